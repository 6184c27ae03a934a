"""Finds the tensors of ``into=`` that a restore overwrites, and checks that they fit and share no memory."""

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
from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.boxes import Box, elements_of
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.sources import NumpySource, write_into
from ckptstore.formats.states.shard import JoinedSource
from ckptstore.formats.states.state import FlatState, paths, places
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes
from ckptstore.restore.selection import TensorSelection

__all__ = [
    "MadeTargets",
    "TargetSink",
    "Targets",
    "distinct_elements",
    "find_targets",
    "made_targets",
    "sharing",
    "writable",
]

_MOST_WORK: Final = 1_000_000
"""Work limit of `numpy.shares_memory`; views of one buffer take a few steps."""


class Targets:
    """The tensors to overwrite, by their names in the checkpoint."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        """Use `find_targets`, which rejects tensors that do not fit."""
        self._found = found
        # A tensor that cannot be written by byte range is rewritten whole for each range: by one thread at a time, or
        # one write would undo another.
        self._whole = threading.Lock()

    def __contains__(self, name: object) -> bool:
        """Whether a tensor is among them."""
        return name in self._found

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Overwrite a tensor's bytes from `offset` on. Called from several threads, for ranges that do not overlap."""
        target = self._found[name]
        if isinstance(target, JoinedSource):
            size = dtypes.get(target.dtype).itemsize
            for source, index, elements in target.split(offset // size, elements_of(data, size)):
                self._put(source, index, elements)
            return
        if isinstance(target, NumpySource):
            write_into(target.array, data, offset)
        else:
            with nullcontext() if _by_range(target.tensor) else self._whole:
                bridge.tensors().copy_into(target.tensor, data, offset)

    def box(self, name: str) -> Box:
        """The elements that the caller has of a tensor: all of it, or this rank's part of a DTensor or `Shard`."""
        target = self._found[name]
        if (offset := _place(target)[1]) is None:
            return Box.whole(target.shape)
        return Box(offset, tuple(target.shape))

    def put(self, name: str, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """Overwrite a box of the caller's part of a tensor, with elements in the form of `boxes.elements_of`.

        Called from several threads, for boxes that do not overlap.
        """
        target = self._found[name]
        if not isinstance(target, JoinedSource):
            self._put(target, index, elements)
            return
        start = tuple(one.start + low for one, low in zip(index, target.box.offset, strict=True))
        block = Box(start, elements.shape)
        for box, source in target.pieces:
            if (common := block.common(box)) is not None:
                self._put(source, common.within(box), elements[common.within(block)])

    def _put(self, target: Any, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        if isinstance(target, NumpySource):
            array = target.array
            np.copyto(array[index], elements.view(array.dtype.newbyteorder("<")))
        else:
            with nullcontext() if _by_range(target.tensor) else self._whole:
                bridge.shards().copy_box_into(target.tensor, index, elements)

    def tensor(self, name: str) -> Any:
        """The caller's tensor, array or `Shard`."""
        target = self._found[name]
        if (owner := getattr(target, "owner", None)) is not None:
            return owner
        return target.array if isinstance(target, NumpySource) else target.tensor


def _place(target: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape of the whole tensor, and the offset of a target that is a part of it; None: it is the whole tensor."""
    offset = getattr(target, "offset", None)
    return tuple(target.shape if offset is None else target.global_shape), offset


class TargetSink:
    """One of the targets as a `box_reads.Sink`. It offers no memory, so that only verified bytes are written to it."""

    memory: Bytes | None = None

    def __init__(self, targets: Targets, name: str, box: Box | None = None) -> None:
        """The target `name` of `targets`. `box`: the elements that it takes, if they are not the target's own place."""
        self.box = targets.box(name) if box is None else box
        self._targets = targets
        self._name = name

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """See `Sink.put`."""
        self._targets.put(self._name, index, elements)


@dataclass(frozen=True, slots=True)
class MadeTargets:
    """As ``into=``: torch tensors for some of a checkpoint's tensors, found once the contents of the checkpoint are
    known.

    The other tensors are returned in new memory.

    Attributes:
        find: called with the checkpoint's state, with a `TensorEntry` for each tensor -> name in the checkpoint ->
            torch tensor of that dtype and shape (a DTensor has this rank's part).
    """

    find: Callable[[Any], Mapping[str, Any]]


def find_targets(
    wanted: Mapping[str, TensorEntry], picked: TensorSelection, into: Any, select: str | Sequence[str] | None
) -> Targets:
    """Find the tensors of `into` that a restore overwrites.

    Args:
        wanted: name in the checkpoint -> the tensor that is restored.
        picked: the selected part of the checkpoint.
        into: a state; `select`: the part of it to overwrite.

    Raises:
        UsageError: a tensor is missing, superfluous or does not fit, or two share memory; or an optimizer's parameters
            have names (``param_names``) that are in another order. Nothing has been overwritten.
    """
    flat = bridge.flattened(into, sharded=True, overwritten=True)
    _check_parameter_names(picked, flat.tree)
    names = picked.tensors  # those that the caller uses
    if select is None:
        targets: dict[str, Any] = dict(flat.tensors)
        names = {**names, **_rank_names(picked.whole, names, flat)}
    else:
        targets = _selected(flat, picked, names, select)
    _check_targets({names[name]: tensor for name, tensor in wanted.items()}, targets)
    return Targets({name: targets[names[name]] for name in wanted})


def _check_parameter_names(picked: TensorSelection, mine: Any) -> None:
    """Raise if the parameter numbers of an optimizer stand for other parameters, where both states have their names."""
    for path, stored, own in _paired_optimizers(picked.whole, mine, ()):
        name = ".".join(path)
        selected = picked.all or any(place.name.startswith(f"{name}.") for place in picked.kept.values())
        theirs, ours = _parameter_names(stored), _parameter_names(own)
        if not selected or theirs is None or ours is None:
            continue
        # Prevents: moments that are silently read into those of another layer of the same shape.
        if other := [(one, its) for one, its in zip(ours, theirs, strict=False) if one != its]:
            raise UsageError(
                f"into= has {other[0][0]!r} in {name}.param_groups where the checkpoint has {other[0][1]!r} "
                f"({len(other)} of {len(ours)} differ): the state of one would be read into the other; give the "
                "optimizer its parameters in the checkpoint's order, or let a Checkpointer map them by name"
            )


def _paired_optimizers(stored: Any, mine: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The optimizer states that two trees have at the same place, with that place."""
    if isinstance(stored, dict) and isinstance(mine, dict):
        if "param_groups" in stored and "param_groups" in mine:
            yield path, stored["param_groups"], mine["param_groups"]
        else:
            for key in stored.keys() & mine.keys():
                yield from _paired_optimizers(stored[key], mine[key], (*path, key))
    elif isinstance(stored, list) and isinstance(mine, list):
        for number, (one, its) in enumerate(zip(stored, mine, strict=False)):
            yield from _paired_optimizers(one, its, (*path, str(number)))


def _parameter_names(groups: Any) -> list[str] | None:
    """The names of an optimizer's parameters, in their order; None: some of its groups have none."""
    if not isinstance(groups, list) or not all(isinstance(one, dict) and "param_names" in one for one in groups):
        return None
    return [name for group in groups for name in group["param_names"]]


def _rank_names(stored: Any, names: Collection[str], flat: FlatState) -> dict[str, str]:
    """Names that ranks use for other tensors (``NAME@RANK``, tied tensors) -> what `flat` calls the tensor there."""
    strange = {name for name in names if name not in flat.tensors}
    if not strange:
        return {}
    there = dict(paths(flat.tree))
    found: dict[str, set[str]] = {}
    for path, tensor in paths(stored):
        if tensor in strange and path in there:
            found.setdefault(tensor, set()).add(there[path])
    alone = {tensor: next(iter(mine)) for tensor, mine in found.items() if len(mine) == 1}
    counts = Counter(alone.values())  # tensors that are tied only here would be filled twice
    return {tensor: mine for tensor, mine in alone.items() if mine not in names and counts[mine] == 1}


def made_targets(entries: Mapping[str, TensorEntry], made: Mapping[str, Any]) -> Targets:
    """The targets that `MadeTargets.find` returned for `entries`. Raises `UsageError` as `find_targets`."""
    sources = {name: bridge.shards().recognise(tensor) for name, tensor in made.items()}
    _check_targets({name: entries[name] for name in sources}, sources)
    return Targets(sources)


def _selected(
    flat: FlatState, picked: TensorSelection, names: Mapping[str, str], select: str | Sequence[str]
) -> dict[str, Any]:
    """Name of a selected tensor -> the tensor at its place in `into`; and other tensors that `select` names there."""
    there = {place.name: place.tensor for place in places(flat.tree)}
    targets: dict[str, Any] = {}
    used: set[str] = set()
    for place in picked.kept.values():
        if place.name in there and names[place.tensor] not in targets:
            targets[names[place.tensor]] = flat.tensors[there[place.name]]
            used.add(there[place.name])
    # A tensor that `select` names but the checkpoint lacks would otherwise silently stay unchanged. So would one of two
    # tensors that are one in the checkpoint.
    globs = [select] if isinstance(select, str) else select
    asked = {name for glob in globs for name in (glob, *fnmatch.filter(there, glob)) if name in there}
    return targets | {
        name: flat.tensors[tensor] for name, tensor in there.items() if name in asked and tensor not in used
    }


def _check_targets(wanted: dict[str, TensorEntry], targets: dict[str, Any]) -> None:
    """Raise for everything that does not fit, before the first byte is overwritten."""
    if missing := [name for name in wanted if name not in targets]:
        first = f"into= has no tensor {missing[0]!r} ({len(missing)} of {len(wanted)} are missing)"
        if targets and len(missing) == len(wanted):  # `model.state_dict()` itself, say
            there = sorted({name.partition(".")[0] for name in wanted})
            nested = f"none of its names is in the checkpoint, which has {', '.join(there[:5])}"
            raise UsageError(
                f"{first}: {nested}: give the same nesting, into={{'model': model.state_dict()}} for instance"
            )
        raise UsageError(f"{first}: {_advice(missing, targets)}")
    if extra := [name for name in targets if name not in wanted]:
        raise UsageError(f"into= has a tensor {extra[0]!r} that is not in the checkpoint ({len(extra)} in total)")
    for name, tensor in wanted.items():
        have = (targets[name].dtype, _place(targets[name])[0])
        if have != (tensor.dtype, tensor.shape):
            raise UsageError(
                f"into= tensor {name!r} is {have[0]} {list(have[1])}, "
                f"the checkpoint's is {tensor.dtype} {list(tensor.shape)}"
            )
        if not writable(targets[name]):
            raise UsageError(f"into= tensor {name!r} is read-only, or several of its elements share memory")
    if (shared := sharing([(name, targets[name]) for name in wanted])) is not None:
        raise UsageError(
            f"into= tensors {shared[0]!r} and {shared[1]!r} share memory, and are two tensors in the checkpoint: "
            "the one that is read last would overwrite the other; load one of them without into= (select=[...])"
        )


def _advice(missing: Sequence[str], targets: Collection[str]) -> str:
    """Advice if `into` lacks some of the checkpoint's tensors."""
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
    """The key of an optimizer whose whole state is missing (its tensors have ``.state.`` in their names), or None."""
    found = {name.partition(".state.")[0] for name in missing if ".state." in name}
    fresh = [key for key in found if not any(name.startswith(f"{key}.state.") for name in targets)]
    return fresh[0] if len(fresh) == 1 else None


def _by_range(tensor: Any) -> bool:
    """Whether `copy_into` writes only the given range of a torch tensor."""
    lazy = bool(tensor.is_conj() or tensor.is_neg())
    return not lazy and bool(tensor.is_contiguous() or tensor.device.type == "cpu")


def writable(target: Any) -> bool:
    """Whether every element has memory of its own (`expand` makes tensors whose elements do not)."""
    if isinstance(target, JoinedSource):
        return all(writable(source) for _, source in target.pieces)
    array = target.array if isinstance(target, NumpySource) else None
    if array is not None and not array.flags.writeable:
        return False
    if array is None:
        return distinct_elements(target.tensor.stride(), target.shape)
    return distinct_elements(array.strides, target.shape, array.itemsize)


def distinct_elements(strides: Sequence[int], shape: Sequence[int], itemsize: int = 1) -> bool:
    """Whether no two elements share memory. Also False for rare tensors whose elements are interleaved but distinct.

    Args:
        strides: in units of which an element has `itemsize`.
    """
    reach = itemsize - 1
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True)):
        if size > 1 and stride <= reach:
            return 0 in shape
        reach += stride * (size - 1)
    return True


@dataclass(frozen=True, slots=True)
class _Span:
    """The memory range of a tensor's elements; their byte strides may be negative."""

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
        """For questions about addresses only: the memory may be on a device."""
        return {
            "version": 3,
            "data": (self.address, True),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.itemsize}",
        }


def sharing(targets: Sequence[tuple[str, Any]]) -> tuple[str, str] | None:
    """The first two targets that have a byte in common. Interleaved views of one buffer have none."""
    leaves = [(name, leaf) for name, target in targets for leaf in _leaves(target) if leaf.nbytes]
    spans = [_Span.of(name, leaf) for name, leaf in leaves]
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


def _leaves(target: Any) -> list[Any]:
    """The tensors and arrays of a target: several if it has several `Shard`s."""
    return [source for _, source in target.pieces] if isinstance(target, JoinedSource) else [target]


def _overlap(a: _Span, b: _Span) -> bool:
    try:
        one, other = np.asarray(a), np.asarray(b)
        return bool(np.shares_memory(one, other, max_work=_MOST_WORK))  # type: ignore[arg-type,unused-ignore]  # any int
    except np.exceptions.TooHardError:
        return True  # unrelated strides in many dimensions: better rejected than wrong
