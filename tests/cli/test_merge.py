"""`ckpt merge`: its output and its end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import ckptstore
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tests.cli.conftest import Run, assert_documented, documented
from tests.cli.terminal import on_a_terminal
from tests.maintenance.stores import grown
from tests.store.states import same
from tests.write.test_deltas import trajectory

STATES = trajectory(6)
CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Steps 1 to 6: a full and a chain of deltas; 3 is tagged."""
    root = tmp_path / "run"
    with ckptstore.open(root).writer(deltas=CHAIN, poll_seconds=None) as writer:
        for step, state in enumerate(STATES, 1):
            writer.save(state, step=step)
        writer.tag("best", 3)
    return root


def steps(root: Path) -> list[int]:
    return [info.step for info in ckptstore.open(root).checkpoints()]


def test_a_plan_and_what_becomes_of_it(ckpt: Run, chain: Path) -> None:
    planned = ckpt("merge", chain, "1..6", "--dry-run")
    assert planned.code == 0
    assert "would be merged into one segment: 3 checkpoints: 4..6@1" in planned.out
    assert "would be retired: 3 checkpoints: 2@1, 4@1, 5@1" in planned.out
    assert "stays: 3@1, tag 'best' names it" in planned.out
    assert "fulls, which stay: 1@1" in planned.out
    assert "nothing was written" in planned.err
    assert steps(chain) == [1, 2, 3, 4, 5, 6]
    found = ckpt("merge", chain, "1..6", "--take-over", "--json").json
    assert_documented(found, documented("ckpt merge")[0])
    assert found["answer"] == "accepted"
    assert found["restore_before"]["links"] == 6
    assert found["restore_after"]["links"] == 4
    assert steps(chain) == [1, 3, 6]
    collected = ckpt("gc", chain, "--json").json
    assert sorted(collected["segments"]) == sorted(found["dropped"])
    assert collected["bytes"] == found["bytes_dropped"]
    assert ckpt("verify", chain).code == 0
    for step in (1, 3, 6):
        same(STATES[step - 1], ckptstore.open(chain).load(step))


def test_fulls_are_dropped_only_with_the_option(ckpt: Run, chain: Path) -> None:
    done = ckpt("merge", chain, "1..6", "--fulls", "--take-over")
    assert done.code == 0
    assert "retired: 4 checkpoints: 1@1, 2@1, 4@1, 5@1" in done.out
    assert "stays: 3@1, tag 'best' names it" in done.out
    assert "4 checkpoints can no longer be restored after this" in done.err
    assert steps(chain) == [3, 6]
    for step in (3, 6):
        same(STATES[step - 1], ckptstore.open(chain).load(step))
    refused = ckpt("merge", chain, "3..6", "--fulls", "--keep-steps", "--take-over")
    assert refused.code == 2
    assert "ckpt compact --only" in refused.err


def test_no_gain_is_reported_instead_of_a_table_of_zeros(ckpt: Run, tmp_path: Path) -> None:
    store = grown(tmp_path / "grown")  # batches of four: 7 to 10, 11 to 14, 15 to 18
    planned = ckpt("merge", store.url, "8@3..9@3", "--dry-run")
    assert planned.out == (
        "9@3: stays stored as it is\n"
        "would be retired: 8@3\n"
        "no segment can be dropped: checkpoints outside the range are in the same segments, or build on them\n"
    )
    assert planned.err.endswith("note: nothing was written (--dry-run)\n")


def test_keep_steps_as_text(ckpt: Run, chain: Path) -> None:
    outcome = ckpt("merge", chain, "2..latest", "--keep-steps", "--take-over")
    assert outcome.code == 0
    assert outcome.out.startswith("merged into one segment: 5 checkpoints: 2..6@1\n6@1: chunks copied as they are\n")
    assert "TO RESTORE 6@1" in outcome.out
    assert "5 segments are no longer needed: `ckpt gc` frees " in outcome.err
    assert steps(chain) == [1, 2, 3, 4, 5, 6]


def test_losses_are_reported_before_and_after(ckpt: Run, chain: Path) -> None:
    planned = ckpt("merge", chain, "4..6", "--dry-run")
    assert planned.err.startswith("note: 2 checkpoints can no longer be restored after this: 4@1, 5@1\n")
    refused = on_a_terminal("merge", chain, "4..6", "--take-over", typed="n\n")
    assert "2 checkpoints can no longer be restored after this: 4@1, 5@1" in refused
    assert "nothing was changed" in refused
    assert steps(chain) == [1, 2, 3, 4, 5, 6]
    done = on_a_terminal("merge", chain, "4..6", "--take-over", typed="y\n")
    assert "Merge (--keep-steps would keep them)?" in done
    assert steps(chain) == [1, 2, 3, 6]
    for ref in ("5", "5@1"):
        gone = ckpt("inspect", chain, ref)
        assert gone.code == 3
        assert "hint: 5@1 was dropped by a merge into 6@1; `ckpt log" in gone.err
    assert ckpt("retire", chain, "2@1", "--take-over").code == 0
    assert "hint: 2@1 was retired; `ckpt log" in ckpt("inspect", chain, "2").err
    assert "was " not in ckpt("inspect", chain, "77").err


def test_yes_asks_nothing(chain: Path) -> None:
    assert "Merge (" not in on_a_terminal("merge", chain, "4..6", "--take-over", "--yes")
    assert steps(chain) == [1, 2, 3, 6]


def test_a_live_run_is_asked(ckpt: Run, chain: Path) -> None:
    stop = threading.Event()

    def train() -> None:
        with ckptstore.open(chain).writer(poll_seconds=0.05):
            stop.wait()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        while len(ckptstore.open(chain).terms()) < 2:
            pass
        found = ckpt("merge", chain, "4@1..5@1", "--json").json
    finally:
        stop.set()
        thread.join()
    assert found["answer"] == "accepted"
    assert len(ckptstore.open(chain).terms()) == 2  # nobody was fenced
    assert steps(chain) == [1, 2, 3, 5, 6]


def test_nobody_answers(ckpt: Run, chain: Path) -> None:
    with ckptstore.open(chain).writer(poll_seconds=None):
        outcome = ckpt("merge", chain, "4..6", "--timeout", "0.1")
        found = ckpt("merge", chain, "4..6", "--timeout", "0", "--json")
    assert outcome.code == 10
    assert "no answer in 0.1 s. A live run looks for requests" in outcome.err
    assert "--take-over" in outcome.err
    assert steps(chain) == [1, 2, 3, 4, 5, 6]
    assert found.code == 10
    assert_documented(found.json, documented("ckpt merge")[0])
    assert found.json["answer"] == "waiting"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["1"], 2, "'1' is not a range; write A..B"),
        (["1..2"], 2, "nothing to merge"),
        (["5..2"], 2, "write 2..5"),
        (["1..77"], 3, "no checkpoint of step 77"),
        (["4..6", "--timeout", "-1"], 2, "timeout"),
    ],
)
def test_errors(ckpt: Run, chain: Path, arguments: list[str], code: int, message: str) -> None:
    outcome = ckpt("merge", chain, *arguments, "--take-over")
    assert outcome.code == code
    assert message in outcome.err
    assert len(ckptstore.open(chain).terms()) == 1


def test_no_store(ckpt: Run, tmp_path: Path) -> None:
    assert ckpt("merge", tmp_path / "nothing", "1..2").code == 3
    assert not (tmp_path / "nothing").exists()
