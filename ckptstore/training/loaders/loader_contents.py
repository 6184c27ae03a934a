"""Small records of the contents of datasets and samplers, which two runs can compare.

A dataset of torch's ``Subset`` and ``ConcatDataset``, nested in any way, is a sequence of samples of the datasets
below them. The record holds a digest of that sequence, so two nestings of the same sequence have equal records. The
record of a custom sampler holds its class and its public attributes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ckptstore.formats.checksums import xxh3_128

__all__ = [
    "SEQUENCES",
    "composition",
    "contents",
    "digest",
    "made_with",
    "other_attributes",
    "same_samples",
    "stream",
]

SEQUENCES: Final = ("indices", "weights")
"""Public attributes of torch's samplers that may have as many entries as the dataset."""

_INDICES = npt.NDArray[np.int64]
_BLOCK: Final = 1 << 20
"""Samples in one block of the digest."""
_LARGE: Final = 1 << 25
"""Most numbers in an attribute; larger ones are data, and are not read."""
_LEFT_OUT: Final = frozenset({"epoch", "dataset", "data_source"})
"""Attributes of samplers to skip: the script sets the epoch, and the dataset is compared separately."""
_WORDS: Final = 60
"""Most characters of a value that is stored as it is; longer ones are stored as a digest."""
_DEPTH: Final = 8
"""Most levels of nested datasets or samplers."""


# -- datasets


def composition(dataset: Any, like: Mapping[str, Any] | None = None, depth: int = 0) -> dict[str, Any] | None:
    """Describe which samples of which datasets a dataset has, in order; None: unknown.

    The members are ``samples`` (their number), ``digest`` (of the sequence) and ``inside``: the compositions of the
    datasets that these have as attributes, for example a dataset whose samples are transformed.

    Args:
        like: a composition; no more samples are read than it has.
    """
    if isinstance(dataset, IterableDataset):
        return None
    leaves: dict[int, _Leaf] = {}
    try:
        node = _node(dataset, leaves, depth)
        samples = len(node) if like is None else min(len(node), like["samples"])
        digest_of_all = _digest_of(node, samples)
    except (TypeError, ValueError, IndexError, OverflowError, RuntimeError, NotImplementedError, AttributeError):
        return None  # such as indices that are not numbers
    held = [one for leaf in leaves.values() for one in _held(leaf.dataset)]
    pairs = itertools.zip_longest(held, () if like is None else like["inside"][: len(held)])
    inside = [composition(one, beside, depth + 1) for one, beside in pairs]
    return {"samples": samples, "digest": digest_of_all, "inside": inside}


def same_samples(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> bool:
    """Whether a dataset still begins with its earlier samples; True if one of them is unknown.

    Args:
        before: a composition.
        now: the dataset's composition now, made with ``like=before``.
    """
    if before is None or now is None:
        return True
    inside, inside_now = before["inside"], now["inside"]
    if len(inside) != len(inside_now) or not all(map(same_samples, inside, inside_now)):
        return False
    # Prevents: an epoch that silently continues with other samples.
    if before["samples"] > now["samples"]:  # it shrank: comparable only if each has all samples of one dataset
        return all(one["digest"] == _digest_of(_Leaf(0, None, one["samples"]), one["samples"]) for one in (before, now))
    return bool(before["digest"] == now["digest"])


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A dataset that is not made of others. `dataset` may be None if only the number of samples matters."""

    number: int
    dataset: Any
    samples: int

    def __len__(self) -> int:
        return self.samples

    def rows(self, start: int, stop: int) -> _INDICES:
        """A part of the sequence, as rows of (number of the dataset, first index, number of consecutive indices)."""
        return np.array([[self.number, start, stop - start]], np.int64)

    def resolved(self, indices: _INDICES) -> tuple[_INDICES, _INDICES]:
        """Numbers of datasets, and indices in them."""
        return np.full_like(indices, self.number), indices


@dataclass(frozen=True, slots=True)
class _Taken:
    """The samples of a `Subset`."""

    whole: _Node
    indices: _INDICES

    def __len__(self) -> int:
        return len(self.indices)

    def rows(self, start: int, stop: int) -> _INDICES:
        """A part of the sequence, as rows of (number of the dataset, first index, number of consecutive indices)."""
        numbers, at = self.resolved(np.arange(start, stop))
        return np.column_stack([numbers, at, np.ones_like(at)])

    def resolved(self, indices: _INDICES) -> tuple[_INDICES, _INDICES]:
        """Numbers of datasets, and indices in them."""
        inner, length = self.indices[indices], len(self.whole)
        inner = np.where(inner < 0, inner + length, inner)
        if len(inner) and (inner.min() < 0 or inner.max() >= length):
            raise IndexError("an index that is not a sample")
        return self.whole.resolved(inner)


@dataclass(frozen=True, slots=True)
class _JoinedData:
    """The samples of a `ConcatDataset`. `ends` has for each part the index after its last sample."""

    parts: tuple[_Node, ...]
    ends: _INDICES

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def rows(self, start: int, stop: int) -> _INDICES:
        """A part of the sequence, as rows of (number of the dataset, first index, number of consecutive indices)."""
        found = []
        for part, end in zip(self.parts, self.ends.tolist(), strict=True):
            first = end - len(part)
            if max(first, start) < min(end, stop):
                found.append(part.rows(max(first, start) - first, min(end, stop) - first))
        return np.concatenate(found)

    def resolved(self, indices: _INDICES) -> tuple[_INDICES, _INDICES]:
        """Numbers of datasets, and indices in them."""
        part = np.searchsorted(self.ends, indices, "right")
        numbers, at = np.empty_like(indices), np.empty_like(indices)
        for one in np.unique(part).tolist():
            chosen, node = part == one, self.parts[one]
            numbers[chosen], at[chosen] = node.resolved(indices[chosen] - (self.ends[one] - len(node)))
        return numbers, at


_Node = _Leaf | _Taken | _JoinedData


def _node(dataset: Any, leaves: dict[int, _Leaf], depth: int) -> _Node:
    """The parts of a dataset; `leaves` gets those that are not made of others, numbered in order of appearance."""
    if depth > _DEPTH:
        raise ValueError("nested too deep")
    if isinstance(dataset, Subset):
        return _Taken(_node(dataset.dataset, leaves, depth + 1), _numbers(dataset.indices))
    if isinstance(dataset, ConcatDataset):
        parts = tuple(_node(part, leaves, depth + 1) for part in dataset.datasets)
        return _JoinedData(parts, np.cumsum([len(part) for part in parts], dtype=np.int64))
    return leaves.setdefault(id(dataset), _Leaf(len(leaves), dataset, len(dataset)))


def _digest_of(node: _Node, samples: int) -> str:
    """The digest of a sequence's first samples, independent of its nesting. It reads block by block."""
    parts = (node.rows(at, min(at + _BLOCK, samples)) for at in range(0, samples, _BLOCK))
    digests = [xxh3_128(np.ascontiguousarray(_merged(rows), "<i8").tobytes()) for rows in parts]
    return xxh3_128("".join(digests).encode("ascii"))


def _merged(rows: _INDICES) -> _INDICES:
    """The same sequence in the fewest rows."""
    numbers, at, lengths = rows.T
    begins = np.flatnonzero((numbers[1:] != numbers[:-1]) | (at[1:] != at[:-1] + lengths[:-1])) + 1
    begins = np.concatenate([[0], begins])
    return np.column_stack([numbers[begins], at[begins], np.add.reduceat(lengths, begins)])


def _held(leaf: Any) -> list[Any]:
    """Datasets that a dataset has as attributes, in the order of their names."""
    held = sorted(getattr(leaf, "__dict__", {}).items()) if isinstance(leaf, Dataset) else []
    return [one for _, one in held if isinstance(one, Dataset)]


def _numbers(indices: Any) -> _INDICES:
    found = indices.detach().cpu().numpy() if isinstance(indices, torch.Tensor) else np.asarray(indices)
    if found.size and (found.dtype.kind not in "iu" or found.ndim != 1):
        raise TypeError("indices that are not whole numbers")
    return found.astype(np.int64).reshape(-1)


# -- samplers


def contents(sampler: Any) -> dict[str, Any] | None:
    """The arguments of a torch sampler; None: another sampler, which may change its attributes at any time."""
    if isinstance(sampler, list | tuple | range):
        return {"indices": digest(sampler)}
    if not isinstance(sampler, SubsetRandomSampler | WeightedRandomSampler):
        return None
    found = {name: digest(getattr(sampler, name)) for name in SEQUENCES if hasattr(sampler, name)}
    plain = {name: getattr(sampler, name, None) for name in ("num_samples", "replacement")}
    return found | {name: one for name, one in plain.items() if isinstance(one, int)}


def made_with(loader: Any) -> dict[str, Any] | None:
    """The attributes of the script's own samplers, by their place; None: there is no such sampler.

    Call it when the loader is new: a sampler may change its attributes during an epoch.
    """
    if not isinstance(loader, DataLoader):
        return None  # torch accepts no sampler for a stream
    found: dict[str, Any] = {}
    seen = {id(loader.dataset)}
    batches = loader.batch_sampler
    if isinstance(batches, list | tuple):
        _look("batch_sampler", batches, found, seen)
    for place, sampler in (("batch_sampler", batches), ("sampler", getattr(batches, "sampler", loader.sampler))):
        if _is_own(sampler):
            _look(place, sampler, found, seen)
    return found or None


def stream(loader: Any) -> dict[str, Any] | None:
    """The attributes of an `IterableDataset`, or of the parts of a `ChainDataset`, by their place.

    None: it is no such dataset. Call it when the loader is new.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not isinstance(dataset, IterableDataset):
        return None
    found: dict[str, Any] = {}
    _look("dataset", dataset, found, set())
    return found


def other_attributes(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> list[str]:
    """The differences, each as a sentence; none if one side is unknown.

    Args:
        before, now: of `made_with` or `stream`.
    """
    if before is None or now is None:
        return []
    found = []
    for name in sorted(before.keys() & now.keys()):
        was, is_now = before[name], now[name]
        if was == is_now:
            continue
        if isinstance(was, list) or isinstance(is_now, list):
            found.append(f"{name} has other contents than it had")
        else:
            found.append(f"{name} was {was}, and is {is_now} now")
    return found


def _look(place: str, value: Any, found: dict[str, Any], seen: set[int], depth: int = 0) -> None:
    """Record `value`; of samplers and streams their public attributes."""
    if id(value) in seen or depth > _DEPTH:
        return
    if isinstance(value, ChainDataset):
        seen.add(id(value))
        parts = list(value.datasets) if isinstance(value.datasets, list | tuple) else []
        found[f"{place}.datasets"] = len(parts)
        for number, part in enumerate(parts):
            _look(f"{place}.datasets[{number}]", part, found, seen, depth + 1)
    elif (depth == 0 or isinstance(value, Sampler | IterableDataset)) and not isinstance(value, list | tuple):
        seen.add(id(value))
        if depth:
            found[f"{place}'s class"] = f"{type(value).__module__}.{type(value).__qualname__}"
        for name, one in sorted(getattr(value, "__dict__", {}).items()):
            if not name.startswith("_") and name not in _LEFT_OUT:
                _look(f"{place}.{name}", one, found, seen, depth + 1)
    else:
        value = value.item() if isinstance(value, np.generic) else value
        if value is None or (isinstance(value, bool | int | float | str) and len(str(value)) <= _WORDS):
            found[place] = value
        elif (text := digest(value)) is not None:
            found[place] = [text]  # in a list, which marks a digest


def digest(values: Any) -> str | None:
    """The digest of a sequence, equal for a list, an array and a tensor of numbers; None: too large, or no numbers."""
    if not isinstance(values, list | tuple | range | dict | set | frozenset | str | np.ndarray | torch.Tensor):
        return None
    return (_of_numbers(values) or _of_anything(values)) if _count(values) <= _LARGE else None


def _count(values: Any) -> int:
    """Roughly how many numbers or texts it holds."""
    if isinstance(values, torch.Tensor):
        return values.numel()
    if isinstance(values, np.ndarray):
        return int(values.size)
    held = values.values() if isinstance(values, dict) else values
    nested = (list, tuple, dict, np.ndarray, torch.Tensor)
    return len(values) + sum(_count(one) for one in held if isinstance(one, nested))


def _of_numbers(values: Any) -> str | None:
    try:
        found = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        if found.dtype.kind not in "biuf":
            return None
        found = np.ascontiguousarray(found, "<f8" if found.dtype.kind == "f" else "<i8")
    except (TypeError, ValueError, RuntimeError):
        return None
    return xxh3_128(found.tobytes())


def _of_anything(values: Any) -> str | None:
    """The digest of texts, and of lists of different lengths."""
    try:
        text = json.dumps(values, default=_listed)
    except (TypeError, ValueError, RecursionError, RuntimeError):
        return None
    return xxh3_128(text.encode("utf-8", "surrogatepass"))


def _listed(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, range):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(type(value).__name__)


def _is_own(sampler: Any) -> bool:
    """Whether a class of the script, not of torch, decides its order."""
    kind = type(sampler)
    return hasattr(sampler, "__dict__") and kind.__module__.partition(".")[0] not in ("torch", "torchdata")
