"""The golden optimizer steps give the recorded results: in both forms of our kernels, and in the page's decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import ckptstore.formats
from ckptstore.formats import kernel_choice, optim
from ckptstore.formats.checksums import chunk_hash, header_hash, xxh3_128
from ckptstore.formats.digest import digest
from ckptstore.formats.segment_files import step_codec
from ckptstore.formats.segment_files.segment import SegmentDoc, header_length, parse
from tests.kernel_forms import KINDS
from tools.conformance.page import steps as page
from tools.golden import make_codecs, make_steps
from tools.golden.golden_set import GoldenSet

GOLDEN = Path(ckptstore.formats.__file__).parent / "golden"
Set = GoldenSet[make_steps.Example]


def listing(one: Set) -> dict[str, Any]:
    assert (GOLDEN / one.listing).exists(), f"{GOLDEN} has no {one.listing}: `make golden` makes it"
    found: dict[str, Any] = json.loads((GOLDEN / one.listing).read_text())
    return found


def golden(one: Set, name: str) -> tuple[bytes, SegmentDoc]:
    data, expected = (GOLDEN / name).read_bytes(), listing(one)["segments"][name]
    header = data[: header_length(data, len(data), name)]
    assert (xxh3_128(data), header_hash(header)) == (expected["hash"], expected["header_hash"])
    return data, parse(header, len(data), name, lambda offset, length: data[offset : offset + length])


@pytest.mark.parametrize("one", make_steps.SETS, ids=lambda one: one.listing)
@pytest.mark.parametrize("reader", ["page", *KINDS])
def test_golden_steps_stay_readable(reader: str, one: Set, request: pytest.FixtureRequest) -> None:
    if reader != "page":
        request.addfinalizer(lambda: kernel_choice.use(None))
        kernel_choice.use(reader)
    (below, base), (data, doc) = golden(one, one.base), golden(one, one.change)
    old, tensors = base.tensors[20], doc.tensors[21]
    images: dict[str, bytes] = {}
    for group in step_codec.groups_of(tensors, "golden"):
        (chunk,) = tensors[group.leader].chunks
        payload = data[chunk.offset : chunk.offset + chunk.length]
        slots = []
        for slot in range(len(group.members[0])):
            parts = [old[member[slot]].chunks[0] for member in group.members]
            image = b"".join(below[part.offset : part.offset + part.length] for part in parts)
            slots.append(np.frombuffer(image, "<u4").copy())
        if reader == "page":
            slots = page.decode(group.encoding, group.rule.params, payload, slots)
        else:
            optim.decode([optim.StepLink(group.encoding, group.rule, payload)], slots)
        cut = len(slots[0]) // len(group.members)
        for number, member in enumerate(group.members):
            for name, part in zip(member, slots, strict=True):
                images[name] = part[number * cut : (number + 1) * cut].tobytes()
    assert {name: xxh3_128(image) for name, image in images.items()} == listing(one)["images"]
    for name, entry in tensors.items():
        assert (chunk_hash(images[name]), digest(images[name])) == (entry.chunks[0].decoded_hash, entry.digest)


def test_they_cover_the_page() -> None:
    documents = [golden(one, one.change)[1] for one in make_steps.SETS]
    leaders = [entry.params for doc in documents for entry in doc.tensors[21].values() if "rule" in entry.params]
    rules = [params["rule"] for params in leaders]
    missing = {*optim.RULES} - {rule["rule"] for rule in rules}
    assert not missing, f"no golden file has {missing}: add a row to SETS in tools/golden/make_steps.py"
    assert {params["encoding"] for params in leaders} == {*get_args(optim.Encoding)}
    assert {(rule["rule"], rule.get("variant")) for rule in rules} >= {
        *(("adam/1", variant) for variant in ("fma", "plain", "divide")),
        *(("sgd/1", variant) for variant in ("fma", "plain")),
    }
    for flag in ("amsgrad", "maximize", "buffer", "first", "nesterov"):
        assert {rule[flag] for rule in rules if flag in rule} == {True, False}, flag
    assert {len(params["members"]) for params in leaders} == {1, 2}


@pytest.mark.parametrize("maker", [make_steps, make_codecs], ids=["steps", "codecs"])
def test_the_scripts_make_the_golden_files(maker: object, tmp_path: Path) -> None:
    """The same images. Their codes changed: frames of literals are now our own (`codecs.literals`)."""
    maker.main(tmp_path)  # type: ignore[attr-defined]
    assert {path.name for path in tmp_path.iterdir()} <= {path.name for path in GOLDEN.iterdir()}
    listings = list(tmp_path.glob("*.json"))
    assert listings
    for path in listings:
        made, frozen = (json.loads((folder / path.name).read_text()) for folder in (tmp_path, GOLDEN))
        assert made["images"] == frozen["images"], path.name
        assert made["segments"].keys() == frozen["segments"].keys(), path.name
