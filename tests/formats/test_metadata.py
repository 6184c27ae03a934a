"""Metadata of a checkpoint as other writers may have written it: an object, or the record is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.errors import FormatError
from ckptstore.formats.history import metadata
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.folds import decode_fold, encode_fold
from ckptstore.formats.history.record_text import decode_record, encode_commit
from ckptstore.formats.history.records import CheckpointEntry, CommitRecord, Encoding, OpenRecord, SegmentEntry

RUN, STATE = "a" * 32, "b" * 32


def record(said: Any) -> CommitRecord:
    return CommitRecord(
        1,
        "c" * 32,
        segments=(SegmentEntry("d" * 32, 1, 5000, 4096, "e" * 32),),
        checkpoints=(CheckpointEntry(1, 7, STATE, 1.5, 3, 100, {metadata.MEMBER: said}),),
        encodings=(Encoding((1, 7), "full", None, ("d" * 32,), False, 900),),
    )


def folded(said: Any) -> tuple[bytes, str]:
    return encode_fold(Catalog().apply(OpenRecord(1, None, "c" * 32, 1.0), 0).apply(record(said), 1), run=RUN)


@pytest.mark.parametrize("said", ["text", 3, None, [1], True])
def test_metadata_that_is_no_object_is_refused(said: Any) -> None:
    data, _ = encode_commit(record(said), seq=1, run=RUN, manifest="f" * 32)
    with pytest.raises(FormatError, match="member 'metadata' is not an object"):
        decode_record(data, seq=1, run=RUN, what="slot")
    data, digest = folded(said)
    with pytest.raises(FormatError, match="metadata"):
        decode_fold(data, seq=1, run=RUN, digest16=digest[:16], what="fold")


def test_metadata_of_another_version_is_kept() -> None:
    said = {"a": {"$complex": [1, 2]}, "b": [{"$float": "huge"}, {"$float": "inf"}, {"$float": 3}]}
    data, _ = encode_commit(record(said), seq=1, run=RUN, manifest="f" * 32)
    found = decode_record(data, seq=1, run=RUN, what="slot")
    assert isinstance(found, CommitRecord)
    assert found.checkpoints == record(said).checkpoints
    data, digest = folded(said)
    catalog = decode_fold(data, seq=1, run=RUN, digest16=digest[:16], what="fold")
    assert catalog.checkpoints[1, 7] == record(said).checkpoints[0]
    shown = metadata.read(catalog.checkpoints[1, 7].extra[metadata.MEMBER])
    assert shown == said | {"b": [{"$float": "huge"}, float("inf"), {"$float": 3}]}
