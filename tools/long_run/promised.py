"""The trainer's records, and the part that the rules promise: a few lines that are independent of the product."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Rules", "Saved", "digest", "promised", "read_saved"]


@dataclass(frozen=True)
class Rules:
    """``last:N every:N best:loss:N``."""

    last: int = 20
    every: int = 250
    best: int = 3

    def texts(self) -> list[str]:
        return [f"last:{self.last}", f"every:{self.every}", f"best:loss:{self.best}"]


@dataclass(frozen=True)
class Saved:
    """A line of the trainer's records: written before the save is called."""

    step: int
    digest: str
    loss: float
    tag: str | None


def read_saved(path: Path) -> dict[int, Saved]:
    """The records by step. The last line may be incomplete."""
    if not path.exists():
        return {}
    lines = path.read_text().split("\n")[:-1]
    return {one.step: one for one in (Saved(**json.loads(line)) for line in lines)}


def promised(saved: Iterable[Saved], rules: Rules) -> set[int]:
    """The steps that must exist, of one term in which all these were saved."""
    ascending = sorted(saved, key=lambda one: one.step)
    rated = sorted(ascending, key=lambda one: (one.loss, -one.step))
    found = {one.step for one in (*ascending[-rules.last :], *ascending[-1:], *rated[: rules.best])}
    return found | {one.step for one in ascending if one.step % rules.every == 0 or one.tag is not None}


def digest(state: Any) -> str:
    """The digest of every bit of a state: of the form, the numbers, and the bytes of its tensors."""
    total = hashlib.sha256()

    def take(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                take(f"{name}/{key}", value[key])
        elif isinstance(value, list | tuple):
            for place, one in enumerate(value):
                take(f"{name}/{place}", one)
        elif hasattr(value, "shape"):
            array = np.ascontiguousarray(value.numpy() if hasattr(value, "numpy") else value)
            total.update(f"{name} {array.dtype.str} {tuple(value.shape)}\n".encode())
            total.update(array.tobytes())
        else:
            total.update(f"{name} {value!r}\n".encode())

    take("", state)
    return total.hexdigest()
