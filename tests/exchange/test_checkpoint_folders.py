"""Folders that trainers write: every file in them becomes part of the state, is skipped on request, or is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import ckptstore
from ckptstore.errors import FormatError, UnsupportedStateError, UsageError
from ckptstore.exchange.checkpoint_folders import open_checkpoint, survey
from ckptstore.exchange.export import export
from ckptstore.exchange.import_files import import_files
from tests.exchange.trainer_folder import write_trainer_folder
from tests.store.states import same

ARGUMENTS = ("training_args.bin",)


def imported(tmp_path: Path, folder: Path, leave_out: tuple[str, ...] = ARGUMENTS) -> Any:
    store = ckptstore.open(tmp_path / "run")
    import_files(store.journal, [folder], leave_out=leave_out)
    return store.load("latest", framework="torch")


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_trainers_folder_comes_back_whole(tmp_path: Path, sharded: bool, ranks: int) -> None:
    saved = write_trainer_folder(tmp_path / "checkpoint-5", sharded=sharded, ranks=ranks)
    loaded = imported(tmp_path, tmp_path / "checkpoint-5")
    assert list(loaded) == list(saved)
    assert loaded["model"].keys() == saved["model"].keys()
    saved["model"] = {name: saved["model"][name] for name in loaded["model"]}  # as the file has them
    same(loaded, saved)
    numbers = np.random.RandomState()
    numbers.set_state(loaded["rng"][ranks - 1]["numpy"])
    expected = np.random.RandomState()
    expected.set_state(saved["rng"][ranks - 1]["numpy"])
    assert numbers.standard_normal() == expected.standard_normal()
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros_like(one)) for one in saved["model"].values()])
    optimizer.load_state_dict(loaded["optimizer"])
    same(optimizer.state_dict(), saved["optimizer"])


def test_an_unsupported_file_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    write_trainer_folder(folder)
    (folder / "global_step5").mkdir()
    (folder / "runs").mkdir()
    store = ckptstore.open(tmp_path / "run")
    with pytest.raises(UnsupportedStateError) as raised:
        import_files(store.journal, [folder])
    said = str(raised.value)
    assert said.startswith(f"{folder}: cannot be imported whole: ")
    assert "training_args.bin" not in said
    assert "global_step5: DeepSpeed wrote it, a part for each rank; with its optimizer, import " in said
    assert f"deepspeed.checkpoint.ds_to_universal --input_folder {folder}/global_step5 --output_folder" in said
    assert f"python {folder}/zero_to_fp32.py {folder} " in said
    assert "runs: it is a folder" in said
    assert raised.value.__notes__ == ["to import the rest: --leave-out 'global_step5' --leave-out 'runs'"]
    assert not (tmp_path / "run").exists()
    (one,) = import_files(store.journal, [folder], leave_out=["training_*", "runs/", "global_step*"])
    assert one.left_out == ("global_step5", "runs", "training_args.bin")
    assert one.path == folder
    kept = [file for file in folder.iterdir() if file.is_file() and file.name != "training_args.bin"]
    assert one.nbytes == sum(file.stat().st_size for file in kept)


def test_the_arguments_are_kept_as_bytes_and_never_unpickled(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    write_trainer_folder(folder)
    (folder / "training_args.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")  # a pickle that runs a command
    loaded = imported(tmp_path, folder, leave_out=())
    assert loaded["files"]["training_args.bin"].tobytes() == (folder / "training_args.bin").read_bytes()
    assert "training_args" not in loaded


def test_another_pickle_is_still_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    write_trainer_folder(folder)
    (folder / "training_args.bin").rename(folder / "custom_checkpoint_0.pkl")
    with pytest.raises(UnsupportedStateError, match=r"custom_checkpoint_0\.pkl: loading it would run pickled code"):
        open_checkpoint(folder)


def test_a_part_with_something_that_no_state_holds(tmp_path: Path) -> None:
    write_trainer_folder(tmp_path / "checkpoint-5")
    torch.save({"a": [torch.empty(2, device="meta")]}, tmp_path / "checkpoint-5" / "x.pt")
    with pytest.raises(UnsupportedStateError, match=r"checkpoint-5: state\['x'\]\['a'\]\[0\]"):
        open_checkpoint(tmp_path / "checkpoint-5", ARGUMENTS)


def test_other_parts_take_their_files_names(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    folder.mkdir()
    weights = {"w": torch.ones(3)}
    torch.save(weights, folder / "pytorch_model.bin")
    torch.save({"w": torch.zeros(3)}, folder / "ema.pt")
    torch.save({"random_state": (3, (1, 2), None)}, folder / "random_states_0.pkl")
    torch.save({"last": 1}, folder / "scheduler.bin")
    assert imported(tmp_path, folder) == {
        "model": {"w": pytest.approx(weights["w"])},
        "ema": {"w": pytest.approx(torch.zeros(3))},
        "scheduler": {"last": 1},
        "rng": {0: {"random_state": (3, (1, 2), None)}},
    }


def test_an_exported_part_keeps_its_types(tmp_path: Path) -> None:
    state = {"shape": torch.Size([2, 3]), "array": np.arange(3), "dtype": torch.bfloat16, "t": (torch.ones(2),)}
    with ckptstore.open(tmp_path / "first").writer() as writer:
        writer.save(state, 1)
    folder = tmp_path / "step_2"
    folder.mkdir()
    export(ckptstore.open(tmp_path / "first").journal, "latest", folder / "model.safetensors")
    torch.save({"lr": 0.5}, folder / "optimizer.pt")
    same(imported(tmp_path, folder), {"model": state, "optimizer": {"lr": 0.5}})


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ("pytorch_model.bin", "it has weights, like model.safetensors"),
        ("model-00001-of-00002.safetensors", "it has weights, like model.safetensors"),
        ("scheduler.bin", "scheduler.bin has the same key 'scheduler' in the state"),
        ("rng.pt", "something else has the same key 'rng' in the state"),
        ("random_states_0.pkl", "rng_state.pth: random_states_0.pkl has the random states of rank 0, too"),
        ("model.bin.index.json", None),
    ],
)
def test_two_files_for_one_place(tmp_path: Path, extra: str, why: str | None) -> None:
    folder = tmp_path / "checkpoint-5"
    write_trainer_folder(folder)
    (folder / extra).write_bytes((folder / "scaler.pt").read_bytes())
    if why is None:  # an index has priority over a file: this one is not an index
        with pytest.raises(FormatError, match=r"model\.bin\.index\.json"):
            open_checkpoint(folder, ARGUMENTS)
        return
    with pytest.raises(UnsupportedStateError, match=why):
        open_checkpoint(folder, ARGUMENTS)
    open_checkpoint(folder, (*ARGUMENTS, extra)).opened.close()


def test_a_folder_of_weights_is_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "step_7"
    folder.mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, folder / "anything.safetensors")
    (folder / "config.json").write_text("{}")
    (one,) = import_files(ckptstore.open(tmp_path / "run").journal, [folder])
    assert (one.path, one.left_out, one.info.step) == (folder / "anything.safetensors", ("config.json",), 7)
    assert list(ckptstore.open(tmp_path / "run").tensors()) == ["w"]
    (folder / "onnx").mkdir()
    with pytest.raises(UnsupportedStateError, match="onnx: it is a folder"):
        open_checkpoint(folder)


def test_a_pipe_is_never_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    write_trainer_folder(folder)
    os.mkfifo(folder / "events")
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(UnsupportedStateError, match="events: it is not a regular file"):
        open_checkpoint(folder, ARGUMENTS)
    with pytest.raises(FormatError, match=r"model\.pt: not a regular file"):
        open_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"step": 1' + "0" * 5000 + "}"])
def test_a_damaged_trainer_state(tmp_path: Path, text: str) -> None:
    write_trainer_folder(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text(text)
    with pytest.raises(FormatError, match=r"trainer_state\.json: not JSON"):
        open_checkpoint(tmp_path / "checkpoint-5", ARGUMENTS)


def test_a_trainer_state_of_any_length(tmp_path: Path) -> None:
    write_trainer_folder(tmp_path / "checkpoint-5")
    with (tmp_path / "checkpoint-5" / "trainer_state.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(FormatError, match="too long for the state of a trainer"):
        open_checkpoint(tmp_path / "checkpoint-5", ARGUMENTS)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "has no .safetensors, .bin or .pt file"),
        (["optimizer.pt", "rng_state_1.pth"], "has no .safetensors, .bin or .pt file with a model's weights$"),
        (["a.pt", "b.pt"], r"has 2 checkpoint files and no index \(a.pt, b.pt\): name the one to import"),
        (["a.pt", "b.safetensors"], "has 2 checkpoint files and no index"),
        (["FORMAT"], "is a checkpoint store"),
    ],
)
def test_folders_that_are_no_checkpoint(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match=message):
        survey(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        open_checkpoint(tmp_path / "none")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_that_another_program_converts(tmp_path: Path) -> None:
    shards = tmp_path / "dcp"
    dcp.save({"w": torch.arange(5.0)}, checkpoint_id=shards, no_dist=True)
    with pytest.raises(UsageError, match=rf"{shards} was written by torch.distributed.checkpoint: `ckpt import`"):
        survey(shards)

    deepspeed = tmp_path / "checkpoint-9" / "global_step9"
    deepspeed.mkdir(parents=True)
    (deepspeed / "mp_rank_00_model_states.pt").write_bytes(b"")
    (deepspeed.parent / "rng_state_0.pth").write_bytes(b"")
    for folder in (deepspeed, deepspeed.parent):
        with pytest.raises(UsageError, match=rf"python {deepspeed.parent}/zero_to_fp32.py {deepspeed.parent} "):
            survey(folder)
    fsdp = tmp_path / "checkpoint-10"
    fsdp.mkdir()
    shards.rename(fsdp / "pytorch_model_fsdp_0")
    with pytest.raises(UsageError, match=r"weights; pytorch_model_fsdp_0: torch.distributed.checkpoint wrote it"):
        survey(fsdp)


def test_megatrons_ranks_are_refused_with_its_tool(tmp_path: Path) -> None:
    step = tmp_path / "run" / "iter_0000100"
    for rank in ("mp_rank_00", "mp_rank_01_001"):
        (step / rank).mkdir(parents=True)
        torch.save({"model": {"w": torch.ones(2)}}, step / rank / "model_optim_rng.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("100")
    for path in (step, step.parent):
        with pytest.raises(UsageError, match=r"iter_0000100 was written by Megatron-LM.*tools/checkpoint/convert\.py"):
            open_checkpoint(path)
    with pytest.raises(UsageError, match="one of 2 parts that Megatron-LM wrote"):
        open_checkpoint(step / "mp_rank_00" / "model_optim_rng.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "run" / "model.pt")
    (step / "mp_rank_01_001").rename(tmp_path / "gone")  # one rank had it all
    with open_checkpoint(step / "mp_rank_00" / "model_optim_rng.pt") as opened:
        assert list(opened.flat.tensors) == ["model.w"]


def test_one_of_deepspeeds_parts_is_refused(tmp_path: Path) -> None:
    parts = [tmp_path / "global_step5" / f"mp_rank_0{rank}_model_states.pt" for rank in range(2)]
    parts[0].parent.mkdir()
    for part in parts:
        torch.save({"module": {"w": torch.ones(2)}}, part)
    with pytest.raises(UsageError, match=r"one of 2 parts that DeepSpeed wrote.*zero_to_fp32\.py"):
        open_checkpoint(parts[0])
    parts[1].unlink()
    (parts[0].parent / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    with open_checkpoint(parts[0]) as opened:
        assert list(opened.flat.tensors) == ["module.w"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "scripted.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))
    with pytest.raises(UnsupportedStateError, match="a TorchScript archive") as told:
        open_checkpoint(path)
    (note,) = told.value.__notes__
    command = note.partition('-c "')[2].rstrip('"').replace("weights.pt", str(tmp_path / "weights.pt"))
    exec(command, {})  # noqa: S102  # the command from the error message
    with open_checkpoint(tmp_path / "weights.pt") as opened:
        assert set(opened.flat.tensors) == {"weight", "bias"}
