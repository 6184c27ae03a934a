"""Tags and retirement of any live checkpoint: with a live writer, a dead one, one that is fenced meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, RestoreBound, Retired
from ckptstore.log import change_committer, requests
from tests.store.states import same
from tests.write.trainer import Trainer

CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(70_000, 1 + step * 1e-4, np.float32), "step": step}


def fill(store: ckptstore.Store, *steps: int, parent: Any = "latest", **options: Any) -> ckptstore.Store:
    with store.writer(parent=parent, poll_seconds=None, **options) as writer:
        for step in steps:
            writer.save(state(step), step)
    return store


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    """Term 1: steps 1 to 4; term 2 continues from 2@1: steps 3 to 5. Fulls."""
    store = fill(ckptstore.open(tmp_path / "store"), 1, 2, 3, 4)
    return fill(store, 3, 4, 5, parent="2@1")


@pytest.fixture
def alive(store: ckptstore.Store) -> Iterator[ckptstore.Writer]:
    """A writer of term 3 that answers soon."""
    with store.writer(poll_seconds=0.02) as writer:
        yield writer


def refs(store: ckptstore.Store) -> list[str]:
    return [info.ref for info in store.checkpoints()]


def check(store: ckptstore.Store, *expected: str) -> None:
    """Exactly these are promised, each restores, gc deletes nothing needed, and every byte is right."""
    store.gc()
    assert refs(store) == list(expected)
    for ref in expected:
        same(state(int(ref.partition("@")[0])), store.load(ref, framework="numpy"))
    assert store.verify(deep=True).ok


class TestBesideALiveWriter:
    def test_a_tag_of_any_term_and_it_moves_and_goes(self, store: ckptstore.Store, alive: ckptstore.Writer) -> None:
        info = store.tag("best", "3@1")
        assert (info.ref, info.tags) == ("3@1", ("best",))
        assert store.tag("also", np.int64(3)).ref == "3@2"
        assert store.tag("newest").ref == "5@2"
        assert store.tag("again", "tag:best").ref == "3@1"
        assert store.tag("best", "latest").tags == ("best", "newest")
        assert {name: info.ref for name, info in store.tags().items()} == {
            "again": "3@1",
            "also": "3@2",
            "best": "5@2",
            "newest": "5@2",
        }
        store.untag("best")
        with pytest.raises(ckptstore.CheckpointNotFoundError, match="no tag 'best'; the tags are again, also, newest"):
            store.untag("best")
        assert alive.save(state(6), 6).ref == "6@3"  # nobody was fenced

    def test_retired_is_what_nothing_needs(self, store: ckptstore.Store, alive: ckptstore.Writer) -> None:
        before = {info.ref: info for info in store.checkpoints()}
        planned = store.retire("3@1", 4, dry_run=True)
        assert refs(store) == list(before)
        done = store.retire("3@1", 4)
        assert done == planned
        keys = tuple(f"seg/{before[ref].term:010d}/{before[ref].segments[0]}.safetensors" for ref in ("3@1", "4@2"))
        assert done == Retired(("3@1", "4@2"), (), keys, sum(before[ref].stored for ref in ("3@1", "4@2")))
        check(store, "1@1", "2@1", "4@1", "3@2", "5@2")
        store.retire(2)  # term 2 continues from it
        assert alive.save(state(6), 6).ref == "6@3"
        check(store, "1@1", "4@1", "3@2", "5@2", "6@3")

    def test_a_change_without_effect_makes_no_request(self, store: ckptstore.Store, alive: ckptstore.Writer) -> None:
        store.tag("best", "3@1")
        slots = len(store.backend.list("log/"))
        assert store.tag("best", "3@1").tags == ("best",)
        assert len(store.backend.list("log/")) == slots

    def test_the_writer_may_refuse(
        self, store: ckptstore.Store, alive: ckptstore.Writer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between our READ and its answer the checkpoint got a tag."""
        post = requests.post

        def late(*arguments: Any, **changes: Any) -> Any:
            alive.tag("mine", "4@1")
            return post(*arguments, **changes)

        monkeypatch.setattr(requests, "post", late)
        with pytest.raises(
            ckptstore.RequestRefusedError, match=r"term 3 refused to retire 4@1: .* tag 'mine' names it"
        ):
            store.retire("4@1")
        assert "4@1" in refs(store)

    def test_retired_meanwhile(
        self, store: ckptstore.Store, alive: ckptstore.Writer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        post = requests.post

        def late(journal: Any, term: int, what: str, change: Any) -> Any:
            monkeypatch.setattr(requests, "post", post)
            store.retire("4@1")
            return post(journal, term, what, change)

        monkeypatch.setattr(requests, "post", late)
        with pytest.raises(ckptstore.RequestRefusedError, match=r"refused to tag 4@1 as 'best': .* is not promised"):
            store.tag("best", "4@1")

    def test_a_process_of_its_own(self, store: ckptstore.Store, alive: ckptstore.Writer) -> None:
        code = "import sys, ckptstore; store = ckptstore.open(sys.argv[1]); store.tag('best', '3@1'); store.retire(3)"
        done = subprocess.run([sys.executable, "-c", code, store.url], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        check(store, "1@1", "2@1", "3@1", "4@1", "4@2", "5@2")
        assert store.checkpoint("tag:best").ref == "3@1"


WRITES = """
import os, sys, ckptstore
writer = ckptstore.open(sys.argv[1]).writer(poll_seconds=0.02)
writer.save({"lr": 0.5}, 6)
print("saved", flush=True)
sys.stdin.readline()
os._exit(9)
"""


def test_a_writer_in_another_process_and_its_death(store: ckptstore.Store) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", WRITES, store.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    with other, other.stdin, other.stdout:
        assert other.stdout.readline() == "saved\n"
        assert store.tag("best", "3@1").ref == "3@1"
        assert store.retire("4@1").retired == ("4@1",)
        other.stdin.write("end\n")
        other.stdin.flush()
        assert other.wait() == 9
    with pytest.raises(ckptstore.RequestTimeoutError, match=rf"no writer is active \(process {other.pid} on this"):
        store.untag("best")  # does not wait
    assert store.backend.list("req/") == []
    store.untag("best", take_over=True)
    assert store.tags() == {}
    assert refs(store) == ["1@1", "2@1", "3@1", "3@2", "4@2", "5@2", "6@3"]


class TestRules:
    def test_checkpoints_that_stay(self, store: ckptstore.Store) -> None:
        fill_tag(store, "best", "4@1")
        for ref, why in (("latest", "5@2 is the latest"), (5, "is the latest"), ("4@1", "tag 'best' names it")):
            for dry_run in (True, False):
                with pytest.raises(ckptstore.UsageError, match=why):
                    store.retire(1, ref, dry_run=dry_run, timeout=0)
        with pytest.raises(ckptstore.UsageError, match="nothing to retire"):
            store.retire()
        for method in (store.retire, lambda ref, **how: store.tag("x", ref, **how)):
            with pytest.raises(ckptstore.CheckpointNotFoundError, match="no checkpoint of step 9"):
                method(9, timeout=0)  # type: ignore[operator]
        for method in (store.tag, store.untag):
            with pytest.raises(ckptstore.UsageError, match="'no tag' is not a tag name"):
                method("no tag", timeout=0)  # type: ignore[arg-type]
        with pytest.raises(ckptstore.StoreNotFoundError):
            ckptstore.open("memory://none", create=None).tag("best", 1)

    def test_bases_of_others_stay_stored(self, tmp_path: Path) -> None:
        store = fill(ckptstore.open(tmp_path / "chain"), 1, 2, 3, 4, deltas=CHAIN)
        assert [info.base for info in store.checkpoints()] == [None, "1@1", "2@1", "3@1"]
        fill(store, 5, parent=None)
        done = store.retire("2@1", "3@1", take_over=True)
        assert (done.retired, done.kept, done.dropped) == (("2@1", "3@1"), ("2@1", "3@1"), ())
        check(store, "1@1", "4@1", "5@2")
        # When the last checkpoint that builds on them goes, so do its bases.
        rest = store.retire("4@1", take_over=True)
        assert (rest.kept, len(rest.dropped)) == ((), 3)
        check(store, "1@1", "5@2")

    def test_steps_of_one_segment(self, tmp_path: Path) -> None:
        trainer, truth = Trainer(), {}
        store = ckptstore.open(tmp_path / "steps")
        with store.writer(diffs=DiffOptions(batch=4, seconds=None), poll_seconds=0.02) as writer:
            for step in range(1, 10):
                trainer.train()
                truth[step] = trainer.frozen()
                writer.save_async(trainer.state(), step, updates=trainer.updates())
            writer.wait()
            done = store.retire(2, 3, 4)
            assert done.kept == ("2@1", "3@1", "4@1")
            assert done.dropped == ()
            assert store.retire(8).kept == ("8@1",)
            trainer.train()
            truth[10] = trainer.frozen()
            writer.save(trainer.state(), 10, updates=trainer.updates())
        store.gc()
        assert [info.step for info in store.checkpoints()] == [1, 5, 6, 7, 9, 10]
        for info in store.checkpoints():
            same(truth[info.step], store.load(info.step))
        assert store.verify(deep=True).ok

    def test_read_only(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store.backend, "read_only", True)
        with pytest.raises(ckptstore.ReadOnlyError, match="nothing can be changed"):
            store.tag("best", 1)
        assert store.retire(1, dry_run=True).retired == ("1@1",)


def fill_tag(store: ckptstore.Store, name: str, ref: str) -> None:
    store.tag(name, ref, take_over=True)


class TestWithoutAWriter:
    def test_nobody_answers(self, store: ckptstore.Store) -> None:
        before, silent = refs(store), store.writer(poll_seconds=None)
        for call in (
            lambda: store.tag("best", 3, timeout=0.01),
            lambda: store.retire(3, timeout=0.01),
        ):
            why = r"term 3 \(host .*, pid \d+\) did not answer .* in 0.01 s.* void.*take_over=True \(--take-over"
            with pytest.raises(ckptstore.RequestTimeoutError, match=why) as caught:
                call()
            assert isinstance(caught.value, TimeoutError)
        assert refs(store) == before
        silent.close()
        assert store.tags() == {}
        with store.writer() as writer:  # a newer term: the requests to the old one are void
            assert writer.save(state(6), 6).ref == "6@4"
        assert refs(store) == [*before, "6@4"]
        assert store.tags() == {}
        assert store.backend.list("req/") == []

    def test_it_may_still_be_accepted(self, store: ckptstore.Store) -> None:
        writer = store.writer(poll_seconds=None)
        with pytest.raises(ckptstore.RequestTimeoutError):
            store.tag("best", 3, timeout=0.01)
        writer.save(state(6), 6)  # looks for requests
        writer.close()
        assert store.checkpoint("tag:best").ref == "3@2"

    def test_taking_over(self, store: ckptstore.Store) -> None:
        writer = store.writer(poll_seconds=None)
        assert store.tag("best", "3@1", take_over=True).tags == ("best",)
        with pytest.raises(ckptstore.FencedError):
            writer.save(state(6), 6)
        assert [term.term for term in store.terms()] == [1, 2, 3, 4]
        assert store.terms()[-1].extra["for"] == "tag"
        store.retire("4@1", take_over=True)
        store.untag("best", take_over=True)
        check(store, "1@1", "2@1", "3@1", "3@2", "4@2", "5@2")
        assert store.latest_step() == 5

    def test_a_mistake_fences_nobody(self, store: ckptstore.Store) -> None:
        for call in (lambda: store.tag("x", 9, take_over=True), lambda: store.retire("latest", take_over=True)):
            with pytest.raises((ckptstore.CheckpointNotFoundError, ckptstore.UsageError)):
                call()
        assert len(store.terms()) == 2


class TestANewerTerm:
    def test_the_request_is_made_again(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """The writer that got the request is fenced before it answers; the next one gets it."""
        old = store.writer(poll_seconds=None)
        post, new = requests.post, []

        def fenced(*arguments: Any, **changes: Any) -> Any:
            request = post(*arguments, **changes)
            if not new:
                new.append(store.writer(poll_seconds=0.02))
            return request

        monkeypatch.setattr(requests, "post", fenced)
        assert store.tag("best", "3@1").tags == ("best",)
        new[0].close()
        with pytest.raises(ckptstore.FencedError):
            old.save(state(6), 6)

    def test_again_and_again(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        post, writers = requests.post, [store.writer(poll_seconds=None)]

        def fenced(*arguments: Any, **changes: Any) -> Any:
            request = post(*arguments, **changes)
            writers.append(store.writer(poll_seconds=None))  # and still writes: a closed one would get no request
            return request

        monkeypatch.setattr(requests, "post", fenced)
        with pytest.raises(ckptstore.RequestError, match="3 times a newer term began before the request to retire 1@1"):
            store.retire(1)
        assert "1@1" in refs(store)
        for writer in writers:
            writer.close()

    def test_two_take_over_at_once(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        class Late(change_committer.TakeOver):
            def commit(self, term: int, what: str, changes: Any) -> Any:
                store.writer(poll_seconds=None).close()
                return super().commit(term, what, changes)

        monkeypatch.setattr("ckptstore.maintenance.catalog_changes.TakeOver", Late)
        with pytest.raises(ckptstore.FencedError):
            store.tag("best", 3, take_over=True)
        assert store.tags() == {}


class TestTheWritersOwn:
    def test_any_live_checkpoint(self, store: ckptstore.Store) -> None:
        with store.writer(poll_seconds=None) as writer:
            assert writer.tag("old", "3@1").tags == ("old",)
            assert writer.tag("start").ref == "5@2"  # latest: nothing is saved yet
            info = writer.save(state(6), 6)
            assert writer.tag("mine", info).ref == "6@3"
            assert writer.tag("mine", np.uint8(4)).ref == "4@2"
            assert writer.tag("copy", "tag:old").tags == ("copy", "old")
            writer.untag("copy")
            for call in (lambda: writer.untag("copy"), lambda: writer.tag("x", "9@1")):
                with pytest.raises(ckptstore.CheckpointNotFoundError):
                    call()
            with pytest.raises(ckptstore.UsageError, match="is not a tag name"):
                writer.tag("no tag", 3)
        assert {name: info.ref for name, info in store.tags().items()} == {"old": "3@1", "start": "5@2", "mine": "4@2"}

    @pytest.mark.parametrize("ref", ["latest", 4, "4", "4@1", "04", "tag:here"])
    def test_a_waiting_step_is_written_if_it_is_named(self, tmp_path: Path, ref: str | int) -> None:
        trainer, store = Trainer(), ckptstore.open(tmp_path / "store")
        with store.writer(diffs=DiffOptions(batch=100, seconds=None), poll_seconds=None) as writer:
            for step in range(1, 5):
                trainer.train()
                writer.save_async(trainer.state(), step, updates=trainer.updates(), tags="here" if step == 4 else ())
            writer.tag("one", 1)
            assert refs(store) == ["1@1"]
            assert writer.tag("four", ref).ref == "4@1"
            assert refs(store) == ["1@1", "2@1", "3@1", "4@1"]
            writer.untag("here")
        assert set(store.tags()) == {"one", "four"}

    def test_from_another_thread(self) -> None:
        store = fill(ckptstore.open(f"memory://{uuid.uuid4().hex}"), 1)
        with store.writer(poll_seconds=0.02) as writer:
            names = [f"n{number}" for number in range(8)]
            threads = [threading.Thread(target=store.tag, args=(name, 1)) for name in names]
            for thread in threads:
                thread.start()
            for step in range(2, 6):
                writer.save(state(step), step)
            for thread in threads:
                thread.join()
        assert sorted(store.tags()) == names
