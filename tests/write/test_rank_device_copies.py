"""What devices copy for ranks: shares and digests are queued, in order, and read when they are there; simulated."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DeltaOptions, DiffOptions, RankOptions  # noqa: E402
from ckptstore.errors import DivergedReplicasError  # noqa: E402
from ckptstore.frameworks import bridge  # noqa: E402
from ckptstore.frameworks.torch_offload import CopyQueue  # noqa: E402
from ckptstore.training import OptimizerStep  # noqa: E402
from ckptstore.write.capture.snapshot import Snapshot  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox  # noqa: E402
from ckptstore.write.ranks.shares import ChosenDigests  # noqa: E402
from tests.forms import short_or  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.waiting import until  # noqa: E402
from tests.write.rank_threads import as_ranks  # noqa: E402
from tools.device import simulated, why_not  # noqa: E402
from tools.device.machine import Machine  # noqa: E402

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SEEDS = range(short_or(2, 100))
RANKS = 2
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "delta": {"deltas": DeltaOptions(interval=1)},
    "gradient": {"diffs": DiffOptions(full_every=4)},
    "batch": {"diffs": DiffOptions(full_every=8, batch=2)},
}
STEPS = 8
WARM = 4
"""Saves after which memory that is used again is registered."""


class Training:
    """One rank: replicated parameters that SGD moves, and others; on a device and a stream of its own."""

    def __init__(self, rank: int, *, large: bool = True) -> None:
        self.rank = rank
        torch.cuda.set_device(rank)
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            sizes = ((400, 1000) if large else (40, 10), (700,), (1,))  # of the first each rank stores some rows
            self.weights = [torch.zeros(size, device="cuda", requires_grad=True) for size in sizes]
            self.optimizer = torch.optim.SGD(self.weights, lr=0.125, momentum=0.5)
            self.odd = torch.zeros(7, dtype=torch.uint8, device="cuda")
            self.strided = torch.zeros(5, 4, device="cuda").t()
            self.host = torch.zeros(5)
            self.own = torch.full((90,), float(rank), device="cuda")

    def step(self, number: int) -> None:
        for weight in self.weights:
            weight.grad = torch.full_like(weight, float(number))
        self.optimizer.step()
        for one in (self.odd, self.strided, self.host, self.own):
            one.add_(number)

    def state(self) -> dict[str, Any]:
        slots = [self.optimizer.state[one].get("momentum_buffer") for one in self.weights]
        return {
            "weights": list(self.weights),
            "momentum": slots,
            "odd": self.odd,
            "strided": self.strided,
            "host": self.host,
            "own": {f"r{self.rank}": self.own},
        }


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: each(one, change) for name, one in value.items()}
    if isinstance(value, list):
        return [each(one, change) for one in value]
    return change(value.detach()) if isinstance(value, torch.Tensor) else value


def settled(machine: Machine, registered: int) -> None:
    """Wait until some memory is registered, so that copies to it are queued."""
    until(lambda: len(machine.registered) >= registered, "nothing is registered")


def trained(machine: Machine, place: Path, way: str, **how: Any) -> list[Any]:
    """Save each step on each rank, and queue the next one at once -> what each rank saved, or its error."""
    together = threading.Barrier(RANKS, timeout=60)

    def work(group: Group) -> dict[int, Any]:
        training, wanted = Training(group.rank, **how), {}
        options = RankOptions(timeout=60, per_rank="own.*")
        store = ckptstore.open(place, create=True)
        with (
            torch.cuda.stream(training.stream),
            store.writer(group=group, ranks=options, max_in_flight=2, **WAYS[way]) as writer,
        ):
            for step in range(1, STEPS + 1):
                training.step(step)
                wanted[step] = each(training.state(), lambda one: one.clone())
                updates = OptimizerStep(training.optimizer) if "diffs" in WAYS[way] else None
                pending = writer.save_async(training.state(), step, updates=updates)
                if step <= WARM:
                    pending.result()
                    together.wait()
                    settled(machine, 2 * min(step, 2))
        return {step: each(state, lambda one: one.cpu()) for step, state in wanted.items()}

    found = as_ranks(RANKS, work, LocalMailbox())
    torch.cuda.synchronize()
    return found


def check(place: Path, wanted: list[Any]) -> None:
    """Each step is restored with the bits of each rank."""
    store = ckptstore.open(place)
    for rank, states in enumerate(wanted):
        if isinstance(states, BaseException):
            raise AssertionError(f"rank {rank}") from states
        for step, state in states.items():
            loaded = each(store.load(step, rank=rank), lambda one: one)
            same(state["weights"], loaded["weights"], f"rank {rank}, step {step}: weights")
            for part in ("momentum", "odd", "strided", "host"):
                same(state[part], loaded[part], f"rank {rank}, step {step}: {part}")
            for name, own in state["own"].items():
                same(own, loaded["own"][name], f"rank {rank}, step {step}: {name}")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_is_the_state_of_its_step(tmp_path: Path, way: str) -> None:
    for seed in SEEDS:
        with simulated(seed, devices=RANKS) as machine:
            wanted = trained(machine, tmp_path / f"{seed}", way)
            assert not machine.hazards, (seed, machine.hazards)
        check(tmp_path / f"{seed}", wanted)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "a share is read before the event": lambda patch: patch.setattr(CopyQueue, "marked", lambda _: lambda: None),
    "the writing thread does not wait": lambda patch: patch.setattr(Snapshot, "arrive", lambda _: None),
    "nothing later waits for copies and digests": lambda patch: patch.setattr(CopyQueue, "gate", lambda _: None),
    "copies and digests wait for nothing": lambda patch: patch.setattr(
        torch.cuda.Stream, "wait_stream", lambda *_: None
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_leaves_an_order_out_is_caught(tmp_path: Path, mutant: str) -> None:
    """Each of these makes the test above fail."""
    for seed in range(20):
        with simulated(seed, devices=RANKS) as machine, pytest.MonkeyPatch.context() as patch:
            MUTANTS[mutant](patch)
            wanted = trained(machine, tmp_path / f"{seed}", "full", large=False)
            if machine.hazards:
                return
        for found in wanted:  # a patch that no longer fits is not a mutant
            assert not isinstance(found, BaseException) or isinstance(found, ckptstore.CkptError), found
        try:
            check(tmp_path / f"{seed}", wanted)
        except (AssertionError, ckptstore.CkptError):
            return
    pytest.fail(f"{mutant}: not caught under any seed")


def test_rows_of_a_tensor_are_copied_by_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank stores half of the only tensor, and its call waits for no device."""
    monkeypatch.setattr("ckptstore.write.ranks.division.CUT_FROM", 4096)
    place = tmp_path / "store"
    together = threading.Barrier(RANKS, timeout=60)
    with simulated(0, devices=RANKS) as machine:

        def work(group: Group) -> list[str]:
            torch.cuda.set_device(group.rank)
            x = torch.arange(1 << 20, dtype=torch.float32, device="cuda").reshape(-1, 256)
            store = ckptstore.open(place, create=True)
            with store.writer(group=group, ranks=RankOptions(timeout=60), max_in_flight=1) as writer:
                for step in range(1, WARM + 1):
                    writer.save_async({"x": x}, step).result()
                    settled(machine, RANKS)
                machine.counts.reset()
                together.wait()
                pending = writer.save_async({"x": x}, WARM + 1)
                x.zero_()
                waits = list(machine.counts.waits)
                pending.result()
            return [one.why for one in waits if one.thread == threading.get_ident()]

        assert as_ranks(RANKS, work, LocalMailbox()) == [[], []]
        assert 4 << 20 <= machine.counts.to_host < 5 << 20, "each half once"
        assert not machine.hazards
    store = ckptstore.open(place)
    assert np.array_equal(store.load("latest")["x"].reshape(-1), np.arange(1 << 20, dtype=np.float32))


def test_what_digests_there_are_is_known_without_the_device() -> None:
    """Threads that hash ask for each tensor whether its digest is known."""

    class Computing(dict[str, int]):
        def __getitem__(self, name: str) -> int:
            raise AssertionError("waits for the device")

    chosen = ChosenDigests(Computing(a=1, b=2), ["a"])
    assert "a" in chosen
    assert "b" not in chosen


def test_a_digest_that_is_known_is_not_computed_again() -> None:
    with simulated(0):
        state = {name: torch.ones(1 << 20, device="cuda") for name in ("a", "b")}
        queue = bridge.copy_queue(bridge.flattened(state).tensors)
        assert queue is not None
        found = queue.digests(known={"a"})
        queue.gate()
        assert {*found} == {"b"}


@pytest.mark.parametrize("size", [3, 400_000])
def test_replicas_that_differ_on_their_devices_are_found(tmp_path: Path, size: int) -> None:
    with simulated(0, devices=RANKS):

        def work(group: Group) -> None:
            torch.cuda.set_device(group.rank)
            state = {"same": torch.ones(9, device="cuda"), "differs": torch.ones(size, device="cuda")}
            store = ckptstore.open(tmp_path / "store", create=True)
            with store.writer(group=group, ranks=RankOptions(timeout=60)) as writer:
                writer.save_async(state, 1).result()
                state["differs"][-1] += group.rank
                writer.save_async(state, 2).result()

        for error in as_ranks(RANKS, work, LocalMailbox()):
            assert isinstance(error, DivergedReplicasError)
            assert "differs" in str(error)


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_let_go_at_the_end(tmp_path: Path, way: str) -> None:
    """When the writers are closed, and not when Python's collector comes by."""
    with simulated(0, devices=RANKS) as machine:
        gc.collect()
        gc.disable()
        try:
            for found in trained(machine, tmp_path / "store", way, large=False):
                assert not isinstance(found, BaseException), found
            assert machine.registered == set()
        finally:
            gc.enable()


def test_a_device_that_fails_fails_the_step_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = threading.Event()
    with simulated(0, devices=RANKS) as machine:
        synchronize = torch.cuda.Event.synchronize

        def fails(event: Any) -> None:
            synchronize(event)
            if failing.is_set():
                raise RuntimeError("an illegal memory access")

        monkeypatch.setattr(torch.cuda.Event, "synchronize", fails)
        together = threading.Barrier(RANKS, timeout=60)

        def work(group: Group) -> list[str]:
            torch.cuda.set_device(group.rank)
            state, ends = {"x": torch.ones(900, device="cuda"), "n": np.ones(3)}, []
            store = ckptstore.open(tmp_path / "store", create=True)
            with store.writer(group=group, ranks=RankOptions(timeout=60)) as writer:
                for step in range(1, 8):
                    together.wait()
                    failing.set() if step == 6 else failing.clear()
                    together.wait()
                    try:
                        writer.save_async(state, step).result()
                        ends.append("saved")
                    except Exception as error:  # noqa: BLE001  # looked at below
                        ends.append(str(error))
                    settled(machine, 1)
            return ends

        for ends in as_ranks(RANKS, work, LocalMailbox()):
            assert not isinstance(ends, BaseException), ends
            assert [end == "saved" for end in ends] == [True] * 5 + [False, True]
            assert "illegal" in ends[5]
    assert [one.step for one in ckptstore.open(tmp_path / "store").checkpoints()] == [1, 2, 3, 4, 5, 7]
