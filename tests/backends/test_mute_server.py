"""An object server that stops answering: Ctrl-C and SIGTERM end the waits long before the timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.base import SegmentSource
from ckptstore.backends.object_store import segment_ranges
from ckptstore.host import cancellable_calls
from tests.forms import in_turn
from tools.objects.proxy import FaultProxy, Rule
from tools.objects.server import Server, options_for

INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""Shells make background processes ignore SIGINT, and the tests may run in the background."""
COMMAND = [sys.executable, "-c", f"{INTERRUPTIBLE}; from ckptstore.cli.main import main; main()"]
SILENCE = 100.0
"""Seconds for which the server does not answer; requests time out after 60."""
SOON = 50.0
"""Longest time in seconds for a signal to end a process: many, because the machine may be busy; the tests wait only
until it ends."""


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultProxy]:
    if not s3.port:
        pytest.skip("the proxy stands before a server of our own")
    with FaultProxy(s3.port) as one:
        yield one


def stored(s3: Server, numbers: int) -> str:
    url = s3.url()
    with ckptstore.open(url, storage_options=s3.options).writer(poll_seconds=None) as writer:
        writer.save({"w": np.random.default_rng(1).standard_normal(numbers)}, 1)
    return url


@pytest.fixture
def url(s3: Server) -> str:
    return stored(s3, 1000)


@pytest.fixture(scope="module")
def large(s3: Server) -> str:
    """More than a block: several threads read it."""
    return stored(s3, 2_500_000)


def started(s3: Server, proxy: FaultProxy, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | s3.environment() | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
    root = Path(__file__).parents[2]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=environment, cwd=root, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def wait_until_mute(proxy: FaultProxy, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not proxy.injected():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.1)  # others of its threads ask, too


@pytest.mark.parametrize(
    ("mute", "number", "code"), in_turn(["get", "range"], [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
)
def test_a_command_ends_at_once(
    s3: Server, proxy: FaultProxy, large: str, tmp_path: Path, mute: str, number: int, code: int
) -> None:
    proxy.rules([Rule("stall", mute, seconds=SILENCE)])
    process = started(s3, proxy, *COMMAND, "restore", large, "--out", str(tmp_path / "out.safetensors"))
    try:
        wait_until_mute(proxy, process)
        began = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=SOON)
        assert time.monotonic() - began < SOON
        assert process.returncode == code, errors
        assert not list(tmp_path.iterdir())
    finally:
        process.kill()
        process.communicate()


SAVING = """
import sys
import numpy as np
import ckptstore
writer = ckptstore.open(sys.argv[1]).writer(poll_seconds=None)
writer.save({"w": np.ones(9)}, 2)
print("saved 2", flush=True)
sys.stdin.readline()
try:
    writer.save({"w": np.ones(8)}, 3)
finally:
    print("interrupted", flush=True)
"""


def test_a_save_that_is_interrupted_loses_nothing_that_was_acknowledged(
    s3: Server, proxy: FaultProxy, url: str
) -> None:
    environment = os.environ | s3.environment() | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + SAVING, url],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "saved 2\n"
        proxy.rules([Rule("stall", "create", seconds=SILENCE)])
        process.stdin.write("go on\n")
        process.stdin.flush()
        wait_until_mute(proxy, process)
        # The first waits for the threads that read the tensors, the second does not, the third ends the writer's last
        # messages.
        end = time.monotonic() + SOON
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert process.poll() is not None
    finally:
        process.kill()
        process.communicate()
    store = ckptstore.open(url, storage_options=s3.options)
    assert [info.step for info in store.checkpoints()][:2] == [1, 2]
    assert store.verify(deep=True).ok


def test_one_ctrl_c_ends_a_save(s3: Server, proxy: FaultProxy, url: str) -> None:
    """The last request may have succeeded: the writer is in doubt of it, and does not wait for an answer."""
    process = scripted(s3, proxy, SAVING, url)
    try:
        assert process.stdout.readline() == "saved 2\n"  # type: ignore[union-attr]
        go_on_mute(proxy, process)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"  # type: ignore[union-attr]
        assert time.monotonic() - began < SOON
    finally:
        process.kill()
        process.communicate()


LEAVING = """
import sys
import numpy as np
import ckptstore
from ckptstore.host import interpreter_exit
interpreter_exit.SILENT_SECONDS = 0.1
with ckptstore.open(sys.argv[1]).writer(poll_seconds=None) as writer:
    print("saved 2", flush=True)
    sys.stdin.readline()
    writer.save_async({"w": np.ones(8)}, 3)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("bare", [False, True])
def test_the_wait_at_exit_is_reported_and_a_second_ctrl_c_ends_it(
    s3: Server, proxy: FaultProxy, url: str, bare: bool
) -> None:
    text = LEAVING.replace("with ", "writer = ").replace(" as writer:", "").replace("    ", "") if bare else LEAVING
    process = scripted(s3, proxy, text, url)
    try:
        assert process.stdout.readline() == "saved 2\n"  # type: ignore[union-attr]
        go_on_mute(proxy, process)
        process.send_signal(signal.SIGINT)
        told = ""
        while "Ctrl-C gives up" not in told:
            line = process.stderr.readline()  # type: ignore[union-attr]
            assert line, told
            told += line
        assert (
            f"{url}: {'the interpreter ends' if bare else 'interrupted: closing ends'} once step 3 is written" in told
        )
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=SOON)
        assert time.monotonic() - began < SOON
        assert f"{url}: interrupted: step 3 is perhaps not saved" in rest
        assert process.returncode
    finally:
        process.kill()
        process.communicate()
    assert [info.step for info in ckptstore.open(url, storage_options=s3.options).checkpoints()] == [1]


def scripted(s3: Server, proxy: FaultProxy, text: str, url: str) -> subprocess.Popen[str]:
    environment = os.environ | s3.environment() | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
    command = [sys.executable, "-c", INTERRUPTIBLE + text, url]
    root = Path(__file__).parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, cwd=root, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def go_on_mute(proxy: FaultProxy, process: subprocess.Popen[str]) -> None:
    proxy.rules([Rule("stall", "create", seconds=SILENCE)])
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    wait_until_mute(proxy, process)


def interrupted_read(source: SegmentSource, proxy: FaultProxy) -> bytearray:
    """The buffer of a read that was interrupted before its answer, which arrives after 0.6 s."""
    for _ in range(10):  # on a stalled machine the answer may arrive before the alarm
        proxy.rules([Rule("slow", "range", seconds=0.6)])
        out = bytearray(1000)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            source.read_into(16, memoryview(out))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            if not any(out):
                return out
    raise AssertionError("no read was interrupted")


def test_an_abandoned_read_writes_to_no_memory(
    s3: Server, proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread's wait is interrupted; the answer arrives later, and no byte of it is written."""
    monkeypatch.setattr(segment_ranges, "FIRST", 16)  # not at hand once the segment is open
    monkeypatch.setattr(segment_ranges, "REST", 0)
    store = ckptstore.open(url, storage_options=options_for(proxy.port))
    (segment,) = store.checkpoint().segments
    key = store.view().catalog.segments[segment].key
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        with store.backend.open_source(key) as source:
            out = interrupted_read(source, proxy)
            time.sleep(0.8)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert out == bytes(1000)
    assert cancellable_calls.cancellable(lambda: 7) == 7


def test_a_save_gives_up_in_time(s3: Server, proxy: FaultProxy, url: str) -> None:
    """Without the option each of many requests waits for 20 s, and is sent again."""
    options = options_for(proxy.port) | {"timeout": 3.0}
    writer = ckptstore.open(url, storage_options=options).writer(poll_seconds=None)
    proxy.rules([Rule("stall", name, seconds=SILENCE) for name in ("create", "head", "get", "range")])
    began = time.monotonic()
    with pytest.raises(ckptstore.StorageError, match="no answer in time"):
        writer.save({"w": np.ones(9)}, 2)
    assert time.monotonic() - began < SOON
    proxy.rules([])
    writer.save({"w": np.ones(9)}, 3)
    writer.close()
    assert [info.step for info in ckptstore.open(url, storage_options=s3.options).checkpoints()] == [1, 3]
