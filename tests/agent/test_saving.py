"""An agent stores the same data as a writer in the trainer's process, and reports errors."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
import ckptstore.agent
from ckptstore import DeltaOptions, DiffOptions
from ckptstore.agent import AgentRestartWarning, AgentWriter
from ckptstore.errors import (
    AgentLostError,
    FencedError,
    StepOrderError,
    StorageError,
    StoreReplacedError,
    UnsupportedStateError,
    UsageError,
    WriterClosedError,
)
from tests.agent.inside import ask_beside
from tests.agent.lives import agents, alive, begun, kill, run, truth, until
from tests.store.states import every_dtype, same, training_state
from tests.write.trainer import Trainer


def opened(url: Path, **options: Any) -> AgentWriter:
    return ckptstore.agent.writer(url, linger_seconds=options.pop("linger_seconds", 120.0), **options)


def test_every_type_of_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    states = {1: training_state(), 2: every_dtype(), 3: {"empty": {}}, 4: {"x": np.zeros((0, 2)), "y": 1}}
    with opened(tmp_path / "store") as writer:
        infos = [writer.save(state, step) for step, state in states.items()]
    store = ckptstore.open(tmp_path / "store")
    assert [info.ref for info in infos] == ["1@1", "2@1", "3@1", "4@1"]
    assert store.checkpoints() == infos
    for step, state in states.items():
        same(state, store.load(step))
    assert store.verify().ok


@pytest.mark.usefixtures("warm_agents")
def test_without_a_step_the_next_one_is_saved(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        assert writer.save({"x": 1}).step == 1
        assert writer.save({"x": 2}, 5).step == 5
        assert writer.save_async({"x": 3}).result().step == 6
    with opened(tmp_path / "store") as writer:
        assert writer.save({"x": 4}).step == 7
    assert [info.step for info in ckptstore.open(tmp_path / "store").checkpoints()] == [1, 5, 6, 7]


@pytest.mark.usefixtures("warm_agents")
def test_the_state_may_change_as_soon_as_save_async_returns(tmp_path: Path) -> None:
    state = begun()
    with opened(tmp_path / "store", max_in_flight=3) as writer:
        writer.prepare(state)
        for step in range(1, 9):
            state["weights"][:] = step
            writer.save_async(state, step)
            state["weights"][:] = -1
    store = ckptstore.open(tmp_path / "store")
    for step in range(1, 9):
        assert (store.load(step)["weights"] == step).all()


@pytest.mark.usefixtures("warm_agents")
def test_labels_of_a_checkpoint_arrive(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        told: list[bool] = []
        pending = writer.save_async(begun(), 5, metadata={"loss": [0.5, float("inf")]}, tags=["best", "first"])
        pending.when_done(told.append)
        info = pending.result()
        assert (info.metadata, info.tags, told) == ({"loss": [0.5, float("inf")]}, ("best", "first"), [True])
        assert writer.tag("named", 5).tags == ("best", "first", "named")
        writer.untag("first")
        writer.poll()
        writer.wait()
        assert ckptstore.open(tmp_path / "store").checkpoint("tag:named").tags == ("best", "named")
        with pytest.raises(ckptstore.CheckpointNotFoundError):
            writer.untag("first")
        with pytest.raises(UsageError, match="tag name"):
            writer.save_async(begun(), 6, tags="no tag")
        with pytest.raises(UsageError, match="metadata: a function; an agent commits in another process"):
            writer.save_async(begun(), 6, metadata=dict)
        layers = writer.begin(begun(), 6, {})
        with pytest.raises(UsageError, match="metadata: a function"):
            layers.finish(metadata=dict)
        writer.save(begun(), 6)


@pytest.mark.usefixtures("warm_agents")
def test_the_stores_rules_are_kept_to(tmp_path: Path) -> None:
    with opened(tmp_path / "store", keep=["last:2"], poll_seconds=0.05) as writer:
        for step in range(1, 6):
            writer.save({"n": step}, step)
        store = ckptstore.open(tmp_path / "store")
        assert store.rules() == ("last:2",)
        assert [one.step for one in store.checkpoints()] == [4, 5]
        store.keep("last:1")
        kill(writer.agent_pid)
        with pytest.warns(AgentRestartWarning):
            writer.save({"n": 6}, 6)
        assert store.rules() == ("last:1",)
    assert [one.step for one in store.checkpoints()] == [6]
    with pytest.raises(UsageError, match="lest:2"):
        opened(tmp_path / "store", keep=["lest:2"])


def test_the_agent_imports_no_torch(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        writer.save(training_state(), 1)
        assert "libtorch" not in Path(f"/proc/{writer.agent_pid}/maps").read_text()
        assert os.getsid(writer.agent_pid) == writer.agent_pid  # in its own session: no signal to the group reaches it


def test_the_environment_is_the_trainers(tmp_path: Path) -> None:
    with opened(tmp_path / "store"):
        (term,) = ckptstore.open(tmp_path / "store").terms()
    assert "torch" in term.extra["environment"]


@pytest.mark.usefixtures("warm_agents")
def test_steps_ascend_and_a_state_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        writer.save(begun(), 3)
        with pytest.raises(StepOrderError):
            writer.save_async(begun(), 3)
        with pytest.raises(UnsupportedStateError, match="bad"):
            writer.save_async({"bad": object()}, 4)
        writer.save(begun(), 4)


@pytest.mark.usefixtures("warm_agents")
def test_rollback_forks(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        for step in (1, 2, 3):
            writer.save_async(truth(step), step)
        assert writer.rollback(1).ref == "1@1"
        assert (writer.term, writer.parent and writer.parent.ref) == (2, "1@1")
        writer.save(truth(2), 2)
    store = ckptstore.open(tmp_path / "store")
    assert [info.ref for info in store.checkpoints()] == ["1@1", "2@1", "3@1", "2@2"]
    assert store.latest_step() == 2


def train(writer: Any, *, sparse: bool = False, steps: int = 12) -> dict[int, Any]:
    trainer, states = Trainer(), {}
    for step in range(1, steps + 1):
        trainer.train(keep=0.05 if sparse else None)
        writer.save_async(trainer.state(), step, updates=trainer.updates())
        states[step] = trainer.frozen()
    return states


@pytest.mark.usefixtures("warm_agents")
@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_diffs_are_encoded_in_the_agent_as_in_the_trainer(tmp_path: Path, sparse: bool) -> None:
    options = {"diffs": DiffOptions(full_every=6, batch=3, seconds=None), "max_in_flight": 2}
    with opened(tmp_path / "agent", **options) as writer:
        states = train(writer, sparse=sparse)
    with ckptstore.open(tmp_path / "here").writer(**options) as other:  # type: ignore[call-overload]
        train(other, sparse=sparse)
    there, here = ckptstore.open(tmp_path / "agent"), ckptstore.open(tmp_path / "here")
    told = [(info.step, info.kind, info.state, info.stored) for info in there.checkpoints()]
    assert told == [(info.step, info.kind, info.state, info.stored) for info in here.checkpoints()]
    assert [kind for _, kind, _, _ in told].count("gradient") == 10
    for step, state in states.items():
        same(state, there.load(step))


@pytest.mark.usefixtures("warm_agents")
def test_deltas_are_encoded_in_the_agent(tmp_path: Path) -> None:
    with opened(tmp_path / "store", deltas=DeltaOptions(interval=4), max_in_flight=2) as writer:
        states = train_plain(writer)
    store = ckptstore.open(tmp_path / "store")
    with ckptstore.open(tmp_path / "here").writer(deltas=DeltaOptions(interval=4)) as other:
        train_plain(other)
    here = ckptstore.open(tmp_path / "here").checkpoints()
    assert [(info.kind, info.state) for info in store.checkpoints()] == [(info.kind, info.state) for info in here]
    assert "delta" in {info.kind for info in here}
    for step, state in states.items():
        same(state, store.load(step))


def train_plain(writer: Any, steps: int = 8) -> dict[int, Any]:
    for step in range(1, steps + 1):
        writer.save_async(truth(step), step)
    return {step: truth(step) for step in range(1, steps + 1)}


@pytest.mark.usefixtures("warm_agents")
def test_asking_for_a_result_writes_the_batch(tmp_path: Path) -> None:
    with opened(tmp_path / "store", diffs=DiffOptions(batch=50, seconds=None)) as writer:
        trainer = Trainer()
        for step in (1, 2, 3):
            trainer.train()
            pending = writer.save_async(trainer.state(), step, updates=trainer.updates())
        assert pending.result(timeout=60).step == 3
        assert ckptstore.open(tmp_path / "store").latest_step() == 3


@pytest.mark.usefixtures("warm_agents")
def test_updates_without_diffs_are_remarked_once(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        with pytest.warns(ckptstore.UnexplainedStepWarning, match="diffs=DiffOptions"):
            writer.save(begun(), 1, updates=[])
        writer.save(begun(), 2, updates=[])


@pytest.mark.usefixtures("warm_agents")
def test_layers_are_copied_into_the_agents_memory(tmp_path: Path) -> None:
    state = {"a": np.arange(70_000.0), "b": np.arange(9, dtype="i2"), "n": 1}
    with opened(tmp_path / "store") as writer:
        begun_save = writer.begin(state, 1, {"first": ["a"]})
        begun_save.ready("first")
        begun_save.wait("first")
        for call in (writer.wait, lambda: writer.tag("x"), lambda: writer.save(state, 2)):
            with pytest.raises(UsageError, match="step 1 has not ended: finish or abandon it"):
                call()
        state["a"] += 1  # the layer may change
        pending = begun_save.finish({**state, "n": 2})
        state["b"] += 1
        assert pending.result().step == 1
        writer.begin(state, 2, {"first": ["a"]}).abandon()
        writer.save(state, 2)
        with pytest.raises(UsageError, match="direct"):
            writer.begin(state, 3, {}, direct=True)
        for save in (writer.save, writer.save_async):
            with pytest.raises(UsageError, match="replace: step 2: an agent's writer cannot"):
                save(state, 2, replace=True)
    store = ckptstore.open(tmp_path / "store")
    same({"a": np.arange(70_000.0), "b": np.arange(9, dtype="i2"), "n": 2}, store.load(1))
    same(state, store.load(2))


def test_an_ordinary_exit_without_close_writes_what_waits(tmp_path: Path) -> None:
    script = """
writer = ckptstore.agent.writer(url, diffs=ckptstore.DiffOptions(batch=50, seconds=None), linger_seconds=120)
from tests.write.trainer import Trainer
trainer = Trainer()
for step in range(1, 6):
    trainer.train()
    writer.save_async(trainer.state(), step, updates=trainer.updates())
print(writer.agent_pid)
"""
    (pid,) = run(script, tmp_path / "store")
    assert not alive(int(pid))
    assert ckptstore.open(tmp_path / "store").latest_step() == 5


def test_closing_ends_the_agent_and_leaves_nothing(tmp_path: Path, runtime: Path) -> None:
    writer = opened(tmp_path / "store")
    pid = writer.agent_pid
    assert sorted(path.suffix for path in runtime.iterdir()) == [".lock", ".log", ".sock"]
    writer.close()
    writer.close()
    assert not alive(pid)
    assert list(runtime.iterdir()) == []
    with pytest.raises(WriterClosedError):
        writer.save(begun(), 1)


@pytest.mark.usefixtures("warm_agents")
def test_sigterm_to_the_agent_writes_what_waits(tmp_path: Path) -> None:
    writer = opened(tmp_path / "store", diffs=DiffOptions(batch=50, seconds=None), max_in_flight=3)
    trainer = Trainer()
    pending = []
    for step in range(1, 6):
        trainer.train()
        pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
    writer.poll()
    os.kill(writer.agent_pid, signal.SIGTERM)
    assert [one.result().step for one in pending] == [1, 2, 3, 4, 5]
    same(trainer.state(), ckptstore.open(tmp_path / "store").load())
    trainer.train()
    with pytest.warns(AgentRestartWarning, match="term 1 is over, and an agent continues with term 2"):
        writer.save(trainer.state(), 6)
    writer.close()


@pytest.mark.usefixtures("warm_agents")
def test_a_killed_agent_is_noticed_and_another_one_begins_with_a_full(tmp_path: Path) -> None:
    writer = opened(tmp_path / "store", diffs=DiffOptions(batch=50, seconds=None), max_in_flight=3)
    trainer = Trainer()
    pending = []
    for step in range(1, 4):
        trainer.train()
        pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
    assert pending[0].result().step == 1
    kill(writer.agent_pid)
    until(lambda: all(one.done() for one in pending))
    for one in pending[1:]:  # it claims nothing that was not acknowledged
        with pytest.raises(AgentLostError, match=rf"step {one.step} may or may not be in the store"):
            one.result()
    trainer.train()
    with pytest.warns(AgentRestartWarning):
        writer.save(trainer.state(), 4, updates=trainer.updates())
    same(trainer.state(), ckptstore.open(tmp_path / "store").load())
    writer.close()
    assert [(info.ref, info.kind) for info in ckptstore.open(tmp_path / "store").checkpoints()] == [
        ("1@1", "full"),
        ("4@2", "full"),
    ]


@pytest.mark.usefixtures("warm_agents")
def test_an_unreported_loss_is_raised_once(tmp_path: Path) -> None:
    writer = opened(tmp_path / "store", diffs=DiffOptions(batch=50, seconds=None))
    trainer = Trainer()
    for step in (1, 2):
        trainer.train()
        pending = writer.save_async(trainer.state(), step, updates=trainer.updates())
    kill(writer.agent_pid)
    until(pending.done)
    with pytest.raises(AgentLostError, match="step 2"):
        writer.save_async(trainer.state(), 3)
    with pytest.warns(AgentRestartWarning):
        writer.save(trainer.state(), 3)
    writer.close()


@pytest.mark.usefixtures("warm_agents")
def test_a_newer_term_fences_it(tmp_path: Path) -> None:
    writer = opened(tmp_path / "store")
    writer.save(begun(), 1)
    with ckptstore.open(tmp_path / "store").writer() as other:
        other.save(begun(), 2)
    for _ in range(2):
        with pytest.raises(FencedError):
            writer.save(begun(), 3)
    writer.close()
    assert [info.ref for info in ckptstore.open(tmp_path / "store").checkpoints()] == ["1@1", "2@2"]


@pytest.mark.usefixtures("warm_agents")
def test_an_agent_that_died_does_not_fence_the_term_that_came_after(tmp_path: Path) -> None:
    writer = opened(tmp_path / "store")
    writer.save(begun(), 1)
    kill(writer.agent_pid)
    with ckptstore.open(tmp_path / "store").writer() as other:
        other.save(begun(), 2)
        with pytest.raises(FencedError, match="term 1 is over"):
            writer.save(begun(), 3)
        other.save(begun(), 3)
    writer.close()


@pytest.mark.usefixtures("warm_agents")
def test_another_store_in_its_place_gets_nothing(tmp_path: Path) -> None:
    writer = opened(tmp_path / "store")
    writer.save(begun(), 1)
    kill(writer.agent_pid)
    shutil.move(tmp_path / "store", tmp_path / "moved")
    with ckptstore.open(tmp_path / "store").writer() as other:
        other.save(begun(), 7)
    with pytest.raises(StoreReplacedError):
        writer.save(begun(), 2)
    writer.close()
    assert [info.ref for info in ckptstore.open(tmp_path / "store").checkpoints()] == ["7@1"]


@pytest.mark.usefixtures("warm_agents")
def test_a_store_that_was_deleted_fails_its_saves(tmp_path: Path) -> None:
    writer = opened(tmp_path / "store")
    writer.save(begun(), 1)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises((StorageError, ckptstore.NotFoundError)):
        writer.save(begun(), 2)
    writer.close()


def test_a_fork_cannot_use_it_and_does_not_keep_it_alive(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        writer.save(begun(), 1)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's handler needs a running interpreter
                signal.alarm(20)
                for call in (lambda: writer.save(begun(), 2), writer.poll):
                    with pytest.raises(WriterClosedError, match="not to its fork"):
                        call()
                writer.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        writer.save(begun(), 2)
    assert ckptstore.open(tmp_path / "store").latest_step() == 2


@pytest.mark.usefixtures("warm_agents")
def test_a_call_of_when_done_that_would_wait_for_the_agent_is_refused(tmp_path: Path) -> None:
    """It runs in the thread that receives the agent's answers, and would wait for ever."""
    told: list[BaseException] = []
    with opened(tmp_path / "store", max_in_flight=3) as writer:

        def ended(_: bool) -> None:
            if threading.current_thread() is threading.main_thread():
                return  # it was durable already
            beside.append(ask_beside(writer, pending.step))  # as `PendingSave.result` does
            for call in (pending.cancel, lambda: writer.tag("first", 1), writer.poll, writer.wait):
                try:
                    call()
                except UsageError as error:
                    told.append(error)

        beside: list[Any] = []
        for step in range(1, 100):
            pending = writer.save_async(begun(), step)
            pending.when_done(ended)
            assert pending.result(60).step == step
            if beside:
                break
        writer.save_async(begun(), 100).result(60)
        beside[0].result(60)
    assert [str(one).startswith("this call waits for the agent") for one in told] == [True] * 4


@pytest.mark.usefixtures("warm_agents")
def test_a_cancelled_save_is_none(tmp_path: Path) -> None:
    slow = {"big": np.zeros(40 << 20, np.uint8)}
    with opened(tmp_path / "store", max_in_flight=3) as writer:
        first, second = writer.save_async(slow, 1), writer.save_async(slow, 2)
        cancelled = second.cancel()
        assert first.result().step == 1
        if cancelled:  # else it was committed meanwhile
            assert second.cancelled()
        writer.save(slow, 3)
    steps = [info.step for info in ckptstore.open(tmp_path / "store").checkpoints()]
    assert steps == ([1, 3] if cancelled else [1, 2, 3])


@pytest.mark.usefixtures("warm_agents")
def test_metrics_are_the_trainers(tmp_path: Path) -> None:
    told: list[ckptstore.SaveMetrics] = []
    with opened(tmp_path / "store", on_metrics=told.append) as writer:
        writer.save_async(begun(), 1)
        writer.save(begun(), 2)
    assert [(one.step, one.kind, one.error) for one in told] == [(1, "full", None), (2, "full", None)]
    assert all(0 < one.stall <= one.durable or one.stall > 0 for one in told)


def test_options_that_another_process_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="memory"):
        ckptstore.agent.writer("memory://agent")
    with pytest.raises(UsageError, match="linger_seconds"):
        ckptstore.agent.writer(tmp_path / "store", linger_seconds=float("inf"))
    with pytest.raises(UsageError, match="memory: an agent's writer has no such option"):
        ckptstore.agent.writer(tmp_path / "store", memory=1 << 30)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="max_in_flight"):
        ckptstore.agent.writer(tmp_path / "store", max_in_flight=0)
    assert not (tmp_path / "store").exists()


def test_errors_of_opening_come_unchanged_from_the_agent(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "novel.txt").write_text("once")
    with pytest.raises(UsageError, match="not a checkpoint store"):
        opened(tmp_path / "store")
    with pytest.raises(ckptstore.CheckpointNotFoundError):
        opened(tmp_path / "other", parent=17)
    assert agents(runtime) == []


@pytest.mark.usefixtures("warm_agents")
def test_several_threads_may_save(tmp_path: Path) -> None:
    with opened(tmp_path / "store", max_in_flight=2) as writer:
        turn, step = threading.Lock(), [0]

        def work() -> None:
            for _ in range(4):
                with turn:
                    step[0] += 1
                    writer.save_async(begun(), step[0])

        threads = [threading.Thread(target=work) for _ in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert ckptstore.open(tmp_path / "store").latest_step() == 12
