"""Runs of a loop with Accelerate, in this process or as a script:

    python -m tests.integrations.accelerate_job STORE LOSSES CASE [OPTION=VALUE ...]

LOSSES gets a line for each micro-batch. CASE names a row of `CASES`. STORE may be ``-``: without a store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ckptstore import DeterminismWarning
from ckptstore.integrations.accelerate import checkpointer

__all__ = ["CASES", "EPOCHS", "StoppedError", "lines_of", "train"]

EPOCHS = 3
CASES: dict[str, dict[str, Any]] = {
    "shard": {},
    "seedable": {"seedable": True},
    "dispatcher": {"dispatch": True},
    "shard-workers": {"workers": 2},
    "dispatcher-workers": {"workers": 2, "dispatch": True},
    "persistent": {"workers": 2, "persistent": True},
    "stateful": {"stateful": True},
    "stateful-seedable": {"stateful": True, "seedable": True},
    "stateful-generator": {"stateful": True, "generator": True},
    "stateful-workers": {"stateful": True, "workers": 2},
    "stateful-workers-generator": {"stateful": True, "workers": 2, "generator": True},
    "stateful-dispatcher": {"stateful": True, "dispatch": True},
    "stateful-dispatcher-workers": {"stateful": True, "dispatch": True, "workers": 2},
    "augmented": {"augmented": True},
    "augmented-stateful": {"augmented": True, "stateful": True},
    "augmented-dispatcher": {"augmented": True, "dispatch": True, "stateful": True},
    "stream": {"stream": True},
    "stream-stateful": {"stream": True, "stateful": True},
    "stream-persistent": {"stream": True, "workers": 1, "persistent": True},
    "whole": {"samples": 40, "accumulate": 1},
    "drop-last": {"drop_last": True, "stateful": True, "generator": True},
    "gradient": {"strategy": "gradient"},
    "killed": {"strategy": "gradient", "samples": 80},
    "killed-workers": {"strategy": "gradient", "samples": 80, "workers": 2},
    "ranks": {"samples": 78},
    "ranks-seedable": {"samples": 78, "seedable": True},
    "ranks-dispatcher": {"samples": 78, "dispatch": True, "stateful": True},
    "ranks-stateful": {"samples": 78, "stateful": True, "strategy": "gradient"},
    "ranks-stateful-workers": {"samples": 78, "stateful": True, "workers": 2, "generator": True},
}


class StoppedError(RuntimeError):
    """The run was stopped."""


class Samples(Dataset[torch.Tensor]):
    """Rows of numbers; with noise that is drawn when a row is loaded, if `augmented`."""

    def __init__(self, samples: int, augmented: bool) -> None:
        self.rows = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + (torch.randn(8) / 8 if self.augmented else 0)


class Stream(IterableDataset[torch.Tensor]):
    """The same rows in their order."""

    def __init__(self, samples: int) -> None:
        self.rows = Samples(samples, False).rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.rows


class Average:
    """A registered object: the moving average of the losses."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Unsaved:
    """Stands for a Checkpointer in a run without one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def resume(self) -> None:
        pass

    def step(self, metrics: Any = None) -> None:
        pass


def lines_of(path: Path) -> list[str]:
    """The losses that were written down."""
    return path.read_text().splitlines() if path.exists() else []


def prepared(case: dict[str, Any]) -> tuple[Accelerator, list[Any]]:
    """A script's objects, prepared: model, optimizer, loader, schedule."""
    torch.manual_seed(case.get("seed", 3))
    # None: a stream is dispatched by default
    dispatch = case.get("dispatch", False if not case.get("stream") else None)
    loading = DataLoaderConfiguration(
        dispatch_batches=dispatch,
        use_stateful_dataloader=case.get("stateful", False),
        use_seedable_sampler=case.get("seedable", False),
    )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=case.get("accumulate", 2), dataloader_config=loading
    )
    accelerator.sync_gradients = True  # it is the process's, and a run may have been stopped while it was False
    hidden = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.ReLU()]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
    samples = case.get("samples", 42)
    stream = bool(case.get("stream"))
    loader = DataLoader(
        Stream(samples) if stream else Samples(samples, case.get("augmented", False)),
        batch_size=4,
        shuffle=not stream,
        num_workers=case.get("workers", 0),
        persistent_workers=case.get("persistent", False),
        drop_last=case.get("drop_last", False),
        generator=torch.Generator().manual_seed(5) if case.get("generator") else None,
    )
    return accelerator, list(accelerator.prepare(model, optimizer, loader, schedule))


def train(store: Any, losses: Path, *, stop: int = -1, dies: int = -1, **case: Any) -> None:
    """Train. `store`: None: without a Checkpointer.

    Args:
        stop, dies: after so many micro-batches of this process raise a `StoppedError`; the process kills itself.
    """
    accelerator, (model, optimizer, loader, schedule) = prepared(case)
    average = Average()
    accelerator.register_for_checkpointing(average)
    given = (model, optimizer, loader, schedule, average)
    strategy = case.get("strategy", "delta")
    saved: Any = Unsaved(loader) if store is None else checkpointer(accelerator, store, *given, strategy=strategy)
    seen = 0
    with saved if store is not None else contextlib.nullcontext():
        saved.resume()
        while saved.loader.iteration < EPOCHS:
            epoch = saved.loader.iteration
            number = getattr(saved.loader, "given", 0) if store is not None else 0
            for batch in saved.loader:
                number = saved.loader.given if store is not None else number + 1
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                average.value = 0.9 * average.value + 0.1 * loss.item()
                rate = optimizer.param_groups[0]["lr"]
                words = [epoch, number, loss.item().hex(), average.value.hex(), rate.hex()]
                name = f"{losses.name}{accelerator.process_index}" if accelerator.num_processes > 1 else losses.name
                with losses.with_name(name).open("a") as file:
                    file.write(" ".join(map(str, words)) + "\n")
                saved.step(metrics={"loss": loss})
                seen += 1
                if seen == dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                if seen == stop:
                    raise StoppedError(f"after {seen} micro-batches")
            torch.rand(1)  # a validation


def main(store: str, losses: str, case: str, *options: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the random generators of the loader's", DeterminismWarning)
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
    warnings.filterwarnings("ignore", "OMP_NUM_THREADS", UserWarning)
    more = {name: int(value) for name, _, value in (one.partition("=") for one in options)}
    with contextlib.suppress(StoppedError):
        train(None if store == "-" else store, Path(losses), **CASES[case], **more)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
