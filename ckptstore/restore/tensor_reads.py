"""Reads tensors, and boxes of tensors, many in one open of a checkpoint: checks all requests, then reads each chunk
once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

from ckptstore.errors import UsageError
from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.states.state import places
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.option_checks import MOST_THREADS, whole
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import Workers, default_threads, workers
from ckptstore.log.journal import Journal
from ckptstore.restore.alternatives import NO_FAILED_WAYS
from ckptstore.restore.box_reads import BoxRead, Sink, bytes_to_read, fill, jobs_of, new_sinks
from ckptstore.restore.box_targets import box_targets
from ckptstore.restore.fallback import FAULTS
from ckptstore.restore.load import restore_with
from ckptstore.restore.open_checkpoint import OpenCheckpoint, opened
from ckptstore.restore.selection import chosen_box, one_of
from ckptstore.restore.tensor_streams import stream

__all__ = ["BoxOptions", "BoxRequest", "chunks", "read_boxes", "read_tensor", "read_tensors"]

BoxRequest = tuple[str, Sequence[tuple[int, int]] | None]
"""The name of a tensor, and (start, stop) for each of its dimensions; None: the whole tensor."""


@dataclass(frozen=True, slots=True)
class BoxOptions:
    """See `Store.read_boxes`."""

    out: Sequence[Any] | None = None
    framework: Literal["torch", "numpy"] | None = None
    verify: bool = True
    threads: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.framework not in (None, "torch", "numpy"):
            raise UsageError(f"framework={self.framework!r}: 'torch' or 'numpy'")
        if self.out is not None and self.framework is not None:
            raise UsageError("out= already says what the boxes are read into: it cannot be combined with framework=")
        if self.threads is not None:
            whole("threads", self.threads, 1, MOST_THREADS)

    @property
    def to_torch(self) -> bool:
        """Whether new tensors are torch tensors."""
        return bridge.torch_in_use() if self.framework is None else self.framework == "torch"


def read_boxes(journal: Journal, ref: str | int, requests: Sequence[BoxRequest], options: BoxOptions) -> list[Any]:
    """See `Store.read_boxes`."""
    wanted = list(map(_checked, requests))
    with workers(options.threads or default_threads(), "read") as readers:
        return restore_with(journal, ref, lambda found: _read_boxes(found, wanted, options, readers))


def read_tensor(
    journal: Journal, ref: str | int, name: str, verify: bool, box: Sequence[slice] | slice | None = None
) -> npt.NDArray[Any]:
    """See `Store.read_tensor`."""
    with workers(default_threads(), "read") as readers:
        return restore_with(journal, ref, lambda found: _image(found, _names_in(found)(name), readers, verify, box))


def read_tensors(
    journal: Journal, ref: str | int, names: Iterable[str] | None, verify: bool
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """See `Store.read_tensors`."""
    left, tried = None if names is None else list(names), NO_FAILED_WAYS
    while True:
        with opened(journal, ref, tried) as found, workers(default_threads(), "read") as readers:
            named = _names_in(found)
            try:
                left = list(found.tensors) if left is None else left
                while left:
                    yield left[0], _image(found, named(left[0]), readers, verify)
                    del left[0]
                return
            except FAULTS as error:
                tried, ref = found.record_failure(error), found.ref


def chunks(journal: Journal, ref: str | int, name: str, verify: bool) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """See `Store.chunks`."""
    done, tried = 0, NO_FAILED_WAYS
    while True:
        with opened(journal, ref, tried) as found:
            try:
                for start, data in stream(found, _names_in(found)(name), verify=verify):
                    if start >= done:  # earlier chunks were verified: another encoding gives the same bytes
                        yield start, data
                        done = start + len(data)
                return
            except FAULTS as error:
                tried, ref = found.record_failure(error), found.ref


def _image(
    found: OpenCheckpoint,
    name: str,
    readers: Workers,
    verify: bool,
    box: Sequence[slice] | slice | None = None,
) -> Bytes:
    """The image of a tensor, or of the box of it that slices select, in new memory."""
    shape, parts = found.tensors[name].shape, found.stored(name)
    chosen = Box.whole(shape) if box is None else chosen_box(shape, box, f"tensor {name!r}")
    (sink,) = new_sinks([(parts, chosen)])
    fill(jobs_of([BoxRead(parts, sink)]), readers, _staging(readers), verify=verify)
    return sink.image


def _read_boxes(
    found: OpenCheckpoint, requests: Sequence[BoxRequest], options: BoxOptions, readers: Workers
) -> list[Any]:
    named = _names_in(found)
    names = [named(name) for name, _ in requests]
    entries = [found.tensors[name] for name in names]
    boxes = [_box_of(name, entry, bounds) for name, entry, (_, bounds) in zip(names, entries, requests, strict=True)]
    parts = {name: found.stored(name) for name in dict.fromkeys(names)}
    sinks: Sequence[Sink]
    if options.out is None:
        sinks = made = new_sinks([(parts[name], box) for name, box in zip(names, boxes, strict=True)])
        results = [_built(entry, sink.box, sink.image, options) for entry, sink in zip(entries, made, strict=True)]
    else:
        wanted = [(name, entry.dtype, box) for name, entry, box in zip(names, entries, boxes, strict=True)]
        sinks, results = box_targets(wanted, options.out), list(options.out)
    pairs: zip[tuple[str, Sink]] = zip(names, sinks, strict=True)
    jobs = jobs_of([BoxRead(parts[name], sink) for name, sink in pairs])
    advance = Tally(options.progress, bytes_to_read(jobs)).advance
    fill(jobs, readers, _staging(readers), verify=options.verify, advance=advance)
    return results


def _built(entry: TensorEntry, box: Box, image: Bytes, options: BoxOptions) -> Any:
    """A tensor or array over new memory."""
    if options.to_torch:
        return bridge.tensors().from_buffer(entry.dtype, box.shape, image)
    return image.view(dtypes.get(entry.dtype).numpy).reshape(box.shape)


def _staging(readers: Workers) -> Staging:
    """Two blocks for each thread: a payload, and its decoded bytes."""
    return Staging.for_chunks(2 * readers.threads)


def _names_in(found: OpenCheckpoint) -> Callable[[str], str]:
    """A function that finds a tensor by its name, or by one of its places (`formats.states.state.places`)."""
    at_places: dict[str, str] = {}

    def named(name: str) -> str:
        if name in found.parts:
            return name
        if not at_places:
            at_places.update((place.name, place.tensor) for place in places(found.tree))
        return at_places[one_of(at_places, name, found.ref)]

    return named


def _checked(request: Any) -> BoxRequest:
    """A request of the right form. Whether the checkpoint has it is checked when that is open."""
    try:
        name, box = request
    except (TypeError, ValueError):
        raise UsageError(f"{request!r:.80}: boxes= takes pairs of a tensor's name and a box of it") from None
    if not isinstance(name, str):
        raise UsageError(f"{name!r:.80} is not the name of a tensor")
    if box is None:
        return name, None
    try:
        bounds = [(start, stop) for start, stop in box]
    except (TypeError, ValueError):
        raise UsageError(
            f"tensor {name!r}: {box!r:.80} is not a box: it takes (start, stop) for each dimension, or None for all"
        ) from None
    where = f"a bound of the box {box!r:.80} of tensor {name!r}"
    return name, [(whole(where, start, 0), whole(where, stop, 0)) for start, stop in bounds]


def _box_of(name: str, entry: TensorEntry, bounds: Sequence[tuple[int, int]] | None) -> Box:
    if bounds is None:
        return Box.whole(entry.shape)
    fits = len(bounds) == len(entry.shape) and all(
        start <= stop <= length for (start, stop), length in zip(bounds, entry.shape, strict=True)
    )
    if not fits:
        raise UsageError(
            f"tensor {name!r}: box {bounds} is not in its shape {list(entry.shape)}: it takes (start, stop) for each "
            f"of {len(entry.shape)} dimensions, with 0 <= start <= stop <= the length"
        )
    return Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))
