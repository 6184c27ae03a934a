"""The training loop's body and its whole state: everything that the next step's bits depend on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ckptstore.frameworks.torch_environment import describe_environment
from tools.demo.config import DemoConfig
from tools.demo.corpus import Corpus
from tools.demo.loader import ShuffledWindows
from tools.demo.model import GPT

State = dict[str, Any]


class Notes:
    """A run's records beside the model: its losses, its data, its environment."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.losses: list[float] = []

    def state_dict(self) -> State:
        """Losses as float32, one for each step."""
        return {
            "losses": np.array(self.losses, np.float32),
            "corpus": self.corpus.identity(),
            # str(): torch.__version__ is of a subclass, and the store keeps exact types only
            "environment": {name: str(value) for name, value in describe_environment().items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Continue. Raises `tools.demo.corpus.CorpusError` if the run was on other data."""
        self.corpus.require(state["corpus"])
        self.losses = [float(loss) for loss in state["losses"]]


class Training:
    """Model, optimizer, schedule, loader and RNGs of one run.

    The constructor seeds the global RNGs of python, numpy and torch, and fixes torch's thread count, which affects the
    bits like the rest of ``environment`` in the state.
    """

    def __init__(self, config: DemoConfig, corpus: Corpus) -> None:
        torch.set_num_threads(config.threads)
        random.seed(config.seed)
        np.random.seed(config.seed)
        torch.manual_seed(config.seed)
        self.config = config
        self.corpus = corpus
        self.step = 0
        self.notes = Notes(corpus)
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.model, config), lr=config.learning_rate, betas=(0.9, 0.95), foreach=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _warmup_then_cosine(config))
        self.loader = ShuffledWindows(
            corpus.text, context=config.context, batch=config.batch, noise=config.noise, seed=config.seed
        )

    def run_step(self) -> float:
        """One optimizer step; returns its loss (mean cross entropy in nats per byte)."""
        inputs, targets = self.loader.next_batch()
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch annotates it so
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.notes.losses.append(loss.item())
        return self.notes.losses[-1]

    def state(self) -> State:
        """Everything the next step depends on. Tensors are the live ones, not copies."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "torch": torch.get_rng_state(),
            },
            "loader": self.loader.state_dict(),
            **self.notes.state_dict(),
        }

    def restore(self, state: State) -> None:
        """Continue from `state`. Raises `tools.demo.corpus.CorpusError` if it belongs to other data."""
        self.notes.load_state_dict(state)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.loader.load_state_dict(state["loader"])
        random.setstate(state["rng"]["python"])
        np.random.set_state(state["rng"]["numpy"])
        torch.set_rng_state(state["rng"]["torch"])


def _parameter_groups(model: nn.Module, config: DemoConfig) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _warmup_then_cosine(config: DemoConfig) -> Callable[[int], float]:
    """Factor of the learning rate at a step: linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        done = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return factor
