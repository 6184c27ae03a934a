"""Whole terms of step diffs, counted in bits a parameter: no step after a full costs more than an explained one."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.training import Checkpointer, OptimizerStep  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group  # noqa: E402
from ckptstore.write.steps import resident_step  # noqa: E402
from tests.write.rank_threads import as_ranks  # noqa: E402

EXPLAINED = 34.0
"""Bits a parameter, generators, headers and trees of so small a model included; a difference takes 40 to 75."""
WIDTH = 192
pytestmark = [
    pytest.mark.filterwarnings("error::ckptstore.UnexplainedStepWarning"),
    pytest.mark.usefixtures("warm_agents"),
]


class Growing:
    """State of another form in each step, which no plan survives."""

    def __init__(self, until: int) -> None:
        self.losses: list[float] = []
        self.until = until

    def state_dict(self) -> dict[str, Any]:
        return {"losses": torch.tensor(self.losses[: self.until])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"].tolist()


class Job:
    """A script: two groups, a schedule that changes the learning rate right after each step."""

    def __init__(self, grows_until: int = 0, frozen: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        self.spare = torch.nn.Linear(WIDTH, WIDTH) if frozen else None  # updated only in every fourth step
        parts = list(self.model.parameters())
        groups = [{"params": parts[:2]}, {"params": parts[2:], "weight_decay": 0.0}]
        models = {"model": self.model}
        if self.spare is not None:
            groups.append({"params": list(self.spare.parameters())})
            models["spare"] = self.spare
        self.models = models
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.05 * step))
        self.notes = Growing(grows_until)
        self.steps = 0
        self.bits: dict[int, tuple[str, float]] = {}

    def one(self, gradients: Any = "none", seeded: int | None = None) -> OptimizerStep:
        generator = None if seeded is None else torch.Generator().manual_seed(seeded)
        inputs = torch.randn(16, WIDTH, generator=generator)
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        if self.spare is not None and self.steps % 4 == 0:
            outputs = outputs + self.spare(inputs)
        (outputs - inputs).square().mean().backward()
        self.optimizer.step()
        taken = OptimizerStep(self.optimizer, gradients=gradients)
        self.scheduler.step()
        self.steps += 1
        self.notes.losses.append(float(self.steps))
        return taken

    def told(self, metrics: ckptstore.SaveMetrics) -> None:
        assert metrics.error is None
        parameters = sum(one.numel() for model in self.models.values() for one in model.parameters())
        self.bits[metrics.step] = str(metrics.kind), metrics.stored * 8 / parameters

    def check(self, first: int, last: int) -> None:
        end = time.monotonic() + 60  # metrics come a moment after the result
        while len(self.bits) < last + 1 - first and time.monotonic() < end:
            time.sleep(0.01)
        assert sorted(self.bits) == list(range(first, last + 1))
        assert self.bits[first][0] == "full"
        for step in range(first + 1, last + 1):
            kind, bits = self.bits[step]
            assert kind == "gradient"
            assert bits < EXPLAINED, (step, self.bits)


@pytest.mark.parametrize("agent", [False, True], ids=["local", "agent"])
@pytest.mark.parametrize("grows_until", [0, 3, 100], ids=["stands", "grows-for-three-steps", "grows"])
def test_every_step_of_every_term_of_a_checkpointer(tmp_path: Path, grows_until: int, agent: bool) -> None:
    for first in (1, 10):
        job = Job(grows_until)
        with Checkpointer(
            tmp_path / "run", model=job.models, optimizer=job.optimizer, scheduler=job.scheduler,
            extra={"notes": job.notes}, strategy="gradient", on_metrics=job.told, agent=agent,
        ) as checkpointer:  # fmt: skip
            job.steps = checkpointer.resume()
            while job.steps < first + 8:
                job.one()
                pending = checkpointer.step()
                assert pending is not None
                pending.result()
        job.check(first, first + 8)


def test_a_new_plan_knows_which_parameters_stand_still(tmp_path: Path) -> None:
    """Parameters without a gradient are not treated as moved because a state of another form came."""
    job = Job(grows_until=0, frozen=True)
    with Checkpointer(
        tmp_path / "run", model=job.models, optimizer=job.optimizer, scheduler=job.scheduler,
        extra={"notes": job.notes}, strategy="gradient", on_metrics=job.told,
    ) as checkpointer:  # fmt: skip
        checkpointer.resume()
        for step in range(1, 9):
            job.one()
            job.notes.until = 6 if step >= 6 else 0  # in a step that leaves a third of the parameters alone
            checkpointer.step().result()
    job.check(1, 8)
    assert abs(job.bits[6][1] - job.bits[7][1]) < 3, job.bits


@pytest.mark.parametrize("first", ["save", "save-with-updates", "save_async"])
@pytest.mark.parametrize("gradients", ["none", "grad"])
def test_every_step_of_a_writer(tmp_path: Path, gradients: Any, first: str) -> None:
    """Whichever way the full was saved: the updates of the second step are not mistaken for those of the first."""
    job = Job()
    with ckptstore.open(tmp_path / "run").writer(diffs=ckptstore.DiffOptions(), on_metrics=job.told) as writer:
        for step in range(1, 7):
            updates = job.one(gradients)
            state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
            if step > 1 or first == "save_async":
                writer.save_async(state, step, updates=updates).result()
            else:
                writer.save(state, step, updates=updates if first == "save-with-updates" else None)
    job.check(1, 6)


@pytest.mark.filterwarnings("default::ckptstore.UnexplainedStepWarning")
@pytest.mark.parametrize("first", ["save", "save-without-updates", "save_async"])
def test_every_step_of_ranks(tmp_path: Path, first: str) -> None:
    """Two ranks with the same state, as under DDP: each stores half of it."""
    jobs = [Job(), Job()]  # one after the other, with the same random numbers

    def work(group: Group) -> None:
        job = jobs[group.rank]
        options = ckptstore.RankOptions(timeout=120)
        with ckptstore.open(tmp_path / "run").writer(
            group=group, ranks=options, diffs=ckptstore.DiffOptions(), on_metrics=job.told
        ) as writer:
            for step in range(1, 7):
                updates = job.one(seeded=step)
                state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
                if step == 1 and first != "save_async":
                    writer.save(state, step, updates=updates if first == "save" else None)
                else:
                    writer.save_async(state, step, updates=updates).result()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert as_ranks(2, work) == [None, None]
    told = [str(one.message) for one in caught if one.category is ckptstore.UnexplainedStepWarning]
    assert all("divide their tensors again" in one for one in told)
    assert bool(told) == (first == "save-without-updates")
    together = Job()
    for step, (kind, bits) in jobs[0].bits.items():
        together.bits[step] = kind, bits + jobs[1].bits[step][1]
    if told:  # the division of the tensors changes, after which only a full is possible
        del together.bits[1]
    together.check(1 + bool(told), 6)


@pytest.mark.filterwarnings("default::ckptstore.UnexplainedStepWarning")
def test_unexplained_steps_are_reported_once_for_each_reason(tmp_path: Path) -> None:
    job = Job()
    with (
        warnings.catch_warnings(record=True) as caught,
        Checkpointer(
            tmp_path / "run", model=job.models, optimizer=job.optimizer, scheduler=job.scheduler, strategy="gradient"
        ) as checkpointer,
    ):
        warnings.simplefilter("always")
        checkpointer.resume()
        for step in range(1, 12):
            job.one()
            checkpointer.step(save=step not in (5, 8, 9))
    told = [str(one.message) for one in caught if one.category is ckptstore.UnexplainedStepWarning]
    assert len(told) == 1, told
    assert "2 optimizer steps since the previous checkpoint" in told[0]


@pytest.mark.filterwarnings("default::ckptstore.UnexplainedStepWarning")
def test_a_step_that_could_not_be_saved_is_no_base_of_what_explains_the_next(tmp_path: Path) -> None:
    job = Job()
    extra: dict[str, Any] = {}
    job.notes.state_dict = lambda: dict(extra)  # type: ignore[method-assign]
    with (
        warnings.catch_warnings(record=True) as caught,
        Checkpointer(
            tmp_path / "run", model=job.models, optimizer=job.optimizer, scheduler=job.scheduler,
            extra={"notes": job.notes}, strategy="gradient", on_error="raise", on_metrics=job.told,
        ) as checkpointer,
    ):  # fmt: skip
        warnings.simplefilter("always")
        checkpointer.resume()
        for step in range(1, 7):
            job.one()
            extra["odd"] = object() if step == 4 else step
            if step == 4:
                with pytest.raises(ckptstore.UnsupportedStateError):
                    checkpointer.step()
            else:
                checkpointer.step().result()
    told = [str(one.message) for one in caught if one.category is ckptstore.UnexplainedStepWarning]
    assert len(told) == 1, told
    assert "2 optimizer steps since" in told[0]
    assert job.bits[5][0] == "gradient"
    assert job.bits[6][1] < EXPLAINED


@pytest.mark.parametrize("agent", [False, True], ids=["local", "agent"])
def test_after_going_back(tmp_path: Path, agent: bool) -> None:
    job = Job(3)
    with Checkpointer(
        tmp_path / "run", model=job.models, optimizer=job.optimizer, scheduler=job.scheduler,
        extra={"notes": job.notes}, strategy="gradient", on_metrics=job.told, agent=agent,
    ) as checkpointer:  # fmt: skip
        checkpointer.resume()
        for _ in range(5):
            job.one()
            checkpointer.step().result()
        job.check(1, 5)
        job.one()  # it has no checkpoint
        job.bits.clear()
        job.steps = checkpointer.rollback(3)
        for _ in range(5):
            job.one()
            checkpointer.step().result()
        job.check(4, 8)


@pytest.mark.filterwarnings("default::ckptstore.UnexplainedStepWarning")
def test_a_step_for_which_there_was_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is encoded against the step before it, from which its own update does not lead."""
    job, used = Job(), []
    whole = resident_step.encode_step

    def encode(flat: Any, updates: Any, base: Any, step: int, **others: Any) -> Any:
        used.append((step, len(updates)))
        if step == 3:
            raise MemoryError("none left")
        return whole(flat, updates, base, step, **others)

    monkeypatch.setattr(resident_step, "encode_step", encode)
    with (
        warnings.catch_warnings(record=True) as caught,
        ckptstore.open(tmp_path / "run").writer(diffs=ckptstore.DiffOptions()) as writer,
    ):
        warnings.simplefilter("always")
        for step in range(1, 6):
            updates = job.one()
            state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
            if step == 3:
                with pytest.raises(MemoryError):
                    writer.save_async(state, step, updates=updates).result()
            else:
                writer.save_async(state, step, updates=updates).result()
    assert used == [(2, 4), (3, 4), (4, 0), (5, 4)]
    told = [str(one.message) for one in caught if one.category is ckptstore.UnexplainedStepWarning]
    assert len(told) == 1
    assert "step 3 before it could not be stored" in told[0]
