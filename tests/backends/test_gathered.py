"""Segments that are collected in memory: who owns the memory, and that one is sent while the next is filled."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.gathered import Blocks
from ckptstore.backends.object_store.object_segments import ObjectSink
from ckptstore.backends.object_store.objects import ObjectBackend
from tools.objects.fast_server import serving_fast
from tools.objects.server import Server

MIB = 1 << 20


@pytest.fixture(scope="module")
def fast() -> Iterator[Server]:
    with serving_fast() as server:
        yield server


def backend(fast: Server) -> ObjectBackend:
    return ObjectBackend(fast.url(), fast.options)


def test_memory_is_used_again_where_it_fits_and_is_bounded() -> None:
    blocks = Blocks(6 * MIB)
    first, second = blocks.take(4 * MIB), blocks.take(2 * MIB + 1)
    assert (len(first), len(second)) == (4 * MIB, 3 * MIB)
    blocks.give([first, second])  # together too large: the older one goes
    assert blocks.take(2 * MIB + 5) is second
    assert blocks.take(2 * MIB + 5) is not second
    blocks.give([second])
    assert blocks.take(MIB) is not second  # too large for that


def test_memory_of_the_sink_is_sent_directly_and_other_memory_is_copied(fast: Server) -> None:
    store = backend(fast)
    sink = store.open_sink("seg/0000000001/a", 4 * MIB)
    lent = sink.block(2 * MIB)
    assert lent is not None
    own = np.full(2 * MIB, 7, np.uint8)
    lent[:] = 1
    sink.write(0, lent.data)
    sink.write(2 * MIB, own.data)
    lent[5], own[5] = 2, 8
    sink.seal(4 * MIB)
    found = np.zeros(4 * MIB, np.uint8)
    with store.open_source("seg/0000000001/a") as source:
        source.read_into(0, found.data)
    assert (found[5], found[2 * MIB + 5]) == (2, 7)
    assert np.bincount(found).tolist()[1::6] == [2 * MIB - 1, 2 * MIB]


class Watched(ObjectBackend):
    """Sends its first segment only when the second is being filled; fails for the named one."""

    segment_bytes = 2 * MIB
    fails = 0

    def __init__(self, fast: Server) -> None:
        super().__init__(fast.url(), fast.options)
        self.opened = 0
        self.second = threading.Event()
        self.together: list[bool] = []

    def open_sink(self, key: str, size_hint: int) -> Any:
        self.opened += 1
        number, watched = self.opened, self

        class Sink(ObjectSink):
            def block(self, length: int) -> Any:
                if number == 2:
                    watched.second.set()
                return super().block(length)

            def refer(self, offset: int, data: memoryview) -> None:
                if number == 2:
                    watched.second.set()
                super().refer(offset, data)

            def put(self, parts: Sequence[memoryview], size: int) -> None:
                if number == watched.fails:
                    raise ckptstore.StorageError(f"segment {number} is not sent")
                if number == 1:
                    watched.together.append(watched.second.wait(60))
                super().put(parts, size)

        return Sink(self._requests, key, self._pool, self._memory)


def state(seed: int) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    return {f"t{number}": numbers.standard_normal(MIB // 4).astype(np.float32) for number in range(7)}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(found[name].tobytes() == tensor.tobytes() for name, tensor in wanted.items())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_segment_is_sent_while_the_next_is_filled(fast: Server, asynchronous: bool) -> None:
    medium = Watched(fast)
    store = ckptstore.Store(medium)
    with store.writer(poll_seconds=None, threads=2) as writer:
        if asynchronous:
            medium.opened = 2  # its memory comes from elsewhere
            writer.save_async(state(1), 1).result()
        else:
            writer.save(state(1), 1)
            assert medium.together == [True]
        writer.save(state(2), 2)
    for step in (1, 2):
        assert len(store.checkpoint(step).segments) >= 3
        assert same(store.load(step, framework="numpy"), state(step))
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("number", [2, 4])
def test_a_segment_that_cannot_be_sent_fails_its_save_and_no_other(fast: Server, number: int) -> None:
    medium = Watched(fast)
    medium.fails = number
    store = ckptstore.Store(medium)
    with store.writer(poll_seconds=None) as writer:
        with pytest.raises(ckptstore.StorageError, match=f"segment {number} is not sent"):
            writer.save(state(1), 1)
        writer.save(state(2), 2)
    assert [one.step for one in store.checkpoints()] == [2]
    assert same(store.load(framework="numpy"), state(2))
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("laid_out", [False, True])
def test_memory_in_the_stored_layout_is_sent_without_a_copy(
    fast: Server, laid_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors are not copied, strided and small ones are; a snapshot (of deltas) has the right layout."""
    numbers = np.random.default_rng(5)
    whole = {f"w{number}": numbers.standard_normal(MIB // 2).astype(np.float32) for number in range(3)}
    wanted: dict[str, Any] = {**whole, "s": numbers.standard_normal((800, 700))[:, ::2], "b": np.arange(9.0)}
    wanted |= {"odd": numbers.integers(0, 9, MIB + 5, np.uint8), "late": numbers.standard_normal(7)}
    sent: list[memoryview] = []
    put = ObjectSink.put

    def noted(sink: ObjectSink, parts: Sequence[memoryview], size: int) -> None:
        sent.extend(parts)
        put(sink, parts, size)

    monkeypatch.setattr(ObjectSink, "put", noted)
    monkeypatch.setattr(ObjectSink, "block", None if laid_out else ObjectSink.block)
    store = ckptstore.Store(backend(fast))
    with store.writer(poll_seconds=None, deltas=ckptstore.DeltaOptions(interval=3) if laid_out else None) as writer:
        if laid_out:
            writer.save_async(wanted, 1).result()
        else:
            writer.save(wanted, 1)
    found = store.load(framework="numpy")
    assert all(found[name].tobytes() == tensor.tobytes() for name, tensor in wanted.items())
    assert store.verify(deep=True).ok
    lie = [np.frombuffer(part, np.uint8) for part in sent]
    for name in [] if laid_out else [*whole, "odd"]:
        assert any(np.shares_memory(wanted[name].view(np.uint8), part) for part in lie), name


def test_a_sealed_segment_takes_no_reference(fast: Server) -> None:
    sink = backend(fast).open_sink("seg/0000000001/b", MIB)
    assert sink.refers
    sink.refer(0, np.full(5000, 3, np.uint8).data)
    sink.seal(5000)
    with pytest.raises(ckptstore.StorageError, match="sealed or given up"):
        sink.refer(5000, np.zeros(9, np.uint8).data)
