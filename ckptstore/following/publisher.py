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

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptstore.errors import CkptError, StorageError, UsageError
from ckptstore.exchange.export import PrefixSelection
from ckptstore.exchange.trainer_layouts import model_files
from ckptstore.following import ancestry
from ckptstore.following.manifests import MANIFEST, Manifest, Pointer, folder_of, sha256
from ckptstore.following.polling import Polling, check_polling
from ckptstore.following.publish_target import NewestVersion, PublishTarget
from ckptstore.following.version_writer import LAYOUTS, BaseUnusableError, Layout, VersionContent, write_version
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry
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
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
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
        if self.files is not None:
            if not Path(self.files).is_dir():
                raise UsageError(f"files: {os.fspath(self.files)} is not a folder")
            _small_files(Path(self.files))

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
        self._target = PublishTarget(target)
        self._options = options
        self._looks = LogWatch(journal)
        self._looking = threading.Lock()
        self._held = _Held()

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
        self._target.close()

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
        known = self._target.newest
        if known is not None and self._target.doubtful is None and self._is_there(known.manifest, journal, entry):
            return None
        if not self._target.locked:
            self._target.take_lock()
        newest = self._target.read_newest()
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
        if self._options.sha256 and any(tensor.sha256 is None for tensor in manifest.tensors):
            return False  # it was published without
        return (manifest.layout, manifest.selection) == (self._options.layout, self._options.selected)

    # -- one version

    def _publish(self, journal: Journal, catalog: Catalog, entry: CheckpointEntry, newest: NewestVersion) -> Published:
        why = self._full_because(journal, catalog, entry, newest)
        with self._target.claimed(newest) as version:
            if why is None and newest.manifest is not None and version != newest.manifest.version + 1:
                why = "a version before it was not completed"

            def work(found: OpenCheckpoint) -> tuple[Manifest, int, str | None]:
                return self._write(found, journal.run, version, newest, why)

            manifest, written, reason = restore_with(journal, entry.ref, work)
            data = manifest.encoded()
            self._target.backend.create(f"{folder_of(version)}/{MANIFEST}", data)
            crash_point("publish.complete")
            before = () if manifest.base is None or newest.pointer is None else newest.pointer.chain
            chain = (*before, folder_of(version))
            self._target.commit(Pointer(version, sha256(data), manifest.ref, manifest.step, chain), manifest, newest)
        if self._options.layout == "slime":
            self._hold(entry.ref)
        removed = self._target.remove_old(version, self._options.keep)
        changed = sum(tensor.encoding != "base" for tensor in manifest.tensors)
        sizes = (len(manifest.tensors), changed, sum(tensor.nbytes for tensor in manifest.tensors), written)
        place = (version, folder_of(version), manifest.ref, manifest.step, manifest.base, reason)
        return Published(*place, *sizes, removed, manifest.lossy, 0.0)

    def _full_because(
        self, journal: Journal, catalog: Catalog, entry: CheckpointEntry, newest: NewestVersion
    ) -> str | None:
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

    def _write(
        self, found: OpenCheckpoint, run: str, version: int, newest: NewestVersion, why: str | None
    ) -> tuple[Manifest, int, str | None]:
        """Write the files of a version -> its manifest, the bytes written, and why it is a full (None: a delta)."""
        self._target.clear(version)  # of an encoding that was damaged
        options, files = self._options, self._files(found)
        limit = min(options.max_shard_bytes or _SHARD, self._target.backend.segment_bytes)
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
                tensors, written = write_version(self._target.backend, version, content)
            except BaseUnusableError as error:
                self._target.clear(version)
                content.base, why = None, f"the previous checkpoint cannot be read: {error}"
                tensors, written = write_version(self._target.backend, version, content)
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

    def _hold(self, ref: str) -> None:
        """Keep the checkpoint open. If that fails, the next version may have to be a full."""
        self._held.close()
        with suppress(CkptError):
            self._held.found = self._held.open.enter_context(opened(self._journal, ref))
            self._held.ref = ref


def _small_files(folder: Path) -> list[Path]:
    """The small files in a folder, without hidden ones and those of weights. Raises `StorageError`, `UsageError`."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
    try:
        files = [one for one in sorted(folder.iterdir()) if one.is_file() and not one.name.startswith(".")]
    except OSError as error:
        raise StorageError(error.errno, error.strerror, str(folder)) from error
    found = [one for one in files if not one.name.endswith(weights)]
    for one in found:
        # Prevents: an error only after all weights were written.
        if _NAME.fullmatch(one.name) is None:
            raise UsageError(
                f"files: {one}: the name of a published file has ASCII letters, digits, '_', '.' and '-' alone, and "
                "begins with none of the last two: rename it, or name a folder that has the model's files alone"
            )
    return found


def _files_in(folder: Path) -> Mapping[str, bytes]:
    """Name -> contents of the `_small_files` in a folder. Raises as they do."""
    try:
        return {one.name: one.read_bytes() for one in _small_files(folder)}
    except OSError as error:
        raise StorageError(error.errno, error.strerror, str(folder)) from error
