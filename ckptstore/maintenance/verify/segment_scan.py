"""Checks the segments of a catalog: reads every byte, compares their descriptions with the log, and decodes them."""

from __future__ import annotations

from collections.abc import Mapping

from ckptstore.backends.base import Backend
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Node
from ckptstore.host.buffers import Staging
from ckptstore.host.task_pool import sweep
from ckptstore.maintenance.verify.deep_verify import decoded_bytes, prove
from ckptstore.maintenance.verify.description_check import Descriptions, reading_order
from ckptstore.maintenance.verify.encoding_trees import chosen_encodings, trees
from ckptstore.maintenance.verify.stored_bytes import scrubbing
from ckptstore.maintenance.verify.verify_findings import Findings
from ckptstore.restore.restore_plan import Plan

__all__ = ["examine"]


def examine(
    backend: Backend,
    run: str,
    catalog: Catalog,
    plans: Mapping[Node, Plan],
    found: Findings,
    threads: int,
    *,
    deep: bool,
) -> None:
    """Check every segment of `catalog`.

    Args:
        run: the store's run.
        plans: plans of the restorable checkpoints.
        found: collects errors; its tally counts every byte.
        deep: also decode and replay every encoding.

    Raises:
        StorageError: the medium failed in a way that says nothing about the store.
    """
    chosen = chosen_encodings(plans)
    roots = trees(catalog, chosen) if deep else []
    stored = sum(segment.size for segment in catalog.segments.values())
    found.tally.total = found.nbytes + stored + decoded_bytes(roots, catalog)
    descriptions = Descriptions(catalog, found)
    staging = Staging.for_chunks(max(2, threads))
    order = [catalog.segments[segment] for segment in reading_order(catalog)]
    tasks = [scrubbing(backend, run, entry, staging, descriptions, found) for entry in order]
    sweep(tasks, threads, "ckptstore-verify")
    descriptions.compare_bases(chosen)
    prove(backend, catalog, roots, found, threads)
