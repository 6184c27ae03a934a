"""The fuzzer itself: its inputs, its checks, and a short run of every target."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.errors import FormatError
from tests.forms import short_or
from tools.fuzz import __main__ as command
from tools.fuzz import campaign
from tools.fuzz.guard import Target, Violation, attempt
from tools.fuzz.mutations import mutate, mutate_json
from tools.fuzz.targets import TARGETS
from tools.fuzz.worker import Recorder
from tools.mutants.copies import repository

RUNS = short_or(25, 150)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_is_made_of_them(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    for seed in seeds:  # compilation at the first use is not a cost of an input, and is slow while memory is traced
        with contextlib.suppress(*target.refusals):
            target.run(seed)
    accepted = sum(attempt(target, seed, memory=True).accepted for seed in seeds)
    assert accepted >= 1, "no seed is valid"
    source = random.Random(name)
    for run in range(RUNS):
        attempt(target, mutate(source.choice(seeds), seeds, source), memory=run % 8 == 0)


def test_mutations_keep_json_json_and_change_it() -> None:
    seed = json.dumps({"a": [1, {"b": "text"}], "inner": json.dumps({"c": [1, 2]})}).encode()
    source = random.Random(1)
    made = {mutate_json(seed, [seed], source) for _ in range(300)}
    assert None not in made
    parsed = [json.loads(text or b"") for text in made]
    assert len(made) > 150
    inner = [value["inner"] for value in parsed if isinstance(value, dict) and isinstance(value.get("inner"), str)]
    assert any(text.startswith("{") and json.loads(text) != {"c": [1, 2]} for text in inner if text[:1] == "{")
    assert mutate_json(b"\xff{", [], source) is None


def _hang(_: bytes) -> bool:
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    return True


def _grow(data: bytes) -> bool:
    return len(bytearray(64 << 20)) > len(data)


def _raise_foreign(data: bytes) -> bool:
    return {}[data]


def _refuse_at_length(_: bytes) -> bool:
    raise FormatError("x" * 50_000)


@pytest.mark.parametrize("bad", [_hang, _grow, _raise_foreign, _refuse_at_length])
def test_the_watch_notices(bad: Callable[[bytes], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.fuzz.guard.SECONDS", 0.02)
    with pytest.raises(Violation):
        attempt(Target("bad", bad, lambda: [b""]), b"input", memory=True)


def test_an_input_that_never_ends_is_left_behind_in_a_file(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from tools.fuzz import guard, worker

def run(data):
    while data == b"for ever":
        pass
    return True

guard.SECONDS = 0.05
recorder = worker.Recorder(guard.Target("hang", run, lambda: []), Path(sys.argv[1]))
recorder.run(b"for a while")
recorder.run(b"for ever")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=repository(), timeout=240, check=False)
    assert done.returncode == -signal.SIGPROF
    left = (tmp_path / "current").read_bytes()
    assert left[8 : 8 + int.from_bytes(left[:8], "little")] == b"for ever"


def test_a_planted_bug_is_found_made_small_and_kept(tmp_path: Path) -> None:
    def run(data: bytes) -> bool:
        if b"\x80" in data:
            raise KeyError("planted")
        if len(data) > 3:
            raise FormatError("too long")
        return True

    recorder = Recorder(Target("planted", run, lambda: [b"ok"]), tmp_path)
    source = random.Random(3)
    while not recorder.found and recorder.runs < 20_000:
        recorder.run(mutate(b"some seed", [b"other"], source))
    (name,) = recorder.found.values()
    assert (tmp_path / f"found-{name}").read_bytes() == b"\x80"
    assert "KeyError" in (tmp_path / f"found-{name}.txt").read_text()
    assert json.loads((tmp_path / "stats.json").read_text())["found"] == [name]


def test_the_command_runs_a_target_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seconds", "2", "--target", "pin", "--jobs", "1", "--engine", "plain", "--keep", str(tmp_path)]
    assert command.main(options) == 0
    words = capsys.readouterr().out.splitlines()[1].split()
    assert words[:2] == ["pin", "plain"]
    assert int(words[2]) > 10
    assert not list(tmp_path.iterdir())


def test_a_process_that_dies_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", _killed_after_one_input(tmp_path))
    (result,) = campaign.campaign(["pin"], 1.0, jobs=1, engine="plain", keep=tmp_path / "kept")
    (kept,) = result.found
    assert kept.read_bytes() == b"deadly"
    assert "-9" in result.messages[0]


def _killed_after_one_input(folder: Path) -> str:
    """Replaces Python: leaves a worker's files, and dies like one that the system kills."""
    script = folder / "python"
    script.write_text(
        '#!/bin/sh\nfor word in "$@"; do case "$word" in --folder=*) folder="${word#--folder=}";; esac; done\n'
        "printf '\\006\\000\\000\\000\\000\\000\\000\\000deadly' > \"$folder/current\"\nkill -9 $$\n"
    )
    script.chmod(0o755)
    return str(script)
