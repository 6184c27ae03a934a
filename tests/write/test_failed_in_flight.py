"""Saves in flight of which one fails: how many are given before the error, which call raises, and that it names every
lost step.

For a writer of one process, for ranks, and for an agent, only through their public interfaces.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions, RankOptions, StorageError, agent
from ckptstore.formats.step_text import named_steps
from ckptstore.host.arenas import LEAST
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from tests.write.rank_threads import Clock, as_ranks

pytestmark = pytest.mark.usefixtures("warm_agents")


HOW: dict[str, dict[str, Any]] = {
    "fulls": {},
    "bounded": {"memory": LEAST},
    "deltas": {"deltas": 3},
    "bounded-deltas": {"deltas": 3, "memory": LEAST},
    "diffs": {"diffs": DiffOptions()},
    "bounded-diffs": {"diffs": DiffOptions(), "memory": LEAST},
}
WRITERS = [*((kind, how) for kind in ("local", "rank") for how in HOW), ("agent", "fulls"), ("agent", "deltas")]


def state(step: int) -> dict[str, Any]:
    return {"weight": np.full(500, step, "<f4")}


def opened(kind: str, how: str, store: ckptstore.Store, in_flight: int) -> Any:
    options = HOW[how] | {"max_in_flight": in_flight, "poll_seconds": None}
    if kind == "agent":
        return agent.writer(store, **options)
    if kind == "rank":
        options |= {"group": Group(0, 1, LocalMailbox()), "ranks": RankOptions(120)}
    return store.writer(**options)


class Medium:
    """A store's folder whose segments can be removed, for any process."""

    def __init__(self, folder: Path) -> None:
        self._segments, self._away = folder / "seg", folder.with_name("away")

    def fail(self) -> None:
        self._segments.rename(self._away)
        self._segments.write_text("no folder")

    def heal(self) -> None:
        self._segments.unlink()
        self._away.rename(self._segments)


def steps_in(text: str) -> list[int]:
    """Every step that is named as lost."""
    found: list[int] = []
    for names in re.findall(r"steps? ([\d, toand]+?) (?:was|were|may)", text):
        for one in re.findall(r"(\d+) to (\d+)|(\d+)", names):
            found += range(int(one[0]), int(one[1]) + 1) if one[0] else [int(one[2])]
    return found


def said(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("kind", "how"), WRITERS)
def test_steps_given_before_the_error_are_bounded_and_named(
    tmp_path: Path, kind: str, how: str, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, medium = ckptstore.open(tmp_path / "store"), Medium(tmp_path / "store")
    open_sink: Any = store.backend.open_sink
    slow = threading.Event()

    def late(key: str, size_hint: int) -> Any:
        if slow.is_set():
            time.sleep(0.1)  # so that the next save waits for a slot meanwhile
        return open_sink(key, size_hint)

    monkeypatch.setattr(store.backend, "open_sink", late)
    with opened(kind, how, store, in_flight) as writer:
        writer.save(state(1), 1)
        medium.fail()
        slow.set()
        given: list[Any] = []
        told = ""
        for step in range(2, 30):
            try:
                given.append(writer.save_async(state(step), step))
            except ckptstore.CkptError as error:
                told = said(error)
                break
            # None is durable, and the caller knows the outcome of none: a kill now costs all of them.
            assert len(given) <= in_flight + ("diffs" in how)  # one batch of one
        lost = [one.step for one in given if one.exception() is not None]
        assert lost == [one.step for one in given]
        named = steps_in(told)
        assert len(named) == len(set(named)), told
        # Two plain fulls of one process are written beside each other: either may fail first. All others go in turn.
        beside = how in ("fulls", "bounded") and kind != "rank" and in_flight > 1
        assert set(named) & ({2, 3} if beside else {2}), told
        assert set(named) <= set(lost)
        medium.heal()
        slow.clear()
        again = lost[-1] + 1  # the call that raised did not begin its own step
        assert writer.save_async(state(again), again).result().step == again
    assert [info.step for info in store.checkpoints()] == [1, again]


@pytest.mark.parametrize("kind", ["local", "rank", "agent"])
def test_closing_names_every_lost_step(tmp_path: Path, kind: str) -> None:
    """Also if the body of the with raises another error."""
    store, medium = ckptstore.open(tmp_path / "store"), Medium(tmp_path / "store")
    writer = opened(kind, "fulls", store, 2)
    writer.save(state(1), 1)
    medium.fail()
    writer.save_async(state(2), 2)
    with pytest.raises(ckptstore.CkptError) as told:
        writer.close()
    assert steps_in(said(told.value)) == [2]
    writer.close()
    medium.heal()

    def body() -> None:
        with opened(kind, "fulls", store, 2) as writer:
            writer.save(state(11), 11)
            medium.fail()
            writer.save_async(state(12), 12)
            raise KeyError("the body's own")

    with pytest.raises(KeyError) as own:
        body()
    assert steps_in(said(own.value)) == [12]


def test_one_dead_rank_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps in flight: the second and the third end with the first, with the same cause."""
    gone, timeout, ended = threading.Event(), 30.0, dict[int, float]()
    clock = Clock(monkeypatch)
    monkeypatch.setattr("ckptstore.write.ranks.commit_coordinator._FAREWELL", 0.1)  # rank 1 is not there to hear it

    def work(group: Group) -> list[str]:
        how: dict[str, Any] = {"max_in_flight": 3, "ranks": RankOptions(timeout), "group": group}
        with ckptstore.open(tmp_path / "store").writer(**how) as writer:
            writer.save(state(1), 1)
            if group.rank:
                assert gone.wait(120)
                return []
            pending = [writer.save_async(state(step), step) for step in (2, 3, 4)]
            for one in pending:
                one.when_done(lambda _, step=one.step: ended.setdefault(step, time.monotonic()))
            while 2 not in ended:  # the timeout of the first step; those of the others may not end
                clock.put_forward()
                time.sleep(0.02)
            texts = [str(one.exception()) for one in pending]
            gone.set()
        return texts

    texts, _ = as_ranks(2, work)
    assert ended[4] - ended[2] < timeout
    assert all("rank 1 did not" in text for text in texts), texts
    assert texts[1].startswith("step 3 was not saved, as step 2: "), texts
    assert texts[2].startswith("step 4 was not saved, as step 2: "), texts


def test_a_step_given_after_a_rank_was_missed_waits_for_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be back."""
    back, missed, clock = threading.Event(), threading.Event(), Clock(monkeypatch)
    monkeypatch.setattr("ckptstore.write.ranks.commit_coordinator._FAREWELL", 0.1)

    def work(group: Group) -> str | None:
        with ckptstore.open(tmp_path / "store").writer(group=group, ranks=RankOptions(20.0)) as writer:
            writer.save(state(1), 1)
            if group.rank == 0:
                pending = writer.save_async(state(2), 2)
                while not pending.done():
                    clock.put_forward()
                    time.sleep(0.02)
                error = pending.exception()
                missed.set()
                threading.Timer(0.2, back.set).start()
                writer.save(state(3), 3)
                return type(error).__name__
            assert missed.wait(120)
            assert back.wait(120)
            writer.save(state(3), 3)
            return None

    assert as_ranks(2, work) == ["MissingRankError", None]


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    training = pytest.importorskip("ckptstore.training")
    model = torch.nn.Linear(2, 2)
    options: dict[str, Any] = {"model": model, "strategy": "full", "on_error": "warn", "max_in_flight": 2}
    with training.Checkpointer(tmp_path / "store", **options) as made:
        made.resume()
        yield made


def test_a_checkpointer_names_every_lost_step_once(checkpointer: Any) -> None:
    """Several fail in flight, and while the next one waits; each step that the error does not name is in the store."""
    medium: Any = checkpointer.store.backend
    open_sink, asked = medium.open_sink, [0]

    def failing(key: str, size_hint: int) -> Any:
        asked[0] += 1
        if asked[0] % 5 in (2, 3, 4):
            time.sleep(0.02)
            raise StorageError("it is full")
        return open_sink(key, size_hint)

    medium.open_sink = failing
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(30):
            checkpointer.step()
        checkpointer.wait()
    del medium.open_sink
    texts = [str(one.message) for one in told if "it is full" in str(one.message)]
    lost = sorted(step for text in texts for step in steps_in(text))
    there = [info.step for info in checkpointer.store.checkpoints()]
    assert len(lost) > 5
    assert sorted([*lost, *there]) == list(range(1, 31)), texts


def test_steps_as_they_are_named() -> None:
    assert named_steps([7]) == "step 7"
    assert named_steps([8, 7]) == "steps 7 and 8"
    assert named_steps([2, 3, 4, 5, 8, 11, 12]) == "steps 2 to 5, 8, 11 and 12"
    assert steps_in(f"{named_steps([2, 3, 4, 5, 8, 11, 12])} were not saved") == [2, 3, 4, 5, 8, 11, 12]
