"""`ckpt watch`: beside a run in another process, in a pipe, on a terminal, and its ends."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import ckptstore
from ckptstore.cli.output import printable, spark
from tests.cli.conftest import Run, assert_documented, documented, state

COMMAND: Final = [sys.executable, "-c", "from ckptstore.cli.main import main; main()", "watch"]
PATIENCE: Final = 120.0


def test_once_in_text_and_json(ckpt: Run, run: Path) -> None:
    found = ckpt("watch", run, "--once", "--json")
    assert_documented(found.json, documented("ckpt watch")[0])
    assert found.out.count("\n") == 1
    assert (found.json["latest"], found.json["checkpoints"], found.json["terms"]) == ("5@3", 7, 3)
    assert (found.json["parent"], found.json["changes"], found.json["final"]) == ("4@2", [], False)
    (line,) = ckpt("watch", run, "--once").out.splitlines()
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  5@3  saved \d+ (s|min) ago  .*x (smaller|larger)  7 checkpoints in "
    assert re.match(pattern, line)
    assert line.endswith("closed, all saves done")


def test_mistakes(ckpt: Run, run: Path, tmp_path: Path) -> None:
    assert ckpt("watch", run, "--every", "0").code == 2
    assert ckpt("watch", run, "--every", "nan").code == 2
    assert ckpt("watch", run, "--every", "soon").code == 2
    assert ckpt("watch", run, "--metric", "").code == 2
    assert ckpt("watch", tmp_path / "nothing", "--once").code == 3
    (tmp_path / "file").touch()
    assert ckpt("watch", tmp_path / "file", "--wait").code == 3
    outcome = ckpt("watch", tmp_path / "nothing", "--json")
    assert (outcome.code, outcome.out.count("\n"), outcome.json["error"]["exit_code"]) == (3, 1, 3)


def test_a_store_in_memory(ckpt: Run) -> None:
    with ckptstore.open("memory://watch-me").writer(poll_seconds=None) as writer:
        writer.save({"x": 1}, 1, metadata={"loss": 0.25})
    found = ckpt("watch", "memory://watch-me", "--once", "--json").json
    assert found["metric"] == {"name": "loss", "step": 1, "value": 0.25}
    assert found["free_bytes"] is None
    assert "loss 0.25" in ckpt("watch", "memory://watch-me", "--once").out


@pytest.fixture
def started() -> Iterator[Any]:
    """Starts processes, and ends those that the test has not ended."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: list[Any], **options: Any) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen([str(word) for word in command], **options))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Its output, line by line; it is expected to continue."""
    assert process.stdout is not None
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.1)[0]:
            if not (line := process.stdout.readline()):
                return
            yield line.decode()
    raise AssertionError("nothing more was printed")


def watching(started: Any, *arguments: object) -> subprocess.Popen[bytes]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    process: subprocess.Popen[bytes] = started([*COMMAND, "--every", "0.02", *arguments], **pipes)
    return process


WRITER: Final = """
import sys, ckptstore
store = ckptstore.open(sys.argv[1])
with store.writer(poll_seconds=None) as writer:
    for line in sys.stdin:
        step = int(line)
        if step < 0:
            writer.rollback(-step)
        else:
            writer.save({"step": step}, step, metadata={"loss": 1 / step})
"""


def test_a_run_in_another_process_is_followed_from_before_its_beginning(started: Any, tmp_path: Path) -> None:
    """--wait, a line of JSON for each change, a rollback, and the end by Ctrl-C: exit code 0 and the final state."""
    root = tmp_path / "run"
    watcher = watching(started, root, "--wait", "--json")
    assert watcher.stderr is not None
    assert watcher.stderr.readline().decode() == f"note: waiting for a store at {root}\n"
    writer = started([sys.executable, "-c", WRITER, root], stdin=subprocess.PIPE)

    def say(*steps: int) -> None:
        writer.stdin.write("".join(f"{step}\n" for step in steps).encode())
        writer.stdin.flush()

    say(1, 2)
    seen = []
    for line in lines(watcher):
        status = json.loads(line)
        assert_documented(status, documented("ckpt watch")[0])
        seen.append(status)
        if status["latest"] == "2@1":
            say(3)
        elif status["latest"] == "3@1":
            say(-1, 2)
        elif status["latest"] == "2@2":
            break
    watcher.send_signal(signal.SIGINT)
    (final,) = map(json.loads, lines(watcher))
    assert (watcher.wait(PATIENCE), watcher.stderr.read()) == (0, b"")
    assert (final["latest"], final["final"], final["pid"], final["writer"]) == ("2@2", True, writer.pid, "alive")
    assert not any(status["final"] for status in seen)
    told = [change for status in seen for change in status["changes"]]
    assert "term 2 forks from 1@1 (the newest was 3@1)" in told
    assert told[-1] == "saved 2@2"


def test_lines_in_a_pipe_have_no_control_codes(started: Any, run: Path) -> None:
    watcher = watching(started, run)
    coming = lines(watcher)
    first = next(coming)
    with ckptstore.open(run).writer(poll_seconds=None) as writer:
        writer.save(state(6), 6, metadata={"loss": 0.5})
        text = next(line for line in coming if "6@4" in line)
        watcher.send_signal(signal.SIGINT)
        final = list(coming)[-1]
    assert watcher.wait(PATIENCE) == 0
    assert "saved 6@4" in text
    assert "  loss 0.5  8 checkpoints in " in text
    assert "  term 4  " in text
    assert final.endswith("  ended\n")
    assert "\x1b" not in first + text + final


def test_sigterm(started: Any, run: Path) -> None:
    watcher = watching(started, run)
    next(lines(watcher))
    watcher.terminate()
    assert watcher.wait(PATIENCE) == 143


def test_a_reader_that_goes_away_ends_it(started: Any, run: Path) -> None:
    watcher = watching(started, run)
    next(lines(watcher))
    assert watcher.stdout is not None
    watcher.stdout.close()
    ckptstore.open(run).tag("other", take_over=True)
    assert watcher.wait(PATIENCE) == 141


@pytest.mark.parametrize(("how", "code"), [("moved", 3), ("damaged", 4), ("replaced", 7)])
def test_a_store_that_is_taken_away_ends_it(started: Any, run: Path, how: str, code: int) -> None:
    place = run.parent / "place"
    place.symlink_to(run)
    watcher = watching(started, place, "--json")
    coming = lines(watcher)
    next(coming)
    if how == "moved":
        run.rename(run.parent / "elsewhere")
    elif how == "damaged":
        max((run / "log").iterdir()).write_bytes(b"garbage")
    else:
        with ckptstore.open(run.parent / "other").writer(poll_seconds=None) as writer:
            writer.save({"x": 1}, 1)
        (run.parent / "link").symlink_to(run.parent / "other")
        (run.parent / "link").replace(place)  # at once: a look always finds a checkpoint
    error = json.loads(list(coming)[-1])["error"]
    assert watcher.stderr is not None
    text = watcher.stderr.read().decode()
    assert (watcher.wait(PATIENCE), error["exit_code"]) == (code, code)
    assert text.startswith(f"error: {error['message']}\nhint: {error['hint']}\n")
    assert str(place) in text
    assert "Traceback" not in text


def test_on_a_terminal_lines_are_drawn_again(started: Any, run: Path) -> None:
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30", "PYTHONIOENCODING": "utf-8"}
    watcher = started([*COMMAND, run, "--every", "0.05"], stdout=other, stderr=other, stdin=other, env=environment)
    os.close(other)
    shown = b""

    def until(text: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + PATIENCE
        while text.encode() not in shown and time.monotonic() < deadline:
            if select.select([main], [], [], 0.1)[0]:
                shown += os.read(main, 65536)
        assert text.encode() in shown

    until("7   term 3, from 4@2")
    with ckptstore.open(run).writer(poll_seconds=None) as writer:
        for step in (6, 7, 8):
            writer.save(state(step), step, metadata={"loss": 1 / step})
        until("█")
        until("steps/s")
        until("term 4 continues from 5@3")
        watcher.send_signal(signal.SIGINT)
        until("\x1b[?25h")  # the cursor is shown again; nothing else clears the terminal
        assert watcher.wait(PATIENCE) == 0
    os.close(main)
    assert b"Traceback" not in shown


def test_a_terminal_that_can_only_print_gets_lines(started: Any, run: Path) -> None:
    main, other = pty.openpty()
    watcher = started([*COMMAND, run, "--once"], stdout=other, stdin=other, env={**os.environ, "TERM": "dumb"})
    assert watcher.wait(PATIENCE) == 0
    os.close(other)
    shown = os.read(main, 65536)
    os.close(main)
    assert b"5@3  saved " in shown
    assert b"\x1b" not in shown


def test_bars() -> None:
    assert spark([1, 2, 3, 4, 5, 6, 7, 8], 8, "utf-8") == "▁▂▃▄▅▆▇█"
    assert spark([8, 1], 8, "latin-1") == "#_"
    assert spark([5, 5, 1e308, -1e308, float("nan"), float("inf")], 5, None) == "=#_!!"
    assert spark([3, 3, 3], 2, "utf-8") == "▁▁"
    assert spark([], 5, "utf-8") == ""
    assert spark([float("nan")], 5, "utf-8") == "!"


def test_control_characters_are_not_shown() -> None:
    assert printable("node\x1b[2J\n") == "node\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}"
