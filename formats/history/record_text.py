"""Encode and decode log slots, FORMAT, requests and pins as text that people can read.

Each text is one line of canonical JSON, a line feed, the xxh3_128 of that JSON as 32 hex digits, and a line feed. The
hash covers every byte, so any flipped bit is found. A commit that does not fit a slot is stored as a manifest object in
the same form; the slot then has the manifest's size and hash.

Invalid bytes raise `FormatError`; the engine decides whether they are hostile or damaged. An intact text that requires
a feature this version lacks raises `IncompatibleFormatError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ckptstore.errors import FormatError, IncompatibleFormatError
from ckptstore.formats import jsontext
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history import metadata, term_members
from ckptstore.formats.history.members import Members, hexadecimal
from ckptstore.formats.history.records import (
    KEEP,
    MAJOR,
    CheckpointEntry,
    CommitRecord,
    Encoding,
    FormatFile,
    Node,
    OpenRecord,
    PinRecord,
    Record,
    Request,
    SegmentEntry,
    manifest_key,
)

__all__ = [
    "KNOWN_FEATURES",
    "MANIFEST_LIMIT",
    "SLOT_LIMIT",
    "decode_format",
    "decode_pin",
    "decode_record",
    "decode_request",
    "encode_commit",
    "encode_format",
    "encode_open",
    "encode_pin",
    "encode_request",
    "seal",
    "torn",
    "unseal",
]

SLOT_LIMIT: Final = 256 * 1024
"""Longest log slot in bytes."""
MANIFEST_LIMIT: Final = 256 * 1024 * 1024
"""Longest manifest, request or pin in bytes."""
KNOWN_FEATURES: Final[frozenset[str]] = frozenset({KEEP})
"""Names in ``incompat``, ``ro_compat`` and FORMAT's ``features`` that this version understands."""

_OF_COMMITS: Final = frozenset(
    {"segments", "checkpoints", "encodings", "drops", "retires", "tags", "requests", "swept", KEEP}
    | {term_members.CLOSED, term_members.HIGHEST, term_members.LACKS}
)
"""Members of a COMMIT that are in the manifest, not in the slot, if there is a manifest."""
_MANIFEST: Final = "manifest"
"""Member of a slot that points to the manifest object with the text of its COMMIT."""
_TAIL: Final = 34  # line feed, 32 hex digits, line feed


def seal(value: Mapping[str, Any]) -> bytes:
    """Return canonical JSON, line feed, its hash, line feed. Raises `FormatError` for too many values to read."""
    text = jsontext.bounded(value, what=f"a text of kind {value.get('ckptstore')!r}")
    return text + f"\n{xxh3_128(text)}\n".encode("ascii")


def unseal(data: bytes, *, what: str, max_bytes: int = SLOT_LIMIT) -> Any:
    """Check a sealed text and return its JSON value.

    Raises:
        FormatError: a byte differs from what was written, or the text is longer than `max_bytes`.
    """
    if len(data) > max_bytes:
        raise FormatError(f"{what}: {len(data)} bytes, at most {max_bytes} are allowed")
    text = data[:-_TAIL]
    if data[-_TAIL:] != f"\n{xxh3_128(text)}\n".encode("ascii"):
        raise FormatError(f"{what}: checksum mismatch in {len(data)} bytes")
    return jsontext.loads(text, what=what, max_bytes=max_bytes)


def torn(data: bytes) -> bool:
    """Whether `data` may be the beginning of a sealed text whose writer has not finished, or was killed.

    Canonical JSON contains no line feed and no zero byte. So an incomplete text lacks at least one of its two line
    feeds, and a text with missing blocks contains zeros. Data with both line feeds and no zeros was written completely:
    it is intact or damaged, but not torn.
    """
    return not data or b"\0" in data or (data[:1] == b"{" and data.count(b"\n") < 2)


# ------------------------------------------------------------------------------------------------ log slots


def encode_open(record: OpenRecord, *, seq: int, run: str) -> bytes:
    """Return the slot text of an OPEN.

    Raises:
        FormatError: the text is longer than a slot may be.
    """
    parent = None if record.parent is None else list(record.parent)
    known = _common("open", record, seq, run)
    known |= {"parent": parent, "time": record.time, "writer": dict(record.writer)}
    data = seal(_joined(known, _features(record), record.extra))
    if len(data) > SLOT_LIMIT:
        raise FormatError(f"OPEN of term {record.term}: {len(data)} bytes, at most {SLOT_LIMIT} are allowed")
    return data


def encode_commit(record: CommitRecord, *, seq: int, run: str, manifest: str) -> tuple[bytes, bytes | None]:
    """Return the slot text of a COMMIT, and its manifest object or None if the record fits the slot.

    Args:
        record: the record to write; its own `manifest` is ignored.
        manifest: a fresh uuid for the manifest object, used only if one is needed.

    Raises:
        FormatError: the text is longer than even a manifest may be.
    """
    known = _common("commit", record, seq, run)
    policy = {} if record.keep is None else {KEEP: list(record.keep)}  # an empty list is a policy: no rules
    body: dict[str, Any] = {
        "segments": [_segment(entry) for entry in record.segments],
        "checkpoints": [_checkpoint(entry) for entry in record.checkpoints],
    }
    body |= _changes(record.encodings, record.drops, record.retires, record.tags)
    body |= {"requests": dict(record.requests), "swept": list(record.swept)}
    known_body = {name: value for name, value in body.items() if value} | policy
    data = seal(_joined(known | known_body, _features(record), record.extra))
    if len(data) <= SLOT_LIMIT:
        return data, None
    if len(data) > MANIFEST_LIMIT:
        raise FormatError(f"COMMIT at slot {seq}: {len(data)} bytes, at most {MANIFEST_LIMIT} are allowed")
    pointer = {"id": manifest, "size": len(data), "hash": xxh3_128(data)}
    return seal(known | {_MANIFEST: pointer} | _features(record)), data


def decode_record(
    data: bytes, *, seq: int, run: str, what: str, fetch: Callable[[str, int], bytes] | None = None
) -> Record:
    """Decode a slot.

    Args:
        data: the slot's bytes.
        seq: the slot's number; the text must contain it.
        run: the store's run; the text must contain it.
        what: names the slot in errors.
        fetch: (key, size in bytes) -> bytes of a manifest object. None: a record with a manifest is refused.

    Raises:
        FormatError: damaged, hostile, or the text of another slot or store.
        IncompatibleFormatError: intact, but of a kind or with a feature that this version does not know.
        Anything that `fetch` raises.
    """
    found = Members(unseal(data, what=what), what)
    kind, incompat = _heading(found, seq, run, what)
    if kind == "open":
        term, parent = found.term(), found.checkpoint_id("parent")
        if parent is not None and parent.term >= term:  # else following the line of parents could loop
            found.refuse("parent", "a checkpoint of an earlier term")
        term_members.check_types(found.rest(), what)
        return OpenRecord(
            term=term,
            nonce=found.digest("nonce"),
            parent=parent,
            time=found.time("time"),
            writer=found.mapping("writer"),
            incompat=incompat,
            ro_compat=found.names("ro_compat"),
            previous=found.digest("previous"),
            extra=found.rest(),
        )
    if kind != "commit":
        raise IncompatibleFormatError(f"{what}: a record of kind {kind!r}, which this version does not know")
    pointer = found.mapping(_MANIFEST)
    if not pointer:
        return _commit(found, incompat, None, what)
    return _from_manifest(found, Members(pointer, what), seq, run, what, fetch)


def _from_manifest(
    slot: Members, pointer: Members, seq: int, run: str, what: str, fetch: Callable[[str, int], bytes] | None
) -> CommitRecord:
    term, nonce, previous = slot.term(), slot.digest("nonce"), slot.digest("previous")
    manifest, size, digest = pointer.digest("id"), pointer.number("size"), pointer.digest("hash")
    # Prevents: writing to a store without knowing a feature that only the slot, not its manifest, requires.
    needs = slot.names("ro_compat")
    if fetch is None or size > MANIFEST_LIMIT:
        raise FormatError(f"{what}: a manifest of {size} bytes")
    if doubled := sorted(_OF_COMMITS & slot.rest().keys()):
        # Prevents: silently ignoring members that a slot has besides its manifest.
        raise FormatError(f"{what}: has a manifest, and also the member {doubled[0]!r}")
    # Prevents: silently ignoring an invalid member of a slot because the slot has a manifest.
    term_members.check_types(slot.rest(), what)
    data = fetch(manifest_key(term, manifest), size)
    what = f"{what}, manifest {manifest}"
    if len(data) != size or xxh3_128(data) != digest:
        raise FormatError(f"{what}: checksum mismatch in {len(data)} bytes, {size} expected")
    found = Members(unseal(data, what=what, max_bytes=MANIFEST_LIMIT), what)
    kind, incompat = _heading(found, seq, run, what)
    if _MANIFEST in found.rest():  # else the next record made of this one would get it as a member
        found.refuse(_MANIFEST, "a member of a manifest")
    record = _commit(found, incompat, manifest, what)
    if kind != "commit" or (record.term, record.nonce, record.previous) != (term, nonce, previous):
        raise FormatError(f"{what}: belongs to another record")
    return replace(record, ro_compat=tuple(dict.fromkeys((*record.ro_compat, *needs))))


def _heading(found: Members, seq: int, run: str, what: str) -> tuple[str, tuple[str, ...]]:
    """Read the members at the beginning of every slot -> (kind, incompat).

    Features are checked first, because they may change the meaning of everything else.
    """
    incompat = found.names("incompat")
    if unknown := [name for name in incompat if name not in KNOWN_FEATURES]:
        raise IncompatibleFormatError(f"{what}: needs {', '.join(unknown)}, which this version does not know")
    kind = found.text("ckptstore")
    if (other := found.digest("run")) != run:
        raise FormatError(f"{what}: belongs to run {other}, not {run}")
    if (number := found.number("seq")) != seq:
        raise FormatError(f"{what}: holds the text of slot {number}")
    return kind, incompat


def _commit(found: Members, incompat: tuple[str, ...], manifest: str | None, what: str) -> CommitRecord:
    term = found.term()
    term_members.check_types(found.rest(), what)
    return CommitRecord(
        term=term,
        nonce=found.digest("nonce"),
        segments=found.items("segments", lambda value: _read_segment(value, term, what), "segments"),
        checkpoints=found.items("checkpoints", lambda value: _read_checkpoint(value, term, what), "checkpoints"),
        encodings=found.items("encodings", lambda value: _read_encoding(value, what), "encodings"),
        drops=found.ids("drops"),
        retires=found.nodes("retires"),
        tags=found.tags("tags"),
        requests=_outcomes(found),
        swept=found.ids("swept"),
        keep=found.rules(KEEP),
        incompat=incompat,
        ro_compat=found.names("ro_compat"),
        manifest=manifest,
        previous=found.digest("previous"),
        extra=found.rest(),
    )


def _outcomes(found: Members) -> dict[str, str | None]:
    outcomes = found.mapping("requests")
    for request, reason in outcomes.items():
        if not hexadecimal(request) or not (reason is None or type(reason) is str):
            found.refuse("requests", "an object of uuids to a reason or null")
    return outcomes


# ------------------------------------------------------------------------------------------------ entries


def _common(kind: str, record: Record, seq: int, run: str) -> dict[str, Any]:
    """Return the members at the beginning of every slot."""
    place = {"ckptstore": kind, "run": run, "seq": seq, "previous": record.previous}
    return place | {"term": record.term, "nonce": record.nonce}


def _joined(known: dict[str, Any], features: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    assert not extra.keys() & known.keys(), "an unknown member shadows a known one"
    return {**known, **features, **extra}


def _features(record: Record) -> dict[str, Any]:
    both = {"incompat": list(record.incompat), "ro_compat": list(record.ro_compat)}
    return {name: value for name, value in both.items() if value}


def _changes(
    encodings: Sequence[Encoding], drops: Sequence[str], retires: Sequence[Node], tags: Mapping[str, Node | None]
) -> dict[str, Any]:
    """Return the members that a COMMIT and a request have in common."""
    return {
        "encodings": [_encoding(entry) for entry in encodings],
        "drops": list(drops),
        "retires": [list(node) for node in retires],
        "tags": {tag: None if node is None else list(node) for tag, node in tags.items()},
    }


def _segment(entry: SegmentEntry) -> dict[str, Any]:
    known = {"id": entry.id, "size": entry.size, "header": entry.header, "hash": entry.hash}
    return _joined(known, {}, entry.extra)


def _read_segment(value: Any, term: int, what: str) -> SegmentEntry:
    found = Members(value, what)
    return SegmentEntry(
        id=found.digest("id"),
        term=term,  # a record adds only segments of its own term
        size=found.number("size"),
        header=found.number("header"),
        hash=found.digest("hash"),
        extra=found.rest(),
    )


def _checkpoint(entry: CheckpointEntry) -> dict[str, Any]:
    known = {"step": entry.step, "state": entry.state, "time": entry.time}
    return _joined(known | {"tensors": entry.tensors, "bytes": entry.nbytes}, {}, entry.extra)


def _read_checkpoint(value: Any, term: int, what: str) -> CheckpointEntry:
    found = Members(value, what)
    entry = CheckpointEntry(
        term=term,  # a record promises only checkpoints of its own term
        step=found.number("step"),
        state=found.digest("state"),
        time=found.time("time"),
        tensors=found.number("tensors"),
        nbytes=found.number("bytes"),
        extra=found.rest(),
    )
    if type(entry.extra.get(metadata.MEMBER, {})) is not dict:
        found.refuse(metadata.MEMBER, "an object")
    return entry


def _encoding(entry: Encoding) -> dict[str, Any]:
    known: dict[str, Any] = {"checkpoint": list(entry.checkpoint), "kind": entry.kind}
    known |= {"base": None if entry.base is None else list(entry.base), "segments": list(entry.segments)}
    return _joined(known | {"lossy": entry.lossy, "bytes": entry.bytes}, {}, entry.extra)


def _read_encoding(value: Any, what: str) -> Encoding:
    found = Members({**value, "checkpoint": [value.get("checkpoint")]} if type(value) is dict else value, what)
    segments = found.ids("segments")
    if not segments:
        found.refuse("segments", "a list of at least one uuid")
    return Encoding(
        checkpoint=found.nodes("checkpoint")[0],
        kind=found.text("kind"),
        base=found.checkpoint_id("base"),
        segments=segments,
        lossy=found.flag("lossy"),
        bytes=found.number("bytes"),
        extra=found.rest(),
    )


# ------------------------------------------------------------------------------------------------ other texts


def encode_format(file: FormatFile) -> bytes:
    """Return the bytes of FORMAT."""
    features = {operation: list(names) for operation, names in file.features.items()}
    known = {"ckptstore": "format", "major": file.major, "run": file.run, "anchor_every": file.anchor_every}
    return seal(_joined(known | {"features": features}, {}, file.extra))


def decode_format(data: bytes, *, what: str = "FORMAT") -> FormatFile:
    """Decode FORMAT.

    Raises:
        FormatError: the text is damaged or not a FORMAT file.
        IncompatibleFormatError: another major version, or an unknown feature that readers must know.
    """
    found = Members(unseal(data, what=what), what)
    if (kind := found.text("ckptstore")) != "format":
        raise FormatError(f"{what}: a text of kind {kind!r}, expected 'format'")
    if (major := found.number("major")) != MAJOR:
        raise IncompatibleFormatError(f"{what}: format version {major}; this version reads {MAJOR}")
    features = Members(found.mapping("features"), what)
    operations = {operation: features.names(operation) for operation in tuple(features.rest())}
    if unknown := [name for name in operations.get("read", ()) if name not in KNOWN_FEATURES]:
        raise IncompatibleFormatError(f"{what}: needs {', '.join(unknown)}, which this version does not know")
    return FormatFile(
        run=found.digest("run"),
        major=major,
        anchor_every=found.number("anchor_every", least=1),
        features=operations,
        extra=found.rest(),
    )


def encode_request(request: Request, *, run: str) -> bytes:
    """Return the bytes of a request."""
    known: dict[str, Any] = {"ckptstore": "request", "run": run, "term": request.term, "id": request.id}
    known |= {"what": request.what, "segments": [_segment(entry) for entry in request.segments]}
    changes = _changes(request.encodings, request.drops, request.retires, request.tags)
    known |= {name: value for name, value in changes.items() if value}
    if request.keep is not None:
        # Prevents: a writer without retention rules accepting the request and so claiming that the rules are in force.
        known |= {KEEP: list(request.keep), "incompat": [KEEP]}
    return seal(_joined(known, {}, request.extra))


def decode_request(data: bytes, *, run: str, what: str) -> Request:
    """Decode a request. Raises `FormatError`, or `IncompatibleFormatError` for an unknown feature."""
    found = Members(unseal(data, what=what, max_bytes=MANIFEST_LIMIT), what)
    kind = found.text("ckptstore")
    if unknown := [name for name in found.names("incompat") if name not in KNOWN_FEATURES]:
        raise IncompatibleFormatError(f"{what}: needs {', '.join(unknown)}, which this version does not know")
    if kind != "request" or found.digest("run") != run:
        raise FormatError(f"{what}: not a request to this run")
    term = found.term()
    return Request(
        id=found.digest("id"),
        term=term,
        what=found.text("what"),
        segments=found.items("segments", lambda value: _read_segment(value, term, what), "segments"),
        encodings=found.items("encodings", lambda value: _read_encoding(value, what), "encodings"),
        drops=found.ids("drops"),
        retires=found.nodes("retires"),
        tags=found.tags("tags"),
        keep=found.rules(KEEP),
        extra=found.rest(),
    )


def encode_pin(pin: PinRecord) -> bytes:
    """Return the bytes of a pin."""
    known = {"ckptstore": "pin", "nonce": pin.nonce, "segments": list(pin.segments), "reader": dict(pin.reader)}
    return seal(_joined(known, {}, pin.extra))


def decode_pin(data: bytes, *, what: str) -> PinRecord:
    """Decode a pin. Raises `FormatError`."""
    found = Members(unseal(data, what=what, max_bytes=MANIFEST_LIMIT), what)
    if found.text("ckptstore") != "pin":
        raise FormatError(f"{what}: not a pin")
    return PinRecord(found.digest("nonce"), found.ids("segments"), found.mapping("reader"), found.rest())
