"""Copies of whole states: their description of a tensor, their memory, and its reuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host import buffers
from ckptstore.host.buffers import Bytes
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.write.capture import snapshot as module
from ckptstore.write.capture.snapshot import HostTensor, Snapshot, SnapshotPool

PAGE = 4096
MIB = 1 << 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of memory that were mapped, each time."""
    found: list[int] = []

    def noted(nbytes: int) -> Bytes:
        if nbytes:
            found.append(nbytes)
        return buffers.aligned(nbytes)

    monkeypatch.setattr(module, "aligned", noted)
    return found


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Background:
    """Runs each task at once, and counts."""

    def __init__(self) -> None:
        self.jobs = 0

    def __call__(self, work: Any) -> None:
        self.jobs += 1
        work()


def flat(nbytes: int = 3 * PAGE, fill: int = 1, **more: Any) -> FlatState:
    return bridge.flattened({"w": np.full(nbytes, fill, np.uint8), **more})


def pool_of(limit: int = 2, *, kept: int = 0) -> tuple[SnapshotPool, Background]:
    background = Background()
    return SnapshotPool(limit, background, kept=kept), background


def data(one: Snapshot, name: str = "w") -> Bytes:
    view = one.flat.tensors[name].view()
    assert view is not None
    return view


def begins(one: Snapshot) -> int:
    return int(data(one).ctypes.data)


def test_a_copy_is_described_as_what_it_is_of(threads: ThreadPoolExecutor) -> None:
    state = flat(
        part=np.arange(12, dtype=np.float32).reshape(3, 4), scalar=np.float64(2.5), none=np.zeros((0, 3), "i4")
    )
    taken = pool_of()[0].placed(state, threads)
    assert taken.flat.tree == state.tree
    assert list(taken.flat.tensors) == list(state.tensors)
    for name, source in state.tensors.items():
        copied = taken.flat.tensors[name]
        assert isinstance(copied, HostTensor)
        for attribute in ("dtype", "shape", "nbytes", "origin"):
            assert getattr(copied, attribute) == getattr(source, attribute), (name, attribute)
        assert (copied.global_shape, copied.offset) == (None, None)
        view, original = copied.view(), source.view()
        assert original is not None
        assert bytes(view) == bytes(original)
        assert not np.shares_memory(view, original)
        if source.nbytes:
            part = np.zeros(source.nbytes - 1, np.uint8)
            copied.read(1, part)
            assert bytes(part) == bytes(original)[1:]
    assert len({one.identity for one in taken.flat.tensors.values()}) == len(state.tensors)


def test_memory_is_used_again_once_it_is_free(threads: ThreadPoolExecutor, asked: list[int]) -> None:
    pool, _ = pool_of(1)
    first = pool.placed(flat(fill=1), threads)
    place = begins(first)
    first.land()
    first.land()
    second = pool.placed(flat(fill=2), threads)
    assert begins(second) != place, "the first is still looked at"
    assert bytes(data(first)) == b"\1" * 3 * PAGE
    first.free()
    first.free()
    second.land()
    third = pool.placed(flat(fill=3), threads)
    assert begins(third) == place
    third.land()
    assert len(asked) == 2


def test_a_finished_copy_is_reported_once() -> None:
    landed: list[int] = []
    one = Snapshot(LaidOutState({}, {}, ()), lambda: landed.append(1), lambda: None)
    one.land()
    one.land()
    assert landed == [1]


def test_memory_is_given_back_once_devices_have_copied_to_it() -> None:
    happened: list[str] = []

    def one(wait: Callable[[], None]) -> Snapshot:
        del happened[:]
        found = Snapshot(LaidOutState({}, {}, ()), lambda: None, lambda: happened.append("free"))
        found.arrives(wait)
        return found

    def fails() -> None:
        happened.append("failed")
        raise RuntimeError("an illegal memory access")

    waited = one(lambda: happened.append("arrived"))
    waited.arrive()
    waited.arrive()
    waited.free()
    assert happened == ["arrived", "free"]
    one(lambda: happened.append("arrived")).free()
    assert happened == ["arrived", "free"]
    failed = one(fails)
    with pytest.raises(RuntimeError, match="illegal"):
        failed.arrive()
    one(fails).free()
    assert happened == ["failed", "free"]


@pytest.mark.parametrize("kept", [0, 1])
def test_memory_is_requested_as_soon_as_the_need_is_known(
    threads: ThreadPoolExecutor, asked: list[int], kept: int
) -> None:
    pool, background = pool_of(2, kept=kept)
    pool.expect(3 * PAGE)
    assert asked == [3 * PAGE + 3 * PAGE // 512 + (1 << 16)]
    del asked[:]
    pool.prepare(flat())
    assert asked == [3 * PAGE] * kept, "what was expected is large enough for one"
    assert background.jobs == 1 + kept
    pool.prepare(flat())
    assert background.jobs == 1 + kept, "once"
    del asked[:]
    pool.placed(flat(), threads)
    assert len(asked) == 1, "one for each place, and those that stay"
    assert background.jobs == 2 + kept
    pool.kept(flat())
    assert background.jobs == 2 + kept
    for _ in range(1 + kept):
        pool.placed(flat(), threads)
    assert len(asked) == 1
    pool.kept(flat())
    assert len(asked) == 2


def test_memory_that_was_given_back_is_not_asked_for_as_if_it_were_in_use(
    threads: ThreadPoolExecutor, asked: list[int]
) -> None:
    pool, _ = pool_of(1, kept=1)
    pool.copy(flat(), threads).free()
    assert len(asked) == 1
    pool.prepare(flat())
    assert len(asked) == 2, "one that is there, and one more"


def test_memory_of_another_size_is_let_go_of_after_a_while(threads: ThreadPoolExecutor, asked: list[int]) -> None:
    """States and gradients take turns; the memory of a size that is no longer used is freed."""
    pool, _ = pool_of(1)
    small, large = flat(MIB), flat(8 * MIB)
    for state in (small, large, small, large, small):
        one = pool.placed(state, threads)
        one.land()
        one.free()
    assert sorted(asked) == [MIB, 8 * MIB]
    for times, found in ((3, 1), (4, 1), (5, 2)):  # the first three follow one that passed it
        for _ in range(times):
            one = pool.placed(small, threads)
            one.land()
            one.free()
        one = pool.placed(large, threads)
        one.land()
        one.free()
        assert sorted(asked) == [MIB, *[8 * MIB] * found], times


@pytest.mark.parametrize(
    ("now", "again"),
    [(6 * MIB + PAGE, False), (6 * MIB, True), (5 * MIB // 2, True), (5 * MIB // 2 - PAGE, False)],
)
def test_memory_is_used_for_what_takes_about_half_of_it(
    threads: ThreadPoolExecutor, asked: list[int], now: int, again: bool
) -> None:
    pool, _ = pool_of(1)
    one = pool.placed(flat(6 * MIB), threads)
    one.land()
    one.free()
    del asked[:]
    pool.copy(flat(now), threads)
    assert asked == ([] if again else [now])


def test_a_closed_pool_keeps_nothing(threads: ThreadPoolExecutor, asked: list[int]) -> None:
    pool, _ = pool_of(1)
    one = pool.placed(flat(), threads)
    one.land()
    one.free()
    pool.close()
    pool.copy(flat(), threads)
    assert len(asked) == 2


def test_a_closed_pool_touches_nothing_any_more() -> None:
    jobs: list[Any] = []
    pool = SnapshotPool(1, jobs.append)
    pool.prepare(flat())
    pool.close()
    jobs[0]()
    assert jobs[0].__self__.touched == 0
    jobs.clear()
    pool.prepare(flat())
    jobs[0]()
    assert jobs[0].__self__.touched == 3 * PAGE


def test_a_copy_that_fails_gives_its_memory_back(
    threads: ThreadPoolExecutor, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _ = pool_of(1)

    def fails(*_: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(module, "run_all", fails)
        with pytest.raises(OSError, match="no"):
            pool.placed(flat(), threads)
    with monkeypatch.context() as patch:
        patch.setattr(module, "aligned", fails)
        with pytest.raises(OSError, match="no"):
            pool.empty(flat(9 * MIB))
    assert len(asked) == 1
    pool.placed(flat(), threads)
    assert len(asked) == 1, "the memory of the copy that failed"


def test_a_state_takes_the_place_of_one_that_is_almost_alike(threads: ThreadPoolExecutor) -> None:
    """One byte in sixteen may be new. Tensors of the same size stay in their places."""

    def state(new: int, dtype: str = "u1") -> FlatState:
        return bridge.flattened({"w": np.ones(15 * PAGE, np.uint8), "x": np.zeros(new, dtype)})

    pool, _ = pool_of()
    one = pool.copy(state(PAGE - 1), threads)
    assert one.room(state(PAGE + 1)) is None
    room = one.room(state(PAGE))
    assert room is not None
    assert {name: len(place) for name, place in room.items()} == {"w": 15 * PAGE, "x": PAGE}
    assert room["w"].ctypes.data == begins(one)
    assert not np.shares_memory(room["x"], data(one, "x"))
    assert one.flat.regions
    room["x"][:] = 9
    freed: list[int] = []
    one = Snapshot(one.flat, lambda: None, lambda: freed.append(1))
    turned = one.turned(state(PAGE), room)
    assert turned.flat.regions == (), "it does not lie as its segments will"
    assert bytes(data(turned, "x")) == b"\x09" * PAGE
    one.free()
    assert freed == []
    turned.free()
    assert freed == [1]
    same = pool.copy(state(PAGE), threads)
    place = same.room(state(PAGE))
    assert place is not None
    assert same.turned(state(PAGE), place).flat.regions == same.flat.regions
    cast = pool.copy(state(64, "u1"), threads).room(state(16, "i4"))
    assert cast is not None
    assert len(cast["x"]) == 64
