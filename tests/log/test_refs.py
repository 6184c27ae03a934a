"""REF: latest, STEP, STEP@TERM, tag:NAME, and errors that help."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from ckptstore.errors import CheckpointNotFoundError, CorruptLogError, UsageError
from ckptstore.formats.history import metadata
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CommitRecord, slot_key
from ckptstore.log import refs
from ckptstore.log.term import open_term, read
from tests.log.log_world import HASTE, World, full, save, segments_of


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    """Term 1: 10 to 50; term 2 from 20@1: 30 and 60; term 3 from 30@2, empty. 40@1 is retired."""
    world = World()
    first = open_term(world.journal, None, patience=HASTE)
    saved = {step: save(first, step) for step in range(10, 60, 10)}
    drops = segments_of(first.catalog, (1, 40))
    first.commit(CommitRecord(1, "0" * 32, retires=((1, 40),), drops=drops, tags={"best/loss": (1, 20)}))
    second = open_term(world.journal, saved[20], patience=HASTE)
    fork = save(second, 30)
    save(second, 60)
    return open_term(world.journal, fork, patience=HASTE).catalog


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("latest", "30@2"),
        ("60", "60@2"),
        (60, "60@2"),
        ("30", "30@2"),  # the newest term that has the step
        ("30@1", "30@1"),
        ("50", "50@1"),
        (" 50 ", "50@1"),
        ("050", "50@1"),
        ("tag:best/loss", "20@1"),
    ],
)
def test_the_checkpoints_that_refs_name(catalog: Catalog, ref: str | int, expected: str) -> None:
    assert refs.resolve(catalog, ref).ref == expected


def test_the_best_of_the_newest_line() -> None:
    """As the retention rule of this name: of equal ones the newer. Another branch, and NaN, do not count."""
    world = World()
    first = open_term(world.journal, None, patience=HASTE)
    losses = {1: 0.5, 2: float("nan"), 3: 0.25, 4: 0.25, 5: 0.125}
    ids = {}
    for step, loss in losses.items():
        record = full(1, step)
        labels = {metadata.MEMBER: metadata.checked({"metrics": {"loss": loss}, "n": step})}
        entry = dataclasses.replace(record.checkpoints[0], extra=labels)
        first.commit(dataclasses.replace(record, checkpoints=(entry,)))
        ids[step] = entry.id
    second = open_term(world.journal, ids[4], patience=HASTE)
    save(second, 6)
    found = second.catalog
    for ref, expected in (("best:loss", "4@1"), ("best:loss:max", "1@1"), ("best:n", "1@1"), ("best:n:max", "4@1")):
        assert refs.resolve(found, ref).ref == expected, ref
    with pytest.raises(CheckpointNotFoundError, match=r"has the metric 'los'; the metrics are loss, n") as caught:
        refs.resolve(found, "best:los")
    assert caught.value.__notes__ == ["did you mean best:loss?"]
    with pytest.raises(UsageError, match="name the metric"):
        refs.resolve(found, "best:")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint has metrics"):
        refs.resolve(Catalog(), "best:loss")


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("44", r"nearest are 30@1, 50@1, 30@2, 60@2"),
        ("40", r"no checkpoint of step 40; the nearest are"),
        ("40@1", r"no checkpoint 40@1; the nearest are 10@1, 20@1, 30@1, 50@1"),
        ("30@3", r"term 3 holds none"),
        ("30@9", r"there is no term 9; the newest are 1, 2, 3"),
        ("tag:worst", r"no tag 'worst'; the tags are best/loss"),
    ],
)
def test_a_missing_checkpoint_is_reported_with_the_existing_ones(catalog: Catalog, ref: str, message: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=message):
        refs.resolve(catalog, ref)


@pytest.mark.parametrize("ref", ["latest", "5", "5@1", "tag:best"])
def test_an_empty_store_holds_nothing(ref: str) -> None:
    with pytest.raises(CheckpointNotFoundError):
        refs.resolve(Catalog(), ref)


@pytest.mark.parametrize(
    "ref", ["", "-1", "1.5", "newest", "@2", "5@", "5@x", "5@1@2", "tag:", "tag:a b", "٣", "1" * 17, "LATEST"]
)
def test_an_invalid_ref_is_a_usage_error(catalog: Catalog, ref: str) -> None:
    with pytest.raises(UsageError):
        refs.resolve(catalog, ref)


def test_latest_behind_damage_names_the_last_intact_checkpoint() -> None:
    world = World(every=1000)
    term = open_term(world.journal, None, patience=HASTE)
    save(term, 1)
    save(term, 2)

    world.damage(slot_key(2))
    catalog = read(world.journal).catalog
    with pytest.raises(CorruptLogError, match="1@1"):
        refs.resolve(catalog, "latest")
    assert refs.resolve(catalog, "1").ref == "1@1"


@pytest.mark.parametrize("name", ["best/loss", "worst"])
def test_a_tag_is_an_error_when_the_end_of_the_log_is_lost(catalog: Catalog, name: str) -> None:
    """Segments of a term that the log lacks prove the loss; a lost record may have moved the tag."""
    lost = copy.copy(catalog)
    lost.lost = catalog.term + 1
    assert not lost.damage
    with pytest.raises(CorruptLogError, match=f"the end of the log is lost, with term {lost.lost}, and may have held"):
        refs.resolve(lost, f"tag:{name}")
