"""The folder of agents' sockets belongs to the user alone."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

import ckptstore
import ckptstore.agent
from ckptstore.errors import AgentBusyError, AgentError
from tests.agent.lives import agents, begun, kill

NOBODY = 65534


def test_folder_and_socket_are_the_users_alone(tmp_path: Path, runtime: Path) -> None:
    before = os.umask(0)
    try:
        with ckptstore.agent.writer(tmp_path / "store"):
            modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in (runtime, *runtime.iterdir())}
    finally:
        os.umask(before)
    assert modes == {"": 0o700, ".sock": 0o600, ".lock": 0o600, ".log": 0o600}


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, runtime: Path, mode: int) -> None:
    runtime.mkdir()
    runtime.chmod(mode)
    with pytest.raises(AgentError, match="nobody else may enter"):
        ckptstore.agent.writer(tmp_path / "store")
    assert agents(runtime) == []


def test_a_link_in_its_place_is_refused(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AgentError, match="has to be a folder"):
        ckptstore.agent.writer(tmp_path / "store")


@pytest.mark.root
def test_another_users_folder_is_refused(tmp_path: Path, runtime: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    runtime.mkdir(mode=0o700)
    os.chown(runtime, NOBODY, NOBODY)
    with pytest.raises(AgentError, match=f"of user {NOBODY}"):
        ckptstore.agent.writer(tmp_path / "store")


def as_nobody(path: Path) -> bytes:
    """The answer of a socket to another user: ``!`` if it cannot be reached."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(30)
            try:
                connection.connect(str(path))
                os.write(writing, b"connected " + connection.recv(1))
            except PermissionError:
                os.write(writing, b"!")
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as file:
        return file.read()


@pytest.mark.root
def test_other_users_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if folder and socket were opened to them: the kernel tells who the peer is."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    with tempfile.TemporaryDirectory(prefix="ck", dir="/tmp") as short:  # a path that every user may traverse
        folder = Path(short) / "rt"
        monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(folder))
        with ckptstore.agent.writer(tmp_path / "store") as writer:
            writer.save(begun(), 1)
            (path,) = folder.glob("*.sock")
            Path(short).chmod(0o755)
            assert as_nobody(path) == b"!"
            folder.chmod(0o755)
            path.chmod(0o666)
            assert as_nobody(path) == b"connected "  # and the connection is closed
            folder.chmod(0o700)
            with pytest.raises(AgentBusyError):  # the user itself gets an answer
                ckptstore.agent.writer(tmp_path / "store")


def test_a_long_path_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 120)
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(folder))
    with ckptstore.agent.writer(tmp_path / "store") as writer:
        writer.save(begun(), 1)
        with pytest.raises(AgentBusyError):
            ckptstore.agent.writer(tmp_path / "store")


def test_a_relative_path_and_a_link_are_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    with ckptstore.agent.writer("store"), pytest.raises(AgentBusyError):
        ckptstore.agent.writer(tmp_path / "link" / "store")


def test_an_agent_that_cannot_even_begin_says_why(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "path" / "xxhash.py"
    broken.parent.mkdir()
    broken.write_text("raise RuntimeError('no such luck')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    with pytest.raises(AgentError, match="no such luck"):
        ckptstore.agent.writer(tmp_path / "store")
    for pid in agents(runtime):
        kill(pid)
