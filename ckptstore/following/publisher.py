"""`Publisher`: keeps a folder, or a bucket's prefix, of weights up to date with a run, for programs without ckptstore.

A version is published in these steps (`manifests` shows the files):

1. Claim the next number: create its folder's ``claim.json``, which has one winner.
2. Write the version's files, each durable, and its manifest at last. No reader knows of them.
3. Compare the pointer with what it was before step 1. Another publisher has taken over if it differs: stop.
4. Replace the pointer, durably: one rename, or one PUT. From now on readers find the new version.
5. Remove the versions that are no longer kept, and that nothing kept builds on.

A publisher that dies before step 4 leaves the previous version complete. The number that it claimed is not used again,
and the version after it is a full: a reader may not go from a version to one that does not follow it directly.

On one machine a lock on the folder admits one publisher. Elsewhere the one that started last continues: the others stop
in step 3, or at their next version. Between steps 3 and 4 there is no exclusion in a bucket. If a publisher is stopped
exactly there for as long as another needs to publish and to remove a version, it moves the pointer back to a version
that may be gone; readers then find no version, never a mixture, until the other publisher, which stops, is started
again.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
from ckptstore.exchange.export import PrefixSelection
from ckptstore.exchange.trainer_layouts import model_files
from ckptstore.following import ancestry
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
from ckptstore.following.polling import Polling, check_polling
from ckptstore.following.version_writer import LAYOUTS, BaseUnusableError, Layout, VersionContent, write_version
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import FORMAT_KEY, CheckpointEntry
from ckptstore.host.crash_points import crash_point
from ckptstore.host.option_checks import whole
from ckptstore.log import refs
from ckptstore.log.journal import Journal
from ckptstore.log.log_watch import LogWatch
from ckptstore.restore.load import restore_with
from ckptstore.restore.open_checkpoint import OpenCheckpoint, opened

if TYPE_CHECKING:
    from ckptstore.backends.base import Backend
    from ckptstore.host.progress import Progress

__all__ = ["PublishOptions", "Published", "Publisher"]

_SHARD: Final = 5_000_000_000
_MOST: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """See `Store.publish`."""

    ref: str | int = "latest"
    layout: Layout = "hf"
    strip: str | None = "model."
    select: str | Sequence[str] | None = None
    files: str | os.PathLike[str] | None = None
    keep: int = 2
    full_every: int = 16
    sha256: bool = False
    max_shard_bytes: int | None = None
    poll: float = 2.0
    timeout: float | None = None
    stop: threading.Event | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_polling(self.poll, self.timeout)
        if self.layout not in LAYOUTS:
            raise UsageError(f"layout: {self.layout!r:.80}; it may be {' or '.join(map(repr, LAYOUTS))}")
        whole("keep", self.keep, 1, _MOST)
        whole("full_every", self.full_every, 1, _MOST)
        if self.max_shard_bytes is not None:
            whole("max_shard_bytes", self.max_shard_bytes, 1)
        if self.files is not None and not Path(self.files).is_dir():
            raise UsageError(f"files: {os.fspath(self.files)} is not a folder")

    @property
    def selection(self) -> str | Sequence[str] | PrefixSelection | None:
        """What `chosen_tensors` takes."""
        return PrefixSelection(self.strip, self.select or None) if self.strip else self.select

    @property
    def selected(self) -> tuple[str, ...]:
        """See `Manifest.selection`."""
        globs = (self.select,) if isinstance(self.select, str) else tuple(self.select or ())
        return (self.strip or "", *globs)


@dataclass(frozen=True, slots=True)
class Published:
    """A version that was published.

    Attributes:
        version: its number; the numbers rise.
        folder: its folder, from the place that was published to.
        ref, step: the checkpoint.
        base: the version that it is a delta on; None: it is a full.
        reason: of a full: why it is not a delta.
        tensors, changed: number of the model's tensors, and of those that differ from the base's (of a full: all).
        nbytes: bytes of the model's tensors.
        written: bytes that were written.
        removed: versions that were removed.
        lossy: whether the checkpoint was stored lossily, on request.
        seconds: from the poll that found the checkpoint to the end.
    """

    version: int
    folder: str
    ref: str
    step: int
    base: int | None
    reason: str | None
    tensors: int
    changed: int
    nbytes: int
    written: int
    removed: tuple[int, ...]
    lossy: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest version at the target.

    Attributes:
        data: the bytes of the pointer.
        pointer: the pointer; None: there is none.
        manifest: its manifest; None: it is missing or damaged, or a version that it builds on is missing.
    """

    data: bytes | None = None
    pointer: Pointer | None = None
    manifest: Manifest | None = None


@dataclass
class _Held:
    """The checkpoint of the newest version, open, so that its segments stay pinned until a delta on it is written."""

    ref: str = ""
    found: OpenCheckpoint | None = None
    open: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self.open.close()
        self.ref, self.found = "", None


class Publisher(Polling[Published]):
    """An iterator that publishes the checkpoints of a run as they appear; see `Store.publish`.

    One thread iterates; any thread may call `close`. After an error ``next`` continues, except after `FencedError`.
    """

    def __init__(self, journal: Journal, target: Backend, options: PublishOptions) -> None:
        """Publish nothing yet. Raises `UsageError`: `target` is a store, or inside one."""
        super().__init__(options.poll, options.timeout, options.stop)
        self._journal = journal
        self._target = target
        self._options = options
        self._looks = LogWatch(journal)
        self._looking = threading.Lock()
        self._lock = ExitStack()
        self._locked = False
        self._newest: _Newest | None = None  # as this publisher has read or written it
        self._doubtful: bytes | None = None  # a pointer that was sent without an answer
        self._bases: dict[int, int | None] = {}
        self._held = _Held()
        _refuse_store(target)

    def close(self) -> None:
        """End the iteration: a waiting ``next`` raises `StopIteration` soon. Another publisher may start then.

        If another thread is publishing a version, that completes.
        """
        self._closed.set()
        if self._looking.acquire(blocking=False):
            try:
                self._free()
            finally:
                self._looking.release()

    def _free(self) -> None:
        self._held.close()
        self._looks.close()
        self._lock.close()
        self._locked = False

    def look(self) -> Published | None:
        """Publish the checkpoint if the target has another one; None: it has this one, or there is none yet."""
        try:
            with self._looking:
                return self._poll()
        finally:
            if self._closed.is_set():
                self.close()

    def _poll(self) -> Published | None:
        began = time.monotonic()
        journal, view = self._looks.look()
        entry = self._entry(view.catalog)
        if entry is None:
            return None
        known = self._newest
        if known is not None and self._doubtful is None and self._is_there(known.manifest, journal, entry):
            return None
        if not self._locked:
            self._take_lock()
        newest = self._newest = self._read_newest()
        if self._is_there(newest.manifest, journal, entry):
            return None
        found = self._publish(journal, view.catalog, entry, newest)
        return replace(found, seconds=time.monotonic() - began)

    def _entry(self, catalog: Catalog) -> CheckpointEntry | None:
        if self._options.ref == "latest" and not catalog.checkpoints:
            return None
        return refs.resolve(catalog, self._options.ref)

    def _is_there(self, manifest: Manifest | None, journal: Journal, entry: CheckpointEntry) -> bool:
        if manifest is None or (manifest.run, manifest.ref, manifest.state) != (journal.run, entry.ref, entry.state):
            return False
        return (manifest.layout, manifest.selection) == (self._options.layout, self._options.selected)

    # -- the target

    def _take_lock(self) -> None:
        if not self._lock.enter_context(exclusive_access(self._target, lambda: False, make=True)):
            self._lock.close()
            raise WriterError(f"{self._target.url}: another publisher is running here; end it, or use another place")
        self._locked = True

    def _read_newest(self) -> _Newest:
        """Read the pointer and its manifest. Raises `FencedError`, `UsageError`, `FormatError`, `StorageError`."""
        known, doubtful = self._newest, self._doubtful
        data = self._pointer()
        if known is not None and data not in (known.data, doubtful):
            raise FencedError(f"{self._target.url}: another publisher has taken over; this one has stopped")
        self._doubtful = None
        if known is not None and data == known.data and known.manifest is not None:
            return known
        if data is None:
            self._refuse_foreign()
            if known is None:
                self._target.probe()
            return _Newest()
        what = f"{self._target.url}/{POINTER}"
        try:
            pointer = Pointer.decoded(data, what)
        except FormatError as error:
            error.add_note(f"remove {what} if no program needs it: the next version is a full then")
            raise
        return _Newest(data, pointer, self._manifest_of(pointer))

    def _pointer(self) -> bytes | None:
        try:
            return self._target.get(POINTER, LIMIT)
        except KeyNotFoundError:
            return None

    def _manifest_of(self, pointer: Pointer) -> Manifest | None:
        """The newest manifest, if it is intact and the versions that it builds on are there."""
        try:
            data = self._target.get(f"{folder_of(pointer.version)}/{MANIFEST}", LIMIT)
            for folder in pointer.chain[:-1]:
                self._target.size(f"{folder}/{MANIFEST}")
            return Manifest.decoded(data, MANIFEST) if sha256(data) == pointer.manifest else None
        except (KeyNotFoundError, FormatError):
            return None

    def _versions(self) -> list[int]:
        return sorted(number for name in self._target.folders("") if (number := version_of(name)) is not None)

    def _owned(self, version: int) -> bool:
        try:
            self._target.size(f"{folder_of(version)}/{CLAIM}")
        except KeyNotFoundError:
            return False
        return True

    def _refuse_foreign(self) -> None:
        """Raise `UsageError` if another program's versions are here, because they would be removed, or mixed with ours.

        The folder of a publisher that died as it claimed a number is empty.
        """
        for version in self._versions():
            if not self._owned(version) and self._target.list(f"{folder_of(version)}/"):
                there = f"{self._target.url} has {folder_of(version)}/"
                raise UsageError(f"{there}, which ckpt publish did not write: choose another place")

    # -- one version

    def _publish(self, journal: Journal, catalog: Catalog, entry: CheckpointEntry, newest: _Newest) -> Published:
        why = self._full_because(journal, catalog, entry, newest)
        with self._claimed(newest) as version:
            if why is None and newest.manifest is not None and version != newest.manifest.version + 1:
                why = "a version before it was not completed"

            def work(found: OpenCheckpoint) -> tuple[Manifest, int, str | None]:
                return self._write(found, journal.run, version, newest, why)

            manifest, written, reason = restore_with(journal, entry.ref, work)
            data = manifest.encoded()
            self._target.create(f"{folder_of(version)}/{MANIFEST}", data)
            crash_point("publish.complete")
            before = () if manifest.base is None or newest.pointer is None else newest.pointer.chain
            chain = (*before, folder_of(version))
            self._commit(Pointer(version, sha256(data), manifest.ref, manifest.step, chain), manifest, newest)
        if self._options.layout == "slime":
            self._hold(entry.ref)
        removed = self._remove_old(version)
        changed = sum(tensor.encoding != "base" for tensor in manifest.tensors)
        sizes = (len(manifest.tensors), changed, sum(tensor.nbytes for tensor in manifest.tensors), written)
        place = (version, folder_of(version), manifest.ref, manifest.step, manifest.base, reason)
        return Published(*place, *sizes, removed, manifest.lossy, 0.0)

    def _full_because(self, journal: Journal, catalog: Catalog, entry: CheckpointEntry, newest: _Newest) -> str | None:
        """Why the next version is a full, as far as is known before the checkpoint is opened; None: no reason."""
        before, options = newest.manifest, self._options
        if newest.pointer is None:
            return "there was no version"
        if before is None:
            return "the previous version is damaged or incomplete"
        if before.run != journal.run:
            return "another run"
        if (before.layout, before.selection) != (options.layout, options.selected):
            return "another layout or selection"
        if ancestry.fork_point(catalog, (before.term, before.step), entry.node) != (before.term, before.step):
            return "the run went back, or was forked"
        there = catalog.checkpoints.get((before.term, before.step))
        if there is not None and there.state != before.state:
            return "the run went back, or was forked"
        if len(newest.pointer.chain) >= options.full_every:
            return "every so many versions"
        return None

    @contextmanager
    def _claimed(self, newest: _Newest) -> Iterator[int]:
        """Claim the next number. What was written under it is removed after an error, unless a pointer may name it."""
        version = max([*self._versions(), 0 if newest.pointer is None else newest.pointer.version]) + 1
        claim = {"publisher": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        while True:
            try:
                self._target.create(f"{folder_of(version)}/{CLAIM}", json.dumps(claim).encode())
                break
            except KeyExistsError:  # another publisher was faster
                version += 1
        try:
            crash_point("publish.claimed")
            yield version
        except BaseException:
            if self._doubtful is None:
                with suppress(CkptError):
                    self._remove(version)
                    if root_of(self._target) is not None:  # the handle refuses to make the folder that it has made once
                        self._target = self._target.reopened()
            raise

    def _write(
        self, found: OpenCheckpoint, run: str, version: int, newest: _Newest, why: str | None
    ) -> tuple[Manifest, int, str | None]:
        """Write the files of a version -> its manifest, the bytes written, and why it is a full (None: a delta)."""
        self._clear(version)  # of an encoding that was damaged
        options, files = self._options, self._files(found)
        limit = min(options.max_shard_bytes or _SHARD, self._target.segment_bytes)
        with ExitStack() as stack:

            def base_source() -> OpenCheckpoint:
                assert newest.manifest is not None
                if self._held.found is not None and self._held.ref == newest.manifest.ref:
                    return self._held.found
                return stack.enter_context(opened(self._journal, newest.manifest.ref))

            base = newest.manifest if why is None else None
            content = VersionContent(
                found,
                options.selection,
                options.layout,
                base,
                base_source,
                files,
                options.sha256,
                limit,
                options.progress,
            )
            if base is not None and content.kinds != base.kinds:
                content.base, why = None, "other tensors, shapes or files"
            try:
                tensors, written = write_version(self._target, version, content)
            except BaseUnusableError as error:
                self._clear(version)
                content.base, why = None, f"the previous checkpoint cannot be read: {error}"
                tensors, written = write_version(self._target, version, content)
        crash_point("publish.written")
        entry, base = found.entry, content.base
        manifest = Manifest(
            version,
            None if base is None else base.version,
            None if base is None or newest.pointer is None else newest.pointer.manifest,
            options.layout,
            options.selected,
            run,
            entry.ref,
            entry.step,
            entry.term,
            entry.state,
            entry.time,
            found.lossy,
            tuple(tensors),
            content.tied,
            {name: sha256(data) for name, data in files.items()},
        )
        return manifest, written, why

    def _files(self, found: OpenCheckpoint) -> dict[str, bytes]:
        """The model's other files: those of the checkpoint, and those of the folder that the user named."""
        files = model_files(found)
        if self._options.files is not None:
            files |= _files_in(Path(self._options.files))
        taken = ("claim.json", "manifest.json", "model.safetensors.index.json")
        return {name: data for name, data in files.items() if name not in taken and not name.endswith(".safetensors")}

    def _commit(self, pointer: Pointer, manifest: Manifest, newest: _Newest) -> None:
        # Prevents: two publishers that move the pointer in turn, so that readers go back and forth.
        if self._pointer() != newest.data:
            raise FencedError(f"{self._target.url}: another publisher has taken over; this one has stopped")
        data = self._doubtful = pointer.encoded()
        self._target.replace(POINTER, data)
        crash_point("publish.pointed")
        # Prevents: versions that are removed although a power cut brings back the pointer that names them.
        self._target.settle("")
        self._newest, self._doubtful = _Newest(data, pointer, manifest), None
        self._bases[pointer.version] = manifest.base
        crash_point("publish.committed")

    def _hold(self, ref: str) -> None:
        """Keep the checkpoint open. If that fails, the next version may have to be a full."""
        self._held.close()
        with suppress(CkptError):
            self._held.found = self._held.open.enter_context(opened(self._journal, ref))
            self._held.ref = ref

    # -- old versions

    def _remove_old(self, newest: int) -> tuple[int, ...]:
        """Remove the versions below `newest` that are not kept. What cannot be removed now is removed the next time."""
        removed: list[int] = []
        with suppress(StorageError):
            below = [version for version in self._versions() if version <= newest]
            bases = {version: self._base_of(version) for version in below}
            needed: set[int] = set()
            for version in [one for one in below if bases[one] is not None][-self._options.keep :]:
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
                data = self._target.get(f"{folder_of(version)}/{MANIFEST}", LIMIT)
                self._bases[version] = Manifest.decoded(data, MANIFEST).base
            except (KeyNotFoundError, FormatError):
                return None
        return self._bases[version] or 0

    def _remove(self, version: int) -> None:
        """Remove a version: first what makes it complete, last what says that it is ours."""
        folder = folder_of(version)
        self._target.delete(f"{folder}/{MANIFEST}")
        crash_point("publish.removing")
        self._clear(version)
        self._target.delete(f"{folder}/{CLAIM}")
        self._bases.pop(version, None)
        if (root := root_of(self._target)) is not None:
            with suppress(OSError):
                Path(root, folder).rmdir()

    def _clear(self, version: int) -> None:
        """Remove a version's files, but not its claim."""
        for key in self._target.list(f"{folder_of(version)}/"):
            if not key.endswith(f"/{CLAIM}"):
                self._target.delete(key)


def _refuse_store(target: Backend) -> None:
    journal = Journal(target)
    journal.check_outside()
    with suppress(KeyNotFoundError):
        target.size(FORMAT_KEY)
        raise UsageError(f"{target.url} is a checkpoint store: publish to another place")


def _files_in(folder: Path) -> Mapping[str, bytes]:
    """The small files in a folder, without those of weights. Raises `StorageError`."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
    try:
        files = [one for one in sorted(folder.iterdir()) if one.is_file() and not one.name.startswith(".")]
        return {one.name: one.read_bytes() for one in files if not one.name.endswith(weights)}
    except OSError as error:
        raise StorageError(error.errno, error.strerror, str(folder)) from error
