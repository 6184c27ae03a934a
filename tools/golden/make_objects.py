"""Golden objects of a state's tree (SPEC.md 3.4): one of every kind that needs no torch, and trees that are refused.

``objects-1.json`` has ``read``: the ``tree`` of a value; its ``arrays``, name -> logical dtype, shape and image in hex;
``value``, what Python's `repr` prints (of a generator the next three numbers of 64 bits). ``refused`` has trees that a
reader that makes values refuses.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import json
import pathlib
import types
import uuid
import zoneinfo
from collections import defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np

from ckptstore.formats.sources import TensorSource
from ckptstore.formats.states.registered_types import Foreign
from ckptstore.formats.states.state import flatten

__all__ = ["main", "shown", "values"]

Point = namedtuple("Point", "x y")

REFUSED: list[Any] = [
    ["deque", [1, 2], "1"],
    ["deque", [], "01"],
    ["defaultdict", {}, "eval"],
    ["namedtuple", {"_a": 1}, "P"],
    ["namedtuple", {"class": 1}, "P"],
    ["namedtuple", {"a": 1}],
    ["datetime", "2026-11-27"],
    ["datetime", ["2026-11-27T00:00:00", None, 0]],
    ["timedelta", [0, -1, 0]],
    ["timezone", [0, 0, 0, "UTC"]],
    ["zoneinfo", "../secret"],
    ["path", "a//b", "PosixPath"],
    ["path", "a", "Popen"],
    ["range", [0, 1, 0]],
    ["decimal", "1_0"],
    ["fraction", [2, 4]],
    ["uuid", "A" * 32],
    ["np.dtype", "O"],
    ["registered", 1],
    ["Deque", []],
    ["date", "2026-01-01", "name"],
]


def values() -> dict[str, Any]:
    """One value of every kind, by name."""
    moment = datetime.datetime(2026, 10, 25, 2, 30, 0, 7, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1)
    return {
        "deque": deque([1, None], 5),
        "deque without maxlen": deque(["a"]),
        "defaultdict": defaultdict(list, {"a": [1], 2: []}),
        "defaultdict without factory": defaultdict(None, {}),
        "namedtuple": Point(1, [2]),
        "namespace": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
        "simple_namespace": types.SimpleNamespace(a=1),
        "dataclass": Foreign("mine.Config", {"lr": 0.1}, "dataclass"),
        "enum": Foreign("mine.Phase", "warm", "enum"),
        "registered": Foreign("mine.Type", [1, {"a": 2}]),
        "timedelta": datetime.timedelta(-1, 86399, 999999),
        "timezone": datetime.timezone(datetime.timedelta(hours=-2)),
        "timezone with a name": datetime.timezone(datetime.timedelta(hours=1), "X"),
        "zoneinfo": zoneinfo.ZoneInfo("America/Argentina/Ushuaia"),
        "date": datetime.date(1, 2, 3),
        "datetime": datetime.datetime(2026, 11, 27, 1, 2, 3),
        "datetime in a zone": moment,
        "time": datetime.time(1, 2, 3, 4),
        "time with fold": datetime.time(1, 2, fold=1),
        "decimal": decimal.Decimal("-0.10"),
        "decimal exponent": decimal.Decimal("1E+999999"),
        "decimal NaN": decimal.Decimal("-sNaN123"),
        "fraction": fractions.Fraction(-(10**20), 3),
        "uuid": uuid.UUID(int=0x0123456789ABCDEF0123456789ABCDEF),
        "path": pathlib.PosixPath("/a/b"),
        "windows path": pathlib.PureWindowsPath("c:\\a"),
        "range": range(0, 10**30, 7),
        "slice": slice(None, "a", 2),
        "np.dtype": np.dtype(">M8[25s]"),
        "np.str": np.str_("é"),
        "np.bytes": np.bytes_(b"\0a"),
        "np.datetime64": np.datetime64("2026-01-01", "D"),
        "np.timedelta64 NaT": np.timedelta64("NaT"),
        "array of text": np.array([["ab", "\U0001f600"], ["", "c"]]),
        "array of bytes": np.array([b"a\0b", b"c"]),
        "array of times": np.array(["2026-01-01", "NaT"], "M8[25s]"),
        "np.generator PCG64": np.random.Generator(np.random.PCG64(1)),
        "np.generator MT19937": np.random.Generator(np.random.MT19937(1)),
        "np.generator Philox": np.random.Generator(np.random.Philox(1)),
        "np.generator SFC64": np.random.Generator(np.random.SFC64(1)),
        "np.random_state": np.random.RandomState(1),
    }


def shown(value: Any) -> str:
    """What the golden file says of a value. A generator is used up."""
    if isinstance(value, np.random.Generator):
        return repr([int(value.integers(0, 2**64, dtype=np.uint64)) for _ in range(3)])
    if isinstance(value, np.random.RandomState):
        return repr([int(value.randint(0, 2**32, dtype=np.uint32)) for _ in range(3)])
    return repr(value.tolist()) + f" {value.dtype.str}" if isinstance(value, np.ndarray) else repr(value)


def _array(source: TensorSource) -> list[Any]:
    image = np.empty(source.nbytes, np.uint8)
    source.read(0, image)
    return [source.dtype, list(source.shape), image.tobytes().hex()]


def main(folder: Path) -> None:
    """Write ``objects-1.json`` to `folder`."""
    read = {}
    for name, value in values().items():
        flat = flatten(value)
        arrays = {one: _array(source) for one, source in flat.tensors.items()}
        read[name] = {"tree": flat.tree, "arrays": arrays, "value": shown(value)}
    text = json.dumps({"read": read, "refused": [{"$object": body} for body in REFUSED]}, indent=1)
    (folder / "objects-1.json").write_text(text + "\n", encoding="ascii")
