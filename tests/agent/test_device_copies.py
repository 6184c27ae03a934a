"""What a device copies to an agent's buffers: queued, in order, handed over when it is there; on a simulated device."""

from __future__ import annotations

import gc
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
import ckptstore.agent  # noqa: E402
from ckptstore import DeltaOptions, DiffOptions  # noqa: E402
from ckptstore.agent import AgentRestartWarning, AgentWriter  # noqa: E402
from ckptstore.agent.client.agent_term import AgentTerm  # noqa: E402
from ckptstore.agent.client.buffer_client import BorrowedBuffer, BufferClient  # noqa: E402
from ckptstore.agent.server.shared_buffers import SharedBuffer, SharedBuffers  # noqa: E402
from ckptstore.errors import AgentLostError, UsageError  # noqa: E402
from ckptstore.formats import uncached_copy  # noqa: E402
from ckptstore.frameworks.torch_offload import CopyQueue  # noqa: E402
from ckptstore.training import OptimizerStep  # noqa: E402
from tests.agent.lives import kill, run  # noqa: E402
from tests.forms import short_or  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.waiting import until  # noqa: E402
from tools.device import simulated, why_not  # noqa: E402
from tools.device.machine import Machine  # noqa: E402

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.usefixtures("warm_agents"),
]

SEEDS = range(short_or(2, 100))
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "delta": {"deltas": DeltaOptions(interval=1)},
    "gradient": {"diffs": DiffOptions(full_every=4)},
}
STEPS = 8
WARM = 4
"""Saves after which every buffer was used, and is registered."""


def opened(place: Path, **options: Any) -> AgentWriter:
    return ckptstore.agent.writer(place, name=uuid.uuid4().hex, linger_seconds=60.0, **options)


class Training:
    """A model that SGD moves, and a state that also has strided, odd and host tensors; on a stream of its own."""

    def __init__(self) -> None:
        self.stream, self.side = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            self.weights = [torch.zeros(size, device="cuda", requires_grad=True) for size in (3000, 700, 1)]
            self.optimizer = torch.optim.SGD(self.weights, lr=0.125, momentum=0.5)
            self.odd = torch.zeros(7, dtype=torch.uint8, device="cuda")
            self.strided = torch.zeros(5, 4, device="cuda").t()
            self.host = torch.zeros(5)
            self.lent = torch.zeros(900, device="cuda")

    def step(self, number: int) -> None:
        for weight in self.weights:
            weight.grad = torch.full_like(weight, float(number))
        self.optimizer.step()
        self.odd.add_(number)
        self.strided.add_(number)
        self.host.add_(number)
        # Memory of another stream, which is that stream's again as soon as nobody has the tensor.
        with torch.cuda.stream(self.side):
            other = torch.full((900,), float(number), device="cuda")
        self.stream.wait_stream(self.side)
        other.record_stream(self.stream)
        self.lent = other

    def state(self) -> dict[str, Any]:
        slots = [self.optimizer.state[one].get("momentum_buffer") for one in self.weights]
        return {
            "weights": list(self.weights),
            "momentum": slots,
            "odd": self.odd,
            "strided": self.strided,
            "host": self.host,
            "lent": self.lent,
        }


def on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: on_host(one) for name, one in value.items()}
    if isinstance(value, list):
        return [on_host(one) for one in value]
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def copied(value: Any) -> Any:
    """A copy on the device, which is queued."""
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def watched(machine: Machine, patch: pytest.MonkeyPatch) -> list[str]:
    """What passes a buffer on while a device still copies to it."""
    early: list[str] = []
    beside: dict[int, BorrowedBuffer] = {}
    save, give_back, lend_beside = BorrowedBuffer.save, BorrowedBuffer.give_back, BufferClient.lend_beside

    def note(buffer: BorrowedBuffer, what: str) -> None:
        if machine.is_pending(torch.from_numpy(buffer.memory)):
            early.append(what)

    def saved(self: BorrowedBuffer, body: dict[str, Any], failed: Callable[[BaseException], None]) -> None:
        note(self, "save")
        if (number := body.get("gradients")) is not None:
            note(beside[number], "gradients")
        save(self, body, failed)

    def given_back(self: BorrowedBuffer) -> None:
        note(self, "give back")
        give_back(self)

    def lent_beside(self: BufferClient, *arguments: Any) -> BorrowedBuffer:
        lent = lend_beside(self, *arguments)
        beside[lent.number] = lent
        return lent

    patch.setattr(BorrowedBuffer, "save", saved)
    patch.setattr(BorrowedBuffer, "give_back", given_back)
    patch.setattr(BufferClient, "lend_beside", lent_beside)
    return early


def settled(machine: Machine, registered: int) -> None:
    """Wait until some buffers are registered, so that copies to them are queued."""
    until(lambda: len(machine.registered) >= registered, "nothing is registered")


def trained(machine: Machine, place: Path, way: str, *, registers: bool = True) -> dict[int, Any]:
    """Save each step, and queue the next one at once -> copies of what was saved."""
    training, wanted = Training(), {}
    with torch.cuda.stream(training.stream), opened(place, max_in_flight=2, **WAYS[way]) as writer:
        for step in range(1, STEPS + 1):
            training.step(step)
            with torch.no_grad():
                wanted[step] = copied(training.state())
            updates = OptimizerStep(training.optimizer) if way == "gradient" else None
            pending = writer.save_async(training.state(), step, updates=updates)
            if step <= WARM:
                pending.result()
                settled(machine, min(step, 2) if registers else 0)
        torch.cuda.synchronize()
    return {step: on_host(state) for step, state in wanted.items()}


def right(place: Path, wanted: dict[int, Any]) -> bool:
    """Whether each step is restored with its bits."""
    store = ckptstore.open(place)
    for step, state in wanted.items():
        same(state, on_host(store.load(step)), f"step {step}")
    return True


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_is_the_state_of_its_step(tmp_path: Path, way: str) -> None:
    for seed in SEEDS:
        with simulated(seed) as machine, pytest.MonkeyPatch.context() as patch:
            early = watched(machine, patch)
            wanted = trained(machine, tmp_path / f"{seed}", way)
            assert not machine.hazards, (seed, machine.hazards)
            assert early == []
            assert machine.counts.waits
        assert right(tmp_path / f"{seed}", wanted)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "the agent is told before the event": lambda patch: patch.setattr(CopyQueue, "marked", lambda _: lambda: None),
    "nothing later waits for the copies": lambda patch: patch.setattr(CopyQueue, "gate", lambda _: None),
    "the copies wait for nothing": lambda patch: patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None),
    "memory is not kept for the copies": lambda patch: patch.setattr(torch.Tensor, "record_stream", lambda *_: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_leaves_an_order_out_is_caught(tmp_path: Path, mutant: str) -> None:
    """Each of these makes the test above fail."""
    for seed in range(20):
        with simulated(seed) as machine, pytest.MonkeyPatch.context() as patch:
            MUTANTS[mutant](patch)
            early = watched(machine, patch)
            wanted = trained(machine, tmp_path / f"{seed}", "gradient")
            if machine.hazards or early:
                return
        try:
            right(tmp_path / f"{seed}", wanted)
        except AssertionError:
            return
    pytest.fail(f"{mutant}: not caught under any seed")


class Held:
    """Holds every thread that waits for the device, until `release`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waiting = threading.Event()
        self._released = threading.Event()
        synchronize = torch.cuda.Event.synchronize

        def held(event: Any) -> None:
            self.waiting.set()
            assert self._released.wait(60)
            synchronize(event)

        patch.setattr(torch.cuda.Event, "synchronize", held)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def device() -> Iterator[Machine]:
    with simulated(0) as machine:
        yield machine


def warm(machine: Machine, writer: AgentWriter, state: dict[str, Any]) -> None:
    """Save until every buffer is registered."""
    for step in range(1, WARM + 1):
        writer.save_async(state, step).result()
        settled(machine, min(step, 2))


def test_a_later_state_of_the_host_overtakes_none_that_is_being_copied(
    tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = {"x": torch.ones(2000)}, {"x": torch.ones(2000, device="cuda")}
    with opened(tmp_path / "store", max_in_flight=3) as writer:
        warm(device, writer, there)
        held = Held(monkeypatch)
        first = writer.save_async(there, 10)
        second = writer.save_async(here, 11)
        assert held.waiting.wait(30)
        assert not first.done()
        assert not second.done()
        held.release()
        assert [one.result().step for one in (first, second)] == [10, 11]
        assert writer.inherited is None
    assert not device.hazards


def test_a_save_that_is_being_copied_can_be_cancelled(
    tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the agent knows it. It may have saved the state before it is asked, and then the answer is no."""
    state = {"x": torch.ones(2000, device="cuda")}
    stored, cancelled = [1, 2, 3, 4], False
    with opened(tmp_path / "store", max_in_flight=3) as writer:
        warm(device, writer, state)
        for step in range(10, 40):
            with monkeypatch.context() as patch:
                held = Held(patch)
                pending = writer.save_async(state, step)
                answer: list[bool] = []
                asking = threading.Thread(target=lambda pending=pending, answer=answer: answer.append(pending.cancel()))
                asking.start()
                assert held.waiting.wait(30)
                asking.join(0.1)
                assert answer == [], "the agent does not know the step yet"
                held.release()
                asking.join(60)
            cancelled = answer == [True]
            if cancelled:
                assert pending.exception() is not None
                break
            assert pending.result().step == step
            stored.append(step)
        writer.wait()
    assert cancelled, "no save of many was cancelled"
    assert [one.step for one in ckptstore.open(tmp_path / "store").checkpoints()] == stored


def test_a_save_that_fails_while_a_device_copies_gives_its_buffer_back_once_that_is_over(
    tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.ones(2000, device="cuda"), "y": torch.zeros(2000)}
    with opened(tmp_path / "store", max_in_flight=2, diffs=DiffOptions(full_every=4)) as writer:
        warm(device, writer, state)
        early = watched(device, monkeypatch)
        waits = len(device.counts.waits)
        with pytest.raises(UsageError, match="updates"):
            writer.save_async(state, 10, updates=lambda _: 1)  # type: ignore[arg-type, return-value]
        assert len(device.counts.waits) > waits, "its copies were queued"
        writer.save_async(state, 10).result()
    assert early == []
    assert not device.hazards
    same(on_host(state), on_host(ckptstore.open(tmp_path / "store").load(10)))


def test_a_copy_of_the_host_that_fails_while_a_device_copies(
    tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer is given back once the device has copied, too."""

    def fails(*_: Any) -> None:
        raise MemoryError("no memory")

    state = {"x": torch.ones(2000, device="cuda"), "y": torch.zeros(2000)}
    with opened(tmp_path / "store", max_in_flight=2) as writer:
        warm(device, writer, state)
        early = watched(device, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(uncached_copy, "copy", fails)
            with pytest.raises(MemoryError, match="no memory"):
                writer.save_async(state, 10)
        writer.save_async(state, 10).result()
    assert early == []
    same(on_host(state), on_host(ckptstore.open(tmp_path / "store").load(10)))


def test_a_device_that_fails_fails_the_save(tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    state = {"x": torch.ones(2000, device="cuda")}
    with opened(tmp_path / "store", max_in_flight=2) as writer:
        warm(device, writer, state)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Event, "synchronize", fails)
            pending = writer.save_async(state, 10)
            with pytest.raises(RuntimeError, match="illegal"):
                pending.result()
        torch.cuda.synchronize()
        writer.save_async(state, 11).result()
    assert [one.step for one in ckptstore.open(tmp_path / "store").checkpoints()] == [1, 2, 3, 4, 11]


def test_an_agent_that_dies_while_a_device_copies(
    tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers stay mapped and registered until the copies are over."""
    state = {"x": torch.ones(2000, device="cuda")}
    with opened(tmp_path / "store", max_in_flight=2) as writer:
        warm(device, writer, state)
        held = Held(monkeypatch)
        pending = writer.save_async(state, 10)
        assert held.waiting.wait(30)
        kill(writer.agent_pid)
        held.release()
        with pytest.raises(AgentLostError, match="step 10 may or may not"):
            pending.result()
        with pytest.warns(AgentRestartWarning):
            writer.save_async(state, 11).result()
    assert not device.hazards
    assert ckptstore.open(tmp_path / "store").latest_step() == 11


def test_every_buffer_is_registered_once_and_let_go_at_the_end(
    tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `close`, and not when another thread hears that the agent has ended."""
    state = {"x": torch.ones(2000, device="cuda")}
    monkeypatch.setattr(AgentTerm, "lost", lambda *_: None)
    gc.disable()
    try:
        with opened(tmp_path / "store", max_in_flight=2) as writer:
            warm(device, writer, state)
            assert device.registered
        assert device.registered == set()
    finally:
        gc.enable()


def test_memory_that_cannot_be_registered_costs_time_alone(
    tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = torch.cuda.cudart()
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    wanted = trained(device, tmp_path / "store", "gradient", registers=False)
    assert {one.why for one in device.counts.waits if one.where} == {"copy to host"}
    assert right(tmp_path / "store", wanted)


KILLED = """
import threading, torch
from tools.device import simulated
with simulated(0) as machine:
    writer = ckptstore.agent.writer(url, max_in_flight=2, linger_seconds=120)
    x = torch.zeros(100_000, device="cuda")
    for step in range(1, 5):
        x.fill_(step)
        writer.save_async({"x": x}, step).result()
    held = threading.Event()
    torch.cuda.Event.synchronize = lambda _: (held.set(), threading.Event().wait())
    x.fill_(5)
    writer.save_async({"x": x}, 5)
    assert held.wait(30)
    print("copying", flush=True)
    kill()
"""


def test_a_trainer_that_is_killed_while_a_device_copies_loses_that_step_alone(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path / "store", code=-signal.SIGKILL) == ["copying"]
    with (
        simulated(0),
        ckptstore.agent.writer(tmp_path / "store", max_in_flight=2, linger_seconds=60) as writer,
    ):
        assert writer.step == 4
        assert bool((writer.load()["x"] == 4).all())
        writer.save_async({"x": torch.full((100_000,), 5.0)}, 5).result()
    store = ckptstore.open(tmp_path / "store")
    assert [one.step for one in store.checkpoints()] == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        assert bool((store.load(step)["x"] == step).all())


def test_a_buffer_that_a_dead_trainer_was_filling_is_not_lent_again() -> None:
    """A device of the dead process may still copy to it."""
    pool, lent = SharedBuffers(2), list[SharedBuffer | MemoryError]()
    try:
        for _ in range(2):
            pool.lend(5000, lent.append)
        pool.take(5000)
        pool.recall()
        for _ in range(2):
            pool.lend(5000, lent.append)
        first, second, third, fourth = lent
        assert all(isinstance(one, SharedBuffer) for one in lent)
        assert {first, second}.isdisjoint({third, fourth})
        assert third is not fourth
    finally:
        pool.close()
