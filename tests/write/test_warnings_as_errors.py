"""Where warnings are errors, one that tells of what happened before stops one start, and not every start after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.frameworks import bridge
from tests.write.test_diffs import Trainer

pytestmark = pytest.mark.filterwarnings("error")


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
    assert store.rules() == ("last:9",)  # what the start asked for is recorded, too
    assert saved(store) == "3@1"
    killed(2)  # other steps than those that were told of
    with pytest.raises(ckptstore.LostStepsWarning, match=r"term 4 ended without closing"):
        store.writer()
    assert saved(store, 6) == "5@4"


def test_a_change_of_somebody_else_tells_nobody(store: ckptstore.Store, killed: Callable[[int], None]) -> None:
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
