"""Hypothesis strategies for the contents of the log. Ids, terms and steps come from small sets, so that records
collide."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ckptstore.formats.history.records import (
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    FormatFile,
    OpenRecord,
    PinRecord,
    Record,
    Request,
    SegmentEntry,
)

RUN = "0123456789abcdef" * 2


def digest(number: int) -> str:
    return f"{number:032x}"


ids = st.integers(0, 9).map(digest)
terms = st.integers(1, 4)
steps = st.integers(0, 6)
sizes = st.integers(0, 2**53)
times = st.floats(-(2.0**40), 2.0**40)
tags = st.sampled_from(["best", "v1.0", "a/b"])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, width=32).filter(lambda value: abs(value) < 1e30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
# Members unknown to this version begin with "x-" here, so that they never shadow a known one.
extras: st.SearchStrategy[dict[str, Any]] = st.just({}) | st.dictionaries(
    st.text(max_size=4).map(lambda text: "x-" + text), json_values, max_size=2
)
nodes = st.tuples(terms, steps)
identities = st.builds(CheckpointId, terms, steps, ids)


def segments(term: st.SearchStrategy[int] = terms) -> st.SearchStrategy[SegmentEntry]:
    return st.builds(SegmentEntry, id=ids, term=term, size=sizes, header=sizes, hash=ids, extra=extras)


def checkpoints(term: st.SearchStrategy[int] = terms) -> st.SearchStrategy[CheckpointEntry]:
    return st.builds(
        CheckpointEntry, term=term, step=steps, state=ids, time=times, tensors=sizes, nbytes=sizes, extra=extras
    )


encodings = st.builds(
    Encoding,
    checkpoint=nodes,
    kind=st.sampled_from(["full", "delta", "gradient"]),
    base=st.none() | identities,
    segments=st.lists(ids, min_size=1, max_size=3).map(tuple),
    lossy=st.booleans(),
    bytes=sizes,
    extra=extras,
)


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


tag_changes = st.dictionaries(tags, st.none() | nodes, max_size=2)


def _opens(term: int) -> st.SearchStrategy[OpenRecord]:
    """The parent is of an earlier term."""
    earlier = st.builds(CheckpointId, st.integers(1, term - 1), steps, ids) if term > 1 else st.nothing()
    return st.builds(
        OpenRecord,
        term=st.just(term),
        parent=st.none() | earlier,
        nonce=ids,
        time=times,
        writer=extras,
        extra=extras,
    )


opens = terms.flatmap(_opens)


def _commits(term: int) -> st.SearchStrategy[CommitRecord]:
    return st.builds(
        CommitRecord,
        term=st.just(term),
        nonce=ids,
        segments=some(segments(st.just(term))),
        checkpoints=some(checkpoints(st.just(term))),
        encodings=some(encodings),
        drops=some(ids),
        retires=some(nodes),
        tags=tag_changes,
        requests=st.dictionaries(ids, st.none() | st.text(max_size=5), max_size=2),
        swept=some(ids),
        extra=extras,
    )


commits = terms.flatmap(_commits)
records: st.SearchStrategy[Record] = st.one_of(opens, commits)
formats = st.builds(
    FormatFile,
    run=ids,
    anchor_every=st.integers(1, 2**53),
    features=st.dictionaries(st.sampled_from(["write", "gc"]), some(st.text(max_size=5)), max_size=2),
    extra=extras,
)
requests = terms.flatmap(
    lambda term: st.builds(
        Request,
        id=ids,
        term=st.just(term),
        what=st.text(max_size=10),
        segments=some(segments(st.just(term))),
        encodings=some(encodings),
        drops=some(ids),
        retires=some(nodes),
        tags=tag_changes,
        extra=extras,
    )
)
pins = st.builds(PinRecord, nonce=ids, segments=some(ids), reader=extras, extra=extras)
