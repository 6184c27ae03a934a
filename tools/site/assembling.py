"""The pages of the site in one folder: docs/, SPEC.md, the changes, and pages of the public names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import ckptstore

__all__ = ["API", "assemble", "public_names", "relinked"]

_SPEC: Final = "formats/SPEC.md"
_MOVED: Final = {_SPEC: "spec.md", "CHANGELOG.md": "changelog.md"}
"""Files outside docs/ that are pages of the site."""
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
API: Final = {
    "Stores": ("store", "log.checkpoint_info", "log.log_reader"),
    "Writers": ("write", "host.progress", "frameworks.flat_states"),
    "What methods return": ("reports", "following", "tiers", "maintenance", "exchange", "restore", "formats"),
    "Media": ("backends",),
    "Warnings": ("host.caller_warnings",),
    "Errors": ("errors",),
}
"""Heading -> the modules whose public names are below it, by the beginnings of their names."""


def public_names() -> dict[str, str]:
    """Public name of `ckptstore` -> its module, without ``ckptstore.``."""
    names = [name for name in ckptstore.__all__ if not name.startswith("_")]
    return {name: getattr(ckptstore, name).__module__.removeprefix("ckptstore.") for name in names}


def assemble(root: Path, target: Path, homes: Mapping[str, str], training: list[str]) -> None:
    """Fill `target` with the pages.

    Args:
        root: of the repository.
        target: a folder, which is emptied.
        homes: `public_names`.
        training: public names of `ckptstore.training`.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root / "docs", target)
    for path in target.glob("*.md"):
        path.write_text(relinked(path.read_text(), "docs"))
    for source, page in _MOVED.items():
        (target / page).write_text(relinked((root / source).read_text(), str(Path(source).parent)))
    (target / "api.md").write_text(_api(homes))
    (target / "api-training.md").write_text(
        "# For training scripts\n\n`from ckptstore.training import ...`\n\n"
        + "\n".join(f"{_entry(f'training.{name}')}\n" for name in training)
    )


def relinked(text: str, folder: str) -> str:
    """The links of a page of `folder`, changed for the site, where every page lies beside the others.

    A link to a file that is not a page (a source file) becomes the file's path in the repository.
    """

    def link(match: re.Match[str]) -> str:
        place, hash_, anchor = match[1].partition("#")
        if not place or "://" in place or place.startswith("mailto:"):
            return match[0]
        path = Path(folder, place)
        parts: list[str] = []
        for part in path.parts:
            if part == "..":
                parts.pop()
            elif part != ".":
                parts.append(part)
        whole = "/".join(parts)
        if whole in _MOVED:
            return f"]({_MOVED[whole]}{hash_}{anchor})"
        if parts[0] == "docs" and len(parts) > 1:
            return f"]({'/'.join(parts[1:])}{hash_}{anchor})"
        return f"](#)<!-- {whole} -->"

    text = _LINK.sub(link, text)
    return re.sub(r"\[([^\]]*)\]\(#\)<!-- (\S+) -->", r"\1 (`\2`)", text)


def _entry(name: str) -> str:
    """The text from which mkdocstrings makes the entry of a name.

    Entries of errors and warnings name their base classes; those of other names do not, as their bases are details.
    """
    bases = "\n    options:\n      show_bases: true" if name.endswith(("Error", "Warning")) else ""
    return f"::: ckptstore.{name}{bases}"


def _api(homes: Mapping[str, str]) -> str:
    parts = ["# Python API\n\n`import ckptstore`; each name is one of `ckptstore` itself. Nothing else is public."]
    left = dict(homes)
    for heading, modules in API.items():
        found = [name for name, home in left.items() if home.startswith(modules)]
        parts += [f"## {heading}", *(_entry(f"{left.pop(name)}.{name}") for name in found)]
    if left:
        raise ValueError(f"no heading of the API page takes {', '.join(left)}")
    return "\n\n".join(parts) + "\n"
