"""The golden texts of the log are read, refused or found damaged as recorded: by us and by the page's reader."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

import ckptstore.formats
from ckptstore.errors import FormatError, IncompatibleFormatError
from ckptstore.formats.history import folds, record_text
from ckptstore.formats.history.records import CommitRecord, OpenRecord
from tools.conformance.page import log as page
from tools.golden import make_texts

EXPECTED = json.loads((Path(ckptstore.formats.__file__).parent / "golden" / "texts-1.json").read_text())
RUN, CASES = EXPECTED["run"], {case["name"]: case for case in EXPECTED["cases"]}
MANIFESTS = "e" * 32


def manifest_of(case: dict[str, Any]) -> bytes:
    return zstandard.decompress(base64.b64decode(case["manifest_zstd"]), max_output_size=1 << 24)


def decoded(case: dict[str, Any], data: bytes) -> bytes:
    """Read it, and write it again."""
    name = case["name"]
    match case["kind"]:
        case "slot":
            fetched = manifest_of(case) if "manifest_zstd" in case else b""
            record = record_text.decode_record(
                data, seq=case["seq"], run=RUN, what=name, fetch=lambda _key, _size: fetched
            )
            if isinstance(record, OpenRecord):
                return record_text.encode_open(record, seq=case["seq"], run=RUN)
            assert isinstance(record, CommitRecord)
            return record_text.encode_commit(record, seq=case["seq"], run=RUN, manifest=MANIFESTS)[0]
        case "format":
            return record_text.encode_format(record_text.decode_format(data, what=name))
        case "request":
            return record_text.encode_request(record_text.decode_request(data, run=RUN, what=name), run=RUN)
        case "pin":
            return record_text.encode_pin(record_text.decode_pin(data, what=name))
    catalog = folds.decode_fold(data, seq=case["seq"], run=RUN, digest16=case["hash"], what=name)
    again, digest = folds.encode_fold(catalog, run=RUN)
    line, _, columns = zstandard.decompress(again.split(b"\n", 2)[2]).partition(b"\n")
    assert json.loads(line) == case["holds"]
    assert columns == base64.b64decode(case["columns"])
    assert digest[:16] == case["hash"] or list(zstandard.ZSTD_VERSION) != EXPECTED["zstd"]
    return data


def bytes_of(case: dict[str, Any]) -> bytes:
    return case["text"].encode("ascii") if "text" in case else base64.b64decode(case["base64"])


def test_there_are_some_of_every_kind_and_outcome() -> None:
    assert {case["kind"] for case in CASES.values()} == {"slot", "format", "request", "pin", "fold"}
    assert {case["outcome"] for case in CASES.values()} == {"read", "incompatible", "damaged"}
    asked = "".join(case.get("text", "") for case in CASES.values())
    assert all(f'"{name}"' in asked for name in ("incompat", "ro_compat", "features", "manifest", "parent", "swept"))


@pytest.mark.parametrize("name", CASES)
def test_golden_texts_are_read_as_they_say(name: str) -> None:
    case = CASES[name]
    data = bytes_of(case)
    if case["outcome"] == "read":
        assert (
            json.loads(decoded(case, data)[:-34]) == json.loads(data[:-34]) if "text" in case else decoded(case, data)
        )
        return
    with pytest.raises(FormatError) as caught:
        decoded(case, data)
    assert isinstance(caught.value, IncompatibleFormatError) == (case["outcome"] == "incompatible")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] in ("slot", "fold")])
def test_the_reader_from_the_page_takes_them_likewise(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    data = bytes_of(case)
    (tmp_path / "fold").mkdir()
    if case["kind"] == "fold":
        (tmp_path / "fold" / f"{case['seq']:020d}-{case['hash']}").write_bytes(data)
        catalog, following = page.newest_fold(tmp_path, RUN)
        assert following == (case["seq"] + 1 if case["outcome"] == "read" else 0)
        if case["outcome"] == "read":
            ours = folds.decode_fold(data, seq=case["seq"], run=RUN, digest16=case["hash"], what=name)
            assert set(catalog.promised()) == set(ours.checkpoints)
            assert catalog.segments.keys() == ours.segments.keys()
            assert catalog.parents == {term: one.parent and list(one.parent) for term, one in ours.terms.items()}
        return
    if "manifest_zstd" in case:
        (tmp_path / "seg" / "0000000001").mkdir(parents=True)
        (tmp_path / "seg" / "0000000001" / f"{MANIFESTS}.json").write_bytes(manifest_of(case))
    folder = tmp_path / "log"
    folder.mkdir()
    (tmp_path / "FORMAT").write_text(CASES["FORMAT"]["text"])
    (folder / f"{0:020d}").write_bytes(data)
    outcome = "read"
    try:
        slot = page.unsealed(data)
        page.check_slot(slot, RUN, case["seq"])
        page.whole(tmp_path, slot)
    except page.DamagedError:
        outcome = "damaged"
    except page.RefusedError:
        outcome = "incompatible"
    assert outcome == case["outcome"]


def test_the_script_makes_the_golden_texts(tmp_path: Path) -> None:
    make_texts.main(tmp_path)
    made = json.loads((tmp_path / "texts-1.json").read_text())
    if list(zstandard.ZSTD_VERSION) == EXPECTED["zstd"]:
        assert made == EXPECTED
