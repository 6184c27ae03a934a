"""The graph of forks, drawn."""

from __future__ import annotations

import pytest

from ckptstore.cli.graph import draw


def drawn(*edges: str) -> list[str]:
    """`draw` on edges given newest first: ``child<parent`` or ``root``."""
    pairs = [edge.partition("<") for edge in edges]
    nodes = [child for child, _, _ in pairs]
    return [
        f"{columns} {node}" if node else columns
        for columns, node in draw(nodes, {child: parent or None for child, _, parent in pairs})
    ]


def test_a_line() -> None:
    assert drawn("3<2", "2<1", "1") == ["* 3", "* 2", "* 1"]


def test_a_fork() -> None:
    assert drawn("4b<2", "4a<3a", "3a<2", "2<1", "1") == ["* 4b", "| * 4a", "| * 3a", "|/", "* 2", "* 1"]


def test_three_branches_from_one_checkpoint() -> None:
    assert drawn("c<1", "b<1", "a<1", "1") == ["* c", "| * b", "| | * a", "|_|/", "|/", "* 1"]


def test_a_branch_joins_while_others_continue() -> None:
    # d continues b; c and b both continue a; e is on the right and moves left when c joins
    assert drawn("d<b", "c<a", "e<x", "b<a", "a", "x") == [
        "* d",
        "| * c",
        "| | * e",
        "* | | b",
        "|/ /",
        "* | a",
        "  * x",
    ]


def test_roots_free_their_column() -> None:
    assert drawn("b2<b1", "a2<a1", "b1", "c", "a1") == ["* b2", "| * a2", "* | b1", "* | c", "  * a1"]


def test_an_unknown_parent_is_none() -> None:
    assert drawn("3<2", "1") == ["* 3", "* 1"]


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_long_histories(count: int) -> None:
    nodes = list(range(count, 0, -1))
    lines = list(draw(nodes, {node: node - 1 for node in nodes}))
    assert [node for _, node in lines] == nodes
    assert {columns for columns, _ in lines} <= {"*"}
