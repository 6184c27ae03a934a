"""The crash tools: the file system in memory behaves like a real one, every legal crash state is visited and no other,
and enumeration catches wrong protocols."""

from __future__ import annotations

import errno
import os
import random
import textwrap
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.posix import SYSTEM, Posix
from ckptstore.errors import KeyNotFoundError, StorageError
from ckptstore.host.pages import BLOCK
from tests.backends.backend_conformance import aligned, filled
from tools.crash import enumerate as enumeration
from tools.crash.disk import Allocate, Blob, Image, Name, Rename, Sync, SyncFailed, Truncate, Unname, Write
from tools.crash.enumerate import CrashState, crash_states
from tools.crash.fates import STALE
from tools.crash.faults import (
    Fault,
    FaultyPosix,
    acknowledgement_lost,
    disk_full,
    interrupted,
    short_reads,
    short_writes,
    sync_fails,
    sync_forgotten,
)
from tools.crash.ramfs import SECTOR, RamPosix
from tools.crash.recording import RecordingPosix

# The file system in memory


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def exercise(posix: Posix, root: str, seed: int) -> list[object]:
    """A few hundred random calls; returns the result of each, except real descriptors."""
    numbers = random.Random(seed)
    names = [f"{folder}/{name}" for folder in ("", "/a", "/a/b") for name in "xy"] + ["/a", "/a/b", "/none/x", "/x/y"]
    descriptors: list[int] = []
    seen: list[object] = []

    def opened(flags: int) -> str:
        descriptors.append(posix.open(root + numbers.choice(names), flags))
        return "open"

    def read(fd: int) -> bytes:
        out = aligned(numbers.choice([1, 7, SECTOR]))
        return bytes(out[: posix.preadv(fd, out, numbers.choice([0, 3, 5000]))])

    calls: list[Callable[[], object]] = [
        lambda: opened(os.O_RDWR | os.O_CREAT),
        lambda: opened(os.O_RDWR | os.O_CREAT | os.O_EXCL),
        lambda: opened(os.O_RDWR | os.O_CREAT | os.O_TRUNC),
        lambda: opened(os.O_RDONLY),
        lambda: opened(os.O_RDONLY | os.O_DIRECTORY),
        lambda: posix.mkdir(root + numbers.choice(names)),
        lambda: posix.unlink(root + numbers.choice(names)),
        lambda: posix.link(root + numbers.choice(names), root + numbers.choice(names)),
        lambda: posix.stat(root + numbers.choice(names)).st_mode & 0o170000,
        lambda: sorted(posix.scandir(root + numbers.choice(["", *names]))),
    ]
    on_files: list[Callable[[int], object]] = [
        lambda fd: posix.pwrite(
            fd, memoryview(numbers.randbytes(numbers.choice([1, 700]))), numbers.choice([0, 9, 3000])
        ),
        lambda fd: posix.ftruncate(fd, numbers.choice([0, 10, 4000])),
        lambda fd: posix.fallocate(fd, numbers.choice([1, 2000])),
        posix.fsync,
        read,
        read,
    ]
    for _ in range(300):
        if descriptors and numbers.random() < 0.5:
            fd, call = numbers.choice(descriptors), numbers.choice(on_files)
            before = numbers.getstate()
            seen.append(outcome(lambda fd=fd, call=call: call(fd)))  # type: ignore[misc]
            numbers.setstate(before)
            numbers.random()
        else:
            seen.append(outcome(numbers.choice(calls)))
    for fd in descriptors:
        posix.close(fd)
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_the_file_system_in_memory_agrees_with_the_real_one(tmp_path: Path, seed: int) -> None:
    memory = RamPosix()
    assert exercise(memory, "", seed) == exercise(SYSTEM, str(tmp_path), seed)
    for path, blob in memory.image().walk():
        real = tmp_path / path[1:]
        assert real.is_dir() if blob is None else real.read_bytes() == blob.data
    assert len(list(memory.image().walk())) == len(list(tmp_path.rglob("*")))


def test_renames_agree_with_the_real_file_system(tmp_path: Path) -> None:
    for posix, root in ((RamPosix(), ""), (SYSTEM, str(tmp_path))):
        for name in ("a", "b"):
            fd = posix.open(f"{root}/{name}", os.O_CREAT | os.O_WRONLY)
            posix.pwrite(fd, memoryview(name.encode()), 0)
            posix.close(fd)
        assert outcome(lambda: posix.rename_exclusive(f"{root}/a", f"{root}/b")) == "EEXIST"  # noqa: B023 - called now
        assert outcome(lambda: posix.rename_exclusive(f"{root}/none", f"{root}/c")) == "ENOENT"  # noqa: B023
        posix.rename_exclusive(f"{root}/a", f"{root}/c")
        posix.replace(f"{root}/b", f"{root}/c")
        assert posix.scandir(root or "/") == [("c", False)]
        out = aligned(2)
        fd = posix.open(f"{root}/c", os.O_RDONLY)
        assert posix.preadv(fd, out, 0) == 1
        posix.close(fd)
        assert bytes(out[:1]) == b"b"


def test_direct_io_wants_whole_sectors() -> None:
    posix = RamPosix()
    fd = posix.open("/x", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    assert posix.pwrite(fd, aligned(SECTOR), SECTOR) == SECTOR
    for offset, length in ((1, SECTOR), (0, 5)):
        assert outcome(lambda: posix.pwrite(fd, aligned(length), offset)) == "EINVAL"  # noqa: B023 - called now
        assert outcome(lambda: posix.preadv(fd, aligned(length), offset)) == "EINVAL"  # noqa: B023
    assert outcome(lambda: RamPosix(direct=False).open("/x", os.O_CREAT | os.O_DIRECT)) == "EINVAL"


def test_an_image_is_its_paths_and_contents(tmp_path: Path) -> None:
    one = Image({0: {"a": 1, "s": 2}, 2: {"b": 3}}, {1: Blob(b"x"), 3: Blob(b"y"), 9: Blob(b"nameless")})
    other = Image({0: {"s": 7, "a": 5}, 7: {"b": 8}}, {5: Blob(b"x"), 8: Blob(b"y")})
    assert one.digest() == other.digest()
    assert list(one.walk()) == [("/a", Blob(b"x")), ("/s", None), ("/s/b", Blob(b"y"))]
    for changed in (
        Image({0: {"a": 1, "s": 2}, 2: {"b": 1}}, one.files),
        Image({0: {"a": 1, "s": 2}, 2: {}}, one.files),
        Image({0: {"a": 1, "t": 2}, 2: {"b": 3}}, one.files),
    ):
        assert changed.digest() != one.digest()
    assert RamPosix(one).image().digest() == one.digest()
    one.materialize(tmp_path)
    assert (tmp_path / "s" / "b").read_bytes() == b"y"


def test_a_crash_state_is_not_changed_by_using_it() -> None:
    image = Image({0: {"a": 1}}, {1: Blob(b"before")})
    posix = RamPosix(image)
    fd = posix.open("/a", os.O_WRONLY)
    posix.pwrite(fd, memoryview(b"after!"), 0)
    posix.unlink("/a")
    posix.mkdir("/b")
    assert list(image.walk()) == [("/a", Blob(b"before"))]


# Recordings


def test_the_history_holds_every_change_in_order() -> None:
    posix = RecordingPosix()
    posix.mkdir("/s")
    fd = posix.open("/s/x", os.O_CREAT | os.O_RDWR)
    posix.pwrite(fd, memoryview(b"abc"), 5)
    posix.ftruncate(fd, 4)
    posix.fallocate(fd, 9)
    posix.fdatasync(fd)
    posix.link("/s/x", "/s/y")
    posix.replace("/s/y", "/s/z")
    posix.unlink("/s/x")
    posix.fail_sync(fd)
    posix.preadv(fd, aligned(4), 0)
    posix.stat("/s")
    assert posix.history == [
        Name(0, "s", 1, "folder"),
        Name(1, "x", 2, "file"),
        Write(2, 5, b"abc"),
        Truncate(2, 4),
        Allocate(2, 9),
        Sync(2),
        Name(1, "y", 2),
        Rename(1, "y", "z", 2),
        Unname(1, "x", 2),
        SyncFailed(2),
    ]


def test_threads_are_recorded_whole() -> None:
    posix = RecordingPosix()
    fd = posix.open("/x", os.O_CREAT | os.O_RDWR)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: posix.pwrite(fd, memoryview(bytes([n]) * 10), n * 10), range(200)))
    written = sorted((w for w in posix.history if isinstance(w, Write)), key=lambda w: w.offset)
    assert written == [Write(1, n * 10, bytes([n]) * 10) for n in range(200)]


# Possible states after a crash


def files(state: CrashState) -> dict[str, bytes]:
    return {path: blob.data for path, blob in state.image.walk() if blob is not None}


def recorded(*named: str, data: bytes = b"") -> tuple[RecordingPosix, list[int]]:
    """A recording that begins with these files durable, and a descriptor for each."""
    posix = RamPosix()
    for name in named:
        fd = posix.open(name, os.O_CREAT | os.O_WRONLY)
        posix.pwrite(fd, memoryview(data), 0)
    recording = RecordingPosix(posix.image())
    return recording, [recording.open(name, os.O_RDWR) for name in named]


def endings(recording: RecordingPosix, **options: int) -> list[dict[str, bytes]]:
    """The files after a crash now."""
    recording.acknowledge(now := object())
    return [files(state) for state in crash_states(recording, **options) if now in state.acknowledged]


def contents(recording: RecordingPosix, name: str = "/x", **options: int) -> set[bytes | None]:
    """The possible contents of `name` after a crash now; None: absent."""
    return {found.get(name) for found in endings(recording, **options)}


def test_an_unsynced_write_is_kept_lost_or_torn_by_sectors() -> None:
    old, new = b"o" * SECTOR, b"n" * SECTOR
    posix, (fd,) = recorded("/x", data=old * 3)
    posix.pwrite(fd, memoryview(new * 3), 0)
    found = contents(posix, torn=200)
    assert found == {a + b + c for a in (old, new) for b in (old, new) for c in (old, new)}
    assert contents(posix, torn=0) == {old * 3, new * 3, new + old * 2, old + new * 2}


def test_an_unaligned_write_tears_at_sector_boundaries() -> None:
    posix, (fd,) = recorded("/x", data=b"o" * 2 * SECTOR)
    posix.pwrite(fd, memoryview(b"n" * 20), SECTOR - 15)
    o, n = b"o", b"n"
    assert contents(posix, torn=50) == {
        o * 2 * SECTOR,
        o * (SECTOR - 15) + n * 20 + o * (SECTOR - 5),
        o * (SECTOR - 15) + n * 15 + o * SECTOR,
        o * SECTOR + n * 5 + o * (SECTOR - 5),
    }


def test_a_file_may_grow_without_its_data() -> None:
    posix, (fd,) = recorded("/x")
    posix.pwrite(fd, memoryview(b"data"), 0)
    assert contents(posix) == {b"", b"data", bytes(4), STALE * 4}


def test_lengths_are_as_uncertain_as_data() -> None:
    posix, (fd,) = recorded("/x", data=b"123456")
    posix.ftruncate(fd, 2)
    posix.fallocate(fd, 4)
    assert contents(posix) == {b"123456", b"12", b"12\0\0"}


def test_a_later_write_may_land_without_an_earlier_one() -> None:
    posix, (fd,) = recorded("/x", data=b"..")
    posix.pwrite(fd, memoryview(b"a"), 0)
    posix.pwrite(fd, memoryview(b"b"), 1)
    assert contents(posix) == {b"..", b"a.", b".b", b"ab"}


def test_a_synced_write_is_certain() -> None:
    posix, (fd,) = recorded("/x", data=b"old")
    posix.pwrite(fd, memoryview(b"new, longer"), 0)
    posix.fsync(fd)
    assert contents(posix) == {b"new, longer"}
    posix.pwrite(fd, memoryview(b"N"), 0)
    assert contents(posix) == {b"new, longer", b"New, longer"}


def test_a_file_without_its_folder_synced_may_be_absent() -> None:
    posix, _ = recorded()
    fd = posix.open("/x", os.O_CREAT | os.O_WRONLY)
    posix.pwrite(fd, memoryview(b"x"), 0)
    posix.fsync(fd)
    assert contents(posix) == {b"x", None}
    posix.fsync(posix.open("/", os.O_RDONLY))
    assert contents(posix) == {b"x"}


def test_a_folder_sync_saves_names_not_contents() -> None:
    posix, _ = recorded()
    fd = posix.open("/x", os.O_CREAT | os.O_WRONLY)
    posix.pwrite(fd, memoryview(b"x"), 0)
    posix.fsync(posix.open("/", os.O_RDONLY))
    assert contents(posix) == {b"x", b"", b"\0", STALE}


def test_a_folder_sync_does_not_save_the_folders_own_name() -> None:
    posix, _ = recorded()
    posix.mkdir("/s")
    posix.fsync(posix.open("/s/x", os.O_CREAT | os.O_WRONLY))
    posix.fsync(posix.open("/s", os.O_RDONLY))
    assert contents(posix, "/s/x") == {b"", None}
    posix.fsync(posix.open("/", os.O_RDONLY))
    assert contents(posix, "/s/x") == {b""}


def test_names_are_kept_or_lost_in_any_combination() -> None:
    posix, _ = recorded("/a", "/b")
    posix.unlink("/a")
    posix.unlink("/b")
    posix.open("/c", os.O_CREAT | os.O_WRONLY)
    found = {frozenset(files(state)) for state in crash_states(posix)}
    assert found == {
        frozenset(s) for s in ((*a, *b, *c) for a in ((), ("/a",)) for b in ((), ("/b",)) for c in ((), ("/c",)))
    }


def test_a_rename_is_one_step() -> None:
    posix, _ = recorded("/old")
    fd = posix.open("/new", os.O_CREAT | os.O_WRONLY)
    posix.pwrite(fd, memoryview(b"n"), 0)
    posix.fsync(fd)
    posix.fsync(posix.open("/", os.O_RDONLY))
    posix.replace("/new", "/old")
    found = endings(posix)
    assert len(found) == 2
    assert {"/new": b"n", "/old": b""} in found
    assert {"/old": b"n"} in found


def test_a_slot_made_again_after_a_lost_unlink() -> None:
    """A name may return with its old contents, never with a mixture."""
    posix, _ = recorded("/x", data=b"first")
    posix.unlink("/x")
    fd = posix.open("/x", os.O_CREAT | os.O_WRONLY)
    posix.pwrite(fd, memoryview(b"second"), 0)
    posix.fsync(fd)
    assert contents(posix) == {b"first", b"second", None}


def test_data_of_a_failed_sync_stays_in_doubt() -> None:
    posix, (fd,) = recorded("/x", data=b"..")
    posix.pwrite(fd, memoryview(b"a"), 0)
    posix.fail_sync(fd)
    posix.pwrite(fd, memoryview(b"b"), 1)
    posix.fsync(fd)  # the fsync that PostgreSQL once believed
    assert contents(posix) == {b"ab", b".b"}
    root = posix.open("/", os.O_RDONLY)
    posix.unlink("/x")
    posix.fail_sync(root)
    posix.open("/y", os.O_CREAT | os.O_WRONLY)
    posix.fsync(root)
    last = endings(posix)
    assert {"/x" in found for found in last} == {True, False}
    assert all("/y" in found for found in last)


def test_acknowledgements_and_cuts_are_in_step() -> None:
    posix, (fd,) = recorded("/x")
    for number in range(3):
        posix.pwrite(fd, memoryview(bytes([number])), number)
        posix.fsync(fd)
        posix.acknowledge(number)
    states = list(crash_states(posix))
    assert {state.acknowledged for state in states} == {(), (0,), (0, 1), (0, 1, 2)}
    for state in states:
        assert len(files(state)["/x"]) >= len(state.acknowledged)
        assert state.position <= len(posix.history)
        assert state.exhaustive


def many_writes() -> RecordingPosix:
    posix, (fd,) = recorded("/x")
    for number in range(30):
        posix.pwrite(fd, memoryview(bytes([number]) * 3 * SECTOR), number * 3 * SECTOR)
    return posix


def test_a_sample_is_bounded_reproducible_and_holds_the_telling_states() -> None:
    states = list(crash_states(many_writes(), limit=500, seed=3))
    assert 300 < len(states) <= 500
    assert not any(state.exhaustive for state in states)
    found = [state.image.digest() for state in states]
    assert found == [state.image.digest() for state in crash_states(many_writes(), limit=500, seed=3)]
    assert set(found) != {state.image.digest() for state in crash_states(many_writes(), limit=500, seed=4)}
    assert len(set(found)) == len(found), "no state twice"
    whole = b"".join(bytes([number]) * 3 * SECTOR for number in range(30))
    held = {files(state)["/x"] for state in states}
    assert {b"", whole, whole[: 3 * SECTOR], whole[: 60 * SECTOR]} <= held
    assert bytes(3 * SECTOR) + whole[3 * SECTOR :] in held, "all but the first"


def test_a_sample_too_keeps_what_is_certain_beside_what_is_in_doubt() -> None:
    posix, (fd,) = recorded("/x")
    for number in range(20):
        posix.pwrite(fd, memoryview(b"d"), number)
    posix.fail_sync(fd)
    posix.pwrite(fd, memoryview(b"certain"), 20)
    posix.fsync(fd)
    found = endings(posix, limit=300)
    assert len(found) > 100
    assert all(state["/x"].endswith(b"certain") for state in found)


def test_a_state_explains_itself() -> None:
    posix, (fd,) = recorded("/x", data=b"..")
    posix.pwrite(fd, memoryview(b"a"), 0)
    texts = [state.explain() for state in crash_states(posix)]
    assert any("lost: Write(node=" in text and "/x 2" in text for text in texts)


# Enumeration of the backend's states

ROOT = "/data/store"
SEGMENT = bytes(filled(2 * BLOCK))


def scenario(backend: LocalBackend, acknowledge: Callable[[str], None]) -> None:
    """Two segments and the two slots that name them, in a store that is new to the disk."""
    for number in range(2):
        memory = aligned(2 * BLOCK)
        memory[:] = SEGMENT
        sink = backend.open_sink(f"seg/{number}/a", 2 * BLOCK)
        sink.write(0, memory)
        sink.seal(BLOCK + 5)
        acknowledge(f"seg/{number}/a")
        backend.create(f"log/{number}", f"slot {number} ".encode() * 100)
        acknowledge(f"log/{number}")


def violations(recording: RecordingPosix, limit: int = 2000) -> list[str]:
    """The broken promises: something acknowledged is absent or different, or a slot is partially there."""
    found = []
    for state in crash_states(recording, limit=limit):
        survivor = LocalBackend(ROOT, state.mount())
        for key in state.acknowledged:
            assert isinstance(key, str)
            try:
                data = survivor.get(key)
            except KeyNotFoundError:
                found.append(f"{key} is gone\n{state.explain()}")
                continue
            if key.startswith("seg") and data != SEGMENT[: BLOCK + 5]:
                found.append(f"{key} is damaged\n{state.explain()}")
        found += [
            f"{key} is torn\n{state.explain()}"
            for key in survivor.list("log/")
            if survivor.get(key) != f"slot {key[4:]} ".encode() * 100
        ]
    return found


def run(
    *faults: Fault, kind: type[LocalBackend] = LocalBackend, direct: bool = True
) -> tuple[RecordingPosix, FaultyPosix]:
    recording = RecordingPosix(direct=direct)
    posix = FaultyPosix(recording, *faults)
    scenario(kind(ROOT, posix), recording.acknowledge)
    return recording, posix


@pytest.mark.parametrize("direct", [True, False])
def test_the_backend_keeps_every_promise_in_every_crash_state(direct: bool) -> None:
    recording, _ = run(direct=direct)
    assert violations(recording) == []
    states = list(crash_states(recording, limit=2000))
    assert len(states) > 60
    assert all(state.exhaustive for state in states)


SYNCS = 14
"""/, /data, the store twice and seg/ twice, for the names of folders; file and folder of 2 segments and 2 slots."""


def test_the_scenario_makes_as_many_syncs_as_the_tests_below_forget() -> None:
    _, posix = run()
    assert posix.calls["fsync"] + posix.calls["fdatasync"] == SYNCS


@pytest.mark.parametrize("nth", range(1, SYNCS + 1))
def test_every_sync_of_the_backend_is_needed(nth: int) -> None:
    recording, _ = run(sync_forgotten(nth))
    assert violations(recording) != []


def test_without_syncing_folders_what_was_acknowledged_is_gone() -> None:
    class NoFolderSync(RecordingPosix):
        def fsync(self, fd: int) -> None:
            if not self._opened(fd, file=False).flags & os.O_DIRECTORY:
                super().fsync(fd)

    recording = NoFolderSync()
    scenario(LocalBackend(ROOT, recording), recording.acknowledge)
    assert any("log/0 is gone" in text for text in violations(recording))


def test_without_syncing_the_temporary_a_slot_is_torn() -> None:
    class NoFileSync(RecordingPosix):
        def fsync(self, fd: int) -> None:
            if self._opened(fd, file=False).flags & os.O_DIRECTORY:
                super().fsync(fd)

    recording = NoFileSync()
    scenario(LocalBackend(ROOT, recording), recording.acknowledge)
    assert any("log/0 is torn" in text for text in violations(recording))


def test_writing_a_slot_under_its_own_name_shows_torn_slots() -> None:
    """Durable once acknowledged, also exclusive, and wrong: the reason for a temporary."""

    class InPlace(LocalBackend):
        def _create(self, key: str, data: bytes) -> None:
            folder, _, name = key.rpartition("/")
            with self._folders.made(folder) as handle:
                self._write(name, data, handle)
                self._folders.sync(handle, folder)

    found = violations(run(kind=InPlace)[0])
    assert found
    assert all("torn" in text for text in found)


def commit(backend: LocalBackend, key: str, data: bytes, *, settle: bool) -> bool:
    """COMMIT, steps 2 to 4: create; if in doubt read back."""
    try:
        backend.create(key, data)
    except StorageError:
        try:
            if backend.get(key) != data:
                return False
            if settle:
                backend.settle("log/")
        except (KeyNotFoundError, StorageError):
            return False
    return True


@pytest.mark.parametrize("fault", [sync_fails(7), acknowledgement_lost(2)])
def test_reading_back_is_no_proof_until_settled(fault: Fault) -> None:
    """A slot that was linked but not synced is read back identical, and gone after a crash. `settle` detects it."""
    for settle in (False, True):
        recording = RecordingPosix()
        posix = FaultyPosix(recording, fault)
        backend = LocalBackend(ROOT, posix)
        for number in range(3):
            if commit(backend, f"log/{number}", f"slot {number} ".encode() * 100, settle=settle):
                recording.acknowledge(f"log/{number}")
        assert (violations(recording) == []) == settle


def test_a_handle_may_be_closed_within_a_count_of_calls() -> None:
    """As the garbage collector does, in the middle of any call. A thread that waits there for itself stops all
    collection."""

    class Collected(frozenset[str]):
        def isdisjoint(self, names: Iterable[object]) -> bool:
            if "unlink" in names:
                posix.close(handle)
            return super().isdisjoint(names)

    posix = FaultyPosix(None, Fault(Collected()))
    handle = posix.open("/x", os.O_CREAT | os.O_WRONLY)
    worker = threading.Thread(target=posix.unlink, args=("/x",), daemon=True)
    worker.start()
    worker.join(10)
    assert not worker.is_alive()
    assert posix.calls["close"] == 1


@pytest.mark.parametrize("nth", range(1, 10))
def test_no_failed_sync_is_ever_acknowledged(nth: int) -> None:
    recording = RecordingPosix()
    backend = LocalBackend(ROOT, FaultyPosix(recording, sync_fails(nth)))
    for number in range(3):
        for _ in range(2):
            if commit(backend, f"log/{number}", f"slot {number} ".encode() * 100, settle=True):
                recording.acknowledge(f"log/{number}")
    assert violations(recording) == []


def test_a_crash_during_recovery_loses_nothing_either() -> None:
    recording, _ = run()
    found = list(crash_states(recording, limit=2000))[::7]
    assert any(state.acknowledged for state in found)
    for state in found:
        again = RecordingPosix(state.image)
        for label in state.acknowledged:
            again.acknowledge(label)
        backend = LocalBackend(ROOT, again)
        for key in backend.stray_temporaries():
            backend.discard_stray(key)
        free = len(backend.list("log/"))
        backend.create(f"log/{free}", f"slot {free} ".encode() * 100)
        again.acknowledge(f"log/{free}")
        assert violations(again) == []


def test_the_example_of_the_enumerator_runs() -> None:
    assert enumeration.__doc__ is not None
    lines = enumeration.__doc__.split("::\n", 1)[1].split("\nThe model", 1)[0]
    scope = {"RecordingPosix": RecordingPosix, "LocalBackend": LocalBackend, "crash_states": crash_states}
    exec(textwrap.dedent(lines), scope)  # noqa: S102 - our own docstring
    assert scope["survivor"]


# Faults


def test_faults_hit_the_calls_they_name() -> None:
    posix = FaultyPosix(RamPosix(), sync_fails(2, times=2), Fault(frozenset({"mkdir"}), code=errno.ENOSPC))
    fd = posix.open("/x", os.O_CREAT | os.O_RDWR)
    results = [outcome(lambda: posix.fsync(fd)), outcome(lambda: posix.fdatasync(fd)), outcome(lambda: posix.fsync(fd))]
    assert [*results, outcome(lambda: posix.fsync(fd))] == [None, "EIO", "EIO", None]
    assert [outcome(lambda: posix.mkdir("/a")), outcome(lambda: posix.mkdir("/a"))] == ["ENOSPC", None]
    assert posix.calls == {"open": 1, "create": 1, "fsync": 3, "fdatasync": 1, "mkdir": 2}


def test_transfers_can_be_cut_short_or_interrupted() -> None:
    disk = RamPosix()
    posix = FaultyPosix(disk, short_writes(2, times=1, part=0.5), interrupted(4), short_reads(2, times=1, part=0.25))
    fd = posix.open("/x", os.O_CREAT | os.O_RDWR)
    data, out = memoryview(bytes(range(100))), aligned(100)
    assert [outcome(lambda: posix.pwrite(fd, data, 0)) for _ in range(5)] == [100, 50, 100, "EINTR", 100]
    assert [outcome(lambda: posix.preadv(fd, out, 0)) for _ in range(3)] == [100, 25, 100]


def test_a_disk_fills_up_in_the_middle_of_a_write_and_stays_full() -> None:
    posix = FaultyPosix(RamPosix(), *disk_full(2))
    fd = posix.open("/x", os.O_CREAT | os.O_RDWR)
    written = [outcome(lambda: posix.pwrite(fd, memoryview(b"12345678"), 0)) for _ in range(4)]
    assert written == [8, 4, "ENOSPC", "ENOSPC"]


def test_a_lost_acknowledgement_takes_effect() -> None:
    posix = FaultyPosix(RamPosix(), acknowledgement_lost())
    posix.open("/x", os.O_CREAT | os.O_RDWR)
    assert outcome(lambda: posix.link("/x", "/y")) == "EIO"
    assert sorted(name for name, _ in posix.scandir("/")) == ["x", "y"]


def test_a_failed_sync_is_recorded_as_failed_and_a_forgotten_one_not_at_all() -> None:
    recording = RecordingPosix()
    posix = FaultyPosix(recording, sync_fails(1), sync_forgotten(2))
    fd = posix.open("/x", os.O_CREAT | os.O_RDWR)
    assert [outcome(lambda: posix.fsync(fd)) for _ in range(3)] == ["EIO", None, None]
    assert recording.history[1:] == [SyncFailed(1), Sync(1)]
