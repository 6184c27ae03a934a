"""The conformance set (`tools.conformance`): stores that a reader in any language is tried with, and what they hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore import DeltaOptions, folding
from ckptstore.backends.local import LocalBackend
from ckptstore.formats.hashing import header_hash
from ckptstore.formats.records import (
    FORMAT_KEY,
    CheckpointEntry,
    CommitRecord,
    Encoding,
    FormatFile,
    SegmentEntry,
    slot_key,
)
from ckptstore.formats.segment import SegmentDoc, header_length, parse
from ckptstore.formats.texts import encode_format, seal
from ckptstore.log import Term, open_term
from tools.conformance.ours import answer
from tools.golden import make_codecs, make_steps
from tools.golden.make_segments import RUN, state_of
from tools.golden.still import MOMENT, still

_NONCE = "0" * 31


def _of_segments(folder: Path, files: Mapping[str, bytes]) -> None:
    """A store of one term whose segments are given: each is one checkpoint."""
    backend = LocalBackend(folder)
    fmt = FormatFile(RUN)
    backend.create(FORMAT_KEY, encode_format(fmt))
    term: Term = open_term(backend, fmt, None, {"host": "golden"})
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
    tensors = doc.tensors[step].values()
    nbytes = sum(entry.nbytes for entry in tensors)
    checkpoint = CheckpointEntry(doc.term, step, state_of(doc), MOMENT, len(tensors), nbytes)
    edge = Encoding(checkpoint.node, told.kind, told.base, (doc.segment,), told.lossy, segment.size)
    return CommitRecord(doc.term, nonce, segments=(segment,), checkpoints=(checkpoint,), encodings=(edge,))


def _codecs(folder: Path) -> None:
    found = make_codecs.examples()
    base = make_codecs.base_segment(found)
    _of_segments(folder, {"base": base, "delta": make_codecs.delta_segment(found)})


def _steps(folder: Path) -> None:
    found = list(make_steps.examples())
    _of_segments(folder, {"base": make_steps.base_segment(found), "steps": make_steps.step_segment(found)})


def _small(folder: Path) -> ckptstore.Store:
    """Five checkpoints: a full, and deltas on it."""
    store = ckptstore.open(folder, create=True)
    weight = np.arange(600, dtype="<f4") / np.float32(7)
    with store.writer(deltas=DeltaOptions(interval=5), poll_seconds=None) as writer:
        for step in range(1, 6):
            weight[step::50] += np.float32(step)
            writer.save({"weight": weight, "step": step, "odd": {"$": (1, None)}}, step)
    return store


def _slots(folder: Path) -> list[Path]:
    return sorted((folder / "log").iterdir())


def _rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A sealed text with other members."""
    value = json.loads(path.read_bytes()[:-34])
    change(value)
    path.write_bytes(seal(value))


def _folded(folder: Path) -> None:
    backend, fmt = LocalBackend(folder), FormatFile(RUN, anchor_every=4)
    backend.create(FORMAT_KEY, encode_format(fmt))
    store = _small(folder)
    for step in (6, 7, 8, 9):
        with store.writer(poll_seconds=None) as writer:
            writer.save({"step": step}, step)
        folding.fold(backend, fmt, store.view())
    folding.trim(backend, fmt, store.view())
    for path in _slots(folder)[-1:]:
        assert len(_slots(folder)) < int(path.name)  # some are gone


def _incompat(folder: Path) -> None:
    _small(folder)
    _rewritten(_slots(folder)[-1], lambda slot: slot.update(incompat=["later"]))


def _ro_compat(folder: Path) -> None:
    _small(folder)
    _rewritten(_slots(folder)[-1], lambda slot: slot.update(ro_compat=["later"]))


def _unknown(folder: Path) -> None:
    _small(folder)
    _rewritten(_slots(folder)[-1], lambda slot: slot.update(later={"more": [1, 2.5, None]}))
    _rewritten(folder / FORMAT_KEY, lambda text: text.update(later=True))


def _features(operation: str) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        _small(folder)
        _rewritten(folder / FORMAT_KEY, lambda text: text.update(features={operation: ["later"]}))

    return made


def _major(folder: Path) -> None:
    _small(folder)
    _rewritten(folder / FORMAT_KEY, lambda text: text.update(major=2))


def _damaged_slot(folder: Path) -> None:
    store = _small(folder)
    with store.writer(parent=5, poll_seconds=None) as writer:
        writer.save({"step": 6}, 6)
    _flip(folder / slot_key(3), 100)


def _damaged_segment(folder: Path) -> None:
    store = _small(folder)
    (segment,) = store.checkpoint(4).segments
    (path,) = folder.glob(f"seg/*/{segment}.safetensors")
    _flip(path, 4096)


def _unknown_rule(folder: Path) -> None:
    found = [example for example in make_steps.examples() if example.group.leader.startswith("0.9.fma.")][:1]
    base, steps = make_steps.base_segment(found), make_steps.step_segment(found, change=_other_version)
    _of_segments(folder, {"base": base, "steps": steps})


def _other_version(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "rule": {**params["rule"], "rule": "adam/2"}}


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


STORES: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
    "codecs": ("every codec of 5.4 with all kinds of parameters, groups and pieces", _codecs),
    "steps": ("every rule, variant, encoding and form of gradient of 5.5", _steps),
    "folded": ("a log whose older slots are gone: a fold has what they said", _folded),
    "damaged-slot": ("a COMMIT of the first term has a wrong bit; a second term goes on behind it", _damaged_slot),
    "damaged-segment": (
        "a chunk of step 4 has a wrong bit: it and what builds on it cannot be restored",
        _damaged_segment,
    ),
    "unknown-rule": ("an optimizer step of arithmetic that is not known, adam/2", _unknown_rule),
    "unknown-members": ("members of FORMAT and of a slot that are not known: read", _unknown),
    "incompat": ("a COMMIT with an unknown feature in incompat: refused", _incompat),
    "ro-compat": ("a COMMIT with an unknown feature in ro_compat: read", _ro_compat),
    "features-read": ("FORMAT asks readers for an unknown feature: refused", _features("read")),
    "features-write": ("FORMAT asks writers for an unknown feature: read", _features("write")),
    "major-2": ("another major version: refused", _major),
}


def _answers(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    about = "two lines of terms; fulls, deltas, steps, a lossy sum, merges, tags, a fold"
    yield "../store-1", {"about": about, "expected": answer(folder.parent / "store-1")}
    for seed, (name, (about, make)) in enumerate(STORES.items(), 100):
        with still(seed):
            make(folder / name)
        yield name, {"about": about, "expected": answer(folder / name)}


def main(folder: Path) -> None:
    """Make the set anew in `folder`, beside the golden store, which is a part of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = json.dumps({"stores": dict(_answers(folder))}, indent=1)
    (folder / "conformance-1.json").write_text(text + "\n", encoding="ascii")
