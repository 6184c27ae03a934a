"""Rules that are set before a run or while it saves: every kind of writer deletes the retired checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DeltaOptions, Store  # noqa: E402
from ckptstore.training import Checkpointer, retention  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox  # noqa: E402
from tests.forms import in_turn, short_or  # noqa: E402 - as above
from tests.training.polls import poll_often  # noqa: E402 - as above


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch, warm_agents: None) -> None:
    """A writer looks for new rules every 0.1 s, not every 5 s, and the deleting thread pauses for a tenth as long."""
    poll_often(monkeypatch)
    for name, value in {"_SHARE": 4, "_SHARE_IDLE": 20, "_PAUSE_IDLE": 0.1}.items():
        monkeypatch.setattr(retention, name, value)


def segments(store: Store) -> int:
    return len([key for key in store.backend.list("seg/") if key.endswith(".safetensors")])


class Job:
    def __init__(self, store: Store, *, strategy: Any = "full", **options: Any) -> None:
        self.model = torch.nn.Linear(20, 20)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.store = store
        self.saved = 0
        self.checkpointer = Checkpointer(
            store.url, model=self.model, optimizer=self.optimizer, strategy=strategy, **options
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(4, 20)).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.step()
            self.saved += 1

    def deleted(self) -> int:
        """At least how many segments. On a busy machine many are written between one round of the collector and the
        next."""
        return self.saved - segments(self.store)

    def run_until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not true():
            assert time.monotonic() < end, f"{segments(self.store)} segments of {self.saved}"
            self.run(1)
            time.sleep(0.01)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "local": dict,
    "agent": lambda: {"agent": True},
    "ranks": lambda: {"group": Group(0, 1, LocalMailbox())},
}


@pytest.mark.parametrize(("kind", "strategy"), in_turn(list(KINDS), ["full", "delta", "gradient"]))
def test_rules_that_come_free_what_they_retire(tmp_path: Path, kind: str, strategy: str) -> None:
    """Bases of newer checkpoints stay until these are retired, too: at most one chain."""
    store = ckptstore.open(tmp_path / "run")
    how: dict[str, Any] = {"deltas": DeltaOptions(interval=8)} if strategy == "delta" else {"full_every": 8}
    job = Job(store, strategy=strategy, **how, **KINDS[kind]())
    with job.checkpointer:
        job.checkpointer.resume()
        job.run(40)
        job.checkpointer.wait()
        assert {info.kind for info in store.checkpoints()} == {"full", strategy}
        assert len(store.checkpoints()) == 40
        store.keep("last:5")
        job.run_until(lambda: job.deleted() > 20)
    assert len(store.checkpoints()) == 5
    assert segments(store) <= (5 + 8) * (2 if kind == "ranks" else 1)  # of ranks: one with the tree, and one of each
    assert store.verify(deep=True).ok


class Clock:
    """The clock of the deleting thread: stands still, or each look at it is so many seconds later."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step = 0.0

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


def test_one_slow_look_does_not_keep_rules_from_having_an_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that finds no rules looks again soon, however long the look took."""
    clock = Clock()
    monkeypatch.setattr(retention, "time", clock)
    store = ckptstore.open(tmp_path / "run")
    job = Job(store)
    with job.checkpointer:
        job.checkpointer.resume()
        clock.step = 10.0  # the first look takes ten seconds, and more
        job.run(1)
        job.checkpointer.wait()
        end = time.monotonic() + 60
        while clock.now < 20 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)
        clock.step = 0.0
        job.run(29)
        store.keep("last:5")
        clock.now += 30.0
        job.run_until(lambda: job.deleted() > 20)


@pytest.mark.filterwarnings("ignore::ckptstore.training.SlowSavesWarning")  # of so small a model saving is all the work
def test_rules_of_the_recommended_kind_cost_fulls_and_one_chain(tmp_path: Path) -> None:
    """Step diffs, the newest and every fiftieth kept: each of these is a full, and nothing else stays stored for it."""
    steps, every, last = short_or(200, 1000), 50, 10
    store = ckptstore.open(tmp_path / "run")
    stored: dict[int, int] = {}

    def told(metrics: ckptstore.SaveMetrics) -> None:
        stored[metrics.step] = metrics.stored

    rules = [f"last:{last}", f"every:{every}"]
    job = Job(store, strategy="gradient", full_every=every, keep=rules, on_metrics=told)
    with job.checkpointer:
        job.checkpointer.resume()
        job.run(steps)
    kept = [info.step for info in store.checkpoints()]
    assert kept == sorted({*range(every, steps + 1, every), *range(steps - last + 1, steps + 1)})
    there = {key: store.backend.size(key) for key in store.backend.list("seg/") if key.endswith(".safetensors")}
    full, diff = stored[1], max(stored[step] for step in range(steps - last, steps))
    assert diff < 0.7 * full
    assert sum(there.values()) <= 1.05 * (steps / every * full + every * diff), there
    held = {step for _, step in store.view().catalog.held}
    assert min(held) > steps - every, held
    assert len(there) <= steps / every + every
    assert store.verify(deep=True).ok


def test_rules_that_are_gone_again_before_anybody_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()  # the deleting thread does not look while it stands still
    monkeypatch.setattr(retention, "time", clock)
    store = ckptstore.open(tmp_path / "run")
    job = Job(store)
    with job.checkpointer:
        job.checkpointer.resume()
        job.run(30)
        job.checkpointer.wait()
        store.keep("last:5")
        job.run(1)
        job.checkpointer.wait()
        store.keep(everything=True)
        assert segments(store) == 31  # nothing is deleted yet
        clock.now += 30.0
        job.run_until(lambda: segments(store) <= len(store.checkpoints()) + 1)
        job.checkpointer.wait()
        there = len(store.checkpoints())
        job.run(5)
    assert len(store.checkpoints()) == there + 5


def test_rules_that_come_at_the_very_end(tmp_path: Path) -> None:
    """No step follows them: the end of the run deletes what they retire."""
    store = ckptstore.open(tmp_path / "run")
    job = Job(store)
    with job.checkpointer:
        job.checkpointer.resume()
        job.run(30)
        job.checkpointer.wait()
        store.keep("last:5")
        end = time.monotonic() + 60
        while len(store.checkpoints()) > 5 and time.monotonic() < end:  # the writer retires at its next look
            time.sleep(0.02)
    assert len(store.checkpoints()) == 5
    assert segments(store) == 5


def test_without_rules_nothing_is_deleted(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    job = Job(store)
    with job.checkpointer:
        job.checkpointer.resume()
        job.run(30)
    assert len(store.checkpoints()) == segments(store) == 30
