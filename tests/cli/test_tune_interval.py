"""`ckpt tune interval`."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run, assert_documented, documented

QUICK = ["--in-flight", "2", "--threads", "2", "--saves", "2", "--probe", "2MiB"]


def test_a_store_says_what_its_state_and_pace_are(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("tune", "interval", pristine, *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert_documented(found, documented("ckpt tune interval")[0])
    assert found["sources"] == {"state_bytes": "latest", "iteration": "store"}
    assert "the iteration time is the time between commits" in outcome.err
    assert sorted(path.name for path in pristine.parent.iterdir()) == [pristine.name], "nothing stays"


def test_the_numbers_are_those_of_the_model(ckpt: Run, tmp_path: Path) -> None:
    place = tmp_path / "run"
    outcome = ckpt("tune", "interval", place, "--size", "3MB", "--iteration-time", "1ms", *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    chosen, interval = found["chosen"], found["interval"]
    assert (found["state_bytes"], found["probe_bytes"]) == (3_000_000, 2 << 20)
    assert found["sources"] == {"state_bytes": "given", "iteration": "given"}
    assert "of 2.86 MiB were saved" in outcome.err
    assert [one for one in found["settings"] if one["chosen"]] == [chosen]
    assert chosen["per_save"] == pytest.approx(chosen["write"] / chosen["in_flight"])
    assert chosen["host_bytes"] == chosen["in_flight"] * 3_000_000 + chosen["staging_bytes"]
    assert interval["equation_3"] == math.ceil(chosen["per_save"] / (1.05 * 0.001))
    assert interval["iterations"] == max(interval["equation_3"], math.ceil(chosen["loss"] / (0.05 * 0.001)))
    assert interval["slowdown"] <= 1.05 + 1e-6
    recovery = found["recovery"]
    assert recovery["total"] == pytest.approx(recovery["load"] + recovery["since_save"] + recovery["under_way"])
    assert found["line"].startswith(f"store.writer(max_in_flight={chosen['in_flight']}, threads={chosen['threads']}")
    assert list(tmp_path.iterdir()) == []


def test_the_text_ends_with_what_to_copy(ckpt: Run, tmp_path: Path) -> None:
    outcome = ckpt("tune", "interval", tmp_path / "run", "--size", "1MB", "--iteration-time", "10s", *QUICK)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("save every iteration (10.00 s), 1 in flight")
    assert "a failure costs at most" in outcome.out
    lines = outcome.out.splitlines()
    assert lines[-3].startswith("  writer = store.writer(max_in_flight=1, threads=")
    assert lines[-2:] == ["  ...", "  writer.save_async(state, step)"]


def test_limits_bound_what_is_tried(ckpt: Run, tmp_path: Path) -> None:
    size = ["--size", "1MB", "--iteration-time", "1ms", *QUICK]
    outcome = ckpt("tune", "interval", tmp_path / "run", *size, "--space", "2MB", "--json")
    assert outcome.code == 0, outcome.err
    assert {one["in_flight"] for one in outcome.json["settings"]} == {1}
    assert "allow only 1 saves in flight of the 2" in outcome.err
    assert outcome.json["limits"] == {"slowdown": 1.05, "memory": None, "space": 2_000_000}
    for option, message in (("--space", "two checkpoints of this state need"), ("--memory", "one save of this state")):
        outcome = ckpt("tune", "interval", tmp_path / "run", *size, option, "1MB")
        assert outcome.code == 2
        assert message in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_state_like_a_file(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    assert ckpt("restore", pristine, "--out", file).code == 0
    options = ["--like", file, "--iteration-time", "5ms", *QUICK, "--json"]
    found = ckpt("tune", "interval", tmp_path / "run", *options).json
    assert found["like"] == str(file)
    assert found["state_bytes"] == found["probe_bytes"]


def test_a_picture(ckpt: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "interval.png"
    size = ["--size", "1MB", "--iteration-time", "1ms", *QUICK]
    outcome = ckpt("tune", "interval", tmp_path / "run", *size, "--plot", picture, "--json")
    assert outcome.json["plot"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    missing = ckpt("tune", "interval", tmp_path / "run", *size, "--plot", tmp_path / "no" / "a.png")
    assert (missing.code, "/no does not exist" in missing.err) == (2, True)
    assert ckpt("tune", "interval", tmp_path / "run", *size, "--plot", tmp_path / "a.xyz").code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run"], 2, "missing: --size or --like, --iteration-time (there is no store yet to measure)"),
        (["run", "--size", "1MB"], 2, "missing: --iteration-time"),
        (["run", "--size", "1MB", "--like", "latest"], 2, "--size and --like"),
        (["run", "--like", "latest", "--iteration-time", "1s"], 2, "no store yet that it could be a REF of"),
        (["run", "--size", "1MB", "--iteration-time", "5"], 2, "'5' is not a time"),
        (["run", "--size", "1MB", "--iteration-time", "1s", "--slowdown", "1"], 2, "slowdown"),
        (["no/run", "--size", "1MB", "--iteration-time", "1s"], 2, "does not exist"),
        (["memory://run", "--size", "1MB", "--iteration-time", "1s"], 2, "a folder of this machine"),
        (["file", "--size", "1MB", "--iteration-time", "1s"], 3, "is a file"),
    ],
)
def test_errors_say_what_to_write(
    ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    outcome = ckpt("tune", "interval", *arguments)
    assert outcome.code == code
    assert message in outcome.err.splitlines()[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_its_help(ckpt: Run) -> None:
    assert "interval" in ckpt("tune", "--help").out
    text = ckpt("tune", "interval", "--help").out
    assert "--iteration-time TIME" in text
    assert "ckpt tune interval runs/gpt" in text.split("Examples:")[1]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_leaves_nothing(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    arguments = ["tune", "interval", "run", "--size", "40MB", "--probe", "4MB", "--iteration-time", "1ms"]
    # If the tests run in the background of a shell, SIGINT is ignored, also in their children.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heeds}; from ckptstore.cli.main import main; main()"
    command = [sys.executable, "-c", script, *arguments, "--saves", "1000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".ckpt-tune-*/0/seg/*")) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.02)
        process.send_signal(sent)
        try:
            assert process.wait(60) == code
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


def test_memory_below_one_copy_is_measured_with_and_printed(ckpt: Run, tmp_path: Path) -> None:
    size = ["--size", "128MiB", "--iteration-time", "1s", "--threads", "1", "--in-flight", "2", "--saves", "2"]
    memory = (48 << 20) + (64 << 20)
    found = ckpt("tune", "interval", tmp_path / "run", *size, "--probe", "128MiB", "--memory", str(memory), "--json")
    assert found.code == 0, found.err
    settings = found.json["settings"]
    assert {(one["in_flight"], one["staging_bytes"], one["memory"]) for one in settings} == {(1, 64 << 20, 48 << 20)}
    assert settings[0]["host_bytes"] == memory
    assert found.json["line"] == f"store.writer(max_in_flight=1, threads=1, memory={48 << 20})"
    less = ckpt("tune", "interval", tmp_path / "run", *size, "--probe", "64MiB", "--memory", str(memory))
    assert less.code == 2
    assert "pass --probe" in less.err
    assert list(tmp_path.iterdir()) == []
