"""Strategy ``replica`` of several ranks: each agent repeats the steps, and all of them write one checkpoint."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DivergedReplicasError, MissingRankError, UnmadeStateError  # noqa: E402
from ckptstore.agent import AgentWriter  # noqa: E402
from ckptstore.agent.client.replica_client import ReplicaClient, ReplicaStep  # noqa: E402
from ckptstore.host.caller_warnings import UnexplainedStepWarning  # noqa: E402
from ckptstore.training import Checkpointer, UnsavedStepWarning  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group  # noqa: E402
from tests.agent.lives import agents, own_runtime, until  # noqa: E402
from tests.forms import long_only  # noqa: E402
from tests.training import test_sparse_replica  # noqa: E402
from tests.warm_agents import start_warm  # noqa: E402
from tests.write.rank_threads import as_ranks  # noqa: E402
from tools.kills import shim_kills  # noqa: E402
from tools.objects.server import free_port  # noqa: E402
from tools.warm import Script as Started  # noqa: E402
from tools.warm import Warm  # noqa: E402


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    start_warm(monkeypatch)  # for threads as ranks; processes start their agents as usual
    with own_runtime(tmp_path / "runtime", monkeypatch) as folder:
        yield folder


class Script:
    """One rank's script. Without DistributedDataParallel all ranks have the same data, and so the same gradients."""

    def __init__(self, store: Path | str, rank: int, *, seed: int = 0, **options: Any) -> None:
        chance = torch.Generator().manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))
        with torch.no_grad():
            for one in self.model.parameters():
                one.copy_(0.1 * torch.randn(one.shape, generator=chance))
        self.model.register_buffer("own", torch.zeros(()))
        self.inner: torch.nn.Module = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.rank, self.seed = rank, seed
        self.checkpointer = Checkpointer(
            store,
            model=self.model,
            optimizer=self.optimizer,
            strategy="replica",
            agent=True,
            linger_seconds=120,
            rank_timeout=60,
            **options,
        )

    def train(self, *, scale: float = 1.0) -> ckptstore.PendingSave | None:
        step = self.checkpointer.steps_done
        chance = torch.Generator().manual_seed(1000 * self.seed + step)
        self.inner(torch.randn(8, 128, generator=chance)).square().mean().backward()
        for one in self.model.parameters():
            one.grad.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.model.own.fill_(100 * self.rank + step + 1)
        return self.checkpointer.step()

    def digest(self) -> str:
        return shim_kills.digest([self.model.state_dict(), self.optimizer.state_dict()])


def stored(store: ckptstore.Store, step: int, rank: int) -> str:
    found = store.load(step, rank=rank)
    return shim_kills.digest([found["model"], found["optimizer"]])


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, int, str]]:
    """(rank, step, how) of each whole state that was handed over."""
    found: list[tuple[int | None, int, str]] = []
    save, hold = AgentWriter.save_async, AgentWriter.hold

    def saved(self: AgentWriter, state: Any, step: int, **named: Any) -> Any:
        found.append((self.rank, step, "written"))
        return save(self, state, step, **named)

    def held(self: AgentWriter, flat: Any, step: int, **named: Any) -> None:
        found.append((self.rank, step, "in memory"))
        hold(self, flat, step, **named)

    monkeypatch.setattr(AgentWriter, "save_async", saved)
    monkeypatch.setattr(AgentWriter, "hold", held)
    return found


def test_ranks_write_what_is_due_together_whichever_agent_cannot_make_it(
    tmp_path: Path, wholes: list[tuple[int | None, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer of rank 1 consumes twice the gradient that its agent gets; the agent's result is rank 0's state."""
    sent_whole: dict[int, int] = {}
    advance = ReplicaClient.advance

    def spy(self: ReplicaClient, area: Any, told: ReplicaStep) -> Any:
        if told.whole:
            sent_whole[told.step] = sum(len(one.starts) for one in told.whole)
        return advance(self, area, told)

    monkeypatch.setattr(ReplicaClient, "advance", spy)

    def doubled(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad.mul_(2)

    def work(group: Group) -> dict[int, str]:
        script = Script(tmp_path / "run", group.rank, group=group, save_every=2)
        digests = {}

        def step(*, unseen: bool = False) -> ckptstore.PendingSave | None:
            behind = unseen and group.rank == 1
            hook = script.optimizer.register_step_pre_hook(doubled) if behind else contextlib.nullcontext()
            with hook:
                pending = script.train(scale=2.0 if unseen and not behind else 1.0)
            digests[script.checkpointer.steps_done] = script.digest()
            return pending

        assert script.checkpointer.resume() == 0
        assert step() is None, "the first state is whole, and not due"
        pending = step()
        assert pending is not None
        assert pending.result().step == 2
        assert step() is None
        script.checkpointer.wait()  # only in memory until now
        pending = step(unseen=True)
        script.checkpointer.wait()  # it is handed over again
        assert step() is None
        pending = step(unseen=True)
        assert pending is not None
        error = pending.exception()
        assert isinstance(error, UnmadeStateError) == (group.rank == 0), error
        assert step() is None
        step()
        script.checkpointer.wait()
        if group.rank == 1:
            with torch.no_grad():
                script.model[0].weight[3, 5] += 1
        step()
        pending = step()
        assert pending is not None
        assert isinstance(pending.exception(), DivergedReplicasError)
        with pytest.raises(DivergedReplicasError, match=r"model\.0\.weight"):
            script.checkpointer.wait()
        assert script.checkpointer.rollback(8) == 8
        assert step() is None
        if group.rank == 1:
            script.checkpointer.close()  # which writes the newest step that both have
        else:
            step()
            with pytest.raises(MissingRankError, match="trainer of rank 1 ended"):
                script.checkpointer.close()
        return digests

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        digests = as_ranks(2, work)
    for found in digests:
        assert isinstance(found, dict), found
    assert sent_whole == {7: 6}, "rank 1 sends what its agent made wrongly, and no whole state"
    store = ckptstore.open(tmp_path / "run")
    assert [info.ref for info in store.checkpoints()] == ["2@1", "3@1", "4@1", "8@1", "9@2"]
    for step in (2, 3, 4, 8, 9):
        assert len(store.checkpoint(step).segments) >= 3, "the tree, and something of each rank"
        for rank in range(2):
            assert stored(store, step, rank) == digests[rank][step]
    assert sorted(wholes) == [
        (0, 1, "in memory"),
        (0, 4, "written"),
        (0, 9, "in memory"),
        (1, 1, "in memory"),
        (1, 4, "written"),
        (1, 9, "in memory"),
    ]
    told = [str(one.message) for one in caught if one.category is UnsavedStepWarning]
    assert len(told) == 2, told
    assert all(one.endswith("not saved, because the agent could not make their states: 6") for one in told)
    assert sum(one.category is UnexplainedStepWarning for one in caught) == 1


TRAINER = """
import contextlib, os, signal, sys, time
import torch
import torch.distributed as dist
from tests.training.test_replica_ranks import Script

store, port, rank, every, last, victim = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
leaves = rank == victim and sys.argv[7:] == ["leaves"]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
script = Script(store, rank, seed=rank, save_every=every)
script.inner = torch.nn.parallel.DistributedDataParallel(script.model, broadcast_buffers=False)
with contextlib.suppress(ZeroDivisionError), script.checkpointer:
    start = script.checkpointer.resume()
    print("from", start, flush=True)
    for step in range(start, last):
        script.train()
        print(step + 1, script.digest(), flush=True)
        if rank == victim and step + 1 == 6:
            if leaves:
                raise ZeroDivisionError
            os.kill(os.getpid(), signal.SIGKILL)
if leaves:
    print("left", 0, flush=True)
    time.sleep(300)  # what ends this process would end the other's collective
dist.destroy_process_group()
"""


def started(warm: Warm, store: Path, *how: object) -> list[Started]:
    port = free_port()
    words = [list(map(str, (store, port, rank, *how))) for rank in range(2)]
    return [warm.start([sys.executable, "-c", TRAINER, *own], stdout=subprocess.PIPE, text=True) for own in words]


def trainers(warm: Warm, store: Path, every: int, last: int, victim: int = -1) -> list[dict[str, str]]:
    """Two ranks of DDP -> the output of each. If one kills itself the other is killed, too, as by a launcher."""
    ranks = started(warm, store, every, last, victim)
    try:
        said: list[str] = [""] * 2
        if victim >= 0:
            said[victim] = ranks[victim].communicate(timeout=150)[0]
            assert ranks[victim].returncode == -signal.SIGKILL
            ranks[1 - victim].kill()
        for rank, one in enumerate(ranks):
            said[rank] = said[rank] or one.communicate(timeout=150)[0]
            assert victim >= 0 or one.returncode == 0
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [dict(line.split() for line in text.splitlines()) for text in said]


@long_only
@pytest.mark.parametrize("victim", [0, 1])
def test_steps_only_in_the_agents_memory_are_written_when_the_ranks_are_killed(
    tmp_path: Path, victim: int, warm: Warm
) -> None:
    """A rank may be a step ahead: the newest step that both have is written, by both."""
    said = trainers(warm, tmp_path / "run", 50, 9, victim)
    store = ckptstore.open(tmp_path / "run")
    until(lambda: bool(store.checkpoints()))
    (info,) = store.checkpoints()
    assert info.step in (5, 6), "more than the step in flight is lost"  # a message may be in flight
    for rank in range(2):
        assert stored(store, info.step, rank) == said[rank][str(info.step)]


@long_only
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_leaves_by_an_exception_while_the_other_sits_in_a_collective(
    tmp_path: Path, leaver: int, warm: Warm, runtime: Path
) -> None:
    """The exception is not delayed by that; when the other rank is killed all agents write the newest step of both
    ranks."""
    store, said = ckptstore.open(tmp_path / "run"), [dict[str, str](), dict[str, str]()]
    ranks = started(warm, tmp_path / "run", 50, 9, leaver, "leaves")
    try:
        for rank in (leaver, 1 - leaver):
            last = "left" if rank == leaver else "6"
            while last not in said[rank]:
                out = ranks[rank].stdout
                assert out is not None
                step, digest = out.readline().split()
                said[rank][step] = digest
        assert len(agents(runtime)) == 2
        assert store.latest_step() is None
    finally:
        for rank in (1 - leaver, leaver):  # it waits in the collective of step 7, or is about to
            ranks[rank].kill()
            ranks[rank].communicate()
    until(lambda: bool(store.checkpoints()), 200)
    (info,) = store.checkpoints()
    assert info.step == 6
    for rank in range(2):
        assert stored(store, 6, rank) == said[rank]["6"]


@long_only
@pytest.mark.parametrize("every", [1, 4, 50])
@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_that_were_killed_go_on_bit_for_bit(tmp_path: Path, every: int, victim: int, warm: Warm) -> None:
    first = trainers(warm, tmp_path / "run", every, 9, victim)
    second = trainers(warm, tmp_path / "run", every, 9)
    whole = trainers(warm, tmp_path / "whole", 1, 9)
    for rank in range(2):
        assert int(second[rank].pop("from")) in (5, 6)
        assert second[rank].items() <= whole[rank].items()
        assert first[rank].items() - {("from", "0")} <= whole[rank].items()
    store = ckptstore.open(tmp_path / "run")
    assert store.latest_step() == 9
    assert [stored(store, 9, rank) for rank in range(2)] == [whole[rank]["9"] for rank in range(2)]


def test_ranks_send_only_the_entries_of_compressed_gradients(
    tmp_path: Path, wholes: list[tuple[int | None, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse: set[tuple[int, bool]] = set()
    advance = ReplicaClient.advance

    def spy(self: ReplicaClient, area: Any, told: ReplicaStep) -> Any:
        rows = {row for call in told.calls for row, _ in call[4]}
        sparse.add((told.step, rows == set(self.recipe.gradients)))
        return advance(self, area, told)

    monkeypatch.setattr(ReplicaClient, "advance", spy)

    def work(group: Group) -> str:
        script = test_sparse_replica.Script(tmp_path / "run", group=group, rank_timeout=60)
        with script.checkpointer:
            script.checkpointer.resume()
            for step in range(4):
                script.train(step)
        return script.digest()

    assert as_ranks(2, work) == [test_sparse_replica.uninterrupted(4)] * 2
    assert sparse == {(2, True), (3, True), (4, True)}
    assert {step for _, step, _ in wholes} == {1}
    assert [info.step for info in ckptstore.open(tmp_path / "run").checkpoints()] == [1, 2, 3, 4]


def test_gradients_that_are_averaged_past_torchs_count_cost_ranks_no_step(
    tmp_path: Path, wholes: list[tuple[int | None, int, str]]
) -> None:
    """torch does not count ``all_reduce(p.grad)`` as a change; ``.data`` stands for it here."""

    def work(group: Group) -> None:
        script = test_sparse_replica.Script(tmp_path / "run", group=group, rank_timeout=60)
        with script.checkpointer:
            script.checkpointer.resume()
            for step in range(4):
                script.train(step, uncounted=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        warnings.simplefilter("error", UnsavedStepWarning)
        as_ranks(2, work)
    assert {step for _, step, _ in wholes} == {1}
    assert [info.step for info in ckptstore.open(tmp_path / "run").checkpoints()] == [1, 2, 3, 4]
