"""A short campaign of `tools.kills.agent_kills`, and the errors that it would notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forms import long_only, short_or
from tools.crash.scenario import Violation
from tools.kills.agent_kills import MODES, Campaign, Truth, campaign


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(one, marks=long_only) if one == "full" else one for one in sorted(MODES)]
)
def test_nothing_acknowledged_is_lost(tmp_path: Path, mode: str) -> None:
    for attempt in range(5):  # on a busy machine nothing may be durable within half a second
        done = campaign(tmp_path / str(attempt), mode, short_or(2, 3), seed=5)
        assert sum(done.kills.values()) == short_or(2, 3)
        if done.newest:
            break
    assert done.newest > 0


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("up 500 2 7 1 {wrong}", "wrong bits"),
        ("up 500 2 5 1 {5}", "step 7 was acknowledged"),
        ("up 500 3 8 1 {8}", "should continue"),
        ("up 500 2 8 0 {8}", "kept nothing"),
        ("up 501 2 8 1 {8}", "should continue"),
        ("up 500 2 7 1 {7}", "step 9 was handed over"),
        ("died AgentError: none", "did not begin"),
    ],
)
def test_violations_are_noticed(tmp_path: Path, line: str, why: str) -> None:
    truth = Truth()
    one = Campaign(str(tmp_path / "store"), "full")
    one.expect("trainer", agent=500, term=2, given=9, newest=7)
    digests = {str(step): truth[step] for step in range(10)}
    for name, digest in digests.items():
        line = line.replace(f"{{{name}}}", digest)
    with pytest.raises(Violation, match=why):
        one.begin(line.replace("{wrong}", digests["6"]))
