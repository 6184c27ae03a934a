"""What a worker tells the supervisor: one JSON line per event on its standard output.

A line shorter than ``PIPE_BUF`` is written whole or not at all, and what is in the pipe outlives the writer, so the
supervisor knows exactly how far a killed worker came.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

EventKind = Literal["built", "resumed", "begin", "computed", "released", "durable", "finished", "warning"]
"""
built: python, torch and an untrained model are there.
resumed: ready to train from ``step`` (0: from scratch); with a store also its ``term`` and ``mode``.
begin: iteration that will make ``step`` begins.
computed: ``step`` is computed; ``loss``, ``seconds``.
released: the trainer goes on; ``seconds`` it stood still for the checkpoint of ``step``.
durable: the store acknowledged ``step``; its ``ref``, ``seconds`` from the call to this, ``nbytes``, ``stored``.
finished: all steps are done.
warning: ``text`` for the user.
"""


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `at` is `time.monotonic`, one clock for all processes of a machine."""

    kind: EventKind
    at: float
    fields: dict[str, Any]

    @classmethod
    def parse(cls, line: str) -> Event:
        """Raises `ValueError` for anything that no worker wrote."""
        found = json.loads(line)
        if not isinstance(found, dict) or found.get("event") not in get_args(EventKind):
            raise ValueError(f"not an event of a demo worker: {line!r}")
        return cls(found.pop("event"), float(found.pop("at")), found)


def emit(kind: EventKind, **fields: Any) -> None:
    """Tell the supervisor, at once and past all buffers."""
    line = json.dumps({"event": kind, "at": time.monotonic(), **fields}) + "\n"
    os.write(1, line.encode())
