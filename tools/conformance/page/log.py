"""SPEC.md 6 to 8 and READ of 10: FORMAT, slots, manifests and folds; and the catalog that results from them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from tools.conformance.page import segments
from tools.conformance.page.codecs import RefusedError

Node = tuple[int, int]
WIDEST_GAP = 4096
LOOKED_INTO = 16
FEATURES = {"keep"}
TAG_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,127}")
FOLD_NAME = re.compile("[0-9]{20}-.{16}", re.ASCII)
TYPES = {"closed": bool, "highest": int, "lacks": int, "reached": int, "remote": str}
OF_OPEN = {"writer": dict}
OF_COMMIT = dict.fromkeys(("segments", "checkpoints", "encodings", "drops", "retires", "swept", "keep"), list)
OF_COMMIT |= {"tags": dict, "requests": dict, "manifest": dict}
OF_COMMITS = {"segments", "checkpoints", "encodings", "drops", "retires", "tags", "requests", "swept", "keep"}
OF_COMMITS |= {"closed", "lacks", "highest"}


class DamagedError(Exception):
    """A text is damaged."""


@dataclass
class Catalog:
    """The catalog (7.4)."""

    run: str = ""
    term: int = 0
    nonces: dict[int, str] = field(default_factory=dict)
    orphans: set[int] = field(default_factory=set)
    last: str | None = "0" * 32  # None: the slot before was damaged
    parents: dict[int, Any] = field(default_factory=dict)
    opens: dict[int, int] = field(default_factory=dict)  # the slots of OPENs that are not lost
    checkpoints: dict[Node, dict[str, Any]] = field(default_factory=dict)
    retired: set[Node] = field(default_factory=set)
    encodings: dict[Node, list[dict[str, Any]]] = field(default_factory=dict)
    segments: dict[str, dict[str, Any]] = field(default_factory=dict)
    slots: dict[Node, int] = field(default_factory=dict)  # of promised checkpoints
    damage: list[int] = field(default_factory=list)
    tags: dict[str, Node] = field(default_factory=dict)
    written: int = 0  # the newest term that has segments
    highest: dict[int, int] = field(default_factory=dict)  # of a term: steps that were retired, or that a COMMIT lists

    def promised(self) -> list[Node]:
        return [node for node in self.checkpoints if node not in self.retired]

    def latest(self) -> Node | None:
        term, below, found, searched, orphan = self.term, 1 << 60, None, 0, False
        while term in self.parents:
            searched = term
            if steps := [step for one, step in self.promised() if one == term and step <= below]:
                found = term, max(steps)
                break
            orphan |= term in self.orphans
            parent = self.parents[term]
            if parent is None:
                break
            if (parent[0], parent[1]) in self.promised():
                found = parent[0], parent[1]
                break
            term, below = parent[0], parent[1]
        else:
            searched = 0
        if orphan or self.written > self.term:
            raise DamagedError
        settled = self.opens.get(searched, -1)
        if found and found[0] == self.term and found[1] >= self.highest.get(self.term, 0):
            settled = self.slots[found]
        if any(slot > settled for slot in self.damage):
            raise DamagedError
        return found

    def tagged(self, name: str) -> Node | None:
        """The checkpoint of `tag:NAME`."""
        node = self.tags[name] if self.tags[name] in self.promised() else None
        settled = -1 if node is None else self.slots[node]
        if self.written > self.term or any(slot > settled for slot in self.damage):
            raise DamagedError
        return node


def unsealed(data: bytes) -> dict[str, Any]:
    text = data[:-34]
    if data[-34:] != b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n":
        raise DamagedError
    found = segments.parsed(text)
    if not isinstance(found, dict):
        raise DamagedError
    return found


def read_format(folder: Path) -> dict[str, Any]:
    """Read FORMAT (6.2): a store without it, or with a damaged one, is refused."""
    try:
        found = unsealed(text_of(folder / "FORMAT"))
    except DamagedError as error:
        raise RefusedError("FORMAT is missing or damaged") from error
    if found["ckptstore"] != "format" or found["major"] != 1:
        raise RefusedError("another format")
    if set(found.get("features", {}).get("read", [])) - FEATURES:
        raise RefusedError("features of FORMAT")
    return found


def read(folder: Path) -> Catalog:
    """READ; nobody writes meanwhile, so nothing becomes stale."""
    format_file = read_format(folder)
    for place in (folder / name for name in ("log", "fold", "seg")):
        if place.is_symlink() or (place.exists() and not place.is_dir() and not place.is_file()):
            raise RefusedError("a link, pipe or device in place of a folder")
    catalog, seq = newest_fold(folder, format_file["run"])
    if seq:
        check_end(folder, catalog, seq - 1, format_file["run"])
    named = [path for path in (folder / "seg").glob("*") if re.fullmatch("[0-9]{10}", path.name, re.ASCII)]
    terms = [path for path in named if path.is_dir() and not path.is_symlink()]
    catalog.written = max((int(path.name) for path in terms if counts(path, format_file["run"])), default=0)
    names = [path.name for path in (folder / "log").glob("*")]
    slots = sorted(int(name) for name in names if len(name) == 20 and name.isascii() and name.isdecimal())
    for above in [slot for slot in slots if slot >= seq]:
        if above - seq > WIDEST_GAP:
            raise RefusedError("so many slots were never lost")
        for slot in range(seq, above + 1):
            if slot != above and not never_deleted(folder, slot, format_file["anchor_every"]):
                raise RefusedError("a slot was deleted, and no fold has it")
            take(folder, catalog, slot, format_file)  # if it is absent it is lost
        seq = above + 1
    if not never_deleted(folder, seq, format_file["anchor_every"]):
        raise RefusedError("a slot was deleted, and no fold has it")
    return catalog


def never_deleted(folder: Path, seq: int, every: int) -> bool:
    """READ: an anchor, or a slot without the anchor above it, is never deleted."""
    return seq % every == 0 or not (folder / "log" / f"{(seq // every + 1) * every:020d}").exists()


def counts(term: Path, run: str) -> bool:
    """READ 4: whether a folder below ``seg/`` has an object that does not name another run."""
    objects = list(objects_of(term))
    return len(objects) > LOOKED_INTO or any(run_of(path) in (run, None) for path in objects)


def objects_of(folder: Path) -> Iterator[Path]:
    """All objects except folders, in the folder and in those below it. Names that begin with a dot are skipped."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from objects_of(path)
        else:
            yield path


def run_of(path: Path) -> str | None:
    """The run that a segment or a manifest names; None: unknown."""
    try:
        data = text_of(path)
        found = (unsealed(data) if path.suffix == ".json" else segments.read(data))["run"]
    except Exception:  # noqa: BLE001  # a file with any error names no run
        return None
    return found if isinstance(found, str) and re.fullmatch("[0-9a-f]{32}", found) else None


def text_of(path: Path) -> bytes:
    """The text of a regular file; None if there is none."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else b""


def check_end(folder: Path, catalog: Catalog, seq: int, run: str) -> None:
    """Check the end slot of a fold: a record that differs from the fold's is damage; any other defect is not."""
    data = text_of(folder / "log" / f"{seq:020d}")
    try:
        slot = unsealed(data)
    except DamagedError:
        return
    if (slot.get("run"), slot.get("seq")) == (run, seq) and xxhash.xxh3_128_hexdigest(data) != catalog.last:
        catalog.damage.append(seq)
        catalog.last = None  # behind a damaged slot


def take(folder: Path, catalog: Catalog, seq: int, format_file: dict[str, Any]) -> None:
    data = text_of(folder / "log" / f"{seq:020d}")
    try:
        slot = unsealed(data)
        check_slot(slot, format_file["run"], seq)
        record = whole(folder, slot)
        if not continues(catalog, slot):
            every = format_file["anchor_every"]
            if seq and not (seq % every and never_deleted(folder, seq, every)):
                raise RefusedError("a stray, or what follows one")
            raise DamagedError
        apply(catalog, record, seq)
        catalog.last = xxhash.xxh3_128_hexdigest(data)
    except DamagedError:
        catalog.damage.append(seq)
        catalog.last = None


def check_slot(slot: dict[str, Any], run: str, seq: int) -> None:
    """Check a slot; the first error counts."""
    if not are_texts(slot.get("incompat", [])):
        raise DamagedError
    if set(slot.get("incompat", [])) - FEATURES:
        raise RefusedError("features of a slot")
    if slot.get("run") != run or slot.get("seq") != seq or not isinstance(slot.get("ckptstore"), str):
        raise DamagedError
    if slot["ckptstore"] not in ("open", "commit"):
        raise RefusedError("kind of a slot")
    for name, kind in (TYPES | (OF_OPEN if slot["ckptstore"] == "open" else OF_COMMIT)).items():
        if name in slot and (type(slot[name]) is not kind or (kind is int and not 0 <= slot[name] <= 1 << 53)):
            raise DamagedError
    if not are_texts(slot.get("ro_compat", [])):
        raise DamagedError
    for name, node in slot.get("tags", {}).items():
        if not TAG_NAME.fullmatch(name) or not (node is None or is_node(node)):
            raise DamagedError
    if not all(map(is_node, slot.get("retires", []))):
        raise DamagedError
    if any(not isinstance(one.get("metadata", {}), dict) for one in slot.get("checkpoints", [])):
        raise DamagedError


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def is_node(value: Any) -> bool:
    if not isinstance(value, list) or [type(part) for part in value] != [int, int]:
        return False
    term, step = value
    return 1 <= term <= 9999999999 and 0 <= step <= 1 << 53


def continues(catalog: Catalog, slot: dict[str, Any]) -> bool:
    if catalog.last is not None and slot["previous"] != catalog.last:
        return False
    if slot["ckptstore"] == "open":
        return bool(slot["term"] > catalog.term)
    if slot["term"] == catalog.term:
        return catalog.nonces.get(slot["term"]) == slot["nonce"]
    return catalog.last is None and slot["term"] > catalog.term


def whole(folder: Path, slot: dict[str, Any]) -> dict[str, Any]:
    """Read a whole record (7.3)."""
    if slot["ckptstore"] == "open" or not slot.get("manifest"):
        return slot
    if OF_COMMITS & slot.keys():
        raise DamagedError
    pointer = slot["manifest"]
    path = folder / "seg" / f"{slot['term']:010d}" / f"{pointer['id']}.json"
    data = text_of(path)
    if (len(data), xxhash.xxh3_128_hexdigest(data)) != (pointer["size"], pointer["hash"]):
        raise DamagedError
    found = unsealed(data)
    needs = found.get("incompat", [])
    if are_texts(needs) and not set(needs) - FEATURES and found.get("ckptstore") != slot["ckptstore"]:
        raise DamagedError  # 6.1: only in a slot is a wrong kind no damage
    check_slot(found, slot["run"], slot["seq"])
    if "manifest" in found or any(found[name] != slot[name] for name in ("ckptstore", "previous", "term", "nonce")):
        raise DamagedError
    return found


def apply(catalog: Catalog, record: dict[str, Any], seq: int) -> None:
    term = record["term"]
    if record["ckptstore"] == "open":
        catalog.term, catalog.opens[term] = term, seq
        catalog.parents[term], catalog.nonces[term] = record["parent"], record["nonce"]
        if parent := record["parent"]:
            node = (parent[0], parent[1])
            if node not in catalog.promised() or catalog.checkpoints[node]["state"] != parent[2]:
                catalog.orphans.add(term)
        return
    if term > catalog.term:  # its OPEN is lost
        catalog.term = term
        catalog.parents[term], catalog.nonces[term] = None, record["nonce"]
    catalog.segments |= {one["id"]: {**one, "term": term} for one in record.get("segments", [])}
    for one in record.get("checkpoints", []):
        node = (term, one["step"])
        catalog.checkpoints[node], catalog.slots[node] = {**one, "term": term}, seq
        catalog.retired.discard(node)
    for one in record.get("encodings", []):
        catalog.encodings.setdefault((one["checkpoint"][0], one["checkpoint"][1]), []).append(one)
    catalog.highest[term] = max(catalog.highest.get(term, 0), record.get("highest", 0))
    for node in map(tuple, record.get("retires", [])):
        if node[0] == term:
            catalog.highest[term] = max(catalog.highest[term], node[1])
        if node in catalog.checkpoints:
            catalog.retired.add(node)
    dropped = set(record.get("drops", []))
    for node, edges in list(catalog.encodings.items()):
        catalog.encodings[node] = [edge for edge in edges if not dropped & set(edge["segments"])]
    for segment in dropped:
        catalog.segments.pop(segment, None)
    for node in [node for node in catalog.retired if not catalog.encodings.get(node)]:
        catalog.checkpoints.pop(node, None)
        catalog.retired.discard(node)
    for name, target in record.get("tags", {}).items():
        catalog.tags.pop(name, None)
        if target is not None:
            catalog.tags[name] = (target[0], target[1])


# ---- 8


def newest_fold(folder: Path, run: str) -> tuple[Catalog, int]:
    """The catalog of the newest valid fold, and the slot to continue with."""
    names = [path for path in (folder / "fold").glob("*") if FOLD_NAME.fullmatch(path.name)]
    for path in sorted(names, reverse=True):
        found, columns = fold_of(text_of(path), path.name[21:])
        if found.get("ckptstore") != "fold":
            continue
        if set(found.get("incompat", [])) - FEATURES:
            raise RefusedError("features of a fold")
        if found["run"] != run or f"{found['seq']:020d}" != path.name[:20]:
            continue
        try:
            return unfolded(found, columns), found["seq"] + 1
        except DamagedError:  # invalid according to section 8
            continue
    return Catalog(run), 0


def fold_of(data: bytes, digest16: str) -> tuple[dict[str, Any], bytes]:
    """The JSON and the columns of a fold; None if it is damaged."""
    head, digest, frame = [*data.split(b"\n", 2), b"", b""][:3]
    if (
        head != b"ckptstore fold"
        or xxhash.xxh3_128_hexdigest(frame).encode() != digest
        or digest[:16] != digest16.encode()
    ):
        return {}, b""
    try:
        line, _, columns = zstandard.decompress(frame, max_output_size=1 << 30).partition(b"\n")
        found = segments.parsed(line)
    except (ValueError, zstandard.ZstdError):
        return {}, b""
    return (found if isinstance(found, dict) else {}), columns


def split(joined: str) -> list[str]:
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]


def identities(columns: dict[str, Any]) -> list[Any]:
    states = iter(split(columns["state"]))
    pairs = zip(columns["term"], columns["step"], strict=True)
    return [[term, step, next(states)] if term else None for term, step in pairs]


class Columns:
    """The part of a fold behind the JSON, taken column by column."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def _take(self, size: int) -> bytes:
        taken, self.data = self.data[:size], self.data[size:]
        if len(taken) < size:
            raise DamagedError
        return taken

    def numbers(self, rows: int) -> list[int]:
        return [number for (number,) in struct.iter_unpack("<Q", self._take(8 * rows))]

    def times(self, rows: int) -> list[float]:
        return [time for (time,) in struct.iter_unpack("<d", self._take(8 * rows))]

    def flags(self, rows: int) -> list[bool]:
        return [bool(flag) for flag in self._take(rows)]

    def hashes(self, rows: int) -> list[str]:
        return split(self._take(16 * rows).hex())


def unfolded(found: dict[str, Any], data: bytes) -> Catalog:
    catalog, columns = Catalog(found["run"], found["term"], last=found["last"]), Columns(data)
    terms = found["terms"]
    catalog.parents = dict(zip(terms["term"], identities(terms["parent"]), strict=True))
    catalog.nonces = dict(zip(terms["term"], split(terms["nonce"]), strict=True))
    catalog.orphans = {term for term, there in zip(terms["term"], terms["found"], strict=True) if not there}
    for table in ("checkpoints", "held"):
        rows = found[table]["rows"]
        keys = zip(columns.numbers(rows), columns.numbers(rows), columns.hashes(rows), strict=True)
        extra = found[table].get("extra", {})
        for row, (term, step, state) in enumerate(keys):
            catalog.checkpoints[term, step] = {"term": term, "step": step, "state": state, **extra.get(str(row), {})}
            if table == "held":
                catalog.retired.add((term, step))
        columns.times(rows)
        for _ in ("tensors", "bytes"):
            columns.numbers(rows)
        if table == "checkpoints":
            catalog.slots = dict(zip(catalog.checkpoints, columns.numbers(rows), strict=True))
    rows = found["segments"]["rows"]
    ids = columns.hashes(rows)
    numbers = [columns.numbers(rows) for _ in ("term", "size", "header")]
    for row in zip(ids, *numbers, columns.hashes(rows), strict=True):
        catalog.segments[row[0]] = dict(zip(("id", "term", "size", "header", "hash"), row, strict=True))
    table = found["encodings"]
    loose = split(table.get("loose", ""))
    if set(ids) & set(loose) or any(row != sorted(set(row)) for row in (loose, table["kinds"])):
        raise DamagedError
    unfold_encodings(catalog, table, columns, ids + loose)
    wrong = columns.data or any(parent and parent[0] >= term for term, parent in catalog.parents.items())
    if wrong or len(catalog.checkpoints) < found["checkpoints"]["rows"] + found["held"]["rows"]:
        raise DamagedError
    catalog.opens = {
        term: seq for term, seq, known in zip(terms["term"], terms["seq"], terms["known"], strict=True) if known
    }
    catalog.damage = list(found.get("damage", []))
    catalog.tags = {name: (term, step) for name, (term, step) in found.get("tags", {}).items()}
    for row, members in terms.get("extra", {}).items():
        catalog.highest[terms["term"][int(row)]] = members.get("highest", 0)
    catalog.highest[catalog.term] = max([catalog.highest.get(catalog.term, 0), *found.get("spent", [])])
    return catalog


def unfold_encodings(catalog: Catalog, table: dict[str, Any], columns: Columns, ids: list[str]) -> None:
    rows = table["rows"]
    nodes = zip(columns.numbers(rows), columns.numbers(rows), strict=True)
    kinds = [table["kinds"][place] for place in columns.numbers(rows)]
    bases = zip(columns.numbers(rows), columns.numbers(rows), columns.hashes(rows), strict=True)
    counts, lossy, _ = columns.numbers(rows), columns.flags(rows), columns.numbers(rows)
    places = iter(columns.numbers(table["uses"]))
    for node, kind, base, count, flag in zip(nodes, kinds, bases, counts, lossy, strict=True):
        segments = [ids[next(places)] for _ in range(count)]
        edge = {"kind": kind, "base": list(base) if base[0] else None, "lossy": flag, "segments": segments}
        catalog.encodings.setdefault(node, []).append(edge)
    assert next(places, None) is None
