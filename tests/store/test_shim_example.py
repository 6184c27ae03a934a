"""The shim of ``examples/shim``: it is killed, continues, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ckptstore

EXAMPLE = Path(__file__).parents[2] / "examples" / "shim" / "shim.py"


@pytest.fixture(scope="module")
def shim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shim_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("how", [[], ["--agent"]], ids=["local", "agent"])
def test_a_killed_run_ends_as_one_that_was_not(shim: ModuleType, tmp_path: Path, how: list[str]) -> None:
    with ckptstore.open(tmp_path / "whole").writer(poll_seconds=None) as writer:
        whole = shim.train(shim.Shim(ckptstore.open(tmp_path / "whole"), writer, 300), 300)
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "store"), "--steps", "300", *how]
    for _ in range(10):  # on a busy machine all 300 steps may be saved between two looks
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 120
        store = None
        while time.monotonic() < until and running.poll() is None:
            if (tmp_path / "store" / "FORMAT").exists():
                store = store or ckptstore.open(tmp_path / "store")
                if (store.latest_step() or 0) >= 20:
                    break
            time.sleep(0.02)
        running.kill()
        if (status := running.wait()) == -signal.SIGKILL:
            break
        shutil.rmtree(tmp_path / "store")
    assert status == -signal.SIGKILL
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("step 300: loss ")
    store = ckptstore.open(tmp_path / "store")
    loaded = store.load(framework="numpy")
    assert all(np.array_equal(loaded[name], array) for name, array in whole.items())
    assert ckptstore.verify(store).ok


def test_it_uses_nothing_private() -> None:
    words = (
        EXAMPLE.read_text()
        .replace("__main__", "")
        .replace("__name__", "")
        .replace("__init__", "")
        .replace("__future__", "")
    )
    assert "._" not in words
