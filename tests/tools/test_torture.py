"""Long random runs in short: everything at once for some seconds, and the checks notice errors."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.posix import Posix
from ckptstore.log.change import CatalogChange
from ckptstore.store import Store
from tools.crash import torture, torture_actors
from tools.crash.faults import FaultyPosix
from tools.crash.scenario import Violation, create
from tools.crash.stages import Acknowledged, FolderStage, Stage
from tools.crash.torture_actors import ACTORS, sample_faults, train

# A killed writer of diffs may have lost steps that waited for their batch; the next one reports it.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning"),
]


def test_everything_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tools.crash.torture", "--seconds", "12", "--seed", "5"]
    done = subprocess.run([*command, "--dir", str(tmp_path)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 violations" in done.stdout
    for event in ("saved", "loaded", "audited"):
        assert f" {event}\n" in done.stdout


def test_the_seed_decides_the_schedule() -> None:
    names = torture.parts(disk_full=True)
    assert torture.schedule(3, 100, names) == torture.schedule(3, 100, names)
    assert torture.schedule(3, 100, names) != torture.schedule(4, 100, names)
    plan = torture.schedule(3, 100, names)
    assert plan[-1].part == ""
    assert {action.part for action in plan} == {*names, ""}
    assert sample_faults(random.Random(1)) == sample_faults(random.Random(1))


@pytest.fixture
def stage(tmp_path: Path) -> FolderStage:
    (tmp_path / "notes").mkdir()
    create(LocalBackend(tmp_path / "store"))
    journal = Acknowledged(tmp_path / "notes" / "1.jsonl")
    return FolderStage(tmp_path / "notes", random.Random(1), journal, root=tmp_path / "store")


def lies(stage: Stage) -> None:
    stage.note(saved="7@7")
    torture_actors.time.sleep(60)


def fails(stage: Stage) -> None:
    raise ZeroDivisionError("a bug")


def steals(stage: Stage) -> None:
    """A collector that ignores readers."""
    store = stage.store()
    for key in store.backend.list("seg/"):
        if store.view().catalog.collectable(key):
            store.backend.delete(key)


@pytest.mark.parametrize(("actor", "what"), [(lies, "acknowledged and not visible|gone"), (fails, "a bug")])
def test_a_violation_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actor: object, what: str) -> None:
    """Negative control: an actor whose promised checkpoint is missing, and one with a bug."""
    few = {name: ACTORS[name] for name in ("trainer", "auditor")}
    monkeypatch.setattr(torture, "ACTORS", {**few, "wrong": (actor, 1)})
    monkeypatch.setattr(torture_actors, "ACTORS", {**few, "wrong": (actor, 1)})
    monkeypatch.setattr(torture, "obstacle", lambda _: "not in a test process")
    with pytest.raises(Violation, match=what) as caught:
        torture.torture(6, seed=2, folder=tmp_path)
    assert "seed 2" in str(caught.value)


def test_a_reader_notices_a_collector_that_ignores_pins(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of gc: while a reader holds its pin the checkpoint is retired, and its segments are deleted."""
    store = stage.store()
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        first = writer.save(torture_actors.state_of(1, 1), 1)
        writer.save(torture_actors.state_of(1, 2), 2)

    def meanwhile(_: float) -> None:
        with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
            view = store.view()
            node = (first.term, first.step)
            drops = torture_actors.droppable(view.catalog, [node])
            torture_actors.requests.post(
                store.journal, writer.term, "test", CatalogChange(drops=tuple(drops), retires=(node,))
            )
            writer.poll()
        collector(stage)

    monkeypatch.setattr(torture_actors.time, "sleep", meanwhile)
    collector = steals
    with pytest.raises(Violation, match="is pinned for 1@1, and is gone"):
        torture_actors.hold(stage, store, first.ref)


def test_actors_get_on_with_faults_and_note_what_they_were_promised(
    stage: FolderStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Posix] = []
    posix = FolderStage.posix
    monkeypatch.setattr(FolderStage, "posix", lambda stage: made.append(posix(stage)) or made[-1])  # type: ignore[func-returns-value]
    stage.faulty = (torture_actors.faults.short_reads(1, None), torture_actors.faults.interrupted(3, 5))
    train(stage)
    events = Acknowledged.read(stage.notes)
    assert made
    assert all(isinstance(posix, FaultyPosix) and posix.calls for posix in made)
    saved = {event["saved"] for event in events if "saved" in event}
    assert saved == {info.ref for info in Store(LocalBackend(stage.root)).checkpoints()}


def test_a_journal_cut_in_the_middle_of_a_line_is_read(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(b'{"saved": "1@1"}\n{"sav')
    assert Acknowledged.read(tmp_path) == [{"saved": "1@1"}]
