"""The Python of docs/serving.md runs unchanged; the examples of serving run as scripts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptstore
from tests import warmth
from tests.following.published import EXAMPLES

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def save(store: ckptstore.Store, step: int) -> None:
    with store.writer(parent="latest", threads=1, poll_seconds=None) as writer:
        writer.save({"model": module(step).state_dict()}, step)


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    save(ckptstore.open(tmp_path / "run"), 1)
    exec(example, {"RUN": tmp_path / "run", "PLACE": tmp_path / "published", "TIMEOUT": 0.1})  # noqa: S102  # the docs' own
    assert capsys.readouterr().out == "version 1 is 1@1 on None in weight_v000001\n"


def test_the_reader_has_forty_lines_and_three_packages(tmp_path: Path) -> None:
    text = (EXAMPLES / "read_published.py").read_text()
    assert len(text.splitlines()) <= 40
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert imported - {"numpy", "safetensors"} <= set(sys.stdlib_module_names)
    store = ckptstore.open(tmp_path / "run")
    save(store, 1)
    with store.publish(tmp_path / "published", sha256=True) as publisher:
        assert publisher.look() is not None
    done = warmth.run([sys.executable, str(EXAMPLES / "read_published.py"), str(tmp_path / "published")], timeout=120)
    assert done.returncode == 0, done.stderr
    assert "0.weight F32 [64, 64] 16384 bytes, intact" in done.stdout
    assert done.stdout.endswith("version 1 of step 1\n")


def test_the_servers(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    save(store, 1)
    with store.publish(tmp_path / "published", layout="slime") as publisher:
        assert publisher.look() is not None
        servers = [
            warmth.start(
                [sys.executable, str(EXAMPLES / name), str(place), "--every", "0.02", "--timeout", "60"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, place in (("serve_published.py", tmp_path / "published"), ("serve_follow.py", tmp_path / "run"))
        ]
        try:
            first = [one.stdout.readline() for one in servers if one.stdout is not None]
            assert first == ["serving version 1\n", "serving 1@1\n"]
            save(store, 2)
            assert publisher.look() is not None
            second = [one.stdout.readline() for one in servers if one.stdout is not None]
            assert second == ["serving version 2\n", "serving 2@2\n"]
        finally:
            for one in servers:
                one.kill()
                one.communicate()
