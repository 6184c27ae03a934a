"""``python -m tools.crash.points docs/crash-points.md``: the page of crash points, from the register and the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from ckptstore.host.crash_points import CRASH_POINTS, PUBLISH_POINTS, RANK_POINTS, TIER_POINTS, UPKEEP_POINTS

__all__ = ["ENGINE", "Place", "calls", "page"]

ENGINE: Final = Path(__file__).parents[2] / "ckptstore"
Place = tuple[str, str, str]
"""Name, file and function of a call of ``crash_point``."""
_HEAD: Final = """# Crash points

Named instants at which the crash tests kill the process with SIGKILL (`CKPTSTORE_CRASH_AT=name:n`: at the n-th time).
`make crash` visits each of them again and again, `make rank-kills` those of ranks, `python -m tools.kills.tier_kills`
those of two tiers, `tests/maintenance/test_upkeep_kills.py` those of prune, copy and repair, and
`tests/following/test_publish_kills.py` those of a publisher.
`python -m tools.crash.points docs/crash-points.md` writes this page.
"""
_COLUMNS: Final = "| name | where | at that instant |\n|---|---|---|"
_SECTIONS: Final = {
    "One process": CRASH_POINTS,
    "Prune, copy and repair": UPKEEP_POINTS,
    "Ranks": RANK_POINTS,
    "Two tiers": TIER_POINTS,
    "Publishing weights": PUBLISH_POINTS,
}


def calls() -> list[Place]:
    """Every call of ``crash_point`` in the engine."""
    return [place for path in sorted(ENGINE.rglob("*.py")) for place in _Calls(path).found]


def page() -> str:
    """The text of docs/crash-points.md."""
    places = calls()
    parts = [_HEAD]
    for heading, points in _SECTIONS.items():
        rows = [f"| `{name}` | {', '.join(_where(name, places))} | {said} |" for name, said in points.items()]
        parts.append("\n".join([f"## {heading}\n", _COLUMNS, *rows]) + "\n")
    return "\n".join(parts)


def _where(name: str, places: list[Place]) -> Iterator[str]:
    return (f"`{file}` `{function}`" for called, file, function in places if called == name)


class _Calls(ast.NodeVisitor):
    """The calls in one file."""

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
            self.found.append((str(name), self.path.relative_to(ENGINE).as_posix(), self.scopes[-1]))
        self.generic_visit(node)


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
def main(path: Path) -> None:
    """Write the page of crash points to PATH."""
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
