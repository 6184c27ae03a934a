"""Sentences of SPEC.md that no store of the conformance set shows: ours and the page's reader agree."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.formats import codecs
from ckptstore.formats.checksums import chunk_hash, header_hash, xxh3_128
from ckptstore.formats.history.record_text import encode_format, seal
from ckptstore.formats.history.records import CheckpointId, FormatFile, slot_key
from ckptstore.formats.jsontext import dumps
from ckptstore.formats.segment_files.layout import ALIGN
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.segment_files.segment_steps import StepEncoding
from ckptstore.log import fold_writer
from ckptstore.log.journal import Journal
from ckptstore.store import Store as OurStore
from tools.conformance.__main__ import SET
from tools.conformance.comparing import differences
from tools.conformance.ours import answer
from tools.conformance.page.codecs import RefusedError
from tools.conformance.page.store import Store
from tools.golden.make_conformance import flip, make_folded, named, of_segments, rewritten, slot_files
from tools.golden.make_segments import RUN, packed, state_of

pytestmark = pytest.mark.usefixtures("haste")  # what is damaged or missing on purpose is asked for again at once
OTHER_RUN = "f" * 32


def both(folder: Path) -> dict[str, Any]:
    """The answers of both readers."""
    try:
        page = Store(folder).answer()
    except RefusedError as error:
        page = {"refused": str(error)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = answer(folder)
    assert differences(ours, page) == []
    return ours


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(SET.parent / name, tmp_path / "store", symlinks=True))


@pytest.mark.parametrize("damage", ["missing", "flipped", "empty", "folder", "kind"])
def test_without_its_format_a_store_is_refused(damage: str, tmp_path: Path) -> None:
    folder = copied("merged", tmp_path)
    assert both(folder)["latest"] == "5@1"
    path = folder / "FORMAT"
    if damage == "flipped":
        flip(path, 20)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "kind":
        rewritten(path, lambda text: text.update(ckptstore="pin"))
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    assert both(folder).keys() == {"refused"}


@pytest.mark.parametrize("room", ["log", "fold", "seg"])
def test_other_objects_in_place_of_a_folder(room: str, tmp_path: Path) -> None:
    """6: a pipe refuses the store; a file is a folder without objects."""
    folder = copied("merged", tmp_path)
    shutil.rmtree(folder / room, ignore_errors=True)
    expected = both(folder)
    (folder / room).write_bytes(b"")
    assert both(folder) == expected
    (folder / room).unlink()
    os.mkfifo(folder / room)
    assert both(folder).keys() == {"refused"}


def _above(folder: Path) -> Path:
    path = folder / "seg" / "0000000009"
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("segment", True),
        ("foreign", False),
        ("17 foreign", True),
        ("manifest", False),
        ("junk", True),
        ("empty", False),
    ],
)
def test_segments_of_this_run_above_the_newest_term(name: str, lost: bool, tmp_path: Path) -> None:
    """READ 4: an object counts unless it names another run; at most 16 are examined."""
    folder, foreign = copied("codecs", tmp_path), tmp_path / "foreign"
    (segment,) = (folder / "seg").glob("*/a*.safetensors")
    above = _above(folder)
    if name == "segment":
        shutil.copyfile(segment, above / segment.name)
    elif name == "junk":
        (above / "notes.txt").write_bytes(b"mine")
    elif name == "manifest":
        (above / f"{'0' * 32}.json").write_bytes(seal({"ckptstore": "commit", "run": OTHER_RUN}))
    elif name != "empty":
        shutil.copytree(folder, foreign)
        data = segment.read_bytes().replace(RUN.encode(), OTHER_RUN.encode())
        for number in range(17 if name == "17 foreign" else 16):
            (above / f"{number:032x}.safetensors").write_bytes(data)
    assert isinstance(both(folder)["latest"], dict) is lost


def test_a_folder_that_is_no_term_does_not_count(tmp_path: Path) -> None:
    folder = copied("codecs", tmp_path)
    shutil.copytree(folder / "seg" / "0000000001", folder / "seg" / "99")
    shutil.copytree(folder / "seg" / "0000000001", folder / "seg" / "trash")
    assert both(folder)["latest"] == "11@1"


def folded_store(tmp_path: Path) -> tuple[Path, list[Path]]:
    folder = tmp_path / "store"
    make_folded(folder)
    return folder, sorted((folder / "fold").iterdir())


def changed_fold(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Put another fold beside one, of the same slot."""
    head = len(b"ckptstore fold\n") + 33
    line, _, columns = zstandard.decompress(path.read_bytes()[head:]).partition(b"\n")
    found = json.loads(line)
    change(found)
    frame = zstandard.ZstdCompressor().compress(dumps(found) + b"\n" + columns)
    digest = xxh3_128(frame)
    made = path.with_name(f"{path.name[:20]}-{digest[:16]}")
    made.write_bytes(f"ckptstore fold\n{digest}\n".encode() + frame)
    return made


def test_an_older_fold_is_read_where_the_newest_is_damaged(tmp_path: Path) -> None:
    folder, (_, newest) = folded_store(tmp_path)
    expected = both(folder)
    flip(newest, 100)
    assert both(folder) == expected
    newest.unlink()
    newest.mkdir()
    (newest / "x").write_bytes(b"")
    assert both(folder) == expected


def test_of_several_folds_of_a_slot_the_greatest_name_is_read_first(tmp_path: Path) -> None:
    folder, (_, newest) = folded_store(tmp_path)
    promised = both(folder)["checkpoints"]

    def orphaned(fold: dict[str, Any]) -> None:
        fold["terms"]["found"][-1] = 0
        fold["terms"]["extra"] = {"0": {"other": fold.setdefault("number", 0)}}

    for number in range(6):
        changed_fold(newest, lambda fold, number=number: (fold.update(number=number), orphaned(fold)))  # type: ignore[misc]
    names = sorted(path.name for path in (folder / "fold").iterdir() if path.name[:20] == newest.name[:20])
    assert len(names) == 7
    while names:
        assert both(folder)["checkpoints"] == promised
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry = OurStore(LocalBackend(folder)).view().catalog.terms[5]
        assert entry.parent_found is (names[-1] == newest.name)
        (folder / "fold" / names.pop()).unlink()


def test_a_fold_s_name_that_is_none_is_passed_over(tmp_path: Path) -> None:
    folder, (_, newest) = folded_store(tmp_path)
    expected = both(folder)
    for name in ("99999999999999999999", f"{'9' * 21}-{'f' * 16}", f"{'9' * 20}-{'f' * 15}", "notes"):
        shutil.copyfile(newest, newest.with_name(name))
    shutil.copyfile(newest, newest.with_name(f"{'9' * 20}-{newest.name[21:]}"))  # whole, but of another slot
    assert both(folder) == expected


@pytest.mark.parametrize("end", ["flipped", "missing", "folder"])
def test_the_slot_after_a_fold_names_the_fold_s_last(end: str, tmp_path: Path) -> None:
    """Any object at the end slot; but if another record is there, nothing is compared."""
    folder = copied("folded", tmp_path)
    backend, fmt = LocalBackend(folder), FormatFile(RUN, anchor_every=4)
    journal = Journal(backend, fmt)
    store = OurStore(backend)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 10}, 10)
    fold_writer.fold(journal, store.view())
    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 11}, 11)
    expected = both(folder)
    assert expected["latest"] == "11@7"
    seq = max(int(path.name[:20]) for path in (folder / "fold").iterdir())
    path = folder / slot_key(seq)
    whole = path.read_bytes()
    if end == "flipped":
        flip(path, 100)
    else:
        path.unlink()
        if end == "folder":
            path.mkdir()
    assert both(folder) == expected
    following = folder / slot_key(seq + 1)
    text = following.read_bytes()
    rewritten(following, lambda slot: slot.update(previous="0" * 32))  # the next OPEN: it does not continue the fold
    assert both(folder).keys() == {"refused"}  # it may be a stray: an anchor is above it
    following.write_bytes(text)
    if end == "folder":
        path.rmdir()
    path.write_bytes(whole)
    rewritten(path, lambda slot: slot.update(later=1))
    assert both(folder) == expected  # damage before the newest OPEN
    for above in slot_files(folder):
        if int(above.name) > seq + 1:
            above.unlink()
    kept = both(folder)
    rewritten(following, lambda slot: slot.update(previous="0" * 32))  # behind damage it is not compared
    assert both(folder) == kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        view = OurStore(LocalBackend(folder)).view()
    assert (view.damage, view.catalog.term) == ((seq,), 7)


def _two(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Two checkpoints; the index of the second one's segment is changed."""
    folder = tmp_path / "store"
    words = np.arange(100, dtype="<u4")
    files = {f"{step}": _word(words, step, {"words": codecs.Raw()}) for step in (1, 2)}
    of_segments(folder, {name: data for name, (data, _) in files.items()})
    (path,) = folder.glob(f"seg/*/{'2' * 32}.safetensors")
    path.write_bytes(reindexed(path.read_bytes(), change))
    data = path.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]

    def record(slot: dict[str, Any]) -> None:
        slot["segments"][0].update(size=len(data), header=len(header), hash=header_hash(header))

    rewritten(slot_files(folder)[-1], record)
    return folder


def _word(
    words: Any, step: int, tensors: dict[str, codecs.Codec], *, name: str = "", base: Any = None, told: Any = None
) -> tuple[bytes, SegmentDoc]:
    data = codecs.as_bytes(words)
    entries = []
    for tensor, codec in tensors.items():
        stored = codecs.encode(codec, data, b"" if base is None else base).tobytes()
        chunk = Chunk(0, len(stored), len(data), chunk_hash(stored), chunk_hash(data))
        entries.append((TensorEntry(tensor, "F32", (len(words),), (chunk,), codec.name, codec.params), stored))
    tree = {"words": {"$t": "words"}}
    told = StepEncoding(1, "full") if told is None else told
    segment = name or f"{step}" * 32
    return packed(SegmentDoc(RUN, 1, segment, {step: told}, parents={1: None}, trees={step: tree}), {step: entries})


def reindexed(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A packed segment with another index."""
    start = 8 + int.from_bytes(data[:8], "little")
    members = json.loads(data[8:start])
    document = json.loads(members["__metadata__"]["ckptstore"])
    begin, end = members["ckptstore/index"]["data_offsets"]
    index = json.loads(zstandard.decompress(data[start + begin : start + end]))
    change(index)
    document.pop("uses", None)
    text = dumps(index)
    stored = zstandard.ZstdCompressor().compress(text)
    document["index"].update(length=len(text), hash=xxh3_128(stored))
    members["__metadata__"]["ckptstore"] = dumps(document).decode()
    members["ckptstore/index"].update(shape=[len(stored)], data_offsets=[begin, begin + len(stored)])
    line = dumps(members)
    length = -(-(8 + len(line)) // ALIGN) * ALIGN - 8
    return length.to_bytes(8, "little") + line.ljust(length) + data[start : start + begin] + stored


def test_an_unknown_dtype_in_an_index_refuses_the_segment(tmp_path: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        index["tensors"][0][1] = "F4_LATER"

    found = both(_two(tmp_path, change))
    assert "error" in found["checkpoints"]["2@1"]
    assert "state" in found["checkpoints"]["1@1"]


def test_a_segment_whose_uses_are_wrong_is_refused(tmp_path: Path) -> None:
    folder = _two(tmp_path, lambda index: None)
    (path,) = folder.glob(f"seg/*/{'1' * 32}.safetensors")
    data = path.read_bytes().replace(b'\\"uses\\":[\\"raw\\"]', b'\\"uses\\":[\\"xor\\"]')
    assert data != path.read_bytes()
    path.write_bytes(data)
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    rewritten(slot_files(folder)[1], lambda slot: slot["segments"][0].update(hash=header_hash(header)))
    previous = xxh3_128(slot_files(folder)[1].read_bytes())
    rewritten(slot_files(folder)[2], lambda slot: slot.update(previous=previous))
    found = both(folder)
    assert "error" in found["checkpoints"]["1@1"]
    assert "state" in found["checkpoints"]["2@1"]


def test_the_index_may_have_any_text_of_the_same_tree(tmp_path: Path) -> None:
    """4: the state hash is of the canonical text that the reader makes."""
    folder = _two(tmp_path, lambda index: None)
    expected = both(folder)
    (path,) = folder.glob(f"seg/*/{'2' * 32}.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.dumps", lambda value: json.dumps(value, indent=1).encode())
        path.write_bytes(reindexed(path.read_bytes(), lambda index: None))
    data = path.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    assert b"\n" in header

    def record(slot: dict[str, Any]) -> None:
        slot["segments"][0].update(size=len(data), header=len(header), hash=header_hash(header))

    rewritten(slot_files(folder)[-1], record)
    assert both(folder) == expected
    assert "state" in expected["checkpoints"]["2@1"]


@pytest.mark.parametrize("name", ["ckptstore/more", "__metadata__", "w\udfff", 7, None, ["words"], "lacking"])
def test_names_of_a_tree_that_are_none(name: Any, tmp_path: Path) -> None:
    """3.1: also if the tree is only passed on."""

    def change(index: dict[str, Any]) -> None:
        index["trees"]["2"] = {"words": {"$t": "words"}, "deep": [{"$set": [{"$t": name}]}]}
        index["tensors"][0][0] = "words"

    found = both(_two(tmp_path, change))
    assert "error" in found["checkpoints"]["2@1"]
    assert "state" in found["checkpoints"]["1@1"]


def test_a_retire_counts_only_for_the_term_of_its_record(tmp_path: Path) -> None:
    """7.4: also for a checkpoint that the log does not have; it shows that there was a higher step."""
    folder = copied("damaged-slot", tmp_path)
    assert both(folder)["latest"] == "6@2"
    last = slot_files(folder)[-1]
    while json.loads(last.read_bytes()[:-34]).get("checkpoints") is None:
        last = last.with_name(f"{int(last.name) - 1:020d}")
    rewritten(last, lambda slot: slot.update(retires=[[1, 99]]))
    for path in slot_files(folder)[int(last.name) + 1 :]:
        path.unlink()
    assert both(folder)["latest"] == "6@2"


@pytest.mark.parametrize("step", [2, 99])
def test_a_retire_of_an_unknown_checkpoint_counts(step: int, tmp_path: Path) -> None:
    """Damage before the COMMIT of the answer does not matter, unless a higher step was retired."""
    folder = copied("damage-after", tmp_path)
    slots = slot_files(folder)
    slots[-1].write_bytes(slots[-2].read_bytes())
    rewritten(slots[-1], lambda slot: slot.update(seq=int(slots[-1].name), previous=xxh3_128(slots[-2].read_bytes())))
    rewritten(slots[-1], lambda slot: [slot.pop(name, None) for name in ("segments", "checkpoints", "encodings")])
    rewritten(slots[-1], lambda slot: slot.update(retires=[[1, step]]))
    flip(slots[2], 100)
    latest = both(folder)["latest"]
    assert isinstance(latest, dict) is (step == 99)


def _entry(name: str, data: Any, codec: codecs.Codec, base: Any = b"", **params: Any) -> tuple[TensorEntry, bytes]:
    """A tensor of one chunk, encoded on the bytes of `base`."""
    dtype = {"u2": "F16", "u4": "F32"}[data.dtype.str[1:]]
    image = codecs.as_bytes(data)
    stored = codecs.encode(codec, image, codecs.as_bytes(base) if len(base) else base).tobytes()
    chunk = Chunk(0, len(stored), len(image), chunk_hash(stored), chunk_hash(image))
    return TensorEntry(name, dtype, data.shape, (chunk,), codec.name, {**codec.params, **params}, None, None), stored


def _segment(
    name: str, step: int, entries: list[tuple[TensorEntry, bytes]], base: Any = None
) -> tuple[bytes, SegmentDoc]:
    told = {step: StepEncoding(1, "full" if base is None else "delta", base)}
    tree = {"half": {"$t": "half"}}
    return packed(SegmentDoc(RUN, 1, name * 32, told, parents={1: None}, trees={step: tree}), {step: entries})


def _store_of(folder: Path, segments: list[tuple[bytes, SegmentDoc]], sizes: list[int]) -> Path:
    """One COMMIT: an encoding of each segment, whose `bytes` are `sizes`, and a checkpoint for every step."""
    folder.mkdir()
    LocalBackend(folder).create("FORMAT", encode_format(FormatFile(RUN)))
    base = {"run": RUN, "seq": 0, "previous": "0" * 32, "term": 1, "nonce": "1" * 32}
    opening = seal({"ckptstore": "open", **base, "parent": None, "time": 0.0, "writer": {}})
    rows, checkpoints, encodings = [], {}, []
    for (data, doc), size in zip(segments, sizes, strict=True):
        ((step, told),) = doc.encodings.items()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        path = folder / "seg" / "0000000001" / f"{doc.segment}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        rows.append({"id": doc.segment, "size": len(data), "header": len(header), "hash": header_hash(header)})
        state = state_of(named(doc))
        assert checkpoints.get(step, {"state": state})["state"] == state
        checkpoints[step] = {"step": step, "state": state, "time": 0.0, "tensors": 1, "bytes": 400}
        about = {"checkpoint": [1, step], "kind": told.kind, "base": None if told.base is None else list(told.base)}
        encodings.append({**about, "segments": [doc.segment], "lossy": False, "bytes": size})
    commit = {"ckptstore": "commit", **base, "seq": 1, "previous": xxh3_128(opening), "segments": rows}
    commit |= {"checkpoints": list(checkpoints.values()), "encodings": encodings}
    (folder / "log").mkdir()
    (folder / slot_key(0)).write_bytes(opening)
    (folder / slot_key(1)).write_bytes(seal(commit))
    return folder


HALF = np.arange(100, dtype="<u2")
AUX = "ckptstore/master"


@pytest.mark.parametrize("sizes", [[1, 9000, 10], [9000, 1, 10]])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_another_encoding_of_the_base_has_what_its_tree_does_not_name(
    sizes: list[int], order: tuple[int, ...], tmp_path: Path
) -> None:
    """5.4: the base has two encodings; one lacks the auxiliary tensor that the delta builds on."""
    below = np.arange(100, dtype="<u4") * 65536 + 0x3F800000
    above = below + 3
    thin = _segment("a", 1, [_entry("half", HALF, codecs.Raw())])
    thick = _segment("b", 1, [_entry("half", HALF, codecs.Raw()), _entry(AUX, below, codecs.Raw())])
    rounded = codecs.decode(codecs.Derive("F16"), b"", 200, codecs.as_bytes(above)).view("<u2")
    derived = _entry("half", rounded, codecs.Derive("F16"), above, of=AUX)
    base = CheckpointId(1, 1, state_of(named(thin[1])))
    delta = _segment("c", 2, [_entry(AUX, above, codecs.Sub(4), below), derived], base)
    segments = [thin, thick, delta]
    folder = _store_of(tmp_path / "store", [segments[one] for one in order], [sizes[one] for one in order])
    tensors = both(folder)["checkpoints"]["2@1"]["tensors"]
    assert tensors["half"]["hash"] == xxh3_128(rounded.tobytes())


def _later_dtype(index: dict[str, Any]) -> None:
    index["tensors"][0][1] = "F4_LATER"


def _later_codec(index: dict[str, Any]) -> None:
    index["codecs"][0] = ["later", {}]
    index["decoded"] = "0" * 16


def _reserved(index: dict[str, Any]) -> None:
    index["trees"]["1"]["half"]["$t"] = AUX


def _no_name(index: dict[str, Any]) -> None:
    index["trees"]["1"]["half"]["$t"] = 7


def _dashes(index: dict[str, Any]) -> None:
    index["decoded"] = "-" * 16


@pytest.mark.parametrize("change", [_later_dtype, _later_codec, _reserved, _no_name, _dashes])
def test_whatever_refuses_an_encoding_another_one_leads_to_the_checkpoint(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    """7.4: if one way fails the others are tried."""
    planes = _segment("a", 1, [_entry("half", HALF, codecs.Planes(2))])
    plain = _segment("b", 1, [_entry("half", HALF, codecs.Raw())])
    bad = reindexed(planes[0], change)
    folder = _store_of(tmp_path / "store", [(bad, planes[1]), plain], [1, 9000])
    assert both(folder)["checkpoints"]["1@1"]["tensors"]["half"]["hash"] == xxh3_128(HALF.tobytes())
    (folder / "seg" / "0000000001" / f"{'b' * 32}.safetensors").unlink()
    assert "error" in both(folder)["checkpoints"]["1@1"]
