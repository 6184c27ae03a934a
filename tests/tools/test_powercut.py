"""Power cuts: real ones on loop devices where possible, and omissions that only enumeration can show."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.errors import CommitUnknownError, StorageError
from ckptstore.formats.history import record_text
from ckptstore.log import requests, term
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.log.term import open_term
from ckptstore.store import Store
from tests.forms import short_or
from tools.crash import faults, killcuts
from tools.crash.disk import Unname
from tools.crash.enumerate import crash_states
from tools.crash.faults import FaultyPosix
from tools.crash.forgetful import SITES, ForgetfulBackend, site_of
from tools.crash.killcuts import LINKS, Killed, MortalPosix
from tools.crash.powercut import HIDDEN, hidden
from tools.crash.powercut_rig import FILE_SYSTEMS, obstacle
from tools.crash.recording import RecordingPosix
from tools.crash.scenario import Violation, check, create, live, state_of

# A killed writer of diffs may have lost steps that waited for their batch; the next one reports it.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning"),
]


def powercut(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tools.crash.powercut", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.root
def test_real_power_cuts_lose_nothing_acknowledged(tmp_path: Path) -> None:
    if (why := obstacle("ext4")) is not None:
        pytest.skip(why)
    said = powercut("--on", "ext4", "--cuts", "6", "--controls", "0", "--dir", str(tmp_path))
    assert "6 power cuts" in said
    assert "0 violations" in said


@pytest.mark.root
def test_real_power_cuts_catch_a_backend_that_does_not_sync_slots(tmp_path: Path) -> None:
    if (why := obstacle("ext4")) is not None:
        pytest.skip(why)
    said = powercut("--on", "ext4", "--cuts", "0", "--controls", "12", "--site", "slot bytes", "--dir", str(tmp_path))
    assert "caught at cut" in said


@pytest.mark.root
def test_real_power_cuts_of_mapped_segments(tmp_path: Path) -> None:
    """Like persistent memory that is none: written through mappings, made durable by msync."""
    if (why := obstacle("ext4")) is not None:
        pytest.skip(why)
    said = powercut("--on", "ext4", "--cuts", "4", "--controls", "12", "--medium", "pmem-msync", "--dir", str(tmp_path))
    assert "4 power cuts" in said
    assert "0 violations" in said
    assert "caught at cut" in said


def test_unavailable_file_systems_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    obstacle.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(obstacle("ext4"))
    obstacle.cache_clear()


def test_hidden_omissions_are_explained() -> None:
    for kinds, sites, ways, why in HIDDEN:
        assert set(kinds) <= set(FILE_SYSTEMS)
        assert set(sites) <= set(SITES)
        assert why
        assert hidden(kinds[0], sites[0], ways[0]) is not None
    assert hidden("ext4", "slot bytes", True) is None


RECYCLING = ("old header", "recycled data")
"""These show if a segment is as long as the one before: ``tests/backends/test_recycling.py`` omits them."""

# Omissions that real file systems hide, found by the enumerator


def test_every_sync_of_the_backend_belongs_to_a_site() -> None:
    seen, elsewhere = set(), set()

    class Watching(ForgetfulBackend):
        def __init__(self) -> None:
            super().__init__("/store", "settle", RecordingPosix(), recycle="always")

    backend = Watching()
    posix = backend.forgetful

    def note(fd: int) -> None:
        site = site_of(posix.path(fd), "/store") if posix.settling else posix.site(fd)
        if site is None:
            elsewhere.add(posix.path(fd))
        else:
            seen.add(site)

    fsync, fdatasync = posix.fsync, posix.fdatasync
    posix.fsync = lambda fd: (note(fd), fsync(fd))[1]  # type: ignore[method-assign,func-returns-value]
    posix.fdatasync = lambda fd: (note(fd), fdatasync(fd))[1]  # type: ignore[method-assign,func-returns-value]
    live(backend, lambda _: None)
    assert seen == set(SITES) - {"settle"}
    assert elsewhere == {"/store/req"}  # an unanswered request promises nothing


@pytest.mark.parametrize("site", sorted(set(SITES) - {"settle", *RECYCLING}))
def test_leaving_out_any_sync_is_caught(site: str) -> None:
    with pytest.raises(Violation):
        killcuts.explore(limit=6, start=10**6, site=site)


def test_leaving_out_settling_is_caught() -> None:
    with pytest.raises(Violation):
        killcuts.explore(limit=6, calls=LINKS, site="settle")


def test_a_killed_writer_and_then_a_power_cut_lose_nothing() -> None:
    done = killcuts.explore(every=short_or(53, 5), start=4, limit=short_or(1, 6), calls=LINKS)
    assert done.kills >= short_or(2, 4)
    assert done.states > short_or(12, 50)


def test_an_opener_makes_durable_what_it_builds_on() -> None:
    """The slot before the OPEN was linked, not synced, by a writer that died: the cut may remove it, but then both."""
    disk = RecordingPosix()
    create(LocalBackend("/store", disk))
    with pytest.raises(Killed):
        live(LocalBackend("/store", MortalPosix(disk, 6, LINKS)), disk.acknowledge)
    begin = len(disk.history)
    with Store(LocalBackend("/store", disk)).writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        disk.acknowledge(writer.save(state_of(writer.term, 90), 90).ref)
    cuts = 0
    for state in crash_states(disk, limit=20, begin=begin):
        check(LocalBackend("/store", state.mount()), map(str, state.acknowledged), write=False)
        cuts += 1
    assert cuts > 20


def test_a_slot_that_was_read_back_is_settled_before_it_is_acknowledged() -> None:
    """The folder's fsync fails after the link: the slot can be read, and a power cut may remove it."""
    healthy = FaultyPosix(RecordingPosix())
    save_two(healthy, lambda _: None)
    failed = kept = 0
    for nth in range(10, sum(healthy.calls[name] for name in faults.SYNCS) + 1, short_or(3, 1)):
        disk = RecordingPosix()
        try:
            save_two(FaultyPosix(disk, faults.sync_fails(nth)), disk.acknowledge)
        except (StorageError, CommitUnknownError):
            failed += 1
        for state in crash_states(disk, limit=4):
            check(LocalBackend("/store", state.mount()), map(str, state.acknowledged), write=False)
            kept += len(state.acknowledged)
    assert failed > short_or(1, 5), "syncs that fail end the writer"
    assert kept > 5, "and leave what was acknowledged before"


def save_two(posix: FaultyPosix, acknowledge: object) -> None:
    with Store(LocalBackend("/store", posix)).writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        for step in (1, 2):
            acknowledge(writer.save(state_of(writer.term, step), step).ref)  # type: ignore[operator]


def test_a_request_is_reported_accepted_only_when_that_is_durable() -> None:
    disk = RecordingPosix()
    backend = LocalBackend("/store", disk)
    create(backend)
    store = Store(backend)
    mortal = MortalPosix(disk, 10**6)
    term = open_term(Journal(LocalBackend("/store", mortal)), None)
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        writer.save(state_of(writer.term, 1), 1)
        term_number = writer.term
    term = open_term(Journal(LocalBackend("/store", mortal)), None)
    assert term.number == term_number + 1
    request = requests.post(
        Journal(backend, store.format), term.number, "a tag", CatalogChange(tags={"good": (term_number, 1)})
    )
    mortal.lives(1, LINKS)
    with pytest.raises(Killed):
        requests.handle(term)
    begin = len(disk.history)
    assert requests.wait(Journal(backend, store.format), request, timeout=0).answer == "accepted"
    disk.acknowledge("accepted")
    told = 0
    for state in crash_states(disk, limit=50, begin=begin):
        if state.acknowledged:
            survivor = LocalBackend("/store", state.mount())
            assert read(Journal(survivor, store.format)).catalog.tags == {"good": (term_number, 1)}, state.explain()
            told += 1
    assert told > 0


def test_a_manifest_goes_only_after_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in different folders: without a sync between them a cut may keep the second unlink, not the first."""

    def with_manifest(*record: Any, **place: Any) -> tuple[bytes, bytes | None]:
        with monkeypatch.context() as patch:
            patch.setattr(record_text, "SLOT_LIMIT", 100)
            return record_text.encode_commit(*record, **place)

    monkeypatch.setattr(term, "encode_commit", with_manifest)
    disk = RecordingPosix()
    live(LocalBackend("/store", disk), disk.acknowledge)
    begin = next(
        at
        for at, operation in enumerate(disk.history)
        if isinstance(operation, Unname) and operation.name.endswith(".json")
    )
    restored = 0
    for state in itertools.islice(crash_states(disk, limit=60, begin=begin), 40):
        restored += check(LocalBackend("/store", state.mount()), map(str, state.acknowledged), write=False)
    assert restored > 40


def test_a_pin_that_a_cut_leaves_is_whole() -> None:
    """A torn one would look like damage, and block every collector until it is taken for dead."""
    disk = RecordingPosix()
    backend = LocalBackend("/store", disk)
    pins = [b"first" * 100, b"second" * 100]
    for pin in pins:
        backend.replace("pins/a", pin)
    seen = set()
    for state in crash_states(disk):
        survivor = LocalBackend("/store", state.mount())
        seen.update(survivor.get(key) for key in survivor.list("pins/"))
    assert seen == set(pins)
