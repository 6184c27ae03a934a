"""Replays optimizer steps: programs that restore all tensors that steps have updated together.

A *program* is the sequence of operations that restores a set of tensors: apply a link, apply another one, take a step,
take the next ... Chunk k of a tensor needs only chunk k of the others, so threads take whole chunks. Consecutive steps
of the same tensors are taken in one pass over the state, block by block in the core's cache, while the payloads of the
next steps are read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import dtypes, kernel_choice, optim
from ckptstore.formats.segment_files.layout import CHUNK, chunk_count
from ckptstore.formats.segment_files.segment import RAW
from ckptstore.host.buffers import SLACK, Bytes, aligned
from ckptstore.host.cancellable_calls import current_scope, in_scope
from ckptstore.host.pages import BLOCK
from ckptstore.restore.chains.chain_link import TensorLink, apply_link, check_decoded, read_payload, wrong
from ckptstore.restore.chains.held_tensors import Held
from ckptstore.segments.segment_reader import extents, read_extent

__all__ = ["Cell", "KeptBytes", "Program", "ReplayStage", "take_step"]

_WINDOW = 4 << 20
"""Payload bytes of the steps that one pass takes: enough to keep the state in cache, few enough to read ahead."""
_KEPT = 512 << 20
"""Logical bytes of results that are kept for callers that restore tensors one by one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A tensor while a program runs. A tensor that changes its shape on the way is two cells."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Logical bytes."""
        return dtypes.nbytes(dtypes.get(self.dtype), self.shape)


@dataclass(frozen=True, slots=True)
class ReplayStage:
    """One operation of a program: apply one link to its cell, or take some steps of one group.

    Attributes:
        cells: what it changes, and all that it needs: the link's cell, or the group's in the order of its names.
        links: the link; or the leaders of the steps, in the order of the steps.
        followers: for each step the tensors of its encoding; those of the group are compared after an error.
    """

    cells: tuple[Cell, ...]
    links: tuple[TensorLink, ...]
    followers: tuple[Held, ...] = ()

    @property
    def steps(self) -> bool:
        """Whether it takes steps, instead of applying a link."""
        return self.links[0].group is not None

    def followed(self) -> Iterator[TensorLink]:
        """The links of all tensors of the group, step by step."""
        return (held[cell.name] for held in self.followers for cell in self.cells)


class KeptBytes:
    """The memory budget for results that the programs of one restore keep."""

    def __init__(self, nbytes: int = _KEPT) -> None:
        self._left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Reserve this many bytes if they are available -> whether they were."""
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Return bytes to the budget."""
        with self._lock:
            self._left += nbytes


class Program:
    """Restores a set of tensors together; several threads may run it.

    It changes while it is used: results that `decode_one` computed for other tensors are kept for their calls.

    Attributes:
        stages: in the order of execution.
        results: name -> cell and last link of each tensor that it restores.
        cells: every tensor that has memory while it runs.
        chunks: number of chunks of each of its tensors: the tensors of a parameter have one shape, and several
            parameters together fit into one chunk.
    """

    def __init__(
        self,
        stages: tuple[ReplayStage, ...],
        results: Mapping[str, tuple[Cell, TensorLink]],
        allowance: KeptBytes | None = None,
    ) -> None:
        """Create a program that keeps results within `allowance`, which all programs of a restore share."""
        self.stages = stages
        self.results = results
        self.cells = tuple(dict.fromkeys(cell for stage in stages for cell in stage.cells))
        self.chunks = chunk_count(self.cells[0].nbytes)  # the same for all: `groups_of` has rejected other groups
        self._allowance = KeptBytes() if allowance is None else allowance
        self._raw, self._others = _divided(stages) if self.chunks == 1 else ((), stages)
        self._lock = threading.Lock()
        self._results_kept: dict[tuple[str, int], Bytes] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that it restores."""
        return tuple(self.results)

    @property
    def links(self) -> tuple[TensorLink, ...]:
        """Every link that it applies; of a step's links only the leaders have bytes."""
        return tuple(link for stage in self.stages for link in (stage.followed() if stage.steps else stage.links))

    def nbytes(self, index: int) -> int:
        """Logical bytes of chunk `index` of all of its tensors."""
        return sum(_length(cell, index) for cell in self.cells)

    def decode(
        self,
        index: int,
        outs: Mapping[str, Bytes],
        scratch: tuple[Bytes, Bytes],
        prefetch: ThreadPoolExecutor | None = None,
        *,
        verify: bool = True,
    ) -> None:
        """Restore chunk `index` of the tensors in `outs` into the memory given there.

        Args:
            scratch: memory for payloads, two blocks of `CHUNK` + `SLACK`.
            prefetch: reads payloads ahead of their use.

        Raises:
            CorruptSegmentError: a payload or a result is not what was written; names segment, tensor and step.
            StorageError: the medium failed.
        """
        memory = {self.results[name][0]: out for name, out in outs.items()}
        for cell in self.cells:
            if cell not in memory:
                memory[cell] = aligned(_length(cell, index))

        def work() -> None:
            if self._raw:
                _read_raw(self._raw, memory, scratch[0], verify)
            for stage in self._others:
                _run(stage, index, memory, scratch, prefetch, verify)
            for name, out in outs.items():
                check_decoded(self.results[name][1], index, out, verify=verify)

        try:
            kernel_choice.confirmed(work)
        except CorruptSegmentError as error:
            raise (self._first_wrong_step(index, scratch) if error.computed else None) or error from None

    def decode_one(self, name: str, index: int, out: Bytes, *, verify: bool = True) -> None:
        """Restore chunk `index` of one tensor. The other results are kept until they are asked for, as far as they fit.

        Raises:
            the errors of `decode`.
        """
        with self._lock:
            kept = self._results_kept.pop((name, index), None)
            if kept is not None:
                self._allowance.give(len(kept))
                out[:] = kept
                return
            outs = {name: out}
            for other, (cell, _) in self.results.items():
                if (
                    other != name
                    and (other, index) not in self._results_kept
                    and self._allowance.take(_length(cell, index))
                ):
                    outs[other] = aligned(_length(cell, index))
            scratch = (aligned(CHUNK + SLACK), aligned(CHUNK + SLACK))
            self.decode(index, outs, scratch, verify=verify)
            self._results_kept.update({(other, index): data for other, data in outs.items() if other != name})

    def _first_wrong_step(self, index: int, scratch: tuple[Bytes, Bytes]) -> CorruptSegmentError | None:
        """Run again and compare after every step -> the error of the first step whose result is wrong."""
        memory = {cell: aligned(_length(cell, index)) for cell in self.cells}
        for stage in self.stages:
            for number, link in enumerate(stage.links):
                _run(ReplayStage(stage.cells, (link,)), index, memory, scratch, None, True)
                for cell in stage.cells:
                    compared = stage.followers[number][cell.name] if stage.steps else link
                    try:
                        check_decoded(compared, index, memory[cell], verify=True)
                    except CorruptSegmentError as error:
                        return wrong(f"{error}; the steps before it are right")
        return None


def take_step(
    link: TensorLink, cells: tuple[Cell, ...], index: int, memory: Mapping[Cell, Bytes], scratch: Bytes
) -> None:
    """Take one step of a group, in place.

    Args:
        link: the leader.
        cells: the tensors of the group, in the order of its names.
            memory: chunk `index` of each; invalid after an error.
        scratch: memory for the payload.

    Raises:
        CorruptSegmentError: the payload is not what was written.
        StorageError: the medium failed.
    """
    _take_steps(ReplayStage(cells, (link,)), index, memory, (scratch, scratch), None, True)


# -- execution


def _divided(stages: Sequence[ReplayStage]) -> tuple[tuple[ReplayStage, ...], tuple[ReplayStage, ...]]:
    """The stages with which uncompressed tensors begin, which are read together before all else, and the others."""
    raw: list[ReplayStage] = []
    others: list[ReplayStage] = []
    touched: set[Cell] = set()
    for stage in stages:
        if stage.links[0].tensor.codec == RAW and stage.cells[0] not in touched:
            raw.append(stage)
        else:
            others.append(stage)
            touched.update(stage.cells)
    return tuple(raw), tuple(others)


def _read_raw(stages: Sequence[ReplayStage], memory: Mapping[Cell, Bytes], scratch: Bytes, verify: bool) -> None:
    """Read uncompressed tensors of one chunk, neighbors at once: most small ones are side by side in a segment."""
    cells = {id(stage.links[0].tensor): stage.cells[0] for stage in stages}
    readers = {id(stage.links[0].reader): stage.links[0].reader for stage in stages}
    for key, reader in readers.items():
        tensors = [stage.links[0].tensor for stage in stages if id(stage.links[0].reader) == key]
        for extent in extents(tensors, len(scratch) - SLACK):
            for piece, data in zip(extent, read_extent(reader, extent, scratch, verify=verify), strict=True):
                memory[cells[id(piece.tensor)]][:] = data


def _length(cell: Cell, index: int) -> int:
    return max(0, min(CHUNK, cell.nbytes - index * CHUNK))


def _run(
    stage: ReplayStage,
    index: int,
    memory: Mapping[Cell, Bytes],
    scratch: tuple[Bytes, Bytes],
    prefetch: ThreadPoolExecutor | None,
    verify: bool,
) -> None:
    if stage.steps:
        _take_steps(stage, index, memory, scratch, prefetch, verify)
        return
    out = memory[stage.cells[0]]
    link = stage.links[0]
    apply_link(link, index, out if link.base_ratio else None, out, scratch[0], verify=verify)


def _take_steps(
    stage: ReplayStage,
    index: int,
    memory: Mapping[Cell, Bytes],
    scratch: tuple[Bytes, Bytes],
    prefetch: ThreadPoolExecutor | None,
    verify: bool,
) -> None:
    with _Contiguous(stage, memory) as state:
        windows = list(_windows(stage.links, index))
        ahead: Future[list[Bytes]] | None = None
        for number, window in enumerate(windows):
            payloads = _read(window, index, scratch[number % 2], verify) if ahead is None else ahead.result()
            ahead = None
            if prefetch is not None and number + 1 < len(windows):
                ahead = prefetch.submit(
                    in_scope(
                        current_scope(), partial(_read, windows[number + 1], index, scratch[(number + 1) % 2], verify)
                    )
                )
            try:
                _decode(window, index, payloads, state)
            except BaseException:
                if ahead is not None:
                    ahead.exception()  # waits: it still writes into memory that will be returned
                raise


def _windows(links: Sequence[TensorLink], index: int) -> Iterator[list[TensorLink]]:
    """Groups of steps whose payloads are read and applied together."""
    window: list[TensorLink] = []
    filled = 0
    for link in links:
        # Every payload keeps its offset modulo the page in memory.
        length = link.tensor.chunks[index].length + 2 * BLOCK
        if window and filled + length > _WINDOW:
            yield window
            window, filled = [], 0
        window.append(link)
        filled += length
    if window:
        yield window


def _read(window: Sequence[TensorLink], index: int, out: Bytes, verify: bool) -> list[Bytes]:
    payloads = []
    at = 0
    for link in window:
        payload = read_payload(link, index, out[at:], verify=verify)
        payloads.append(payload)
        at += -(-(link.tensor.chunks[index].offset % BLOCK + len(payload)) // BLOCK) * BLOCK
    return payloads


def _decode(
    window: Sequence[TensorLink], index: int, payloads: Sequence[Bytes], state: Sequence[np.ndarray[Any, Any]]
) -> None:
    steps = []
    for link, payload in zip(window, payloads, strict=True):
        assert link.group is not None
        steps.append(optim.StepLink(link.group.encoding, link.group.rule, payload))
    try:
        optim.decode(steps, state)
    except (CorruptSegmentError, FormatError, ValueError) as error:
        span = f"step {window[0].step}" if len(window) == 1 else f"steps {window[0].step} to {window[-1].step}"
        raise wrong(f"{window[0].where}: chunk {index} of {span}: {error}") from error


class _Contiguous:
    """The slots of a group as contiguous arrays: the cells, or for several parameters a copy that is written back."""

    def __init__(self, stage: ReplayStage, memory: Mapping[Cell, Bytes]) -> None:
        group = stage.links[0].group
        assert group is not None
        width = len(group.rule.slots)
        self._slots = [[memory[cell] for cell in stage.cells[slot::width]] for slot in range(width)]
        self._joined = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in self._slots]

    def __enter__(self) -> list[np.ndarray[Any, Any]]:
        return [joined.view("<f4") for joined in self._joined]

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            return
        for parts, joined in zip(self._slots, self._joined, strict=True):
            if len(parts) == 1:
                continue
            at = 0
            for part in parts:
                part[:] = joined[at : at + len(part)]
                at += len(part)
