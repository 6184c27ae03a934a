"""Payloads and parameters of optimizer steps that no encoder writes: refused, in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import optim

STEP = optim.Step(count=3, lr=1e-3)
SGD = optim.SGD().rule(STEP)
RULES = (optim.AdamW().rule(STEP), optim.SGD(momentum=0.9).rule(STEP), optim.Skip(("weight",)))
COUNT = 100
SPARSE = 3  # first of the sparse forms: fp32 values
ONE = bytes([4]) + b"\0\0\x80\x3f"  # the group of one value


def state(rule: optim.Rule, count: int = COUNT) -> list[np.ndarray]:
    return [np.zeros(count, "<f4") for _ in rule.slots]


def sparse(steps: bytes, met: int, values: bytes) -> bytes:
    return bytes([SPARSE]) + struct.pack("<II", len(steps), met) + bytes([1]) + steps + values


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.params["rule"])
def test_parameters(rule: optim.Rule) -> None:
    assert optim.rule(rule.params) == rule
    for wrong in ({"later": 1}, {"rule": "lion"}, {"rule": ["adam"]}, {"rule": None}):
        with pytest.raises(FormatError):
            optim.rule({**rule.params, **wrong})
    for name, value in rule.params.items():
        with pytest.raises(FormatError):
            optim.rule({key: other for key, other in rule.params.items() if key != name})
        wrong_type: Any = 1 if isinstance(value, bool) else not value
        with pytest.raises(FormatError):
            optim.rule({**rule.params, name: wrong_type})


def test_positions() -> None:
    found = state(SGD)
    optim.sparse.decode(SGD, sparse(b"\x07", 1, ONE), found)
    assert np.flatnonzero(found[0]).tolist() == [7]
    for steps, met in (
        (b"\x07\xff", 1),  # skips more than there is
        (b"\x64", 1),
        (b"\xff\x00", 1),
        (b"\xff", 1),
        (b"\x01\x01", 1),
        (b"\x01", 2),
        (b"\0" * 101, 101),
    ):
        with pytest.raises(CorruptSegmentError, match="positions"):
            optim.sparse.decode(SGD, sparse(steps, met, bytes([4]) + bytes(4 * met)), state(SGD))


def test_claims_cost_no_memory() -> None:
    """A plane of one repeated value takes two bytes, whatever length it claims."""
    payload = bytes([SPARSE]) + struct.pack("<II", 1 << 24, 1 << 24) + b"\0\1\0" + ONE
    optim.sparse.decode(SGD, sparse(b"\x07", 1, ONE), state(SGD))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptSegmentError):
            optim.sparse.decode(SGD, payload, state(SGD))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", [6, 127, 128 + 6, 255])
def test_an_unknown_form_of_a_gradient(form: int) -> None:
    for encoding in (optim.replayed, optim.sparse):
        with pytest.raises(CorruptSegmentError, match="unknown form"):
            encoding.decode(SGD, bytes([form]) + bytes(500), state(SGD))


@pytest.mark.parametrize("encoding", ["predicted", "replayed", "sparse"])
def test_what_follows_the_last_block(encoding: optim.Encoding) -> None:
    payload = {
        "predicted": optim.predicted.encode(SGD, state(SGD), state(SGD)).tobytes(),
        "replayed": optim.replayed.encode(SGD, state(SGD), None, np.ones(COUNT, "<f4")).tobytes(),
        "sparse": sparse(b"\x07", 1, ONE),
    }[encoding]
    decode = getattr(optim, encoding).decode
    decode(SGD, payload, state(SGD))
    optim.decode([optim.StepLink(encoding, SGD, payload)] * 2, state(SGD))
    with pytest.raises(CorruptSegmentError, match="follow"):
        decode(SGD, payload + b"\0", state(SGD))
    for links in ([payload, payload + b"\0"], [payload + b"\0", payload]):
        with pytest.raises(CorruptSegmentError, match="follow"):
            optim.decode([optim.StepLink(encoding, SGD, link) for link in links], state(SGD))


def test_a_payload_of_the_other_kind() -> None:
    dense = optim.replayed.encode(SGD, state(SGD), None, np.ones(COUNT, "<f4")).tobytes()
    with pytest.raises(CorruptSegmentError, match="dense"):
        optim.sparse.decode(SGD, dense, state(SGD))
    for encoding, payload in (("sparse", dense), ("replayed", sparse(b"\x07", 1, ONE))):
        with pytest.raises(CorruptSegmentError, match=f"said to be {encoding}"):
            optim.decode([optim.StepLink(encoding, SGD, payload)], state(SGD))  # type: ignore[arg-type]


def test_a_state_longer_than_a_chunk() -> None:
    rule = optim.Skip(("weight",))
    blocks = -(-optim.CHUNK_NUMBERS // (1 << 18))
    unchanged = b"\xff" * blocks
    optim.predicted.decode(rule, unchanged, state(rule, optim.CHUNK_NUMBERS))
    for payload in (unchanged, unchanged + b"\xff"):
        with pytest.raises(FormatError, match="a chunk of"):
            optim.predicted.decode(rule, payload, state(rule, optim.CHUNK_NUMBERS + 1))


def test_gradients_are_flat_and_contiguous() -> None:
    for gradient in (np.ones((10, 10), "<f4"), np.ones(2 * COUNT, "<f4")[::2]):
        with pytest.raises(ValueError, match="flat, contiguous"):
            optim.replayed.encode(SGD, state(SGD), None, gradient)
