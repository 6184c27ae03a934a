"""Entries of packed segments that are made from columns when they are asked for, and checks that steps share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CkptError, CorruptSegmentError, FormatError
from ckptstore.formats import jsontext, optim
from ckptstore.formats.checksums import chunk_hash
from ckptstore.formats.history.members import Members
from ckptstore.formats.segment_files import segment_index, step_codec
from ckptstore.formats.segment_files.layout import TensorSpec, chunk_extents
from ckptstore.formats.segment_files.segment import RAW, Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.segment_files.segment_steps import StepEncoding
from ckptstore.formats.segment_files.step_tensors import StepTensors
from tests.formats import test_step_codec_hostile as hostile
from tests.forms import short_or

STEPS = (5, 6)
DRAFT = SegmentDoc("0" * 32, 1, "1" * 32, {step: StepEncoding(1, "gradient") for step in STEPS})


def indexed(steps: Mapping[int, Mapping[str, TensorEntry]], start: int = 4096) -> dict[str, Any]:
    """The members of an index, and the payload's bytes under ``payload``: the entries' chunks lie end to end."""
    at, tensors = start, {}
    for step, entries in steps.items():
        tensors[step] = {}
        for name, entry in entries.items():
            chunks = []
            for chunk in entry.chunks:
                stored = chunk.stored_hash if chunk.length else chunk_hash(b"")
                chunks.append(replace(chunk, offset=at, stored_hash=stored))
                at += chunk.length
            tensors[step][name] = replace(entry, chunks=tuple(chunks))
    doc = replace(DRAFT, encodings={step: DRAFT.encodings[step] for step in steps}, tensors=tensors)
    return {"payload": at - start, "doc": doc, **segment_index.index_members(doc, at - start, start)}


def read(members: dict[str, Any]) -> SegmentDoc:
    """The document of an index, through its text."""
    payload, doc = members["payload"], members["doc"]
    text = jsontext.dumps({key: value for key, value in members.items() if key not in ("payload", "doc")})
    found = jsontext.loads(text, what="index", max_bytes=1 << 24, shared=True)
    return segment_index.read_index(replace(doc, tensors={}), Members(found, "index"), payload, 4096, "index")


HASHES = st.integers(0, 2**64 - 1).map("{:016x}".format)


@st.composite
def entries(draw: st.DrawFn) -> dict[str, TensorEntry]:
    """Entries of one step: raw and encoded, empty, of several chunks, whole and shards, with and without hashes."""
    found = {}
    for name in draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6)):
        size = draw(st.sampled_from([0, 1, 7, 4096, (16 << 20) + 8, 48 << 20]))
        whole = draw(st.booleans()) or not size
        spec = TensorSpec(name, "U8", (size,), None if whole else (size + 9,), None if whole else (3,))
        raw = draw(st.booleans())
        chunks = []
        for _, logical in chunk_extents(size):
            length = logical if raw else draw(st.sampled_from([0, 1, 300]))
            stored = draw(HASHES) if length else chunk_hash(b"")
            chunks.append(Chunk(0, length, logical, stored, stored if raw else draw(st.none() | HASHES)))
        params = {} if raw else {"word": draw(st.sampled_from([1, 2]))}
        codec = RAW if raw else "planes"
        digest = draw(st.none() | st.integers(0, 2**64 - 1))
        found[name] = TensorEntry(
            name, "U8", spec.shape, tuple(chunks), codec, params, spec.global_shape, spec.offset, digest
        )
    return found


@settings(max_examples=short_or(60, 600), deadline=None)
@given(st.tuples(entries(), entries()), st.booleans(), st.randoms(use_true_random=False))
def test_entries_are_those_that_were_written(pair: Any, again: bool, chance: Any) -> None:
    """Whatever order they are asked for in, and whether or not two steps have the same tensors."""
    steps = {5: pair[0], 6: pair[0] if again else pair[1]}
    members = indexed(steps)
    found = read(members)
    for step in STEPS:
        wanted, own = members["doc"].tensors[step], found.tensors[step]
        names = list(wanted)
        assert (list(own), len(own)) == (names, len(names))
        chance.shuffle(names)
        for name in names:
            assert own[name] == wanted[name]
            assert isinstance(own, StepTensors)
            assert own.spec(name).nbytes == wanted[name].nbytes
        assert own == wanted
        assert "z" not in own
        assert own.get("z") is None
    one, other = (found.tensors[step].rows for step in STEPS)  # type: ignore[attr-defined]
    assert (one is other) == same(*steps.values())


def same(one: Mapping[str, TensorEntry], other: Mapping[str, TensorEntry]) -> bool:
    def specs(held: Mapping[str, TensorEntry]) -> list[Any]:
        return [(entry.name, entry.shape, entry.global_shape, entry.offset) for entry in held.values()]

    return specs(one) == specs(other)


@pytest.mark.parametrize("wrong", [True, 1.0])
def test_rows_that_python_takes_for_equal_are_no_known_rows(wrong: object) -> None:
    """Tables of descriptions are shared by their text: true and 1.0 are refused while a 1 in their place is known."""
    members = indexed({5: {"a": TensorEntry("a", "U8", (1,), (Chunk(0, 1, 1, "0" * 16, "0" * 16),))}})
    known = read(members)
    table = known.tensors[5].columns.table  # type: ignore[attr-defined]
    assert read(members).tensors[5].columns.table is table  # type: ignore[attr-defined]
    members["tensors"] = [["a", "U8", [wrong]]]
    with pytest.raises(FormatError, match="shape"):
        read(members)


def test_a_table_goes_with_its_last_document() -> None:
    members = indexed({5: {"a": TensorEntry("a", "U8", (1,), (Chunk(0, 1, 1, "0" * 16, "0" * 16),))}})
    found = read(members)
    table = weakref.ref(found.tensors[5].columns.table)  # type: ignore[attr-defined]
    assert table() is not None
    del found
    assert table() is None


def test_a_raw_chunk_of_another_length_names_its_tensor() -> None:
    raw = TensorEntry("b", "U8", (4,), (Chunk(0, 4, 4, "0" * 16, "0" * 16),))
    members = indexed({5: {"empty": TensorEntry("empty", "U8", (0,), ()), "b": raw}})
    members["length"] = [3]
    members["payload"] = 3
    with pytest.raises(CorruptSegmentError, match=r"tensor 'b': 3 raw bytes of a chunk of 4"):
        read(members)


# -- groups of steps

Outcome = tuple[str, Any]


def moved() -> hostile.Tensors:
    """Two groups, and a tensor that a codec encodes."""
    found = hostile.tensors()
    return {**found, "other": replace(found["other"], codec="planes", params={"word": 4})}


def outcome(tensors: Mapping[str, TensorEntry]) -> Outcome:
    try:
        return "groups", [(one, one.names) for one in step_codec.groups_of(tensors, "here")]
    except CkptError as error:
        return type(error).__name__, str(error)


LATER = optim.AdamW(weight_decay=0.1).rule(optim.Step(count=8, lr=2e-3))
OTHER = optim.SGD(momentum=0.9).rule(optim.Step(count=8, lr=2e-3))


def reordered(found: hostile.Tensors) -> None:
    entries = list(found.items())[::-1]
    found.clear()
    found.update(entries)


MORE: dict[str, Any] = {
    "nothing": lambda found: None,
    "another rule": hostile.params(rule=LATER.params),
    "a rule of other slots": hostile.params(rule=OTHER.params),
    "another encoding that is known": hostile.params(encoding="predicted"),
    "another order": reordered,
    "a tensor less": lambda found: found.pop("other"),
    "members in another order": hostile.params(members=[hostile.NAMES[0], hostile.NAMES[1][::-1]]),
    "members of one": lambda found: (
        hostile.params(members=hostile.NAMES[:1])(found),  # type: ignore[func-returns-value]
        [found.pop(name) for name in hostile.NAMES[1]],
    ),
}
UNSTORABLE = {"a follower of another codec", "no numbers"}
CHANGES = {**MORE, **hostile.UNKNOWN, **hostile.UNFIT}


@pytest.mark.parametrize("change", CHANGES)
def test_groups_of_a_later_step_are_checked_like_those_of_the_first(change: str) -> None:
    """The same groups or the same error as without what is known of the step before."""
    after = moved()
    CHANGES[change](after)
    if change in UNSTORABLE:
        with pytest.raises(FormatError):
            indexed({5: moved(), 6: after})
        return
    doc = read(indexed({5: moved(), 6: after}))
    assert outcome(doc.tensors[5])[0] == "groups"
    assert outcome(doc.tensors[6]) == outcome(dict(doc.tensors[6]))
    assert outcome(doc.tensors[5]) == outcome(dict(doc.tensors[5]))


def test_steps_with_the_same_groups_share_their_members() -> None:
    after = moved()
    hostile.params(rule=LATER.params)(after)
    doc = read(indexed({5: moved(), 6: after}))
    one, other = (step_codec.groups_of(doc.tensors[step], "here") for step in STEPS)
    assert [group.members for group in one] == [group.members for group in other]
    assert all(left.members is right.members for left, right in zip(one, other, strict=True))
    assert other[1].rule == LATER
