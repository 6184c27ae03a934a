"""A shim between a training loop and ckptstore: all that a framework needs to save through any `ckptstore.Writer`.

    python shim.py runs/shim --steps 200            # this process saves
    python shim.py runs/shim --steps 200 --agent    # an agent saves, and outlives this process

Kill it at any time and start it again: it continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import ckptstore
import ckptstore.agent


class Shim:
    """Saves every `every` steps, and says at once when a save has failed."""

    def __init__(self, store: ckptstore.Store, writer: ckptstore.Writer, every: int) -> None:
        self.store, self.writer, self.every = store, writer, every
        self.under_way: list[ckptstore.PendingSave] = []

    def restored(self) -> tuple[dict[str, Any] | None, int]:
        """The state to continue from and its step; (None, 0): a new run."""
        if self.writer.inherited is not None:  # an agent has kept it of a trainer that was killed
            return self.writer.load(framework="numpy"), self.writer.step
        if self.writer.parent is None:
            return None, 0
        return self.store.load(self.writer.parent.ref, framework="numpy"), self.writer.parent.step

    def after_step(self, step: int, state: dict[str, Any], loss: float) -> None:
        """Call it after each optimizer step. Returns when the state is copied: it may change then."""
        for pending in [one for one in self.under_way if one.done()]:
            self.under_way.remove(pending)
            pending.result()  # raises what stopped it
        if step % self.every == 0:
            self.under_way.append(self.writer.save_async(state, step, metadata={"loss": loss}))


def train(shim: Shim, steps: int) -> dict[str, Any]:
    """Gradient descent with momentum on a small problem. Everything that it needs to continue is in its state."""
    state, begun = shim.restored()
    if state is None:
        state = {"weights": np.zeros(1000, np.float32), "momentum": np.zeros(1000, np.float32)}
    target = np.random.default_rng(0).standard_normal(1000, np.float32)
    for step in range(begun + 1, steps + 1):
        error = state["weights"] - target
        state["momentum"] = np.float32(0.9) * state["momentum"] + error
        state["weights"] = state["weights"] - np.float32(0.01) * state["momentum"]
        shim.after_step(step, state, float((error**2).mean()))
    return state


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("store")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--every", type=int, default=1)
    options.add_argument("--agent", action="store_true")
    given = options.parse_args()
    opened = ckptstore.open(given.store)
    with ckptstore.agent.writer(opened) if given.agent else opened.writer(max_in_flight=2) as writer:
        train(Shim(opened, writer, given.every), given.steps)
    print(f"step {opened.latest_step()}: loss {opened.checkpoint().metadata['loss']:.3g}")
