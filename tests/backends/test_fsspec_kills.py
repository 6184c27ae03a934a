"""SIGKILL of a writer on a file system of fsspec, with and without hard links: acknowledged checkpoints survive.

Without links a kill may leave a partially written slot. The next writer finds it torn for good after a bounded time,
and continues from the newest checkpoint that is named.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckptstore
from ckptstore.formats.history.record_text import torn
from ckptstore.log import partial_objects
from tests import warmth
from tests.backends.test_fsspec_files import Linkless, LocalFileSystem
from tests.forms import short_or

_WRITER = """
import sys, time
import ckptstore
from tests.backends.test_fsspec_files import Linkless, LocalFileSystem
kind = {"linkless": Linkless, "links": LocalFileSystem}[sys.argv[2]]
store = ckptstore.open(sys.argv[1], filesystem=kind(skip_instance_cache=True))
with store.writer(parent=sys.argv[3] if sys.argv[3] != "none" else None, poll_seconds=None) as writer:
    print("open", flush=True)
    step = int(sys.argv[4])
    while True:
        step += 1
        print(writer.save({"w": step}, step=step).ref, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["links", "linkless"])
@pytest.mark.filterwarnings("ignore::ckptstore.DamagedLogWarning", "ignore::ckptstore.FreshStartWarning")
def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path, kind: str) -> None:
    rng = random.Random(kind)
    acknowledged: list[str] = []
    parent, step, tears = "none", 0, 0
    filesystem = {"linkless": Linkless, "links": LocalFileSystem}[kind](skip_instance_cache=True)
    for _ in range(short_or(4, 40)):
        command = [sys.executable, "-c", _WRITER, str(tmp_path / "run"), kind, parent, str(step)]
        with warmth.start(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
            acknowledged += [writer.stdout.readline().strip() for _ in range(2)]
            time.sleep(rng.uniform(0.0, 0.15))
            writer.kill()
            acknowledged += [line.strip() for line in writer.stdout if line.endswith("\n")]
        for store in (ckptstore.open(str(tmp_path / "run"), filesystem=filesystem), ckptstore.open(tmp_path / "run")):
            begun = time.monotonic()
            found = [info.ref for info in store.checkpoints()]
            assert time.monotonic() - begun < partial_objects.STILL + 60
            assert set(acknowledged) <= set(found)
            for ref in acknowledged[-3:]:
                assert store.load(ref)["w"] == int(ref.partition("@")[0])
        tears += sum(torn(slot.read_bytes()) for slot in (tmp_path / "run" / "log").glob("0*"))
        if kind == "links":
            assert tears == 0, "an object has its name when it is whole"
            assert store.verify().ok
        parent = found[-1] if found else "none"
        step = max((info.step for info in store.checkpoints()), default=0)
    assert len(acknowledged) > 5
    left = [path for path in (tmp_path / "run").rglob(".*") if path.is_file()]
    assert len(left) <= short_or(4, 40), "at most one temporary file for each kill"
    assert not [key for key in store.backend.list("") if "/." in key]
