"""Where the temporary folders of tests lie: in memory with ``--in-memory``, but on a disk for tests about disks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import media

ROOT = Path(__file__).parents[1]


def test_each_entry_names_something() -> None:
    for one in media.ON_DISK:
        assert (ROOT / one).is_dir() if one.endswith("/") else (ROOT / one).is_file(), one


def test_which_tests_need_a_disk() -> None:
    assert media.needs_disk(ROOT / "tests/backends/test_space.py")
    assert media.needs_disk(ROOT / "tests/write/test_direct.py")
    assert not media.needs_disk(ROOT / "tests/write/test_writer.py")


def test_this_one_needs_none(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    asked = request.config.getoption("in_memory") and os.environ.get(media.VARIABLE) == str(media.MEMORY)
    assert media.is_memory(tmp_path) or not asked


def test_shared_memory_must_be_large_and_run_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = SimpleNamespace(f_bavail=1 << 30, f_frsize=4096, f_flag=0)
    monkeypatch.setattr(media.Path, "read_text", lambda _: "MemTotal: 9 kB\nMemAvailable: 33554432 kB\n")
    for changed, expected in {(): True, ("f_bavail", 1): False, ("f_flag", os.ST_NOEXEC): False}.items():
        found = SimpleNamespace(**{**vars(plenty), **dict([changed] if changed else [])})
        monkeypatch.setattr(os, "statvfs", lambda _, found=found: found)
        assert media.suitable() == expected, changed
    monkeypatch.setattr(os, "statvfs", lambda _: plenty)
    monkeypatch.setattr(media.Path, "read_text", lambda _: "MemAvailable: 1000000 kB\n")
    assert not media.suitable()


def test_make_test_alone_asks_for_it() -> None:
    recipes = dict(re.findall(r"^(test[a-z-]*):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [name for name, recipe in recipes.items() if "--in-memory" in recipe] == ["test"]
