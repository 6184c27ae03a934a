"""A file system in memory that records every change, for `tools.crash.enumerate`."""

from __future__ import annotations

from collections.abc import Hashable

from tools.crash.disk import Acknowledge, Image, Operation, SyncFailed
from tools.crash.ramfs import RamPosix


class RecordingPosix(RamPosix):
    """Records every write, truncation, allocation, name and sync, with its data, in the order they took effect.

    `LocalBackend` reaches its disk only through its `Posix`, so a run on this one makes the same calls as a run on a
    disk. Thread-safe. To crash a recovery too, start it from a crash state: ``RecordingPosix(state.image)``.

    Attributes:
        base: the durable contents before the recording.
        history: the operations so far.
    """

    def __init__(self, base: Image | None = None, *, direct: bool = True) -> None:
        super().__init__(base, direct=direct)
        self.base = base or Image()
        self.history: list[Operation] = []

    def _apply(self, operation: Operation) -> None:
        super()._apply(operation)
        self.history.append(operation)

    def acknowledge(self, label: Hashable) -> None:
        """Note that `label` is promised to survive any crash from here on."""
        with self._lock:
            self._apply(Acknowledge(label))

    def fail_msync(self, memory: memoryview) -> None:
        """The same for an msync of mapped `memory`."""
        with self._lock:
            self._apply(SyncFailed(self._maps.place(memory)[0]))

    def fail_sync(self, fd: int) -> None:
        """Note that a sync of `fd` reported an error, without syncing. (`FaultyPosix` calls this.)"""
        with self._lock:
            self._apply(SyncFailed(self._opened(fd, file=False).node))
