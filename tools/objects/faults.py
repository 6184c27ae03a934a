"""Injects random faults between a run and its bucket for any time: nothing acknowledged is lost, nothing is wrong.

    python -m tools.objects.faults --faults 5000 --seed 1

A writer saves fulls and deltas through `FaultProxy`, and is opened again when it must stop. Beside it the store is
read, collected and verified, also through the proxy. Each read is right or raises an error of the project. In the end
the faults stop, and a handle that bypasses the proxy must find every acknowledged checkpoint, bit for bit.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

import ckptstore
from ckptstore.backends.object_store import object_requests, object_segments
from tools.objects.proxy import FAULTS, FaultProxy, Rule
from tools.objects.server import Server, options_for, serving

TIMEOUT: Final = 0.4
TRIES: Final = 4


class LossError(AssertionError):
    """An acknowledged checkpoint is gone, or a read returned wrong data."""


def state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step // 4)
    weight = rng.standard_normal(3000).astype(np.float32)
    weight[step % 3000] += np.float32(step)
    return {"weight": weight, "step": step}


def check(found: dict[str, Any], step: int, how: str) -> None:
    wanted = state(step)
    if found["step"] != step or found["weight"].tobytes() != wanted["weight"].tobytes():
        raise LossError(f"step {step} {how} is not what was saved")


@contextlib.contextmanager
def small_uploads(single: int = 4 << 10) -> Iterator[None]:
    """Segments above `single` bytes are uploaded in parts, although they are small: ministack takes 18 MB a second."""
    before = object_segments.SINGLE, object_requests.PART
    object_segments.SINGLE, object_requests.PART = single, 5 << 20
    try:
        yield
    finally:
        object_segments.SINGLE, object_requests.PART = before


@dataclass
class Trial:
    """One run in a separate place.

    Attributes:
        server: bypasses the proxy.
        proxy: the run's connection.
        errors: the errors raised, by kind.
        texts: their messages.
    """

    server: Server
    proxy: FaultProxy
    seed: int = 0
    deltas: int | None = 3
    errors: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    acknowledged: set[int] = field(default_factory=set)
    retired: set[int] = field(default_factory=set)
    steps: int = 0

    def __post_init__(self) -> None:
        self.numbers = random.Random(self.seed)
        self.url = self.server.url()
        self.clean = ckptstore.open(self.url, create=True, storage_options=self.server.options)
        self.options = options_for(self.proxy.port, read_timeout=TIMEOUT, tries=TRIES)
        self.writer: ckptstore.Writer | None = None

    def store(self) -> ckptstore.Store:
        return ckptstore.open(self.url, storage_options=self.options)

    def attempt(self, call: Callable[[], Any]) -> Any:
        """The result of the call, or None after an error of the project. Other errors are bugs."""
        try:
            return call()
        except ckptstore.CkptError as error:
            self.errors[type(error).__name__] += 1
            self.texts.append(f"{type(error).__name__}: {error}")
            return None

    def save(self) -> None:
        self.steps += 1
        step = self.steps
        if self.writer is None:
            self.writer = self.attempt(lambda: self.store().writer(deltas=self.deltas, poll_seconds=None))
        writer = self.writer
        if writer is None:
            return
        if self.attempt(lambda: writer.save(state(step), step=step)) is not None:
            self.acknowledged.add(step)
        else:
            self.close()

    def close(self) -> None:
        writer, self.writer = self.writer, None
        if writer is not None:
            self.attempt(writer.close)

    def load(self) -> None:
        known = sorted(self.acknowledged - self.retired)
        if known:
            step = self.numbers.choice(known[-6:])
            found = self.attempt(lambda: self.store().load(step, framework="numpy"))
            if found is not None:
                check(found, step, "read through faults")

    def retire(self) -> None:
        """Retire checkpoints: after a success they are retired; after an error they may be."""
        known = sorted(self.acknowledged - self.retired)[:-3]
        if known:
            self.close()
            gone = known[: len(known) // 2 + 1]
            self.retired |= set(gone)
            self.attempt(lambda: self.store().retire(*gone, take_over=True))

    def gc(self) -> None:
        self.attempt(lambda: self.store().gc())

    def verify(self) -> None:
        self.attempt(lambda: self.store().verify())

    def settle(self) -> None:
        """End the faults, and check everything. Raises `LossError`."""
        self.proxy.rules([])
        self.close()
        self.proxy.settle()
        found = {one.step: one.ref for one in self.clean.checkpoints()}
        if missing := self.acknowledged - self.retired - found.keys():
            raise LossError(f"acknowledged, and gone: steps {sorted(missing)}")
        for step, ref in found.items():
            check(self.clean.load(ref, framework="numpy"), step, "after the faults")
        report = self.clean.verify(deep=True)
        if report.damage or report.unread:
            raise LossError(f"damage: {report.damage} {report.unread}")
        self.save()
        self.close()
        if self.steps not in self.acknowledged:
            raise LossError(f"no save without faults: {self.texts[-1]}")

    def busy(self, rounds: int) -> None:
        """Do a number of operations that the seed chooses."""
        choices = [self.save] * 7 + [self.load] * 4 + [self.gc, self.verify, self.retire, self.close]
        for _ in range(rounds):
            self.numbers.choice(choices)()


def everything(odds: float) -> list[Rule]:
    """Every fault, with these odds for a request to be hit."""
    faults = [name for name in FAULTS if name not in ("slow", "stall")]
    # A rule applies only if the earlier rules let a request pass, so later rules need greater odds.
    rules = [Rule(name, odds=odds / len(FAULTS), seconds=0.05 + TIMEOUT * (name == "late")) for name in faults]
    waits = [Rule("stall", odds=odds / 60, seconds=2 * TIMEOUT), Rule("slow", odds=odds / 30, seconds=1.5 * TIMEOUT)]
    return [*waits, *rules]


def quiet() -> None:
    """Ignore the run's warnings: they are not tested here."""
    warnings.simplefilter("ignore", ckptstore.LostStepsWarning)
    warnings.simplefilter("ignore", ckptstore.FreshStartWarning)
    warnings.simplefilter("ignore", UserWarning)


def random_run(server: Server, faults: int, seed: int, odds: float = 0.3, rounds: int = 40) -> Iterator[Trial]:
    """Run trials until enough faults were injected -> each trial that ended well. Raises `LossError`."""
    injected = 0
    number = 0
    while injected < faults:
        with FaultProxy(server.port, seed=seed + number) as proxy, small_uploads(4 << 10 if number % 2 else 1 << 30):
            trial = Trial(server, proxy, seed + number, deltas=None if number % 3 == 2 else 3)
            proxy.rules(everything(odds))
            trial.busy(rounds)
            trial.settle()
            injected += sum(proxy.injected().values())
            yield trial
        number += 1


def table(counts: Counter[tuple[str, str]]) -> Sequence[str]:
    operations = sorted({operation for _, operation in counts})
    lines = [" " * 12 + "".join(f"{one:>10}" for one in operations)]
    rows = (f"{fault:>12}" + "".join(f"{counts[fault, one] or '':>10}" for one in operations) for fault in FAULTS)
    return [*lines, *rows]


@click.command()
@click.option("--faults", default=5000, help="Stop after so many were injected.")
@click.option("--seed", default=1)
@click.option("--odds", default=0.3, help="Share of the requests that a fault hits.")
def main(faults: int, seed: int, odds: float) -> None:
    """Inject the given number of faults, and print the results."""
    quiet()
    began = time.monotonic()
    counts: Counter[tuple[str, str]] = Counter()
    errors: Counter[str] = Counter()
    acknowledged = 0
    with tempfile.TemporaryDirectory(prefix="ckptstore-faults-") as folder, serving(Path(folder)) as server:
        for trial in random_run(server, faults, seed, odds):
            counts += trial.proxy.injected()
            errors += trial.errors
            acknowledged += len(trial.acknowledged)
            click.echo(f"seed {trial.seed}: {sum(counts.values())} faults, {acknowledged} acknowledged, 0 lost")
    click.echo("\n".join(table(counts)))
    click.echo(f"errors raised: {dict(errors)}")
    click.echo(
        f"{sum(counts.values())} faults, {acknowledged} saves acknowledged, 0 lost, 0 wrong, "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
