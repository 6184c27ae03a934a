"""The table of frameworks: only imported ones are queried, and ``into=`` refuses tensors that cannot be overwritten."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import MissingDependencyError, UnsupportedStateError
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.state import Recognise
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


def test_a_torch_whose_groups_have_no_store_for_others_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.6 to 2.8: otherwise ranks would fail with an unexplained AttributeError on another machine."""
    from torch import distributed

    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    monkeypatch.delattr(distributed.ProcessGroup, "get_group_store", raising=False)
    distributed.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        with (
            ckptstore.open(tmp_path / "store") as store,
            pytest.raises(MissingDependencyError, match=r"group= needs torch 2\.9 or newer: torch 2\."),
        ):
            store.writer(group=distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()
