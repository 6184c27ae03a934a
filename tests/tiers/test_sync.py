"""``ckpt sync`` by hand and as a process beside a writer; drains and writers that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.cli.main import cli
from ckptstore.host.crash_points import TIER_POINTS
from tests.forms import short_or
from tests.tiers.conftest import Place
from tests.tiers.test_tiers import check, fill, state, steps
from tools.kills.tier_kills import campaign
from tools.objects.server import Server
from tools.warm import Warm

CKPT = [sys.executable, "-m", "ckptstore"]
ARMED = """
import sys
from ckptstore.host import crash_points
from ckptstore.cli.main import main
crash_points.arm(sys.argv.pop(1))
main()
"""
LONG = 120.0


@pytest.fixture(scope="module")
def commands() -> Iterator[Warm]:
    """Starts commands as forks of one interpreter."""
    with Warm(("ckptstore.cli.main", "ckptstore.cli.commands.sync", "obstore")) as warm:
        yield warm


def killed_at(commands: Warm, point: str, *arguments: str) -> bool:
    done = commands.run([sys.executable, "-c", ARMED, point, *arguments], env=os.environ)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def test_sync_brings_new_commits_and_continues_after_kills(place: Place, s3: Server, commands: Warm) -> None:
    if place.remote.startswith("memory"):
        pytest.skip("another process has other memory")
    os.environ.update(s3.environment())
    fill(ckptstore.open(place.here), 1, 3)
    sync = ("sync", str(place.here), place.remote)
    passed = [point for point in TIER_POINTS if not point.startswith("tiers")]
    killed = [point for point in passed if killed_at(commands, point, *sync)]
    assert killed == passed
    done = CliRunner().invoke(cli, [*sync, "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert (said["remote"], said["branch"], said["over"]) == (place.remote, [], None)
    theirs = place.theirs()
    assert steps(theirs) == ["1@1", "2@1", "3@1"]
    assert theirs.verify(deep=True).ok
    before = len(theirs.terms())
    fill(ckptstore.open(place.here), 4, 5)
    done = CliRunner().invoke(cli, [*sync, "--bandwidth", "1GB/s"])
    assert done.output.startswith("drained 2 checkpoints: 2 segments"), done.output
    assert len(place.theirs().terms()) == before + 1
    assert CliRunner().invoke(cli, list(sync)).output.startswith("drained 0 checkpoints")
    for info in place.theirs().checkpoints():
        check(place.theirs().load(info.ref, framework="numpy"), info.step)


def test_sync_says_what_stays_a_branch(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    fill(ckptstore.open(folders.here, remote=False), 3, 4)
    fill(folders.open(folders.there), 8, 9)
    done = CliRunner().invoke(cli, ["sync", str(folders.here)])
    assert done.exit_code == 7
    assert "continued elsewhere: term 2" in done.output
    assert "branch: 3@2, 4@2" in done.output


def test_sync_without_a_remote_is_wrong_usage(tmp_path: Path) -> None:
    fill(ckptstore.open(tmp_path / "run"), 1, 1)
    done = CliRunner().invoke(cli, ["sync", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "no remote" in done.output
    assert CliRunner().invoke(cli, ["sync", str(tmp_path / "none"), str(tmp_path / "r")]).exit_code == 3


def test_a_daemon_follows_a_writer_that_drains_nothing(folders: Place) -> None:
    writer = ckptstore.open(folders.here, remote=False).writer(deltas=3)
    writer.save(state(1), 1)
    daemon = subprocess.Popen(
        [*CKPT, "sync", str(folders.here), folders.remote, "--follow", "--every", "0.05", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert daemon.stdout is not None
        assert json.loads(daemon.stdout.readline())["checkpoints"] == 1
        for step in range(2, 8):
            writer.save(state(step), step)
        brought = 1
        while brought < 7:
            brought += json.loads(daemon.stdout.readline())["checkpoints"]
        assert steps(folders.theirs()) == [f"{step}@1" for step in range(1, 8)]
        writer.close()
        for step in range(9, 99):
            try:
                fill(folders.open(folders.there), step, step)
                break
            except ckptstore.RemoteWarning:  # the daemon was at work there at that moment
                continue
        last = [json.loads(line) for line in daemon.stdout][-1]
        assert re.match("term [2-9]", last["over"])
        assert last["branch"] == []
        assert daemon.wait(LONG) == 0
    finally:
        daemon.kill()
        daemon.communicate()


def test_sigterm_ends_a_daemon_and_the_next_one_continues(folders: Place) -> None:
    with ckptstore.open(folders.here, remote=False).writer(deltas=3) as writer:
        writer.save(state(1), 1)
        daemon = subprocess.Popen(
            [*CKPT, "sync", str(folders.here), folders.remote, "--follow", "--every", "0.05", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert daemon.stdout is not None
            assert json.loads(daemon.stdout.readline())["checkpoints"] == 1
            for step in range(2, 6):
                writer.save(state(step), step)
            daemon.send_signal(signal.SIGTERM)
            _, complaint = daemon.communicate(timeout=LONG)
        finally:
            daemon.kill()
            daemon.communicate()
        assert daemon.returncode == 143, complaint
        assert "Traceback" not in complaint
    theirs = folders.theirs()
    assert theirs.verify(deep=True).ok  # whatever had arrived, every byte of it
    for store in (theirs, ckptstore.open(folders.here, remote=False)):
        assert store.backend.list("pins/") == []
    assert CliRunner().invoke(cli, ["sync", str(folders.here), folders.remote]).exit_code == 0
    assert steps(folders.theirs()) == [f"{step}@1" for step in range(1, 6)]


def test_two_drains_of_one_store_take_turns(folders: Place) -> None:
    store = folders.open()
    with store.writer() as writer:
        beside = subprocess.Popen([*CKPT, "sync", str(folders.here), folders.remote, "--follow", "--every", "0.05"])
        try:
            pending = []
            end = time.monotonic() + 1.2
            while time.monotonic() < end:
                pending.append(writer.save_async(state(len(pending) + 1), len(pending) + 1))
            pending[-1].result(tier="remote", timeout=LONG)
        finally:
            beside.kill()
            beside.wait()
    theirs = folders.theirs()
    assert [one.step for one in theirs.checkpoints()] == list(range(1, len(pending) + 1))
    assert theirs.verify(deep=True).ok


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(short_or(2, 5)))
def test_nothing_acknowledged_is_lost_by_kills_and_lost_disks(tmp_path: Path, seed: int) -> None:
    done = campaign(tmp_path, str(tmp_path / "remote"), {}, short_or(3, 100), seed)
    assert done.drained
