"""`Store.map_tensors`, which verifies each tensor when it is asked for, and `Store.file_of`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ckptstore
from ckptstore import CorruptSegmentError, MappedTensors, RankOptions, Shard, TensorNotFoundError, UsageError
from ckptstore.backends import base
from ckptstore.cli.main import cli
from ckptstore.segments import segment_reader
from ckptstore.write.ranks.messages.key_value_store import Group
from tests.restore.test_fallback import flip
from tests.write.rank_threads import as_ranks
from tools.golden.shard_stores import Piece, ShardStore, by_rank

STATE = {
    "model": {"a": np.arange(3000, dtype="<f4").reshape(50, 60), "b": np.arange(500.0)},
    "e": np.zeros((0, 2)),
    "step": 4,
}


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    made = ckptstore.open(tmp_path / "store")
    with made.writer() as writer:
        writer.save(STATE, 1)
    return made


def place_of(store: ckptstore.Store, name: str) -> tuple[Path, int]:
    """The file of checkpoint 1, and the position of a tensor in it."""
    (segment,) = store.view().catalog.segments.values()
    return Path(store.url) / segment.key, store.tensors(1)[name].chunks[0].offset


def test_a_tensor_is_verified_when_it_is_first_asked_for(store: ckptstore.Store) -> None:
    real, checked = segment_reader.check_chunk, []

    def counted(where: str, tensor: Any, *rest: Any) -> None:
        checked.append(tensor.name)
        real(where, tensor, *rest)

    with mock.patch.object(segment_reader, "check_chunk", counted):
        found = store.map_tensors(1, framework="numpy")
        assert isinstance(found, MappedTensors)
        assert (list(found), len(found), found.ref) == (["model.a", "model.b", "e"], 3, "1@1")
        assert "model.a" in found
        assert "model.c" not in found
        assert checked == []
        a = found["model.a"]
        assert found["model.a"] is a
        assert found.get("model.a") is a
        assert found.get("model.c", 5) == 5
        assert checked == ["model.a"]
        found.verify()
        assert checked == ["model.a", "model.b"]
        assert dict(found).keys() == set(found)
        assert checked == ["model.a", "model.b"]
    assert np.array_equal(a, STATE["model"]["a"])  # type: ignore[index]
    assert found["e"].shape == (0, 2)
    with pytest.raises(TensorNotFoundError, match=r"no tensor is named 'model\.aa'; close: model\.a"):
        found["model.aa"]
    a[0, 0] = 7  # private memory
    assert np.array_equal(store.map_tensors(1, framework="numpy")["model.a"], STATE["model"]["a"])  # type: ignore[index]


def test_damage_of_one_tensor_is_found_when_it_is_asked_for(store: ckptstore.Store) -> None:
    path, at = place_of(store, "model.b")
    flip(path, at + 9)
    found = store.map_tensors(1, framework="numpy")
    assert np.array_equal(found["model.a"], STATE["model"]["a"])  # type: ignore[index]
    for _ in range(2):
        with pytest.raises(CorruptSegmentError, match=r"tensor 'model\.b': checksum mismatch"):
            found["model.b"]
        with pytest.raises(CorruptSegmentError):
            found.verify(["model.a", "model.b"])
        with pytest.raises(CorruptSegmentError):
            found.verify()
    found.verify(["model.a"])
    with pytest.raises(CorruptSegmentError):
        store.load(1, mmap=True)


def test_the_tensors_outlive_store_and_mapping(store: ckptstore.Store) -> None:
    torch = pytest.importorskip("torch")
    found = store.map_tensors(1, select="model.*")
    store.close()
    a = found["model.a"]
    del found
    gc.collect()
    assert torch.equal(a, torch.from_numpy(STATE["model"]["a"]))  # type: ignore[index]


def test_a_file_that_others_can_map(store: ckptstore.Store) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    (found,) = store.file_of(1)
    assert (Path(found.path), found.size) == (place_of(store, "model.a")[0].resolve(), Path(found.path).stat().st_size)
    assert found.tensors == {"model.a": None, "model.b": None, "e": None}
    loaded = safetensors.load_file(found.path)
    assert loaded.keys() == found.tensors.keys()
    assert np.array_equal(loaded["model.a"], STATE["model"]["a"])  # type: ignore[index]


def test_files_of_many_ranks(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    whole = np.arange(24, dtype="<f4").reshape(6, 4)

    def work(group: Group) -> None:
        rows = slice(3 * group.rank, 3 * group.rank + 3)
        with ckptstore.open(tmp_path).writer(group=group, ranks=RankOptions(timeout=120)) as writer:
            writer.save({"w": Shard(whole[rows], (6, 4), (rows.start, 0)), "r": np.ones(2)}, 1)

    assert as_ranks(2, work) == [None, None]
    store = ckptstore.open(tmp_path)
    files = store.file_of("latest")
    assert [one.tensors["w"] for one in files] == [((0, 3), (0, 4)), ((3, 6), (0, 4))]
    assert sum("r" in one.tensors for one in files) == 1
    for one in files:
        box = one.tensors["w"]
        assert box is not None
        loaded = safetensors.load_file(one.path)["w"]
        assert np.array_equal(loaded, store.read_boxes(1, [("w", box)], framework="numpy")[0])
    with pytest.raises(UsageError, match=r"tensor 'w' is stored in shards.* load\(\) or read_boxes\(\)"):
        store.map_tensors(1)
    assert np.array_equal(store.map_tensors(1, select="r", framework="numpy")["r"], np.ones(2))


def test_a_delta_has_no_file_and_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    from click.testing import CliRunner

    whole = np.arange(40_000, dtype="<f4")
    store = ckptstore.open(tmp_path / "store")
    with store.writer(deltas=2) as writer:
        for step in range(1, 4):
            whole[::5] += 1
            writer.save({"w": whole.copy()}, step)
    assert store.checkpoint(2).kind == "delta"
    with pytest.raises(
        UsageError, match="checkpoint 2@1 is a delta, the last of a chain of 2, and tensor 'w'"
    ) as raised:
        store.file_of(2)
    with pytest.raises(UsageError, match="'w' is stored as something else"):
        store.map_tensors(2)
    said = str(raised.value)
    there = {"STORE": tmp_path / "store", "FILE.safetensors": tmp_path / "x.safetensors"}
    before = store.load(2, framework="numpy")["w"]
    for part in said.split("`")[1::2]:
        words = [str(there.get(word, word)) for word in part.split()[1:]]
        done = CliRunner().invoke(cli, [*words, "--take-over"] if words[0] == "compact" else words)  # no run is writing
        assert done.exit_code == 0, (part, done.output)
    assert (tmp_path / "x.safetensors").exists()
    assert [one.tensors for one in store.file_of(2)] == [{"w": None}]
    assert np.array_equal(store.map_tensors(2, framework="numpy")["w"], before)


def test_a_raw_tensor_in_a_packed_segment_is_no_file_of_its_own() -> None:
    made = ShardStore()
    made.commit(1, by_rank([Piece("w", np.arange(12.0))]), packed=True)
    assert made.store.tensors(1)["w"].codec == "raw"
    with pytest.raises(UsageError, match="tensor 'w' is not stored as it is"):
        made.store.file_of(1)


def test_media_without_files(tmp_path: Path) -> None:
    store = ckptstore.open(f"memory://{tmp_path.name}-files")
    with store.writer() as writer:
        writer.save(STATE, 1)
    with pytest.raises(UsageError, match="no other program can open what is in this store"):
        store.file_of(1)
    with mock.patch.object(type(store.backend), "address", "s3://bucket/runs/a/?region=eu"):
        (found,) = store.file_of(1)
    assert found.path.startswith("s3://bucket/runs/a/seg/")
    assert base.Backend.locate(store.backend, "log/1") is None
    assert np.array_equal(store.map_tensors(1, framework="numpy")["model.b"], np.arange(500.0))
    with pytest.raises(UsageError, match="framework="):
        store.map_tensors(1, framework="jax")  # type: ignore[arg-type]
