"""The size of a disk write is the machine's choice; the size of a chunk is the format's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forms import long_only

SCRIPT = """
import sys

from ckptstore.host import buffers

buffers.BLOCK_BYTES = int(sys.argv[2])  # before anything else is imported: as if the line in the source were another

import numpy as np

import ckptstore
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.maintenance.merge import merge

rng = np.random.default_rng(0)
weight = rng.standard_normal(5_000_000).astype("<f4")  # two chunks, and a copy that crosses from one to the other
truth = {}


def changed():
    global weight
    weight = weight * np.float32(1.0001)
    return {"w": weight, "c": weight.astype("<f2"), "noise": rng.integers(0, 256, 17 << 20, dtype=np.uint8)}


def check(*steps):
    for step in steps:
        loaded = store.load(step, framework="numpy")
        assert all((loaded[name] == truth[step][name]).all() for name in truth[step]), step
        assert (store.read_tensor(step, "c").view("<f2") == truth[step]["c"]).all(), step
        assert b"".join(part.tobytes() for _, part in store.chunks(step, "w")) == truth[step]["w"].tobytes()


store = ckptstore.open(sys.argv[1], create=True)
# memory=0: each base is read back from the store.
options = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=9), compress_fulls=True, memory=0)
with store.writer(deltas=options, poll_seconds=None, staging_bytes=64 << 20) as writer:
    for step in range(1, 5):
        truth[step] = changed()
        assert writer.save(truth[step], step).kind == ("full" if step == 1 else "delta")
    check(1, 4)
merge(store.journal, "1..3", keep_steps=True, take_over=True)
check(1, 2, 3)
merge(store.journal, "2..4", take_over=True)
check(4)
assert ckptstore.verify(store).ok
"""


@pytest.mark.parametrize("nbytes", [1 << 20, pytest.param(32 << 20, marks=long_only)])
def test_deltas_and_merges_do_not_depend_on_it(tmp_path: Path, nbytes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "store", str(nbytes)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
