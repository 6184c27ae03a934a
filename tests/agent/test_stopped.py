"""A stopped agent answers nobody: a warning says so, a typed error ends the wait, and so does one Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
import ckptstore.agent
from ckptstore import AgentSilentError
from ckptstore.agent import SilentAgentWarning
from ckptstore.agent.client import agent_link
from ckptstore.agent.client.agent_launch import find_agent
from ckptstore.agent.client.process_state import state_of, stopped
from ckptstore.agent.protocol.agent_address import AgentAddress
from tests import warmth
from tests.agent.inside import answers
from tests.agent.lives import ROOT, advance, alive, begun, kill, truth, until


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter times, so that a test can wait for them."""
    monkeypatch.setattr(agent_link, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(agent_link, "SAID_SECONDS", 0.5)
    monkeypatch.setattr(agent_link, "PATIENT_SECONDS", 2.0)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stopped(pid) is not None)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_the_systems_state_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    pid = sleeper.pid
    assert stopped(pid) is None
    _stop(pid)
    assert f"kill -CONT {pid}" in (stopped(pid) or "")
    assert "state T" in state_of(pid)
    os.kill(pid, signal.SIGCONT)
    until(lambda: stopped(pid) is None)
    sleeper.kill()
    sleeper.wait()
    assert stopped(pid) is None


@pytest.mark.usefixtures("hurried")
def test_a_stopped_agent_is_named_and_waited_for_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = begun()
    with ckptstore.agent.writer(tmp_path / "s", max_in_flight=1) as writer:
        writer.save(state, 0)
        _stop(writer.agent_pid)
        began = time.monotonic()
        with pytest.warns(SilentAgentWarning) as told, pytest.raises(AgentSilentError) as raised:
            writer.save(state, 1)
        assert 1.5 < time.monotonic() - began < 100
        for text in (str(told[0].message), str(raised.value)):
            assert f"process {writer.agent_pid}" in text
            assert f"kill -CONT {writer.agent_pid}" in text
        monkeypatch.setattr(agent_link, "PATIENT_SECONDS", 120.0)
        began = time.monotonic()
        with pytest.raises(AgentSilentError):
            writer.save(state, 2)
        assert time.monotonic() - began < 100, "it is known by now"
        os.kill(writer.agent_pid, signal.SIGCONT)
        until(lambda: answers(writer))
        assert writer.term == 1
        for step in range(3, 9):  # no buffer of a failed save is lost
            state = advance(state)
            writer.save(state, step)
    assert ckptstore.open(tmp_path / "s").latest_step() == 8
    assert ckptstore.verify(tmp_path / "s", deep=True).ok


class Freezer:
    """A control group of this test. Its processes can be frozen, as by `docker pause` and batch systems."""

    def __init__(self, parent: Path, version: int) -> None:
        name, frozen, thawed = ("freezer.state", "FROZEN", "THAWED") if version == 1 else ("cgroup.freeze", "1", "0")
        self.parent = parent
        self.group = parent / f"ckptstore-test-{os.getpid()}"
        self.switch = self.group / name
        self.state, self.says = (self.switch, frozen) if version == 1 else (self.group / "cgroup.events", "frozen 1")
        self.frozen = frozen
        self.thawed = thawed
        self.pids: list[int] = []

    def freeze(self, pid: int) -> None:
        (self.group / "cgroup.procs").write_text(str(pid))
        self.pids.append(pid)
        self.switch.write_text(self.frozen)
        until(lambda: self.says in self.state.read_text().splitlines())

    def thaw(self) -> None:
        self.switch.write_text(self.thawed)

    def end(self) -> None:
        self.thaw()
        for pid in self.pids:
            with contextlib.suppress(OSError):  # it has ended
                (self.parent / "cgroup.procs").write_text(str(pid))
        until(lambda: not (self.group / "cgroup.procs").read_text())
        self.group.rmdir()


@pytest.fixture(params=["cgroup", "cgroup2"])
def freezer(request: pytest.FixtureRequest) -> Iterator[Freezer]:
    """Of version 1 or 2, if this machine has it and permits its use."""
    for line in Path("/proc/self/mounts").read_text("utf-8").splitlines():
        _, place, kind, options = line.split()[:4]
        if kind != request.param or (kind == "cgroup" and "freezer" not in options.split(",")):
            continue
        one = Freezer(Path(place), 1 if kind == "cgroup" else 2)
        try:
            one.group.mkdir()
        except OSError as error:
            pytest.skip(f"no control group can be made in {place}: {error}")
        yield one
        one.end()
        return
    pytest.skip(f"no freezer of {request.param} is mounted here")


@pytest.mark.usefixtures("hurried")
def test_one_whose_control_group_is_frozen_is_named(tmp_path: Path, freezer: Freezer) -> None:
    with ckptstore.agent.writer(tmp_path / "s", max_in_flight=1) as writer:
        writer.save(begun(), 0)
        freezer.freeze(writer.agent_pid)
        rescue = threading.Timer(20, freezer.thaw)  # without a timeout this test would hang, too
        rescue.start()
        began = time.monotonic()
        with pytest.warns(SilentAgentWarning) as told, pytest.raises(AgentSilentError) as raised:
            writer.save(truth(1), 1)
        assert 1.5 < time.monotonic() - began < 20
        for text in (str(told[0].message), str(raised.value)):
            assert f"process {writer.agent_pid}" in text
            assert f"its control group /{freezer.group.name} is frozen: thaw it" in text
        rescue.cancel()
        freezer.thaw()
        until(lambda: answers(writer))
        writer.save(truth(2), 2)
    assert ckptstore.open(tmp_path / "s").latest_step() == 2
    assert ckptstore.verify(tmp_path / "s", deep=True).ok


@pytest.mark.usefixtures("hurried")
def test_an_agent_that_resumes_in_time_causes_only_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "PATIENT_SECONDS", 120.0)
    with ckptstore.agent.writer(tmp_path / "s") as writer:
        writer.save(begun(), 0)
        _stop(writer.agent_pid)
        told = pytest.warns(SilentAgentWarning)

        def continue_it() -> None:
            with contextlib.suppress(AssertionError):  # it is continued in any case: the save waits for it
                until(lambda: len(told) > 0)
            os.kill(writer.agent_pid, signal.SIGCONT)

        thread = threading.Thread(target=continue_it)
        thread.start()
        with told:
            writer.save(truth(1), 1)
        thread.join()
    assert ckptstore.open(tmp_path / "s").latest_step() == 1


@pytest.mark.usefixtures("hurried")
def test_closing_ends_and_the_agent_finishes_later(tmp_path: Path) -> None:
    writer = ckptstore.agent.writer(tmp_path / "s", linger_seconds=0.5)
    writer.save(begun(), 0)
    pid = writer.agent_pid
    pending = writer.save_async(truth(1), 1)
    _stop(pid)
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SilentAgentWarning)
        with contextlib.suppress(AgentSilentError):  # unless it was faster than the signal
            writer.close()
    assert pending.done()
    assert time.monotonic() - began < 100
    os.kill(pid, signal.SIGCONT)
    until(lambda: not alive(pid))
    assert ckptstore.open(tmp_path / "s").latest_step() == 1


def _left(store: Path) -> int:
    """An agent that has saved step 0 and whose trainer was killed -> its process."""
    script = """
import os, sys
import ckptstore.agent
from tests.agent.lives import begun
writer = ckptstore.agent.writer(sys.argv[1])
writer.save(begun(), 0)
print(writer.agent_pid, flush=True)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", script, store], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout)


@pytest.mark.usefixtures("hurried")
# The killed trainer had no torch; this process may have it.
@pytest.mark.filterwarnings("ignore::ckptstore.DeterminismWarning")
def test_one_that_was_left_and_is_stopped_is_named(tmp_path: Path) -> None:
    pid = _left(tmp_path / "s")
    _stop(pid)
    with pytest.warns(SilentAgentWarning), pytest.raises(AgentSilentError, match=f"kill -CONT {pid}"):
        ckptstore.agent.writer(tmp_path / "s")
    os.kill(pid, signal.SIGCONT)
    with ckptstore.agent.writer(tmp_path / "s") as writer:
        assert writer.step == 0
        assert writer.agent_pid == pid


def test_a_trainer_is_not_refused_for_those_that_gave_up_while_the_agent_was_stopped(tmp_path: Path) -> None:
    pid = _left(tmp_path / "s")
    _stop(pid)
    place = AgentAddress(str(tmp_path / "s"), "")
    for _ in range(3):
        connection = place.connect()
        assert connection is not None
        connection.close()
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
    timer.start()
    agent = find_agent(place, lambda *_: None, lambda *_: None)
    timer.join()
    assert agent is not None
    assert agent.greeting["newest"]["step"] == 0
    agent.link.call("close")
    agent.let_go()
    until(lambda: not alive(pid))


_LOOP = """
import os, signal, sys, time, warnings
import torch
from pathlib import Path
from ckptstore.training import Checkpointer
from tests.agent.lives import agents

how, url = sys.argv[1:3]
net = torch.nn.Linear(300, 300)
adam = torch.optim.AdamW(net.parameters())
with Checkpointer(url, model=net, optimizer=adam, strategy="full", agent=True, on_error=how, max_in_flight=1) as cp:
    cp.resume()
    for step in range(100000):
        net(torch.randn(4, 300)).square().mean().backward()
        adam.step()
        adam.zero_grad()
        cp.step()
        if step == 3:
            cp.wait()
            (pid,) = agents(Path(os.environ["CKPTSTORE_RUNTIME_DIR"]))
            print(pid, flush=True)
        print("step", flush=True)
        time.sleep(0.01)
"""


def test_one_ctrl_c_ends_the_wait_of_a_trainer(tmp_path: Path) -> None:
    """A real training script whose agent is stopped: a warning after 5 s, then one Ctrl-C."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", _LOOP, "raise", str(tmp_path / "s")]
    trainer = warmth.start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    assert trainer.stderr is not None
    words = iter(trainer.stdout.readline, "")
    pid = next(int(word) for word in words if word.strip().isdigit())
    _stop(pid)
    said = next(line for line in iter(trainer.stderr.readline, "") if "SilentAgentWarning" in line)
    assert f"process {pid}" in said
    assert f"kill -CONT {pid}" in said
    trainer.send_signal(signal.SIGINT)
    began = time.monotonic()
    out = trainer.communicate(timeout=60)
    assert time.monotonic() - began < 50  # after 60 s an error would end it, too
    assert trainer.returncode != 0, out
    assert "KeyboardInterrupt" in out[1]
    assert alive(pid)
    os.kill(pid, signal.SIGCONT)
    kill(pid, signal.SIGTERM)
    assert ckptstore.verify(tmp_path / "s").ok


_HURRIED = """
from ckptstore.agent.client import agent_link as link
link.LOOK_SECONDS, link.SAID_SECONDS, link.PATIENT_SECONDS = 0.1, 0.5, 2.0
"""


@pytest.mark.parametrize("how", ["raise", "warn"])
def test_a_training_step_follows_on_error(tmp_path: Path, how: str) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", _HURRIED + _LOOP, how, str(tmp_path / "s")]
    trainer = warmth.start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    assert trainer.stderr is not None
    words = iter(trainer.stdout.readline, "")
    pid = next(int(word) for word in words if word.strip().isdigit())
    _stop(pid)
    if how == "raise":
        _, err = trainer.communicate(timeout=120)
        assert trainer.returncode == 1
        assert "AgentSilentError" in err
        assert "Traceback" in err
        os.kill(pid, signal.SIGCONT)
        return
    said = next(line for line in iter(trainer.stderr.readline, "") if "UnsavedStepWarning" in line)
    assert "training continues: AgentSilentError" in said
    for _ in range(30):
        assert next(words) == "step\n"
    before = ckptstore.open(tmp_path / "s").latest_step()
    os.kill(pid, signal.SIGCONT)
    drain = threading.Thread(target=lambda: [None for _ in words], daemon=True)
    drain.start()
    errors = threading.Thread(target=trainer.stderr.read, daemon=True)
    errors.start()
    until(lambda: (ckptstore.open(tmp_path / "s").latest_step() or 0) > (before or 0) + 30)
    trainer.kill()
    trainer.wait()
    drain.join()
    errors.join()
    trainer.stdout.close()
    trainer.stderr.close()


def test_a_blocked_sigterm_is_not_inherited(tmp_path: Path) -> None:
    every = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, every)
    try:
        with ckptstore.agent.writer(tmp_path / "s") as writer:
            writer.save(begun(), 0)
            pid = writer.agent_pid
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            mask = next(line for line in status if line.startswith("SigBlk"))
            assert not any(int(mask.split()[1], 16) >> (number - 1) & 1 for number in every)
            kill(pid, signal.SIGTERM)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_USERS = ("random", "json", "signal", "ckptstore_not", "selectors")
_BEFORE = f"""
import random, json, signal, selectors
for name in {_USERS}:
    with open(name + ".py", "w") as file:
        file.write("raise RuntimeError('a file of the user')\\n")
"""
"""A trainer that has already imported its modules when files of these names appear in its folder, which is on its path.
"""

_PLAIN = """
import sys
import numpy as np
import ckptstore, ckptstore.agent
with ckptstore.agent.writer(sys.argv[1]) as writer:
    writer.save({"x": np.arange(5.0)}, 1)
    print(open(f"/proc/{writer.agent_pid}/cmdline").read().split("\\0")[-4])
"""


@pytest.mark.parametrize("how", ["-P", "-c", "script", "-m"])
def test_a_file_of_the_user_s_kills_no_agent(tmp_path: Path, how: str) -> None:
    """Files named like Python modules that only the agent has yet to import: the trainer has imported its own."""
    script = f"{_BEFORE}{_PLAIN}"
    (tmp_path / "trainer.py").write_text(script)
    words = {"-P": ["-P", "-c", script], "-c": ["-c", script], "script": ["trainer.py"], "-m": ["-m", "trainer"]}[how]
    command = [sys.executable, *words, tmp_path / "s"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in _USERS:
        assert (tmp_path / f"{name}.py").exists()
    assert ckptstore.open(tmp_path / "s").latest_step() == 1


def test_a_vendored_package_is_the_agent_s_as_well(tmp_path: Path) -> None:
    vendored = tmp_path / "vendor" / "ckptstore"
    vendored.parent.mkdir()
    shutil.copytree(ROOT / "ckptstore", vendored, ignore=shutil.ignore_patterns("__pycache__"))
    script = f"import sys; sys.path.insert(0, {str(vendored.parent)!r})\n{_PLAIN}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, tmp_path / "s"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(vendored / "agent" / "startup.py")
    assert "Warning" not in done.stderr


def test_an_agent_of_a_package_in_an_archive_is_refused_with_what_to_do(tmp_path: Path) -> None:
    archive = tmp_path / "vendor.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for folder, name in (("ckptstore", "ckptstore"), ("formats", "ckptstore/formats")):
            for path in (ROOT / folder).rglob("*.py"):
                zipped.write(path, f"{name}/{path.relative_to(ROOT / folder)}")
    script = f"import sys; sys.path.insert(0, {str(archive)!r})\n{_PLAIN}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, tmp_path / "s"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"{archive}/ckptstore/agent/startup.py is not a file" in done.stderr
    assert "install ckptstore, or unpack the archive, or save without an agent" in done.stderr


def test_an_agent_of_another_version_is_replaced_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import os, sys
import ckptstore.agent
from tests.agent.lives import begun
writer = ckptstore.agent.writer(sys.argv[1])
writer.save(begun(), 0)
print(writer.agent_pid, flush=True)
os._exit(9)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "s"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    pid = int(done.stdout)
    monkeypatch.setattr("ckptstore.agent.protocol.package_version.__version__", "0.0.9")
    with pytest.warns(ckptstore.agent.AgentRestartWarning) as told:
        writer = ckptstore.agent.writer(tmp_path / "s")
    texts = [str(one.message) for one in told]
    assert any(f"process {pid}" in text and "this process 0.0.9" in text for text in texts), texts
    assert any("start the trainer again" in text for text in texts)
    with writer:
        assert not alive(pid)
        assert writer.term == 2
        assert writer.step == 0
