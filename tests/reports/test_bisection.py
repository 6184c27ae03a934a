"""`bisect`: the step at which a change began, in as few restores as a binary search needs."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore import CheckpointNotFoundError, Probe, UsageError
from ckptstore.formats.history.catalog import Catalog, TermEntry
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId
from ckptstore.reports.bisection import Answer, Ask, history, search


def entry(step: int, term: int = 1) -> CheckpointEntry:
    return CheckpointEntry(term, step, f"{term * 100_000 + step:032x}", 0.0, 1, 4)


def from_step(first: int, asked: list[int] | None = None) -> Ask:
    def ask(one: CheckpointEntry) -> tuple[Answer, str]:
        if asked is not None:
            asked.append(one.step)
        return ("bad" if one.step >= first else "good"), ""

    return ask


def test_ten_thousand_steps_need_fourteen_restores() -> None:
    """Of a log with a fork: 4,000 steps of term 1, 6,000 more of term 2, and 3,000 of term 1 that are another line."""
    catalog = Catalog(term=2)
    parent = entry(4000)
    for step in range(1, 7001):
        catalog.checkpoints[1, step] = entry(step)
    for step in range(4001, 10_001):
        catalog.checkpoints[2, step] = entry(step, 2)
    catalog.terms[1] = TermEntry(1, None, 0.0, {}, 0)
    catalog.terms[2] = TermEntry(2, CheckpointId(1, 4000, parent.state), 0.0, {}, 1)
    line = history(catalog, catalog.checkpoints[2, 10_000])
    assert [one.step for one in line] == list(range(1, 10_001))
    assert {one.term for one in line[:4000]} == {1}
    assert {one.term for one in line[4000:]} == {2}
    for first in (1, 2, 3, 3999, 4000, 4001, 5000, 7331, 9999, 10_000, 10_001):
        asked: list[int] = []
        found = search(line, from_step(first, asked))
        assert found.first_bad == (None if first > 10_000 else f"{first}@{1 if first <= 4000 else 2}"), first
        assert found.last_good == (None if first == 1 else f"{first - 1}@{1 if first <= 4001 else 2}")
        assert len(asked) == len(set(asked)) <= 14
        assert [int(one.ref.partition("@")[0]) for one in found.probes] == asked


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 20])
def test_every_place_of_short_lines(count: int) -> None:
    line = [entry(step) for step in range(1, count + 1)]
    for first in range(1, count + 2):
        found = search(line, from_step(first))
        assert found.first_bad == (f"{first}@1" if first <= count else None)
        assert found.between == ()
        assert len(found.probes) <= math.ceil(math.log2(count + 1))


def test_skipped_steps_are_named_where_they_matter() -> None:
    line = [entry(step) for step in range(1, 31)]
    for first in (4, 12, 15, 18, 25):

        def ask(one: CheckpointEntry, first: int = first) -> tuple[Answer, str]:
            return ("skipped", "damaged") if 11 <= one.step <= 17 else from_step(first)(one)

        found = search(line, ask)
        if 11 <= first <= 18:
            assert (found.last_good, found.first_bad) == ("10@1", "18@1")
            assert found.between == tuple(f"{step}@1" for step in range(11, 18))
        else:
            assert (found.last_good, found.first_bad, found.between) == (f"{first - 1}@1", f"{first}@1", ())
    found = search(line, lambda _: ("skipped", ""))
    assert (found.last_good, found.first_bad, len(found.probes)) == (None, None, 30)


def test_a_predicate_that_changes_back_is_reported() -> None:
    line = [entry(step) for step in range(1, 101)]

    def spike(one: CheckpointEntry) -> tuple[Answer, str]:
        return ("bad" if 40 <= one.step <= 60 else "good"), ""

    found = search(line, spike, checks=1)
    assert found.first_bad == "40@1"
    assert found.contradictions == ("100@1 is good, and should be bad",)
    found = search(line, from_step(40), checks=5)
    assert (found.first_bad, found.contradictions) == ("40@1", ())
    assert len(found.probes) > 7
    assert search(line, spike).contradictions == ()  # not requested


# -- with states


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NaN from 13@2 on; the line of term 1 beside it has one from 9@1 on."""
    root = tmp_path_factory.mktemp("bisect") / "store"
    store = ckptstore.open(root)
    for parent, steps, first in ((None, range(1, 13), 9), ("6@1", range(7, 21), 13)):
        with store.writer(parent=parent, poll_seconds=None) as writer:
            for step in steps:
                weight = np.full(5, step, "f4")
                weight[3] = np.nan if step >= first else 1
                writer.save({"model": {"w": weight, "b": np.zeros(2)}, "list": [np.arange(3)], "n": step}, step)
    return root


def not_finite(state: dict[str, dict[str, np.ndarray]]) -> bool:
    return not np.isfinite(state["model"]["w"]).all()


def test_a_planted_nan(pristine: Path) -> None:
    store = ckptstore.open(pristine)
    told: list[Probe] = []
    found = store.bisect(not_finite, on_probe=told.append)
    assert (found.last_good, found.first_bad, found.checkpoints) == ("12@2", "13@2", 20)
    assert told == list(found.probes)
    assert len(told) <= 5
    assert told[-1].left == 0
    assert store.bisect(not_finite, ref="12@1").first_bad == "9@1"
    assert store.bisect(not_finite, ref="8@1").first_bad is None
    assert store.bisect(not_finite, select="model.w", good="10@2", bad=15).probes[0].ref in ("12@2", "13@2")


def test_a_command(pristine: Path, tmp_path: Path) -> None:
    store = ckptstore.open(pristine)
    listed = tmp_path / "asked"
    command = f'echo "$1 $CKPT_REF $CKPT_STEP" >> {listed}; test -s "$CKPT_FILE" && test "$CKPT_STEP" -lt 13'
    assert store.bisect(command).first_bad == "13@2"
    lines = [line.split() for line in listed.read_text().splitlines()]
    assert len(lines) <= 5
    assert all(path.endswith(f"step-{step}.safetensors") for path, _, step in lines)
    assert not any(Path(path).exists() or Path(path).parent.exists() for path, _, _ in lines)
    skipped = store.bisect('test "$CKPT_STEP" -ge 9 && exit 125; test "$CKPT_STEP" -lt 13')
    assert (skipped.first_bad, skipped.last_good) == (None, "8@2")
    with pytest.raises(UsageError, match="exited with -9"):
        store.bisect("kill -9 $$")
    with pytest.raises(UsageError, match="exited with 200"):
        store.bisect("exit 200")


def test_damaged_checkpoints_are_skipped(pristine: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(pristine, tmp_path / "store"))
    store = ckptstore.open(root)
    for ref in ("12@2", "13@2"):
        (root / store.describe(ref)[0][0].key).unlink()
    found = store.bisect(not_finite)
    assert (found.last_good, found.first_bad, found.between) == ("11@2", "14@2", ("12@2", "13@2"))
    assert {one.ref for one in found.probes if one.answer == "skipped"} == {"12@2", "13@2"}
    assert all("missing" in one.why for one in found.probes if one.answer == "skipped")
    assert store.bisect("exit 1").first_bad == "1@1"


def test_errors_of_a_predicate_are_raised(pristine: Path, tmp_path: Path) -> None:
    def predicate(state: object) -> bool:
        raise KeyboardInterrupt

    store = ckptstore.open(pristine)
    with pytest.raises(KeyboardInterrupt):
        store.bisect(predicate)
    with pytest.raises(ckptstore.TensorNotFoundError):
        store.bisect(not_finite, select="nothing")
    with pytest.raises(UsageError, match="good=9@1 is not before 20@2"):
        store.bisect(not_finite, good="9@1")
    with pytest.raises(UsageError, match="checks"):
        store.bisect(not_finite, checks=-1)
    with pytest.raises(CheckpointNotFoundError):
        ckptstore.open(tmp_path / "empty", create=True).bisect(not_finite)
