"""Changed compositions of datasets, and changed custom samplers: the remaining samples, and the warnings."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402 - torch decides whether this file runs at all
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    random_split,
)

from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from ckptstore.training.loaders.loader_contents import composition, made_with, stream  # noqa: E402
from ckptstore.training.loaders.loader_counting import counted  # noqa: E402
from tests.forms import short_or  # noqa: E402

ANEW = "the epoch starts again"
TWICE = "already yielded are repeated if the loader still has them, and none is skipped"
OTHER = "the dataset has other samples than it had, or in another order"


class Numbers(Dataset[int]):
    def __init__(self, start: int, stop: int) -> None:
        self.values = range(start, stop)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        return self.values[index]


class Doubled(Dataset[int]):
    """Transforms the samples of another dataset, as scripts do with the results of `random_split`."""

    def __init__(self, parts: Dataset[int]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> int:
        return 2 * self.parts[index]


class Stream(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


def numbers(batches: Iterator[Any], count: int = 10**9) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        batch = next(batches, None)
        if batch is None:
            break
        found += batch.tolist()
    return found


def continued(before: DataLoader[Any], after: DataLoader[Any], batches: int) -> tuple[list[int], list[int], str]:
    """The samples before a stop, those after it in another process, and the warnings there."""
    torch.manual_seed(1)
    running = counted(before)
    first = numbers(iter(running), batches)
    state = copy.deepcopy(running.state_dict())
    torch.manual_seed(99)
    resumed = counted(after)
    resumed.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.remark()
    return first, numbers(iter(resumed)), "".join(str(one.message) for one in caught)


def tree(chance: random.Random, base: Dataset[int], depth: int) -> Any:
    """Random nestings of `Subset` and `ConcatDataset` over one dataset."""
    kind = chance.choice(["subset", "subset", "concat"]) if depth else "base"
    if kind == "base":
        return base
    if kind == "concat":
        return ConcatDataset([tree(chance, base, depth - 1) for _ in range(chance.randint(1, 3))])
    inner = tree(chance, base, depth - 1)
    size = len(inner)
    start = chance.randrange(size)
    return Subset(
        inner,
        chance.choice(
            [
                range(start, size),
                list(range(0, size, 2)),
                torch.tensor([chance.randrange(size) for _ in range(5)]),
                np.array([chance.randrange(-size, size) for _ in range(5)]),
            ]
        ),
    )


@settings(max_examples=short_or(80, 600), deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_an_epoch_continues_in_the_same_samples_or_warns(seed: int, shuffle: bool) -> None:
    """There is no warning if and only if the samples are the same, however they are nested."""
    chance = random.Random(seed)
    base = ConcatDataset([Numbers(0, 5), Numbers(5, 12), Numbers(12, 15)])
    before = tree(chance, base, chance.randint(0, 3))
    order = list(before)
    how = chance.choice(["same", "flat", "grown", "swapped", "other"])
    after: Any
    if how == "same":
        after = copy.copy(before)
    elif how == "flat":
        after = Subset(base, order)
    elif how == "grown":
        after = ConcatDataset([before, Subset(base, [0])])
    elif how == "swapped":
        at = chance.randrange(len(order))
        indices = list(range(len(order)))
        indices[0], indices[at] = indices[at], indices[0]
        after = Subset(before, indices)
    else:
        after = tree(chance, base, chance.randint(0, 3))
    now = list(after)
    same = now == order if shuffle else now[: len(order)] == order
    first, rest, said = continued(DataLoader(before, 1, shuffle=shuffle), DataLoader(after, 1, shuffle=shuffle), 1)
    assert (said == "") == (now == order), how
    if same:
        assert sorted(first + rest) == sorted(now)
    elif now[: len(rest)] != now or shuffle:  # all samples are yielded
        assert sorted(rest) == sorted(now)
        assert ANEW in said


def taken(indices: Any) -> Dataset[int]:
    return Subset(Numbers(0, 40), indices)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], bool]] = {
    "other indices": (lambda: taken(range(8)), lambda: taken(range(12, 20)), False),
    "another base": (lambda: Numbers(0, 8), lambda: taken(range(12, 20)), False),
    "in another form": (lambda: taken(range(8)), lambda: taken(torch.arange(8, dtype=torch.int32)), True),
    "counted from the end": (lambda: taken([-1, -2, -3]), lambda: taken([39, 38, 37]), True),
    "parts of other lengths": (
        lambda: ConcatDataset([Numbers(0, 4), Numbers(0, 8)]),
        lambda: ConcatDataset([Numbers(0, 8), Numbers(0, 4)]),
        False,
    ),
    "grown at its end": (lambda: taken(range(8)), lambda: taken(range(10)), True),
    "grown at its front": (lambda: taken(range(4, 12)), lambda: taken(range(2, 12)), False),
    "shrunk, of one dataset": (lambda: taken(range(8)), lambda: taken(range(6)), True),
    "shrunk": (lambda: taken(range(4, 12)), lambda: taken(range(4, 10)), False),
    "another split": (
        lambda: random_split(Numbers(0, 20), [8, 12], torch.Generator().manual_seed(0))[0],
        lambda: random_split(Numbers(0, 20), [8, 12], torch.Generator().manual_seed(1))[0],
        False,
    ),
    "transformed": (lambda: Doubled(taken(range(8))), lambda: Doubled(taken(range(12, 20))), False),
    "transformed twice": (
        lambda: Doubled(Doubled(taken(range(8)))),
        lambda: Doubled(Doubled(taken(range(1, 9)))),
        False,
    ),
    "transformed, grown": (lambda: Doubled(taken(range(8))), lambda: Doubled(taken(range(10))), True),
    "transformed, shrunk": (lambda: Doubled(Numbers(0, 8)), lambda: Doubled(Numbers(0, 6)), True),
    "transformed, transformed no more": (lambda: Doubled(taken(range(8))), lambda: taken(range(8)), False),
    "indices that are not numbers": (lambda: Named(["a", "b", "c"]), lambda: Named(["b", "a", "c"]), True),
}


def Named(keys: list[str]) -> Any:  # noqa: N802 - stands for a class
    return Subset({"a": 1, "b": 2, "c": 3}, keys)  # type: ignore[type-var, arg-type]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shared", [False, True])
def test_datasets_that_are_made_of_others(name: str, shared: bool) -> None:
    before, after, continues = CASES[name]

    def loader(dataset: Any) -> DataLoader[Any]:
        sampler = DistributedSampler(dataset, 1, 0, shuffle=False) if shared else None
        return DataLoader(dataset, 1, sampler=sampler)

    first, rest, said = continued(loader(before()), loader(after()), 2)
    now = list(after()) if name != "indices that are not numbers" else [2, 1, 3]
    if continues:
        assert ANEW not in said
        assert OTHER not in said
        assert rest == now[2:]
        assert first == now[:2] or name == "indices that are not numbers"
    else:
        assert f"{OTHER} (Subset, ConcatDataset)" in said
        assert f"{ANEW}: the 2 samples {TWICE}" in said
        assert rest == now


def test_unknown_facts_are_not_compared() -> None:
    """A state of an earlier version; indices that are not samples; datasets that contain each other endlessly."""
    batches = counted(DataLoader(taken(range(8)), 2))
    numbers(iter(batches), 2)
    state = copy.deepcopy(batches.state_dict())
    for name in ("composition", "made_with", "stream"):
        del state["facts"][name]
    assert counted(DataLoader(taken(range(12, 20)), 2)).compare(state) == []
    assert composition(taken([50])) is None
    other = SimpleNamespace(dataset=Stream(3), batch_sampler=Batches(LIST))
    assert made_with(other) is stream(other) is None, "a loader of another kind"
    assert made_with(DataLoader(Stream(3))) is None
    deep: Any = Numbers(0, 3)
    for _ in range(12):
        deep = Subset(deep, [0, 1])
    assert composition(deep) is None
    assert composition(Stream(3)) is None
    sized = type("Sized", (Stream,), {"__len__": lambda self: self.samples})
    assert composition(sized(3)) is None, "nobody can say which samples a stream has"
    endless = Doubled(Numbers(0, 3))
    endless.parts = endless  # type: ignore[assignment]
    endless.__class__ = type("Endless", (Doubled,), {"__len__": lambda _: 3})
    found, depth = composition(endless), 0
    while found is not None:
        found, depth = found["inside"][0], depth + 1
    assert depth == 9, "this is kept in each checkpoint"
    assert composition(Subset(Numbers(0, 3), [])) == composition(ConcatDataset([Subset(Numbers(0, 3), [])]))


def test_many_samples_are_looked_at_in_blocks() -> None:
    """More than one block, whose parts end at any places."""
    million = 1 << 20
    base = Numbers(0, 3 * million)
    whole = composition(base)
    assert whole == composition(Subset(base, np.arange(3 * million)))
    assert whole == composition(
        ConcatDataset([Subset(base, range(million + 7)), Subset(base, range(million + 7, 3 * million))])
    )
    other = np.arange(3 * million)
    other[-1] = 0
    assert whole != composition(Subset(base, other))
    other = np.arange(3 * million)
    other[million], other[million + 1] = million + 1, million
    assert whole != composition(Subset(base, other))


def test_digests_are_those_that_checkpoints_have() -> None:
    """Another version of the program must not treat the same samples as different."""
    million = 1 << 20
    known = {
        "89107c502fa6b5c796b0b4cff7326fa4": Numbers(0, million + 5),
        "0f1e0d4594d088a9ae4da98a21e4e65e": Numbers(0, 2 * million + 5),
        "133a27e9c8d68cef2c6d638ff3f2c5bc": taken([5, 6, -1]),
    }
    for digest, dataset in known.items():
        found = composition(dataset)
        assert found is not None
        assert found == {"samples": len(dataset), "digest": digest, "inside": []}  # type: ignore[arg-type]
    sampler = Batches(LIST, kept="x" * 60, longer="x" * 61, words=["a", "b"], scales=[0.5])
    assert made_with(DataLoader(Numbers(0, 12), batch_sampler=sampler)) == {
        "batch_sampler.batches": ["72901ce8018ce108bbf1d8f682c4189b"],
        "batch_sampler.done": 0,
        "batch_sampler.kept": "x" * 60,
        "batch_sampler.longer": ["ee2422f04a0e63412fc541d7bd3a4540"],
        "batch_sampler.scales": ["4db2ae0a682e4ec55f215778b5c88d19"],
        "batch_sampler.words": ["8584880b46eb445782455db333ed731d"],
    }


@pytest.mark.parametrize("kind", [lambda inner: Subset(inner, range(3)), lambda inner: ConcatDataset([inner])])
def test_datasets_are_looked_at_to_a_depth_of_eight(kind: Callable[[Any], Any]) -> None:
    dataset: Any = Numbers(0, 3)
    for _ in range(8):
        dataset = kind(dataset)
    assert composition(dataset) == composition(Numbers(0, 3))
    assert composition(kind(dataset)) is None


# -- samplers of the script's own


class Batches:
    """Not one of torch's classes."""

    def __init__(self, batches: Any, **more: Any) -> None:
        self.batches = batches
        self.epoch = 0
        self.done = 0
        self.__dict__ |= more

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            self.done += 1
            yield list(batch)


class Seeded(Sampler[int]):
    def __init__(self, seed: Any) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(int(self.seed))).tolist())


class Grouped(BatchSampler):
    """Batches of a custom class over another sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from list(super().__iter__())


LIST = [[0, 1], [2], [3, 4, 5]]
OTHER_LIST = [[3, 4], [5], [0, 1, 2]]
SAMPLERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a list": ({"batch_sampler": LIST}, {"batch_sampler": OTHER_LIST}, "batch_sampler has other contents than it had"),
    "the same list": ({"batch_sampler": LIST}, {"batch_sampler": [torch.tensor(one) for one in LIST]}, ""),
    "an object with a list": (
        {"batch_sampler": Batches(LIST)},
        {"batch_sampler": Batches(OTHER_LIST)},
        "batch_sampler.batches has other contents than it had",
    ),
    "an object with the same tensors": (
        {"batch_sampler": Batches(LIST)},
        {"batch_sampler": Batches([torch.tensor(one) for one in LIST])},
        "",
    ),
    "an epoch that was set": ({"batch_sampler": Batches(LIST)}, {"batch_sampler": Batches(LIST, epoch=3)}, ""),
    "what is private": ({"batch_sampler": Batches(LIST, _t=1)}, {"batch_sampler": Batches(LIST, _t=2)}, ""),
    "texts": (
        {"batch_sampler": Batches(LIST, by={"a": ["x", "y"], "b": {1}})},
        {"batch_sampler": Batches(LIST, by={"a": ["x", "z"], "b": {1}})},
        "batch_sampler.by has other contents than it had",
    ),
    "what nobody can compare": (
        {"batch_sampler": Batches(LIST, key=len, objects=[object()])},
        {"batch_sampler": Batches(LIST, key=sum, objects=[object()])},
        "",
    ),
    "a seed": ({"sampler": Seeded(1)}, {"sampler": Seeded(2)}, "sampler.seed was 1, and is 2 now"),
    "the same seed": ({"sampler": Seeded(1)}, {"sampler": Seeded(np.int64(1))}, ""),
    "a seed below batches of torch's": (
        {"batch_sampler": BatchSampler(Seeded(1), 2, False)},
        {"batch_sampler": BatchSampler(Seeded(2), 2, False)},
        "sampler.seed was 1, and is 2 now",
    ),
    "a sampler below batches of one's own": (
        {"batch_sampler": Grouped(SequentialSampler(range(12)), 2, False)},
        {"batch_sampler": Grouped(RandomSampler(range(12)), 2, False)},
        "batch_sampler.sampler's class was torch.utils.data.sampler.SequentialSampler, and is",
    ),
    "another size of batches of one's own": (
        {"batch_sampler": Grouped(SequentialSampler(range(12)), 2, False)},
        {"batch_sampler": Grouped(SequentialSampler(range(12)), 3, False)},
        "batch_sampler.batch_size was 2, and is 3 now",
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_of_the_script_s_own(name: str) -> None:
    before, after, differs = SAMPLERS[name]
    data = Numbers(0, 12)
    torch.manual_seed(7)
    whole = numbers(iter(DataLoader(data, **copy.deepcopy(after))))
    first, rest, said = continued(DataLoader(data, **before), DataLoader(data, **after), 1)
    if differs:
        assert said.startswith(f"loader: {differs}")
        assert ANEW in said
        assert sorted(rest) == sorted(whole)
    else:
        assert said == ""
        assert first + rest == whole


def test_counters_of_a_running_sampler_are_no_difference() -> None:
    """Its first numbers count, from when this or another Checkpointer first got the loader."""
    loaders = [DataLoader(Numbers(0, 12), batch_sampler=Batches(LIST)) for _ in range(2)]
    for before, after in (loaders, loaders[::-1], loaders[:1] * 2):
        first, rest, said = continued(before, after, 2)
        assert said == ""
        assert first + rest == [0, 1, 2, 3, 4, 5]
    assert loaders[0].batch_sampler.done > 3
    batches = counted(loaders[0])
    numbers(iter(batches), 1)
    state = copy.deepcopy(batches.state_dict())
    loaders[0].batch_sampler.batches = OTHER_LIST
    (found, _) = counted(loaders[0]).compare(state)
    assert found.sentence == "loader: batch_sampler.batches has other contents than it had"


def test_large_attributes_are_not_read() -> None:
    loader = DataLoader(Numbers(0, 12), batch_sampler=Batches(LIST, data=torch.empty(1 << 26, device="meta")))
    made = counted(loader).state_dict()["facts"]["made_with"]
    assert set(made) == {"batch_sampler.batches", "batch_sampler.done"}


def test_of_other_ranks_samplers_may_be_made_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = counted(DataLoader(Numbers(0, 12), batch_sampler=Batches(LIST, rank=0)))
    numbers(iter(batches), 1)
    state = batches.state_dict()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    found = counted(DataLoader(Numbers(0, 12), batch_sampler=Batches(LIST, rank=1))).compare(state)
    assert not [one for one in found if "batch_sampler" in one.sentence]


# -- streams


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        (Stream(10), Stream(12), "dataset.samples was 10, and is 12 now"),
        (
            ChainDataset([Stream(4), Stream(6)]),
            ChainDataset([Stream(6), Stream(4)]),
            "dataset.datasets[0].samples was 4, and is 6 now; loader: dataset.datasets[1].samples was 6, and is 4 now",
        ),
        (ChainDataset([Stream(8)]), ChainDataset([Stream(8), Stream(2)]), "dataset.datasets was 1, and is 2 now"),
        (ChainDataset([Stream(4), Stream(6)]), ChainDataset([Stream(4), Stream(6)]), ""),
    ],
)
def test_a_changed_stream_continues_with_a_warning(before: Any, after: Any, differs: str) -> None:
    _, rest, said = continued(DataLoader(before, 2), DataLoader(after, 2), 2)
    assert rest == list(after)[4:]
    if differs:
        assert said == (
            f"loader: {differs}; the epoch continues after 2 batches. If that changes the order of its samples, some "
            "may be repeated or skipped"
        )
    else:
        assert said == ""


# -- whole runs


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_with_another_split(tmp_path: Path, workers: int) -> None:
    def life(dataset: Dataset[int], until: int | None) -> list[int]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(dataset, 2, shuffle=True, num_workers=workers)
        found: list[int] = []
        with Checkpointer(
            tmp_path / "s", model=model, optimizer=optimizer, loader=loader, strategy="full", signals=False
        ) as checkpointer:
            checkpointer.resume()
            for batch in checkpointer.loader:
                found += batch.tolist()
                optimizer.step()
                checkpointer.step()
                if len(found) == until:
                    break
        return found

    first = life(taken(range(8)), 4)
    with pytest.warns(DeterminismWarning, match=OTHER):
        assert sorted(life(taken(range(12, 20)), None)) == list(range(12, 20))
    assert set(first) < set(range(8))
