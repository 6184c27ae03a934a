"""A small training with Hugging Face's Trainer, as processes run it: dropout, shuffling, accumulation, a schedule."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from ckptstore.integrations.huggingface import CkptstoreCallback

__all__ = ["STEPS", "Samples", "losses", "made", "run"]

STEPS = 15
"""Optimizer steps of the whole training: 37 samples, 4 in a batch, 2 batches in a step, 3 epochs."""


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int = 37) -> None:
        self.tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class _Losses(TrainerCallback):
    """Appends what is logged to a file, as hex floats."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        names = ("loss", "grad_norm", "learning_rate", "eval_loss")
        found = {name: float(logs[name]).hex() for name in names if name in logs}
        with self.path.open("a") as file:
            file.write(json.dumps([state.global_step, found]) + "\n")


class _Signalled(TrainerCallback):
    """Sends this process a signal when a step begins."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def losses(path: Path) -> dict[tuple[int, str], str]:
    """What was logged: (step, name) -> hex float. A step that was repeated has to repeat its numbers."""
    found: dict[tuple[int, str], str] = {}
    for line in path.read_text().splitlines():
        step, numbers = json.loads(line)
        for name, value in numbers.items():
            assert found.setdefault((step, name), value) == value, f"step {step}, {name}: another number when repeated"
    return found


def made(out: Path, *callbacks: TrainerCallback, lora: bool = False, **arguments: Any) -> Trainer:
    """A Trainer of a new model; with `lora` of one whose adapters alone are trained."""
    torch.set_num_threads(1)
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2LMHeadModel(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1))
    options: dict[str, Any] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    given = TrainingArguments(output_dir=str(out), **{**options, **arguments})
    logged = _Losses(out.with_name(f"{out.name}.losses"))
    return Trainer(
        model=model,
        args=given,
        train_dataset=Samples(),
        eval_dataset=Samples(8),
        callbacks=[logged, *callbacks],
    )


def run(
    out: Path,
    store: Path | None,
    dies: int = -1,
    strategy: str = "full",
    arguments: dict[str, Any] | None = None,
    ref: str = "latest",
    number: int = signal.SIGKILL,
    **options: Any,
) -> None:
    """Train, from the store's latest step; without a store from nothing.

    Args:
        dies: the process gets a signal when this many steps are done.
        ref: the checkpoint to resume from.
        number: the signal.
        options: of the callback.
    """
    # A loader's worker that the forkserver makes does not notice that the trainer was killed.
    multiprocessing.set_start_method("fork", force=True)
    logging.disable(logging.WARNING)
    warnings.simplefilter("error", UserWarning)
    callback = None if store is None else CkptstoreCallback(store, strategy=strategy, **options)
    callbacks = ([] if callback is None else [callback]) + [_Signalled(dies, number)]
    trainer = made(out, *callbacks, **(arguments or {}))
    trainer.train(resume_from_checkpoint=None if callback is None else callback.latest(ref))
