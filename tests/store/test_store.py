"""The public interface on real files: saved states are loaded unchanged, and history is never overwritten."""

from __future__ import annotations

import gc
import re
import threading
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import (
    CheckpointNotFoundError,
    StepOrderError,
    TensorNotFoundError,
    UnsupportedStateError,
    UsageError,
)
from ckptstore.segments.plain_segments import write_full
from tests.store.states import every_dtype, fill, same, tensor_bytes, training_state


class TestRoundTrip:
    def test_training_state(self, url: str) -> None:
        state = training_state()
        with ckptstore.open(url).writer() as writer:
            info = writer.save(state, step=3)
        assert (info.step, info.term, info.ref, info.kind, info.lossy) == (3, 1, "3@1", "full", False)
        loaded = ckptstore.open(url).load("latest")
        same(state, loaded)
        assert loaded["model"]["tied"] is loaded["model"]["0.weight"]
        assert isinstance(loaded["rng"]["numpy"][1], np.ndarray)
        torch.set_rng_state(loaded["rng"]["torch"])

    def test_every_dtype(self, url: str) -> None:
        state = every_dtype()
        with ckptstore.open(url).writer() as writer:
            writer.save(state, step=1)
        same(state, ckptstore.open(url).load(1))

    def test_numpy_framework_gives_the_same_bits(self, url: str) -> None:
        state = every_dtype()
        with ckptstore.open(url).writer() as writer:
            writer.save(state, step=1)
        loaded = ckptstore.open(url).load(1, framework="numpy")
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                assert isinstance(loaded[name], np.ndarray), name
                assert loaded[name].tobytes() == tensor_bytes(tensor), name
                assert loaded[name].shape == tuple(tensor.shape), name

    def test_a_state_with_too_long_a_text_is_refused_by_its_key(self) -> None:
        """Before anything is sent, so one medium is enough for texts of so many bytes."""
        store = ckptstore.open(f"memory://{uuid.uuid4().hex}")
        with store.writer() as writer:
            for save in (writer.save, writer.save_async):
                with pytest.raises(UnsupportedStateError, match=r"^state\['run'\]\['notes'\]: takes 20\.0 MB"):
                    save({"w": np.ones(3), "run": {"notes": "x" * 20_000_000}}, 1)
            assert not any(key.startswith("seg/") for key in store.backend.list(""))
            same(writer.save({"notes": "x" * 16_000_000}, 1).step, 1)
        assert len(store.load(1)["notes"]) == 16_000_000

    def test_state_without_tensors(self, url: str) -> None:
        with ckptstore.open(url).writer() as writer:
            writer.save({"epoch": 3}, step=0)
        assert ckptstore.open(url).load() == {"epoch": 3}

    def test_loaded_tensors_can_be_written_and_outlive_the_store(self, url: str) -> None:
        store = fill(url, 1)
        value = store.load(1)["value"]
        del store
        gc.collect()
        value += 1
        assert value.tolist() == [2.0] * 5

    def test_several_segments(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        state = {f"layer{index}": torch.randn(1000) for index in range(7)}

        def small(*args: Any, **keywords: Any) -> Any:
            return write_full(*args, **keywords, limit=9000)

        monkeypatch.setattr("ckptstore.write.deltas.write_full", small)
        store = ckptstore.open(tmp_path / "store")
        with store.writer() as writer:
            info = writer.save(state, step=1)
        assert len(info.segments) == 4
        same(state, store.load(1))
        assert ckptstore.verify(store).ok


class TestSafetensors:
    def test_a_full_is_a_normal_safetensors_file(self, tmp_path: Path) -> None:
        state = training_state()
        store = ckptstore.open(tmp_path / "store")
        with store.writer() as writer:
            writer.save(state, step=3)
        (file,) = (tmp_path / "store" / "seg").rglob("*.safetensors")
        loaded = safetensors.torch.load_file(file)
        assert tensor_bytes(loaded["model.0.bias"]) == tensor_bytes(state["model"]["0.bias"])
        assert tensor_bytes(loaded["optimizer.state.0.exp_avg"]) == tensor_bytes(
            state["optimizer"]["state"][0]["exp_avg"]
        )
        with safetensors.safe_open(file, framework="numpy") as opened:
            assert "model.2.bias" in opened.keys()  # noqa: SIM118  # not a dict
            assert opened.metadata()["format"] == "pt"


class TestSelection:
    def test_globs_and_names(self, url: str) -> None:
        state = training_state()
        with ckptstore.open(url).writer() as writer:
            writer.save(state, step=3)
        store = ckptstore.open(url)
        only = store.load(3, select="model.*")
        assert "0.weight" in only["model"]
        assert only["optimizer"]["state"][0] == {}
        assert only["note"] == state["note"]
        both = store.load(3, select=["model.2.bias", "optimizer.state.*.exp_avg"])
        assert list(both["model"]) == ["2.bias"]
        same(both["optimizer"]["state"][1]["exp_avg"], state["optimizer"]["state"][1]["exp_avg"])

    def test_no_match_suggests(self, url: str) -> None:
        store = fill(url, 1)
        with pytest.raises(ckptstore.TensorNotFoundError, match=r"'valeu'.*close: value"):
            store.load(1, select="valeu")

    def test_one_tensor_reads_only_its_bytes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from ckptstore.backends.local_disk import directio

        with ckptstore.open(tmp_path / "store").writer() as writer:
            writer.save({f"t{index}": torch.randn(1 << 18) for index in range(16)}, step=1)
        asked: list[int] = []
        original = directio.FileSource.read_into

        def counting(self: Any, offset: int, out: memoryview) -> None:
            asked.append(out.nbytes)
            original(self, offset, out)

        monkeypatch.setattr(directio.FileSource, "read_into", counting)
        ckptstore.open(tmp_path / "store").load(1, select="t7")
        assert (1 << 20) <= sum(asked) < (1 << 20) + 65536  # the tensor, the header and small records

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("w.*", "this takes one name, and 2 match: w.a, w.b"),
            ("w.c", "close: w.b, w.a"),
            ("nothing", "it has 3 tensors"),
        ],
    )
    def test_one_tensor_has_one_name(self, url: str, name: str, hint: str) -> None:
        store = ckptstore.open(url)
        with store.writer() as writer:
            writer.save({"w": {"a": np.ones(1), "b": np.zeros(1)}, "v[0]": np.ones(2)}, 1)
        alone = lambda ref, name: list(store.read_tensors(ref, [name]))  # noqa: E731
        for read in (store.read_tensor, lambda *which: list(store.chunks(*which)), alone):
            with pytest.raises(TensorNotFoundError, match=f"no tensor is named '{re.escape(name)}'; {re.escape(hint)}"):
                read(1, name)
        assert store.read_tensor(1, "v[0]").nbytes == 16
        assert sorted(data.nbytes for _, data in store.read_tensors(1)) == [8, 8, 16]

    @pytest.mark.parametrize("step", [np.int64(7), np.uint8(7), np.array(7), torch.tensor(7)], ids=repr)
    def test_whole_numbers_of_any_type_are_steps(self, url: str, step: Any) -> None:
        store = ckptstore.open(url)
        with store.writer(max_in_flight=2) as writer:
            assert type(writer.save({"n": 1}, step).step) is int
            assert type(writer.save_async({"n": 2}, step + 1).result().step) is int
            writer.tag("best", step)
        assert store.load(step) == {"n": 1}
        assert store.load("tag:best") == {"n": 1}
        assert store.load(step + 1) == {"n": 2}
        with store.writer(parent=step) as writer:
            assert writer.parent is not None
            assert writer.parent.ref == "7@1"

    @pytest.mark.parametrize("step", [True, np.True_, torch.tensor(True), 7.0, np.float32(7), "7"], ids=repr)
    def test_nothing_else_is_a_step(self, url: str, step: Any) -> None:
        store = ckptstore.open(url)
        with store.writer() as writer:
            writer.save({"n": 1}, 1)
            for refuse in (writer.save, writer.save_async):
                with pytest.raises(StepOrderError, match="a whole number from 0"):
                    refuse({"n": 1}, step)
            # A tag names a REF, which may be text.
            error, why = (UsageError, "is not a REF; use") if step != "7" else (CheckpointNotFoundError, "step 7")
            with pytest.raises(error, match=why):
                writer.tag("best", step)
        if step != "7":
            with pytest.raises(UsageError, match="is not a REF; use latest"):
                store.load(step)

    def test_a_checkpoint_in_place_of_its_ref_is_refused_with_the_remedy(self, url: str) -> None:
        store = ckptstore.open(url)
        with store.writer() as writer:
            info = writer.save({"n": 1}, 1)
        with pytest.raises(UsageError) as caught:
            store.load(info)  # type: ignore[arg-type]
        assert caught.value.__notes__ == ["name a checkpoint by its ref: '1@1'"]


class TestInPlace:
    def test_restores_into_existing_tensors(self, url: str) -> None:
        state = training_state(seed=1)
        with ckptstore.open(url).writer() as writer:
            writer.save(state, step=3)
        target = training_state(seed=2)
        pointers = [tensor.data_ptr() for tensor in target["model"].values()]
        restored = ckptstore.open(url).load(3, into=target)
        same(state, restored)
        same(state["model"], target["model"])
        assert [tensor.data_ptr() for tensor in target["model"].values()] == pointers

    def test_strided_targets(self, url: str) -> None:
        weight = torch.randn(300, 200)
        with ckptstore.open(url).writer() as writer:
            writer.save({"w": weight, "n": np.arange(6.0)}, step=1)
        target = {"w": torch.zeros(200, 300).t(), "n": np.zeros(12)[::2]}
        ckptstore.open(url).load(1, into=target)
        assert torch.equal(target["w"], weight)
        assert target["n"].tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize(
        ("into", "complaint"),
        [
            ({"value": torch.zeros(4), "step": 0}, r"F32 \[4\], the checkpoint's is F32 \[5\]"),
            ({"value": torch.zeros(5, dtype=torch.float64), "step": 0}, "F64"),
            ({"other": torch.zeros(5)}, "no tensor 'value'"),
            ({"value": torch.zeros(5), "more": torch.zeros(1)}, "'more' that is not in the checkpoint"),
            (
                {"value": torch.zeros(1).expand(5), "step": 0},
                "'value' is read-only, or several of its elements share",
            ),
            ({"value": torch.zeros(9).as_strided((5,), (0,)), "step": 0}, "'value' is read-only"),
            ({"value": np.broadcast_to(np.float32(0), 5), "step": 0}, "'value' is read-only"),
        ],
    )
    def test_refuses_before_overwriting(self, url: str, into: dict[str, Any], complaint: str) -> None:
        store = fill(url, 7)
        with pytest.raises(ckptstore.UsageError, match=complaint):
            store.load(7, into=into)
        assert all(float(t.sum()) == 0 for t in into.values() if isinstance(t, torch.Tensor))

    def test_threads_do_not_undo_each_others_parts(self, tmp_path: Path) -> None:
        """A conjugate view is rewritten as a whole for every chunk."""
        saved = torch.randn(6 << 20, dtype=torch.complex64)  # 48 MiB, 3 chunks
        store = ckptstore.open(tmp_path / "store")
        with store.writer() as writer:
            writer.save({"w": saved}, step=1)
        for _ in range(3):
            target = torch.zeros(6 << 20, dtype=torch.complex64).conj()
            store.load(1, into={"w": target}, threads=3)
            assert torch.equal(target, saved)

    def test_a_fresh_optimizer_has_no_place_for_its_state_and_the_error_says_what_to_do(self, url: str) -> None:
        state, store = training_state(), ckptstore.open(url)
        with store.writer() as writer:
            writer.save(state, 1)
        model = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
        model["0.weight"] = model["tied"]
        optimizer = torch.optim.AdamW([torch.nn.Parameter(model["tied"])])
        into = {"model": model, "optimizer": optimizer.state_dict()}
        with pytest.raises(UsageError, match="an optimizer has no state before its first step") as raised:
            store.load(1, into=into)
        assert "leave 'optimizer' out, load(REF, into=..., select='model.*')" in str(raised.value)
        assert "load(REF, select='optimizer.*')['optimizer'] to its load_state_dict()" in str(raised.value)
        with pytest.raises(UsageError, match=r"is in the checkpoint, which has loader, model.*into=\{'model': "):
            store.load(1, into=model)
        assert not model["0.weight"].any()
        untied = model | {"0.weight": torch.zeros(64, 64)}
        with pytest.raises(UsageError, match=r"into= has a tensor 'model\.0\.weight' that is not in the checkpoint"):
            store.load(1, into={"model": untied}, select=["model.*"])
        store.load(1, into={"model": model}, select=["model.*"])
        same(model["0.weight"], state["model"]["0.weight"])
        same(store.load(1, select="optimizer.*")["optimizer"], state["optimizer"])

    def test_other_tensors_that_are_missing(self, url: str) -> None:
        store = ckptstore.open(url)
        with store.writer() as writer:
            writer.save({"a": np.ones(2), "o": {"state": {"x": np.ones(1), "y": np.ones(1)}}}, 1)
        with pytest.raises(
            UsageError, match=r"no tensor 'o\.state\.x' \(1 of 3 are missing\): load what it has with sel"
        ):
            store.load(1, into={"a": np.ones(2), "o": {"state": {"y": np.ones(1)}}})


class TestMapping:
    def test_mapped_tensors_are_private_views(self, tmp_path: Path) -> None:
        state = training_state()
        with ckptstore.open(tmp_path / "store").writer() as writer:
            writer.save(state, step=3)
        store = ckptstore.open(tmp_path / "store")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mapped = store.load(3, mmap=True)
        same(state, mapped)
        mapped["model"]["0.weight"].zero_()  # copy on write: the file stays
        same(state, store.load(3))
        assert ckptstore.verify(store).ok

    def test_a_backend_without_mappings_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = fill(tmp_path / "store", 1)
        monkeypatch.setattr("ckptstore.backends.local_disk.directio.FileSource.map", lambda self: None)
        with pytest.raises(ckptstore.UsageError, match="local store"):
            store.load(1, mmap=True)


class TestAsync:
    def test_the_state_may_change_at_once(self, url: str) -> None:
        weight = torch.zeros(1 << 18)
        with ckptstore.open(url).writer(max_in_flight=3) as writer:
            pending = []
            for step in range(1, 9):
                weight += 1
                pending.append(writer.save_async({"w": weight}, step=step))
            weight.fill_(-1)
            assert [p.result().step for p in pending] == list(range(1, 9))
        store = ckptstore.open(url)
        for step in range(1, 9):
            assert store.load(step)["w"].unique().tolist() == [step]

    def test_leaving_waits(self, url: str) -> None:
        with ckptstore.open(url).writer() as writer:
            writer.save_async({"w": torch.zeros(1 << 20)}, step=1)
        assert ckptstore.open(url).checkpoint().step == 1

    def test_an_unclaimed_error_surfaces(self, url: str) -> None:
        store = ckptstore.open(url)
        writer = store.writer()
        with store.writer():
            writer.save_async({"a": 1}, step=1)
            with pytest.raises(ckptstore.FencedError):
                writer.close()

    def test_snapshots_in_flight_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = threading.Event()
        original = MemoryBackend.open_sink

        def slow(self: MemoryBackend, key: str, size_hint: int) -> Any:
            gate.wait(120)
            return original(self, key, size_hint)

        monkeypatch.setattr(MemoryBackend, "open_sink", slow)
        with ckptstore.open(f"memory://{uuid.uuid4().hex}").writer(max_in_flight=2) as writer:
            writer.save_async({"w": torch.zeros(4)}, step=1)
            writer.save_async({"w": torch.zeros(4)}, step=2)
            third = threading.Thread(target=writer.save_async, args=({"w": torch.zeros(4)}, 3))
            third.start()
            time.sleep(0.2)
            assert third.is_alive()  # two snapshots are in memory: the third save waits
            gate.set()
            third.join(120)
            assert not third.is_alive()
