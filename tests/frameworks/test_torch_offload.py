"""Copies by devices: queued, in order, to registered memory; on a simulated device, under many seeds."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.agent.protocol.shared_memory import SharedMemory  # noqa: E402
from ckptstore.frameworks import torch_offload  # noqa: E402
from ckptstore.frameworks.torch_offload import CopyQueue  # noqa: E402
from ckptstore.frameworks.torch_tensors import TorchSource  # noqa: E402
from ckptstore.host.arenas import LEAST  # noqa: E402
from ckptstore.host.buffers import aligned, region_of  # noqa: E402
from ckptstore.write.policy.delta_options import DeltaOptions  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox  # noqa: E402
from tests.forms import short_or  # noqa: E402
from tests.waiting import until  # noqa: E402
from tools.device import simulated, why_not  # noqa: E402
from tools.device.machine import Machine  # noqa: E402

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

GPU = torch.device("cuda", 0)
SEEDS = range(short_or(3, 200))
HOST = torch.zeros(3)
WAYS = ["full", "delta", "share"]


def options(way: str) -> dict[str, Any]:
    """Of a writer; `share`: a rank that copies under a budget."""
    if way == "share":
        return {"group": Group(0, 1, LocalMailbox()), "memory": LEAST}
    return {"deltas": DeltaOptions(interval=3)} if way == "delta" else {}


def trained(
    device: Machine, place: Path, way: str, *, steps: int = 6, wait: bool = True, registers: bool = True
) -> dict[int, list[Any]]:
    """Save a state after each step and change it at once -> the saved states, by step.

    `registers`: whether the device can register memory; if not, nothing waits for that.
    """
    state = {f"w{number}": torch.zeros(3000 + number, device="cuda") for number in range(4)}
    state["host"] = torch.zeros(5)
    side = torch.cuda.Stream()
    wanted = {}
    store = ckptstore.open(place, create=True)
    with store.writer(max_in_flight=2, **options(way)) as writer:
        for step in range(1, steps + 1):
            for one in state.values():
                one.add_(step)
            wanted[step] = [float(sum(range(step + 1)))] * len(state)
            pending = writer.save_async(state, step)
            if wait or step <= 2:
                pending.result()
                if registers:
                    settled(device)  # reused memory is registered by then
            else:
                # Memory of another stream, which returns to that stream once no one has the tensor.
                with torch.cuda.stream(side):
                    other = torch.full((3000,), wanted[step][0], device="cuda")
                torch.cuda.current_stream().wait_stream(side)
                other.record_stream(torch.cuda.current_stream())  # which uses it, too
                state["w0"] = other
                del other
    return wanted


def settled(device: Machine) -> None:
    """Wait until some memory that was mapped for saves is registered."""
    until(lambda: device.ranges.starts, "nothing is registered")


def wrong(place: Path, wanted: dict[int, list[Any]]) -> list[int]:
    """The steps that were restored with wrong bits."""
    store = ckptstore.open(place)
    return [
        step
        for step, values in wanted.items()
        for one, value in zip(store.load(step).values(), values, strict=True)
        if not bool((one.cpu() == value).all())
    ]


@pytest.mark.parametrize("way", WAYS)
def test_the_saved_state_is_that_of_its_step(tmp_path: Path, way: str) -> None:
    for seed in SEEDS:
        for wait in (False, True):
            with simulated(seed) as device:
                wanted = trained(device, tmp_path / f"{seed}-{wait}", way, wait=wait)
                assert not device.hazards, (seed, device.hazards)
                torch.cuda.synchronize()
            assert not wrong(tmp_path / f"{seed}-{wait}", wanted), seed


@pytest.mark.parametrize("way", WAYS)
def test_the_caller_waits_for_no_device(tmp_path: Path, way: str) -> None:
    """Once memory is registered, `save_async` returns while all of its copies are still queued."""
    with simulated(0) as device:
        state = {"w": torch.ones(50_000, device="cuda")}
        with ckptstore.open(tmp_path / "run", create=True).writer(max_in_flight=2, **options(way)) as writer:
            for step in range(1, 5):
                writer.save_async(state, step).result()
                settled(device)
            before = [site for site in device.counts.waits if "torch_tensors" in str(site)]
            writer.save_async(state, 5)
            after = [site for site in device.counts.waits if "torch_tensors" in str(site)]
        assert after == before


def goes_wrong(seed: int, fault: Callable[[], object], *, freed: bool) -> bool:
    """Whether a capture of one tensor that changes, or is `freed`, has wrong bytes or races."""
    with simulated(seed) as device:
        fault()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensor = torch.full((3000,), 1.0, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        if not freed:
            tensor.add_(1)
        memory = aligned(12000)
        memory[:] = 0
        assert torch_offload.register(memory, GPU)
        sources = {"w": TorchSource(tensor)}
        queue = torch_offload.copy_queue(sources)
        assert queue is not None
        with queue.queueing():
            queue.sources["w"].read(0, memory)
        wait = queue.marked()
        queue.gate()
        if not freed:
            tensor.add_(1)
            kept = tensor
        del tensor, queue, sources  # freed memory belongs to its own stream again
        with torch.cuda.stream(side):
            other = torch.full((3000,), 7.0, device="cuda")
        wait()
        found = memory.view(np.float32).copy()
        del other, memory
        torch.cuda.synchronize()
        assert freed or bool((kept == 3).all())
        return bool(device.hazards) or not bool((found == (1 if freed else 2)).all())


def hasty_stream() -> type[Any]:
    class Hasty(torch.cuda.Stream):  # type: ignore[misc, name-defined]
        def wait_stream(self, other: Any) -> None: ...

    return Hasty


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "no gate": lambda patch: patch.setattr(CopyQueue, "gate", lambda self: None),
    "no wait for the work before": lambda patch: patch.setattr(torch_offload, "_copy_stream", hasty_stream()),
    "no record of the stream": lambda patch: patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None),
}


def test_a_queue_that_is_let_go_of_holds_no_tensor() -> None:
    """At once, and not when Python's garbage collector runs: a device's memory is scarce."""
    with simulated(0):
        tensor = torch.ones(300, device="cuda")
        seen = weakref.ref(tensor)
        queue = torch_offload.copy_queue({"w": TorchSource(tensor)})
        assert queue is not None
        memory = aligned(1200)
        assert torch_offload.register(memory, GPU)
        with queue.queueing():
            queue.sources["w"].read(0, memory)
        wait = queue.marked()
        gc.disable()
        try:
            del tensor, queue
            assert seen() is None
        finally:
            gc.enable()
        wait()
        del memory


def test_a_capture_keeps_its_bytes() -> None:
    for seed in SEEDS:
        for freed in (False, True):
            assert not goes_wrong(seed, lambda: None, freed=freed), (seed, freed)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_order_is_caught(fault: str) -> None:
    """Each of these omissions makes the test above fail."""
    for seed in range(100):
        with pytest.MonkeyPatch.context() as patch:
            freed = fault == "no record of the stream"
            if goes_wrong(seed, lambda patch=patch: FAULTS[fault](patch), freed=freed):  # type: ignore[misc]
                return
    pytest.fail(f"{fault}: not caught under any seed")


def test_memory_is_registered_once_and_let_go_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(0):
        runtime = torch.cuda.cudart()
        calls: list[tuple[str, int]] = []
        for name in ("cudaHostRegister", "cudaHostUnregister"):
            real = getattr(runtime, name)

            def noted(address: int, *more: int, real: Any = real, name: str = name) -> Any:
                calls.append((name, address))
                return real(address, *more)

            monkeypatch.setattr(runtime, name, noted)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        memory = aligned(1 << 20)
        region = region_of(memory)
        assert region is not None
        address = region.address
        del region
        assert not torch_offload.registered(memory)
        assert torch_offload.register(memory, GPU)
        assert torch_offload.register(memory[4096:], GPU)
        assert torch_offload.registered(memory[100:])
        del memory
        gc.collect()
        assert calls == [("cudaHostRegister", address), ("cudaHostUnregister", address)]


def test_a_fork_has_no_registered_memory_and_lets_go_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would copy all of it for the fork, and a fork cannot call the driver."""
    with simulated(0):
        runtime = torch.cuda.cudart()
        calls: list[int] = []
        monkeypatch.setattr(runtime, "cudaHostUnregister", calls.append)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        memory = aligned(1 << 20)
        memory[:] = 1
        assert torch_offload.register(memory, GPU)
        for reads in (False, True):
            if (child := os.fork()) == 0:
                try:
                    faulthandler.disable()
                    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                    if reads:
                        bool(memory[0])
                    del memory
                    gc.collect()
                    os._exit(len(calls))
                finally:
                    os._exit(9)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == (-signal.SIGSEGV if reads else 0)
        del memory
        gc.collect()
        assert len(calls) == 1


def test_a_fork_keeps_memory_that_is_shared() -> None:
    """The kernel copies none of it for the fork."""
    with simulated(0):
        shared = SharedMemory.made(1 << 20)
        shared.close()
        shared.memory[:] = 1
        assert torch_offload.register(shared.memory, GPU)
        if (child := os.fork()) == 0:
            try:
                faulthandler.disable()
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os._exit(int(shared.memory[5]))
            finally:
                os._exit(9)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 1
        del shared


def test_memory_that_cannot_be_registered_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with simulated(3) as device:
        runtime = torch.cuda.cudart()
        monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: 2)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        with caplog.at_level(logging.WARNING, "ckptstore"):
            wanted = trained(device, tmp_path / "run", "delta", steps=2, registers=False)
        assert not device.hazards
    assert not wrong(tmp_path / "run", wanted)
    assert caplog.text.count("could not be registered with the device (CUDA error 2)") == 1, "once, not for each piece"


def test_a_refused_registration_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(0):
        runtime = torch.cuda.cudart()
        asked: list[int] = []

        def refuse(address: int, *_: int) -> int:
            asked.append(address)
            return 2

        monkeypatch.setattr(runtime, "cudaHostRegister", refuse)
        monkeypatch.setattr(runtime, "cudaHostUnregister", lambda _: pytest.fail("it was not registered"))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        memory = aligned(4096)
        for _ in range(2):
            assert not torch_offload.register(memory, GPU)
            assert not torch_offload.registered(memory)
        assert len(asked) == 1
        del memory
        gc.collect()


def test_a_refused_registration_fails_no_later_kernel_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps a thread's last error, and torch raises it with the next kernel."""
    errors: list[str] = []

    def refuse(*_: int) -> int:
        errors.append("invalid argument")
        return 1

    zeros = torch.zeros

    def kernel(*arguments: Any, **more: Any) -> Any:
        if errors:
            raise RuntimeError(f"CUDA error: {errors.pop()}")
        return zeros(*arguments, **more)

    with simulated(0):
        runtime = torch.cuda.cudart()
        monkeypatch.setattr(runtime, "cudaHostRegister", refuse)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch, "zeros", kernel)
        assert not torch_offload.register(aligned(4096), GPU)
        assert bool((torch.zeros(3, device=GPU) == 0).all())


def test_a_queued_tensor_is_described_as_it_is() -> None:
    with simulated(0):
        source = TorchSource(torch.ones(3, 5, device="cuda", dtype=torch.bfloat16))
        queue = torch_offload.copy_queue({"w": source})
        assert queue is not None
        queued = queue.sources["w"]
        for name in ("dtype", "shape", "nbytes", "origin", "identity"):
            assert getattr(queued, name) == getattr(source, name), name
        assert queued.nbytes == 30
        assert queued.view() is None, "it is not in host memory"


def queued_copy() -> tuple[Any, CopyQueue]:
    """A copy of a tensor of ones that is only queued, and its destination."""
    memory = aligned(1200)
    assert torch_offload.register(memory, GPU)
    queue = torch_offload.copy_queue({"w": TorchSource(torch.ones(300, device="cuda")), "host": TorchSource(HOST)})
    assert queue is not None
    with queue.queueing():
        queue.sources["w"].read(0, memory)
    return memory, queue


def test_a_copy_cannot_be_cancelled_and_is_waited_for_here_once_the_threads_are_gone() -> None:
    def closed(_: Callable[[], None]) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    with simulated(0):
        memory, queue = queued_copy()
        assert [queue.queues(name) for name in queue.sources] == [True, False]
        work: list[Callable[[], None]] = []
        later = queue.copied(work.append)
        assert not later.cancel()
        assert not later.done()
        now = queue.copied(closed)
        assert now.result(0) is None
        assert bool((memory.view(np.float32) == 1).all())
        work[0]()
        assert later.result(0) is None
        assert queue.waiting == {later, now}
        del memory


def test_a_wait_for_a_copy_raises_the_devices_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    with simulated(0):
        memory, queue = queued_copy()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Event, "synchronize", fails)
            with pytest.raises(RuntimeError, match="illegal"):
                queue.copied(lambda work: work()).result(0)
            with pytest.raises(RuntimeError, match="illegal"):
                queue.wait()
        queue.wait()
        del memory


def test_without_a_device_nothing_is_registered_or_queued() -> None:
    assert not torch.cuda.is_initialized()
    assert not torch_offload.register(aligned(4096), GPU)
    assert torch_offload.copy_queue({"host": TorchSource(HOST)}) is None
    with simulated(0):
        assert torch_offload.copy_queue({"host": TorchSource(HOST)}) is None
        assert torch_offload.device_of({"host": TorchSource(HOST)}) is None


def test_other_memory_is_not_registered() -> None:
    with simulated(0):
        assert not torch_offload.register(aligned(4096).copy(), GPU)


def test_tensors_in_host_memory_do_not_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many copies the device still has to make, threads make theirs meanwhile."""
    released = threading.Event()
    released.set()
    with simulated(0) as device:
        # Five units of tensors on the device, and one of others.
        state = {f"w{number}": torch.ones(230_000, device="cuda") for number in range(95)}
        state["host"] = torch.ones((17 << 20) + 1, dtype=torch.uint8)  # no whole lines: it comes last

        class Late(torch.cuda.Event):  # type: ignore[misc, name-defined]
            def synchronize(self) -> None:
                released.wait(60)
                super().synchronize()

        with ckptstore.open(tmp_path / "run", create=True).writer(max_in_flight=1) as writer:
            writer.prepare(state)
            settled(device)
            writer.save_async(state, 1).result()
            real = torch.cuda.Event
            monkeypatch.setattr(torch.cuda, "Event", Late)
            released.clear()
            asked = ThreadPoolExecutor(1).submit(writer.save_async, state, 2)
            try:
                pending = asked.result(30)
            finally:
                released.set()
            state["host"].zero_()
            pending.result()
            monkeypatch.setattr(torch.cuda, "Event", real)
    assert bool((ckptstore.open(tmp_path / "run").load(2)["host"] == 1).all())


@pytest.mark.parametrize("way", WAYS)
def test_no_other_device_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A thread begins with the first device as its own: calling the driver there takes memory of that device."""
    with simulated(0, devices=2) as device:
        runtime, synchronize = torch.cuda.cudart(), torch.cuda.Event.synchronize
        asked: list[int] = []
        register = runtime.cudaHostRegister

        def registering(*arguments: int) -> Any:
            asked.append(torch.cuda.current_device())
            return register(*arguments)

        def waiting(event: Any) -> None:
            asked.append(torch.cuda.current_device())
            synchronize(event)

        monkeypatch.setattr(runtime, "cudaHostRegister", registering)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda.Event, "synchronize", waiting)
        state = {"w": torch.ones(50_000, device="cuda:1")}
        with ckptstore.open(tmp_path / "run", create=True).writer(max_in_flight=2, **options(way)) as writer:
            for step in range(1, 4):
                writer.save_async(state, step).result()
                settled(device)
        monkeypatch.undo()
    assert len(asked) > 1
    assert set(asked) == {1}
