"""The actor that loses slots, puts copies back and moves folders: it finds silent damage, and here there is none."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forms import short_or
from tests.tools.inside import Rule, break_rule
from tools.crash.scenario import Violation
from tools.crash.stages import Acknowledged, FolderStage
from tools.crash.torture_mishaps import mishap


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """In memory, if there is such a place: no power is cut here, and a disk's fsyncs would take minutes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


def run(place: Path, seeds: range) -> dict[str, int]:
    """Mishaps of these seeds -> how often each kind."""
    notes = place / "notes"
    notes.mkdir(exist_ok=True)
    journal = Acknowledged(notes / "mishap.jsonl")
    for seed in seeds:
        mishap(FolderStage(notes, random.Random(seed), journal, root=place / "store"))
    kinds: dict[str, int] = {}
    for event in Acknowledged.read(notes):
        for kind in event:
            kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


@pytest.mark.slow
def test_nothing_is_silent(place: Path) -> None:
    kinds = run(place, range(24))
    assert set(kinds) == {"mishap slots", "mishap copy", "mishap moved", "mishap deleted"}
    assert not list(place.glob("mishap-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "first"), [("look above", 80), ("look before", 50), ("chain", 50)])
def test_it_finds_what_the_rules_prevent(place: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule, first: int) -> None:
    """From a seed that comes a little before the first one that finds it."""
    break_rule(monkeypatch, rule)
    with pytest.raises(Violation):
        run(place, range(short_or(first, 0), 400))
