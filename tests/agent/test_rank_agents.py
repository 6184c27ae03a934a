"""Trainers of two ranks that save together, an agent each, with kills of some. Real processes, without torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
import ckptstore.agent
from ckptstore.agent import AgentWriter
from ckptstore.agent.protocol.agent_address import AgentAddress
from ckptstore.agent.protocol.rank_job import MAILBOX_ENDING, RankJob, place_name
from ckptstore.agent.server.rank_saves import RankSaves
from ckptstore.agent.server.shutdown_wait import ShutdownWait
from ckptstore.errors import (
    AgentBusyError,
    AgentLostError,
    CommitUnknownError,
    FailedRankError,
    MissingRankError,
    RankMismatchError,
    StorageError,
    UsageError,
    WriterClosedError,
)
from ckptstore.frameworks import bridge
from ckptstore.log.log_reader import Patience
from ckptstore.write.capture.snapshot import SnapshotPool
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox, ReplyDeadline, post
from ckptstore.write.ranks.messages.rank_messages import pack
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.writer_options import WriterOptions
from tests.agent.lives import ROOT, agents, kill, until
from tests.agent.rank_trainer import OPTIONS, state
from tests.forms import long_only
from tests.write.rank_threads import Clock, as_ranks


def trainer(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.agent.rank_trainer", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def killed_once_delivered(url: Path, path: Path, last: tuple[int, int], options: dict[str, Any]) -> None:
    """Two trainers pass so many steps each to their agents; then both are killed."""
    trainers = [trainer(url, path, rank, step, json.dumps(options)) for rank, step in enumerate(last)]
    for process in trainers:
        assert process.stdout is not None
        assert process.stdout.readline() == "delivered\n"
    for process in trainers:
        process.kill()
        process.communicate()


def check(url: Path, step: int) -> None:
    """Check that a step is in the store as each rank had it."""
    for rank in range(2):
        loaded = ckptstore.open(url).load(step, rank=rank)
        for name, value in state(step, rank).items():
            np.testing.assert_array_equal(loaded[name], value)


def steps(url: Path) -> list[int]:
    return [info.step for info in ckptstore.open(url).checkpoints()]


def opened(url: Path, group: Group, **options: Any) -> AgentWriter:
    return ckptstore.agent.writer(url, group=group, ranks=OPTIONS, linger_seconds=120, **options)


def continued(url: Path, group: Group, *, inherits: bool) -> int:
    """Continue with one step -> the step that was there."""
    with opened(url, group) as writer:
        first = writer.step
        assert (writer.inherited is not None) == inherits
        if first:
            found = writer.load()
            for name, value in state(first, group.rank).items():
                np.testing.assert_array_equal(found[name], value)
        writer.save(state(first + 1, group.rank), first + 1)
    return first


def test_two_ranks_save_go_back_and_name(tmp_path: Path, runtime: Path) -> None:
    url = tmp_path / "store"

    def work(group: Group) -> int:
        with opened(url, group, deltas=3, max_in_flight=2) as writer:
            for step in range(1, 5):
                writer.save_async(state(1, group.rank) | {"bias": np.full(9, step)}, step)
            writer.wait()
            assert len(agents(runtime)) == 2
            parent = writer.rollback(2)
            writer.save(state(3, group.rank), 3)
            if group.rank == 0:
                writer.tag("here")
            return parent.step

    assert as_ranks(2, work) == [2, 2]
    store = ckptstore.open(url)
    assert [info.ref for info in store.checkpoints()] == ["1@1", "2@1", "3@1", "4@1", "3@2"]
    assert store.checkpoint("4@1").kind == "delta"
    np.testing.assert_array_equal(store.load("4@1", rank=1)["bias"], np.full(9, 4))
    np.testing.assert_array_equal(store.load("4@1", rank=1)["rng"], state(1, 1)["rng"])
    assert store.checkpoint("tag:here").ref == "3@2"
    check(url, 3)
    assert agents(runtime) == []


@pytest.mark.parametrize("options", [{}, {"deltas": 3}], ids=["fulls", "deltas"])
def test_a_save_waits_until_the_one_before_is_durable_on_all_ranks(
    tmp_path: Path, runtime: Path, options: dict[str, Any]
) -> None:
    """An agent that has written its own share has nothing durable yet."""
    ahead = threading.Event()

    def work(group: Group) -> bool:
        with opened(tmp_path / "store", group, max_in_flight=1, **options) as writer:
            writer.save(state(1, group.rank), 1)
            if group.rank == 0:
                assert ahead.wait(60)
                for step in (2, 3):
                    writer.save_async(state(step, 0), step)
                return True
            first = writer.save_async(state(2, 1), 2)
            threading.Timer(0.3, ahead.set).start()
            writer.save_async(state(3, 1), 3)
            return ahead.is_set() and first.done()

    assert as_ranks(2, work) == [True, True]
    assert steps(tmp_path / "store") == [1, 2, 3]


@pytest.mark.parametrize(
    ("last", "options"),
    [((4, 3), {}), pytest.param((3, 4), {"deltas": 3}, marks=long_only), ((3, 3), {})],
    ids=["rank 1 is behind", "rank 0 is behind", "in step"],
)
def test_the_trainers_are_killed_and_what_all_ranks_had_given_is_written(
    tmp_path: Path, runtime: Path, last: tuple[int, int], options: dict[str, Any]
) -> None:
    """A step that one rank has not handed over is not a checkpoint, and delays no rank; the run continues from the step
    that all agents keep."""
    url, path = tmp_path / "store", tmp_path / "trainers"
    killed_once_delivered(url, path, last, options)
    killed = time.monotonic()
    assert len(agents(runtime)) == 2
    assert as_ranks(2, lambda group: continued(url, group, inherits=last == (3, 3))) == [3, 3]
    assert time.monotonic() - killed < OPTIONS.timeout
    assert steps(url) == [1, 2, 3, 4]
    check(url, 3)
    check(url, 4)
    assert agents(runtime) == []


@contextlib.contextmanager
def in_memory(
    tmp_path: Path, last: tuple[int, int], leaves: int | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Trainers whose agents have steps up to `last` only in memory; one trainer, if any, leaves by an exception."""
    options = [json.dumps({"memory": True, "leaves": rank == leaves}) for rank in range(2)]
    ranks = [trainer(tmp_path / "store", tmp_path / "box", rank, last[rank], options[rank]) for rank in range(2)]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "delivered\n"
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("leaves", [1, pytest.param(0, marks=long_only)])
def test_one_trainer_leaves_by_an_exception_while_the_other_sits_in_a_collective(
    tmp_path: Path, runtime: Path, leaves: int
) -> None:
    """The exception is not delayed by that, and the step of both ranks is written when the other is killed. The one
    that left was ahead."""
    url = tmp_path / "store"
    with in_memory(tmp_path, (3 + (leaves == 0), 3 + (leaves == 1)), leaves) as ranks:
        assert ranks[leaves].wait(200) == 1
        assert len(agents(runtime)) == 2, "the agent of the one that left has not waited for the other's"
        assert steps(url) == []
        ranks[1 - leaves].kill()
        until(lambda: steps(url) == [3], 200)
    check(url, 3)


def test_the_trainers_close_their_writers_one_after_the_other(tmp_path: Path, runtime: Path) -> None:
    """The last to close returns when the step of both is written; the first has not waited. Both can continue."""
    url, box = tmp_path / "store", LocalMailbox()

    def work(group: Group) -> int:
        writer = opened(url, group)
        for step in (1, 2):
            writer.hold(bridge.flattened(state(step, group.rank)), step)
        if group.rank == 0:
            assert ReplyDeadline(200).wait(lambda: box.has(["left"]))
            assert steps(url) == []
        writer.close()
        if group.rank == 0:
            assert steps(url) == [2]
        box.set("left", b"")
        return continued(url, group, inherits=False)  # rank 1, while its agent waits for rank 0's

    assert as_ranks(2, work, box) == [2, 2]
    check(url, 2)
    assert agents(runtime) == []


def test_agents_that_get_sigterm_write_the_step_that_all_have_only_in_memory(tmp_path: Path, runtime: Path) -> None:
    """As by a scheduler, which ends a whole job."""
    with in_memory(tmp_path, (4, 3)):
        for pid in agents(runtime):
            os.kill(pid, signal.SIGTERM)
        until(lambda: agents(runtime) == [], 200)
    assert steps(tmp_path / "store") == [3]
    check(tmp_path / "store", 3)


@long_only  # twenty seconds, for an agent that gets no message
@pytest.mark.parametrize("rank", [0, 1])
def test_a_single_agent_that_gets_sigterm_ends_and_names_the_lost_steps(
    tmp_path: Path, runtime: Path, rank: int
) -> None:
    def work(group: Group) -> str:
        writer = opened(tmp_path / "store", group)
        writer.hold(bridge.flattened(state(1, group.rank)), 1)
        writer.poll()  # it has arrived
        if group.rank == rank:
            os.kill(writer.agent_pid, signal.SIGTERM)
        until(lambda: agents(runtime) == [], 200)
        with pytest.raises(WriterClosedError) as caught:
            writer.save(state(2, group.rank), 2)
        writer.close()
        return str(caught.value)

    told = as_ranks(2, work)
    assert f"step 1 was only in memory, and is not written: rank {1 - rank} has not ended" in told[rank]


@long_only  # as above
def test_an_agent_that_waits_for_the_word_of_another_hears_that_it_shall_end(tmp_path: Path, runtime: Path) -> None:
    with in_memory(tmp_path, (3, 3), 1) as ranks:
        assert ranks[1].wait(200) == 1
        for pid in agents(runtime):
            command = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(command[1]) != ranks[0].pid:  # its trainer is gone
                kill(pid, signal.SIGTERM)  # within a minute, not five
        assert len(agents(runtime)) == 1


def test_the_wait_for_the_others_has_one_bound_that_is_shortened(tmp_path: Path) -> None:
    """By SIGTERM, and by a successor of the trainer; a rank that was late with the first message gets no more time for
    the second."""
    never, told = (lambda: False), threading.Event()
    parting = ShutdownWait(3600, 3600, told.is_set, after=0.1)
    threading.Timer(0.1, told.set).start()
    assert not parting.wait(never, lambda: None), "SIGTERM"
    assert not parting.wait(never, lambda: None), "its time is over"
    assert parting.wait(lambda: True, lambda: None)
    again = ShutdownWait(3600, 0.1)
    again.wanted = lambda: True
    assert not again.wait(never, lambda: None), "a successor"
    calls: list[int] = []
    short = ShutdownWait(0.2, 3600)
    short.held_up = lambda: calls.append(1)
    late = threading.Event()
    threading.Timer(0.1, late.set).start()
    short.wait(late.is_set, lambda: None)
    assert not short.wait(never, lambda: None)
    assert short.spent < 3600
    assert calls == [], "no trainer was held for long"


def test_a_refused_step_is_not_continued(tmp_path: Path, runtime: Path) -> None:
    """All ranks have kept the same step, and it is not a checkpoint: replicas differed in it."""
    url, path = tmp_path / "store", tmp_path / "trainers"
    trainers = [trainer(url, path, rank, 3, json.dumps({"apart": 3})) for rank in range(2)]
    for process in trainers:
        assert process.stdout is not None
        assert process.stdout.readline() == "delivered\n"
    for process in trainers:
        process.kill()
        process.communicate()
    assert as_ranks(2, lambda group: continued(url, group, inherits=False)) == [2, 2]
    assert steps(url) == [1, 2, 3]
    check(url, 3)


def test_an_agent_with_shards_is_not_continued_from(tmp_path: Path, runtime: Path) -> None:
    """An agent has only its own rank's rows: the store gives each rank the whole tensor."""
    url, path = tmp_path / "store", tmp_path / "trainers"
    killed_once_delivered(url, path, (3, 3), {"sharded": True})
    assert as_ranks(2, lambda group: continued(url, group, inherits=False)) == [3, 3]
    assert steps(url) == [1, 2, 3, 4]
    check(url, 3)


@long_only  # rank 0's agent waits ten seconds for rank 1's, which nobody ends
def test_a_group_of_another_size_continues_from_the_store(tmp_path: Path, runtime: Path) -> None:
    """A step that only rank 0 has kept may be no whole state."""
    url, path = tmp_path / "store", tmp_path / "trainers"
    killed_once_delivered(url, path, (3, 3), {})
    assert as_ranks(1, lambda group: continued(url, group, inherits=False)) == [3]
    assert steps(url) == [1, 2, 3, 4]


@pytest.mark.parametrize("victim", [0, 1])
def test_an_agent_dies_and_every_rank_gets_an_error(tmp_path: Path, runtime: Path, victim: int) -> None:
    """Rank 0's agent has the mailbox; the end of another one is reported to rank 0's."""
    url = tmp_path / "store"

    def work(group: Group) -> str:
        writer = opened(url, group)
        writer.save(state(1, group.rank), 1)
        group.mailbox.set(f"saved/{group.rank}", b"")
        if group.rank == victim:
            assert ReplyDeadline(60).wait(lambda: group.mailbox.has(["saved/0", "saved/1"]))
            os.kill(writer.agent_pid, signal.SIGKILL)
        told: list[str] = []
        for step in itertools.count(2):
            try:
                writer.save(state(step, group.rank), step)
            except AgentLostError as error:
                told.append(str(error))
            except WriterClosedError as error:
                told.append(str(error))
                break
        assert "open another writer on all of them" in told[-1]
        writer.close()
        return told[0]

    killed = time.monotonic()
    told = as_ranks(2, work)
    assert all("gone" in one for one in told), told
    assert time.monotonic() - killed < OPTIONS.timeout
    until(lambda: agents(runtime) == [])
    newest = steps(url)[-1]
    assert steps(url) == list(range(1, newest + 1))
    check(url, newest)


def test_a_commit_in_doubt_is_not_an_agent_that_is_gone(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both agents live, and nobody answers rank 0's slot: the trainers must learn that their writers are finished.

    Two agents run in threads here: in their own processes no medium could be made to fail.
    """
    url = str(tmp_path / "store")
    ckptstore.open(url, create=True)
    place, token = AgentAddress(url, place_name("", 0)), RankJob.new_token()
    listener = place.listen(MAILBOX_ENDING).detach()
    saved = threading.Barrier(2, timeout=60)

    def silent(key: str, _data: bytes) -> None:
        raise StorageError(110, "no answer", key)

    def work(group: Group) -> list[type[BaseException] | None]:
        rank = group.rank
        job = RankJob(rank, 2, OPTIONS, token, url, "", None if rank else listener)
        store = ckptstore.open(url)
        options = WriterOptions(poll_seconds=None)
        saves = RankSaves.opened(store, "latest", options, job, {}, lambda _: None, lambda: True)
        told = []
        with ThreadPoolExecutor(1) as copiers:
            pool = SnapshotPool(1, copiers.submit, store.backend.segment_bytes)
            for step in (1, 2, 3):
                if step == 2:
                    saved.wait()
                    medium: Any = store.backend
                    medium.create = silent
                snapshot = pool.placed(bridge.flattened(state(step, rank)), copiers)
                error = saves.adopt(snapshot, step).exception(60)
                told.append(None if error is None else type(error))
        saves.close()
        saves.leave(farewell=True)
        return told

    monkeypatch.setattr(Patience, "pause", lambda _patience, _done: None)
    assert as_ranks(2, work) == [[None, CommitUnknownError, CommitUnknownError]] * 2
    place.close()


LEAVING = """
import os, signal, sys, threading
import numpy as np
import ckptstore, ckptstore.agent
from ckptstore.frameworks import bridge
from ckptstore.host import cancellable_calls, interpreter_exit
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox

interpreter_exit.SILENT_SECONDS = 0.2
signal.signal(signal.SIGINT, signal.default_int_handler)
url, state = sys.argv[1], {"w": np.ones(9)}
press = lambda: os.kill(os.getpid(), signal.SIGINT)

if sys.argv[2] == "of a rank":
    store = ckptstore.open(url, create=True)
    writer = store.writer(group=Group(0, 1, LocalMailbox()), poll_seconds=None)
    save = lambda: writer.save_async(state, 1)
    store.backend.create = lambda *_: cancellable_calls.nap(60)  # as a server that says nothing
else:
    writer = ckptstore.agent.writer(url)
    def stopped(*_):
        os.kill(writer.agent_pid, signal.SIGSTOP)
        while open(f"/proc/{writer.agent_pid}/stat").read().rpartition(")")[2].split()[0] != "T":
            pass  # it may run a little longer on another processor, and write the step
        return ()
    save = lambda: writer.save_filled(bridge.flattened(state), 1, stopped)

def told(text, write=sys.stderr.write):
    if "Ctrl-C gives up" in text:
        threading.Timer(0.1, press).start()
    return write(text)

sys.stderr.write = told
with writer:
    save()
    press()
"""


@pytest.mark.parametrize("whose", ["of a rank", "of an agent"])
def test_a_second_ctrl_c_gives_up_what_closing_waits_for(tmp_path: Path, runtime: Path, whose: str) -> None:
    """As with a `Writer`: a message names what closing waits for, and the interpreter's end does not wait again.

    If the agent is stopped, one Ctrl-C is enough: it would not answer.
    """
    url = tmp_path / "store"
    command = [sys.executable, "-c", LEAVING, str(url), whose]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=240, check=False)
    waited = [f"ckptstore: {url}: interrupted: closing ends once step 1 is written; Ctrl-C gives up"]
    assert [line for line in done.stderr.splitlines() if line.startswith("ckptstore: ")] == [
        *(waited if whose == "of a rank" else []),
        f"ckptstore: {url}: interrupted: step 1 is perhaps not saved",
    ], done.stderr


def test_ranks_that_cannot_have_agents_begin_none(tmp_path: Path, runtime: Path) -> None:
    with pytest.raises(UsageError, match="give group="):
        ckptstore.agent.writer(tmp_path, ranks=OPTIONS)
    url = tmp_path / "store"

    def again(group: Group) -> None:
        opened(url, group).close()

    def work(group: Group) -> None:
        with opened(url, group):
            box.set(f"open/{group.rank}", b"")
            assert ReplyDeadline(60).wait(lambda: box.has(["open/0", "open/1"]))
            if group.rank == 0:
                others.extend(as_ranks(2, again))
                box.set("over", b"")
            assert ReplyDeadline(60).wait(lambda: box.has(["over"]))

    box, others = LocalMailbox(), list[Any]()
    assert as_ranks(2, work) == [None, None]
    assert [type(one) for one in others] == [AgentBusyError, AgentBusyError], others
    assert agents(runtime) == []


class Impatient(LocalMailbox):
    """Hours pass once a rank has come."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        if "/here/" in key:
            self._clock.put_forward()


def test_a_rank_gets_an_error_at_once_if_another_did_not_come(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, late = Impatient(Clock(monkeypatch)), RankOptions(timeout=600)

    def work(group: Group) -> None:
        ckptstore.agent.writer(tmp_path / "store", group=Group(group.rank, 3, box), ranks=late)

    told = as_ranks(2, work, box)
    assert isinstance(told[0], MissingRankError)
    assert isinstance(told[1], FailedRankError), told[1]
    assert "rank 2 of 3 did not join within 600 s" in str(told[1])
    assert agents(runtime) == []


class Elsewhere:
    """The mailbox as a rank on another machine would use it."""

    def __init__(self, box: LocalMailbox) -> None:
        self._box = box

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    def set(self, key: str, value: bytes) -> None:
        if "/here/" in key:
            post(self._box, key, pack(["another machine", 2, None, None]))
        else:
            self._box.set(key, value)


def test_ranks_on_several_machines_are_refused(tmp_path: Path, runtime: Path) -> None:
    box = LocalMailbox()

    def work(group: Group) -> None:
        mailbox: Any = Elsewhere(box) if group.rank else box
        opened(tmp_path / "store", Group(group.rank, 2, mailbox)).close()

    told = as_ranks(2, work, box)
    assert isinstance(told[0], RankMismatchError)
    assert isinstance(told[1], FailedRankError)
    assert "on several" in str(told[1])
    assert agents(runtime) == []


def test_ranks_of_groups_of_two_sizes_are_refused(tmp_path: Path, runtime: Path) -> None:
    """Each would wait for ranks that do not exist."""
    box = LocalMailbox()

    def work(group: Group) -> None:
        opened(tmp_path / "store", Group(group.rank, 2 + group.rank, box)).close()

    told = as_ranks(2, work, box)
    assert isinstance(told[0], RankMismatchError), told[0]
    assert str(told[0]) == "rank 1 is of a group of 3, rank 0 of one of 2"
    assert isinstance(told[1], FailedRankError), told[1]
    assert str(told[0]) in str(told[1])
    assert agents(runtime) == []
