"""`repair`: whatever is broken, every complete checkpoint is recovered, bit for bit, and the others are named."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import CorruptLogError, CorruptSegmentError, ReadOnlyError, Repaired, StoreNotFoundError, UsageError
from ckptstore.backends.local_disk.directio import FileSink
from ckptstore.log import fold_writer
from tests.forms import in_turn, short_or
from tests.maintenance.stores import bits, broken, flip, grown, segments, states
from tests.restore.twofold import twofold

GOLDEN = Path(__file__).parents[1] / "golden/conformance"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repair") / "store"
    grown(root)
    return root


@pytest.fixture(scope="module")
def wanted(source: Path) -> dict[str, Any]:
    return states(ckptstore.open(source))


def check(root: Path, done: Repaired, wanted: dict[str, Any]) -> None:
    """The new store is clean; it has the kept checkpoints, unchanged; kept and lost are all that existed."""
    report = ckptstore.verify(root, deep=True)
    assert report.ok
    assert report.restorable == done.kept
    assert (report.orphans, report.strangers) == ((), ())
    assert states(ckptstore.open(root)) == {ref: wanted[ref] for ref in done.kept}
    assert {*done.kept, *done.lost} == wanted.keys()


def key_of(source: Path, ref: str) -> str:
    return ckptstore.open(source).describe(ref)[-1][0].key


def slots(root: Path) -> list[Path]:
    return sorted((root / "log").iterdir())


# -- the log


def test_an_intact_store_is_copied(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    done = ckptstore.repair(source, tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert (done.log, done.lost, done.found, done.damage, done.latest) == ("whole", {}, (), (), "20@4")
    before, after = ckptstore.open(source), ckptstore.open(tmp_path / "new")
    assert after.checkpoints() == before.checkpoints()
    assert (after.terms(), after.tags()) == (before.terms(), before.tags())


def test_without_its_log_a_store_is_made_again_from_segments(
    source: Path, tmp_path: Path, wanted: dict[str, Any]
) -> None:
    old = broken(source, tmp_path / "old", lambda root: shutil.rmtree(root / "log"))
    done = ckptstore.repair(old, tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert (done.log, done.lost, done.found, done.latest) == ("gone", {}, done.kept, "20@4")
    assert {"5@1", "20@4"} <= set(done.unproven)  # nothing builds on them
    assert not {"1@1", "4@1", "17@3"} & set(done.unproven)
    store = ckptstore.open(tmp_path / "new")
    for before, after in zip(ckptstore.open(source).checkpoints(), store.checkpoints(), strict=True):
        assert replace(before, tags=(), metadata={}, extra={}) == replace(after, extra={})
    assert [one.parent for one in store.terms()] == [None, "4@1", "6@2", "18@3"]
    with store.writer() as writer:  # a run can continue in the store
        writer.save({"n": 21}, 21)
    assert store.load("latest") == {"n": 21}


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_without_format(source: Path, tmp_path: Path, wanted: dict[str, Any], how: str) -> None:
    old = broken(source, tmp_path / "old", lambda root: (root / "FORMAT").unlink())
    if how == "damaged":
        (old / "FORMAT").write_text("nonsense")
    done = ckptstore.repair(old, tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert (done.run, done.log, done.found) == (ckptstore.open(source).run, "whole", ())
    assert [one.key for one in done.damage] == ["FORMAT"]


def test_rules_of_retention_are_kept_where_the_log_has_them(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store").writer(keep=["last:2"]) as writer:
        for step in range(1, 5):
            writer.save({"n": step}, step)
    (tmp_path / "store" / "FORMAT").unlink()
    ckptstore.repair(tmp_path / "store", tmp_path / "new")
    found = ckptstore.open(tmp_path / "new")
    assert found.rules() == ("last:2",)
    assert [one.step for one in found.checkpoints()] == [3, 4]


def test_a_slot_lost_or_damaged(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    """The checkpoints that the slot promised are recovered from segments. (Tags that it set are not.)"""
    count = len(slots(source))
    for name, number in (("cut", 0), ("gone", count // 2), ("gone", count - 1)):
        damage = flip if name == "cut" else Path.unlink
        old = broken(source, tmp_path / f"{name}{number}", lambda root: damage(slots(root)[number]))  # noqa: B023
        new = tmp_path / f"new-{name}{number}"
        done = ckptstore.repair(old, new)
        check(new, done, wanted)
        assert done.lost == {}, (name, number)
        # A slot that is gone from the very end leaves no trace: it can only have had tags.
        assert done.log == ("whole" if number == count - 1 else "damaged"), (name, number)


def test_checkpoints_lost_with_the_end_of_the_log(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    """A copy that was taken while a writer continued: its log first, then its segments."""
    old = broken(source, tmp_path / "old", lambda root: [path.unlink() for path in slots(root)[-4:]])
    done = ckptstore.repair(old, tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert done.lost == {}
    assert set(done.found) == {"20@4"}


def test_a_copy_whose_segments_are_older_than_its_log(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    key = key_of(source, "20@4")
    old = broken(source, tmp_path / "old", lambda root: (root / key).unlink())
    done = ckptstore.repair(old, tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert done.lost == {"20@4": f"{key}: the segment is committed but missing"}
    assert done.tags == {"best": "20@4"}
    assert (done.latest, done.log) == ("19@4", "whole")


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose slots are folded and deleted, except anchors and OPENs."""
    root = tmp_path_factory.mktemp("repair") / "folded"
    store = ckptstore.open(root, create=True)
    text = (root / "FORMAT").read_bytes()
    from ckptstore.formats.history.record_text import decode_format, encode_format

    file = decode_format(text)
    (root / "FORMAT").write_bytes(encode_format(type(file)(run=file.run, anchor_every=4)))
    store = ckptstore.open(root)
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 30):
            writer.save({"n": step}, step, metadata={"loss": 0.5})
            if step in (10, 20, 28):
                fold_writer.fold(store.journal, store.view())
    fold_writer.trim(store.journal, store.view())
    assert len(slots(root)) < 25
    assert len(list((root / "fold").iterdir())) == 2
    return root


@pytest.mark.parametrize("gone", ["newer", "older", "both"])
def test_folds_deleted(folded: Path, tmp_path: Path, gone: str) -> None:
    def damage(root: Path) -> None:
        older, newer = sorted((root / "fold").iterdir())
        for path in {"newer": [newer], "older": [older], "both": [older, newer]}[gone]:
            path.unlink()

    wanted = states(ckptstore.open(folded))
    done = ckptstore.repair(broken(folded, tmp_path / "old", damage), tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert done.lost == {}
    store = ckptstore.open(tmp_path / "new")
    told = [info.metadata.get("loss") for info in store.checkpoints()]
    if gone == "both":
        assert done.log == "damaged"
        assert None in told  # known only from the fold and the deleted slots
        assert 0.5 in told
    else:
        assert (done.log, told) == ("whole", [0.5] * 29)


# -- segments


@pytest.mark.parametrize(("how", "log"), in_turn(["flipped", "cut", "missing", "empty", "foreign"], ["whole", "gone"]))
def test_damaged_segments_cost_what_needs_them(
    source: Path, tmp_path: Path, wanted: dict[str, Any], how: str, log: str
) -> None:
    key = key_of(source, "4@1")  # 5@1 and 6@1 build on it; term 2 continues from it
    old = broken(source, tmp_path / "old", lambda root: shutil.rmtree(root / "log") if log == "gone" else None)
    path = old / key
    if how == "flipped":
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        flip(path, header + 5)
    elif how == "foreign":
        path.write_bytes((old / key_of(source, "2@1")).read_bytes())
    elif how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 9000 if how == "cut" else 0])
    done = ckptstore.repair(old, tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert set(done.lost) == {"4@1", "5@1", "6@1"}
    assert done.lost["5@1"] == "what it builds on is lost: 4@1"
    assert (done.lost_bases["5@1"], done.lost_bases.get("4@1")) == ("4@1", None)
    if log == "whole" or how == "flipped":
        assert key in done.lost["4@1"]
    assert ckptstore.open(tmp_path / "new").terms()[1].parent == "4@1"  # unchanged


def test_a_batch_that_is_damaged_in_the_middle_gives_what_is_before(
    source: Path, tmp_path: Path, wanted: dict[str, Any]
) -> None:
    store = ckptstore.open(source)
    entry, doc = store.describe("13@3")[-1]
    assert doc.steps == (12, 13, 14, 15)
    chunk = next(one for tensor in doc.tensors[14].values() for one in tensor.chunks if one.length)
    old = broken(source, tmp_path / "old", lambda root: flip(root / entry.key, chunk.offset))
    done = ckptstore.repair(old, tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert done.rewritten == ("12@3", "13@3")
    assert set(done.lost) == {f"{step}@3" for step in range(14, 19)}
    assert "is damaged" in done.lost["14@3"]
    assert done.lost["18@3"] == "what it builds on is lost: 17@3"
    assert done.latest == "20@4"
    assert ckptstore.open(tmp_path / "new").terms()[3].parent == "18@3"


def test_newly_written_segments_are_read_back(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A medium that stores other bytes than it was given: no store is made from that."""
    entry, doc = ckptstore.open(source).describe("13@3")[-1]
    chunk = next(one for tensor in doc.tensors[14].values() for one in tensor.chunks if one.length)
    old = broken(source, tmp_path / "old", lambda root: flip(root / entry.key, chunk.offset))
    seal, spoiled = FileSink.seal, []

    def bad(sink: FileSink, size: int) -> None:
        if not spoiled:  # new segments come first
            spoiled.append(size)
            sink.write(4096, memoryview(bytes(512)))
        seal(sink, size)

    monkeypatch.setattr(FileSink, "seal", bad)
    with pytest.raises(CorruptSegmentError, match="checksum mismatch"):
        ckptstore.repair(old, tmp_path / "new")
    assert len(spoiled) == 1
    assert not (tmp_path / "new" / "FORMAT").exists()


@pytest.mark.slow
def test_few_of_many_segments_damaged(tmp_path: Path) -> None:
    """Three of fifty (in the long form of a hundred), at random: flipped, cut, deleted. Checkpoints that do not build
    on these are recovered."""
    store = ckptstore.open(tmp_path / "old")
    rng = random.Random(5)
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, short_or(51, 101)):
            writer.save({"n": step, "text": "x" * (step % 7)}, step)
    wanted = states(store)
    refs = {store.describe(ref)[0][0].id: ref for ref in wanted}
    hit = rng.sample(list(segments(tmp_path / "old")), 3)
    flip(hit[0], 40)
    hit[1].write_bytes(hit[1].read_bytes()[:-1])
    hit[2].unlink()
    done = ckptstore.repair(tmp_path / "old", tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert set(done.lost) == {refs[path.stem] for path in hit}
    assert all(path.stem in done.lost[refs[path.stem]] for path in hit)


@pytest.mark.parametrize("step", [1, 3])
def test_the_intact_one_of_two_encodings_keeps_a_checkpoint(tmp_path: Path, step: int) -> None:
    """Step 1 is the base of all others, which are decoded on whichever of its fulls is left."""
    store = twofold(tmp_path / "old", f"{step}@1")
    wanted = states(store)
    edges = store.view().catalog.encodings[1, step]
    assert len(edges) == 2
    for number, edge in enumerate(edges):
        old = tmp_path / f"old{number}"
        shutil.copytree(tmp_path / "old", old)
        flip(old / store.view().catalog.segments[edge.segments[0]].key)
        done = ckptstore.repair(old, tmp_path / f"new{number}")
        check(tmp_path / f"new{number}", done, wanted)
        assert done.lost == {}


@pytest.mark.parametrize("name", ["codecs", "lossy-base", "manifests", "merged", "parts", "shards", "steps"])
def test_every_form_of_segments_makes_its_log_again(tmp_path: Path, name: str) -> None:
    old = Path(shutil.copytree(GOLDEN / name, tmp_path / "old"))
    before = {info.ref: info for info in ckptstore.open(GOLDEN / name).checkpoints()}
    shutil.rmtree(old / "log")
    done = ckptstore.repair(old, tmp_path / "new")
    assert ckptstore.verify(tmp_path / "new", deep=True).ok
    after = {info.ref: info for info in ckptstore.open(tmp_path / "new").checkpoints()}
    assert (set(done.kept), done.lost) == (set(after), {})
    for ref, info in before.items():
        for member in ("state", "lossy", "kind", "base"):
            assert getattr(after[ref], member) == getattr(info, member), (ref, member)


@pytest.mark.parametrize("name", ["ro-compat", "features-write", "unknown-members"])
def test_a_newer_versions_data_is_left_to_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReadOnlyError, match="only a newer version knows"):
        ckptstore.repair(GOLDEN / name, tmp_path / "new")
    with pytest.raises(ReadOnlyError, match="only a newer version knows"):
        ckptstore.open(GOLDEN / name).copy(tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- several stores, other things


def test_two_stores_in_one_folder(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    other = ckptstore.open(tmp_path / "other")
    with other.writer(poll_seconds=None) as writer:
        for step in (1, 2, 3):
            writer.save({"other": step}, step)
    theirs = states(other)
    old = broken(source, tmp_path / "old", lambda root: None)
    shutil.copytree(tmp_path / "other", old, dirs_exist_ok=True)  # FORMAT and the first slots are the other's now
    ours = ckptstore.open(source).run
    with pytest.raises(UsageError, match=f"objects of 2 runs.*{ours}"):
        ckptstore.repair(old, tmp_path / "new")
    with pytest.raises(UsageError, match="names 0 of the runs"):
        ckptstore.repair(old, tmp_path / "new", run="zz")
    assert not (tmp_path / "new").exists()
    done = ckptstore.repair(old, tmp_path / "new", run=ours[:8])
    check(tmp_path / "new", done, wanted)
    assert (done.run, done.lost) == (ours, {})
    done = ckptstore.repair(old, tmp_path / "new2", run=other.run)
    check(tmp_path / "new2", done, theirs)
    assert (done.run, done.kept, done.lost) == (other.run, ("1@1", "2@1", "3@1"), {})


def test_a_segment_under_anothers_name_is_reported(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    def twice(root: Path) -> None:
        first = next(segments(root))
        shutil.copy(first, first.with_name(f"{'5' * 32}.safetensors"))

    done = ckptstore.repair(broken(source, tmp_path / "old", twice), tmp_path / "new")
    check(tmp_path / "new", done, wanted)
    assert done.lost == {}
    told = f"holds segment {next(segments(source)).stem} of term 1"
    assert [one.what for one in done.damage if "5555" in one.key] == [told]


def test_nothing_to_repair(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("hello")
    with pytest.raises(StoreNotFoundError, match="nothing here can be read"):
        ckptstore.repair(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_where_to(source: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").write_text("important")
    with pytest.raises(UsageError, match="not empty"):
        ckptstore.repair(source, taken)
    assert [path.name for path in taken.iterdir()] == ["thesis.tex"]
    ckptstore.repair(source, tmp_path / "new")
    with pytest.raises(UsageError, match="a store already"):
        ckptstore.repair(source, tmp_path / "new")
    with pytest.raises(UsageError, match="outside of"):
        ckptstore.repair(source, source / "repaired")
    with pytest.raises(UsageError, match="outside of"):
        ckptstore.repair(source, source)


def test_the_damaged_store_is_never_changed(source: Path, tmp_path: Path) -> None:
    def damage(root: Path) -> None:
        flip(slots(root)[4])
        flip(root / key_of(source, "19@4"))

    old = broken(source, tmp_path / "old", damage)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in old.rglob("*") if path.is_file()}
    ckptstore.repair(old, tmp_path / "new")
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in old.rglob("*") if path.is_file()}
    assert after == before


# -- SIGKILL

KILLED = """
import os, signal, sys
import ckptstore
left = int(sys.argv[3])
def progress(done, total):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
{call}
"""


def killed(call: str, source: Path, target: Path, left: int, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", KILLED.format(call=call), str(source), str(target), str(left)],
        env={**os.environ, **environment},
        check=False,
        timeout=240,
    )
    return done.returncode


@pytest.mark.slow
def test_killed_anywhere_the_same_call_continues(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    entry, doc = ckptstore.open(source).describe("13@3")[-1]
    chunk = next(one for tensor in doc.tensors[14].values() for one in tensor.chunks if one.length)

    def damage(root: Path) -> None:
        flip(slots(root)[3])
        flip(root / entry.key, chunk.offset)

    old, new = broken(source, tmp_path / "old", damage), tmp_path / "new"
    call = "ckptstore.repair(sys.argv[1], sys.argv[2], progress=progress)"
    for place in ("save.sealed", "create.linked:2", "create.synced:2"):
        assert killed(call, old, new, 0, CKPTSTORE_CRASH_AT=place) == -signal.SIGKILL, place
        assert not (new / "FORMAT").exists()
        if (new / "log").exists():
            with pytest.raises(StoreNotFoundError, match="not finished"):
                ckptstore.open(new).checkpoints()
    with pytest.raises(UsageError, match="unfinished copy of something else"):
        ckptstore.repair(source, new)
    done = ckptstore.repair(old, new)
    check(new, done, wanted)
    assert "12@3" in done.rewritten


def test_a_repaired_store_is_no_part_of_the_old_one(source: Path, tmp_path: Path) -> None:
    """The old one's `latest` was an error; the new one's is the newest that is left, as `Repaired` says."""
    old = broken(source, tmp_path / "old", lambda root: flip(slots(root)[-3]))
    with pytest.raises(CorruptLogError):
        ckptstore.open(old).load("latest")
    done = ckptstore.repair(old, tmp_path / "new")
    assert (
        bits(ckptstore.open(tmp_path / "new").load("latest", framework="numpy"))
        == states(ckptstore.open(tmp_path / "new"))[done.latest or ""]
    )
