"""Strategy ``replica`` of parameters on a device: what leaves it is queued, and the agent is told when it is there."""

from __future__ import annotations

import copy
import logging
import re
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.agent import AgentWriter  # noqa: E402
from ckptstore.agent.client.agent_link import AgentLink  # noqa: E402
from ckptstore.agent.client.replica_client import ReplicaClient  # noqa: E402
from ckptstore.errors import UsageError  # noqa: E402
from ckptstore.frameworks.torch_offload import CopyQueue, PinnedCopy  # noqa: E402
from ckptstore.frameworks.torch_optimizers import settings_of  # noqa: E402
from ckptstore.host.caller_warnings import UnexplainedStepWarning  # noqa: E402
from ckptstore.training import Checkpointer, TopKHook, UnsavedStepWarning  # noqa: E402
from ckptstore.training.replica import arithmetic_probe  # noqa: E402
from tests.forms import in_turn, short_or  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.training.inside import without_torchs_kernels  # noqa: E402
from tests.training.test_on_device import OPTIMIZERS, listed, on_host  # noqa: E402
from tools.device import simulated, why_not  # noqa: E402
from tools.device.machine import Machine  # noqa: E402
from tools.device.roundings import CONTRACTED, UNKNOWN  # noqa: E402

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SEEDS = range(short_or(2, 40))
STEPS = 9
WARM = 4
"""Steps after which the areas were used, and are registered."""


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_agents: None) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose whole state was handed over."""
    found: list[int] = []
    save = AgentWriter.save_async

    def spy(self: AgentWriter, state: Any, step: int, **named: Any) -> Any:
        found.append(step)
        return save(self, state, step, **named)

    monkeypatch.setattr(AgentWriter, "save_async", spy)
    return found


class Script:
    """Parameters on a device that the agent computes, a frozen one, a small one, a buffer, on a stream of its own."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 64))
        model.append(torch.nn.Linear(64, 64)).requires_grad_(True)
        model[3].requires_grad_(False)
        self.model = model.cuda()
        self.optimizer = OPTIMIZERS[optimizer]([one for one in self.model.parameters() if one.requires_grad])
        self.chance = torch.Generator().manual_seed(3)

    def update(self, hook: Any = None) -> None:
        inputs = torch.randn(8, 64, generator=self.chance).cuda()
        self.model(inputs).square().mean().backward()
        if hook is not None:
            hook.compress(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """A copy on the device, which is queued."""
        found = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with torch.no_grad():
            return copied(found)


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def opened(place: Path, script: Script, **options: Any) -> Checkpointer:
    return Checkpointer(
        place,
        model=script.model,
        optimizer=script.optimizer,
        strategy="replica",
        agent=True,
        linger_seconds=0,
        **options,
    )


def trained(
    machine: Machine,
    place: Path,
    optimizer: str = "AdamW",
    each: Callable[[Script, int], object] = lambda *_: None,
    hook: Any = None,
    own_stream: bool = True,
) -> dict[int, Any]:
    """Train, with the next step queued at once -> what each step has to be in the store."""
    wanted = {}
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else None):
        script = Script(optimizer)
        with opened(place, script, max_in_flight=2, compressor=hook) as checkpointer:
            checkpointer.resume()
            for step in range(1, STEPS + 1):
                script.update(hook)
                each(script, step)
                wanted[step] = script.state()
                pending = checkpointer.step()
                if step <= WARM and pending is not None:
                    pending.exception()
                    settle()
        torch.cuda.synchronize()
    return {step: on_host(state) for step, state in wanted.items()}


def settle() -> None:
    """Memory is registered meanwhile, by another thread."""
    time.sleep(0.05)


def check(place: Path, wanted: dict[int, Any]) -> list[int]:
    """Compare each stored step -> the steps."""
    store = ckptstore.open(place)
    steps = [info.step for info in store.checkpoints()]
    for step in steps:
        found = store.load(step)
        for part in ("model", "optimizer"):
            same(listed(wanted[step][part]), listed(on_host(found[part])), f"step {step}: {part}")
    return steps


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_agent_makes_every_step_but_the_first_two(tmp_path: Path, wholes: list[int], optimizer: str) -> None:
    """With momentum the second state is whole, too: it is the first that has all tensors."""
    for seed in SEEDS if optimizer == "AdamW" else [0]:
        wholes.clear()
        with simulated(seed) as machine, warnings.catch_warnings():
            warnings.simplefilter("error", UnexplainedStepWarning)
            warnings.simplefilter("error", UnsavedStepWarning)
            wanted = trained(machine, tmp_path / f"{seed}", optimizer)
            assert not machine.hazards, (seed, machine.hazards)
        steps = check(tmp_path / f"{seed}", wanted)
        assert wholes == [1]
        assert {1, 2, 3, 4, STEPS} <= set(steps)


def test_a_step_that_has_to_be_written_is_sent_whole_and_waits_for_no_device(tmp_path: Path, wholes: list[int]) -> None:
    """The gradients that were copied for the agent are not used. The agent gets the state in the order of the steps."""
    with simulated(0) as machine, warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        script, wanted, quiet = Script(), {}, 0
        with opened(tmp_path / "run", script, max_in_flight=2) as checkpointer:
            checkpointer.resume()
            while quiet < 4 and len(wanted) < 40:  # memory is registered meanwhile, by another thread
                script.update()
                step = len(wanted) + 1
                wanted[step] = script.state()
                machine.counts.waits.clear()
                pending = checkpointer.step(tags=["written"] if step % 2 else [])
                here = threading.get_ident()
                waits = [one for one in machine.counts.waits if one.where and one.thread == here]
                quiet = 0 if waits else quiet + 1
                if pending is not None:
                    pending.exception()
            torch.cuda.synchronize()
        assert quiet == 4, waits
        assert not machine.hazards
        wanted = {step: on_host(state) for step, state in wanted.items()}
    odd = list(range(1, len(wanted) + 1, 2))
    assert set(odd) <= set(check(tmp_path / "run", wanted))
    assert wholes == odd


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "the agent is told before the event": lambda patch: patch.setattr(CopyQueue, "marked", lambda _: lambda: None),
    "nothing later waits for copies and digests": lambda patch: patch.setattr(CopyQueue, "gate", lambda _: None),
}


def asked(ask: Any, machine: Machine, early: list[int], link: AgentLink, do: str, **body: Any) -> Any:
    """Note a step of which the agent is told while a device still copies to memory of the host."""
    if do == "advance" and machine.copying:
        early.append(body["step"])
    return ask(link, do, **body)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_leaves_an_order_out_is_caught(tmp_path: Path, mutant: str) -> None:
    """Without an order the device reports a hazard, or the agent reads memory too early, or its result differs."""
    ask = AgentLink.ask
    for seed in range(20):
        early: list[int] = []
        with simulated(seed) as machine, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            MUTANTS[mutant](patch)
            told = partial(asked, ask, machine, early)
            patch.setattr(AgentLink, "ask", lambda self, do, told=told, **body: told(self, do, **body))
            wanted = trained(machine, tmp_path / f"{seed}")
            if machine.hazards or early:
                return
        if len(check(tmp_path / f"{seed}", wanted)) < STEPS - 2:
            return
    pytest.fail(f"{mutant}: not caught under any seed")


def test_only_the_tensors_concerned_are_sent_after_a_mismatch(
    tmp_path: Path, wholes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    once: dict[int, set[str]] = {}
    advance = ReplicaClient.advance

    def spy(self: ReplicaClient, area: Any, told: Any) -> Any:
        if told.whole:
            tensors = self.recipe.layout.tensors
            once[told.step] = {tensors[number].name for one in told.whole for number in one.starts}
        return advance(self, area, told)

    monkeypatch.setattr(ReplicaClient, "advance", spy)

    def each(script: Script, step: int) -> None:
        if step == 3:
            with torch.no_grad():
                script.model[0].weight.mul_(0.5)

    with simulated(0) as machine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wanted = trained(machine, tmp_path / "run", each=each)
        assert not machine.hazards
    steps = check(tmp_path / "run", wanted)
    assert wholes == [1]
    assert once == {4: {"model.0.weight", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq"}}
    assert 3 not in steps
    assert {1, 2, 4, STEPS} <= set(steps)
    (remark,) = (str(one.message) for one in told if issubclass(one.category, UnexplainedStepWarning))
    assert "other values than training for model.0.weight" in remark


def test_a_device_that_rounds_otherwise_is_refused_once_and_states_are_sent_whole(
    tmp_path: Path, wholes: list[int]
) -> None:
    with simulated(roundings=UNKNOWN) as machine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wanted = trained(machine, tmp_path / "run")
    assert wholes == check(tmp_path / "run", wanted) == list(range(1, STEPS + 1))
    (remark,) = (str(one.message) for one in told if issubclass(one.category, UnexplainedStepWarning))
    assert re.search(r"AdamW on cuda:0 rounds [\d,]+ of 12,399 numbers of a probe", remark)
    assert "strategy='gradient' or 'delta'" in remark


def test_a_refused_replica_saves_what_is_due_and_nothing_else(tmp_path: Path, wholes: list[int]) -> None:
    with simulated(roundings=UNKNOWN), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = Script()
        with opened(tmp_path / "run", script, save_every=4) as checkpointer:
            for _ in range(9):
                script.update()
                checkpointer.step()
    assert wholes == [1, 4, 8, 9], "the first, before anything is known, those that are due, and the last"


def test_a_scaler_with_a_fused_optimizer_is_refused(tmp_path: Path) -> None:
    with simulated(0):
        script = Script("AdamW fused")
        scaler = torch.amp.GradScaler("cuda")
        with pytest.raises(UsageError, match="leave fused out"):
            opened(tmp_path / "run", script, scaler=scaler).resume()


def test_a_step_that_a_scaler_skips(tmp_path: Path, wholes: list[int]) -> None:
    with simulated(0) as machine, warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        script, wanted = Script("AdamW foreach"), {}
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        with opened(tmp_path / "run", script, scaler=scaler) as checkpointer:
            for step in range(1, 6):
                scaler.scale(script.model(torch.ones(8, 64).cuda()).square().mean()).backward()
                if step == 3:
                    script.model[0].weight.grad[0, 0] = float("inf")
                scaler.step(script.optimizer)
                scaler.update()
                script.optimizer.zero_grad()
                wanted[step] = script.state()
                checkpointer.step()
                checkpointer.wait()
        assert not machine.hazards
        wanted = {step: on_host(state) for step, state in wanted.items()}
    assert check(tmp_path / "run", wanted) == [1, 2, 3, 4, 5]
    assert wholes == [1]


@pytest.mark.parametrize(
    ("optimizer", "variant"), [("AdamW", "divide"), ("Adam amsgrad", "divide"), ("SGD momentum", "fma")]
)
def test_a_device_that_contracts_products_and_sums_is_computed_exactly(
    tmp_path: Path,
    wholes: list[int],
    optimizer: str,
    variant: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_torchs_kernels(monkeypatch)
    caplog.set_level(logging.DEBUG, "ckptstore.training")
    with simulated(roundings=CONTRACTED) as machine, warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        warnings.simplefilter("error", UnsavedStepWarning)
        wanted = trained(machine, tmp_path / "run", optimizer)
        assert not machine.hazards
    assert {1, 2, 3, 4, STEPS} <= set(check(tmp_path / "run", wanted))
    assert wholes == [1]
    assert f"variant='{variant}'" in caplog.text


def test_a_variant_that_lies_is_caught_by_the_digests(
    tmp_path: Path, wholes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe says that the device rounds as the CPU. It does not, in every parameter and every step."""
    lie = arithmetic_probe.Probed("as on the CPU", {}, 0, 1)
    monkeypatch.setattr(arithmetic_probe, "probed", lambda *_: lie)
    with simulated(roundings=CONTRACTED) as machine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wanted = trained(machine, tmp_path / "run")
    steps = check(tmp_path / "run", wanted)  # what is stored is right
    assert wholes[0] == 1
    assert 2 not in steps, "a step with the bits of another arithmetic was stored"
    assert STEPS in steps
    (remark,) = (str(one.message) for one in told if issubclass(one.category, UnexplainedStepWarning))
    assert "the agent computed other values than training" in remark


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.3}, {"maximize": True, "weight_decay": 0.01}])
def test_the_probe_finds_the_arithmetic_of_each_group(kind: str, more: dict[str, Any]) -> None:
    with torch.no_grad():
        optimizer = getattr(torch.optim, kind)([torch.zeros(3)], lr=0.01, **more)
        settings = settings_of(optimizer, optimizer.param_groups[0])
        device = torch.device("cuda", 0)
        with simulated():
            assert arithmetic_probe.probed(kind, settings, device, torch.float32).variant == "as on the CPU"
        with simulated(roundings=CONTRACTED):
            found = arithmetic_probe.probed(kind, settings, device, torch.float32)
            # On a CPU with AVX2 torch's kernels contract all products of SGD as well.
            assert found.variant in (("fma", "as on the CPU") if kind == "SGD" else ("divide",))
            assert found.exact == (found.variant != "as on the CPU")
            half = arithmetic_probe.probed(kind, settings, device, torch.bfloat16)
            assert not half.exact, "the exact variants are of fp32"


# ------------------------------------------------------------------------------------------------- compressed gradients

SPARSE_SEEDS = range(short_or(2, 200))


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[int, int]]:
    """For each step that the agent gets, the number of entries of each gradient that is sent as entries."""
    found: dict[int, dict[int, int]] = {}
    ask = AgentLink.ask

    def spy(self: AgentLink, do: str, **body: Any) -> Any:
        if do == "advance":
            found[body["step"]] = dict(one for call in body["calls"] for one in call[4])
        return ask(self, do, **body)

    monkeypatch.setattr(AgentLink, "ask", spy)
    return found


@pytest.mark.parametrize(("scope", "own_stream"), in_turn(["tensor", "bucket"], [True, False]))
def test_only_entries_of_compressed_gradients_leave_the_device(
    tmp_path: Path, wholes: list[int], entries: dict[int, dict[int, int]], scope: Any, own_stream: bool
) -> None:
    for seed in SPARSE_SEEDS:
        wholes.clear()
        entries.clear()
        with simulated(seed) as machine, warnings.catch_warnings():
            warnings.simplefilter("error", UnexplainedStepWarning)
            warnings.simplefilter("error", UnsavedStepWarning)
            hook = TopKHook(density=0.05, scope=scope, exact=False)
            wanted = trained(machine, tmp_path / f"{seed}", hook=hook, own_stream=own_stream)
            assert not machine.hazards, (seed, machine.hazards)
        steps = check(tmp_path / f"{seed}", wanted)
        assert wholes == [1]
        assert {1, 2, 3, 4, STEPS} <= set(steps)
        assert sorted(entries) == list(range(2, STEPS + 1))
        for found in entries.values():
            assert len(found) == 2, "both parameters that the agent computes"
            if scope == "tensor":
                assert sorted(found.values()) == [308, 308]


SPARSE_MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "entries are read before they are there": lambda patch: patch.setattr(PinnedCopy, "wait", lambda self: self._host),
    "entries leave before they are computed": lambda patch: patch.setattr(
        torch.cuda.Stream, "wait_stream", lambda *_: None
    ),
    "the memory of entries is not kept": lambda patch: patch.setattr(torch.Tensor, "record_stream", lambda *_: None),
}


@pytest.mark.parametrize("mutant", SPARSE_MUTANTS)
def test_what_leaves_an_order_of_entries_out_is_caught(tmp_path: Path, mutant: str) -> None:
    """The device reports a hazard, or the digests show that the agent's step differs."""
    for seed in range(20):
        with simulated(seed) as machine, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SPARSE_MUTANTS[mutant](patch)
            wanted = trained(machine, tmp_path / f"{seed}", hook=TopKHook(density=0.05, exact=False))
            if machine.hazards:
                return
        if not {1, 2, 3, 4, STEPS} <= set(check(tmp_path / f"{seed}", wanted)):
            return
    pytest.fail(f"{mutant}: not caught under any seed")


class Changing(TopKHook):
    """Changes gradients after they were compressed: `change` gets the parameters and the number of the call."""

    def __init__(self, change: Callable[[list[Any], int], object], density: float = 0.05) -> None:
        super().__init__(density, exact=False)
        self._change = change
        self._calls = 0

    def compress(self, parameters: Any) -> None:
        found = [one for one in parameters if one.grad is not None]
        super().compress(found)
        self._calls += 1
        self._change(found, self._calls)


def clipped(parameters: list[Any], _: int) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.01)


def added_to(parameters: list[Any], call: int) -> None:
    if call >= 3:
        parameters[0].grad.add_(1e-4)


def added_uncounted(parameters: list[Any], call: int) -> None:
    if call >= 3:
        parameters[0].grad.data.add_(1e-4)


def test_clipped_entries_stay_entries(tmp_path: Path, wholes: list[int], entries: dict[int, dict[int, int]]) -> None:
    with simulated(1) as machine, warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        warnings.simplefilter("error", UnsavedStepWarning)
        wanted = trained(machine, tmp_path / "run", hook=Changing(clipped))
        assert not machine.hazards
    check(tmp_path / "run", wanted)
    assert wholes == [1]
    assert {len(found) for found in entries.values()} == {2}


@pytest.mark.parametrize("change", [added_to, added_uncounted])
def test_a_gradient_that_is_more_than_its_entries_is_sent_dense_from_then_on(
    tmp_path: Path, wholes: list[int], entries: dict[int, dict[int, int]], change: Any
) -> None:
    """The step in which that is found out is not saved. The tensors concerned are sent once, and that is said."""
    with simulated(0) as machine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wanted = trained(machine, tmp_path / "run", hook=Changing(change))
        assert not machine.hazards
    steps = check(tmp_path / "run", wanted)
    assert wholes == [1]
    assert {1, 2, 4, STEPS} <= set(steps)
    assert 3 not in steps
    (remark,) = (str(one.message) for one in told if issubclass(one.category, UnexplainedStepWarning))
    assert "model.0.weight" in remark
    assert len(entries[2]) == 2
    assert len(entries[STEPS]) == 1, "the other parameter's entries"


def test_more_entries_than_half_of_the_numbers_are_written_dense(
    tmp_path: Path, wholes: list[int], entries: dict[int, dict[int, int]]
) -> None:
    with simulated(0) as machine, warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        wanted = trained(machine, tmp_path / "run", hook=TopKHook(density=0.7, exact=False))
        assert not machine.hazards
    assert {1, 2, 3, 4, STEPS} <= set(check(tmp_path / "run", wanted))
    assert wholes == [1]
    assert {len(found) for found in entries.values()} == {0}


def test_residuals_on_the_device_are_sent_whole(
    tmp_path: Path, wholes: list[int], entries: dict[int, dict[int, int]]
) -> None:
    """They change by the dense gradient, which the agent does not get."""
    with simulated(0) as machine, warnings.catch_warnings():
        warnings.simplefilter("error", UnexplainedStepWarning)
        hook = TopKHook(density=0.05)
        wanted = trained(machine, tmp_path / "run", hook=hook)
        assert not machine.hazards
    assert {1, 2, 3, 4, STEPS} <= set(check(tmp_path / "run", wanted))
    assert wholes == [1]
    assert {len(found) for found in entries.values()} == {2}


def test_a_device_that_fails_while_it_sends_entries(
    tmp_path: Path, wholes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That step is lost, and the next state is sent whole."""
    wait = PinnedCopy.wait
    calls = []

    def fails(self: PinnedCopy) -> Any:
        calls.append(self)
        if len(calls) == 3:
            raise RuntimeError("an illegal memory access")
        return wait(self)

    monkeypatch.setattr(PinnedCopy, "wait", fails)
    with simulated(0) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = trained(machine, tmp_path / "run", hook=TopKHook(density=0.05, exact=False))
    assert STEPS in check(tmp_path / "run", wanted)
    assert len(wholes) == 2
