"""Sentences of SPEC.md that once had two readings: ours and the page's reader choose the same one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.formats import codecs, optim
from ckptstore.formats.checksums import chunk_hash, header_hash, state_hash
from ckptstore.formats.codecs import rounding
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.folds import encode_fold
from ckptstore.formats.history.record_text import seal
from ckptstore.formats.history.records import CheckpointId, fold_key, segment_key, slot_key
from ckptstore.formats.jsontext import dumps
from ckptstore.formats.segment_files.layout import TensorSpec
from ckptstore.formats.segment_files.segment import SegmentDoc, header_length
from ckptstore.formats.segment_files.segment_plain import encode_plain, plan_plain, raw_entry
from ckptstore.formats.segment_files.segment_steps import StepEncoding
from ckptstore.formats.segment_files.shards import state_parts
from tests.tools.test_conformance_page import OTHER_RUN, both, changed_fold, folded_store, reindexed
from tools.golden.by_hand import Hand, Made, Step, changed_document, entry
from tools.golden.make_conformance import flip, rewritten
from tools.golden.make_segments import RUN
from tools.golden.make_slips import stepped

WORDS = np.arange(40, dtype="<u4")
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def hand(tmp_path: Path) -> Hand:
    found = Hand(tmp_path / "store")
    found.open()
    return found


def word(more: int = 0, codec: codecs.Codec | None = None, base: int | None = None, **wrong: Any) -> Any:
    on = None if base is None else WORDS + np.uint32(base)
    return entry("words", WORDS + np.uint32(more), codec, on, **wrong)


def fates(hand: Hand) -> dict[str, bool]:
    """Whether each checkpoint is restored."""
    return {ref: "state" in told for ref, told in both(hand.folder)["checkpoints"].items()}


def indexed(change: Change) -> Callable[[bytes], bytes]:
    return lambda data: reindexed(data, change)


def path_of(hand: Hand, made: Made) -> Path:
    return hand.folder / segment_key(made.term, made.entry["id"])


# ---------------------------------------------------------------------------------------- segments


def test_rank_members_stand_in_the_document_or_the_index_and_not_in_both(hand: Hand) -> None:
    """5.1; and the array of a step in `ranks` may be empty."""
    told = {"rank": [[1, 3]], "ranks": [[1, []]]}
    hand.promise(hand.segment({1: Step([word()])}, extra=told))
    hand.promise(hand.segment({2: Step([word(2)])}, changed_document(lambda found: found.update(ranks=[[2, []]]))))
    document = changed_document(lambda found: found.update(rank=[[3, 0]]))
    hand.promise(hand.segment({3: Step([word(3)])}, document, extra={"rank": [[3, 0]]}))
    wrong = changed_document(lambda found: found.update(rank=[[9, 0]]))
    hand.promise(hand.segment({4: Step([word(4)])}, wrong))
    assert fates(hand) == {"1@1": True, "2@1": True, "3@1": False, "4@1": False}


DOCUMENTS: dict[str, tuple[Change, bool]] = {
    "keep is not a feature of segments": (lambda found: found.update(incompat=["keep"]), False),
    "parents of other terms": (lambda found: found.update(parents=[[1, None], [7, [5, 3, OTHER_RUN]]]), True),
    "parents that descend": (lambda found: found.update(parents=[[2, None], [1, None]]), False),
    "a parent of a later term": (lambda found: found.update(parents=[[1, [1, 3, OTHER_RUN]]]), False),
    "a parent of a term of eleven digits": (lambda found: found.update(parents=[[10**10, None]]), False),
    "number 0 of another segment": (lambda found: found.update(parts=[[1, OTHER_RUN, 0, 2]]), True),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str, hand: Hand) -> None:
    change, taken = DOCUMENTS[name]
    hand.promise(hand.segment({1: Step([word()])}, changed_document(change)))
    assert fates(hand) == {"1@1": taken}


@pytest.mark.parametrize("told", [{}, {"format": "np"}, {"format": 7}])
def test_format_of_the_metadata_does_not_matter(told: dict[str, Any], hand: Hand) -> None:
    def change(data: bytes) -> bytes:
        size = header_length(data, len(data), "a test")
        members = json.loads(data[8:size])
        members["__metadata__"] = told | {"ckptstore": members["__metadata__"]["ckptstore"]}
        return data[:8] + json.dumps(members).encode().ljust(size - 8) + data[size:]

    hand.promise(hand.segment({1: Step([word()])}, change))
    assert fates(hand) == {"1@1": True}


INDEXES: dict[str, tuple[Change, bool]] = {
    "rows twice": (
        lambda found: (found["tensors"].extend(found["tensors"]), found["codecs"].extend(found["codecs"])),
        True,
    ),
    "a member that the document has": (lambda found: found.update(run=OTHER_RUN), False),
    "a row that no entry uses": (lambda found: found["tensors"].append(["more", "F32", [2]]), True),
    "one of an unknown dtype": (lambda found: found["tensors"].append(["more", "F4_LATER", [2]]), False),
    "one of no name": (lambda found: found["tensors"].append(["__metadata__", "F32", [2]]), False),
    "one with a surrogate": (lambda found: found["tensors"].append(["\ud800", "F32", [2]]), False),
}


@pytest.mark.parametrize("name", INDEXES)
def test_rows_of_an_index(name: str, hand: Hand) -> None:
    change, taken = INDEXES[name]
    hand.promise(hand.segment({1: Step([word()])}, indexed(change)))
    assert fates(hand) == {"1@1": taken}


def test_a_raw_chunk_of_another_length_refuses_the_segment(hand: Hand) -> None:
    """5.3: also for an entry that no tensor needs."""
    made = entry("aside", WORDS, codecs.Planes(4))
    change = indexed(lambda found: [row.__setitem__(0, "raw") or row[1].clear() for row in found["codecs"][1:]])
    hand.promise(hand.segment({1: Step([word(), made], {"words": {"$t": "words"}})}))
    hand.promise(hand.segment({2: Step([word(2), made], {"words": {"$t": "words"}})}, change))
    assert fates(hand) == {"1@1": True, "2@1": False}


def test_a_high_and_a_low_surrogate_are_one_character(hand: Hand) -> None:
    """1: escaped, or as three bytes each; the state hash is of the character."""
    spellings = [b"\\ud83d\\ude00", b"\xed\xa0\xbd\xed\xb8\x80", b"\\ud83d\xed\xb8\x80", b"\xed\xa0\xbd\\uDE00"]
    for step, text in enumerate(spellings, 1):
        tree = {"words": {"$t": "words"}, "says": "\U0001f600"}
        made = hand.segment({step: Step([word(step)], tree)}, lambda data, text=text: _spelled(data, text))  # type: ignore[misc]
        hand.promise(made)
    assert fates(hand) == {f"{step}@1": True for step in range(1, 5)}


def _spelled(data: bytes, text: bytes) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        own = lambda value: json.dumps(value).encode().replace(b"\\ud83d\\ude00", text)  # noqa: E731
        patch.setattr("tests.tools.test_conformance_page.dumps", own)
        return reindexed(data, lambda index: None)


# ---------------------------------------------------------------------------------------- ways


def test_nothing_of_a_base_is_compared_but_what_is_stored(hand: Hand) -> None:
    """5.4: its decoded hashes do not matter to its followers."""
    base = hand.segment({1: Step([word(1, codecs.Planes(4), decoded_hash="0" * 16)])})
    hand.promise(base)
    hand.promise(hand.segment({2: Step([word(2, codecs.Sub(4), 1)], base=base.identity(1))}))
    other = CheckpointId(1, 1, OTHER_RUN)
    hand.promise(hand.segment({3: Step([word(3, codecs.Sub(4), 1)], base=other)}))
    assert fates(hand) == {"1@1": False, "2@1": True, "3@1": False}


@pytest.mark.parametrize("damage", ["header", "missing", "chunk"])
def test_damage_in_a_base_that_no_tensor_needs(damage: str, hand: Hand) -> None:
    """7.4: only the catalog decides whether the base leads further."""
    base = hand.segment({1: Step([word(1)])})
    hand.promise(base)
    hand.promise(hand.segment({2: Step([word(2)], base=base.identity(1))}))
    hand.promise(hand.segment({3: Step([word(3, codecs.Sub(4), 1)], base=base.identity(1))}))
    hand.promise(hand.segment({4: Step([word(4, codecs.Sub(4), 2)], base=hand_identity(2))}))
    lone = hand.segment({5: Step([word(5)])})
    hand.commit(lone, checkpoints=[lone.checkpoint(5)])  # no encoding leads to it
    hand.promise(hand.segment({6: Step([word(6)], base=lone.identity(5))}))
    path = path_of(hand, base)
    if damage == "missing":
        path.unlink()
    else:
        flip(path, 100 if damage == "header" else base.entry["header"])
    assert fates(hand) == {"1@1": False, "2@1": True, "3@1": False, "4@1": True, "5@1": False, "6@1": False}


def hand_identity(step: int) -> CheckpointId:
    return CheckpointId(1, step, Step([word(step)]).state)


RANKS: dict[str, tuple[Any, bool]] = {
    "right": ({"$ranks": [[0, None, 1], [1, 2]]}, True),
    "no array": ({"$ranks": [0, [1]]}, False),
    "no places": ({"$ranks": [[], [1]]}, False),
    "a place beyond the nodes": ({"$ranks": [[0, 2, 0], [1, 2]]}, False),
    "a boolean place": ({"$ranks": [[0, True, 0], [1, 2]]}, False),
    "of another number of ranks": ([{"$ranks": [[0, 1], [1, 2]]}, {"$ranks": [[0, 1, 1], [1, 2]]}], False),
    "within another": ({"$ranks": [[0, 1], [1, {"a": {"$ranks": [[0, 1], [1, 2]]}}]]}, False),
    "null for all in an array": ([{"$ranks": [[None, None], [1]]}], False),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_of_wrong_form(name: str, hand: Hand) -> None:
    """3.3: a reader that takes the union refuses them."""
    node, taken = RANKS[name]
    hand.promise(hand.segment({1: Step([word()], {"words": {"$t": "words"}, "x": node})}))
    assert fates(hand) == {"1@1": taken}


def test_a_reader_that_hands_the_tree_on_does_not_count_its_levels(hand: Hand) -> None:
    """3.1; one that takes a union does."""
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    hand.promise(hand.segment({1: Step(tree={"deep": deep})}))
    hand.promise(hand.segment({2: Step(tree={"deep": deep[0], "n": {"$ranks": [[0, 1], [1, 2]]}})}))
    hand.promise(hand.segment({3: Step(tree={"deep": deep, "n": {"$ranks": [[0, 1], [1, 2]]}})}))
    assert fates(hand) == {"1@1": True, "2@1": True, "3@1": False}


# ---------------------------------------------------------------------------------------- the log


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("link", True),
        ("below", True),
        (".hidden", False),
        ("unsealed", True),
        ("sealed", False),
        ("empty below", False),
    ],
)
def test_objects_above_the_newest_term(name: str, lost: bool, hand: Hand) -> None:
    """READ 4"""
    hand.promise(hand.segment({1: Step([word()])}))
    above = hand.folder / "seg" / "0000000009"
    above.mkdir()
    if name == "link":
        (above / "link").symlink_to(hand.folder / "FORMAT")
    elif name.endswith("below"):
        (above / "sub").mkdir()
        if name == "below":
            (above / "sub" / "notes").write_bytes(b"mine")
    elif name == ".hidden":
        (above / name).write_bytes(b"mine")
    else:
        path = above / f"{'0' * 32}.json"
        path.write_bytes(seal({"ckptstore": "commit", "run": OTHER_RUN}))
        if name == "unsealed":
            flip(path, path.stat().st_size - 3)
    assert isinstance(both(hand.folder)["latest"], dict) is lost


MEMBERS: dict[str, tuple[dict[str, Any], bool]] = {
    "unknown": ({"later": 1}, True),
    "tags": ({"tags": {"a": [1, 1]}}, False),
    "drops": ({"drops": []}, False),
    "closed": ({"closed": True}, False),
    "highest": ({"highest": 3}, False),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_slot_with_a_manifest_has_no_members_of_a_commit(name: str, hand: Hand) -> None:
    """7.3"""
    more, taken = MEMBERS[name]
    made = hand.segment({1: Step([word()])})
    told = {"checkpoints": [made.checkpoint(1)], "encodings": [made.encoding(1)], "segments": [made.entry]}
    hand.in_manifest(told)
    rewritten(hand.folder / slot_key(hand.seq - 1), lambda slot: slot.update(more))
    assert (both(hand.folder)["latest"] == "1@1") is taken


def test_an_empty_manifest_is_none(hand: Hand) -> None:
    hand.promise(hand.segment({1: Step([word()])}), manifest={})
    assert both(hand.folder)["latest"] == "1@1"


@pytest.mark.parametrize("term", [0, 10**10])
def test_a_node_of_no_term_makes_its_slot_damaged(term: int, hand: Hand) -> None:
    hand.promise(hand.segment({1: Step([word()])}))
    hand.commit(retires=[[term, 1]])
    hand.commit(tags={"a": [1, 1]})
    found = both(hand.folder)
    assert isinstance(found["latest"], dict)
    assert "state" in found["checkpoints"]["1@1"]


@pytest.mark.parametrize("more", [{"ckptstore": "merge"}, {"incompat": ["later"]}, {"seq": 0}, {"run": OTHER_RUN}])
def test_objects_at_the_end_slot_of_a_fold(more: dict[str, Any], tmp_path: Path) -> None:
    """8: a whole text of this run and number is a record of another history, whatever its kind and features."""
    folder, (_, newest) = folded_store(tmp_path)
    expected = both(folder)
    rewritten(folder / slot_key(int(newest.name[:20])), lambda slot: slot.update(more))
    found = both(folder)
    assert "refused" not in found
    assert found["checkpoints"] == expected["checkpoints"]


def test_missing_decoded_hashes_are_those_of_one_way_alone(hand: Hand) -> None:
    """4, 5.5"""
    made = word(1, codecs.Planes(4), decoded_hash=None)
    state = Step([word(1)]).state
    base = hand.segment({1: Step([made])})
    hand.promise(base, checkpoints=[base.checkpoint(1, state=state)])
    hand.promise(hand.segment({2: Step([word(2, codecs.Sub(4), 1)], base=CheckpointId(1, 1, state))}))
    assert fates(hand) == {"1@1": False, "2@1": True}


def test_an_encoding_that_names_a_segment_twice_leads_nowhere(hand: Hand) -> None:
    """7.2: also if nothing of the segment is needed; if another encoding leads there, it is used."""
    full, empty, way = hand.segment({1: Step([word(1)])}), _without_tensors(hand, 1), hand.segment({2: Step([word(2)])})
    hand.commit(full, empty, checkpoints=[full.checkpoint(1)], encodings=[full.encoding(1, empty, empty)])
    twice, once = way.encoding(2, way), way.encoding(2)
    hand.commit(way, checkpoints=[way.checkpoint(2)], encodings=[twice, once])
    hand.promise(hand.segment({3: Step([word(3)], base=full.identity(1))}))
    hand.promise(hand.segment({4: Step([word(4)], base=way.identity(2))}))
    assert fates(hand) == {"1@1": False, "2@1": True, "3@1": False, "4@1": True}


def _without_tensors(hand: Hand, step: int, base: CheckpointId | None = None) -> Made:
    return hand.segment({step: Step(base=base, treeless=True)})


KINDS: dict[str, tuple[Change, str]] = {
    "absent": (lambda slot: slot.pop("ckptstore"), "damaged"),
    "number": (lambda slot: slot.update(ckptstore=5), "damaged"),
    "null": (lambda slot: slot.update(ckptstore=None), "damaged"),
    "other": (lambda slot: slot.update(ckptstore="merge"), "refused"),
    "number, later": (lambda slot: slot.update(ckptstore=5, incompat=["later"]), "refused"),
    "number, no features": (lambda slot: slot.update(ckptstore=5, incompat=[7]), "damaged"),
    "later, other type": (lambda slot: slot.update(incompat=["later"], ro_compat=5), "refused"),
    "other, foreign": (lambda slot: slot.update(ckptstore="merge", run=OTHER_RUN), "damaged"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_slots(name: str, hand: Hand) -> None:
    """7: a kind is a text; the first error decides."""
    change, fate = KINDS[name]
    hand.promise(hand.segment({1: Step([word()])}))
    hand.commit(tags={"a": [1, 1]})
    rewritten(hand.folder / slot_key(hand.seq - 1), change)
    found = both(hand.folder)
    assert fate == ("refused" if "refused" in found else "damaged" if isinstance(found["latest"], dict) else "taken")


MANIFESTS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "remote": ({"remote": "s3://here"}, {}, True),
    "remote, other type": ({"remote": 5}, {}, False),
    "reached, other type": ({"reached": True}, {}, False),
    "ro_compat, other type": ({"ro_compat": [5]}, {}, False),
    "writer": ({"writer": 5}, {}, True),
    "manifest of a manifest": ({}, {"manifest": {"id": "0" * 32, "size": 1, "hash": "0" * 32}}, False),
    "number as manifest of it": ({}, {"manifest": 5}, False),
    "empty manifest of it": ({}, {"manifest": {}}, False),
    "remote of a manifest": ({}, {"remote": 5}, False),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_members_beside_a_manifest_and_in_it(name: str, hand: Hand) -> None:
    """7.3"""
    beside, within, taken = MANIFESTS[name]
    made = hand.segment({1: Step([word()])})
    told = {"checkpoints": [made.checkpoint(1)], "encodings": [made.encoding(1)], "segments": [made.entry]}
    hand.in_manifest(told | within)
    rewritten(hand.folder / slot_key(hand.seq - 1), lambda slot: slot.update(beside))
    assert (both(hand.folder)["latest"] == "1@1") is taken


FOLDS: dict[str, tuple[Callable[[Catalog], object], Change, str]] = {
    "right": (lambda catalog: None, lambda found: None, "taken"),
    "a node promised and held": (
        lambda catalog: catalog.held.__setitem__((1, 1), catalog.checkpoints[1, 1]),
        lambda found: None,
        "passed over",
    ),
    "an id among segments and loose ones": (
        lambda catalog: None,
        lambda found: found["encodings"].update(loose=f"{1:032x}"),
        "passed over",
    ),
    "loose ids that descend": (
        lambda catalog: None,
        lambda found: found["encodings"].update(loose=f"{9:032x}{8:032x}"),
        "passed over",
    ),
    "a kind twice": (lambda catalog: None, lambda found: found["encodings"].update(kinds=["full"] * 2), "passed over"),
    "a parent of its own term": (
        lambda catalog: _with_parent(catalog, 2, CheckpointId(2, 1, OTHER_RUN)),
        lambda found: None,
        "passed over",
    ),
    "columns of another length": (lambda catalog: None, lambda found: found["held"].update(rows=1), "passed over"),
    "such columns and a feature": (
        lambda catalog: None,
        lambda found: found.update(incompat=["later"], held={"rows": 1}),
        "refused",
    ),
    "another run and a feature": (
        lambda catalog: None,
        lambda found: found.update(incompat=["later"], run=OTHER_RUN),
        "refused",
    ),
    "a parent of another state": (
        lambda catalog: _with_parent(catalog, 2, CheckpointId(1, 1, OTHER_RUN)),
        lambda found: None,
        "taken",
    ),
}


@pytest.mark.parametrize("name", FOLDS)
def test_errors_in_a_fold(name: str, hand: Hand) -> None:
    """8, and 7.4: whether a parent has the state that its OPEN names was checked when the OPEN was applied."""
    change, told, fate = FOLDS[name]
    made = hand.segment({1: Step([word()])})
    hand.promise(made)
    hand.open(made.identity(1))
    catalog = ckptstore.open(hand.folder).view().catalog
    catalog.tags["fold"] = (1, 1)
    change(catalog)
    data, digest = encode_fold(catalog, run=RUN)
    path = hand.folder / fold_key(hand.seq - 1, digest)
    path.parent.mkdir()
    path.write_bytes(data)
    if path != (other := changed_fold(path, told)):
        path.unlink()
        assert other.exists()
    found = both(hand.folder)
    assert ("refused" in found) is (fate == "refused")
    if fate != "refused":
        assert found["latest"] == "1@1"
        assert ("tags" in found) is (fate == "taken")


def _with_parent(catalog: Catalog, term: int, parent: CheckpointId) -> None:
    catalog.terms[term] = replace(catalog.terms[term], parent=parent)


# ---------------------------------------------------------------------------------------- bases and groups


def _base(hand: Hand, *segments: Made, step: int = 1) -> CheckpointId:
    """A checkpoint of these segments, which its tree describes or not."""
    told = segments[0]
    hand.commit(*segments, checkpoints=[told.checkpoint(step)], encodings=[told.encoding(step, *segments[1:])])
    return told.identity(step)


BASES: dict[str, tuple[Callable[[Hand], list[Made]], bool]] = {
    "no tree": (lambda hand: [hand.segment({1: Step([word(1)], treeless=True)})], True),
    "two trees": (
        lambda hand: [hand.segment({1: Step([word(1)])}), hand.segment({1: Step(tree={"words": {"$t": "words"}})})],
        True,
    ),
    "a tensor of its tree is missing": (
        lambda hand: [hand.segment({1: Step([word(1)], {"words": {"$t": "words"}, "more": {"$t": "more"}})})],
        True,
    ),
    "a tensor in two segments": (
        lambda hand: [hand.segment({1: Step([word(1)])}), hand.segment({1: Step([word(1)], treeless=True)})],
        False,
    ),
    "another tensor in two segments": (
        lambda hand: [
            hand.segment({1: Step([word(1), entry("more", WORDS)])}),
            hand.segment({1: Step([entry("more", WORDS)], treeless=True)}),
        ],
        False,
    ),
    "a segment of another base": (
        lambda hand: [hand.segment({1: Step([word(1)])}), _without_tensors(hand, 1, CheckpointId(1, 0, OTHER_RUN))],
        False,
    ),
    "a segment of another step": (
        lambda hand: [hand.segment({1: Step([word(1)])}), _without_tensors(hand, 7)],
        False,
    ),
}


@pytest.mark.parametrize("name", BASES)
def test_the_parts_of_a_bases_encoding_that_count(name: str, hand: Hand) -> None:
    """5.4"""
    make, taken = BASES[name]
    base = _base(hand, *make(hand))
    hand.promise(hand.segment({2: Step([word(2, codecs.Sub(4), 1)], base=base)}))
    found = fates(hand)
    assert found["2@1"] is taken
    assert not found["1@1"]


def test_a_base_whose_shards_are_not_all_there(hand: Hand) -> None:
    """5.4: checkpoints that build on the existing ones are restored."""
    tree = {"words": {"$t": "words"}}

    def box(more: int, at: int, codec: codecs.Codec | None = None, base: int | None = None) -> Any:
        made, stored = word(more, codec, base)
        return replace(made, global_shape=(120,), offset=(40 * at,)), stored

    base = _base(hand, *(hand.segment({1: Step([box(at, at)], tree, treeless=at > 0)}) for at in range(2)))
    boxes = [box(7, 0, codecs.Sub(4), 0), box(8, 1, codecs.Sub(4), 1), box(9, 2)]
    own = [hand.segment({2: Step([one], tree, base, treeless=at > 0)}) for at, one in enumerate(boxes)]
    state = state_hash(dumps(tree), state_parts(one for one, _ in boxes))
    told = {"checkpoints": [own[0].checkpoint(2, state=state)], "encodings": [own[0].encoding(2, *own[1:])]}
    hand.commit(*own, **told)
    assert fates(hand) == {"1@1": False, "2@1": True}


def test_decoded_hashes_of_unnamed_tensors_are_not_compared(hand: Hand) -> None:
    """5.4: also of the tensor that others are rounded from, in the same checkpoint and in a base."""
    master, wrong = np.arange(40, dtype="<f4"), {"decoded_hash": "0" * 16}
    half = np.empty(40, "<u2")
    rounding.to_bfloat16(master.view("<u4"), half)
    planes = codecs.Planes(4)

    def rounded(name: str) -> Any:
        return entry("copy", half, codecs.Derive("BF16"), master, dtype="BF16", params={"of": name})

    tree = {"copy": {"$t": "copy"}}
    hidden = "ckptstore/master"
    base = hand.segment({1: Step([rounded(hidden), entry(hidden, master, planes, **wrong)], tree)})
    hand.promise(base)
    hand.promise(hand.segment({2: Step([rounded("other"), entry("other", master, planes, **wrong)], tree)}))
    named = {**tree, "other": {"$t": "other"}}
    hand.promise(hand.segment({3: Step([rounded("other"), entry("other", master, planes, **wrong)], named)}))
    delta = entry("copy", half, codecs.Sub(2), half, dtype="BF16")
    hand.promise(hand.segment({4: Step([delta], base=base.identity(1))}))
    hand.promise(hand.segment({5: Step([rounded(hidden), entry(hidden, master, planes, stored_hash="0" * 16)], tree)}))
    assert fates(hand) == {"1@1": True, "2@1": True, "3@1": False, "4@1": True, "5@1": False}


def test_decoded_hashes_of_unnamed_tensors_that_a_step_moved(hand: Hand) -> None:
    """The same of the tensors of a group."""
    old, entries = _group("g")
    first = hand.segment({1: Step([entry(name, part) for name, part in old.items()])})
    hand.promise(first)
    for step, spoiled in ((2, "g.momentum_buffer"), (3, "g.weight")):
        made = [
            (
                replace(one, chunks=(replace(one.chunks[0], decoded_hash="0" * 16),)) if one.name == spoiled else one,
                data,
            )
            for one, data in entries
        ]
        hand.promise(hand.segment({step: Step(made, {"weight": {"$t": "g.weight"}}, base=first.identity(1))}))
    assert fates(hand) == {"1@1": True, "2@1": True, "3@1": False}


def test_the_decoded_hash_of_a_master_that_a_step_moved(hand: Hand) -> None:
    """The same of a tensor that another is rounded from."""
    old, entries = _group("g")
    first = hand.segment({1: Step([entry(name, part) for name, part in old.items()])})
    hand.promise(first)
    weight = _moved(old)[0]
    half = np.empty(40, "<u2")
    rounding.to_bfloat16(weight.view("<u4"), half)
    rounded = entry("copy", half, codecs.Derive("BF16"), weight, dtype="BF16", params={"of": "g.weight"})
    (leader, payload), *others = entries
    wrong = replace(leader, chunks=(replace(leader.chunks[0], decoded_hash="0" * 16),))
    for step, one, tree in ((2, wrong, ["copy"]), (3, leader, ["copy"]), (4, wrong, ["copy", "g.weight"])):
        told = Step([rounded, (one, payload), *others], {name: {"$t": name} for name in tree}, first.identity(1))
        hand.promise(hand.segment({step: told}))
    assert fates(hand) == {"1@1": True, "2@1": True, "3@1": True, "4@1": False}


_RULE = optim.SGD(momentum=0.5).rule(optim.Step(count=2, lr=1.0), "fma")


def _moved(old: dict[str, Any]) -> list[Any]:
    new = [part.copy() for part in old.values()]
    optim.advance(_RULE, new, np.ones(40, "<f4"))
    return new


def _group(name: str) -> tuple[dict[str, Any], list[Any]]:
    """The old slots of a parameter by name, and the entries of one step of them."""
    old = [np.arange(40, dtype="<f4"), np.ones(40, "<f4")]
    entries = stepped(name, _RULE, old, np.ones(40, "<f4"))
    return {one.name: part for (one, _), part in zip(entries, old, strict=True)}, entries


GROUPS: dict[str, tuple[Change, bool]] = {
    "right": (lambda params: None, True),
    "a name twice": (lambda params: params.update(members=[params["members"][0]] * 2), False),
    "a slot without an entry": (lambda params: params["members"][0].__setitem__(1, "none"), False),
    "fewer slots": (lambda params: params["members"][0].pop(), False),
    "an unknown parameter": (lambda params: params.update(later=1), False),
    "an unknown member of the rule": (lambda params: params["rule"].update(later=1), False),
    "an encoding of another name": (lambda params: params.update(encoding="later"), False),
    "a codec of its own": (lambda params: params["members"][0].__setitem__(1, "words"), False),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_that_no_tensor_needs(name: str, hand: Hand) -> None:
    """5.5: they refuse the encoding, and everything that builds on it."""
    change, taken = GROUPS[name]
    old, entries = _group("ckptstore/g")
    first = hand.segment({1: Step([word(1), *(entry(key, part) for key, part in old.items())])})
    hand.promise(first)
    (leader, payload), *others = entries
    params = copy.deepcopy(dict(leader.params))
    change(params)
    wrong = [(replace(leader, params=params), payload), *others]
    second = hand.segment({2: Step([word(2), *wrong], base=first.identity(1))})
    hand.promise(second)
    hand.promise(hand.segment({3: Step([word(3, codecs.Sub(4), 2)], base=second.identity(2))}))
    hand.promise(hand.segment({4: Step([word(4)], base=second.identity(2))}))
    assert fates(hand) == {"1@1": True, "2@1": taken, "3@1": taken, "4@1": True}


# ---------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize("column", ["stored", "decoded"])
def test_dashes_in_a_column_of_an_index(column: str, hand: Hand) -> None:
    """5.3: a missing stored hash refuses the segment, also if nobody needs the chunk."""
    made = entry("ckptstore/aside", WORDS, codecs.Planes(4))
    change = indexed(lambda found: found.update({column: found[column][:-16] + "-" * 16}))
    hand.promise(hand.segment({1: Step([word(), made])}, change))
    assert fates(hand) == {"1@1": column == "decoded"}


PLAIN: dict[str, tuple[Change, bool]] = {
    "right": (lambda found: None, True),
    "the stored dtype": (lambda found: found.update(dtypes=[[0, "U32"]]), True),
    "another dtype": (lambda found: found.update(dtypes=[[0, "F32"]]), False),
    "no hash": (lambda found: found.update(hashes="-" * 16), False),
}


@pytest.mark.parametrize("name", PLAIN)
def test_documents_of_plain_segments(name: str, hand: Hand) -> None:
    """5.2"""
    change, taken = PLAIN[name]
    spec, step, own = TensorSpec("words", "U32", (40,)), Step([word()]), f"{77:032x}"
    told = {1: StepEncoding(1, "full", None, 1.5, False, None)}
    doc = SegmentDoc(RUN, 1, own, told, parents={1: None}, trees={1: step.full_tree})
    layout = plan_plain([spec], doc)
    made = raw_entry(layout, spec, [chunk_hash(WORDS.tobytes())])
    data = encode_plain(layout, replace(doc, tensors={1: {"words": made}})) + WORDS.tobytes()
    data = changed_document(change)(data)
    size = header_length(data, len(data), "a test")
    hand.put(segment_key(1, own), data)
    about = {"id": own, "size": len(data), "header": size, "hash": header_hash(data[:size])}
    hand.promise(Made(1, about, {1: step}))
    assert fates(hand) == {"1@1": taken}


# ---------------------------------------------------------------------------------------- above the newest term


def _foreign(hand: Hand, place: Path, number: int, **members: Any) -> None:
    place.mkdir(parents=True, exist_ok=True)
    told = {"ckptstore": "commit", "run": OTHER_RUN} | members
    (place / f"{number:032x}.json").write_bytes(seal(told))


@pytest.mark.parametrize(
    ("below", "lost"), [((16, 0), False), ((17, 0), True), ((10, 6), False), ((10, 10), True), ((0, 17), True)]
)
def test_how_many_objects_above_the_newest_term_are_looked_into(below: tuple[int, int], lost: bool, hand: Hand) -> None:
    """READ 4: those of all folders of a term count together."""
    hand.promise(hand.segment({1: Step([word()])}))
    above = hand.folder / "seg" / "0000000009"
    for place, count in zip((above, above / "sub"), below, strict=True):
        for number in range(count):
            _foreign(hand, place, number)
    assert isinstance(both(hand.folder)["latest"], dict) is lost


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("right", False),
        ("version", True),
        ("feature", True),
        ("dtype", True),
        ("run of a segment", True),
        ("run", True),
        ("empty run", True),
        ("link", False),
        ("file", False),
    ],
)
def test_the_run_of_an_object_above_the_newest_term(name: str, lost: bool, hand: Hand, tmp_path: Path) -> None:
    """READ 4: a segment that section 5 refuses counts, and so does a run that is not a uuid."""
    hand.promise(hand.segment({1: Step([word()])}))
    changes: dict[str, Callable[[bytes], bytes]] = {
        "version": changed_document(lambda found: found.update(version=2)),
        "feature": changed_document(lambda found: found.update(incompat=["later"])),
        "dtype": indexed(lambda found: found["tensors"][0].__setitem__(1, "F4_LATER")),
        "run of a segment": changed_document(lambda found: found.update(run="other")),
    }
    other = Hand(tmp_path / "other")
    other.open()
    made = other.segment({1: Step([word()])}, changes.get(name), run=OTHER_RUN)
    above = hand.folder / "seg" / "0000000009"
    if name == "link":
        above.symlink_to(hand.folder / "seg" / "0000000001")
    elif name == "file":
        above.write_bytes(b"mine")
    elif name.endswith("run"):
        _foreign(hand, above, 1, run="" if name == "empty run" else "other")
    else:
        above.mkdir()
        path_of(other, made).rename(above / f"{1:032x}.safetensors")
    assert isinstance(both(hand.folder)["latest"], dict) is lost
