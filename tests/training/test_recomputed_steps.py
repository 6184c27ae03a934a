"""Steps of a device that the host computes again: what crosses the bus, and that the bits are those of training."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DiffOptions, agent  # noqa: E402
from ckptstore.errors import CkptError, StorageError, UsageError  # noqa: E402
from ckptstore.host.caller_warnings import UnexplainedStepWarning  # noqa: E402
from ckptstore.training import Checkpointer, OptimizerStep, clip_factor  # noqa: E402
from ckptstore.training.optimizers.optimizer_tracker import OptimizerTracker  # noqa: E402
from ckptstore.write.ranks import division  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group  # noqa: E402
from ckptstore.write.saves.save_metrics import SaveMetrics  # noqa: E402
from ckptstore.write.steps.recomputed_steps import Recomputing  # noqa: E402
from ckptstore.write.steps.resident_step import ResidentStep  # noqa: E402
from tests.forms import long_only, short_or  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.training.test_on_device import listed, on_host  # noqa: E402
from tests.write.rank_threads import as_ranks  # noqa: E402
from tools.device import simulated, why_not  # noqa: E402
from tools.device.roundings import CONTRACTED  # noqa: E402

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

STEPS = 6
WARM = 3
"""Steps after which memory is registered, and the gradients' format is known."""


class Script:
    """100,000 parameters on a device, most of them in one tensor."""

    def __init__(self, optimizer: Callable[[Any], Any], device: str = "cuda:0") -> None:
        chance = torch.Generator().manual_seed(0)  # ranks are threads, which share the global one
        layers = [torch.nn.Linear(300, 300), torch.nn.LayerNorm(300), torch.nn.Linear(300, 30)]
        self.model = torch.nn.Sequential(*layers)
        with torch.no_grad():
            for one in self.model.parameters():
                one.copy_(0.05 * torch.randn(one.shape, generator=chance))
        self.device = device
        self.model.to(device)
        self.optimizer = optimizer(self.model.parameters())
        self.chance = torch.Generator().manual_seed(3)

    @property
    def count(self) -> int:
        return sum(one.numel() for one in self.model.parameters())

    def backward(self, scaler: Any = None) -> None:
        inputs = torch.randn(4, 300, generator=self.chance).to(self.device)
        loss = self.model(inputs).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()

    def state(self) -> Any:
        with torch.no_grad():
            return copied({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def trained(
    place: Path,
    optimizer: Callable[[Any], Any] = lambda ones: torch.optim.AdamW(ones, lr=1e-2),
    *,
    before: Callable[[Script, int], object] = lambda *_: None,
    after: Callable[[Script, int], object] = lambda *_: None,
    warm: int = WARM,
    scaled: bool = False,
    missing: Set[int] = frozenset(),
    **options: Any,
) -> list[SaveMetrics]:
    """Train, compare each stored step bit for bit, and return the metrics of each.

    `before` and `after` are called before and after the optimizer's step.
    """
    found, wanted = run(place, optimizer, before, after, warm, scaled, missing, **options)
    compare(place, {step: state for step, state in wanted.items() if step not in missing})
    return found


def compare(place: Path, wanted: dict[int, Any]) -> None:
    """The store is intact, and has these steps bit for bit."""
    torch.cuda.synchronize()
    store = ckptstore.open(place)
    assert not store.verify(deep=True).damage
    for step, state in wanted.items():
        loaded = store.load(step)
        for part in ("model", "optimizer"):
            same(listed(on_host(state[part])), listed(on_host(loaded[part])), f"step {step}: {part}")


def run(
    place: Path,
    optimizer: Callable[[Any], Any],
    before: Callable[[Script, int], object] = lambda *_: None,
    after: Callable[[Script, int], object] = lambda *_: None,
    warm: int = WARM,
    scaled: bool = False,
    missing: Set[int] = frozenset(),
    device: str = "cuda:0",
    **options: Any,
) -> tuple[list[SaveMetrics], dict[int, Any]]:
    """Train -> the metrics of each save, and a copy of the state after each step."""
    found: list[SaveMetrics] = []
    wanted = {}
    script = Script(optimizer, device)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if scaled else None
    saving = Checkpointer(
        place, model=script.model, optimizer=script.optimizer, scaler=scaler,
        strategy="gradient", on_metrics=found.append, **({"recompute": True} | options),
    )  # fmt: skip
    with saving as checkpointer:
        checkpointer.resume()
        for step in range(1, STEPS + 1):
            script.backward(scaler)
            before(script, step)
            if scaler is None:
                script.optimizer.step()
            else:
                scaler.step(script.optimizer)
                scaler.update()
            script.optimizer.zero_grad()
            after(script, step)
            wanted[step] = script.state()
            pending = checkpointer.step()
            assert pending is not None or step in missing
            if pending is not None and step <= warm:
                pending.exception()
                time.sleep(0.03)  # memory is registered meanwhile
    return found, wanted


ADAMS: dict[str, Callable[[Any], Any]] = {
    "foreach": lambda ones: torch.optim.AdamW(ones, lr=1e-2, foreach=True),
    "for-loop": lambda ones: torch.optim.AdamW(ones, lr=1e-2, foreach=False),
    "fused": lambda ones: torch.optim.AdamW(ones, lr=1e-2, fused=True),
    "amsgrad": lambda ones: torch.optim.Adam(ones, lr=1e-2, amsgrad=True, weight_decay=0.01),
    "SGD": lambda ones: torch.optim.SGD(ones, lr=1e-2, momentum=0.9),
}


def change_flipped(_: Any, weights: Any, firsts: Any, roots: Any, rates: Any) -> Any:
    """Adam's last operation, with the last bit of each change flipped before it is added."""
    for weight, first, root, rate in zip(weights, firsts, roots, rates, strict=True):
        change = rate * first / root
        change.view(torch.int32).bitwise_xor_(1)
        weight.add_(change)
    return weights


KERNELS: dict[str, Any] = {
    "as on the CPU": {},
    "contracted": CONTRACTED,
    "flipped": {"aten::_foreach_addcdiv_": change_flipped},
}


@contextlib.contextmanager
def strictly(seed: int = 0, **named: Any) -> Iterator[Any]:
    """A simulated device without hazards, and no warning."""
    with simulated(seed, **named) as machine, warnings.catch_warnings():
        warnings.simplefilter("error")
        yield machine
        assert not machine.hazards


def bits(one: SaveMetrics) -> float:
    """Bits of a parameter that crossed the bus."""
    return 8 * one.from_device / 99_930


@pytest.mark.parametrize("optimizer", short_or(["foreach", "fused"], list(ADAMS)))
def test_34_bits_of_a_parameter_leave_a_device(tmp_path: Path, optimizer: str) -> None:
    with strictly():
        found = trained(tmp_path / "run", ADAMS[optimizer])
        assert found[0].sent_whole == "there is no earlier state in memory"
        assert all(one.sent_whole is None for one in found[1:])
        assert found[-1].resent == 0  # fused kernels compute the last numbers of tensors with other instructions
        assert all(bits(one) <= 34 for one in found[WARM:])


def test_gradients_to_which_the_optimizer_adds_its_momentum_are_not_sent(tmp_path: Path) -> None:
    """SGD's foreach form does that with Nesterov's momentum, in place; its form for one tensor does not."""
    with strictly():
        for foreach in (True, False):
            made = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, foreach=foreach)
            found = trained(tmp_path / str(foreach), made)
            assert [one.resent for one in found] == [0] * STEPS
            assert ("has changed since" in (found[-1].sent_whole or "")) is foreach


def test_the_bus_carries_what_the_metrics_say(tmp_path: Path) -> None:
    """And training waits for none of it in `Checkpointer.step`; scratch is freed."""
    with strictly() as machine:
        script = Script(ADAMS["foreach"])
        told: list[SaveMetrics] = []
        with Checkpointer(
            tmp_path / "run",
            model=script.model,
            optimizer=script.optimizer,
            strategy="gradient",
            recompute=True,
            on_metrics=told.append,
        ) as checkpointer:
            checkpointer.resume()
            step, end, waits = 0, time.monotonic() + 60, list[Any]()
            while step <= WARM or (waits and time.monotonic() < end):  # memory is registered by another thread
                step += 1
                script.backward()
                script.optimizer.step()
                torch.cuda.synchronize()
                machine.settle()
                machine.counts.reset()
                pending = checkpointer.step()
                assert pending is not None
                pending.result()
                counts = machine.counts
                waits = [one for one in counts.waits if one.where and one.thread == threading.get_ident()]
                if step <= WARM or waits:
                    time.sleep(0.03)
        assert not waits
        assert told[-1].from_device == counts.to_host
        assert told[-1].device_bytes <= 3 << 20  # constants of digests
        torch.cuda.synchronize()
        machine.settle()
        assert counts.product == told[-1].device_bytes
        assert counts.product_peak <= counts.product + 5 * told[-1].nbytes


def test_18_bits_if_gradients_are_bf16(tmp_path: Path) -> None:
    """In one step they are not: that is found out, and all is sent whole."""

    def rounded(script: Script, step: int) -> None:
        for one in script.model.parameters():
            if step != STEPS:
                one.grad.copy_(one.grad.bfloat16())

    with strictly():
        found = trained(tmp_path / "run", before=rounded)
        assert [bits(one) <= 18 for one in found] == [False] * 2 + [True] * (STEPS - 3) + [False]
        assert [one.resent > 0 for one in found[WARM:]] == [False, False, True]


@pytest.mark.parametrize("kernels", short_or(["contracted", "flipped"], list(KERNELS)))
def test_kernels_that_round_otherwise(tmp_path: Path, kernels: str) -> None:
    with strictly(roundings=KERNELS[kernels]):
        found = trained(tmp_path / "run", ADAMS["foreach"])
        assert [one.resent for one in found[WARM:]] == [0] * (STEPS - WARM)
        assert all(bits(one) <= 34 for one in found[WARM:])


def coded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All payloads that are encoded, with what describes them."""
    found: list[Any] = []
    encode = ResidentStep.encode

    def spy(self: ResidentStep, *args: Any, **named: Any) -> Any:
        made = encode(self, *args, **named)
        found.extend(
            (made.step, one.spec.name, one.codec, str(one.params), [bytes(chunk.payload) for chunk in one.chunks])
            for unit in made.units for one in unit
        )  # fmt: skip
        return made

    monkeypatch.setattr(ResidentStep, "encode", spy)
    return found


def test_the_stored_bytes_are_those_of_a_state_that_was_sent_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = coded(monkeypatch)
    with strictly():
        trained(tmp_path / "recomputed")
    recomputed, found[:] = list(found), []
    with strictly():
        assert all(bits(one) > 95 for one in trained(tmp_path / "whole", recompute=False))
    assert recomputed == found


def clamped(script: Script, step: int) -> None:
    """Change a weight after the optimizer's step: the host cannot know."""
    if step > 2:
        with torch.no_grad():
            script.model[2].weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("seed", range(short_or(2, 30)))
def test_what_the_host_computes_otherwise_is_sent_whole(tmp_path: Path, seed: int) -> None:
    """Although the next step is begun at once. After three such steps the tensor is not computed any more."""
    with simulated(seed) as machine, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trained(tmp_path / "run", after=clamped, warm=0)
        assert not machine.hazards
    assert [one.resent for one in found] == [0, 0, *[4 * 9000] * 3, 0]
    texts = [str(one.message) for one in said if one.category is UnexplainedStepWarning]
    assert sum("the host computed other values than training for 'model.2.weight'" in text for text in texts) <= 1


def test_a_step_is_not_saved_wrong_if_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the order of work: optimizers do not wait for the host."""
    monkeypatch.setattr(OptimizerTracker, "hold", lambda *_: None)
    compute, changed = Recomputing.computed, threading.Event()

    def late(*args: Any) -> Any:
        changed.wait(60)
        return compute(*args)

    def change(script: Script, step: int) -> None:
        clamped(script, step)
        if step > 3:  # the weights that were given with step 3 have changed
            torch.cuda.synchronize()
            changed.set()

    monkeypatch.setattr(Recomputing, "computed", late)
    with simulated(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(StorageError, match="was changed after its step was given to be saved"):
            trained(tmp_path / "run", after=change, warm=0)


def test_skipped_steps_and_parameters_without_a_gradient(tmp_path: Path) -> None:
    """Only digests of them leave the device."""

    def spoil(script: Script, step: int) -> None:
        if step == WARM + 1:
            script.model[0].weight.grad[0, 0] = float("inf")
        if step == WARM + 2:
            script.model[0].weight.grad = None

    with strictly():
        found = trained(tmp_path / "run", before=spoil, scaled=True)
        assert [one.resent for one in found[WARM:]] == [0] * (STEPS - WARM)
        assert bits(found[WARM]) < 1
        assert bits(found[WARM + 1]) < 5


def test_a_save_that_fails_does_no_harm_to_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host computes from the state that was given, whether it was stored or not."""
    encode = ResidentStep.encode

    def fail(self: ResidentStep, flat: Any, updates: Any, step: int, **named: Any) -> Any:
        if step == 4:
            raise MemoryError("injected")
        return encode(self, flat, updates, step, **named)

    monkeypatch.setattr(ResidentStep, "encode", fail)
    with simulated(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trained(tmp_path / "run", on_error="warn", missing={4}, warm=4)
        assert [one.resent for one in found[2:]] == [0] * (STEPS - 2)


def test_a_writer_and_bf16_gradients_that_are_given(tmp_path: Path) -> None:
    """Weights in bf16, masters in fp32, clipping: 16 bits and the remainders of a master."""
    with strictly():
        torch.manual_seed(0)
        weight = torch.nn.Parameter((torch.randn(320, 320, device="cuda") * 0.05).bfloat16())
        master = weight.detach().float().clone().requires_grad_(True)
        optimizer = torch.optim.AdamW([master], lr=1e-2, weight_decay=0.1)
        found: list[SaveMetrics] = []
        wanted = []
        store = ckptstore.open(tmp_path / "run", create=True)
        with store.writer(diffs=DiffOptions(recompute=True), on_metrics=found.append, max_in_flight=2) as writer:
            for step in range(1, STEPS + 1):
                weight.grad = None
                (torch.randn(8, 320, device="cuda", dtype=torch.bfloat16) @ weight).float().square().sum().backward()
                assert weight.grad is not None
                master.grad = weight.grad.float()
                norm = torch.nn.utils.clip_grad_norm_([master], 1.0)
                optimizer.step()
                updates = OptimizerStep(optimizer, gradients={master: weight.grad}, clip=clip_factor(norm, 1.0))
                with torch.no_grad():
                    weight.copy_(master)
                state = {"master": master, "optimizer": optimizer.state_dict()}
                pending = writer.save_async(state, step, updates=updates)
                wanted.append(on_host(copied(state)))
                if step <= WARM:
                    pending.result()
                    time.sleep(0.03)
        torch.cuda.synchronize()
        for step, state in enumerate(wanted, 1):
            same(listed(state), listed(on_host(store.load(step))), f"step {step}")
        assert [one.resent for one in found[2:]] == [0] * (STEPS - 2)
        assert all(8 * one.from_device / 320**2 <= 18 for one in found[2:])
        assert found[-1].stored * 8 / 320**2 < 16  # the gradient was stored


def ranks_trained(place: Path, **how: Any) -> list[list[SaveMetrics]]:
    """Two ranks with the same model, each on a device of its own, and each with its half of the state."""

    def work(group: Group) -> tuple[list[SaveMetrics], dict[int, Any]]:
        with torch.cuda.device(group.rank), torch.autograd.set_multithreading_enabled(False):
            return run(place, ADAMS["foreach"], device=f"cuda:{group.rank}", group=group, rank_timeout=60, **how)

    found = as_ranks(2, work)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    compare(place, found[0][1])
    return [metrics for metrics, _ in found]


def test_ranks_compute_their_shares_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors, and rows of the largest one. What is stored are the same bytes."""
    monkeypatch.setattr(division, "CUT_FROM", 1 << 16)
    payloads = coded(monkeypatch)
    with strictly(devices=2):
        shares = ranks_trained(tmp_path / "recomputed")
    for both in zip(*shares, strict=True):
        assert {one.sent_whole is None for one in both} == {both[0].step > 1}
        assert both[0].step <= WARM or [one.resent for one in both] == [0, 0]
    for rank in shares:
        assert 0.4 < rank[-1].nbytes / sum(one[-1].nbytes for one in shares) < 0.6, "rows of the first weight"
        assert 32 < 96 * rank[-1].from_device / rank[-1].nbytes <= 35
    recomputed, payloads[:] = sorted(payloads), []
    with strictly(devices=2):
        shares = ranks_trained(tmp_path / "whole", recompute=False)
    assert all(96 * one.from_device / one.nbytes > 90 for rank in shares for one in rank)
    assert recomputed == sorted(payloads)


@pytest.mark.parametrize("seed", range(short_or(2, 30)))
def test_a_share_that_a_rank_computes_otherwise_is_sent_whole(tmp_path: Path, seed: int) -> None:
    with simulated(seed, devices=2) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnexplainedStepWarning)
        shares = ranks_trained(tmp_path / "run", after=clamped, warm=0)
        assert not machine.hazards
    resent = [sum(one.resent for one in both) for both in zip(*shares, strict=True)]
    assert resent[:2] == [0, 0]
    assert all(one >= 4 * 9000 for one in resent[2:5])


@long_only  # the other rank waits for a minute
def test_a_rank_saves_no_step_wrong_if_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant, as for a process alone."""
    monkeypatch.setattr(OptimizerTracker, "hold", lambda *_: None)
    compute = Recomputing.computed

    def late(*args: Any) -> Any:
        time.sleep(0.3)
        return compute(*args)

    monkeypatch.setattr(Recomputing, "computed", late)
    with simulated(0, devices=2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CkptError, match="was changed after its step was given to be saved"):
            ranks_trained(tmp_path / "run", after=clamped, warm=0)


def test_where_nothing_is_computed_again_the_option_is_an_error(tmp_path: Path) -> None:
    """Before a term is opened: nothing ignores it."""
    asked = DiffOptions(recompute=True)
    store = ckptstore.open(tmp_path / "run", create=True)
    with pytest.raises(UsageError, match="recompute: not with an agent"):
        agent.writer(store, diffs=asked)
    with pytest.raises(UsageError, match="recompute"):
        store.writer(diffs=asked, memory=1 << 26)
    with pytest.raises(UsageError, match="recompute"):
        DiffOptions(recompute=True, accumulate="sum")
    model = torch.nn.Linear(2, 2)
    for options in ({"strategy": "full"}, {"strategy": "gradient", "agent": True}):
        with (
            pytest.raises(UsageError, match="recompute"),
            Checkpointer(
                store, model=model, optimizer=torch.optim.Adam(model.parameters()), recompute=True, **options
            ) as saving,
        ):
            saving.resume()
    assert not store.terms()
