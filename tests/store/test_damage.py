"""One flipped byte anywhere: `verify` reports it, and a load raises or returns the right bits."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions
from ckptstore.backends.local_disk import directio
from ckptstore.log import fold_writer, partial_objects
from ckptstore.log.pins import Pin
from ckptstore.maintenance.merge import merge
from ckptstore.restore.open_checkpoint import opened
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tests.forms import short_or
from tests.store.states import files, same
from tests.write.trainer import Trainer

STATES: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with three terms, a fork, a tag, two folds, a pin and segments with padding and odd sizes."""
    root = tmp_path_factory.mktemp("damage") / "store"
    store = ckptstore.open(root)
    rng = np.random.default_rng(0)
    for parent, steps in (("latest", (1, 2)), ("1", (2, 3)), ("latest", (4,))):
        with store.writer(parent=parent) as writer:
            for step in steps:
                state = {"w": rng.integers(0, 255, 5000 + step, dtype=np.uint8), "b": rng.standard_normal(7), "s": step}
                STATES[writer.save(state, step=step).ref] = state
            writer.tag("best", steps[0])
        fold_writer.fold(store.journal, store.view())
    with Pin(store.backend, ["0" * 32]):
        shutil.copytree(root, root.with_name("copy"))
    return root.with_name("copy")


def offsets(file: Path) -> list[int]:
    """Bytes all over small files; of segments the first and last bytes of every region, and a seeded sample."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return [*range(0, size, short_or(3, 1) if file.name == "FORMAT" else short_or(97, 7)), size - 1]
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    edges = {0, 1, 7, 8, 9, header - 1, header - 2, header, header + 1, size - 1, size // 2}
    return sorted(edges | set(random.Random(file.name).sample(range(size), short_or(2, 40))))


def test_pristine_is_intact(pristine: Path) -> None:
    report = ckptstore.verify(pristine)
    assert report.ok
    assert set(report.restorable) == set(STATES)
    assert len([file for file in files(pristine) if file.parent.name == "fold"]) >= 2
    assert report.nbytes == sum(file.stat().st_size for file in files(pristine))  # no byte is unchecked


@pytest.mark.slow
def test_every_flipped_byte_is_reported_and_never_returned(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_objects, "STILL", 0.01)  # nobody is writing the torn object here
    flips = 0
    store = ckptstore.open(pristine)
    needs = {ref: {entry.key for entry, _ in store.describe(ref)} for ref in STATES}
    for file in files(pristine):
        original, name = file.read_bytes(), str(file.relative_to(pristine))
        concerned = [ref for ref in STATES if name in needs[ref]]
        for offset in offsets(file):
            damaged = bytearray(original)
            damaged[offset] ^= 1 << (offset % 8)
            file.write_bytes(damaged)
            where = f"{name} byte {offset}"
            report = ckptstore.verify(pristine)
            assert [d for d in report.damage if d.key == name], where
            # A segment's damage is tested on the checkpoints that need it; the others take turns.
            everyone = list(STATES)
            for ref in {*concerned, everyone[flips % len(everyone)]}:
                state = STATES[ref]
                try:
                    loaded = ckptstore.open(pristine).load(ref, framework="numpy")
                except ckptstore.CkptError:
                    continue
                same(state, loaded, f"{where}: {ref}")
            flips += 1
        file.write_bytes(original)
    assert flips > short_or(70, 800)
    assert ckptstore.verify(pristine).ok


def test_damage_is_named_with_what_it_costs(pristine: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(pristine, root)
    store = ckptstore.open(root)
    key = store.describe("3@2")[0][0].key
    file = root / key
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)
    report = ckptstore.verify(root)
    (damage,) = report.damage
    assert damage.key == key
    assert "'w'" in damage.what
    assert damage.checkpoints == ("3@2",)
    assert report.lost == ("3@2",)
    assert report.latest is not None
    assert report.latest.ref == "4@3"
    with pytest.raises(ckptstore.CorruptSegmentError, match=f"{file.name}.*'w'.*checksum"):
        store.load("3@2")
    same(STATES["4@3"], store.load("4@3", framework="numpy"))


@pytest.mark.parametrize("folder", ["log", "fold"])
def test_files_without_the_name_of_a_slot_or_fold_are_named_and_are_no_damage(
    pristine: Path, tmp_path: Path, folder: str
) -> None:
    root = tmp_path / "store"
    shutil.copytree(pristine, root)
    whole = next(file for file in files(root) if file.parent.name == folder)
    shutil.copy(whole, root / folder / "notes")
    report = ckptstore.verify(root)
    assert report.ok
    assert report.strangers == (f"{folder}/notes",)


@pytest.mark.parametrize("how", ["missing", "truncated", "longer"])
def test_a_segment_that_is_not_whole(pristine: Path, tmp_path: Path, how: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(pristine, root)
    store = ckptstore.open(root)
    file = root / store.describe("4@3")[0][0].key
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if how == "truncated" else data + b"\0")
    with pytest.raises(ckptstore.CorruptSegmentError, match=file.name):
        store.load("4@3")
    assert ckptstore.verify(store).lost == ("4@3",)
    assert store.load("3@2")["s"] == 3


def test_a_damaged_newest_slot_hides_nothing(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    with store.writer() as writer:
        for step in (1, 2, 3):
            writer.save({"step": step}, step=step)
    # Only the record that the writer was closed comes after it.
    newest = sorted((tmp_path / "store" / "log").iterdir())[-2]
    data = bytearray(newest.read_bytes())
    data[20] ^= 4
    newest.write_bytes(data)
    with pytest.raises(ckptstore.CorruptLogError, match=r"last intact checkpoint is 2@1"):
        store.load("latest")
    assert store.load(2) == {"step": 2}
    with pytest.raises(ckptstore.CorruptLogError):
        store.writer()
    with store.writer(parent="2") as writer:  # an explicit parent says that you know
        writer.save({"step": 3, "again": True}, step=3)
    assert store.load("latest")["again"]
    assert not ckptstore.verify(store).ok  # the old damage stays reported


Layered = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module", params=["deltas", "steps"])
def layered(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Layered:
    """Checkpoints that build on each other, except some of their tensors.

    deltas: a chain of these, then steps without an optimizer, three to a segment. steps: of an optimizer, with copies
    of its masters and parameters small enough to be laid end to end; some are merged.
    """
    store = ckptstore.open(tmp_path_factory.mktemp("layered") / "store")
    truth: dict[str, Any] = {}
    if request.param == "steps":
        trainer = Trainer(sizes={"wide": (60, 50), **{f"bias{number}": (40,) for number in range(6)}})
        with store.writer(diffs=DiffOptions(full_every=9, batch=3, seconds=None), poll_seconds=None) as writer:
            for step in range(1, 13):
                trainer.train()
                truth[f"{step}@1"] = trainer.frozen()
                writer.save_async(trainer.state(), step, updates=trainer.updates())
        merge(store.journal, "1..9", keep_steps=True, take_over=True)
        return Path(store.url.removeprefix("file://")), truth
    rng = np.random.default_rng(1)
    drift = rng.standard_normal(4000).astype(np.float32)
    chain = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))
    for how in ({"deltas": chain}, {"diffs": DiffOptions(batch=3, seconds=None)}):
        with store.writer(poll_seconds=None, **how) as writer:  # type: ignore[arg-type]
            begin = 0 if writer.parent is None else writer.parent.step
            for step in range(begin + 1, begin + 8):
                drift = drift + (np.arange(4000) < 40 * step).astype(np.float32)
                state = {"drift": drift.copy(), "random": rng.integers(0, 256, 3000, dtype=np.uint8), "step": step}
                truth[f"{step}@{writer.term}"] = state
                writer.save_async(state, step)
    return Path(store.url.removeprefix("file://")), truth


def loadable(root: Path, truth: dict[str, Any]) -> list[str]:
    loaded = []
    for ref, state in truth.items():
        try:
            found = ckptstore.open(root).load(ref, framework="numpy")
        except (ckptstore.CorruptSegmentError, ckptstore.StorageError):
            continue
        same(state, found, ref)
        loaded.append(ref)
    return loaded


def test_lost_is_what_cannot_be_loaded_and_nothing_else(layered: Layered) -> None:
    """Also if the damaged segment is read, and the damage lies beside the part that is read."""
    root, truth = layered
    chance = random.Random(0)
    reads = {ref: {entry.key for entry, _ in ckptstore.open(root).describe(ref)} for ref in truth}
    assert set(loadable(root, truth)) == set(truth)
    spared = lost = 0
    for file in files(root):
        if file.suffix != ".safetensors":
            continue
        original = file.read_bytes()
        for offset in chance.sample(range(len(original)), short_or(1, 12)):
            damaged = bytearray(original)
            damaged[offset] ^= 1 << (offset % 8)
            file.write_bytes(damaged)
            report = ckptstore.verify(root)
            if file.relative_to(root).as_posix() in report.orphans:
                continue  # the leftovers of merging
            (damage,) = report.damage
            loaded = loadable(root, truth)
            assert list(report.restorable) == loaded, (file.name, offset)
            assert set(damage.checkpoints) == set(report.lost) == set(truth) - set(loaded)
            spared += sum(damage.key in reads[ref] for ref in loaded)
            lost += len(report.lost)
        file.write_bytes(original)
    assert spared > short_or(1, 20)
    assert lost > short_or(4, 20)


def test_a_bad_sector_costs_what_lies_there(layered: Layered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are read in one go, and then one by one."""
    root, truth = layered
    newest = list(truth)[-1]
    with opened(ckptstore.open(root).journal, newest) as found:
        link = found.chains["random" if "random" in truth[newest] else "master.wide"].links[-1]
    tensor, key = link.tensor, link.reader.entry.key
    bad = tensor.chunks[0].offset + 5
    read_into = directio.FileSource.read_into

    def failing(self: Any, offset: int, out: memoryview) -> None:
        if self._path.endswith(key) and offset <= bad < offset + len(out):
            raise ckptstore.StorageError(errno.EIO, "cannot read: Input/output error", key)
        read_into(self, offset, out)

    monkeypatch.setattr(directio.FileSource, "read_into", failing)
    report = ckptstore.verify(root)
    assert list(report.restorable) == loadable(root, truth)
    assert newest in report.lost
    assert len(report.restorable) > len(truth) // 2
    (damage,) = report.damage
    assert f"tensor {tensor.name!r}: bytes" in damage.what
    assert "Input/output error" in damage.what


def test_a_parent_that_a_damaged_slot_took_along(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    state = {"w": np.arange(5000, dtype=np.float32)}
    with store.writer(deltas=2, poll_seconds=None) as writer:
        for step in range(1, 6):
            writer.save({"w": state["w"] + np.float32(step)}, step)
    kinds = {info.ref: info.kind for info in store.checkpoints()}
    assert kinds["5@1"] != "full"
    base = next(info.base for info in store.checkpoints() if info.ref == "5@1")
    assert base is not None
    slot = tmp_path / "store" / "log" / f"{int(base.partition('@')[0]):020d}"
    data = bytearray(slot.read_bytes())
    data[len(data) // 2] ^= 1
    slot.write_bytes(data)
    number = int(slot.name)
    newest = max(info.step for info in store.checkpoints() if info.ref in ckptstore.verify(store).restorable)
    with pytest.raises(ckptstore.CorruptLogError, match=rf"5@1 cannot be restored.*log slot {number}.*is {newest}@1"):
        store.writer(parent="5@1")
    with pytest.raises(ckptstore.CorruptLogError, match=rf"5@1 cannot be restored.*log slot {number} is damaged"):
        store.load("5@1")
    with store.writer(parent=newest) as writer:
        writer.save(state, 100)
    same(state, store.load(100, framework="numpy"))
