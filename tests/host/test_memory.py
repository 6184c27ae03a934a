"""Peak memory of saving and loading states much larger than the staging budget, measured in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forms import short_or

LAYERS = short_or(12, 24)
"""Of 24 MiB each."""
SCRIPT = """
import sys, re, pathlib
import numpy as np
import ckptstore, ckptstore.write.local_writer, ckptstore.restore.load
MIB = 1 << 20
status = pathlib.Path("/proc/self/status")
def field(name): return int(re.search(name + r":\\s+(\\d+)", status.read_text())[1]) * 1024
def reset(): pathlib.Path("/proc/self/clear_refs").write_text("5")
action, url, layers = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = ckptstore.open(url)
def state(value):
    return {f"layer{i}": {"w": np.full(24 * MIB // 4 + 32 * i, value, np.float32)} for i in range(layers)}
if action == "save":
    saved = state(1.5)
    with store.writer() as writer:
        writer.save({"warm": np.zeros(64 * MIB, np.uint8)}, step=1)  # the staging blocks themselves are in the budget
        reset(); before = field("VmRSS") - 64 * MIB
        writer.save(saved, step=2)
elif action == "async":
    saved = state(2.5)
    with store.writer() as writer:
        writer.save({"warm": np.zeros(MIB, np.uint8)}, step=3)  # what is imported and compiled, from 1 MiB on
        reset(); before = field("VmRSS")
        for step in (4, 5):
            writer.save_async(saved, step=step)
elif action == "into":
    target = state(0.0)
    reset(); before = field("VmRSS")
    store.load(2, into=target, framework="numpy")
    assert all((layer["w"] == 1.5).all() for layer in target.values())
elif action == "load":
    reset(); before = field("VmRSS") + layers * 24 * MIB
    loaded = store.load(2, framework="numpy")
elif action == "one":
    reset(); before = field("VmRSS") + 24 * MIB
    loaded = store.load(2, select="layer7.*", framework="numpy")
elif action == "verify":
    reset(); before = field("VmRSS")
    assert ckptstore.verify(store).ok
print(field("VmHWM") - before)
"""


@pytest.mark.slow
def test_peak_memory_is_budget_plus_64_mib(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system cannot reset the peak of resident memory")
    peaks = {}
    for action in ("save", "into", "load", "one", "verify", "async"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, action, str(tmp_path / "store"), str(LAYERS)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peaks[action] = int(done.stdout) / (1 << 20)
    snapshot = 24 * LAYERS  # of a state; it is written from there, without staging blocks
    assert peaks.pop("async") <= snapshot + 24, peaks
    staging = 64
    assert all(peak <= staging + 64 for peak in peaks.values()), peaks
    assert peaks["load"] <= 64, peaks  # straight into place: no staging at all


REPLAY = """
import sys, re, pathlib
import numpy as np
import ckptstore, ckptstore.write.local_writer, ckptstore.restore.load
from ckptstore.formats import optim
MIB = 1 << 20
status = pathlib.Path("/proc/self/status")
def field(name): return int(re.search(name + r":\\s+(\\d+)", status.read_text())[1]) * 1024
def reset(): pathlib.Path("/proc/self/clear_refs").write_text("5")
action, url = sys.argv[1:]
store = ckptstore.open(url)
group, sizes = optim.SGD(momentum=0.9), [40 * MIB // 4, 24 * MIB // 4, 500]
def state(value): return {name: [np.full(size, value, "<f4") for size in sizes] for name in ("w", "b")}
if action == "save":
    now = state(0.5)
    with store.writer(diffs=ckptstore.DiffOptions(batch=4)) as writer:
        for step in range(1, 10):
            numbers, updates = optim.Step(count=step, lr=0.1), []
            for place, size in enumerate(sizes):
                where = np.arange(step, size, 90)
                gradient = optim.SparseGradient(where, np.full(len(where), step, "<f4"), size)
                optim.advance(group.rule(numbers), [now["w"][place], now["b"][place]], gradient.dense())
                updates.append(ckptstore.Update((f"w.{place}", f"b.{place}"), group, numbers, gradient))
            writer.save_async(now, step, updates=updates)
    before = field("VmHWM")
elif action == "into":
    target = state(0.0)
    reset(); before = field("VmRSS")
    store.load(9, into=target, framework="numpy")
elif action == "load":
    reset(); before = field("VmRSS") + 2 * 64 * MIB
    loaded = store.load(9, framework="numpy")
elif action == "chunks":
    reset(); before = field("VmRSS")
    for name in ("w.0", "b.0", "w.1", "b.1", "w.2"):
        for offset, data in store.chunks(9, name): pass
print(field("VmHWM") - before)
"""


@pytest.mark.slow
def test_replaying_takes_the_budget_and_the_chunks_under_way(tmp_path: Path) -> None:
    """Nine steps of 128 MiB of state: no state between the full and the target ever exists."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system cannot reset the peak of resident memory")
    peaks = {}
    for action in ("save", "load", "into", "chunks"):
        done = subprocess.run(
            [sys.executable, "-c", REPLAY, action, str(tmp_path / "store")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peaks[action] = int(done.stdout) / (1 << 20)
    threads = min(4, os.cpu_count() or 1)
    staging, chunks = 32 * threads, 2 * 16 * threads
    assert peaks["load"] <= staging + 64, peaks
    assert peaks["into"] <= staging + chunks + 64, peaks
    assert peaks["chunks"] <= 64 + 64, peaks  # a chunk of both slots, and payloads
