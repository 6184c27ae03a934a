"""`tools.entered` and `tools.bench.training.small` run, and count correctly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import ckptstore
from tools import entered
from tools.bench.training import small


def test_functions_of_the_package_are_counted(tmp_path: Path) -> None:
    with entered.counted() as found:
        sum(range(10))
    assert found().functions == 0
    with entered.counted() as found, ckptstore.open(tmp_path / "store") as store, store.writer() as writer:
        writer.save({"a": 1}, 1)
    one = found()
    assert 20 < one.functions <= one.all_functions
    assert 10 < one.modules <= one.all_modules
    assert one.threads >= 1


def test_the_report_names_four_operations() -> None:
    told = CliRunner().invoke(entered.main, ["--json"], catch_exceptions=False)
    found = json.loads(told.output)
    assert [name.partition(",")[0] for name in found] == ["save_async", "step()", "load", "tag"]
    assert all(one["functions"] > 10 for one in found.values())


@pytest.mark.usefixtures("one_thread")
def test_small_states_are_saved_in_every_way_and_compared(tmp_path: Path) -> None:
    rows = small.measure(tmp_path, 3)
    assert [row.way for row in rows] == list(small.WAYS)
    assert all(row.loop > 0 for row in rows)
    assert rows[0].ratio == 1
