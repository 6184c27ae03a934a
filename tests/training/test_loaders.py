"""Loaders of every kind, runs that are cut off anywhere: a resumed run has the losses of an uninterrupted one."""

from __future__ import annotations

import gc
import logging
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torchdata = pytest.importorskip("torchdata.stateful_dataloader")

from torch.utils.data import (  # noqa: E402 - torch decides whether this file runs at all
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import ckptstore  # noqa: E402
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tests.forms import in_turn, short_or  # noqa: E402

# torchdata uses a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Samples(Dataset[torch.Tensor]):
    """Numbers; augmented from the global generators, or optionally from its own."""

    def __init__(self, count: int, *, augmented: bool = False, own: bool = False) -> None:
        self.count, self.augmented = count, augmented
        self.rng = np.random.default_rng(3) if own else None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((4,), (index + 1) / self.count)
        if self.augmented:
            sample = sample + 0.1 * torch.randn(4) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return sample if self.rng is None else sample + float(self.rng.random())


class Stream(IterableDataset[torch.Tensor]):
    """Samples one after the other; it has its own position."""

    def __init__(self, count: int, *, augmented: bool = False) -> None:
        self.count, self.augmented, self.at = count, augmented, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.count:
            self.at += 1
            sample = torch.full((4,), self.at / self.count)
            yield sample + torch.randn(4) if self.augmented else sample
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@dataclass(frozen=True)
class Case:
    """A loader, and where the run is cut off."""

    stateful: bool
    order: str
    samples: int
    batch_size: int
    workers: int
    persistent: bool
    generator: bool  # the loader's own
    sampler_generator: bool
    drop_last: bool
    augmented: bool
    own: bool
    extra_step: bool  # one after each epoch, so that a save finds it over
    steps: int
    cuts: tuple[int, ...]

    def steps_on(self) -> bool:
        """Whether an epoch has a step; otherwise the script would begin epochs for ever."""
        return self.extra_step or next(iter(replace(self, workers=0).loader()), None) is not None

    def loader(self) -> Any:
        kind = torchdata.StatefulDataLoader if self.stateful else DataLoader
        options: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.workers}
        options["generator"] = torch.Generator().manual_seed(7) if self.generator else None
        options["persistent_workers"] = self.persistent and self.workers > 0
        # If worker processes load the epoch again, they draw their numbers again. Otherwise these are lost, with a
        # warning.
        drawn_again = not self.workers or not (self.stateful or self.persistent)
        augmented = self.augmented and drawn_again
        if self.order == "stream":
            return kind(Stream(self.samples, augmented=augmented), **options)
        data = Samples(self.samples, augmented=augmented, own=self.own and not self.workers)
        generator = torch.Generator().manual_seed(9) if self.sampler_generator else None
        weights, some = [1.0] * self.samples, list(range(0, self.samples, 2))
        samplers = {
            "random": lambda: RandomSampler(data, generator=generator),
            "replaced": lambda: RandomSampler(data, replacement=True, num_samples=self.samples, generator=generator),
            "subset": lambda: SubsetRandomSampler(some, generator=generator),
            "weighted": lambda: WeightedRandomSampler(weights, self.samples, generator=generator),
            "shared": lambda: DistributedSampler(data, num_replicas=2, rank=1),
        }
        if self.order in samplers:
            options["sampler"] = samplers[self.order]()
        return kind(data, shuffle=self.order == "shuffled" or None, drop_last=self.drop_last, **options)


def lived(case: Case, store: Path, until: int, losses: list[str]) -> None:
    """One process of a run: it trains until a step, and appends each loss, in hex."""
    loader = _lived(case, store, until, losses)
    let_go(loader)


def let_go(loader: Any) -> None:
    """Collect the cycle that contained the loader, like a Checkpointer's, before the loader itself is freed.

    In a cycle it cannot end its worker processes: it waits 5 s for each, which no test needs.
    """
    if getattr(loader, "num_workers", 0):
        gc.collect()


def _lived(case: Case, store: Path, until: int, losses: list[str]) -> Any:
    torch.manual_seed(5)
    random.seed(1)
    np.random.seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    validation = DataLoader(Samples(4, augmented=True), batch_size=2, shuffle=True)
    options: dict[str, Any] = {"strategy": "full", "signals": False}

    def step(batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        checkpointer.step()

    loader = case.loader()
    with Checkpointer(store, model=model, optimizer=optimizer, loader=loader, **options) as checkpointer:
        checkpointer.resume()
        del losses[checkpointer.steps_done :]
        while checkpointer.steps_done < until:
            for batch in checkpointer.loader:
                if checkpointer.steps_done % 3 == 1:
                    with torch.no_grad():
                        for one in validation:
                            model(one)
                step(batch)
                if checkpointer.steps_done == until:
                    return loader
            if case.extra_step:
                step(torch.randn(2, 4))
    return loader


def compared(case: Case, folder: Path) -> None:
    never, cut = [], []
    with warnings.catch_warnings():
        if case.workers:
            warnings.filterwarnings("ignore", ".*worker processes start again", DeterminismWarning)
        lived(case, folder / "never", case.steps, never)
        for until in (*sorted(case.cuts), case.steps):
            lived(case, folder / "cut", until, cut)
    assert cut == never


ORDERS = ("shuffled", "sequential", "random", "replaced", "subset", "weighted", "shared", "stream")


@st.composite
def cases(draw: st.DrawFn, workers: int = 0) -> Case:
    steps = draw(st.integers(4, 16))
    flag = st.booleans()
    return Case(
        stateful=draw(flag),
        order=draw(st.sampled_from(ORDERS)),
        samples=draw(st.sampled_from((5, 8, 12))),
        batch_size=draw(st.integers(2, 4)),
        workers=workers,
        persistent=draw(flag),
        generator=draw(flag),
        sampler_generator=draw(flag),
        drop_last=draw(flag),
        augmented=draw(flag),
        own=draw(flag),
        extra_step=draw(flag),
        steps=steps,
        cuts=tuple(draw(st.lists(st.integers(1, steps - 1), min_size=1, max_size=2))),
    )


@pytest.mark.parametrize(
    ("stateful", "samples", "cuts"), in_turn([True, False], [(5, (3,)), (5, (3, 6)), (6, (3,)), (5, (2,))], 2)
)
def test_the_order_after_an_epoch_whose_last_batch_was_the_last_step(
    tmp_path: Path, stateful: bool, samples: int, cuts: tuple[int, ...]
) -> None:
    """A short last batch takes the sampler to its end, where it draws from its generator once more."""
    case = Case(
        stateful, "random", samples, 2, 0, False, False, True, drop_last=False, augmented=False, own=False,
        extra_step=False, steps=10, cuts=cuts,
    )  # fmt: skip
    compared(case, tmp_path)


@settings(max_examples=short_or(8, 100), deadline=None)
@given(case=cases())
def test_the_losses_of_a_resumed_run(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    assume(case.steps_on())
    compared(case, tmp_path_factory.mktemp("run"))


@pytest.mark.slow
@settings(max_examples=short_or(1, 12), deadline=None)
@given(case=cases(workers=2))
def test_with_worker_processes(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    assume(case.steps_on())
    compared(case, tmp_path_factory.mktemp("run"))


@pytest.mark.slow
@pytest.mark.parametrize(("stateful", "order"), [(True, "random"), (False, "random"), (False, "stream")])
def test_workers_that_outlive_an_epoch(tmp_path: Path, stateful: bool, order: str) -> None:
    case = Case(
        stateful, order, 6, 2, 1, True, False, False, drop_last=False, augmented=False, own=False, extra_step=False,
        steps=5, cuts=(4,),
    )  # fmt: skip
    compared(case, tmp_path)


# -- loaders whose state cannot be saved, or that are not used


def trained(checkpointer: Checkpointer, optimizer: torch.optim.Optimizer, batches: Any, until: int) -> list[Any]:
    """Steps with the batches given, up to one -> these batches."""
    found = []
    for batch in batches:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        found.append(batch)
        checkpointer.step()
        if checkpointer.steps_done == until:
            break
    return found


def opened(folder: Path, loader: Any, **others: Any) -> tuple[Checkpointer, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"strategy": "full", "signals": False, **others}
    return Checkpointer(folder / "s", model=model, optimizer=optimizer, loader=loader, **options), optimizer


def test_draws_of_workers_cause_one_warning(tmp_path: Path) -> None:
    def loader() -> Any:
        return torchdata.StatefulDataLoader(list(range(12)), batch_size=2, num_workers=1)

    loaders = [loader(), loader()]
    checkpointer, optimizer = opened(tmp_path, loaders[0])
    with checkpointer:
        checkpointer.resume()
        trained(checkpointer, optimizer, checkpointer.loader, 2)
    checkpointer, optimizer = opened(tmp_path, loaders[1])
    with checkpointer:
        with pytest.warns(DeterminismWarning, match="1 worker processes start again.*use num_workers=0, or filter"):
            assert checkpointer.resume() == 2
        found = trained(checkpointer, optimizer, checkpointer.loader, 4)
        checkpointer.wait()
        assert checkpointer.rollback(3) == 3  # once: a warning would be an error here
    assert [batch.tolist() for batch in found] == [[4, 5], [6, 7]]
    del checkpointer, optimizer
    let_go(loaders[0])


def drawing(name: str) -> None:
    """Draw from a global generator."""
    if name == "torch":
        # It is not shuffled, and draws a seed for worker processes that it does not have.
        for _ in DataLoader(range(2)):
            pass
    elif name == "python":
        random.random()
    elif name == "numpy":
        np.random.rand()


def told(folder: Path, loader: Any, name: str, *, where: str, until: int = 6, **options: Any) -> list[str]:
    """A run that draws beside its training -> the warnings.

    Args:
        where: ``before`` step(), ``after`` it, or ``between`` two epochs.
    """
    checkpointer, optimizer = opened(folder, loader, **options)
    with checkpointer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeterminismWarning)
        checkpointer.resume()
        while checkpointer.steps_done < until:
            for batch in checkpointer.loader:
                for _ in range(checkpointer.steps_done % 2):
                    drawing(name if where == "before" else "nothing")
                trained(checkpointer, optimizer, [batch], checkpointer.steps_done + 1)
                drawing(name if where == "after" else "nothing")
                if checkpointer.steps_done == until:
                    break
            drawing(name if where == "between" else "nothing")
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("kind", [DataLoader, torchdata.StatefulDataLoader])
@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
def test_draws_between_a_save_and_the_next_batch_cause_one_warning(tmp_path: Path, kind: Any, name: str) -> None:
    def loader() -> Any:
        return kind(Samples(4, augmented=True), shuffle=True)

    for until in (6, 10):  # and again of the resumed run
        said = told(tmp_path, loader(), name, where="after", until=until)
        assert len(said) == 1
        assert said[0].startswith(f"random numbers were drawn ({name}'s global generator) between checkpointer.step()")
        assert "Do it before checkpointer.step()" in said[0]
    for where in ("before", "between"):
        assert told(tmp_path / where, loader(), name, where=where) == []
    assert told(tmp_path / "nothing", loader(), "nothing", where="after") == []


def test_only_draws_after_a_saved_step_cause_a_warning(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(Samples(4), shuffle=True)

    assert told(tmp_path / "never", loader(), "torch", where="after", save_every=20) == []
    assert len(told(tmp_path / "second", loader(), "torch", where="after", save_every=2)) == 1


def test_a_step_that_is_not_saved_or_is_between_epochs(tmp_path: Path) -> None:
    checkpointer, optimizer = opened(tmp_path, DataLoader(Samples(3), shuffle=True), save_every=2)
    with checkpointer:
        checkpointer.resume()
        trained(checkpointer, optimizer, [0], 1)
        for batch in checkpointer.loader:  # a warning would be an error here
            trained(checkpointer, optimizer, [batch], checkpointer.steps_done + 1)
            torch.rand(1)
            trained(checkpointer, optimizer, [batch], checkpointer.steps_done + 1)
        trained(checkpointer, optimizer, [0], 8)
        torch.rand(1)
        next(iter(checkpointer.loader))


def test_the_package_draws_nothing_from_global_generators() -> None:
    """A pause before a retry takes its jitter elsewhere: otherwise training would have other random numbers."""
    drawn = re.compile(
        r"(?<!\w)(?:np\.|torch\.)?random\.(?!Random|SystemRandom|Generator|default_rng|[gs]et_?state)\w+\("
    )
    folder = Path(ckptstore.__file__).parent
    found = [(file.name, one) for file in folder.rglob("*.py") for one in drawn.findall(file.read_text())]
    assert found == []


def test_going_back_is_no_draw(tmp_path: Path) -> None:
    checkpointer, optimizer = opened(tmp_path, DataLoader(Samples(12)))
    with checkpointer:
        checkpointer.resume()
        batches = iter(checkpointer.loader)
        for until in (1, 2):
            batch = next(batches)
            torch.rand(1)
            trained(checkpointer, optimizer, [batch], until)
        checkpointer.wait()
        checkpointer.rollback(1, parts=["model", "random"])
        next(batches)  # a warning would be an error here


class Place:
    """It has its own position, and unexpectedly draws when an iterator is made."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        torch.rand(3)
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("stepwise", [True, False])
def test_any_loader_that_says_where_it_is(tmp_path: Path, stepwise: bool) -> None:
    drawn = []
    for until in (3, 5):
        checkpointer, optimizer = opened(tmp_path, Place())
        with checkpointer:
            checkpointer.resume()
            loader = checkpointer.loader
            batches = iter(partial(next, loader), None) if stepwise else loader
            before = torch.get_rng_state()
            found = trained(checkpointer, optimizer, batches, until)
            drawn.append(not torch.equal(before, torch.get_rng_state()))
            assert loader.at == until
            loader.at = 20  # attributes are set on the loader
            assert loader.loader.at == 20
        assert found == list(range(1, until + 1))[-len(found) :]
    assert drawn == [True, False]


def test_the_loader_itself_is_iterated_over_after_a_resume(tmp_path: Path) -> None:
    for until in (4, 8):
        place = Place()
        checkpointer, optimizer = opened(tmp_path, place)
        with checkpointer, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpointer.resume()
            assert trained(checkpointer, optimizer, place, until)[-1] == until
        said = [str(one.message) for one in caught]
        assert len(said) == (until == 8)
        assert all("nothing iterates over Checkpointer.loader" in one for one in said)


def test_torchdata_s_loader_itself_is_iterated_over(tmp_path: Path) -> None:
    data = torchdata.StatefulDataLoader(list(range(12)))
    checkpointer, optimizer = opened(tmp_path, data)
    with checkpointer:
        checkpointer.resume()
        with pytest.warns(DeterminismWarning, match="nothing iterates over Checkpointer.loader"):
            trained(checkpointer, optimizer, data, 4)
    data = torchdata.StatefulDataLoader(list(range(12)))
    checkpointer, optimizer = opened(tmp_path, data)
    with checkpointer:
        checkpointer.resume()
        # It has its own position.
        assert [int(one) for one in trained(checkpointer, optimizer, checkpointer.loader, 6)] == [4, 5]


class Stateless(IterableDataset[int]):  # type: ignore[misc]
    """Has no state, and neither has its iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


@pytest.mark.filterwarnings("ignore:.*worker processes start again")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_a_state_is_resumed_again_and_again(tmp_path: Path, workers: int) -> None:
    """torchdata reads such a stream from its beginning, and counts the batches twice: from the second resume on it
    skipped samples."""
    found = []
    for stop in (3, 5, 8, 12):
        loader = torchdata.StatefulDataLoader(Stateless(), batch_size=2, num_workers=workers)
        checkpointer, optimizer = opened(tmp_path, loader)
        with checkpointer:
            checkpointer.resume()
            found += [
                int(one) for batch in trained(checkpointer, optimizer, checkpointer.loader, stop) for one in batch
            ]
        del checkpointer, optimizer
        let_go(loader)
    assert found == list(range(24))


def test_a_save_before_the_first_batch_draws_nothing(tmp_path: Path) -> None:
    losses = []
    for cut in (False, True):
        found = []
        for until in (1, 4) if cut else (4,):
            torch.manual_seed(1)
            data = torchdata.StatefulDataLoader(list(range(12)), shuffle=True, batch_size=2)
            checkpointer, optimizer = opened(tmp_path / str(cut), data)
            with checkpointer:
                if checkpointer.resume() == 0:
                    found += trained(checkpointer, optimizer, [torch.tensor([0, 0])], 1)
                if until == 4:
                    found += trained(checkpointer, optimizer, checkpointer.loader, until)
                    found.append(torch.rand(1))
        losses.append([one.tolist() for one in found])
    assert losses[0] == losses[1]


def test_an_iterator_from_before_going_back(tmp_path: Path) -> None:
    checkpointer, optimizer = opened(tmp_path, DataLoader(list(range(12))))
    with checkpointer:
        checkpointer.resume()
        batches = iter(checkpointer.loader)
        trained(checkpointer, optimizer, batches, 4)
        checkpointer.wait()
        checkpointer.rollback(2)
        with pytest.warns(DeterminismWarning, match="made before resume\\(\\) or rollback\\(\\) is used after it"):
            assert int(next(batches)) == 4
        assert checkpointer.loader.given == 2
        assert [int(one) for one in trained(checkpointer, optimizer, checkpointer.loader, 4)] == [2, 3]


class Prepared(DataLoader[int]):
    """Like a loader that Accelerate prepares: with methods that raise."""

    def state_dict(self) -> Any:
        raise AttributeError("DataLoader has no attribute state_dict")

    def load_state_dict(self, state: Any) -> None:
        raise AttributeError("DataLoader has no attribute load_state_dict")


def test_a_loader_whose_state_dict_raises_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for until in (3, 5):
        checkpointer, optimizer = opened(tmp_path, Prepared(list(range(12)), batch_size=2))
        with checkpointer, caplog.at_level(logging.WARNING, "ckptstore.training"):
            caplog.clear()
            checkpointer.resume()
            found += trained(checkpointer, optimizer, checkpointer.loader, until)
        assert [one.message[:63] for one in caplog.records] == [
            "Prepared.state_dict() raises AttributeError: DataLoader has no "
        ]
    assert [one.tolist() for one in found] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


class Wrapping(torchdata.StatefulDataLoader):
    """Like a loader that Accelerate wraps: the iterator is made when the first batch is requested."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


def test_a_loader_that_makes_its_iterator_late(tmp_path: Path) -> None:
    ends = []
    for number, lives in enumerate(((8,), (3, 8))):
        for until in lives:
            torch.manual_seed(1)
            checkpointer, optimizer = opened(tmp_path / str(number), Wrapping(range(12), batch_size=2, shuffle=True))
            found: list[Any] = []
            with checkpointer, warnings.catch_warnings(record=True) as caught:
                warnings.filterwarnings("always", category=DeterminismWarning)
                resumed = checkpointer.resume()
                while checkpointer.steps_done < until:
                    found += trained(checkpointer, optimizer, checkpointer.loader, until)
            said = [str(one.message) for one in caught]
            assert len(said) == bool(resumed)
            assert all("Wrapping makes its iterator when the first batch" in one for one in said)
        ends.append([one.tolist() for one in (*found[-5:], torch.rand(1))])
    assert ends[0] == ends[1]


class Drawing(Place):
    def __iter__(self) -> Iterator[int]:
        while True:
            torch.rand(1)
            yield super().__next__()


def test_draws_that_cannot_be_distinguished(tmp_path: Path) -> None:
    for until in (2, 4):
        checkpointer, optimizer = opened(tmp_path, Drawing())
        with checkpointer:
            checkpointer.resume()
            if until == 2:
                trained(checkpointer, optimizer, checkpointer.loader, until)
            else:
                with pytest.warns(DeterminismWarning, match="Drawing.__iter__ is a generator"):
                    trained(checkpointer, optimizer, checkpointer.loader, until)


@pytest.mark.slow
def test_workers_of_a_counted_loader_draw_what_they_drew(tmp_path: Path) -> None:
    case = Case(
        stateful=False, order="random", samples=8, batch_size=2, workers=2, persistent=False, generator=False,
        sampler_generator=False, drop_last=False, augmented=True, own=False, extra_step=False, steps=6, cuts=(3,),
    )  # fmt: skip
    compared(case, tmp_path)
