"""A store as a notebook shows it: its newest checkpoints."""

from __future__ import annotations

import time
from typing import Final

from ckptstore.errors import CkptError
from ckptstore.formats.markup import counted, table, text
from ckptstore.log.checkpoints import describe
from ckptstore.log.journal import Journal
from ckptstore.log.reading import read

__all__ = ["store_html"]

_MOST: Final = 10


def store_html(journal: Journal) -> str:
    """HTML. Reads the log; what keeps it from being read is what is shown. Raises nothing of ours."""
    try:
        catalog = read(journal).catalog
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
    return table(title, ("checkpoint", "kind", "stored bytes", "time", "metadata", "tags"), rows)
