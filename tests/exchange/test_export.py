"""Checkpoints as files: bits, atomicity, memory."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import ckptstore
from ckptstore.errors import FormatError, StorageError, TensorNotFoundError, UnsupportedStateError, UsageError
from ckptstore.exchange.atomic_files import refuse_store
from ckptstore.exchange.export import export
from ckptstore.exchange.import_files import import_files
from ckptstore.exchange.weight_files import STATE_MEMBER, open_file
from ckptstore.formats import jsontext
from tests.exchange import inside
from tests.store.states import every_dtype, same, tensor_bytes, training_state


def stored(state: Any) -> ckptstore.Store:
    store = ckptstore.open("memory://exporting")
    with store.writer(parent=None, poll_seconds=None) as writer:
        writer.save(state, step=1)
    return store


def test_pt_is_the_state_that_was_saved(tmp_path: Path) -> None:
    state = training_state()
    state["loader"].pop("order")
    state["rng"].pop("numpy")
    state[3] = (None, True, 1, 1.0, -0.0, b"\x00\xff", 2**70)
    state["torch"] = (torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"))
    result = export(stored(state).journal, "latest", tmp_path / "x.pt", "pt")
    assert result.converted == ()
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    same(loaded, state)
    assert loaded["model"]["tied"] is loaded["model"]["0.weight"]
    same(torch.load(tmp_path / "x.pt", weights_only=True, mmap=True), state)
    assert (result.nbytes, result.tensors) == (sum(t.nbytes for t in distinct(state)), len(distinct(state)))


def distinct(state: Any) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    waiting = [state]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            found[node.data_ptr()] = node
        elif isinstance(node, dict):
            waiting.extend(node.values())
        elif isinstance(node, list | tuple):
            waiting.extend(node)
    return list(found.values())


def test_numpy_becomes_torch_and_is_named(tmp_path: Path) -> None:
    state = {"a": np.arange(3, dtype=np.uint16), "b": np.float64(0.5), "c": torch.ones(1)}
    result = export(stored(state).journal, 1, tmp_path / "x.pt", "pt")
    assert result.converted == ("a", "b")
    same(
        torch.load(tmp_path / "x.pt", weights_only=True),
        {"a": torch.tensor([0, 1, 2], dtype=torch.uint16), "b": 0.5, "c": torch.ones(1)},
    )


@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
def test_every_dtype(tmp_path: Path, file_format: Any) -> None:
    state = {name: tensor for name, tensor in every_dtype().items() if isinstance(tensor, torch.Tensor)}
    export(stored(state).journal, "latest", tmp_path / "x", file_format)
    if file_format == "pt":
        same(
            torch.load(tmp_path / "x", weights_only=True), {name: tensor.contiguous() for name, tensor in state.items()}
        )
        return
    loaded = safetensors.torch.load_file(tmp_path / "x")
    assert {name: tensor_bytes(tensor) for name, tensor in loaded.items()} == {
        name: tensor_bytes(tensor) for name, tensor in state.items()
    }
    assert loaded["float8_e4m3fn"].dtype == torch.float8_e4m3fn


def test_a_safetensors_file_brings_the_whole_state_back(tmp_path: Path) -> None:
    state = training_state() | {
        "complex": torch.ones(2, 3, dtype=torch.complex128),
        "names": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
    }
    store = stored(state)
    for limit in (None, 20_000):
        result = export(store.journal, "latest", tmp_path / f"{limit}.safetensors", max_shard_bytes=limit)
        copy = ckptstore.open(tmp_path / f"copy-{limit}")
        (imported,) = import_files(copy.journal, [result.index or result.paths[0]], step=1)
        assert imported.info.state == store.checkpoint("latest").state
        same(copy.load("latest", framework="torch"), store.load("latest", framework="torch"))


def test_shards_respect_the_limit_and_are_aligned(tmp_path: Path) -> None:
    state = {f"t{n}": torch.full((n * 100,), n, dtype=torch.uint8) for n in range(1, 20)}
    result = export(stored(state).journal, "latest", tmp_path / "m.safetensors", max_shard_bytes=2000)
    assert result.index is not None
    where = json.loads(result.index.read_text())["weight_map"]
    assert list(where) == list(state)
    for path in result.paths:
        with safetensors.safe_open(path, "pt") as file:
            names = file.keys()
            assert sum(state[name].nbytes for name in names) <= 2000
            for name in names:
                assert torch.equal(file.get_tensor(name), state[name])
                assert where[name] == path.name
    assert result.paths[0].name == f"m-00001-of-{len(result.paths):05d}.safetensors"


def test_selection_leaves_the_rest_of_the_state(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2), "b": torch.zeros(1)}, "optimizer": {"m": torch.ones(2), "lr": 0.1}}
    store = stored(state)
    export(store.journal, 1, tmp_path / "x.pt", "pt", select="model.*")
    same(torch.load(tmp_path / "x.pt"), {"model": state["model"], "optimizer": {"lr": 0.1}})
    export(store.journal, 1, tmp_path / "x.safetensors", select=["model.w", "optimizer.m"])
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert set(file.keys()) == {"model.w", "optimizer.m"}
        tree = jsontext.loads(file.metadata()[STATE_MEMBER].encode(), what="x", max_bytes=10_000)
    assert tree == {"model": {"w": {"$t": "model.w"}}, "optimizer": {"m": {"$t": "optimizer.m"}, "lr": 0.1}}
    with pytest.raises(TensorNotFoundError):
        export(store.journal, 1, tmp_path / "y", select="nothing")


def test_a_hostile_dtype_name_stays_out_of_the_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored({"a": 1})
    with pytest.raises(FormatError, match="no dtype"):
        inside.revived_dtype("float32\nposix\nsystem")
    export(store.journal, 1, tmp_path / "x.pt", "pt")


# Complete and durable, or absent


def test_existing_files_are_kept(tmp_path: Path) -> None:
    store = stored({"a": torch.ones(10_000), "b": torch.zeros(10_000)})
    for name, options in [
        ("x.pt", {"format": "pt"}),
        ("x.safetensors", {}),
        ("m.safetensors.index.json", {"max_shard_bytes": 1}),
        ("m-00002-of-00002.safetensors", {"max_shard_bytes": 1}),
    ]:
        (tmp_path / name).write_text("mine")
        out = tmp_path / ("m.safetensors" if name.startswith("m") else name)
        with pytest.raises(UsageError, match="exists"):
            export(store.journal, 1, out, **options)  # type: ignore[arg-type]
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "mine"
        export(store.journal, 1, out, overwrite=True, **options)  # type: ignore[arg-type]
        assert (tmp_path / name).read_bytes() != b"mine"
        for path in tmp_path.iterdir():
            path.unlink()


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    with pytest.raises(UsageError, match="exists"):
        export(
            stored({"a": torch.ones(3)}).journal,
            1,
            out,
            progress=lambda _done, _total: out.write_text("theirs") and None,
        )
    assert out.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [out]


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    export(stored({"a": torch.ones(3)}).journal, 1, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == [tmp_path / "x.safetensors"]


@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
@pytest.mark.parametrize("failing", ["pwrite", "fdatasync", "fsync", "link"])
def test_a_medium_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: Any, failing: str
) -> None:
    store = stored({"a": torch.ones(50_000), "b": torch.ones(70_000)})

    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(StorageError, match="No space left"):
        export(store.journal, 1, tmp_path / "x", file_format)
    assert list(tmp_path.iterdir()) == []


def test_shards_that_cannot_all_be_published_are_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored({"a": torch.ones(50_000), "b": torch.ones(70_000)})
    link = os.link
    links: list[str] = []

    def failing(source: str, target: str) -> None:
        links.append(str(target))
        if len(links) == 3:
            raise OSError(errno.EIO, "Input/output error")
        link(source, target)

    monkeypatch.setattr(os, "link", failing)
    with pytest.raises(StorageError):
        export(store.journal, 1, tmp_path / "m.safetensors", max_shard_bytes=1)
    assert links[-1].endswith("m.safetensors.index.json"), "the index comes last"
    assert list(tmp_path.iterdir()) == []


def test_contents_are_durable_before_names_and_names_before_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, fdatasync, link = os.fsync, os.fdatasync, os.link

    def seen_fsync(descriptor: int) -> None:
        assert stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.append("fsync folder")
        fsync(descriptor)

    def seen_fdatasync(descriptor: int) -> None:
        calls.append("fdatasync")
        fdatasync(descriptor)

    def seen_link(source: str, target: str) -> None:
        calls.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "fdatasync", seen_fdatasync)
    monkeypatch.setattr(os, "link", seen_link)
    export(stored({"a": torch.ones(3)}).journal, 1, tmp_path / "x.pt", "pt")
    assert calls == ["fdatasync", "fsync folder", "link", "fsync folder"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_memory_does_not_grow_with_the_state(tmp_path: Path, name: str) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save({f"t{n}": np.full(8_000_000, n, np.float32) for n in range(8)}, step=1)  # 256 MB
    script = f"""
import resource, sys
from pathlib import Path
import ckptstore
from ckptstore.exchange.export import export
store = ckptstore.open({str(tmp_path / "run")!r})
kind = {"pt" if name.endswith("pt") else "safetensors"!r}
export(store.journal, 1, Path({str(tmp_path / "warm.pt")!r}), kind, select="t0")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(store.journal, 1, Path({str(tmp_path / name)!r}), {"pt" if name.endswith("pt") else "safetensors"!r})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 48 * 1024, "KiB above a first, small export"


@pytest.mark.parametrize("where", ["FORMAT", "log/00000000000000000000", "model.safetensors", "seg/new/../model.pt"])
def test_no_output_inside_a_store(tmp_path: Path, where: str) -> None:
    """Neither of this store nor of another, empty or with a damaged FORMAT; not through a link to one."""
    root = tmp_path / "run"
    store = ckptstore.open(root)
    with store.writer() as writer:
        writer.save({"w": np.ones(3)}, 1)
    before = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    (tmp_path / "link").symlink_to(root)
    (root / "seg" / "new").mkdir()
    for folder in (root, tmp_path / "link"):
        with pytest.raises(UsageError, match=rf"is inside the checkpoint store {re.escape(str(root))}: write it som"):
            export(store.journal, 1, folder / where, overwrite=True)
    assert {file: file.read_bytes() for file in root.rglob("*") if file.is_file()} == before
    ckptstore.open(tmp_path / "empty", create=True)
    with pytest.raises(UsageError, match="is inside the checkpoint store"):
        export(store.journal, 1, tmp_path / "empty" / "FORMAT", overwrite=True)
    (root / "FORMAT").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="is inside the checkpoint store"):
        refuse_store(root / "FORMAT")
    (tmp_path / "FORMAT").write_text("somebody else's")
    refuse_store(tmp_path / "model.pt")


def test_a_tree_too_long_for_a_header_is_refused_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not silently omitted."""
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save({"w": np.ones(3), "notes": "x" * 500}, 1)
    export(store.journal, 1, tmp_path / "x.safetensors")
    monkeypatch.setattr("ckptstore.formats.states.state.TREE_LIMIT", 400)
    with pytest.raises(UnsupportedStateError, match=r"^state\['notes'\]: takes"):
        export(store.journal, 1, tmp_path / "y.safetensors")
    with pytest.raises(UnsupportedStateError, match=r"x\.safetensors: state\['notes'\]: takes"):
        open_file(tmp_path / "x.safetensors")
    assert export(store.journal, 1, tmp_path / "y.pt", format="pt").tensors == 1


@pytest.mark.parametrize(("name", "limit"), [("m.safetensors", None), ("m.safetensors", 100), ("m.pt", None)])
def test_stripped_it_is_what_load_state_dict_takes(tmp_path: Path, name: str, limit: int | None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    state = {"model": model.state_dict(), "optimizer": {"model.x": torch.ones(2)}, "step": 7}
    store = stored(state)
    out = tmp_path / name
    result = store.export("latest", out, strip="model.", max_shard_bytes=limit)
    if name.endswith(".pt"):
        loaded = torch.load(out, weights_only=True)
    else:
        assert (len(result.paths) > 1) is (limit is not None)
        loaded = {key: tensor for path in result.paths for key, tensor in safetensors.torch.load_file(path).items()}
    fresh = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    fresh.load_state_dict(loaded)
    same(dict(fresh.state_dict()), dict(model.state_dict()))
    copy = ckptstore.open(tmp_path / "copy")
    import_files(copy.journal, [result.index or result.paths[0]], step=1)
    same(dict(copy.load(1, framework="torch")), dict(model.state_dict()))
    only = store.export("latest", tmp_path / f"0{out.suffix}", strip="model.", select="*.0.*")
    assert only.tensors == 2


@pytest.mark.parametrize("kind", ["one", "several", "by name"])
def test_stripped_of_an_optimizer_is_what_it_loads(tmp_path: Path, kind: str) -> None:
    """No optimizer accepts its tensors alone, under names like ``state.0.exp_avg``."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    held = {
        "one": optimizer.state_dict(),
        "several": [optimizer.state_dict()],
        "by name": {"a.b": optimizer.state_dict()},
    }
    prefix = {"one": "optimizer.", "several": "optimizer.0.", "by name": "optimizer.a.b."}[kind]
    store = stored({"model": model.state_dict(), "optimizer": held[kind], "step": 1})
    store.export(1, tmp_path / "optimizer.pt", strip=prefix)
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    fresh = torch.optim.AdamW(model.parameters(), lr=1.0)
    fresh.load_state_dict(loaded)
    assert fresh.param_groups[0]["lr"] == 0.25
    same(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    # With more requested, and in a safetensors file, it is tensors.
    store.export(1, tmp_path / "some.pt", strip=prefix, select="*.exp_avg")
    assert list(torch.load(tmp_path / "some.pt", weights_only=True)) == ["state.0.exp_avg", "state.1.exp_avg"]
    store.export(1, tmp_path / "x.safetensors", strip=prefix)
    assert "state.0.exp_avg" in safetensors.torch.load_file(tmp_path / "x.safetensors")


def test_stripped_of_a_model_with_extra_state_has_it(tmp_path: Path) -> None:
    store = stored({"model": {"w": torch.ones(2), "layer._extra_state": b"scales"}})
    store.export(1, tmp_path / "m.pt", strip="model.")
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert loaded["layer._extra_state"] == b"scales"
    assert torch.equal(loaded["w"], torch.ones(2))


def test_tied_tensors_are_stripped_to_names_of_their_own(tmp_path: Path) -> None:
    shared = torch.ones(3)
    store = stored({"ema": shared, "model": {"head": shared, "wte": shared}})
    result = store.export(1, tmp_path / "m.safetensors", strip="model.")
    assert (result.tensors, result.tied) == (1, (("wte", "head"),))
    store.export(1, tmp_path / "m.pt", strip="model.")
    assert list(torch.load(tmp_path / "m.pt", weights_only=True)) == ["head", "wte"]


def test_a_state_that_cannot_be_stripped_is_reported(tmp_path: Path) -> None:
    store = stored({"model": {"a": torch.ones(1)}, "lone": torch.ones(1), "odd": {"$x": torch.ones(1)}})
    for strip, error, said in (
        ("net.", TensorNotFoundError, r"begins with 'net\.'; there are 'model\.', 'lone\.'"),
        ("model", UsageError, r"would be named '\.a', which is invalid in a file; end the prefix"),
        ("odd.", UsageError, r"would be named '\$x'"),
        ("lone", UsageError, r"would be named ''"),
        ("", UsageError, r"pass a prefix of tensor names"),
    ):
        with pytest.raises(error, match=said):
            store.export(1, tmp_path / "x.safetensors", strip=strip)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("strip", [None, "model."])
@pytest.mark.parametrize("select", [None, "model.*"])
def test_names_are_those_of_the_bare_model_at_any_depth(tmp_path: Path, strip: str | None, select: str | None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 3)))
    model[1][0] = torch.compile(model[1][0], backend="eager")
    whole = torch.compile(model, backend="eager")
    state = {"model": whole.state_dict()}
    store = stored(state)
    out = tmp_path / "m.safetensors"
    store.export(1, out, strip=strip, select=select)
    loaded = safetensors.torch.load_file(out)
    bare = ["0.bias", "0.weight", "1.0.bias", "1.0.weight"]
    assert sorted(loaded) == [f"{'' if strip else 'model.'}{name}" for name in bare]
    assert torch.equal(loaded["1.0.weight" if strip else "model.1.0.weight"], model[1][0].weight)
    copy = ckptstore.open(tmp_path / "copy")
    import_files(copy.journal, [out], step=1)
    back = copy.load(1, framework="torch")
    same(dict(back), loaded) if strip else same(back["model"], state["model"])


def test_names_that_would_be_one_without_what_compile_puts_there_stay(tmp_path: Path) -> None:
    store = stored({"model": {"a.w": torch.zeros(1), "a._orig_mod.w": torch.ones(1)}})
    for strip, names in ((None, {"model.a.w", "model.a._orig_mod.w"}), ("model.", {"a.w", "a._orig_mod.w"})):
        store.export(1, tmp_path / f"{strip}.safetensors", strip=strip)
        assert set(safetensors.torch.load_file(tmp_path / f"{strip}.safetensors")) == names
