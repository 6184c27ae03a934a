"""PCcheck, section 3.1: writing from the first copied chunk on, against writing after the whole copy; by medium.

The store copies a full whole before it writes, if it has the memory: training waits for the copy alone, and threads
that hash and write would take the cores that copy. Where memory is short it writes from the first chunk on.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import numpy as np

import ckptstore
from ckptstore.write.capture.unit_copy import StagedCopy
from tools.papers.result import Asked, Cell, Claim, Compared, Figure, Result, Table

__all__ = ["run"]

FORMS: Final = ("whole copy first", "from the first chunk")
_WARM: Final = 2
"""Saves that are not counted: memory is touched in them."""


def run(asked: Asked) -> Result:
    """Run the experiment."""
    nbytes, rounds = asked.pick((24 << 20, 1), (96 << 20, 9), (384 << 20, 25))
    state = _state(nbytes)
    rows: list[list[Cell]] = []
    equal = 0
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with TemporaryDirectory(dir="/dev/shm", prefix="ckptstore-papers-") as memory:
        media = {"this disk": str(asked.scratch / "disk"), "shared memory": f"{memory}/store"}
        for medium, place in media.items():
            times, same = _measured(state, place, rounds)
            equal += same
            for form in FORMS:
                found[medium, form] = times[form]
                stall, durable = (statistics.median(one) for one in zip(*times[form], strict=True))
                rows.append([medium, form, 1e3 * stall, 1e3 * durable, nbytes / 1e6 / durable])
            told = ", ".join(f"{form} {row[3]:.0f} ms" for form, row in zip(FORMS, rows[-2:], strict=True))
            asked.told(f"{medium}: {told}")
    stalls, durables = (_ratios(found, list(media), place) for place in (0, 1))
    sooner = all(one < 1 for one in durables.values())
    said = {
        name: ", ".join(f"{medium} {one:.2f}" for medium, one in own.items())
        for name, own in (("stall", stalls), ("durable", durables))
    }
    return Result(
        tables=[
            Table(
                f"A full of {nbytes / 1e6:.0f} MB, {rounds} saves of each form in turns",
                ("medium", "writing begins", "training waits ms", "durable ms", "MB/s"),
                rows,
                dict.fromkeys(("training waits ms", "durable ms", "MB/s"), ".0f"),
            )
        ],
        claims=[
            Claim(
                "a pipeline of chunks makes a checkpoint durable sooner than a whole copy first",
                "yes",
                f"by the whole copy's time: {said['durable']}",
                sooner,
                "the copy is a small part of the time, and shares the cores with hashing",
            ),
            Claim(
                "training waits no longer for it",
                "yes, on a GPU's copy engine",
                f"by the whole copy's wait: {said['stall']}",
                all(one <= 1.05 for one in stalls.values()),
                "the same cores copy, hash and write. So the store copies first where it has the memory; with less "
                "(`memory=`) it writes while it copies. Tensors of a device are copied by the device while what has "
                "arrived is written",
            ),
        ],
        figures=[
            Figure(
                "Milliseconds until durable",
                "bars",
                list(media),
                {
                    form: [1e3 * statistics.median(one[1] for one in found[medium, form]) for medium in media]
                    for form in FORMS
                },
                y="ms",
            )
        ],
        compared=[Compared("the last save of each form and medium", 2 * len(media), equal)],
        settings={"bytes": nbytes, "rounds": rounds},
        numbers={"times": [[*key, value] for key, value in found.items()]},
    )


def _state(nbytes: int) -> dict[str, Any]:
    count = 24
    each = nbytes // count // 4
    return {f"w{number}": np.random.default_rng(number).standard_normal(each, np.float32) for number in range(count)}


def _ratios(found: dict[tuple[str, str], list[tuple[float, float]]], media: list[str], place: int) -> dict[str, float]:
    """Medium -> the median of the pipeline's time by the whole copy's, of the same round."""
    return {
        medium: statistics.median(
            piped[place] / whole[place] for whole, piped in zip(*(found[medium, form] for form in FORMS), strict=True)
        )
        for medium in media
    }


@contextlib.contextmanager
def _piped() -> Iterator[None]:
    """Writing begins before the first unit is copied."""
    whole = StagedCopy._copy

    def copy(self: StagedCopy, begin: Callable[[], None]) -> float:
        begin()
        return whole(self, lambda: None)

    with mock.patch.object(StagedCopy, "_copy", copy):
        yield


def _measured(state: dict[str, Any], place: str, rounds: int) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Form -> (seconds that training waited, seconds until durable) of each save; and how many forms restored."""
    times: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    with contextlib.ExitStack() as stack:
        stores = {form: ckptstore.open(f"{place}-{number}", create=True) for number, form in enumerate(FORMS)}
        writers = {
            form: stack.enter_context(store.writer(keep=["last:1"], max_in_flight=1)) for form, store in stores.items()
        }
        for turn in range(rounds + _WARM):
            state["w0"][:8] = turn
            for form in FORMS if turn % 2 else FORMS[::-1]:
                with _piped() if form == FORMS[1] else contextlib.nullcontext():
                    began = time.perf_counter()
                    pending = writers[form].save_async(state, turn + 1)
                    stalled = time.perf_counter() - began
                    pending.result()
                    durable = time.perf_counter() - began
                if turn >= _WARM:
                    times[form].append((stalled, durable))
                stores[form].gc()
    equal = 0
    for number, (form, store) in enumerate(stores.items()):
        del form
        loaded = store.load(rounds + _WARM, framework="numpy")
        equal += all(np.array_equal(loaded[name], one) for name, one in state.items())
        store.close()
        shutil.rmtree(Path(f"{place}-{number}"), ignore_errors=True)
    return times, equal
