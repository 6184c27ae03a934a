"""`ckpt retire`."""

from __future__ import annotations

from pathlib import Path

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented


def test_dry_run_and_then(ckpt: Run, run: Path) -> None:
    store = ckptstore.open(run)
    planned = ckpt("retire", run, "3@1", "4@1", "--dry-run", "--json").json
    assert_documented(planned, documented("ckpt retire")[0])
    assert (planned["retired"], planned["kept"], len(planned["dropped"])) == (["3@1", "4@1"], [], 2)
    assert len(store.checkpoints()) == 7
    text = ckpt("retire", run, "3@1", "4@1", "--dry-run")
    assert text.out == "would retire 2 checkpoints: 3@1, 4@1\n"
    assert ckpt("rm", run, "3@1", "4@1", "--dry-run").out == text.out  # the forms that people type
    assert "2 segments are no longer needed: `ckpt gc` would free " in text.err
    done = ckpt("retire", run, "3@1", "4@1", "--take-over", "--json").json
    assert done == planned | {"dry_run": False}
    assert [info.ref for info in store.checkpoints()] == ["1@1", "2@1", "3@2", "4@2", "5@3"]
    assert ckpt("gc", run, "--json").json["segments"] == sorted(done["dropped"])
    assert ckpt("verify", run).code == 0


def test_kept_checkpoints_are_reported(ckpt: Run, tmp_path: Path) -> None:
    from tests.maintenance.test_tags_and_retirement import CHAIN, fill

    store = fill(ckptstore.open(tmp_path / "chain"), 1, 2, 3, deltas=CHAIN)
    outcome = ckpt("retire", store.url, "2", "--take-over")
    assert outcome.out.splitlines() == [
        "retired 2@1",
        "still stored, because others build on it or share its segment: 2@1",
    ]
    assert outcome.err == ""


def test_mistakes(ckpt: Run, run: Path) -> None:
    for ref, code, why in (
        ("latest", 2, "latest"),
        ("tag:best", 2, "5@3"),
        ("99", 3, "no checkpoint"),
        ("x", 2, "REF"),
    ):
        outcome = ckpt("retire", run, "1", ref, "--take-over")
        assert (outcome.code, why in outcome.err) == (code, True), ref
    assert ckpt("retire", run).code == 2
    assert len(ckptstore.open(run).checkpoints()) == 7


def test_without_a_ref_it_says_what_to_type(ckpt: Run, run: Path) -> None:
    """The example can be pasted: the newest checkpoint that may be retired (4@2: 5@3 is the latest, and has a tag)."""
    before = sorted(run.rglob("*"))
    for name in ("rm", "retire"):
        outcome = ckpt(name, run)
        assert outcome.code == 2
        said = "error: pass the REFs of the checkpoints to give up: no REF is given, and nothing was changed"
        assert said in outcome.err
        assert f"hint: `ckpt retire {run} 4@2 --dry-run` shows what giving one up would do" in outcome.err
    assert sorted(run.rglob("*")) == before
    assert ckpt("retire", run, "4@2", "--dry-run").code == 0
    found = ckpt("rm", run, "--json", "--take-over")
    assert (found.code, found.json["error"]["exit_code"]) == (2, 2)
    assert f"{run} 4@2 --dry-run" in found.json["error"]["hint"]


def test_of_a_store_without_such_a_checkpoint_the_example_is_a_word(ckpt: Run, tmp_path: Path) -> None:
    ckptstore.open(tmp_path / "empty run", create=True)
    outcome = ckpt("rm", tmp_path / "empty run")
    assert outcome.code == 2
    assert f"`ckpt retire '{tmp_path}/empty run' REF --dry-run`" in outcome.err
    assert ckpt("rm", tmp_path / "nothing").code == 3
