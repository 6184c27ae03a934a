"""The simulated accelerator: it keeps the order of streams and events, and no other.

Each known mistake in ordering device work is a small program here, beside the correct one: under some seed the wrong
one fails, and the correct one never does.
"""

from __future__ import annotations

import gc
import json
import math
import threading
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
import ckptstore.agent  # noqa: E402
from ckptstore.errors import StorageError  # noqa: E402
from ckptstore.formats.optim import arithmetic  # noqa: E402
from ckptstore.frameworks import bridge, torch_offload  # noqa: E402
from ckptstore.frameworks.torch_tensors import TorchSource  # noqa: E402
from ckptstore.training import Checkpointer, LayerwiseSnapshots, TopKHook  # noqa: E402
from ckptstore.training.capture.capture_plan import StatePlan  # noqa: E402
from ckptstore.training.layerwise.layer_sources import LayerSource, staged  # noqa: E402
from ckptstore.write.steps.updates import LateGradient, arrived  # noqa: E402
from tests.forms import in_turn, short_or  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.training.test_on_device import check, check_sparse  # noqa: E402
from tests.warm_agents import start_warm  # noqa: E402
from tools.device import campaign, simulated, why_not  # noqa: E402
from tools.device.__main__ import main, measured  # noqa: E402
from tools.device.queues import Scheduler  # noqa: E402
from tools.device.roundings import CONTRACTED  # noqa: E402

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SEEDS = range(short_or(8, 40))
FEW = range(short_or(3, 40))
"""For what takes longer, and whose mutants are tried with all."""
N = 64


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))


# ------------------------------------------------------------------------------------------------------ the mistakes


def registered(count: int = N) -> torch.Tensor:
    """Host memory to and from which copies do not block the host."""
    memory = np.zeros(count, np.float32)
    assert torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0) == 0
    return torch.from_numpy(memory)


def update_waits(right: bool) -> bool:
    """The state changes in place while its copy is queued."""
    state, host, stream = torch.full((N,), 1.0, device="cuda"), registered(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.copy_(state, non_blocking=True)
        event = stream.record_event()
    if right:
        torch.cuda.current_stream().wait_event(event)
    state.add_(1)
    event.synchronize()
    return bool((host == 1).all())


def memory_is_kept(right: bool) -> bool:
    """A tensor is freed while another stream's copy of it is queued."""
    host, stream = registered(), torch.cuda.Stream()
    state = torch.full((N,), 1.0, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.copy_(state, non_blocking=True)
        event = stream.record_event()
    if right:
        state.record_stream(stream)
    del state
    torch.full((N,), 2.0, device="cuda")
    event.synchronize()
    return bool((host == 1).all())


def host_waits(right: bool) -> bool:
    """The host reads the destination of a queued copy."""
    host = registered()
    host.copy_(torch.full((N,), 1.0, device="cuda"), non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    if right:
        event.synchronize()
    return bool((host == 1).all())


def buffer_is_free(right: bool) -> bool:
    """A host buffer is used for the next copy before the first was read from it."""
    host, stream = registered(), torch.cuda.Stream()
    found = []
    events = []
    for number in (1.0, 2.0):
        state = torch.full((N,), number, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(state, non_blocking=True)
            events.append(stream.record_event())
        state.record_stream(stream)
        if right:
            events[-1].synchronize()
            found.append(host.clone())
    if not right:
        for event in events:
            event.synchronize()
            found.append(host.clone())
    return all(bool((one == number).all()) for one, number in zip(found, (1, 2), strict=True))


def upload_is_taken(right: bool) -> bool:
    """A registered host buffer is overwritten while its copy to the device is queued."""
    host = registered()
    host.fill_(1)
    state = torch.zeros(N, device="cuda")
    state.copy_(host, non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    host.fill_(2)
    return bool((state.cpu() == 1).all())


def the_right_stream_waits(right: bool) -> bool:
    """The copying stream waits for the default stream; the state was made on the caller's own."""
    own, host, stream = torch.cuda.Stream(), registered(), torch.cuda.Stream()
    state = torch.zeros(N, device="cuda")
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        state.fill_(1)
        waited = torch.cuda.current_stream() if right else torch.cuda.default_stream()
        stream.wait_stream(waited)
    with torch.cuda.stream(stream):
        host.copy_(state, non_blocking=True)
        stream.record_event().synchronize()
    return bool((host == 1).all())


def the_right_event_is_waited_for(right: bool) -> bool:
    """The host waits for an event that was recorded before the copy."""
    host, stream = registered(), torch.cuda.Stream()
    state = torch.full((N,), 1.0, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    before = stream.record_event()
    with torch.cuda.stream(stream):
        host.copy_(state, non_blocking=True)
    (stream.record_event() if right else before).synchronize()
    return bool((host == 1).all())


def the_right_device_waits(right: bool) -> bool:
    """Of two devices, the other one's stream is waited for."""
    state = torch.zeros(N, device="cuda:1")
    host, stream = registered(), torch.cuda.Stream("cuda:1")
    state.fill_(1)
    stream.wait_stream(torch.cuda.current_stream("cuda:1" if right else "cuda:0"))
    with torch.cuda.stream(stream):
        host.copy_(state, non_blocking=True)
        stream.record_event().synchronize()
    return bool((host == 1).all())


PROGRAMS: list[Callable[[bool], bool]] = [
    update_waits,
    memory_is_kept,
    host_waits,
    buffer_is_free,
    upload_is_taken,
    the_right_stream_waits,
    the_right_event_is_waited_for,
    the_right_device_waits,
]


def outcome(program: Callable[[bool], bool], right: bool, seed: int) -> bool:
    with simulated(seed, devices=2) as machine:
        good = program(right)
        torch.cuda.synchronize()
        return good and not machine.hazards


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_ordered_work_is_right_under_every_seed(program: Callable[[bool], bool]) -> None:
    assert [seed for seed in SEEDS if not outcome(program, True, seed)] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_unordered_work_fails_under_some_seed(program: Callable[[bool], bool]) -> None:
    assert any(not outcome(program, False, seed) for seed in SEEDS)


ON_DEVICES = [
    update_waits,
    memory_is_kept,
    the_right_stream_waits,
    the_right_event_is_waited_for,
    the_right_device_waits,
]
"""Mistakes that need no seed: all accesses of streams to memory are known. The host's own reads and writes are not."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("program", ON_DEVICES, ids=lambda one: one.__name__)
def test_unordered_accesses_are_found_under_every_seed(program: Callable[[bool], bool], seed: int) -> None:
    with simulated(seed, devices=2) as machine:
        program(False)
        torch.cuda.synchronize()
        assert machine.hazards


def test_two_streams_may_share_memory_that_neither_writes_or_that_is_apart() -> None:
    with simulated() as machine:
        x, one, other = torch.zeros(N, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
        for stream, half in ((one, x[: N // 2]), (other, x[N // 2 :])):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                half.add_(1)
        for stream in (one, other):
            torch.cuda.current_stream().wait_stream(stream)
        for stream in (one, other):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x.sum()
            stream.synchronize()
        assert not machine.hazards
        with torch.cuda.stream(one):
            x.add_(1)
        with torch.cuda.stream(other):
            x.sum()
        assert any("nothing orders" in one for one in machine.hazards)
        torch.cuda.synchronize()


def test_host_memory_that_is_unregistered_under_a_copy() -> None:
    with simulated() as machine:
        host = registered()
        host.copy_(torch.ones(N, device="cuda"), non_blocking=True)
        assert torch.cuda.cudart().cudaHostUnregister(host.data_ptr()) == 0
        assert len(machine.hazards) == 1
        assert torch.cuda.cudart().cudaHostUnregister(host.data_ptr()) == 713
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------ the rules alone


@pytest.mark.parametrize("seed", SEEDS)
def test_a_queue_keeps_its_order_and_its_waits(seed: int) -> None:
    """Random queues and waits: whatever the seed, nothing runs before the work that it must wait for."""
    random = np.random.default_rng(seed)
    scheduler = Scheduler(seed)
    queues = [scheduler.queue() for _ in range(4)]
    ran: list[tuple[int, int]] = []
    behind: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for _ in range(60):
        number, other = random.integers(4, size=2)
        job, waits = (int(number), queues[number].pushed), queues[other].end
        behind[job] = [(int(other), count) for count in range(waits[1])] if other != number else []
        scheduler.push(queues[number], lambda job=job: ran.append(job), [waits] if other != number else [])
        if random.random() < 0.1:
            scheduler.run_to(queues[other].end)
    scheduler.run_all()
    places = {job: place for place, job in enumerate(ran)}
    assert len(places) == 60
    for job, before in behind.items():
        assert all(places[one] < places[job] for one in before)
        assert job[1] == 0 or places[job[0], job[1] - 1] < places[job]


def test_seed_0_is_as_late_as_it_can_be() -> None:
    with simulated() as machine:
        host = torch.zeros(N).pin_memory()
        assert host.is_pinned()
        assert not torch.zeros(N).is_pinned()
        host.copy_(torch.ones(N, device="cuda"), non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        assert not event.query()
        assert machine.is_pending(host)
        assert not host.any()
        assert machine.counts.to_host == 4 * N
        assert not machine.counts.waits
        event.synchronize()
        assert host.all()
        assert event.query()
        assert not machine.is_pending(host)


def test_polling_an_event_succeeds_in_the_end() -> None:
    with simulated():
        torch.ones(N, device="cuda")
        event = torch.cuda.current_stream().record_event()
        assert any(event.query() for _ in range(100))


@pytest.mark.parametrize("seed", [0, 1])
def test_pageable_memory_is_copied_at_once(seed: int) -> None:
    with simulated(seed) as machine:
        host = torch.zeros(N)
        host.copy_(torch.ones(N, device="cuda"), non_blocking=True)
        assert host.all()
        assert [one.why for one in machine.counts.waits] == ["copy to pageable host memory"]
        state = torch.zeros(N, device="cuda")
        state.copy_(host, non_blocking=True)
        host.zero_()  # it was already read
        assert state.cpu().all()


def test_operations_give_the_results_of_the_cpu() -> None:
    """Views, strides, types, sizes that depend on data, out= and in-place forms."""

    def program(device: str) -> list[Any]:
        x = torch.arange(24.0, device=device).reshape(4, 6)
        y = x.t()[1:4, ::2]
        x[1, 2:4] = -1
        y = y.clone().add_(1)
        z = torch.cat([y.reshape(-1), x.to(torch.bfloat16).float().flatten()])
        found = [x, y, z, x.double(), x > 3, x[x > 3], torch.nonzero(x), x.unique(), z.sort().values, x[None, 1]]
        found += [torch.stack([x, x]).sum(0), x @ x.t(), x.view(torch.int32), x.expand(2, 4, 6).contiguous()]
        found += [x.masked_fill(x > 2, 0), torch.where(x > 2, x, -x), x.cumsum(0), x.std(), x.softmax(1), x.half()]
        found += [torch.view_as_real(torch.complex(x, x).conj().resolve_conj()), z.topk(3).indices, x.new_zeros(3)]
        found += [x.to(torch.int64).bitwise_and_(5), x.to(torch.int64) & 0xFFFFFFFF]  # numbers that stand for tensors
        found += [torch.tensor([1, 2], device=device), torch.complex(x, x).imag, torch.complex(x, x).conj().imag]
        return [*found, x.sum().item(), bool(torch.equal(x, x)), x.tolist(), torch.searchsorted(z.sort().values, x)]

    wanted = program("cpu")
    for seed in range(3):
        with simulated(seed):
            found = program("cuda")
            assert all(one.is_cuda and type(one) is torch.Tensor for one in found if isinstance(one, torch.Tensor))
            found = [one.cpu() if isinstance(one, torch.Tensor) else one for one in found]
        for one, other in zip(wanted, found, strict=True):
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
            else:
                assert one == other


FORMS: list[Callable[[Any], Any]] = [
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    lambda ps: torch.optim.Adam(ps, foreach=False),
    lambda ps: torch.optim.Adam(ps, foreach=True),
    lambda ps: torch.optim.AdamW(ps, foreach=False),
    lambda ps: torch.optim.AdamW(ps, foreach=True),
    lambda ps: torch.optim.AdamW(ps, fused=True),
]


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_a_model_is_trained_as_on_the_cpu(form: int) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inner = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU()
        model = torch.nn.Sequential(*inner, torch.nn.Linear(16, 2)).to(device)
        optimizer = FORMS[form](list(model.parameters()))
        for _ in range(3):
            model(torch.ones(4, 8, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().cpu() for one in model.parameters()]

    wanted = train("cpu")
    for seed in (0, 5):
        with simulated(seed) as machine:
            found = train("cuda")
            assert not machine.hazards
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(one, other)


def test_nothing_stays_behind() -> None:
    before = torch.cuda.Stream, torch.Tensor.record_stream, torch.empty, torch.cuda.is_available
    with simulated():
        torch.ones(3, device="cuda")
    assert before == (torch.cuda.Stream, torch.Tensor.record_stream, torch.empty, torch.cuda.is_available)
    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(3, device="cuda")
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()  # autograd asks torch's hooks again


def test_memory_is_counted() -> None:
    with simulated() as machine:
        kept = torch.empty(100, dtype=torch.uint8, device="cuda")
        machine.counts.reset()
        one = torch.empty(1000, dtype=torch.uint8, device="cuda")
        del one
        torch.empty(10, dtype=torch.uint8, device="cuda")
        assert machine.counts.extra == 1000
        assert kept.untyped_storage().nbytes() == 100


def test_a_copy_without_a_wait_is_pinned_and_late() -> None:
    with simulated() as machine:
        x = torch.ones(N, device="cuda")
        host = x.to("cpu", non_blocking=True)
        assert host.is_pinned()
        assert machine.is_pending(host)
        assert not machine.counts.waits
        torch.cuda.synchronize()
        assert host.all()


def test_random_numbers_come_from_the_device_s_own_generator() -> None:
    def drawn() -> list[torch.Tensor]:
        made = torch.nn.functional.dropout(torch.ones(N, device="cuda", requires_grad=True), 0.5).detach()
        return [torch.rand(N, device="cuda").cpu(), torch.randperm(N, device="cuda").cpu(), made.cpu()]

    for seed in range(3):
        with simulated(seed):
            torch.manual_seed(3)
            host = torch.get_rng_state()
            before = torch.cuda.get_rng_state_all()
            first, second = drawn(), drawn()
            assert not torch.equal(first[0], second[0])
            torch.cuda.set_rng_state(before[0], 0)
            same(first, drawn())
            assert torch.equal(host, torch.get_rng_state())


# ------------------------------------------------------------------------------------------------------- the product


def trained_state() -> dict[str, torch.Tensor]:
    return {"x": torch.arange(5000.0, device="cuda"), "y": torch.arange(12.0, device="cuda").reshape(3, 4).t()}


@pytest.mark.parametrize("seed", range(6))
def test_save_and_load_into(tmp_path: Path, seed: int) -> None:
    """The state changes right after each save, in the stream of the caller."""
    with simulated(seed) as machine, torch.cuda.stream(torch.cuda.Stream()):
        store = ckptstore.open(tmp_path / "run")
        state, copies = trained_state(), []
        with store.writer() as writer:
            for step in range(1, 4):
                copies.append({name: one.clone() for name, one in state.items()})
                writer.save_async(state, step)
                for one in state.values():
                    one.mul_(1.5)
        for step, wanted in enumerate(copies, 1):
            into = {name: torch.empty_like(one) for name, one in state.items()}
            store.load(step, into=into)
            same({name: one.cpu() for name, one in wanted.items()}, {name: one.cpu() for name, one in into.items()})
        assert not machine.hazards
        assert machine.counts.waits


@pytest.mark.parametrize("way", ["full", "delta", "gradient", "gradient+recompute"])
def test_training_with_a_checkpointer(tmp_path: Path, way: str) -> None:
    with simulated(7) as machine:
        check(tmp_path / "run", "cuda", way, "AdamW foreach", own_stream=True, scaled=way.startswith("gradient"))
        assert not machine.hazards


@pytest.mark.parametrize("way", ["full by an agent", "gradient by an agent"])
def test_training_with_a_checkpointer_and_an_agent(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start_warm(monkeypatch)
    with simulated(7) as machine:
        check(tmp_path / "run", "cuda", way, "AdamW foreach", own_stream=True)
        assert not machine.hazards


@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_a_run_with_compressed_gradients(tmp_path: Path, scope: str) -> None:
    with simulated(5) as machine, torch.cuda.stream(torch.cuda.Stream()):
        check_sparse(tmp_path / "run", "cuda", scope)
        torch.cuda.synchronize()
        assert not machine.hazards


SAVERS = {"one process": (False, 0), "agent": (True, 0), "ranks": (False, 2), "ranks with agents": (True, 2)}


@pytest.mark.parametrize("strategy", ["full", "gradient"])
def test_a_state_on_a_device_is_flattened_once(tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After that by plan, in the order of the stream that is current at each step."""
    made = StatePlan.whole
    planned: list[int] = []

    def whole(plan: StatePlan, light: Any) -> Any:
        planned.append(len(light.tensors))
        return made(plan, light)

    monkeypatch.setattr(StatePlan, "whole", whole)
    with simulated(0) as machine:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        wanted: list[Any] = []
        with Checkpointer(
            tmp_path / "run", model=model, optimizer=optimizer, strategy=strategy, max_in_flight=2, signals=False
        ) as saved:
            saved.resume()
            for _ in range(6):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    model(torch.ones(2, 8, device="cuda")).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    wanted.append({name: one.clone() for name, one in model.state_dict().items()})
                    saved.step()
                torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert not machine.hazards
        wanted = [{name: one.cpu() for name, one in state.items()} for state in wanted]
    assert len(planned) >= 5, "states were flattened"
    store = ckptstore.open(tmp_path / "run")
    for step, state in enumerate(wanted, 1):
        same(state, dict(store.load(step)["model"]))


@pytest.mark.parametrize(
    ("savers", "strategy"),
    [*in_turn([*SAVERS], ["full", "delta", "gradient"]), ("one process", "gradient+recompute")],
)
def test_a_step_waits_for_no_device(
    tmp_path: Path, savers: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once memory is registered. Nothing leaves the device twice."""
    agent, ranks = SAVERS[savers]
    start_warm(monkeypatch)
    row = measured(tmp_path / "run", strategy, parameters=6, agent=agent, ranks=ranks)
    assert row.training_waits == 0, row.waits
    assert row.waits
    recomputed = strategy == "gradient+recompute"
    assert row.to_host <= (0.36 if recomputed else 1.02) * row.state_bytes
    assert not row.hazards
    assert row.reported == row.kept
    assert bool(row.kept) == (savers == "ranks" or recomputed), "constants of digests"


@pytest.mark.parametrize("savers", ["one process", "ranks"])
def test_a_step_with_compressed_gradients_waits_for_no_device(tmp_path: Path, savers: str) -> None:
    """Neither does what compresses them. Besides the state only the entries leave the device, together."""
    agent, ranks = SAVERS[savers]
    row = measured(tmp_path / "run", "gradient+topk", parameters=6, agent=agent, ranks=ranks)
    assert row.training_waits == 0, row.waits
    assert sum(count for where, count in row.copied_by.items() if "torch_offload" in where) == max(ranks, 1)
    assert not row.hazards
    assert row.reported == row.kept > row.state_bytes / 3 - 1000


Entries = list[dict[int, tuple[list[int], bytes, int]]]


def compressed(seed: int, device: str, late: Callable[[TopKHook, Any], Any], **options: Any) -> Entries:
    """Entries that the optimizer would consume, read after the gradients have changed -> by step and parameter."""
    with simulated(seed) as machine, torch.cuda.stream(torch.cuda.Stream()):
        chance = torch.Generator().manual_seed(0)
        shapes = [(7, 9), (40,), (3,), (300, 20), (4, 5)]
        parameters = [torch.nn.Parameter(torch.zeros(shape).to(device)) for shape in shapes]
        hook = TopKHook(0.1, **options)
        found: Entries = []
        for step in range(5):
            for one in parameters[: 4 if step < 3 else 5]:
                one.grad = torch.randn(one.shape, generator=chance).to(device)
            if step == 4:
                parameters[3].grad = parameters[3].grad.t().contiguous().t()
            machine.counts.reset()
            hook.compress(parameters)
            if step % 2:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            if step == 3:
                parameters[1].grad.add_(1.0)
            asked = parameters[1:] if step == 2 else parameters
            later = late(hook, asked)
            assert not [wait for wait in machine.counts.waits if wait.where]
            for one in parameters:
                one.grad = None
            read = {n: arrived(later[one]) for n, one in enumerate(parameters) if one in later}
            found.append(
                {
                    n: (one.indices.tolist(), one.values.tobytes(), one.size)
                    for n, one in read.items()
                    if one is not None
                }
            )
        torch.cuda.synchronize()
        assert not machine.hazards
        return found


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_gradients_are_compressed_as_on_the_host(scope: str, momentum: float) -> None:
    wanted = compressed(0, "cpu", TopKHook.consumed, scope=scope, momentum=momentum)
    assert [sorted(one) for one in wanted] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3], [0, 2, 3, 4], [0, 1, 2, 3, 4]]
    for seed in FEW:
        assert compressed(seed, "cuda", TopKHook.consumed_later, scope=scope, momentum=momentum) == wanted


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_what_is_not_finite_is_sent_and_never_kept_on_a_device(scope: Any, momentum: float) -> None:
    with simulated(3) as machine:
        hook = TopKHook(0.25, scope=scope, momentum=momentum)
        parameters = [torch.nn.Parameter(torch.zeros(8).cuda()) for _ in range(2)]
        for one in parameters:
            one.grad = torch.tensor([math.inf, -math.inf, math.nan, 2.0, math.inf, 0.0, 1.0, -math.inf]).cuda()
        machine.counts.reset()
        hook.compress(parameters)
        assert not [wait for wait in machine.counts.waits if wait.where]
        sent = sum(int((~one.grad.cpu().isfinite()).sum()) for one in parameters)
        assert sent == 4, "a scaler sees them"
        for one in parameters:
            one.grad = torch.zeros(8).cuda()
        hook.compress(parameters)
        wanted = 3.0 if momentum else 2.0
        assert sorted(one.grad.cpu().max().item() for one in parameters) == [wanted, wanted]
        assert not machine.hazards


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_replicas_step_waits_for_no_device(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients leave the device, and digests; of the parameters that the agent computes nothing else."""
    start_warm(monkeypatch)
    row = measured(tmp_path / "run", "replica", parameters=6, agent=True, ranks=ranks)
    assert row.training_waits == 0, row.waits
    assert row.waits
    assert row.to_host <= 0.36 * row.state_bytes
    assert not row.hazards


@pytest.mark.parametrize(("strategy", "ranks"), in_turn(["replica+topk", "replica+bucket"], [2, 0]))
def test_of_compressed_gradients_a_replica_takes_only_entries(
    tmp_path: Path, strategy: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices, values and digests leave the device, and parameters that are too small for the agent to compute."""
    start_warm(monkeypatch)
    row = measured(tmp_path / "run", strategy, parameters=6, agent=True, ranks=ranks)
    assert row.training_waits == 0, row.waits
    assert row.waits
    assert row.to_host <= 0.03 * row.state_bytes
    assert not row.hazards


def layer_by_layer(seed: int, mode: str, change: Callable[[pytest.MonkeyPatch], object]) -> bool:
    """Snapshots that are taken layer by layer, while the optimizer's next step is queued -> whether all are right."""
    with simulated(seed) as machine, pytest.MonkeyPatch.context() as patch, torch.cuda.stream(torch.cuda.Stream()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        copies: list[dict[str, torch.Tensor]] = []
        change(patch)
        read, moved = TorchSource.read, threading.Condition()

        def later(source: TorchSource, offset: int, out: Any) -> None:
            """The host reaches the copy only when the next step was queued."""
            with moved:
                begun = len(copies)  # without the step itself, whose optimizer has not returned
                moved.wait_for(lambda: len(copies) > begun + 1 or len(copies) == 3, 0.1)
            read(source, offset, out)

        if mode == "device":
            patch.setattr(TorchSource, "read", later)
        store = ckptstore.open(f"memory://{uuid.uuid4().hex}")
        with (
            store.writer(max_in_flight=4) as writer,
            LayerwiseSnapshots(
                writer, model, optimizer, lambda: {"model": model.state_dict()}, mode=mode, packed=0
            ) as it,
        ):
            for step in range(1, 4):
                model(torch.ones(2, 8, device="cuda")).square().mean().backward()
                it.begin(step)
                optimizer.step()
                with moved:
                    copies.append({name: one.clone() for name, one in model.state_dict().items()})
                    moved.notify_all()
                it.save(step)
        found = [store.load(step)["model"] for step in range(1, 4)]
        torch.cuda.synchronize()
        return not machine.hazards and all(
            torch.equal(one[name].cpu(), wanted[name].cpu())
            for one, wanted in zip(found, copies, strict=True)
            for name in wanted
        )


@pytest.mark.parametrize("mode", ["host", "device"])
def test_layer_by_layer(mode: str) -> None:
    assert [seed for seed in range(short_or(6, 12)) if not layer_by_layer(seed, mode, lambda _: None)] == []


@pytest.mark.parametrize("mode", ["host", "device"])
def test_a_device_holds_no_copies_of_layers_that_the_host_has(tmp_path: Path, mode: str) -> None:
    row = measured(tmp_path / "run", "layerwise" if mode == "host" else f"layerwise+{mode}", parameters=6)
    assert row.kept == 0
    assert row.reported <= row.held, "the save is measured while its layers are copied"
    assert (0 < row.held <= row.state_bytes) if mode == "device" else row.held == 0
    assert row.training_waits == 0
    assert row.to_host == row.state_bytes
    assert not row.hazards


def test_copies_of_layers_are_counted_until_they_are_freed() -> None:
    with simulated() as machine:
        weight = torch.zeros(30, 20, device="cuda")
        before = bridge.device_bytes()
        source = staged({"weight": TorchSource(weight)}, "device")
        assert bridge.device_bytes() - before == weight.nbytes
        source.end("layer")()
        assert bridge.device_bytes() == before
        with pytest.raises(StorageError, match="freed"):
            source.sources["weight"].view()
        torch.cuda.synchronize()
        assert not machine.hazards


def test_copies_for_an_abandoned_save_are_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when Python collects cycles: most of their reads are cancelled."""
    read, may = TorchSource.read, threading.Event()

    def held(source: TorchSource, offset: int, out: Any) -> None:
        may.wait(60)
        read(source, offset, out)

    monkeypatch.setattr(TorchSource, "read", held)
    with simulated():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = bridge.device_bytes()
        gc.disable()
        try:
            with (
                ckptstore.open(f"memory://{uuid.uuid4().hex}").writer() as writer,
                LayerwiseSnapshots(writer, model, optimizer, mode="device", packed=0) as it,
            ):
                for step in range(1, 4):
                    it.begin(step)
                    model(torch.ones(2, 64, device="cuda")).sum().backward()
                    optimizer.step()
                    assert step == 1 or bridge.device_bytes() > before
                    threading.Timer(0.05, may.set).start()
                    it.abandon()
                    assert bridge.device_bytes() == before
                    may.clear()
        finally:
            may.set()
            gc.enable()
        torch.cuda.synchronize()


def abandoned(
    seed: int, mode: Any, change: Callable[[pytest.MonkeyPatch], object], place: Path | None = None
) -> tuple[list[str], bool]:
    """Every other layer-wise save is abandoned while layers are copied -> hazards, and whether the others are right.

    Args:
        place: where an agent saves; None: this process saves.
    """
    with simulated(seed) as machine, pytest.MonkeyPatch.context() as patch, torch.cuda.stream(torch.cuda.Stream()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        copies: dict[int, dict[str, torch.Tensor]] = {}
        change(patch)
        url = f"memory://{uuid.uuid4().hex}"
        opening = ckptstore.open(url).writer(max_in_flight=1) if place is None else (
            ckptstore.agent.writer(place, name=uuid.uuid4().hex, linger_seconds=0, max_in_flight=1)
        )  # fmt: skip
        with (
            opening as writer,
            LayerwiseSnapshots(
                writer, model, optimizer, lambda: {"model": model.state_dict()}, mode=mode, packed=0
            ) as it,
        ):
            for step in range(1, 7):
                model(torch.ones(2, 8, device="cuda")).square().mean().backward()
                it.begin(step)
                optimizer.step()
                if step % 2 == 0:
                    it.abandon()
                    continue  # the next step changes the layers at once, and its save gets the memory
                copies[step] = {name: one.clone() for name, one in model.state_dict().items()}
                it.save(step)
        store = ckptstore.open(url if place is None else place)
        assert [info.step for info in store.checkpoints()] == list(copies)
        found = {step: store.load(step)["model"] for step in copies}
        torch.cuda.synchronize()
        right = all(
            torch.equal(found[step][name].cpu(), wanted.cpu())
            for step in copies
            for name, wanted in copies[step].items()
        )
        return machine.hazards, right


@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.parametrize("mode", ["host", "device"])
def test_layers_that_are_abandoned_while_a_device_copies_them(
    tmp_path: Path, mode: str, agent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if agent:
        start_warm(monkeypatch)
    for seed in FEW:
        hazards, right = abandoned(seed, mode, lambda _: None, tmp_path / f"{seed}" if agent else None)
        assert not hazards, seed
        assert right, seed


def test_a_gate_that_is_forgotten_when_layers_are_abandoned_is_caught() -> None:
    def without(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(LayerSource, "gate", lambda _: None)

    assert any(abandoned(seed, "device", without)[0] for seed in SEEDS)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "nobody waits before the layer changes": lambda patch: patch.setattr(LayerSource, "gate", lambda _: None),
    "the copy is not behind the update": lambda patch: patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_product_without_one_of_its_waits_is_caught(mutant: str) -> None:
    assert any(not layer_by_layer(seed, "device", MUTANTS[mutant]) for seed in SEEDS)


@pytest.mark.parametrize("scope", ["tensor", "bucket"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_of_ddp(ranks: int, scope: Any) -> None:
    """DDP in one process, over a group in which all ranks send the same: its buckets and hooks are torch's own."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    with simulated(3) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=ranks)
        try:
            model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 2)).cuda()
            parallel = torch.nn.parallel.DistributedDataParallel(model)
            hook = TopKHook(density=0.25, scope=scope)
            hook.register(parallel)
            output = parallel(torch.randn(2, 8).cuda()).square().sum()
            machine.counts.reset()
            output.backward()
            later = hook.consumed_later(list(model.parameters()))
            assert not [wait for wait in machine.counts.waits if wait.where]
            assert set(later) == set(model.parameters())
            for one, found in later.items():
                assert isinstance(found, LateGradient)
                entries = found.read()
                assert entries is not None
                assert one.grad is not None
                assert entries.dense().tobytes() == one.grad.cpu().numpy().tobytes()
                sent = torch.count_nonzero(one.grad).item()
                assert scope == "bucket" or sent == len(entries.indices) == max(1, one.numel() // 4)
        finally:
            torch.distributed.destroy_process_group()
        torch.cuda.synchronize()
        assert not machine.hazards


@pytest.mark.parametrize("broken", [False, True])
def test_the_campaign_finds_a_missing_order(tmp_path: Path, broken: bool) -> None:
    out = tmp_path / "seeds.jsonl"
    command = ["--seeds", "1", "--only", "full", "--out", str(out), *(["--broken"] if broken else [])]
    done = CliRunner().invoke(campaign.main, command)
    assert done.exit_code == broken, done.output
    assert [bool(json.loads(line)["wrong"]) for line in out.read_text().splitlines()] == [broken, broken]
    if broken:
        assert "nothing orders that" in done.output
    assert "0 cases" in CliRunner().invoke(campaign.main, command).output, "what is done is not done again"


def test_the_table_of_a_step(tmp_path: Path) -> None:
    row = measured(tmp_path / "run", "full", parameters=6, seed=0)
    assert row.to_host >= row.state_bytes > 0
    assert row.waits
    said = CliRunner().invoke(main, ["--json", "--parameters", "6", "--strategy", "delta", "--ranks", "2"])
    assert said.exit_code == 0, said.output
    (found,) = json.loads(said.output)["rows"]
    assert (found["strategy"], found["ranks"]) == ("delta", 2)
    assert found["launches"] >= 0
    said = CliRunner().invoke(main, ["--parameters", "2", "--strategy", "full", "--ranks", "1"])
    assert "full, 1 ranks" in said.output


def test_the_waits_of_the_threads_that_train_are_counted_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies to memory that is not registered wait, each in the thread that asks for it."""
    monkeypatch.setattr(torch_offload, "register", lambda *_: False)
    row = measured(tmp_path / "run", "full", parameters=2)
    assert row.training_waits == sum(row.waits.values()) > 0


def test_contracted_operations_are_rounded_once() -> None:
    """As `formats.optim` computes them, in another way."""
    chance = np.random.default_rng(4)
    a, b, c = (
        (10.0 ** chance.uniform(-22, 18, 100_000) * chance.choice([-1, 1], 100_000)).astype(np.float32)
        for _ in range(3)
    )
    c[::2] = -a[::2] * b[::2]  # what is left of it is the error of the product
    wanted = np.empty_like(a)
    with simulated(roundings=CONTRACTED):
        found = torch.from_numpy(c).cuda().addcmul_(torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()).cpu()
        added = torch.from_numpy(c).cuda().add_(torch.from_numpy(b).cuda(), alpha=0.3).cpu()
    plain = c + np.float32(1) * (a * b)
    assert found.numpy().tobytes() == plain.tobytes(), "the product within it is rounded, as in torch's source"
    arithmetic.fma(b, float(np.float32(0.3)), c, wanted)
    assert added.numpy().tobytes() == wanted.tobytes()
    assert wanted.tobytes() != (np.float32(0.3) * b + c).tobytes()
    assert np.isfinite(wanted).all()
