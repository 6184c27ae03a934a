"""A writer's deltas: which bases it keeps in memory, and how the next checkpoint is stored.

The strategy is asked once per checkpoint, by the committer's thread alone: `write` makes segments durable, `committed`
is told when the record is history. Only then does the checkpoint become a base.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from ckptstore.backends.base import Backend
from ckptstore.chains import Chain, decode_chunk
from ckptstore.encoding import Base, Choices, write_packed
from ckptstore.formats.codecs import FAST_POLICY, Policy
from ckptstore.formats.errors import UsageError
from ckptstore.formats.records import CheckpointId, Encoding, FormatFile
from ckptstore.formats.state import FlatState
from ckptstore.intervals import FULL, Decision, Form, RestoreBound, Schedule
from ckptstore.reading import Progress
from ckptstore.segments import WrittenState, write_full
from ckptstore.snapshot import Snapshot, SnapshotPool
from ckptstore.staging import BLOCK_BYTES, SLACK, Bytes, Staging, aligned

__all__ = ["DeltaOptions", "Deltas", "MemoryBase", "StoredBase"]


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """How a writer makes deltas.

    Attributes:
        interval: checkpoints that share one base (T), or ``auto``: chosen from the sizes measured, within the bound.
        form: ``anchor`` (one state in memory) or ``paper`` (each checkpoint against the one T before; T states).
        bound: what restoring any checkpoint may cost.
        policy: which codecs may be chosen, and what for.
        compress_fulls: code fulls, too. They are smaller, but other tools cannot load them.
        memory: host bytes for bases; a base that does not fit is read back from the store. None: no limit.
    """

    interval: int | Literal["auto"] = "auto"
    form: Form = "anchor"
    bound: RestoreBound = field(default_factory=RestoreBound)
    policy: Policy = FAST_POLICY
    compress_fulls: bool = False
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 0:
            raise UsageError(f"memory for bases: {self.memory} bytes")


class MemoryBase:
    """A base whose tensors are in host memory."""

    def __init__(self, identity: CheckpointId, snapshot: Snapshot) -> None:
        self.id = identity
        self._tensors = snapshot.flat.tensors
        self._snapshot = snapshot

    def spec(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """See `Base.spec`."""
        source = self._tensors.get(name)
        return None if source is None else (source.dtype, tuple(source.shape))

    def read(self, name: str, start: int, length: int) -> Bytes:
        """See `Base.read`. A view: nothing is copied."""
        view = self._tensors[name].view()
        assert view is not None  # snapshots are host memory
        return view[start : start + length]

    def forget(self) -> None:
        """Give the memory back."""
        self._snapshot.free()


class StoredBase:
    """A base that is read back from the store, for want of memory. Every thread keeps the chunk it read last."""

    def __init__(self, identity: CheckpointId, chains: dict[str, Chain], close: Callable[[], None]) -> None:
        self.id = identity
        self._chains = chains
        self._close = close
        self._local = threading.local()

    def spec(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """See `Base.spec`."""
        chain = self._chains.get(name)
        return None if chain is None else (chain.tensor.dtype, chain.tensor.shape)

    def read(self, name: str, start: int, length: int) -> Bytes:
        """See `Base.read`. The range lies within one chunk. Raises `CorruptSegmentError`, `StorageError`."""
        chain = self._chains[name]
        index, within = divmod(start, BLOCK_BYTES)
        out = self._chunk(name, chain, index)
        if within + length <= len(out):
            return out[within : within + length]
        following = self._chunk(name, chain, index + 1)  # a master's range, twice as long as its copy's chunk
        joined = aligned(length)
        joined[: len(out) - within] = out[within:]
        joined[len(out) - within :] = following[: length - (len(out) - within)]
        return joined

    def _chunk(self, name: str, chain: Chain, index: int) -> Bytes:
        kept: tuple[str, int, Bytes] | None = getattr(self._local, "kept", None)
        if kept is not None and kept[:2] == (name, index):
            return kept[2]
        length = chain.tensor.chunks[index].logical
        out = aligned(length)
        decode_chunk(chain, index, out, aligned(BLOCK_BYTES + SLACK))
        self._local.kept = (name, index, out)
        return out

    def forget(self) -> None:
        """Close the segments."""
        self._close()


class Deltas:
    """The deltas of one term."""

    def __init__(
        self,
        options: DeltaOptions | None,
        backend: Backend,
        fmt: FormatFile,
        term: int,
        snapshots: SnapshotPool,
        reopen: Callable[[CheckpointId], StoredBase],
    ) -> None:
        """Begin without a base: the first checkpoint is a full.

        Args:
            options: None: every checkpoint is an uncompressed full.
            reopen: opens a committed checkpoint as a base, when memory does not suffice to keep it.
        """
        self._options = options or DeltaOptions()
        self.schedule: Schedule | None = None
        if options is not None:
            self.schedule = Schedule(options.interval, options.form, options.bound)
        self._backend = backend
        self._format = fmt
        self._term = term
        self._snapshots = snapshots
        self._reopen = reopen
        self._choices = Choices(self._options.policy)
        self._bases: dict[int, MemoryBase | StoredBase] = {}
        self._threads = max(1, os.cpu_count() or 1)
        self._encoders = ThreadPoolExecutor(self._threads, thread_name_prefix="ckptstore-encode")

    def write(
        self,
        flat: FlatState,
        step: int,
        *,
        staging: Staging,
        pool: ThreadPoolExecutor,
        begun: Callable[[str], None],
        progress: Progress | None,
    ) -> tuple[WrittenState, Decision, Base | None]:
        """Store `flat` as the schedule decides, and make it durable (COMMIT step 1)."""
        decision = FULL if self.schedule is None else self.schedule.decide()
        base = None if decision.base is None else self._bases[decision.base]
        began = time.monotonic()
        if base is None and not self._options.compress_fulls:
            written = write_full(
                self._backend,
                flat,
                run=self._format.run,
                term=self._term,
                step=step,
                staging=staging,
                pool=pool,
                begun=begun,
                progress=progress,
            )
        else:
            written = write_packed(
                self._backend,
                flat,
                run=self._format.run,
                term=self._term,
                step=step,
                kind="full" if base is None else "delta",
                base=base,
                gap=decision.gap,
                choices=self._choices,
                staging=staging,
                pool=pool,
                encoders=self._encoders,
                threads=self._threads,
                begun=begun,
                progress=progress,
            )
        if self.schedule is not None:
            # Decoding is about as fast as encoding and writing; it bounds a restore in seconds well enough.
            self.schedule.rate = written.stored / max(time.monotonic() - began, 1e-6)
        return written, decision, base

    @staticmethod
    def encoding(written: WrittenState, node: tuple[int, int], base: Base | None) -> Encoding:
        """The edge that the COMMIT adds."""
        return Encoding(
            checkpoint=node,
            kind="full" if base is None else "delta",
            base=None if base is None else base.id,
            segments=tuple(segment.id for segment in written.segments),
            lossy=False,
            bytes=written.stored,
        )

    def committed(
        self, decision: Decision, identity: CheckpointId, flat: FlatState, snapshot: Snapshot | None, stored: int
    ) -> bool:
        """The checkpoint is history -> whether `snapshot` was kept as a base (else its memory is the caller's to free).

        Args:
            flat: the state that was written; still unchanged.
            snapshot: what owns its memory, or None if that is the training's.
        """
        if self.schedule is None:
            return False
        number = self.schedule.written(decision, stored)
        for old in decision.forget:
            if old in self._bases:
                self._bases.pop(old).forget()
        if not decision.keep:
            return False
        nbytes = sum(source.nbytes for source in flat.tensors.values())
        if self._options.memory is not None and (len(self._bases) + 1) * nbytes > self._options.memory:
            self._bases[number] = self._reopen(identity)
            return False
        kept = snapshot or self._snapshots.copy(flat, self._encoders)
        self._bases[number] = MemoryBase(identity, kept)
        return snapshot is not None

    def close(self) -> None:
        """Let go of every base."""
        self._encoders.shutdown()
        for base in self._bases.values():
            base.forget()
        self._bases.clear()
