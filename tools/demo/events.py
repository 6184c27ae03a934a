"""The messages of a worker to the supervisor: one JSON line per event on its standard output.

A line shorter than ``PIPE_BUF`` is written whole or not at all, and the contents of the pipe outlive the writer, so the
supervisor knows exactly how far a killed worker got.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

EventKind = Literal["built", "resumed", "begin", "computed", "released", "durable", "finished", "warning"]
"""built: python, torch and an untrained model are ready. resumed: ready to train from ``step`` (0: from scratch); with
a store also its ``term`` and ``mode``. begin: iteration that will make ``step`` begins. computed: ``step`` is computed;
``loss``, ``seconds``. released: the trainer continues; ``seconds`` it was blocked by the checkpoint of ``step``.
durable: the store acknowledged ``step``; its ``ref``, ``seconds`` from the call to this, ``nbytes``, ``stored``.
finished: all steps are done. warning: ``text`` for the user.
"""


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `at` is `time.monotonic`, one clock for all processes of a machine."""

    kind: EventKind
    at: float
    fields: dict[str, Any]

    @classmethod
    def parse(cls, line: str) -> Event:
        """Parse a line. Raises `ValueError` for anything that no worker wrote."""
        found = json.loads(line)
        if not isinstance(found, dict) or found.get("event") not in get_args(EventKind):
            raise ValueError(f"not an event of a demo worker: {line!r}")
        return cls(found.pop("event"), float(found.pop("at")), found)


def emit(kind: EventKind, **fields: Any) -> None:
    """Send an event to the supervisor, unbuffered."""
    line = json.dumps({"event": kind, "at": time.monotonic(), **fields}) + "\n"
    os.write(1, line.encode())
