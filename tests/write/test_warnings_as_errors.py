"""If warnings are errors, each is raised only after its event is recorded, and no step is lost by one.

A warning about an earlier event stops one start, and not every start after it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
import ckptstore.agent
import ckptstore.training
from ckptstore.agent.client.agent_writer import AgentWriter
from ckptstore.frameworks import bridge
from ckptstore.host import background_threads
from ckptstore.host.caller_warnings import WarningsLast, warn, warns_last
from ckptstore.host.threads import started_pool
from ckptstore.training import Checkpointer, LayerwiseSnapshots
from ckptstore.write.capture.layerwise_save import LayeredSave
from ckptstore.write.local_writer import LocalWriter
from ckptstore.write.ranks.rank_writer import RankWriter
from tests.write.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("error")


def _categories() -> list[type[Warning]]:
    """Every warning of this package."""
    found = {UserWarning}
    for module in (ckptstore, ckptstore.training, ckptstore.agent):
        members = (getattr(module, name) for name in module.__all__)
        found |= {one for one in members if inspect.isclass(one) and issubclass(one, Warning)}
    return sorted(found, key=lambda one: one.__name__)


every_category = pytest.mark.parametrize("category", _categories())


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    return ckptstore.open(tmp_path / "s", create=True)


@pytest.fixture
def killed(store: ckptstore.Store) -> Iterator[Callable[[int], None]]:
    """Runs that end without closing, while steps wait for their batch."""
    with contextlib.ExitStack() as ends:

        def run(steps: int) -> None:
            trainer = Trainer()
            writer = store.writer(diffs=ckptstore.DiffOptions(batch=50, seconds=None))
            ends.enter_context(contextlib.suppress(ckptstore.FencedError))
            ends.callback(writer.close)
            trainer.step = writer.parent.step if writer.parent is not None else 0
            for _ in range(steps):
                trainer.train()
                writer.save_async(trainer.state(), trainer.step, updates=trainer.updates())
            writer.wait()
            trainer.train()
            writer.save_async(trainer.state(), trainer.step, updates=trainer.updates())

        yield run


def saved(store: ckptstore.Store, *steps: int, **options: Any) -> str | None:
    with store.writer(poll_seconds=None, **options) as writer:
        for step in steps:
            writer.save({"w": np.full(30, step, "<f4")}, step)
    return None if writer.parent is None else writer.parent.ref


def test_steps_that_are_lost(store: ckptstore.Store, killed: Callable[[int], None]) -> None:
    killed(3)
    with pytest.raises(ckptstore.LostStepsWarning, match="term 1 ended without closing"):
        store.writer(keep=["last:9"])
    assert store.rules() == ("last:9",)  # the options of that start are recorded, too
    assert saved(store) == "3@1"
    killed(2)  # not the steps of the earlier warning
    with pytest.raises(ckptstore.LostStepsWarning, match=r"term 4 ended without closing"):
        store.writer()
    assert saved(store, 6) == "5@4"


def test_a_term_that_was_killed_before_its_first_checkpoint(
    store: ckptstore.Store, killed: Callable[[int], None]
) -> None:
    killed(3)
    with pytest.raises(ckptstore.LostStepsWarning, match="term 1 ended without closing"):
        store.writer()
    batch = ckptstore.DiffOptions(batch=50, seconds=None)
    dead = store.writer(diffs=batch, poll_seconds=None)  # already reported
    for _ in range(2):  # the second time other steps are lost
        number = dead.term
        with pytest.raises(
            ckptstore.LostStepsWarning,
            match=rf"term {number} ended .* before its first checkpoint .* \(4 and following\) .* continues from 3@1",
        ):
            store.writer(diffs=batch)
        dead = store.writer(diffs=batch, poll_seconds=None)  # which the stopped start is not
    with pytest.raises(ckptstore.FencedError):
        saved_by(dead, store)


def saved_by(dead: Any, store: ckptstore.Store) -> None:
    with pytest.warns(ckptstore.LostStepsWarning):
        store.writer(poll_seconds=None).close()
    with dead:
        dead.save({"w": np.zeros(30, "<f4")}, 9)


def test_going_back_says_nothing_of_a_term_that_saved(store: ckptstore.Store) -> None:
    saved(store, 1, 2)
    with store.writer(diffs=ckptstore.DiffOptions(batch=50, seconds=None), poll_seconds=None, parent="1") as writer:
        writer.save({"w": np.full(30, 7, "<f4")}, 5)
        with store.writer(parent="1@1", poll_seconds=None) as other:
            other.save({"w": np.full(30, 8, "<f4")}, 6)
        with contextlib.suppress(ckptstore.FencedError):
            writer.poll()


def test_a_change_by_others_causes_no_warning(store: ckptstore.Store, killed: Callable[[int], None]) -> None:
    killed(3)
    store.tag("kept", "3@1", take_over=True)
    assert store.terms()[-1].term == 2
    with pytest.raises(ckptstore.LostStepsWarning, match="term 1 ended without closing"):
        store.writer()


def test_another_machine(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(store, 1)
    here = bridge.environment()
    for threads in (97, 98):
        monkeypatch.setattr(bridge, "environment", lambda: {**here, "numpy": str(threads)})  # noqa: B023
        with pytest.raises(ckptstore.DeterminismWarning, match=f"{threads}"):
            store.writer()
        assert saved(store) == "1@1"
    monkeypatch.undo()
    assert saved(store, 2) == "1@1"  # on the machine that saved it


def test_a_run_from_nothing(store: ckptstore.Store) -> None:
    saved(store, 1)
    for _ in range(2):
        saved(store, parent=None)
        with pytest.raises(ckptstore.FreshStartWarning, match="parent='1@1'"):
            store.writer()
        assert saved(store) is None


def test_all_warnings_of_a_start_are_raised_at_once(
    store: ckptstore.Store, killed: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start raises none of them."""
    killed(3)
    here = bridge.environment()
    monkeypatch.setattr(bridge, "environment", lambda: {**here, "numpy": "97"})
    with pytest.raises(ckptstore.DeterminismWarning, match="97") as told:
        store.writer()
    assert "LostStepsWarning: term 1 ended without closing" in told.value.__notes__[0]
    assert saved(store) == "3@1"


@every_category
@pytest.mark.parametrize("diffs", [True, False], ids=["diffs", "memory"])
@pytest.mark.parametrize("call", ["save", "save_async"])
def test_a_save_warns_when_it_is_recorded(
    store: ckptstore.Store, category: type[Warning], call: str, diffs: bool
) -> None:
    def updates(_: object) -> list[Any]:
        warn("said within the save", category)
        return []

    options: dict[str, Any] = {"diffs": ckptstore.DiffOptions()}
    if not diffs:
        options["memory"] = 48 << 20
    with store.writer(poll_seconds=None, **options) as writer:
        for step in (1, 2, 3):
            with pytest.raises(category, match="said within the save"):
                getattr(writer, call)({"w": np.full(30, step, "<f4")}, step, updates=updates)
    assert [info.step for info in store.checkpoints()] == [1, 2, 3]
    for step in (1, 2, 3):
        assert np.array_equal(store.load(step)["w"], np.full(30, step, "<f4"))


@pytest.mark.parametrize("call", ["save", "save_async"])
def test_updates_that_are_ignored(store: ckptstore.Store, call: str) -> None:
    with store.writer(poll_seconds=None) as writer:
        with pytest.raises(ckptstore.UnexplainedStepWarning, match="updates= is ignored"):
            getattr(writer, call)({"w": np.zeros(3)}, 1, updates=[])
        getattr(writer, call)({"w": np.ones(3)}, 2, updates=[])
    assert [info.step for info in store.checkpoints()] == [1, 2]


def test_a_failed_save_raises_its_own_error_with_the_warnings(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": np.zeros(3)}, 1)
        with pytest.raises(ckptstore.StepOrderError) as failed:
            writer.save({"w": np.zeros(3)}, 1, updates=[])
    assert "UnexplainedStepWarning: updates= is ignored" in failed.value.__notes__[0]


def test_calls_within_a_call_that_warns_last() -> None:
    @warns_last
    def outer() -> None:
        with WarningsLast():
            warn("first", UserWarning)
        warn("second", ckptstore.LossyWarning)

    with pytest.raises(UserWarning, match="first") as told:
        outer()
    assert told.value.__notes__ == ["LossyWarning: second"]
    with pytest.raises(UserWarning, match="not held any more"):
        warn("not held any more", UserWarning)


@every_category
def test_threads_of_the_package_log_it(category: type[Warning], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ckptstore"), started_pool(1, "ckptstore-test") as pool:
        pool.submit(warn, "of a pool", category).result()
        thread = background_threads.start(lambda: warn("of a thread", category), "test")
        thread.join()
        done = threading.Event()

        def at_last() -> None:
            warn("of a timer", category)
            done.set()

        background_threads.after(0.0, at_last)
        assert done.wait(60)
    assert [one.getMessage() for one in caplog.records] == [
        f"{category.__name__}: of a {what}" for what in ("pool", "thread", "timer")
    ]


def test_threads_of_the_caller_get_warnings() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ckptstore.LossyWarning):
        pool.submit(warn, "of the caller's pool", ckptstore.LossyWarning).result()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (LocalWriter, "save save_async adopt begin wait poll tag untag rollback close"),
        (RankWriter, "save save_async take_over wait tag untag rollback close"),
        (AgentWriter, "save save_async save_filled hold begin load wait tag untag rollback close"),
        (LayeredSave, "finish"),
        (LayerwiseSnapshots, "save"),
        (Checkpointer, "resume rollback step wait tag close"),
    ],
)
def test_every_call_that_records_something_warns_last(kind: type, names: str) -> None:
    for name in names.split():
        assert hasattr(getattr(kind, name), "__wrapped__"), f"{kind.__name__}.{name} is not declared with warns_last"
