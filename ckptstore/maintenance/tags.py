"""Names checkpoints of any term with tags, with or without a live writer."""

from __future__ import annotations

from ckptstore.errors import CheckpointNotFoundError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.checkpoint_ref import Ref
from ckptstore.formats.history.records import Node, ref_of
from ckptstore.log import refs
from ckptstore.log.change import CatalogChange
from ckptstore.log.checkpoint_info import CheckpointInfo, describe, describe_checkpoint
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.maintenance.catalog_changes import change, look

__all__ = ["tag", "tags", "untag"]


def tag(
    journal: Journal, name: str, ref: str | int, *, take_over: bool = False, timeout: float | None = 60.0
) -> CheckpointInfo:
    """Give the checkpoint that `ref` names now a tag, and return it. An existing tag is moved.

    Raises:
        UsageError: `name` is not a valid tag name.
        CheckpointNotFoundError: `ref` names no checkpoint.
        as `catalog_changes.change`.
    """
    refs.check_new_tag(name)
    # Resolve once: `latest` may be another checkpoint by the time the writer answers.
    view = look(journal, take_over=take_over)
    node = refs.resolve(view.catalog, ref).node

    def plan(catalog: Catalog) -> CatalogChange | None:
        _entry(catalog, node)
        return None if catalog.tags.get(name) == node else CatalogChange(tags={name: node})

    what = f"tag {ref_of(node)} as {name!r}"
    catalog = change(journal, view, what, plan, take_over=take_over, timeout=timeout).catalog
    return describe_checkpoint(catalog, catalog.checkpoints[_entry(catalog, node)])


def untag(journal: Journal, name: str, *, take_over: bool = False, timeout: float | None = 60.0) -> None:
    """Remove a tag; the checkpoint stays.

    Raises:
        CheckpointNotFoundError: there is no such tag.
        as `catalog_changes.change`.
    """
    wanted = Ref(tag=name)
    view = look(journal, take_over=take_over)
    refs.resolve(view.catalog, wanted)  # raises with a list of the tags

    def plan(catalog: Catalog) -> CatalogChange | None:
        return CatalogChange(tags={name: None}) if name in catalog.tags else None

    change(journal, view, f"remove tag {name!r}", plan, take_over=take_over, timeout=timeout)


def tags(journal: Journal) -> dict[str, CheckpointInfo]:
    """Return every tag by name, with its checkpoint."""
    catalog = read(journal).catalog
    live = {node: entry for node in sorted(set(catalog.tags.values())) if (entry := catalog.checkpoints.get(node))}
    infos = dict(zip(live, describe(catalog, live.values()), strict=True))
    return {name: infos[node] for name, node in sorted(catalog.tags.items()) if node in infos}


def _entry(catalog: Catalog, node: Node) -> Node:
    if node not in catalog.checkpoints:
        raise CheckpointNotFoundError(f"{ref_of(node)} was retired meanwhile")
    return node
