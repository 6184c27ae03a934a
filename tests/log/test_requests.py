"""Requests: changes with a live writer, which they never fence."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore.errors import FencedError, UsageError
from ckptstore.formats.history.record_text import encode_request
from ckptstore.formats.history.records import CheckpointId, Encoding, Request, SegmentEntry
from ckptstore.log import requests
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.log.term import Term, open_term, read
from tests.log.log_world import HASTE, World, save, scripted, segments_of


class Setting:
    """A store with a full and two deltas, and its live writer."""

    def __init__(self) -> None:
        self.world = World(every=1000)
        self.term = self.open()
        self.full = save(self.term, 1)
        self.middle = save(self.term, 2, self.full)
        self.last = save(self.term, 3, self.middle)

    def open(self) -> Term:
        return open_term(self.world.journal, None, patience=HASTE)

    def segment(self, term: int = 1) -> SegmentEntry:
        """A segment whose object exists."""
        entry = SegmentEntry(secrets.token_hex(16), term, 100, 64, "0" * 32)
        self.world.create(entry.key, bytes(100))
        return entry

    def rebuilt(self, entry: SegmentEntry, of: CheckpointId) -> Encoding:
        return Encoding(of.node, "full", None, (entry.id,), False, 100)

    def post(self, term: int = 1, **changes: Any) -> Request:
        plain = {name: value if isinstance(value, dict) else tuple(value) for name, value in changes.items()}
        return requests.post(self.world.journal, term, "a test", CatalogChange(**plain))

    def outcome(self, request: Request) -> requests.Outcome:
        return requests.wait(self.world.journal, request, timeout=0)

    def of(self, identity: CheckpointId) -> tuple[str, ...]:
        return segments_of(self.term.catalog, identity.node)


@pytest.fixture
def here() -> Setting:
    return Setting()


def test_a_compaction_is_committed_by_the_live_writer(here: Setting) -> None:
    entry = here.segment()
    old = here.of(here.last)
    request = here.post(segments=[entry], encodings=[here.rebuilt(entry, here.last)], drops=old)
    assert here.outcome(request).answer == "waiting"
    assert requests.handle(here.term) == 1
    assert here.outcome(request) == requests.Outcome("accepted")
    assert here.of(here.last) == (entry.id,)
    assert here.world.list("req/") == []
    save(here.term, 4, here.last)  # the writer continues


def test_retirement_and_tags(here: Setting) -> None:
    request = here.post(retires=[here.last.node], drops=here.of(here.last), tags={"best": here.middle.node})
    requests.handle(here.term)
    assert here.outcome(request).answer == "accepted"
    catalog = read(Journal(here.world, here.world.fmt)).catalog
    assert set(catalog.checkpoints) == {(1, 1), (1, 2)}
    assert catalog.tags == {"best": (1, 2)}


def test_changes_reserved_for_writers_are_not_requested(here: Setting) -> None:
    entry = here.term.catalog.checkpoints[here.last.node]
    for change in (
        CatalogChange(checkpoints=(entry,)),
        CatalogChange(requests={"0" * 32: None}),
        CatalogChange(extra={"closed": True}),
    ):
        with pytest.raises(UsageError, match="only a writer commits"):
            requests.post(here.world.journal, 1, "add a checkpoint", change)
    assert here.world.list("req/") == []


REFUSALS: dict[str, tuple[Callable[[Setting, SegmentEntry], dict[str, Any]], str]] = {
    "a drop that is not live": (lambda here, entry: {"drops": ["f" * 32]}, "not live"),
    "a promised checkpoint left unreachable": (lambda here, entry: {"drops": here.of(here.full)}, "leave .*@1"),
    "retired, but others build on it": (
        lambda here, entry: {"drops": here.of(here.full), "retires": [here.full.node]},
        "leave .*@1",
    ),
    "an encoding of what is not promised": (
        lambda here, entry: {"encodings": [here.rebuilt(entry, CheckpointId(1, 9, "0" * 32))]},
        "not promised",
    ),
    "a base that is gone": (
        lambda here, entry: {
            "encodings": [Encoding((1, 3), "delta", CheckpointId(1, 9, "0" * 32), (entry.id,), False, 1)]
        },
        "9@1",
    ),
    "a segment that is not there": (
        lambda here, entry: {
            "segments": [SegmentEntry("e" * 32, 1, 1, 1, "0" * 32)],
            "encodings": [Encoding((1, 3), "full", None, ("e" * 32,), False, 1)],
        },
        "not there",
    ),
    "a segment of another size": (
        lambda here, entry: {
            "segments": [SegmentEntry(entry.id, 1, 99, 1, "0" * 32)],
            "encodings": [here.rebuilt(entry, here.last)],
        },
        "100 bytes, not 99",
    ),
    "a tag on what is not promised": (lambda here, entry: {"tags": {"best": (1, 9)}}, "not promised"),
    "a retirement of what is not promised": (lambda here, entry: {"retires": [(1, 9)]}, "not promised"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_request_that_would_break_a_promise_is_refused_and_its_segments_are_dropped_by_name(
    here: Setting, case: str
) -> None:
    entry = here.segment()
    changes, message = REFUSALS[case]
    given = {"segments": [entry], "encodings": [here.rebuilt(entry, here.last)], **changes(here, entry)}
    request = here.post(**given)
    before = dict(here.term.catalog.encodings)
    assert requests.handle(here.term) == 1
    answer = here.outcome(request)
    assert answer.answer == "refused"
    assert re.search(message, answer.reason)
    assert here.term.catalog.encodings == before
    assert {segment.id for segment in request.segments} <= here.term.catalog.dropped
    assert here.world.list("req/") == []


def test_a_request_that_names_a_live_segment_as_its_own_does_not_get_it_dropped(here: Setting) -> None:
    live = here.term.catalog.segments[here.of(here.last)[0]]
    here.world.create(live.key, bytes(100))
    request = here.post(segments=[live], encodings=[here.rebuilt(live, here.last)])
    requests.handle(here.term)
    assert here.outcome(request).answer == "refused"
    assert live.id in here.term.catalog.segments


def test_a_request_to_an_older_term_is_void(here: Setting) -> None:
    entry = here.segment()
    request = here.post(segments=[entry], encodings=[here.rebuilt(entry, here.last)])
    newer = here.open()
    assert requests.handle(newer) == 0
    assert here.outcome(request).answer == "void"
    assert here.world.list("req/") == []
    with pytest.raises(FencedError):
        save(here.term, 4)


@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize("what", ["drops", "retires", "tags"])
def test_after_a_newer_term_began_only_what_is_there_was_accepted(here: Setting, what: str, handled: bool) -> None:
    old = here.of(here.last)
    entry = here.segment()
    here.post(segments=[entry], encodings=[here.rebuilt(entry, here.last)])
    requests.handle(here.term)
    changes: dict[str, Any] = {"drops": old, "retires": [here.middle.node], "tags": {"best": here.full.node}}
    request = here.post(**{what: changes[what]})
    if handled:
        assert requests.handle(here.term) == 1
    here.open()
    assert here.outcome(request).answer == ("accepted" if handled else "void")


def test_a_request_to_a_newer_term_is_left_to_it(here: Setting) -> None:
    here.open()
    here.post(term=2, tags={"best": here.last.node})
    assert requests.handle(here.term) == 0
    assert len(here.world.list("req/")) == 1


@pytest.mark.parametrize("fate", ["accepted", "refused"])
def test_a_request_is_handled_once_however_often_it_arrives(here: Setting, fate: str) -> None:
    entry = here.segment()
    drops = () if fate == "accepted" else ("f" * 32,)
    request = here.post(segments=[entry], encodings=[here.rebuilt(entry, here.last)], drops=drops)
    assert requests.handle(here.term) == 1
    assert here.outcome(request).answer == fate
    here.world.create(request.key, encode_request(request, run=here.world.fmt.run))  # a duplicated create
    slots = len(here.world.canon)
    assert requests.handle(here.term) == 0
    assert len(here.world.canon) == slots
    assert here.world.list("req/") == []


def test_a_damaged_request_is_refused(here: Setting) -> None:
    request = here.post(tags={"best": here.last.node})
    here.world.damage(request.key)
    requests.handle(here.term)
    assert here.outcome(request).answer == "refused"
    assert "checksum" in here.outcome(request).reason


def test_a_request_under_anothers_name_is_refused(here: Setting) -> None:
    request = here.post(tags={"best": here.last.node})
    other = Request("d" * 32, 1, "")
    here.world.create(other.key, here.world.get(request.key))
    here.world.delete(request.key)
    requests.handle(here.term)
    assert here.outcome(other).answer == "refused"
    assert "best" not in here.term.catalog.tags


def test_strangers_in_the_folder_are_left_alone(here: Setting) -> None:
    here.world.create("req/notes.txt", b"")
    assert requests.handle(here.term) == 0
    assert here.world.list("req/") == ["req/notes.txt"]


def test_a_fenced_writer_answers_nothing(here: Setting) -> None:
    request = here.post(tags={"best": here.last.node})
    here.open()
    with pytest.raises(FencedError):
        requests.handle(here.term)
    assert here.outcome(request).answer == "void"


def test_an_answer_of_an_earlier_term_is_found_by_its_effect(here: Setting) -> None:
    entry = here.segment()
    added = here.post(segments=[entry], encodings=[here.rebuilt(entry, here.last)])
    retired = here.post(retires=[here.full.node])
    requests.handle(here.term)
    late = here.post(tags={"best": here.last.node})
    here.open()
    assert here.outcome(added).answer == "accepted"
    assert here.outcome(retired).answer == "accepted"
    assert here.outcome(late).answer == "void"


def test_a_lost_answer_to_the_post_does_no_harm(here: Setting) -> None:
    backend = scripted(here.world, ["duplicate"], prefix="req/")
    request = requests.post(Journal(backend, here.world.fmt), 1, "twice", CatalogChange(tags={"best": here.last.node}))
    requests.handle(here.term)
    here.world.deliver(0)
    requests.handle(here.term)
    assert here.outcome(request).answer == "accepted"


def test_waiting_polls_the_log_and_gives_up_in_time(here: Setting) -> None:
    request = here.post(tags={"best": here.last.node})
    now = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def wait() -> str:
        return requests.wait(
            Journal(here.world, here.world.fmt), request, timeout=10.0, poll=0.5, clock=lambda: now[0], sleep=sleep
        ).answer

    assert wait() == "waiting"
    assert sum(slept) == pytest.approx(10.0)
    assert slept[0] < slept[4]
    requests.handle(here.term)
    assert wait() == "accepted"
