"""Stores that no writer of ours makes, with every hash right: `verify` reports the error, or everything loads.

Every member of every record, header, document and index of valid stores is changed, a seeded sample of them at a time.
"""

from __future__ import annotations

import os
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptstore
from ckptstore import CorruptSegmentError, DiffOptions, UsageError
from ckptstore.formats import checksums, jsontext
from ckptstore.formats.codecs import Derive, Sub, Xor
from ckptstore.formats.segment_files.shards import state_parts
from ckptstore.maintenance.merge import merge
from ckptstore.restore.chains.chain import iterate_chain
from ckptstore.restore.open_checkpoint import opened
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tests.forms import short_or
from tests.maintenance.crafted import Crafted, mutate
from tests.write.trainer import Trainer
from tools.golden.shard_stores import Piece, ShardStore, by_rank, cut, rows

CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100), compress_fulls=True)


def _fulls(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save({"w": np.arange(300.0) * step, "c": np.ones(3, "c8"), "n": [step, {"b": np.zeros(0)}]}, step)


def _deltas(store: ckptstore.Store) -> None:
    weight = np.random.default_rng(0).standard_normal(3000).astype("<f4")
    with store.writer(deltas=CHAIN, poll_seconds=None) as writer:
        for step in (1, 2, 3):
            weight = weight * np.float32(1.001)
            counts = np.arange(2000, dtype="<u2") + (np.arange(2000) < step).astype("<u2")
            state = {"copy": weight.astype(ml_dtypes.bfloat16), "w": weight, "counts": counts, "step": step}
            writer.save(state, step)


def _steps(store: ckptstore.Store) -> None:
    trainer = Trainer(sizes={"wide": (30, 20), "bias0": (5,), "bias1": (7,)})
    with store.writer(diffs=DiffOptions(full_every=9, batch=2, seconds=None), poll_seconds=None) as writer:
        for step in range(1, 6):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())


def _merged(store: ckptstore.Store) -> None:
    _steps(store)
    merge(store.journal, "1..5", keep_steps=True, take_over=True)


def _shards(store: ckptstore.Store) -> None:
    """Two ranks: a full, a delta, a delta that is cut in another order; a tensor that is whole, and rounded copies."""
    made, boxes = ShardStore(store), rows((60, 5), 2)
    old = np.random.default_rng(0).standard_normal((60, 5)).astype("<f4")
    whole = [Piece("n", np.arange(7))]
    copies = cut("copy", old.astype("<f2"), boxes, codec=Derive("F16"), base=old, params={"of": "w"})
    made.commit(1, by_rank(cut("w", old, boxes), whole, copies))
    for step, codec in ((2, Xor(4)), (3, Sub(4))):
        new = old * np.float32(1.001)
        copies = cut("copy", new.astype("<f2"), boxes, codec=Derive("F16"), base=new, params={"of": "w"})
        made.commit(step, by_rank(cut("w", new, boxes, codec=codec, base=old), copies, whole)[::-1], base=step - 1)
        old = new


KINDS: dict[str, Callable[[ckptstore.Store], None]] = {
    "fulls": _fulls,
    "deltas": _deltas,
    "steps": _steps,
    "merged": _merged,
    "shards": _shards,
    "one shard": _steps,
}
TRIALS = int(os.environ.get("CRAFTED_TRIALS", short_or(6, 20)))
"""Changes of each kind for each store; a campaign sets more, and CRAFTED_SEED."""


@pytest.fixture(scope="module", params=KINDS)
def valid(request: pytest.FixtureRequest) -> tuple[str, Crafted]:
    """A store of each kind, in parts."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    KINDS[request.param](store)
    crafted = Crafted.read(store)
    if request.param == "one shard":
        crafted.shard()
        crafted = Crafted.read(crafted.write(restate=True))
    again = crafted.clone().write()
    report = ckptstore.verify(again, deep=True)
    assert report.ok, report.damage
    assert loadable(again) == (list(report.restorable), {})
    return request.param, crafted


def loadable(store: ckptstore.Store) -> tuple[list[str], dict[str, ckptstore.CkptError]]:
    """REFs of the checkpoints that load with the state hash of the log, and the errors of the others."""
    right, wrong = [], {}
    for node, entry in sorted(store.view().catalog.checkpoints.items()):
        ref = f"{node[1]}@{node[0]}"
        try:
            store.load(ref, framework="numpy")
            with opened(store.journal, ref) as found:
                entries = [
                    replace(
                        chain.tensor,
                        chunks=tuple(
                            replace(chunk, decoded_hash=checksums.chunk_hash(data.data))
                            for chunk, (_, data) in zip(chain.tensor.chunks, iterate_chain(chain), strict=True)
                        ),
                    )
                    for chain in found.chains.values()
                ]
                assert checksums.state_hash(jsontext.dumps(found.merged), state_parts(entries)) == entry.state
            right.append(ref)
        except ckptstore.CkptError as error:
            wrong[ref] = error
    return right, wrong


DECODED = re.compile(r"chunk \d+|state digest|gives other bytes|stored bytes for a chunk")


def check(store: ckptstore.Store, where: Any) -> bool:
    """Check the promise; returns whether `verify` reported something."""
    try:
        shallow, deep = ckptstore.verify(store), ckptstore.verify(store, deep=True)
    except ckptstore.CkptError:
        return True  # reported, and more loudly
    right, wrong = loadable(store)
    assert not deep.ok or not wrong, (where, wrong)
    assert deep.ok <= shallow.ok, where
    # Only errors that cannot be known without decoding may be left to ``deep``.
    assert not shallow.ok or all(DECODED.search(str(error)) for error in wrong.values()), (where, wrong)
    # If a checkpoint has two encodings, `verify` accepts either, and a load takes the cheaper one.
    double = {f"{node[1]}@{node[0]}" for node, edges in store.view().catalog.encodings.items() if len(edges) > 1}
    assert set(deep.restorable) - double == set(right) - double, (where, wrong, deep.damage)
    return not deep.ok


@pytest.mark.filterwarnings("ignore::ckptstore.LossyWarning")  # a log may say this of any checkpoint
@pytest.mark.parametrize("kind", ["record", "header", "document", "index", "restated"])
def test_verified_checkpoints_load(valid: tuple[str, Crafted], kind: str) -> None:
    name, crafted = valid
    chance = random.Random(f"{name} {kind}" + os.environ.get("CRAFTED_SEED", ""))
    kinds = ("document", "index") if kind == "restated" else (kind,)
    places = [place for place in crafted.places() if place[0] in kinds]
    if not places:
        pytest.skip("packed segments have no tensors in their header, and plain ones no index")
    # Most changes of values that the log's state hash covers have no effect once the hash is changed, too.
    demanded = 0 if kind == "restated" else TRIALS // 3 + 1
    reported = tried = 0
    while tried < TRIALS or reported < demanded:
        assert tried < 10 * TRIALS, f"only {reported} of {tried} changes were reported"
        what, key, place = chance.choice(places)
        changed = crafted.clone()
        if not mutate(chance, changed.text(what, key), place):
            continue
        tried += 1
        try:
            store = changed.write(restate=kind == "restated")
        except ckptstore.CkptError:
            continue  # nothing to describe
        reported += check(store, (name, what, key, place))


def test_payloads_that_fit_and_lead_elsewhere(valid: tuple[str, Crafted]) -> None:
    """Every stored byte is as it was stored, and a load gives wrong bytes, or none: ``deep`` finds it."""
    name, crafted = valid
    chance = random.Random(name)
    packed = [key for key, segment in crafted.segments.items() if segment.index is not None and segment.payload]
    for _ in range(TRIALS if packed else 0):
        changed = crafted.clone()
        segment = changed.segments[chance.choice(packed)]
        at = chance.randrange(len(segment.payload))
        segment.spoil(at)
        store = changed.write()
        assert check(store, (name, at))
        assert ckptstore.verify(store, deep=True).lost


def _row(crafted: Crafted, step: int, name: str) -> tuple[dict[str, Any], int]:
    """The index that holds a tensor of a step, and its entry's path there."""
    for segment in crafted.segments.values():
        if segment.document["steps"] == [step]:
            assert segment.index is not None
            names = [segment.index["tensors"][row][0] for row in segment.index["tensor"]]
            return segment.index, names.index(name)
    raise AssertionError(step)


def _document(crafted: Crafted, step: int) -> dict[str, Any]:
    return next(one.document for one in crafted.segments.values() if one.document["steps"] == [step])


def _codec(crafted: Crafted, step: int, name: str, codec: str | None, **params: Any) -> None:
    """Another codec, or other parameters, for one tensor; the hash of the decoded bytes is unchanged."""
    index, place = _row(crafted, step, name)
    found, before = index["codecs"][index["codec"][place]]
    index["codecs"].append([codec or found, {**({} if codec else before), **params}])
    index["codec"][place] = len(index["codecs"]) - 1


def _spec(crafted: Crafted, step: int, name: str, place: int, value: Any) -> None:
    """Another name, dtype or shape of a tensor."""
    index, entry = _row(crafted, step, name)
    index["tensors"][index["tensor"][entry]][place] = value


def _tree(crafted: Crafted, step: int, name: str, value: Any) -> None:
    index, _ = _row(crafted, step, "w")
    index["trees"][str(step)][name] = value


def _renamed(crafted: Crafted) -> None:
    """The base has a tensor of another name; its state has the new name, too."""
    _spec(crafted, 1, "counts", 0, "other")
    _tree(crafted, 1, "counts", {"$a": "other"})


def _decoded(crafted: Crafted) -> None:
    index, _ = _row(crafted, 2, "w")
    index["decoded"] = ("0" if index["decoded"][0] != "0" else "1") + index["decoded"][1:]


def _unknown(crafted: Crafted) -> None:
    index, _ = _row(crafted, 2, "w")
    index["decoded"] = "-" * 16 + index["decoded"][16:]


def _encoding(crafted: Crafted, step: int) -> dict[str, Any]:
    return next(
        edge for slot in crafted.slots.values() for edge in slot.get("encodings", ()) if edge["checkpoint"][1] == step
    )


def _twice(crafted: Crafted) -> None:
    _encoding(crafted, 2)["segments"] *= 2


def _second_tree(crafted: Crafted) -> None:
    """A second segment of the same step that holds no tensor, but a tree."""
    (key,) = [key for key, one in crafted.segments.items() if one.document["steps"] == [2]]
    (slot,) = [slot for slot in crafted.slots.values() if slot.get("segments", [{}])[0].get("id", "?") in key]
    more = crafted.clone().segments[key]
    assert more.index is not None
    more.document["segment"], more.payload = OTHER, b""
    more.index |= {"tensor": [], "codec": [], "length": [], "counts": [0], "stored": "", "decoded": ""}
    more.index.pop("digests", None)
    crafted.segments[key.rpartition("/")[0] + f"/{OTHER}.safetensors"] = more
    slot["segments"].append({**slot["segments"][0], "id": OTHER})
    _encoding(crafted, 2)["segments"].append(OTHER)


OTHER = "0" * 32
ALL = ("1@1", "2@1", "3@1")
BASE = "does not build 2@1 on 1@1, as the log says"
WRONG: dict[str, tuple[Callable[[Crafted], Any], bool, str, tuple[str, ...]]] = {
    "run": (lambda one: _document(one, 2).update(run=OTHER), False, "holds segment", ALL[1:]),
    "term": (lambda one: _document(one, 2).update(term=7), False, "holds segment", ALL[1:]),
    "segment": (lambda one: _document(one, 2).update(segment=OTHER), False, "holds segment", ALL[1:]),
    "base": (lambda one: _document(one, 2)["bases"][0].__setitem__(2, OTHER), False, BASE, ALL[1:]),
    "no base": (lambda one: _document(one, 2).update(bases=[None]), False, BASE, ALL[1:]),
    "no row of bases": (lambda one: _document(one, 2).update(bases=[]), False, "one for each step", ALL[1:]),
    "another term's step": (lambda one: _document(one, 2).update(terms=[2]), False, BASE, ALL[1:]),
    "no tree": (lambda one: _row(one, 2, "w")[0]["trees"].clear(), False, "0 trees", ("2@1",)),
    "two trees": (_second_tree, False, "2 trees", ("2@1",)),
    "no state": (lambda one: _tree(one, 2, "step", {"$no": 1}), True, "unknown tag", ("2@1",)),
    "another value": (lambda one: _tree(one, 2, "step", 7), False, "another state", ("2@1",)),
    "another hash": (_decoded, False, "another state", ("2@1",)),
    "no hash": (_unknown, False, "hashes of its decoded chunks", ("2@1",)),
    "a tensor too many": (lambda one: _tree(one, 2, "more", {"$a": "more"}), False, "lack tensor 'more'", ("2@1",)),
    "unknown codec": (lambda one: _codec(one, 2, "w", "nope"), False, "unknown codec", ALL[1:]),
    "unknown word": (lambda one: _codec(one, 2, "w", None, word=3), False, "'w'", ALL[1:]),
    "no master": (lambda one: _codec(one, 3, "copy", None, of="no"), False, "derived from 'no'", ("3@1",)),
    "wrong master": (lambda one: _codec(one, 3, "copy", None, of="counts"), False, "another dtype or shape", ("3@1",)),
    "from nothing": (lambda one: _codec(one, 1, "counts", "sub", word=2), False, "builds on nothing", ALL),
    "base without it": (_renamed, True, "'counts' of 2@1 builds on 1@1, which has no U16", ALL[1:]),
    "another shape": (lambda one: _spec(one, 1, "counts", 2, [2, 1000]), True, "has no U16", ALL[1:]),
    "another dtype": (lambda one: _spec(one, 1, "counts", 1, "I16"), True, "has no U16", ALL[1:]),
}


@pytest.fixture(scope="module")
def deltas() -> Crafted:
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    _deltas(store)
    crafted = Crafted.read(store)
    index, place = _row(crafted, 3, "copy")
    assert index["codecs"][index["codec"][place]][0] == "derive"
    return crafted


@pytest.mark.parametrize("how", WRONG)
def test_refusals_of_loads_are_reported_without_decoding(deltas: Crafted, how: str) -> None:
    change, restate, reason, lost = WRONG[how]
    crafted = deltas.clone()
    change(crafted)
    store = crafted.write(restate=restate)
    report = ckptstore.verify(store)
    assert len(report.damage) == 1, report.damage
    assert reason in report.damage[0].what
    assert report.lost == report.damage[0].checkpoints == lost
    right, wrong = loadable(store)
    assert tuple(right) == report.restorable
    assert tuple(wrong) == lost
    assert any(
        reason in str(error) or "base has" in str(error) or "begins with" in str(error) for error in wrong.values()
    )


def test_an_encoding_that_names_a_segment_twice_leads_nowhere(deltas: Crafted) -> None:
    """The log itself shows it, for each checkpoint that is lost; and the segment would be read twice (SPEC 7.4)."""
    crafted = deltas.clone()
    _twice(crafted)
    store = crafted.write(restate=False)
    report = ckptstore.verify(store)
    reason = f"an encoding of 2@1 names segment {_encoding(crafted, 2)['segments'][0]} twice"
    of_log = [one.what for one in report.damage if one.key.startswith("log/")]
    assert of_log == [f"checkpoint {ref} cannot be restored: {reason}" for ref in ALL[1:]]
    assert ["is in two segments" in one.what for one in report.damage] == [False, False, True]
    assert report.lost == ALL[1:]
    right, wrong = loadable(store)
    assert tuple(right) == report.restorable == ALL[:1]
    assert {ref: reason in str(error) for ref, error in wrong.items()} == dict.fromkeys(ALL[1:], True)


@pytest.mark.parametrize("how", ["copy", "sync"])
def test_nothing_is_added_to_a_copy_that_has_another_state_of_the_name(
    deltas: Crafted, tmp_path: Path, how: str
) -> None:
    """Of the very same term. It is refused at once: no other process is at work there."""
    place = tmp_path / "place"
    getattr(deltas.clone().write(), how)(place)
    before = [info.state for info in ckptstore.open(place).checkpoints()]
    crafted = deltas.clone()
    _tree(crafted, 2, "step", 7)
    other = crafted.write(restate=True)
    with pytest.raises(UsageError, match="its 2@1 is another state"):
        getattr(other, how)(place)
    assert [info.state for info in ckptstore.open(place).checkpoints()] == before


@pytest.mark.parametrize(("how", "form"), [("another value", "full"), ("run", "stored"), ("term", "stored")])
def test_segments_that_contradict_the_log_are_not_copied(deltas: Crafted, tmp_path: Path, how: str, form: Any) -> None:
    crafted = deltas.clone()
    change, restate, reason, _ = WRONG[how]
    change(crafted)
    store = crafted.write(restate=restate)
    with pytest.raises(CorruptSegmentError, match=reason):
        store.copy(tmp_path / "copy", ["2@1"], form=form)
    assert not (tmp_path / "copy/FORMAT").exists()
    assert store.copy(tmp_path / "other", ["1@1"], form=form).checkpoints == ("1@1",)
