"""LightCheck, Fig. 15: interruptions and resumes do not change what is learned.

A residual CNN with BatchNorm learns drawn images twice: once without interruption, and once interrupted after every
epoch and continued by new objects from the store's newest checkpoint, which layer-wise snapshots took during training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import ckptstore
from ckptstore.training import LayerwiseSnapshots
from tools.bench.codecs.trajectories import cnn, images
from tools.papers.result import Asked, Claim, Compared, Figure, Result, Table

__all__ = ["run"]


class _Learner:
    """A model, its optimizer and its schedule; everything that a checkpoint holds."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(3)
        self.model = cnn(width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        self.batch = batch
        self.done = 0

    def step(self) -> None:
        """One iteration."""
        inputs, labels = images(self.batch, self.done)
        loss: Any = functional.cross_entropy(self.model(inputs), labels)
        self.model.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1

    def accuracy(self) -> float:
        """Top-1, of images that are not trained on."""
        self.model.eval()
        with torch.no_grad():
            inputs, labels = images(256, 9_999_999)
            found = (self.model(inputs).argmax(1) == labels).float().mean().item()
        self.model.train()
        return float(found)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]

    def bits(self) -> bytes:
        return b"".join(one.detach().numpy().tobytes() for one in self.model.state_dict().values())


def run(asked: Asked) -> Result:
    """Run the experiment."""
    width, batch = asked.pick((4, 8), (8, 32), (16, 32))
    epochs, steps = asked.pick((2, 4), (5, 24), (12, 60))
    plain, curve = _Learner(width, batch), []
    for _ in range(epochs):
        for _ in range(steps):
            plain.step()
        curve.append(plain.accuracy())
    asked.told(f"without interruption: {curve[-1]:.1%}")
    resumed: list[float] = []
    learner = _Learner(width, batch)
    for epoch in range(epochs):
        learner = _epoch(_Learner(width, batch), steps, asked.scratch / "store", first=epoch == 0)
        resumed.append(learner.accuracy())
    equal = learner.bits() == plain.bits()
    rows = [
        (epoch + 1, one, other, abs(one - other)) for epoch, (one, other) in enumerate(zip(curve, resumed, strict=True))
    ]
    same = sum(one == other for one, other in zip(curve, resumed, strict=True))
    columns = ("epoch", "no interruption", "resumed after every epoch", "difference")
    return Result(
        tables=[Table("Top-1 accuracy of validation images", columns, rows, dict.fromkeys(columns[1:], ".2%"))],
        claims=[
            Claim(
                "resuming has a negligible effect on accuracy",
                "similar (96 %)",
                f"{resumed[-1]:.1%} and {curve[-1]:.1%}; the weights are {'equal' if equal else 'different'}",
                equal,
                "" if equal else "the resumed run is another one",
            )
        ],
        figures=[
            Figure(
                "Top-1 accuracy",
                "lines",
                list(range(1, epochs + 1)),
                {"no interruption": curve, "resumed after every epoch": resumed},
                x="epoch",
            )
        ],
        compared=[
            Compared("accuracy after each epoch", epochs, same),
            Compared("the final weights and BatchNorm statistics", 1, int(equal)),
        ],
        settings={"width": width, "batch": batch, "epochs": epochs, "iterations": steps},
    )


def _epoch(learner: _Learner, steps: int, folder: Path, *, first: bool) -> _Learner:
    """Continue from the newest checkpoint, train an epoch, and leave: the objects are dropped."""
    with ckptstore.open(folder, create=first) as store, store.writer(max_in_flight=2, poll_seconds=None) as writer:
        if not first:
            learner.load(store.load("latest", framework="torch"))
        with LayerwiseSnapshots(writer, learner.model, learner.optimizer, learner.state, mode="host") as layers:
            for number in range(steps):
                learner.step()
                if number % 4 == 3 or number == steps - 1:
                    layers.save(learner.done)
        writer.wait()
    return learner
