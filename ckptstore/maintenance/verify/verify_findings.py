"""What is found wrong with a store, collected from several threads.

*Damage* is what is not as it was written. What could not be read for reasons that are not the store's (no descriptors
left, no permission, no connection) says nothing about it, and is kept apart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptstore.backends.system_errors import is_bad_medium
from ckptstore.errors import CkptError, StorageError
from ckptstore.formats.records import Encoding, pin_of, request_of
from ckptstore.host.progress import Tally
from ckptstore.restore.restore_plan import Edge, edge_of

__all__ = ["Damage", "Edge", "Findings", "Flaw", "Unread", "edge_of", "is_bad_medium"]


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was written.

    Attributes:
        key: the object.
        what: what is wrong, with tensor and offset where they are known.
        checkpoints: REFs of the checkpoints that are lost with it.
    """

    key: str
    what: str
    checkpoints: tuple[str, ...] = ()

    @property
    def passing(self) -> bool:
        """Whether it is a pin or a request: no checkpoint needs it, and deleting the file mends the store."""
        return pin_of(self.key) is not None or request_of(self.key) is not None


@dataclass(frozen=True, slots=True)
class Unread:
    """An object that could not be read, for a reason that is no damage of the store.

    Attributes:
        key: the object.
        what: what the system said.
        checkpoints: REFs of the checkpoints of which therefore nothing is known.
    """

    key: str
    what: str
    checkpoints: tuple[str, ...] = ()


@dataclass(slots=True)
class Flaw:
    """What cannot be had of an encoding although its segments are there.

    Attributes:
        whole: nothing of it can be used.
        names: tensors that cannot be restored, neither here nor where something is built on them.
        decoded: tensors that were decoded to other bytes than their hashes say, on the base that was chosen. On another
            base they may be right; and so may what builds on them, where it is the hashes that are wrong.
        state: the checkpoint itself cannot be loaded, whatever can be built on its tensors.
    """

    whole: bool = False
    names: set[str] = field(default_factory=set)
    decoded: set[str] = field(default_factory=set)
    state: bool = False


@dataclass(slots=True)
class Findings:
    """Collects what is wrong.

    Attributes:
        tally: told of every byte, those that are no bytes of the store (decoded ones) included.
        damage: (object, what is wrong), each once.
        unread: object -> why it could not be read.
        bad_segments: ids of segments of which nothing can be read.
        unread_segments: those of them that may be all right.
        bad_chunks: id of a segment -> where its damaged chunks begin.
        flaws: what is wrong with encodings.
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
        """An object is damaged, or could not be read: then nothing of the segment is known.

        Args:
            segment: its id, if it is one.
            chunks: where the chunks begin that are damaged; None: all of it is.
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
        """Something about an encoding is wrong; see `Flaw`."""
        with self._lock:
            self.damage[key, _without(key, error)] = None
            flaw = self.flaws.setdefault(edge_of(encoding), Flaw())
            flaw.names.update(names)
            flaw.decoded.update(decoded)
            flaw.whole |= whole
            flaw.state |= state

    def doubt(self, encoding: Encoding, names: Iterable[str]) -> None:
        """The base as it is restored lacks what these tensors build on; another encoding of it has that: no damage."""
        with self._lock:
            self.flaws.setdefault(edge_of(encoding), Flaw()).names.update(names)

    def done(self, nbytes: int, objects: int = 0) -> None:
        """So many bytes were compared, and so many objects are done with."""
        with self._lock:
            self.nbytes += nbytes
            self.objects += objects
        self.tally.advance(nbytes)


def _without(key: str, error: CkptError) -> str:
    return str(error).removeprefix(f"{key}: ")
