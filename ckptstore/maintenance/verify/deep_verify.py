"""Decodes every checkpoint of a store, and compares every hash with the computed one.

The encodings that build on one full form a tree (`encoding_trees`). It is walked once for every *column*: the chunks at
one place of tensors that need each other (those that optimizer steps encode together, a master and its rounded copy).
So each payload is decoded once, and no whole state is ever in memory: one column for each thread, and one more for
every fork of the tree above the current encoding. There are few of these, because the larger side is walked last.

An error is reported once. What builds on it is not decoded: `lost_checkpoints` counts it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptSegmentError, StorageError
from ckptstore.formats import digest, kernel_choice
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Encoding
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.task_pool import Task, sweep
from ckptstore.maintenance.verify.decode_groups import Column, ColumnStep, cell_of, columns_of
from ckptstore.maintenance.verify.encoding_trees import Branch
from ckptstore.maintenance.verify.verify_findings import Findings, edge_of
from ckptstore.restore.chains.assembly import Held, held_by
from ckptstore.restore.chains.chain import master_of
from ckptstore.restore.chains.chain_link import TensorLink, apply_link, check_decoded, wrong
from ckptstore.restore.chains.replay import Cell, take_step
from ckptstore.segments.open_files import OpenFiles
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["decoded_bytes", "prove"]

_Memory: TypeAlias = dict[tuple[Cell, int], Bytes]
"""(tensor, chunk) -> its bytes; lost chunks are absent."""


def decoded_bytes(roots: Iterable[Branch], catalog: Catalog) -> int:
    """Return the logical bytes that `prove` will decode, as far as the log says."""
    entries = (catalog.find(branch.encoding.checkpoint) for root in roots for branch in root.walk())
    return sum(entry.nbytes for entry in entries if entry is not None)


def prove(backend: Backend, catalog: Catalog, roots: Iterable[Branch], found: Findings, threads: int) -> None:
    """Decode and replay every encoding. Compare every chunk's hash and every state digest with the recorded one.

    Args:
        roots: see `encoding_trees.trees`.
        found: known errors, whose encodings are skipped; collects new ones.
        threads: number of threads; each has two payloads and its columns in memory.

    Raises:
        StorageError: the medium failed. An unreadable place on it counts as damage.
    """
    handles = OpenFiles(backend)
    staging = Staging.for_chunks(max(2, threads))
    try:
        for root in roots:
            tree = _Tree(root, catalog, handles, backend, found)
            sweep(list(tree.tasks(staging)), threads, "ckptstore-prove")
    finally:
        handles.close()


class _Tree:
    """The encodings that build on one full, opened and described."""

    def __init__(self, root: Branch, catalog: Catalog, handles: OpenFiles, backend: Backend, found: Findings) -> None:
        self._root = root
        self._catalog = catalog
        self._handles = handles
        self._backend = backend
        self._found = found
        self._readers: dict[str, SegmentReader] = {}
        self.held = {branch: self._described(branch.encoding) for branch in root.walk()}

    def tasks(self, staging: Staging) -> Iterator[Task]:
        """Yield one task for each column and place."""
        for column in columns_of(self.held):
            column.left = column.places
            for place in range(column.left):
                yield self._task(column, place, staging)

    def _described(self, encoding: Encoding) -> Held:
        """Return the tensors of an encoding; none if it is known to be unusable."""
        flaw = self._found.flaws.get(edge_of(encoding))
        unusable = self._found.bad_segments.intersection(encoding.segments) or (flaw is not None and flaw.whole)
        if unusable:
            return {}
        try:
            held = held_by([self._reader(segment) for segment in encoding.segments], encoding)
        except StorageError:
            return {}
        except CkptError as error:  # it has changed since it was first read
            self._found.blame(encoding, self._catalog.segments[encoding.segments[0]].key, error, whole=True)
            return {}
        sound = {name: link for name, link in held.items() if flaw is None or name not in flaw.names}
        return {name: link for name, link in sound.items() if link.base_ratio != 2 or master_of(link.tensor) in sound}

    def _reader(self, segment: str) -> SegmentReader:
        if segment not in self._readers:
            entry = self._catalog.segments[segment]
            try:
                reader = SegmentReader(self._backend, entry)
            except StorageError as error:
                self._found.add(entry.key, error, entry.id)
                raise
            reader.close()
            reader.source = self._handles.source(reader.entry.key, reader.entry.size)
            self._readers[segment] = reader
        return self._readers[segment]

    def _task(self, column: Column, place: int, staging: Staging) -> Task:
        def work() -> Iterable[Task]:
            with staging.block() as scratch:
                self._place(column, place, scratch)
            with column.lock:
                column.left -= 1
                last = not column.left
            if last:
                self._check_digests(column, staging)
            return ()

        return work

    def _place(self, column: Column, place: int, scratch: Bytes) -> None:
        """Decode a column at one place, and report errors that numpy confirms."""
        outcome = _Outcome()

        def work() -> None:
            outcome.begin()
            self._decode(column, place, scratch, outcome)
            for _, _, error, _ in outcome.wrong:
                if error.computed:
                    raise error

        with contextlib.suppress(CorruptSegmentError):
            kernel_choice.confirmed(work)
        for found in outcome.wrong:
            self.wrong(*found)
        outcome.add_to(column)

    def _decode(self, column: Column, place: int, scratch: Bytes, outcome: _Outcome) -> None:
        """Walk the tree. The last child reuses the parent's memory; the others get copies."""
        waiting: list[tuple[Branch, _Memory, bool]] = [(self._root, {}, True)]
        while waiting:
            branch, below, owned = waiting.pop()
            step = column.steps.get(branch)
            memory: _Memory = {}
            if step is not None:
                memory = _Decoding(self, column, place, branch, below, owned, scratch, outcome).run(step)
            for number, child in enumerate(branch.children):
                waiting.append((child, memory, number == 0))  # the first child is popped last

    def unread(self, link: TensorLink, index: int, error: StorageError) -> None:
        """Record a payload that could not be read."""
        entry = link.reader.entry
        self._found.add(entry.key, error, entry.id, [link.tensor.chunks[index].offset])

    def wrong(self, branch: Branch, link: TensorLink, error: CorruptSegmentError, names: Iterable[str]) -> None:
        """Record that a link's result is not what was saved: the tensors `names` are lost."""
        self._found.blame(branch.encoding, link.reader.entry.key, error, decoded=names)

    def damaged(self, link: TensorLink, index: int) -> bool:
        """Tell whether a payload is known to be damaged."""
        chunk = link.tensor.chunks[index]
        return bool(chunk.length) and chunk.offset in self._found.bad_chunks.get(link.reader.entry.id, ())

    def advance(self, nbytes: int) -> None:
        """Count decoded logical bytes."""
        self._found.tally.advance(nbytes)

    def _check_digests(self, column: Column, staging: Staging) -> None:
        found: list[tuple[Branch, TensorLink, CorruptSegmentError]] = []

        def work() -> None:
            if kernel_choice.doubting():
                self._sum_again(column, staging)
            found[:] = self._other_digests(column)
            if found:
                raise found[0][2]

        with contextlib.suppress(CorruptSegmentError):
            kernel_choice.confirmed(work, since=kernel_choice.used())
        for branch, link, error in found:
            # A load compares only digests of computed tensors.
            self._found.blame(branch.encoding, link.reader.entry.key, error, state=link.base_ratio == 1)

    def _sum_again(self, column: Column, staging: Staging) -> None:
        column.sums.clear()
        with staging.block() as scratch:
            for place in range(column.places):
                outcome = _Outcome(passes=2)
                self._decode(column, place, scratch, outcome)
                outcome.add_to(column)

    def _other_digests(self, column: Column) -> Iterator[tuple[Branch, TensorLink, CorruptSegmentError]]:
        for branch in column.steps:
            for cell in column.cells:
                link = self.held[branch].get(cell.name)
                if link is None or cell_of(link) != cell or link.tensor.digest is None:
                    continue
                tensor = link.tensor
                total, count = column.sums.get((branch, cell.name), (0, 0))
                if count < len(tensor.chunks):  # a part is lost, which was reported
                    continue
                if digest.combine(total, nbytes=tensor.nbytes) != tensor.digest:
                    text = f"{link.where}: its state digest is not that of step {link.step}, as training had it"
                    yield branch, link, wrong(text)


@dataclass(slots=True)
class _Outcome:
    """The result of decoding a column at one place.

    Attributes:
        passes: number of passes begun.
        wrong: results that are not what was saved: arguments for `_Tree.wrong`.
        parts: parts of state digests.
    """

    passes: int = 0
    wrong: list[tuple[Branch, TensorLink, CorruptSegmentError, list[str]]] = field(default_factory=list)
    parts: list[tuple[Branch, str, int]] = field(default_factory=list)

    def begin(self) -> None:
        """Discard the results of an earlier pass."""
        self.passes += 1
        self.wrong.clear()
        self.parts.clear()

    def add_to(self, column: Column) -> None:
        """Add the parts of digests to the column's sums."""
        with column.lock:
            for branch, name, part in self.parts:
                total, count = column.sums.get((branch, name), (0, 0))
                column.sums[branch, name] = (total + part, count + 1)


@dataclass(slots=True)
class _Decoding:
    """Decodes one encoding at one place of a column."""

    tree: _Tree
    column: Column
    place: int
    branch: Branch
    below: _Memory
    owned: bool
    scratch: Bytes
    outcome: _Outcome
    memory: _Memory = field(default_factory=dict)

    def run(self, step: ColumnStep) -> _Memory:
        """Return the column's memory after this encoding."""
        for link in step.links:
            for index in self.column.chunks(cell_of(link), self.place):
                if link.group is not None:
                    self._step(link, index)
                else:
                    self._apply(link, index)
        for link in step.copies:
            for index in self.column.chunks(cell_of(link), self.place):
                self._copy(link, index)
        return self.memory

    def _base(self, cell: Cell, index: int) -> Bytes | None:
        """Return the base's bytes, in memory that may be overwritten."""
        base = self.below.get((cell, index))
        return base if base is None or self.owned else base.copy()

    def _apply(self, link: TensorLink, index: int) -> None:
        cell = cell_of(link)
        out = self._base(cell, index) if link.base_ratio else _memory(link, index)
        if out is not None:
            base = out if link.base_ratio else None
            self._try(link, index, [link], [out], lambda: apply_link(link, index, base, out, self.scratch, verify=True))

    def _copy(self, link: TensorLink, index: int) -> None:
        held = self.tree.held[self.branch]
        master = cell_of(held[(master_of(link.tensor) or "")])
        parts = [self.memory.get((master, number)) for number in self.column.chunks(master, self.place)]
        whole = [part for part in parts if part is not None]
        if len(whole) == len(parts):
            base = whole[0] if len(whole) == 1 else np.concatenate(whole)
            out = _memory(link, index)
            self._try(link, index, [link], [out], lambda: apply_link(link, index, base, out, self.scratch, verify=True))

    def _step(self, link: TensorLink, index: int) -> None:
        assert link.group is not None
        held = self.tree.held[self.branch]
        members = [held[name] for name in link.group.names if name in held]
        bases = [self._base(cell_of(member), index) for member in members]
        outs = [base for base in bases if base is not None]
        if len(outs) == len(link.group.names):
            cells = tuple(map(cell_of, members))
            memory = dict(zip(cells, outs, strict=True))
            self._try(link, index, members, outs, lambda: take_step(link, cells, index, memory, self.scratch))

    def _try(
        self,
        link: TensorLink,
        index: int,
        results: Sequence[TensorLink],
        outs: Sequence[Bytes],
        work: Callable[[], Any],
    ) -> None:
        """Decode a payload, and keep its correct results."""
        if self.tree.damaged(link, index):
            return
        try:
            work()
        except StorageError as error:
            self.tree.unread(link, index, error)
            return
        except CorruptSegmentError as error:
            self.outcome.wrong.append((self.branch, link, error, [one.tensor.name for one in results]))
            return
        for result, out in zip(results, outs, strict=True):
            name = result.tensor.name
            if self.outcome.passes == 1:
                self.tree.advance(len(out))
            try:
                check_decoded(result, index, out, verify=True)
            except CorruptSegmentError as error:
                self.outcome.wrong.append((self.branch, result, error, [name]))
                continue
            self.memory[cell_of(result), index] = out
            if result.tensor.digest is not None:
                self.outcome.parts.append((self.branch, name, digest.partial(out, index * CHUNK // 4)))


def _memory(link: TensorLink, index: int) -> Bytes:
    return np.empty(link.tensor.chunks[index].logical, np.uint8)
