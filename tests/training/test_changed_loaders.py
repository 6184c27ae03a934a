"""A loader that has changed since the run was saved: the remaining samples of the epoch, and the warnings."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torchdata = pytest.importorskip("torchdata.stateful_dataloader")

from torch.utils.data import (  # noqa: E402 - torch decides whether this file runs at all
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.errors import FormatError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from ckptstore.training.loaders import loader_contents  # noqa: E402
from ckptstore.training.loaders.counted_batches import CountedBatches  # noqa: E402
from ckptstore.training.loaders.loader_counting import counted  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group  # noqa: E402
from tests.forms import short_or  # noqa: E402
from tests.write.rank_threads import as_ranks  # noqa: E402

# torchdata uses a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

TWICE = "already yielded are repeated if the loader still has them, and none is skipped"


def taken(batches: Iterator[Any], count: int = 10**9) -> list[list[int]]:
    found = []
    while len(found) < count and (batch := next(batches, None)) is not None:
        found.append(batch.tolist() if isinstance(batch, torch.Tensor) else list(batch))
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [one for batch in batches for one in batch]


def resumed(loader: Any, state: Any) -> tuple[CountedBatches, str]:
    """A loader restored to a position, as in another process -> it, and the warnings."""
    torch.manual_seed(99)
    batches = counted(loader)
    state = copy.deepcopy(state)
    compared = batches.compare(state)
    batches.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches.remark()
    said = "".join(str(one.message) for one in caught)
    assert said == "; ".join(one.sentence for one in compared)
    assert all(one.category is DeterminismWarning for one in caught)
    return batches, said


def cut_off(loader: Any, after: int) -> tuple[list[list[int]], Any]:
    """Batches of a new epoch, and the state after them."""
    torch.manual_seed(1)
    batches = counted(loader)
    found = taken(iter(batches), after)
    return found, batches.state_dict()


@st.composite
def lives(draw: st.DrawFn) -> dict[str, Any]:
    """Three processes, or groups of them, that continue one epoch."""
    sizes = st.sampled_from((1, 2, 3, 4))
    ranks = draw(st.one_of(st.just((1, 1, 1)), st.tuples(*[st.sampled_from((1, 2, 4))] * 3)))
    return {
        "samples": draw(st.sampled_from((24, 29, 32))),
        "ranks": ranks,
        "shared": max(ranks) > 1 or draw(st.booleans()),
        "shuffled": draw(st.booleans()),
        "stateful": draw(st.booleans()),
        "generator": draw(st.booleans()),
        "sizes": draw(st.tuples(sizes, sizes, sizes)),
        "steps": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "seed": draw(st.integers(0, 99)),
    }


def group(one: dict[str, Any], life: int) -> list[CountedBatches]:
    data, found = list(range(one["samples"])), []
    for rank in range(one["ranks"][life]):
        options: dict[str, Any] = {"batch_size": one["sizes"][life]}
        if one["shared"]:
            sampler = DistributedSampler(data, one["ranks"][life], rank, shuffle=one["shuffled"])
            sampler.set_epoch(5)
            options["sampler"] = sampler
        else:
            options["shuffle"] = one["shuffled"]
        if one["generator"]:
            options["generator"] = torch.Generator().manual_seed(life)
        found.append(counted((torchdata.StatefulDataLoader if one["stateful"] else DataLoader)(data, **options)))
    return found


@settings(max_examples=short_or(60, 500), deadline=None)
@given(lives())
def test_each_sample_of_an_epoch_comes_once(one: dict[str, Any]) -> None:
    """With other batch sizes and other numbers of ranks; the warning counts the samples that are repeated."""
    states: list[Any] = []
    seen: list[int] = []
    twice = 0
    for life in range(3):
        torch.manual_seed(one["seed"] + 100 * life)
        ranks = group(one, life)
        if states:
            said = ""
            for rank, batches in enumerate(ranks):
                state = copy.deepcopy(states[rank % len(states)])
                said = "; ".join(difference.sentence for difference in batches.compare(state))
                assert not any(difference.prevents for difference in batches.compare(state))
                batches.load_state_dict(state)
            changed = any(one[what][life] != one[what][life - 1] for what in ("ranks", "sizes"))
            assert bool(said) == changed
            found = re.search(r"and (\d+) are repeated so that", said)
            more = int(found[1]) if found else 0
            if changed and len(set(seen)) < one["samples"]:  # those come last
                twice = more
        else:
            twice = math.ceil(one["samples"] / len(ranks)) * len(ranks) - one["samples"] if one["shared"] else 0
        running = [iter(batches) for batches in ranks]
        steps = one["steps"][life] if life < 2 else 10**9
        for _ in range(steps):
            given_out = [next(each, None) for each in running]
            if given_out[0] is None:
                assert given_out == [None] * len(running)  # the same number for each rank: a group would hang
                break
            seen += flat([batch.tolist() for batch in given_out])
        else:
            states = [batches.state_dict() for batches in ranks]
            continue
        break
    assert sorted(set(seen)) == list(range(one["samples"]))
    assert len(seen) - one["samples"] == twice


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::ckptstore.DeterminismWarning"
)  # of several threads; the warnings are checked above
def test_ranks_that_save_together_and_are_others_each_time(tmp_path: Path) -> None:
    """2 ranks, then 4, then 2: the epoch continues, and the next one is whole."""
    data = list(range(48))

    def work(group: Group, until: int | None) -> list[list[int]]:
        sampler = DistributedSampler(data, group.size, group.rank)
        sampler.set_epoch(3)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        model = torch.nn.BatchNorm1d(2)  # which begins alike on all ranks
        parts: dict[str, Any] = {"model": model, "loader": loader, "group": group}
        found: list[list[int]] = []
        with Checkpointer(tmp_path / "s", strategy="full", signals=False, **parts) as checkpointer:
            checkpointer.resume()
            for batch in checkpointer.loader:
                found.append(batch.tolist())
                checkpointer.step()
                if checkpointer.steps_done == until:
                    return found
            assert sum(1 for _ in checkpointer.loader) == len(data) // group.size // 2
        return found

    seen = []
    for ranks, until in ((2, 5), (4, 7), (2, None)):
        for batches in as_ranks(ranks, partial(work, until=until)):
            assert isinstance(batches, list), batches
            seen += flat(batches)
    assert sorted(seen) == data


def test_another_batch_size_continues_in_the_same_order() -> None:
    data = list(range(40))
    whole = flat(cut_off(DataLoader(data, batch_size=4, shuffle=True), 10)[0])
    first, state = cut_off(DataLoader(data, batch_size=4, shuffle=True), 3)
    batches, said = resumed(DataLoader(data, batch_size=10, shuffle=True), state)
    assert said == (
        "loader: a batch had 4 samples, and has 10 now; the epoch continues after the 12 samples already yielded: "
        "the other 28 are yielded once each"
    )
    rest = taken(iter(batches))
    assert [len(batch) for batch in rest] == [10, 10, 8]
    assert flat(first) + flat(rest) == whole
    assert batches.loader.batch_sampler.sampler is not batches.loader.sampler
    assert sorted(flat(taken(iter(batches)))) == data  # the next epoch is a whole one
    assert batches.loader.batch_sampler.sampler is batches.loader.sampler


def test_in_the_middle_of_a_shortened_epoch() -> None:
    data = list(range(40))
    first, state = cut_off(DataLoader(data, batch_size=4, shuffle=True), 3)
    batches, _ = resumed(DataLoader(data, batch_size=10, shuffle=True), state)
    second = taken(iter(batches), 1)
    batches, said = resumed(DataLoader(data, batch_size=10, shuffle=True), batches.state_dict())
    assert said == ""
    assert sorted(flat(first) + flat(second) + flat(taken(iter(batches)))) == data


@pytest.mark.parametrize("kind", [DataLoader, torchdata.StatefulDataLoader])
def test_a_dataset_that_grew(kind: Any) -> None:
    first, state = cut_off(kind(list(range(12)), batch_size=2), 3)
    batches, said = resumed(kind(list(range(15)), batch_size=2), state)
    assert "the dataset had 12 samples, and has 15 now; the epoch continues after the 6 samples" in said
    assert flat(first) + flat(taken(iter(batches))) == list(range(15))


def test_a_dataset_that_shrank_below_the_samples_already_yielded() -> None:
    _, state = cut_off(DataLoader(list(range(12)), batch_size=2), 3)
    batches, said = resumed(DataLoader(list(range(5)), batch_size=2), state)
    assert said.endswith("all samples of the epoch were already yielded (6)")
    assert taken(iter(batches)) == []
    assert flat(taken(iter(batches))) == list(range(5))


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"shuffle": False}, "the order of samples was shuffled by torch.utils.data.sampler.RandomSampler, and is the"),
        ({"shuffle": True, "longer": True}, "the dataset had 12 samples, and has 13 now"),
        ({"sampler": DistributedSampler(range(12), 2, 0)}, "the samples were for 1 ranks, and are for 2 now"),
    ],
)
def test_another_order_restarts_the_epoch(options: dict[str, Any], differs: str) -> None:
    _, state = cut_off(DataLoader(list(range(12)), batch_size=2, shuffle=True), 2)
    data = list(range(12 + options.pop("longer", False)))
    loader = DataLoader(data, batch_size=2, **options)
    batches, said = resumed(loader, state)
    assert differs in said
    assert said.endswith(f"the 4 samples {TWICE}")
    assert [one.prevents for one in batches.compare(state)][-1]
    assert len(flat(taken(iter(batches)))) == len(loader.sampler)
    assert batches.epoch == 0


class Split(IterableDataset[int]):
    """A stream that its worker processes divide among them."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        yield from range(22) if worker is None else range(worker.id, 22, worker.num_workers)


def test_a_stream_that_other_workers_divide() -> None:
    _, state = cut_off(DataLoader(Split(), 4), 3)
    _, told = resumed(DataLoader(Split(), 4, num_workers=2), state)
    assert "some samples may be repeated or skipped" in told


def weighted(weights: Any, count: int = 12, replacement: bool = True) -> Any:
    return WeightedRandomSampler(weights, count, replacement)


@pytest.mark.parametrize("kind", [DataLoader, torchdata.StatefulDataLoader])
@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        (SubsetRandomSampler(range(8)), SubsetRandomSampler(range(4, 12)), "the sampler has other indices than it had"),
        (list(range(8)), list(range(4, 12)), "the sampler has other indices than it had"),
        (weighted([1.0] * 12), weighted([1.0] * 6 + [2.0] * 6), "the sampler has other weights than it had"),
        (weighted([1.0] * 12), weighted([1.0] * 12, 11), "the sampler's num_samples was 12, and is 11 now"),
        (
            weighted([1.0] * 12),
            weighted([1.0] * 12, replacement=False),
            "the sampler's replacement was True, and is False now",
        ),
    ],
)
def test_other_contents_of_a_sampler_restart_the_epoch(kind: Any, before: Any, after: Any, differs: str) -> None:
    _, state = cut_off(kind(list(range(12)), batch_size=2, sampler=before), 2)
    batches, said = resumed(kind(list(range(12)), batch_size=2, sampler=after), state)
    assert said == f"loader: {differs}; the epoch starts again: the 4 samples {TWICE}"
    assert [one.prevents for one in batches.compare(state)][-1]
    assert len(flat(taken(iter(batches)))) == len(after)


class Thinned(Sampler[int]):
    """A custom sampler class: each second sample, or each third."""

    def __init__(self, each: int) -> None:
        self.each = each

    def __len__(self) -> int:
        return 12 // self.each

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 12, self.each))


def test_a_sampler_of_the_script_s_own_that_has_another_length() -> None:
    _, state = cut_off(DataLoader(list(range(12)), sampler=Thinned(2)), 2)
    batches, said = resumed(DataLoader(list(range(12)), sampler=Thinned(3)), state)
    assert (
        "the sampler yielded 6 samples in an epoch, and yields 4 now; loader: sampler.each was 2, and is 3 now" in said
    )
    assert "the epoch starts again" in said
    assert flat(taken(iter(batches))) == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SubsetRandomSampler(range(8)), SubsetRandomSampler(torch.arange(8, dtype=torch.int32))),
        (SubsetRandomSampler(list(range(8))), SubsetRandomSampler(tuple(range(8)))),
        (weighted([1] * 8), weighted(torch.ones(8))),
    ],
)
def test_the_same_contents_in_another_form_continue(before: Any, after: Any) -> None:
    first, state = cut_off(DataLoader(list(range(12)), sampler=before), 3)
    batches, said = resumed(DataLoader(list(range(12)), sampler=after), state)
    assert said == ""
    assert len(flat(first) + flat(taken(iter(batches)))) == len(before)
    batches, said = resumed(DataLoader(list(range(12)), sampler=after), {**state, "facts": without(state["facts"])})
    assert said == ""


def without(facts: dict[str, Any]) -> dict[str, Any]:
    """As an earlier version kept them."""
    return {name: one for name, one in facts.items() if name != "contents"}


def test_the_contents_of_a_sampler_are_read_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(loader_contents, "xxh3_128", lambda data: read.append(len(data)) or "0")
    batches = counted(DataLoader(range(12), sampler=SubsetRandomSampler(range(12))))
    batches.state_dict()
    assert not read
    for _ in range(2):
        for _ in batches:
            batches.state_dict()
    batches.state_dict()
    row, blocks = 24, 1  # the dataset: one row of numbers, and the digest of its block
    assert read == [96, row, blocks] * 2


@pytest.mark.parametrize("first", [True, False])
def test_an_added_or_removed_generator_restarts_the_epoch(first: bool) -> None:
    def loader(own: bool) -> Any:
        return DataLoader(range(22), 4, shuffle=True, generator=torch.Generator().manual_seed(3) if own else None)

    _, state = cut_off(loader(first), 3)
    batches, told = resumed(loader(not first), state)
    assert sorted(flat(taken(iter(batches)))) == list(range(22))
    assert "the order of samples was drawn from" in told
    assert "the 12 samples already yielded are repeated" in told


def test_a_generator_that_came_where_the_sampler_says_how_it_drew() -> None:
    def loader(own: bool) -> Any:
        generator = torch.Generator().manual_seed(3) if own else None
        return torchdata.StatefulDataLoader(range(22), 4, shuffle=True, generator=generator)

    given, state = cut_off(loader(False), 3)
    batches, told = resumed(loader(True), state)
    assert sorted(flat(given) + flat(taken(iter(batches)))) == list(range(22))
    assert not told


@pytest.mark.parametrize("shuffled", [True, False])
def test_samples_that_drop_last_drops_are_counted(shuffled: bool) -> None:
    data = list(range(13))
    first, state = cut_off(DataLoader(data, batch_size=2, shuffle=shuffled), 2)
    batches, said = resumed(DataLoader(data, batch_size=4, shuffle=shuffled, drop_last=True), state)
    assert said.endswith("the other 9 are yielded once each, except 1 that drop_last drops")
    assert len({*flat(first), *flat(taken(iter(batches)))}) == 12


def test_shares_that_drop_last() -> None:
    def loaders(ranks: int, size: int) -> list[Any]:
        samplers = [DistributedSampler(range(26), ranks, rank, drop_last=True) for rank in range(ranks)]
        return [DataLoader(range(26), batch_size=size, sampler=sampler, drop_last=True) for sampler in samplers]

    first = [cut_off(loader, 2) for loader in loaders(2, 2)]
    seen = flat([flat(batches) for batches, _ in first])
    for rank, loader in enumerate(loaders(4, 2)):
        batches, said = resumed(loader, first[rank % 2][1])
        assert said.endswith("the other 18 are yielded once each, except 2 that drop_last drops")
        seen += flat(taken(iter(batches)))
    assert len(seen) == len(set(seen)) == 24


def test_the_other_number_of_workers() -> None:
    def loader(workers: int) -> Any:
        return torchdata.StatefulDataLoader(list(range(12)), batch_size=2, num_workers=workers)

    first, state = cut_off(loader(0), 2)
    batches, said = resumed(loader(1), state)
    assert "0 worker processes loaded samples, and 1 do now" in said
    assert flat(first) + flat(taken(iter(batches))) == list(range(12))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(20)


@pytest.mark.parametrize("kind", [DataLoader, torchdata.StatefulDataLoader])
@pytest.mark.parametrize(("size", "rest"), [(3, 6), (4, 4)])
def test_a_stream_whose_batches_cannot_be_cut(kind: Any, size: int, rest: int) -> None:
    _, state = cut_off(kind(Stream(), batch_size=2), 3)
    batches, said = resumed(kind(Stream(), batch_size=size), state)
    again = 6 - rest
    twice = (
        f"{again} of the 6 samples already yielded are repeated"
        if again
        else "none of the 6 samples already yielded is repeated"
    )
    assert said.endswith(f"continues after {6 // size} batches of {size} samples: {twice}, and none is skipped")
    assert [one.prevents for one in batches.compare(state)][-1] == bool(again)
    assert flat(taken(iter(batches))) == list(range(rest, 20))


def test_ranks_that_share_in_an_unknown_way(monkeypatch: pytest.MonkeyPatch) -> None:
    first, state = cut_off(DataLoader(list(range(12)), batch_size=2), 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    batches, said = resumed(DataLoader(list(range(12)), batch_size=2), state)
    assert "for 1 ranks, and are for 2 now" in said
    assert said.endswith("is unknown, so some may be repeated or skipped")
    assert [one.prevents for one in batches.compare(state)][-1]
    assert flat(first) + flat(taken(iter(batches))) == list(range(12))


def test_batches_of_a_sampler_s_own_making() -> None:
    class Own(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0], [1, 2], [3, 4, 5], [6])

    def loader(kind: Any) -> DataLoader[int]:
        return DataLoader(list(range(7)), batch_sampler=kind(SequentialSampler(range(7)), 2, drop_last=False))

    first, state = cut_off(loader(Own), 2)
    batches, said = resumed(loader(Own), state)
    assert said == ""
    assert flat(first) + flat(taken(iter(batches))) == list(range(7))
    batches, said = resumed(loader(BatchSampler), state)
    assert said.endswith(f"the 2 batches {TWICE}")
    assert flat(taken(iter(batches))) == list(range(7))


def test_the_order_is_that_of_the_batch_sampler() -> None:
    """Not that of the loader's own sampler, which nothing uses then."""

    def loader(size: int, kind: Any) -> DataLoader[int]:
        return DataLoader(list(range(12)), batch_sampler=BatchSampler(kind(range(12)), size, drop_last=False))

    first, state = cut_off(loader(2, RandomSampler), 2)
    batches, said = resumed(loader(4, RandomSampler), state)
    assert said.endswith("the other 8 are yielded once each")
    assert sorted(flat(first) + flat(taken(iter(batches)))) == list(range(12))
    _, said = resumed(loader(2, SequentialSampler), state)
    assert "the epoch starts again: the 4 samples" in said


def test_an_epoch_that_was_over() -> None:
    loader = DataLoader(list(range(12)), batch_size=2)
    _, state = cut_off(loader, 99)
    batches, said = resumed(DataLoader(list(range(12)), batch_size=3), state)
    assert said == "loader: a batch had 2 samples, and has 3 now; another epoch begins with that"
    assert flat(taken(iter(batches))) == list(range(12))
    assert batches.epoch == 1


def test_the_epoch_of_a_sampler_that_a_script_sets_to_another() -> None:
    def loader(epoch: int) -> DataLoader[int]:
        sampler = DistributedSampler(list(range(12)), 1, 0)
        sampler.set_epoch(epoch)
        return DataLoader(list(range(12)), sampler=sampler)

    first, state = cut_off(loader(3), 5)
    batches, _ = resumed(loader(3), state)
    assert sorted(flat(first) + flat(taken(iter(batches)))) == list(range(12))
    batches, _ = resumed(loader(0), state)
    with pytest.warns(DeterminismWarning, match=r"set to 0, but the checkpoint is in the middle of epoch 3"):
        rest = taken(iter(batches))
    assert sorted(flat(first) + flat(rest)) == list(range(12))


# -- states of earlier versions, and of other kinds


def test_a_state_of_an_earlier_version_that_counted() -> None:
    loader = DataLoader(list(range(12)), shuffle=True, generator=torch.Generator().manual_seed(3))
    first, state = cut_off(loader, 5)
    begun = {"global": state["begun"]["global"], "own": list(state["begun"]["own"].values())}
    earlier = {"epoch": 0, "given": 5, "begun": begun}
    batches, said = resumed(DataLoader(list(range(12)), shuffle=True, generator=torch.Generator()), earlier)
    assert said == ""
    assert sorted(flat(first) + flat(taken(iter(batches)))) == list(range(12))


def test_a_state_of_an_earlier_version_that_asked() -> None:
    loader = torchdata.StatefulDataLoader(list(range(12)), shuffle=True)
    first, state = cut_off(loader, 5)
    batches, _ = resumed(torchdata.StatefulDataLoader(list(range(12)), shuffle=True), state["inner"])
    before = torch.get_rng_state()
    assert sorted(flat(first) + flat(taken(iter(batches)))) == list(range(12))
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(FormatError, match="DataLoader cannot restore it"):
        counted(DataLoader(list(range(12)))).compare(state["inner"])


@pytest.mark.parametrize(
    ("before", "after"), [(DataLoader, torchdata.StatefulDataLoader), (torchdata.StatefulDataLoader, DataLoader)]
)
def test_a_loader_of_another_kind(before: Any, after: Any) -> None:
    first, state = cut_off(before(list(range(12)), batch_size=2), 2)
    batches, said = resumed(after(list(range(12)), batch_size=2), state)
    assert said == ""
    assert flat(first) + flat(taken(iter(batches))) == list(range(12))


def test_a_loader_that_does_not_take_its_state_back(caplog: pytest.LogCaptureFixture) -> None:
    class Once(torchdata.StatefulDataLoader):
        def load_state_dict(self, state: Any) -> None:
            if state:
                raise RuntimeError("no")

    first, state = cut_off(Once(list(range(12)), batch_size=2), 2)
    batches, _ = resumed(Once(list(range(12)), batch_size=2), state)
    assert "Once.load_state_dict() raises RuntimeError: no" in caplog.text
    assert flat(first) + flat(taken(iter(batches))) == list(range(12))
