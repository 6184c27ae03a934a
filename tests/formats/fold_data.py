"""Takes folds apart and reassembles them according to SPEC 8, without the code under test."""

from __future__ import annotations

import json
import struct
from typing import Any

import xxhash
import zstandard

Columns = dict[str, list[Any]]
"""``table.column`` -> its rows: numbers, seconds, or hashes as hex digits."""

LAYOUT = {
    "checkpoints": {"term": "Q", "step": "Q", "state": "x", "time": "d", "tensors": "Q", "bytes": "Q", "slot": "Q"},
    "held": {"term": "Q", "step": "Q", "state": "x", "time": "d", "tensors": "Q", "bytes": "Q"},
    "segments": {"id": "x", "term": "Q", "size": "Q", "header": "Q", "hash": "x"},
    "encodings": {
        "term": "Q",
        "step": "Q",
        "kind": "Q",
        "base_term": "Q",
        "base_step": "Q",
        "base_state": "x",
        "count": "Q",
        "lossy": "B",
        "bytes": "Q",
        "segment": "Q",
    },
}
_WIDTHS = {"Q": 8, "d": 8, "B": 1, "x": 16}


def body_of(data: bytes) -> bytes:
    """The content of a fold's frame."""
    return zstandard.ZstdDecompressor().decompress(data[len(b"ckptstore fold\n") + 33 :])


def parted(data: bytes) -> tuple[dict[str, Any], Columns]:
    """A fold -> (its JSON, its columns)."""
    line, _, rest = body_of(data).partition(b"\n")
    document: dict[str, Any] = json.loads(line)
    columns: Columns = {}
    for table, names in LAYOUT.items():
        for name, letter in names.items():
            rows = document[table]["uses" if name == "segment" else "rows"]
            taken, rest = rest[: rows * _WIDTHS[letter]], rest[rows * _WIDTHS[letter] :]
            if letter == "x":
                columns[f"{table}.{name}"] = [taken[row * 16 : row * 16 + 16].hex() for row in range(rows)]
            else:
                columns[f"{table}.{name}"] = list(struct.unpack(f"<{rows}{letter}", taken))
    assert rest == b""
    return document, columns


def joined(columns: Columns) -> bytes:
    """The columns one after the other; of numbers the low 8 bytes, so that a column may be invalid."""
    parts = []
    for table, names in LAYOUT.items():
        for name, letter in names.items():
            for value in columns[f"{table}.{name}"]:
                if letter == "x":
                    parts.append(bytes.fromhex(value))
                elif letter == "d":
                    parts.append(struct.pack("<d", value))
                else:
                    parts.append((value % 2 ** (8 * _WIDTHS[letter])).to_bytes(_WIDTHS[letter], "little"))
    return b"".join(parts)


def body(document: Any, columns: Columns) -> bytes:
    """The content of the frame of such a fold."""
    return json.dumps(document, separators=(",", ":")).encode() + b"\n" + joined(columns)


def sealed_frame(frame: bytes) -> tuple[bytes, str]:
    """A fold with a valid checksum around any bytes -> (fold, first 16 digits of its hash)."""
    digest = xxhash.xxh3_128_hexdigest(frame)
    return b"ckptstore fold\n" + digest.encode() + b"\n" + frame, digest[:16]


def sealed(document: Any, columns: Columns) -> tuple[bytes, str]:
    """A fold with a valid checksum around any JSON and columns -> (fold, first 16 digits of its hash)."""
    return sealed_frame(zstandard.compress(body(document, columns)))
