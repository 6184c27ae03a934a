"""Renders a store in a notebook: its newest checkpoints."""

from __future__ import annotations

import time
from typing import Final

from ckptstore.errors import CkptError, CorruptLogError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.html_tables import counted, table, text
from ckptstore.log.checkpoint_info import describe
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read

__all__ = ["store_html"]

_MOST: Final = 10


def store_html(journal: Journal) -> str:
    """Return HTML. Reads the log; if that fails, the HTML contains the error. Raises none of our errors."""
    try:
        catalog = read(journal, tell=False).catalog
        newest = list(catalog.checkpoints.values())[-_MOST:]
        infos = describe(catalog, newest)[::-1]
    except (CkptError, OSError) as error:
        return table(str(error), (), ())
    rows = [
        (
            info.ref,
            "step diff" if info.kind == "gradient" else info.kind,
            f"{info.stored:,}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.time)),
            ", ".join(f"{key} {text(value)}" for key, value in info.metadata.items())[:200],
            ", ".join(info.tags),
        )
        for info in infos
    ]
    count = len(catalog.checkpoints)
    shown = f", the last {_MOST} by term and step" if count > _MOST else ""
    title = f"{journal.url}: {counted(count, 'checkpoint')}{shown}"
    if wrong := _damage(catalog):  # Prevents: a store whose log is lost, shown as one in which nothing was saved yet.
        title += f". {wrong} (`ckpt verify` names what is damaged, `ckpt repair` keeps the rest)"
    return table(title, ("checkpoint", "kind", "stored bytes", "time", "metadata", "tags"), rows)


def _damage(catalog: Catalog) -> str | None:
    """Return what is wrong with the log, in a sentence; None if nothing is."""
    try:
        catalog.latest()
    except CorruptLogError as error:
        return str(error)
    slots = len(catalog.damage)
    return f"{slots:,} log slot{' is' if slots == 1 else 's are'} damaged or missing" if slots else None
