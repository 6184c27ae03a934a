"""Checkpoints exported as folders of torch.distributed.checkpoint: loaded by torch itself, equal in every bit."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import resource
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import ckptstore
from ckptstore.errors import (
    CkptError,
    FormatError,
    StorageError,
    TensorNotFoundError,
    UnsupportedStateError,
    UsageError,
)
from tests.exchange.test_dcp_folders import state
from tests.store.states import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


def more() -> dict[str, Any]:
    """A state with everything that is not a tensor in a plain dict."""
    return {
        **state(),
        "array": np.arange(5.0),
        "pair": (torch.full((3,), 7.0), 4),
        "arguments": argparse.Namespace(rate=1e-3, names=["a"]),
        "ordered": OrderedDict(b=torch.tensor([1, 2]), a=torch.tensor(True)),
        "recent": deque([1.5, 2.5], 4),
        "complex": torch.tensor([1 + 2j]),
        "half": torch.tensor([1.0, float("nan")], dtype=torch.float16),
    }


def stored(tmp_path: Path, saved: Any, step: int = 1) -> ckptstore.Store:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save(saved, step)
    return store


def zeroed(value: Any) -> Any:
    """A copy with zeros in all tensors."""
    found = copy.deepcopy(value)
    waiting = [found]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            one.zero_()
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []
    return found


def loaded(folder: Path, like: Any) -> Any:
    """What torch's own reader reads into a copy of `like`."""
    found = zeroed(like)
    dcp.load(found, storage_reader=FileSystemReader(folder))
    return found


@pytest.mark.parametrize("limit", [None, 600])
def test_torch_loads_every_bit(tmp_path: Path, limit: int | None) -> None:
    saved = more()
    result = stored(tmp_path, saved).export(1, tmp_path / "out", format="dcp", max_shard_bytes=limit)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {".metadata", *(path.name for path in result.paths)}
    assert (len(result.paths) > 3) == (limit is not None)
    assert result.converted == ()
    same(loaded(tmp_path / "out", saved), saved)


def test_it_is_what_dcp_save_writes(tmp_path: Path) -> None:
    saved = {key: one for key, one in more().items() if key != "recent"}
    stored(tmp_path, saved).export(1, tmp_path / "out", format="dcp")
    dcp.save(copy.deepcopy(saved), checkpoint_id=tmp_path / "torch")
    ours, its = (FileSystemReader(tmp_path / name).read_metadata() for name in ("out", "torch"))
    assert ours.planner_data == its.planner_data
    assert ours.state_dict_metadata.keys() == its.state_dict_metadata.keys()
    for name, said in its.state_dict_metadata.items():
        mine = ours.state_dict_metadata[name]
        assert type(mine) is type(said), name
        if hasattr(said, "chunks"):
            assert (mine.size, mine.chunks, mine.properties.dtype) == (said.size, said.chunks, said.properties.dtype)


def test_there_and_back(tmp_path: Path) -> None:
    saved = more()
    stored(tmp_path, saved).export(1, tmp_path / "step-40", format="dcp")
    again = ckptstore.open(tmp_path / "again")
    (one,) = again.import_files([tmp_path / "step-40"])
    assert one.info.step == 40
    same(again.load(), {**saved, "ordered": dict(saved["ordered"])})


def test_a_folder_that_torch_wrote_comes_back_the_same(tmp_path: Path) -> None:
    saved = state()
    dcp.save(copy.deepcopy(saved), checkpoint_id=tmp_path / "torch")
    store = ckptstore.open(tmp_path / "run")
    store.import_files([tmp_path / "torch"])
    store.export("latest", tmp_path / "out", format="dcp")
    same(loaded(tmp_path / "out", saved), saved)


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Config:
    width: int


def test_objects_that_only_their_class_makes_become_their_parts(tmp_path: Path) -> None:
    store = stored(tmp_path, {"w": torch.ones(2), "inner": {"config": Config(3)}, "points": [Point(1, 2)]})
    result = store.export(1, tmp_path / "out", format="dcp")
    assert result.converted == ("inner.config", "points")
    found: dict[str, Any] = {"w": torch.zeros(2), "inner": {"config": None}, "points": None}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "out"))
    assert found["inner"]["config"] == {"width": 3}
    assert found["points"] == [(1, 2)]
    assert type(found["points"][0]) is tuple


def test_tensors_inside_objects_are_written_with_them(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2), "inside": argparse.Namespace(mask=torch.arange(3), one=(torch.ones(1),))}
    result = stored(tmp_path, saved).export(1, tmp_path / "out", format="dcp")
    assert result.tensors == 1
    found = loaded(tmp_path / "out", {"w": torch.ones(2), "inside": None})
    assert torch.equal(found["inside"].mask, torch.arange(3))
    assert torch.equal(found["inside"].one[0], torch.ones(1))


def test_selections(tmp_path: Path) -> None:
    saved = state()
    store = stored(tmp_path, saved)
    store.export(1, tmp_path / "some", format="dcp", select="model.*")
    found = FileSystemReader(tmp_path / "some").read_metadata().state_dict_metadata
    assert {name for name, one in found.items() if hasattr(one, "chunks")} == {"model.w", "model.b"}
    assert "step" in found
    store.export(1, tmp_path / "model", format="dcp", strip="model.")
    same(loaded(tmp_path / "model", saved["model"]), saved["model"])
    for wrong, kind in (("nothing.", TensorNotFoundError), ("model", UsageError)):
        with pytest.raises(kind):
            store.export(1, tmp_path / "no", format="dcp", strip=wrong)
    assert not (tmp_path / "no").exists()


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    store = stored(tmp_path, {"w": torch.ones(3)})
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists"):
        store.export(1, tmp_path / "there", format="dcp")
    with pytest.raises(UsageError, match="inside the checkpoint store"):
        store.export(1, tmp_path / "run" / "out", format="dcp")
    with pytest.raises(UsageError, match="does not exist"):
        store.export(1, tmp_path / "no" / "out", format="dcp")
    with pytest.raises(UsageError, match="overwrite="):
        store.export(1, tmp_path / "out", format="dcp", overwrite=True)
    with store.writer() as writer:
        writer.save([torch.ones(3)], 2)
        writer.save({"w": torch.ones(3), "s": torch.eye(2).to_sparse()}, 3)
        writer.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, 4)
    with pytest.raises(UsageError, match="holds a dict"):
        store.export(2, tmp_path / "out", format="dcp")
    with pytest.raises(UnsupportedStateError, match="s: DCP stores dense tensors"):
        store.export(3, tmp_path / "out", format="dcp")
    with pytest.raises(UnsupportedStateError, match=r"joins keys by dots: .*a\.b"):
        store.export(4, tmp_path / "out", format="dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]


@pytest.mark.parametrize(
    "about",
    [
        {"planner": {"w": ["w"]}, "bytes": {"none": True}, "parts": {}, "pieces": {}},
        {"planner": {"w": 3}, "bytes": {}, "parts": {}, "pieces": {}},
        {"planner": {}, "bytes": {}, "parts": {}, "pieces": {"v": {"w": {"offset": [0], "whole": [3]}}}},
        {"planner": {}, "bytes": {}, "parts": {}, "pieces": {"v": {}}},
        {"planner": {}, "bytes": {}, "parts": {"v": ["none"]}, "pieces": {}},
        {"planner": {}, "bytes": [], "parts": {}, "pieces": {}},
        [1],
    ],
)
def test_a_store_whose_description_is_made_up(tmp_path: Path, about: Any) -> None:
    store = stored(tmp_path, {"w": torch.ones(3), "ckptstore.dcp": about})
    with pytest.raises(FormatError, match=r"ckptstore\.dcp"):
        store.export(1, tmp_path / "out", format="dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files, which the system reports as it reports a full disk: by the write that fails."""
    store = stored(tmp_path, {"w": torch.arange(100_000.0)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(StorageError):
            store.export(1, tmp_path / "out", format="dcp")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    store.export(1, tmp_path / "out", format="dcp")


def test_damage_is_found_and_nothing_appears(tmp_path: Path) -> None:
    store = stored(tmp_path, {"w": torch.arange(100_000.0)})
    (segment,) = (path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.stat().st_size > 400_000)
    with segment.open("r+b") as file:
        file.seek(300_000)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CkptError, match="w"):
        store.export(1, tmp_path / "out", format="dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
