"""Measure T_w on this machine with trial saves, for N saves in flight, p threads and b bytes of staging (PCcheck §3.4).

Each setting gets its own store and fills it with back-to-back saves, so that N of them are always running: T_w is
defined for this worst case. The first N saves touch their memory for the first time and do not count. The last N - 1 do
not count either, because fewer saves run at the same time.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.errors import StorageError, UsageError
from ckptstore.exchange.weight_files import open_file
from ckptstore.host.progress import Progress, Tally
from ckptstore.store import Store
from ckptstore.store import open as open_store
from ckptstore.tuning.save_interval import TOLERANCE, Setting, Timing, least_seconds
from ckptstore.tuning.trial_folder import Scratch

__all__ = ["Profile", "TrialPlan", "lengths_like", "lengths_of", "profile", "trial_state"]

State = Mapping[str, npt.NDArray[np.uint8]]

_TENSOR: Final = 16 << 20
_SEED: Final = 1
_GIVE_UP: Final = 2
"""The search for a larger N ends after this many values in a row without a gain."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """The settings to try.

    Attributes:
        in_flight: maximum N.
        threads: p, ascending.
        staging: b, ascending; the first is used while N and p are searched.
        saves: measured saves of each setting.
        slowdown: q, by which settings are compared (`save_interval.least_seconds`).
        memory: returns the writer's ``memory`` for a setting; None: no limit.
    """

    in_flight: int
    threads: Sequence[int]
    staging: Sequence[int]
    saves: int
    slowdown: float = 1.05
    memory: Callable[[Setting], int | None] = lambda _: None

    def saves_of(self, in_flight: int) -> int:
        """Number of saves for a setting, including those that do not count."""
        return self.saves + 2 * in_flight - 1

    def most_saves(self) -> int:
        """Number of saves for all settings, if none is left out."""
        counts = [1] * len(self.threads) + list(range(2, self.in_flight + 1))
        return sum(map(self.saves_of, counts + [self.in_flight] * (1 + len(self.staging))))


@dataclass(frozen=True, slots=True)
class Profile:
    """The measurements, for the state that was saved.

    Attributes:
        timings: in the order of measuring.
        load: seconds to load one checkpoint.
        seconds: duration of all measurements.
    """

    timings: tuple[Timing, ...]
    load: float
    seconds: float

    def scaled(self, factor: float) -> Profile:
        """The profile for a state larger by `factor`: each time is approximately bytes over a bandwidth."""
        timings = tuple(Timing(one.setting, one.write * factor, one.loss * factor) for one in self.timings)
        return Profile(timings, self.load * factor, self.seconds)


def lengths_of(nbytes: int) -> list[int]:
    """Bytes of the tensors of a state of `nbytes` if nothing else is known."""
    whole, rest = divmod(nbytes, _TENSOR)
    return [_TENSOR] * whole + ([rest] if rest else [])


def lengths_like(like: str, store: Store | None) -> list[int]:
    """Bytes of the tensors of a checkpoint of the store, or of a checkpoint file.

    Raises:
        UsageError: `like` is not a file, and there is no store in which it could be a REF.
        CheckpointNotFoundError, CorruptionError, FormatError, UnsupportedStateError, StorageError: it cannot be read.
    """
    path = Path(like).expanduser()
    if path.is_file():
        with open_file(path) as opened:
            return [source.nbytes for source in opened.flat.tensors.values()]
    if store is None:
        raise UsageError(f"{like}: no file of this name, and no store yet that it could be a REF of")
    return [entry.nbytes for entry in store.tensors(like).values()]


def trial_state(lengths: Sequence[int], most: int) -> dict[str, npt.NDArray[np.uint8]]:
    """Random bytes in tensors of these lengths; if there are more than `most` bytes, an even selection of that size."""
    total = sum(lengths)
    kept: list[int] = []
    passed = taken = 0
    for length in lengths:
        passed += length
        # Keep the same share of the first lengths as of all lengths.
        if taken * total < most * passed or total <= most:
            kept.append(length if total <= most else min(length, max(1, most - taken)))
            taken += kept[-1]
    noise = np.frombuffer(np.random.default_rng(_SEED).bytes(taken), np.uint8)
    state, start = {}, 0
    for number, length in enumerate(kept):
        state[f"tensor.{number:06}"] = noise[start : start + length]
        start += length
    return state


def profile(scratch: Scratch, state: State, plan: TrialPlan, progress: Progress | None = None) -> Profile:
    """Measure p (threads) at N = 1, then N (saves in flight) with the best p, then p's neighbours, then b (staging).

    N is raised as long as saves can become more frequent. Two values in a row without a gain end the search, as "we
    need to check only a few values" (§3.4). Fewer threads and less staging are preferred as in
    `save_interval.best_setting`.

    Args:
        scratch: the place; holds the checkpoints of one setting at a time.
        state: the state to save.
        plan: the settings to try.
        progress: called with (bytes saved, bytes to save).

    Raises:
        StorageError: too little space, or the medium failed.
    """
    began = time.perf_counter()
    nbytes = sum(array.nbytes for array in state.values())
    needed, free = plan.saves_of(plan.in_flight) * nbytes, scratch.free()
    if needed > free:
        raise StorageError(errno.ENOSPC, f"trial saves take {needed} bytes, {free} are free", str(scratch.folder))
    search = _Search(scratch, state, plan, Tally(progress, plan.most_saves() * nbytes))
    first = plan.staging[0]
    for threads in plan.threads:
        search.time(Setting(1, threads, first))
    _more_in_flight(search, search.best().setting.threads)
    best = search.best().setting
    at = plan.threads.index(best.threads)
    for threads in (*plan.threads[max(0, at - 1) : at], *plan.threads[at + 1 : at + 2]):
        search.time(Setting(best.in_flight, threads, first))
    best = search.best().setting
    for staging in plan.staging[1:]:
        search.time(Setting(best.in_flight, best.threads, staging))
    search.tally.total = search.tally.done
    search.tally.advance(0)
    return Profile(tuple(search.timings), search.load, time.perf_counter() - began)


class _Search:
    """The measurements so far."""

    def __init__(self, scratch: Scratch, state: State, plan: TrialPlan, tally: Tally) -> None:
        self.timings: list[Timing] = []
        self.load = 0.0
        self.tally = tally
        self._scratch = scratch
        self._state = state
        self._plan = plan
        self.most = plan.in_flight

    def time(self, setting: Setting) -> Timing:
        """Measure a setting, once."""
        for known in self.timings:
            if known.setting == setting:
                return known
        name = f"{len(self.timings)}"
        try:
            with open_store(self._scratch.url(name), create=True) as store:
                timing = _timing(store, self._state, setting, self._plan, self.tally.advance)
                if not self.timings:
                    self.load = _load_seconds(store)
        finally:
            self._scratch.remove(name)
        self.timings.append(timing)
        return timing

    def seconds(self, timing: Timing) -> float:
        """Minimum time from one save to the next, under the slowdown."""
        return least_seconds(timing, self._plan.slowdown)

    def best(self) -> Timing:
        """The timing with the most frequent saves; among nearly equal ones the fewest in flight, threads and bytes."""
        least = min(map(self.seconds, self.timings)) * (1 + TOLERANCE)
        return min(
            (one for one in self.timings if self.seconds(one) <= least),
            key=lambda one: (one.setting.in_flight, one.setting.threads, one.setting.staging_bytes),
        )


def _more_in_flight(search: _Search, threads: int) -> None:
    staging = search.timings[0].setting.staging_bytes
    least, in_vain = min(map(search.seconds, search.timings)), 0
    for in_flight in range(2, search.most + 1):
        found = search.seconds(search.time(Setting(in_flight, threads, staging)))
        in_vain = 0 if found < least * (1 - TOLERANCE) else in_vain + 1
        least = min(least, found)
        if in_vain == _GIVE_UP:
            return


def _timing(store: Store, state: State, setting: Setting, plan: TrialPlan, advance: Callable[[int], None]) -> Timing:
    """Fill a store with saves, `setting.in_flight` of them always running."""
    nbytes = sum(array.nbytes for array in state.values())
    places = threading.Semaphore(setting.in_flight)
    writes: dict[int, float] = {}
    calls: list[float] = []

    def landed(step: int, began: float, _durable: bool) -> None:
        writes[step] = time.perf_counter() - began
        places.release()

    options: dict[str, Any] = {"max_in_flight": setting.in_flight, "threads": setting.threads}
    options |= {"staging_bytes": setting.staging_bytes, "memory": plan.memory(setting)}
    with store.writer(None, poll_seconds=None, **options) as writer:
        for step in range(1, plan.saves_of(setting.in_flight) + 1):
            places.acquire()  # so that the time of the call does not include the wait for a place
            began = time.perf_counter()
            pending = writer.save_async(state, step)  # raises the failure of an earlier save
            calls.append(time.perf_counter() - began)
            pending.when_done(partial(landed, step, began))
            advance(nbytes)
        for _ in range(setting.in_flight):
            places.acquire()  # a save is durable before it calls `landed`
        writer.wait()
    counted = range(setting.in_flight + 1, setting.in_flight + plan.saves + 1)
    # A small state may be durable before its call returns.
    write = median(max(writes[step], calls[step - 1]) for step in counted)
    return Timing(setting, write, median(calls[step - 1] for step in counted))


def _load_seconds(store: Store) -> float:
    began = time.perf_counter()
    store.load("latest", framework="numpy")
    return time.perf_counter() - began
