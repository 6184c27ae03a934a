"""`ckpt gc`: the segments that it deletes, and those that others keep."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckptstore
from ckptstore.formats.history.commit_checks import droppable
from ckptstore.formats.history.records import pin_key
from ckptstore.log import requests
from ckptstore.log.change import CatalogChange
from ckptstore.log.pins import Pin
from ckptstore.maintenance import garbage_collection
from tests.cli.conftest import Run, assert_documented, documented, state


@pytest.fixture
def litter(run: Path) -> Path:
    """A store in which the segment of the retired 4@1 is no longer needed; its path below the store."""
    store = ckptstore.open(run)
    with store.writer(poll_seconds=None) as writer:
        drops = droppable(store.view().catalog, [(1, 4)])
        requests.post(store.journal, writer.term, "test", CatalogChange(drops=tuple(drops), retires=((1, 4),)))
        writer.poll()
        (segment,) = drops
    return Path(f"seg/0000000001/{segment}.safetensors")


def test_unneeded_segments_are_deleted(ckpt: Run, run: Path, litter: Path) -> None:
    nbytes = (run / litter).stat().st_size
    planned = ckpt("gc", run, "--dry-run", "--json").json
    assert_documented(planned, documented("ckpt gc")[0])
    assert planned["segments"] == [str(litter)]
    assert planned["bytes"] == nbytes
    assert (run / litter).exists()
    outcome = ckpt("gc", run)
    assert outcome.code == 0
    assert outcome.out.startswith("deleted 1 segment: ")
    assert not (run / litter).exists()
    assert ckpt("gc", run).out == "deleted 0 segments: 0 B\n"
    assert ckpt("verify", run).code == 0
    assert set(ckptstore.open(run).load(5, framework="numpy")) == set(state(5))


def test_the_owner_of_a_pin_is_named(ckpt: Run, run: Path, litter: Path) -> None:
    store = ckptstore.open(run)
    with Pin(store.backend, [litter.stem]) as pin:
        outcome = ckpt("gc", run)
        assert outcome.code == 0
        assert "deleted 0 segments" in outcome.out
        assert "pinned by readers, kept: 1 segment," in outcome.out
        assert f"  {pin.key}: host " in outcome.out
        assert f"pid {os.getpid()}, 1 segment\n" in outcome.out
        assert "--wait" in outcome.err
        found = ckpt("gc", run, "--wait", "0.3", "--json").json
        assert_documented(found, documented("ckpt gc")[0])
        assert found["pinned"] == [str(litter)]
        assert found["pins"][0]["reader"]["pid"] == os.getpid()
        assert (run / litter).exists()
    assert "deleted 1 segment" in ckpt("gc", run).out


def test_the_pin_of_a_dead_reader_is_found_out(
    ckpt: Run, run: Path, litter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = Pin(ckptstore.open(run).backend, [litter.stem])
    pin.renew()  # and never again
    monkeypatch.setattr(garbage_collection, "SHORTEST_TTL", 0.1)
    outcome = ckpt("gc", run, "--wait", "20", "--pin-ttl", "0.3")
    assert "deleted 1 segment" in outcome.out
    assert f"the pins of 1 dead reader: {pin.key}" in outcome.out
    assert not (run / litter).exists()


def test_a_damaged_pin_keeps_everything(ckpt: Run, run: Path, litter: Path) -> None:
    key = pin_key("0" * 32)
    ckptstore.open(run).backend.replace(key, b"damaged")
    outcome = ckpt("gc", run)
    assert outcome.code == 4
    assert f"damaged  {key}" in outcome.out
    assert (run / litter).exists()
    found = ckpt("gc", run, "--json")
    assert found.code == 4
    assert_documented(found.json, documented("ckpt gc")[0])
    assert found.json["unreadable_pins"] == [key]


def test_errors(ckpt: Run, run: Path, tmp_path: Path) -> None:
    outcome = ckpt("gc", run, "--pin-ttl", "10")
    assert outcome.code == 2
    assert "renewed every 30 s" in outcome.err
    assert ckpt("gc", run, "--wait", "-1").code == 2
    for option in ("--wait", "--pin-ttl"):
        assert ckpt("gc", run, option, "nan").code == 2
    assert ckpt("gc", tmp_path / "nothing").code == 3
    assert not (tmp_path / "nothing").exists()


def test_strangers_are_shown_and_kept(ckpt: Run, run: Path, litter: Path) -> None:
    stranger = run / "seg" / "0000000001" / "notes.txt"
    stranger.write_text("do not delete")
    found = ckpt("gc", run, "--dry-run", "--json").json
    assert_documented(found, documented("ckpt gc")[0])
    assert found["strangers"] == ["seg/0000000001/notes.txt"]
    outcome = ckpt("gc", run)
    assert outcome.code == 0
    assert "not the store's, kept: seg/0000000001/notes.txt" in outcome.out
    assert "gc deletes only files that a store writes" in outcome.err
    assert stranger.read_text() == "do not delete"
    assert not (run / litter).exists()


def test_spare_files_are_reported(ckpt: Run, run: Path, litter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RECYCLE", "always")
    if (why := ckptstore.open(run).backend.recycling).startswith("off"):
        pytest.skip(f"recycling is {why}")
    nbytes = (run / litter).stat().st_size
    outcome = ckpt("gc", run)
    assert "kept as spare files, which new checkpoints overwrite: " in outcome.out
    assert ckpt("gc", run, "--json").json["spare_bytes"] == nbytes
    assert ckpt("verify", run).code == 0
    monkeypatch.setenv("CKPTSTORE_RECYCLE", "never")
    assert "spare" not in ckpt("gc", run).out
    assert not list((run / ".spare").iterdir())


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_lost_log_is_damage_and_costs_nothing(ckpt: Run, run: Path, options: tuple[str, ...]) -> None:
    segments = sorted(run.rglob("*.safetensors"))
    for part in ("log", "fold"):
        shutil.rmtree(run / part, ignore_errors=True)
    outcome = ckpt("gc", run, *options)
    assert (outcome.code, ckpt("verify", run).code) == (4, 4)
    assert outcome.out.endswith("0 segments: 0 B\n")
    assert "note: there are segments of term 3, but the log ends in term 0" in outcome.err
    assert f"`ckpt repair {run} DST` makes a store of what is intact" in outcome.err
    found = ckpt("gc", run, *options, "--json")
    assert found.code == 4
    assert_documented(found.json, documented("ckpt gc")[0])
    assert "its end is lost" in found.json["damage"][0]
    assert sorted(run.rglob("*.safetensors")) == segments


def test_segments_stay_if_the_log_is_damaged(ckpt: Run, run: Path, litter: Path) -> None:
    slot = run / "log" / f"{2:020d}"
    slot.write_bytes(slot.read_bytes()[:-40])
    outcome = ckpt("gc", run)
    assert outcome.code == 4
    assert "note: log slot 2 is damaged or missing" in outcome.err
    assert (run / litter).exists()  # it may be the segment that that slot promised
