"""Golden sets: each is two segments, and a listing of the tensors that the second one has to give.

The files of a set are frozen with the first version that has it. What is added later gets a set of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import zstandard

from ckptstore.formats.checksums import header_hash, xxh3_128

__all__ = ["GoldenSet", "write"]

Example = TypeVar("Example")


class GoldenSet(NamedTuple, Generic[Example]):
    """The names of a set's files in ``formats/golden``, and what they hold.

    Attributes:
        listing: ``NAME.json``, with the hashes of the segments, and of the image of each tensor of `change`.
        base: the segment of the first checkpoint.
        change: the segment of the second one, whose tensors are encoded.
        examples: makes what the segments hold, the same every time.
    """

    listing: str
    base: str
    change: str
    examples: Callable[[], Sequence[Example]]


def write(folder: Path, listing: str, segments: dict[str, bytes], images: Iterable[tuple[str, bytes]]) -> None:
    """Write the segments of a set and its listing to `folder`. `images`: name and bytes of each tensor."""
    hashes = {}
    for name, data in segments.items():
        (folder / name).write_bytes(data)
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        hashes[name] = {"hash": xxh3_128(data), "header_hash": header_hash(header)}
    found = {name: xxh3_128(image) for name, image in images}
    text = json.dumps({"zstd": list(zstandard.ZSTD_VERSION), "segments": hashes, "images": found}, indent=1)
    (folder / listing).write_text(text + "\n", encoding="ascii")
