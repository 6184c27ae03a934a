"""Objects of the standard library in files of torch.save: inert ones are restored, all others are refused."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import fractions
import os
import pathlib
import types
from collections import OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import CkptError, UnsupportedStateError
from tests.frameworks.test_pickled_arrays import Made, imported


class Phase(enum.Enum):
    WARM = 1


VALUES: list[Any] = [
    argparse.Namespace(lr=0.1, nested=argparse.Namespace(a=[1]), out=Path("/x/y")),
    types.SimpleNamespace(a=1),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}),
    [defaultdict(dict, {"a": defaultdict(int, b=(defaultdict(set), 2))})],
    argparse.Namespace(counts=defaultdict(float, a=0.5)),
    datetime.datetime(2026, 11, 27, 1, tzinfo=datetime.UTC),
    datetime.date(2026, 1, 1),
    datetime.time(1, 2),
    datetime.timedelta(1),
    datetime.timezone(datetime.timedelta(hours=1), "X"),
    pathlib.PurePosixPath("a/b"),
    pathlib.PureWindowsPath("c:\\a"),
    Decimal("-sNaN1"),
    fractions.Fraction(-1, 3),
    range(3, 10, 2),
    slice(1, None),
    frozenset([1]),
    defaultdict(frozenset, {"a": frozenset([1])}),
    defaultdict(OrderedDict),
    deque([1, [2]], maxlen=3),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value!r:.40}")
def test_inert_objects_come_back_the_same(tmp_path: Path, value: Any) -> None:
    found = imported(tmp_path, value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_a_shared_tensor_in_a_defaultdict_is_one_again(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    found = imported(tmp_path, defaultdict(list, {"a": tensor, "b": tensor}))
    assert found["a"] is found["b"]


def test_a_dict_that_contains_itself_is_refused(tmp_path: Path) -> None:
    value: Any = defaultdict(list)
    value["self"] = [value]
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        imported(tmp_path, value)


HOSTILE: list[Any] = [
    Made(defaultdict, (os.getcwd,)),
    Made(defaultdict, (torch.Size,)),
    Made(defaultdict, (list, {1: 2})),
    Made(list, ([1],)),
    Made(pathlib.PosixPath, (b"x",)),
    Made(pathlib.PosixPath, ("a\0b",)),
    Made(Decimal, (1.5,)),
    Made(Decimal, ("x",)),
    Made(fractions.Fraction, ("1e999999999",)),
    Made(fractions.Fraction, (1, 0)),
    Made(range, (0, 1.5)),
    Made(frozenset, (range(10**9),)),
    Made(datetime.datetime, (b"short",)),
    Made(datetime.timezone, (datetime.timedelta(days=9),)),
    Made(argparse.Namespace, (), {1: 2}),
    Made(collections.OrderedDict, (Made(os.getcwd, ()),)),
    Phase.WARM,
    print,
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_all_others_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CkptError):
        imported(tmp_path, value)
    assert not os.path.lexists(tmp_path / "run") or not ckptstore.open(tmp_path / "run").checkpoints()


def test_the_allowed_names_are_gone_after_the_load(tmp_path: Path) -> None:
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
    imported(tmp_path / "first", OrderedDict(a=1))  # modules that torch imports late allow their own names
    before = set(torch.serialization.get_safe_globals())  # in any order
    imported(tmp_path / "second", OrderedDict(a=defaultdict(list)))
    assert set(torch.serialization.get_safe_globals()) == before
