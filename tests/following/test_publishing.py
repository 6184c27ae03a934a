"""`Store.publish`: what readers without ckptstore find, on disks and in buckets; and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptstore
from ckptstore.backends import open_backend
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.errors import (
    CheckpointNotFoundError,
    FencedError,
    FormatError,
    StorageError,
    TensorNotFoundError,
    UsageError,
    WriterError,
)
from tests.following.published import Tensors, example, pull_as_slime
from tools.objects.server import Server

reading, serving = example("read_published"), example("serve_published")


def model(step: int) -> dict[str, torch.Tensor]:
    """Weights that change with each step, one that never does, and dtypes that numpy lacks."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(33, 7, generator=generator)
    return {
        "embed.weight": weight.to(torch.bfloat16),
        "norm.weight": torch.randn(5, generator=generator).to(torch.float16),
        "up.weight": weight.to(torch.float8_e4m3fn),
        "up.scale": torch.tensor(1.5 + step),
        "frozen": torch.arange(1000, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, step % 2 == 0]),
    }


def image(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def images(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: image(tensor) for name, tensor in state.items()}


def told(found: Tensors) -> dict[str, bytes]:
    return {name: one.tobytes() for name, one in found.items()}


@dataclass
class Place:
    """Where weights are published: a folder, or a bucket that is copied to a folder for its readers."""

    url: str
    copy: Path
    options: dict[str, Any] = field(default_factory=dict)

    def folder(self) -> Path:
        """What a reader of files finds now."""
        if not self.options:
            return Path(self.url)
        backend = open_backend(self.url, create=True, storage_options=self.options)
        shutil.rmtree(self.copy, ignore_errors=True)
        for key in backend.list(""):
            (self.copy / key).parent.mkdir(parents=True, exist_ok=True)
            (self.copy / key).write_bytes(backend.get(key))
        return self.copy

    def read(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The newest manifest and tensors, as the example without ckptstore reads them."""
        manifest, tensors = reading.read(self.folder())
        return manifest, told(tensors)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "published"), tmp_path / "copy")
    server: Server = request.getfixturevalue("s3")
    return Place(server.url(), tmp_path / "copy", server.options)


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    return ckptstore.open(tmp_path / "run")


Save = Callable[[int], dict[str, bytes]]


@pytest.fixture
def save(store: ckptstore.Store) -> Save:
    """Saves a step, and returns the bytes of its model."""

    def one(step: int) -> dict[str, bytes]:
        with store.writer(parent="latest", threads=1, poll_seconds=None) as writer:
            writer.save({"model": model(step), "optimizer": {"moment": torch.zeros(9)}, "epoch": step}, step)
        return images(model(step))

    return one


def publisher(store: ckptstore.Store, place: Place, **options: Any) -> ckptstore.Publisher:
    return store.publish(place.url, storage_options=place.options or None, **options)


def test_a_full_then_deltas(store: ckptstore.Store, save: Save, place: Place) -> None:
    store.create()
    with publisher(store, place, sha256=True) as published:
        assert published.look() is None  # nothing was saved yet
        wanted = save(1)
        first = published.look()
        assert first is not None
        assert (first.version, first.ref, first.base, first.reason) == (1, "1@1", None, "there was no version")
        assert first.tensors == first.changed == len(wanted)
        assert place.read()[1] == wanted
        assert published.look() is None
        for step in (2, 3):
            wanted = save(step)
            found = published.look()
            assert found is not None
            assert (found.version, found.base, found.reason) == (step, step - 1, None)
            assert found.changed == len(wanted) - 2  # not the frozen tensor, nor the empty one
            assert found.written < first.written
            manifest, tensors = place.read()
            assert tensors == wanted
            assert {one["name"] for one in manifest["tensors"] if one["encoding"] == "base"} == {"frozen", "empty"}
    for one in manifest["tensors"]:
        assert one["sha256"] == hashlib.sha256(wanted[one["name"]]).hexdigest()
    assert (manifest["step"], manifest["ref"], manifest["kind"], manifest["base"]) == (3, f"3@{3}", "delta", 2)
    assert manifest["total_size"] == sum(map(len, wanted.values()))
    changed = load_file(place.folder() / "weight_v000003" / "model-00001-of-00001.safetensors")
    assert images(changed) == {name: data for name, data in wanted.items() if name not in ("frozen", "empty")}
    assert {name: one.dtype for name, one in changed.items()} == {name: model(3)[name].dtype for name in changed}


def test_the_layout_of_slime(store: ckptstore.Store, save: Save, place: Place) -> None:
    with publisher(store, place, layout="slime", full_every=3, keep=9) as published:
        for step in range(1, 6):
            wanted = save(step)
            found = published.look()
            assert found is not None
            assert found.base == (None if step in (1, 4) else step - 1)
            assert told(pull_as_slime(place.folder(), step)) == wanted
    assert told(pull_as_slime(place.folder(), 2)) == images(model(2))


@pytest.mark.parametrize("layout", ["hf", "slime"])
def test_a_live_module_is_updated_in_place(store: ckptstore.Store, tmp_path: Path, layout: Any) -> None:
    def net() -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 16, bias=False))
        made[2].weight = made[0].weight
        return made.to(torch.bfloat16)

    trained, live = net(), net()
    kept = [parameter.data_ptr() for parameter in live.parameters()]
    weights = serving.PublishedWeights(tmp_path / "published", live)
    with (
        store.writer(threads=1, poll_seconds=None) as writer,
        store.publish(tmp_path / "published", layout=layout, keep=4) as published,
    ):
        for step in range(1, 9):
            with torch.no_grad():
                trained[step % 2].weight += step
            writer.save({"model": trained.state_dict()}, step)
            assert published.look() is not None
            if step in (1, 2, 5, 8):  # one version, or several at once
                assert weights.update()
                assert not weights.update()
                assert images(live.state_dict()) == images(trained.state_dict())
        assert [parameter.data_ptr() for parameter in live.parameters()] == kept
        manifest = json.loads((tmp_path / "published" / "weight_v000008" / "manifest.json").read_text())
        assert manifest["tied"] == [["2.weight", "0.weight"]]
        late = serving.PublishedWeights(tmp_path / "published", net())
        assert late.update()
        assert images(late.module.state_dict()) == images(trained.state_dict())


def test_a_live_module_of_another_kind(store: ckptstore.Store, tmp_path: Path) -> None:
    def net(dtype: torch.dtype, *, tied: bool, rows: int = 8) -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, rows, bias=False))
        if tied:
            made[1].weight = made[0].weight
        return made.to(dtype)

    trained = net(torch.bfloat16, tied=True)
    with (
        store.writer(threads=1, poll_seconds=None) as writer,
        store.publish(tmp_path / "published") as published,
    ):
        writer.save({"model": trained.state_dict()}, 1)
        assert published.look() is not None
    # The same number of bytes, but other numbers.
    for live in (net(torch.float16, tied=True), net(torch.bfloat16, tied=False, rows=4)):
        before = images(live.state_dict())
        with pytest.raises(ValueError, match=r"does not fit"):
            serving.PublishedWeights(tmp_path / "published", live).update()
        assert images(live.state_dict()) == before
    live = net(torch.bfloat16, tied=False)  # each of the two gets the weight
    assert serving.PublishedWeights(tmp_path / "published", live).update()
    assert images(live.state_dict()) == images(trained.state_dict())


@pytest.mark.parametrize("layout", ["hf", "slime"])
def test_damage_is_noticed_and_changes_nothing(store: ckptstore.Store, tmp_path: Path, layout: Any) -> None:
    trained, live = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(2))
    root = tmp_path / "published"
    weights = serving.PublishedWeights(root, live)
    with (
        store.writer(threads=1, poll_seconds=None) as writer,
        store.publish(root, layout=layout, sha256=True) as published,
    ):
        for step in (1, 2):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(1)
            writer.save({"model": trained.state_dict()}, step)
            assert published.look() is not None
            if step == 1:
                assert weights.update()
    before = images(live.state_dict())
    for file in sorted(root.glob("weight_v000002/m*")):
        intact = file.read_bytes()
        if file.name.endswith(".index.json"):
            continue
        for at in (len(intact) // 3, len(intact) - 2):
            damaged = bytearray(intact)
            damaged[at] ^= 0x10
            if damaged[at : at + 1].isspace() or intact[at : at + 1].isspace():
                continue  # the header's padding
            file.write_bytes(damaged)
            with pytest.raises(Exception):  # noqa: B017  # zstandard's, safetensors' or the example's own
                weights.update()
            assert images(live.state_dict()) == before, file
        file.write_bytes(intact[: len(intact) // 2])
        with pytest.raises(Exception):  # noqa: B017
            weights.update()
        file.unlink()
        with pytest.raises(FileNotFoundError):
            weights.update()
        file.write_bytes(intact)
        assert images(live.state_dict()) == before
    first = root / "weight_v000001" / "model-00001-of-00001.safetensors"
    intact = first.read_bytes()
    first.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    late = serving.PublishedWeights(root, torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    if layout == "hf":  # the second version replaces every tensor
        assert late.update()
    else:
        with pytest.raises(ValueError, match="damaged"):
            late.update()
    first.write_bytes(intact)
    assert weights.update()
    assert images(live.state_dict()) == images(trained.state_dict())


def test_old_versions_are_removed_but_not_what_others_build_on(
    store: ckptstore.Store, save: Save, place: Place
) -> None:
    there = {}
    with publisher(store, place, full_every=3, keep=2) as published:
        for step in range(1, 9):
            save(step)
            found = published.look()
            assert found is not None
            there[step] = sorted(int(one.name[-6:]) for one in place.folder().glob("weight_v*"))
    assert there == {
        1: [1], 2: [1, 2], 3: [1, 2, 3],
        4: [1, 2, 3, 4],  # the third is kept, and builds on the others
        5: [4, 5], 6: [4, 5, 6], 7: [4, 5, 6, 7], 8: [7, 8],
    }  # fmt: skip


def test_what_makes_a_full(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    root = tmp_path / "published"

    def look(**options: Any) -> tuple[int | None, str | None]:
        with store.publish(root, **options) as published:
            found = published.look()
            assert found is not None
            return found.base, found.reason

    save(1)
    assert look() == (None, "there was no version")
    save(2)
    assert look() == (1, None)  # a new publisher continues
    assert look(layout="slime") == (None, "another layout or selection")
    with store.publish(root, layout="slime") as published:
        assert published.look() is None
    assert look() == (None, "another layout or selection")
    assert look(select="model.up*") == (None, "another layout or selection")
    assert look() == (None, "another layout or selection")
    with store.writer(parent="1@1", threads=1, poll_seconds=None) as writer:
        writer.save({"model": model(3)}, 3)
    assert look() == (None, "the run went back, or was forked")
    with store.writer(parent="latest", threads=1, poll_seconds=None) as writer:
        writer.save({"model": {**model(4), "more": torch.ones(3)}}, 4)
    assert look() == (None, "other tensors, shapes or files")
    with store.writer(parent="latest", threads=1, poll_seconds=None) as writer:
        writer.save({"model": {**model(5), "more": torch.ones(3)}}, 5)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")
    (tmp_path / "files" / "pytorch_model.bin").write_bytes(b"weights")
    assert look(files=tmp_path / "files") == (None, "other tensors, shapes or files")
    newest = max(root.glob("weight_v*"))
    assert (newest / "config.json").read_text() == "{}"
    assert not (newest / "pytorch_model.bin").exists()
    (newest / "manifest.json").write_bytes(b"{}")
    with store.writer(parent="latest", threads=1, poll_seconds=None) as writer:
        writer.save({"model": {**model(6), "more": torch.ones(3)}}, 6)
    assert look(files=tmp_path / "files") == (None, "the previous version is damaged or incomplete")
    shutil.rmtree(tmp_path / "run")
    other = ckptstore.open(tmp_path / "run")
    with other.writer(threads=1, poll_seconds=None) as writer:
        writer.save({"model": model(1)}, 1)
    with other.publish(root) as published:
        found = published.look()
    assert found is not None
    assert (found.base, found.reason) == (None, "another run")


@pytest.mark.parametrize("layout", ["hf", "slime"])
def test_a_base_that_was_pruned(store: ckptstore.Store, save: Save, tmp_path: Path, layout: Any) -> None:
    """A publisher that goes on has it pinned. A new one needs it for slime's deltas, and publishes a full then."""
    root = tmp_path / "published"

    def replaced_by(step: int) -> dict[str, bytes]:
        wanted = save(step)
        store.retire(store.checkpoints()[-2].ref, take_over=True)
        store.gc()
        return wanted

    save(1)
    with store.publish(root, layout=layout, keep=9) as published:
        assert published.look() is not None
        wanted = {2: replaced_by(2)}
        found = published.look()
        assert found is not None
        assert (found.base, found.reason) == (1, None)
    wanted[3] = replaced_by(3)
    with store.publish(root, layout=layout, keep=9) as published:
        found = published.look()
    assert found is not None
    if layout == "hf":
        assert (found.base, found.reason) == (2, None)
        return
    assert found.base is None
    assert found.reason is not None
    assert found.reason.startswith("the previous checkpoint cannot be read: ")
    assert [told(pull_as_slime(root, step)) for step in wanted] == list(wanted.values())


def test_a_base_with_other_bytes(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    """A manifest that names other bytes than the store has: no delta on them is written."""
    root = tmp_path / "published"
    save(1)
    with store.publish(root, layout="slime", max_shard_bytes=600) as published:
        assert published.look() is not None
    path = root / "weight_v000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["tensors"][-1]["file"] > manifest["tensors"][0]["file"]  # after a file that is complete
    manifest["tensors"][-1]["xxh3"] = "0" * 32
    text = json.dumps(manifest).encode()
    path.write_bytes(text)
    pointer = json.loads((root / "latest.json").read_text())
    (root / "latest.json").write_text(json.dumps({**pointer, "manifest": hashlib.sha256(text).hexdigest()}))
    wanted = save(2)
    with store.publish(root, layout="slime", max_shard_bytes=600) as published:
        found = published.look()
    assert found is not None
    assert found.base is None
    assert found.reason is not None
    assert "other bytes" in found.reason
    assert told(pull_as_slime(root, 2)) == wanted


def test_shards_names_and_the_rest_of_the_state(store: ckptstore.Store, tmp_path: Path) -> None:
    root = tmp_path / "published"
    state = {f"layers.{n}._orig_mod.weight": torch.full((64,), float(n)) for n in range(6)}
    with store.writer(threads=1, poll_seconds=None) as writer:
        writer.save({"model": state}, 1)
        with store.publish(root, max_shard_bytes=600) as published:
            assert published.look() is not None
            state["layers.4._orig_mod.weight"] = torch.zeros(64)
            writer.save({"model": state}, 2)
            assert published.look() is not None
    full = sorted(one.name for one in (root / "weight_v000001").glob("*.safetensors"))
    assert full == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((root / "weight_v000001" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {f"layers.{n}.weight": full[n // 2] for n in range(6)}
    assert index["metadata"] == {"total_size": 6 * 256}
    assert [one.name for one in (root / "weight_v000002").glob("*.safetensors")] == [full[2]]
    assert list(load_file(root / "weight_v000002" / full[2])) == ["layers.4.weight"]
    with store.publish(tmp_path / "all", strip="") as published:
        assert published.look() is not None
    assert "model.layers.0.weight" in load_file(
        tmp_path / "all" / "weight_v000001" / "model-00001-of-00001.safetensors"
    )


def test_damage_at_the_place_makes_a_full(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    def look() -> str | None:
        with store.publish(root, sha256=True) as published:
            found = published.look()
            assert found is not None
            return found.reason

    root = tmp_path / "published"
    save(1)
    assert look() == "there was no version"
    save(2)
    assert look() is None
    manifest = root / "weight_v000002" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"step":2', '"step":1'))
    save(3)
    assert look() == "the previous version is damaged or incomplete"
    save(4)
    assert look() is None
    shutil.rmtree(root / "weight_v000003")
    save(5)
    assert look() == "the previous version is damaged or incomplete"
    assert told(reading.read(root)[1]) == images(model(5))


def test_another_history_of_the_run(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    """An older copy of the store was put in its place, and trained on: the same REFs name other states."""
    root = tmp_path / "published"
    save(1)
    shutil.copytree(tmp_path / "run", tmp_path / "older")
    save(2)
    with store.publish(root, sha256=True) as published:
        assert published.look() is not None
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "older", tmp_path / "run")
    store = ckptstore.open(tmp_path / "run")
    with store.writer(parent="latest", threads=1, poll_seconds=None) as writer:
        writer.save({"model": model(7)}, 2)
    with store.publish(root, sha256=True) as published:
        found = published.look()
        assert found is not None
        assert (found.ref, found.reason) == ("2@2", "the run went back, or was forked")
    assert told(reading.read(root)[1]) == images(model(7))


def test_what_another_program_wrote_is_not_removed(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    root = tmp_path / "published"
    with store.publish(root, full_every=1, keep=1) as published:
        for step in (1, 2, 3):
            save(step)
            found = published.look()
            assert found is not None
            (root / "weight_v000000").mkdir(exist_ok=True)
            (root / "weight_v000000" / "model.safetensors").write_bytes(b"somebody's")
            (root / "notes").write_bytes(b"somebody's")
    assert found.removed == (2,)
    assert sorted(one.name for one in root.iterdir()) == ["latest.json", "notes", "weight_v000000", "weight_v000003"]
    assert (root / "weight_v000000" / "model.safetensors").read_bytes() == b"somebody's"


def test_the_configuration_that_a_checkpoint_holds(store: ckptstore.Store, tmp_path: Path) -> None:
    """As the Trainer's callback and imported folders of a Trainer have it."""
    files = {name: np.frombuffer(name.encode(), np.uint8) for name in ("config.json", "training_args.bin", "vocab.txt")}
    with store.writer(threads=1, poll_seconds=None) as writer:
        writer.save({"model": model(1), "files": files}, 1)
    with store.publish(tmp_path / "published", sha256=True) as published:
        assert published.look() is not None
    folder = tmp_path / "published" / "weight_v000001"
    names = {one.name for one in folder.iterdir()} - {"claim.json", "manifest.json", "model.safetensors.index.json"}
    assert names == {"config.json", "vocab.txt", "model-00001-of-00001.safetensors"}
    assert (folder / "vocab.txt").read_text() == "vocab.txt"
    manifest, _ = reading.read(tmp_path / "published")
    assert manifest["files"] == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in ("config.json", "vocab.txt")
    }


def test_checksums_that_are_asked_for_later(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    save(1)
    for sha, published in ((False, True), (False, False), (True, True), (True, False), (False, False)):
        with store.publish(tmp_path / "published", sha256=sha) as publisher:
            assert (publisher.look() is not None) == published, sha
    manifest, _ = reading.read(tmp_path / "published")
    assert all(tensor["sha256"] for tensor in manifest["tensors"])


def test_nothing_is_removed_before_the_pointer_is_durable(
    store: ckptstore.Store, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("replace", "settle", "delete"):
        real = getattr(LocalBackend, name)

        def call(self: LocalBackend, key: str, *rest: bytes, real: Any = real, name: str = name) -> None:
            if str(tmp_path / "published") in self.root:
                calls.append(name)
            real(self, key, *rest)

        monkeypatch.setattr(LocalBackend, name, call)
    with store.publish(tmp_path / "published", full_every=1, keep=1) as published:
        for step in (1, 2):
            calls.clear()
            save(step)
            assert published.look() is not None
    assert calls[:2] == ["replace", "settle"]
    assert set(calls[2:]) == {"delete"}


def test_shards_of_ranks(store: ckptstore.Store, tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    parts = [ckptstore.Shard(whole[begin : begin + 3], (6, 4), (begin, 0)) for begin in (0, 3)]
    with store.writer(threads=1, poll_seconds=None) as writer:
        writer.save({"model": {"weight": ckptstore.Shards(parts)}}, 1)
    with store.publish(tmp_path / "published", sha256=True) as published:
        assert published.look() is not None
    _, tensors = reading.read(tmp_path / "published")
    assert tensors["weight"].tobytes() == whole.tobytes()


def test_two_publishers_of_one_folder(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    save(1)
    root = tmp_path / "published"
    with store.publish(root) as first:
        assert first.look() is not None
        with store.publish(root) as second, pytest.raises(WriterError, match="another publisher is running"):
            second.look()
    with store.publish(root) as second:
        assert second.look() is None


def test_two_publishers_of_one_bucket(save: Save, store: ckptstore.Store, s3: Server, tmp_path: Path) -> None:
    """Without a lock, as on two machines: the one that started last continues, the other stops."""
    place = Place(s3.url(), tmp_path / "copy", s3.options)
    save(1)
    with publisher(store, place, sha256=True) as first:
        assert first.look() is not None
        wanted = save(2)
        elsewhere = Place(f"{place.url}/", place.copy, place.options)  # the lock of this process has another name
        with publisher(store, elsewhere, sha256=True) as second:
            assert second.look() is not None
            save(3)
            with pytest.raises(FencedError, match="another publisher has taken over"):
                first.look()
            with pytest.raises(FencedError):
                first.look()
            assert place.read()[1] == wanted
            found = second.look()
            assert found is not None
            assert place.read()[1] == images(model(3))


def test_a_publisher_that_is_overtaken_while_it_writes(
    save: Save, store: ckptstore.Store, s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(s3.url(), tmp_path / "copy", s3.options)
    save(1)
    with publisher(store, place, sha256=True, keep=1) as first:
        assert first.look() is not None
        save(2)
        overtaken = []

        def overtake(name: str) -> None:
            if name == "publish.complete" and not overtaken:
                overtaken.append(name)
                with publisher(store, Place(f"{place.url}/", place.copy, place.options), sha256=True) as second:
                    found = second.look()
                    assert found is not None
                    assert (found.version, found.base, found.reason) == (
                        3,
                        None,
                        "a version before it was not completed",
                    )

        monkeypatch.setattr("ckptstore.following.publisher.crash_point", overtake)
        with pytest.raises(FencedError):
            first.look()
    manifest, tensors = place.read()
    assert (manifest["version"], tensors) == (3, images(model(2)))


def test_what_is_refused(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layout"):
        store.publish(tmp_path / "a", layout="gguf")  # type: ignore[arg-type]
    for options in ({"keep": 0}, {"full_every": 0}, {"max_shard_bytes": 0}, {"poll": 0}, {"timeout": -1}):
        with pytest.raises(UsageError):
            store.publish(tmp_path / "a", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is not a folder"):
        store.publish(tmp_path / "a", files=tmp_path / "nothing")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model card.md").write_text("")
    with pytest.raises(UsageError, match=r"model card\.md: the name of a published file"):
        store.publish(tmp_path / "a", files=tmp_path / "files")
    save(1)
    with pytest.raises(UsageError, match="is a checkpoint store"):
        store.publish(tmp_path / "run")
    with pytest.raises(UsageError, match="inside the checkpoint store"):
        store.publish(tmp_path / "run" / "published")
    with store.publish(tmp_path / "a", strip="nothing.") as published, pytest.raises(TensorNotFoundError):
        published.look()
    with store.publish(tmp_path / "a", ref="tag:none") as published, pytest.raises(CheckpointNotFoundError):
        published.look()
    assert not list((tmp_path / "a").glob("weight_v*"))
    foreign = tmp_path / "foreign" / "weight_v000003"
    foreign.mkdir(parents=True)
    (foreign / "model.safetensors").write_bytes(b"slime's own")
    with store.publish(tmp_path / "foreign") as published, pytest.raises(UsageError, match="did not write"):
        published.look()
    assert (foreign / "model.safetensors").read_bytes() == b"slime's own"
    (tmp_path / "a" / "latest.json").write_text('{"version": 3}')
    with store.publish(tmp_path / "a") as published, pytest.raises(FormatError, match="not written by"):
        published.look()


@pytest.mark.parametrize(
    "damage",
    [{"version": "1"}, {"version": None}, {"version": 2}, {"chain": []}, {"chain": ["../run", "weight_v000001"]}],
)
def test_a_pointer_that_cannot_be(store: ckptstore.Store, save: Save, tmp_path: Path, damage: dict[str, Any]) -> None:
    save(1)
    with store.publish(tmp_path / "a") as published:
        assert published.look() is not None
    pointer = tmp_path / "a" / "latest.json"
    pointer.write_text(json.dumps(json.loads(pointer.read_text()) | damage))
    save(2)
    with store.publish(tmp_path / "a") as published, pytest.raises(FormatError, match="not a pointer"):
        published.look()


def test_a_medium_that_fails_leaves_the_former_version(
    store: ckptstore.Store, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "published"
    place = Place(str(root), tmp_path / "copy")
    wanted = save(1)
    with store.publish(root, sha256=True) as published:
        assert published.look() is not None
        save(2)

        def fail(name: str) -> None:
            if name == failing:
                raise StorageError(5, "the medium failed", str(root))

        for failing in ("publish.claimed", "publish.before-header", "publish.written", "publish.complete"):
            with monkeypatch.context() as patch:
                for module in ("publisher", "publish_target", "version_writer"):
                    patch.setattr(f"ckptstore.following.{module}.crash_point", fail)
                with pytest.raises(StorageError):
                    published.look()
            assert place.read()[1] == wanted
            assert sorted(one.name for one in root.iterdir()) == ["latest.json", "weight_v000001"], failing
        failing = "publish.pointed"  # it is unknown whether the pointer is durable
        with monkeypatch.context() as patch:
            patch.setattr("ckptstore.following.publish_target.crash_point", fail)
            with pytest.raises(StorageError):
                published.look()
        assert published.look() is None  # the pointer names it
        assert place.read()[1] == images(model(2))
        wanted = save(3)
        found = published.look()
        assert found is not None
        assert (found.version, found.base) == (3, 2)
        assert place.read()[1] == wanted


def test_the_iteration_waits_and_ends(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    stop = threading.Event()
    seen: list[str] = []
    progress: list[int] = []

    def publish() -> None:
        with store.publish(
            tmp_path / "published", poll=0.01, stop=stop, progress=lambda done, _total: progress.append(done)
        ) as published:
            for one in published:
                seen.append(one.ref)
                if len(seen) == 1:
                    save(2)
                else:
                    stop.set()

    thread = threading.Thread(target=publish)
    save(1)
    thread.start()
    thread.join(60)
    assert seen == ["1@1", "2@2"]
    assert max(progress) == sum(map(len, images(model(1)).values()))
    with store.publish(tmp_path / "published", poll=0.01, timeout=0.05) as published:
        assert list(published) == []


def test_other_refs_and_media(store: ckptstore.Store, save: Save, tmp_path: Path) -> None:
    save(1)
    save(2)
    store.tag("best", "1@1", take_over=True)
    url = f"memory://{uuid.uuid4().hex}"
    with store.publish(url, ref="tag:best") as published:
        found = published.look()
        assert found is not None
        assert found.ref == "1@1"
        assert published.look() is None
        store.tag("best", "2@2", take_over=True)
        found = published.look()
        assert found is not None
        assert (found.ref, found.base) == ("2@2", 1)
        store.tag("best", "1@1", take_over=True)
        found = published.look()
        assert found is not None
        assert (found.ref, found.reason) == ("1@1", "the run went back, or was forked")
