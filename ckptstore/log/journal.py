"""The log of one store, as whoever reads or writes it holds it: the medium and the store's FORMAT file."""

from __future__ import annotations

import contextlib
import uuid

from ckptstore.backends.base import Backend
from ckptstore.errors import KeyExistsError, KeyNotFoundError, ReadOnlyError, StoreNotFoundError, UsageError
from ckptstore.formats.records import FORMAT_KEY, FormatFile
from ckptstore.formats.texts import SLOT_LIMIT, decode_format, encode_format

__all__ = ["Journal"]


class Journal:
    """One store's medium and FORMAT file, the pair that every part of the protocol works on.

    Attributes:
        backend: the medium. `create` replaces it if the folder was deleted meanwhile.
    """

    def __init__(self, backend: Backend, format_file: FormatFile | None = None) -> None:
        """Read nothing yet.

        Args:
            format_file: the FORMAT file, if it is known already.
        """
        self.backend = backend
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
                self._format = decode_format(self.backend.get(FORMAT_KEY, SLOT_LIMIT))
            except KeyNotFoundError as error:
                raise StoreNotFoundError(f"{self.url}: there is no checkpoint store here (no FORMAT file)") from error
        return self._format

    def create(self) -> None:
        """Create the store if there is none.

        Raises:
            UsageError: the place holds other things.
            ReadOnlyError, StorageError, UnsupportedBackendError: it cannot be written, or not safely.
        """
        if self.backend.deleted():  # its writers and readers keep the old handle, which reaches nothing any more
            self.backend = self.backend.reopened()
            self._format = None
        try:
            self.format  # noqa: B018  # the property reads the file
        except StoreNotFoundError:
            pass
        else:
            return
        if self.backend.read_only:
            raise ReadOnlyError(f"{self.url}: read-only, cannot create a store")
        if strangers := [key for key in self.backend.list("") if not key.startswith("probe/")]:
            raise UsageError(
                f"{self.url}: not a checkpoint store, and not empty (it holds {strangers[0]!r}); give an empty place"
            )
        self.backend.probe()
        # Two creators: one wins, both read what it wrote.
        with contextlib.suppress(KeyExistsError):
            self.backend.create(FORMAT_KEY, encode_format(FormatFile(run=uuid.uuid4().hex)))
        self.format  # noqa: B018
