"""Crash points: none is missing in the code, in its register or in the documentation, and the crash tests reach all."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.host.crash_points import CRASH_POINTS, RANK_POINTS, TIER_POINTS, UPKEEP_POINTS
from tools.crash.scenario import live
from tools.mutants.copies import repository

ENGINE = repository() / "ckptstore"
Place = tuple[str, str, str]
"""Name, file and function of a call."""


class _Calls(ast.NodeVisitor):
    """Every call of ``crash_point`` in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scopes: list[str] = []
        self.found: list[Place] = []
        self.visit(ast.parse(path.read_bytes()))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # ast's name
        self.scopes.append(node.name)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).endswith("crash_point"):
            (name,) = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            self.found.append((name, self.path.relative_to(ENGINE).as_posix(), self.scopes[-1]))
        self.generic_visit(node)


@pytest.fixture(scope="module")
def called() -> list[Place]:
    """Every call in the engine."""
    return [place for path in sorted(ENGINE.rglob("*.py")) for place in _Calls(path).found]


def documented() -> list[Place]:
    """The rows of docs/crash-points.md, one for each place."""
    text = (repository() / "docs/crash-points.md").read_text()
    rows = re.findall(r"^\| `([a-z.-]+)` \| (.+?) \|", text, re.MULTILINE)
    return [(name, *place) for name, where in rows for place in re.findall(r"`([a-z_/]+\.py)` `(\w+)`", where)]


def test_the_calls_are_the_documented_ones(called: list[Place]) -> None:
    assert sorted(called) == sorted(documented())


def test_the_register_names_what_is_called_and_nothing_else(called: list[Place]) -> None:
    registered = [*CRASH_POINTS, *UPKEEP_POINTS, *RANK_POINTS, *TIER_POINTS]
    assert len(set(registered)) == len(registered)
    assert set(registered) == {name for name, _, _ in called}
    assert list(dict.fromkeys(name for name, _, _ in documented())) == registered


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning")
def test_a_life_of_the_crash_tests_comes_to_every_call(
    called: list[Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: set[Place] = set()

    def reach(name: str) -> None:
        caller = sys._getframe(1).f_code
        place = Path(caller.co_filename).resolve().relative_to(ENGINE).as_posix()
        reached.add((name, place, caller.co_name))

    for name, module in list(sys.modules.items()):
        if name.startswith("ckptstore.") and hasattr(module, "crash_point") and name != "ckptstore.host.crash_points":
            monkeypatch.setattr(module, "crash_point", reach)
    for mode in ("never", "always"):
        live(LocalBackend(tmp_path / mode, recycle=mode), lambda _: None)
    assert reached == {place for place in called if place[0] in CRASH_POINTS}
