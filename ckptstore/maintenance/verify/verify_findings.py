"""Collects what is found wrong with a store, from several threads.

*Damage* is data that is not as it was written. An object that could not be read for other reasons (no file descriptors
left, no permission, no connection) says nothing about the store, and is recorded separately.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptstore.backends.system_errors import is_bad_medium
from ckptstore.errors import CkptError, StorageError
from ckptstore.formats.history.records import Encoding, pin_of, request_of
from ckptstore.host.progress import Tally
from ckptstore.restore.restore_plan import Edge, edge_of

__all__ = ["Damage", "Edge", "Findings", "Flaw", "Unread", "edge_of", "is_bad_medium"]


@dataclass(frozen=True, slots=True)
class Damage:
    """An object that is not as it was written.

    Attributes:
        key: the object.
        what: what is wrong, with tensor and offset if they are known.
        checkpoints: REFs of the checkpoints that are lost with it.
    """

    key: str
    what: str
    checkpoints: tuple[str, ...] = ()

    @property
    def passing(self) -> bool:
        """Whether it is a pin or a request: no checkpoint needs it, and deleting the file fixes the store."""
        return pin_of(self.key) is not None or request_of(self.key) is not None


@dataclass(frozen=True, slots=True)
class Unread:
    """An object that could not be read, for a reason other than damage.

    Attributes:
        key: the object.
        what: the system's message.
        checkpoints: REFs of the checkpoints whose state is therefore unknown.
    """

    key: str
    what: str
    checkpoints: tuple[str, ...] = ()


@dataclass(slots=True)
class Flaw:
    """What is unusable in an encoding although its segments exist.

    Attributes:
        whole: nothing of it can be used.
        names: tensors that cannot be restored, neither here nor as a base of others.
        decoded: tensors whose decoded bytes do not match their hashes, on the chosen base. On another base they may be
            correct; so may tensors that build on them, if the hashes are wrong.
        state: the checkpoint itself cannot be loaded, although others may build on its tensors.
    """

    whole: bool = False
    names: set[str] = field(default_factory=set)
    decoded: set[str] = field(default_factory=set)
    state: bool = False


@dataclass(slots=True)
class Findings:
    """Collects what is wrong.

    Attributes:
        tally: counts every byte, including decoded ones, which are not bytes of the store.
        damage: (object, what is wrong), each once.
        unread: object -> why it could not be read.
        bad_segments: ids of segments that cannot be read at all.
        unread_segments: those of them that may be intact.
        bad_chunks: id of a segment -> offsets of its damaged chunks.
        flaws: errors of encodings.
        strangers: objects that are not of this store: names that the format does not have, segments of another run.
        objects, nbytes: what was checked.
    """

    tally: Tally
    damage: dict[tuple[str, str], None] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    bad_segments: set[str] = field(default_factory=set)
    unread_segments: set[str] = field(default_factory=set)
    bad_chunks: dict[str, set[int]] = field(default_factory=dict)
    flaws: dict[Edge, Flaw] = field(default_factory=dict)
    strangers: set[str] = field(default_factory=set)
    objects: int = 0
    nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, key: str, error: CkptError, segment: str | None = None, chunks: Iterable[int] | None = None) -> None:
        """Record an object that is damaged, or that could not be read: then nothing is known of the segment.

        Args:
            segment: its id, if it is a segment.
            chunks: offsets of the damaged chunks; None: all of it is damaged.
        """
        with self._lock:
            if isinstance(error, StorageError) and not is_bad_medium(error):
                self.unread[key] = _without(key, error)
                if segment is not None:
                    self.unread_segments.add(segment)
                    self.bad_segments.add(segment)
                return
            self.damage[key, _without(key, error)] = None
            if segment is not None and chunks is not None:
                self.bad_chunks.setdefault(segment, set()).update(chunks)
            elif segment is not None:
                self.bad_segments.add(segment)

    def blame(
        self,
        encoding: Encoding,
        key: str,
        error: CkptError,
        *,
        names: Iterable[str] = (),
        decoded: Iterable[str] = (),
        whole: bool = False,
        state: bool = False,
    ) -> None:
        """Record an error of an encoding; see `Flaw`."""
        with self._lock:
            self.damage[key, _without(key, error)] = None
            flaw = self.flaws.setdefault(edge_of(encoding), Flaw())
            flaw.names.update(names)
            flaw.decoded.update(decoded)
            flaw.whole |= whole
            flaw.state |= state

    def doubt(self, encoding: Encoding, names: Iterable[str]) -> None:
        """Record tensors whose base is missing in the base's planned encoding, but not in another: no damage."""
        with self._lock:
            self.flaws.setdefault(edge_of(encoding), Flaw()).names.update(names)

    def done(self, nbytes: int, objects: int = 0) -> None:
        """Count compared bytes and finished objects."""
        with self._lock:
            self.nbytes += nbytes
            self.objects += objects
        self.tally.advance(nbytes)


def _without(key: str, error: CkptError) -> str:
    return str(error).removeprefix(f"{key}: ")
