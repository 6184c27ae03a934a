"""Training loops that are killed: ``python -m tools.kills.loop_kills`` in short. PEFT's is in tests/integrations."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.forms import long_only, short_or
from tools.crash.scenario import Violation
from tools.kills.loop_kills import Form, sweep
from tools.warm import Warm


@pytest.mark.parametrize("strategy", ["gradient", *(pytest.param(one, marks=long_only) for one in ("full", "delta"))])
@pytest.mark.parametrize("workers", [pytest.param(0, marks=long_only), 2])
def test_the_plain_loop(tmp_path: Path, workers: int, strategy: str, warm: Warm) -> None:
    result = sweep(warm.start, tmp_path, Form("plain", workers, strategy), short_or(2, 25), "1")
    assert result.kills == short_or(2, 25)
    assert result.runs >= 1


def test_a_loop_that_forgets_its_loader_is_noticed(tmp_path: Path, warm: Warm) -> None:
    with pytest.raises(Violation, match="losses that the run that is never killed does not have"):
        sweep(warm.start, tmp_path, Form("plain", 0, "full", forgets=True), short_or(2, 5), "1")
