"""Examine the processor, the memory, and the limits that the system sets for this process."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from ckptstore.doctor.findings import Finding
from ckptstore.doctor.number_text import bandwidth, counted, size
from ckptstore.host.threads import default_threads, run_all, started_pool

__all__ = ["examine_machine", "usable_cores"]

_BLOCK: Final = 32 << 20
_SECONDS: Final = 0.15
"""Seconds of measuring for each maximum speed."""
_FEW_FILES: Final = 256
_LITTLE: Final = 1 << 30
_MANY_ROOTS: Final = 0.01
"""Minimum share of inexact square roots that is worth a remark (docs/optimizer.md)."""
_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "busybox", "zsh"})


def examine_machine(*, quick: bool) -> Iterator[Finding]:
    """Check cores and maximum speeds, square roots, memory, descriptors, SIGTERM.

    Measures for less than a second; if `quick`, not at all.
    """
    yield _processor(quick=quick)
    if not quick:
        yield from _roots()
    yield _memory()
    yield _open_files()
    yield _sigterm()


def usable_cores() -> float:
    """Cores that this process may use: its affinity, or a container's quota if that is lower."""
    cores = float(len(os.sched_getaffinity(0)))
    for path in (Path("/sys/fs/cgroup/cpu.max"),):
        with suppress(OSError, ValueError):
            quota, period = path.read_text().split()
            if quota != "max":
                cores = min(cores, int(quota) / int(period))
    return cores


def _best(work: Callable[[], object], nbytes: int) -> float:
    """Bytes per second of the fastest of several calls; the first call is a warm-up."""
    work()
    fastest, end = 0.0, time.perf_counter() + _SECONDS
    while True:
        begin = time.perf_counter()
        work()
        now = time.perf_counter()
        fastest = max(fastest, nbytes / max(now - begin, 1e-9))
        if now >= end:
            return fastest


def _roofs(threads: int) -> tuple[float, float]:
    """Upper bounds for the speed of a save, in bytes per second of all threads: copying memory, and hashing it."""
    import numpy as np
    import xxhash

    parts = [(np.ones(_BLOCK, np.uint8), np.ones(_BLOCK, np.uint8)) for _ in range(threads)]
    pool = started_pool(threads, "doctor")

    def copy(number: int) -> None:
        np.copyto(parts[number][1], parts[number][0])

    def digest(number: int) -> None:
        xxhash.xxh3_128_digest(parts[number][0].data)

    def measured(work: Callable[[int], None]) -> float:
        jobs = [partial(work, number) for number in range(threads)]
        return _best(lambda: run_all(pool, jobs), threads * _BLOCK)

    try:
        return measured(copy), measured(digest)
    finally:
        pool.shutdown()


def _processor(*, quick: bool) -> Finding:
    cores = usable_cores()
    values: dict[str, object] = {"cores": cores, "threads": default_threads()}
    what = f"{cores:g} cores usable of {os.cpu_count()}"
    if not quick:
        copy, digest = _roofs(default_threads())
        values |= {"copy_bytes_per_second": copy, "hash_bytes_per_second": digest}
        what += f"; {counted(default_threads(), 'thread')} copy {bandwidth(copy)} and hash {bandwidth(digest)}"
    if cores < 2:
        do = "give the job a second core: compressing and writing run while training runs, and share its core here"
        return Finding("machine", "processor", "slow", what, do, values)
    return Finding("machine", "processor", "works", what, None, values)


def _roots() -> Iterator[Finding]:
    """Check that torch's square roots are those that step diffs predict; without torch there is no finding."""
    from ckptstore.frameworks import bridge

    try:
        share = bridge.torch_roots()
    except Exception:  # noqa: BLE001 - no torch, or a broken one: the finding "torch" reports it
        return
    what = f"torch rounds {'all' if not share else f'all but {share:.2%}'} of the square roots to nearest"
    if share >= _MANY_ROOTS:
        what += "; step diffs of Adam take up to 0.1 bits more per number, but no more with fused=True"
    yield Finding("machine", "roots", "works", what, None, {"inexact": share})


def _memory() -> Finding:
    fields = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) << 10
    available, limit = fields.get("MemAvailable", 0), None
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max" raises ValueError: no limit
        available = min(available, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    total = min(fields.get("MemTotal", 0), limit) if limit else fields.get("MemTotal", 0)
    values = {"total": total, "available": available}
    what = f"{size(available)} available of {size(total)}{' (the limit of this container)' if limit else ''}"
    if available < _LITTLE:
        do = "limit the writer's copies (store.writer(memory=...)): each save in flight holds a copy of the state"
        return Finding("machine", "memory", "careful", what, do, values)
    return Finding("machine", "memory", "works", what, None, values)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = {"soft": soft, "hard": hard}
    what = f"{soft:,} at once" if soft != resource.RLIM_INFINITY else "no limit"
    if 0 <= soft < _FEW_FILES:
        do = f"ulimit -n {min(4096, hard) if hard >= 0 else 4096}: long chains are read from many segments at once"
        return Finding("machine", "open files", "slow", what, do, values)
    return Finding("machine", "open files", "works", what, None, values)


def _sigterm() -> Finding:
    """Check that SIGTERM, which schedulers send before they kill, reaches a training script started here."""
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        what = "blocked in this process and its children: a kill loses steps that wait for their batch"
        return Finding(
            "machine", "SIGTERM", "fails", what, "find out what blocks it (the launcher), or call writer.wait()"
        )
    first = ""
    with suppress(OSError):
        first = Path("/proc/1/comm").read_text().strip()
    if first in _SHELLS:
        what = f"process 1 is a shell ({first}), which forwards no signal to its children"
        do = "start the training script with `exec python ...`, or the container with an init (docker run --init)"
        return Finding("machine", "SIGTERM", "careful", what, do, {"process_1": first})
    what = "reaches processes started here; writers with diffs then write pending steps, others leave it to the script"
    return Finding("machine", "SIGTERM", "works", what, None, {"process_1": first})
