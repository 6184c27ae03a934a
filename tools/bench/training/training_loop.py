"""The training loop of every checkpoint strategy: the demo's language model under AdamW, and its cores.

The model computes on some cores and everything that saves runs on others, so that no strategy gets more cores than
another, and none takes the trainer's. On CUDA the code is the same, with the steps synchronized.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash
from torch.nn import functional

from tools.demo.config import DemoConfig
from tools.demo.corpus import read_corpus
from tools.demo.model import GPT

State = dict[str, Any]

BYTES_PER_PARAMETER: Final = 12
"""A weight and two moments in fp32."""
_TEXT: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class Shape:
    """The trained model. `batch` windows of `context` bytes of text a step."""

    width: int
    layers: int
    batch: int
    context: int

    @classmethod
    def of(cls, parameters: int, batch: int, context: int) -> Shape:
        """A shape of about the given number of parameters, in 6 layers; 2 of a small model. The width is a multiple of
        32."""
        layers = 6 if parameters >= 1_000_000 else 2
        width = max(32, round((parameters / (12 * layers)) ** 0.5 / 32) * 32)
        return cls(width, layers, batch, context)

    def config(self) -> DemoConfig:
        """For `tools.demo.model`: heads of 32 numbers, and no dropout, so that a step has no state but the model's."""
        heads = self.width // 32
        return DemoConfig(
            width=self.width, layers=self.layers, heads=heads, batch=self.batch, context=self.context, dropout=0.0
        )


class Trainer:
    """One run. Its bits depend only on the shape, the seed, the step and the number of threads.

    Attributes:
        parameters: how many are trained.
        shape: of the model.
        compressor: a `TopKHook` that keeps the largest entries of each gradient; None: gradients are unchanged.
    """

    def __init__(self, shape: Shape, device: str = "cpu", seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.model = GPT(shape.config()).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.step = 0
        self.compressor: Any = None
        self.shape = shape
        self._text = torch.from_numpy(read_corpus(_TEXT).text.copy()).long()

    def loss(self) -> torch.Tensor:
        """The loss of the next step's data."""
        shape = self.shape
        generator = torch.Generator().manual_seed(1_000_003 + self.step)
        starts = torch.randint(len(self._text) - shape.context - 1, (shape.batch,), generator=generator)
        rows = torch.stack([self._text[start : start + shape.context + 1] for start in starts.tolist()])
        rows = rows.to(self.device)
        return functional.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def backward(self) -> None:
        """Compute the gradient of the next step."""
        self.loss().backward()  # type: ignore[no-untyped-call]
        if self.compressor is not None:
            self.compressor.compress(self.model.parameters())

    def update(self) -> None:
        """Take the optimizer's step. The gradient stays until the next `clear`."""
        self.optimizer.step()
        self.step += 1
        self.synchronize()

    def clear(self) -> None:
        """Clear the gradient."""
        self.optimizer.zero_grad()

    def take(self) -> None:
        """Take a whole step without saves."""
        self.backward()
        self.update()
        self.clear()

    def synchronize(self) -> None:
        """Wait until the device is idle: a step's time is not the time of its launch."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state(self) -> State:
        """The state for a checkpoint; its tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def load(self, state: State) -> None:
        """Continue from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def tensors(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all tensors of a nested state, in its order."""
    if isinstance(state, torch.Tensor):
        yield ".".join(path), state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, (*path, str(key)))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from tensors(value, (*path, str(number)))


def mapped(state: Any, change: Any, path: tuple[str, ...] = ()) -> Any:
    """A copy of the nesting, with ``change(name, tensor)`` in place of each tensor."""
    if isinstance(state, torch.Tensor):
        return change(".".join(path), state)
    if isinstance(state, dict):
        return {key: mapped(value, change, (*path, str(key))) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(mapped(value, change, (*path, str(number))) for number, value in enumerate(state))
    return state


def digest(state: State) -> str:
    """The digest of every bit of every tensor, and of everything else in the state."""
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(tensors(state)):
        plain = tensor.detach().cpu().contiguous()
        hasher.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        hasher.update(plain.reshape(-1).view(torch.uint8).numpy())
    hasher.update(repr(mapped(state, lambda name, _tensor: name)).encode())
    return hasher.hexdigest()


def divide_cores(pinned: bool) -> tuple[set[int], set[int]]:
    """(the trainer's cores, the cores of everything that saves); all for both, unless `pinned` and there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if not pinned or len(cores) < 2:
        return set(cores), set(cores)
    half = len(cores) // 2
    return set(cores[:half]), set(cores[half:])


_savers: set[int] = set()
"""The cores of everything that saves, once `pin` has set them."""


@contextmanager
def on_savers() -> Iterator[None]:
    """Run this thread on the savers' cores, and with it every thread and process that it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _savers or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(trainer: set[int], savers: set[int]) -> str:
    """Put this thread on the trainer's cores, and every thread that starts from now on on the savers'.

    A thread inherits the cores of its starter; so the starter runs on the savers' cores while it starts one
    (`threading.Thread.start`, which every pool of Python's calls). Threads that C++ code starts, such as torch's own,
    keep their starter's cores. torch computes with as many threads as the trainer has cores.

    Returns:
        a description for the report.
    """
    torch.set_num_threads(len(trainer))
    if trainer == savers:
        return f"not pinned: training and saving share {len(trainer)} cores"
    start = threading.Thread.start
    global _savers
    _savers = savers

    def started(thread: threading.Thread) -> None:
        with on_savers():
            start(thread)

    threading.Thread.start = started  # type: ignore[method-assign]
    os.sched_setaffinity(0, trainer)
    return (
        f"pinned: the training thread on {len(trainer)} of {len(trainer) + len(savers)} cores "
        f"(torch.set_num_threads({len(trainer)})), every thread that a strategy starts on the other {len(savers)}; "
        "what a strategy does in the training thread itself runs on the trainer's"
    )
