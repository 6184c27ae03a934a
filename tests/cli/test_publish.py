"""`ckpt publish`: what it prints, its exit codes, and its ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckptstore
from tests import warmth
from tests.cli.conftest import Run, assert_documented, documented, state
from tools.objects.server import Server

INTERRUPTIBLE: Final = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""Shells make background processes ignore SIGINT, and the tests may run in the background."""
COMMAND: Final = [sys.executable, "-c", f"{INTERRUPTIBLE}; from ckptstore.cli.main import main; main()", "publish"]
PATIENCE: Final = 120.0


def test_text_json_and_nothing_new(ckpt: Run, run: Path, tmp_path: Path) -> None:
    to = tmp_path / "published"
    text = ckpt("publish", run, "--to", to, "--ref", "4@2").out
    assert text.startswith("published 4@2 as weight_v000001: a full (there was no version); ")
    assert sorted(load_file(to / "weight_v000001" / "model-00001-of-00001.safetensors")) == [
        "embedding.weight",
        "frozen",
    ]
    found = ckpt("publish", run, "--to", to, "--json", "--sha256", "--keep", "1")
    assert_documented(found.json, documented("ckpt publish")[0])
    assert (found.json["ref"], found.json["base"], found.json["changed"]) == ("5@3", 1, 1)
    again = ckpt("publish", run, "--to", to)
    assert (again.code, again.out) == (0, "")
    assert "has the newest checkpoint already" in again.err
    whole = ckpt("publish", run, "--to", tmp_path / "whole", "--strip", "", "--select", "odd.*", "--layout", "slime")
    assert "2 tensors" not in whole.out
    tensors = load_file(tmp_path / "whole" / "weight_v000001" / "model-00001-of-00001.safetensors")
    assert sorted(tensors) == ["odd.empty", "odd.half", "odd.z"]
    ckpt("publish", run, "--to", tmp_path / "whole", "--full-every", "1", "--max-shard-size", "1KB")
    assert len(list((tmp_path / "whole" / "weight_v000002").glob("*.safetensors"))) == 2


def test_mistakes(ckpt: Run, run: Path, tmp_path: Path) -> None:
    to = tmp_path / "published"
    assert ckpt("publish", run).code == 2
    assert ckpt("publish", run, "--to", to, "--every", "0").code == 2
    assert ckpt("publish", run, "--to", to, "--keep", "0").code == 2
    limited = ckpt("publish", run, "--to", to, "--timeout", "3")
    assert (limited.code, "--timeout is for --follow" in limited.err) == (2, True)
    assert ckpt("publish", run, "--to", to, "--layout", "gguf").code == 2
    assert ckpt("publish", run, "--to", run / "published").code == 2
    assert ckpt("publish", tmp_path / "nothing", "--to", to).code == 3
    assert ckpt("publish", run, "--to", to, "--ref", "77").code == 3
    assert ckpt("publish", run, "--to", to, "--strip", "none.").code == 3
    with ckptstore.open(run).publish(to) as publisher:
        assert publisher.look() is not None
        ckptstore.open(run).tag("best", "4@2", take_over=True)
        held = ckpt("publish", run, "--to", to, "--ref", "tag:best", "--json")
    assert (held.code, held.json["error"]["exit_code"]) == (7, 7)
    (to / "weight_v000009").mkdir()
    (to / "weight_v000009" / "x").write_bytes(b"")
    (to / "latest.json").unlink()
    assert ckpt("publish", run, "--to", to).code == 2


def test_damage_is_no_version(ckpt: Run, tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None, threads=1) as writer:
        for step in (1, 2):
            writer.save(state(step), step)
            if step == 1:
                assert ckpt("publish", tmp_path / "run", "--to", tmp_path / "to").code == 0
    (segment,) = (Path(one.path) for one in store.file_of("2@1"))
    data = bytearray(segment.read_bytes())
    data[-2000] ^= 1
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    before = (tmp_path / "to" / "latest.json").read_bytes()
    assert ckpt("publish", tmp_path / "run", "--to", tmp_path / "to").code == 4
    assert (tmp_path / "to" / "latest.json").read_bytes() == before
    assert sorted(one.name for one in (tmp_path / "to").iterdir()) == ["latest.json", "weight_v000001"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_goes_on_until_a_signal_comes(tmp_path: Path, number: int, code: int) -> None:
    to = tmp_path / "published"
    with ckptstore.open(tmp_path / "run").writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
        process = subprocess.Popen(
            [*COMMAND, str(tmp_path / "run"), "--to", str(to), "--follow", "--every", "0.02", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert json.loads(process.stdout.readline())["ref"] == "1@1"
            writer.save(state(2), 2)
            second = json.loads(process.stdout.readline())
            assert (second["ref"], second["base"]) == ("2@1", 1)
            began = time.monotonic()
            process.send_signal(number)
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == code, errors
    assert time.monotonic() - began < PATIENCE
    assert "Traceback" not in errors
    assert not (tmp_path / "run" / "pins").exists() or not list((tmp_path / "run" / "pins").iterdir())
    assert sorted(one.name for one in to.iterdir()) == ["latest.json", "weight_v000001", "weight_v000002"]


WAITING: Final = """
import time
from ckptstore.following import version_writer
files = []
def waits(name):
    files.append(name)
    if len(files) == 3:
        print("inside", flush=True)
        time.sleep(600)
version_writer.crash_point = waits
from ckptstore.cli.main import main
main()
"""
"""The command; it waits once the tensors of three files are written."""


def test_sigterm_while_a_version_is_written(tmp_path: Path) -> None:
    """What was written is removed; the previous version stays."""
    store, to = ckptstore.open(tmp_path / "run"), tmp_path / "published"
    big = {"model": {f"w{n}": np.full(1_000_000, n, np.float32) for n in range(40)}}
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
        with store.publish(to) as publisher:
            assert publisher.look() is not None
        writer.save(big, 2)
    command = [sys.executable, "-c", WAITING, "publish", str(tmp_path / "run"), "--to", str(to)]
    process = warmth.start([*command, "--max-shard-size", "4MB", "--sha256"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    assert len(list((to / "weight_v000002").glob("*.safetensors"))) >= 2
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    pointer = json.loads((to / "latest.json").read_text())
    assert pointer["version"] == 1
    assert sorted(one.name for one in to.iterdir()) == ["latest.json", "weight_v000001"]


def test_a_bucket(run: Path, s3: Server, tmp_path: Path) -> None:
    url = s3.url()
    environment = {**os.environ, **s3.environment()}
    command = [*COMMAND, str(run), "--to", url, "--json"]
    done = warmth.nursery().run(command, env=environment, timeout=PATIENCE)
    assert (done.returncode, json.loads(done.stdout)["to"]) == (0, url), done.stderr
    done = warmth.nursery().run(command, env=environment, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "")
