"""The log of one store, as whoever reads or writes it holds it: the medium and the store's FORMAT file."""

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
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.record_text import decode_format, encode_format
from ckptstore.formats.records import COPYING_KEY, FORMAT_KEY, FormatFile, slot_key
from ckptstore.log.partial_objects import exists, text_bytes

__all__ = ["Journal"]

_ROOMS: Final = ("log", "seg", "fold")
"""Folders that only a store has, and never before its FORMAT file."""
_NAMES: Final = (*_ROOMS, "pins", "req")
"""Folders that the format names."""
_OURS: Final = (b'"ckptstore"', b'"anchor_every"', b'"features"')
"""What a FORMAT file of ours has, whichever byte of it is another."""


class Journal:
    """One store's medium and FORMAT file, the pair that every part of the protocol works on.

    Attributes:
        backend: the medium. `create` replaces it if the folder was deleted meanwhile.
        fold: key and catalog of the fold that was decoded last. Its key has its hash: who finds the same key again
            need not read it again. Nobody changes the catalog.
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
        """What the store was opened with."""
        return self.backend.url

    @property
    def run(self) -> str:
        """The run's uuid, 32 hex digits. Raises as `format`."""
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
                self._format = _decoded(_format_bytes(self.backend), self.url)
            except KeyNotFoundError as error:
                self._format = self._come_between(error)
        return self._format

    def _come_between(self, absence: KeyNotFoundError) -> FormatFile:
        """What FORMAT holds that was absent just now, if a store is begun at this moment. Raises as `format`."""
        rooms = self.rooms()
        if not rooms:
            raise StoreNotFoundError(f"{self.url}: there is no checkpoint store here (no FORMAT file)") from absence
        try:
            return _decoded(_format_bytes(self.backend), self.url)
        except KeyNotFoundError as error:
            self._check_finished(error)
            raise StoreNotFoundError(
                f"{self.url}: there is no FORMAT file, although {rooms[0]}/ is here: it was removed, and without it "
                "this is no checkpoint store; restore FORMAT from a copy of this store, or use `ckpt repair`"
            ) from error

    def _check_finished(self, absence: KeyNotFoundError) -> None:
        """Raise `StoreNotFoundError` where a copy was begun and is not finished (`log.log_copy`)."""
        try:
            self.backend.size(COPYING_KEY)
        except (KeyNotFoundError, StorageError):
            return
        raise StoreNotFoundError(
            f"{self.url}: a copy or repair to this place is not finished: the command that began it goes on where it "
            "stopped; or delete this"
        ) from absence

    def rooms(self) -> list[str]:
        """The folders of a store that are here, whether FORMAT is or not.

        Raises:
            StoreNotFoundError: the store was deleted while it was open.
        """
        try:
            found = self.backend.folders("")
        except StorageError:  # unreadable: nothing can be said
            return []
        return [name for name in _ROOMS if name in found]

    def check_present(self) -> None:
        """Raise `StorageError` if FORMAT was removed under a writer, where looking is cheap; before a COMMIT.

        Prevents: acknowledging into a store that nobody can open any more. A look that fails otherwise says nothing.
        """
        if not self.backend.cheap_looks:
            return
        try:
            self.backend.size(FORMAT_KEY)
        except KeyNotFoundError as error:
            raise StorageError(
                f"{self.url}: the store has lost its FORMAT file, and nobody can open it: nothing was committed; "
                "restore FORMAT from a copy of this store, then this writer goes on"
            ) from error
        except StorageError:
            pass

    def check_outside(self) -> None:
        """Raise `UsageError` if this place is within another store. Whoever makes a store asks first.

        Prevents: a store that `ckpt ls` does not list, that verify of the other one calls strangers, and that goes with
        the other one when that is deleted. At any depth, as no file is written into a store either, and as no store is
        made around another. Where each look costs a request there is one: above the nearest folder that has a name of
        the format, else right above. What cannot be looked at (credentials for this prefix alone) is taken for no
        store.
        """
        above = self.backend.above()
        if above and not self.backend.cheap_looks:
            above = [next((one for one in above if one[0] in _NAMES), above[0])]
        for name, handle in above:
            if (outer := _store_at(handle)) is not None:
                within = f", in {name}/, which is that store's own" if name in _NAMES else ""
                raise UsageError(
                    f"{self.url} is inside the checkpoint store {outer}{within}: no store is made there; give a place "
                    "beside it"
                )

    def create(self, *, anew: bool = False) -> None:
        """Create the store if there is none.

        Args:
            anew: also in place of one that was deleted while it was open.

        Raises:
            StoreNotFoundError: it was deleted while it was open, or its FORMAT file was removed.
            UsageError: the place holds other things, or is within another store.
            ReadOnlyError, StorageError, UnsupportedBackendError: it cannot be written, or not safely.
        """
        if self.backend.deleted():  # its writers and readers keep the old handle, which reaches nothing any more
            if not anew:  # Prevents: a run that goes on in an empty store, because somebody deleted the one it was in.
                raise StoreNotFoundError(
                    f"{self.url}: the folder of the store was deleted while it was open; to begin another open it "
                    "again, or call Store.create"
                )
            self.backend = self.backend.reopened()
            self._format = self.fold = None
        try:
            self.format  # noqa: B018  # the property reads the file
        except StoreNotFoundError:
            if self.rooms():  # somebody has begun one at this moment; or it has lost FORMAT, and this says so
                self.format  # noqa: B018
                return
        else:
            return
        if self.backend.read_only:
            raise ReadOnlyError(f"{self.url}: read-only, cannot create a store")
        self.check_outside()
        known = ("probe/", FORMAT_KEY)  # FORMAT: somebody else creates it at this moment
        if strangers := [key for key in self.backend.list("") if not key.startswith(known)]:
            raise UsageError(
                f"{self.url}: not a checkpoint store, and not empty (it holds {strangers[0]!r}); give an empty place"
            )
        self.backend.probe()
        # Two creators: one wins, both read what it wrote.
        with contextlib.suppress(KeyExistsError):
            self.backend.create(FORMAT_KEY, encode_format(FormatFile(run=uuid.uuid4().hex)))
        self.format  # noqa: B018


def _store_at(handle: Callable[[], Backend]) -> str | None:
    """The URL of the store in a place; None: there is none, or nobody can tell."""
    with contextlib.suppress(CkptError), contextlib.closing(handle()) as place:
        with contextlib.suppress(CorruptLogError, IncompatibleFormatError):  # damaged, or newer: a store all the same
            _decoded(_format_bytes(place), place.url)
        return place.url
    return None


def _format_bytes(backend: Backend) -> bytes:
    """FORMAT, once nobody is writing it any more. Slot 0 is only created when it is whole. Raises as `Backend.get`."""
    return text_bytes(backend, FORMAT_KEY, followed=lambda: exists(backend, slot_key(0)))


def _decoded(data: bytes, url: str) -> FormatFile:
    """What a FORMAT file says.

    Raises:
        CorruptLogError: it was ours, and is damaged.
        FormatError: it is something else, or of an unknown format.
    """
    try:
        return decode_format(data)
    except IncompatibleFormatError:
        raise
    except FormatError as error:
        if data and not any(member in data for member in _OURS):
            raise
        raise CorruptLogError(f"{url}: {error}: this file is damaged; `ckpt repair` makes it again") from error
