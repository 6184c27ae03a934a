"""The store in a bucket under kills, faults and torture: short forms of ``python -m tools.crash.* --medium s3``.

A process that forks must never have used a bucket's client, so kills and torture run in separate processes here.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ckptstore.backends.object_store.objects import ObjectBackend
from ckptstore.errors import CkptError, StorageError
from ckptstore.log import term
from tests.forms import LONG, long_only
from tools.crash import bucket_faults
from tools.crash.apart import apart
from tools.crash.grounds import Bucket, BucketPlace
from tools.crash.kills import points_of
from tools.crash.scenario import Violation
from tools.crash.stages import Acknowledged, BucketStage
from tools.crash.torture_buckets import bucket_mishap
from tools.objects.fast_server import serving_fast
from tools.objects.proxies import proxying
from tools.objects.proxy import Rule
from tools.objects.server import Server

# A killed writer of diffs may have lost steps that waited for their batch; the next one reports it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning")]

LIMIT = 3400
"""Seconds of a campaign. Each kill starts interpreters: beside other work 200 kills can take half an hour."""


@pytest.fixture(scope="module")
def fast() -> Iterator[Server]:
    with serving_fast() as server:
        yield server


def said(tool: str, *words: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", f"tools.crash.{tool}", "--medium", "s3", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 violations" in done.stdout
    return done.stdout


@long_only
@pytest.mark.timeout(LIMIT + 200)
def test_sigkill_between_and_within_requests(tmp_path: Path) -> None:
    """In CI: a writer that is killed at crash points (tests/backends/test_objects_store.py)."""
    text = said("kills", "--kills", "200", "--seed", "3", "--dir", str(tmp_path))
    assert "200 kills, " in text
    assert re.search(r"^ +[1-9]\d* a request$", text, re.MULTILINE)
    assert all(re.search(rf"^ +[1-9]\d* {re.escape(one)}$", text, re.MULTILINE) for one in points_of("whole", "s3"))


@long_only
def test_everything_at_once(tmp_path: Path) -> None:
    """In CI: faults at single requests (below), and a random run of them (test_object_faults.py)."""
    text = said("torture", "--seconds", "60", "--seed", "5", "--dir", str(tmp_path))
    for event in ("saved", "audited"):
        assert f" {event}\n" in text


@long_only
def test_faults_at_requests_surface_and_lose_nothing(fast: Server) -> None:
    done = bucket_faults.sweep(fast, every=60, start=120, checks=False)
    assert set(done.injected) == set(bucket_faults.KINDS) - {"flip_up"}
    assert all(done.injected.values())
    assert done.surfaced["StorageError"] > 0
    assert done.survived > 0
    assert done.restored > 0


def test_a_fault_at_a_request_surfaces_or_is_survived(fast: Server) -> None:
    error, hit, restored = bucket_faults.inject(fast, bucket_faults.rule("503 from here on", 100))
    assert error == "StorageError"
    assert hit > 1
    assert restored > 0
    error, hit, _ = bucket_faults.inject(fast, Rule("late", times=1, skip=20), Rule("short", times=3, skip=20))
    assert error is None
    assert hit == 4


def test_a_client_that_assumes_success_is_caught(fast: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a lost answer is taken for a success."""
    create = ObjectBackend.create

    def believing(backend: ObjectBackend, key: str, data: bytes) -> None:
        try:
            create(backend, key, data)
        except StorageError:
            if not key.startswith("log/"):
                raise

    monkeypatch.setattr(ObjectBackend, "create", believing)
    with pytest.raises((Violation, CkptError)):
        # Slot 7: the slot before it closes a term, and losing that one loses only the record of the end.
        bucket_faults.inject(fast, Rule("reset", "create", path="log/", skip=7, times=4))


@pytest.fixture
def stage(fast: Server, tmp_path: Path) -> Iterator[BucketStage]:
    with proxying(fast.port) as proxy:
        place = BucketPlace(fast.url(), Bucket(fast, proxy))
        yield BucketStage(tmp_path, random.Random(1), Acknowledged(tmp_path / "1.jsonl"), place=place)


def suffer(stage: BucketStage, seeds: Iterable[int]) -> None:
    for seed in seeds:
        stage.chance = random.Random(seed)
        bucket_mishap(stage)


def test_mishaps_of_a_bucket_are_not_silent(stage: BucketStage) -> None:
    suffer(stage, range(100) if LONG else (0, 1, 5))
    found = {name for event in Acknowledged.read(stage.notes) for name in event if name.startswith("mishap")}
    assert found == {"mishap slots", "mishap copy", "mishap deleted"}


def test_a_writer_that_does_not_look_whose_store_it_is_is_caught(
    stage: BucketStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(term, "check_same_store", lambda _journal: None)
    with pytest.raises(Violation, match="after the store was deleted"):
        suffer(stage, (5, 6, 10))


def test_the_separate_proxy_follows_its_rules(stage: BucketStage) -> None:
    bucket = stage.place.bucket
    bucket.proxy.rules([Rule("late", "create", seconds=0.3, times=1), Rule("503", "get", times=1)])
    way = ObjectBackend(stage.place.url, bucket.through_proxy())
    way.create("log/1", b"x")
    assert way.get("log/1") == b"x"
    bucket.proxy.settle()
    assert bucket.proxy.injected() == {("late", "create"): 1, ("503", "get"): 1}


def test_the_result_of_a_separate_process_comes_back() -> None:
    assert apart(lambda: [1, "two"]) == [1, "two"]
    with pytest.raises(Violation, match="ZeroDivisionError"):
        apart(lambda: 1 // 0)
    with pytest.raises(Violation, match="without a result"):
        apart(lambda: os._exit(0))
