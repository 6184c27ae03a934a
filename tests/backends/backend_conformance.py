"""The requirements on every backend, as one suite: subclass `BackendConformance` and define how to open the store.

::

    class TestS3(BackendConformance):
        @pytest.fixture
        def opener(self, bucket):
            return functools.partial(S3Backend, bucket)   # picklable if `processes`

The suite checks the properties that the commit protocol relies on (one winner per create, also among processes), and
the expectations of readers and writers of segments. It cannot see durability: see ``tests/tools/test_crash_toolbox.py``
for POSIX.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import multiprocessing
import random
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from ckptstore.backends.base import Backend
from ckptstore.errors import (
    CorruptSegmentError,
    ForeignObjectError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    UsageError,
)
from ckptstore.formats.history.record_text import seal, torn
from ckptstore.host.pages import BLOCK

Opener = Callable[[], Backend]

SEGMENT = "seg/0000000001/0123456789abcdef.safetensors"
RACERS = 4


def aligned(size: int) -> memoryview:
    """Zeroed memory on a page boundary."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


@functools.lru_cache(64)
def _noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def filled(size: int, seed: int = 0) -> memoryview:
    """Aligned memory with reproducible random bytes."""
    memory = aligned(size)
    memory[:] = _noise(size, seed)
    return memory


def write_segment(backend: Backend, data: memoryview, key: str = SEGMENT, block: int = 16 * BLOCK) -> None:
    """Write `data` in blocks, from the last to the first, the last one padded, and seal."""
    sink = backend.open_sink(key, len(data))
    for offset in reversed(range(0, len(data), block)):
        part = data[offset : offset + block]
        padded = aligned(-(-len(part) // BLOCK) * BLOCK)
        padded[: len(part)] = part
        padded[len(part) :] = b"\xff" * (len(padded) - len(part))
        sink.write(offset, padded)
    sink.seal(len(data))


def read_segment(backend: Backend, key: str = SEGMENT) -> bytes:
    with backend.open_source(key) as source:
        out = aligned(source.size)
        source.read_into(0, out)
        return bytes(out)


def segment_name(number: int) -> str:
    """Another key of a segment for each number."""
    return f"seg/0000000001/{number:016x}.safetensors"


def refuses(ask: Callable[..., object], *arguments: object) -> bool:
    """Whether a call raises `UsageError`."""
    try:
        ask(*arguments)
    except UsageError:
        return True
    return False


_barrier: Any = None  # a worker process gets its barrier when it starts: barriers cannot be sent later


def _keep_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def race(opener: Opener, name: str, rounds: int, barrier: Any = None) -> list[int]:
    """Create one key after another at the same time as the other racers; returns the rounds won."""
    backend, start = opener(), barrier or _barrier
    won = []
    for number in range(rounds):
        start.wait(60)
        try:
            backend.create(f"race/{number}", f"{name} {number} ".encode() * 100)
        except KeyExistsError:
            continue
        won.append(number)
    return won


def check_race(backend: Backend, won: dict[str, list[int]], rounds: int) -> None:
    for number in range(rounds):
        winners = [name for name, numbers in won.items() if number in numbers]
        assert len(winners) == 1, f"round {number} was won by {winners}"
        assert backend.get(f"race/{number}") == f"{winners[0]} {number} ".encode() * 100
    assert backend.list("race/") == sorted(f"race/{number}" for number in range(rounds))


class BackendConformance:
    """Subclass, and override the fixture `opener`."""

    processes = False
    """Whether `opener` can be pickled and opens the same store in another process."""
    rounds = 100
    """Rounds of each race."""
    replacements = 200
    """How often a pin is replaced while others read it."""
    creates = 60
    """Objects that are created while others read them."""
    whole = True
    """Whether a reader never sees a part of an object that is being created, or of a pin that is being replaced."""
    taken_at_seal = False
    """Whether a segment's name is checked only when it is sealed, and nothing is there before. A second sink of a name
    is refused nevertheless while this process has one open."""

    @pytest.fixture
    def opener(self, tmp_path: Any) -> Opener:
        """Opens the store, empty at first; every call returns another handle on it."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self, opener: Opener) -> Backend:
        return opener()

    # Small objects

    def test_created_objects_are_read_back(self, backend: Backend, opener: Opener) -> None:
        for number, size in enumerate((0, 1, 4096, 300_000)):
            key, data = f"log/{number:020}", bytes(filled(size))
            backend.create(key, data)
            for handle in (backend, opener()):
                assert handle.get(key) == data
                assert handle.size(key) == size

    def test_a_second_create_fails_and_changes_nothing(self, backend: Backend, opener: Opener) -> None:
        backend.create("FORMAT", b"first")
        for handle in (backend, opener()):
            for data in (b"second", b"first", b""):
                with pytest.raises(KeyExistsError):
                    handle.create("FORMAT", data)
        assert backend.get("FORMAT") == b"first"
        assert backend.list("") == ["FORMAT"]

    def test_a_deleted_key_can_be_created_again(self, backend: Backend) -> None:
        backend.create("pins/a", b"1")
        backend.delete("pins/a")
        assert backend.list("pins/") == []
        backend.create("pins/a", b"2")
        assert backend.get("pins/a") == b"2"

    def test_absence_has_its_own_error(self, backend: Backend) -> None:
        backend.create("log/1", b"")
        for key in ("log/2", "nowhere/at/all", "log/1/below"):
            for ask in (backend.get, backend.size, backend.open_source):
                with pytest.raises(KeyNotFoundError, match=key):
                    ask(key)
        with pytest.raises(FileNotFoundError):
            backend.get("log/2")

    def test_a_folder_is_no_object(self, backend: Backend) -> None:
        """A medium that has folders refuses to read one; on others it is absent."""
        backend.create("seg/1/a", b"")
        for key in ("seg", "seg/1"):
            for ask in (backend.get, backend.size, backend.open_source):
                with pytest.raises((KeyNotFoundError, ForeignObjectError, CorruptSegmentError), match=key):
                    ask(key)

    def test_an_object_longer_than_the_limit_is_refused(self, backend: Backend) -> None:
        for number, size in enumerate((1, 4096, 100_000)):
            key, segment, data = f"log/{number}", segment_name(number), filled(size)
            backend.create(key, bytes(data))
            for limit in (size, size + 1):
                assert backend.get(key, limit) == data
            with pytest.raises(ForeignObjectError, match=f"{key}: {size} bytes, at most {size - 1} are"):
                backend.get(key, size - 1)
            write_segment(backend, data, segment)
            with pytest.raises(ForeignObjectError, match=segment):
                backend.get(segment, 0)

    def test_a_store_that_is_opened_again_is_the_same(self, backend: Backend) -> None:
        backend.create("log/1", b"1")
        assert not backend.deleted()
        again = backend.reopened()
        assert again.url == backend.url
        assert again.get("log/1") == b"1"
        again.close()

    def test_deleting_what_is_absent_is_no_error(self, backend: Backend) -> None:
        backend.delete("log/2")
        backend.create("log/1", b"")
        backend.delete("log/2")
        backend.delete("log/1")
        backend.delete("log/1")

    def test_replace_creates_and_overwrites(self, backend: Backend, opener: Opener) -> None:
        for data in (b"first", b"a longer second", b"", b"4"):
            backend.replace("pins/a", data)
            assert opener().get("pins/a") == data
        assert backend.list("pins/") == ["pins/a"]

    def test_replace_is_atomic(self, backend: Backend, opener: Opener) -> None:
        values = [bytes([number]) * (1000 + 7000 * number) for number in range(4)]
        backend.replace("pins/a", values[0])
        done = threading.Event()
        seen: set[bytes] = set()

        def watch() -> None:
            reader = opener()
            while not done.is_set():
                seen.add(reader.get("pins/a"))

        with ThreadPoolExecutor(2) as pool:
            watchers = [pool.submit(watch) for _ in range(2)]
            for number in range(self.replacements):
                backend.replace("pins/a", values[number % 4])
            done.set()
            for watcher in watchers:
                watcher.result()
        assert seen <= set(values)

    def test_list_is_sorted_recursive_and_by_folder(self, backend: Backend, opener: Opener) -> None:
        keys = ["FORMAT", "log/9", "log/10", "logs/1", "seg/2/b.safetensors", "seg/10/a.json", "seg/10/a-b"]
        for key in keys:
            backend.create(key, b"x")
        assert backend.list("") == sorted(keys)
        assert opener().list("log/") == ["log/10", "log/9"]
        assert backend.list("seg/") == ["seg/10/a-b", "seg/10/a.json", "seg/2/b.safetensors"]
        assert backend.list("seg/10/") == ["seg/10/a-b", "seg/10/a.json"]
        assert backend.list("nowhere/") == []
        backend.create("seg/10/c", b"three")
        assert list(opener().sizes("seg/10/").items()) == [("seg/10/a-b", 1), ("seg/10/a.json", 1), ("seg/10/c", 5)]
        assert backend.sizes("nowhere/") == {}

    def test_keys_cannot_lead_out_of_the_store(self, backend: Backend) -> None:
        for key in ("", "/etc/passwd", "../x", "log/../../x", "a//b", "log/", ".hidden", "a/.b", "ä", "a b"):
            for ask in (backend.get, backend.size, backend.delete, backend.open_source):
                assert refuses(ask, key), (ask, key)
            assert refuses(backend.create, key, b""), key
            assert refuses(backend.replace, key, b""), key
            assert refuses(backend.open_sink, key, 0), key

    def test_only_folders_are_listed_and_settled(self, backend: Backend) -> None:
        for prefix in ("log", "/", "../", "lo*/", "log//"):
            assert refuses(backend.list, prefix), prefix
            assert refuses(backend.settle, prefix), prefix

    def test_settle_changes_nothing(self, backend: Backend) -> None:
        for prefix in ("", "log/", "seg/"):
            backend.settle(prefix)
        assert backend.list("") == []
        backend.create("log/0", b"0")
        backend.create("seg/1/a", b"0")
        for prefix in ("", "log/", "seg/"):
            backend.settle(prefix)
        assert backend.list("") == ["log/0", "seg/1/a"]

    def test_probe_accepts_the_medium_and_leaves_nothing(self, backend: Backend) -> None:
        backend.probe()
        backend.probe()
        assert backend.list("") == []

    # Races

    def test_threads_race_for_a_key(self, opener: Opener) -> None:
        barrier = Barrier(RACERS)
        with ThreadPoolExecutor(RACERS) as pool:
            racers = {str(n): pool.submit(race, opener, str(n), self.rounds, barrier) for n in range(RACERS)}
            won = {name: racer.result() for name, racer in racers.items()}
        check_race(opener(), won, self.rounds)

    def test_threads_race_on_one_handle(self, backend: Backend) -> None:
        barrier = Barrier(RACERS)
        with ThreadPoolExecutor(RACERS) as pool:
            racers = {str(n): pool.submit(race, lambda: backend, str(n), self.rounds, barrier) for n in range(RACERS)}
            won = {name: racer.result() for name, racer in racers.items()}
        check_race(backend, won, self.rounds)

    def test_processes_race_for_a_key(self, opener: Opener) -> None:
        if not self.processes:
            pytest.skip("this store lives in one process")
        # Forks of a process with one thread, which has imported this module: a fresh interpreter takes half a second.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(
            RACERS, mp_context=context, initializer=_keep_barrier, initargs=(context.Barrier(RACERS),)
        ) as pool:
            racers = {str(n): pool.submit(race, opener, str(n), self.rounds) for n in range(RACERS)}
            won = {name: racer.result() for name, racer in racers.items()}
        check_race(opener(), won, self.rounds)

    # Readers beside a writer

    def test_a_create_is_seen_whole_or_absent_or_torn(self, backend: Backend, opener: Opener) -> None:
        """An incomplete object is recognised as the beginning of a text: `torn`. With `whole` none is ever seen."""
        texts = [seal({"n": number, "text": "x" * (number * 997)}) for number in range(self.creates)]
        done = threading.Event()
        seen: set[tuple[int, bytes]] = set()

        def watch() -> None:
            reader, number = opener(), 0
            while number < len(texts):
                ended = done.is_set()
                with contextlib.suppress(KeyNotFoundError):
                    seen.add((number, reader.get(f"log/{number}")))
                    number += (number, texts[number]) in seen
                    continue
                if ended:
                    return

        with ThreadPoolExecutor(2) as pool:
            watchers = [pool.submit(watch) for _ in range(2)]
            for number, text in enumerate(texts):
                backend.create(f"log/{number}", text)
            done.set()
            for watcher in watchers:
                watcher.result()
        assert {(number, text) for number, text in enumerate(texts)} <= seen
        odd = {(number, data) for number, data in seen if data != texts[number]}
        assert all(torn(data) and texts[number].startswith(data) for number, data in odd)
        assert not (odd and self.whole)

    # Segments

    def test_a_segment_has_exactly_its_bytes(self, backend: Backend, opener: Opener) -> None:
        sizes = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * 16 * BLOCK - 3, (3 << 20) + 128)
        for number, size in enumerate(sizes):
            key, data = segment_name(number), filled(size)
            write_segment(backend, data, key)
            for handle in (backend, opener()):
                assert read_segment(handle, key) == data, size
                assert handle.size(key) == size
                assert handle.get(key) == data, size

    def test_the_size_hint_may_be_wrong(self, backend: Backend) -> None:
        data = filled(3 * BLOCK)
        for number, hint in enumerate((0, 1, 20 << 20)):
            key = segment_name(number)
            sink = backend.open_sink(key, hint)
            sink.write(0, data)
            sink.seal(2 * BLOCK + 5)
            assert read_segment(backend, key) == data[: 2 * BLOCK + 5], hint

    def test_threads_write_one_segment(self, backend: Backend) -> None:
        data, block = filled(4 << 20), 16 * BLOCK
        sink = backend.open_sink(SEGMENT, len(data))
        offsets = list(range(0, len(data), block))
        random.Random(1).shuffle(offsets)
        with ThreadPoolExecutor(RACERS) as pool:
            for written in [pool.submit(sink.write, at, data[at : at + block]) for at in offsets]:
                written.result()
        sink.seal(len(data) - 1000)
        assert read_segment(backend) == data[:-1000]

    def test_written_memory_may_be_used_again_at_once(self, backend: Backend) -> None:
        block = aligned(BLOCK)
        sink = backend.open_sink(SEGMENT, 8 * BLOCK)
        for number in range(8):
            block[:] = bytes([number]) * BLOCK
            sink.write(number * BLOCK, block)
        block[:] = bytes(BLOCK)
        sink.seal(8 * BLOCK)
        assert read_segment(backend) == b"".join(bytes([number]) * BLOCK for number in range(8))

    def test_a_segment_name_is_taken_once(self, backend: Backend) -> None:
        first = backend.open_sink(SEGMENT, BLOCK)
        with pytest.raises(KeyExistsError):  # `first` is open in this process, so with `taken_at_seal`, too
            backend.open_sink(SEGMENT, BLOCK)
        first.write(0, filled(BLOCK))
        first.seal(BLOCK)
        if self.taken_at_seal:
            second = backend.open_sink(SEGMENT, BLOCK)
            second.write(0, filled(BLOCK, seed=1))
            with pytest.raises(KeyExistsError):
                second.seal(BLOCK)
            second.abort()
        else:
            with pytest.raises(KeyExistsError):
                backend.open_sink(SEGMENT, BLOCK)
        assert read_segment(backend) == filled(BLOCK)

    def test_an_aborted_segment_leaves_nothing(self, backend: Backend) -> None:
        for written in (False, True):
            sink = backend.open_sink(SEGMENT, BLOCK)
            if written:
                sink.write(0, filled(BLOCK))
            sink.abort()
            sink.abort()
            assert backend.list("") == []
            with pytest.raises(KeyNotFoundError):
                backend.size(SEGMENT)
        write_segment(backend, filled(BLOCK))
        assert read_segment(backend) == filled(BLOCK)

    def test_abort_after_seal_is_harmless(self, backend: Backend) -> None:
        sink = backend.open_sink(SEGMENT, BLOCK)
        sink.write(0, filled(BLOCK))
        sink.seal(BLOCK)
        sink.abort()
        assert read_segment(backend) == filled(BLOCK)

    def test_a_finished_sink_takes_nothing_more(self, backend: Backend) -> None:
        sealed, aborted = backend.open_sink(SEGMENT, BLOCK), backend.open_sink(SEGMENT + "2", BLOCK)
        sealed.seal(0)
        aborted.abort()
        for sink in (sealed, aborted):
            with pytest.raises(StorageError):
                sink.write(0, filled(BLOCK))
            with pytest.raises(StorageError):
                sink.seal(BLOCK)
        assert backend.size(SEGMENT) == 0

    def test_many_segments_at_once(self, backend: Backend) -> None:
        def one(number: int) -> None:
            write_segment(backend, filled(100_000, number), f"seg/{number % 3}/{number}")

        with ThreadPoolExecutor(RACERS) as pool:
            list(pool.map(one, range(12)))
        assert len(backend.list("seg/")) == 12
        for number in range(12):
            assert read_segment(backend, f"seg/{number % 3}/{number}") == filled(100_000, number)

    # Reading by position

    def test_any_part_can_be_read_into_any_memory(self, backend: Backend) -> None:
        data = filled((3 << 20) + 17)
        write_segment(backend, data)
        for offset, length, misaligned in (
            (0, 3 << 20, 0),  # everything, aligned
            (BLOCK, 2 << 20, 0),
            (100, (2 << 20) + 17, 100),  # memory and offset misaligned alike: only the ends are unaligned
            (100, 2 << 20, 0),
            (0, 2 << 20, 1),
            ((3 << 20) + 7, 10, 3),  # inside the last, short block
            (BLOCK - 1, 2, 0),
            ((3 << 20) + 17, 0, 0),  # nothing, at the very end
        ):
            memory = aligned(length + misaligned + 5)
            with backend.open_source(SEGMENT) as source:
                assert source.size == len(data)
                source.read_into(offset, memory[misaligned : misaligned + length])
            where = (offset, length, misaligned)
            assert memory[misaligned : misaligned + length] == data[offset : offset + length], where
            assert memory[:misaligned] == bytes(misaligned), where
            assert memory[misaligned + length :] == bytes(5), where

    def test_threads_read_one_source(self, backend: Backend) -> None:
        data = filled((6 << 20) + 5)
        write_segment(backend, data)
        source = backend.open_source(SEGMENT)

        def read(seed: int) -> bool:
            numbers = random.Random(seed)
            length = numbers.choice([1, 5000, 2 << 20])
            offset = numbers.choice([0, BLOCK, numbers.randrange(len(data) - length)])
            out = aligned(length)
            source.read_into(offset, out)
            return out == data[offset : offset + length]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(40)))
        source.close()

    def test_reading_past_the_end_is_corruption(self, backend: Backend) -> None:
        write_segment(backend, filled(BLOCK + 1))
        for offset, length in ((0, BLOCK + 2), (BLOCK + 1, 1), (1 << 60, 1), (-1, 1), (0, 4 << 20)):
            with backend.open_source(SEGMENT) as source:
                for _ in range(2):  # a source that refused refuses again
                    with pytest.raises(CorruptSegmentError, match="0123456789abcdef"):
                        source.read_into(offset, aligned(length))

    def test_a_closed_source_gives_nothing(self, backend: Backend) -> None:
        write_segment(backend, filled(BLOCK))
        source = backend.open_source(SEGMENT)
        maps = source.map() is not None
        source.close()
        source.close()
        with pytest.raises(StorageError):
            source.read_into(0, aligned(BLOCK))
        if maps:
            with pytest.raises(StorageError):
                source.map()

    def test_a_mapping_is_private_and_outlives_its_source(self, backend: Backend) -> None:
        for number, size in enumerate((0, 1, 100_000)):
            key, data = segment_name(number), filled(size)
            write_segment(backend, data, key)
            with backend.open_source(key) as source:
                mapped = source.map()
            if mapped is None:
                pytest.skip("this medium maps nothing")
            assert mapped == data
            assert not mapped.readonly
            mapped[:1] = data[:1].tobytes().translate(bytes(range(255, -1, -1)))
            assert read_segment(backend, key) == data
            backend.delete(key)
            assert mapped[1:] == data[1:]
