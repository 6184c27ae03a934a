"""A process that ends in the middle of a batch: waiting steps are written, or lost, and the next writer names those."""

from __future__ import annotations

import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import DiffOptions
from tests import warmth
from tests.store.states import same
from tests.write.trainer import Trainer

BATCH, LAST = 10, 25
CHILD = """
import os, signal, sys, time
import ckptstore
from ckptstore.host import crash_points
from tests.write.trainer import Trainer

url, batch, last, end, (place, _, count) = *sys.argv[1:5], sys.argv[5].partition(":")
batch, last = int(batch), int(last)
crash_points.arm(place, int(count or 1))
trainer, store = Trainer(), ckptstore.open(url)
writer = store.writer(diffs=ckptstore.DiffOptions(batch=batch, seconds=None), poll_seconds=None, max_in_flight=4)
pending = []
for step in range(1, last + 1):
    trainer.train()
    pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
writer.poll()  # coded, all of them
print(*[one.step for one in pending if one.done()], flush=True)
if end == "close":
    writer.close()
elif end != "":
    os.kill(os.getpid(), getattr(signal, end))
    time.sleep(60)
"""


def run(url: Path, end: str, *, at: str = "", batch: int = BATCH) -> tuple[int, list[int]]:
    """Run a process -> its exit status, and the steps that it reported as durable."""
    command = [sys.executable, "-c", CHILD, str(url), str(batch), str(LAST), end, at]
    done = warmth.run(command, cwd=Path(__file__).resolve().parents[2], timeout=120)
    if done.returncode not in (0, -9, -15):
        raise AssertionError(done.stderr)
    return done.returncode, [int(word) for word in done.stdout.split()]


def truth(last: int = LAST) -> dict[int, Any]:
    """The states of the run, computed again."""
    trainer, states = Trainer(), {}
    for step in range(1, last + 1):
        trainer.train()
        states[step] = trainer.frozen()
    return states


def all_there(url: Path, last: int) -> None:
    store, states = ckptstore.open(url), truth()
    assert [info.step for info in store.checkpoints()] == list(range(1, last + 1))
    for step in sorted({1, min(2, last), (last + 1) // 2, last}):
        same(states[step], store.load(step))


def test_a_killed_process_loses_what_waited_and_the_next_one_says_which(tmp_path: Path) -> None:
    url = tmp_path / "store"
    code, durable = run(url, "SIGKILL")
    assert (code, durable) == (-9, list(range(1, 22)))  # a full, and two batches
    all_there(url, 21)
    with pytest.warns(ckptstore.LostStepsWarning) as caught:
        writer = ckptstore.open(url).writer(diffs=DiffOptions(batch=BATCH))
    assert re.search(r"up to 13 steps after 21 .*\(22 and following\).* continues from 21@1", str(caught[0].message))
    with writer:  # and continues from there
        trainer = Trainer()
        for step in range(1, LAST + 1):
            trainer.train()
            if step > 21:
                writer.save_async(trainer.state(), step, updates=trainer.updates())
    store, states = ckptstore.open(url), truth()
    for step in (21, 22, 23, LAST):
        same(states[step], store.load(step))


@pytest.mark.parametrize(
    ("place", "last"),
    [("save.begin:3", 11), ("save.before-header:3", 11), ("save.sealed:3", 11), ("commit.before-create:2", 1)],
)
def test_killed_while_a_batch_is_written(tmp_path: Path, place: str, last: int) -> None:
    """Before its COMMIT a batch does not exist; earlier commits do."""
    url = tmp_path / "store"
    assert run(url, "close", at=place)[0] == -9
    all_there(url, last)
    with pytest.warns(ckptstore.LostStepsWarning, match=f"after {last} "):
        ckptstore.open(url).writer().close()


def test_killed_before_its_first_checkpoint_the_next_run_says_so(tmp_path: Path) -> None:
    url = tmp_path / "store"
    for term in (1, 2):
        assert run(url, "close", at="save.begin:1")[0] == -9
        store = ckptstore.open(url)
        assert [one.term for one in store.terms()] == list(range(1, term + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.writer(parent=None).close()  # asked to start from scratch
        store.writer().close()  # that one was closed
    assert run(url, "close", at="save.begin:1")[0] == -9
    with pytest.warns(ckptstore.LostStepsWarning) as caught:
        store.writer().close()
    assert [str(one.message) for one in caught] == [
        "term 5 ended without closing, before its first checkpoint was durable: no step that it computed is in the "
        "store; training starts from scratch"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.writer().close()


def test_killed_after_the_commit_nothing_of_the_batch_is_lost(tmp_path: Path) -> None:
    url = tmp_path / "store"
    code, _ = run(url, "close", at="commit.created:2")
    assert code == -9
    all_there(url, 11)


def test_sigterm_writes_what_waits(tmp_path: Path) -> None:
    url = tmp_path / "store"
    code, durable = run(url, "SIGTERM")
    assert (code, len(durable)) == (-signal.SIGTERM, 21)
    all_there(url, LAST)
    ckptstore.open(url).writer().close()  # warns of nothing


def test_closing_writes_waiting_steps_without_a_warning(tmp_path: Path) -> None:
    url = tmp_path / "store"
    assert run(url, "close")[0] == 0
    all_there(url, LAST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptstore.open(url).writer().close()


def test_without_batches_a_kill_loses_nothing(tmp_path: Path) -> None:
    url = tmp_path / "store"
    assert run(url, "SIGKILL", batch=1) == (-9, list(range(1, LAST + 1)))
    all_there(url, LAST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptstore.open(url).writer().close()
