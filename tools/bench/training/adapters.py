"""Measures what a checkpoint of each step takes with adapters, averaged weights, and optimizers of other libraries.

    python -m tools.bench.training.adapters FOLDER

Each case trains a small model on the CPU, once for each strategy. ``own`` is what the library's own saving writes: for
adapters these (of PEFT: `get_peft_model_state_dict`) and the optimizer's state, else the states of model, optimizer and
averaged weights, with ``torch.save``. The other columns are the medians of the bytes that a step took after the first,
which is a full; ``only`` is ``strategy="gradient", only="trainable"``. ``--run`` trains one case in this process, and
appends each step's loss to a file: tests kill it.

It needs peft, schedulefree, bitsandbytes and torchao.
"""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"

import click
import torch

import ckptstore
from ckptstore.training import Checkpointer

__all__ = ["CASES", "QUANTIZED", "Job", "eager", "main", "run"]

STRATEGIES: Final = ("full", "delta", "gradient")


class Net(torch.nn.Module):
    """Matrices and vectors, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, width)
        self.norm = torch.nn.LayerNorm(width)
        self.second = torch.nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.nn.functional.dropout(self.norm(self.first(x)).relu(), 0.1))
        return found


class Job:
    """What a script has.

    Attributes:
        model: what is trained.
        optimizers: what trains it.
        parts: what the Checkpointer is given beside the model.
        after: called after each step of the optimizers.
    """

    def __init__(self, model: Any, optimizer: Any, **parts: Any) -> None:
        self.model = model
        self.optimizers: list[Any] = optimizer if isinstance(optimizer, list) else [optimizer]
        self.parts = {"optimizer": optimizer, **parts}
        self.after: Callable[[], object] = lambda: None

    def loss(self) -> torch.Tensor:
        """The loss of a new batch."""
        x = torch.randn(8, 64, dtype=next(self.model.parameters()).dtype if isinstance(self.model, Net) else None)
        found: torch.Tensor = (self.model(x).float() - x.float().roll(1, 1)).square().mean()
        return found

    def own_state(self) -> Any:
        """What the library's own way would save."""
        extra = {name: one.state_dict() for name, one in self.parts.get("extra", {}).items()}
        return [self.model.state_dict(), [one.state_dict() for one in self.optimizers], extra]


class TunedJob(Job):
    """A language model of transformers, with adapters of PEFT."""

    def __init__(self, width: int) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=64, n_positions=16, n_embd=width // 2, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        model: Any = get_peft_model(GPT2LMHeadModel(config), lora)
        trained = [one for one in model.parameters() if one.requires_grad]
        super().__init__(model, torch.optim.AdamW(trained, lr=1e-2))

    def loss(self) -> torch.Tensor:
        """See `Job.loss`."""
        tokens = torch.randint(0, 64, (4, 12))
        found: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return found

    def own_state(self) -> Any:
        """See `Job.own_state`."""
        from peft import get_peft_model_state_dict

        return [get_peft_model_state_dict(self.model), self.optimizers[0].state_dict()]


class Adapter(torch.nn.Module):
    """A frozen layer, and a product of two thin matrices that is added to it."""

    def __init__(self, base: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(4, width) / width)
        self.b = torch.nn.Parameter(torch.zeros(width, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return found


class AdapterJob(Job):
    """Adapters of a layer, which may be quantized."""

    def __init__(self, layer: torch.nn.Module, width: int) -> None:
        model = Adapter(layer, width)
        self.width = width
        super().__init__(model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2))

    def own_state(self) -> Any:
        """See `Job.own_state`."""
        return [{"a": self.model.a, "b": self.model.b}, self.optimizers[0].state_dict()]

    def loss(self) -> torch.Tensor:
        """See `Job.loss`."""
        x = torch.randn(8, self.width)
        found: torch.Tensor = (self.model(x) - x).square().mean()
        return found


def _schedule_free(width: int) -> Job:
    import schedulefree

    model = Net(width)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=5)
    optimizer.train()
    return Job(model, optimizer)


def _averaged(width: int) -> Job:
    """Averaged weights; the model is compiled."""
    model = Net(width)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay).requires_grad_(False)
    compiled = torch.compile(model, backend="eager")
    job = Job(compiled, torch.optim.AdamW(model.parameters(), lr=1e-2), extra={"ema": average})
    job.after = lambda: average.update_parameters(model)
    return job


def _compiled(width: int) -> Job:
    """One layer of the model is compiled."""
    model = Net(width)
    model.first = torch.compile(model.first, backend="eager")
    return Job(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


def _muon(width: int) -> Job:
    model = Net(width)
    matrices = [one for one in model.parameters() if one.ndim == 2]
    vectors = [one for one in model.parameters() if one.ndim != 2]
    return Job(model, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=1e-2)])


def _half(width: int) -> Job:
    """Weights and moments in bf16."""
    model = Net(width).bfloat16()
    return Job(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _bitsandbytes(width: int) -> Job:
    import bitsandbytes

    model = Net(width)
    return Job(model, bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256))


def _torchao(width: int) -> Job:
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    ckptstore.register(OptimState8bit)
    model = Net(width)
    return Job(model, AdamW8bit(model.parameters(), lr=1e-2))


def _layer(width: int) -> Job:
    return AdapterJob(torch.nn.Linear(width, width), width)


def _four_bits(width: int) -> Job:
    import bitsandbytes

    layer: Any = bitsandbytes.nn.Linear4bit(width, width, quant_type="nf4", compute_dtype=torch.float32)
    layer.load_state_dict(torch.nn.Linear(width, width).state_dict())
    return AdapterJob(layer.to("cpu"), width)


def _eight_bits(width: int) -> Job:
    from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_

    ckptstore.register(Int8Tensor)
    layer = torch.nn.Sequential(torch.nn.Linear(width, width))
    quantize_(layer, Int8WeightOnlyConfig())
    return AdapterJob(layer, width)


CASES: Final[dict[str, Callable[[int], Job]]] = {
    "one layer": _layer,
    "PEFT": TunedJob,
    "schedule-free": _schedule_free,
    "averaged": _averaged,
    "compiled": _compiled,
    "Muon": _muon,
    "bf16": _half,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}
QUANTIZED: Final[dict[str, Callable[[int], Job]]] = {"bitsandbytes 4 bits": _four_bits, "torchao 8 bits": _eight_bits}
"""Adapters of quantized weights."""


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled functions as they are written: torchao compiles its steps, which takes minutes on a CPU."""
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


def run(
    case: str, store: Path, strategy: str, until: int, losses: Path | None = None, width: int = 128, **options: Any
) -> Job:
    """Resume and train. A line for each step goes to `losses`: its number, and the loss in hex."""
    torch.manual_seed(1)
    job = {**CASES, **QUANTIZED}[case](width)
    with Checkpointer(store, model=job.model, strategy=strategy, **job.parts, **options) as checkpointer:
        for step in range(checkpointer.resume(), until):
            loss = job.loss()
            loss.backward()
            for optimizer in job.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            job.after()
            if losses is not None:
                with losses.open("a") as file:
                    file.write(f"{step + 1} {loss.item().hex()}\n")
            checkpointer.step(metrics={"loss": loss})
    return job


def _row(case: str, folder: Path, steps: int, width: int) -> str:
    columns = []
    for number, strategy in enumerate((*STRATEGIES, "only")):
        found: list[int] = []
        options: dict[str, Any] = {"strategy": "gradient", "only": "trainable"} if strategy == "only" else {}
        options = {"strategy": strategy, **options, "on_metrics": lambda one, found=found: found.append(one.stored)}
        job = run(case, folder / f"{case}-{number}", until=steps, width=width, **options)
        columns.append(f"{statistics.median(found[1:]):12,.0f}")
    own = io.BytesIO()
    torch.save(job.own_state(), own)
    return f"{case:22}{len(own.getvalue()):12,}{''.join(columns)}"


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option("--steps", type=click.IntRange(2), default=40, help="of each run (default 40)")
@click.option("--width", type=click.IntRange(8), default=256, help="of the model's layers (default 256)")
@click.option("--run", "one", nargs=4, metavar="CASE STORE LOSSES STRATEGY", help="train one case in this process")
def main(folder: Path | None, steps: int, width: int, one: tuple[str, str, str, str] | None) -> None:
    """Run the command: see the module."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with eager():
        if one is not None:
            case, store, losses, strategy = one
            run(case, Path(store), strategy, steps, Path(losses), width)
            return
        click.echo(f"{'bytes a step':22}{'own':>12}{''.join(f'{name:>12}' for name in (*STRATEGIES, 'only'))}")
        with tempfile.TemporaryDirectory(prefix="bench-adapters-", dir=folder) as place:
            for case in (*CASES, *QUANTIZED):
                click.echo(_row(case, Path(place), steps, width))


if __name__ == "__main__":
    main()
