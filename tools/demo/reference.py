"""The uninterrupted run with which the store's run is compared. It never uses the store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tools.demo.fingerprint import Leaf, leaves, part_hashes, read_leaves, write_leaves

if TYPE_CHECKING:
    from tools.demo.training import Training

_HASHES = "hashes.jsonl"
_FINAL = "final.leaves"


class ReferenceRecorder:
    """Replaces the store in the training loop: records the hashes of every state, and the whole last state."""

    def __init__(self, folder: Path, last_step: int, training: Training) -> None:
        self._training = training
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._last_step = last_step
        self._hashes = (folder / _HASHES).open("w")

    def resume(self) -> dict[str, Any]:
        """A reference run always starts from scratch."""
        return {}

    def keep(self, step: int) -> None:
        """Record the state as the one after `step` steps."""
        state = self._training.state()
        self._hashes.write(json.dumps({"step": step, "parts": part_hashes(state)}) + "\n")
        if step == self._last_step:
            write_leaves(self._folder / _FINAL, list(leaves(state)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hashes.close()


@dataclass(frozen=True, slots=True)
class Reference:
    """The record of a finished reference run: hashes per step and part, and the leaves of its last state."""

    hashes: dict[int, dict[str, str]]
    final: list[Leaf]

    @classmethod
    def read(cls, folder: Path) -> Reference:
        """Raises `FileNotFoundError` if the run did not finish."""
        lines = [json.loads(line) for line in (folder / _HASHES).read_text().splitlines()]
        return cls({line["step"]: line["parts"] for line in lines}, read_leaves(folder / _FINAL))
