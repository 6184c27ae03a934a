"""``into=``: the tensors that a restore overwrites, whether they fit, and whether some of them share memory."""

from __future__ import annotations

import fnmatch
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UsageError
from ckptstore.formats.boxes import Box
from ckptstore.formats.segment import TensorEntry
from ckptstore.formats.sources import NumpySource, write_into
from ckptstore.formats.state import FlatState, paths, places
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes
from ckptstore.restore.selection import Selection

__all__ = ["MadeTargets", "TargetSink", "Targets", "distinct_elements", "find_targets", "made_targets", "sharing"]

_MOST_WORK: Final = 1_000_000
"""Of `numpy.shares_memory`; views of one buffer take a few steps."""


class Targets:
    """The tensors that are overwritten, by the names that the checkpoint has for them."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        """Use `find_targets`, which refuses what does not fit."""
        self._found = found
        # What cannot be written by byte range is rewritten whole for each: one thread at a time, or one undoes another.
        self._whole = threading.Lock()

    def __contains__(self, name: object) -> bool:
        """Whether a tensor is among them."""
        return name in self._found

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Overwrite a tensor's bytes from `offset` on. Called from several threads, for ranges that do not overlap."""
        target = self._found[name]
        if isinstance(target, NumpySource):
            write_into(target.array, data, offset)
        else:
            with nullcontext() if _by_range(target.tensor) else self._whole:
                bridge.tensors().copy_into(target.tensor, data, offset)

    def box(self, name: str) -> Box:
        """What the caller has of a tensor: all of it, but of a DTensor what this rank has."""
        target = self._found[name]
        if (offset := _place(target)[1]) is None:
            return Box.whole(target.shape)
        return Box(offset, tuple(target.shape))

    def put(self, name: str, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """Overwrite a box of what the caller has of a tensor, with elements as `boxes.elements_of` gives them.

        Called from several threads, for boxes that do not overlap.
        """
        target = self._found[name]
        if isinstance(target, NumpySource):
            array = target.array
            np.copyto(array[index], elements.view(array.dtype.newbyteorder("<")))
        else:
            with nullcontext() if _by_range(target.tensor) else self._whole:
                bridge.shards().copy_box_into(target.tensor, index, elements)

    def tensor(self, name: str) -> Any:
        """The caller's own tensor or array."""
        target = self._found[name]
        if isinstance(target, NumpySource):
            return target.array
        return getattr(target, "distributed", target.tensor)


def _place(target: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape of the whole tensor, and where a target that is a part of it begins; None: it is all of it."""
    offset = getattr(target, "offset", None)
    return tuple(target.shape if offset is None else target.global_shape), offset


class TargetSink:
    """One of the targets as a `filling.Sink`. It has no memory of its own: it takes only what was verified."""

    memory: Bytes | None = None

    def __init__(self, targets: Targets, name: str) -> None:
        """The target `name` of `targets`."""
        self.box = targets.box(name)
        self._targets = targets
        self._name = name

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """See `Sink.put`."""
        self._targets.put(self._name, index, elements)


@dataclass(frozen=True, slots=True)
class MadeTargets:
    """As ``into=``: torch tensors for some of a checkpoint's, which are found when it is known what it holds.

    The others come in memory of their own.

    Attributes:
        find: called with the checkpoint's state, a `TensorEntry` for each tensor -> by the names of those, torch
            tensors of that dtype and shape, of which DTensors have this rank's part.
    """

    find: Callable[[Any], Mapping[str, Any]]


def find_targets(
    wanted: Mapping[str, TensorEntry], picked: Selection, into: Any, select: str | Sequence[str] | None
) -> Targets:
    """Find the tensors of `into` that a restore overwrites.

    Args:
        wanted: name in the checkpoint -> the tensor that is restored.
        picked: what `select` takes of the checkpoint.
        into: a state; `select`: the part of it that is meant.

    Raises:
        UsageError: one is missing, superfluous or does not fit, or two share memory; an optimizer's parameters have
            names (``param_names``), and those are in another order. Nothing has been overwritten.
    """
    flat = bridge.flattened(into, sharded=True, overwritten=True)
    _check_parameter_names(picked, flat.tree)
    names = picked.tensors  # those that the caller knows
    if select is None:
        targets: dict[str, Any] = dict(flat.tensors)
        names = {**names, **_of_ranks(picked.whole, names, flat)}
    else:
        targets = _selected(flat, picked, names, select)
    _check_targets({names[name]: tensor for name, tensor in wanted.items()}, targets)
    return Targets({name: targets[names[name]] for name in wanted})


def _check_parameter_names(picked: Selection, mine: Any) -> None:
    """An optimizer's state counts its parameters. Where both states name them, each number has to have one name."""
    for path, stored, own in _both(picked.whole, mine, ()):
        name = ".".join(path)
        selected = picked.all or any(place.name.startswith(f"{name}.") for place in picked.kept.values())
        theirs, ours = _parameter_names(stored), _parameter_names(own)
        if not selected or theirs is None or ours is None:
            continue
        # Prevents: moments that are read into those of another layer of the same shape, without a word.
        if other := [(one, its) for one, its in zip(ours, theirs, strict=False) if one != its]:
            raise UsageError(
                f"into= has {other[0][0]!r} in {name}.param_groups where the checkpoint has {other[0][1]!r} "
                f"({len(other)} of {len(ours)} differ): what is kept for one would be read into the other; give the "
                "optimizer its parameters in the checkpoint's order, or let a Checkpointer map them by name"
            )


def _both(stored: Any, mine: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The optimizers' states that two trees have at one place, with that place."""
    if isinstance(stored, dict) and isinstance(mine, dict):
        if "param_groups" in stored and "param_groups" in mine:
            yield path, stored["param_groups"], mine["param_groups"]
        else:
            for key in stored.keys() & mine.keys():
                yield from _both(stored[key], mine[key], (*path, key))
    elif isinstance(stored, list) and isinstance(mine, list):
        for number, (one, its) in enumerate(zip(stored, mine, strict=False)):
            yield from _both(one, its, (*path, str(number)))


def _parameter_names(groups: Any) -> list[str] | None:
    """The names of an optimizer's parameters, in their order; None: not all of its groups have them."""
    if not isinstance(groups, list) or not all(isinstance(one, dict) and "param_names" in one for one in groups):
        return None
    return [name for group in groups for name in group["param_names"]]


def _of_ranks(stored: Any, names: Collection[str], flat: FlatState) -> dict[str, str]:
    """What ranks call otherwise, by what `flat` calls what it has at that place: ``NAME@RANK`` and tied tensors."""
    strange = {name for name in names if name not in flat.tensors}
    if not strange:
        return {}
    there = dict(paths(flat.tree))
    found: dict[str, set[str]] = {}
    for path, tensor in paths(stored):
        if tensor in strange and path in there:
            found.setdefault(tensor, set()).add(there[path])
    alone = {tensor: next(iter(mine)) for tensor, mine in found.items() if len(mine) == 1}
    counts = Counter(alone.values())  # what is tied only here would be filled twice
    return {tensor: mine for tensor, mine in alone.items() if mine not in names and counts[mine] == 1}


def made_targets(entries: Mapping[str, TensorEntry], made: Mapping[str, Any]) -> Targets:
    """What `MadeTargets.find` gave, of the tensors `entries`. Raises `UsageError` as `find_targets`."""
    sources = {name: bridge.shards().recognise(tensor) for name, tensor in made.items()}
    _check_targets({name: entries[name] for name in sources}, sources)
    return Targets(sources)


def _selected(
    flat: FlatState, picked: Selection, names: Mapping[str, str], select: str | Sequence[str]
) -> dict[str, Any]:
    """Name of a selected tensor -> what is at its place in `into`; and what else `select` names there."""
    there = {place.name: place.tensor for place in places(flat.tree)}
    targets: dict[str, Any] = {}
    used: set[str] = set()
    for place in picked.kept.values():
        if place.name in there and names[place.tensor] not in targets:
            targets[names[place.tensor]] = flat.tensors[there[place.name]]
            used.add(there[place.name])
    # What it asks for and the checkpoint has not would otherwise stay as it is, unsaid; so would one of two tensors
    # that are one in the checkpoint.
    globs = [select] if isinstance(select, str) else select
    asked = {name for glob in globs for name in (glob, *fnmatch.filter(there, glob)) if name in there}
    return targets | {
        name: flat.tensors[tensor] for name, tensor in there.items() if name in asked and tensor not in used
    }


def _check_targets(wanted: dict[str, TensorEntry], targets: dict[str, Any]) -> None:
    """Everything that cannot fit is refused before the first byte is overwritten."""
    if missing := [name for name in wanted if name not in targets]:
        first = f"into= has no tensor {missing[0]!r} ({len(missing)} of {len(wanted)} are missing)"
        if targets and len(missing) == len(wanted):  # `model.state_dict()` itself, say
            there = sorted({name.partition(".")[0] for name in wanted})
            nested = f"nothing in it is called as in the checkpoint, which has {', '.join(there[:5])}"
            raise UsageError(
                f"{first}: {nested}: give the same nesting, into={{'model': model.state_dict()}} for instance"
            )
        raise UsageError(f"{first}: {_what_to_do(missing, targets)}")
    if extra := [name for name in targets if name not in wanted]:
        raise UsageError(f"into= has a tensor {extra[0]!r} that the checkpoint has not ({len(extra)} in all)")
    for name, tensor in wanted.items():
        have = (targets[name].dtype, _place(targets[name])[0])
        if have != (tensor.dtype, tensor.shape):
            raise UsageError(
                f"into= tensor {name!r} is {have[0]} {list(have[1])}, "
                f"the checkpoint's is {tensor.dtype} {list(tensor.shape)}"
            )
        if not _writable(targets[name]):
            raise UsageError(f"into= tensor {name!r} is read-only, or several of its elements are one in memory")
    if (shared := sharing([(name, targets[name]) for name in wanted])) is not None:
        raise UsageError(
            f"into= tensors {shared[0]!r} and {shared[1]!r} share memory, and are two tensors in the checkpoint: "
            "what is read last would overwrite the other; load one of them without into= (select=[...])"
        )


def _what_to_do(missing: Sequence[str], targets: Collection[str]) -> str:
    """Advice for `into` without some of the checkpoint's tensors."""
    if (optimizer := _fresh_optimizer(missing, targets)) is None:
        return "load what it has with select=[...], the rest without into="
    others = (name.partition(".")[0] for name in targets)
    rest = [f"{key}.*" for key in dict.fromkeys(others) if key != optimizer]
    one = repr(rest[0] if len(rest) == 1 else rest)
    return (
        f"an optimizer has no state before its first step: leave {optimizer!r} out, load(REF, into=..., select={one}), "
        f"and give load(REF, select='{optimizer}.*')['{optimizer}'] to its load_state_dict()"
    )


def _fresh_optimizer(missing: Sequence[str], targets: Collection[str]) -> str | None:
    """The key of an optimizer of which every state that the checkpoint has is missing: its names go on ``.state.``"""
    found = {name.partition(".state.")[0] for name in missing if ".state." in name}
    fresh = [key for key in found if not any(name.startswith(f"{key}.state.") for name in targets)]
    return fresh[0] if len(fresh) == 1 else None


def _by_range(tensor: Any) -> bool:
    """Whether `copy_into` touches only the range of a torch tensor that it is given."""
    lazy = bool(tensor.is_conj() or tensor.is_neg())
    return not lazy and bool(tensor.is_contiguous() or tensor.device.type == "cpu")


def _writable(target: Any) -> bool:
    """Whether every element can be given a value of its own (`expand` makes tensors of which that is not so)."""
    array = target.array if isinstance(target, NumpySource) else None
    if array is not None and not array.flags.writeable:
        return False
    if array is None:
        return distinct_elements(target.tensor.stride(), target.shape)
    return distinct_elements(array.strides, target.shape, array.itemsize)


def distinct_elements(strides: Sequence[int], shape: Sequence[int], itemsize: int = 1) -> bool:
    """Whether no two elements share memory. False, too, for rare ones that do not but are interleaved.

    Args:
        strides: in units of which an element takes `itemsize`.
    """
    reach = itemsize - 1
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True)):
        if size > 1 and stride <= reach:
            return 0 in shape
        reach += stride * (size - 1)
    return True


@dataclass(frozen=True, slots=True)
class _Span:
    """The memory that a tensor's elements lie in; their byte strides may be negative."""

    name: str
    space: str
    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, name: str, target: Any) -> _Span:
        if isinstance(target, NumpySource):
            array = target.array
            address = array.__array_interface__["data"][0]
            return cls(name, "cpu", address, array.itemsize, array.shape, array.strides)
        tensor = target.tensor
        width = tensor.element_size()
        strides = tuple(stride * width for stride in tensor.stride())
        return cls(name, str(tensor.device), tensor.data_ptr(), width, tuple(target.shape), strides)

    @property
    def start(self) -> int:
        steps = zip(self.shape, self.strides, strict=True)
        return self.address + sum((size - 1) * stride for size, stride in steps if stride < 0)

    @property
    def end(self) -> int:
        steps = zip(self.shape, self.strides, strict=True)
        return self.address + sum((size - 1) * stride for size, stride in steps if stride > 0) + self.itemsize

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For questions about addresses only: what lies there may be on a device."""
        return {
            "version": 3,
            "data": (self.address, True),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.itemsize}",
        }


def sharing(targets: Sequence[tuple[str, Any]]) -> tuple[str, str] | None:
    """The first two targets that have a byte in common. Views of one buffer that lie in each other's gaps have none."""
    spans = [_Span.of(name, target) for name, target in targets if target.nbytes]
    ranges = sorted(((span.space, span.start, span.end, index) for index, span in enumerate(spans)))
    reaching: list[tuple[str, int, int]] = []
    for space, start, end, index in ranges:
        reaching = [other for other in reaching if other[0] == space and other[1] > start]
        for _, _, other in reaching:
            if _overlap(spans[other], spans[index]):
                first, second = sorted((other, index))
                return spans[first].name, spans[second].name
        reaching.append((space, end, index))
    return None


def _overlap(a: _Span, b: _Span) -> bool:
    try:
        one, other = np.asarray(a), np.asarray(b)
        return bool(np.shares_memory(one, other, max_work=_MOST_WORK))  # type: ignore[arg-type,unused-ignore]  # any int
    except np.exceptions.TooHardError:
        return True  # many dimensions of strides that have nothing to do with each other: rather refused than wrong
