"""Stores taken apart into JSON, changed anywhere, and reassembled with every hash right."""

from __future__ import annotations

import copy
import json
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import zstandard

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.formats import checksums, jsontext
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history import record_text
from ckptstore.formats.history.records import NO_SLOT
from ckptstore.formats.segment_files.shards import name_of, state_parts
from ckptstore.formats.states.state import tensor_names
from ckptstore.restore.chains.assembly import held_by, tree_of
from ckptstore.segments.segment_reader import SegmentReader
from ckptstore.store import Store

ALIGN = 4096
Place = tuple[Any, ...]
"""A path in nested JSON."""


@dataclass
class Segment:
    """A segment: the JSON of its header and, if it is packed, of its index, and the bytes between."""

    head: dict[str, Any]
    document: dict[str, Any]
    payload: bytes
    index: dict[str, Any] | None

    @classmethod
    def read(cls, data: bytes) -> Segment:
        header = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(data[8:header])
        document = json.loads(head.pop("__metadata__")["ckptstore"])
        if document["form"] == "plain":
            return cls(head, document, data[header:], None)
        document.pop("uses", None)  # a list of values of the index, which is about to be changed
        length = head["ckptstore/payload"]["shape"][0]
        index = json.loads(zstandard.ZstdDecompressor().decompress(data[header + length :]))
        return cls({}, document, data[header : header + length], index)

    def spoil(self, at: int) -> None:
        """Change a byte of the data, and the stored hash with it."""
        self.payload = self.payload[:at] + bytes([self.payload[at] ^ 1]) + self.payload[at + 1 :]
        assert self.index is not None
        lengths = self.index["length"]
        offsets = self.index.get("offset", [sum(lengths[:number]) for number in range(len(lengths))])
        extents = [(offset, length) for offset, length in zip(offsets, lengths, strict=True) if length]
        self.index["stored"] = "".join(
            checksums.chunk_hash(self.payload[offset : offset + length]) for offset, length in extents
        )

    def write(self) -> tuple[bytes, int]:
        """The file, and the length of its header."""
        head, document, tail = dict(self.head), dict(self.document), b""
        if self.index is not None:
            text = jsontext.dumps(self.index)
            tail = zstandard.ZstdCompressor().compress(text)
            if isinstance(document.get("index"), dict):
                document["index"] = document["index"] | {"length": len(text), "hash": xxh3_128(tail)}
            begin, end = len(self.payload), len(self.payload) + len(tail)
            head = {
                "ckptstore/payload": {"dtype": "U8", "shape": [begin], "data_offsets": [0, begin]},
                "ckptstore/index": {"dtype": "U8", "shape": [len(tail)], "data_offsets": [begin, end]},
            }
        metadata = {"format": "pt", "ckptstore": jsontext.dumps(document).decode("ascii")}
        text = jsontext.dumps({"__metadata__": metadata, **head})
        size = -(-(8 + len(text)) // ALIGN) * ALIGN
        header = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
        return header + self.payload + tail, size


@dataclass
class Crafted:
    """A store in parts: `parts` is JSON, by what it is."""

    slots: dict[str, dict[str, Any]]
    segments: dict[str, Segment]
    others: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, store: ckptstore.Store) -> Crafted:
        found = cls({}, {})
        live = {entry.key for entry in store.view().catalog.segments.values()}
        for key in store.backend.list(""):
            data = store.backend.get(key)
            if key.startswith("log/"):
                found.slots[key] = json.loads(data.split(b"\n")[0])
            elif key in live:
                found.segments[key] = Segment.read(data)
            elif not key.startswith(("fold/", "seg/")):
                found.others[key] = data
        return found

    def places(self) -> Iterator[tuple[str, str, Place]]:
        """(kind of text, key, path) of everything that can be changed."""
        for key, slot in self.slots.items():
            if slot["ckptstore"] == "commit":
                for member in [name for name in ("segments", "checkpoints", "encodings") if name in slot]:
                    yield from (("record", key, place) for place in _within(slot[member], (member,)))
        for key, segment in self.segments.items():
            yield from (("header", key, place) for place in _within(segment.head, ()))
            yield from (("document", key, place) for place in _within(segment.document, ()))
            if segment.index is not None:
                yield from (("index", key, place) for place in _within(segment.index, ()))

    def text(self, kind: str, key: str) -> Any:
        """The JSON of one kind."""
        if kind == "record":
            return self.slots[key]
        return getattr(self.segments[key], {"header": "head"}.get(kind, kind))

    def shard(self) -> None:
        """Turn every tensor into one shard that is all of it. `write` it with `restate`."""
        for segment in self.segments.values():
            if segment.index is None:
                shapes = [info["shape"] for info in segment.head.values()]
                segment.document["shards"] = [[place, shape, [0] * len(shape)] for place, shape in enumerate(shapes)]
            else:
                for row in segment.index["tensors"]:
                    row += [list(row[2]), [0] * len(row[2])]

    def clone(self) -> Crafted:
        return copy.deepcopy(self)

    def write(self, *, restate: bool = False) -> ckptstore.Store:
        """Reassemble it in memory. With `restate` the log names the states as the segments describe them now.

        Raises:
            CkptError: it cannot be restated, because the segments describe nothing.
        """
        if restate:
            self._restate()
        backend = MemoryBackend(uuid.uuid4().hex)
        for key, data in self.others.items():
            backend.replace(key, data)
        sealed = {}
        for key, segment in self.segments.items():
            data, header = segment.write()
            backend.replace(key, data)
            sealed[key.rpartition("/")[2].partition(".")[0]] = (len(data), header, checksums.header_hash(data[:header]))
        before = NO_SLOT
        for key, slot in sorted(self.slots.items()):
            for entry in slot.get("segments", []) if isinstance(slot.get("segments"), list) else []:
                if isinstance(entry, dict) and entry.get("id") in sealed:
                    entry["size"], entry["header"], entry["hash"] = sealed[entry["id"]]
            if "previous" in slot:
                slot["previous"] = before
            data = record_text.seal(slot)
            backend.replace(key, data)
            before = xxh3_128(data)
        return Store(backend)

    def _restate(self) -> None:
        """Replace every mention of a state's hash by the hash of the segments' present contents."""
        store = self.write()
        catalog = store.view().catalog
        changed = {}
        for (edge,) in catalog.encodings.values():
            readers = [SegmentReader(store.backend, catalog.segments[segment]) for segment in edge.segments]
            held, tree = held_by(readers, edge), tree_of(readers, edge)
            entry = catalog.find(edge.checkpoint)
            assert entry is not None
            names = set(tensor_names(tree))
            parts = state_parts(layer.tensor for key, layer in held.items() if name_of(key) in names)
            changed[entry.state] = checksums.state_hash(jsontext.dumps(tree), parts)
        for slot in self.slots.values():
            _replace(slot, changed)
        for segment in self.segments.values():
            _replace(segment.document, changed)
            if segment.index is not None:
                _replace(segment.index, changed)


def mutate(chance: random.Random, root: Any, place: Place) -> bool:
    """Replace the value at a path by another of about its kind; False if it is the same."""
    holder = root
    for step in place[:-1]:
        holder = holder[step]
    last = place[-1]
    before = copy.deepcopy(root)
    value = holder[last]
    if isinstance(holder, dict) and chance.random() < 0.15:
        del holder[last]
        return True
    holder[last] = _other(chance, value)
    return bool(root != before) or json.dumps(root) != json.dumps(before)


def _other(chance: random.Random, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return chance.choice([not value, 1, "text"])
    if isinstance(value, int):
        return chance.choice([value + 1, max(0, value - 1), 0, 1, value * 2, 1 << 40, -1, True])
    if isinstance(value, float):
        return chance.choice([value + 1, -value, 0])
    if isinstance(value, str):
        return chance.choice([_flipped(chance, value), value[:-1], value + "x", "", "w", "raw", "BF16", 7])
    if isinstance(value, list):
        return chance.choice(
            [value[:-1], value[1:], value[::-1], [*value, *value[-1:]], [], chance.sample(value, len(value)), {}]
        )
    return chance.choice([{}, dict(list(value.items())[::-1]), dict(list(value.items())[1:]), []])


def _flipped(chance: random.Random, text: str) -> str:
    if not text:
        return "0"
    at = chance.randrange(len(text))
    return text[:at] + chance.choice("0123456789abcdef-") + text[at + 1 :]


def _within(value: Any, place: Place) -> Iterator[Place]:
    if place:
        yield place
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _within(member, (*place, key))
    elif isinstance(value, list):
        for number, member in enumerate(value):
            yield from _within(member, (*place, number))


def _replace(value: Any, changed: dict[str, str]) -> None:
    for key, member in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(member, str) and member in changed:
            value[key] = changed[member]
        elif isinstance(member, dict | list):
            _replace(member, changed)
