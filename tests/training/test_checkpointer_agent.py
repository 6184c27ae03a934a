"""A Checkpointer whose saves an agent does: kills of either, and the state from which the next `resume` continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.agent import AgentRestartWarning  # noqa: E402
from ckptstore.errors import AgentLostError, UsageError, WriterClosedError  # noqa: E402
from ckptstore.training import Checkpointer, UnsavedStepWarning  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox  # noqa: E402
from tests.agent.lives import kill  # noqa: E402
from tests.forms import long_only  # noqa: E402
from tools.kills import shim_kills  # noqa: E402
from tools.warm import Warm  # noqa: E402


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))


class Script:
    """A small training script."""

    def __init__(self, store: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 16))
        self.inner: torch.nn.Module = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.checkpointer = Checkpointer(
            store, model=self.model, optimizer=self.optimizer, agent=True, linger_seconds=120, **options
        )

    def update(self) -> None:
        self.inner(torch.randn(8, 16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> ckptstore.PendingSave:
        self.update()
        pending = self.checkpointer.step()
        assert pending is not None
        return pending

    @property
    def agent_pid(self) -> int:
        pid = self.checkpointer.agent_pid
        assert pid is not None
        return pid

    def digest(self) -> str:
        return shim_kills.digest([self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()])


def uninterrupted(steps: int) -> str:
    """The last state of a run without a Checkpointer."""
    script = Script.__new__(Script)
    torch.manual_seed(0)
    script.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 16))
    script.optimizer = torch.optim.AdamW(script.model.parameters(), lr=1e-2)
    for _ in range(steps):
        script.model(torch.randn(8, 16)).square().mean().backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.digest()


TRAINER = """
import os, signal, sys
from tests.training.test_checkpointer_agent import Script
import torch
script = Script(sys.argv[1], strategy=sys.argv[2])
print("from", script.checkpointer.resume(), flush=True)
for _ in range(3):
    script.train()
print("agent", script.agent_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("victims", ["trainer", "both"])
def test_a_run_whose_trainer_is_killed_continues_bit_for_bit(tmp_path: Path, victims: str, warm: Warm) -> None:
    arguments = [sys.executable, "-c", TRAINER, str(tmp_path / "run"), "gradient"]
    done = warm.run(arguments, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    told = dict(line.split() for line in done.stdout.splitlines())
    assert told["from"] == "0"
    if victims == "both":
        kill(int(told["agent"]))
    script = Script(tmp_path / "run", strategy="gradient")
    with script.checkpointer:
        start = script.checkpointer.resume()
        if victims == "trainer":
            assert start >= 2, "more than the step in flight is lost"  # a message may be in flight when step() returns
            assert script.agent_pid == int(told["agent"])
        for _ in range(start, 6):
            script.train()
    assert script.digest() == uninterrupted(6)
    assert ckptstore.open(tmp_path / "run").latest_step() == 6


def test_training_continues_when_the_agent_dies_and_another_one_saves(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", strategy="delta")
    with script.checkpointer:
        script.checkpointer.resume()
        script.train()
        script.checkpointer.wait()
        first = script.agent_pid
        kill(first)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                script.train()
            script.checkpointer.wait()
        assert AgentRestartWarning in {one.category for one in caught}
        assert script.agent_pid != first
    store = ckptstore.open(tmp_path / "run")
    assert [info.step for info in store.checkpoints()] == [1, 2, 3]
    again = Script(tmp_path / "run", strategy="delta")
    with again.checkpointer:
        assert again.checkpointer.resume() == 3
        again.train()
    assert again.digest() == uninterrupted(4)


@pytest.mark.parametrize("closing", [False, True])
def test_the_last_step_is_saved_again_if_its_agent_dies_with_it(tmp_path: Path, closing: bool) -> None:
    script = Script(tmp_path / "run", strategy="gradient", batch=50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with script.checkpointer:
            script.checkpointer.resume()
            script.train().result()
            pending = [script.train(), script.train()]  # they wait for their batch, in the agent's memory
            kill(script.agent_pid)
            if not closing:
                script.checkpointer.wait()
                assert ckptstore.open(tmp_path / "run").latest_step() == 3
    assert all(one.exception() is not None for one in pending)
    assert {AgentRestartWarning, UnsavedStepWarning} <= {one.category for one in caught}
    store = ckptstore.open(tmp_path / "run")
    assert [info.step for info in store.checkpoints()] == [1, 3]
    assert shim_kills.digest([store.load()["model"]]) == shim_kills.digest([script.model.state_dict()])


def test_a_step_whose_agent_died_is_not_saved_again_once_the_next_has_begun(tmp_path: Path) -> None:
    """The live state is the next step's by then: saved under the name of the last one it would be wrong."""
    script = Script(tmp_path / "run", strategy="gradient", batch=50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with script.checkpointer:
            script.checkpointer.resume()
            script.train().result()
            script.train()  # waits for its batch, in the agent's memory
            kill(script.agent_pid)
            script.update()
            script.checkpointer.wait()
            assert ckptstore.open(tmp_path / "run").latest_step() == 1
            script.checkpointer.step()
    store = ckptstore.open(tmp_path / "run")
    assert [info.step for info in store.checkpoints()] == [1, 3]
    assert shim_kills.digest([store.load()["model"]]) == shim_kills.digest([script.model.state_dict()])


def test_going_back_with_an_agent(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", strategy="gradient")
    with script.checkpointer:
        script.checkpointer.resume()
        for _ in range(3):
            script.train()
        assert script.checkpointer.rollback(1) == 1
        for _ in range(2):
            script.train()
    assert script.digest() == uninterrupted(3)
    assert [info.ref for info in ckptstore.open(tmp_path / "run").checkpoints()][-2:] == ["2@2", "3@2"]


def test_resume_none_takes_nothing_that_an_agent_kept(tmp_path: Path, warm: Warm) -> None:
    arguments = [sys.executable, "-c", TRAINER, str(tmp_path / "run"), "full"]
    assert warm.run(arguments, timeout=120).returncode == -signal.SIGKILL
    script = Script(tmp_path / "run", strategy="full")
    with script.checkpointer:
        assert script.checkpointer.resume(None) == 0
        script.train()
    assert ckptstore.open(tmp_path / "run").latest_step() == 1


def test_the_agent_of_one_of_many_ranks_is_not_replaced(tmp_path: Path) -> None:
    """The current step of the other ranks is unknown: all start again."""
    script = Script(tmp_path / "run", strategy="gradient", group=Group(0, 1, LocalMailbox()))
    with script.checkpointer:
        assert script.checkpointer.resume() == 0
        script.train().result()
        kill(script.agent_pid)
        with pytest.raises((AgentLostError, WriterClosedError)):
            script.train().result()
        with pytest.raises(WriterClosedError, match="open another writer on all of them"):
            script.train()
        with pytest.raises(WriterClosedError):
            script.checkpointer.close()
    script = Script(tmp_path / "run", strategy="gradient", group=Group(0, 1, LocalMailbox()))
    with script.checkpointer:
        for _ in range(script.checkpointer.resume(), 3):
            script.train()
    assert script.digest() == uninterrupted(3)


ELASTIC = """
import os, signal, sys
import torch
import torch.distributed as dist
from tests.training.test_checkpointer_agent import Script

torch.set_num_threads(1)
rank, count = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
# torchrun's store outlives the workers; gloo of torch 2.13 finds the addresses of dead ones there.
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.PrefixStore(f"try {count}", dist.TCPStore(*place, is_master=False))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
again = count != "0"
script = Script(sys.argv[1], strategy="gradient", rank_timeout=60.0)
script.inner = torch.nn.parallel.DistributedDataParallel(script.model)
with script.checkpointer:
    start = script.checkpointer.resume()
    for step in range(start, 6):
        script.train()
        if step == 3 and rank == int(sys.argv[2]) and not again:
            os.kill(os.getpid(), signal.SIGKILL)
open(f"{sys.argv[1]}-{rank}", "w").write(f"{start} {again} {script.digest()}")
dist.destroy_process_group()
"""


@long_only
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_starts_the_ranks_again_and_they_go_on_bit_for_bit(tmp_path: Path, victim: int) -> None:
    file = tmp_path / "script.py"
    file.write_text(ELASTIC)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(file), str(tmp_path / "run"), str(victim)], check=True, timeout=300, env=environment)
    for rank in range(2):
        start, again, digest = Path(f"{tmp_path / 'run'}-{rank}").read_text().split()
        assert (int(start) >= 3, again, digest) == (True, "True", uninterrupted(6))


def test_an_invalid_agent_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="agent: 'yes'"):
        Checkpointer(tmp_path / "run", model=torch.nn.Linear(1, 1), agent="yes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="linger_seconds"):
        Checkpointer(tmp_path / "run", model=torch.nn.Linear(1, 1), agent=True, linger_seconds=-1)
