"""The configuration of one demo run: sizes, seed and schedule, as one frozen value that every process reads from a
file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

Mode = Literal["save", "save_async", "both"]
"""How the trainer saves checkpoints; ``both`` alternates from term to term."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The settings that both runs share. Sizes of the model in float32 numbers, of the corpus in bytes."""

    steps: int = 200
    kills: int = 6
    kills_in_commit: int = 3
    full_every: int = 50
    """Step diffs from one full checkpoint to the next: a restore may have to replay as many steps."""
    samples: int = 12
    """Earlier steps that are restored and compared at the end."""
    mode: Mode = "both"
    side_by_side: bool = False
    """Train the reference on a second core meanwhile. The bits are the same; the times are then not representative."""
    seed: int = 1729
    threads: int = 1
    """``torch.set_num_threads`` of every process: fixed, because the number changes the bits. It is one, because the
    second core saves (`save_async`), and because OpenMP threads on a busy machine wait for each other 15 times as long.
    """
    corpus_bytes: int = 256 * 1024
    batch: int = 8
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.1
    tied: bool = True
    """Output head and token embedding are one tensor."""
    noise: float = 0.02
    """Share of the input bytes replaced at random in every other batch (drawn from python's and numpy's RNG)."""
    learning_rate: float = 2e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.kills_in_commit <= self.kills:
            raise ValueError(f"kills in a commit: {self.kills_in_commit} is not within 0 and {self.kills} kills")
        if self.steps < 4 * (self.kills + 1):
            raise ValueError(f"{self.kills} kills need at least {4 * (self.kills + 1)} steps, not {self.steps}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")

    @property
    def parameters(self) -> int:
        """Number of trained parameters of `tools.demo.model.GPT` (a tied head counts once)."""
        block = 12 * self.width**2 + 13 * self.width
        embeddings = (256 * (1 if self.tied else 2) + self.context) * self.width
        return self.layers * block + embeddings + 2 * self.width

    @property
    def checkpoint_bytes(self) -> int:
        """About what one full checkpoint takes: weights and two moments in float32, and the small rest."""
        return 12 * self.parameters + 64 * 1024

    def write(self, path: Path) -> None:
        """Store as JSON for the worker processes."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> DemoConfig:
        """The value that `write` stored."""
        fields: dict[str, Any] = json.loads(path.read_text())
        return cls(**fields)


FULL: Final = DemoConfig()
"""Under three minutes on two cores, a store of 0.6 GB."""

QUICK: Final = replace(
    FULL,
    steps=40,
    kills=3,
    kills_in_commit=1,
    full_every=16,
    samples=4,
    corpus_bytes=32 * 1024,
    warmup=8,
    width=96,
    layers=3,
    side_by_side=True,
)
"""Under 40 s on two cores, a store of 200 MB: the form for CI."""
