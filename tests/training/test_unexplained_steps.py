"""A step diff that takes more bytes than an explained step causes a warning, and has the right bits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.training import Checkpointer, OptimizerStep  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group  # noqa: E402
from tests.training.test_explained_steps import Job  # noqa: E402
from tests.write.rank_threads import as_ranks  # noqa: E402

WRITERS: dict[str, dict[str, Any]] = {
    "plain": {"diffs": ckptstore.DiffOptions()},
    "batches": {"diffs": ckptstore.DiffOptions(batch=3)},
    "memory": {"diffs": ckptstore.DiffOptions(), "memory": 48 << 20},
    "memory-batches": {"diffs": ckptstore.DiffOptions(batch=3), "memory": 48 << 20},
}
each_writer = pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)


@contextmanager
def told() -> Iterator[list[str]]:
    """The unexplained steps that a warning names."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in caught if one.category is ckptstore.UnexplainedStepWarning]


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in state["model"].items()} | {
        f"{name}.{slot}": tensor.clone()
        for name, slots in state["optimizer"]["state"].items()
        for slot, tensor in slots.items()
    }


class Script:
    """A custom loop, with a plain writer."""

    def __init__(self, store: ckptstore.Store, **options: Any) -> None:
        self.store = store
        self.job = Job()
        self.had: dict[int, dict[str, Any]] = {}
        self.writer = store.writer(poll_seconds=None, **options)

    def state(self) -> dict[str, Any]:
        return {"model": self.job.model.state_dict(), "optimizer": self.job.optimizer.state_dict()}

    def step(self, *, save: bool = True, change: Callable[[], None] | None = None, **said: Any) -> None:
        updates = self.job.one()
        if change is not None:
            change()
        if save:
            self.writer.save_async(self.state(), self.job.steps, updates=updates, **said)
            self.had[self.job.steps] = copied(self.state())

    def check(self) -> None:
        self.writer.close()
        assert [info.step for info in self.store.checkpoints()] == sorted(self.had)
        for step, before in self.had.items():
            loaded = copied(self.store.load(step, framework="torch"))
            assert loaded.keys() == before.keys()
            for name, tensor in before.items():
                assert torch.equal(loaded[name], tensor), (step, name)


@each_writer
def test_steps_that_a_script_does_not_save(tmp_path: Path, options: dict[str, Any]) -> None:
    script = Script(ckptstore.open(tmp_path / "run"), **options)
    with told() as texts:
        for step in range(1, 10):
            script.step(save=step not in (5, 7, 8))
        script.check()
    assert len(texts) == 1, texts
    assert "step 6 takes more bytes than an explained step" in texts[0]
    assert "step 5 before it is not in the store" in texts[0]


@pytest.mark.parametrize("options", [WRITERS["plain"], WRITERS["memory"]], ids=["plain", "memory"])
def test_a_save_that_fails_before_it_is_compressed(tmp_path: Path, options: dict[str, Any]) -> None:
    def broken(_: object) -> Any:
        raise RuntimeError("of the script's own")

    script = Script(ckptstore.open(tmp_path / "run"), **options)
    with told() as texts:
        for _ in range(3):
            script.step()
        script.step(save=False)
        script.step(save=False)
        with pytest.raises(RuntimeError, match="of the script's own"):
            script.writer.save_async(script.state(), script.job.steps, updates=broken)
        script.step()
        script.step()
        script.check()
    assert len(texts) == 1, texts
    assert "steps 4 to 5 before it are not in the store" in texts[0]


@each_writer
def test_moments_that_the_script_edits(tmp_path: Path, options: dict[str, Any]) -> None:
    script = Script(ckptstore.open(tmp_path / "run"), **options)

    def decay() -> None:
        for kept in script.job.optimizer.state.values():
            kept["exp_avg"].mul_(0.99)

    with told() as texts:
        script.step()
        for _ in range(4):
            script.step(change=decay)
        script.check()
    assert len(texts) == 1, texts
    assert "step 2 takes more bytes than an explained step" in texts[0]
    assert "changed outside the optimizer" in texts[0]


@each_writer
def test_steps_without_a_warning(tmp_path: Path, options: dict[str, Any]) -> None:
    """Also for steps with other numbers, as after micro-batches: only the size of a step counts."""
    script = Script(ckptstore.open(tmp_path / "run"), **options)
    with told() as texts:
        for _ in range(6):
            script.step()
            script.job.steps += 4
        script.check()
    assert texts == []


def test_plain_sgd_takes_no_more_without_an_explanation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with told() as texts, ckptstore.open(tmp_path / "run").writer(diffs=ckptstore.DiffOptions()) as writer:
        for step in range(1, 7):
            optimizer.zero_grad()
            model(torch.randn(4, 100)).square().mean().backward()
            optimizer.step()
            if step != 3:
                updates = OptimizerStep(optimizer, gradients="none")
                writer.save_async({"model": model.state_dict()}, step, updates=updates)
    assert texts == []


def replaced(job: Job, step: int) -> None:
    if step == 4:
        for kept in job.optimizer.state.values():
            kept["exp_avg"] = torch.rand_like(kept["exp_avg"])
            kept["exp_avg_sq"] = torch.rand_like(kept["exp_avg_sq"])


def one_replaced(job: Job, step: int) -> None:
    if step == 4:
        next(iter(job.optimizer.state.values()))["exp_avg"].data = torch.rand(192, 192)


def edited(job: Job, _: int) -> None:
    for kept in job.optimizer.state.values():
        kept["exp_avg_sq"].mul_(0.9)


@pytest.mark.usefixtures("warm_agents")
@pytest.mark.parametrize("agent", [False, True], ids=["local", "agent"])
@pytest.mark.parametrize("change", [replaced, one_replaced, edited])
def test_moments_beside_the_optimizer_of_a_checkpointer(
    tmp_path: Path, change: Callable[[Job, int], None], agent: bool
) -> None:
    job = Job()
    store = ckptstore.open(tmp_path / "run")
    with (
        told() as texts,
        Checkpointer(
            store, model=job.models, optimizer=job.optimizer, strategy="gradient", agent=agent, keep=[]
        ) as checkpointer,
    ):
        checkpointer.resume()
        for step in range(1, 8):
            job.one()
            change(job, step)
            checkpointer.step()
            checkpointer.wait()
            had = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    assert len([one for one in texts if "changed outside the optimizer" in one]) == 1, texts
    loaded = store.load("latest", framework="torch")["model"]["model"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in had.items())


def test_ranks(tmp_path: Path) -> None:
    jobs = [Job(), Job()]  # one after the other, with the same random numbers

    def work(group: Group) -> None:
        job = jobs[group.rank]
        options = ckptstore.RankOptions(timeout=120)
        with ckptstore.open(tmp_path / "run", create=True).writer(
            diffs=ckptstore.DiffOptions(), group=group, ranks=options
        ) as writer:
            for step in range(1, 7):
                updates = job.one(seeded=step)
                if step != 4:
                    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
                    writer.save_async(state, step, updates=updates).result()

    with told() as texts:
        as_ranks(2, work)
    found = [one for one in texts if "step 4 before it is not in the store" in one]
    assert 1 <= len(found) <= 2  # each rank for its stored part
    loaded = ckptstore.open(tmp_path / "run").load("latest", framework="torch")["model"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in jobs[0].model.state_dict().items())


@pytest.mark.parametrize("size", [40, 120_000], ids=["small", "large"])
def test_only_unexplained_parameters_and_measured_sizes_are_reported(tmp_path: Path, size: int) -> None:
    """Of parameters with separate payloads the changed one is named. Of a shared payload it is only known that one of
    them was."""
    torch.manual_seed(1)
    count = 3 if size > 1000 else 400
    parameters = {f"p{number}": torch.nn.Parameter(torch.randn(size)) for number in range(count)}
    optimizer = torch.optim.Adam(parameters.values(), lr=0.01)
    touched = parameters[f"p{count - 1}"]
    store = ckptstore.open(tmp_path / "run")
    with told() as texts, store.writer(diffs=ckptstore.DiffOptions(), poll_seconds=None) as writer:
        for step in range(1, 6):
            for parameter in parameters.values():
                parameter.grad = torch.randn(size)
            optimizer.step()
            if step == 4:
                with torch.no_grad():
                    for one in [touched] if size > 1000 else parameters.values():
                        one.copy_(torch.randn(size))
            state = {"model": parameters, "optimizer": optimizer.state_dict()}
            writer.save(state, step, updates=OptimizerStep(optimizer, gradients="none"))
    (text,) = texts
    assert "three times" not in text
    found = re.search(r"for (.*) \((\d+) bits a number, where 32 are enough\): ", text)
    assert found, text
    assert int(found[2]) > 36
    if size > 1000:
        assert found[1] == f"'model.p{count - 1}'"
    else:
        assert re.fullmatch(
            r"one or more of \d+ small parameters that are compressed together, 'model.p\d+' the first", found[1]
        )
