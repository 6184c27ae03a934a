"""`ckpt keep` and `ckpt prune`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented
from tests.maintenance.test_pruning import CHAIN, RULES, promised, save

STEPS = range(1, 21)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Chains of seven; the loss is lowest at step 7."""
    with ckptstore.open(tmp_path / "chain") as store, store.writer(deltas=CHAIN, poll_seconds=None) as writer:
        save(writer, STEPS)
        writer.tag("mine", 3)
    return tmp_path / "chain"


def test_rules_are_set_shown_and_taken_away(ckpt: Run, chain: Path) -> None:
    assert ckpt("keep", chain).out == "no rules: every checkpoint is kept\n"
    done = ckpt("keep", chain, *RULES, "--take-over")
    assert done.out.splitlines() == list(RULES)
    assert "ckpt prune" in done.err
    found = ckpt("keep", chain, "--json").json
    assert_documented(found, documented("ckpt keep")[0])
    assert found["rules"] == list(RULES)
    assert ckptstore.open(chain).rules() == RULES
    assert ckpt("keep", chain, "--everything", "--take-over").out == "no rules: every checkpoint is kept\n"
    assert ckptstore.open(chain).rules() == ()


def test_dry_run_and_then(ckpt: Run, chain: Path) -> None:
    ckpt("keep", chain, *RULES, "--take-over")
    planned = ckpt("prune", chain, "--dry-run", "--json").json
    assert_documented(planned, documented("ckpt prune")[0])
    kept = [f"{step}@1" for step in promised(STEPS, tagged=[3])]
    assert sorted({ref for one in planned["kept"] for ref in one["checkpoints"]}) == sorted(kept)
    assert planned["checkpoints"] == len(kept)
    assert planned["gc"] is None
    assert len(ckptstore.open(chain).checkpoints()) == 20
    text = ckpt("prune", chain, "--dry-run")
    assert text.out.splitlines()[:6] == [
        "KEPT BY      COUNT  CHECKPOINTS",
        "newest           1  20@1",
        "tagged           1  3@1",
        "last:2           2  19@1, 20@1",
        "every:5          4  5..20@1 by 5",
        "best:loss:2      2  7@1, 8@1",
    ]
    assert text.out.splitlines()[6].startswith("would keep 8, would retire 12: 1@1, 2@1, 4@1, 6@1, 9@1, 11..14@1,")
    assert "still stored, because others build on them: " in text.out.splitlines()[7]
    segments = len(list((chain / "seg").rglob("*.safetensors")))
    done = ckpt("prune", chain, "--gc", "--take-over", "--json").json
    assert done == planned | {"dry_run": False, "gc": done["gc"]}
    assert done["gc"] == {"segments": len(done["dropped"]), "bytes": done["bytes_dropped"], "pinned_bytes": 0}
    assert len(list((chain / "seg").rglob("*.safetensors"))) == segments - done["gc"]["segments"]
    assert [info.ref for info in ckptstore.open(chain).checkpoints()] == kept
    assert ckpt("verify", chain, "--deep").code == 0
    assert ckpt("prune", chain, "--take-over").out.splitlines()[6] == "kept 8, retired 0"


def test_what_later_checkpoints_build_on_is_freed_too(ckpt: Run, chain: Path) -> None:
    """Pruning alone leaves the retired checkpoints below 3, which is tagged, and below 20."""
    rule = ["--keep", "last:1", "--take-over"]
    plan = ckpt("prune", chain, *rule, "--dry-run", "--compact", "--json").json
    assert plan["held"]
    assert plan["compact"] is None
    assert len(ckptstore.open(chain).checkpoints()) == 20
    done = ckpt("prune", chain, *rule, "--compact", "--gc", "--json")
    assert done.code == 0
    assert_documented(done.json, documented("ckpt prune")[0])
    assert done.json["compact"]["made"] == done.json["compact"]["moves"] > 0
    assert done.json["compact"]["bytes_after"] < done.json["compact"]["bytes_before"]
    store = ckptstore.open(chain)
    assert [info.ref for info in store.checkpoints()] == ["3@1", "20@1"]
    assert not ckpt("prune", chain, *rule, "--json").json["held"]
    assert (
        sum(path.stat().st_size for path in (chain / "seg").rglob("*.safetensors"))
        <= done.json["compact"]["bytes_after"]
    )
    assert ckpt("verify", chain, "--deep").code == 0
    assert "\ncompacted" not in ckpt("prune", chain, *rule, "--compact").out  # nothing is held any more


def test_a_full_to_map_stays_one(ckpt: Run, chain: Path) -> None:
    """The kept checkpoints that build on retired ones are rewritten, and nothing else."""
    store = ckptstore.open(chain)
    store.compact(plain=[12], take_over=True)
    (file,) = store.file_of(12)
    rules = ["--keep", "every:4", "--take-over", "--compact"]
    assert ckpt("prune", chain, *rules, "--json").json["compact"]["made"] > 0
    assert store.file_of(12) == [file]


def test_compaction_is_told(ckpt: Run, chain: Path) -> None:
    told = ckpt("prune", chain, "--keep", "last:1", "--take-over", "--compact")
    assert "still stored" not in told.out  # nothing is, after the compaction
    assert re.search(r"^compacted, \d+ moves?: [\d.]+ KiB -> [\d.]+ KiB, slowest restore", told.out, re.MULTILINE)
    assert "`ckpt compact" not in told.err


def test_rules_for_once(ckpt: Run, chain: Path) -> None:
    done = ckpt("prune", chain, "--keep", "last:1", "--take-over", "--gc")
    assert done.out.splitlines()[-1].startswith("deleted ")
    assert [info.step for info in ckptstore.open(chain).checkpoints()] == [3, 20]
    assert ckptstore.open(chain).rules() == ()


def test_mistakes(ckpt: Run, chain: Path) -> None:
    for arguments, why in (
        (("prune", chain, "--dry-run"), "has no rules of retention"),
        (("prune", chain, "--keep", "newest:3"), "'newest:3' is not a retention rule"),
        (("keep", chain, "last:0", "--take-over"), "'last:0' is not a retention rule"),
        (("keep", chain, "last:1", "--everything"), "omit RULE"),
    ):
        outcome = ckpt(*arguments)
        assert outcome.code == 2
        assert why in outcome.err
    assert ckpt("prune", chain, "--keep", "last:1", "--timeout", "0.05").code == 10
    assert len(ckptstore.open(chain).checkpoints()) == 20


@pytest.mark.filterwarnings("default")
def test_a_misspelt_metric_is_reported(ckpt: Run, chain: Path) -> None:
    told = "no checkpoint has 'los' (there are: loss): best:los:2 keeps everything until one has"
    assert f"note: {told}\n" in ckpt("keep", chain, "last:1", "best:los:2", "--take-over").err
    assert f"note: {told}\n" in ckpt("prune", chain, "--dry-run").err
    assert "keeps everything" not in ckpt("keep", chain, "best:loss:2", "--take-over").err
    with pytest.warns(UserWarning, match=re.escape(told)) as caught:
        ckptstore.open(chain).keep("best:los:2", take_over=True)
    assert caught[0].filename == __file__


def test_the_next_command_is_shown(ckpt: Run, chain: Path) -> None:
    outcome = ckpt("prune", chain)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == (
        f"hint: `ckpt prune {chain} --keep last:100` prunes once; `ckpt keep {chain} last:100` sets the rule for good"
    )
    assert ckpt("keep", chain, "last=5").err.endswith("hint: did you mean last:5?\n")
    ckpt("tag", chain, "good", "4", "--take-over")
    assert ckpt("inspect", chain, "good").err.endswith("hint: did you mean tag:good?\n")
    pruned = ckpt("prune", chain, "--keep", "every:5", "--take-over")
    assert f"note: `ckpt compact {chain} --gc` rewrites the kept checkpoints" in pruned.err
