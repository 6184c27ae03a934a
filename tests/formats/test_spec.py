"""SPEC.md holds: its limits are the code's, and a reader written from it alone reads the golden segments."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import xxhash

import ckptstore.formats
from ckptstore.formats.dtypes import DTYPES
from tools.conformance.page import segments

FORMATS = Path(ckptstore.formats.__file__).parent
SPEC = (FORMATS / "SPEC.md").read_text(encoding="utf-8")
EXPECTED = json.loads((FORMATS / "golden" / "segments-1.json").read_text())["segments"]

LIMITS = re.findall(r"^\|[^|]+\| (\d+) \| `(\w+)\.(\w+)` \|$", SPEC, re.MULTILINE)


def test_the_table_of_limits_was_found() -> None:
    assert len(LIMITS) >= 16


@pytest.mark.parametrize(("value", "module", "name"), LIMITS, ids=[name for _, _, name in LIMITS])
def test_limits_are_those_of_the_code(value: str, module: str, name: str) -> None:
    files = [*FORMATS.rglob(f"{module}.py"), *FORMATS.glob(f"{module}/__init__.py")]
    (path,) = files  # no two modules have one name
    dotted = ".".join(path.relative_to(FORMATS).with_suffix("").parts).removesuffix(".__init__")
    assert getattr(importlib.import_module(f"ckptstore.formats.{dotted}"), name) == int(value)


def test_dtypes_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (`\w+`[^|]*)\| ([\d, ]+) \| ([^|]+) \|$", section("2 Element types"), re.MULTILINE)
    named: dict[str, tuple[int, str]] = {}
    for names, sizes, stored in rows:
        codes = re.findall(r"`([A-Z]\w+)`", names)
        widths = [int(size) for size in sizes.split(",")] * (1 if "," in sizes else len(codes))
        targets = codes if "itself" in stored else re.findall(r"`(\w+)`", stored)
        named |= {code: (width, target) for code, width, target in zip(codes, widths, targets, strict=True)}
    assert named == {dtype.name: (dtype.itemsize, dtype.storage) for dtype in DTYPES.values()}


def test_tags_are_those_of_the_code() -> None:
    from ckptstore.formats.states import rank_trees, state, tree, values

    told = set(re.findall(r"`(\$\w+)`", section("3.1 The tree")))
    source = "".join(
        Path(module.__file__ or "").read_text(encoding="utf-8") for module in (rank_trees, state, tree, values)
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


ROWS = re.findall(r"^\| `(F8_\w+)` \| s, (\d) bits e, (\d) bits f, bias (\d+)\. (.+) \|$", SPEC, re.MULTILINE)


@pytest.mark.parametrize(("name", "exponent", "fraction", "bias", "told"), ROWS, ids=[row[0] for row in ROWS])
def test_numbers_of_small_floats_are_those_of_the_code(
    name: str, exponent: str, fraction: str, bias: str, told: str
) -> None:
    """Section 2: by the formula of the page, and by the dtype of the code."""
    bits, shift = int(fraction), int(bias)
    numbers = np.arange(256, dtype=np.uint8).view(DTYPES[name].numpy).astype(np.float64)
    for byte, number in enumerate(numbers.tolist()):
        sign, e, f = byte >> 7, byte >> bits & (1 << int(exponent)) - 1, byte & (1 << bits) - 1
        if "e = 31" in told and e == 31:
            assert (np.isinf(number) and (number < 0) == sign) if f == 0 else np.isnan(number)
        elif f"{byte:02x}" in told.split("NaN")[0].replace(".", " ").split():
            assert np.isnan(number)
        else:
            scaled = (1 + f / 2**bits) * 2.0 ** (e - shift) if e else f / 2**bits * 2.0 ** (1 - shift)
            assert number == (-1) ** sign * scaled


def test_the_rows_of_numbers_were_found() -> None:
    assert [row[0] for row in ROWS] == ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"]
    scales = np.arange(256, dtype=np.uint8).view(DTYPES["F8_E8M0"].numpy).astype(np.float64)
    assert scales[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert np.isnan(scales[255])
    assert np.frombuffer(bytes([0, 1, 2, 255]), DTYPES["BOOL"].numpy).tolist() == [False, True, True, True]
