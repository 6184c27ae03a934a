"""A process of one version: reads commands from standard input, a JSON object a line, and answers each with one.

It imports only public names, because two versions run it. Training is a small torch model whose data depends only on
the step, so that every version that restores the same state trains the same next steps.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

import ckptstore
from ckptstore.training import OptimizerStep

_MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "full": dict,
    "delta": lambda: {"deltas": ckptstore.DeltaOptions(interval=3)},
    "diffs": lambda: {"diffs": ckptstore.DiffOptions(full_every=6, batch=3, seconds=None)},
}


class _Training:
    """A model and its optimizer, which can be set to a state."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, number: int) -> None:
        data = torch.Generator().manual_seed(number)
        self.model(torch.randn(16, 24, generator=data)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Worker:
    def __init__(self, path: str) -> None:
        self.store = ckptstore.open(path, create=True)
        self.writer: Any = None
        self.mode = "full"
        self.done = 0
        self.training = _Training()

    def begin(self, mode: str, parent: str) -> dict[str, Any]:
        """Open a writer, and restore the state that it continues from."""
        self.training, self.mode, self.done = _Training(), mode, 0
        self.writer = self.store.writer(parent=parent, poll_seconds=0.2, **_MODES[mode]())
        if self.writer.parent is not None:
            self.done = self.writer.parent.step
            self.training.restore(self.store.load(self.writer.parent.ref))
        return {"term": self.writer.term}

    def train(self, steps: int) -> dict[str, Any]:
        """Train and save every step -> digests of the states, by REF."""
        saved = {}
        for _ in range(steps):
            self.done += 1
            self.training.step(self.done)
            given: dict[str, Any] = {"metadata": {"loss": 1.0 / self.done}}
            if self.mode == "diffs":
                given["updates"] = OptimizerStep(self.training.optimizer)
            self.writer.save_async(self.training.state(), self.done, **given)
            saved[f"{self.done}@{self.writer.term}"] = _digest(self.training.state())
        self.writer.wait()
        return {"saved": saved}

    def end(self) -> dict[str, Any]:
        """Close the writer."""
        writer, self.writer = self.writer, None
        writer.close()
        return {}

    def tag(self, name: str, ref: str, take_over: bool) -> dict[str, Any]:
        return {"ref": self.store.tag(name, ref, take_over=take_over, timeout=30).ref}

    def retire(self, ref: str, take_over: bool) -> dict[str, Any]:
        self.store.retire(ref, take_over=take_over, timeout=30)
        return {}

    def keep(self, rules: list[str], take_over: bool) -> dict[str, Any]:
        self.store.keep(*rules, everything=not rules, take_over=take_over, timeout=30)
        if rules:
            self.store.prune(take_over=take_over, timeout=30)
        return {}

    def merge(self, refs: str, take_over: bool) -> dict[str, Any]:
        self.store.merge(refs, keep_steps=True, take_over=take_over, timeout=30)
        return {}

    def compact(self, take_over: bool) -> dict[str, Any]:
        self.store.compact(take_over=take_over, timeout=30)
        return {}

    def gc(self) -> dict[str, Any]:
        self.store.gc()
        return {}

    def copy(self, target: str) -> dict[str, Any]:
        self.store.copy(target)
        return {}

    def read(self, path: str | None = None) -> dict[str, Any]:
        """Read everything: digests of all states by REF, tags, rules, and the findings of a deep verification."""
        store = self.store if path is None else ckptstore.open(path)
        states = {info.ref: _digest(store.load(info.ref)) for info in store.checkpoints()}
        report = store.verify(deep=True)
        tags = {name: info.ref for name, info in store.tags().items()}
        found = {"states": states, "tags": tags, "rules": list(store.rules()), "ok": report.ok}
        return found | {"latest": store.latest_step(), "steps": [info.ref for info in store.checkpoints()]}


def _digest(state: dict[str, Any]) -> str:
    """The digest of names, shapes, dtypes and bytes of all tensors, and of everything else in the state."""
    found = hashlib.sha256()

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                add(f"{path}/{key!r}", one)
        elif isinstance(value, list | tuple):
            for number, one in enumerate(value):
                add(f"{path}/{number}", one)
        elif isinstance(value, torch.Tensor):
            found.update(f"{path} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(f"{path} {value!r}".encode())

    add("", state)
    return found.hexdigest()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worker = _Worker(sys.argv[1])
    print(json.dumps({"from": ckptstore.__file__, "version": ckptstore.__version__}), flush=True)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = getattr(worker, command)(**arguments)
        except ckptstore.CkptError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
