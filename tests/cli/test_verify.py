"""`ckpt verify`: exit 4 on damage, and the remaining checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented
from tests.store.states import files


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_an_intact_store(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("verify", pristine)
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1] == "intact"
    assert "7 checkpoints" in outcome.out
    found = ckpt("verify", pristine, "--json").json
    assert_documented(found, documented("ckpt verify")[0])
    assert found["ok"] is True
    assert found["bytes"] == sum(path.stat().st_size for path in files(pristine))


def test_a_damaged_segment_is_named_with_what_it_costs(ckpt: Run, run: Path) -> None:
    segment = next((run / "seg" / "0000000003").iterdir())
    flip(segment, segment.stat().st_size - 1)
    outcome = ckpt("verify", run)
    assert outcome.code == 4
    assert f"damaged  seg/0000000003/{segment.name}: tensor " in outcome.out
    assert "lost     5@3" in outcome.out
    assert "intact   6 checkpoints: 1..4@1, 3@2, 4@2" in outcome.out
    assert "newest checkpoint that can be restored: 4@2" in outcome.out
    found = ckpt("verify", run, "--json")
    assert found.code == 4
    assert_documented(found.json, documented("ckpt verify")[0])
    assert found.json["lost"] == ["5@3"]
    assert found.json["latest"] == "4@2"
    assert found.json["damage"][0]["checkpoints"] == ["5@3"]


def test_damage_of_format_and_log_is_a_finding_not_an_error(ckpt: Run, run: Path) -> None:
    flip(run / "FORMAT", 20)
    flip(sorted((run / "log").iterdir())[2], 30)
    outcome = ckpt("verify", run)
    assert outcome.code == 4
    assert "damaged  FORMAT" in outcome.out
    assert "damaged  log/00000000000000000002" in outcome.out


@pytest.mark.parametrize("deep", [(), ("--deep",)])
def test_one_checkpoint(ckpt: Run, run: Path, deep: tuple[str, ...]) -> None:
    segment = next((run / "seg" / "0000000003").iterdir())
    flip(segment, segment.stat().st_size - 1)
    outcome = ckpt("verify", run, "4@2", *deep)
    assert outcome.code == 0
    assert "checkpoint 4@2" + (", decoded" if deep else "") in outcome.out
    found = ckpt("verify", run, "tag:best", "--json", *deep)
    assert found.code == 4
    assert_documented(found.json, documented("ckpt verify")[0])
    assert (found.json["ref"], found.json["lost"], found.json["restorable"]) == ("5@3", ["5@3"], [])
    assert ckpt("verify", run, "99").code == 3


def test_strangers_and_orphans_are_no_damage(ckpt: Run, run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    (run / "seg" / "0000000001" / ("0" * 32 + ".safetensors")).write_bytes(b"torn")
    outcome = ckpt("verify", run)
    assert outcome.code == 0
    assert "notes.txt" in outcome.out
    assert "1 segment belongs to no checkpoint" in outcome.out


def test_no_store(ckpt: Run, tmp_path: Path) -> None:
    assert ckpt("verify", tmp_path / "nothing").code == 3
    assert not (tmp_path / "nothing").exists()


def test_segments_that_a_damaged_slot_hides_are_not_called_harmless(ckpt: Run, run: Path) -> None:
    (slot,) = [file for file in (run / "log").iterdir() if int(file.name) == 2]
    flip(slot, slot.stat().st_size // 2)
    outcome = ckpt("verify", run)
    assert outcome.code == 4
    why = "or to one that damage of the log hides: keep them, `ckpt repair` can recover what is in them"
    assert f"1 segment belongs to no checkpoint ({why})" in outcome.out


def test_a_lost_log_sends_nobody_to_gc(ckpt: Run, run: Path) -> None:
    for part in ("log", "fold"):
        shutil.rmtree(run / part, ignore_errors=True)
    outcome = ckpt("verify", run)
    assert outcome.code == 4
    assert "gc deletes them" not in outcome.out
    assert "belong to no checkpoint (or to one that damage of the log hides: keep them" in outcome.out
    hint = f"hint: `ckpt repair {run} DST` builds a store from what the segments still contain"
    assert hint in ckpt("inspect", run).err
    log = ckpt("log", run)
    assert "no checkpoint yet" not in log.err
    assert f"`ckpt repair {run} DST` makes a store from what is left in the segments" in log.err


@pytest.mark.filterwarnings("default")
def test_remarks_of_the_library_name_no_line_of_its_source(
    ckpt: Run, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise ckptstore.ReadOnlyError("no access here")

    monkeypatch.setattr("ckptstore.backends.local_disk.local.LocalBackend.replace", refused)
    outcome = ckpt("diff", run, "1", "2")
    assert outcome.code == 0
    assert outcome.err.startswith("note: reading unpinned: no access here")
    assert ".py" not in outcome.err
