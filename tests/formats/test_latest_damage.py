"""`latest`, a tag and a step behind damage: the answer of the intact log, or an error; never silently an older one.

Random histories as writers make them (`check_commit` refuses the others): terms that go back, commits that end out of
order, retired checkpoints, tags that move. In each, slots are damaged or lost, one or several.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ckptstore.errors import CkptError, CorruptLogError, StepOrderError, UsageError
from ckptstore.formats.history.catalog import HIGHEST, Catalog, CatalogBuilder
from ckptstore.formats.history.commit_checks import check_commit
from ckptstore.formats.history.records import (
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    Node,
    OpenRecord,
    Record,
    SegmentEntry,
)
from ckptstore.log.refs import resolve
from tests.formats.log_strategies import digest
from tests.forms import short_or


def save(term: int, *steps: int, **more: Any) -> CommitRecord:
    """A COMMIT of fulls."""
    ids = {step: digest(term << 20 | step) for step in steps}
    return CommitRecord(
        term,
        digest(term),
        segments=tuple(SegmentEntry(name, term, 1, 1, digest(1)) for name in ids.values()),
        checkpoints=tuple(CheckpointEntry(term, step, name, 0.0, 1, 1) for step, name in ids.items()),
        encodings=tuple(Encoding((term, step), "full", None, (name,), False, 1) for step, name in ids.items()),
        **more,
    )


def history(choose: random.Random, records: int) -> list[Record]:
    """A possible sequence of writers' records."""
    builder = CatalogBuilder()
    found: list[Record] = []

    def add(record: Record) -> None:
        if isinstance(record, CommitRecord):
            try:
                check_commit(builder.catalog, record)
            except (StepOrderError, UsageError):
                return
            record = builder.catalog.with_highest(record)
        builder.apply(record, len(found))
        found.append(record)

    while len(found) < records:
        catalog = builder.catalog
        promised = sorted(catalog.checkpoints.keys())
        if not catalog.term or choose.random() < 0.25:
            node = choose.choice([*promised, catalog.latest() and catalog.latest().node])  # type: ignore[union-attr]
            parent = None if node is None else catalog.checkpoints[node].id
            # A number may be skipped: there were segments of that term.
            add(OpenRecord(catalog.term + choose.choice((1, 1, 1, 2)), parent, digest(catalog.term + 1), 0.0))
        elif promised and choose.random() < 0.4:
            retired = tuple(choose.sample(promised, choose.randint(0, min(2, len(promised)))))
            name, tagged = choose.choice("ab"), choose.choice([None, *promised])
            change = CommitRecord(catalog.term, digest(catalog.term), retires=retired)
            add(change if choose.random() < 0.5 else replace(change, tags={name: tagged}))
        else:
            add(save(catalog.term, *choose.sample(range(9), choose.choice((1, 1, 2)))))
    return found


def damaged(records: list[Record], gone: set[int]) -> Catalog:
    """The catalog of a reader when those slots are damaged."""
    builder = CatalogBuilder()
    for seq, record in enumerate(records):
        if seq in gone:
            builder.mark_damaged(seq)
        else:
            builder.apply(record, seq)
    return builder.catalog


def latest(catalog: Catalog) -> Node | str | None:
    try:
        found = catalog.latest()
    except CorruptLogError:
        return "error"
    return None if found is None else found.node


def named(catalog: Catalog, ref: str) -> Node | str:
    try:
        return resolve(catalog, ref).node
    except CkptError:
        return "error"


@pytest.mark.parametrize("seed", range(short_or(30, 400)))
def test_damage_gives_the_same_answer_or_an_error(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(40):
        records = history(choose, choose.randint(3, 14))
        whole = damaged(records, set())
        ends = range(len(records))
        for gone in [{seq} for seq in ends] + [set(choose.sample(ends, choose.randint(2, 4 if len(ends) > 3 else 2)))]:
            found = damaged(records, gone)
            assert latest(found) in (latest(whole), "error"), (records, gone)
            for tag in "ab":
                assert named(found, f"tag:{tag}") in (named(whole, f"tag:{tag}"), "error"), (records, gone, tag)
            for step in range(9):
                kept, right = named(found, str(step)), named(whole, str(step))
                # A checkpoint that a lost record retired may still be there: of that step it is the newest that ever
                # was.
                newer = isinstance(kept, tuple) and (not isinstance(right, tuple) or kept > right)
                assert kept in (right, "error") or newer, (records, gone, step)


def test_the_histories_have_all_kinds() -> None:
    """Otherwise the property would prove little: errors and answers, out of order, back, and behind damage."""
    choose, seen = random.Random(0), dict.fromkeys(("error", "same", "settled", "out of order", "back"), 0)
    for _ in range(600):
        records = history(choose, 10)
        gone = {choose.randrange(10)}
        found = latest(damaged(records, gone))
        whole = damaged(records, set())
        seen["error" if found == "error" else "same"] += 1
        seen["settled"] += found != "error" and min(gone) < 9
        seen["out of order"] += any(isinstance(one, CommitRecord) and HIGHEST in one.extra for one in records)
        seen["back"] += isinstance(node := latest(whole), tuple) and node[0] != whole.term
    assert min(seen.values()) > 50, seen


class TestByHand:
    def opened(self, term: int, parent: Node | None = None) -> OpenRecord:
        identity = None if parent is None else CheckpointId(*parent, digest(parent[0] << 20 | parent[1]))
        return OpenRecord(term, identity, digest(term), 0.0)

    def test_a_retired_parent_and_damage_before_the_newest_open(self) -> None:
        """The lost record promised the checkpoints between: the older step does not pass for the newest."""
        retires = CommitRecord(2, digest(2), retires=((1, 3),))
        records = [self.opened(1), save(1, 1), save(1, 2), save(1, 3), self.opened(2, (1, 3)), retires]
        assert latest(damaged(records, set())) == (1, 2)
        assert latest(damaged(records, {2})) == "error"
        assert latest(damaged(records, {1})) == "error"  # it may have held a step above 2
        assert latest(damaged(records[:-1], {2})) == (1, 3)  # named by an intact OPEN

    def test_a_damaged_slot_before_the_open_of_the_term_that_was_searched_does_not_matter(self) -> None:
        records = [self.opened(1), save(1, 1), self.opened(2, (1, 1)), save(2, 2), save(2, 3), self.opened(3, (2, 3))]
        records.append(CommitRecord(3, digest(3), retires=((2, 3),)))
        assert latest(damaged(records, {0})) == (2, 2)
        assert latest(damaged(records, {3})) == "error"
        assert latest(damaged(records, {2})) == "error"

    @pytest.mark.parametrize("later", [True, False])
    def test_a_commit_that_was_overtaken_does_not_settle_damage(self, later: bool) -> None:
        """20 was committed after 30, whose slot is lost."""
        overtaken = damaged([self.opened(1), save(1, 10), save(1, 30)], set()).with_highest(save(1, 20))
        assert overtaken.extra == {HIGHEST: 30}
        records = [self.opened(1), save(1, 10), save(1, 30), overtaken, *([save(1, 40)] if later else [])]
        assert latest(damaged(records, {2})) == ((1, 40) if later else "error")
        assert latest(damaged(records, {1})) == ((1, 40) if later else (1, 30))

    def test_a_term_of_which_nothing_is_left_may_have_had_the_step(self) -> None:
        records = [self.opened(1), save(1, 5), self.opened(2), save(2, 5), self.opened(3)]
        assert named(damaged(records, set()), "5") == (2, 5)
        assert named(damaged(records, {2, 3}), "5") == "error"
