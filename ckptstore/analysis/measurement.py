"""Measure a series: the sampled blocks, by every method, in parallel, with bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.analysis.comparison_plan import Target
from ckptstore.analysis.methods import COPIES, METHODS, Coded, Methods, prefix_counts
from ckptstore.analysis.sampling import Estimate, SampleGroup, SampleUnit, Sums, read_unit
from ckptstore.analysis.series import Checkpoint, Read, TensorType
from ckptstore.formats import codecs
from ckptstore.formats.codecs import Codec, Sample
from ckptstore.host.buffers import Bytes
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import workers

__all__ = ["Measurements", "MethodMeasurement", "measure"]

_FITTED: Final = 4
"""Number of units on which parameters are fitted."""
_SLOW_UNITS: Final = 8
"""Approximate number of units of a sample on which slow methods are measured."""
_MASTER: Final = 4096
"""Number of values compared to find the master of which a half-width tensor is the rounded copy."""


@dataclass(frozen=True, slots=True)
class MethodMeasurement:
    """One method at one step of one group.

    Attributes:
        group: position among the groups.
        index: position of the checkpoint in the series.
        base: position of the base; None for a method without one.
        gap: checkpoints between them; None without a base.
        method: a name of `METHODS`, or a bound.
        params: the codec's parameters.
        estimate: stored over logical bytes.
        units: number of measured units.
        logical: their bytes.
        encode: bytes per second of one core; None for a bound.
        decode: as `encode`.
    """

    group: int
    index: int
    base: int | None
    gap: int | None
    method: str
    params: Mapping[str, Any]
    estimate: Estimate
    units: int
    logical: int
    encode: float | None
    decode: float | None


@dataclass(slots=True)
class Measurements:
    """All measurements, and (group, checkpoint) -> how many numbers have each prefix of 12 bits."""

    results: list[MethodMeasurement] = field(default_factory=list)
    prefixes: dict[tuple[int, int], npt.NDArray[np.int64]] = field(default_factory=dict)


@dataclass(slots=True)
class _Job:
    """One group at one checkpoint."""

    number: int
    group: SampleGroup
    methods: Methods
    read: Read
    bases: list[tuple[int, int, Read, dict[str, Codec]]]  # position, gap, read, codecs
    masters: Mapping[str, str]
    exact: bool


def measure(
    series: Sequence[Checkpoint],
    groups: Sequence[SampleGroup],
    targets: Sequence[Target],
    *,
    wanted: Sequence[str] = METHODS,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Measurements:
    """Measure every group at every target.

    Memory: per thread one unit (1 MiB) of the checkpoint and of one base with their encoded forms, and for a store a
    chunk (16 MiB) of each compared checkpoint; it does not depend on the checkpoints' size.

    Args:
        series: the checkpoints.
        groups: the tensors to measure.
        targets: which checkpoints to compare with which.
        wanted: methods.
        threads: None: the number of cores.
        progress: called with (bytes done, total bytes), in logical bytes encoded.

    Raises:
        CorruptionError, StorageError: a checkpoint cannot be read.
    """
    types = series[-1].tensors
    total = sum((1 + len(target.bases)) * group.sampled for target in targets for group in groups)
    measured, tally = Measurements(), Tally(progress, total)
    fitted: dict[int, Methods] = {}
    masters: dict[str, str] = {}
    with workers(threads or os.cpu_count() or 1, "analyze") as coders:
        for target in targets:
            with ExitStack() as stack:
                read = stack.enter_context(series[target.index].open())
                reads = {base: stack.enter_context(series[base].open()) for base, _ in target.bases}
                if not fitted:
                    masters = _masters(groups, types, read) if {*COPIES} & {*wanted} else {}
                for number, group in enumerate(groups):
                    if number not in fitted:
                        fitted[number] = _fit(group, read, wanted)
                    job = _job(number, group, fitted[number], target, read, reads, masters)
                    sums: dict[tuple[int | None, str], Sums] = {}
                    for unit, coded, prefixes in coders.in_order(_unit_jobs(job)):
                        _collect(sums, unit, coded)
                        if prefixes is not None:
                            key = (number, target.index)
                            measured.prefixes[key] = measured.prefixes.get(key, 0) + prefixes
                        tally.advance((1 + len(target.bases)) * unit.nbytes)
                    measured.results += _results(job, target, sums)
    return measured


def _fit(group: SampleGroup, read: Read, wanted: Sequence[str]) -> Methods:
    units = [read_unit(unit, read) for unit in _few(group.units)]
    return Methods.suited(group.dtype, units, wanted)


def _few(units: Sequence[SampleUnit]) -> list[SampleUnit]:
    stride = max(1, len(units) // _FITTED)
    return list(units[::stride][:_FITTED])


def _job(
    number: int,
    group: SampleGroup,
    methods: Methods,
    target: Target,
    read: Read,
    reads: Mapping[int, Read],
    masters: Mapping[str, str],
) -> _Job:
    """A job with the contexts of ``sub`` fitted to this pair."""
    bases = []
    few = [(unit, read_unit(unit, read)) for unit in _few(group.units)] if target.bases else []
    for base, gap in target.bases:
        samples = [Sample(data, read_unit(unit, reads[base])) for unit, data in few]
        bases.append((base, gap, reads[base], methods.deltas(samples)))
    exact = len(group.units) == group.blocks
    return _Job(number, group, methods, read, bases, masters, exact)


_UnitResult = tuple[SampleUnit, list[tuple["int | None", Coded]], "npt.NDArray[np.int64] | None"]


def _unit_jobs(job: _Job) -> Iterator[Callable[[], _UnitResult]]:
    """One call per unit. The results are used in order, so that sums do not depend on which thread finished first."""
    stride = 1 if job.exact else max(1, len(job.group.units) // _SLOW_UNITS)
    for position, unit in enumerate(job.group.units):
        yield partial(_measure_unit, job, unit, position % stride == 0)


def _measure_unit(job: _Job, unit: SampleUnit, slow: bool) -> _UnitResult:
    data = read_unit(unit, job.read)
    alone = job.methods.alone(data, slow=slow)
    found: list[tuple[int | None, Coded]] = [(None, one) for one in alone]
    if (master := _master_bytes(job, unit)) is not None:
        found += [(None, one) for one in job.methods.derived(data, master)]
    for base, _, read, deltas in job.bases:
        found += [(base, one) for one in job.methods.against(data, read_unit(unit, read), deltas, alone)]
    return unit, found, prefix_counts(data, job.methods.word)


def _collect(
    sums: dict[tuple[int | None, str], Sums], unit: SampleUnit, coded: Sequence[tuple[int | None, Coded]]
) -> None:
    for base, one in coded:
        sums.setdefault((base, one.method), Sums()).add(unit.nbytes, one.stored, one.encode, one.decode)


def _results(job: _Job, target: Target, sums: Mapping[tuple[int | None, str], Sums]) -> list[MethodMeasurement]:
    gaps = dict(target.bases)
    params: dict[tuple[int | None, str], Mapping[str, Any]] = {
        (None, name): codec.params for name, codec in job.methods.chosen.items()
    }
    params |= {(base, name): codec.params for base, _, _, deltas in job.bases for name, codec in deltas.items()}
    return [
        MethodMeasurement(
            group=job.number,
            index=target.index,
            base=base,
            gap=None if base is None else gaps[base],
            method=method,
            params=params.get((base, method), {}),
            estimate=total.estimate(job.group.blocks),
            units=total.count,
            logical=int(total.logical),
            encode=total.logical / total.encode if total.encode else None,
            decode=total.logical / total.decode if total.decode else None,
        )
        for (base, method), total in sums.items()
        if method not in COPIES or total.count == len(job.group.units)  # only if the whole group is a copy
    ]


# masters


def _masters(groups: Sequence[SampleGroup], types: Mapping[str, TensorType], read: Read) -> dict[str, str]:
    """Half-width tensor -> the fp32 tensor of the same shape whose rounded values it starts with."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    names = [name for group in groups for name in group.tensors]
    for name in names:
        if types[name].dtype == "F32":
            by_shape.setdefault(types[name].shape, []).append(name)
    found = {}
    for name in names:
        tensor = types[name]
        tried = codecs.copies_of(tensor.dtype)
        if not tried or tensor.shape not in by_shape:
            continue
        count = min(_MASTER, tensor.nbytes // 2)
        half = read(name, 0, 2 * count)
        if half.any():
            for master in by_shape[tensor.shape]:
                numbers = read(master, 0, 4 * count)
                if any(not len(codecs.encode(codec, half, numbers)) for codec in tried):
                    found[name] = master
                    break
    return found


def _master_bytes(job: _Job, unit: SampleUnit) -> Bytes | None:
    if not job.masters or not all(piece.name in job.masters for piece in unit.pieces):
        return None
    return np.concatenate(
        [job.read(job.masters[piece.name], 2 * piece.start, 2 * piece.length) for piece in unit.pieces]
    )
