"""Strategy ``replica``: the agent repeats the optimizers' steps, and digests prove it; a mismatch costs only a full."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.agent import AgentRestartWarning, AgentWriter  # noqa: E402
from ckptstore.agent.client.replica_client import ReplicaClient  # noqa: E402
from ckptstore.agent.protocol.replica_recipe import Proof  # noqa: E402
from ckptstore.errors import UsageError, WriterClosedError  # noqa: E402
from ckptstore.formats import digest  # noqa: E402
from ckptstore.host.batched_copies import BatchedCopies  # noqa: E402
from ckptstore.host.caller_warnings import UnexplainedStepWarning  # noqa: E402
from ckptstore.host.threads import workers  # noqa: E402
from ckptstore.training import Checkpointer, UnsavedStepWarning  # noqa: E402
from ckptstore.training.replica import consumed_gradients  # noqa: E402
from tests.agent.lives import kill  # noqa: E402
from tests.forms import long_only  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.training.inside import copied_during_backward, hooks_of  # noqa: E402
from tests.training.unknown_optimizer import UnknownOptimizer  # noqa: E402
from tests.warm_agents import start_warm  # noqa: E402
from tools.kills import shim_kills  # noqa: E402
from tools.warm import Warm  # noqa: E402


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))
    start_warm(monkeypatch)


class Script:
    """Three optimizers, of which one is fused and scaled, one clips, accumulation, buffers, a frozen layer."""

    def __init__(self, store: Path | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.first = torch.nn.Sequential(torch.nn.Linear(64, 257), torch.nn.BatchNorm1d(257), torch.nn.ReLU())
        self.second = torch.nn.Sequential(torch.nn.Linear(257, 128), torch.nn.Dropout(0.1), torch.nn.Linear(128, 128))
        self.third = torch.nn.Linear(128, 64)
        self.second[2].requires_grad_(False)
        self.model = torch.nn.Sequential(self.first, self.second, self.third)
        self.optimizers = [
            torch.optim.AdamW(self.first.parameters(), lr=1e-2),
            torch.optim.SGD([one for one in self.second.parameters() if one.requires_grad], 1e-2, 0.9, nesterov=True),
            torch.optim.Adam(self.third.parameters(), lr=1e-2, amsgrad=True, weight_decay=1e-2, fused=True),
        ]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.checkpointer: Any = None
        if store is not None:
            self.checkpointer = Checkpointer(
                store,
                model=self.model,
                optimizer=self.optimizers,
                scheduler=self.scheduler,
                scaler=self.scaler,
                strategy="replica",
                agent=True,
                linger_seconds=120,
                **options,
            )

    def train(self, step: int, *, beside: bool = False) -> Any:
        for part in range(2):
            loss = self.model(torch.randn(16, 64)).square().mean()
            if step == 3 and part:
                loss = loss * float("inf")  # the scaler skips this step
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizers[0])
        torch.nn.utils.clip_grad_norm_(self.first.parameters(), 0.1)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if beside:
            with torch.no_grad():
                self.first[0].weight.clamp_(-0.1, 0.1)
        return None if self.checkpointer is None else self.checkpointer.step(metrics={"loss": loss})

    def digest(self) -> str:
        parts = [self.model.state_dict(), *(one.state_dict() for one in self.optimizers), self.scheduler.state_dict()]
        return shim_kills.digest([*parts, self.scaler.state_dict(), torch.get_rng_state()])


def uninterrupted(steps: int, *, beside: bool = False) -> str:
    script = Script(None)
    for step in range(steps):
        script.train(step, beside=beside)
    return script.digest()


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose whole state was handed over."""
    found: list[int] = []
    save = AgentWriter.save_async

    def spy(self: AgentWriter, state: Any, step: int, **named: Any) -> Any:
        found.append(step)
        return save(self, state, step, **named)

    monkeypatch.setattr(AgentWriter, "save_async", spy)
    return found


def test_the_agent_makes_every_step_but_the_first(tmp_path: Path, wholes: list[int]) -> None:
    script = Script(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        with script.checkpointer:
            for step in range(script.checkpointer.resume(), 7):
                script.train(step)
                if step != 4:
                    script.checkpointer.wait()
            assert wholes == [1], "a whole state was handed over"
    assert script.digest() == uninterrupted(7)
    store = ckptstore.open(tmp_path / "run")
    assert [info.step for info in store.checkpoints()][-1] == 7
    assert {1, 2, 3, 4, 7} <= {info.step for info in store.checkpoints()}
    assert math.isinf(store.checkpoint(4).metadata["metrics"]["loss"])
    again = Script(tmp_path / "run")
    with again.checkpointer:
        assert again.checkpointer.resume(4) == 4
        again.checkpointer.close()
    script = Script(None)
    for step in range(4):
        script.train(step)
    assert again.digest() == script.digest()


TRAINER = """
import os, signal, sys
from tests.training.test_checkpointer_replica import Script
script = Script(sys.argv[1])
print("from", script.checkpointer.resume(), flush=True)
for step in range(6):
    script.train(step)
print("agent", script.checkpointer.agent_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("victims", ["trainer", pytest.param("both", marks=long_only)])
def test_a_run_whose_trainer_is_killed_continues_bit_for_bit(
    tmp_path: Path, victims: str, wholes: list[int], warm: Warm
) -> None:
    arguments = [sys.executable, "-c", TRAINER, str(tmp_path / "run")]
    done = warm.run(arguments, timeout=180)
    assert done.returncode == -signal.SIGKILL, done.stderr
    told = dict(line.split() for line in done.stdout.splitlines())
    if victims == "both":
        kill(int(told["agent"]))
    script = Script(tmp_path / "run")
    with script.checkpointer:
        start = script.checkpointer.resume()
        if victims == "trainer":
            assert start >= 5, "more than the step in flight is lost"  # a message may be in flight when step() returns
            assert script.checkpointer.agent_pid == int(told["agent"])
        for step in range(start, 8):
            script.train(step)
    assert wholes == [start + 1]
    assert script.digest() == uninterrupted(8)
    assert ckptstore.open(tmp_path / "run").latest_step() == 8


def test_unpredicted_tensors_are_handed_over_whole_then_sent(tmp_path: Path, wholes: list[int]) -> None:
    script = Script(tmp_path / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with script.checkpointer:
            script.checkpointer.resume()
            for step in range(9):
                script.train(step, beside=True)
                script.checkpointer.wait()
                newest = ckptstore.open(tmp_path / "run").load()
                assert shim_kills.digest(newest["model"]) == shim_kills.digest(script.model.state_dict())
    remarks = [str(one.message) for one in caught if "replica:" in str(one.message)]
    assert len(remarks) == 1
    assert "other values than training for model.0.0.weight" in remarks[0]
    assert max(wholes) < 7, "a tensor that was wrong twice is not sent"
    assert script.digest() == uninterrupted(9, beside=True)


def test_steps_that_are_not_due_are_in_memory_and_an_agent_that_dies_is_replaced(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", save_every=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with script.checkpointer:
            script.checkpointer.resume()
            given = [script.train(step) for step in range(5)]
            assert [one is not None for one in given] == [True, False, True, False, False]  # the first is whole
            assert given[2].result().step == 3
            kill(script.checkpointer.agent_pid)
            for step in range(5, 8):
                script.train(step)
    assert AgentRestartWarning in {one.category for one in caught}
    assert script.digest() == uninterrupted(8)
    store = ckptstore.open(tmp_path / "run")
    assert store.latest_step() == 8
    assert shim_kills.digest(store.load()["model"]) == shim_kills.digest(script.model.state_dict())


@pytest.mark.parametrize("settled", [False, True])
def test_a_run_may_end_with_a_step_that_was_given_whole_before_it_was_due(tmp_path: Path, settled: bool) -> None:
    script = Script(tmp_path / "run", save_every=3)
    with script.checkpointer:
        script.checkpointer.resume()
        pending = script.train(0)
        assert pending is not None, "the first state is handed over whole, although it is not due"
        if settled:
            script.checkpointer.wait()
    assert pending.result().step == 1
    assert ckptstore.open(tmp_path / "run").latest_step() == 1
    assert len(ckptstore.open(tmp_path / "run").checkpoints()) == 1


def test_going_back_begins_with_a_whole_state(tmp_path: Path, wholes: list[int]) -> None:
    script = Script(tmp_path / "run")
    with script.checkpointer:
        script.checkpointer.resume()
        for step in range(3):
            script.train(step)
            script.checkpointer.wait()
        assert script.checkpointer.rollback(2) == 2
        for step in range(2, 5):
            script.train(step)
        script.checkpointer.wait()
    assert wholes == [1, 3]
    assert script.digest() == uninterrupted(5)
    assert ckptstore.open(tmp_path / "run").checkpoints()[-1].ref == "5@2"


def test_a_step_whose_gradients_could_not_be_taken_is_handed_over_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wholes: list[int]
) -> None:
    """An error in a hook must not end training. Without the gradients the agent would compute another state."""
    area, failing = ReplicaClient.area, [True]

    def broken(self: ReplicaClient, *, wait: bool) -> Any:
        if step == 2 and failing:
            failing.clear()
            raise RuntimeError("no gradient")
        return area(self, wait=wait)

    monkeypatch.setattr(ReplicaClient, "area", broken)
    script = Script(tmp_path / "run")
    with script.checkpointer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script.checkpointer.resume()
        for step in range(4):
            script.train(step)
            script.checkpointer.wait()
    assert ["RuntimeError: no gradient: such a step is handed over" in str(one.message) for one in caught] == [True]
    assert wholes == [1, 3]
    assert [info.step for info in ckptstore.open(tmp_path / "run").checkpoints()] == [1, 2, 3, 4]
    assert script.digest() == uninterrupted(4)


def test_a_first_step_that_could_not_be_handed_over_is_saved_by_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no replica yet that could have ended with the step."""

    def full(*_: Any, **_named: Any) -> Any:
        raise MemoryError("no room")

    script = Script(tmp_path / "run")
    with script.checkpointer:
        script.checkpointer.resume()
        with monkeypatch.context() as patch:
            patch.setattr(AgentWriter, "save_async", full)
            with pytest.raises(MemoryError):
                script.train(0)
        script.checkpointer.wait()
        assert ckptstore.open(tmp_path / "run").latest_step() == 1


class Lookahead(torch.optim.SGD):
    """Another arithmetic under a known class."""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "agent=True"),
        ({"agent": True, "batch": 4}, "written in batches"),
        ({"agent": True, "optimizer": None}, "no optimizer"),
        ({"agent": True, "optimizer": lambda own: Lookahead(own, 0.1)}, "arithmetic of .*Lookahead is not known"),
        ({"agent": True, "optimizer": UnknownOptimizer}, "strategy='gradient' or 'delta'"),
        ({"agent": True, "optimizer": lambda own: torch.optim.AdamW(own, lr=torch.tensor(0.1))}, "lr is a Tensor"),
    ],
)
def test_an_unsupported_script_is_refused_with_the_remedy(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    model = torch.nn.Linear(4, 4)
    made = {"optimizer": lambda own: torch.optim.SGD(own, 0.1)} | options
    optimizer = None if made["optimizer"] is None else made["optimizer"](model.parameters())
    with pytest.raises(UsageError, match=reason):
        Checkpointer(tmp_path, model=model, strategy="replica", **made | {"optimizer": optimizer}).resume()
    assert not list(tmp_path.iterdir())


def test_one_bit_is_found_in_the_tensor_that_has_it() -> None:
    images = [np.zeros(nbytes, np.uint8) for nbytes in (0, 5, 9 << 20, 1)]
    proof = Proof(images)
    wanted = np.zeros(len(proof), np.uint64)
    with workers(2, "test") as some:
        proof.into(wanted, some.pool)
        assert proof.differs(wanted, some.pool) == []
        images[2][(5 << 20) + 3] ^= 1
        images[3][0] ^= 128
        assert proof.differs(wanted, some.pool) == [2, 3]


def test_a_tensor_may_have_one_digest_which_a_device_computes() -> None:
    images = [np.zeros(nbytes, np.uint8) for nbytes in (5, 9 << 20, 1, 0)]
    proof = Proof(images, summed={1, 3})
    assert proof.slots == [0, 1, 2, 3]
    wanted = np.zeros(len(proof), np.uint64)
    with workers(2, "test") as some:
        proof.into(wanted, some.pool)
        assert [int(wanted[1]), int(wanted[3])] == [digest.digest(images[1]), digest.digest(images[3])]
        elsewhere = np.full(len(proof), 7, np.uint64)
        Proof([images[0], None, images[2], images[3]], summed={1, 3}).into(elsewhere, some.pool)
        assert [int(one) for one in elsewhere] == [int(wanted[0]), 7, int(wanted[2]), int(wanted[3])]
        images[1][(5 << 20) + 3] ^= 1
        assert proof.differs(wanted, some.pool) == [1]


def test_gradients_are_sent_during_backward_until_that_is_useless(tmp_path: Path, wholes: list[int]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    options: dict[str, Any] = {"strategy": "replica", "agent": True, "linger_seconds": 120}
    early = []
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, **options) as checkpointer:
        for step in range(9):
            for _ in range(2):
                model(torch.randn(16, 128)).square().mean().backward()
            early.append(copied_during_backward(checkpointer) if step else 0)
            if step > 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            checkpointer.wait()
    assert early == [0, 1, 1, 1, 1, 1, 1, 0, 0], "the bias is small, and three steps were clipped"
    assert not hooks_of(model.weight)
    assert wholes == [1]
    found = ckptstore.open(tmp_path / "run").load()
    assert shim_kills.digest([found["model"]]) == shim_kills.digest([model.state_dict()])
    assert shim_kills.digest([found["optimizer"]]) == shim_kills.digest([optimizer.state_dict()])


@pytest.mark.parametrize("words", [5000, 20000], ids=["below what is copied during backward", "above"])
def test_a_parameter_that_grows_is_handed_over_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wholes: list[int], words: int
) -> None:
    """Its gradient does not fit: copied there, it would overwrite the memory behind it."""
    beyond: list[int] = []
    room = 4 * words

    class Gathered(BatchedCopies):
        def __init__(self, copies: Sequence[tuple[int, int, int]]) -> None:
            beyond.extend(nbytes for _, _, nbytes in copies if nbytes > room)
            # So that a failure is reported, instead of a crash.
            super().__init__([one for one in copies if one[2] <= room])

    monkeypatch.setattr(consumed_gradients, "BatchedCopies", Gathered)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(words)) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Checkpointer(
            tmp_path / "run", model=model, optimizer=optimizer, strategy="replica", agent=True, linger_seconds=120
        ) as checkpointer,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UnexplainedStepWarning)
        checkpointer.resume()
        for step in range(5):
            if step == 3:
                model[0].data = torch.randn(2 * words)
                model[0].grad = None
            sum(one.square().sum() for one in model).backward()
            optimizer.step()
            assert not beyond
            if step == 3:
                room = 8 * words  # from the next step on
            optimizer.zero_grad()
            checkpointer.step()
            checkpointer.wait()
    assert wholes == [1, 4]
    same(ckptstore.open(tmp_path / "run").load("latest")["model"], model.state_dict())


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    with script.checkpointer:
        script.train(0)
        assert script.optimizers[0]._optimizer_step_pre_hooks
    for optimizer in script.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    assert not list((tmp_path / "runtime").iterdir())


EXITS = """
import sys
import torch
from ckptstore.training import Checkpointer
torch.manual_seed(0)
model = torch.nn.Linear(128, 256)
optimizer = torch.optim.SGD(model.parameters(), 1e-2, 0.9)
options = {"strategy": "replica", "agent": True, "max_in_flight": 1}
checkpointer = Checkpointer(sys.argv[1], model=model, optimizer=optimizer, **options)
for step in range(5):
    model(torch.randn(16, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step()
print(model.weight.sum().item().hex())
"""


def test_at_an_ordinary_exit_the_newest_step_is_written(tmp_path: Path, warm: Warm) -> None:
    arguments = [sys.executable, "-c", EXITS, str(tmp_path / "run")]
    done = warm.run(arguments, timeout=180, teardown=True)
    assert done.returncode == 0, done.stderr
    store = ckptstore.open(tmp_path / "run")
    assert store.latest_step() == 5
    assert store.load()["model"]["weight"].sum().item().hex() == done.stdout.strip()


class Small(torch.nn.Module):  # type: ignore[misc]
    """One layer that the agent computes, and buffers that torch conjugates and negates lazily."""

    optimizer: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(128, 128)
        self.register_buffer("conjugated", torch.randn(4, dtype=torch.cfloat).conj())
        self.register_buffer("negated", torch.randn(4, dtype=torch.cfloat).conj().imag)

    def forward(self, x: Any) -> Any:
        return self.layer(x).square().mean()


def small(
    store: Path, steps: int, each: Any, *, made: type[Small] = Small, **options: Any
) -> tuple[Checkpointer, Small]:
    """Train it; `each` is called with the Checkpointer, the model, and the step, in place of a bare `step`."""
    model = made()
    model.optimizer = optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept = Checkpointer(
        store, model=model, optimizer=optimizer, strategy="replica", agent=True, linger_seconds=0, **options
    )
    kept.resume()
    for step in range(1, steps + 1):
        model(torch.randn(2, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()
        each(kept, model, step)
    return kept, model


def test_lazily_conjugated_and_negated_buffers_are_stored_as_they_are(tmp_path: Path, wholes: list[int]) -> None:
    def each(kept: Checkpointer, _model: Small, _step: int) -> None:
        kept.step()
        kept.wait()

    kept, model = small(tmp_path / "run", 3, each)
    kept.close()
    assert wholes == [1]
    stored = ckptstore.open(tmp_path / "run").load(3, framework="torch")["model"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored[name], tensor), name


def test_due_steps_are_written_even_where_the_arithmetic_fails(tmp_path: Path) -> None:
    """A weight is changed outside the optimizer in the very step that gets a tag: that state could not be computed
    again."""

    def each(kept: Checkpointer, model: Small, step: int) -> None:
        if step in (3, 5):
            with torch.no_grad():
                model.layer.weight.mul_(0.5)
            kept.step(tags=f"t{step}", save=True)
        else:
            kept.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnexplainedStepWarning)
        kept, _ = small(tmp_path / "run", 6, each, save_every=50)
        kept.close()
    assert {"t3", "t5"} <= set(ckptstore.open(tmp_path / "run").tags())


def test_closing_writes_what_is_in_memory_alone(tmp_path: Path) -> None:
    """As at the ordinary end of a script without a `with`."""
    kept, _ = small(tmp_path / "run", 7, lambda kept, _model, _step: kept.step(), save_every=50)
    kept.close()
    assert ckptstore.open(tmp_path / "run").latest_step() == 7


def test_the_last_step_of_a_script_without_a_with_is_written_too(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "script.py"
    script.write_text(_WITHOUT)
    run = warm.start([sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    _, said = run.communicate(timeout=120)
    assert (run.returncode, said) == (0, "")
    assert ckptstore.open(tmp_path / "run").latest_step() == 7  # the agent had it only in memory


_WITHOUT = """
import torch
from ckptstore.training import Checkpointer

model = torch.nn.Linear(128, 64)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = Checkpointer(
    "run", model=model, optimizer=optimizer, strategy="replica", agent=True, linger_seconds=0, save_every=50
)
checkpointer.resume()
for _ in range(7):
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step()
"""


@long_only  # two agents, one after the other
def test_an_agent_that_gets_sigterm_writes_steps_that_are_only_in_memory(tmp_path: Path) -> None:
    kept, _ = small(tmp_path / "run", 7, lambda kept, _model, _step: kept.step(), save_every=50)
    pid = kept.agent_pid
    assert pid is not None
    kill(pid, signal.SIGTERM)
    newest = ckptstore.open(tmp_path / "run").latest_step()
    assert newest is not None
    assert newest > 1, "the first was handed over whole, and is the only one that was due"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AgentRestartWarning)
        warnings.simplefilter("ignore", UnsavedStepWarning)
        kept.close()
    assert ckptstore.open(tmp_path / "run").latest_step() == 7


def followed(
    monkeypatch: pytest.MonkeyPatch, hears: Callable[[int], bool] = lambda _: True
) -> tuple[dict[int, set[str]], dict[int, set[str]]]:
    """Names of the tensors that each step sends whole once, and of those that the agent computes.

    Args:
        hears: whether the trainer has the answers before it sends a step. False: they are still under way.
    """
    once: dict[int, set[str]] = {}
    computed: dict[int, set[str]] = {}
    advance, mismatches = ReplicaClient.advance, ReplicaClient.mismatches
    sending = [1]

    def spy(self: ReplicaClient, area: Any, told: Any) -> Any:
        tensors = self.recipe.layout.tensors
        computed[told.step] = {tensors[number].name for number in self.recipe.made}
        if told.whole:
            once[told.step] = {tensors[number].name for one in told.whole for number in one.starts}
        return advance(self, area, told)

    def heard(self: ReplicaClient) -> Any:
        sending[0] += 1
        return mismatches(self) if hears(sending[0]) else []

    monkeypatch.setattr(ReplicaClient, "advance", spy)
    monkeypatch.setattr(ReplicaClient, "mismatches", heard)
    return once, computed


@pytest.mark.parametrize("late", [False, True], ids=["heard at once", "two steps later"])
def test_after_a_mismatch_only_the_tensors_concerned_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wholes: list[int], late: bool
) -> None:
    once, computed = followed(monkeypatch, lambda step: not late or step % 5 == 1)
    digests: dict[int, str] = {}

    class Two(Small):
        """Another layer, which stays proven."""

        def __init__(self) -> None:
            super().__init__()
            self.conjugated = self.negated = torch.zeros(())
            self.other = torch.nn.Linear(128, 128)

        def forward(self, x: Any) -> Any:
            return self.other(self.layer(x)).square().mean()

    def each(kept: Checkpointer, model: Small, step: int) -> None:
        if step in (3, 8):
            with torch.no_grad():
                model.layer.weight.mul_(0.5)
        pending = kept.step()
        if pending is not None:
            pending.exception()
        digests[step] = shim_kills.digest([model.state_dict(), model.optimizer.state_dict()])

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kept, _ = small(tmp_path / "run", 13, each, made=Two)
        kept.close()
    lost = {3, 4, 5, 8, 9, 10} if late else {3, 8}
    after = (6, 11) if late else (4, 9)
    row = {"model.layer.weight", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq"}
    assert wholes == [1]
    assert once == dict.fromkeys(after, row)
    for step, names in computed.items():
        assert row <= names if step <= after[1] else row.isdisjoint(names), "it was wrong twice: it is sent"
        assert "model.other.weight" in names
    store = ckptstore.open(tmp_path / "run")
    assert [info.step for info in store.checkpoints()] == [step for step in range(1, 14) if step not in lost]
    for info in store.checkpoints():
        found = store.load(info.step, framework="torch")
        assert shim_kills.digest([found["model"], found["optimizer"]]) == digests[info.step]
    unsaved = [str(one.message) for one in told if issubclass(one.category, UnsavedStepWarning)]
    assert {int(word) for one in unsaved for word in one.rpartition(": ")[2].split(",")} == lost
    (remark,) = (str(one.message) for one in told if issubclass(one.category, UnexplainedStepWarning))
    assert "other values than training for model.layer.weight" in remark
    assert "sent whole with the next step, and the agent computes the others" in remark


def test_a_due_step_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """Also the last one, if an error ends the script after the optimizers have stepped once more."""

    def each(kept: Checkpointer, model: Small, step: int) -> None:
        if step in (3, 5):
            with torch.no_grad():
                model.layer.weight.mul_(0.5)
        if step < 6:
            kept.step()
        if step not in (3, 5):
            kept.wait()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kept, _ = small(tmp_path / "run", 6, each)
        kept.close()
    unsaved = [str(one.message) for one in told if issubclass(one.category, UnsavedStepWarning)]
    assert [one.rpartition(": ")[2] for one in unsaved] == ["3", "5"]
    assert all("not saved, because the agent could not make their states" in one for one in unsaved)
    assert [info.step for info in ckptstore.open(tmp_path / "run").checkpoints()] == [1, 2, 4]


def test_a_step_after_a_call_that_raised_is_not_taken_for_two(tmp_path: Path, wholes: list[int]) -> None:
    """The call was made, so there is no warning of two steps; a whole state replaces its message to the agent."""

    def each(kept: Checkpointer, _model: Small, step: int) -> None:
        if step == 3:
            with pytest.raises(UsageError):
                kept.step(metrics={"loss": object()})
        else:
            kept.step()
        kept.wait()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        kept, model = small(tmp_path / "run", 6, each, on_error="raise")
        kept.close()
    assert wholes == [1, 4]
    stored = ckptstore.open(tmp_path / "run").load(6, framework="torch")["model"]
    assert torch.equal(stored["layer.weight"], model.layer.weight)


def test_a_fork_is_refused_and_touches_nothing(tmp_path: Path, wholes: list[int]) -> None:
    """Also a step that need not be written: the areas for gradients are the parent's."""

    def each(kept: Checkpointer, model: Small, step: int) -> None:
        kept.step()
        kept.wait()
        if step == 3:
            victim = os.fork()
            if not victim:
                status = 1
                try:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's handler needs a running interpreter
                    signal.alarm(120)
                    torch.set_num_threads(1)  # torch's pool of threads is not in a fork
                    status = 2 * refused_in_a_fork(kept, model)
                finally:
                    os._exit(status)
            _, status = os.waitpid(victim, 0)
            assert os.waitstatus_to_exitcode(status) == 0

    kept, model = small(tmp_path / "run", 6, each, on_error="raise")
    kept.close()
    assert wholes == [1]
    stored = ckptstore.open(tmp_path / "run").load(6, framework="torch")["model"]
    assert torch.equal(stored["layer.weight"], model.layer.weight)


def refused_in_a_fork(kept: Checkpointer, model: Small) -> int:
    """The number of steps that are not refused."""
    taken = 0
    for options in ({"save": False}, {}, {"save": True}, {"tags": "mine"}):
        with torch.no_grad():
            for one in model.parameters():
                one.grad = torch.ones_like(one)
        model.optimizer.step()
        try:
            kept.step(**options)
            taken += 1
        except WriterClosedError as error:
            taken += "not to its fork" not in str(error)
    return taken
