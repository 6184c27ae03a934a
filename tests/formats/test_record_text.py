"""The order of members in the store's texts, which is part of them: equal records have equal bytes."""

from __future__ import annotations

import json

import pytest

from ckptstore.formats.history import record_text
from ckptstore.formats.history.records import CheckpointEntry, CommitRecord, Encoding, OpenRecord, SegmentEntry

RUN, ID = "0" * 32, "1" * 32
LATER = {"later": 1, "zz": 2}


def members(data: bytes) -> list[str]:
    """Of the text's object, in order."""
    return list(json.loads(data[:-34]))


@pytest.mark.parametrize("features", [{}, {"ro_compat": ("a",)}, {"ro_compat": ("a",), "incompat": ("b",)}])
def test_features_follow_a_record_and_unknown_members_follow_them(
    features: dict[str, tuple[str, ...]],
) -> None:
    wanted = [name for name in ("incompat", "ro_compat") if name in features] + list(LATER)
    opened = record_text.encode_open(OpenRecord(1, None, ID, 0, {}, extra=LATER, **features), seq=0, run=RUN)
    assert members(opened)[-len(wanted) :] == wanted
    assert members(opened)[: -len(wanted)][-2:] == ["time", "writer"]
    record = CommitRecord(1, ID, tags={"a": (1, 1)}, extra=LATER, **features)
    committed, manifest = record_text.encode_commit(record, seq=1, run=RUN, manifest="2" * 32)
    assert manifest is None
    assert members(committed)[-len(wanted) - 1 :] == ["tags", *wanted]
    pointed, manifest = record_text.encode_commit(
        CommitRecord(1, ID, tags={"a": (1, 1)}, extra=LATER | {"much": "x" * record_text.SLOT_LIMIT}, **features),
        seq=1,
        run=RUN,
        manifest="2" * 32,
    )
    assert manifest is not None
    assert members(manifest)[-len(wanted) - 2 :] == ["tags", *wanted, "much"]
    assert [name for name in members(pointed) if name in ("manifest", *wanted)] == ["manifest", *wanted[: -len(LATER)]]


def test_entries_end_with_unknown_members() -> None:
    record = CommitRecord(
        1,
        ID,
        segments=(SegmentEntry(ID, 1, 5, 6, ID, extra=LATER),),
        checkpoints=(CheckpointEntry(1, 2, ID, 0, 1, 1, extra=LATER),),
        encodings=(Encoding((1, 2), "full", None, (ID,), False, 5, extra=LATER),),
    )
    found = json.loads(record_text.encode_commit(record, seq=1, run=RUN, manifest=ID)[0][:-34])
    assert list(found["segments"][0]) == ["id", "size", "header", "hash", *LATER]
    assert list(found["checkpoints"][0]) == ["step", "state", "time", "tensors", "bytes", *LATER]
    assert list(found["encodings"][0]) == ["checkpoint", "kind", "base", "segments", "lossy", "bytes", *LATER]
