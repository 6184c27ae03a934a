"""`max_in_flight` bounds the steps that are not durable, on every rank: so it bounds the loss of a kill."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import DiffOptions, RankOptions, SaveMetrics
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.host.arenas import LEAST
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.saves import in_flight
from tests import warmth
from tests.forms import long_only, short_or
from tests.waiting import once_it_waits
from tests.write import late_job
from tests.write.rank_threads import as_ranks
from tools.objects.server import free_port

IN_FLIGHT = 2
BATCH = 3
HOW: dict[str, dict[str, Any]] = {
    "fulls": {},
    "bounded": {"memory": LEAST},
    "deltas": {"deltas": 3},
    "bounded-deltas": {"deltas": 3, "memory": LEAST},
    "diffs": {"diffs": DiffOptions(batch=BATCH, seconds=None)},
    "bounded-diffs": {"diffs": DiffOptions(batch=BATCH, seconds=None), "memory": LEAST},
}


def state(rank: int, step: int) -> dict[str, Any]:
    return {"weight": np.full(500, step, "<f4"), f"own{rank}": np.full(100, step), "step": step}


@pytest.mark.parametrize("how", HOW)
def test_no_more_saves_than_that_are_given_and_not_durable(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a medium that is slow to commit: waiting only for shares would bound nothing there."""
    create, delay = LocalBackend.create, [0.0]

    def late(self: LocalBackend, key: str, data: bytes) -> Any:
        time.sleep(delay[0])
        return create(self, key, data)

    monkeypatch.setattr(LocalBackend, "create", late)
    for delay[0] in (0.02, 0.1, 0.5):  # on a busy machine training may be the slower one, which waits for nothing
        told = saved_by_two(tmp_path / str(delay[0]), how)
        for rank in told:
            assert len(rank) == 24
            assert all(one.waited <= one.stall for one in rank)
        # The wait is reported: with batches only now and then, as the medium is asked once for three steps.
        if all(sum(one.waited for one in rank) > 0.05 for rank in told):
            return
    raise AssertionError("no wait was reported")


def saved_by_two(place: Path, how: str) -> list[list[SaveMetrics]]:
    """Two ranks save 24 steps, of which never too many are in flight -> what each of them was told."""
    most, told = [0, 0], list[list[SaveMetrics]]([[], []])
    bound = IN_FLIGHT + (BATCH if "diffs" in how else 0)

    def work(group: Group) -> None:
        options = HOW[how] | {"max_in_flight": IN_FLIGHT, "on_metrics": told[group.rank].append}
        with ckptstore.open(place).writer(group=group, ranks=RankOptions(120), **options) as writer:
            pending = []
            for step in range(1, 25):
                pending.append(writer.save_async(state(group.rank, step), step))
                most[group.rank] = max(most[group.rank], sum(not one.done() for one in pending))

    assert as_ranks(2, work) == [None] * 2
    assert max(most) <= bound
    assert max(one.in_flight for rank in told for one in rank) <= bound + 1  # one more while it waits
    return told


@settings(max_examples=short_or(8, 40), deadline=None)
@given(st.sampled_from(sorted(HOW)), st.integers(1, 4), st.integers(2, 4), st.integers(0, 2**32))
def test_it_is_so_for_any_ranks_that_take_their_time(how: str, in_flight: int, size: int, seed: int) -> None:
    """Whichever rank is slow, and whatever is waited for in between."""
    most = [0] * size
    url = f"memory://{uuid.uuid4().hex}"
    bound = in_flight + (BATCH if "diffs" in how else 0)

    def work(group: Group) -> None:
        chance = random.Random(seed + group.rank)
        together = random.Random(seed)  # common to all
        options = HOW[how] | {"max_in_flight": in_flight}
        with ckptstore.open(url).writer(group=group, ranks=RankOptions(120), **options) as writer:
            pending = []
            for step in range(1, 16):
                time.sleep(chance.choice([0, 0, 0.001, 0.02]))
                if together.random() < 0.2:
                    writer.save(state(group.rank, step), step)
                else:
                    pending.append(writer.save_async(state(group.rank, step), step))
                if chance.random() < 0.1 and pending:
                    chance.choice(pending).result()
                most[group.rank] = max(most[group.rank], sum(not one.done() for one in pending))

    assert as_ranks(size, work) == [None] * size
    assert max(most) <= bound
    assert ckptstore.open(url).latest_step() == 15


@pytest.mark.parametrize("memory", [None, LEAST])
def test_a_save_waits_for_another_rank_s_part_of_the_one_before(
    tmp_path: Path, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is ahead has written its own share long ago: nothing of it is durable."""
    ahead, gate = threading.Event(), threading.Event()
    told: list[SaveMetrics] = []
    now = [0.0]
    monkeypatch.setattr(in_flight, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def later() -> None:
        now[0] += 0.25
        ahead.set()

    def work(group: Group) -> None:
        how: dict[str, Any] = {"max_in_flight": 1, "memory": memory, "on_metrics": told.append if group.rank else None}
        with ckptstore.open(tmp_path / "store").writer(group=group, ranks=RankOptions(120), **how) as writer:
            writer.save(state(group.rank, 1), 1)
            if group.rank == 0:
                assert ahead.wait(120)
                writer.save_async(state(0, 2), 2)
                writer.save_async(state(0, 3), 3)
                return
            first = writer.save_async(state(1, 2), 2)
            once_it_waits(threading.current_thread(), "Places.take", later)
            writer.save_async(state(1, 3), 3)
            assert first.done()
            gate.set()

    assert as_ranks(2, work) == [None] * 2
    assert gate.is_set()
    waited = {one.step: one.waited for one in told}
    assert (waited[2], waited[3]) == (0.0, 0.25)


def test_a_step_that_fails_leaves_its_place(tmp_path: Path) -> None:
    """Otherwise the second save after it would wait for ever."""

    def work(group: Group) -> list[str]:
        found = []
        how: dict[str, Any] = {"max_in_flight": 1, "ranks": RankOptions(120)}
        with ckptstore.open(tmp_path / "store").writer(group=group, **how) as writer:
            for step in range(1, 7):
                # In every other step another replica diverges.
                diverged = step % 2 * group.rank
                pending = writer.save_async({"weight": np.full(10, step + diverged)}, step)
                error = pending.exception()
                found.append("saved" if error is None else type(error).__name__)
        return found

    assert as_ranks(2, work) == [["DivergedReplicasError", "saved"] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [*(pytest.param(one, marks=long_only) for one in ("fulls", "diffs")), "bounded", "checkpointer", "batches"]
)
def test_a_kill_costs_no_more_than_is_promised(tmp_path: Path, job: str) -> None:
    """Real gloo ranks, on a slow medium, killed all at once while they save as fast as they can."""
    killed(tmp_path, job)
    assert lost(tmp_path) <= IN_FLIGHT + (BATCH if job in ("diffs", "batches") else 0)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sharded", "sharded-batches"])
def test_nor_of_a_model_in_shards(tmp_path: Path, job: str) -> None:
    """FSDP2, killed, resumed and killed again, after any number of steps."""
    chance = random.Random(job)
    for _ in range(short_or(2, 12)):
        killed(tmp_path, job, chance.randrange(3, 40))
        assert lost(tmp_path) <= IN_FLIGHT + (BATCH if job == "sharded-batches" else 0)


def killed(folder: Path, job: str, steps: int = 40) -> None:
    """Two ranks of a job, from where the store is until each has given so many steps more."""
    pytest.importorskip("torch.distributed")
    until = steps + (ckptstore.open(folder / "store").latest_step() or 0)
    port = free_port()
    for rank in range(2):
        (folder / f"given-{rank}").write_text("")
    ranks = [
        warmth.start(
            [sys.executable, "-m", "tests.write.lost_job", str(port), str(rank), "2", str(folder), job],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        end = time.monotonic() + 120
        while min(given(folder, rank) for rank in range(2)) < until:
            assert time.monotonic() < end, "no rank gives steps"
            assert all(rank.poll() is None for rank in ranks), "\n".join(one.communicate()[0] for one in ranks)
            time.sleep(0.01)
        for one in ranks:
            one.send_signal(signal.SIGKILL)
    finally:
        for one in ranks:
            one.kill()
            one.communicate()


def lost(folder: Path) -> int:
    """How many steps were given, and are not in the store."""
    return max(given(folder, rank) for rank in range(2)) - (ckptstore.open(folder / "store").latest_step() or 0)


def given(folder: Path, rank: int) -> int:
    """The newest step that a rank has given, by its notes."""
    place = folder / f"given-{rank}"
    lines = place.read_text().split() if place.exists() else []
    return int(lines[-1]) if lines else 0


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_dies_between_its_write_and_the_commit(tmp_path: Path, dead: int) -> None:
    """Rank 1's part is durable, so rank 0 commits without it; without rank 0 nobody commits."""
    (tmp_path / "mail").mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.write.late_job", str(rank), str(tmp_path)], stdout=subprocess.DEVNULL
        )
        for rank in range(2)
    ]
    try:
        end = time.monotonic() + 100
        while not (tmp_path / "asked").exists():
            assert time.monotonic() < end
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.01)
        ranks[dead].kill()
        ranks[dead].wait()
        store = ckptstore.open(tmp_path / "store")
        assert store.latest_step() is None
        (tmp_path / ".known").write_text('{"loss": 0.5}')
        (tmp_path / ".known").rename(tmp_path / "known")
        if dead == 1:
            assert ranks[0].wait(100) == 0
            found = store.checkpoint(1)
            assert found.metadata == {"loss": 0.5}
            assert set(store.load(1, framework="numpy")) == {"shared", "own-0", "own-1"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    with store.writer() as writer:
        assert (writer.parent is None) == (dead == 0)
        writer.save(late_job.state(0), 2, metadata={"loss": 0.25})
    store.gc()
    assert len(store.backend.list("seg/")) == len(store.view().catalog.segments)
    assert store.verify(deep=True).ok
