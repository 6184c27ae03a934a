"""The table of what saving every step costs in each framework, with small runs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tests.forms import long_only
from tools.bench.training.framework_steps import FRAMEWORKS, LINES, main

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "framework", ["torch.save", *(pytest.param(one, marks=long_only) for one in FRAMEWORKS if one != "torch.save")]
)
def test_each_framework_has_a_row(framework: str) -> None:
    small = ["--width", "16", "--steps", "8", "--rounds", "1", "--json", "--framework", framework]
    done = CliRunner().invoke(main, small, catch_exceptions=False)
    (row,) = json.loads(done.stdout)
    assert row["framework"] == framework
    assert row["lines"] == [len(one) for one in LINES[framework]]
    assert all(seconds > 0 for seconds in row["seconds"].values())
