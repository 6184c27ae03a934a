"""The journal of a store: its medium and FORMAT file, on which the log protocol works."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import (
    CkptError,
    CorruptLogError,
    FormatError,
    IncompatibleFormatError,
    KeyExistsError,
    KeyNotFoundError,
    ReadOnlyError,
    StorageError,
    StoreNotFoundError,
    UsageError,
)
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.record_text import decode_format, encode_format
from ckptstore.formats.history.records import COPYING_KEY, FORMAT_KEY, FormatFile, slot_key
from ckptstore.log.partial_objects import exists, text_bytes

__all__ = ["Journal"]

_ROOMS: Final = ("log", "seg", "fold")
"""Folders that only a store has, and never before its FORMAT file."""
_NAMES: Final = (*_ROOMS, "pins", "req")
"""Folders that the format names."""
_OURS: Final = (b'"ckptstore"', b'"anchor_every"', b'"features"')
"""Texts of which our FORMAT file still contains one if a single byte of it is damaged."""


class Journal:
    """One store's medium and FORMAT file: every part of the log protocol works on this pair.

    Attributes:
        backend: the medium. `create` replaces it if the folder was deleted meanwhile.
        fold: key and catalog of the fold that was decoded last. The key contains the fold's hash, so a fold with the
            same key need not be read again. The catalog must not be changed.
    """

    def __init__(self, backend: Backend, format_file: FormatFile | None = None) -> None:
        """Read nothing yet.

        Args:
            format_file: the FORMAT file, if it is known already.
        """
        self.backend = backend
        self.fold: tuple[str, Catalog] | None = None
        self._format = format_file

    @property
    def url(self) -> str:
        """The path or URL that the store was opened with."""
        return self.backend.url

    @property
    def run(self) -> str:
        """The run's uuid, 32 hex digits. Raises the errors of `format`."""
        return self.format.run

    @property
    def format(self) -> FormatFile:
        """The store's FORMAT file, read once.

        Raises:
            StoreNotFoundError: there is no store here.
            CorruptLogError, FormatError: the file is damaged, or of an unknown format.
        """
        if self._format is None:
            try:
                self._format = _decode(_format_bytes(self.backend), self.url)
            except KeyNotFoundError as error:
                self._format = self._format_of_new_store(error)
        return self._format

    def _format_of_new_store(self, absence: KeyNotFoundError) -> FormatFile:
        """Read a FORMAT file that was absent just now, if another process is creating the store. Raises as `format`."""
        rooms = self.rooms()
        if not rooms:
            raise StoreNotFoundError.at(self.url, ": there is no checkpoint store here (no FORMAT file)") from absence
        try:
            return _decode(_format_bytes(self.backend), self.url)
        except KeyNotFoundError as error:
            self._check_finished(error)
            raise StoreNotFoundError.at(
                self.url,
                f": there is no FORMAT file, although {rooms[0]}/ is here: it was removed, and without it "
                "this is not a checkpoint store; restore FORMAT from a copy of this store, or use `ckpt repair`",
                "no FORMAT",
            ) from error

    def _check_finished(self, absence: KeyNotFoundError) -> None:
        """Raise `StoreNotFoundError` if a copy was begun here and is not finished (`log.log_copy`)."""
        try:
            self.backend.size(COPYING_KEY)
        except (KeyNotFoundError, StorageError):
            return
        raise StoreNotFoundError.at(
            self.url,
            ": a copy or repair to this place is not finished: repeat the command that began it, which "
            "continues where it stopped; or delete this place",
        ) from absence

    def rooms(self) -> list[str]:
        """The folders of a store that exist here, whether FORMAT does or not.

        Raises:
            StoreNotFoundError: the store was deleted while it was open.
        """
        try:
            found = self.backend.folders("")
        except StorageError:  # unreadable: nothing is known
            return []
        return [name for name in _ROOMS if name in found]

    def check_present(self) -> None:
        """Raise `StorageError` if FORMAT was removed while a writer is open, where a look is cheap; before a COMMIT.

        Prevents: acknowledging into a store that can no longer be opened. A look that fails otherwise is ignored.
        """
        if not self.backend.cheap_looks:
            return
        try:
            self.backend.size(FORMAT_KEY)
        except KeyNotFoundError as error:
            raise StorageError(
                f"{self.url}: the store has lost its FORMAT file and cannot be opened: nothing was committed; "
                "restore FORMAT from a copy of this store, then this writer continues"
            ) from error
        except StorageError:
            pass

    def check_outside(self) -> None:
        """Raise `UsageError` if this place is inside another store. Call it before creating a store.

        Prevents: a store that `ckpt ls` does not list, whose files verify of the outer store reports as strangers, and
        that is deleted with the outer store. Any depth counts. For the same reason no export is written into a store,
        and no store is created around another. If each look costs a request, only one place is checked: the one above
        the nearest folder that has a name of the format, else the one right above. A place that cannot be looked at
        (credentials for this prefix alone) counts as no store.
        """
        above = self.backend.above()
        if above and not self.backend.cheap_looks:
            above = [next((one for one in above if one[0] in _NAMES), above[0])]
        for name, handle in above:
            if (outer := _store_at(handle)) is not None:
                within = f", in {name}/, which is that store's own" if name in _NAMES else ""
                raise UsageError(
                    f"{self.url} is inside the checkpoint store {outer}{within}: no store is created there; choose a "
                    "place outside it"
                )

    def create(self, *, anew: bool = False) -> None:
        """Create the store if there is none.

        Args:
            anew: also if the store here was deleted while it was open.

        Raises:
            StoreNotFoundError: it was deleted while it was open, or its FORMAT file was removed.
            UsageError: the place is not empty, or is inside another store.
            ReadOnlyError, StorageError, UnsupportedBackendError: it cannot be written, or not safely.
        """
        if self.backend.deleted():  # its writers and readers keep the old handle, which no longer reaches anything
            if not anew:  # Prevents: a run that continues in an empty store because its own store was deleted.
                raise StoreNotFoundError.at(
                    self.url,
                    ": the folder of the store was deleted while it was open; to begin another open it again, or call "
                    "Store.create",
                )
            self.backend = self.backend.reopened()
            self._format = self.fold = None
        try:
            self.format  # noqa: B018  # the property reads the file
        except StoreNotFoundError:
            if self.rooms():  # another process is creating one; or it has lost FORMAT, and this raises
                self.format  # noqa: B018
                return
        else:
            return
        if self.backend.read_only:
            raise ReadOnlyError(f"{self.url}: read-only, cannot create a store")
        self.check_outside()
        known = ("probe/", FORMAT_KEY)  # FORMAT: another process is creating it
        if strangers := [key for key in self.backend.list("") if not key.startswith(known)]:
            raise UsageError(
                f"{self.url}: not a checkpoint store, and not empty (it holds {strangers[0]!r}); give an empty place"
            )
        self.backend.probe()
        # Two creators: one wins, and both read what it wrote.
        with contextlib.suppress(KeyExistsError):
            self.backend.create(FORMAT_KEY, encode_format(FormatFile(run=uuid.uuid4().hex)))
        self.format  # noqa: B018


def _store_at(handle: Callable[[], Backend]) -> str | None:
    """The URL of the store at a place; None: there is none, or it cannot be determined."""
    with contextlib.suppress(CkptError), contextlib.closing(handle()) as place:
        with contextlib.suppress(CorruptLogError, IncompatibleFormatError):  # damaged, or newer: it is still a store
            _decode(_format_bytes(place), place.url)
        return place.url
    return None


def _format_bytes(backend: Backend) -> bytes:
    """FORMAT, once it is completely written. Slot 0 is created only after that. Raises as `Backend.get`."""
    return text_bytes(backend, FORMAT_KEY, followed=lambda: exists(backend, slot_key(0)))


def _decode(data: bytes, url: str) -> FormatFile:
    """The decoded FORMAT file.

    Raises:
        CorruptLogError: it is our FORMAT file, but damaged.
        FormatError: it is another file, or of an unknown format.
    """
    try:
        return decode_format(data)
    except IncompatibleFormatError:
        raise
    except FormatError as error:
        if data and not any(member in data for member in _OURS):
            raise
        raise CorruptLogError(f"{url}: {error}: this file is damaged; `ckpt repair` makes it again") from error
