"""`ckptstore.save` and `ckptstore.load` do what scripts do with `torch.save` and `torch.load(weights_only=True)`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore import (
    CheckpointNotFoundError,
    CorruptionError,
    FencedError,
    FormatError,
    StepOrderError,
    StorageError,
    StoreNotFoundError,
    UnsupportedStateError,
    UsageError,
)

FILES = ("model.pt", "model.pth", "model.bin", "model.safetensors")
PLACES = ("store", *FILES)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    from ckptstore.host.interpreter_exit import watched

    for writer in watched():
        writer.close()


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": 3,
        "args": {"lr": 1e-3, "name": "a", "sizes": (1, 2), "on": True, "none": None},
    }


def image(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal: types, order of dicts, and every bit of the tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.device == other.device
            and image(one) == image(other)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


@pytest.mark.parametrize("place", PLACES)
def test_what_scripts_save_comes_back(tmp_path: Path, place: str) -> None:
    saved = state()
    torch.save(saved, tmp_path / "reference")
    for _ in range(2):
        ckptstore.save(saved, tmp_path / place)
    loaded = ckptstore.load(tmp_path / place)
    assert same(loaded, saved)
    assert same(loaded, torch.load(tmp_path / "reference", weights_only=True))
    assert same(ckptstore.load(str(tmp_path / place), mmap=True, map_location="cpu"), saved)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model.load_state_dict(loaded["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded["optimizer"])


@pytest.mark.parametrize("name", FILES[:3])
def test_torch_reads_what_is_saved_and_is_read_itself(tmp_path: Path, name: str) -> None:
    saved = state()
    ckptstore.save(saved, tmp_path / name)
    assert same(torch.load(tmp_path / name, weights_only=True), saved)
    torch.save(saved, tmp_path / name)
    assert same(ckptstore.load(tmp_path / name, weights_only=True), saved)
    torch.save(saved, tmp_path / name, _use_new_zipfile_serialization=False)
    assert same(ckptstore.load(tmp_path / name), saved)


def test_safetensors_reads_what_is_saved_and_is_read_itself(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    saved = dict(state()["model"])
    ckptstore.save(saved, tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == saved.keys()
    assert all(same(loaded[name], saved[name]) for name in saved)
    safetensors.save_file(saved, tmp_path / "theirs.safetensors")
    loaded = ckptstore.load(tmp_path / "theirs.safetensors")
    assert all(same(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize("value", [None, 3, [], {}, "x"], ids=repr)
def test_a_state_without_tensors_comes_back(value: Any, tmp_path: Path) -> None:
    """None came back as an empty dict from a safetensors file."""
    for place in PLACES:
        ckptstore.save(value, tmp_path / place)
        assert same(ckptstore.load(tmp_path / place), value), place


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.int8]
TENSORS = st.builds(
    lambda dtype, shape, seed: torch.from_numpy(np.random.default_rng(seed).integers(0, 2, shape)).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 9),
)
STRIDED = TENSORS.map(lambda tensor: tensor.movedim(0, -1) if tensor.dim() > 1 else tensor)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([torch.float16, torch.Size([2, 3])]),
)
STATES = st.recursive(
    st.one_of(TENSORS, STRIDED, SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=6), st.integers(-3, 99)), inner, max_size=4),
        st.dictionaries(st.text(max_size=6), inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=8,
)


@given(STATES, st.sampled_from(["memory", "model.pt", "model.safetensors"]))
def test_every_state_comes_back_as_torch_gives_it(saved: Any, place: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(saved, Path(folder, "reference"))
        path = f"memory://{uuid.uuid4().hex}" if place == "memory" else str(Path(folder, place))
        ckptstore.save(saved, path)
        loaded = ckptstore.load(path)
        assert same(loaded, torch.load(Path(folder, "reference"), weights_only=True)), loaded
        if place == "memory":
            ckptstore.open(path).writer(reuse=True).close()


def test_tied_tensors_are_one_again(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    for place in PLACES:
        ckptstore.save({"a": tensor, "b": [tensor]}, tmp_path / place)
        loaded = ckptstore.load(tmp_path / place)
        loaded["a"][0] = 5
        assert loaded["b"][0][0] == 5, place


# stores


def test_a_save_adds_the_next_step_and_two_stay(tmp_path: Path) -> None:
    infos = [ckptstore.save({"x": step}, tmp_path / "run") for step in range(1, 6)]
    assert [info and info.ref for info in infos] == [f"{step}@1" for step in range(1, 6)]
    assert ckptstore.load(tmp_path / "run") == {"x": 5}
    assert ckptstore.load(tmp_path / "run", 4) == {"x": 4}
    store = ckptstore.open(tmp_path / "run")
    assert [info.step for info in store.checkpoints()] == [4, 5]
    assert store.rules() == ("last:2",)
    with pytest.raises(CheckpointNotFoundError):
        ckptstore.load(tmp_path / "run", 1)


def test_space_is_freed(tmp_path: Path) -> None:
    def files() -> int:
        return sum(1 for one in (tmp_path / "run").rglob("*.safetensors"))

    for _ in range(60):
        ckptstore.save({"x": torch.zeros(10)}, tmp_path / "run")
    assert files() < 25
    for _ in range(5):
        ckptstore.save({"x": torch.zeros(6 << 20)}, tmp_path / "run")  # 24 MiB
    assert files() < 10, "large states: sooner"


def test_keep_step_tags_and_metadata(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ckptstore.save({"x": 1}, run, step=100, tags="best", metadata={"loss": 0.5}, keep=3)
    for _ in range(5):
        ckptstore.save({"x": 2}, run, keep=3)
    store = ckptstore.open(run)
    assert [info.ref for info in store.checkpoints()] == ["100@1", "103@1", "104@1", "105@1"]
    assert store.checkpoint("tag:best").metadata == {"loss": 0.5}
    assert ckptstore.load(run, "tag:best") == {"x": 1}
    ckptstore.save({"x": 2}, run, keep=["last:1", "every:50"])
    assert {info.step for info in store.checkpoints()} == {100, 106}
    ckptstore.save({"x": 2}, run)
    assert store.rules() == ("last:1", "every:50"), "None: the rules stay"
    ckptstore.save({"x": 2}, run, keep=[])
    ckptstore.save({"x": 2}, run)
    assert {info.step for info in store.checkpoints()} == {100, 107, 108, 109}
    with pytest.raises(StepOrderError):
        ckptstore.save({"x": 1}, run, step=5)


def test_a_store_that_exists_keeps_its_rules(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "run").writer() as writer:
        for step in range(1, 6):
            writer.save({"x": step}, step)
    for _ in range(3):
        ckptstore.save({"x": 0}, tmp_path / "run")
    assert [info.ref for info in ckptstore.open(tmp_path / "run").checkpoints()] == [
        *(f"{step}@1" for step in range(1, 6)),
        *(f"{step}@2" for step in (6, 7, 8)),
    ]


def test_it_uses_the_shared_writer_whatever_its_options(tmp_path: Path) -> None:
    writer = ckptstore.open(tmp_path / "run").writer(reuse=True, deltas=1, max_in_flight=2)
    writer.save({"x": np.zeros(1000)})
    info = ckptstore.save({"x": np.ones(1000)}, tmp_path / "run")
    assert info is not None
    assert (info.ref, info.kind) == ("2@1", "delta")


def test_threads_save_to_one_new_store(tmp_path: Path) -> None:
    found: list[int] = []

    def work() -> None:
        for _ in range(3):
            info = ckptstore.save({"x": 1}, tmp_path / "run")
            assert info is not None
            found.append(info.step)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 16))
    assert [info.ref for info in ckptstore.open(tmp_path / "run").checkpoints()] == ["14@1", "15@1"]


def test_a_writer_of_this_process_is_not_fenced_by_a_save(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "run").writer() as writer:
        writer.save({"x": 1}, 1)
        with pytest.raises(UsageError, match="this process has a writer of this store open"):
            ckptstore.save({"x": 2}, tmp_path / "run")
        writer.save({"x": 3}, 2)
    ckptstore.save({"x": 4}, tmp_path / "run")
    assert ckptstore.load(tmp_path / "run") == {"x": 4}


_OTHER = """
import sys, ckptstore
ckptstore.save({"x": 1}, sys.argv[1])
print("saved", flush=True)
sys.stdin.readline()
try:
    ckptstore.save({"x": 2}, sys.argv[1])
except ckptstore.FencedError as error:
    print("fenced", *error.__notes__, flush=True)
"""


def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OTHER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        with pytest.raises(UsageError, match=f"process {other.pid} of this host saves to this store: save from one"):
            ckptstore.save({"x": 3}, tmp_path / "run")
        assert ckptstore.load(tmp_path / "run") == {"x": 1}
        ckptstore.open(tmp_path / "run").writer(reuse=True)  # what the error's note says
        ckptstore.save({"x": 3}, tmp_path / "run")
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline().startswith("fenced another process saves to ")
    ckptstore.save({"x": 4}, tmp_path / "run")
    assert [info.ref for info in ckptstore.open(tmp_path / "run").checkpoints()] == ["2@2", "3@2"]


def test_a_process_continues_after_one_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OTHER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        other.kill()
    info = ckptstore.save({"x": 3}, tmp_path / "run")
    assert info is not None
    assert info.ref == "2@2"


def test_a_save_after_a_writer_was_fenced_takes_over(tmp_path: Path) -> None:
    ckptstore.save({"x": 1}, tmp_path / "run")
    with ckptstore.open(tmp_path / "run").writer() as writer:
        writer.save({"x": 2})
        with pytest.raises(FencedError):
            ckptstore.save({"x": 3}, tmp_path / "run")
    ckptstore.save({"x": 4}, tmp_path / "run")
    assert ckptstore.load(tmp_path / "run") == {"x": 4}


def test_a_store_may_be_called_like_a_file(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "model.pt").writer() as writer:
        writer.save({"x": 1}, 1)
    ckptstore.save({"x": 2}, tmp_path / "model.pt")
    assert ckptstore.load(tmp_path / "model.pt") == {"x": 2}
    assert (tmp_path / "model.pt").is_dir()


# files


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_replaced_complete_or_not_at_all(tmp_path: Path, name: str) -> None:
    ckptstore.save({"x": torch.zeros(3)}, tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(UnsupportedStateError):
        ckptstore.save({"x": torch.zeros(3), "f": lambda: 1}, tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    ckptstore.save({"x": torch.ones(3)}, tmp_path / name)
    assert torch.equal(ckptstore.load(tmp_path / name)["x"], torch.ones(3))
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_a_file_that_is_larger_than_a_block(tmp_path: Path) -> None:
    big = {"strided": torch.arange(10 << 20).reshape(1 << 10, -1).T, "plain": torch.randn(5 << 20)}
    for name in FILES[-2:]:
        ckptstore.save(big, tmp_path / name)
        assert same(ckptstore.load(tmp_path / name), big)


def test_numpy_arrays_become_tensors_of_a_torch_file_with_a_warning(tmp_path: Path) -> None:
    saved = {"x": np.arange(3.0), "y": np.float32(2.5)}
    with pytest.warns(UserWarning, match=r"model.pt: numpy arrays became tensors.*: x"):
        ckptstore.save(saved, tmp_path / "model.pt")
    assert torch.equal(ckptstore.load(tmp_path / "model.pt")["x"], torch.arange(3.0, dtype=torch.float64))
    for place in ("store", "model.safetensors"):
        ckptstore.save(saved, tmp_path / place)
        loaded = ckptstore.load(tmp_path / place)
        assert isinstance(loaded["x"], np.ndarray)
        assert type(loaded["y"]) is np.float32


def test_numpy_instead_of_torch(tmp_path: Path) -> None:
    for place in ("store", "model.safetensors"):
        ckptstore.save({"x": torch.ones(3)}, tmp_path / place)
        assert isinstance(ckptstore.load(tmp_path / place, framework="numpy")["x"], np.ndarray)
    ckptstore.save({"x": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match=r"framework='numpy': .* is a torch file"):
        ckptstore.load(tmp_path / "model.pt", framework="numpy")


@pytest.mark.parametrize("place", PLACES)
def test_another_device(tmp_path: Path, place: str) -> None:
    ckptstore.save({"x": torch.ones(3)}, tmp_path / place)
    for device in ("meta", torch.device("meta")):
        assert ckptstore.load(tmp_path / place, map_location=device)["x"].is_meta


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    ckptstore.save({"x": torch.ones(3000)}, tmp_path / name)
    data = bytearray((tmp_path / name).read_bytes())
    for cut in (0, 5, len(data) // 2):
        (tmp_path / name).write_bytes(data[:cut])
        with pytest.raises((FormatError, CorruptionError)):
            ckptstore.load(tmp_path / name)
    if name == "model.pt":  # a safetensors file has no checksums
        data[len(data) // 2] ^= 1
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CorruptionError, match="damaged"):
            ckptstore.load(tmp_path / name)


# what is refused


@pytest.mark.parametrize("place", PLACES)
def test_objects_with_code_are_refused_with_the_remedy(tmp_path: Path, place: str) -> None:
    model = torch.nn.Linear(2, 2)
    for obj in (model, torch.optim.AdamW(model.parameters()), {"model": model}):
        with pytest.raises(UnsupportedStateError, match=r"cannot be stored: store its state_dict\(\)"):
            ckptstore.save(obj, tmp_path / place)
    with pytest.raises(UnsupportedStateError, match="code is not state"):
        ckptstore.save({"f": lambda: 1}, tmp_path / place)
    assert not (tmp_path / place).exists() or not ckptstore.open(tmp_path / place).checkpoints()


def test_an_open_file_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    with (tmp_path / "model.pt").open("w+b") as file:
        with pytest.raises(UsageError, match=r"an open file \('.*model.pt'\).*ckptstore\.save\(obj, 'model\.pt'\)"):
            ckptstore.save({"x": 1}, file)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"ckptstore\.load\('model\.pt'\)"):
            ckptstore.load(file)  # type: ignore[arg-type]


def test_places_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    torch.save({}, tmp_path / "folder/model.pt")
    with pytest.raises(UsageError, match=r"not a checkpoint store, and not empty \(it holds 'model.pt'\)"):
        ckptstore.save({}, tmp_path / "folder")
    with pytest.raises(StoreNotFoundError) as caught:
        ckptstore.load(tmp_path / "folder")
    assert "load one of its files: model.pt" in caught.value.__notes__[0]
    for name in ("nothing", "nothing.pt"):
        with pytest.raises(FileNotFoundError, match=f"{name} does not exist"):
            ckptstore.load(tmp_path / name)
    (tmp_path / "text").write_text("text")
    with pytest.raises(FormatError):
        ckptstore.load(tmp_path / "text")
    with pytest.raises(StoreNotFoundError, match="is a file") as caught:
        ckptstore.save({}, tmp_path / "text")
    assert "a name that ends in .pt, .pth, .bin, .safetensors makes a file" in caught.value.__notes__[0]
    with pytest.raises(UsageError, match="no-folder does not exist"):
        ckptstore.save({}, tmp_path / "no-folder/model.pt")
    ckptstore.save({}, tmp_path / "run")
    with pytest.raises(UsageError, match="is inside the checkpoint store"):
        ckptstore.save({}, tmp_path / "run/model.pt")


def test_a_file_of_lightning(tmp_path: Path) -> None:
    """Its state dicts load; its hyperparameters may be objects with code."""
    torch.save({"state_dict": state()["model"], "epoch": 1}, tmp_path / "last.ckpt")
    assert same(ckptstore.load(tmp_path / "last.ckpt")["state_dict"], state()["model"])
    torch.save({"state_dict": {}, "hyper_parameters": Path("a")}, tmp_path / "last.ckpt")
    with pytest.raises(UnsupportedStateError, match="loading it would run pickled code"):
        ckptstore.load(tmp_path / "last.ckpt")
    with pytest.raises(StoreNotFoundError, match="is a file, not the folder of a store"):
        ckptstore.save({}, tmp_path / "last.ckpt")


@pytest.mark.parametrize("path", ["/proc/run", "/proc/model.pt", "/proc/model.safetensors"])
def test_a_medium_that_cannot_be_written(path: str) -> None:
    with pytest.raises(StorageError):
        ckptstore.save({"x": 1}, path)


def test_arguments_without_a_meaning(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "model.pt"
    for name, value in {"step": 1, "keep": 2, "tags": "a", "metadata": {}}.items():
        with pytest.raises(UsageError, match=f"{name}: a file such as .* has none; without its ending"):
            ckptstore.save({}, file, **{name: value})  # type: ignore[arg-type]
    for keep in (0, -1, True, 1.5, "last:2"):
        with pytest.raises(UsageError, match=r"^keep: "):
            ckptstore.save({}, run, keep=keep)  # type: ignore[arg-type]
    assert not run.exists()
    ckptstore.save({}, run)
    ckptstore.save({}, file)
    with pytest.raises(UsageError, match="weights_only: pickled code is never run"):
        ckptstore.load(run, weights_only=False)
    with pytest.raises(UsageError, match="map_location: "):
        ckptstore.load(run, map_location={"cuda:0": "cpu"})
    with pytest.raises(UsageError, match=r"ref: 3; .* is a file"):
        ckptstore.load(file, 3)
    with pytest.raises(UsageError, match="framework='jax'"):
        ckptstore.load(file, framework="jax")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a path or URL is needed"):
        ckptstore.load(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a text is needed, not bytes"):
        ckptstore.load(b"x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="files are written to and read from local paths"):
        ckptstore.save({}, "s3://bucket/model.pt")
