"""SPEC.md holds: its limits are the code's, and a reader written from it alone reads the golden segments."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import xxhash

import ckptstore.formats
from tools.conformance.page import segments

FORMATS = Path(ckptstore.formats.__file__).parent
SPEC = (FORMATS / "SPEC.md").read_text(encoding="utf-8")
EXPECTED = json.loads((FORMATS / "golden" / "segments-1.json").read_text())["segments"]

LIMITS = re.findall(r"^\|[^|]+\| (\d+) \| `(\w+)\.(\w+)` \|$", SPEC, re.MULTILINE)


def test_the_table_of_limits_was_found() -> None:
    assert len(LIMITS) >= 16


@pytest.mark.parametrize(("value", "module", "name"), LIMITS, ids=[name for _, _, name in LIMITS])
def test_limits_are_those_of_the_code(value: str, module: str, name: str) -> None:
    assert getattr(importlib.import_module(f"ckptstore.formats.{module}"), name) == int(value)


def test_dtypes_are_those_of_the_code() -> None:
    from ckptstore.formats.dtypes import DTYPES

    rows = re.findall(r"^\| (`\w+`[^|]*)\| ([\d, ]+) \| ([^|]+) \|$", section("2 Element types"), re.MULTILINE)
    named: dict[str, tuple[int, str]] = {}
    for names, sizes, stored in rows:
        codes = re.findall(r"`([A-Z]\w+)`", names)
        widths = [int(size) for size in sizes.split(",")] * (1 if "," in sizes else len(codes))
        targets = codes if "itself" in stored else re.findall(r"`(\w+)`", stored)
        named |= {code: (width, target) for code, width, target in zip(codes, widths, targets, strict=True)}
    assert named == {dtype.name: (dtype.itemsize, dtype.storage) for dtype in DTYPES.values()}


def test_tags_are_those_of_the_code() -> None:
    from ckptstore.formats import ranked, state, tree, values

    told = set(re.findall(r"`(\$\w+)`", section("3.1 The tree")))
    source = "".join(
        Path(module.__file__ or "").read_text(encoding="utf-8") for module in (ranked, state, tree, values)
    )
    assert told == set(re.findall(r'"(\$[a-z]+)"', source))


def test_links_lead_somewhere() -> None:
    headings = {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", SPEC, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", SPEC)) <= headings


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    return re.split(r"^#+ ", SPEC.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_reader_made_from_the_page_reads_the_golden_segments(name: str) -> None:
    data = (FORMATS / "golden" / name).read_bytes()
    assert segments.read(data) == EXPECTED[name]["doc"]
    header = EXPECTED[name]["header"]
    assert xxhash.xxh3_128_hexdigest(data[:header]) == EXPECTED[name]["header_hash"]
