"""Frozen weights: stored once by default, or left out by ``only="trainable"``; a change of them is never missed."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.errors import DivergedReplicasError, StateMismatchError, UsageError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from ckptstore.training.strategies import Circumstances, chosen, frozen_bytes, state_bytes  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox  # noqa: E402
from tests.forms import short_or  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.training.inside import plan_nothing  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 256
FROZEN = 2 * 4 * WIDTH * (WIDTH + 1)
"""Bytes of the two frozen layers."""
MOVED = 3 * 2 * 4 * 2 * 2 * WIDTH
"""Bytes of the adapters and their moments."""


class Adapter(torch.nn.Module):  # type: ignore[misc]
    """A frozen layer, and a product of two thin matrices that is added to it (LoRA)."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(rank, WIDTH) / WIDTH)
        self.b = torch.nn.Parameter(torch.zeros(WIDTH, rank))

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.a.T @ self.b.T


class Script:
    """A script that tunes adapters of a frozen model."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(Adapter(), torch.nn.Dropout(0.1), Adapter())
        self.optimizer = torch.optim.AdamW([one for one in self.model.parameters() if one.requires_grad], lr=1e-3)

    @property
    def weight(self) -> Any:
        """A frozen one."""
        return self.model[0].base.weight

    def one(self) -> None:
        x = torch.randn(4, WIDTH)
        (self.model(x) - x.roll(1, 1)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checkpointer(self, store: Any, **options: Any) -> Checkpointer:
        return Checkpointer(store, model=self.model, optimizer=self.optimizer, **options)

    def run(self, store: Any, until: int, between: Callable[[int], object] = lambda _: None, **options: Any) -> None:
        """Resume and train. `between` is called before each step with its number."""
        with self.checkpointer(store, **options) as checkpointer:
            for step in range(checkpointer.resume(), until):
                between(step + 1)
                self.one()
                checkpointer.step()

    def everything(self) -> Any:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "at": torch.get_rng_state()}


def copied(script: Script) -> dict[str, Any]:
    return OrderedDict((name, one.clone()) for name, one in script.model.state_dict().items())


# -- stored once


@pytest.mark.parametrize("strategy", ["auto", "delta", "gradient"])
def test_frozen_weights_are_stored_once(tmp_path: Path, strategy: str) -> None:
    script, seen, steps = Script(), {}, short_or(12, 300)
    options: dict[str, Any] = {"strategy": strategy, "full_every": 4, "on_metrics": None}
    found: list[Any] = []
    options["on_metrics"] = found.append

    def keep(step: int) -> None:
        seen[step - 1] = copied(script)

    script.run(tmp_path / "s", steps, keep, **options)
    store = ckptstore.open(tmp_path / "s")
    kinds = [info.kind for info in store.checkpoints()]
    assert kinds[0] == "full"
    assert set(kinds[1:]) == ({"delta"} if strategy == "delta" else {"delta", "gradient"}), "of 4 steps one is a delta"
    assert max(one.stored for one in found[1:]) < MOVED + FROZEN // 20
    assert store.verify(deep=True).ok
    for step in range(1, steps):
        same(store.load(step)["model"], seen[step])
    depth = {len(store.explain(step).steps) for step in range(2, steps + 1)}
    assert depth == ({2} if strategy == "delta" else {2, 3, 4, 5}), "a full, a delta on it, and the steps since"


def test_auto_takes_what_stores_frozen_weights_once() -> None:
    usual: dict[str, Any] = {"nbytes": 500_000, "rate": 1e10, "spare": 0, "unpredicted": None}
    assert chosen(Circumstances(**usual))[0] == "full"
    assert chosen(Circumstances(**usual, frozen=249_999))[0] == "full"
    strategy, why = chosen(Circumstances(**usual, frozen=476_000))
    assert strategy == "gradient"
    assert why == "465 KiB of 488 KiB of state are frozen, and are stored once; the optimizers' steps can be predicted"
    assert chosen(Circumstances(**{**usual, "unpredicted": "why"}, frozen=476_000))[0] == "delta"
    assert chosen(Circumstances(**{**usual, "nbytes": 65_000}, frozen=65_000))[0] == "full", "too small to matter"


def test_the_forecast_of_space_counts_frozen_weights_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ckptstore.training"):
        Script().run(tmp_path / "s", 3, full_every=4)
    (said,) = [one.getMessage() for one in caplog.records if "in 1,000 steps" in one.getMessage()]
    mebibytes = float(re.findall(r"about ([\d.]+) MiB", said)[0])
    assert mebibytes < (FROZEN + 1000 * MOVED) / 2**20, "250 fulls take 157 MiB"


def test_frozen_parameters_have_no_moments() -> None:
    script = Script()
    for optimizer in (script.optimizer, torch.optim.AdamW(script.model.parameters())):
        assert state_bytes([script.model], [optimizer]) == FROZEN + MOVED
    assert frozen_bytes([script.model]) == FROZEN


@pytest.mark.parametrize(("strategy", "planned"), [("delta", False), ("gradient", True)])
def test_a_frozen_weight_that_is_written_is_stored(tmp_path: Path, strategy: str, planned: bool) -> None:
    script, seen = Script(), {}

    def write(step: int) -> None:
        seen[step - 1] = copied(script)
        if step == 5:
            script.weight.data[3, 4] = 7.0  # torch does not count such a change
        if step == 7:
            with torch.no_grad():
                script.weight.add_(1.0)

    with script.checkpointer(tmp_path / "s", strategy=strategy) as checkpointer:
        checkpointer.resume()
        for step in range(1, 10):
            write(step)
            script.one()
            checkpointer.step()
            if not planned:
                plan_nothing(checkpointer)
    store = ckptstore.open(tmp_path / "s")
    for step in range(1, 9):
        same(store.load(step)["model"], seen[step])


@pytest.mark.parametrize("strategy", ["delta", "gradient"])
def test_a_layer_that_is_trained_later(tmp_path: Path, strategy: str) -> None:
    def unfreeze(script: Script) -> Callable[[int], None]:
        def thaw(step: int) -> None:
            if step >= 6 and not script.weight.requires_grad:
                script.weight.requires_grad_(True)
                script.optimizer.add_param_group({"params": [script.weight]})

        return thaw

    whole = Script()
    whole.run(tmp_path / "whole", 10, unfreeze(whole), strategy=strategy)
    first = Script()
    first.run(tmp_path / "s", 8, unfreeze(first), strategy=strategy)
    again = Script()
    unfreeze(again)(6)
    again.run(tmp_path / "s", 10, strategy=strategy)
    same(again.everything(), whole.everything())


@pytest.mark.parametrize("strategy", ["delta", "gradient"])
def test_the_full_with_the_frozen_weights_outlives_its_retirement(tmp_path: Path, strategy: str) -> None:
    script = Script()
    script.run(tmp_path / "s", 12, strategy=strategy, full_every=4, keep_last=2)
    store = ckptstore.open(tmp_path / "s")
    assert [info.step for info in store.checkpoints()] == [11, 12]
    store.gc()
    assert store.verify(deep=True).ok
    same(store.load()["model"], copied(script))
    # Two fulls at most: what was there, and what compacting makes.
    stored = sum(one.stat().st_size for one in (tmp_path / "s" / "seg").rglob("*.safetensors"))
    assert stored < 2 * (FROZEN + MOVED)
    store.compact(take_over=True)
    store.gc()
    assert store.verify(deep=True).ok
    same(store.load()["model"], copied(script))
    store.export("latest", tmp_path / "all.safetensors")
    assert (tmp_path / "all.safetensors").stat().st_size > FROZEN
    store.copy(tmp_path / "copy")
    store.sync(tmp_path / "remote")
    (tmp_path / "s").rename(tmp_path / "gone")
    for place in ("copy", "remote"):
        other = ckptstore.open(tmp_path / place)
        assert other.verify(deep=True).ok
        same(other.load()["model"], copied(script))
    again = Script()
    again.run(tmp_path / "copy", 12, strategy=strategy)
    same(again.everything(), script.everything())


# -- left out


def compare_after_resume(tmp_path: Path, strategy: str, **options: Any) -> None:
    whole = Script()
    whole.run(tmp_path / "whole", 9, strategy=strategy, **options)
    for until in (3, 6, 9):
        parts = Script()
        parts.run(tmp_path / "parts", until, strategy=strategy, **options)
    same(parts.everything(), whole.everything())


@pytest.mark.parametrize("strategy", ["auto", "full", "delta", "gradient"])
def test_only_what_is_trained_is_stored(tmp_path: Path, strategy: str) -> None:
    found: list[Any] = []
    compare_after_resume(tmp_path, strategy, only="trainable", on_metrics=found.append)
    store = ckptstore.open(tmp_path / "whole")
    assert set(store.load()["model"]) == {"0.a", "0.b", "2.a", "2.b"}
    assert max(one.stored for one in found) < MOVED + 20_000
    assert store.verify(deep=True).ok


@pytest.mark.parametrize(
    ("strategy", "only"), [("full", "trainable"), ("delta", None), ("gradient", None), ("gradient", "trainable")]
)
def test_ranks_store_frozen_weights_once(tmp_path: Path, strategy: str, only: Any) -> None:
    found: list[Any] = []
    scripts = ranks(tmp_path / "s", [Script(), Script()], 6, found, strategy=strategy, only=only)
    store = ckptstore.open(tmp_path / "s")
    assert store.verify(deep=True).ok
    later = max(one.stored for one in found if one.step > 1)
    assert later < 2 * MOVED + FROZEN // 10
    for step in (3, 6):
        assert set(store.load(step)["model"]) == {"0.a", "0.b", "2.a", "2.b"} or only is None
    again = ranks(tmp_path / "s", [Script(), Script()], 6, [], strategy=strategy, only=only)
    for one, other in zip(again, scripts, strict=True):
        same(one.model.state_dict(), other.model.state_dict())


def test_ranks_with_other_frozen_weights_are_refused(tmp_path: Path) -> None:
    scripts = [Script(), Script()]
    for rank, script in enumerate(scripts):
        script.model[0].unused = torch.nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
    with pytest.raises(DivergedReplicasError, match=r"script\.left_out"):
        ranks(tmp_path / "s", scripts, 1, [], strategy="full", only="trainable")


def ranks(store: Path, scripts: list[Script], until: int, found: list[Any], **options: Any) -> list[Script]:
    """Train as ranks that see the same batches; raises the first error."""
    box, errors = LocalMailbox(), []
    turn = threading.Barrier(len(scripts))

    def train(number: int) -> None:
        try:
            with scripts[number].checkpointer(
                store, group=Group(number, len(scripts), box), rank_timeout=60, on_metrics=found.append, **options
            ) as checkpointer:
                for step in range(checkpointer.resume(), until):
                    turn.wait(60)
                    if number == 0:
                        torch.manual_seed(step)
                        scripts[0].one()
                    turn.wait(60)
                    if number:
                        torch.manual_seed(step)
                        scripts[number].one()
                    turn.wait(60)
                    checkpointer.step()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)
            turn.abort()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(len(scripts))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
    return scripts


@pytest.mark.parametrize(("strategy", "planned"), [("full", True), ("delta", True), ("gradient", False)])
def test_a_weight_that_changes_is_stored_after_all(tmp_path: Path, strategy: str, planned: bool) -> None:
    script, seen = Script(), {}
    with script.checkpointer(tmp_path / "s", strategy=strategy, only="trainable") as checkpointer:
        checkpointer.resume()
        for step in range(1, 9):
            if step == 4:
                script.weight.data[3, 4] = 7.0  # torch does not count such a change
            if step == 6:
                script.weight.data[3, 5] = 8.0
            script.one()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                checkpointer.step()
            told = [str(one.message) for one in said if one.category is DeterminismWarning]
            assert len(told) == (step == 4), told
            assert not told or "0.base.weight" in told[0]
            seen[step] = copied(script)
            if not planned:
                plan_nothing(checkpointer)
    store = ckptstore.open(tmp_path / "s")
    for step in range(1, 9):
        model = store.load(step)["model"]
        assert ("0.base.weight" in model) == (step >= 4)
        assert "0.base.bias" not in model
        again = Script()
        with again.checkpointer(tmp_path / "s", only="trainable") as checkpointer:
            checkpointer.resume(step)
        same(copied(again), seen[step])


@pytest.mark.filterwarnings("ignore:.*have changed since")
def test_one_weight_changes_as_another_changes_back(tmp_path: Path) -> None:
    script, seen = Script(), {}
    loaded, other = script.weight.detach().clone(), script.model[2].base.weight

    def write(step: int) -> None:
        seen[step - 1] = copied(script)
        if step == 3:
            script.weight.data.fill_(7.0)
        if step == 6:
            script.weight.data.copy_(loaded)
            other.data.fill_(8.0)

    script.run(tmp_path / "s", 8, write, only="trainable", strategy="full")
    for step in range(1, 8):
        again = Script()
        with again.checkpointer(tmp_path / "s", only="trainable") as checkpointer:
            checkpointer.resume(step)
        same(copied(again), seen[step])


def test_a_restored_change_is_stored_again(tmp_path: Path) -> None:
    script = Script()
    with pytest.warns(DeterminismWarning, match="have changed since"):
        script.run(tmp_path / "s", 3, script.weight.data.fill_, only="trainable")
    again = Script()
    with pytest.warns(DeterminismWarning, match="have changed since"):
        again.run(tmp_path / "s", 5, only="trainable")
    assert bool((again.weight == 3).all())
    assert bool((ckptstore.open(tmp_path / "s").load()["model"]["0.base.weight"] == 3).all())


def test_a_layer_that_is_trained_and_frozen_again_is_stored(tmp_path: Path) -> None:
    script = Script()

    def thaw(step: int) -> None:
        if step == 3:
            script.weight.requires_grad_(True)
            script.optimizer.add_param_group({"params": [script.weight]})
        if step == 5:
            script.weight.requires_grad_(False)

    with pytest.warns(DeterminismWarning, match="have changed since"):
        script.run(tmp_path / "s", 6, thaw, only="trainable", strategy="full")
    store = ckptstore.open(tmp_path / "s")
    assert ["0.base.weight" in store.load(step)["model"] for step in range(1, 7)] == [False, False, *[True] * 4]
    same(store.load(6)["model"]["0.base.weight"], script.weight.detach())


@pytest.mark.parametrize("only", [None, "trainable"])
def test_another_base_is_refused(tmp_path: Path, only: Any) -> None:
    Script().run(tmp_path / "s", 2, only="trainable")
    other = Script(seed=2)
    before = copied(other)
    with other.checkpointer(tmp_path / "s", only=only) as checkpointer:
        with pytest.raises(StateMismatchError, match=r"only='trainable'") as found:
            checkpointer.resume()
        assert [one.partition(":")[0] for one in found.value.differences] == [
            f"model.{layer}.base.{name}" for layer in (0, 2) for name in ("weight", "bias")
        ]
        same(copied(other), before)
        with pytest.warns(DeterminismWarning, match="left out of the checkpoint"):
            assert checkpointer.resume(strict=False) == 2
    after = copied(other)
    assert not torch.equal(after.pop("0.a"), before["0.a"])
    assert all(torch.equal(one, before[name]) for name, one in after.items() if "base" in name)


def test_a_base_of_another_type_or_form_is_refused(tmp_path: Path) -> None:
    Script().run(tmp_path / "s", 2, only="trainable")
    half = Script()
    half.model[0].base.half()
    with half.checkpointer(tmp_path / "s") as checkpointer, pytest.raises(StateMismatchError, match="another type"):
        checkpointer.resume()
    wide = Script()
    with torch.no_grad():
        wide.model[0].base.bias.zero_()
    wide.run(tmp_path / "zeros", 2, only="trainable")
    wide.model[0].base.bias = torch.nn.Parameter(torch.zeros(1, WIDTH), requires_grad=False)
    with wide.checkpointer(tmp_path / "zeros") as checkpointer, pytest.raises(StateMismatchError, match="or shape"):
        checkpointer.resume()
    small = Script()
    small.model[2].base = torch.nn.Identity()
    with (
        small.checkpointer(tmp_path / "s") as checkpointer,
        pytest.raises(StateMismatchError, match=r"left out 2 frozen weights .* does not have"),
    ):
        checkpointer.resume()


def test_with_and_without_the_option_runs_continue_each_other(tmp_path: Path) -> None:
    whole = Script()
    whole.run(tmp_path / "whole", 9)
    for until, only in ((3, None), (6, "trainable"), (9, None)):
        parts = Script()
        parts.run(tmp_path / "parts", until, only=only)
    same(parts.everything(), whole.everything())
    store = ckptstore.open(tmp_path / "parts")
    assert [("0.base.weight" in store.load(step)["model"]) for step in (3, 4, 6, 7)] == [True, False, False, True]


def test_several_models(tmp_path: Path) -> None:
    def run(store: Path, until: int, kind: type) -> Any:
        torch.manual_seed(1)
        models = {"one": Adapter(), "two": Adapter(), "all": torch.nn.Linear(3, 3)}
        given = models if kind is dict else list(models.values())
        trained = [one for model in models.values() for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(trained, 0.1)
        with Checkpointer(store, model=given, optimizer=optimizer, only="trainable") as checkpointer:
            for _ in range(checkpointer.resume(), until):
                x = torch.randn(2, WIDTH)
                (models["two"](models["one"](x)).square().mean() + models["all"](x[:, :3]).mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
        return {name: one.state_dict() for name, one in models.items()}

    for kind in (dict, list):
        whole = run(tmp_path / f"{kind}-whole", 4, kind)
        run(tmp_path / f"{kind}", 2, kind)
        same(run(tmp_path / f"{kind}", 4, kind), whole)
        state = ckptstore.open(tmp_path / f"{kind}").load()["model"]
        assert set(state["two"] if kind is dict else state[1]) == {"a", "b"}


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only: 'frozen'"):
        Script().checkpointer(tmp_path / "s", only="frozen")
