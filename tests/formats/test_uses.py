"""A packed document names the codecs and rules of its index: a reader can refuse before it reads the index."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions
from ckptstore.errors import FormatError
from ckptstore.formats import jsontext
from ckptstore.formats.segment_files import segment
from ckptstore.formats.segment_files.layout import padded

GOLDEN = Path(__file__).parents[2] / "formats" / "golden"


def parted(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    return header, json.loads(header["__metadata__"]["ckptstore"]), data[end:]


def read(header: dict[str, Any], document: dict[str, Any], rest: bytes) -> segment.SegmentDoc:
    text = jsontext.dumps(header | {"__metadata__": {"format": "pt", "ckptstore": json.dumps(document)}})
    size = padded(8 + len(text))
    data = struct.pack("<Q", size - 8) + text.ljust(size - 8) + rest
    return segment.parse(data[:size], len(data), "segment", lambda at, length: data[at : at + length])


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("steps-1", ["adam/1", "sgd/1", "skip/1", "step"]),
        ("segment-1-codecs-delta", ["derive", "planes", "prefix", "raw", "sub", "xor"]),
        ("segment-1-packed-no-payload", None),
    ],
)
def test_the_golden_segments(name: str, uses: list[str] | None) -> None:
    _, document, _ = parted((GOLDEN / f"{name}.safetensors").read_bytes())
    assert document["uses"] == sorted(document["uses"])
    if uses is not None:
        assert document["uses"] == uses


def test_the_uses_that_a_writer_writes(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    weight = np.arange(5000, dtype="<f4")
    with store.writer(deltas=DeltaOptions(interval=9), poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save({"weight": weight.copy()}, step)
            weight[::500] += 1
    (path,) = (path for path in tmp_path.glob("store/seg/*/*") if b"ckptstore/index" in path.read_bytes()[:4096])
    _, document, _ = parted(path.read_bytes())
    assert document["uses"] in (["sub"], ["xor"])


def test_a_list_that_is_not_the_index_s_is_refused_and_one_that_is_absent_is_not() -> None:
    header, document, rest = parted((GOLDEN / "steps-1.safetensors").read_bytes())
    found = read(header, document, rest)
    assert "uses" not in found.extra
    for wrong in ([], ["step"], document["uses"][::-1], [*document["uses"], "zeta"], document["uses"] * 2):
        with pytest.raises(FormatError, match="uses"):
            read(header, document | {"uses": wrong}, rest)
    del document["uses"]
    assert read(header, document, rest) == found


def test_a_plain_document_has_none() -> None:
    header, document, rest = parted((GOLDEN / "segment-1-plain-no-tensors.safetensors").read_bytes())
    read(header, document, rest)
    with pytest.raises(FormatError, match="uses"):
        read(header, document | {"uses": ["raw"]}, rest)
