"""The catalog, its folds, and the rules of COMMIT, against brute force."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, ClassVar

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import (
    CheckpointNotFoundError,
    CkptError,
    CorruptLogError,
    FormatError,
    IncompatibleFormatError,
    StepOrderError,
    UsageError,
)
from ckptstore.formats.history import folds
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.commit_checks import check_commit, droppable, needed
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
from tests.formats import log_strategies as some
from tests.formats.fold_data import Columns, body, parted, sealed, sealed_frame
from tests.formats.log_strategies import RUN, digest
from tests.forms import short_or


def applied(records: list[Record], start: Catalog | None = None) -> Catalog:
    builder = CatalogBuilder(start)
    for record in records:
        builder.apply(record, builder.catalog.next_seq)
    return builder.catalog


def refold(catalog: Catalog) -> Catalog:
    data, name = folds.encode_fold(catalog, run=RUN)
    return folds.decode_fold(data, seq=catalog.next_seq - 1, run=RUN, digest16=name[:16], what="fold")


def segment(number: int, term: int = 1) -> SegmentEntry:
    return SegmentEntry(digest(number), term, 100, 64, digest(number))


def save(
    step: int, base: int | None = None, *, term: int = 1, base_term: int | None = None, **more: Any
) -> CommitRecord:
    """A commit of `step` in one segment, whose id and state hash are the step."""
    identity = None if base is None else CheckpointId(base_term or term, base, digest(base))
    return CommitRecord(
        term,
        digest(0),
        segments=(segment(step, term),),
        checkpoints=(CheckpointEntry(term, step, digest(step), 0.0, 1, 10),),
        encodings=(Encoding((term, step), "delta" if base else "full", identity, (digest(step),), False, 10),),
        **more,
    )


def change(term: int = 1, **changes: Any) -> CommitRecord:
    return CommitRecord(term, digest(0), **changes)


def opened(term: int = 1, parent: CheckpointId | None = None) -> OpenRecord:
    return OpenRecord(term, parent, digest(term), 0.0)


CHAIN: list[Record] = [opened(), save(1), save(2, 1), save(3, 2), save(4)]


class TestFold:
    @given(st.lists(some.records, min_size=1, max_size=8), st.lists(some.records, max_size=4))
    @settings(max_examples=short_or(20, 50))
    def test_folding_anywhere_changes_nothing(self, before: list[Record], after: list[Record]) -> None:
        whole = applied(before)
        folded = refold(whole)
        assert folded == whole
        assert list(folded.checkpoints) == list(whole.checkpoints)
        assert list(folded.encodings) == list(whole.encodings)
        assert applied(after, folded) == applied(after, whole) == applied(before + after)

    @given(st.lists(some.records, min_size=1, max_size=6))
    @settings(max_examples=25)
    def test_equal_catalogs_have_equal_folds(self, records: list[Record]) -> None:
        assert folds.encode_fold(applied(records), run=RUN) == folds.encode_fold(refold(applied(records)), run=RUN)

    def test_unknown_members_survive(self) -> None:
        records = [
            OpenRecord(1, None, digest(1), 0.0, {"host": "a"}, extra={"mood": 1}),
            CommitRecord(1, digest(2), (SegmentEntry(digest(3), 1, 1, 1, digest(3), {"disk": "x"}),), extra={"k": [1]}),
        ]
        catalog = refold(applied(list(records)))
        assert catalog.terms[1].extra == {"mood": 1}
        assert catalog.segments[digest(3)].extra == {"disk": "x"}
        assert catalog.unknown == ((1, {"k": [1]}),)

    def test_features_that_writers_must_know_survive(self) -> None:
        catalog = refold(applied([OpenRecord(1, None, digest(1), 0.0, ro_compat=("warp",))]))
        assert catalog.ro_compat == {"warp"}

    def test_damage_and_manifests_survive(self) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        builder.mark_damaged(5)
        builder.apply(CommitRecord(1, digest(1), manifest=digest(77)), 6)
        catalog = builder.catalog
        assert refold(catalog).damage == (5,)
        assert refold(catalog).manifests == {digest(77): (1, 6)}
        data, name = folds.encode_fold(catalog, run=RUN, forget={digest(77)})
        assert folds.decode_fold(data, seq=6, run=RUN, digest16=name[:16], what="f").manifests == {}

    def test_every_flipped_bit_of_every_byte_is_found(self) -> None:
        data, name = folds.encode_fold(applied(CHAIN), run=RUN)
        for position in range(len(data)):
            for bit in (1, 16, 128):
                flipped = bytearray(data)
                flipped[position] ^= bit
                assert not folds.intact(bytes(flipped), name[:16])
                with pytest.raises(FormatError):
                    folds.decode_fold(bytes(flipped), seq=4, run=RUN, digest16=name[:16], what="fold")
        for length in range(len(data)):
            with pytest.raises(FormatError):
                folds.decode_fold(data[:length], seq=4, run=RUN, digest16=name[:16], what="fold")

    def test_another_folds_name_is_refused(self) -> None:
        data, name = folds.encode_fold(applied(CHAIN), run=RUN)
        for wrong in ({"seq": 5}, {"run": digest(1)}, {"digest16": "0" * 16}):
            with pytest.raises(FormatError):
                folds.decode_fold(data, **{"seq": 4, "run": RUN, "digest16": name[:16], "what": "f", **wrong})  # type: ignore[arg-type]

    def test_a_thousand_checkpoints_cost_little(self) -> None:
        builder = CatalogBuilder(applied([opened()]))
        for step in range(1, 1001):
            builder.apply(save(step, step - 1 if step % 10 else None), step)
        data, name = folds.encode_fold(builder.catalog, run=RUN)
        begun = time.thread_time()
        folds.decode_fold(data, seq=1000, run=RUN, digest16=name[:16], what="fold")
        assert time.thread_time() - begun < 10  # it takes 10 ms; only a quadratic decoder would take seconds


def document(records: list[Record]) -> tuple[dict[str, Any], Columns]:
    return parted(folds.encode_fold(applied(records), run=RUN)[0])


class TestHostileFold:
    MANY: ClassVar[list[Record]] = [*CHAIN, change(tags={"best": (1, 4)}, drops=(digest(50),), retires=((1, 1),))]

    def refuses_or_holds(self, text: bytes, name: str) -> None:
        with contextlib.suppress(FormatError):
            catalog = folds.decode_fold(text, seq=5, run=RUN, digest16=name, what="fold")
            catalog.latest()
            assert refold(catalog) == catalog

    @given(st.data())
    @settings(max_examples=short_or(80, 200))
    def test_any_change_of_the_document_gives_a_catalog_or_a_format_error(self, data: st.DataObject) -> None:
        found, columns = document(self.MANY)
        value: Any = found
        while True:
            place = data.draw(st.sampled_from(list(value) if isinstance(value, dict) else list(range(len(value)))))
            inner = value[place]
            if isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
                value = inner
                continue
            value[place] = data.draw(some.json_values)
            break
        try:
            text, name = sealed(found, columns)
        except ValueError:  # no JSON
            return
        self.refuses_or_holds(text, name)

    @given(st.data())
    @settings(max_examples=short_or(80, 200))
    def test_any_change_of_a_column_gives_a_catalog_or_a_format_error(self, data: st.DataObject) -> None:
        found, columns = document(self.MANY)
        column = columns[data.draw(st.sampled_from([name for name in columns if columns[name]]))]
        row = data.draw(st.integers(0, len(column) - 1))
        if isinstance(column[row], str):
            column[row] = data.draw(some.ids)
        elif isinstance(column[row], float):
            column[row] = data.draw(st.floats())
        else:
            column[row] = data.draw(st.integers(0, 5) | st.integers(-(2**63), 2**63))
        self.refuses_or_holds(*sealed(found, columns))

    @given(st.integers(-40, 40).filter(bool), st.binary(min_size=40, max_size=40))
    def test_columns_that_are_too_short_or_too_long_are_refused(self, more: int, tail: bytes) -> None:
        whole = body(*document(CHAIN))
        text, name = sealed_frame(zstandard.compress(whole[:more] if more < 0 else whole + tail[:more]))
        with pytest.raises(FormatError, match=r"bytes of columns, the tables have"):
            folds.decode_fold(text, seq=4, run=RUN, digest16=name, what="fold")

    @pytest.mark.parametrize("table", ["checkpoints", "held", "segments", "encodings"])
    @pytest.mark.parametrize("rows", [0, 2**53, -1, "4"])
    def test_another_number_of_rows_is_refused(self, table: str, rows: Any) -> None:
        found, columns = document(self.MANY)
        assert found[table]["rows"]
        found[table]["rows"] = rows
        text, name = sealed(found, columns)
        with pytest.raises(FormatError):
            folds.decode_fold(text, seq=5, run=RUN, digest16=name, what="fold")

    @pytest.mark.parametrize(("table", "more"), [("checkpoints", 0), ("checkpoints", 1), ("held", 0), ("encodings", 1)])
    def test_rows_out_of_order_or_twice_are_refused(self, table: str, more: int) -> None:
        records = [*CHAIN, change(retires=((1, 1), (1, 2)))]
        found, columns = document(records)
        column = columns[f"{table}.step"]
        column[0] = column[1] + more
        text, name = sealed(found, columns)
        with pytest.raises(FormatError, match="order of term and step"):
            folds.decode_fold(text, seq=5, run=RUN, digest16=name, what="fold")

    def test_a_segment_out_of_range_is_refused(self) -> None:
        found, columns = document(CHAIN)
        columns["encodings.segment"][0] = 99
        text, name = sealed(found, columns)
        with pytest.raises(FormatError, match="99"):
            folds.decode_fold(text, seq=4, run=RUN, digest16=name, what="fold")

    def test_an_unknown_incompat_feature_is_refused(self) -> None:
        found, columns = document(CHAIN)
        text, name = sealed(found | {"incompat": ["warp"]}, columns)
        with pytest.raises(IncompatibleFormatError, match="warp"):
            folds.decode_fold(text, seq=4, run=RUN, digest16=name, what="fold")

    def test_a_frame_that_claims_too_much_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text, name = sealed(*document(CHAIN))
        monkeypatch.setattr(folds, "FOLD_LIMIT", 100)
        monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: pytest.fail("decompressed"))
        with pytest.raises(FormatError, match="at most 100"):
            folds.decode_fold(text, seq=4, run=RUN, digest16=name, what="fold")

    def test_an_invalid_frame_is_refused(self) -> None:
        for frame in (b"", b"garbage", zstandard.compress(b"{}\n") + b"x", zstandard.compress(b"{}")):
            text, name = sealed_frame(frame)
            with pytest.raises(FormatError):
                folds.decode_fold(text, seq=0, run=RUN, digest16=name, what="f")


class TestApply:
    def test_a_retired_base_stays_until_its_segments_are_dropped(self) -> None:
        catalog = applied([*CHAIN, change(retires=((1, 1), (1, 2)))])
        assert set(catalog.checkpoints) == {(1, 3), (1, 4)}
        assert set(catalog.held) == {(1, 1), (1, 2)}
        assert catalog.restorable(CheckpointId(1, 2, digest(2)))
        catalog = applied([change(retires=((1, 3),), drops=(digest(1), digest(2), digest(3)))], catalog)
        assert set(catalog.encodings) == {(1, 4)}
        assert not catalog.held
        assert catalog.dropped == {digest(1), digest(2), digest(3)}

    def test_restorable_follows_bases_and_compares_states(self) -> None:
        catalog = applied(CHAIN)
        assert catalog.restorable(CheckpointId(1, 3, digest(3)))
        assert not catalog.restorable(CheckpointId(1, 3, digest(9)))
        assert not catalog.restorable(CheckpointId(1, 9, digest(9)))
        assert not applied([change(drops=(digest(1),))], catalog).restorable(CheckpointId(1, 3, digest(3)))

    def test_restorable_compares_the_states_of_bases(self) -> None:
        stranger = CheckpointId(1, 4, digest(99))
        record = change(
            segments=(segment(8),),
            checkpoints=(CheckpointEntry(1, 8, digest(8), 0, 1, 1),),
            encodings=(Encoding((1, 8), "delta", stranger, (digest(8),), False, 1),),
        )
        assert not applied([*CHAIN, record]).restorable(CheckpointId(1, 8, digest(8)))
        with pytest.raises(CheckpointNotFoundError, match="4@1"):
            check_commit(applied(CHAIN), record)

    def test_only_the_newest_terms_drops_are_remembered(self) -> None:
        catalog = applied([*CHAIN, opened(2), change(2, retires=((1, 4),), drops=(digest(4), digest(60)))])
        assert catalog.dropped == {digest(60)}

    def test_restorable_ends_on_a_cycle(self) -> None:
        loop = change(
            segments=(segment(8), segment(9)),
            checkpoints=(CheckpointEntry(1, 8, digest(8), 0, 1, 1), CheckpointEntry(1, 9, digest(9), 0, 1, 1)),
            encodings=(
                Encoding((1, 8), "delta", CheckpointId(1, 9, digest(9)), (digest(8),), False, 1),
                Encoding((1, 9), "delta", CheckpointId(1, 8, digest(8)), (digest(9),), False, 1),
            ),
        )
        assert not applied([*CHAIN, loop]).restorable(CheckpointId(1, 8, digest(8)))

    @given(st.lists(st.data(), min_size=4, max_size=12))
    @settings(max_examples=short_or(30, 100))
    def test_restorable_is_what_a_search_of_all_paths_says(self, draws: list[st.DataObject]) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        for data in draws:  # also records that no writer may send: a damaged log has them
            builder.apply(data.draw(small_commits(10 + builder.catalog.next_seq)), builder.catalog.next_seq)
            for node in [*builder.catalog.checkpoints, *builder.catalog.held]:
                entry = builder.catalog.find(node)
                assert entry is not None
                assert builder.catalog.restorable(entry.id) == builder.snapshot().restorable(entry.id)

    def test_a_base_whose_state_is_another_one_now_restores_nothing(self) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        assert builder.catalog.restorable(CheckpointId(1, 3, digest(3)))
        builder.apply(change(checkpoints=(CheckpointEntry(1, 1, digest(9), 0, 1, 1),)), builder.catalog.next_seq)
        assert not builder.catalog.restorable(CheckpointId(1, 3, digest(3)))

    def test_dropping_a_segment_far_below_makes_a_chain_unrestorable(self) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        assert builder.catalog.restorable(CheckpointId(1, 3, digest(3)))
        builder.apply(change(drops=(digest(1),)), builder.catalog.next_seq)
        assert not builder.catalog.restorable(CheckpointId(1, 3, digest(3)))

    def test_a_new_term_forgets_what_only_the_old_one_needed(self) -> None:
        catalog = applied(
            [*CHAIN, change(drops=(digest(4),), retires=((1, 4),), requests={digest(5): None}), opened(2)]
        )
        assert not catalog.dropped
        assert not catalog.spent
        assert not catalog.requests

    def test_a_commit_behind_a_damaged_open_brings_its_term(self) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        builder.mark_damaged(5)
        builder.apply(save(9, term=2), 6)
        assert builder.catalog.term == 2
        assert not builder.catalog.terms[2].known
        latest = builder.catalog.latest()
        assert latest is not None
        assert latest.node == (2, 9)

    def test_swept_segments_are_forgotten(self) -> None:
        catalog = applied([*CHAIN, change(drops=(digest(50), digest(51))), change(swept=(digest(50),))])
        assert catalog.dropped == {digest(51)}

    @given(st.lists(some.records, max_size=6), some.records)
    @settings(max_examples=25)
    def test_apply_leaves_the_original_alone(self, records: list[Record], record: Record) -> None:
        before = applied(records)
        twin = applied(records)
        after = before.apply(record, before.next_seq)
        assert before == twin
        assert after == applied([*records, record])

    def test_a_commit_does_not_copy_the_store(self) -> None:
        builder = CatalogBuilder(applied([opened()]))
        for step in range(1, 20_001):
            builder.apply(save(step), step)
        record = save(20_001, 20_000, retires=((1, 1),), drops=(digest(1),))
        check_commit(builder.catalog, record)  # builds the index, once

        def seconds() -> float:
            begun = time.thread_time()
            check_commit(builder.catalog, record)
            return time.thread_time() - begun

        # The median: the garbage collector may run meanwhile.
        assert statistics.median(seconds() for _ in range(200)) < 0.001


class TestLatest:
    def latest(self, records: list[Record]) -> str | None:
        entry = applied(records).latest()
        return None if entry is None else entry.ref

    def test_an_empty_store_has_none(self) -> None:
        assert self.latest([]) is None
        assert self.latest([opened()]) is None

    def test_the_highest_step_whatever_the_order_of_commits(self) -> None:
        assert self.latest([opened(), save(5), save(3), save(4)]) == "5@1"

    def test_an_empty_term_means_its_parent(self) -> None:
        assert self.latest([*CHAIN, opened(2, CheckpointId(1, 3, digest(3)))]) == "3@1"
        assert self.latest([*CHAIN, opened(2, CheckpointId(1, 3, digest(3))), opened(3)]) is None

    def test_a_rolled_back_run_counts_from_its_own_term(self) -> None:
        assert self.latest([*CHAIN, opened(2, CheckpointId(1, 2, digest(2))), save(7, term=2)]) == "7@2"

    def test_a_retired_parent_gives_way_to_the_one_before_it(self) -> None:
        assert self.latest([*CHAIN, opened(2, CheckpointId(1, 3, digest(3))), change(2, retires=((1, 3),))]) == "2@1"

    @pytest.mark.parametrize("fold", [False, True])
    def test_damage_after_it_is_reported_with_the_last_intact_checkpoint(self, fold: bool) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        builder.mark_damaged(5)
        catalog = refold(builder.catalog) if fold else builder.catalog
        with pytest.raises(CorruptLogError, match=r"slot 5 .*4@1"):
            catalog.latest()
        assert catalog.restorable(CheckpointId(1, 3, digest(3)))

    def test_damage_before_it_does_not_matter(self) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        builder.mark_damaged(5)
        builder.apply(save(6), 6)
        latest = builder.catalog.latest()
        assert latest is not None
        assert latest.step == 6

    def test_an_open_after_the_damage_settles_it(self) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        builder.mark_damaged(5)
        builder.apply(opened(2, CheckpointId(1, 3, digest(3))), 6)
        latest = builder.catalog.latest()
        assert latest is not None
        assert latest.step == 3

    def test_nothing_intact(self) -> None:
        builder = CatalogBuilder()
        builder.mark_damaged(0)
        with pytest.raises(CorruptLogError, match="no checkpoint"):
            builder.catalog.latest()


class TestCheckCommit:
    @pytest.mark.parametrize(
        ("record", "error", "message"),
        [
            (save(9, term=2), UsageError, "term 2 in term 1"),
            (save(4), UsageError, "committed or dropped before"),
            (save(9, 8), CheckpointNotFoundError, "base 8@1"),
            (save(9, 4, drops=(digest(4),), retires=((1, 4),)), CheckpointNotFoundError, "base 4@1"),
            (change(segments=(segment(9),)), UsageError, "no encoding reads it"),
            (change(segments=(segment(9, 2),)), UsageError, "of term 2"),
            (change(segments=(segment(9), segment(9))), UsageError, "twice"),
            (save(9, drops=(digest(9),)), UsageError, "both added and dropped"),
            (change(checkpoints=(CheckpointEntry(1, 9, digest(9), 0, 1, 1),)), UsageError, "no encoding"),
            (change(checkpoints=(CheckpointEntry(2, 9, digest(9), 0, 1, 1),)), UsageError, "not of term"),
            (change(checkpoints=(CheckpointEntry(1, 4, digest(9), 0, 1, 1),)), StepOrderError, "step 4 exists"),
            (change(encodings=(Encoding((1, 8), "full", None, (digest(4),), False, 1),)), UsageError, "not promised"),
            (change(encodings=(Encoding((1, 4), "full", None, (digest(8),), False, 1),)), UsageError, "not live"),
            (
                change(
                    encodings=(Encoding((1, 4), "full", None, (digest(1),), False, 1),),
                    drops=(digest(1), digest(2), digest(3)),
                    retires=((1, 1), (1, 2), (1, 3)),
                ),
                UsageError,
                "not live",
            ),
            (change(encodings=(Encoding((1, 4), "full", None, (), False, 1),)), UsageError, "without segments"),
            (change(retires=((1, 9),)), UsageError, "not promised"),
            (change(drops=(digest(1),)), UsageError, "leave 1@1"),
            (change(drops=(digest(1),), retires=((1, 1),)), UsageError, "leave [23]@1"),
            (change(drops=(digest(2),), retires=((1, 2),)), UsageError, "leave 3@1"),
            (change(tags={"best": (1, 9)}), UsageError, "not promised"),
            (change(tags={"a b": (1, 4)}), UsageError, "no tag name|not a tag name"),
            (save(9, tags={"x": (1, 4)}, retires=((1, 4),)), UsageError, "not promised|names it"),
            (change(swept=(digest(1),)), UsageError, "swept"),
        ],
    )
    def test_a_broken_rule_is_refused(self, record: CommitRecord, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            check_commit(applied(CHAIN), record)

    @pytest.mark.parametrize(
        "record",
        [
            save(9),
            save(9, 4),
            save(9, 3, retires=((1, 3), (1, 2), (1, 1))),
            save(9, retires=((1, 4),), drops=(digest(4),)),
            change(retires=((1, 1), (1, 2), (1, 3)), drops=(digest(1), digest(2), digest(3))),
            change(drops=(digest(77),)),  # a segment that will never be committed
            change(
                segments=(segment(9),),
                encodings=(Encoding((1, 3), "full", None, (digest(9),), False, 1),),
                drops=(digest(3), digest(2)),
                retires=((1, 2),),
            ),
            change(encodings=(Encoding((1, 3), "full", None, (digest(1), digest(4)), False, 1),)),
            change(tags={"best": (1, 4), "gone": None}),
        ],
    )
    def test_a_commit_that_keeps_every_promise_is_accepted(self, record: CommitRecord) -> None:
        check_commit(applied(CHAIN), record)

    def test_a_batch_may_build_on_itself(self) -> None:
        first, second = save(8), save(9, 8)
        check_commit(
            applied(CHAIN),
            change(
                segments=first.segments + second.segments,
                checkpoints=first.checkpoints + second.checkpoints,
                encodings=first.encodings + second.encodings,
            ),
        )

    def test_a_step_below_the_parents_is_refused(self) -> None:
        catalog = applied([*CHAIN, opened(2, CheckpointId(1, 3, digest(3)))])
        for step in (1, 2):
            with pytest.raises(StepOrderError, match="below step 3"):
                check_commit(catalog, change(2, checkpoints=(CheckpointEntry(2, step, digest(step), 0, 1, 1),)))
        check_commit(catalog, save(5, 3, term=2, base_term=1))
        entry = CheckpointEntry(2, 3, digest(60), 0, 1, 1)
        full = Encoding((2, 3), "full", None, (digest(60),), False, 1)
        check_commit(catalog, change(2, segments=(segment(60, term=2),), checkpoints=(entry,), encodings=(full,)))

    def test_a_record_has_each_step_once(self) -> None:
        twins = tuple(CheckpointEntry(1, 9, digest(state), 0, 1, 1) for state in (8, 9))
        with pytest.raises(StepOrderError, match="step 9 exists already"):
            check_commit(applied(CHAIN), replace(save(9), checkpoints=twins))

    def test_a_term_and_step_exist_once_even_after_retirement(self) -> None:
        catalog = applied([*CHAIN, change(retires=((1, 4),), drops=(digest(4),))])
        again = change(
            segments=(segment(60),),
            checkpoints=(CheckpointEntry(1, 4, digest(60), 0, 1, 1),),
            encodings=(Encoding((1, 4), "full", None, (digest(60),), False, 1),),
        )
        for known in (catalog, refold(catalog)):
            with pytest.raises(StepOrderError, match="exists already"):
                check_commit(known, again)

    def test_a_dropped_segment_does_not_come_back(self) -> None:
        catalog = applied([*CHAIN, change(drops=(digest(77),))])
        edge = Encoding((1, 4), "full", None, (digest(77),), False, 1)
        with pytest.raises(UsageError, match="dropped before"):
            check_commit(catalog, change(segments=(segment(77),), encodings=(edge,)))

    def test_a_tagged_checkpoint_is_not_retired(self) -> None:
        catalog = applied([*CHAIN, change(tags={"best": (1, 4)})])
        with pytest.raises(UsageError, match="tag 'best'"):
            check_commit(catalog, change(retires=((1, 4),)))
        check_commit(catalog, change(retires=((1, 4),), tags={"best": (1, 3)}))

    def test_a_request_is_handled_once(self) -> None:
        catalog = applied([*CHAIN, change(requests={digest(5): None})])
        with pytest.raises(UsageError, match="handled before"):
            check_commit(catalog, change(requests={digest(5): None}))

    @given(st.lists(st.data(), min_size=4, max_size=10))
    @settings(max_examples=short_or(24, 60))
    def test_a_log_of_accepted_records_keeps_every_promise(self, draws: list[st.DataObject]) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        for data in draws:
            record = data.draw(small_commits(10 + builder.catalog.next_seq))
            try:
                check_commit(builder.catalog, record)
            except CkptError:
                continue
            builder.apply(record, builder.catalog.next_seq)
            assert_promises(builder.catalog)


@st.composite
def small_commits(draw: st.DrawFn, number: int) -> CommitRecord:
    """Adds segment `number` or nothing, for a new checkpoint or an old one; drops, retires and tags at random."""
    old = st.tuples(st.just(1), st.integers(1, 14))
    adds = draw(st.sampled_from(["nothing", "checkpoint", "encoding"]))
    node = (1, number) if adds == "checkpoint" else draw(old)
    base = draw(st.none() | old)
    identity = None if base is None else CheckpointId(*base, digest(base[1]))
    edge = Encoding(node, "x", identity, (digest(number),), False, 1)
    return change(
        segments=() if adds == "nothing" else (segment(number),),
        checkpoints=(CheckpointEntry(1, number, digest(number), 0, 1, 1),) if adds == "checkpoint" else (),
        encodings=() if adds == "nothing" else (edge,),
        drops=tuple(draw(st.sets(st.integers(1, 14), max_size=3).map(lambda found: map(digest, found)))),
        retires=tuple(draw(st.sets(old, max_size=3))),
        tags=draw(st.dictionaries(some.tags, st.none() | old, max_size=1)),
    )


def assert_promises(catalog: Catalog) -> None:
    for entry in catalog.checkpoints.values():
        assert catalog.restorable(entry.id)
    for node in catalog.tags.values():
        assert node in catalog.checkpoints
    for node, edges in catalog.encodings.items():
        assert catalog.find(node) is not None
        for edge in edges:
            assert all(name in catalog.segments for name in edge.segments)
    assert set(catalog.slots) == set(catalog.checkpoints)
    assert not catalog.checkpoints.keys() & catalog.held.keys()


@st.composite
def graphs(draw: st.DrawFn) -> Catalog:
    """A catalog of up to 8 checkpoints, each with one or two encodings against earlier ones, some retired."""
    builder = CatalogBuilder(applied([opened()]))
    number = 100
    for step in range(1, draw(st.integers(1, 8)) + 1):
        bases = draw(st.lists(st.none() | st.integers(1, step - 1) if step > 1 else st.none(), min_size=1, max_size=2))
        entries, edges = [], []
        for base in bases:
            number += 1
            entries.append(segment(number))
            identity = None if base is None else CheckpointId(1, base, digest(base))
            edges.append(Encoding((1, step), "x", identity, (digest(number),), False, 1))
        checkpoint = CheckpointEntry(1, step, digest(step), 0, 1, 1)
        record = change(segments=tuple(entries), checkpoints=(checkpoint,), encodings=tuple(edges))
        check_commit(builder.catalog, record)
        builder.apply(record, builder.catalog.next_seq)
    builder.apply(change(retires=tuple(draw(st.sets(st.sampled_from(list(builder.catalog.checkpoints)))))), 50)
    return builder.catalog


def calls(work: Callable[[], object]) -> int:
    """How many functions `work` enters."""
    count = 0

    def note(_frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class TestWork:
    """What a save asks of the catalog costs the same at the end of a long chain as of a short one."""

    @staticmethod
    def at_the_end_of(length: int) -> CatalogBuilder:
        """A chain whose last two checkpoints are promised, in the catalog of the term that wrote it."""
        builder = CatalogBuilder(applied([opened(), save(1)]))
        for step in range(2, length + 1):
            record = save(step, step - 1, retires=((1, step - 2),) if step > 2 else ())
            check_commit(builder.catalog, record)
            builder.apply(record, builder.catalog.next_seq)
        return builder

    def work(self, length: int) -> dict[str, int]:
        catalog = self.at_the_end_of(length).catalog
        catalog.edges()  # made once for a term
        last = CheckpointId(1, length, digest(length))
        oldest = (1, length - 1)
        record = save(length + 1, length, retires=(oldest,))
        return {
            "restorable": calls(lambda: catalog.restorable(last)),
            "droppable": calls(lambda: droppable(catalog, [oldest], keep=[last.node])),
            "check_commit": calls(lambda: check_commit(catalog, record)),
            "apply": calls(lambda: catalog.apply(record, catalog.next_seq)),
        }

    def test_it_does_not_grow_with_the_chain(self) -> None:
        assert self.work(300) == self.work(30)

    def test_a_long_chain_that_nobody_needs_is_dropped_in_one_pass(self) -> None:
        def work(length: int) -> int:
            catalog = applied([save(length + 1)], self.at_the_end_of(length).catalog)
            gone = [(1, length), (1, length - 1)]
            drops = droppable(catalog, gone)
            assert len(drops) == length
            record = change(retires=tuple(gone), drops=drops)
            return (
                calls(lambda: droppable(catalog, gone))
                + calls(lambda: check_commit(catalog, record))
                + calls(lambda: catalog.apply(record, catalog.next_seq))
            )

        assert work(400) < 12 * work(40)


class TestDroppable:
    @given(graphs(), st.data())
    def test_against_brute_force(self, catalog: Catalog, data: st.DataObject) -> None:
        promised = list(catalog.checkpoints)
        retires: set[Node] = set(data.draw(st.lists(st.sampled_from(promised), unique=True))) if promised else set()
        drops = droppable(catalog, retires)
        record = change(retires=tuple(retires), drops=drops)
        check_commit(catalog, record)
        stay = needed(catalog, set(promised) - retires)
        reachable_before = needed(catalog, promised)
        assert set(droppable(catalog, retires.union(catalog.held))) == {
            name
            for node, edges in catalog.encodings.items()
            if node not in stay
            for edge in edges
            for name in edge.segments
        }
        # Segments that only retired checkpoints needed are given up, and no others.
        for node, edges in catalog.encodings.items():
            for edge in edges:
                if node in stay:
                    assert not set(edge.segments) & set(drops)
                elif node in reachable_before:
                    assert set(edge.segments) <= set(drops)

    def test_a_base_about_to_be_used_is_kept(self) -> None:
        catalog = applied([*CHAIN, change(retires=((1, 4),))])
        assert droppable(catalog, [(1, 4)]) == (digest(4),)
        assert droppable(catalog, [(1, 4)], keep=[(1, 4)]) == ()

    def test_a_segment_shared_with_a_promised_checkpoint_is_kept(self) -> None:
        shared = change(encodings=(Encoding((1, 3), "full", None, (digest(1), digest(4)), False, 1),))
        assert droppable(applied([*CHAIN, shared]), [(1, 4)]) == ()

    def test_a_whole_chain(self) -> None:
        catalog = applied(CHAIN)
        assert droppable(catalog, [(1, 1), (1, 2)]) == ()
        assert set(droppable(catalog, [(1, 1), (1, 2), (1, 3)])) == {digest(1), digest(2), digest(3)}


class TestCollectable:
    KEY: Callable[[int, int], str] = staticmethod(lambda term, number: f"seg/{term:010d}/{digest(number)}.safetensors")

    def test_the_rule_of_gc(self) -> None:
        records = [*CHAIN, opened(2), save(9, term=2), change(2, drops=(digest(60),))]
        catalog = applied(records)
        assert not catalog.collectable(self.KEY(1, 4))  # live
        assert catalog.collectable(self.KEY(1, 70))  # unreferenced, of an older term
        assert not catalog.collectable(self.KEY(2, 71))  # of the newest term: it may be committed yet
        assert not catalog.collectable(self.KEY(3, 72))  # of a term after this view
        assert catalog.collectable(self.KEY(2, 60))  # dropped by name
        assert not catalog.collectable("seg/x/y")
        assert not catalog.collectable("log/00000000000000000001")

    def test_manifests_that_are_still_read_stay(self) -> None:
        catalog = applied([*CHAIN, CommitRecord(1, digest(0), manifest=digest(80)), opened(2)])
        assert not catalog.collectable(f"seg/{1:010d}/{digest(80)}.json")
        assert catalog.collectable(f"seg/{1:010d}/{digest(81)}.json")

    def test_nothing_unreferenced_goes_while_a_slot_is_damaged(self) -> None:
        builder = CatalogBuilder(applied(CHAIN))
        builder.mark_damaged(5)
        builder.apply(opened(2), 6)
        assert not builder.catalog.collectable(self.KEY(1, 70))
