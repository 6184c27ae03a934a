"""Steps from names, and files that become checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptstore
from ckptstore.errors import FormatError, StepOrderError, StorageError, UsageError
from ckptstore.exchange.import_files import import_files, step_of
from ckptstore.write.writer import Writer


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("step_1000.pt", 1000),
        ("step1000.safetensors", 1000),
        ("runs/checkpoint-500/model.safetensors", 500),
        ("runs/checkpoint-500/model.safetensors.index.json", 500),
        ("runs/checkpoint-500/model-00001-of-00003.safetensors", 500),
        ("global_step12/mp_rank_00_model_states.pt", 12),
        ("iter_0001000/mp_rank_00/model_optim_rng.pt", 1000),
        ("epoch=3-step=1000.ckpt", 1000),
        ("gpt-ckpt_77.pth", 77),
        ("Iteration-5.bin", 5),
        ("step_10/step_20.pt", 20),
        ("llama-7.pt", None),
        ("gpt2.pt", None),
        ("footstep3.pt", None),
        ("step_2024_final.pt", 2024),
        ("model_100.pt", None),
        ("model.safetensors", None),
        ("step_" + "9" * 30 + ".pt", None),
    ],
)
def test_the_step_in_a_name(path: str, step: int | None) -> None:
    assert step_of(Path("/home/user") / path) == step


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("model_100.pt", 100),
        ("model-7.safetensors", 7),
        ("gpt2.pt", None),
        ("step_3_seed_5.pt", 3),
        ("run-9/100/model.pt", 100),
        ("run-9/model.pt", None),
        ("a-00001-of-00002.pt", None),
    ],
)
def test_in_a_series_a_number_at_the_end_is_a_step(path: str, step: int | None) -> None:
    assert step_of(Path("/home/user") / path, series=True) == step


def file(path: Path, value: float = 0) -> Path:
    save_file({"w": torch.full((1000,), float(value)), "h": torch.ones(3, dtype=torch.bfloat16)}, path)
    return path


def test_a_series(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    told: list[tuple[int, int]] = []
    imported = import_files(
        store.journal,
        [file(tmp_path / f"model_{step}.safetensors", step) for step in (20, 10)],
        progress=lambda done, total: told.append((done, total)),
    )
    assert [one.info.ref for one in imported] == ["10@1", "20@1"]
    assert told[-1] == (2 * 4006, 2 * 4006)
    for step in (10, 20):
        loaded = store.load(step, framework="torch")
        assert torch.equal(loaded["w"], torch.full((1000,), float(step)))
        assert loaded["h"].dtype == torch.bfloat16


def test_numpy_users_need_no_torch(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    import_files(store.journal, [file(tmp_path / "x.safetensors", 2)])
    loaded = store.load("latest", framework="numpy")
    assert np.array_equal(loaded["w"], np.full(1000, 2, np.float32))


def test_parents(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        for step in (1, 2, 3):
            writer.save({"step": step}, step=step)
    (after,) = import_files(store.journal, [file(tmp_path / "x.safetensors")])
    assert after.info.ref == "4@2"
    (fork,) = import_files(store.journal, [file(tmp_path / "step_3.safetensors")], parent="2@1")
    assert fork.info.ref == "3@3"
    with pytest.raises(StepOrderError) as raised:
        import_files(store.journal, [tmp_path / "step_3.safetensors"])
    assert "--parent none" in raised.value.__notes__[0]
    (root,) = import_files(store.journal, [tmp_path / "step_3.safetensors"], step=0, parent=None)
    assert root.info.ref == "0@4"
    assert [term.parent for term in store.terms()] == [None, "3@1", "2@1", None]


def test_nothing_is_touched_before_every_file_is_sound(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    good = file(tmp_path / "step_1.safetensors")
    (tmp_path / "step_2.safetensors").write_bytes(b"torn")
    with pytest.raises(FormatError):
        import_files(store.journal, [good, tmp_path / "step_2.safetensors"])
    with pytest.raises(UsageError):
        import_files(store.journal, [good, file(tmp_path / "final.safetensors")])
    with pytest.raises(UsageError):
        import_files(store.journal, [])
    assert not (tmp_path / "run").exists()


def test_checkpoints_imported_before_an_error_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Writer.save

    def failing(self: Writer, state: object, step: int, **options: object) -> object:
        if step == 2:
            raise StorageError(28, "No space left on device", "seg")
        return save(self, state, step, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Writer, "save", failing)
    store = ckptstore.open(tmp_path / "run")
    with pytest.raises(StorageError) as raised:
        import_files(store.journal, [file(tmp_path / f"step_{step}.safetensors") for step in (1, 2)])
    assert raised.value.__notes__ == ["imported before the error: 1@1"]
    assert [info.ref for info in store.checkpoints()] == ["1@1"]
