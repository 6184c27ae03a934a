"""Measures publishing: ``python -m tools.bench.storage.publishing --size 400MB``.

Weights in bf16 are copies of fp32 weights that AdamW changes at a learning rate of reinforcement learning: few of their
bytes change in a step. Each round saves a step and publishes it, as a full and as a delta of both layouts. Prints the
median of the bytes that a version takes, and of the seconds of `Publisher.look`, from a store on the same disk.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Final

import click
import torch

import ckptstore
from ckptstore.cli.arguments import SIZE

__all__ = ["measure"]

_SHAPE: Final = (1024, 1024)


def measure(folder: Path, nbytes: int, rounds: int, rate: float) -> dict[str, tuple[int, float]]:
    """Publish into `folder` -> for a full and a delta of each layout: median bytes, median seconds."""
    torch.manual_seed(0)
    count = max(1, nbytes // (2 * _SHAPE[0] * _SHAPE[1]))
    weights = [torch.nn.Parameter(torch.randn(_SHAPE) * 0.02) for _ in range(count)]
    optimizer = torch.optim.AdamW(weights, lr=rate)
    found: dict[str, list[tuple[int, float]]] = {}
    store = ckptstore.open(folder / "run")
    kinds = {"full": store.publish(folder / "full", full_every=1, keep=1)}
    kinds["delta, hf"] = store.publish(folder / "hf", keep=1)
    kinds["delta, slime"] = store.publish(folder / "slime", layout="slime", keep=1)
    with store.writer(poll_seconds=None, keep=["last:2"]) as writer:
        for step in range(1, rounds + 2):
            for weight in weights:
                weight.grad = torch.randn(_SHAPE)
            optimizer.step()
            model = {f"layers.{n}.weight": weight.detach().to(torch.bfloat16) for n, weight in enumerate(weights)}
            writer.save({"model": model}, step)
            for kind, publisher in kinds.items():
                version = publisher.look()
                assert version is not None
                if step > 1:
                    found.setdefault(kind, []).append((version.written, version.seconds))
    for publisher in kinds.values():
        publisher.close()
    return {
        kind: (int(statistics.median(one[0] for one in runs)), statistics.median(one[1] for one in runs))
        for kind, runs in found.items()
    }


@click.command()
@click.option("--size", type=SIZE, default=400_000_000, help="Bytes of the weights. Default: 400MB.")
@click.option("--rounds", type=click.IntRange(min=1), default=5)
@click.option("--rate", type=float, default=1e-6, help="AdamW's learning rate. Default: 1e-6.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where. Default: the folder of temporary files.")
def main(size: int, rounds: int, rate: float, folder: Path | None) -> None:
    """Print bytes and seconds of a full and of deltas."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        found = measure(Path(made), size, rounds, rate)
    for kind, (nbytes, seconds) in found.items():
        click.echo(f"{kind:14}{nbytes / 1e6:9.1f} MB {seconds:7.2f} s")


if __name__ == "__main__":
    main()
