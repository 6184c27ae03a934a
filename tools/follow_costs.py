"""Compares the bytes read from a bucket: following a run step by step, loading each checkpoint, and loading each from a
full.

    python -m tools.follow_costs --steps 20

Counted by the backend (`store.backend.costs`), through ministack; the bytes do not depend on the machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

import ckptstore
from ckptstore import Update
from ckptstore.backends.costs import Spent
from ckptstore.formats import optim
from ckptstore.formats.sources import NumpySource
from tools.objects.server import Server, serving

_ADAM: Final = optim.AdamW(weight_decay=0.1)


def states(steps: int, numbers: int) -> Iterator[tuple[dict[str, Any], list[Update]]]:
    """fp32 weights with both moments of Adam, whose gradients are zero except in one of 16 rows, as with embeddings."""
    shape = (numbers // 64, 64)
    slots = [np.random.default_rng(1).standard_normal(shape).astype("<f4"), *np.zeros((2, *shape), "<f4")]
    for step in range(1, steps + 1):
        rng = np.random.default_rng([step, 2])
        gradient = np.zeros(shape, "<f4")
        rows = rng.integers(0, shape[0], shape[0] // 16)
        gradient[rows] = rng.standard_normal((len(rows), 64)).astype("<f4")
        when = optim.Step(count=step, lr=1e-4)
        optim.advance(_ADAM.rule(when), slots, gradient)
        w, m, v = slots
        yield {"w": w, "m": m, "v": v, "step": step}, [Update(("w", "m", "v"), _ADAM, when, NumpySource(gradient))]


def measure(server: Server, steps: int, numbers: int, **form: Any) -> tuple[Spent, Spent, int]:
    """Costs of following every step, of loading every step, and the bytes of a state."""
    url = server.url()

    def handle() -> ckptstore.Store:
        return ckptstore.open(url, storage_options=server.options)

    follower, loader = handle(), handle()
    follow = follower.follow(framework="numpy", timeout=0)
    nbytes = 0
    with handle().writer(poll_seconds=None, **form) as writer:
        for step, (state, updates) in enumerate(states(steps, numbers), 1):
            writer.save(state, step, updates=updates if "diffs" in form else None)
            found, loaded = next(follow).state, loader.load(step, framework="numpy")
            for name in ("w", "m", "v"):
                if not found[name].tobytes() == loaded[name].tobytes() == state[name].tobytes():
                    raise AssertionError(f"step {step}: {name} differs")
            nbytes = sum(state[name].nbytes for name in ("w", "m", "v"))
    assert follower.backend.costs is not None
    assert loader.backend.costs is not None
    return follower.backend.costs.spent, loader.backend.costs.spent, nbytes


@click.command()
@click.option("--steps", default=20)
@click.option("--numbers", default=1 << 20, help="Of weights.")
def main(steps: int, numbers: int) -> None:
    """Count the bytes that following reads."""
    forms: dict[str, dict[str, Any]] = {
        "fulls": {},
        "deltas": {"deltas": steps},
        "step diffs": {"diffs": ckptstore.DiffOptions(full_every=steps + 1)},
    }
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        for name, form in forms.items():
            followed, loaded, nbytes = measure(server, steps, numbers, **form)
            click.echo(
                f"{name}: state {nbytes / 2**20:.1f} MiB; each of {steps} steps on average: "
                f"followed {followed.received / steps / 2**20:.2f} MiB in {followed.total / steps:.1f} requests, "
                f"loaded {loaded.received / steps / 2**20:.2f} MiB in {loaded.total / steps:.1f}"
            )


if __name__ == "__main__":
    main()
