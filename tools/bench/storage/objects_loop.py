"""Measures how much of its speed a trainer's Python loop keeps during an upload. Started by `objects`.

``python -m tools.bench.storage.objects_loop thread|agent|apart --port PORT --size BYTES``, one line of JSON. A Python
loop, which waits for the GIL whenever another thread of its process has it, is timed alone, then from the return of
`save_async` until the save is acknowledged, then alone again.

``apart`` is the cost of the machine itself: another process that is unrelated to the loop sends as many bytes by
obstore. Cores that share caches, memory or (as threads of one core) everything slow that loop down, too.

With ``--pin`` the loop has the first core to itself, as a trainer has more cores than one; the threads of the writer,
the agent and the server share the others. Without it, on few cores, they also take the loop's core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ckptstore
import ckptstore.agent
from tools.bench.storage.object_clients import CLIENTS, REGION
from tools.bench.storage.objects_worker import state_of

__all__ = ["others", "pinned", "speeds"]


def others() -> set[int]:
    """All cores except the loop's; all cores if there is only one."""
    every = sorted(os.sched_getaffinity(0))
    return set(every[1:] or every)


@contextlib.contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Pin threads and processes that start inside, and this thread meanwhile, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _queued() -> float:
    """Seconds for which this thread was runnable while the machine was busy with others."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _turns(until: Callable[[], bool]) -> tuple[float, float]:
    """Iterations of the loop per second, and the share of its runnable time on a core in which it ran.

    The rest of that time it waited for the GIL, however busy the machine is with other processes.
    """
    turns = total = 0
    began, cpu, queued = time.perf_counter(), time.thread_time(), _queued()
    while not until():
        for number in range(20_000):
            total += number & 7
        turns += 1
    seconds, ran, queued = time.perf_counter() - began, time.thread_time() - cpu, _queued() - queued
    return turns / seconds, min(1.0, ran / max(1e-9, seconds - queued))


def _alone(seconds: float) -> float:
    end = time.perf_counter() + seconds
    return _turns(lambda: time.perf_counter() > end)[0]


def speeds(mode: str, port: int, size: int, *, pin: bool, bandwidth: str | None = None) -> dict[str, float]:
    """One upload beside the loop -> ``kept`` (share of the loop's speed), ``ran`` (share of the time for which it had
    the GIL, of that for which it had a core), ``stall`` and ``upload`` (seconds).

    Args:
        mode: ``thread``: a writer in this process; ``agent``: in a separate process; ``apart``: no writer at all.
        bandwidth: the bandwidth limit of the upload.
    """
    if mode == "apart":
        return _apart(port, size, pin=pin)
    words: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{port}", "client_kwargs": {"region_name": REGION}}
    words |= {"anon": True} | ({"bandwidth": bandwidth} if bandwidth else {})
    state: dict[str, Any] = dict(state_of(size))
    every = os.sched_getaffinity(0)
    with pinned(others() if pin else every):
        store = ckptstore.open(f"s3://tests/{uuid.uuid4().hex}", storage_options=words)
        if mode == "agent":
            writer: Any = ckptstore.agent.writer(store, poll_seconds=None, linger_seconds=1)
        else:
            writer = store.writer(poll_seconds=None)
        with contextlib.suppress(AttributeError):
            writer.prepare(state)
        writer.save_async({"small": state["t0000"][:1000]}, 1).result()  # threads have started, with their cores
        time.sleep(0.5)
    if pin:
        os.sched_setaffinity(0, every - others() or every)
    before = _alone(1.0)
    began = time.perf_counter()
    pending = writer.save_async(state, 2)
    stalled = time.perf_counter()
    during, ran = _turns(pending.done)
    ended = time.perf_counter()
    pending.result()
    after = _alone(1.0)
    writer.close()
    alone = (before + after) / 2
    return {
        "kept": during / alone,
        "ran": ran,
        "stall": stalled - began,
        "upload": ended - stalled,
    }


def _apart(port: int, size: int, *, pin: bool) -> dict[str, float]:
    """Like `speeds`, beside another process that sends `size` bytes on command."""
    every = os.sched_getaffinity(0)
    command = [
        sys.executable,
        "-m",
        "tools.bench.storage.objects_loop",
        "upload",
        "--port",
        str(port),
        "--size",
        str(size),
    ]
    with pinned(others() if pin else every):
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        other.stdout.readline()
        if pin:
            os.sched_setaffinity(0, every - others() or every)
        before = _alone(1.0)
        began = time.perf_counter()
        other.stdin.write(b"go\n")
        other.stdin.flush()
        during, ran = _turns(lambda: other.poll() is not None)
        ended = time.perf_counter()
        after = _alone(1.0)
    finally:
        other.kill()
        other.wait()
    if other.returncode:
        raise RuntimeError(f"the other process ended with {other.returncode}")
    return {"kept": 2 * during / (before + after), "ran": ran, "stall": 0.0, "upload": ended - began}


def _upload(port: int, size: int) -> None:
    client = CLIENTS["obstore"][0](f"http://127.0.0.1:{port}", f"tests/{uuid.uuid4().hex}")
    state = state_of(size)
    client.save({"small": state["t0000"][:1000]})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    client.save(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["thread", "agent", "apart", "upload"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--bandwidth")
    options = parser.parse_args()
    if options.mode == "upload":
        _upload(options.port, options.size)
        return
    with tempfile.TemporaryDirectory(prefix="bench-objects-") as folder:
        os.environ["CKPTSTORE_RUNTIME_DIR"] = folder
        found = speeds(options.mode, options.port, options.size, pin=options.pin, bandwidth=options.bandwidth)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
