"""One process at a time in one place, also beside processes that were forked meanwhile."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.exclusion import exclusive_access

STATE = {"weight": np.arange(10.0)}


def test_a_child_that_was_forked_meanwhile_keeps_nobody_out(tmp_path: Path) -> None:
    backend = ckptstore.open(tmp_path / "run", create=True).backend
    with exclusive_access(backend) as mine:
        assert mine
        child = os.fork()
        if not child:
            time.sleep(60)  # like a worker of a DataLoader, which knows nothing of it
            os._exit(0)
    try:
        handle = os.open(tmp_path / "run", os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another process would get it
        finally:
            os.close(handle)
        with exclusive_access(backend, lambda: False) as mine:
            assert mine
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_child_has_no_lock_of_its_parent(tmp_path: Path) -> None:
    backend = ckptstore.open(tmp_path / "run", create=True).backend
    with exclusive_access(backend):
        child = os.fork()
        if not child:
            with exclusive_access(backend, lambda: False) as mine:  # the parent still has it
                os._exit(0 if not mine else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


KILLED = """
import os, signal, sys, time
import ckptstore
from ckptstore.backends.exclusion import exclusive_access

with exclusive_access(ckptstore.open(sys.argv[1]).backend):
    child = os.fork()
    if not child:
        time.sleep(300)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_was_killed_leaves_no_lock_to_its_child(tmp_path: Path) -> None:
    ckptstore.open(tmp_path / "run", create=True)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert process.wait(200) == -signal.SIGKILL
            os.kill(child, 0)  # it lives
            end = time.monotonic() + 100
            with exclusive_access(ckptstore.open(tmp_path / "run").backend, lambda: time.monotonic() < end) as mine:
                assert mine
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("which", ["here", "there"])
def test_a_closed_writer_reports_undrained_steps(tmp_path: Path, which: str) -> None:
    """If a closed writer brought nothing because another process has locked it, it must not report that all was
    brought."""
    store = ckptstore.open(tmp_path / "here", remote=str(tmp_path / "there"))
    writer = store.writer(poll_seconds=None)
    writer.save_async(STATE, 1).result(tier="remote")
    other = os.open(tmp_path / which, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        writer.save(STATE, 2)
        with pytest.warns(UserWarning, match="another process has locked it.*the next writer drains it"):
            writer.close()
    finally:
        os.close(other)
    assert [one.step for one in ckptstore.open(tmp_path / "there", remote=False).checkpoints()] == [1]
