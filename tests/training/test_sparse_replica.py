"""Strategy ``replica`` with a `TopKHook`: only the entries of the gradients leave the trainer (LowDiff, Finding 2)."""

from __future__ import annotations

import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.agent import AgentWriter  # noqa: E402
from ckptstore.agent.client.replica_client import ReplicaClient, ReplicaStep  # noqa: E402
from ckptstore.agent.protocol.replica_recipe import read_entries, write_entries  # noqa: E402
from ckptstore.errors import AgentError  # noqa: E402
from ckptstore.formats.optim import SparseGradient  # noqa: E402
from ckptstore.host.caller_warnings import UnexplainedStepWarning  # noqa: E402
from ckptstore.training import Checkpointer, TopKHook  # noqa: E402
from ckptstore.training.replica import consumed_gradients  # noqa: E402
from tests.agent.lives import own_runtime  # noqa: E402
from tests.warm_agents import start_warm  # noqa: E402
from tools.kills import shim_kills  # noqa: E402
from tools.warm import Warm  # noqa: E402

DENSITY = 0.01


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with own_runtime(tmp_path / "runtime", monkeypatch) as folder:
        start_warm(monkeypatch)
        yield folder


class Script:
    """A model whose gradients are compressed, and clipped after that."""

    def __init__(self, store: Path | None, *, exact: bool = True, **options: Any) -> None:
        chance = torch.Generator().manual_seed(0)  # not torch's own: threads stand for ranks
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 128))
        with torch.no_grad():
            for one in self.model.parameters():
                one.copy_(0.1 * torch.randn(one.shape, generator=chance))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.hook = TopKHook(DENSITY, exact=exact)
        self.checkpointer: Any = None
        if store is not None:
            self.checkpointer = Checkpointer(
                store,
                model=self.model,
                optimizer=self.optimizer,
                compressor=self.hook,
                strategy="replica",
                agent=True,
                linger_seconds=120,
                **options,
            )

    def train(self, step: int, *, added: bool = False, beside: bool = False, uncounted: bool = False) -> Any:
        """Take a step.

        Args:
            added: another gradient is added to one that was compressed, so that its entries are not all of it.
            beside: a value is changed past torch's counters, which no hook sees.
            uncounted: as `added`, past torch's counters and before anything else changes the gradient.
        """
        self.model(torch.randn(16, 256, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        self.hook.compress(self.model.parameters())
        if uncounted:
            for one in self.model.parameters():
                one.grad.data.add_(one.data, alpha=1e-4)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        if added:
            self.model[0].weight.grad.add_(1e-4)
        if beside:
            self.model[2].weight.data[0, 0] += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None if self.checkpointer is None else self.checkpointer.step()

    def digest(self) -> str:
        kept = self.hook.state_dict().get("residuals", {})  # by names, which `named` gives
        return shim_kills.digest([self.model.state_dict(), self.optimizer.state_dict(), [*kept.values()]])

    def check_stored(self, path: Path) -> None:
        """Compare the newest checkpoint with the model and the optimizer, bit for bit."""
        found = ckptstore.open(path).load()
        assert shim_kills.digest([found["model"], found["optimizer"]]) == shim_kills.digest(
            [self.model.state_dict(), self.optimizer.state_dict()]
        )


def uninterrupted(steps: int, *, exact: bool = True) -> str:
    script = Script(None, exact=exact)
    script.hook.named(script.model.named_parameters())
    for step in range(steps):
        script.train(step)
    return script.digest()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int]]:
    """(step, how, bytes) of everything that left the trainer: a whole state, or what a step was made of."""
    found: list[tuple[int, str, int]] = []
    save, advance = AgentWriter.save_async, ReplicaClient.advance

    def saved(self: AgentWriter, state: Any, step: int, **named: Any) -> Any:
        found.append((step, "whole", state.nbytes))
        return save(self, state, step, **named)

    def advanced(self: ReplicaClient, area: Any, told: ReplicaStep) -> Any:
        recipe = self.recipe
        counts = {row: count for call in told.calls for row, count in call[4]}
        weights = {row: recipe.layout.tensors[recipe.rows[row].weight].nbytes for row in recipe.gradients}
        nbytes = sum(8 * counts[row] if row in counts else nbytes for row, nbytes in weights.items())
        nbytes += sum(recipe.layout.tensors[number].nbytes for number in recipe.sent) + 8 * recipe.digests[1]
        found.append((told.step, "dense" if weights.keys() - counts.keys() else "sparse", nbytes))
        return advance(self, area, told)

    monkeypatch.setattr(AgentWriter, "save_async", saved)
    monkeypatch.setattr(ReplicaClient, "advance", advanced)
    return found


@pytest.mark.filterwarnings("ignore:.*TopKHook.exact=False")
def test_only_entries_leave_the_trainer_and_every_step_is_stored_bit_for_bit(
    tmp_path: Path, given: list[tuple[int, str, int]]
) -> None:
    script = Script(tmp_path / "run", exact=False)
    digests = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        with script.checkpointer:
            script.checkpointer.resume()
            for step in range(6):
                script.train(step)
                script.checkpointer.wait()
                digests[step + 1] = shim_kills.digest([script.model.state_dict(), script.optimizer.state_dict()])
    assert script.digest() == uninterrupted(6, exact=False)
    whole = given[0][2]
    assert [(step, how) for step, how, _ in given] == [(1, "whole")] + [(step, "sparse") for step in range(2, 7)]
    # Tensors below 16 KiB are sent whole; at a real model's size they are nothing.
    small = sum(one.nbytes for one in script.model.parameters() if one.nbytes < 16 << 10) * 3
    assert all(nbytes - small <= 0.03 * whole for _, how, nbytes in given if how == "sparse")
    store = ckptstore.open(tmp_path / "run")
    for step, digest in digests.items():
        found = store.load(step)
        assert shim_kills.digest([found["model"], found["optimizer"]]) == digest
    sizes = {info.step: info.stored for info in store.checkpoints()}
    assert max(sizes[step] for step in range(2, 7)) < 0.05 * sizes[1], "the step diffs do not replay the entries"


def test_the_residuals_are_part_of_the_state_and_a_killed_run_continues_bit_for_bit(tmp_path: Path, warm: Warm) -> None:
    code = """
import os, signal, sys
from tests.training.test_sparse_replica import Script
script = Script(sys.argv[1])
script.checkpointer.resume()
for step in range(5):
    script.train(step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = warm.run([sys.executable, "-c", code, str(tmp_path / "run")], timeout=180)
    assert done.returncode == -signal.SIGKILL, done.stderr
    script = Script(tmp_path / "run")
    with script.checkpointer:
        start = script.checkpointer.resume()
        assert start >= 4, "more than the step in flight is lost"
        for step in range(start, 7):
            script.train(step)
    assert script.digest() == uninterrupted(7)


def test_a_gradient_with_other_entries_is_sent_dense(tmp_path: Path, given: list[tuple[int, str, int]]) -> None:
    script = Script(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        with script.checkpointer:
            script.checkpointer.resume()
            for step in range(4):
                script.train(step, added=step > 1)
    assert [how for _, how, _ in given] == ["whole", "sparse", "dense", "dense"]
    script.check_stored(tmp_path / "run")


def test_gradients_changed_past_torchs_count_are_sent_dense_after_the_first_wrong_step(
    tmp_path: Path, given: list[tuple[int, str, int]]
) -> None:
    script = Script(tmp_path / "run")

    def work() -> None:
        with script.checkpointer:
            script.checkpointer.resume()
            for step in range(6):
                script.train(step, uncounted=True)
                script.checkpointer.wait()

    with pytest.warns(UnexplainedStepWarning, match=r"weight"):
        work()
    # Step 2 is computed wrongly, and `wait` hands it over again.
    assert [how for _, how, _ in given] == ["whole", "sparse", "whole", "dense", "dense", "dense", "dense"]
    script.check_stored(tmp_path / "run")


def test_a_value_that_no_hook_saw_change_is_never_stored_wrongly(
    tmp_path: Path, given: list[tuple[int, str, int]]
) -> None:
    """The digests differ: the step is dropped with a warning, and the next is sent whole."""
    script = Script(tmp_path / "run")

    def work() -> None:
        with script.checkpointer:
            script.checkpointer.resume()
            for step in range(5):
                script.train(step, beside=step == 2)
                if step == 2:
                    script.checkpointer.wait()

    with pytest.warns(UnexplainedStepWarning, match=r"2\.weight"):
        work()
    assert [how for _, how, _ in given][:3] == ["whole", "sparse", "sparse"]
    assert "whole" in {how for step, how, _ in given if step > 2}
    store = ckptstore.open(tmp_path / "run")
    assert store.latest_step() == 5
    script.check_stored(tmp_path / "run")


@pytest.mark.filterwarnings("ignore::ckptstore.training.UnsavedStepWarning")
@pytest.mark.filterwarnings("ignore:.*TopKHook.exact=False")
def test_after_a_mismatch_only_the_tensors_concerned_are_sent_once_and_counted(
    tmp_path: Path, given: list[tuple[int, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: dict[int, set[str]] = {}
    counted: list[tuple[int, ...]] = []
    advance, judged = ReplicaClient.advance, consumed_gradients.is_all_of

    def advanced(self: ReplicaClient, area: Any, told: ReplicaStep) -> Any:
        if told.whole:
            tensors = self.recipe.layout.tensors
            whole[told.step] = {tensors[number].name for one in told.whole for number in one.starts}
        return advance(self, area, told)

    def counts(sparse: SparseGradient, gradient: Any) -> bool:
        counted.append(tuple(gradient.shape))
        return judged(sparse, gradient)

    monkeypatch.setattr(ReplicaClient, "advance", advanced)
    monkeypatch.setattr(consumed_gradients, "is_all_of", counts)
    script = Script(tmp_path / "run", exact=False)

    def work() -> None:
        with script.checkpointer:
            script.checkpointer.resume()
            step = 0
            while not whole and step < 500:  # the agent's answer comes some steps later
                script.train(step, beside=step == 2)
                step += 1
            for more in range(3):
                script.train(step + more)

    with pytest.warns(UnexplainedStepWarning, match=r"2\.weight") as told:
        work()
    assert len([one for one in told if issubclass(one.category, UnexplainedStepWarning)]) == 1
    assert [how for _, how, _ in given if how == "whole"] == ["whole"], "the first state"
    assert list(whole.values()) == [{"model.2.weight", "optimizer.state.2.exp_avg", "optimizer.state.2.exp_avg_sq"}]
    assert set(counted) == {(128, 256)}, "the gradients of other parameters are not counted"
    script.check_stored(tmp_path / "run")


def _place(numbers: int) -> Any:
    return np.full(4 * numbers, 0xAA, np.uint8)


def test_entries_are_read_as_they_were_written() -> None:
    values = np.array([1.5, -0.0, np.nan], np.float32)
    place = _place(20)
    assert write_entries(SparseGradient(np.array([0, 7, 19]), values, 20), place)
    found = read_entries(place, 3)
    assert found.indices.tolist() == [0, 7, 19]
    assert found.values.tobytes() == values.tobytes()
    dense = np.zeros(20, np.float32)
    dense[[0, 7, 19]] = values
    assert place.tobytes() == dense.tobytes()
    assert write_entries(SparseGradient(np.arange(10), np.ones(10, np.float32), 20), place)
    assert not write_entries(SparseGradient(np.arange(11), np.ones(11, np.float32), 20), place), "11 need 88 bytes"


@pytest.mark.parametrize(
    ("indices", "count"),
    [([3, 3], 2), ([5, 4], 2), ([-1, 4], 2), ([4, 20], 2), ([0, 1], 11)],
    ids=["repeated", "descending", "negative", "outside", "too many"],
)
def test_entries_that_are_none_of_the_gradient_are_refused(indices: list[int], count: int) -> None:
    place = _place(20)
    place[: 4 * len(indices)].view(np.int32)[:] = indices
    before = place.tobytes()
    with pytest.raises(AgentError):
        read_entries(place, count)
    assert place.tobytes() == before
