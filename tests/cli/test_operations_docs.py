"""Every command of docs/operations.md prints what the page shows, except names, sizes and times of a run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Run

PAGE = Path(__file__).parents[2] / "docs/operations.md"


def blocks(text: str) -> list[list[tuple[str, str]]]:
    """The commands of every console block, each with its output."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
        found.append(list(zip(parts[::2], parts[1::2], strict=True)))
    return found


def plain(text: str) -> str:
    """Text without the parts that differ from run to run."""
    text = re.sub(r"\b[0-9a-f]{32}\b", "ID", text)
    text = re.sub(r"\b\d[\d.]* (B|KiB|MiB)\b", "SIZE", text)
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)


def damage(what: list[str]) -> None:
    """Damage the store. Only `segment` stays: the rest of the page begins with the backup."""
    root = Path("runs/gpt")
    if what[0] != "segment":
        shutil.rmtree(root)
        shutil.copytree("backup", root)
    if what[0] == "segment":
        path = root / ckptstore.open(root).describe(what[1])[-1][0].key
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    elif what[0] == "slot":
        path = sorted((root / "log").iterdir())[int(what[1])]
        path.write_bytes(path.read_bytes()[:-1])
    elif what[0] == "format":
        (root / "FORMAT").unlink()
    else:
        shutil.rmtree(root / "log")


def say(ckpt: Run, command: str) -> str:
    words = shlex.split(command)
    if words[0] == "damage":
        damage(words[1:])
        return ""
    if words[1] == "repair":
        shutil.rmtree(words[3], ignore_errors=True)
    outcome = ckpt(*words[1:])
    return outcome.out + outcome.err


def made() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})  # noqa: S102  # the page's own example


def test_every_output_is_real(ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made()
    count = 0
    for block in blocks(PAGE.read_text()):
        for command, shown in block:
            assert plain(say(ckpt, command)) == plain(shown), command
            count += 1
    assert count > 10


def test_links_lead_somewhere() -> None:
    text = PAGE.read_text()
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)", text, re.M)
    }
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", text):
        page, _, anchor = target.partition("#")
        assert (PAGE.parent / page).exists() if page else anchor in headings, target
