"""Accelerate's door, with the real Accelerator: runs that are stopped or killed anywhere repeat the same numbers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.accelerate_job import CASES, StoppedError, lines_of, train

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # of torchdata
    # Loading a sample draws nothing in the workers of these jobs.
    pytest.mark.filterwarnings("ignore:the random generators of the loader's:ckptstore.DeterminismWarning"),
]


def same(found: list[str], wanted: list[str]) -> None:
    """Whether a run that was continued has the losses of one that was never stopped; it may repeat batches."""
    assert set(found) - set(wanted) == set(), "losses that the run that was never stopped does not have"
    assert list(dict.fromkeys(found)) == wanted


def stopped(store: Any, losses: Path, case: dict[str, Any], at: int) -> None:
    with suppress(StoppedError):
        train(store, losses, stop=at, **case)


STOPS = (3, 9, 5, 1, 2)
"""After so many micro-batches each life of a run is stopped: in the middle of an accumulation, after an epoch's last
batch, in the next epoch, before and after the first batch that follows a resume."""


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_ends_anywhere_continues_bit_for_bit(tmp_path: Path, case: str) -> None:
    train(tmp_path / "whole", tmp_path / "wanted", **CASES[case])
    wanted = lines_of(tmp_path / "wanted")
    for at in STOPS[:3] if "workers" in CASES[case] else STOPS:
        stopped(tmp_path / "run", tmp_path / "losses", CASES[case], at)
    train(tmp_path / "run", tmp_path / "losses", **CASES[case])
    same(lines_of(tmp_path / "losses"), wanted)
