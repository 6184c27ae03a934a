"""Scripts with a Checkpointer that are killed: ``python -m tools.kills.shim_kills --every-form`` in short."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import ckptstore
import ckptstore.agent
from tests.agent.lives import alive, own_runtime, until
from tests.forms import long_only, short_or

pytest.importorskip("torch")

from tools.kills.shim_kills.__main__ import Campaign, main, turns
from tools.kills.shim_kills.lives import Job, Violation, kill_agent
from tools.kills.shim_kills.sweeps import Sweeper, Tally
from tools.warm import Warm

STRATEGIES = ("full", "delta", "gradient")


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for the files of broken promises."""
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="module")
def sweeper(warm: Warm, evidence: Path) -> Sweeper:
    """One sweeper, so that uninterrupted runs are made once."""
    return Sweeper(warm.start, evidence)


def swept(sweeper: Sweeper, job: Job, kills: int, seed: str = "1") -> None:
    tally = Tally()
    sweeper.sweep(kills, job, seed, tally)
    assert tally.kills.total() == kills
    assert tally.ends >= 1
    assert tally.lives >= kills


def in_short(*chosen: str) -> list[object]:
    """The strategies; in CI only the chosen ones are tried."""
    return [one if one in chosen else pytest.param(one, marks=long_only) for one in STRATEGIES]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", in_short("gradient"))
def test_one_process(sweeper: Sweeper, strategy: str) -> None:
    swept(sweeper, Job(strategy), short_or(2, 5))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", in_short("gradient"))
def test_two_ranks(sweeper: Sweeper, strategy: str) -> None:
    swept(sweeper, Job(strategy, 2), short_or(1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", in_short())
def test_two_ranks_of_a_model_in_shards(sweeper: Sweeper, strategy: str) -> None:
    swept(sweeper, Job(strategy, 2, sharded=True), short_or(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replica", *in_short()])
def test_one_process_and_its_agent(sweeper: Sweeper, strategy: str) -> None:
    swept(sweeper, Job(strategy, by_agent=True), short_or(2, 5), "3")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param(one, marks=long_only) for one in ("replica", *STRATEGIES)])
def test_two_ranks_and_their_agents(sweeper: Sweeper, strategy: str) -> None:
    swept(sweeper, Job(strategy, 2, by_agent=True), short_or(1, 5), "3")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param(one, marks=long_only) for one in ("gradient", "replica")])
def test_two_ranks_of_a_model_in_shards_and_their_agents(sweeper: Sweeper, strategy: str) -> None:
    swept(sweeper, Job(strategy, 2, sharded=True, by_agent=True), 1, "3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "why"),
    [
        pytest.param("generators", "loss of step", marks=long_only),
        ("moments", "loss of step|last state differs"),
        pytest.param("acknowledgements", "was acknowledged", marks=long_only),
    ],
)
def test_a_checkpointer_that_is_wrong_is_found_out(sweeper: Sweeper, evidence: Path, broken: str, why: str) -> None:
    tally, before = Tally(), set(evidence.iterdir())
    with pytest.raises(Violation, match=why) as found:
        sweeper.sweep(100, Job("full", broken=broken), "1", tally)  # the first one found ends it
    (kept,) = set(evidence.iterdir()) - before
    assert str(kept) in str(found.value)
    assert re.search(r"\n-- stderr-\d+-0\.txt:\n.*ckptstore", str(found.value)), "what the lives have said"
    story = json.loads((kept / "story.json").read_text())
    assert story["lives"][-1]["life"]["resumed"] is not None
    assert (kept / "run/store/FORMAT").exists()


@pytest.mark.slow
def test_a_campaign_continues_where_it_was(warm: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kills.jsonl"
    words = ["--ranks", "1", "--strategy", "full", "--kills", "2", "--out", str(out), "--seed", "1"]
    status = main([*words, "--turn", "2"], warm.start)
    said = capsys.readouterr().out
    assert said.startswith("seed 1\nfull, 1 rank: 2 kills (trainer 2); ")
    assert status == ("BROKEN" in said), "both kills may have come before the first durable step"
    noted = out.read_text()

    def nothing(*_: object, **__: object) -> None:
        raise AssertionError("it was done already")

    main([*words, "--turn", "2", "--json"], nothing)  # type: ignore[arg-type]
    assert out.read_text() == noted
    summary = json.loads(capsys.readouterr().out)
    assert summary["kills"] == summary["forms"]["full, 1 rank"]["kills"]["trainer"] == 2


def test_an_agent_is_killed_and_another_process_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness that does not know an agent by its command line kills none, and shows nothing."""
    with (
        own_runtime(tmp_path / "runtime", monkeypatch),
        ckptstore.agent.writer(tmp_path / "store", linger_seconds=0) as writer,
    ):
        writer.save({"x": np.zeros(3)}, 1)
        assert not kill_agent(os.getpid())
        assert kill_agent(writer.agent_pid)
        until(lambda: not alive(writer.agent_pid))
        with pytest.warns(ckptstore.agent.AgentRestartWarning):
            writer.save({"x": np.zeros(3)}, 2)


def campaign(*records: tuple[int, int, str | None]) -> Campaign:
    """A campaign of (turn, lives that resumed, violation)."""
    found = Campaign(5)
    for turn, resumed, violation in records:
        found.note(Job("full"), turn, Tally(lives=3, resumed=resumed, ends=1), violation)
    return found


def test_turns_are_added_up_and_a_form_that_shows_nothing_says_so() -> None:
    assert campaign((0, 2, None), (1, 0, None)).summary()["forms"]["full, 1 rank"]["lives"] == 6
    assert not campaign((0, 2, None), (1, 0, None)).summary()["forms"]["full, 1 rank"]["violations"]
    assert "the run proves nothing" in campaign((0, 0, None)).summary()["forms"]["full, 1 rank"]["violations"][0]
    assert campaign((0, 2, "why")).summary()["forms"]["full, 1 rank"]["violations"] == ["why"]


def test_a_form_that_is_broken_has_no_more_turns() -> None:
    done = campaign((0, 2, None))
    assert done.done(Job("full"), 0)
    assert not done.done(Job("full"), 1)
    assert not done.done(Job("full", 2), 0)
    assert campaign((0, 2, "why")).done(Job("full"), 1)


def test_forms_take_turns() -> None:
    jobs = [Job("full"), Job("delta")]
    assert list(turns(jobs, 25, 10)) == [(job, turn, count) for turn, count in enumerate((10, 10, 5)) for job in jobs]
