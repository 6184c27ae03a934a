"""REF as a value: one grammar, for the command, the store, ranges, agents and tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import StepOrderError, UsageError
from ckptstore.formats.history.checkpoint_ref import (
    LIKE_A_RANGE,
    LIKE_A_REF,
    Ref,
    node_of,
    parse_range,
    step_number,
    text_of,
)
from ckptstore.formats.history.records import ref_of

STEPS = st.integers(0, 2**53 - 1)
TERMS = st.integers(0, 10**10 - 1)
TAGS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,20}", fullmatch=True)
ENDS = st.sampled_from(["", ":max", ":min"])
REFS = st.one_of(
    st.just(Ref()),
    st.builds(Ref, STEPS),
    st.builds(Ref, STEPS, TERMS),
    st.builds(lambda name: Ref(tag=name), TAGS),
    st.builds(lambda name, end, highest: Ref(best=name + end, highest=highest), TAGS, ENDS, st.booleans()),
)


@given(REFS)
def test_a_ref_reads_as_it_is_written(ref: Ref) -> None:
    assert Ref.parse(str(ref)) == ref
    assert Ref.parse(f"  {ref}\n") == ref
    assert Ref.parse(ref) is ref
    assert LIKE_A_REF.match(str(ref))
    assert ref.is_latest == (str(ref) == "latest")


@given(REFS, REFS)
def test_a_range_reads_as_it_is_written(first: Ref, last: Ref) -> None:
    text = f"{first}..{last}"
    if text.count("..") > 1 or "..." in text:  # a tag with dots in it, of an older store
        with pytest.raises(UsageError, match="is not a range"):
            parse_range(f"{first}..{last}..")
        return
    assert parse_range(text) == (first, last)
    assert LIKE_A_RANGE.match(text)


@given(st.text(alphabet="latest0123456789@tag:.-+/ ", max_size=24))
def test_only_texts_in_the_form_of_a_ref_are_parsed(text: str) -> None:
    try:
        Ref.parse(text)
    except UsageError as error:
        why = str(error)
    else:
        why = ""
    # For a name that no tag may have, the command reports the name instead of taking it for a STORE.
    assert "is not a tag name" in why or bool(LIKE_A_REF.match(text.strip())) == (not why)


@given(STEPS, TERMS)
def test_the_node_of_a_ref(step: int, term: int) -> None:
    assert node_of(ref_of((term, step))) == (term, step)


@pytest.mark.parametrize("ref", ["latest", "5", "tag:best", "5@", "@5", "5@1@2", "x"])
def test_refs_that_name_no_node(ref: str) -> None:
    with pytest.raises(UsageError):
        node_of(ref)


def test_numbers_of_any_type() -> None:
    assert Ref.parse(7) == Ref.parse(np.uint8(7)) == Ref(7)
    assert (text_of(np.int64(7)), text_of("nonsense"), text_of(type("Info", (), {"ref": "5@1"})())) == (
        "7",
        "nonsense",  # the process that looks it up refuses it
        "5@1",
    )
    for wrong in (1.0, True, None, np.bool_(1)):
        with pytest.raises(UsageError, match="is not a REF"):
            Ref.parse(wrong)
        with pytest.raises(UsageError, match="is not a REF"):
            text_of(wrong)
        with pytest.raises(StepOrderError):
            step_number(wrong)


@pytest.mark.parametrize("name", ["", "no tag", "a@b", ".x", "x" * 129, 7])
def test_invalid_names_of_tags(name: Any) -> None:
    with pytest.raises(UsageError, match="is not a tag name: 1-128 letters"):
        Ref(tag=name)
    if isinstance(name, str):
        with pytest.raises(UsageError, match="is not a tag name: 1-128 letters"):
            Ref.parse(f"tag:{name}")


@pytest.mark.parametrize(
    ("ref", "tags", "note"),
    [("bets", ["best"], "did you mean tag:best?"), ("lates", [], "did you mean latest?"), ("x", ["best"], None)],
)
def test_the_error_suggests_what_was_meant(ref: str, tags: list[str], note: str | None) -> None:
    with pytest.raises(UsageError, match="use latest, STEP, STEP@TERM, tag:NAME or best:METRIC") as caught:
        Ref.parse(ref, tags)
    assert getattr(caught.value, "__notes__", []) == ([] if note is None else [note])


def test_a_checkpoint_is_no_ref_and_the_error_says_its_ref() -> None:
    info: Any = type("Info", (), {"ref": "5@1"})()
    with pytest.raises(UsageError) as caught:
        Ref.parse(info)
    assert caught.value.__notes__ == ["name a checkpoint by its ref: '5@1'"]


TAKEN_APART = re.compile(
    r"""partition\(["'](@|tag:)["']\)|split\(["'](@|\.\.)["']\)|startswith\(["']tag:|\\d\+?@|\]\+?@"""
)
OTHERS = {
    "formats/history/checkpoint_ref.py",
    "ckptstore/backends/object_store/object_options.py",  # URLs with a user's name
    "ckptstore/backends/fsspec_files.py",
    "cli/commands/repair.py",  # finds STEP@TERM in a sentence
    "tools/demo/report.py",  # prints a STEP, or "latest"
}


def test_no_other_module_parses_a_ref() -> None:
    root = Path(__file__).parents[2]
    found = {
        str(path.relative_to(root))
        for room in ("ckptstore", "cli", "formats", "tools")
        for path in (root / room).rglob("*.py")
        if TAKEN_APART.search(path.read_text()) and "conformance/page" not in str(path)
    }
    assert found == OTHERS & found
    assert "formats/history/checkpoint_ref.py" in found
