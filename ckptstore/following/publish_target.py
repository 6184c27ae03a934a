"""The place to which weights are published: its pointer, its versions, and which publisher may write there."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.backends.exclusion import exclusive_access, root_of
from ckptstore.errors import (
    CkptError,
    FencedError,
    FormatError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    UsageError,
    WriterError,
)
from ckptstore.following.manifests import (
    CLAIM,
    LIMIT,
    MANIFEST,
    POINTER,
    Manifest,
    Pointer,
    folder_of,
    sha256,
    version_of,
)
from ckptstore.formats.history.records import FORMAT_KEY
from ckptstore.host.crash_points import crash_point
from ckptstore.log.journal import Journal

if TYPE_CHECKING:
    from ckptstore.backends.base import Backend

__all__ = ["NewestVersion", "PublishTarget"]


@dataclass(frozen=True, slots=True)
class NewestVersion:
    """The newest version at the target.

    Attributes:
        data: the bytes of the pointer.
        pointer: the pointer; None: there is none.
        manifest: its manifest; None: it is missing or damaged, or a version that it builds on is missing.
    """

    data: bytes | None = None
    pointer: Pointer | None = None
    manifest: Manifest | None = None


class PublishTarget:
    """A folder, or a bucket's prefix, of versions, as one publisher has read and written it. One thread uses it.

    Attributes:
        backend: its medium.
        locked: whether this publisher excludes the others of this machine.
        newest: the newest version; None: it was not read yet.
        doubtful: a pointer that was sent without an answer.
    """

    def __init__(self, backend: Backend) -> None:
        """Write nothing yet. Raises `UsageError`: the place is a store, or inside one."""
        self.backend = backend
        self.locked = False
        self.newest: NewestVersion | None = None
        self.doubtful: bytes | None = None
        self._lock = ExitStack()
        self._bases: dict[int, int | None] = {}
        _refuse_store(backend)

    def close(self) -> None:
        """Another publisher of this machine may start."""
        self._lock.close()
        self.locked = False

    def take_lock(self) -> None:
        """Exclude the other publishers of this machine. Raises `WriterError`: one is running here."""
        if not self._lock.enter_context(exclusive_access(self.backend, lambda: False, make=True)):
            self._lock.close()
            raise WriterError(f"{self.backend.url}: another publisher is running here; end it, or use another place")
        self.locked = True

    def read_newest(self) -> NewestVersion:
        """Read the pointer and its manifest. Raises `FencedError`, `UsageError`, `FormatError`, `StorageError`."""
        self.newest = self._found_newest()
        return self.newest

    def _found_newest(self) -> NewestVersion:
        known, doubtful = self.newest, self.doubtful
        data = self._pointer()
        if known is not None and data not in (known.data, doubtful):
            raise FencedError(f"{self.backend.url}: another publisher has taken over; this one has stopped")
        self.doubtful = None
        if known is not None and data == known.data and known.manifest is not None:
            return known
        if data is None:
            self._refuse_foreign()
            if known is None:
                self.backend.probe()
            return NewestVersion()
        what = f"{self.backend.url}/{POINTER}"
        try:
            pointer = Pointer.decoded(data, what)
        except FormatError as error:
            error.add_note(f"remove {what} if no program needs it: the next version is a full then")
            raise
        return NewestVersion(data, pointer, self._manifest_of(pointer))

    def _pointer(self) -> bytes | None:
        try:
            return self.backend.get(POINTER, LIMIT)
        except KeyNotFoundError:
            return None

    def _manifest_of(self, pointer: Pointer) -> Manifest | None:
        """The newest manifest, if it is intact and the versions that it builds on are there."""
        try:
            data = self.backend.get(f"{folder_of(pointer.version)}/{MANIFEST}", LIMIT)
            for folder in pointer.chain[:-1]:
                self.backend.size(f"{folder}/{MANIFEST}")
            return Manifest.decoded(data, MANIFEST) if sha256(data) == pointer.manifest else None
        except (KeyNotFoundError, FormatError):
            return None

    def _versions(self) -> list[int]:
        return sorted(number for name in self.backend.folders("") if (number := version_of(name)) is not None)

    def _owned(self, version: int) -> bool:
        try:
            self.backend.size(f"{folder_of(version)}/{CLAIM}")
        except KeyNotFoundError:
            return False
        return True

    def _refuse_foreign(self) -> None:
        """Raise `UsageError` if another program's versions are here, because they would be removed, or mixed with ours.

        The folder of a publisher that died as it claimed a number is empty.
        """
        for version in self._versions():
            if not self._owned(version) and self.backend.list(f"{folder_of(version)}/"):
                there = f"{self.backend.url} has {folder_of(version)}/"
                raise UsageError(f"{there}, which ckpt publish did not write: choose another place")

    @contextmanager
    def claimed(self, newest: NewestVersion) -> Iterator[int]:
        """Claim the next number. What was written under it is removed after an error, unless a pointer may name it."""
        version = max([*self._versions(), 0 if newest.pointer is None else newest.pointer.version]) + 1
        claim = {"publisher": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        while True:
            try:
                self.backend.create(f"{folder_of(version)}/{CLAIM}", json.dumps(claim).encode())
                break
            except KeyExistsError:  # another publisher was faster
                version += 1
        try:
            crash_point("publish.claimed")
            yield version
        except BaseException:
            if self.doubtful is None:
                with suppress(CkptError):
                    self._remove(version)
                    if root_of(self.backend) is not None:  # the handle refuses to make the folder that it has made once
                        self.backend = self.backend.reopened()
            raise

    def commit(self, pointer: Pointer, manifest: Manifest, newest: NewestVersion) -> None:
        """Let the pointer name a version, durably. Raises `FencedError`: another publisher has taken over."""
        # Prevents: two publishers that move the pointer in turn, so that readers go back and forth.
        if self._pointer() != newest.data:
            raise FencedError(f"{self.backend.url}: another publisher has taken over; this one has stopped")
        data = self.doubtful = pointer.encoded()
        self.backend.replace(POINTER, data)
        crash_point("publish.pointed")
        # Prevents: versions that are removed although a power cut brings back the pointer that names them.
        self.backend.settle("")
        self.newest, self.doubtful = NewestVersion(data, pointer, manifest), None
        self._bases[pointer.version] = manifest.base
        crash_point("publish.committed")

    def remove_old(self, newest: int, keep: int) -> tuple[int, ...]:
        """Remove the versions below `newest` that are not kept -> their numbers.

        What cannot be removed now is removed the next time.

        Args:
            keep: number of newest versions that are kept, with those that they build on.
        """
        removed: list[int] = []
        with suppress(StorageError):
            below = [version for version in self._versions() if version <= newest]
            bases = {version: self._base_of(version) for version in below}
            needed: set[int] = set()
            for version in [one for one in below if bases[one] is not None][-keep:]:
                chain: int | None = version
                while chain and chain not in needed:
                    needed.add(chain)
                    chain = bases.get(chain)
            for version in below:
                if version not in needed and self._owned(version):
                    self._remove(version)
                    removed.append(version)
        return tuple(removed)

    def _base_of(self, version: int) -> int | None:
        """The version that one builds on; 0: on none; None: it was never completed."""
        if version not in self._bases:
            try:
                data = self.backend.get(f"{folder_of(version)}/{MANIFEST}", LIMIT)
                self._bases[version] = Manifest.decoded(data, MANIFEST).base
            except (KeyNotFoundError, FormatError):
                return None
        return self._bases[version] or 0

    def _remove(self, version: int) -> None:
        """Remove a version: first what makes it complete, last what says that it is ours."""
        folder = folder_of(version)
        self.backend.delete(f"{folder}/{MANIFEST}")
        crash_point("publish.removing")
        self.clear(version)
        self.backend.delete(f"{folder}/{CLAIM}")
        self._bases.pop(version, None)
        if (root := root_of(self.backend)) is not None:
            with suppress(OSError):
                Path(root, folder).rmdir()

    def clear(self, version: int) -> None:
        """Remove a version's files, but not its claim."""
        for key in self.backend.list(f"{folder_of(version)}/"):
            if not key.endswith(f"/{CLAIM}"):
                self.backend.delete(key)


def _refuse_store(target: Backend) -> None:
    journal = Journal(target)
    journal.check_outside()
    with suppress(KeyNotFoundError):
        target.size(FORMAT_KEY)
        raise UsageError(f"{target.url} is a checkpoint store: publish to another place")
