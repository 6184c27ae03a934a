"""`ckpt doctor` on real disks, a real S3 server, and under real limits; it leaves nothing behind."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.doctor.clocks import against_server
from ckptstore.doctor.disks import PREFIX
from ckptstore.doctor.examination import examine
from ckptstore.doctor.mounts import Mount, judged, mount_of
from ckptstore.doctor.software import examine_software
from tests import warmth
from tools.objects.server import SECRET, Server

COMMAND = [sys.executable, "-m", "ckptstore", "doctor", "--quick", "--json"]
pytestmark = pytest.mark.slow


def findings(outcome: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {finding["name"]: finding for finding in json.loads(outcome.stdout)["findings"]}


def doctor(*more: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in its own process, after the shell line `before`."""
    line = ["sh", "-c", f'{before}\nexec "$@"', "sh", *COMMAND, *more]
    return subprocess.run(line, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_all_of_it_on_a_disk(tmp_path: Path) -> None:
    told: list[str] = []
    diagnosis = examine(str(tmp_path / "runs/gpt"), tell=told.append)
    assert diagnosis.ok, [finding for finding in diagnosis.findings if finding.verdict == "fails"]
    assert told == ["software", "processor and memory", "disk", "store"]
    values = {finding.name: finding.values for finding in diagnosis.findings}
    assert values["disk speed"]["write_bytes_per_second"] > 0
    assert values["disk speed"]["read_bytes_per_second"] > 0
    assert values["disk speed"]["bytes"] <= 256 << 20
    assert 0 < values["fsync"]["seconds"] <= values["fsync"]["worst"]
    assert values["processor"]["copy_bytes_per_second"] > 1 << 20
    assert values["processor"]["hash_bytes_per_second"] > 1 << 20
    assert diagnosis.of("torch").verdict in ("works", "absent")
    assert diagnosis.of("kernels").verdict in ("works", "slow")
    if diagnosis.of("torch").verdict == "works":
        assert 0 <= values["roots"]["inexact"] < 0.5
        assert "square roots" in diagnosis.of("roots").what
    assert diagnosis.of("store").verdict == "absent"
    assert list(tmp_path.iterdir()) == []  # neither files nor the folders of the store


def test_quick_measures_nothing_and_imports_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from ckptstore.doctor.examination import examine;"
        f"d = examine({str(tmp_path)!r}, quick=True);"
        "print(sorted({'torch'} & set(sys.modules)), 'disk speed' in [f.name for f in d.findings])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_the_time_of_a_sync_is_that_of_file_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    sync = getattr(os, call)

    def slow(descriptor: int) -> None:
        time.sleep(0.03)
        sync(descriptor)

    monkeypatch.setattr(os, call, slow)
    assert examine(str(tmp_path), quick=True).of("fsync").values["seconds"] >= 0.03


def test_a_store_and_a_damaged_log(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save({"step": step}, step=step)
    fine = examine(str(tmp_path / "run"), quick=True).of("store")
    assert (fine.verdict, fine.values) == ("works", {"checkpoints": 2, "latest": "2@1", "damage": 0})
    for slot in sorted((tmp_path / "run/log").iterdir())[1:2]:
        slot.write_bytes(slot.read_bytes()[:-1])
    broken = examine(str(tmp_path / "run"), quick=True)
    assert not broken.ok
    assert "ckpt verify" in (broken.of("store").do or "")


def test_a_folder_where_nothing_can_be_written(tmp_path: Path) -> None:
    outcome = doctor("/proc/nowhere")  # the kernel's own: no file can be made there
    assert outcome.returncode == 1
    assert findings(outcome)["writing"]["verdict"] == "fails"
    (tmp_path / "file").write_text("no store")
    outcome = doctor(str(tmp_path / "file"))
    assert outcome.returncode == 1
    assert findings(outcome)["store"]["verdict"] == "fails"


def test_file_systems(tmp_path: Path) -> None:
    assert mount_of(tmp_path).kind
    assert mount_of(Path("/proc/self")).kind == "proc"
    if Path("/dev/shm").is_dir():
        assert judged(mount_of(Path("/dev/shm"))).verdict == "careful"  # memory
    for kind, verdict in {"ext4": "works", "xfs": "works", "nfs4": "careful", "fuse.sshfs": "careful"}.items():
        assert judged(Mount(kind, "/data")).verdict == verdict, kind
    assert "ckpt copy" in (judged(Mount("lustre", "/scratch")).do or "")
    assert judged(Mount("overlay", "/")).verdict == "careful"


def test_limits_and_settings_of_the_process(tmp_path: Path) -> None:
    assert findings(doctor(str(tmp_path), before="ulimit -n 128"))["open files"]["verdict"] == "slow"
    blocking = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
        "os.execv(sys.executable, sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocking, *COMMAND, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert findings(done)["SIGTERM"]["verdict"] == "fails"


def test_how_hot_loops_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.formats import kernel_choice

    pytest.importorskip(kernel_choice.CORE)
    try:
        for wish, verdict in {"numpy": "slow", "fortran": "fails", "": "works"}.items():
            monkeypatch.setenv(kernel_choice.VARIABLE, wish)
            monkeypatch.setattr(kernel_choice, "_compiled", None)
            found = [one for one in examine_software(quick=False) if one.name == "kernels"]
            assert found[0].verdict == verdict, wish
    finally:
        kernel_choice.use(None)


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, call: str) -> None:
    """It comes at a sync: something is written by then."""
    waits = f"""
import os, time
def waits(descriptor):
    print("inside", flush=True)
    time.sleep(600)
os.{call} = waits
from ckptstore.cli.main import main
main()
"""
    command = [sys.executable, "-c", waits, "doctor", str(tmp_path)]
    process = warmth.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    assert any(tmp_path.glob(f"{PREFIX}*"))
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.wait() == 143
    assert list(tmp_path.iterdir()) == []


def test_a_bucket(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if not s3.port:
        pytest.skip("CKPTSTORE_TEST_S3_URL: the clock and the bucket's content are not this test's")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    place = s3.url()
    diagnosis = examine(place)
    assert diagnosis.ok, diagnosis.findings
    assert diagnosis.of("credentials").verdict == "works"
    assert diagnosis.of("conditional writes").verdict == "works"
    assert diagnosis.of("clock").verdict == "works"
    assert diagnosis.of("speed").values["write_bytes_per_second"] > 0
    assert SECRET not in repr(diagnosis)
    assert ckptstore.open(place, create=None).backend.list("") == []  # the probes are gone
    outcome = doctor(s3.root.replace("tests", "nobodys-bucket") + "/run")
    assert outcome.returncode == 1
    assert SECRET not in outcome.stdout + outcome.stderr
    assert findings(outcome)["conditional writes"]["verdict"] == "fails"


class _Late(http.server.BaseHTTPRequestHandler):
    off = 0.0

    def do_HEAD(self) -> None:
        self.send_response_only(403)
        self.send_header("Date", formatdate(time.time() + self.off, usegmt=True))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "works"), (-300.0, "careful"), (3600.0, "fails")])
def test_the_clock_of_a_server(off: float, verdict: str) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), type("Handler", (_Late,), {"off": off}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        finding = against_server(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert finding.verdict == verdict, finding
    assert against_server(f"http://127.0.0.1:{server.server_port}").verdict == "absent"  # it no longer answers
