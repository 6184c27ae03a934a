"""The retention rules: their meaning, and that judging save by save gives the same result as judging everything."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.cli.commands import keep
from ckptstore.errors import FormatError, UsageError
from ckptstore.formats.history import retention_rules
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.commit_checks import check_commit
from ckptstore.formats.history.folds import decode_fold, encode_fold
from ckptstore.formats.history.record_text import decode_record, decode_request, encode_commit, encode_request
from ckptstore.formats.history.records import (
    CheckpointEntry,
    CommitRecord,
    Encoding,
    Node,
    OpenRecord,
    Request,
    SegmentEntry,
)
from ckptstore.formats.history.retention_rules import RetentionTracker, checked, known, reasons_of
from ckptstore.formats.history.rule_rankings import metric
from ckptstore.formats.history.rule_windows import RULES, ends

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "last:3": "newer",
    "every:10": "never",
    "best:loss:1": "better",
    "newer-than:4s": "newer",
    "tagged": "never",
    "branches": "never",
}
"""A rule of each kind -> what ends it. Each of them is tried below."""
RUN = "5" * 32
NONCE = "6" * 32


def entry(term: int, step: int, time: float = 0.0, **metadata: Any) -> CheckpointEntry:
    extra = {"metadata": metadata} if metadata else {}
    return CheckpointEntry(term, step, f"{term * 1000 + step:032x}", time, 1, 10, extra)


def promise(*entries: CheckpointEntry, **more: Any) -> CommitRecord:
    """A COMMIT that promises fulls."""
    segments = tuple(SegmentEntry(f"{one.term:016x}{one.step:016x}", one.term, 9, 8, "7" * 32) for one in entries)
    encodings = tuple(
        Encoding(one.node, "full", None, (segment.id,), False, 9)
        for one, segment in zip(entries, segments, strict=True)
    )
    return CommitRecord(entries[0].term, NONCE, segments, entries, encodings, **more)


def catalog_of(*entries: CheckpointEntry, parents: dict[int, CheckpointEntry] | None = None) -> Catalog:
    """Terms in order, each with its checkpoints; `parents`: the parent of a term."""
    builder = CatalogBuilder()
    for term in sorted({one.term for one in entries}):
        parent = (parents or {}).get(term)
        builder.apply(OpenRecord(term, parent and parent.id, NONCE, 0.0), builder.catalog.next_seq)
        builder.apply(promise(*(one for one in entries if one.term == term)), builder.catalog.next_seq)
    return builder.catalog


def kept(catalog: Catalog, *rules: str) -> dict[str, list[int]]:
    """Rule -> steps; ``gone``: those that no rule keeps."""
    reasons, gone = reasons_of(catalog, checked(rules))
    return {reason: [step for _, step in nodes] for reason, nodes in reasons.items()} | {
        "gone": [step for _, step in gone]
    }


class TestRules:
    @pytest.mark.parametrize(
        "rule",
        ["last:1", "every:1000", "best:loss:5", "best:a:b:5", "best:accuracy:2:max", "best:loss:1:min", "tagged",
         "branches", "newer-than:7d", "newer-than:90m", "newer-than:1.5h", "newer-than:0s", "newer-than:2w"],
    )  # fmt: skip
    def test_valid_rules(self, rule: str) -> None:
        assert checked([f" {rule} ", rule]) == (rule,)
        assert known([rule])

    @pytest.mark.parametrize(
        "rule",
        ["", "last", "last:", "last:0", "last:-1", "last:1.5", "last:1 0", "last:٣", "every:0", "best:loss",
         "best::5", "best:loss:0", "best:loss:5:up", "worst:loss:5", "newer-than:7", "newer-than:d", "newer-than:-1d",
         "newest:3", "last:99999999999999999999", "Last:3", "tagged:x", "best:" + "x" * 300 + ":1", 7, None],
        ids=lambda rule: str(rule)[:20] or "empty",
    )  # fmt: skip
    def test_invalid_rules(self, rule: Any) -> None:
        with pytest.raises(UsageError, match=r"is not a retention rule; the rules are .*last:N, every:N"):
            checked(["last:1", rule])
        if isinstance(rule, str):
            assert not known(["last:1", rule])

    def test_a_text_is_not_several_rules_and_there_are_not_endlessly_many(self) -> None:
        with pytest.raises(UsageError, match="list of strings"):
            checked("last:1")
        assert len(checked(f"last:{n + 1}" for n in range(retention_rules.MAX_RULES))) == retention_rules.MAX_RULES
        with pytest.raises(UsageError, match="65 retention rules"):
            checked(f"last:{n + 1}" for n in range(retention_rules.MAX_RULES + 1))

    def test_a_metric_is_a_number_of_the_metadata_or_of_its_metrics(self) -> None:
        assert metric(entry(1, 1, loss=2), "loss") == 2.0
        assert metric(entry(1, 1, metrics={"loss": 3.5}), "loss") == 3.5
        assert metric(entry(1, 1, loss=1.0, metrics={"loss": 3.5}), "loss") == 1.0
        assert metric(entry(1, 1, loss={"$float": "inf"}), "loss") == math.inf
        assert metric(entry(1, 1, loss=-(10**400)), "loss") == -math.inf
        for said in ({"loss": True}, {"loss": "1"}, {"loss": None}, {"loss": {"$float": "nan"}}, {"metrics": 1}, {}):
            assert metric(entry(1, 1, **said), "loss") is None


class TestWhatTheyKeep:
    def test_each_rule_and_their_union(self) -> None:
        losses = {1: 9.0, 2: 1.0, 3: 8.0, 4: 1.0, 5: math.nan, 6: 5.0, 7: 7.0}
        catalog = catalog_of(*(entry(1, step, 100.0 * step, loss=loss) for step, loss in losses.items()))
        found = kept(catalog, "last:2", "every:3", "best:loss:2", "best:loss:1:max", "newer-than:250s")
        assert found == {
            "newest": [7],
            "tagged": [],
            "last:2": [6, 7],
            "every:3": [3, 6],
            "best:loss:2": [2, 4],
            "best:loss:1:max": [1],
            "newer-than:250s": [5, 6, 7],
            "gone": [],
        }
        assert kept(catalog, "best:loss:1")["best:loss:1"] == [4]  # of equals the newer
        # A metric that no checkpoint has: none is retired for the lack of it.
        assert kept(catalog, "best:other:3")["gone"] == []
        assert kept(catalog, "tagged")["gone"] == [1, 2, 3, 4, 5, 6]

    def test_tags_keep_whatever_the_rules_say(self) -> None:
        catalog = catalog_of(*(entry(1, step) for step in range(1, 6)))
        catalog = catalog.apply(CommitRecord(1, NONCE, tags={"a": (1, 2), "b": (1, 2)}), catalog.next_seq)
        assert kept(catalog, "last:1") == {"newest": [5], "tagged": [2], "last:1": [5], "gone": [1, 3, 4]}
        # Expressed as a rule it is the same: tags keep the checkpoints that they name.
        assert kept(catalog, "tagged") == {"newest": [5], "tagged": [2], "gone": [1, 3, 4]}

    def test_ages_count_back_from_the_newest_and_no_clock_is_asked(self) -> None:
        catalog = catalog_of(*(entry(1, step, 10.0 * step) for step in range(1, 6)))  # in 1970
        assert kept(catalog, "newer-than:20s")["newer-than:20s"] == [3, 4, 5]

    def test_ranks_are_those_of_the_line_and_branches_are_judged_one_by_one(self) -> None:
        """1 to 6 in term 1; term 2 went back to 3 and made 4 and 5; term 3 continues from there."""
        first = [entry(1, step, loss=-step) for step in range(1, 7)]
        second = [entry(2, step, loss=step) for step in (4, 5)]
        catalog = catalog_of(*first, *second, entry(3, 6, loss=0), parents={2: first[2], 3: second[1]})
        reasons, gone = reasons_of(catalog, ("last:4", "best:loss:1"))
        assert reasons["last:4"] == [(1, 3), (2, 4), (2, 5), (3, 6)]
        assert reasons["best:loss:1"] == [(1, 3)]
        assert gone == [(1, 1), (1, 2), (1, 4), (1, 5), (1, 6)]
        reasons, gone = reasons_of(catalog, ("last:1", "branches", "every:2"))
        assert reasons["branches"] == [(1, 4), (1, 5), (1, 6)]
        assert reasons["every:2"] == [(1, 2), (1, 4), (1, 6), (2, 4), (3, 6)]
        assert gone == [(1, 1), (1, 3), (2, 5)]

    def test_an_empty_term_stands_on_its_parent(self) -> None:
        first = [entry(1, step) for step in range(1, 5)]
        catalog = catalog_of(*first)
        catalog = catalog.apply(OpenRecord(2, first[1].id, NONCE, 0.0), catalog.next_seq)
        assert kept(catalog, "last:1") == {"newest": [2], "tagged": [], "last:1": [2], "gone": [1, 3, 4]}


# ------------------------------------------------------------------------------------------------ save by save


def test_a_metric_that_comes_late_ranks_from_then_on() -> None:
    entries = [entry(1, 1, 1.0), entry(1, 2, 2.0), entry(1, 3, 3.0, loss=5.0), entry(1, 4, 4.0, loss=6.0)]
    keeping = RetentionTracker(["best:loss:1"], catalog_of(entries[0]))
    gone = [keeping.superfluous(catalog_of(entries[0]))]
    for count in (2, 3, 4):
        keeping.add(entries[count - 1])
        gone.append(keeping.superfluous(catalog_of(*entries[:count])))
    assert gone == [[], [], [(1, 1), (1, 2)], [(1, 1), (1, 2)]]  # named again until they are retired
    assert keeping.reasons(entries[2]) == ["best:loss:1"]


def test_branches_stay_while_the_line_continues() -> None:
    first = [entry(1, step) for step in range(1, 7)]
    catalog = catalog_of(*first, entry(2, 4), parents={2: first[2]})
    keeping = RetentionTracker(["last:1", "branches"], catalog)
    keeping.add(entry(2, 5))
    assert keeping.superfluous(catalog) == [(1, 1), (1, 2), (1, 3), (2, 4)]
    assert [keeping.reasons(one) for one in first[2:]] == [[], *[["branches"]] * 3]


def test_a_partial_judgement_has_a_partial_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that gets rules late retires the surplus bit by bit: the total cost is not quadratic."""
    catalog = catalog_of(*(entry(1, step) for step in range(1, 3001)))
    looked_at: list[Node] = []
    reasons = RetentionTracker.reasons

    def counted(self: RetentionTracker, one: CheckpointEntry) -> list[str]:
        looked_at.append(one.node)
        return reasons(self, one)

    monkeypatch.setattr(RetentionTracker, "reasons", counted)
    follower = RetentionTracker(("last:10", "every:100"), catalog)
    gone: list[Node] = []
    while found := follower.superfluous(catalog, most=100):
        gone += found
        catalog = catalog.apply(CommitRecord(1, NONCE, retires=tuple(found)), catalog.next_seq)
    assert gone == [(1, step) for step in range(1, 2991) if step % 100]
    assert len(looked_at) <= len(gone) + 100


def test_the_index_of_readers_forgets_dropped_segments() -> None:
    """A run that retires has a catalog that stays small however long it runs, and so does its index."""
    builder = CatalogBuilder(catalog_of(entry(1, 1)))
    catalog = builder.catalog
    for step in range(2, 40):
        one, base = entry(1, step), catalog.checkpoints[1, step - 1]
        segment = SegmentEntry(f"{step:032x}", 1, 9, 8, "7" * 32)
        both = (
            Encoding(one.node, "delta", base.id, (segment.id,), False, 9),
            Encoding(one.node, "full", None, (f"{step + 1000:032x}",), False, 9),
        )
        other = SegmentEntry(f"{step + 1000:032x}", 1, 9, 8, "7" * 32)
        builder.apply(CommitRecord(1, NONCE, (segment, other), (one,), both), catalog.next_seq)
        index = catalog.edges()
        assert index.users(segment.id) == {one.node}
        assert index.dependents(base.node) == {one.node}
        builder.apply(CommitRecord(1, NONCE, drops=(segment.id,)), catalog.next_seq)
        assert index.users(segment.id) == set()
        assert index.dependents(base.node) == set()
        assert index.users(other.id) == {one.node}  # its other encoding exists


def by_hand(
    entries: Iterable[CheckpointEntry], tagged: set[Node], last: int, every: int, best: int, age: float
) -> set[Node]:
    """The kept steps of one term by the rules below, computed in the plainest way."""
    alive = sorted(entries, key=lambda one: one.step)
    newest = alive[-1]
    rated = sorted(alive, key=lambda one: (one.extra["metadata"]["loss"], -one.step))
    found = {one.node for one in (*alive[-last:], *rated[:best], newest)} | tagged
    return found | {one.node for one in alive if one.step % every == 0 or one.time >= newest.time - age}


@pytest.mark.parametrize("seed", range(30))
def test_only_the_promised_checkpoints_are_left(seed: int) -> None:
    """Saves in and out of order, tags that come, move and go; checkpoints are retired as they become surplus."""
    chance = random.Random(seed)
    last, every, best, age = chance.randint(1, 5), chance.randint(2, 9), chance.randint(1, 4), chance.choice([0, 3, 20])
    rules = (f"last:{last}", f"every:{every}", f"best:loss:{best}", f"newer-than:{age}s")
    if seed % 3 == 0:
        last, age, rules = 1, -100, rules[1:3]  # the newest is kept only for being the newest
    catalog = Catalog().apply(OpenRecord(1, None, NONCE, 0.0), 0)
    follower = RetentionTracker(rules, catalog)
    ever: dict[Node, CheckpointEntry] = {}
    steps = list(range(1, 61))
    for place in range(0, 58, 3):
        if chance.random() < 0.3:
            steps[place], steps[place + 1] = steps[place + 1], steps[place]
    tags: dict[str, Node] = {}
    for number, step in enumerate(steps):
        one = entry(1, step, time=chance.choice([number, number, number - 2]), loss=chance.randint(0, 30))
        change: dict[str, Node | None] = {}
        if chance.random() < 0.15:
            change["a"] = chance.choice(list(catalog.checkpoints) or [None])
        if chance.random() < 0.1:
            change["b"] = one.node
        tags = {name: node for name, node in {**tags, **change}.items() if node is not None}
        follower.add(one)
        gone = [node for node in follower.superfluous(catalog, change) if node in catalog.checkpoints]
        record = promise(one, tags=change, retires=tuple(gone))
        check_commit(catalog, record)
        catalog = catalog.apply(record, catalog.next_seq)
        ever[one.node] = one
        late = follower.superfluous(catalog)  # a checkpoint that was committed out of order may be surplus at once
        catalog = catalog.apply(CommitRecord(1, NONCE, retires=tuple(late)), catalog.next_seq)
        assert reasons_of(catalog, rules)[1] == []
    assert set(tags.values()) <= set(catalog.checkpoints)
    alive = by_hand(ever.values(), set(tags.values()), last, every, best, age)
    # A removed tag leaves a checkpoint that a rule may have kept, if it had been applied earlier: never more.
    assert {one for one in alive if one in catalog.checkpoints} == set(catalog.checkpoints)
    if age <= 0:  # times that go back, and then forward, may retire a checkpoint that the last look would keep
        assert set(catalog.checkpoints) == alive


# ------------------------------------------------------------------------------------------------ as bytes


def test_rules_in_a_commit_a_request_and_a_fold() -> None:
    catalog = catalog_of(entry(1, 1))
    for rules in (("last:3", "best:loss:2"), ()):  # an empty list is not the same as no list
        record = CommitRecord(1, NONCE, keep=rules)
        data, manifest = encode_commit(record, seq=2, run=RUN, manifest="8" * 32)
        assert manifest is None
        read = decode_record(data, seq=2, run=RUN, what="slot")
        assert read == record
        catalog = catalog.apply(read, 2)
        assert (catalog.keep, catalog.keep_seq) == (rules, 2)
        silent, _ = encode_commit(CommitRecord(1, NONCE, drops=("9" * 32,)), seq=3, run=RUN, manifest="8" * 32)
        later = catalog.apply(decode_record(silent, seq=3, run=RUN, what="slot"), 3)
        assert later.keep == rules
        folded, digest = encode_fold(later, run=RUN)
        again = decode_fold(folded, seq=3, run=RUN, digest16=digest[:16], what="fold")
        assert (again.keep, again.keep_seq, again.unknown) == (rules, 2, ())
        request = Request("9" * 32, 1, "keep", keep=rules)
        assert decode_request(encode_request(request, run=RUN), run=RUN, what="request").keep == rules


def test_an_older_version_keeps_them_and_a_newer_one_finds_them() -> None:
    """It does not know the member: it preserves it with other unknown ones, in its folds, too."""
    catalog = catalog_of(entry(1, 1))
    catalog.unknown = ((2, {"keep": ["last:9"], "other": 1}), (5, {"keep": ["last:3"]}), (4, {"keep": ["last:8"]}))
    folded, digest = encode_fold(catalog, run=RUN)
    found = decode_fold(folded, seq=1, run=RUN, digest16=digest[:16], what="fold")
    assert (found.keep, found.keep_seq) == (("last:3",), 5)
    assert found.unknown == ((2, {"other": 1}),)
    catalog.unknown = ((2, {"keep": 3}),)
    folded, digest = encode_fold(catalog, run=RUN)
    with pytest.raises(FormatError, match="'keep' is not a list"):
        decode_fold(folded, seq=1, run=RUN, digest16=digest[:16], what="fold")


def test_a_request_with_rules_requires_a_writer_that_knows_them() -> None:
    assert b'"incompat":["keep"]' in encode_request(Request("9" * 32, 1, "keep", keep=("last:1",)), run=RUN)
    assert b"incompat" not in encode_request(Request("9" * 32, 1, "tag", tags={"a": (1, 1)}), run=RUN)


def test_no_commit_has_rules_that_are_none() -> None:
    catalog = catalog_of(entry(1, 1))
    check_commit(catalog, CommitRecord(1, NONCE, keep=("last:3",)))
    with pytest.raises(UsageError, match="is not a retention rule"):
        check_commit(catalog, CommitRecord(1, NONCE, keep=("last:3", "cosine:7")))


def test_each_reason_to_keep_says_what_ends_it() -> None:
    """Compaction moves no checkpoint that is about to go, and a writer counts those that are kept for long."""
    expected = {**EXAMPLES, "newest": "newer", "of-a-later-version:1": "never"}
    assert {reason: ends(reason) for reason in expected} == expected


def test_every_kind_of_rule_is_tried_and_told() -> None:
    kinds = {rule.partition(":")[0] for rule in EXAMPLES}
    assert kinds == set(RULES) - {"space"}, "EXAMPLES above has a rule of each kind; a limit on space keeps nothing"
    spec = (ROOT / "formats/SPEC.md").read_text(encoding="utf-8")
    texts = {
        "docs/retention.md": (ROOT / "docs/retention.md").read_text(encoding="utf-8"),
        "SPEC.md, section 7.5": spec.partition("### 7.5")[2].partition("\n## 8")[0],
        "ckpt keep --help": keep.command.help or "",
        "the docstring of Store.keep": ckptstore.Store.keep.__doc__ or "",
    }
    silent = {(place, kind) for place, text in texts.items() for kind in RULES if not re.search(rf"\b{kind}\b", text)}
    assert not silent


@pytest.mark.parametrize("rule", EXAMPLES)
@pytest.mark.parametrize("seed", range(5))
def test_each_rule_keeps_the_same_save_by_save_as_at_once(rule: str, seed: int) -> None:
    """Steps are committed out of order; the run goes back. After each save a look at all releases nothing more."""
    chance = random.Random(f"{rule} {seed}")
    catalog = Catalog()
    parent: CheckpointEntry | None = None
    number = 0
    for term in (1, 2, 3):
        catalog = catalog.apply(OpenRecord(term, parent and parent.id, NONCE, 0.0), catalog.next_seq)
        tracker = RetentionTracker((rule,), catalog)
        steps = [(parent.step if parent else 0) + one for one in range(1, 31)]
        for place in range(0, 28, 3):
            if chance.random() < 0.3:
                steps[place], steps[place + 1] = steps[place + 1], steps[place]
        for step in steps:
            number += 1
            one = entry(term, step, time=float(number), loss=chance.randint(0, 30))
            tracker.add(one)
            gone = [node for node in tracker.superfluous(catalog) if node in catalog.checkpoints]
            catalog = catalog.apply(promise(one, retires=tuple(gone)), catalog.next_seq)
            late = tuple(tracker.superfluous(catalog))
            catalog = catalog.apply(CommitRecord(term, NONCE, retires=late), catalog.next_seq)
            reasons, released = reasons_of(catalog, (rule,))
            assert released == []
            told = {node for node in catalog.checkpoints if rule in tracker.reasons(catalog.checkpoints[node])}
            assert told == set(reasons[rule])
        parent = catalog.checkpoints[chance.choice(list(catalog.checkpoints))]


def test_the_message_about_a_rule_that_is_none_has_every_kind() -> None:
    with pytest.raises(UsageError) as told:
        checked(["nearly:3"])
    assert all(kind.form in str(told.value) for kind in RULES.values())
