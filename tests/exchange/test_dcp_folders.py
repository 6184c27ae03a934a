"""Folders of torch.distributed.checkpoint: imported whole, without running what their pickles name."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptstore
from ckptstore.errors import (
    CkptError,
    CorruptionError,
    FormatError,
    StorageError,
    UnsupportedStateError,
    UsageError,
)
from ckptstore.exchange.dcp_metadata import read_dcp_metadata
from ckptstore.exchange.import_files import import_files
from tests.store.states import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    chance = torch.Generator().manual_seed(0)
    return {
        "model": {"w": torch.randn(30, 20, generator=chance), "b": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": [{"m": torch.randn(5, generator=chance)}, {"n": 1}], "groups": [{"betas": (0.9, 0.99)}]},
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "turned": torch.randn(4, 6, generator=chance).t(),
        "part": torch.randn(100, generator=chance)[10:20],
        "step": 7,
        "nothing": None,
        "text": "x",
    }


def imported(folder: Path, **options: Any) -> Any:
    store = ckptstore.open(folder.parent / "run")
    (found,) = import_files(store.journal, [folder], **options)
    return store.load(found.info.ref)


def test_a_folder_comes_back_nested(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "step_40")
    store = ckptstore.open(tmp_path / "run")
    (found,) = import_files(store.journal, [tmp_path / "step_40"])
    assert found.info.step == 40
    same(store.load(), state())


def test_a_series_of_folders(tmp_path: Path) -> None:
    for step in (10, 20):
        dcp.save({"w": torch.full((9,), float(step))}, checkpoint_id=tmp_path / f"step-{step}")
    store = ckptstore.open(tmp_path / "run")
    found = import_files(store.journal, [tmp_path / "step-20", tmp_path / "step-10"])
    assert [one.info.step for one in found] == [10, 20]
    assert torch.equal(store.load(10)["w"], torch.full((9,), 10.0))


class Odd:
    """A class that only its own code can make again."""


def test_a_value_that_needs_pickled_code_is_named(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "odd": Odd(), "step": 1}, checkpoint_id=tmp_path / "d")
    with pytest.raises(UnsupportedStateError, match=r"odd: .*pickled code .*Odd") as raised:
        imported(tmp_path / "d")
    assert raised.value.__notes__ == ["to import the rest: --leave-out 'odd'"]
    assert ckptstore.open(tmp_path / "run").latest_step() is None
    found = imported(tmp_path / "d", leave_out=["odd"])
    assert found["step"] == 1
    assert "odd" not in found
    with pytest.raises(UsageError, match="nothing is left"):
        imported(tmp_path / "d", leave_out=["*"])


class Attack:
    """Runs a command when it is unpickled as usual."""

    def __reduce__(self) -> Any:
        return os.mkdir, (Attack.made,)

    made = ""


def test_no_name_in_the_description_is_called(tmp_path: Path) -> None:
    Attack.made = str(tmp_path / "attacked")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "d")
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(UnsupportedStateError, match=r"\.metadata: it refers to posix\.mkdir"):
        imported(tmp_path / "d")
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("name", ["torch.load", "torch.hub", "torch.os", "builtins.eval", "pathlib.Path.unlink"])
def test_names_of_torch_are_not_looked_up(tmp_path: Path, name: str) -> None:
    """A name that could be a dtype is only text."""
    module, _, last = name.rpartition(".")
    path = tmp_path / ".metadata"
    path.write_bytes(b"c" + module.encode() + b"\n" + last.encode() + b"\n(tR.")
    with pytest.raises((FormatError, UnsupportedStateError)):
        read_dcp_metadata(path)


def test_damage_is_an_error_of_ours(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "d")
    before = (tmp_path / "d" / ".metadata").read_bytes()
    for place in range(0, len(before), 37):
        image = bytearray(before)
        image[place] ^= 0x55
        (tmp_path / "d" / ".metadata").write_bytes(image)
        with suppress(CkptError):  # any other error fails the test
            read_dcp_metadata(tmp_path / "d" / ".metadata")
    (tmp_path / "d" / ".metadata").write_bytes(before)
    (data,) = (tmp_path / "d").glob("*.distcp")
    image = bytearray(data.read_bytes())
    start = image.find(state()["model"]["w"].numpy().tobytes()[:64])
    image[start + 40] ^= 1
    data.write_bytes(image)
    with pytest.raises(CorruptionError, match=r"model\.w: damaged"):
        imported(tmp_path / "d")
    data.write_bytes(image[: len(image) // 2])
    with pytest.raises(FormatError, match="truncated"):
        imported(tmp_path / "d")
    data.unlink()
    with pytest.raises(FormatError, match="is missing"):
        imported(tmp_path / "d")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"relative_path": "../d/__0_0.distcp"}, "has an invalid place"),
        ({"relative_path": ".."}, "has an invalid place"),
        ({"relative_path": ""}, "has an invalid place"),
        ({"relative_path": "a\0b"}, "has an invalid place"),
        ({"length": 1.5}, "has an invalid place"),
        ({"offset": -1}, "has an invalid place"),
        ({"length": 2**62}, "truncated"),  # more than memory has
        ({"offset": 2**70}, "truncated"),
    ],
)
def test_a_place_that_cannot_be(tmp_path: Path, place: dict[str, Any], said: str) -> None:
    dcp.save({"number": 5}, checkpoint_id=tmp_path / "d")
    described = tmp_path / "d" / ".metadata"
    metadata = pickle.loads(described.read_bytes())  # noqa: S301  # this test's own
    for item in metadata.storage_data.values():
        vars(item).update(place)
    described.write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match=said):
        imported(tmp_path / "d")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    dcp.save({"number": 5}, checkpoint_id=tmp_path / "d")
    (data,) = (tmp_path / "d").glob("*.distcp")
    data.unlink()
    data.mkdir()
    with pytest.raises(StorageError, match=data.name):
        imported(tmp_path / "d")


def test_boxes_that_leave_elements_out(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(6, 4)}, checkpoint_id=tmp_path / "d")
    path = tmp_path / "d" / ".metadata"
    for sizes, said in (((5, 4), r"elements \[5:6, 0:4\] of \[6, 4\]"), ((7, 4), "is not in a tensor")):
        found = pickle.loads(path.read_bytes())  # noqa: S301 - written above
        found.state_dict_metadata["w"].chunks[0].sizes = torch.Size(sizes)
        (tmp_path / "other").mkdir(exist_ok=True)
        for file in (tmp_path / "d").iterdir():
            (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
        (tmp_path / "other" / ".metadata").write_bytes(pickle.dumps(found))
        with pytest.raises(FormatError, match=said):
            imported(tmp_path / "other")


def test_a_description_for_each_rank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "__0.metadata").write_bytes(b"")
    with pytest.raises(UsageError, match="use_collectives=False"):
        imported(tmp_path)
