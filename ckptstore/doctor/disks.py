"""Examine a folder's disk: O_DIRECT, fsync, speed, overwriting, persistent memory. Removes what it writes."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ckptstore.backends.local_disk import libpmem, overwriting
from ckptstore.backends.local_disk.posix import SYSTEM, write_some
from ckptstore.doctor.findings import Finding
from ckptstore.doctor.mounts import judged, mount_of
from ckptstore.doctor.number_text import bandwidth, size, span

__all__ = ["examine_disk", "probe_folder"]

PREFIX: Final = ".ckpt-doctor-"
_BLOCK: Final = 16 << 20
_MOST: Final = 16
"""Maximum number of blocks to write."""
_SECONDS: Final = 0.6
"""Seconds of measuring for writes and for reads; one more block may be running at the end."""
_SYNCS: Final = 12
_SLOW_DISK: Final = 100 << 20
_SLOW_SYNC: Final = 0.02
_RECYCLED: Final = 256 << 20
_LITTLE: Final = 5 << 30


@contextmanager
def probe_folder(where: Path) -> Iterator[Path]:
    """A new folder in `where`, which is deleted with its contents when the ``with`` ends. Raises `OSError`.

    After a SIGKILL a hidden folder ``.ckpt-doctor-*`` remains, which may be deleted.
    """
    import secrets
    import shutil

    folder = where / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        folder.mkdir(0o700)  # within the try, so that a signal right after it still deletes the folder
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:  # a signal interrupted the deletion: delete again
            shutil.rmtree(folder, ignore_errors=True)
            raise


def examine_disk(folder: Path, where: Path, *, quick: bool) -> Iterator[Finding]:
    """Examine the disk of `folder`, a folder of our own in `where`. Writes up to 512 MiB; if `quick`, a few pages.

    Raises:
        OSError: not even a small file can be written.
    """
    yield judged(mount_of(where))
    yield _space(where)
    direct = _takes_direct(folder)
    yield direct
    yield _syncs(folder)
    if not quick:
        speed = _speed(folder, direct=direct.verdict == "works")
        yield speed
        yield _recycling(folder, float(speed.values["write_bytes_per_second"]))
    yield _persistent_memory(folder)


def _space(where: Path) -> Finding:
    status = os.statvfs(where)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    values = {"free": free, "total": total, "free_names": status.f_favail}
    what = f"{size(free)} free of {size(total)}"
    if status.f_files and status.f_favail < 1000:
        return Finding(
            "medium",
            "space",
            "careful",
            f"{what}, but only {status.f_favail} more files can be created",
            "delete small files",
            values,
        )
    if free < _LITTLE:
        do = "`ckpt stats`, `ckpt prune` and `ckpt gc` show what can be deleted; `store.keep` deletes it regularly"
        return Finding("medium", "space", "careful", what, do, values)
    return Finding("medium", "space", "works", what, None, values)


def _takes_direct(folder: Path) -> Finding:
    path, page = folder / "direct", mmap.mmap(-1, mmap.PAGESIZE)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, page, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            raise
        what = "not on this file system: segments go through the page cache, which costs a copy and the loader's cache"
        return Finding(
            "medium", "O_DIRECT", "slow", what, "nothing, if the disk is fast enough; else another file system"
        )
    return Finding("medium", "O_DIRECT", "works", "segments are written past the page cache")


def _syncs(folder: Path) -> Finding:
    """Time fdatasync of an appended page, as in a commit, and fsync of its folder."""
    times, path = [], folder / "sync"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.perf_counter() + _SECONDS
        for number in range(_SYNCS):
            begin = time.perf_counter()
            os.pwrite(descriptor, b"x" * 4096, number * 4096)
            os.fdatasync(descriptor)
            os.fsync(handle)
            times.append(time.perf_counter() - begin)
            if time.perf_counter() > end:
                break
    finally:
        os.close(handle)
        os.close(descriptor)
    middle = statistics.median(times)
    values = {"seconds": middle, "worst": max(times), "measured": len(times)}
    what = f"a small file is durable after {span(middle)} (the slowest of {len(times)}: {span(max(times))})"
    if middle > _SLOW_SYNC:
        do = "DiffOptions(batch=20): one commit for many steps; or save less often"
        return Finding("medium", "fsync", "slow", what, do, values)
    return Finding("medium", "fsync", "works", what, None, values)


def _timed(step: Callable[[int], None], last: Callable[[], None]) -> float:
    """Bytes per second of as many blocks as fit into the time, `last` included."""
    begin, done = time.perf_counter(), 0
    while done < _MOST and (not done or time.perf_counter() - begin < _SECONDS):
        step(done)
        done += 1
    last()
    return done * _BLOCK / max(time.perf_counter() - begin, 1e-9)


def _speed(folder: Path, *, direct: bool) -> Finding:
    """Write a new file in blocks of 16 MiB until they are durable, and read it back."""
    path, block = folder / "speed", memoryview(mmap.mmap(-1, _BLOCK))
    block[:] = secrets.token_bytes(1 << 20) * (_BLOCK >> 20)  # not zeros, which a disk could store as a hole
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, flags, 0o600)
    try:

        def put(number: int) -> None:
            done = 0
            while done < _BLOCK:
                done += write_some(SYSTEM, descriptor, block[done:], number * _BLOCK + done)

        write = _timed(put, lambda: os.fdatasync(descriptor))
        if not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        blocks = os.fstat(descriptor).st_size // _BLOCK
        read = _timed(lambda number: _fill(descriptor, block, number % blocks * _BLOCK), lambda: None)
    finally:
        os.close(descriptor)
        path.unlink()
    values = {"write_bytes_per_second": write, "read_bytes_per_second": read, "bytes": blocks * _BLOCK}
    what = f"writes {bandwidth(write)} until it is durable, reads {bandwidth(read)}"
    if write < _SLOW_DISK:
        do = f"a full of 1 GiB takes {span((1 << 30) / write)}: store diffs or deltas, or use another disk"
        return Finding("medium", "disk speed", "slow", what, do, values)
    return Finding("medium", "disk speed", "works", what, None, values)


def _fill(descriptor: int, block: memoryview, offset: int) -> None:
    done = 0
    while done < _BLOCK:
        count = os.preadv(descriptor, [block[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, "the file ended while it was read")
        done += count


def _recycling(folder: Path, write: float) -> Finding:
    """Report whether new segments should overwrite the blocks of deleted ones: the same measurement as in gc."""
    name = "recycling"
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if (mode := overwriting.chosen_mode(None)) == "never":
            return Finding("medium", name, "works", "off: CKPTSTORE_RECYCLE=never")
        if SYSTEM.file_system(handle) not in overwriting.LOCAL:
            return Finding("medium", name, "absent", "deleted segments are not reused on this file system")
        if mode == "always":
            return Finding("medium", name, "works", "on: CKPTSTORE_RECYCLE=always")
        if _RECYCLED / write > 1.5:
            what = (
                f"not measured: it would take about {span(_RECYCLED / write)} here; `ckpt gc` measures it when needed"
            )
            return Finding("medium", name, "works", what)
        ratio = overwriting.measure(SYSTEM, handle)
    finally:
        os.close(handle)
    if ratio is None:
        return Finding("medium", name, "absent", "could not be measured here (no O_DIRECT, or nearly full): it is off")
    on = ratio >= overwriting.PAYS
    what = f"{'on' if on else 'off'}: overwriting is {ratio:.2f} times as fast as new files ({overwriting.PAYS} pays)"
    return Finding("medium", name, "works", what, None, {"ratio": ratio, "on": on})


def _persistent_memory(folder: Path) -> Finding:
    library = libpmem.load() is not None
    mapped, path = False, folder / "pmem"
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            SYSTEM.fallocate(descriptor, mmap.PAGESIZE)
            SYSTEM.unmap(SYSTEM.map_shared(descriptor, 0, mmap.PAGESIZE, sync=True))
            mapped = True
        finally:
            os.close(descriptor)
    values = {"libpmem": library, "map_sync": mapped}
    if mapped and library:
        return Finding("medium", "PMEM", "works", "MAP_SYNC and libpmem: open the store as pmem:///path", None, values)
    if mapped:
        what = "MAP_SYNC works, libpmem.so.1 is not installed: pmem:// would sync through msync"
        return Finding("medium", "PMEM", "slow", what, "install libpmem (PMDK)", values)
    return Finding("medium", "PMEM", "absent", "no MAP_SYNC here: this is not persistent memory", None, values)
