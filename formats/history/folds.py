"""A fold: the catalog through one slot, as bytes (SPEC.md 8).

A fold is ``ckptstore fold\\n``, the xxh3_128 of what follows as 32 hex digits, a line feed, and one zstd frame. The
frame contains a line of canonical JSON and the columns of the large tables, as wide as they are in memory, so a store
of 200,000 checkpoints is read in a fraction of a second. A fold can be computed again: a damaged one costs time, not
data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from ckptstore.errors import FormatError, IncompatibleFormatError
from ckptstore.formats import jsontext
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history import term_members
from ckptstore.formats.history.catalog import Catalog, TermEntry
from ckptstore.formats.history.columns import ascending
from ckptstore.formats.history.fold_columns import ColumnReader, Tables, columns_size, write_tables
from ckptstore.formats.history.members import MAX_INT, MAX_TERM, Members, hexadecimal, is_term, is_time, natural
from ckptstore.formats.history.record_text import KNOWN_FEATURES
from ckptstore.formats.history.records import KEEP, CheckpointId, Node
from ckptstore.formats.history.spans import Spans
from ckptstore.formats.history.tables import NodeTable, Table

__all__ = ["FOLD_LIMIT", "JSON_LIMIT", "RATIO", "SLACK", "decode_fold", "encode_fold", "intact"]

FOLD_LIMIT: Final = 1024 * 1024 * 1024
"""Largest fold in bytes. It applies to the stored fold and to the content of its frame."""
JSON_LIMIT: Final = 64 * 1024 * 1024
"""Largest JSON part of a fold in bytes."""
RATIO: Final = 64
"""Maximum ratio of a fold's content, minus `SLACK`, to its frame. Because of the hashes, real folds have 2 to 6."""
SLACK: Final = 1 << 20
"""Content in bytes that a frame of any size may have."""

_MAGIC: Final = b"ckptstore fold\n"
_HEAD: Final = len(_MAGIC) + 33
_LEVEL: Final = 3
_FIRST: Final = 1 << 20
_T = TypeVar("_T")


def encode_fold(catalog: Catalog, *, run: str, forget: Collection[str] = ()) -> tuple[bytes, str]:
    """Encode the catalog through its last slot -> (bytes, their hash, which is part of the fold's key).

    Args:
        catalog: not empty.
        run: the store's run.
        forget: manifests to omit because their slots are deleted.

    Raises:
        FormatError: the fold exceeds a limit, so every reader would refuse it.
    """
    import zstandard  # imported here because only folding needs it

    what = f"the fold through slot {catalog.next_seq - 1}"
    tables, columns = write_tables(catalog)
    line = jsontext.bounded(_document(catalog, tables, run, forget), what=what)
    _check_line(len(line), what)
    body = b"".join([line, b"\n", *columns])
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(body)
    _check_size(len(body), len(frame), what)
    digest = xxh3_128(frame)
    return _MAGIC + digest.encode("ascii") + b"\n" + frame, digest


def decode_fold(data: bytes, *, seq: int, run: str, digest16: str, what: str) -> Catalog:
    """Decode a fold.

    Args:
        data: the bytes of the fold.
        seq: the last slot of the fold, from its key.
        run: the store's run; the fold must contain it.
        digest16: the first 16 digits of its hash, from its key.
        what: names the fold in errors.

    Raises:
        FormatError: damaged, hostile, or of another store or slot.
        IncompatibleFormatError: it needs a feature that this version does not know.
    """
    if len(data) > FOLD_LIMIT:
        raise FormatError(f"{what}: {len(data)} bytes, at most {FOLD_LIMIT} are allowed")
    if not intact(data, digest16):
        raise FormatError(f"{what}: checksum mismatch in {len(data)} bytes")
    frame = memoryview(data)[_HEAD:]
    line = _line(frame, what)
    found = Members(jsontext.loads(line, what=what, max_bytes=JSON_LIMIT), what)
    if (kind := found.text("ckptstore")) != "fold":
        raise FormatError(f"{what}: a text of kind {kind!r}, expected 'fold'")
    if unknown := [name for name in found.names("incompat") if name not in KNOWN_FEATURES]:
        raise IncompatibleFormatError(f"{what}: needs {', '.join(unknown)}, which this version does not know")
    if found.digest("run") != run or found.number("seq") != seq:
        raise FormatError(f"{what}: belongs to another run or slot")
    size = columns_size(found, what)
    return _catalog(found, Tables(found, ColumnReader(_columns(frame, len(line) + 1, size, what)), what), seq, what)


def intact(data: bytes, digest16: str) -> bool:
    """Whether every byte of a fold is as it was written, and its hash begins with `digest16` from its key."""
    digest = xxh3_128(memoryview(data)[_HEAD:])
    return data[:_HEAD] == _MAGIC + digest.encode("ascii") + b"\n" and digest[:16] == digest16


def _check_size(size: int, stored: int, what: str) -> None:
    """Raise `FormatError` if a frame of `stored` bytes must not contain `size` bytes, which could fill all memory."""
    most = min(FOLD_LIMIT, SLACK + RATIO * stored)
    if size > most or stored > FOLD_LIMIT - _HEAD:
        raise FormatError(
            f"{what}: {stored} bytes contain {size} bytes of JSON and columns, at most {most} are allowed"
        )


def _check_line(size: int, what: str) -> None:
    """Raise `FormatError` if the JSON part is too long."""
    if size > JSON_LIMIT:
        raise FormatError(f"{what}: more than {JSON_LIMIT} bytes of JSON")


def _line(frame: memoryview, what: str) -> bytes:
    """Decompress the JSON part, and nothing beyond its maximum length."""
    import zstandard

    try:
        # Check the length that the frame claims before allocating by it.
        size = zstandard.get_frame_parameters(frame).content_size
        _check_size(size, len(frame), what)
        with zstandard.ZstdDecompressor(max_window_size=2 * FOLD_LIMIT).stream_reader(frame) as reader:
            head = reader.read(min(size, _FIRST))
            # Read in pieces: a read allocates all that is requested, however little the frame contains.
            while (end := head.find(b"\n")) < 0 and (more := min(size, JSON_LIMIT + 1) - len(head)) > 0:
                piece = reader.read(min(more, len(head)))
                if not piece:
                    raise FormatError(f"{what}: the frame ends after {len(head)} of {size} bytes")
                head += piece
    except zstandard.ZstdError as error:
        raise FormatError(f"{what}: {error}") from error
    _check_line(len(head) if end < 0 else end, what)
    if end < 0:
        raise FormatError(f"{what}: its JSON does not end with a line feed")
    return head[:end]


def _columns(frame: memoryview, start: int, size: int, what: str) -> memoryview:
    """Decompress the columns behind the JSON part. Their length is compared with that of the tables first."""
    import zstandard

    there = zstandard.get_frame_parameters(frame).content_size - start
    if there != size:
        raise FormatError(f"{what}: {there} bytes of columns, the tables have {size}")
    try:
        body = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{what}: {error}") from error
    return memoryview(body)[start:]


# ------------------------------------------------------------------------------------------------ writing


def _document(catalog: Catalog, tables: dict[str, Any], run: str, forget: Collection[str]) -> dict[str, Any]:
    known: dict[str, Any] = {"ckptstore": "fold", "run": run, "seq": catalog.next_seq - 1, "last": catalog.last}
    known["term"] = catalog.term
    manifests = [[name, *place] for name, place in catalog.manifests.items() if name not in forget]
    rest: dict[str, Any] = {
        "dropped": "".join(sorted(catalog.dropped)),
        "spent": list(catalog.spent),
        "tags": {tag: list(node) for tag, node in catalog.tags.items()},
        "requests": catalog.requests,
        "manifests": manifests,
        "damage": list(catalog.damage),
        "ro_compat": sorted(catalog.ro_compat),
        "unknown": [[seq, dict(members)] for seq, members in _unknown_members(catalog)],
    }
    known |= {"terms": _term_columns([entry for _, entry in sorted(catalog.terms.items())])} | tables
    return known | {name: value for name, value in rest.items() if value}


def _unknown_members(catalog: Catalog) -> list[tuple[int, Mapping[str, Any]]]:
    """Return unknown members and the retention rules. Older versions do not know the rules, but keep them here."""
    found = list(catalog.unknown)
    if catalog.keep_seq >= 0:
        found.append((catalog.keep_seq, {KEEP: list(catalog.keep)}))
    return found


def _extras(rows: Sequence[Any]) -> dict[str, Any]:
    """Return the members that this version does not know, by row; most rows have none."""
    found = {str(index): dict(row.extra) for index, row in enumerate(rows) if row.extra}
    return {"extra": found} if found else {}


def _identities(identities: Iterable[CheckpointId | None]) -> dict[str, Any]:
    """Return columns of optional identities. Term and step 0 without a state is None, because terms begin at 1."""
    rows = list(identities)
    return {
        "term": [0 if row is None else row.term for row in rows],
        "step": [0 if row is None else row.step for row in rows],
        "state": "".join(row.state for row in rows if row is not None),
    }


def _term_columns(rows: list[TermEntry]) -> dict[str, Any]:
    writers: dict[str, int] = {}  # the same host may open many terms: each distinct writer is stored once
    place = [writers.setdefault(jsontext.dumps(row.writer).decode("ascii"), len(writers)) for row in rows]
    return {
        "term": [row.term for row in rows],
        "parent": _identities(row.parent for row in rows),
        "time": [row.time for row in rows],
        "seq": [row.seq for row in rows],
        "known": [int(row.known) for row in rows],
        "nonce": "".join(row.nonce for row in rows),
        "found": [int(row.parent_found) for row in rows],
        "writers": list(writers),
        "writer": place,
    } | _extras(rows)


# ------------------------------------------------------------------------------------------------ reading


class _Columns:
    """The columns of one table. The first column read sets the number of rows. `FormatError` if another one differs."""

    def __init__(self, value: Any, what: str) -> None:
        self._left = Members(value, what)
        self._what = what
        self._rows: int | None = None

    def _measured(self, name: str, column: Sequence[_T], rows: int | None) -> Sequence[_T]:
        if rows is None:
            rows = self._rows = len(column) if self._rows is None else self._rows
        if len(column) != rows:
            self._left.refuse(name, f"a column of {rows} rows")
        return column

    def _listed(self, name: str, rows: int | None) -> Any:
        value = self._left.rest().pop(name, None)
        if type(value) is not list:
            self._left.refuse(name, "a list")
        return self._measured(name, value, rows)

    def numbers(self, name: str, rows: int | None = None) -> list[int]:
        value: list[int] = self._listed(name, rows)
        if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_INT):
            self._left.refuse(name, "a list of integers in 0..2^53")
        return value

    def terms(self) -> list[int]:
        """Return the column of terms; 0 is none."""
        value = self.numbers("term")
        if max(value, default=0) > MAX_TERM:
            self._left.refuse("term", f"terms, at most {MAX_TERM}")
        return value

    def flags(self, name: str) -> list[bool]:
        value = self.numbers(name)
        if not {0, 1}.issuperset(value):
            self._left.refuse(name, "a list of flags, 0 or 1")
        return [bool(flag) for flag in value]

    def times(self, name: str) -> list[float]:
        value = self._listed(name, None)
        if not all(map(is_time, value)):
            self._left.refuse(name, "a list of numbers of seconds")
        return [float(entry) for entry in value]

    def strings(self, name: str, rows: int | None = None) -> list[str]:
        value: list[str] = self._listed(name, rows)
        if not {str}.issuperset(map(type, value)):
            self._left.refuse(name, "a list of strings")
        return value

    def digests(self, name: str, rows: int | None = None) -> Sequence[str]:
        return self._measured(name, self.loose_digests(name), rows)

    def loose_digests(self, name: str) -> list[str]:
        """Return joined digests. Their number need not be the number of rows."""
        text = self._left.text(name, default="")
        if len(text) % 32 or not hexadecimal(text, len(text)):
            self._left.refuse(name, "joined groups of 32 lower-case hex digits")
        return [text[start : start + 32] for start in range(0, len(text), 32)]

    def identities(self, name: str) -> list[CheckpointId | None]:
        table = _Columns(self._left.rest().pop(name, None), f"{self._what}, {name}")
        terms = self._measured(name, table.terms(), None)
        steps = table.numbers("step")
        states = iter(table.digests("state", sum(map(bool, terms))))
        return [
            CheckpointId(term, step, next(states)) if term else None for term, step in zip(terms, steps, strict=True)
        ]

    def extras(self) -> Callable[[int], dict[str, Any]]:
        """Return a function: row -> its unknown members, including those that are stored with a term."""
        found: dict[int, dict[str, Any]] = {}
        for text, members in self._left.mapping("extra").items():
            row = int(text) if text.isdecimal() and len(text) <= 16 else -1
            if str(row) != text or row >= (self._rows or 0) or type(members) is not dict:
                self._left.refuse("extra", "an object of rows to objects")
            term_members.check_types(members, self._what)
            found[row] = members
        return lambda row: found.get(row, {})


def _catalog(found: Members, tables: Tables, seq: int, what: str) -> Catalog:
    terms = _read_terms(_Columns(found.rest().pop("terms", None), f"{what}, terms"), what)
    term = found.number("term")
    if term not in terms and (term or terms):
        raise FormatError(f"{what}: its newest term {term} is not among its terms")
    keep, keep_seq, unknown = _rules_among(found.items("unknown", _unknown, "[slot, members]"), what)
    return Catalog(
        term=term,
        next_seq=seq + 1,
        last=found.digest("last"),
        terms=terms,
        checkpoints=NodeTable(tables.checkpoints),
        slots=NodeTable(tables.slots),
        held=NodeTable(tables.held),
        encodings=NodeTable(tables.encodings),
        segments=Table(tables.segments),
        dropped=set(_Columns({"dropped": found.text("dropped", default="")}, what).loose_digests("dropped")),
        spent=Spans(_ascending(found, "spent", "steps")),
        tags=_read_tags(found),
        requests=_read_requests(found),
        manifests=dict(found.items("manifests", _manifest, "[uuid, term, slot]")),
        damage=_ascending(found, "damage", "slots"),
        ro_compat=frozenset(found.names("ro_compat")),
        unknown=unknown,
        keep=keep,
        keep_seq=keep_seq,
    )


def _ascending(found: Members, name: str, wanted: str) -> tuple[int, ...]:
    """Take a list of numbers that ascend."""
    numbers = found.items(name, lambda value: value if natural(value) else None, wanted)
    if not ascending(numbers):
        found.refuse(name, f"a list of {wanted} that ascend")
    return numbers


def _rules_among(
    unknown: Sequence[tuple[int, dict[str, Any]]], what: str
) -> tuple[tuple[str, ...], int, tuple[tuple[int, dict[str, Any]], ...]]:
    """Return the newest retention rules, their slot (-1: no rules), and the other unknown members."""
    rules: tuple[str, ...] = ()
    newest = -1
    left = []
    for seq, members in unknown:
        found = Members(members, what)
        rules_there = found.rules(KEEP)
        if rules_there is not None and seq > newest:
            rules, newest = rules_there, seq
        if found.rest():
            left.append((seq, found.rest()))
    return rules, newest, tuple(left)


def _read_terms(columns: _Columns, what: str) -> dict[int, TermEntry]:
    terms, parents, times = columns.terms(), columns.identities("parent"), columns.times("time")
    seqs, known, place = columns.numbers("seq"), columns.flags("known"), columns.numbers("writer")
    parent_found, nonces = columns.flags("found"), columns.digests("nonce")
    if not ascending([0, *terms]):
        raise FormatError(f"{what}, terms: not in ascending order from 1, or one of them twice")
    texts = [text.encode(errors="surrogatepass") for text in columns.strings("writers", max(place, default=-1) + 1)]
    writers = [Members(jsontext.loads(text, what=what, max_bytes=JSON_LIMIT), what).rest() for text in texts]
    if any(parent is not None and parent.term >= term for term, parent in zip(terms, parents, strict=True)):
        raise FormatError(f"{what}, terms: a parent of a later term")
    extra = columns.extras()
    return {
        term: TermEntry(
            *(term, parents[row], times[row], writers[place[row]], seqs[row]),
            *(known[row], nonces[row], parent_found[row], extra(row)),
        )
        for row, term in enumerate(terms)
    }


def _read_tags(found: Members) -> dict[str, Node]:
    tags = found.tags("tags")
    if None in tags.values():
        found.refuse("tags", "an object of tag names to [term, step]")
    return {tag: node for tag, node in tags.items() if node is not None}


def _read_requests(found: Members) -> dict[str, str | None]:
    outcomes: Mapping[str, Any] = found.mapping("requests")
    if not all(hexadecimal(name) and (reason is None or type(reason) is str) for name, reason in outcomes.items()):
        found.refuse("requests", "an object of uuids to a reason or null")
    return dict(outcomes)


def _manifest(value: Any) -> tuple[str, tuple[int, int]] | None:
    if type(value) is list and len(value) == 3 and hexadecimal(value[0]) and is_term(value[1]) and natural(value[2]):
        return value[0], (value[1], value[2])
    return None


def _unknown(value: Any) -> tuple[int, dict[str, Any]] | None:
    if type(value) is list and len(value) == 2 and natural(value[0]) and type(value[1]) is dict:
        return value[0], value[1]
    return None
