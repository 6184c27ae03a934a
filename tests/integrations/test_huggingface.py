"""The callback for Hugging Face's Trainer, with the real Trainer, in processes that are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, GPT2LMHeadModel, TrainerCallback

import ckptstore
from ckptstore.cli.main import cli
from ckptstore.errors import UsageError
from ckptstore.integrations.huggingface import CkptstoreCallback
from ckptstore.integrations.resume_folders import ResumeFolder
from ckptstore.integrations.trainer_record import TrainerRecord
from tests.forms import LONG, long_only, short_or
from tests.integrations.trainer_job import STEPS, losses, made, run

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.integrations.trainer_job"])

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def process(*arguments: Any, **options: Any) -> Any:
    """Begin `trainer_job.run` in a process of its own."""
    one = _PROCESSES.Process(target=run, args=arguments, kwargs=options)
    one.start()
    return one


def finished(*arguments: Any, **options: Any) -> int | None:
    one = process(*arguments, **options)
    one.join(120)
    if one.exitcode is None:
        one.kill()
    code: int | None = one.exitcode
    return code


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], str]:
    """The numbers of the plain Trainer, without ckptstore and never killed, evaluated every 3 steps."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert finished(out, None, arguments={"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no"}) == 0
    return losses(out.with_name("out.losses"))


@pytest.mark.parametrize(
    ("strategy", "workers", "kills"),
    [("full", 0, (4, 9) if LONG else (9,)), ("delta", 2, (6,)), ("gradient", 0, (11,))],
)
def test_a_killed_run_repeats_the_numbers_of_one_that_was_not(
    tmp_path: Path, whole: dict[tuple[int, str], str], strategy: str, workers: int, kills: tuple[int, ...]
) -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "dataloader_num_workers": workers}
    out, store = tmp_path / "out", tmp_path / "run"
    for dies in kills:
        assert finished(out, store, dies, strategy, arguments) == -signal.SIGKILL
    assert 0 < (ckptstore.open(store).latest_step() or 0) < STEPS
    assert finished(out, store, -1, strategy, arguments) == 0
    assert losses(tmp_path / "out.losses") == whole
    opened = ckptstore.open(store)
    assert opened.latest_step() == STEPS
    assert {one.step for one in opened.checkpoints()} == set(range(1, STEPS + 1))
    assert list(out.iterdir()) == []  # no folders of the Trainer
    metrics = {one.step: one.metadata["metrics"] for one in opened.checkpoints()}
    assert metrics[3]["eval_loss"].hex() == whole[3, "eval_loss"]
    assert metrics[4]["loss"].hex() == whole[4, "loss"]
    assert "eval_loss" not in metrics[4]


def test_epochs_that_end_with_an_evaluation(tmp_path: Path) -> None:
    """An evaluation draws random numbers, and the last step of an epoch has to be saved after it."""
    arguments = {"eval_strategy": "epoch", "num_train_epochs": 2}
    assert finished(tmp_path / "whole", None, arguments={**arguments, "save_strategy": "no"}) == 0
    assert finished(tmp_path / "out", tmp_path / "run", 9, "full", arguments) == -signal.SIGKILL
    state = ckptstore.open(tmp_path / "run").load(5)
    assert json.loads(state["extra"]["trainer"]["state"].tobytes())["epoch"] == 1.0
    assert finished(tmp_path / "out", tmp_path / "run", -1, "full", arguments, ref="5") == 0
    assert losses(tmp_path / "out.losses") == losses(tmp_path / "whole.losses")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=long_only)])
def test_kills_at_random_times(tmp_path: Path, whole: dict[tuple[int, str], str], workers: int) -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "dataloader_num_workers": workers}
    out, store, chance = tmp_path / "out", tmp_path / "run", random.Random(short_or(3, int(time.time())))
    log = tmp_path / "out.losses"
    log.touch()
    for kill in range(short_or(3, 40)):
        one = process(out, store, -1, ("full", "delta", "gradient")[kill % 3], arguments)
        lines = len(log.read_text().splitlines()) + chance.randint(0, 4)
        while one.is_alive() and len(log.read_text().splitlines()) < lines:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.1)
        if one.is_alive():
            os.kill(one.pid, signal.SIGKILL)
        one.join()
    assert finished(out, store, -1, "full", arguments) == 0
    assert losses(log) == whole
    assert ckptstore.verify(store).ok


@pytest.mark.parametrize("jit", [False, True])
def test_sigterm_loses_no_step(tmp_path: Path, whole: dict[tuple[int, str], str], jit: bool) -> None:
    """With transformers' JIT checkpoints too: its handler hears of the signal when the step is durable."""
    arguments = {"eval_strategy": "steps", "eval_steps": 3}
    out, store = tmp_path / "out", tmp_path / "run"
    steps = (4, 8)  # the first is logged alone, the second is evaluated before it is saved
    for step in steps if LONG else steps[jit:][:1]:
        ended = finished(out, store, step, "delta", {**arguments, "enable_jit_checkpoint": jit}, number=signal.SIGTERM)
        assert ended == (0 if jit else -signal.SIGTERM)
        assert ckptstore.open(store).latest_step() == step + 1, "the step in which the signal came"
    assert list(out.iterdir()) == [], "no folder beside the store"
    assert finished(out, store, -1, "delta", arguments) == 0
    assert losses(tmp_path / "out.losses") == whole


def test_a_plain_trainer_resumes_from_the_layout(tmp_path: Path, whole: dict[tuple[int, str], str]) -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 3}
    assert finished(tmp_path / "out", tmp_path / "run", 9, "gradient", arguments) == -signal.SIGKILL
    store = ckptstore.open(tmp_path / "run")
    step = store.latest_step()
    folder = tmp_path / f"checkpoint-{step}"
    store.export_folder("latest", folder, "hf-trainer")
    assert {one.name for one in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    }
    trainer = made(tmp_path / "plain", **arguments, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(folder))
    found = losses(tmp_path / "plain.losses")
    assert found == {key: value for key, value in whole.items() if key[0] > (step or 0)}
    assert min(found)[0] == (step or 0) + 1


def test_from_pretrained_loads_the_layout(tmp_path: Path) -> None:
    callback = CkptstoreCallback(tmp_path / "run", strategy="full")
    trainer = made(tmp_path / "out", callback, max_steps=2)
    trainer.train()
    ckptstore.open(tmp_path / "run").export_folder("latest", tmp_path / "exported", "hf")
    assert {one.name for one in (tmp_path / "exported").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert isinstance(model, GPT2LMHeadModel)
    assert not any(info.values()), info
    expected = trainer.model.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in model.state_dict().items())
    with pytest.raises(UsageError, match="exists: it is written as a new folder"):
        ckptstore.open(tmp_path / "run").export_folder("latest", tmp_path / "exported", "hf")


def test_folders_of_the_trainer_can_be_asked_for_and_imported(
    tmp_path: Path, whole: dict[tuple[int, str], str]
) -> None:
    callback = CkptstoreCallback(tmp_path / "run", strategy="full", every=None, trainer_folders=True)
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 6}
    made(tmp_path / "out", callback, **arguments).train()
    folders = {int(one.name[11:]): one for one in (tmp_path / "out").iterdir()}
    assert sorted(folders) == [6, 12, 15]
    assert [one.step for one in ckptstore.open(tmp_path / "run").checkpoints()] == [6, 12, 15]
    imported = ckptstore.open(tmp_path / "imported")
    imported.import_files(list(folders.values()))
    state = imported.load(6)
    arguments_file = (folders[6] / "training_args.bin").read_bytes()
    assert state["files"]["training_args.bin"].tobytes() == arguments_file
    imported.export_folder(6, tmp_path / "checkpoint-6", "hf-trainer")
    assert (tmp_path / "checkpoint-6" / "training_args.bin").read_bytes() == arguments_file
    made(tmp_path / "again", **arguments).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    found = losses(tmp_path / "again.losses")
    assert found == {key: value for key, value in whole.items() if key[0] > 6}


def test_what_does_not_continue_the_store_is_refused(tmp_path: Path) -> None:
    callback = CkptstoreCallback(tmp_path / "run", strategy="full", trainer_folders=True)
    assert callback.latest() is None
    made(tmp_path / "out", callback, max_steps=2, save_steps=1).train()
    with pytest.raises(UsageError, match=r"holds a run: call trainer\.train\(resume_from_checkpoint=callback\.latest"):
        made(tmp_path / "out", CkptstoreCallback(tmp_path / "run"), max_steps=2).train()
    with pytest.raises(UsageError, match=r"resumes at step 2 from a folder that callback\.latest"):
        made(tmp_path / "out", CkptstoreCallback(tmp_path / "run"), max_steps=4).train(resume_from_checkpoint=True)
    with pytest.raises(UsageError, match="'model': leave it out"):
        CkptstoreCallback(tmp_path / "x", model=1)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="agent=True"):
        CkptstoreCallback(tmp_path / "x", agent=True)
    with pytest.raises(UsageError, match=r"only: for a model of PEFT"):
        made(tmp_path / "out", CkptstoreCallback(tmp_path / "x", only="trainable"), max_steps=2).train()
    with pytest.raises(UsageError, match="every: 0"):
        CkptstoreCallback(tmp_path / "x", every=0)
    with ckptstore.open(tmp_path / "bare").writer() as writer:
        writer.save({"model": {"w": torch.ones(2)}}, 1)
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        CkptstoreCallback(tmp_path / "bare").latest()


def test_an_earlier_step_begins_a_branch(tmp_path: Path) -> None:
    made(tmp_path / "out", CkptstoreCallback(tmp_path / "run", strategy="full"), max_steps=6).train()
    again = CkptstoreCallback(tmp_path / "run", strategy="full")
    folder = again.latest(3)
    assert folder is not None
    made(tmp_path / "out", again, max_steps=6).train(resume_from_checkpoint=folder)
    losses(tmp_path / "out.losses")  # the same numbers
    assert [one.ref for one in ckptstore.open(tmp_path / "run").checkpoints()][-3:] == ["4@2", "5@2", "6@2"]


def test_the_best_model_is_kept_and_loaded(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 2}
    arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = made(tmp_path / "out", CkptstoreCallback(tmp_path / "run", strategy="full"), max_steps=8, **arguments)
    trainer.train()
    store = ckptstore.open(tmp_path / "run")
    assert {"last:2", "best:eval_loss:1:max"} <= set(map(str, store.rules()))
    assert trainer.state.best_global_step == 2  # the highest loss is the first one
    best = store.load(2)["model"]
    assert all(torch.equal(one, best[name]) for name, one in trainer.model.state_dict().items())
    assert [one.step for one in store.checkpoints()] == [2, 7, 8]
    last = store.load(8)["model"]  # the best model was not saved as the last step
    assert not torch.equal(last["transformer.wte.weight"], best["transformer.wte.weight"])
    # The best metric is in the checkpoint of its own step: it is found before the step is saved.
    state = json.loads(store.load(2)["extra"]["trainer"]["state"].tobytes())
    assert (state["best_global_step"], state["best_metric"].hex()) == (2, trainer.state.best_metric.hex())


@pytest.fixture(scope="module")
def whole_lora(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], str]:
    """The numbers of the plain Trainer with a PEFT model."""
    pytest.importorskip("peft")
    out = tmp_path_factory.mktemp("lora") / "out"
    assert finished(out, None, arguments={"lora": True, "save_strategy": "no"}) == 0
    return losses(out.with_name("out.losses"))


@pytest.mark.parametrize(
    ("options", "workers"),
    [pytest.param({}, 0, marks=long_only), ({"only": "trainable"}, 2), ({"strategy": "full"}, 0)],
    ids=str,
)
def test_a_killed_run_with_lora_repeats_the_numbers(
    tmp_path: Path, whole_lora: dict[tuple[int, str], str], options: dict[str, Any], workers: int
) -> None:
    arguments = {"lora": True, "dataloader_num_workers": workers}
    out, store = tmp_path / "out", tmp_path / "run"
    given = {"strategy": "delta", **options}
    for dies in short_or((7,), (3, 5, 8, 9, 13)):
        assert finished(out, store, dies, arguments=arguments, **given) == -signal.SIGKILL
    assert finished(out, store, -1, arguments=arguments, **given) == 0
    assert losses(tmp_path / "out.losses") == whole_lora
    opened = ckptstore.open(store)
    assert opened.latest_step() == STEPS
    frozen = "model.base_model.model.transformer.wte.weight"
    assert (frozen in {one.name for one in opened.inspect(STEPS).tensors}) == ("only" not in options)
    with pytest.raises(UsageError, match="is of a PEFT model"):
        opened.export_folder(STEPS, tmp_path / "exported", "hf")
    (tmp_path / "folder").mkdir()
    opened.export_folder(STEPS, tmp_path / "folder" / "checkpoint-15", "hf-trainer")
    saved = json.loads((tmp_path / "folder" / "checkpoint-15" / "adapter_config.json").read_text())
    assert saved["peft_type"] == "LORA"
    config = json.loads((tmp_path / "folder" / "checkpoint-15" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]


def test_the_best_adapters_are_loaded(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    arguments: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 6}
    arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    callback = CkptstoreCallback(tmp_path / "run", strategy="delta", only="trainable")
    trainer = made(tmp_path / "out", callback, lora=True, **arguments)
    trainer.train()
    assert trainer.state.best_global_step == 2
    best = ckptstore.open(tmp_path / "run").load(2)["model"]
    trained = {name: one for name, one in trainer.model.named_parameters() if one.requires_grad}
    assert trained
    assert all(torch.equal(one, best[name]) for name, one in trained.items())
    last = ckptstore.open(tmp_path / "run").load(6)["model"]
    assert any(not torch.equal(one, last[name]) for name, one in trained.items())


def test_states_of_other_callbacks(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    arguments |= {"greater_is_better": True, "load_best_model_at_end": True, "save_steps": 1}
    early = EarlyStoppingCallback(early_stopping_patience=9)
    trainer = made(tmp_path / "a", early, CkptstoreCallback(tmp_path / "a-run"), max_steps=1, **arguments)
    with pytest.warns(UserWarning, match="EarlyStoppingCallback: has its own state, which is not saved"):
        trainer.train()
    early = EarlyStoppingCallback(early_stopping_patience=9)
    callback = CkptstoreCallback(tmp_path / "run", strategy="full", stateful=[early])
    made(tmp_path / "out", early, callback, max_steps=4, **arguments).train()
    assert early.early_stopping_patience_counter == 3
    again = EarlyStoppingCallback(early_stopping_patience=4)
    callback = CkptstoreCallback(tmp_path / "run", strategy="full", stateful=[again])
    trainer = made(tmp_path / "out", again, callback, max_steps=12, **arguments)
    trainer.train(resume_from_checkpoint=callback.latest())
    assert trainer.state.global_step == 5  # one more without improvement


class _Noisy(TrainerCallback):
    """Says when a step begins, and asks for a save at step 2."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step == 2


def test_saves_that_another_callback_asks_for(tmp_path: Path) -> None:
    callback = CkptstoreCallback(tmp_path / "run", strategy="full", every=100)
    made(tmp_path / "out", _Noisy(), callback, max_steps=4, save_strategy="no").train()
    assert [one.step for one in ckptstore.open(tmp_path / "run").checkpoints()] == [2, 4]
    assert list((tmp_path / "out").iterdir()) == []


def test_a_loader_that_draws_random_numbers_is_reported(tmp_path: Path) -> None:
    trainer = made(tmp_path / "out", CkptstoreCallback(tmp_path / "run"), max_steps=4)
    collate = trainer.data_collator

    def masked(samples: list[Any]) -> Any:
        torch.rand(1)
        return collate(samples)

    trainer.data_collator = masked
    with pytest.warns(UserWarning, match="loading a batch draws random numbers in this process"):
        trainer.train()


def test_folders_end_with_their_training_or_process(tmp_path: Path) -> None:
    callback = CkptstoreCallback(tmp_path / "run", strategy="full", cache_dir=tmp_path / "cache")
    made(tmp_path / "out", callback, max_steps=2).train()
    folder = callback.latest()
    assert folder is not None
    assert Path(folder).name == "checkpoint-2"
    made(tmp_path / "out", callback, max_steps=4).train(resume_from_checkpoint=folder)
    assert list((tmp_path / "cache").iterdir()) == []
    one = _PROCESSES.Process(target=_abandon, args=(tmp_path / "cache",))
    one.start()
    one.join()
    assert len(list((tmp_path / "cache").iterdir())) == 1
    mine = ResumeFolder(tmp_path / "cache")
    other = ResumeFolder(tmp_path / "cache")  # removes those of processes that have ended, not mine
    assert set((tmp_path / "cache").iterdir()) == {mine.path, other.path}
    mine.remove()
    assert list((tmp_path / "cache").iterdir()) == [other.path]


def _abandon(place: Path) -> None:
    keep = ResumeFolder(place)
    assert keep.path.is_dir()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_history_is_stored_in_parts_of_which_the_last_one_changes(tmp_path: Path) -> None:
    trainer = made(tmp_path / "unused")
    record, before, log = TrainerRecord({}), [], trainer.state.log_history
    for step in range(900):
        log.append({"loss": step / 7, "step": step})
        record.note(trainer.state, [])
        parts = record.state_dict()["history"]
        assert all(a is b for a, b in zip(before[:-1], parts, strict=False))
        before = parts
        if step % short_or(30, 1):
            continue
        lines = b"".join(one.tobytes() for one in parts).splitlines()
        assert [json.loads(line) for line in lines if line.strip()] == log
    assert len(before) > 1
    assert {len(one) for one in before} == {16384}
    assert isinstance(before[0], np.ndarray)


def _example(script: Path, *arguments: str) -> None:
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def test_the_example_continues(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples/huggingface/train.py"
    for steps in (6, 10):
        one = _PROCESSES.Process(target=_example, args=(script, str(tmp_path / "run"), "--steps", str(steps)))
        one.start()
        one.join(120)
        assert one.exitcode == 0
        assert ckptstore.open(tmp_path / "run").latest_step() == steps
    assert [one.term for one in ckptstore.open(tmp_path / "run").checkpoints()] == [1] * 6 + [2] * 4


def test_the_commands_layout(tmp_path: Path) -> None:
    made(tmp_path / "out", CkptstoreCallback(tmp_path / "run", strategy="full"), max_steps=1).train()
    run_it = CliRunner()
    arguments = ["restore", str(tmp_path / "run"), "--layout", "hf-trainer", "--out", str(tmp_path / "checkpoint-1")]
    done = run_it.invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists()
    for wrong in (["--force"], ["--strip", "model."], ["--format", "pt"]):
        assert run_it.invoke(cli, [*arguments[:-1], str(tmp_path / "other"), *wrong]).exit_code == 2
    assert not (tmp_path / "other").exists()
