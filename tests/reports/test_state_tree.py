"""The state's tree in its readable form."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from ckptstore.formats.states.state import Tagged, flatten
from ckptstore.reports.state_tree import children, is_tensor, leaves, text


def tree(state: Any) -> Any:
    def recognise(value: object) -> Tagged | None:
        return Tagged("$size", [2, 3]) if isinstance(value, memoryview) else None  # a substitute for torch.Size

    return flatten(state, recognise).tree


def test_leaves_have_paths() -> None:
    state = {
        "a": {"b": [1, (2.5, None)], "t": np.ones(2)},
        3: {"x": "y"},
        ("k", 1): OrderedDict([("o", b"z"), (2, True)]),
        "empty": [],
        "long": list(range(40)),
    }
    assert [(path, text(leaf, 40)) for path, leaf in leaves(tree(state))] == [
        ("a.b.0", "1"),
        ("a.b.1.0", "2.5"),
        ("a.b.1.1", "None"),
        ("3.x", "'y'"),
        ("('k', 1).o", "b'z'"),
        ("('k', 1).2", "True"),
        ("empty", "[]"),
        ("long", "[0, 1, 2, 3, 4, 5, 6, 7, 8,… (40 in all)"),
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2**70, str(2**70)),
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
        (1 - 2j, "(1-2j)"),
        ({3}, "{3}"),
        (np.float32(0.5), "np.float32(0.5)"),
        (memoryview(b""), "torch.Size([2, 3])"),
        ("x" * 100, "'" + "x" * 70 + "…"),
    ],
)
def test_leaves_are_printed_as_python_does(value: Any, shown: str) -> None:
    assert text(tree({"v": value})["v"]) == shown


def test_tensors() -> None:
    nodes = dict(children(tree({"t": np.ones(1), "n": 1})) or [])
    assert is_tensor(nodes["t"])
    assert not is_tensor(nodes["n"])
    assert text(nodes["t"]) == "<tensor t>"
    assert children(nodes["n"]) is None
    assert list(leaves(tree(np.ones(1)))) == []
    assert list(leaves(5)) == [("", 5)]
