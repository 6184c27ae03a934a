"""Peak memory of saving and loading states that dwarf the staging budget, measured in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, re, pathlib
import numpy as np
import ckptstore, ckptstore.writer, ckptstore.loading
MIB = 1 << 20
status = pathlib.Path("/proc/self/status")
def field(name): return int(re.search(name + r":\\s+(\\d+)", status.read_text())[1]) * 1024
def reset(): pathlib.Path("/proc/self/clear_refs").write_text("5")
action, url = sys.argv[1:]
store = ckptstore.open(url)
def state(value):
    return {f"layer{i}": {"w": np.full(24 * MIB // 4 + i, value, np.float32)} for i in range(24)}
if action == "save":
    saved = state(1.5)
    with store.writer() as writer:
        writer.save({"warm": np.zeros(64 * MIB, np.uint8)}, step=1)  # the staging blocks themselves are in the budget
        reset(); before = field("VmRSS") - 64 * MIB
        writer.save(saved, step=2)
elif action == "into":
    target = state(0.0)
    reset(); before = field("VmRSS")
    store.load(2, into=target, framework="numpy")
    assert all((layer["w"] == 1.5).all() for layer in target.values())
elif action == "load":
    reset(); before = field("VmRSS") + 24 * 24 * MIB
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
    for action in ("save", "into", "load", "one", "verify"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, action, str(tmp_path / "store")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        peaks[action] = int(done.stdout) / (1 << 20)
    staging = 64
    assert all(peak <= staging + 64 for peak in peaks.values()), peaks
    assert peaks["load"] <= 64, peaks  # straight into place: no staging at all
