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
    assert ckpt("rm", run, "3@1", "4@1", "--dry-run").out == text.out  # what people type
    assert "2 segments are needed no more: `ckpt gc` would free " in text.err
    done = ckpt("retire", run, "3@1", "4@1", "--take-over", "--json").json
    assert done == planned | {"dry_run": False}
    assert [info.ref for info in store.checkpoints()] == ["1@1", "2@1", "3@2", "4@2", "5@3"]
    assert ckpt("gc", run, "--json").json["segments"] == sorted(done["dropped"])
    assert ckpt("verify", run).code == 0


def test_what_is_kept_is_said(ckpt: Run, tmp_path: Path) -> None:
    from tests.maintenance.test_tags_and_retirement import CHAIN, fill

    store = fill(ckptstore.open(tmp_path / "chain"), 1, 2, 3, deltas=CHAIN)
    outcome = ckpt("retire", store.url, "2", "--take-over")
    assert outcome.out.splitlines() == [
        "retired 2@1",
        "stored still, because others build on it or share its segment: 2@1",
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
