"""docs/json.md: every command is on it, with the document that it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ckptstore.cli.main import COMMANDS
from tests.cli.conftest import DOCS, JSON, Run, documented

SECTIONS = {
    "log STORE STORE": ("log", 1),
    "inspect --tensor NAME": ("inspect", 1),
    "restore --explain": ("restore", 1),
}
"""Second forms of a document: which block of which section shows it."""


def test_every_command_is_on_the_pages() -> None:
    sections = re.findall(r"^## ckpt (\w+)", JSON.read_text(), re.MULTILINE)
    assert set(sections) == set(COMMANDS), "docs/json.md has a section for each command"
    assert all(documented(f"ckpt {name}") for name in sections)
    listed = re.findall(r"^\| \[`ckpt (\w+)[^`]*`\]", DOCS.read_text().partition("## ")[0], re.MULTILINE)
    assert {*listed} == set(COMMANDS), "the table at the top of docs/cli.md has a row for each command"


LINES = {
    "ls": "..",
    "log": "{}",
    "log STORE STORE": "{0} {0}",
    "inspect": "{} 1@1",
    "inspect --tensor NAME": "{} 1@1 --tensor extra",
    "watch": "{} --once",
    "follow": "{} --once",
    "publish": "{} --to published",
    "sync": "{} second",
    "compact": "{} --dry-run",
    "stats": "{}",
    "verify": "{}",
    "restore": "{} 5@3 --out out.safetensors",
    "restore --explain": "{} 5@3 --explain",
    "import": "{} out.safetensors --step 9",
    "diff": "{} 1@1 5@3",
    "tag": "{}",
    "retire": "{} 1@1 --dry-run",
    "keep": "{}",
    "prune": "{} --keep last:9 --dry-run",
    "gc": "{} --dry-run",
    "copy": "{} copied",
    "repair": "{} repaired",
    "doctor": "{} --quick",
    "completion": "bash",
}
ELSEWHERE = {"analyze", "bisect", "merge", "tune"}
"""Commands whose documents need more than one line on that store: the files of these commands test them."""


def test_the_documents_are_so(ckpt: Run, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*LINES} == ({*COMMANDS} | {*SECTIONS}) - ELSEWHERE, "LINES above has a command line for each document"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, line in LINES.items():
        outcome = ckpt(name.split()[0], *line.format(run).split(), "--json")
        assert outcome.code == 0, (name, outcome.out, outcome.err)
        found = json.loads(outcome.out)
        section, number = SECTIONS.get(name, (name, 0))
        assert list(found) == ["schema", *documented(f"ckpt {section}")[number]], name
        assert found["schema"] == 1
    failed = ckpt("log", "nowhere", "--json")
    assert list(failed.json) == ["schema", "error"]
    assert failed.code == failed.json["error"]["exit_code"] == 3
