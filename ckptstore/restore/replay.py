"""Replaying optimizer steps: programs that restore, together, all tensors that steps have moved together.

A *program* is what leads to the present of a set of tensors: apply this link, apply that one, take this step, and the
next ... Chunk k of every tensor needs chunk k of the others only, so threads take whole chunks. Consecutive steps of
the same tensors are taken in one pass over the state, block by block in the core's cache, while the payloads of the
next ones are read.
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
from ckptstore.formats.layout import CHUNK, chunk_count
from ckptstore.host.buffers import SLACK, Bytes, aligned
from ckptstore.host.cancellable_calls import current_scope, in_scope
from ckptstore.host.pages import BLOCK
from ckptstore.restore.chain_link import Link, apply_link, check_decoded, read_payload, wrong

__all__ = ["Cell", "KeptBytes", "Program", "Stage", "take_step"]

_WINDOW = 4 << 20
"""Payload bytes of steps taken in one pass: enough of them to keep the state in cache, few enough to read ahead."""
_KEPT = 512 << 20
"""Logical bytes that are kept for those who ask for tensors one by one, and got others with them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A tensor while a program runs. One that changes its shape on the way is two cells."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Logical bytes."""
        return dtypes.nbytes(dtypes.get(self.dtype), self.shape)


@dataclass(frozen=True, slots=True)
class Stage:
    """What a program does next: apply one link to its cell, or take some steps of one group.

    Attributes:
        cells: what it changes, and all that it needs: the link's cell, or the group's in the order of its names.
        links: the link; or the leaders of the steps, in the order of the steps.
        followers: for each step the links of all tensors of the group, to be compared when something is wrong.
    """

    cells: tuple[Cell, ...]
    links: tuple[Link, ...]
    followers: tuple[tuple[Link, ...], ...] = ()

    @property
    def steps(self) -> bool:
        """Whether it takes steps, rather than applying a link."""
        return self.links[0].group is not None


class KeptBytes:
    """Memory that the programs of one restore may keep results in."""

    def __init__(self, nbytes: int = _KEPT) -> None:
        self._left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Whether so much is left; then it is taken."""
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Give memory back."""
        with self._lock:
            self._left += nbytes


class Program:
    """How a set of tensors is restored together; several threads may run it.

    It changes as it is used: what `decode_one` restored without having been asked for is kept until it is.

    Attributes:
        stages: in the order of execution.
        results: name -> cell and last link of the tensors that it restores.
        cells: every tensor that has memory while it runs.
        chunks: of each of its tensors: those of a parameter have one shape, several together fit into one chunk.
    """

    def __init__(
        self, stages: tuple[Stage, ...], results: Mapping[str, tuple[Cell, Link]], allowance: KeptBytes | None = None
    ) -> None:
        """Make one that keeps things in `allowance`, which it shares with the other programs of a restore."""
        self.stages = stages
        self.results = results
        self.cells = tuple(dict.fromkeys(cell for stage in stages for cell in stage.cells))
        self.chunks = chunk_count(self.cells[0].nbytes)  # of all of them: `groups_of` has refused what is not so
        self._allowance = KeptBytes() if allowance is None else allowance
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int], Bytes] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that it restores."""
        return tuple(self.results)

    @property
    def links(self) -> tuple[Link, ...]:
        """Every link that it goes through; of a step's, the leaders alone have bytes."""
        return tuple(
            link
            for stage in self.stages
            for link in (stage.links if not stage.steps else (one for step in stage.followers for one in step))
        )

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
        """Restore chunk `index` of the tensors that `outs` names into the memory it gives.

        Args:
            scratch: memory for payloads, two of `CHUNK` + `SLACK`.
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
            for stage in self.stages:
                _run(stage, index, memory, scratch, prefetch, verify)
            for name, out in outs.items():
                check_decoded(self.results[name][1], index, out, verify=verify)

        try:
            kernel_choice.confirmed(work)
        except CorruptSegmentError as error:
            raise (self._first_wrong_step(index, scratch) if error.computed else None) or error from None

    def decode_one(self, name: str, index: int, out: Bytes, *, verify: bool = True) -> None:
        """Restore chunk `index` of one tensor. What comes with it is kept until it is asked for, as far as that fits.

        Raises:
            as `decode`.
        """
        with self._lock:
            kept = self._kept.pop((name, index), None)
            if kept is not None:
                self._allowance.give(len(kept))
                out[:] = kept
                return
            outs = {name: out}
            for other, (cell, _) in self.results.items():
                if other != name and (other, index) not in self._kept and self._allowance.take(_length(cell, index)):
                    outs[other] = aligned(_length(cell, index))
            scratch = (aligned(CHUNK + SLACK), aligned(CHUNK + SLACK))
            self.decode(index, outs, scratch, verify=verify)
            self._kept.update({(other, index): data for other, data in outs.items() if other != name})

    def _first_wrong_step(self, index: int, scratch: tuple[Bytes, Bytes]) -> CorruptSegmentError | None:
        """Go through it again, comparing after every step: which of them gives other bytes than training had?"""
        memory = {cell: aligned(_length(cell, index)) for cell in self.cells}
        for stage in self.stages:
            for number, link in enumerate(stage.links):
                _run(Stage(stage.cells, (link,)), index, memory, scratch, None, True)
                checked = stage.followers[number] if stage.steps else stage.links
                for cell, compared in zip(stage.cells, checked, strict=True):
                    try:
                        check_decoded(compared, index, memory[cell], verify=True)
                    except CorruptSegmentError as error:
                        return wrong(f"{error}; the steps before it are right")
        return None


def take_step(link: Link, cells: tuple[Cell, ...], index: int, memory: Mapping[Cell, Bytes], scratch: Bytes) -> None:
    """Take one step of a group, in place.

    Args:
        link: the leader.
        cells: the tensors of the group, in the order of its names.
        memory: chunk `index` of each; worthless after an error.
        scratch: memory for the payload.

    Raises:
        CorruptSegmentError: the payload is not what was written.
        StorageError: the medium failed.
    """
    _take_steps(Stage(cells, (link,)), index, memory, (scratch, scratch), None, True)


# -- execution


def _length(cell: Cell, index: int) -> int:
    return max(0, min(CHUNK, cell.nbytes - index * CHUNK))


def _run(
    stage: Stage,
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
    stage: Stage,
    index: int,
    memory: Mapping[Cell, Bytes],
    scratch: tuple[Bytes, Bytes],
    prefetch: ThreadPoolExecutor | None,
    verify: bool,
) -> None:
    with _EndToEnd(stage, memory) as state:
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
                    ahead.exception()  # waits: it still writes into memory that will be given back
                raise


def _windows(links: Sequence[Link], index: int) -> Iterator[list[Link]]:
    """Steps whose payloads are read, and taken, at once."""
    window: list[Link] = []
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


def _read(window: Sequence[Link], index: int, out: Bytes, verify: bool) -> list[Bytes]:
    payloads = []
    at = 0
    for link in window:
        payload = read_payload(link, index, out[at:], verify=verify)
        payloads.append(payload)
        at += -(-(link.tensor.chunks[index].offset % BLOCK + len(payload)) // BLOCK) * BLOCK
    return payloads


def _decode(
    window: Sequence[Link], index: int, payloads: Sequence[Bytes], state: Sequence[np.ndarray[Any, Any]]
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


class _EndToEnd:
    """The slots of a group as contiguous arrays: the cells themselves, or for several parameters a copy and back."""

    def __init__(self, stage: Stage, memory: Mapping[Cell, Bytes]) -> None:
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
