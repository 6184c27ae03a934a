"""Each test file belongs to exactly one of ``make test`` and ``make test-rest``; CI runs both."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import division
from tests.conftest import pytest_ignore_collect

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def collected(expression: str) -> set[Path]:
    """The files that pytest would import for ``-m expression``."""
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    return {file for file in FILES if not pytest_ignore_collect(file, config)}


def test_each_file_is_in_one_of_the_two() -> None:
    ordinary, rest = collected("not rest"), collected("rest")
    assert len(FILES) > 250
    assert ordinary | rest == set(FILES)
    assert not ordinary & rest
    assert min(len(ordinary), len(rest)) > 30
    assert collected("") == set(FILES), "without -m all are run"
    assert collected("rest and slow") == set(FILES), "any other expression is left to pytest"


def test_each_entry_names_something() -> None:
    for one in division.REST:
        assert (ROOT / one).is_dir() if one.endswith("/") else ROOT / one in FILES, one
    assert len(set(division.REST)) == len(division.REST)


def test_each_test_is_marked_by_its_file(request: pytest.FixtureRequest) -> None:
    """The mark lets ``-m`` deselect tests that are collected anyway, as when a file is named on the command line."""
    for item in request.session.items:
        assert (item.get_closest_marker("rest") is not None) == division.in_rest(item.path), item.nodeid


def test_the_commands_run_the_two_parts_and_ci_runs_both() -> None:
    recipes = dict(re.findall(r"^(test[a-z-]*):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    chosen = {name: re.findall(r'-m ("[^"]+"|\w+) \$\(PYTEST_ARGS\)', recipe) for name, recipe in recipes.items()}
    assert chosen["test"] == ['"not rest"']
    assert chosen["test-rest"] == ["rest"]
    assert chosen["test-long"] == [], "it runs all"
    assert set(division.EXPRESSIONS) == {"rest", "not rest"}
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("make test")] == ["test", "test-rest"]
