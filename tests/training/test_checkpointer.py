"""The Checkpointer: a script that is ended and resumed ends with the bits of an uninterrupted one."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.backends.local_disk.local import LocalBackend  # noqa: E402
from ckptstore.errors import FormatError, StateMismatchError, UsageError, WriterClosedError  # noqa: E402
from ckptstore.training import Checkpointer, UnsavedStepWarning, retention  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.training.polls import poll_often  # noqa: E402
from tests.training.unknown_optimizer import UnknownOptimizer  # noqa: E402
from tools.warm import Warm  # noqa: E402

STRATEGIES = ("full", "delta", "gradient")
WIDTH = 64


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(torch.nn.Module):  # type: ignore[misc]
    """Tied, frozen, unused and rarely used parameters, and buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = torch.nn.Linear(WIDTH, WIDTH)
        self.seldom = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any, number: int = 0) -> Any:
        x = self.frozen(self.hidden(self.norm(self.embed(tokens))))
        x = torch.nn.functional.dropout(x, 0.1)
        return self.head(self.seldom(x) if number % 3 == 0 else x)


class Script:
    """The parts of a training script; every part draws from generators or counts steps."""

    def __init__(self, make: Callable[[Any], Any] | None = None, **also: Any) -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        self.model = Net()
        moved = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = (make or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(moved)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 7], 0.5)
        data = torch.utils.data.TensorDataset(torch.arange(40))
        self.loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        self.also = also

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            **self.also,
        }

    def one(self, tokens: Any, number: int) -> Any:
        if random.random() < 0.5:
            tokens = (tokens + int(np.random.randint(0, 3))) % 40
        loss = torch.nn.functional.cross_entropy(self.model(tokens, number), tokens.roll(1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss

    def run(self, store: Any, until: int, **options: Any) -> list[float]:
        """Resume from the store and train -> the losses."""
        losses = []
        with Checkpointer(store, **self.parts(), **options) as checkpointer:
            start = checkpointer.resume()
            batches = endless(checkpointer.loader)
            for number in range(start, until):
                (tokens,) = next(batches)
                loss = self.one(tokens, number)
                losses.append(loss.item())
                checkpointer.step(metrics={"loss": loss})
        return losses

    def everything(self) -> Any:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state()[1].tolist(),
            "python": random.getstate(),
        }


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def compare_after_resume(tmp_path: Path, make: Callable[[], Script], **options: Any) -> None:
    """Train 11 steps; train 4, 3 and 4 with a new script each; compare."""
    whole = make()
    losses = whole.run(tmp_path / "whole", 11, **options)
    expected = whole.everything()
    found: list[float] = []
    for until in (4, 7, 11):
        script = make()
        found += script.run(tmp_path / "parts", until, **options)
    assert found == losses
    same(script.everything(), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumes_bit_for_bit(tmp_path: Path, strategy: str) -> None:
    compare_after_resume(tmp_path, Script, strategy=strategy)
    kinds = [info.kind for info in ckptstore.open(tmp_path / "whole").checkpoints()]
    expected = {"full": {"full"}, "delta": {"full", "delta"}, "gradient": {"full", "gradient"}}[strategy]
    assert len(kinds) == 11
    assert set(kinds) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, fused=True),
        lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:], "lr": 1e-4}], lr=1e-3, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
    ],
    ids=["sgd", "fused", "groups", "tensor-lr", "rmsprop"],
)
@pytest.mark.filterwarnings("ignore::ckptstore.UnexplainedStepWarning")
def test_optimizers_of_all_kinds(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    compare_after_resume(tmp_path, lambda: Script(make), strategy="gradient")


def test_averaged_weights_and_generators_are_extras(tmp_path: Path) -> None:
    class Averaging(Script):
        def __init__(self) -> None:
            super().__init__()
            self.ema = torch.optim.swa_utils.AveragedModel(
                self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            self.noise = torch.Generator().manual_seed(3)
            self.choice = np.random.default_rng(3)
            self.dice = random.Random(3)
            self.also = {"extra": {"ema": self.ema, "noise": self.noise, "choice": self.choice, "dice": self.dice}}

        def one(self, tokens: Any, number: int) -> Any:
            shift = int(torch.randint(0, 3, (), generator=self.noise)) + int(self.choice.integers(3))
            loss = super().one((tokens + shift + self.dice.randrange(3)) % 40, number)
            self.ema.update_parameters(self.model)
            return loss

        def everything(self) -> Any:
            return super().everything() | {"ema": self.ema.state_dict()}

    compare_after_resume(tmp_path, Averaging, strategy="gradient")


def test_several_models_and_optimizers_that_take_turns(tmp_path: Path) -> None:
    class Turns(Script):
        def __init__(self) -> None:
            super().__init__()
            self.critic = torch.nn.Linear(40, 1)
            self.second = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)

        def parts(self) -> dict[str, Any]:
            return super().parts() | {
                "model": {"net": self.model, "critic": self.critic},
                "optimizer": [self.optimizer, self.second],
            }

        def one(self, tokens: Any, number: int) -> Any:
            if number % 2:
                return super().one(tokens, number)
            loss = self.critic(self.model(tokens).detach()).square().mean()
            loss.backward()
            self.second.step()
            self.second.zero_grad()
            return loss

        def everything(self) -> Any:
            return super().everything() | {"critic": self.critic.state_dict(), "second": self.second.state_dict()}

    compare_after_resume(tmp_path, Turns, strategy="gradient")


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_and_the_steps_that_it_skips(tmp_path: Path, fused: bool) -> None:
    class Scaled(Script):
        def __init__(self) -> None:
            super().__init__(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=fused))
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            self.also = {"scaler": self.scaler}

        def one(self, tokens: Any, number: int) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(self.model(tokens, number), tokens.roll(1))
            loss = loss * (float("inf") if number in (1, 5, 6) else 1.0)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            return torch.nan_to_num(loss, posinf=0.0)

        def everything(self) -> Any:
            return super().everything() | {"scaler": self.scaler.state_dict()}

    with warnings.catch_warnings():  # torch warns: the scheduler before the first optimizer step, which was skipped
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        compare_after_resume(tmp_path, Scaled, strategy="gradient")
    assert [info.step for info in ckptstore.open(tmp_path / "whole").checkpoints()] == list(range(1, 12))


def test_micro_batches_whose_gradients_are_accumulated(tmp_path: Path) -> None:
    class Accumulating(Script):
        def one(self, tokens: Any, number: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.model(tokens, number), tokens.roll(1))
            (loss / 2).backward()
            if number % 2:
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            return loss

    script = Accumulating()
    script.run(tmp_path / "whole", 12, strategy="gradient")
    assert [info.step for info in ckptstore.open(tmp_path / "whole").checkpoints()] == [2, 4, 6, 8, 10, 12]
    for until in (5, 9, 12):  # in the middle of an accumulation: it is repeated
        again = Accumulating()
        again.run(tmp_path / "parts", until, strategy="gradient")
    same(again.everything(), script.everything())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_are_those_of_the_bare_model(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 3)
    compiled = torch.compile(net, backend="eager")
    with Checkpointer(tmp_path / "s", model=compiled, strategy="full") as checkpointer:
        checkpointer.resume()
        checkpointer.step()
    assert set(ckptstore.open(tmp_path / "s").load()["model"]) == {"weight", "bias"}


def test_a_stateful_loader_is_asked_and_not_counted(tmp_path: Path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[int]:
            while True:
                self.at += 1
                yield self.at

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    for until, expected in ((3, [1, 2, 3]), (5, [4, 5])):
        loader = Loader()
        with Checkpointer(tmp_path / "s", model=torch.nn.Linear(2, 2), loader=loader, strategy="full") as checkpointer:
            start = checkpointer.resume()
            found = []
            for _, batch in zip(range(start, until), checkpointer.loader, strict=False):
                found.append(batch)
                checkpointer.step()
        assert found == expected


def test_bf16_parameters_keep_moments_in_fp32(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer

    model, optimizer = make()
    with Checkpointer(tmp_path / "s", model=model, optimizer=optimizer, strategy="full") as checkpointer:
        checkpointer.resume()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for one in optimizer.state.values():
            one["momentum_buffer"] = one["momentum_buffer"].float() + 1e-6
        checkpointer.step()
    other, fresh = make()
    with Checkpointer(tmp_path / "s", model=other, optimizer=fresh, strategy="full") as checkpointer:
        assert checkpointer.resume() == 1
    same(fresh.state_dict(), optimizer.state_dict())


# -- beginning, going back


def test_a_new_store_begins_at_0_and_an_old_one_wants_a_word(tmp_path: Path) -> None:
    script = Script()
    script.run(tmp_path / "s", 2, strategy="full")
    with Checkpointer(tmp_path / "s", **script.parts()) as checkpointer, pytest.raises(UsageError, match=r"resume\(\)"):
        checkpointer.step()
    with Checkpointer(tmp_path / "s", **Script().parts(), strategy="full") as checkpointer:
        assert checkpointer.resume(None) == 0
        with pytest.warns(UnsavedStepWarning, match="step 1 is not saved, in spite of"):
            checkpointer.step(save=True)
    assert checkpointer.steps_done == 1


def test_resume_at_an_earlier_checkpoint_is_a_branch(tmp_path: Path) -> None:
    Script().run(tmp_path / "s", 4, strategy="full")
    script = Script()
    with Checkpointer(tmp_path / "s", **script.parts(), strategy="full") as checkpointer:
        assert checkpointer.resume(2) == 2
        script.one(torch.arange(8), 2)
        checkpointer.step()
    assert ckptstore.open(tmp_path / "s").checkpoint("latest").ref == "3@2"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_going_back_in_one_process_never_leaves_latest_on_the_old_branch(tmp_path: Path, strategy: str) -> None:
    script = Script()
    store = ckptstore.open(tmp_path / "s")
    with Checkpointer(store, **script.parts(), strategy=strategy) as checkpointer:
        checkpointer.resume()
        batches = endless(checkpointer.loader)
        for number in range(6):
            script.one(*next(batches), number)
            checkpointer.step()
            if number == 2:
                checkpointer.wait()
                third = script.everything()
                third = {name: torch.clone(one) if hasattr(one, "clone") else one for name, one in third.items()}
                weight = script.model.head.weight.detach().clone()
        assert checkpointer.rollback(3) == 3
        assert torch.equal(script.model.head.weight, weight)
        assert torch.equal(torch.get_rng_state(), third["torch"])
        script.one(torch.arange(8), 3)
        checkpointer.step().result()  # type: ignore[union-attr]
        assert store.checkpoint("latest").ref == "4@2"
        assert checkpointer.resume(2) == 2
    assert store.terms()[-1].parent == "2@1"


def test_a_state_that_somebody_else_loads_is_refused(tmp_path: Path) -> None:
    script = Script()
    with Checkpointer(tmp_path / "s", **script.parts(), strategy="full") as checkpointer:
        checkpointer.resume()
        script.optimizer.load_state_dict(script.optimizer.state_dict())  # before the first step: a warm start
        script.one(torch.arange(8), 0)
        checkpointer.step()
        script.optimizer.load_state_dict(script.optimizer.state_dict())
        with pytest.raises(UsageError, match="rollback"):
            checkpointer.step()
        checkpointer.rollback(1)
        script.one(torch.arange(8), 1)
        checkpointer.step()


def test_a_checkpoint_of_another_writer_is_refused(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s").writer() as writer:
        writer.save({"model": {}}, 1)
    with (
        Checkpointer(tmp_path / "s", model=torch.nn.Linear(1, 1)) as checkpointer,
        pytest.raises(FormatError, match="Checkpointer"),
    ):
        checkpointer.resume()
    with Checkpointer(tmp_path / "t", model=torch.nn.Linear(1, 1), strategy="full") as checkpointer:
        checkpointer.resume()
        checkpointer.step()
    with (
        Checkpointer(tmp_path / "t", **Script().parts(), strategy="full") as checkpointer,
        pytest.raises(FormatError, match="no optimizer"),
    ):
        checkpointer.resume()


def test_another_optimizer_is_refused_and_warned_of_on_request(tmp_path: Path) -> None:
    Script(torch.optim.AdamW).run(tmp_path / "s", 2, strategy="full")
    script = Script(torch.optim.Adam)
    with Checkpointer(tmp_path / "s", **script.parts(), strategy="full") as checkpointer:
        with pytest.raises(StateMismatchError, match="optimizer: AdamW in the checkpoint, Adam in the script"):
            checkpointer.resume()
        with (
            pytest.warns(DeterminismWarning, match=r"not be bit-identical.*optimizer 0: AdamW.* -> Adam,"),
            pytest.warns(DeterminismWarning, match="left as the script has it: optimizer: AdamW in the checkpoint"),
        ):
            assert checkpointer.resume(strict=False) == 2
        assert script.optimizer.state  # Adam keeps what AdamW keeps
        script.one(torch.arange(8), 2)
        assert checkpointer.step() is not None


def test_the_optimizers_implementation_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Torch's ``load_state_dict`` restores the flags as well, so the bits continue."""
    Script(lambda p: torch.optim.AdamW(p, foreach=True)).run(tmp_path / "s", 2, strategy="full")
    assert "foreach=True" in ckptstore.open(tmp_path / "s").load()["environment"]["optimizer 0"]
    script = Script(lambda p: torch.optim.AdamW(p, fused=True))
    with Checkpointer(tmp_path / "s", **script.parts(), strategy="full") as checkpointer:
        assert checkpointer.resume() == 2
    assert script.optimizer.param_groups[0]["foreach"]


# -- retention


def test_the_kept_checkpoints_are_a_union_that_includes_the_newest(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    store = ckptstore.open(tmp_path / "s")
    losses = [9.0, 1.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, float("nan")]
    options = {"keep_last": 2, "keep_every": 4, "keep_best": "loss", "strategy": "full"}
    with Checkpointer(store, model=model, **options) as checkpointer:
        checkpointer.resume()
        for loss in losses:
            checkpointer.step(metrics={"loss": torch.tensor(loss)})
    kept = [info.step for info in store.checkpoints()]
    assert kept == [2, 4, 8, 10, 11]
    assert store.checkpoint("tag:best").step == 2
    segments = list((tmp_path / "s" / "seg").rglob("*.safetensors"))
    assert len(segments) == len(kept)
    with Checkpointer(store, model=model, **options) as checkpointer:  # the rules apply to the whole line
        assert checkpointer.resume() == 11
        checkpointer.step(metrics={"loss": 0.5})
    assert store.checkpoint("tag:best").step == 12
    assert [info.step for info in store.checkpoints()] == [4, 8, 11, 12]


def test_the_highest_may_be_the_best(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "s")
    with Checkpointer(
        store, model=torch.nn.Linear(4, 4), keep_best="max:accuracy", keep_last=1, strategy="full"
    ) as checkpointer:
        checkpointer.resume()
        for accuracy in (0.1, 0.9, 0.5):
            checkpointer.step(metrics={"accuracy": accuracy})
    assert [info.step for info in store.checkpoints()] == [2, 3]


def test_a_medium_that_becomes_full_is_collected_before_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = 8 << 20

    def used() -> int:
        found = 0
        for one in (tmp_path / "s" / "seg").rglob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # it was just deleted
                found += one.stat().st_size
        return found

    monkeypatch.setattr(retention, "_SHARE", 10**9)  # after the first round there is no time for another
    monkeypatch.setattr(LocalBackend, "free_bytes", lambda _self: space - used())
    most = 0
    with Checkpointer(tmp_path / "s", model=torch.nn.Linear(256, 256), keep_last=1, strategy="full") as checkpointer:
        checkpointer.resume()
        for _ in range(60):  # twice the space
            checkpointer.step()
            checkpointer.wait()
            most = max(most, used())
    assert space // 3 < most < space


def test_branches_that_were_gone_back_from_stay(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "s")
    for keep, ref in ((None, "latest"), (1, 2)):
        with Checkpointer(store, model=torch.nn.Linear(4, 4), keep_last=keep, strategy="full") as checkpointer:
            start = checkpointer.resume(ref)
            for _ in range(start, 3):
                checkpointer.step()
    assert [info.ref for info in store.checkpoints()] == ["3@1", "3@2"]


def test_rules_are_the_store_s_and_the_next_run_keeps_to_them(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "s")
    for keep, losses in ((["last:1", "best:loss:2"], (5.0, 1.0, 4.0, 2.0, 3.0)), (None, (9.0, 0.5, 8.0))):
        with Checkpointer(store, model=torch.nn.Linear(4, 4), keep=keep, strategy="full") as checkpointer:
            checkpointer.resume()
            for loss in losses:
                checkpointer.step(metrics={"loss": loss})
    assert store.rules() == ("last:1", "best:loss:2")
    assert [info.step for info in store.checkpoints()] == [2, 7, 8]
    assert (
        len(list((tmp_path / "s" / "seg").rglob("*.safetensors"))) == 3
    )  # and the segments of retired ones are deleted


def test_it_compacts_in_its_idle_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)
    store, passed = ckptstore.open(tmp_path / "s"), threading.Event()
    compact = ckptstore.CompactOptions(bandwidth=None, every=0.05, on_pass=lambda done: passed.set())
    model = torch.nn.Linear(64, 64)
    with Checkpointer(store, model=model, strategy="delta", compact=compact) as checkpointer:
        checkpointer.resume()
        for step in range(1, 13):
            with torch.no_grad():
                model.weight[step] += 1.0
            checkpointer.step()
        checkpointer.wait()
        store.keep("every:5")  # late: a writer that knows the rules stores the kept ones as fulls
        assert passed.wait(60)
    assert [info.step for info in store.checkpoints()] == [5, 10, 12]
    assert store.verify(deep=True).ok
    with pytest.raises(UsageError, match="compact: cannot be combined with agent"):
        Checkpointer(store, model=model, agent=True, compact=compact)


def test_not_every_step_and_the_last_one_all_the_same(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "s")
    model = torch.nn.Linear(4, 4)
    with Checkpointer(store, model=model, save_every=3, strategy="full") as checkpointer:
        checkpointer.resume()
        for _ in range(7):
            checkpointer.step()
    assert [info.step for info in store.checkpoints()] == [3, 6, 7]

    def interrupted() -> None:
        with Checkpointer(store, model=model, save_every=3, strategy="full") as checkpointer:
            checkpointer.resume()
            checkpointer.step()
            raise KeyError  # in the middle of a step, perhaps

    with pytest.raises(KeyError):
        interrupted()
    assert store.latest_step() == 7


@pytest.mark.parametrize("also", [{}, {"tags": "ignored"}], ids=["plain", "tagged"])
def test_a_call_without_a_step_takes_nothing_from_the_step_before(tmp_path: Path, also: Any) -> None:
    """A script that ends in the middle of an accumulation: its final weights are in a checkpoint."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    store = ckptstore.open(tmp_path / "s")
    with (
        warnings.catch_warnings(action="ignore", category=UnsavedStepWarning),
        Checkpointer(store, model=model, optimizer=optimizer, save_every=10, strategy="full") as checkpointer,
    ):
        checkpointer.resume()
        for step in range(1, 14):
            if step != 13:
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            checkpointer.step(**({} if step != 13 else also))
    assert [info.step for info in store.checkpoints()] == [10, 13]
    same(store.load(13, framework="torch")["model"], model.state_dict())


def test_the_save_at_the_end_of_an_unfinished_accumulation(tmp_path: Path) -> None:
    """The number of the last call, the weights of the last optimizer step, and the next batch: as the page says."""
    batches = [torch.full((1, 4), float(number)) for number in range(10)]

    def begun() -> tuple[torch.nn.Linear, torch.optim.SGD, Checkpointer]:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given = {"model": model, "optimizer": optimizer, "loader": batches, "strategy": "full"}
        return model, optimizer, Checkpointer(tmp_path / "s", save_every=100, **given)

    model, optimizer, checkpointer = begun()
    with checkpointer:
        checkpointer.resume()
        for number, batch in enumerate(checkpointer.loader):
            model(batch).sum().backward()
            if number == 3:
                optimizer.step()
                stepped = {name: value.clone() for name, value in model.state_dict().items()}
            checkpointer.step()
            if number == 6:
                break
    model, optimizer, checkpointer = begun()
    with checkpointer:
        assert checkpointer.resume() == 7
        same(dict(model.state_dict()), stepped)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert [float(batch[0, 0]) for batch in checkpointer.loader] == [7, 8, 9]


def test_a_parameter_that_left_its_group_causes_a_warning(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def train() -> None:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()

    store = ckptstore.open(tmp_path / "s")
    with Checkpointer(store, model=model, optimizer=optimizer, strategy="gradient", on_error="raise") as checkpointer:
        checkpointer.resume()
        train()
        left = optimizer.param_groups[0]["params"].pop()
        with pytest.raises(UsageError, match=r"AdamW keeps the state of parameters \(1\) that are in none of its"):
            train()
        del optimizer.state[left]
        with pytest.warns(ckptstore.UnexplainedStepWarning, match="2 optimizer steps since the previous checkpoint"):
            train()
    store.verify(deep=True)
    assert [info.step for info in store.checkpoints()] == [1, 3]
    assert len(store.load(3)["optimizer"]["state"]) == 3


# -- auto


def test_auto_says_what_it_takes_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "ckptstore.training"),
        Checkpointer(tmp_path / "s", model=torch.nn.Linear(2, 2)) as checkpointer,
    ):
        assert checkpointer.strategy == "auto"
        checkpointer.resume()
        assert checkpointer.strategy == "full"
    (line,) = [record.getMessage() for record in caplog.records if "strategy" in record.getMessage()]
    assert "not worth compressing" in line
    assert "\n" not in line


def test_on_a_terminal_auto_says_it_there(tmp_path: Path) -> None:
    """Once a process, and only messages that no log handler shows."""
    main, other = os.openpty()
    logger = logging.getLogger("ckptstore.training")
    try:
        with open(other, "w") as terminal, contextlib.redirect_stderr(terminal):
            for level in (logging.WARNING, logging.INFO):
                logger.setLevel(level)
                with Checkpointer(tmp_path / "s", model=torch.nn.Linear(2, 2)) as checkpointer:
                    checkpointer.resume()
                    assert ": full (24 B of state are not worth compressing), term " in repr(checkpointer)
            with Checkpointer(tmp_path / "s", model=torch.nn.Linear(2, 2), strategy="delta") as checkpointer:
                checkpointer.resume()
                assert ": delta, term " in repr(checkpointer)
            print("end", file=terminal, flush=True)
            shown = ""
            while not shown.endswith("end\r\n"):  # a terminal returns its available output, perhaps line by line
                shown += os.read(main, 65536).decode()
    finally:
        logger.setLevel(logging.NOTSET)
        os.close(main)
    assert shown == f"ckptstore: {tmp_path / 's'}: strategy 'full': 24 B of state are not worth compressing\r\nend\r\n"


def test_auto_weighs_size_medium_cores_and_optimizer() -> None:
    from ckptstore.training.strategies import Circumstances, chosen, predicted

    def take(**other: Any) -> str:
        usual = {"nbytes": 10**8, "rate": 1e8, "spare": 1, "unpredicted": None}
        strategy, why = chosen(Circumstances(**{**usual, **other}))
        assert why
        return strategy

    assert take() == "gradient"
    assert take(rate=None) == "gradient"
    assert take(spare=0) == "full"
    assert take(rate=1e10) == "full"
    assert take(nbytes=1000) == "full"
    assert take(unpredicted="it is unknown") == "delta"
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    assert predicted([torch.optim.AdamW(parameters)], 1) is None
    assert "UnknownOptimizer" in str(predicted([UnknownOptimizer(parameters)], 1))
    assert "2 steps" in str(predicted([torch.optim.AdamW(parameters)], 2))
    assert "fp32" in str(predicted([torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3).half())])], 1))
    assert "no optimizer" in str(predicted([], 1))


def test_the_probe_leaves_nothing(tmp_path: Path) -> None:
    from ckptstore.training.strategies import measure_rate

    store = ckptstore.open(tmp_path / "s", create=True)
    rate = measure_rate(store.backend)
    assert rate is not None
    assert rate > 0
    assert list((tmp_path / "s").rglob("*.safetensors")) == []


# -- errors


class Broken:
    """An extra that fails at will."""

    def __init__(self) -> None:
        self.broken = False

    def state_dict(self) -> dict[str, Any]:
        return {"x": object()} if self.broken else {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_an_error_is_raised_or_warned_of(tmp_path: Path) -> None:
    extra = Broken()
    options: Any = {"model": torch.nn.Linear(2, 2), "extra": {"x": extra}, "strategy": "full"}
    with Checkpointer(tmp_path / "s", **options) as checkpointer:
        checkpointer.resume()
        extra.broken = True
        with pytest.raises(ckptstore.UnsupportedStateError, match="extra"):
            checkpointer.step()
        extra.broken = False
        assert checkpointer.step() is not None
    with Checkpointer(tmp_path / "s", **options, on_error="warn") as checkpointer:
        assert checkpointer.resume() == 2
        extra.broken = True
        with pytest.warns(UnsavedStepWarning, match="step 3 was not saved, and training continues"):
            assert checkpointer.step() is None
        extra.broken = False
        assert checkpointer.step() is not None
    assert [info.step for info in ckptstore.open(tmp_path / "s").checkpoints()] == [2, 4]


def test_a_failed_background_save_is_reported_by_the_next_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", model=torch.nn.Linear(2, 2), strategy="full") as checkpointer:
        checkpointer.resume()
        first = checkpointer.step()
        assert first is not None
        first.result()
        medium: Any = checkpointer.store.backend
        medium.open_sink = lambda *_: (_ for _ in ()).throw(ckptstore.StorageError("it is full"))
        pending, ended = checkpointer.step(), threading.Event()
        assert pending is not None
        pending.when_done(lambda _: ended.set())
        assert ended.wait(60)
        del medium.open_sink
        with pytest.raises(ckptstore.StorageError, match="it is full"):
            checkpointer.step()
        checkpointer.step()
    assert [info.step for info in ckptstore.open(tmp_path / "s").checkpoints()] == [1, 4]


def test_a_step_that_reports_a_failed_save_is_saved_itself(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path / "s", model=model, strategy="full", on_error="warn") as checkpointer:
        checkpointer.resume()
        checkpointer.step()
        checkpointer.wait()
        medium: Any = checkpointer.store.backend
        medium.open_sink = lambda *_: (_ for _ in ()).throw(ckptstore.StorageError("it is full"))
        pending, ended = checkpointer.step(), threading.Event()
        assert pending is not None
        pending.when_done(lambda _: ended.set())
        assert ended.wait(60)
        del medium.open_sink
        with pytest.warns(UnsavedStepWarning, match="it is full"):
            assert checkpointer.step() is not None
    assert [info.step for info in ckptstore.open(tmp_path / "s").checkpoints()] == [1, 3]


def test_a_writer_that_was_fenced_stops_the_saving_and_not_the_training(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", model=torch.nn.Linear(2, 2), strategy="full", on_error="warn") as checkpointer:
        checkpointer.resume()
        checkpointer.step()
        checkpointer.wait()
        ckptstore.open(tmp_path / "s").writer().close()
        pending = checkpointer.step()
        with pytest.warns(UnsavedStepWarning, match="no step is saved any more"):
            checkpointer.wait()
        assert pending is not None
        assert checkpointer.step() is None
    assert checkpointer.steps_done == 3


def test_a_fenced_writer_is_reported_at_every_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", model=torch.nn.Linear(2, 2), strategy="full") as checkpointer:
        checkpointer.resume()
        checkpointer.step()
        checkpointer.wait()
        ckptstore.open(tmp_path / "s").writer().close()
        checkpointer.step()
        with pytest.raises(ckptstore.FencedError):
            checkpointer.wait()
        for _ in range(2):
            with pytest.raises(ckptstore.FencedError):
                checkpointer.step()


def test_a_fork_is_refused_before_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it waits for the save that was in flight at the fork, whose thread it lacks: its slot never becomes
    free."""
    create, free = LocalBackend.create, threading.Event()

    def held(backend: LocalBackend, key: str, data: bytes) -> None:
        free.wait(60)
        create(backend, key, data)

    script = Script()
    with Checkpointer(tmp_path / "s", **script.parts(), strategy="full", max_in_flight=1) as checkpointer:
        checkpointer.resume()
        (tokens,) = next(endless(checkpointer.loader))
        for number in range(3):
            script.one(tokens, number)
            checkpointer.step()
        checkpointer.wait()
        monkeypatch.setattr(LocalBackend, "create", held)
        try:
            script.one(tokens, 3)
            checkpointer.step()
            victim = os.fork()
            if not victim:
                status = 1
                try:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's handler needs a running interpreter
                    signal.alarm(20)
                    script.optimizer.step()
                    checkpointer.step()
                except WriterClosedError as error:
                    status = 2 * ("not to its fork" not in str(error))
                finally:
                    os._exit(status)
            _, status = os.waitpid(victim, 0)
        finally:
            free.set()
        assert os.waitstatus_to_exitcode(status) == 0
    assert [info.step for info in ckptstore.open(tmp_path / "s").checkpoints()] == [1, 2, 3, 4]


def test_an_optimizer_that_never_steps_is_remarked_upon(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    given, used = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with Checkpointer(tmp_path / "s", model=model, optimizer=given, strategy="full") as checkpointer:
        checkpointer.resume()
        for _ in range(99):
            used.step()
            assert checkpointer.step() is None
        with pytest.warns(UnsavedStepWarning, match="no optimizer that the Checkpointer was given has stepped"):
            checkpointer.step()


def test_diffs_that_explain_nothing_cause_one_warning(tmp_path: Path) -> None:
    class Odd(torch.optim.AdamW):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(torch.randn_like(parameter) * 0.3)
                    self.state[parameter]["exp_avg"] = torch.randn_like(parameter)
                    self.state[parameter]["exp_avg_sq"] = torch.randn_like(parameter).square()
                    self.state[parameter]["step"] = torch.tensor(2.0)

    model = torch.nn.Linear(300, 300)
    optimizer = Odd(model.parameters())
    with (
        warnings.catch_warnings(record=True) as caught,
        Checkpointer(tmp_path / "s", model=model, optimizer=optimizer, strategy="gradient") as checkpointer,
    ):
        warnings.simplefilter("always")
        checkpointer.resume()
        for _ in range(8):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            checkpointer.step()
            checkpointer.wait()
    told = [str(one.message) for one in caught if one.category is ckptstore.UnexplainedStepWarning]
    assert len(told) == 1
    assert "its own arithmetic" in told[0]


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "none"},
        {"on_error": "ignore"},
        {"save_every": 0},
        {"keep_last": 0},
        {"keep_best": ""},
        {"keep": ["newest:3"]},
        {"keep": ["last:3"], "keep_last": 3},
        {"deadline_seconds": 0},
        {"no_such_option": 1},
        {"optimizer": object()},
        {"scheduler": object()},
        {"extra": {"x": object()}},
        {"extra": 3},
        {"save_every": 2, "strategy": "gradient"},
        {"model": 3},
    ],
    ids="-".join,
)
def test_invalid_arguments_are_refused_before_anything_is_opened(tmp_path: Path, options: Any) -> None:
    with pytest.raises(UsageError):
        Checkpointer(tmp_path / "s", **({"model": torch.nn.Linear(1, 1)} | options))
    assert not (tmp_path / "s").exists()


# -- signals, deadlines, ends


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    script = Script()
    optimizer = script.optimizer
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    threads = set(threading.enumerate())
    hooks = [
        dict(one)
        for one in (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            optimizer._optimizer_load_state_dict_pre_hooks,
        )
    ]
    with Checkpointer(tmp_path / "s", **script.parts(), strategy="gradient", keep_last=1) as checkpointer:
        checkpointer.resume()
        assert signal.getsignal(signal.SIGUSR1) != handlers[1]
        script.one(torch.arange(8), 0)
        checkpointer.step()
    checkpointer.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)  # one that was told to stop may still be ending
    assert set(threading.enumerate()) <= threads  # those of others may end
    assert hooks == [
        dict(one)
        for one in (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            optimizer._optimizer_load_state_dict_pre_hooks,
        )
    ]
    with pytest.raises(WriterClosedError):
        checkpointer.step()


class Board:
    """The used part of a `SummaryWriter`."""

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points.setdefault(name, []).append((step, value))


def test_metrics_and_saves_are_drawn(tmp_path: Path) -> None:
    board, told = Board(), []
    losses = Script().run(tmp_path / "run", 4, tensorboard=board, on_metrics=told.append, strategy="gradient")
    assert board.points["loss"] == list(zip(range(1, 5), losses, strict=True))
    assert [step for step, _ in board.points["ckptstore/stall"]] == [1, 2, 3, 4]
    ratios = [value for _, value in board.points["ckptstore/ratio"]]
    assert ratios == [one.stored / one.nbytes for one in told]
    assert ratios[-1] < 0.9 < ratios[0]
    assert {"durable", "stored", "waited", "in_flight", "lag"} <= {name.rpartition("/")[2] for name in board.points}
    with pytest.raises(UsageError, match="Linear has no add_scalar"):
        Script().run(tmp_path / "run", 5, tensorboard=torch.nn.Linear(1, 1))


def test_outside_the_main_thread_no_handler_is_set(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with Checkpointer(tmp_path / "s", model=torch.nn.Linear(1, 1), strategy="full") as checkpointer:
            checkpointer.resume()
            seen.append(signal.getsignal(signal.SIGTERM))
            checkpointer.step()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    assert ckptstore.open(tmp_path / "s").latest_step() == 1


def test_sigusr1_saves_the_next_step_and_is_handed_on(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        store = ckptstore.open(tmp_path / "s")
        with Checkpointer(store, model=torch.nn.Linear(1, 1), strategy="full", save_every=100) as checkpointer:
            checkpointer.resume()
            checkpointer.step()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert checkpointer.step() is not None
            assert store.latest_step() == 2  # durable by now
            assert checkpointer.step() is None
            assert not checkpointer.should_stop
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_last_step_before_the_deadline_is_saved(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "s")
    with Checkpointer(
        store, model=torch.nn.Linear(1, 1), strategy="full", save_every=10**6, deadline_seconds=1.5
    ) as checkpointer:
        checkpointer.resume()
        while not checkpointer.should_stop:
            checkpointer.step()
            time.sleep(0.005)
        assert store.latest_step() == checkpointer.steps_done


SCRIPT = """
import signal, sys, time, torch
from ckptstore.training import Checkpointer
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = Checkpointer("s", model=model, optimizer=optimizer, {options})
checkpointer.resume()
for step in range({steps}):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step()
{end}
"""


def script(
    warm: Warm, tmp_path: Path, end: str, steps: int = 5, options: str = "strategy='gradient', batch=100"
) -> Any:
    code = SCRIPT.format(end=textwrap.dedent(end), steps=steps, options=options)
    return warm.start([sys.executable, "-c", code], cwd=tmp_path, stdout=PIPE, text=True)


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise KeyError", 1)])
def test_an_ordinary_end_without_close_writes_what_waits(warm: Warm, tmp_path: Path, end: str, status: int) -> None:
    process = script(warm, tmp_path, end)
    process.communicate(timeout=100)
    assert process.returncode == status
    assert ckptstore.open(tmp_path / "s").latest_step() == 5


def test_sigterm_saves_the_step_under_way_and_ends_the_process(warm: Warm, tmp_path: Path) -> None:
    end = """
    print("ready", flush=True)
    while True:
        time.sleep(0.3)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(save=False)
    """
    process = script(warm, tmp_path, end)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGTERM
    assert (ckptstore.open(tmp_path / "s").latest_step() or 0) > 5  # how far it gets depends on scheduling


def test_a_handler_of_sigterm_above_that_calls_the_checkpointers_keeps_no_process_alive(
    warm: Warm, tmp_path: Path
) -> None:
    end = """
    import signal
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))
    print("ready", flush=True)
    time.sleep(60)
    """
    process = script(warm, tmp_path, end, options="strategy='gradient', batch=100, grace_seconds=0.2")
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGTERM
    assert ckptstore.open(tmp_path / "s").latest_step() == 5


def test_sigterm_ends_a_forked_child_at_once(warm: Warm, tmp_path: Path) -> None:
    """It has no loop whose step it could wait for."""
    end = """
    import os
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), 15)
        time.sleep(60)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    process = script(warm, tmp_path, end, options="strategy='full', grace_seconds=1000")
    assert process.communicate(timeout=100)[0] == "-15\n"
    assert process.returncode == 0


def test_a_request_to_save_that_is_sent_to_the_whole_job_ends_no_forked_child(warm: Warm, tmp_path: Path) -> None:
    """A scheduler signals the process group: workers of a DataLoader get SIGUSR1, too."""
    end = """
    import os
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), 10)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    process = script(warm, tmp_path, end, options="strategy='full'")
    assert process.communicate(timeout=100)[0] == "7\n"
    assert process.returncode == 0


def test_sigterm_waits_no_longer_than_its_grace(warm: Warm, tmp_path: Path) -> None:
    end = """
    print("ready", flush=True)
    time.sleep(300)
    """
    process = script(warm, tmp_path, end, options="strategy='gradient', batch=100, grace_seconds=0.2")
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.terminate()
    process.communicate(timeout=100)
    assert time.monotonic() - began < 60
    assert process.returncode == -signal.SIGTERM
    assert ckptstore.open(tmp_path / "s").latest_step() == 5
