"""The remedies in `ckpt`'s error messages: with the names that were typed, ready to paste."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

import ckptstore
from ckptstore import CheckpointNotFoundError, CorruptionError, StoreNotFoundError, UsageError
from ckptstore.cli.hints import TYPED, hint_for
from tests.cli.conftest import Run


def test_a_store_with_a_typing_error(ckpt: Run, run: Path) -> None:
    gone = ckpt("log", run.parent / "rnu")
    assert gone.code == 3
    assert gone.err.splitlines()[-1] == f"hint: did you mean {run}?"
    assert ckpt("diff", run, "1", "2", "--in", run.parent / "rnu").err.splitlines()[-1] == f"hint: did you mean {run}?"
    above = ckpt("log", run.parent)
    assert above.err.splitlines()[-1] == f"hint: did you mean {run}? `ckpt ls {run.parent}` lists them"
    assert ckpt("ls", f"{run.parent}x").err.splitlines()[-1] == f"hint: did you mean {run.parent}?"
    new = ckpt("log", run.parent / "quite another")
    assert f"`ckpt import {shlex.quote(str(run.parent / 'quite another'))} FILE...` creates one" in new.err


def test_a_bare_or_mistyped_tag(ckpt: Run, pristine: Path) -> None:
    for typed in ("best", "bset"):
        outcome = ckpt("inspect", pristine, typed)
        assert outcome.code == 2
        assert outcome.err.splitlines()[-1] == "hint: did you mean tag:best?"
    assert ckpt("inspect", pristine, "lastest").err.splitlines()[-1] == "hint: did you mean latest?"
    assert ckpt("inspect", pristine, "tag:bets").err.splitlines()[-1] == "hint: did you mean tag:best?"
    assert ckpt("inspect", pristine, "tag:bets").code == 3
    assert "did you mean" not in ckpt("inspect", pristine, "xyz").err


def test_hints_hold_what_was_typed_quoted(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    place = shutil.copytree(pristine, tmp_path / "my runs")
    quoted = shlex.quote(str(place))
    assert quoted.startswith("'")
    assert ckpt("inspect", place, "77").err.splitlines()[-1] == f"hint: `ckpt log {quoted}` lists the checkpoints"
    missing = ckpt("restore", place, "4@1", "--select", "nothing", "--out", tmp_path / "x.pt")
    assert f"`ckpt inspect {quoted} 4@1 --tensors`" in missing.err


def test_damage_names_what_can_be_restored_instead(ckpt: Run, tmp_path: Path) -> None:
    import numpy as np

    store = ckptstore.open(tmp_path / "run")
    state = {"w": np.random.default_rng(0).standard_normal(20_000).astype("f4")}
    with store.writer(deltas=ckptstore.DeltaOptions(interval=8), poll_seconds=None) as writer:
        for step in range(1, 6):
            state["w"] = state["w"] * np.float32(1 - 1e-6)
            writer.save(state, step)
    path = tmp_path / "run" / store.describe("3")[-1][0].key
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    out = tmp_path / "x.pt"
    outcome = ckpt("restore", store.url, "3", "--out", out)
    assert outcome.code == 4
    assert "hint: 2@1 is the nearest earlier checkpoint that does not need this segment: " in outcome.err
    command = outcome.err.split("segment: `ckpt ")[1].split("`")[0]
    assert ckpt(*shlex.split(command)).code == 0
    assert out.exists()
    checked = ckpt("verify", store.url)
    assert f"`ckpt restore {store.url} 5@1 --out FILE`" in checked.err
    assert f"`ckpt repair {store.url} DST`" in checked.err


def test_names_that_no_file_of_ours_has(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    refusals = {"a.onnx": "files of that kind cannot be written; give a name that", "folder/": "the name of a folder"}
    for name, message in refusals.items():
        refused = ckpt("restore", pristine, "--out", f"{tmp_path}/{name}")
        assert refused.code == 2
        assert message in refused.err
    assert list(tmp_path.iterdir()) == []
    forced = ckpt("restore", pristine, "--out", tmp_path / "a.onnx", "--format", "safetensors")
    assert forced.code == 0


def test_a_file_or_folder_that_is_missing_is_a_2_everywhere(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for arguments in (
        ("restore", pristine, "--out", gone / "x.pt"),
        ("stats", pristine, "--plot", gone / "x.png"),
        ("analyze", pristine, "--csv", gone / "x.csv"),
        ("analyze", gone),
        ("import", tmp_path / "new", gone / "x.pt"),
        ("tune", "wasted-time", "--paper", "--plot", gone / "x.png"),
    ):
        outcome = ckpt(*arguments)
        assert outcome.code == 2, arguments
        assert f"{gone}" in outcome.err
        assert "does not exist" in outcome.err


def test_a_ref_before_the_store(run: Path, ckpt: Run, tmp_path: Path) -> None:
    for words in (
        ["restore", "2", run, "--out", tmp_path / "x.safetensors"],
        ["diff", "1", "2", run],
        ["retire", "1", run],
    ):
        outcome = ckpt(*words)
        assert outcome.code != 0
        assert outcome.err.splitlines()[-1] == f"hint: STORE comes before the REF: {run} {words[1]}"
    assert "comes before" not in ckpt("copy", "2", run).err  # there both are places
    assert "comes before" not in ckpt("restore", "2", "x" * 5000, "--out", tmp_path / "x.safetensors").err


def test_a_run_that_has_not_saved_yet(ckpt: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert "hint: nothing was saved there yet" in ckpt("log", tmp_path / "run").err


@pytest.mark.parametrize("name", ["bucket", "my bucket, ckpt repair", "x is a file, not the folder"])
def test_words_in_a_name_are_not_taken_for_an_error(ckpt: Run, tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    assert f"`ckpt import {shlex.quote(str(place))} FILE...` creates one" in ckpt("log", place).err
    place.mkdir()
    assert "hint: nothing was saved there yet" in ckpt("log", place).err


def test_hints_do_not_depend_on_the_words_of_an_error(pristine: Path, tmp_path: Path) -> None:
    """Each with a message that says nothing."""

    def hint(error: Exception, **typed: str) -> str | None:
        token = TYPED.set(typed)
        try:
            return hint_for(error)
        finally:
            TYPED.reset(token)

    gone, rules = CheckpointNotFoundError("?"), UsageError("?")
    gone.step, gone.term, rules.no_rules = 77, None, True
    assert hint(rules, store=str(pristine)) is not None
    assert hint(UsageError("the store has no rules of retention"), store=str(pristine)) is None
    assert "lists the checkpoints" in str(hint(gone, store=str(pristine)))
    damage = CorruptionError("?")
    damage.nearest = "2@1"
    damage.add_note("?")
    assert "2@1 is the nearest earlier checkpoint" in str(hint(damage, store=str(pristine)))
    (tmp_path / "a.pt").write_bytes(b"")
    place, file = str(tmp_path / "a"), str(tmp_path / "a.pt")
    assert "`ckpt import STORE" in str(hint(StoreNotFoundError.at(file, "?", "file"), store=file))
    assert hint(StoreNotFoundError.at("s3://b/x", "?", "no bucket"), store="s3://b/x") is None
    assert str(hint(StoreNotFoundError.at(place, "?", "no FORMAT"), store=place)).startswith("`ckpt repair ")
    assert f"`ckpt import {place} FILE...` creates one" in str(hint(StoreNotFoundError.at(place, "?"), store=place))
    assert "STORE" not in str(hint(StoreNotFoundError.at(place, "?"), store="elsewhere", other=place))


def test_a_retired_step_is_said_to_be_one(ckpt: Run, tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save({"w": [step]}, step)
    store.retire("1", take_over=True)
    for ref in ("1", "1@1"):
        assert store.fate(1) is not None
        assert (
            f"hint: {store.fate(1)}; `ckpt log {store.url}` lists the checkpoints"
            in ckpt("inspect", store.url, ref).err
        )


def test_a_file_where_a_store_belongs(ckpt: Run, tmp_path: Path) -> None:
    (tmp_path / "step_5.pt").write_bytes(b"")
    outcome = ckpt("import", tmp_path / "step_5.pt", tmp_path / "run")
    assert outcome.code in (2, 3)
    assert f"`ckpt import STORE {tmp_path / 'step_5.pt'}`" in outcome.err
    (tmp_path / "notes").write_bytes(b"")
    assert outcome_hint(ckpt("log", tmp_path / "notes").err) == "STORE is a folder; `ckpt ls` lists those that are here"


def outcome_hint(text: str) -> str:
    return text.splitlines()[-1].removeprefix("hint: ")


def test_a_rule_without_its_option(ckpt: Run, run: Path) -> None:
    outcome = ckpt("prune", run, "--keep", "last:5", "every:20")
    assert outcome.code == 2
    assert outcome_hint(outcome.err) == "pass each rule with its own --keep: --keep every:20"


def test_the_second_store_of_a_diff_has_a_ref_of_its_own(ckpt: Run, run: Path) -> None:
    outcome = ckpt("diff", run, "3", run)
    assert outcome.code == 2
    assert outcome_hint(outcome.err) == f"name its checkpoint: ckpt diff {run} 3 {run} 3"
