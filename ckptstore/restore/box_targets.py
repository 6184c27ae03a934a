"""Boxes that are read into tensors and arrays of the caller, which are checked before the first byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptstore.errors import UnsupportedStateError, UsageError
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.sources import TensorSource
from ckptstore.frameworks import bridge
from ckptstore.restore.load_targets import Targets, TargetSink, sharing, writable

__all__ = ["box_targets"]


def box_targets(wanted: Sequence[tuple[str, str, Box]], out: Sequence[Any]) -> list[TargetSink]:
    """The sinks that overwrite `out`: one tensor or array for each wanted box.

    Args:
        wanted: (name, logical dtype, box) of each.

    Raises:
        UsageError: another number of them; one does not fit its box, is read-only or is not a tensor; two share memory.
    """
    if isinstance(out, str | bytes) or not isinstance(out, Sequence):
        raise UsageError(f"out= is a {type(out).__qualname__}; it takes a list, with a tensor or array for each box")
    if len(out) != len(wanted):
        raise UsageError(f"out= has {len(out)} tensors for {len(wanted)} boxes")
    found: dict[str, TensorSource] = {}
    for number, ((name, dtype, box), value) in enumerate(zip(wanted, out, strict=True)):
        where = f"out[{number}], for tensor {name!r} {box}"
        found[str(number)] = source = _source(value, where)
        if (source.dtype, tuple(source.shape)) != (dtype, box.shape):
            raise UsageError(f"{where}, is {source.dtype} {list(source.shape)}; it takes {dtype} {list(box.shape)}")
        if not writable(source):
            raise UsageError(f"{where}, is read-only, or several of its elements share memory")
    if (shared := sharing(list(found.items()))) is not None:
        raise UsageError(f"out[{shared[0]}] and out[{shared[1]}] share memory: one box would overwrite the other")
    targets = Targets(found)
    return [TargetSink(targets, str(number), box) for number, (_, _, box) in enumerate(wanted)]


def _source(value: Any, where: str) -> TensorSource:
    try:
        source = bridge.source_of(value, overwritten=True)
    except UnsupportedStateError as error:
        raise UsageError(f"{where}: {error}") from error
    if source is None:
        kind = type(value)
        raise UsageError(f"{where}, is a {kind.__module__}.{kind.__qualname__}; it takes a tensor or an array")
    return source
