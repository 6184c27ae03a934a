"""The table of frameworks: what the process has imported is asked; what nobody can overwrite, ``into=`` refuses."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.state import Recognise
from ckptstore.frameworks import bridge

torch = pytest.importorskip("torch")


class Array:
    numbers = np.arange(3)


@pytest.fixture(autouse=True)
def acme(monkeypatch: pytest.MonkeyPatch) -> None:
    def recogniser(sharded: bool) -> Recognise:
        return lambda value: NumpySource(value.numbers.copy()) if isinstance(value, Array) else None

    monkeypatch.setattr(bridge, "ADAPTERS", {**bridge.ADAPTERS, "acme": bridge.Adapter(recogniser)})


def test_a_state_may_hold_tensors_of_two_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "acme", ModuleType("acme"))
    flat = bridge.flattened({"a": Array(), "t": torch.ones(2), "n": np.zeros(1), "step": 1})
    assert flat.tree == {"a": {"$a": "a"}, "t": {"$t": "t"}, "n": {"$a": "n"}, "step": 1}
    with pytest.raises(UnsupportedStateError, match=r"^state\['a'\]: .*Array cannot be overwritten"):
        bridge.flattened({"a": Array()}, overwritten=True)
    assert list(bridge.flattened({"t": torch.ones(2)}, overwritten=True).tensors) == ["t"]


def test_a_framework_that_is_not_imported_is_not_asked() -> None:
    with pytest.raises(UnsupportedStateError, match="Array cannot be stored"):
        bridge.flattened({"a": Array()})
