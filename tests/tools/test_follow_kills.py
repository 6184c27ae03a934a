"""Followers that are killed: ``python -m tools.kills.follow_kills`` in short, and its oracle notices wrong bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forms import short_or
from tools.kills import follow_kills


@pytest.mark.slow
def test_followers_that_are_killed_end_with_the_bits_of_the_run(tmp_path: Path) -> None:
    result = follow_kills.run(str(tmp_path / "store"), {}, short_or(4, 50), tmp_path, seed=3)
    assert sum(result.kills.values()) == short_or(4, 50)
    assert result.seen
    assert result.checkpoints > 3


def test_the_oracle_sees_a_state_that_the_run_never_had(tmp_path: Path) -> None:
    told, shown, file = tmp_path / "told", tmp_path / "shown", tmp_path / "file"
    told.write_text(f"1@1 {'a' * 64}\n")
    shown.write_text(f"1@1 {'a' * 64} - 0\n")
    follow_kills.check(told, shown, file, follow_kills.Result())
    shown.write_text(f"1@1 {'b' * 64} - 0\n")
    with pytest.raises(follow_kills.WrongError, match="1@1"):
        follow_kills.check(told, shown, file, follow_kills.Result())
