"""The conformance set (`tools.conformance`): test stores for a reader in any language, and their contents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zstandard

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, Update
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.formats import codecs, optim
from ckptstore.formats.checksums import chunk_hash, header_hash, xxh3_128
from ckptstore.formats.dtypes import DTYPES
from ckptstore.formats.history import record_text
from ckptstore.formats.history.record_text import encode_format, seal
from ckptstore.formats.history.records import (
    FORMAT_KEY,
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    FormatFile,
    SegmentEntry,
    slot_key,
)
from ckptstore.formats.jsontext import dumps
from ckptstore.formats.segment_files.layout import TensorSpec
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry, header_length, parse
from ckptstore.formats.segment_files.segment_steps import StepEncoding
from ckptstore.formats.states.state import tensor_names
from ckptstore.log import fold_writer
from ckptstore.log.journal import Journal
from ckptstore.log.term import Term, open_term
from ckptstore.maintenance.merge import merge
from ckptstore.segments.plain_segments import write_full
from ckptstore.write.delta_encoding import write_packed
from ckptstore.write.steps.batch_segments import write_batch
from tools.conformance.ours import answer
from tools.golden import make_codecs, make_steps
from tools.golden.make_ranks import ranks
from tools.golden.make_segments import RUN, packed, plain, state_of
from tools.golden.make_shards import broken, shards
from tools.golden.make_slips import SLIPS
from tools.golden.make_store import Run
from tools.golden.still import MOMENT, still

_NONCE = "0" * 31


def of_segments(folder: Path, files: Mapping[str, bytes]) -> None:
    """A store of one term with the given segments: each is one checkpoint."""
    backend = LocalBackend(folder)
    fmt = FormatFile(RUN)
    backend.create(FORMAT_KEY, encode_format(fmt))
    term: Term = open_term(Journal(backend, fmt), None, {"host": "golden"})
    for number, data in enumerate(files.values()):
        header = data[: header_length(data, len(data), "golden")]
        doc = parse(header, len(data), "golden", lambda at, length, data=data: data[at : at + length])
        path = folder / f"seg/{doc.term:010d}/{doc.segment}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        segment = SegmentEntry(doc.segment, doc.term, len(data), len(header), header_hash(header))
        term.commit(_commit(doc, segment, f"{_NONCE}{number}"))


def _commit(doc: SegmentDoc, segment: SegmentEntry, nonce: str) -> CommitRecord:
    ((step, told),) = doc.encodings.items()
    doc = named(doc)
    tensors = doc.tensors[step].values()
    nbytes = sum(entry.nbytes for entry in tensors)
    checkpoint = CheckpointEntry(doc.term, step, state_of(doc), MOMENT, len(tensors), nbytes)
    edge = Encoding(checkpoint.node, told.kind, told.base, (doc.segment,), told.lossy, segment.size)
    return CommitRecord(doc.term, nonce, segments=(segment,), checkpoints=(checkpoint,), encodings=(edge,))


def named(doc: SegmentDoc) -> SegmentDoc:
    """Only the tensors that the tree of its one step names."""
    (step,) = doc.steps
    names = tensor_names(doc.trees[step])
    return replace(doc, tensors={step: {name: doc.tensors[step][name] for name in names}})


def _codecs(folder: Path) -> None:
    found = make_codecs.examples()
    base = make_codecs.base_segment(found)
    of_segments(folder, {"base": base, "delta": make_codecs.delta_segment(found)})


def _steps(folder: Path) -> None:
    found = list(make_steps.examples())
    of_segments(folder, {"base": make_steps.base_segment(found), "steps": make_steps.step_segment(found)})


def _small(folder: Path) -> ckptstore.Store:
    """Five checkpoints: a full, and deltas on it."""
    store = ckptstore.open(folder, create=True)
    weight = np.arange(600, dtype="<f4") / np.float32(7)
    with store.writer(deltas=DeltaOptions(interval=5), poll_seconds=None) as writer:
        for step in range(1, 6):
            weight[step::50] += np.float32(step)
            writer.save({"weight": weight, "step": step, "odd": {"$": (1, None)}}, step)
    return store


def slot_files(folder: Path) -> list[Path]:
    return sorted((folder / "log").iterdir())


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A sealed text with replaced members."""
    value = json.loads(path.read_bytes()[:-34])
    change(value)
    path.write_bytes(seal(value))


def make_folded(folder: Path) -> None:
    backend, fmt = LocalBackend(folder), FormatFile(RUN, anchor_every=4)
    backend.create(FORMAT_KEY, encode_format(fmt))
    store = _small(folder)
    for step in (6, 7, 8, 9):
        with store.writer(poll_seconds=None) as writer:
            writer.save({"step": step}, step)
        fold_writer.fold(Journal(backend, fmt), store.view())
    fold_writer.trim(Journal(backend, fmt), store.view())
    for path in slot_files(folder)[-1:]:
        assert len(slot_files(folder)) < int(path.name)  # some are missing


def _incompat(folder: Path) -> None:
    _small(folder)
    rewritten(slot_files(folder)[-1], lambda slot: slot.update(incompat=["later"]))


def _ro_compat(folder: Path) -> None:
    _small(folder)
    rewritten(slot_files(folder)[-1], lambda slot: slot.update(ro_compat=["later"]))


def _unknown(folder: Path) -> None:
    _small(folder)
    rewritten(slot_files(folder)[-1], lambda slot: slot.update(later={"more": [1, 2.5, None]}))
    rewritten(folder / FORMAT_KEY, lambda text: text.update(later=True))


def _features(operation: str) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        _small(folder)
        rewritten(folder / FORMAT_KEY, lambda text: text.update(features={operation: ["later"]}))

    return made


def _major(folder: Path) -> None:
    _small(folder)
    rewritten(folder / FORMAT_KEY, lambda text: text.update(major=2))


def _damaged_slot(folder: Path) -> None:
    store = _small(folder)
    with store.writer(parent=5, poll_seconds=None) as writer:
        writer.save({"step": 6}, 6)
    flip(folder / slot_key(3), 100)


def _damaged_segment(folder: Path) -> None:
    store = _small(folder)
    (segment,) = store.checkpoint(4).segments
    (path,) = folder.glob(f"seg/*/{segment}.safetensors")
    flip(path, 4096)


def _unknown_rule(folder: Path) -> None:
    found = [example for example in make_steps.examples() if example.group.leader.startswith("0.9.fma.")][:1]
    base, steps = make_steps.base_segment(found), make_steps.step_segment(found, change=_other_version)
    of_segments(folder, {"base": base, "steps": steps})


def _other_version(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "rule": {**params["rule"], "rule": "adam/2"}}


def _parts(folder: Path) -> None:
    """Encodings of several segments: fulls, deltas, and steps of an optimizer."""
    store = ckptstore.open(folder, create=True)
    run = Run()
    limits = [mock.patch.dict(write.__kwdefaults__, limit=6000) for write in (write_full, write_packed, write_batch)]
    with limits[0], limits[1], limits[2]:
        with store.writer(deltas=DeltaOptions(interval=2), poll_seconds=None) as writer:
            for step in (1, 2):
                run.train("none")
                writer.save(run.state(), step)
        with store.writer(diffs=DiffOptions(batch=2, seconds=None), poll_seconds=None) as writer:
            for step in (3, 4, 5):
                updates = run.train("none")
                writer.save_async(run.state(), step, updates=updates)
    edges = store.view().catalog.encodings
    assert all(len(edges[info.term, info.step][0].segments) > 1 for info in store.checkpoints() if info.step != 4)


def _large(folder: Path) -> None:
    """Tensors of several chunks and blocks, nearly all of them zeros."""
    store = ckptstore.open(folder, create=True)
    weight, halves = np.zeros(5_000_000, "<f4"), np.zeros(9_000_000, "<u2")
    rule = optim.SGD(momentum=0.9)
    buffer = np.zeros_like(weight)
    with store.writer(
        deltas=DeltaOptions(interval=9, compress_fulls=True), diffs=DiffOptions(full_every=3), poll_seconds=None
    ) as writer:
        for step in (1, 2, 3):
            where = np.arange(77_777 * step, len(weight), 1_234_567)
            gradient = optim.SparseGradient(where, where.astype("<f4"), len(weight))
            numbers = optim.Step(count=step, lr=1e-3)
            optim.advance(rule.rule(numbers), [weight, buffer], gradient.dense())
            halves[step::1_111_111] += 1
            updates = [Update(("weight", "buffer"), rule, numbers, gradient)]
            state = {"weight": weight.copy(), "buffer": buffer.copy(), "halves": halves.copy()}
            writer.save(state, step, updates=updates if step > 1 else ())
    halves[-3:] = 7
    with store.writer(deltas=DeltaOptions(interval=9, compress_fulls=True), poll_seconds=None) as writer:
        for step in (4, 5):
            halves[-step] = step
            writer.save({"halves": halves.copy()}, step)


def _retired(folder: Path) -> None:
    """The base of all the others is no longer promised; the segment of another is dropped."""
    store = _small(folder)
    dropped = store.checkpoint(3).segments
    backend = LocalBackend(folder)
    term = open_term(Journal(backend, store.format), store.view().catalog.checkpoints[1, 5].id, {"host": "golden"})
    term.commit(CommitRecord(term.number, retires=((1, 1), (1, 3)), drops=dropped, tags={"two": (1, 2)}))


def _retired_folded(folder: Path) -> None:
    _retired(folder)
    store = ckptstore.open(folder)
    fold_writer.fold(store.journal, store.view())
    for path in slot_files(folder)[1:-1]:
        path.write_bytes(b"not needed: the fold has it")


def _back(folder: Path) -> None:
    """An empty term from an earlier step, which it retires."""
    store = _small(folder)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 6}, 6)
    parent = store.view().catalog.checkpoints[1, 3].id
    term = open_term(Journal(LocalBackend(folder), store.format), parent, {"host": "golden"})
    term.commit(CommitRecord(term.number, retires=((1, 3),)))


def _back_damaged(folder: Path) -> None:
    """The same; a COMMIT of the term in which latest must search is damaged."""
    _back(folder)
    flip(folder / slot_key(2), 100)


def _settled(folder: Path) -> None:
    """An empty term, whose parent is still promised, behind damage."""
    store = _small(folder)
    store.writer(parent=4, poll_seconds=None).close()
    flip(folder / slot_key(5), 100)


def _overtaken(folder: Path) -> None:
    """Step 2 was committed after step 3, whose COMMIT is damaged."""
    files = {}
    for step in (1, 3, 2):
        spec = TensorSpec("weight", "F32", (8,))
        told = {step: StepEncoding(1, "full")}
        trees = {step: {"weight": {"$a": "weight"}}}
        doc = SegmentDoc(RUN, 1, f"{step}" * 32, told, parents={1: None}, trees=trees)
        files[f"{step}"] = plain(doc, [spec], digests=True)[0]
    of_segments(folder, files)
    flip(folder / slot_key(2), 100)


def _last_slot(**members: Any) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        _small(folder)
        rewritten(slot_files(folder)[-1], lambda slot: slot.update(members))

    return made


def _end_folder(folder: Path) -> None:
    """A folder, with a file in it, where the newest fold ends."""
    make_folded(folder)
    path = folder / slot_key(ckptstore.open(folder).view().fold_seq)
    path.unlink()
    path.mkdir()
    (path / "x").write_bytes(b"no slot")


def _end_other(folder: Path) -> None:
    """Another record where the newest fold ends."""
    make_folded(folder)
    rewritten(folder / slot_key(ckptstore.open(folder).view().fold_seq), lambda slot: slot.update(later=1))


def _log_link(folder: Path) -> None:
    _small(folder)
    (folder / "log").rename(folder / "elsewhere")
    (folder / "log").symlink_to("elsewhere")


def _without_uses(folder: Path) -> None:
    found = make_codecs.examples()
    base = make_codecs.base_segment(found)
    of_segments(folder, {"base": base, "delta": _stripped(make_codecs.delta_segment(found))})


def _stripped(data: bytes) -> bytes:
    """A packed segment, as versions before format 1 wrote it."""
    size = header_length(data, len(data), "golden")
    members = json.loads(data[8:size])
    document = json.loads(members["__metadata__"]["ckptstore"])
    del document["uses"]
    members["__metadata__"]["ckptstore"] = dumps(document).decode()
    return data[:8] + dumps(members).ljust(size - 8) + data[size:]


def _merged(folder: Path) -> None:
    """Two steps have a second encoding each; the segments of the first are dropped, and gone."""
    store = _small(folder)
    merge(store.journal, "2@1..3@1", keep_steps=True, take_over=True)
    live = store.view().catalog.segments
    gone = [path for path in folder.glob("seg/*/*.safetensors") if path.stem not in live]
    for path in gone:
        path.unlink()
    assert gone


def _orphan(folder: Path) -> None:
    """A term without checkpoints, whose parent was promised by a damaged slot."""
    store = _small(folder)
    store.writer(parent=5, poll_seconds=None).close()
    flip(folder / slot_key(5), 100)


def _damage_after(folder: Path) -> None:
    _small(folder)
    flip(slot_files(folder)[-1], 100)


def _nothing(folder: Path) -> None:
    ckptstore.open(folder, create=True).writer(poll_seconds=None).close()


def _nothing_left(folder: Path) -> None:
    _nothing(folder)
    flip(folder / slot_key(0), 100)


def _lost(seq: int) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        store = _small(folder)
        with store.writer(parent=2, poll_seconds=None) as writer:
            for step in (6, 7):
                writer.save({"step": step}, step)
        (folder / slot_key(seq)).unlink()

    return made


def _lost_end(folder: Path) -> None:
    store = _small(folder)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 6}, 6)
    for path in slot_files(folder)[7:]:
        path.unlink()


def _gap(folder: Path) -> None:
    _small(folder)
    shutil.copyfile(folder / slot_key(0), folder / slot_key(9_999_999))


def _manifest(folder: Path) -> None:
    with mock.patch.object(record_text, "SLOT_LIMIT", 500):
        _small(folder)
    assert len(list(folder.glob("seg/*/*.json"))) > 1


def _manifest_lost(folder: Path) -> None:
    _manifest(folder)
    store = ckptstore.open(folder)
    manifests = store.view().catalog.manifests
    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 6}, 6)
    second, third = sorted(manifests, key=manifests.__getitem__)[1:3]
    (folder / f"seg/{1:010d}/{second}.json").unlink()
    flip(folder / f"seg/{1:010d}/{third}.json", 100)


def _fold_incompat(folder: Path) -> None:
    make_folded(folder)
    store = ckptstore.open(folder)
    (key,) = [key for key in store.backend.list("fold/") if f"{store.view().fold_seq:020d}" in key]
    head = len(b"ckptstore fold\n") + 33
    line, _, columns = zstandard.decompress((folder / key).read_bytes()[head:]).partition(b"\n")
    body = dumps(json.loads(line) | {"incompat": ["later"]}) + b"\n" + columns
    frame = zstandard.ZstdCompressor().compress(body)
    digest = xxh3_128(frame)
    (folder / key).unlink()
    target = folder / f"{key[: key.index('-')]}-{digest[:16]}"
    target.write_bytes(f"ckptstore fold\n{digest}\n".encode() + frame)


def _every_dtype(folder: Path) -> None:
    specs = [TensorSpec(f"all.{name}", name, (2, 3)) for name in DTYPES]
    specs += [TensorSpec("scalar", "C128", ()), TensorSpec("empty", "C64", (0, 5)), TensorSpec("wide", "BF16", (8, 16))]
    tree = {spec.name: {"$a" if row % 2 else "$t": spec.name} for row, spec in enumerate(specs)}
    doc = SegmentDoc(RUN, 1, "a" * 32, {1: StepEncoding(1, "full")}, parents={1: None}, trees={1: tree})
    of_segments(folder, {"plain": plain(doc, specs, digests=True)[0]})


def _lossy_base(folder: Path) -> None:
    """Two segments: a lossy one, and an exact delta on it."""
    below, above = np.arange(3000, dtype="<u4"), np.arange(3000, dtype="<u4") // 3 * 3
    base, doc = _word_segment(below, codecs.Planes(4), b"", 1, StepEncoding(1, "full", lossy=True))
    told = StepEncoding(1, "delta", CheckpointId(1, 1, state_of(named(doc))))
    delta, _ = _word_segment(above, codecs.Sub(4), below, 2, told)
    of_segments(folder, {"base": base, "delta": delta})


def _word_segment(
    words: Any, codec: codecs.Codec, base: Any, step: int, told: StepEncoding
) -> tuple[bytes, SegmentDoc]:
    """One tensor, and an identical one that the tree does not name."""
    data = codecs.as_bytes(words)
    stored = codecs.encode(codec, data, base).tobytes()
    chunk = Chunk(0, len(stored), len(data), chunk_hash(stored), chunk_hash(data))
    entries = [
        (TensorEntry(name, "U32", (len(words),), (chunk,), codec.name, codec.params), stored)
        for name in ("words", "ckptstore/more", "unnamed")
    ]
    doc = SegmentDoc(RUN, 1, f"{step}" * 32, {step: told}, parents={1: None}, trees={step: {"words": {"$t": "words"}}})
    return packed(doc, {step: entries})


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


STORES: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
    "codecs": ("every codec of 5.4 with all kinds of parameters, groups and pieces", _codecs),
    "steps": ("every rule, variant, encoding and form of gradient of 5.5", _steps),
    "folded": ("a log whose older slots are gone: a fold has what they said", make_folded),
    "damaged-slot": ("a COMMIT of the first term has a wrong bit; a second term goes on behind it", _damaged_slot),
    "damaged-segment": (
        "a chunk of step 4 has a wrong bit: it cannot be restored, and the others can",
        _damaged_segment,
    ),
    "unknown-rule": ("an optimizer step of arithmetic that is not known, adam/2", _unknown_rule),
    "unknown-members": ("members of FORMAT and of a slot that are not known: read", _unknown),
    "incompat": ("a COMMIT with an unknown feature in incompat: refused", _incompat),
    "ro-compat": ("a COMMIT with an unknown feature in ro_compat: read", _ro_compat),
    "features-read": ("FORMAT asks readers for an unknown feature: refused", _features("read")),
    "features-write": ("FORMAT asks writers for an unknown feature: read", _features("write")),
    "major-2": ("another major version: refused", _major),
    "parts": ("encodings of several segments each: fulls, deltas, steps of an optimizer", _parts),
    "large": ("tensors of several chunks and blocks: coded fulls, deltas, steps of an optimizer", _large),
    "every-dtype": ("a plain segment with every dtype", _every_dtype),
    "lossy-base": (
        "a lossy step, and a delta on it, which is not lossy; tensors that the tree does not name",
        _lossy_base,
    ),
    "retired": ("the base of the others is retired; another step is retired, and its segment dropped", _retired),
    "retired-folded": ("the same, of which only a fold tells", _retired_folded),
    "back": ("an empty term, which goes back, and retires its parent: latest is on the line of parents", _back),
    "merged": ("two steps in one segment, which replaces those that they had", _merged),
    "manifests": ("COMMITs in manifests", _manifest),
    "manifests-lost": ("one manifest is missing and one has a wrong bit; a second term goes on", _manifest_lost),
    "orphan": ("an empty term, whose parent was promised by a damaged slot: latest is an error", _orphan),
    "damage-after": ("the last slot is damaged: latest is an error", _damage_after),
    "lost-slot": ("a COMMIT of the first term is missing", _lost(3)),
    "lost-open": ("the OPEN of the second term is missing", _lost(7)),
    "lost-commit": ("the first COMMIT of the second term is missing", _lost(8)),
    "lost-end": ("the second term is missing, of which there is a segment: latest is an error", _lost_end),
    "empty": ("nothing was promised: latest is null", _nothing),
    "empty-damaged": ("nothing is left but a damaged slot: latest is an error", _nothing_left),
    "wide-gap": ("a slot lies far above all others: refused", _gap),
    "fold-incompat": ("the newest fold has an unknown feature in incompat: refused", _fold_incompat),
    "shards": ("tensors in shards: fulls, deltas, rounded copies, cut in four ways; values of each rank", shards),
    "shards-broken": ("shards that do not make up a tensor: each step but the first is refused", broken),
    "back-damaged": ("the same, and a slot of the term that is searched is damaged: latest is an error", _back_damaged),
    "settled": ("an empty term behind a damaged slot: its OPEN names the parent, which is latest", _settled),
    "overtaken": ("a step was committed after a higher one, whose slot is damaged: latest is an error", _overtaken),
    "closed-7": ("the last slot has closed: 7, which makes it damaged: latest is an error", _last_slot(closed=7)),
    "lacks-text": ('the last slot has lacks: "x", which makes it damaged: latest is an error', _last_slot(lacks="x")),
    "drops-null": ("the last slot has drops: null, which makes it damaged: latest is an error", _last_slot(drops=None)),
    "end-folder": ("a folder lies where the newest fold ends: read, the fold has what the slot said", _end_folder),
    "end-other": (
        "another record lies where the newest fold ends: that slot is damaged, latest is an error",
        _end_other,
    ),
    "log-link": ("log/ is a symbolic link: refused", _log_link),
    "without-uses": ("a packed segment without uses: read", _without_uses),
    "ranks": ("states of many ranks: other keys, orders of keys, lengths, kinds; what no rank reads", ranks),
    **SLIPS,
}


def _answers(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    about = "two lines of terms; fulls, deltas, steps, a lossy sum, merges, tags, a fold"
    yield "../store-1", {"about": about, "expected": answer(folder.parent / "store-1")}
    for seed, (name, (about, make)) in enumerate(STORES.items(), 100):
        with still(seed):
            make(folder / name)
        yield name, {"about": about, "expected": answer(folder / name)}


def main(folder: Path) -> None:
    """Make the set from scratch in `folder`, beside the golden store, which is part of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = json.dumps({"stores": dict(_answers(folder))}, indent=1)
    (folder / "conformance-1.json").write_text(text + "\n", encoding="ascii")
