"""A trainer is killed: the steps that it had handed over are written, kept, and passed only to its successor, bit for
bit."""

from __future__ import annotations

import os
import platform
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
import ckptstore.agent
from ckptstore import DiffOptions
from ckptstore.agent import AgentWriter
from ckptstore.errors import AgentBusyError, CheckpointNotFoundError, UsageError
from tests.agent.lives import agents, alive, begun, kill, run, started, truth, until
from tests.forms import in_turn, short_or
from tests.store.states import same, training_state
from tests.write.trainer import Trainer


def opened(url: Path, **options: Any) -> AgentWriter:
    return ckptstore.agent.writer(url, linger_seconds=options.pop("linger_seconds", 120.0), **options)


TRAIN = """
steps = int(sys.argv[2])
writer = ckptstore.agent.writer(url, linger_seconds=120)
state = begun() if writer.parent is None else writer.load()
print(writer.agent_pid, flush=True)
for step in range(writer.step + 1, steps + 1):
    state = advance(state)
    pending = writer.save_async(state, step)
pending.result()
kill()
"""


def test_the_successor_continues_from_the_agents_memory(tmp_path: Path, runtime: Path) -> None:
    url = tmp_path / "store"
    (pid,) = run(TRAIN, url, 4, code=-9)
    assert agents(runtime) == [int(pid)]
    with opened(url) as writer:
        assert (writer.agent_pid, writer.term, writer.step) == (int(pid), 1, 4)
        assert writer.parent is not None
        assert writer.parent.ref == "4@1"
        assert writer.inherited is not None
        assert (writer.inherited.durable, writer.inherited.state) == (True, writer.parent.state)
        state = writer.load()
        same(truth(4), state)
        into = begun()
        same(truth(4), writer.load(into=into))
        same(truth(4)["weights"], into["weights"])
        writer.save(truth(5), 5)
        assert writer.inherited is None
        same(truth(4), state)  # it was copied: the buffers are filled again
    assert [info.ref for info in ckptstore.open(url).checkpoints()] == [f"{step}@1" for step in range(1, 6)]
    assert agents(runtime) == []


@pytest.mark.usefixtures("warm_agents")
def test_nothing_is_read_from_storage(tmp_path: Path) -> None:
    """Every segment is gone, and the state is restored all the same."""
    url = tmp_path / "store"
    run(TRAIN, url, 3, code=-9)
    for segment in (url / "seg").rglob("*.safetensors"):
        segment.unlink()
    with opened(url) as writer:
        same(truth(3), writer.load())


@pytest.mark.usefixtures("warm_agents")
def test_torch_tensors_come_back_as_such(tmp_path: Path) -> None:
    script = """
from tests.store.states import training_state
writer = ckptstore.agent.writer(url, linger_seconds=120)
writer.save(training_state(), 1)
kill()
"""
    run(script, tmp_path / "store", code=-9)
    with opened(tmp_path / "store") as writer:
        assert writer.inherited is not None
        stored = ckptstore.open(tmp_path / "store").load()
        same(stored, writer.load())
        same(stored, writer.load(into=training_state(seed=1)))
        with pytest.raises(UsageError, match="into="):
            writer.load(into={"model": {}})


HALF = """
class Stops:
    '''A tensor in the middle of which the trainer is killed.'''
    dtype, shape, nbytes, origin, identity = "U8", (20 << 20,), 20 << 20, "numpy", "stops"
    def view(self):
        return None
    def read(self, offset, out):
        out[:] = 255
        if offset:
            kill()

writer = ckptstore.agent.writer(url, linger_seconds=120, max_in_flight=int(sys.argv[2]))
for step in (1, 2):
    pending = writer.save_async({"big": np.full(20 << 20, step, np.uint8)}, step)
if sys.argv[3] == "wait":
    pending.result()
writer.save_async(FlatState({"big": {"$a": "big"}}, {"big": Stops()}), 3)
"""


@pytest.mark.parametrize(("when", "in_flight"), in_turn(["wait", "at once"], [1, 3]))
@pytest.mark.usefixtures("warm_agents")
def test_a_buffer_that_is_half_filled_is_never_offered(tmp_path: Path, in_flight: int, when: str) -> None:
    run(HALF, tmp_path / "store", in_flight, when, code=-9)
    with opened(tmp_path / "store", max_in_flight=in_flight) as writer:
        assert writer.step == 2
        assert writer.inherited is not None
        assert (writer.load()["big"] == 2).all()
        writer.save({"big": np.full(20 << 20, 3, np.uint8)}, 3)  # the place in flight is free again
    assert (ckptstore.open(tmp_path / "store").load(3)["big"] == 3).all()


@pytest.mark.usefixtures("warm_agents")
def test_steps_that_wait_for_their_batch_are_written_and_the_chain_continues(tmp_path: Path) -> None:
    script = """
writer = ckptstore.agent.writer(
    url, diffs=ckptstore.DiffOptions(batch=50, seconds=None), max_in_flight=2, linger_seconds=120
)
from tests.write.trainer import Trainer
trainer = Trainer()
for step in range(1, 6):
    trainer.train()
    writer.save_async(trainer.state(), step, updates=trainer.updates())
writer.poll()
kill()
"""
    url = tmp_path / "store"
    run(script, url, code=-9)
    trainer = Trainer()
    for _ in range(5):
        trainer.train()
    with opened(url, diffs=DiffOptions(batch=50, seconds=None), max_in_flight=2) as writer:
        assert writer.step == 5
        same(trainer.state(), writer.load())
        trainer.train()
        writer.save_async(trainer.state(), 6, updates=trainer.updates())
    infos = ckptstore.open(url).checkpoints()
    assert [(info.ref, info.kind) for info in infos] == [
        ("1@1", "full"),
        *((f"{step}@1", "gradient") for step in range(2, 7)),
    ]
    same(trainer.state(), ckptstore.open(url).load())


@pytest.mark.usefixtures("warm_agents")
def test_killed_again_and_again_at_any_moment(tmp_path: Path) -> None:
    """Each life finds the steps that the one before had handed over, except the step in progress."""
    script = """
import threading
writer = ckptstore.agent.writer(url, linger_seconds=120, max_in_flight=2)
state = begun() if writer.parent is None else writer.load()
first = writer.step + 1
print("up", writer.step, flush=True)
for step in range(first, 10_000):
    state = advance(state)
    writer.save_async(state, step)
    print(step, flush=True)
    if step == first:
        threading.Timer(float(sys.argv[2]), kill).start()
"""
    reached = 0
    for life in range(short_or(2, 4)):
        words = run(script, tmp_path / "store", 0.05 + 0.1 * life, code=-9)
        assert int(words[1]) >= reached - 1
        reached = int(words[-1])
    with opened(tmp_path / "store", max_in_flight=2) as writer:
        assert reached - 1 <= writer.step <= reached + 1
        assert writer.term == 1
        same(truth(writer.step), writer.load())


@pytest.mark.usefixtures("warm_agents")
def test_both_die_and_the_newest_durable_checkpoint_is_left(tmp_path: Path) -> None:
    url = tmp_path / "store"
    (pid,) = run(TRAIN, url, 3, code=-9)
    kill(int(pid))
    with opened(url) as writer:
        assert (writer.inherited, writer.term, writer.step) == (None, 2, 3)
        same(truth(3), writer.load())
        writer.save(truth(4), 4)


def test_an_agent_without_a_trainer_ends_after_its_time(tmp_path: Path, runtime: Path) -> None:
    script = """
writer = ckptstore.agent.writer(url, linger_seconds=0.3)
writer.save(begun(), 1)
print(writer.agent_pid, flush=True)
kill()
"""
    (pid,) = run(script, tmp_path / "store", code=-9)
    until(lambda: not alive(int(pid)))
    assert list(runtime.iterdir()) == []


def test_sigterm_ends_an_agent_that_waits(tmp_path: Path, runtime: Path) -> None:
    (pid,) = run(TRAIN, tmp_path / "store", 2, code=-9)
    kill(int(pid), signal.SIGTERM)
    assert list(runtime.iterdir()) == []


@pytest.mark.usefixtures("warm_agents")
def test_two_trainers_never_share_one(tmp_path: Path) -> None:
    script = """
if os.fork():
    time.sleep(600)  # its parent does not wait for it
writer = ckptstore.agent.writer(url, linger_seconds=120)
writer.save(begun(), 1)
print(os.getpid(), flush=True)
time.sleep(600)
"""
    with started(script, tmp_path / "store") as (_, line):
        first = int(line)
        try:
            for _ in range(2):
                with pytest.raises(AgentBusyError, match="two trainers never share one"):
                    opened(tmp_path / "store")
            os.kill(first, signal.SIGSTOP)  # it is still alive
            with pytest.raises(AgentBusyError):
                opened(tmp_path / "store")
        finally:
            os.kill(first, signal.SIGKILL)
        until(lambda: not alive(first))
        assert Path(f"/proc/{first}").exists(), "a zombie until it is waited for: dead"
        with opened(tmp_path / "store") as writer:
            assert (writer.term, writer.step) == (1, 1)
            with pytest.raises(AgentBusyError):
                opened(tmp_path / "store")
            writer.save(begun(), 2)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the system call exit")
def test_a_trainer_that_takes_long_to_die_is_waited_for(tmp_path: Path) -> None:
    """The kernel takes seconds to free a large process's memory: here a thread survives the main one."""
    script = """
import ctypes, threading
writer = ckptstore.agent.writer(url, linger_seconds=120)
writer.save(begun(), 1)
def last():
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    os.rename(sys.argv[2], sys.argv[3])
    os._exit(9)
threading.Thread(target=last).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""
    may_end, its_end = tmp_path / "may end", tmp_path / "its end"
    with started(script, tmp_path / "store", may_end, its_end) as (first, _):
        until(lambda: not alive(first.pid))
        threading.Timer(0.5, may_end.touch).start()
        with opened(tmp_path / "store") as writer:
            assert its_end.exists()
            assert (writer.term, writer.step) == (1, 1)
            writer.save(begun(), 2)
        assert first.wait() == 9


@pytest.mark.usefixtures("warm_agents")
def test_a_child_that_outlives_the_trainer_does_not_keep_its_agent(tmp_path: Path) -> None:
    """Workers of a data loader are forked, and hold every open descriptor."""
    script = """
writer = ckptstore.agent.writer(url, linger_seconds=120)
writer.save(begun(), 1)
if (child := os.fork()) == 0:
    os.close(1); os.close(2)
    time.sleep(600)
print(child, flush=True)
kill()
"""
    (child,) = run(script, tmp_path / "store", code=-9)
    try:
        with opened(tmp_path / "store") as writer:
            assert (writer.term, writer.step) == (1, 1)
        assert alive(int(child))  # it was not waited for
    finally:
        kill(int(child))


@pytest.mark.usefixtures("warm_agents")
def test_other_options_get_the_memory_and_an_agent_of_their_own(tmp_path: Path) -> None:
    (pid,) = run(TRAIN, tmp_path / "store", 3, code=-9)
    with opened(tmp_path / "store", deltas=2) as writer:
        assert writer.inherited is not None
        assert (writer.term, writer.step) == (2, 3)
        assert not alive(int(pid))
        same(truth(3), writer.load())
        writer.save(truth(4), 4)


@pytest.mark.parametrize("parent", [None, "1@1", 2])
@pytest.mark.usefixtures("warm_agents")
def test_another_parent_than_the_newest_is_a_term_of_its_own(tmp_path: Path, parent: Any) -> None:
    (pid,) = run(TRAIN, tmp_path / "store", 3, code=-9)
    with opened(tmp_path / "store", parent=parent) as writer:
        assert (writer.inherited, writer.term) == (None, 2)
        assert not alive(int(pid))
        step = 0 if parent is None else int(str(parent)[0])
        assert writer.step == step
        if step:
            same(truth(step), writer.load())
        writer.save(truth(step + 1), step + 1)


@pytest.mark.usefixtures("warm_agents")
def test_an_older_step_of_the_same_state_is_not_what_the_agent_keeps(tmp_path: Path) -> None:
    script = """
import os, sys
import ckptstore.agent
from tests.agent.lives import begun
writer = ckptstore.agent.writer(sys.argv[1], linger_seconds=120)
for step in (1, 2):
    writer.save(begun(), step)
os._exit(9)
"""
    run(script, tmp_path / "store", code=9)
    with opened(tmp_path / "store", parent="1@1") as writer:
        assert (writer.inherited, writer.term, writer.step) == (None, 2, 1)


@pytest.mark.parametrize(("parent", "term", "step"), [("latest", 2, 1), (None, 3, 0)])
@pytest.mark.usefixtures("warm_agents")
def test_an_agent_without_a_step_continues_only_from_its_parent(
    tmp_path: Path, parent: str | None, term: int, step: int
) -> None:
    """Its trainer died before its first save."""
    with ckptstore.open(tmp_path / "store").writer() as writer:
        writer.save(begun(), 1)
    run("ckptstore.agent.writer(sys.argv[1], linger_seconds=120)\nkill()", tmp_path / "store", code=-9)
    with opened(tmp_path / "store", parent=parent) as next_one:
        assert (next_one.inherited, next_one.term, next_one.step) == (None, term, step)


@pytest.mark.usefixtures("warm_agents")
def test_a_checkpoint_of_another_store_is_not_what_the_agent_keeps(tmp_path: Path) -> None:
    run(TRAIN, tmp_path / "store", 3, code=-9)
    with ckptstore.open(tmp_path / "other").writer() as other:
        info = other.save(begun(), 3)
    assert info.ref == "3@1"  # as the agent's newest
    with pytest.raises(CheckpointNotFoundError):
        opened(tmp_path / "store", parent=info)


@pytest.mark.usefixtures("warm_agents")
def test_the_newest_by_its_name_is_what_the_agent_keeps(tmp_path: Path) -> None:
    run(TRAIN, tmp_path / "store", 3, code=-9)
    with opened(tmp_path / "store", parent="3@1") as writer:
        assert writer.inherited is not None
        assert writer.term == 1


@pytest.mark.usefixtures("warm_agents")
def test_a_term_that_came_after_wins_over_what_the_agent_keeps(tmp_path: Path) -> None:
    run(TRAIN, tmp_path / "store", 3, code=-9)
    with ckptstore.open(tmp_path / "store").writer() as other:
        other.save(truth(4), 4)
    with opened(tmp_path / "store") as writer:
        assert (writer.inherited, writer.term, writer.step) == (None, 3, 4)
        same(truth(4), writer.load())


@pytest.mark.usefixtures("warm_agents")
def test_an_abandoned_branch_is_not_continued(tmp_path: Path) -> None:
    """The trainer went back, and was killed before it had saved anything."""
    script = """
writer = ckptstore.agent.writer(url, linger_seconds=120)
for step in (1, 2, 3):
    writer.save(truth(step), step)
writer.rollback(1)
print(writer.agent_pid, flush=True)
kill()
"""
    (pid,) = run(script, tmp_path / "store", code=-9)
    with opened(tmp_path / "store") as writer:
        assert (writer.agent_pid, writer.inherited, writer.term, writer.step) == (int(pid), None, 2, 1)
        same(truth(1), writer.load())
        writer.save(truth(2), 2)
    assert [info.ref for info in ckptstore.open(tmp_path / "store").checkpoints()] == ["1@1", "2@1", "3@1", "2@2"]


@pytest.mark.usefixtures("warm_agents")
def test_a_store_in_the_place_of_another_gets_an_agent_of_its_own(tmp_path: Path) -> None:
    (pid,) = run(TRAIN, tmp_path / "store", 3, code=-9)
    (tmp_path / "store").rename(tmp_path / "moved")
    with ckptstore.open(tmp_path / "store").writer() as other:
        other.save(truth(1), 1)
    with opened(tmp_path / "store") as writer:
        assert (writer.inherited, writer.step, writer.term) == (None, 1, 2)
        assert not alive(int(pid))
    same(truth(3), ckptstore.open(tmp_path / "moved").load())


@pytest.mark.usefixtures("warm_agents")
def test_a_step_that_could_not_be_written_is_in_memory_still(tmp_path: Path) -> None:
    """The store has lost its FORMAT file: nothing can be committed, and training need not go back."""
    script = """
writer = ckptstore.agent.writer(url, linger_seconds=120)
writer.save(truth(1), 1)
os.rename(url + "/FORMAT", url + ".FORMAT")
try:
    writer.save(truth(2), 2)
except ckptstore.StorageError:
    print("failed", flush=True)
os.rename(url + ".FORMAT", url + "/FORMAT")
kill()
"""
    assert run(script, tmp_path / "store", code=-9) == ["failed"]
    with opened(tmp_path / "store") as writer:
        assert writer.inherited is not None
        assert (writer.step, writer.inherited.durable) == (2, False)
        assert writer.parent is not None
        assert writer.parent.step == 1
        same(truth(2), writer.load())
        writer.save(truth(3), 3)
    assert [info.ref for info in ckptstore.open(tmp_path / "store").checkpoints()] == ["1@1", "3@1"]


def test_a_stale_socket_is_no_agent(tmp_path: Path, runtime: Path) -> None:
    (pid,) = run(TRAIN, tmp_path / "store", 1, code=-9)
    kill(int(pid))
    assert [path.suffix for path in runtime.iterdir()].count(".sock") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(tmp_path / "store") as writer:
            assert writer.term == 2
    assert list(runtime.iterdir()) == []


def test_trainers_of_other_names_have_agents_of_their_own(tmp_path: Path, runtime: Path) -> None:
    with opened(tmp_path / "a", name="0") as first, opened(tmp_path / "b", name="0") as second:
        assert first.agent_pid != second.agent_pid
        assert len(agents(runtime)) == 2
    assert agents(runtime) == []
