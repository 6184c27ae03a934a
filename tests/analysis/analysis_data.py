"""Small training trajectories: weights on a random walk, their moments and gradients."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray


def trajectory(steps: int, rows: int = 700, seed: int = 0, *, half: bool = False) -> list[dict[str, Array]]:
    """States after each of `steps` steps of AdamW on noise; `rows` of 512 numbers."""
    rng = np.random.default_rng(seed)
    weights = {"model.wte.weight": rng.normal(0, 0.02, (rows, 512)), "model.norm.weight": np.ones(512)}
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    first = {name: np.zeros_like(value) for name, value in weights.items()}
    second = {name: np.zeros_like(value) for name, value in weights.items()}
    states = []
    for _ in range(steps):
        state: dict[str, Array] = {}
        for name, value in weights.items():
            gradient = rng.normal(0, 1e-3, value.shape).astype(np.float32)
            first[name] = (0.9 * first[name] + 0.1 * gradient).astype(np.float32)
            second[name] = (0.95 * second[name] + 0.05 * gradient**2).astype(np.float32)
            update = 1e-5 * first[name] / (np.sqrt(second[name]) + np.float32(1e-8))
            weights[name] = (value - update).astype(np.float32)
            state |= {f"grad.{name}": gradient, name: weights[name]}
            state |= {f"optimizer.exp_avg.{name}": first[name], f"optimizer.exp_avg_sq.{name}": second[name]}
            if half:
                state[f"half.{name}"] = weights[name].astype(ml_dtypes.bfloat16)
        states.append(state | {"optimizer.step": np.array([len(states)])})
    return states


def write(folder: Path, states: list[dict[str, Array]], steps: list[int] | None = None) -> list[str]:
    """Write states as ``step_<n>.safetensors``; the paths."""
    paths = []
    for step, state in zip(steps or range(1, len(states) + 1), states, strict=True):
        paths.append(str(folder / f"step_{step}.safetensors"))
        save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, paths[-1])
    return paths
