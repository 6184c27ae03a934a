"""Facts that decide which samples a data loader yields and in which order; and how two records of them differ.

A position in an epoch is a number of *samples* in its order, over all ranks that share it. If the order is the same, a
run with another batch size or another number of ranks continues after that position, and each sample still comes once.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ckptstore.training import rng
from ckptstore.training.loaders import loader_contents

__all__ = [
    "Difference",
    "batch_sampler",
    "differences",
    "facts",
    "made",
    "order",
    "order_of_all_ranks",
    "other_stream",
    "own_generators",
    "position",
    "redrawn",
    "same_order",
    "sampler_of",
    "sharing_sampler",
]

_FIRST: Final[weakref.WeakKeyDictionary[DataLoader[Any], dict[str, Any]]] = weakref.WeakKeyDictionary()
"""The arguments of loaders when they were first seen."""
_IN_ORDER: Final = "the dataset's own order"


class Difference(NamedTuple):
    """One thing that has changed since a checkpoint was saved.

    Attributes:
        sentence: the old and the new value, in words.
        prevents: it prevents an exact continuation: samples are skipped or repeated.
    """

    sentence: str
    prevents: bool


def batch_sampler(loader: Any) -> BatchSampler | None:
    """The sampler that groups indices into batches, if it is torch's own; else None."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    found = loader.batch_sampler
    if not isinstance(found, BatchSampler):
        return None
    # A subclass may choose batches differently. torchdata's does not.
    own = type(found) is BatchSampler or _is_torchdata(type(found))
    return found if own else None


def sampler_of(loader: Any) -> Any:
    """The sampler of single indices, also inside a batch sampler; None: unknown."""
    found = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = getattr(loader, "sampler", None) if found is None else found
    return getattr(found, "in_place_of", found)


def sharing_sampler(sampler: object) -> DistributedSampler[Any] | None:
    """The sampler if it divides one order among ranks in a known way; else None."""
    if type(sampler) is DistributedSampler:
        return sampler
    if isinstance(sampler, DistributedSampler) and _is_torchdata(type(sampler)):
        return sampler
    return None


def facts(
    loader: Any,
    *,
    contents: bool = True,
    made: Mapping[str, Any] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What each checkpoint records of a loader: numbers, flags and names. None: unknown.

    ``batch_size``, ``samples`` (the dataset's length), ``epoch_samples`` (of one rank), ``order`` (which order, in
    words), ``drawn_from`` (which generator shuffles it), ``drop_last``, ``ranks`` (that share the samples), ``shared``
    (whether it is known how), ``drop_last_share`` (if samples do not fill equal shares), ``workers``, ``persistent``,
    ``kind`` (its class), ``contents`` (what torch's sampler was made with: a digest of each sequence, each other
    value), ``composition`` (of the dataset), ``made_with`` (samplers of the script's own), ``stream`` (an
    `IterableDataset`); see `loader_contents`.

    Args:
        contents: whether to read the contents of sampler and dataset. That reads all indices: do it once in an epoch.
        made: ``made_with`` and ``stream`` when the loader was new.
        beside: the facts to compare with. If a dataset has grown, only its earlier samples are read.
    """
    dataset = getattr(loader, "dataset", None)
    like = None if beside is None else beside.get("composition")
    batches = batch_sampler(loader)
    sharing = sharing_sampler(sampler_of(loader))
    size = batches.batch_size if batches is not None else getattr(loader, "batch_size", None)
    if batches is None and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        size = size if isinstance(loader.dataset, IterableDataset) else None  # a custom sampler makes the batches
    return {
        "kind": _name(type(loader)),
        "batch_size": _number(size),
        "samples": _length(getattr(loader, "dataset", None)),
        "epoch_samples": None if batches is None else _length(sampler_of(loader)),
        "order": order(loader),
        "drawn_from": _drawn_from(loader),
        "drop_last": _flag(batches.drop_last if batches is not None else getattr(loader, "drop_last", None)),
        "ranks": sharing.num_replicas if sharing is not None else _ranks(),
        "shared": sharing is not None,
        "drop_last_share": sharing is not None and sharing.drop_last,
        "workers": _number(getattr(loader, "num_workers", None)),
        "persistent": _flag(getattr(loader, "persistent_workers", None)),
        "contents": loader_contents.contents(sampler_of(loader)) if contents else None,
        "composition": loader_contents.composition(dataset, like) if contents and dataset is not None else None,
        **(made or {"made_with": None, "stream": None}),
    }


def made(loader: Any) -> dict[str, Any]:
    """The arguments of a new loader: ``made_with`` and ``stream`` of `facts`.

    A sampler may count in its attributes, so for a known loader the numbers are those of the first call.
    """
    now = {"made_with": loader_contents.made_with(loader), "stream": loader_contents.stream(loader)}
    if not isinstance(loader, DataLoader):
        return now
    first = _FIRST.setdefault(loader, now)
    return {
        kind: found
        and {name: one if isinstance(one, list) else first[kind].get(name, one) for name, one in found.items()}
        for kind, found in now.items()
    }


def order(loader: Any) -> str | None:
    """The order in which a loader reads its dataset, in words; None: unknown."""
    sampler, dataset = sampler_of(loader), getattr(loader, "dataset", None)
    if sampler is None or not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
        return None
    if batch_sampler(loader) is None and loader.batch_sampler is not None:
        return f"that of {_name(type(loader.batch_sampler))}"
    if type(sampler) is SequentialSampler:
        return _IN_ORDER
    sharing = sharing_sampler(sampler)
    if sharing is not None:
        return f"shuffled by DistributedSampler with seed {sharing.seed}" if sharing.shuffle else _IN_ORDER
    name = _name(type(sampler))
    if type(sampler) is RandomSampler or _is_torchdata(type(sampler)):
        drawn = getattr(sampler, "num_samples", None)
        some = "" if drawn is None or drawn == _length(dataset) else f" of {drawn} samples"
        return f"shuffled by {name}{some}{' with replacement' if getattr(sampler, 'replacement', False) else ''}"
    return f"that of {name}"


def position(saved: Mapping[str, Any]) -> int | None:
    """How many samples of the epoch's order were yielded, over all ranks that share it; None: unknown.

    Args:
        saved: a loader's state; see `CountedBatches.state_dict`.
    """
    before = saved["facts"]
    if before["batch_size"] is None:
        return None
    given: int = saved["start"] + saved["given"] * before["batch_size"] * (before["ranks"] if before["shared"] else 1)
    if before["epoch_samples"] is None:
        return given
    # The last batch may have been a short one. Shares of ranks are made equal.
    end: int = before["epoch_samples"] * (before["ranks"] if before["shared"] else 1)
    return min(given, end)


def same_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the samples up to any position are the same as before."""
    if before["order"] != now["order"] or redrawn(before, now):
        return False
    if _other_contents(before, now) or _other_sampler(before, now) or not _same_samples(before, now):
        return False
    if before["order"] == _IN_ORDER:
        return True  # also if the dataset grew: new samples come last
    if before["samples"] != now["samples"]:
        return False
    if not before["shared"] and before["epoch_samples"] != now["epoch_samples"]:
        return False
    # With worker processes torchdata starts shuffling twice, and draws from its generator both times.
    twice = "torchdata." in str(before["order"])
    return not twice or (bool(before["workers"]), before["persistent"]) == (bool(now["workers"]), now["persistent"])


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The changed facts, each as a sentence."""
    found = []
    if before["batch_size"] != now["batch_size"]:
        found.append(f"a batch had {_said(before['batch_size'])} samples, and has {_said(now['batch_size'])} now")
    if before["samples"] != now["samples"]:
        found.append(f"the dataset had {_said(before['samples'])} samples, and has {_said(now['samples'])} now")
    if before["order"] != now["order"]:
        found.append(f"the order of samples was {before['order'] or 'unknown'}, and is {now['order'] or 'unknown'} now")
    if (drawn := redrawn(before, now)) is not None:
        found.append(drawn)
    if before["order"] == now["order"] and before["samples"] == now["samples"]:
        found += _other_contents(before, now) or _other_length(before, now)
    if before["order"] == now["order"]:
        found += _other_sampler(before, now)
    if not _same_samples(before, now):
        found.append("the dataset has other samples than it had, or in another order (Subset, ConcatDataset)")
    found += other_stream(before, now)
    if before["drop_last"] != now["drop_last"]:
        found.append(f"drop_last was {before['drop_last']}, and is {now['drop_last']} now")
    if before["ranks"] != now["ranks"]:
        found.append(f"the samples were for {before['ranks']} ranks, and are for {now['ranks']} now")
    if before["workers"] != now["workers"]:
        found.append(
            f"{_said(before['workers'])} worker processes loaded samples, and {_said(now['workers'])} do now: what "
            "draws random numbers while samples are loaded draws others"
        )
    return found


def redrawn(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A sentence if another generator shuffles the samples; None: the same one, or unknown."""
    was, is_now = before.get("drawn_from"), now["drawn_from"]  # earlier versions did not keep it
    if was is None or is_now is None or was == is_now:
        return None
    return f"the order of samples was drawn from {was}, and is drawn from {is_now} now"


def _other_contents(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences in the sampler's contents, each as a sentence; none if one side is unknown."""
    was, is_now = before.get("contents"), now["contents"]  # earlier versions did not keep it
    if was is None or is_now is None:
        return []
    found = []
    for name in sorted(was.keys() & is_now.keys()):
        if was[name] == is_now[name]:
            continue
        if name in loader_contents.SEQUENCES:
            found.append(f"the sampler has other {name} than it had")
        else:
            found.append(f"the sampler's {name} was {was[name]}, and is {is_now[name]} now")
    return found


def _other_sampler(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences in the script's own samplers, which may depend on the rank and the number of ranks."""
    if before["ranks"] != now["ranks"]:
        return []
    return loader_contents.other_attributes(before.get("made_with"), now["made_with"])


def other_stream(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences in an `IterableDataset`, which may depend on the rank and the number of ranks."""
    if before["ranks"] != now["ranks"]:
        return []
    return loader_contents.other_attributes(before.get("stream"), now["stream"])


def _same_samples(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return loader_contents.same_samples(before.get("composition"), now["composition"])


def _other_length(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence if a sampler yields another number of samples of the same dataset."""
    was, is_now = before["epoch_samples"], now["epoch_samples"]
    if before["shared"] or now["shared"] or was is None or is_now is None or was == is_now:
        return []
    return [f"the sampler yielded {was} samples in an epoch, and yields {is_now} now"]


def order_of_all_ranks(sampler: DistributedSampler[Any]) -> list[int]:
    """The order that ranks share in the sampler's epoch, each sample once, without padding."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.drop_last = 1, 0, False
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]  # it has a length, or no order
    return list(DistributedSampler.__iter__(whole))


def own_generators(loader: Any) -> dict[str, rng.Generator]:
    """The generators among the attributes of a loader, its samplers and its dataset, by place, each once."""
    batches = getattr(loader, "batch_sampler", None)
    whole = getattr(batches, "batch_sampler", None)  # Accelerate's shares batches of this one among ranks
    holders = {
        "": loader,
        "sampler.": getattr(loader, "sampler", None),
        "batch_sampler.": batches,
        "batch_sampler.sampler.": sampler_of(loader),
        "batch_sampler.batch_sampler.": whole,
        "batch_sampler.batch_sampler.sampler.": getattr(whole, "sampler", None),
        "dataset.": getattr(loader, "dataset", None),
    }
    found: dict[str, rng.Generator] = {}
    seen: set[int] = set()
    for prefix, holder in holders.items():
        for name, one in getattr(holder, "__dict__", {}).items():
            if isinstance(one, rng.Generator) and id(one) not in seen:
                seen.add(id(one))
                found[f"{prefix}{name}"] = one
    return found


def _drawn_from(loader: Any) -> str | None:
    """Which generator shuffles the samples, according to the attributes; None: none does, or unknown."""
    if order(loader) in (None, _IN_ORDER) or sharing_sampler(sampler_of(loader)) is not None:
        return None
    for sampler in (loader.sampler, loader.batch_sampler, sampler_of(loader)):
        if isinstance(getattr(sampler, "initial_seed", None), int):  # Accelerate's, which makes its generator late
            return "a seed of the sampler's own"
        if any(isinstance(one, rng.Generator) for one in getattr(sampler, "__dict__", {}).values()):
            return "a generator of the sampler's own"
    # torch's own sampler draws its seed from the global generator, after the loader has drawn one from its own.
    beside = "" if loader.generator is None else ", in addition to the loader's own generator"
    return f"the global random numbers{beside}"


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _is_torchdata(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torchdata"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _length(dataset: Any) -> int | None:
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _said(value: object) -> str:
    return "an unknown number of" if value is None else str(value)
