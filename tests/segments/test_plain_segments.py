"""Plain fulls: the same file from tensors anywhere and from a snapshot, by threads that each have their own bytes."""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.backends.base import SegmentSink
from ckptstore.backends.memory import MemoryBackend
from ckptstore.formats import digest
from ckptstore.formats.segment_files.layout import CHUNK, TensorSpec, order, place, split
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Staging
from ckptstore.segments.aligned_regions import plan_regions
from ckptstore.segments.plain_segments import write_full
from tests.forms import in_turn, short_or
from tests.store.states import every_dtype, same, training_state

PAGE = 4096


def noise(nbytes: int, seed: int = 0) -> Any:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()


@functools.cache
def _unit(number: int) -> Any:
    return noise(9_000_000, number)


def units(count: int) -> dict[str, Any]:
    """Tensors that are a unit each. No test changes them."""
    return {f"w{number}": _unit(number) for number in range(count)}


def tied() -> dict[str, Any]:
    weight = torch.arange(5000.0)
    return {"a": weight, "b": weight, "view": weight[1:], "c": weight.clone()}


def strided() -> dict[str, Any]:
    wide = torch.arange(3_000_003, dtype=torch.int64).reshape(1_000_001, 3)
    return {"t": wide.t(), "rows": wide[::2], "one": wide[5, 1], "np": noise(999)[::-3], "conj": torch.ones(7) * 1j}


@functools.cache
def _large() -> dict[str, Any]:
    state: dict[str, Any] = {"many": noise(CHUNK + 5001).view("u1"), "whole": noise(CHUNK, 1).view("<f4")}
    state |= {f"odd{number}": noise(1_500_000 + 37 * number, number) for number in range(8)}
    state |= {f"small{number}": noise(3 + number, number) for number in range(0, 4000, 8)}
    return {"none": np.zeros((0, 3)), **state, "last": np.arange(11, dtype="<i2")}


def large() -> dict[str, Any]:
    """Chunks that begin and end anywhere in a page, units of one chunk and of many tensors."""
    return {name: array.copy() for name, array in _large().items()}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "training": training_state,
    "dtypes": every_dtype,
    "tied": tied,
    "strided": strided,
    "large": large,
    "no tensors": lambda: {"epoch": 3},
    "only empty ones": lambda: {"a": torch.empty(0, 2), "b": np.zeros((3, 0))},
    "one byte": lambda: {"a": np.ones(1, "u1")},
    "a page": lambda: {"a": np.ones(PAGE, "u1")},
}


@dataclass
class Media:
    """Every sink that memory stores open; the writes whose numbers are in `fails` fail."""

    fails: Callable[[int], bool] = lambda _: False
    opened: list[RecordingSink] = field(default_factory=list)


class RecordingSink(SegmentSink):
    """Checks the obligations of `SegmentSink.write`'s callers, and that no thread still writes when it ends."""

    def __init__(self, inner: SegmentSink, media: Media) -> None:
        self.inner = inner
        self.media = media
        self.ranges: list[tuple[int, int]] = []
        self.ended = ""
        self.under_way = 0
        self.lock = threading.Lock()

    def write(self, offset: int, data: memoryview) -> None:
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        assert offset % PAGE == len(data) % PAGE == address % PAGE == 0
        with self.lock:
            assert not self.ended
            self.ranges.append((offset, offset + len(data)))
            self.under_way += 1
            number = len(self.ranges)
        try:
            if self.media.fails(number):
                raise ckptstore.StorageError("the disk is gone")
            self.inner.write(offset, data)
        finally:
            with self.lock:
                self.under_way -= 1

    def seal(self, size: int) -> None:
        assert not self.under_way
        self.ended = "sealed"
        ordered = sorted(self.ranges)
        assert [begin for begin, _ in ordered] == [0, *(end for _, end in ordered[:-1])]  # nothing twice, nothing left
        assert self.ranges[-1][0] == 0  # the header comes last
        assert ordered[-1][1] - PAGE < size <= ordered[-1][1]
        self.inner.seal(size)

    def abort(self) -> None:
        assert not self.under_way
        self.ended = "aborted"
        self.inner.abort()


@pytest.fixture
def media(monkeypatch: pytest.MonkeyPatch) -> Media:
    found = Media()
    original = MemoryBackend.open_sink

    def recording(self: MemoryBackend, key: str, size_hint: int) -> SegmentSink:
        found.opened.append(RecordingSink(original(self, key, size_hint), found))
        return found.opened[-1]

    monkeypatch.setattr(MemoryBackend, "open_sink", recording)
    monkeypatch.setattr("ckptstore.write.writer_runtime.os.cpu_count", lambda: 3)
    return found


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


def limited(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Limits the bytes of segments, written ones and layouts of snapshots."""
    monkeypatch.setattr("ckptstore.backends.base.Backend.segment_bytes", limit)


def images(flat: FlatState) -> dict[str, bytes]:
    found = {}
    for name, source in flat.tensors.items():
        out = np.empty(source.nbytes, np.uint8)
        source.read(0, out)
        found[name] = out.tobytes()
    return found


def check(store: ckptstore.Store, ref: int, state: dict[str, Any], limit: int) -> list[bytes]:
    """Compare a full with the format's layout of the state's bytes -> the data of its segments."""
    flat = bridge.flattened(state)
    expected = images(flat)
    specs = [TensorSpec(name, source.dtype, tuple(source.shape)) for name, source in flat.tensors.items()]
    found = []
    described = store.describe(ref)
    divided = split(specs, limit)
    assert len(described) == len(divided)
    for (entry, doc), members in zip(described, divided, strict=True):
        source = store.backend.open_source(entry.key)
        file = bytearray(source.size)
        source.read_into(0, memoryview(file))
        assert file[entry.header :] == b"".join(expected[spec.name] for spec in order(members))
        for name, tensor in doc.tensors[ref].items():
            image = expected[name]
            chunks = [image[at : at + CHUNK] for at in range(0, len(image), CHUNK)]
            assert [chunk.stored_hash for chunk in tensor.chunks] == [xxhash.xxh3_64_hexdigest(one) for one in chunks]
            assert tensor.digest == digest.digest(image), name
        found.append(bytes(file[entry.header :]))
    same(state, store.load(ref))
    return found


@pytest.mark.parametrize(
    ("name", "limit"),
    [("large", 1 << 32), ("large", 700_000), *in_turn([one for one in STATES if one != "large"], [1 << 32, 700_000])],
)
def test_the_same_file_from_tensors_anywhere_and_from_a_snapshot(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, media: Media, name: str, limit: int
) -> None:
    limited(monkeypatch, limit)
    state = STATES[name]()
    with store.writer(poll_seconds=None) as writer:
        first = writer.save(state, 1)
        taken = count_blocks(monkeypatch)
        second = writer.save_async(state, 2).result()
        assert not taken  # a snapshot is written from its own memory
    assert first.state == second.state
    assert first.stored == second.stored
    assert check(store, 1, state, limit) == check(store, 2, state, limit)
    one, two = ([doc.tensors[doc.steps[0]] for _, doc in store.describe(step)] for step in (1, 2))
    assert one == two
    assert [sink.ended for sink in media.opened] == ["sealed"] * len([*one, *two])


def count_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A count that grows by one with every staging block that is taken from now on."""
    taken: list[int] = []
    take = Staging.take

    def counted(self: Staging) -> Any:
        taken.append(1)
        return take(self)

    monkeypatch.setattr(Staging, "take", counted)
    return taken


def test_a_snapshot_that_was_laid_out_for_other_segments_is_copied(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, media: Media
) -> None:
    monkeypatch.setattr("ckptstore.write.deltas.write_full", functools.partial(write_full, limit=700_000))
    with store.writer(poll_seconds=None, deltas=1) as writer:
        writer.save_async(STATES["large"](), 1).result()
    assert len(check(store, 1, STATES["large"](), 700_000)) == len(media.opened) > 9


@settings(deadline=None, max_examples=short_or(60, 150))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["U8", "F16", "F32", "F64", "C128"]), st.integers(0, 3000), st.sampled_from([1, 8, 128])
        ),
        max_size=12,
    ),
    st.integers(0, 20_000),
)
def test_regions_are_what_segments_will_be(tensors: list[tuple[str, int, int]], limit: int) -> None:
    """Whatever the header's length: tensors have the same places relative to pages, and memory is bounded."""
    named = tuple((str(number), dtype, (count * times,)) for number, (dtype, count, times) in enumerate(tensors))
    plan = plan_regions(named, limit)
    divided = split([TensorSpec(*one) for one in named], limit)
    assert [list(specs) for specs in plan.segments] == divided
    assert plan.size <= sum(spec.nbytes for specs in divided for spec in specs) + PAGE * len(divided)
    memory = np.ones(plan.size, np.uint8)
    at = 0
    for specs, region, (start, data_end, end) in zip(divided, plan.regions(memory), plan.bounds, strict=True):
        assert start == at
        layout = place(order(specs), 3 * PAGE)
        assert {name: offset - 3 * PAGE for name, offset in layout.offsets.items()} == {
            spec.name: plan.offsets[spec.name] - start for spec in specs
        }
        assert layout.size - 3 * PAGE == data_end - start
        assert len(region.memory) % PAGE == start % PAGE == 0
        assert not region.memory[data_end - start :].any()
        at = end
    assert at == plan.size


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("failing", [1, 4, 5])
def test_a_write_that_fails(store: ckptstore.Store, media: Media, how: str, failing: int) -> None:
    """It is the save's error; the sink is given up once no thread writes, and no memory is lost."""
    state = units(4)
    with store.writer(poll_seconds=None, staging_bytes=2 * CHUNK) as writer:

        def save(step: int) -> Any:
            return writer.save(state, step) if how == "save" else writer.save_async(state, step).result(60)

        for _ in range(3):  # more often than there are staging blocks
            media.fails = lambda number: number == failing
            with pytest.raises(ckptstore.StorageError, match="the disk is gone"):
                save(1)
            assert media.opened[-1].ended == "aborted"
        media.fails = lambda _: False
        save(1)
    check(store, 1, state, 1 << 32)
    assert [entry.id for entry, _ in store.describe(1)] == [
        key.rpartition("/")[2].partition(".")[0] for key in store.backend.list("seg/")
    ]


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_after_a_write_that_failed_little_more_is_sent(store: ckptstore.Store, media: Media, how: str) -> None:
    """Not a whole state into a failed disk. At most two blocks are in flight."""
    media.fails = lambda number: number == 1
    state = units(9)
    with (
        store.writer(poll_seconds=None, staging_bytes=2 * CHUNK) as writer,
        pytest.raises(ckptstore.StorageError, match="the disk is gone"),
    ):
        writer.save(state, 1) if how == "save" else writer.save_async(state, 1).result(60)
    assert len(media.opened[0].ranges) < 6


def test_progress_that_raises_stops_the_save(store: ckptstore.Store, media: Media) -> None:
    def stop(done: int, _total: int) -> None:
        if done > 20_000_000:
            raise ZeroDivisionError

    state = units(4)
    with store.writer(poll_seconds=None, staging_bytes=2 * CHUNK) as writer:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                writer.save(state, 1, progress=stop)
            assert media.opened[-1].ended == "aborted"
        writer.save(state, 1)
    check(store, 1, state, 1 << 32)


def test_a_tensor_that_cannot_be_read_stops_the_save(store: ckptstore.Store, media: Media) -> None:
    class Broken(NumpySource):
        def view(self) -> Any:
            raise ZeroDivisionError

    arrays = units(5)
    sources = {name: (Broken if name == "w3" else NumpySource)(array) for name, array in arrays.items()}
    with store.writer(poll_seconds=None, staging_bytes=2 * CHUNK) as writer:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                writer.save(FlatState(None, dict(sources)), 1)
            assert media.opened[-1].ended == "aborted"
        writer.save(arrays, 1)


def test_several_threads_copy_and_hash(store: ckptstore.Store, media: Media) -> None:
    """Two units wait for each other: with one thread neither would continue."""
    together = threading.Barrier(2, timeout=60)

    class Meeting(NumpySource):
        def read(self, offset: int, out: Any) -> None:
            if offset == 0:
                together.wait()
            super().read(offset, out)

        def view(self) -> Any:
            return None

    arrays = {name: noise(12 << 20, number) for number, name in enumerate("ab")}
    meeting: dict[str, Any] = {name: Meeting(array) for name, array in arrays.items()}
    with store.writer(poll_seconds=None) as writer:
        writer.save(FlatState({name: {"$a": name} for name in arrays}, meeting), 1)
    same(arrays, store.load(1))
    assert media.opened[0].ended == "sealed"


def test_staging_is_the_bound(store: ckptstore.Store, media: Media, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the threads are, and however slow the disk."""
    out, most, lock = [0], [0], threading.Lock()
    take, give = Staging.take, Staging.give

    def taking(self: Staging) -> Any:
        block = take(self)
        with lock:
            out[0] += 1
            most[0] = max(most[0], out[0])
        return block

    def giving(self: Staging, block: Any) -> None:
        with lock:
            out[0] -= 1
        give(self, block)

    monkeypatch.setattr(Staging, "take", taking)
    monkeypatch.setattr(Staging, "give", giving)
    media.fails = lambda _: threading.Event().wait(0.01)  # slow; False
    with store.writer(poll_seconds=None, staging_bytes=2 * CHUNK) as writer:
        writer.save({f"w{number}": noise(CHUNK - 1, number) for number in range(6)}, 1)
    assert most == [2]
    assert out == [0]


@pytest.fixture
def device_tensors() -> dict[str, Any]:
    return {
        "w": torch.arange(900_000.0),
        "strided": torch.arange(900_000, dtype=torch.int32).reshape(1000, 900).t(),
        "conj": torch.ones(200_000, dtype=torch.complex64).mul(1j).conj(),
        "odd": torch.from_numpy(noise(CHUNK + 5)),
        "small": torch.arange(9.0),
        "array": noise(2 << 20),
    }


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("space", [0, 1, 2, 9])
def test_devices_compute_the_digests_of_their_tensors(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, device_tensors: dict[str, Any], how: str, space: int
) -> None:
    """Host tensors take the path of a device's here. The device has memory for only some of them; the host computes the
    rest."""
    from ckptstore.frameworks import torch_digest

    asked: list[int] = []
    compute = torch_digest.partial_on_device

    def there(image: torch.Tensor, first: int) -> torch.Tensor:
        if len(asked) == space:
            raise torch.OutOfMemoryError
        asked.append(len(image))
        return compute(image, first) + 1  # a number that only the device would give

    monkeypatch.setattr(torch_digest, "_computes", lambda _: True)
    monkeypatch.setattr(torch_digest, "partial_on_device", there)
    with store.writer(poll_seconds=None) as writer:
        writer.save(device_tensors, 1) if how == "save" else writer.save_async(device_tensors, 1).result()
    expected = images(bridge.flattened(device_tensors))
    assert images(bridge.flattened(store.load(1))) == expected
    found = {name: entry.digest for name, entry in store.tensors(1).items()}
    told = ["w", "strided", "conj", "odd"][:space]
    assert asked == [len(expected[name]) for name in told]
    assert found == {name: (digest.digest(image) + (name in told)) % (1 << 64) for name, image in expected.items()}


@pytest.mark.parametrize("options", [{"deltas": 1}, {"diffs": ckptstore.DiffOptions(batch=1)}], ids=["deltas", "diffs"])
def test_the_host_digests_encoded_tensors(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, device_tensors: dict[str, Any], options: dict[str, Any]
) -> None:
    """A device would compute digests that nobody reads."""
    from ckptstore.frameworks import torch_digest

    monkeypatch.setattr(torch_digest, "_computes", lambda _: True)
    monkeypatch.setattr(torch_digest, "partial_on_device", lambda *_: pytest.fail("asked a device"))
    with store.writer(poll_seconds=None, **options) as writer:
        for step in (1, 2):
            writer.save_async(device_tensors, step).result()
    assert store.tensors(2)["w"].digest == digest.digest(device_tensors["w"].numpy())


def test_memory_of_snapshots_is_reused(store: ckptstore.Store, media: Media, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.host import arenas

    made: list[int] = []
    aligned = arenas.aligned

    def counted(nbytes: int) -> Any:
        made.append(nbytes)
        return aligned(nbytes)

    monkeypatch.setattr(arenas, "aligned", counted)
    state = STATES["large"]()
    nbytes = sum(array.nbytes for array in state.values())
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 4):
            state["last"] += 1
            state["odd3"][step] ^= 255
            writer.save_async(state, step)
        writer.wait()
    check(store, 3, state, 1 << 32)
    assert len(made) == 1
    units = nbytes / (CHUNK / 2)
    assert nbytes <= made[0] <= nbytes + 2 * PAGE * units
    assert len(media.opened) == 3


def test_a_full_that_stays_in_memory_as_base(store: ckptstore.Store) -> None:
    """Deltas and step diffs build on the memory that was written; they do not change it."""
    state = STATES["large"]()
    with store.writer(deltas=1, poll_seconds=None) as writer:
        writer.save_async(state, 1)
        for step in (2, 3):
            state["many"][step::1000] += 1
            assert writer.save_async(state, step).result().kind == "delta"
    same(state, store.load(3))
    assert ckptstore.verify(store).ok


def test_files_of_a_folder(tmp_path: Path) -> None:
    """Also past the page cache, if the disk allows it."""
    state = STATES["large"]()
    store = ckptstore.open(tmp_path / "store")
    with store.writer(poll_seconds=None) as writer:
        writer.save(state, 1)
        writer.save_async(state, 2)
    assert check(store, 1, state, 1 << 32) == check(store, 2, state, 1 << 32)
