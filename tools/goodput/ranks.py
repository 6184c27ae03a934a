"""Thousands of ranks that commit together: the product's own writers, over a mailbox and a bucket that count.

Every rank is ``store.writer(group=Group(rank, size, mailbox))`` of this product, with all its code: the meeting of the
ranks, the agreement who writes what, the letters, rank 0's commit. Four things are replaced. A virtual clock
(`tools.goodput.world`) is in place of ``time`` where ranks poll for each other. The two threads of a writer run their
work in the caller's thread: all saves are blocking. The mailbox is a dict that counts, and takes the time of a
`torch.distributed` store: one server, one call after the other. The bucket is the store in memory, with the latency of
requests. What rank 0 computes takes the processor time that it really takes.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, Final, Self
from unittest import mock

import numpy as np

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.write.ranks import rank_resources
from ckptstore.write.ranks.messages import key_value_store, step_messages
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.rank_options import RankOptions
from tools.goodput.world import World

__all__ = ["Costs", "Phase", "Run", "simulated"]

_PATIENCE = 1e9
PAGE: Final = 1000
"""Objects that a bucket lists in one request."""
_LISTINGS: Final = ("list", "sizes")


@dataclass(frozen=True, slots=True)
class Costs:
    """What calls take, in seconds. Those of the mailbox are the processor time of torch's TCPStore, measured.

    Attributes:
        call: of the mailbox's server for one call; the others wait meanwhile.
        key: for each further key of a check.
        byte: for each byte of a value.
        network: to the mailbox's server and back.
        request: of the bucket, from any rank at any time.
    """

    call: float = 10e-6
    key: float = 1.1e-6
    byte: float = 0.4e-9
    network: float = 100e-6
    request: float = 20e-3


@dataclass(slots=True)
class Phase:
    """What happened in one phase of a run.

    Attributes:
        seconds: until every rank was done, virtual.
        calls, calls_0: of the mailbox, by all ranks and by rank 0.
        polls: of `calls`, those that found nothing.
        bytes_host: in and out of the mailbox's host, keys included.
        bytes_0: of values that rank 0 sent and received.
        requests, requests_0: to the bucket.
        processor_0: seconds that rank 0 computed.
    """

    seconds: float = 0.0
    calls: int = 0
    calls_0: int = 0
    polls: int = 0
    bytes_host: int = 0
    bytes_0: int = 0
    requests: int = 0
    requests_0: int = 0
    processor_0: float = 0.0


@dataclass(slots=True)
class Run:
    """A finished run.

    Attributes:
        size: the number of ranks.
        phases: ``open``, ``first`` (the ranks agree who writes what), ``next`` (the mean of the others).
        kinds: calls of the mailbox by kind, and requests to the bucket.
        equal: every rank's state of the last step was loaded again, and is what it had saved.
        switches: of the simulation.
    """

    size: int
    phases: dict[str, Phase]
    kinds: Counter[str]
    equal: bool
    switches: int


@dataclass(slots=True)
class _Counted:
    """The world with its counters."""

    world: World
    costs: Costs
    phase: Phase = field(default_factory=Phase)
    kinds: Counter[str] = field(default_factory=Counter)
    free: float = 0.0
    mark: float = 0.0

    def computed(self) -> None:
        """Let the time pass that rank 0 has computed since it last went on."""
        if self.world.rank() == 0:
            spent = time.thread_time() - self.mark
            self.phase.processor_0 += spent
            self.world.sleep(spent)
            self.mark = time.thread_time()

    def call(self, kind: str, keys: int, nbytes: int, *, value: int = 0) -> None:
        """One call of the mailbox."""
        self.computed()
        phase, costs, world = self.phase, self.costs, self.world
        self.kinds[kind] += 1
        phase.calls += 1
        phase.bytes_host += nbytes + value
        if world.rank() == 0:
            phase.calls_0 += 1
            phase.bytes_0 += value
        begin = max(self.free, world.now + costs.network / 2)
        waits = 2 if kind == "get" else 1  # of torch's store: it waits for the key, and then reads it
        self.free = begin + waits * costs.call + costs.key * (keys - 1) + costs.byte * (nbytes + value)
        world.sleep(self.free + costs.network / 2 - world.now)
        if world.rank() == 0:
            self.mark = time.thread_time()

    def request(self, kind: str, count: int = 1) -> None:
        """One request to the bucket, or a few, one after the other."""
        if (rank := self.world.rank()) is None:
            return
        self.computed()
        self.kinds[f"bucket {kind}"] += count
        self.phase.requests += count
        self.phase.requests_0 += count * (rank == 0)
        self.world.sleep(count * self.costs.request)
        if rank == 0:
            self.mark = time.thread_time()


class _Mailbox:
    """As `ckptstore.frameworks.torch_ranks.StoreMailbox`: a set is a set and a check, a get a check and a get."""

    def __init__(self, counted: _Counted) -> None:
        self._counted = counted
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._counted.call("set", 1, len(key), value=len(value))
        self._values[key] = bytes(value)
        self._counted.call("check", 1, len(key))

    def set_all(self, values: Mapping[str, bytes]) -> None:
        sizes = sum(map(len, values)), sum(map(len, values.values()))
        self._counted.call("set", len(values), sizes[0], value=sizes[1])
        self._values |= {key: bytes(value) for key, value in values.items()}
        self._counted.call("check", 1, len(list(values)[-1]))

    def get_all(self, keys: list[str]) -> list[bytes] | None:
        if not self.has(keys):
            return None
        values = [self._values[key] for key in keys]
        self._counted.call("get", len(keys), sum(map(len, keys)), value=sum(map(len, values)))
        return values

    def get(self, key: str) -> bytes | None:
        if not self.has([key]):
            return None
        value = self._values[key]
        self._counted.call("get", 1, len(key), value=len(value))
        return value

    def has(self, keys: list[str]) -> bool:
        self._counted.call("check", len(keys), sum(map(len, keys)))
        found = all(key in self._values for key in keys)
        self._counted.phase.polls += not found
        return found

    def delete(self, key: str) -> None:
        self._counted.call("delete", 1, len(key))
        self._values.pop(key, None)

    def clone(self) -> Self:
        return self

    def left(self) -> int:
        """Keys that nobody has removed."""
        return len(self._values)


class _Inline(Executor):
    """Runs work in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # as a pool does
            done.set_exception(error)
        return done


@contextlib.contextmanager
def _replaced(counted: _Counted) -> Iterator[None]:
    """Put the world in place of what the product would wait for."""
    with contextlib.ExitStack() as stack:
        for module in (key_value_store, step_messages):
            stack.enter_context(mock.patch.object(module, "time", counted.world))
        stack.enter_context(mock.patch.object(rank_resources, "started_pool", return_value=_Inline()))
        for name in ("get", "size", "create", "replace", "delete", "list", "sizes", "open_source"):
            stack.enter_context(mock.patch.object(MemoryBackend, name, _counting(counted, name)))
        stack.enter_context(mock.patch.object(MemoryBackend, "open_sink", _counting(counted, "open_sink", "write")))
        yield


def _counting(counted: _Counted, name: str, said: str | None = None) -> Callable[..., Any]:
    real = getattr(MemoryBackend, name)

    def method(backend: MemoryBackend, *arguments: Any, **named: Any) -> Any:
        found = real(backend, *arguments, **named) if name in _LISTINGS else None
        counted.request(said or name, 1 if found is None else -(-max(1, len(found)) // PAGE))
        return real(backend, *arguments, **named) if found is None else found

    return method


def _state(rank: int, step: int) -> dict[str, Any]:
    """Four tensors that all ranks have alike, and one of its own."""
    common = {f"w{number}": np.full(64, 1000.0 * step + number, np.float32) for number in range(4)}
    return {"model": common, "own": np.full(16, 1e5 * step + rank, np.float32)}


def simulated(size: int, steps: int = 3, costs: Costs | None = None) -> Run:
    """Let `size` ranks open a store, save `steps` steps and close it."""
    counted = _Counted(World(), costs or Costs())
    world, box = counted.world, _Mailbox(counted)
    url = f"memory://goodput-ranks-{size}"
    MemoryBackend.forget(url.removeprefix("memory://"))
    ends: list[tuple[float, Phase]] = []

    def ended() -> None:
        counted.phase.seconds = world.now - (ends[-1][0] if ends else 0.0)
        ends.append((world.now, counted.phase))
        counted.phase = Phase()

    def phase_ends() -> None:
        """Wait until every rank is there: the phases of a run do not overlap. It takes no time and no message."""
        world.meet(size, ended)
        if world.rank() == 0:
            counted.mark = time.thread_time()

    def rank(number: int) -> None:
        counted.mark = time.thread_time() if number == 0 else counted.mark
        store = ckptstore.open(url, create=True)
        options = RankOptions(timeout=_PATIENCE, per_rank="own")
        writer = store.writer(group=Group(number, size, box), ranks=options, poll_seconds=None)
        phase_ends()
        for step in range(1, steps + 1):
            writer.save(_state(number, step), step)
            phase_ends()
        writer.close()
        store.close()

    with _replaced(counted):
        world.run([lambda number=number: rank(number) for number in range(size)])  # type: ignore[misc]
    found = [one for _, one in ends]
    phases = {"open": found[0], "first": found[1], "next": _mean(found[2:] or found[1:])}
    equal = _equal(url, size, steps)
    MemoryBackend.forget(url.removeprefix("memory://"))
    return Run(size, phases, counted.kinds, equal, world.switches)


def _mean(phases: list[Phase]) -> Phase:
    names = Phase.__dataclass_fields__
    return Phase(**{name: sum(getattr(one, name) for one in phases) / len(phases) for name in names})


def _equal(url: str, size: int, steps: int) -> bool:
    with ckptstore.open(url) as store:
        if store.latest_step() != steps:
            return False
        for rank in {0, 1 % size, size // 2, size - 1}:
            wanted, found = _state(rank, steps), store.load(steps, rank=rank)
            if not np.array_equal(found["own"], wanted["own"]):
                return False
            if any(not np.array_equal(found["model"][name], one) for name, one in wanted["model"].items()):
                return False
    return True
