"""Snapshots layer by layer beside real training: each equals a blocking save of that step."""

from __future__ import annotations

import copy
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.frameworks.torch_tensors import TorchSource  # noqa: E402
from ckptstore.training import LayerwiseSnapshots  # noqa: E402
from ckptstore.training.layerwise.layers import layers_of  # noqa: E402
from tests import warmth  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.training import inside  # noqa: E402
from tests.waiting import until, until_it_waits, waits  # noqa: E402

WIDTH = 96


class Model(torch.nn.Module):  # type: ignore[misc]
    """Tied weights, BatchNorm (its buffers change in forward), a frozen layer, dropout, and one that is rarely used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, WIDTH)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.seldom = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any, *, all_of_it: bool) -> Any:
        x = self.norm(self.hidden(self.embed(tokens)))
        x = torch.nn.functional.dropout(self.frozen(x), 0.1)
        return self.head(self.seldom(x) if all_of_it else x)


class Training:
    """A run with everything in its state that a resume needs."""

    def __init__(self, make: Callable[[Sequence[Any]], Any], *, of: str = "model", in_backward: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Model()
        moved = [one for one in self.model.parameters() if one.requires_grad]
        if of == "model":
            groups = [moved]
        elif of == "module":
            found = (
                [one for one in module.parameters(recurse=False) if one.requires_grad]
                for module in self.model.modules()
            )
            seen: set[int] = set()
            groups = [[one for one in group if id(one) not in seen and not seen.add(id(one))] for group in found]
        else:
            groups = [[one] for one in moved]
        self.optimizers = [make(group) for group in groups if group]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in self.optimizers]
        self.in_backward = in_backward
        self.losses: list[float] = []
        self.done = 0
        if in_backward:
            for parameter, optimizer in zip(moved, self.optimizers, strict=True):
                parameter.register_post_accumulate_grad_hook(_stepping(optimizer))

    def step(self) -> None:
        self.done += 1
        tokens = torch.randint(0, 40, (16,))
        logits = self.model(tokens, all_of_it=self.done % 3 != 2)
        loss = torch.nn.functional.cross_entropy(logits, tokens.roll(1))
        loss.backward()
        if not self.in_backward:
            for optimizer in self.optimizers:
                optimizer.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        self.losses.append(loss.item())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "schedulers": [one.state_dict() for one in self.schedulers],
            "random": torch.get_rng_state(),
            "losses": list(self.losses),
            "done": self.done,
        }


def _stepping(optimizer: Any) -> Callable[[Any], None]:
    def hook(_: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


KINDS: dict[str, Callable[[], Training]] = {
    "one AdamW": lambda: Training(lambda p: torch.optim.AdamW(p, foreach=False)),
    "foreach AdamW": lambda: Training(lambda p: torch.optim.AdamW(p, foreach=True)),
    "fused AdamW": lambda: Training(lambda p: torch.optim.AdamW(p, fused=True)),
    "amsgrad": lambda: Training(lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True)),
    "SGD": lambda: Training(lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": lambda: Training(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "optimizer per layer": lambda: Training(torch.optim.AdamW, of="module"),
    "optimizer in backward": lambda: Training(torch.optim.AdamW, of="parameter", in_backward=True),
    "fused in backward": lambda: Training(lambda p: torch.optim.AdamW(p, fused=True), of="parameter", in_backward=True),
    "momentum in backward": lambda: Training(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), of="parameter", in_backward=True
    ),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Every tensor is copied in two halves, with so many seconds between them."""
    pause = [0.0]
    read = TorchSource.read

    def in_halves(self: TorchSource, offset: int, out: Any) -> None:
        middle = len(out) // 2
        read(self, offset, out[:middle])
        time.sleep(pause[0])
        read(self, offset + middle, out[middle:])

    def begin(seconds: float) -> None:
        pause[0] = seconds
        monkeypatch.setattr(TorchSource, "view", lambda self: None)
        monkeypatch.setattr(TorchSource, "read", in_halves)

    yield begin
    pause[0] = 0.0


class Gated:
    """Copies that stop half-way until the optimizer that owns the tensor waits for them, or has changed it.

    Without a gate, or with one at the wrong place, their second half is of the next step.
    """

    def __init__(self, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
        self.optimizers = training.optimizers
        self.layers = [layer.optimizers for layer in layers_of(training.model, training.optimizers, 0)]
        self.begun = [0] * len(self.optimizers)  # steps of each optimizer
        self.taken = [0] * len(self.optimizers)
        self.over = threading.Event()
        self.changed = threading.Condition()
        self.read = TorchSource.read
        for number, optimizer in enumerate(self.optimizers):
            optimizer.register_step_pre_hook(self.counting(self.begun, number))
            optimizer.register_step_post_hook(self.counting(self.taken, number))
        monkeypatch.setattr(TorchSource, "view", lambda source: None)
        monkeypatch.setattr(TorchSource, "read", _method(self.copy))

    def counting(self, steps: list[int], number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            with self.changed:
                steps[number] += 1
                self.changed.notify_all()

        return hook

    def owners(self, source: TorchSource) -> frozenset[int]:
        """The optimizers of the tensor's layer."""
        address = source.tensor.data_ptr()
        for number, optimizer in enumerate(self.optimizers):
            for parameter in optimizer.param_groups[0]["params"]:
                kept = optimizer.state.get(parameter, {}).values()
                if any(isinstance(one, torch.Tensor) and one.data_ptr() == address for one in (parameter, *kept)):
                    return next(layer for layer in self.layers if number in layer)
        return frozenset()

    def copy(self, source: TorchSource, offset: int, out: Any) -> None:
        middle, owners = len(out) // 2, self.owners(source)
        self.read(source, offset, out[:middle])
        if owners and not self.over.is_set():
            with self.changed:
                before = sum(self.taken[one] for one in owners)
                self.changed.wait_for(lambda: sum(self.begun[one] for one in owners) > before or self.over.is_set(), 60)
            until(
                lambda: (
                    waits(threading.main_thread(), "LayeredSave.wait")
                    or sum(self.taken[one] for one in owners) > before
                    or self.over.is_set()
                )
            )
        self.read(source, offset + middle, out[middle:])

    def let_go(self) -> None:
        self.over.set()
        with self.changed:
            self.changed.notify_all()


def _method(call: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments: call(*arguments)  # noqa: PLW0108  # a bound method would not get the instance


def run(
    training: Training,
    store: ckptstore.Store,
    *,
    steps: int = 4,
    early: bool = True,
    last: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[dict[int, Any], Any]:
    """Train and save every step -> a deep copy of each state, made when it was saved, and the report."""
    states: dict[int, Any] = {}
    with (
        store.writer(poll_seconds=None, max_in_flight=steps, threads=4 * steps) as writer,
        LayerwiseSnapshots(
            writer, training.model, training.optimizers, training.state, packed=0, **options
        ) as snapshots,
    ):
        for step in range(1, steps + 1):
            if early:
                snapshots.begin(step)
            training.step()
            snapshots.save(step)
            states[step] = copy.deepcopy(training.state())
        last()
        writer.wait()
        report = snapshots.report()
    return states, report


def check(store: ckptstore.Store, states: dict[int, Any]) -> None:
    assert [info.step for info in store.checkpoints()] == list(states)
    for step, state in states.items():
        same(state, store.load(step))


# ---------------------------------------------------------------------------------------------------------- bit for bit


@pytest.mark.parametrize("early", [False, True], ids=["saved", "begun"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_checkpoint_mixes_steps(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, kind: str, early: bool
) -> None:
    training = KINDS[kind]()
    training.step()
    with monkeypatch.context() as patch:
        gated = Gated(training, patch)
        states, report = run(training, store, early=early, last=gated.let_go)
    check(store, states)
    assert report.saves == 4
    assert report.restarts == report.copied_again == report.refused == 0
    waited = [gate.waited for gate in report.gates]
    assert max(waited) >= 3 if len(training.optimizers) == 1 else min(waited) >= 2, waited


@pytest.mark.parametrize("early", [False, True], ids=["saved", "begun"])
@pytest.mark.parametrize("kind", ["fused AdamW", "optimizer in backward"])
def test_a_copy_on_the_device_waits_for_nothing(
    store: ckptstore.Store, slowly: Callable[[float], None], kind: str, early: bool
) -> None:
    training = KINDS[kind]()
    training.step()
    slowly(0.003)
    states, report = run(training, store, early=early, mode="device")
    slowly(0.0)
    check(store, states)
    assert report.waited_seconds == 0
    assert all(gate.passed and not gate.waited for gate in report.gates)
    assert report.restarts == report.copied_again == report.refused == 0


@pytest.mark.parametrize("kind", ["fused AdamW", "optimizer in backward"])
def test_straight_into_persistent_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    store = ckptstore.open(f"pmem://{tmp_path}/store")
    training = KINDS[kind]()
    with monkeypatch.context() as patch:
        training.step()
        gated = Gated(training, patch)
        states, report = run(training, store, mode="direct", last=gated.let_go)
    check(store, states)
    assert max(gate.waited for gate in report.gates) >= 3
    assert report.restarts == report.copied_again == 0


def test_a_device_without_memory_for_a_copy_is_read_as_it_is(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = KINDS["foreach AdamW"]()
    training.step()
    inside.fill_the_device(monkeypatch)
    with monkeypatch.context() as patch:
        gated = Gated(training, patch)
        states, report = run(training, store, mode="device", last=gated.let_go)
    check(store, states)
    assert report.refused == 4 * len(report.gates)


def test_a_checkpoint_is_the_one_that_a_blocking_save_makes(store: ckptstore.Store) -> None:
    other = ckptstore.open(f"memory://{uuid.uuid4().hex}")
    training = KINDS["foreach AdamW"]()
    with (
        store.writer(poll_seconds=None) as writer,
        other.writer(poll_seconds=None) as reference,
        LayerwiseSnapshots(writer, training.model, training.optimizers, training.state) as snapshots,
    ):
        for step in range(1, 4):
            training.step()
            pending = snapshots.save(step, metadata={"loss": training.losses[-1]}, tags="newest")
            wanted = reference.save(training.state(), step)
            info = pending.result(60)
            assert (info.state, info.nbytes, info.tensors) == (wanted.state, wanted.nbytes, wanted.tensors)
            assert info.metadata == {"loss": training.losses[-1]}
    assert store.checkpoint("tag:newest").step == 3


def test_training_is_what_it_is_without(store: ckptstore.Store) -> None:
    alone, watched = KINDS["optimizer in backward"](), KINDS["optimizer in backward"]()
    torch.manual_seed(1)
    for _ in range(5):
        alone.step()
    torch.manual_seed(1)
    run(watched, store, steps=5)
    same(alone.state(), watched.state())


@pytest.mark.parametrize("kind", ["foreach AdamW", "optimizer in backward", "momentum"])
def test_the_first_step_makes_the_optimizers_state(store: ckptstore.Store, kind: str) -> None:
    """Before it there is none to be copied: early copies are made again."""
    states, report = run(KINDS[kind](), store)
    check(store, states)
    assert report.restarts >= 1
    assert report.restarted == "the state has other tensors than when it was begun"


def test_resuming_from_one_gives_the_same_run(store: ckptstore.Store) -> None:
    training = KINDS["fused AdamW"]()
    states, _ = run(training, store, steps=4)
    other = KINDS["fused AdamW"]()
    state = store.load(2)
    other.model.load_state_dict(state["model"])
    for name in ("optimizers", "schedulers"):
        for one, saved in zip(getattr(other, name), state[name], strict=True):
            one.load_state_dict(saved)
    other.losses, other.done = state["losses"], state["done"]
    torch.set_rng_state(state["random"])
    for _ in range(2):
        other.step()
    same(states[4], other.state())


# ---------------------------------------------------------------------------------------------------------------- gates


def test_a_gate_waits_for_its_own_layer(store: ckptstore.Store, slowly: Callable[[float], None]) -> None:
    """Two optimizers; only the layer that is copied slowly makes its optimizer wait."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    begun, in_time = threading.Event(), list[bool]()
    optimizers[1].register_step_pre_hook(lambda *_: begun.set())  # before the gate's own
    with (
        store.writer(poll_seconds=None, threads=2) as writer,
        LayerwiseSnapshots(
            writer,
            [first, second],
            optimizers,
            lambda: {"first": first.state_dict(), "second": second.state_dict()},
            packed=0,
        ) as snapshots,
    ):
        assert [layer.name for layer in snapshots.layers] == ["0", "1"]
        second(first(torch.ones(3, 8))).sum().backward()
        threads: list[float] = []
        real = TorchSource.read

        def read(self: TorchSource, offset: int, out: Any) -> None:
            if self.tensor.data_ptr() == second.weight.data_ptr():
                in_time.append(begun.wait(120))  # the other's gate has let it pass
                until_it_waits(threading.main_thread(), "LayeredSave.wait")
                time.sleep(0.2)
            real(self, offset, out)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchSource, "view", lambda self: None)
            patch.setattr(TorchSource, "read", read)
            snapshots.save(1)
            for optimizer in optimizers:
                began = time.monotonic()
                optimizer.step()
                threads.append(time.monotonic() - began)
            writer.wait()
        gates = {gate.layer: gate for gate in snapshots.report().gates}
        assert in_time == [True]
        assert 0.1 < gates["1"].seconds <= threads[1]
        assert gates["0"].seconds <= threads[0]
        assert gates["1"].longest == gates["1"].seconds
        assert (gates["1"].passed, gates["1"].waited) == (1, 1)
        assert gates["1"].nbytes == 4 * (8 * 8 + 8)
        report = snapshots.report()
        assert report.copying_seconds >= 0.2
        assert report.overlapped_seconds == max(0.0, report.copying_seconds - report.waited_seconds)


def test_early_copies_begin_while_other_layers_are_still_updated(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = KINDS["optimizer in backward"]()
    training.step()
    events: list[str] = []
    with (
        store.writer(poll_seconds=None) as writer,
        LayerwiseSnapshots(writer, training.model, training.optimizers, training.state, packed=0) as snapshots,
    ):
        for number, optimizer in enumerate(training.optimizers):
            optimizer.register_step_post_hook(lambda *_, number=number: events.append(f"updated {number}"))
        inside.on_copies(snapshots, monkeypatch, lambda layer: events.append(f"copied {layer}"))
        snapshots.begin(1)
        training.step()
        training.step()
        snapshots.save(1).result(60)
    first = next(number for number, event in enumerate(events) if event.startswith("copied"))
    last = max(number for number, event in enumerate(events) if event.startswith("updated"))
    assert first < last - 3
    assert {event for event in events if event.startswith("copied")} == {
        f"copied {layer.name}" for layer in snapshots.layers
    }


def test_a_layer_that_is_updated_twice_is_copied_twice(store: ckptstore.Store, slowly: Callable[[float], None]) -> None:
    training = KINDS["optimizer per layer"]()
    training.step()
    slowly(0.002)
    with (
        store.writer(poll_seconds=None) as writer,
        LayerwiseSnapshots(writer, training.model, training.optimizers, training.state, packed=0) as snapshots,
    ):
        snapshots.begin(1)
        training.step()
        training.step()
        pending = snapshots.save(1)
        wanted = copy.deepcopy(training.state())
        training.step()
        pending.result(60)
        assert snapshots.report().copied_again == len(snapshots.layers)
    slowly(0.0)
    same(wanted, store.load(1))


def test_the_case_is_reported() -> None:
    with ckptstore.open(f"memory://{uuid.uuid4().hex}").writer(poll_seconds=None) as writer:

        def case(kind: str) -> str:
            training = KINDS[kind]()
            with LayerwiseSnapshots(writer, training.model, training.optimizers, training.state, packed=0) as snapshots:
                return snapshots.case

        assert case("fused AdamW").startswith(
            "one optimizer (fused AdamW) updates all 4 layers in one call: their gates"
        )
        assert case("optimizer per layer").startswith("4 optimizers update 4 layers (4 of them have one of their own)")
        assert "(4 of them have one of their own)" in case("optimizer in backward")


# --------------------------------------------------------------------------------------------------------------- layers


def test_small_neighbours_are_packed() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(10)))  # 40 400 bytes each
    one = [torch.optim.SGD(model.parameters(), lr=0.1)]
    assert [layer.name for layer in layers_of(model, one, 100_000)] == [f"{2 * n} to {2 * n + 1}" for n in range(5)]
    each = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    assert len(layers_of(model, each, 100_000)) == 5
    assert len(layers_of(model, each, 0)) == 10
    # Two optimizers that have more than a layer each: neither waits for the other's.
    two = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:5], model[5:])]
    layers = layers_of(model, two, 10 << 20)
    assert [(layer.name, layer.optimizers) for layer in layers] == [("0 to 4", {0}), ("5 to 9", {1})]


def test_tensors_that_two_layers_share_are_in_none() -> None:
    memory = torch.zeros(100)
    one, two = torch.nn.Module(), torch.nn.Module()
    one.weight, two.weight = torch.nn.Parameter(memory[:60]), torch.nn.Parameter(memory[40:])
    one.own = torch.nn.Parameter(torch.zeros(3))
    model = torch.nn.ModuleList([one, two])
    layers = layers_of(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 0)
    assert [(layer.name, [id(p) for p in layer.parameters]) for layer in layers] == [("0", [id(one.own)])]


def test_parameters_of_no_module_are_a_layer(store: ckptstore.Store) -> None:
    model, alone = torch.nn.Linear(3, 3), torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([*model.parameters(), alone], lr=0.1)
    layers = layers_of(model, [optimizer], 0)
    assert [layer.name for layer in layers] == ["Linear", "(parameters of no module)"]


# ---------------------------------------------------------------------------------------------------- changes elsewhere


def test_tensors_that_no_optimizer_owns_are_copied_at_once(
    store: ckptstore.Store, slowly: Callable[[float], None]
) -> None:
    training = KINDS["foreach AdamW"]()
    training.step()
    averaged = {name: one.clone() for name, one in training.model.state_dict().items()}

    def state() -> dict[str, Any]:
        return {
            **training.state(),
            "averaged": averaged,
            "half": training.model.hidden.weight.detach()[:7],
            "view": averaged,
        }

    with (
        store.writer(poll_seconds=None) as writer,
        LayerwiseSnapshots(writer, training.model, training.optimizers, state) as snapshots,
    ):
        slowly(0.002)
        pending = snapshots.save(1)
        slowly(0.0)
        wanted = copy.deepcopy(state())
        for one in averaged.values():
            one.add_(1)
        with torch.no_grad():
            training.model.frozen.weight.add_(1)
        training.model(torch.randint(0, 40, (16,)), all_of_it=True)
        pending.result(60)
        assert snapshots.report().immediate_bytes > sum(one.nbytes for one in averaged.values())
    same(wanted, store.load(1))


def test_weights_that_change_while_they_are_copied_fail_the_save_and_nothing_else(
    store: ckptstore.Store, slowly: Callable[[float], None]
) -> None:
    training = KINDS["foreach AdamW"]()
    training.step()
    with (
        store.writer(poll_seconds=None) as writer,
        LayerwiseSnapshots(writer, training.model, training.optimizers, training.state, packed=0) as snapshots,
    ):
        slowly(0.05)
        pending = snapshots.save(1)
        with torch.no_grad():
            training.model.hidden.weight.clamp_(-0.01, 0.01)
        training.step()
        with pytest.raises(ckptstore.StorageError, match=r"'hidden' changed while it was copied.*call Layerwise.*wait"):
            pending.result(60)
        pending = snapshots.save(2)
        snapshots.wait()
        with torch.no_grad():
            training.model.hidden.weight.clamp_(-0.001, 0.001)
        pending.result(60)
    assert [info.step for info in store.checkpoints()] == [2]


@pytest.mark.parametrize("through", ["torch", "data"])
def test_weights_that_change_after_an_early_copy_are_copied_again(store: ckptstore.Store, through: str) -> None:
    training = KINDS["optimizer per layer"]()
    training.step()
    with (
        store.writer(poll_seconds=None) as writer,
        LayerwiseSnapshots(writer, training.model, training.optimizers, training.state, packed=0) as snapshots,
    ):
        snapshots.begin(1)
        training.step()
        if through == "torch":  # it counts that, but not changes through .data
            while inside.copying(snapshots):
                time.sleep(0.001)
            with torch.no_grad():
                training.model.hidden.weight.clamp_(-0.01, 0.01)
        else:
            snapshots.wait()
            training.model.hidden.weight.data.clamp_(-0.01, 0.01)
        snapshots.save(1).result(60)
        assert snapshots.report().copied_again == (1 if through == "torch" else len(snapshots.layers))
    same(training.state(), store.load(1))


def test_loading_an_optimizers_state_waits(store: ckptstore.Store, slowly: Callable[[float], None]) -> None:
    training = KINDS["foreach AdamW"]()
    training.step()
    saved = copy.deepcopy(training.optimizers[0].state_dict())
    with (
        store.writer(poll_seconds=None) as writer,
        LayerwiseSnapshots(writer, training.model, training.optimizers, training.state) as snapshots,
    ):
        slowly(0.01)
        pending = snapshots.save(1)
        wanted = copy.deepcopy(training.state())
        training.optimizers[0].load_state_dict(saved)
        assert not inside.waits_for(snapshots)
        pending.result(60)
        slowly(0.0)
        snapshots.begin(2)
        training.step()
        snapshots.save(2).result(60)
    same(wanted, store.load(1))
    same(training.state(), store.load(2))


# --------------------------------------------------------------------------------------------------------------- misuse


def test_unsupported_optimizers(store: ckptstore.Store) -> None:
    training = KINDS["SGD"]()

    class Wrapper:
        optimizer = training.optimizers[0]

    with store.writer(poll_seconds=None) as writer:
        for optimizers, why in (
            (Wrapper(), "its .optimizer is one"),
            ([], "expected a torch.optim.Optimizer"),
            (None, "NoneType"),
        ):
            with pytest.raises(ckptstore.UsageError, match=why):
                LayerwiseSnapshots(writer, training.model, optimizers)  # type: ignore[arg-type]
        with pytest.raises(ckptstore.UsageError, match="it may be 'host', 'device', 'direct'"):
            LayerwiseSnapshots(writer, training.model, training.optimizers, mode="tape")  # type: ignore[arg-type]


def test_a_state_of_copies_is_refused_and_one_with_some_copies_causes_a_warning(store: ckptstore.Store) -> None:
    training = KINDS["momentum"]()
    training.step()
    with store.writer(poll_seconds=None) as writer:
        copies = LayerwiseSnapshots(
            writer, training.model, training.optimizers, lambda: copy.deepcopy(training.state()), packed=0
        )
        with copies, pytest.raises(ckptstore.UsageError, match="holds no tensor that the optimizers update"):
            copies.save(1)
        partly = LayerwiseSnapshots(
            writer, training.model, training.optimizers, training.model.hidden.state_dict, packed=0
        )
        with partly:
            with pytest.warns(UserWarning, match=r"3 of 4 layers, such as 'embed', are not in the state"):
                partly.save(1)
            partly.save(2)  # there is one warning


def test_begun_and_saved_have_to_agree(store: ckptstore.Store) -> None:
    training = KINDS["momentum"]()
    with (
        store.writer(poll_seconds=None) as writer,
        LayerwiseSnapshots(writer, training.model, training.optimizers, training.state) as snapshots,
    ):
        snapshots.begin(1)
        with pytest.raises(ckptstore.UsageError, match="step 1 was begun: save it, or abandon it"):
            snapshots.begin(2)
        with pytest.raises(ckptstore.UsageError, match="step 1 was begun, and step 2 is to be saved"):
            snapshots.save(2)
        snapshots.begin(1)
        snapshots.abandon()
        training.step()
        snapshots.save(1).result(60)
    with pytest.raises(ckptstore.UsageError, match="closed"):
        snapshots.begin(2)


def test_leaving_removes_every_hook(store: ckptstore.Store, slowly: Callable[[float], None]) -> None:
    training = KINDS["optimizer per layer"]()
    training.step()

    def hooks() -> list[int]:
        return [
            len(one._optimizer_step_pre_hooks)
            + len(one._optimizer_step_post_hooks)
            + len(one._optimizer_load_state_dict_pre_hooks)
            for one in training.optimizers
        ]

    with store.writer(poll_seconds=None) as writer:
        with LayerwiseSnapshots(writer, training.model, training.optimizers, training.state) as snapshots:
            copy.deepcopy((training.model, training.optimizers))  # like a script that averages weights
            assert set(hooks()) == {3}
            slowly(0.01)
            pending = snapshots.save(1)
            wanted = copy.deepcopy(training.state())
        assert set(hooks()) == {0}
        training.step()  # nothing waits any more, and nothing has to
        slowly(0.0)
        pending.result(60)
        snapshots.close()
    same(wanted, store.load(1))


def test_an_error_of_the_training_gives_everything_back(store: ckptstore.Store) -> None:
    training = KINDS["foreach AdamW"]()
    training.step()
    with store.writer(poll_seconds=None) as writer:
        snapshots = LayerwiseSnapshots(writer, training.model, training.optimizers, training.state)

        def fails() -> None:
            with snapshots:
                snapshots.begin(1)
                training.step()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        writer.save_async(training.state(), 1).result(60)
    same(training.state(), store.load(1))


def test_training_continues_when_the_writer_is_closed(store: ckptstore.Store) -> None:
    training = KINDS["optimizer in backward"]()
    training.step()
    writer = store.writer(poll_seconds=None)
    with LayerwiseSnapshots(writer, training.model, training.optimizers, training.state) as snapshots:
        snapshots.begin(1)
        writer.close()
        training.step()
        with pytest.raises(ckptstore.WriterClosedError):
            snapshots.save(1)
        assert snapshots.report().restarts == 1
    other = KINDS["optimizer in backward"]()
    for _ in range(2):
        other.step()
    same(training.state(), other.state())


def test_interrupted_at_a_gate(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is not taken; the save continues, and so may training."""
    training = KINDS["foreach AdamW"]()
    training.step()
    at_gate, interrupted = threading.Event(), threading.Event()
    training.optimizers[0].register_step_pre_hook(lambda *_: at_gate.set())  # before the gate's own
    real = TorchSource.read

    def read(self: TorchSource, offset: int, out: Any) -> None:
        if self.tensor.data_ptr() == training.model.hidden.weight.data_ptr():
            interrupted.wait(60)
        real(self, offset, out)

    def press() -> None:
        at_gate.wait(60)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with (
        store.writer(poll_seconds=None) as writer,
        LayerwiseSnapshots(writer, training.model, training.optimizers, training.state) as snapshots,
    ):
        monkeypatch.setattr(TorchSource, "view", lambda self: None)
        monkeypatch.setattr(TorchSource, "read", read)
        at_gate.clear()
        pending = snapshots.save(1)
        wanted = copy.deepcopy(training.state()["model"]["hidden.weight"])
        # If the tests run in the background of a shell, SIGINT is ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        pressing = threading.Thread(target=press)
        pressing.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                training.optimizers[0].step()
        finally:
            interrupted.set()
            pressing.join(60)
            signal.signal(signal.SIGINT, before)
        assert torch.equal(training.model.hidden.weight, wanted)
        pending.result(60)
        training.step()
        snapshots.save(2).result(60)
    same(training.state(), store.load(2))


def test_interrupted_while_an_early_copy_begins(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    training = KINDS["optimizer per layer"]()
    training.step()
    with (
        store.writer(poll_seconds=None) as writer,
        LayerwiseSnapshots(
            writer, training.model, training.optimizers, training.state, mode="device", packed=0
        ) as snapshots,
    ):
        snapshots.begin(1)
        with monkeypatch.context() as patch:
            inside.interrupt_early_copy(snapshots, patch)
            with pytest.raises(KeyboardInterrupt):
                training.optimizers[0].step()
        gated = Gated(training, monkeypatch)
        snapshots.save(1)
        wanted = copy.deepcopy(training.state())
        training.step()
        gated.let_go()
    same(wanted, store.load(1))


# --------------------------------------------------------------------------------------------------------------- killed

KILLED = (
    ("optimizer in backward", "copying", 2),
    ("foreach AdamW", "save.before-header:3", 2),
    ("foreach AdamW", "commit.acknowledged:3", 3),
)
"""Kind of run, where it is killed, and the newest checkpoint it leaves."""

KILLS = """
import os, signal, sys
import torch
import ckptstore
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.host import crash_points
from ckptstore.training import LayerwiseSnapshots
from tests.training.test_layerwise import KILLED, KINDS

def run(url, kind, end):
    training = KINDS[kind]()
    if end != "copying":
        name, _, count = end.partition(":")
        crash_points.arm(name, int(count))
    with ckptstore.open(url).writer(poll_seconds=None) as writer:
        with LayerwiseSnapshots(writer, training.model, training.optimizers, training.state) as snapshots:
            for step in (1, 2):
                training.step()
                snapshots.save(step).result(60)
            if end == "copying":
                TorchSource.view = lambda self: None
                TorchSource.read = lambda self, offset, out: os.kill(os.getpid(), signal.SIGKILL)
            snapshots.begin(3)
            training.step()
            snapshots.save(3).result(60)

torch.set_num_threads(1)
KINDS["SGD"]()  # imports what each child would
for number, (kind, end, _) in enumerate(KILLED):
    child = os.fork()
    if not child:
        try:
            run(os.path.join(sys.argv[1], str(number)), kind, end)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_killed_run_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", KILLS, str(tmp_path)]
    done = warmth.run(command, cwd=root, timeout=120)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(KILLED), done.stderr
    for number, (kind, _, newest) in enumerate(KILLED):
        store = ckptstore.open(tmp_path / str(number))
        assert [info.step for info in store.checkpoints()] == list(range(1, newest + 1))
        training = KINDS[kind]()
        for _ in range(newest):
            training.step()
        same(training.state(), store.load("latest"))
        assert not store.verify().damage


# ------------------------------------------------------------------------------------------------------------------ gpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize("kind", ["foreach AdamW", "fused AdamW", "optimizer in backward"])
def test_on_a_gpu(store: ckptstore.Store, kind: str, mode: Any) -> None:
    with torch.device("cuda"):
        training = KINDS[kind]()
    step = training.step

    def on_device() -> None:
        with torch.device("cuda"):
            step()

    training.step = on_device  # type: ignore[method-assign]
    states, report = run(training, store, mode=mode)
    check(store, states)
    assert report.refused == 0
