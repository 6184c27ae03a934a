"""What saving every step costs in each framework, beside its own saving at the same interval.

    python -m tools.bench.training.framework_steps --width 1024 --steps 30 --rounds 3

One small network trains on the CPU in turns: without saves, with what the framework itself saves in every step, and
with ckptstore (`strategy="full"`, so both store the whole state). Each row is the median time of a step, without a
run's first five, and what that is more than without saves. *lines* are those that a user adds to a script that saves
nothing, to save every step and to resume. The frameworks do not sync what they save. Both keep two checkpoints.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

import click
import torch

__all__ = ["FRAMEWORKS", "OWN", "STORE", "main", "measure"]

_FIRST: Final = 5
_BATCH: Final = 16
NOTHING: Final = "no saves"
OWN: Final = "own"
STORE: Final = "ckptstore"

Times = list[float]
"""When each step began, on a monotonic clock."""

LINES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "torch.save": (
        (
            "if Path(path).exists(): state = torch.load(path)",
            "model.load_state_dict(state['model'])",
            "optimizer.load_state_dict(state['optimizer'])",
            "start = state['step']",
            "torch.set_rng_state(state['random'])",
            "torch.save({'model': ..., 'optimizer': ..., 'step': ..., 'random': ...}, temporary)",
            "os.replace(temporary, path)",
        ),
        (
            "from ckptstore.training import Checkpointer",
            "checkpointer = Checkpointer('runs/gpt', model=model, optimizer=optimizer)",
            "for step in range(checkpointer.resume(), steps):",
            "checkpointer.step()",
        ),
    ),
    "DCP": (
        (
            "state = {'model': ..., 'optim': ..., 'step': step}",
            "dcp.save(state, checkpoint_id=f'runs/gpt/step-{step}')",
            "folders = sorted(Path('runs/gpt').glob('step-*/.metadata'), key=...)",
            "dcp.load(state, checkpoint_id=folders[-1].parent)",
            "set_state_dict(model, optimizer, ...)",
            "shutil.rmtree(...)  # of old steps",
        ),
        (
            "from ckptstore.integrations.dcp import CkptstoreReader, CkptstoreWriter",
            "state = {'model': ..., 'optim': ..., 'step': step}",
            "dcp.save(state, storage_writer=CkptstoreWriter('runs/gpt', step, keep=['last:2']))",
            "dcp.load(state, storage_reader=CkptstoreReader('runs/gpt'))",
            "set_state_dict(model, optimizer, ...)",
        ),
    ),
    "Trainer": (
        (
            "save_strategy='steps', save_steps=1, save_total_limit=2",
            "trainer.train(resume_from_checkpoint=get_last_checkpoint('out'))",
        ),
        (
            "from ckptstore.integrations.huggingface import CkptstoreCallback",
            "callback = CkptstoreCallback('runs/gpt')",
            "callbacks=[callback]",
            "trainer.train(resume_from_checkpoint=callback.latest())",
        ),
    ),
    "Accelerate": (
        (
            "first, skipped, done = 0, 0, 0",
            "if folders := sorted(Path('runs/gpt').glob('step_*'), key=...):",
            "accelerator.load_state(folders[-1])",
            "done = int(folders[-1].name[5:])",
            "first, skipped = divmod(done, len(loader))",
            "for epoch in range(first, epochs):",
            "loader.set_epoch(epoch)",
            "batches = accelerator.skip_first_batches(loader, skipped) if epoch == first else loader",
            "for batch in batches:",
            "done += 1",
            "accelerator.save_state(f'runs/gpt/step_{done}')",
        ),
        (
            "from ckptstore.integrations.accelerate import checkpointer",
            "saved = checkpointer(accelerator, 'runs/gpt', model, optimizer, loader, schedule)",
            "saved.resume()",
            "for epoch in range(saved.loader.iteration, epochs):",
            "for batch in saved.loader:",
            "saved.step()",
        ),
    ),
    "Lightning": (
        (
            "callbacks=[ModelCheckpoint('ckpts', every_n_train_steps=1, save_last=True)]",
            "trainer.fit(module, loader, ckpt_path='last')",
        ),
        (
            "from ckptstore.integrations.lightning import StepCheckpoint",
            "callbacks=[StepCheckpoint('runs/gpt')]",
        ),
    ),
}
"""Of each framework: its own lines, and ours."""


def _net(width: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))


def _batches(width: int, steps: int) -> Any:
    return torch.utils.data.DataLoader(torch.randn(_BATCH * steps, width), batch_size=_BATCH)


def _loop(
    width: int, steps: int, after: Callable[[int], object], model: Any, optimizer: Any, batches: Any = None
) -> Times:
    """A plain loop; `after` is called after each step."""
    times: Times = []
    for step, batch in enumerate(_batches(width, steps) if batches is None else batches, 1):
        times.append(time.perf_counter())
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return times


def _torch(way: str, folder: Path, width: int, steps: int) -> Times:
    from ckptstore.training import Checkpointer

    model = _net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if way == STORE:
        with Checkpointer(
            folder / "s", model=model, optimizer=optimizer, strategy="full", keep_last=2, signals=False
        ) as saved:
            saved.resume()
            return _loop(width, steps, lambda _: saved.step(), model, optimizer)

    def save(step: int) -> None:
        if way == OWN:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").replace(folder / "last.pt")

    return _loop(width, steps, save, model, optimizer)


def _dcp(way: str, folder: Path, width: int, steps: int) -> Times:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from ckptstore.integrations.dcp import CkptstoreWriter

    model = _net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def save(step: int) -> None:
        if way == NOTHING:
            return
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": step}
        if way == STORE:
            dcp.save(state, storage_writer=CkptstoreWriter(folder / "s", step, keep=["last:2"]), no_dist=True)
            return
        dcp.save(state, checkpoint_id=folder / str(step), no_dist=True)
        shutil.rmtree(folder / str(step - 2), ignore_errors=True)

    return _loop(width, steps, save, model, optimizer)


def _accelerate(way: str, folder: Path, width: int, steps: int) -> Times:
    from accelerate import Accelerator

    from ckptstore.integrations.accelerate import checkpointer

    accelerator = Accelerator(cpu=True)
    model = _net(width)
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), _batches(width, steps)
    )
    if way == STORE:
        options: Any = {"strategy": "full", "keep_last": 2, "signals": False}
        with checkpointer(accelerator, folder / "s", model, optimizer, batches, **options) as saved:
            saved.resume()
            return _loop(width, steps, lambda _: saved.step(), model, optimizer, saved.loader)

    def save(step: int) -> None:
        if way == OWN:
            accelerator.save_state(str(folder / f"step_{step}"))
            shutil.rmtree(folder / f"step_{step - 2}", ignore_errors=True)

    return _loop(width, steps, save, model, optimizer, batches)


def _trainer(way: str, folder: Path, width: int, steps: int) -> Times:
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

    from ckptstore.integrations.huggingface import CkptstoreCallback

    times: Times = []

    class Noted(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    class Net(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.net = _net(width)
            self.post_init()

        def forward(self, x: Any) -> Any:
            return {"loss": (self.net(x) - x).square().mean()}

    data = [{"x": one} for one in torch.randn(_BATCH * steps, width)]
    given: dict[str, Any] = {"output_dir": str(folder / "out"), "max_steps": steps, "report_to": [], "use_cpu": True}
    given |= {"per_device_train_batch_size": _BATCH, "disable_tqdm": True, "logging_strategy": "no"}
    given |= {"save_strategy": "steps" if way == OWN else "no", "save_steps": 1, "save_total_limit": 2}
    callbacks: list[Any] = [Noted()]
    if way == STORE:
        callbacks.append(CkptstoreCallback(folder / "s", strategy="full", keep_last=2, signals=False))
    Trainer(Net(), TrainingArguments(**given), train_dataset=data, callbacks=callbacks).train()  # type: ignore[arg-type]
    return times


def _lightning(way: str, folder: Path, width: int, steps: int) -> Times:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from ckptstore.integrations.lightning import StepCheckpoint

    times: Times = []

    class Noted(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            times.append(time.perf_counter())

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(width)

        def training_step(self, batch: Any) -> Any:
            return (self.net(batch) - batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callbacks: list[Any] = [Noted()]
    if way == OWN:
        callbacks.append(ModelCheckpoint(folder / "ckpts", every_n_train_steps=1, save_last=True))
    if way == STORE:
        callbacks.append(StepCheckpoint(folder / "s", strategy="full", keep_last=2, signals=False))
    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": way == OWN, "accelerator": "cpu", "devices": 1}
    pl.Trainer(max_steps=steps, callbacks=callbacks, **quiet).fit(Net(), _batches(width, steps))
    return times


FRAMEWORKS: Final[dict[str, Callable[[str, Path, int, int], Times]]] = {
    "torch.save": _torch,
    "DCP": _dcp,
    "Trainer": _trainer,
    "Accelerate": _accelerate,
    "Lightning": _lightning,
}


@contextmanager
def _silent() -> Iterator[None]:
    """Without what the frameworks say."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), Path(os.devnull).open("w") as nowhere:
            warnings.simplefilter("ignore")
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
    finally:
        logging.disable(before)


def measure(framework: str, way: str, width: int, steps: int, place: Path | None = None) -> list[float]:
    """Seconds of each step of a run, without the first ones."""
    with tempfile.TemporaryDirectory(dir=place) as folder, _silent():
        times = FRAMEWORKS[framework](way, Path(folder), width, steps)[_FIRST:]
    return [after - before for before, after in itertools.pairwise(times)]


@click.command(help=__doc__)
@click.option("--width", default=1024, help="Of two square layers.")
@click.option("--steps", default=30)
@click.option("--rounds", default=3)
@click.option("--framework", "chosen", multiple=True, type=click.Choice([*FRAMEWORKS]), help="Default: all.")
@click.option("--dir", "place", type=click.Path(file_okay=False, path_type=Path), help="Where to write.")
@click.option("--json", "as_json", is_flag=True)
def main(width: int, steps: int, rounds: int, chosen: tuple[str, ...], place: Path | None, *, as_json: bool) -> None:
    """Print the table."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    ways = (NOTHING, OWN, STORE)
    rows: list[dict[str, Any]] = []
    for framework in chosen or FRAMEWORKS:
        found: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds):
            for way in ways if turn % 2 else ways[::-1]:
                found[way] += measure(framework, way, width, steps, place)
        took = {way: statistics.median(times) for way, times in found.items()}
        own, ours = LINES[framework]
        rows.append({"framework": framework, "lines": [len(own), len(ours)], "seconds": took})
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    size = 3 * 4 * 2 * (width * width + width)
    click.echo(f"{size / 1e6:.1f} MB of weights and moments; medians of {rounds} runs of {steps} steps, ms of a step")
    click.echo(f"{'':12} {'lines':>6} {'ours':>5} {'no saves':>9} {'own':>9} {'more':>8} {'ckptstore':>10} {'more':>8}")
    for row in rows:
        base, own_s, ours_s = (row["seconds"][way] * 1e3 for way in ways)
        click.echo(
            f"{row['framework']:12} {row['lines'][0]:6} {row['lines'][1]:5} {base:9.1f} {own_s:9.1f} "
            f"{own_s - base:+8.1f} {ours_s:10.1f} {ours_s - base:+8.1f}"
        )


if __name__ == "__main__":
    main()
