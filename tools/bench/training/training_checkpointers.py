"""Checkpointers in the training benchmark's loop: every step, in this process or by an agent on its own core, with
dense gradients or with the largest hundredth of them.

An agent's process is started on the savers' cores (`training_loop.on_savers`). With compressed gradients the loop
compresses them after its backward, with saves or without (``none-topk``): compression belongs to training.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, Final

from tools.bench.training.training_cases import SPIN
from tools.bench.training.training_loop import Trainer, on_savers
from tools.bench.training.training_strategies import AbsentError, Ledger, Nothing, Options, Store, Strategy

__all__ = ["CHECKPOINTERS", "DENSITY", "LEFT", "Checkpointed"]

DENSITY: Final = 0.01


class _Steps:
    """The loop's own count of steps, as a stateful object of the script."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, int]:
        return {"step": self._trainer.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._trainer.step = state["step"]


def _compressed(trainer: Trainer) -> Any:
    """Make a trainer compress its gradients -> its compressor."""
    from ckptstore.training import TopKHook

    # Residuals change by the dense gradient at each step: with them a checkpoint is as large as without compression.
    trainer.compressor = TopKHook(DENSITY, exact=False)
    return trainer.compressor


class NothingCompressed(Nothing):
    """No saves, in a loop that compresses its gradients."""

    label = "none, top-k"

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        _compressed(trainer)


_SPIN: Final = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end:
        for number in range(2000):
            number * number
"""


_STREAM: Final = """
import sys, time
one, other = memoryview(bytearray(1 << 26)), memoryview(bytearray(b"1" * (1 << 26)))
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end:
        for start in range(0, 1 << 26, 1 << 22):
            one[start : start + (1 << 22)] = other[start : start + (1 << 22)]
            if time.process_time() >= end:
                break
"""


class Spinning(Nothing):
    """No saves; a process on the savers' cores computes for a given time at each step, in a few kilobytes of memory.

    The slowdown of training is then caused by the machine: cores that share units, or a host with fewer cores than it
    reports. `SPIN` in the environment sets the seconds.
    """

    label = "none, beside a process that computes"
    compressed: ClassVar[bool] = False
    code: ClassVar[str] = _SPIN

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        if self.compressed:
            _compressed(trainer)
        with on_savers():
            self._process = subprocess.Popen([sys.executable, "-c", self.code], stdin=subprocess.PIPE)

    def save(self, step: int) -> None:
        super().save(step)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{os.environ[SPIN]}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.communicate()


class Checkpointed(Strategy):
    """`ckptstore.training.Checkpointer`, as a script uses it."""

    label = "Checkpointer"
    every_step = True
    how: ClassVar[str] = "gradient"
    by_agent: ClassVar[bool] = False
    compressed: ClassVar[bool] = False

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        self.checkpointer = self.opened(folder, trainer, options, agent=self.by_agent)
        self.agent_pid = self.checkpointer.agent_pid

    @classmethod
    def opened(cls, folder: Path, trainer: Trainer, options: Options, *, agent: bool) -> Any:
        """A Checkpointer that has resumed the existing run, with the loop's own step."""
        return _opened(cls, folder, trainer, options, agent=agent)

    def save(self, step: int) -> None:
        pending = self.checkpointer.step()
        if pending is None:  # a replica's agent has it in memory; the medium has not accepted earlier ones yet
            assert self.how == "replica"
            return
        pending.when_done(lambda durable: self.ledger.done(step) if durable else None)

    def settle(self) -> None:
        self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.close()

    @classmethod
    def restore(cls, folder: Path, trainer: Trainer) -> int | None:
        checkpointer = cls.opened(folder, trainer, Options(), agent=cls.by_agent)
        LEFT.append(checkpointer)  # until the process ends: ending a term is not part of the restored state
        return trainer.step if checkpointer.steps_done else None


LEFT: Final[list[Any]] = []
"""Checkpointers that were only opened to restore; they live until the process ends."""


def _opened(kind: type[Checkpointed], folder: Path, trainer: Trainer, options: Options, *, agent: bool) -> Any:
    """A Checkpointer that has resumed the existing run, with the loop's own step."""
    from ckptstore import UsageError
    from ckptstore.training import Checkpointer, strategies

    if kind.how not in strategies.STRATEGIES:
        raise AbsentError(f"a Checkpointer of this build has no strategy {kind.how!r}")
    given: dict[str, Any] = {"compressor": _compressed(trainer)} if kind.compressed else {}
    if agent:
        given |= {"agent": True, "linger_seconds": 60.0}
    with on_savers():
        try:
            checkpointer = Checkpointer(
                folder / "store",
                model=trainer.model,
                optimizer=trainer.optimizer,
                extra={"steps": _Steps(trainer)},
                strategy=kind.how,
                full_every=options.full_every,
                group=None,
                signals=False,
                **given,
            )
        except UsageError as error:
            if kind.how == "replica" and trainer.device.type != "cpu":
                raise AbsentError(str(error)) from error
            raise
        checkpointer.resume()
    return checkpointer


class FromStorage(Checkpointed):
    """By an agent that dies with its trainer: the state is restored from the store."""

    by_agent = True

    @classmethod
    def restore(cls, folder: Path, trainer: Trainer) -> int | None:
        checkpointer = cls.opened(folder, trainer, Options(), agent=False)
        LEFT.append(checkpointer)
        return trainer.step if checkpointer.steps_done else None


class FullsAndRecompute(Store):
    """A full at every interval; the steps since then are trained again."""

    label = "ckptstore fulls, and trained again"


def _kind(base: type[Strategy], label: str, **members: Any) -> type[Strategy]:
    return type(label, (base,), {"label": label, **members})


CHECKPOINTERS: Final[dict[str, type[Strategy]]] = {
    "none-topk": NothingCompressed,
    "none-spin": Spinning,
    "none-stream": _kind(Spinning, "none, beside a process that copies memory", code=_STREAM),
    "none-topk-stream": _kind(
        Spinning, "none, top-k, beside a process that copies memory", compressed=True, code=_STREAM
    ),
    "none-topk-spin": _kind(Spinning, "none, top-k, beside a process that computes", compressed=True),
    "full-agent": _kind(Checkpointed, "Checkpointer, fulls, agent", how="full", by_agent=True),
    "dense": _kind(Checkpointed, "Checkpointer, step diffs"),
    "dense-agent": _kind(Checkpointed, "Checkpointer, step diffs, agent", by_agent=True),
    "dense-replica": _kind(Checkpointed, "Checkpointer, replica", how="replica", by_agent=True),
    "topk": _kind(Checkpointed, "Checkpointer, top-k step diffs", compressed=True),
    "topk-agent": _kind(Checkpointed, "Checkpointer, top-k step diffs, agent", compressed=True, by_agent=True),
    "topk-replica": _kind(Checkpointed, "Checkpointer, top-k, replica", how="replica", compressed=True, by_agent=True),
    "storage": _kind(FromStorage, "Checkpointer, step diffs, both died"),
    "fulls-50": FullsAndRecompute,
}
"""By the names that ``--only`` takes."""
