"""`ckpt follow`: lines and files for each checkpoint, commands that it runs, and its ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented, state

INTERRUPTIBLE: Final = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""Shells make background processes ignore SIGINT, and the tests may run in the background."""
COMMAND: Final = [sys.executable, "-c", f"{INTERRUPTIBLE}; from ckptstore.cli.main import main; main()", "follow"]
PATIENCE: Final = 120.0


def test_once_in_text_and_json(ckpt: Run, run: Path) -> None:
    found = ckpt("follow", run, "--once", "--json")
    assert_documented(found.json, documented("ckpt follow")[0])
    assert (found.json["ref"], found.json["base"], found.json["out"]) == ("5@3", None, None)
    (line,) = ckpt("follow", run, "--once").out.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  5@3  from the store: full  \d.* in ", line)
    each = ckpt("follow", run, "--after", "2@1", "--each", "--once", "--json").out.splitlines()
    assert [json.loads(one)["ref"] for one in each] == ["3@2", "4@2", "5@3"]
    other = ckpt("follow", run, "--after", "4@1", "--once", "--json").json
    assert (other["branched"], other["fork"], other["skipped"]) == (True, "2@1", 2)


def test_a_file_and_a_command(ckpt: Run, run: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    out, told = tmp_path / "policy.safetensors", tmp_path / "told"
    words = f"echo $CKPT_REF $CKPT_STEP $CKPT_OUT >> {told}; exit 3"
    outcome = ckpt("follow", run, "--out", out, "--select", "model.*", "--exec", words, "--once")
    assert "5@3: the command exited with 3" in outcome.err
    assert told.read_text() == f"5@3 5 {out}\n"
    assert sorted(load_file(out)) == ["model.embedding.weight", "model.frozen"]
    again = ckpt("follow", run, "--out", out, "--select", "model.*", "--once")
    assert (again.code, again.out) == (0, "")
    assert "no new checkpoint" in again.err


@pytest.mark.parametrize("member", ["ckptstore.checkpoint", "ckptstore.log.checkpoints"])
def test_files_of_earlier_versions_are_known_as_exported(ckpt: Run, run: Path, tmp_path: Path, member: str) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    out = tmp_path / "policy.safetensors"
    assert ckpt("follow", run, "--out", out, "--after", "2@1", "--each", "--once").code == 0
    with safe_open(out, "numpy") as file:
        said = file.metadata()
    ref = said.pop("ckptstore.checkpoint")  # the file's metadata is a format: no renamed module may change it
    save_file(load_file(out), out, {**said, member: ref})
    assert ckpt("follow", run, "--out", out, "--once", "--after", "2@1").code == 0
    save_file(load_file(out), out, {**said, "another.checkpoint": ref})
    assert ckpt("follow", run, "--out", out, "--once", "--after", "2@1").code == 2


@pytest.mark.parametrize("name", ["policy.safetensors", "policy.bin"])
def test_only_what_was_exported_is_replaced(ckpt: Run, run: Path, tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    out = tmp_path / name
    tensors = {"w": torch.ones(3)}
    for write in (
        lambda: out.write_bytes(b"a year of work"),
        lambda: save_file(tensors, out),
        lambda: torch.save(tensors, out),
    ):
        write()
        before = out.read_bytes()
        found = ckpt("follow", run, "--out", out, "--once")
        assert found.code == 2
        assert "was not exported from a store" in found.err
        assert out.read_bytes() == before
    out.write_bytes(b"")  # mktemp's
    assert ckpt("follow", run, "--out", out, "--after", "2@1", "--each", "--once").code == 0
    assert len(out.read_bytes()) > 1000
    again = ckpt("follow", run, "--out", out, "--once", "--after", "4@2")
    assert again.code == 0
    if name.endswith(".bin"):
        assert set(torch.load(out, weights_only=True)) == set(ckptstore.open(run).load("5@3"))


def test_mistakes(ckpt: Run, run: Path, tmp_path: Path) -> None:
    assert ckpt("follow", run, "--every", "0").code == 2
    assert ckpt("follow", tmp_path / "nothing").code == 3
    assert ckpt("follow", run, "--after", "77", "--once").code == 3
    assert ckpt("follow", run, "--select", "none.*", "--once").code == 3
    assert ckpt("follow", run, "--out", run / "model.safetensors", "--once").code == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_run_is_followed_until_a_signal_comes(tmp_path: Path, number: int, code: int) -> None:
    out = tmp_path / "policy.safetensors"
    with ckptstore.open(tmp_path / "run").writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
        process = subprocess.Popen(
            [*COMMAND, str(tmp_path / "run"), "--every", "0.02", "--out", str(out), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert json.loads(process.stdout.readline())["ref"] == "1@1"
            writer.save(state(2), 2)
            assert json.loads(process.stdout.readline())["ref"] == "2@1"
            began = time.monotonic()
            process.send_signal(number)
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == code, errors
    assert time.monotonic() - began < PATIENCE
    assert out.exists()
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == [out.name]  # no half-written file
    assert not list((tmp_path / "run" / "pins").glob("*"))
    assert "Traceback" not in errors


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 1), ("SIGTERM", 143)])
def test_a_signal_that_comes_while_a_finalizer_runs_is_heard(name: str, code: int) -> None:
    """Python ignores exceptions of a finalizer, so a command continued as if no signal had come."""
    script = f"""
import os, signal, time, weakref
from ckptstore.cli.main import heed_signals
signal.signal(signal.SIGINT, signal.default_int_handler)
heed_signals()
class Thing: pass
thing = Thing()
def end():
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.2)
weakref.finalize(thing, end)
del thing
time.sleep({PATIENCE})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=PATIENCE / 2)
    assert done.returncode in (code, -signal.Signals[name])
