"""Folders of DeepSpeed's universal form and of Megatron-LM, made here by torch.save in the layouts of their sources.

DeepSpeed: ``deepspeed/checkpoint/ds_to_universal.py`` (``merge_tp_slices``, ``merge_zero3_slices``, ``main``).
Megatron-LM: ``megatron/training/checkpointing.py`` (``get_checkpoint_name``, ``generate_state_dict``) and
``megatron/core/dist_checkpointing`` (``strategies/torch.py``, ``core.py``). Neither framework was run.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import pickle
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import ckptstore
from ckptstore.errors import FormatError, StorageError, UnsupportedStateError, UsageError
from tests.exchange.test_dcp_folders import Odd
from tests.store.states import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


class LossScaler:
    """As DeepSpeed pickles one."""

    def __init__(self) -> None:
        self.cur_scale = 1.0


class AttnBackend(enum.Enum):
    auto = 5


@dataclasses.dataclass
class SubparamShape:
    patterns: list[str]
    shape: tuple[int, ...]


SHAPES = {"module.first.weight": (4, 3), "module.first.bias": (4,), "module.last.weight": (2, 4)}


def tensors(kind: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(kind)
    return {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}


def universal(folder: Path, *, stage: int = 1) -> dict[str, Any]:
    """Write one; returns the state that an import should make."""
    weights, states = tensors(0), {}
    for name in SHAPES:
        found = {"fp32": weights[name], "exp_avg": tensors(1)[name], "exp_avg_sq": tensors(2)[name]}
        states[name] = {key: one for key, one in found.items() if key != "fp32"}
        (folder / "zero" / name).mkdir(parents=True)
        for key, one in found.items():
            written: Any = one.flatten().clone() if stage == 3 else {"cat_dim": 0, "param": one}
            torch.save(written, folder / "zero" / name / f"{key}.pt")
        if stage < 3:
            states[name]["step"] = 7
            torch.save(7, folder / "zero" / name / "step.pt")
    optimizer = {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "step": 7}], "zero_stage": stage}
    torch.save(optimizer, folder / "zero" / "optimizer_state.pt")
    rank: dict[str, Any] = {
        "module": {name: one.bfloat16() for name, one in weights.items()} if stage < 3 else {},
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in SHAPES.items())],
        "lr_scheduler": {"last_batch_iteration": 6},
        "global_steps": 7,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.17.0",
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    file = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    torch.save(rank, folder / f"{file}_model_states.pt")
    state = {"model": weights, "optimizer": {"state": states}, "optimizer_state": optimizer}
    if stage < 3:
        state["universal"] = {name: {"cat_dim": 0} for name in SHAPES}
    return {**state, "model_states": {file: rank}}


def imported(folder: Path, **options: Any) -> tuple[Any, Any]:
    store = ckptstore.open(folder.parent / "run")
    (one,) = store.import_files([folder], parent=None, **options)
    return store.load(one.info.ref), one


def ordered(value: Any) -> Any:
    """Dicts in the order of their keys."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=str)}
    return value


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_universal_form(tmp_path: Path, stage: int) -> None:
    saved = universal(tmp_path / "global_step7_universal", stage=stage)
    found, one = imported(tmp_path / "global_step7_universal")
    assert one.info.step == 7
    assert one.left_out == ()
    same(ordered(found), ordered(saved))
    store = ckptstore.open(tmp_path / "run")
    store.export(one.info.ref, tmp_path / "m.pt", strip="model.")
    same(ordered(torch.load(tmp_path / "m.pt", weights_only=True)), ordered(saved["model"]))


def test_what_needs_code_in_a_universal_folder_is_named_and_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "global_step7_universal"
    universal(folder)
    torch.save({"loss_scaler": LossScaler(), "param_groups": []}, folder / "zero" / "optimizer_state.pt")
    name = "module.last.weight"
    shape = SubparamShape(["x"], (2, 4))
    torch.save({"param": tensors(0)[name], "sub_param_shape": shape}, folder / "zero" / name / "fp32.pt")
    with pytest.raises(UnsupportedStateError) as raised:
        imported(folder)
    said = str(raised.value)
    assert f"optimizer_state.loss_scaler: it is a {__name__}.LossScaler" in said
    assert f"model.{name}.sub_param_shape: it is a {__name__}.SubparamShape" in said
    assert "zero/optimizer_state.pt" in said
    assert not (tmp_path / "run").exists()
    found, one = imported(folder, leave_out_keys=["optimizer_state.loss_scaler"], objects=["*.SubparamShape"])
    assert one.left_out == ("optimizer_state.loss_scaler",)
    assert found["universal"][name]["sub_param_shape"].value == {"patterns": ["x"], "shape": (2, 4)}
    found, one = imported(folder, leave_out=["optimizer_state.pt", "module.last.weight", "mp_rank*"])
    assert one.left_out == ("zero/module.last.weight", "zero/optimizer_state.pt", "mp_rank_00_model_states.pt")
    assert found.keys() == {"model", "optimizer", "universal"}


def test_a_damaged_universal_folder(tmp_path: Path) -> None:
    folder = tmp_path / "global_step7_universal"
    universal(folder)
    file = folder / "zero" / "module.first.bias" / "exp_avg.pt"
    image = file.read_bytes()
    torch.save({"param": torch.ones(5)}, file)
    with pytest.raises(
        FormatError, match=rf"{file}: its tensor is \[5\], and the parameter module.first.bias is \[4\]"
    ):
        imported(folder)
    torch.save({"something": 1}, file)
    with pytest.raises(FormatError, match=rf"{file}: no tensor at the key 'param'"):
        imported(folder)
    file.write_bytes(image[: len(image) // 2])
    with pytest.raises((FormatError, StorageError), match=str(file)):
        imported(folder)
    file.write_bytes(image)
    (file.parent / "fp32.pt").unlink()
    with pytest.raises(FormatError, match=r"module.first.bias has no fp32\.pt"):
        imported(folder)
    universal(tmp_path / "other")
    (tmp_path / "other" / "tmp").mkdir()
    with pytest.raises(UsageError, match=r"tmp is not part of a universal checkpoint: --leave-out tmp"):
        imported(tmp_path / "other")
    assert not (tmp_path / "run").exists()


def test_a_universal_folder_that_is_not_what_its_ranks_saved(tmp_path: Path) -> None:
    folder = tmp_path / "global_step7_universal"
    universal(folder, stage=3)
    name = "module.last.weight"
    (folder / "zero" / name).rename(tmp_path / "aside")
    with pytest.raises(FormatError, match=rf"{name} is missing, and param_shapes names it"):
        imported(folder)
    found, _ = imported(folder, leave_out=["*_model_states.pt"])
    assert name not in found["model"]  # nothing says that it belongs there
    (tmp_path / "aside").rename(folder / "zero" / name)
    found, _ = imported(folder, leave_out=[name])
    assert found["model"].keys() == SHAPES.keys() - {name}
    (ranks,) = folder.glob("*_model_states.pt")
    torch.save({"param_shapes": {name: torch.Size([3, 4])}}, ranks)
    with pytest.raises(FormatError, match=rf"{name}: a tensor has 8 elements, and param_shapes has \[\(3, 4\)\]"):
        imported(folder)
    torch.save({"param_shapes": {name: torch.Size([2, 4])}}, ranks)
    torch.save({"param_shapes": {name: torch.Size([4, 2])}}, folder / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    with pytest.raises(FormatError, match=r"param_shapes has \[\(2, 4\), \(4, 2\)\]"):
        imported(folder)


@pytest.mark.parametrize("name", ["model", "optimizer", "universal", "model_states"])
def test_a_file_with_the_name_of_another_part(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "global_step7_universal"
    universal(folder)
    torch.save({"state": {"x": 1}}, folder / "zero" / f"{name}.pt")
    with pytest.raises(UsageError, match=rf"{name}\.pt is not a file of a universal checkpoint"):
        imported(folder)


def test_a_folder_above_names_what_to_import(tmp_path: Path) -> None:
    universal(tmp_path / "ds" / "global_step7_universal")
    (tmp_path / "ds" / "global_step7").mkdir()
    (tmp_path / "ds" / "latest").write_text("global_step7")
    with pytest.raises(UsageError, match=r"global_step7_universal: it is a checkpoint by itself"):
        imported(tmp_path / "ds")
    (tmp_path / "ds" / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(UsageError, match=r"ds_to_universal --input_folder .*/global_step7 "):
        imported(tmp_path / "ds" / "global_step7")
    megatron(tmp_path / "m" / "iter_0000100")
    with pytest.raises(UsageError, match=r"import them: .*/m/iter_\*"):
        imported(tmp_path / "m")


def megatron(folder: Path, ranks: int = 1) -> dict[str, Any]:
    state: dict[str, Any] = {
        "args": argparse.Namespace(lr=1e-4, params_dtype=torch.bfloat16, hidden_size=4, save=None),
        "checkpoint_version": 3.0,
        "iteration": 100,
        "model": OrderedDict((name, one.bfloat16()) for name, one in tensors(0).items()),
        "optimizer": {
            "optimizer": {"state": {0: {"exp_avg": tensors(1)["module.first.bias"]}}, "param_groups": [{"step": 100}]},
            "fp32_from_fp16_params": [list(tensors(0).values())],
        },
        "opt_param_scheduler": {"num_steps": 6400},
        "rng_state": [{"torch_rng_state": torch.get_rng_state(), "np_rng_state": ("MT19937", [1], 0, 0, 0.0)}],
        "num_floating_point_operations_so_far": 2**60,
    }
    for rank in range(ranks):
        place = folder / f"mp_rank_0{rank}"
        place.mkdir(parents=True)
        torch.save(state, place / "model_optim_rng.pt")
    return state


def test_megatrons_folder_of_one_rank(tmp_path: Path) -> None:
    saved = megatron(tmp_path / "iter_0000100")
    torch.save({0: {"buckets": [tensors(2)]}}, tmp_path / "iter_0000100" / "mp_rank_00" / "distrib_optim.pt")
    found, one = imported(tmp_path / "iter_0000100")
    assert one.info.step == 100
    same(found, {**saved, "distrib_optim": {0: {"buckets": [tensors(2)]}}})


def test_megatrons_arguments_with_classes(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000100"
    saved = megatron(folder)
    saved["args"].attention_backend = AttnBackend.auto
    saved["rerun_state_machine"] = {"mode": AttnBackend.auto}
    torch.save(saved, folder / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(UnsupportedStateError, match=r"args\.attention_backend: it is a .*AttnBackend"):
        imported(folder)
    found, _ = imported(folder, objects=["*.AttnBackend"])
    assert found["args"].attention_backend == ckptstore.Foreign(f"{__name__}.AttnBackend", 5, "enum")
    found, one = imported(folder, leave_out_keys=["args", "rerun_state_machine.mode"])
    assert "args" not in found
    assert one.left_out == ("args", "rerun_state_machine.mode")


def test_megatrons_parts_of_several_ranks_are_refused(tmp_path: Path) -> None:
    megatron(tmp_path / "iter_0000100", ranks=2)
    with pytest.raises(UsageError, match=r"--ckpt-convert-format torch_dist .*tools/checkpoint/convert\.py"):
        imported(tmp_path / "iter_0000100")


def test_megatrons_torch_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of DCP with ``common.pt``, ``metadata.json``, and members that Megatron-LM adds to the description."""
    folder = tmp_path / "iter_0000200"
    sharded = {"decoder.weight": torch.randn(6, 4), "optimizer.state.exp_avg.decoder.weight": torch.randn(6, 4)}
    rng = [{"torch_rng_state": torch.get_rng_state(), "random_rng_state": (3, (1, 2), None)}]
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({**sharded, "rng_state/shard_0.0_1.1": rng}, checkpoint_id=folder, planner=planner)
    common = {"args": argparse.Namespace(lr=1e-4), "iteration": 200, "checkpoint_version": 3.0}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    described = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - written above
    described.planner_data = None
    described.mcore_data = {"decoder.weight": {"nd_reformulated_orig_global_shape": (6, 4)}}
    described.all_local_plans = [SavePlan([WriteItem(MetadataIndex("x"), WriteItemType.BYTE_IO)])]
    ours = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for name in ("MCoreMetadata", "MCoreSavePlan"):
        setattr(ours, name, type(name, (), {"__module__": ours.__name__}))
    described.of_megatron = [ours.MCoreMetadata(), ours.MCoreSavePlan()]
    with monkeypatch.context() as patched:  # pickle looks the classes up
        for module in (ours.__name__, "megatron"):
            patched.setitem(sys.modules, module, ours)
        image = pickle.dumps(described)
    assert b"MCoreSavePlan" in image
    (folder / ".metadata").write_bytes(image)
    found, one = imported(folder)
    assert one.info.step == 200
    assert one.left_out == ("metadata.json",)
    same(ordered(found), ordered({**sharded, "rng_state/shard_0.0_1.1": rng, **common}))
    found, one = imported(folder, leave_out=["common.pt", "optimizer.*"])
    assert found.keys() == {"decoder.weight", "rng_state/shard_0.0_1.1"}
    torch.save({**common, "args": Odd()}, folder / "common.pt")
    with pytest.raises(UnsupportedStateError, match=r"common\.pt: .*args: it is a .*Odd"):
        imported(folder)
    found, one = imported(folder, leave_out_keys=["args"])
    assert found["iteration"] == 200
    torch.save({"decoder.weight": 1}, folder / "common.pt")
    with pytest.raises(FormatError, match=r"common\.pt: the key 'decoder\.weight' is also in the folder's \.metadata"):
        imported(folder)
