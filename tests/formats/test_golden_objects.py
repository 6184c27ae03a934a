"""The golden objects of a tree are read and refused as recorded, and written as they stand there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import FormatError
from ckptstore.formats import dtypes
from ckptstore.formats.states.numpy_objects import NUMPY
from ckptstore.formats.states.state import flatten, unflatten
from ckptstore.formats.states.state_objects import loader
from tools.golden import make_objects

EXPECTED = json.loads((Path(ckptstore.formats.__file__).parent / "golden" / "objects-1.json").read_text())
MAKE = loader(NUMPY, (), keep_foreign=True)


@pytest.mark.parametrize("name", EXPECTED["read"])
def test_golden_objects_are_read_and_written_as_they_stand(name: str) -> None:
    case = EXPECTED["read"][name]

    def resolve(name: str, _origin: str) -> Any:
        dtype, shape, image = case["arrays"][name]
        return np.frombuffer(bytes.fromhex(image), dtypes.get(dtype).numpy).reshape(shape)

    found = unflatten(case["tree"], resolve, None, MAKE)
    assert flatten(found).tree == case["tree"]
    assert make_objects.shown(found) == case["value"]


@pytest.mark.parametrize("tree", EXPECTED["refused"], ids=lambda tree: repr(tree["$object"]))
def test_golden_refusals(tree: Any) -> None:
    with pytest.raises(FormatError):
        unflatten(tree, lambda name, _: name, None, MAKE)


def test_the_script_makes_the_golden_objects(tmp_path: Path) -> None:
    make_objects.main(tmp_path)
    assert json.loads((tmp_path / "objects-1.json").read_text()) == EXPECTED


def test_every_kind_is_there() -> None:
    kinds = {case["tree"]["$object"][0] for case in EXPECTED["read"].values()}
    page = (Path(ckptstore.formats.__file__).parent / "SPEC.md").read_text()
    rows = page[page.index("### 3.4") : page.index("## 4 Hashes")].splitlines()
    named = {part.strip().strip("`") for row in rows if row.startswith("| `") for part in row.split("|")[1].split(", ")}
    assert kinds | {"torch.sparse", "torch.generator"} == named
