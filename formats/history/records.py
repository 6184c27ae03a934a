"""Data classes for the log: the records of a store's history, and the small files beside them.

`record_text` converts them to bytes and back; `catalog` applies records. Every
class keeps the JSON members that this version does not know (`extra`), so an older version never loses what a newer one
wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = [
    "ANCHOR_EVERY",
    "COPYING_KEY",
    "FORMAT_KEY",
    "KEEP",
    "MAJOR",
    "NO_SLOT",
    "PLAIN",
    "CheckpointEntry",
    "CheckpointId",
    "CommitRecord",
    "Encoding",
    "FormatFile",
    "Node",
    "OpenRecord",
    "PinRecord",
    "Record",
    "Request",
    "SegmentEntry",
    "fold_key",
    "fold_of",
    "folder_term",
    "in_format",
    "manifest_key",
    "object_of",
    "pin_key",
    "pin_of",
    "ref_of",
    "request_of",
    "segment_key",
    "slot_key",
    "slot_of",
    "valid_tag",
]

MAJOR: Final = 1
"""The format's major version; a store of another major is refused."""
ANCHOR_EVERY: Final = 1024
"""Default K: slots whose seq is a multiple of K are anchors and are never deleted."""
FORMAT_KEY: Final = "FORMAT"
KEEP: Final = "keep"
"""Member of a COMMIT or request that holds the retention rules. A request with it requires the feature of this name."""
PLAIN: Final = "plain"
"""Member of an encoding: a compaction was asked for this uncompressed full, so other compactions leave it as it is."""
COPYING_KEY: Final = "COPYING"
"""Key of the object that marks an unfinished copy, which has no FORMAT yet."""
NO_SLOT: Final = "0" * 32
"""The `previous` hash of slot 0, which has no slot before it."""

Node: TypeAlias = tuple[int, int]
"""(term, step): identifies a checkpoint within one store."""


def ref_of(node: Node) -> str:
    """Return the REF ``STEP@TERM``, which every command accepts."""
    term, step = node
    return f"{step}@{term}"


class CheckpointId(NamedTuple):
    """A checkpoint's identity: its position in the history and the hash of its state (32 hex digits)."""

    term: int
    step: int
    state: str

    @property
    def node(self) -> Node:
        """(term, step)."""
        return (self.term, self.step)

    @property
    def ref(self) -> str:
        """The REF ``STEP@TERM``."""
        return ref_of(self.node)


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A committed segment.

    Attributes:
        id: uuid, 32 hex digits.
        term: the term that wrote it.
        size: length of the object in bytes.
        header: length of its header in bytes, including the 8-byte length field.
        hash: xxh3_128 of those header bytes, 32 hex digits.
    """

    id: str
    term: int
    size: int
    header: int
    hash: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The object's key in the store."""
        return segment_key(self.term, self.id)


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to restore a checkpoint: an edge from `base` (None: no base) to `checkpoint`.

    Attributes:
        checkpoint: (term, step) of the checkpoint that it restores.
        kind: ``full``, ``delta``, ``gradient``, ...
        base: the checkpoint it builds on; None for a full.
        segments: ids of the segments to read, in reading order; at least one.
        lossy: the restored bits may differ from the saved ones; only written if the user asked for it.
        bytes: stored bytes that belong to this encoding.
    """

    checkpoint: Node
    kind: str
    base: CheckpointId | None
    segments: tuple[str, ...]
    lossy: bool
    bytes: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A promised checkpoint.

    Attributes:
        state: hash of the whole state, 32 hex digits.
        time: Unix seconds when it was saved; information only.
        tensors: number of tensors.
        nbytes: logical bytes of all tensors.
    """

    term: int
    step: int
    state: str
    time: float
    tensors: int
    nbytes: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> CheckpointId:
        """Its identity."""
        return CheckpointId(self.term, self.step, self.state)

    @property
    def node(self) -> Node:
        """(term, step)."""
        return (self.term, self.step)

    @property
    def ref(self) -> str:
        """The REF ``STEP@TERM``."""
        return ref_of(self.node)


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """The beginning of a new term.

    Attributes:
        term: above every earlier term.
        parent: the checkpoint it continues from; None: it starts without one.
        nonce: 128 random bits, 32 hex digits, so that no two OPENs have the same bytes. It identifies the term: in a
            copy of the store another term may have the same number.
        time: Unix seconds; information only.
        writer: who opened it (host, pid, version); information only.
        incompat: features that a reader must know.
        ro_compat: features that a writer must know.
        previous: xxh3_128 of the bytes of the previous slot, which reveals a lost or foreign slot; `NO_SLOT` in slot 0.
    """

    term: int
    parent: CheckpointId | None
    nonce: str
    time: float
    writer: Mapping[str, Any] = field(default_factory=dict)
    incompat: tuple[str, ...] = ()
    ro_compat: tuple[str, ...] = ()
    previous: str = NO_SLOT
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One atomic change of the catalog.

    Attributes:
        term: the newest term; only its owner commits.
        nonce: the nonce of its term's OPEN. `Term.commit` fills it in, as it does `previous`.
        segments: segments to add; all of this term.
        checkpoints: checkpoints promised from now on; all of this term.
        encodings: edges to add, for the checkpoints above or for older promised ones.
        drops: ids of segments to give up: live ones, or ones of this term that will never be committed.
        retires: (term, step) of checkpoints that are no longer promised.
        tags: name -> (term, step), or None to remove the tag.
        requests: uuid of an answered request -> None if accepted, else the reason for refusing it.
        swept: ids dropped earlier in this term whose objects are known to be deleted; the catalog forgets them.
        keep: the retention rules from now on (`retention_rules`). Empty: keep every checkpoint.
            None: the rules do not change.
        manifest: id of the manifest object that contains the record, if it did not fit a slot.
        previous: xxh3_128 of the bytes of the previous slot (see `OpenRecord`).
    """

    term: int
    nonce: str = ""
    segments: tuple[SegmentEntry, ...] = ()
    checkpoints: tuple[CheckpointEntry, ...] = ()
    encodings: tuple[Encoding, ...] = ()
    drops: tuple[str, ...] = ()
    retires: tuple[Node, ...] = ()
    tags: Mapping[str, Node | None] = field(default_factory=dict)
    requests: Mapping[str, str | None] = field(default_factory=dict)
    swept: tuple[str, ...] = ()
    keep: tuple[str, ...] | None = None
    incompat: tuple[str, ...] = ()
    ro_compat: tuple[str, ...] = ()
    manifest: str | None = None
    previous: str = NO_SLOT
    extra: Mapping[str, Any] = field(default_factory=dict)


Record: TypeAlias = OpenRecord | CommitRecord
"""The content of a log slot."""


@dataclass(frozen=True, slots=True)
class FormatFile:
    """The store's FORMAT file, which is created once.

    Attributes:
        run: uuid of the run, 32 hex digits.
        major: `MAJOR` of the version that created the store.
        anchor_every: K, the distance between anchors in slots.
        features: operation (``read``, ``write``, ...) -> features that a program must know to perform it.
    """

    run: str
    major: int = MAJOR
    anchor_every: int = ANCHOR_EVERY
    features: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"read": (), "write": ()})
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A request of another process to the writer of `term`: the members of a COMMIT, with a uuid.

    Attributes:
        id: uuid, 32 hex digits.
        what: one line for people: the purpose of the request and who sent it.
        keep: as in a COMMIT. The request then requires the feature `KEEP`, so a writer without it refuses the request.
    """

    id: str
    term: int
    what: str
    segments: tuple[SegmentEntry, ...] = ()
    encodings: tuple[Encoding, ...] = ()
    drops: tuple[str, ...] = ()
    retires: tuple[Node, ...] = ()
    tags: Mapping[str, Node | None] = field(default_factory=dict)
    keep: tuple[str, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The object's key in the store."""
        return f"req/{self.term:010d}-{self.id}"


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A reader's claim on segments. A changed nonce shows that the reader is alive.

    Attributes:
        nonce: 128 random bits, 32 hex digits; new at every renewal.
        segments: ids of the claimed segments.
        reader: the claiming process (host, pid); information only.
    """

    nonce: str
    segments: tuple[str, ...]
    reader: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,127}\Z")


def valid_tag(name: str) -> bool:
    """Whether `name` is a valid tag name: 1-128 letters, digits and ``_.+/-``, the first a letter, digit or ``_``."""
    return isinstance(name, str) and _TAG.match(name) is not None


def _decimal(text: str, digits: int) -> bool:
    """Whether part of a key is a number of `digits` ASCII digits. (`str.isdecimal` alone accepts other scripts.)"""
    return len(text) == digits and text.isascii() and text.isdecimal()


def slot_key(seq: int) -> str:
    """Return the key of log slot `seq`."""
    return f"log/{seq:020d}"


def slot_of(key: str) -> int | None:
    """Return the seq of a log slot's key; None if `key` is not one."""
    digits = key.removeprefix("log/")
    return int(digits) if key.startswith("log/") and _decimal(digits, 20) else None


def fold_key(seq: int, digest: str) -> str:
    """Return the key of the fold through slot `seq`. `digest` is its hash, 32 hex digits; the key has the first 16."""
    return f"fold/{seq:020d}-{digest[:16]}"


_FOLD: Final = re.compile(r"fold/([0-9]{20})-([0-9a-f]{16})")


def fold_of(key: str) -> tuple[int, str] | None:
    """Return (seq, first 16 digits of the hash) of a fold's key; None if `key` is not one."""
    found = _FOLD.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


def segment_key(term: int, segment: str) -> str:
    """Return the key of a segment."""
    return f"seg/{term:010d}/{segment}.safetensors"


def manifest_key(term: int, manifest: str) -> str:
    """Return the key of a manifest object."""
    return f"seg/{term:010d}/{manifest}.json"


_BELOW_SEG: Final = re.compile(r"seg/([0-9]{10})/([0-9a-f]{32})\.(?:safetensors|json)", re.ASCII)


def folder_term(name: str) -> int:
    """Return the term of a folder below ``seg/``; 0 if `name` is not the name of such a folder."""
    return int(name) if _decimal(name, 10) else 0


def object_of(key: str) -> tuple[int, str] | None:
    """Return (term, uuid) of the key of a segment or manifest; None if `key` is neither."""
    found = _BELOW_SEG.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


_REQUEST: Final = re.compile(r"req/([0-9]{10})-([0-9a-f]{32})")


def request_of(key: str) -> tuple[int, str] | None:
    """Return (term, uuid) of a request's key; None if `key` is not one."""
    found = _REQUEST.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


_PIN: Final = re.compile(r"pins/([0-9a-f]{32})")


def pin_key(pin: str) -> str:
    """Return the key of a pin."""
    return f"pins/{pin}"


def pin_of(key: str) -> str | None:
    """Return the uuid of a pin's key; None if `key` is not one."""
    found = _PIN.fullmatch(key)
    return found[1] if found else None


def in_format(key: str) -> bool:
    """Whether a key has one of the forms of SPEC.md 6. Anything else is not an object of the store.

    Such a file comes from somebody else (an editor, a file manager, a sync client) and is neither read nor deleted.
    """
    return key in {FORMAT_KEY, COPYING_KEY} or any(
        form(key) is not None for form in (slot_of, fold_of, object_of, pin_of, request_of)
    )
