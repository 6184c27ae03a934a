"""SPEC.md 5.5 holds: a decoder written from the page alone decodes every payload like ours, bit for bit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore.formats
from ckptstore.errors import CorruptSegmentError, FormatError, IncompatibleFormatError
from ckptstore.formats import kernel_choice, optim
from tests.formats import test_optim
from tests.forms import short_or
from tests.kernel_forms import BUILT
from tools.conformance.page import steps as page
from tools.conformance.page.codecs import RefusedError
from tools.fuzz.optimizers import RULES as FUZZED

SPEC = (Path(ckptstore.formats.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
FIRST, LATER = optim.Step(count=1, lr=1e-2), optim.Step(count=9, lr=1e-3, clip=0.37, loss_scale=1024.0)
GROUPS: dict[str, Any] = {
    "adamw": optim.AdamW(beta2=0.95, weight_decay=0.1),
    "adam": optim.Adam(weight_decay=0.1, maximize=True),
    "amsgrad": optim.AdamW(amsgrad=True),
    "amsgrad, l2": optim.Adam(amsgrad=True, weight_decay=0.05, maximize=True),
    "large share": optim.AdamW(beta1=0.2),
    "no first moment": optim.Adam(beta1=0.0),
    "sgd": optim.SGD(),
    "sgd, decay": optim.SGD(weight_decay=0.1, maximize=True),
    "momentum": optim.SGD(momentum=0.9, weight_decay=5e-4),
    "dampening": optim.SGD(momentum=0.9, dampening=0.3),
    "all dampened": optim.SGD(momentum=0.9, dampening=1.0),
    "nesterov": optim.SGD(momentum=0.9, nesterov=True),
    "nesterov, decay": optim.SGD(momentum=0.8, nesterov=True, weight_decay=0.1, maximize=True),
}
SPECIAL = np.array(
    [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF], "<u4"
)
Arrays = list[np.ndarray]


def rules() -> list[optim.Rule]:
    """Every group in every variant, its first step and a later one; and skipped steps."""
    found = [
        group.rule(step, variant) for group in GROUPS.values() for step in (FIRST, LATER) for variant in group.variants
    ]
    nesterov = optim.SGD(momentum=0.9, nesterov=True, weight_decay=0.1).rule(LATER)
    return [
        *found,
        replace(nesterov, share=np.float32(0.7).item()),
        optim.AdamW(amsgrad=True).rule(replace(LATER, skipped=True)),
        optim.Skip(("weight", "momentum_buffer")),
        optim.Skip(("a", "b", "c", "d", "e", "f", "g", "h")),
    ]


RULES = rules()
IDS = [f"{number}-{rule.params['rule']}-{rule.params.get('variant', '')}" for number, rule in enumerate(RULES)]


def trained(rule: optim.Rule, count: int, seed: int) -> Arrays:
    """A state as in training."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-6, -3, count)
    state = [rng.normal(0, 0.02, count)] + [rng.normal(0, 0.3, count) * scale for _ in rule.slots[1:2]]
    return [part.astype("<f4") for part in state + [scale**2 * rng.uniform(0.5, 2, count) for _ in rule.slots[2:]]]


def noise(rng: np.random.Generator, count: int) -> np.ndarray:
    """Any patterns at all, many of them special."""
    words = rng.integers(0, 1 << 32, count, "<u4")
    return np.where(rng.random(count) < 0.4, rng.choice(SPECIAL, count), words).astype("<u4")


def patterns(state: Arrays) -> Arrays:
    return [part.view("<u4") for part in state]


def same(found: Arrays, wanted: Arrays) -> bool:
    return all(np.array_equal(a.view("<u4"), b.view("<u4")) for a, b in zip(found, wanted, strict=True))


def gradients(values: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """All six forms."""
    count = len(values)
    with np.errstate(all="ignore"):
        kinds = {
            "fp32": values,
            "bf16": values.astype(ml_dtypes.bfloat16),
            "fp16": (values * np.float32(2**14)).astype(np.float16),
        }
    where = np.flatnonzero(rng.random(count) < 0.02)
    sparse = {f"sparse {name}": optim.SparseGradient(where, kind[where], count) for name, kind in kinds.items()}
    return {**kinds, **sparse, "empty": optim.SparseGradient(where[:0], values[:0], count)}


def payloads(rule: optim.Rule, old: Arrays, new: Arrays, gradient: np.ndarray, rng: Any) -> list[tuple[Any, bytes]]:
    """Every encoding of a step, with and without residuals."""
    made: list[tuple[Any, bytes]] = [("predicted", optim.predicted.encode(rule, old, new).tobytes())]
    for given_gradient in gradients(gradient, rng).values():
        encoding = "sparse" if isinstance(given_gradient, optim.SparseGradient) else "replayed"
        written = [optim.replayed.encode(rule, old, after, given_gradient) for after in (new, None)]
        made += [(encoding, payload.tobytes()) for payload in written]
    return made + scaled(rule, old, new, gradient)


def scaled(rule: optim.Rule, old: Arrays, new: Arrays, gradient: np.ndarray) -> list[tuple[Any, bytes]]:
    """The encodings with scales, if the rule has them."""
    if not optim.scaled.suits(rule, None):
        return []
    made: list[tuple[Any, bytes]] = [("predicted/2", optim.scaled.encode(rule, old, new, None).tobytes())]
    with np.errstate(all="ignore"):
        halves = gradient.astype(ml_dtypes.bfloat16)
    for values in (gradient, halves):
        written = [optim.scaled.encode(rule, old, after, values) for after in (new, None)]
        made += [("replayed/2", payload.tobytes()) for payload in written]
    return made


def ours(encoding: Any, rule: optim.Rule, payload: bytes, old: Arrays) -> Arrays:
    state = [part.copy() for part in old]
    optim.decode([optim.StepLink(encoding, optim.rule(rule.params), payload)], state)
    return state


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_training_states(rule: optim.Rule) -> None:
    rng, count = np.random.default_rng(3), short_or(1200, 3000)
    old = trained(rule, count, 1)
    gradient = (rng.normal(0, 1, count) * 10.0 ** rng.uniform(-6, -3, count)).astype("<f4")
    new = [part.copy() for part in old]
    optim.advance(rule, new, gradient)
    new[0].view("<u4")[::100] += 1  # values that another kernel rounded differently
    for encoding, payload in payloads(rule, old, new, gradient, rng):
        found = page.decode(encoding, rule.params, payload, patterns(old))
        assert same(found, ours(encoding, rule, payload, old)), encoding
        if encoding.startswith("predicted") or payload[0] >= 128:
            assert same(found, new), encoding


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_any_patterns(rule: optim.Rule, request: pytest.FixtureRequest) -> None:
    """NaNs of all kinds, infinities, zeros of both signs, subnormal numbers: in old state, new state and gradient."""
    request.addfinalizer(lambda: kernel_choice.use(None))
    read: dict[tuple[Any, bytes], Arrays] = {}  # the kernels write the same payloads, and the page's decoder is slow
    for kind in BUILT:
        kernel_choice.use(kind)
        rng, count = np.random.default_rng(7), short_or(250, 1200)
        old, new = ([noise(rng, count).view("<f4") for _ in rule.slots] for _ in range(2))
        for encoding, payload in payloads(rule, old, new, noise(rng, count).view("<f4"), rng):
            if (encoding, payload) not in read:
                read[encoding, payload] = page.decode(encoding, rule.params, payload, patterns(old))
            assert same(read[encoding, payload], ours(encoding, rule, payload, old)), (kind, encoding)


def test_the_first_buffer_is_predicted_as_a_product_with_zero() -> None:
    """Its sign, and NaN for non-finite values: not 0."""
    rule = optim.SGD(momentum=0.9).rule(FIRST)
    old = [np.ones(4, "<f4"), np.array([-2.0, 3.0, -np.inf, np.nan], "<f4")]
    with np.errstate(all="ignore"):
        guess = page.prediction(page.Rule(rule.params), "momentum_buffer", dict(zip(rule.slots, old, strict=True)), {})
    assert guess.view("<u4").tolist() == [0x80000000, 0, 0x7FC00000, 0x7FC00000]
    payload = optim.predicted.encode(rule, old, [old[0], guess]).tobytes()
    assert payload[0] == 255  # nothing was missed
    assert same(page.decode("predicted", rule.params, payload, patterns(old)), [old[0], guess])


def test_skipped_slots_stand_in_their_own_order() -> None:
    """The weight first: if only the weight of the slots changed, its residual is the first."""
    rule = optim.Skip(("weight", "exp_avg", "exp_avg_sq"))
    old = [np.full(300, slot, "<f4") for slot in (1, 2, 3)]
    new = [old[0] + np.float32(1), old[1], old[2]]
    payload = optim.predicted.encode(rule, old, new).tobytes()
    assert payload[0] != 255
    assert payload[-2:] == b"\xff\xff"
    assert same(page.decode("predicted", rule.params, payload, patterns(old)), new)


def test_several_blocks() -> None:
    rule = GROUPS["adamw"].rule(LATER)
    count = page.BLOCK + 700
    old = trained(rule, count, 5)
    gradient = (np.random.default_rng(2).normal(0, 1e-4, count)).astype("<f4")
    new = [part.copy() for part in old]
    optim.advance(rule, new, gradient)
    new[0].view("<u4")[5::1000] ^= 1
    made = payloads(rule, old, new, gradient, np.random.default_rng(4))
    for encoding, payload in [*made[:15:3], *scaled(rule, old, new, gradient)[:2]]:
        found = page.decode(encoding, rule.params, payload, patterns(old))
        assert same(found, ours(encoding, rule, payload, old)), encoding


@settings(deadline=None, max_examples=short_or(24, 60))
@given(st.data(), st.sampled_from(range(len(RULES))), st.integers(0, 2**32))
def test_damage_is_taken_alike(data: st.DataObject, number: int, seed: int) -> None:
    """Both refuse the same payloads, and decode the others alike."""
    rule, rng = RULES[number], np.random.default_rng(seed)
    old, new = trained(rule, 400, seed), trained(rule, 400, seed + 1)
    made = payloads(rule, old, new, rng.normal(0, 1e-4, 400).astype("<f4"), rng)
    encoding, payload = made[data.draw(st.integers(0, len(made) - 1))]
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, min(len(damaged), 40) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        expected = page.decode(encoding, rule.params, bytes(damaged), patterns(old))
    except RefusedError:
        with pytest.raises((CorruptSegmentError, FormatError)):
            ours(encoding, rule, bytes(damaged), old)
    else:
        assert same(ours(encoding, rule, bytes(damaged), old), expected)


@pytest.mark.parametrize(
    ("encoding", "form"),
    [("replayed", 3), ("replayed", 133), ("sparse", 0), ("sparse", 6), ("replayed/2", 2), ("replayed/2", 131)],
)
def test_an_encoding_has_its_own_forms(encoding: Any, form: int) -> None:
    rule = GROUPS["adamw"].rule(LATER)
    old = [np.zeros(8, "<f4") for _ in rule.slots]
    payload = bytes([form]) + bytes(100)
    with pytest.raises(RefusedError):
        page.decode(encoding, rule.params, payload, patterns(old))
    with pytest.raises(CorruptSegmentError):
        ours(encoding, rule, payload, old)


@pytest.mark.parametrize("encoding", optim.SCALED)
def test_scales_are_adams(encoding: Any) -> None:
    rule, old = GROUPS["sgd"].rule(LATER), [np.zeros(8, "<f4")]
    with pytest.raises(RefusedError):
        page.decode(encoding, rule.params, bytes(9), patterns(old))
    with pytest.raises(FormatError, match="Adam"):
        ours(encoding, rule, bytes(9), old)
    with pytest.raises(ValueError, match="no encoding with scales"):
        optim.scaled.encode(rule, old, old, None)


# ---- the ids of rules


@pytest.mark.parametrize("unknown", ["adam/2", "adam", "sgd/0", "skip", "lion/1"])
def test_other_arithmetic_is_another_id_and_is_refused(unknown: str) -> None:
    """Never mistaken for the known one: a name alone is not an id."""
    params = {**GROUPS["adamw"].rule(LATER).params, "rule": unknown}
    known = f"this version knows {', '.join(optim.RULES)}"
    with pytest.raises(IncompatibleFormatError, match=f"unknown optimizer rule '{unknown}': {known}"):
        optim.rule(params)
    with pytest.raises(RefusedError):
        page.Rule(params)


def test_every_rule_is_tried() -> None:
    groups = {rule.params["rule"] for group in test_optim.GROUPS.values() for rule in [group.rule(LATER)]}
    assert {rule.params["rule"] for rule in RULES} == {*optim.RULES}, "GROUPS above has each optimizer"
    assert groups == {*optim.RULES} - {"skip/1"}, "GROUPS in tests/formats/test_optim.py has each optimizer"
    assert {rule.params["rule"] for rule in FUZZED} == {*optim.RULES}, "RULES in tools/fuzz/optimizers.py has each rule"


def test_rules_are_those_of_the_page() -> None:
    rows = re.findall(r"^\| `(\w+/\d+)` \|([^|]+)\|([^|]+)\|$", SPEC, re.MULTILINE)
    assert [row[0] for row in rows] == list(optim.RULES), "the rows of the table in SPEC 5.5.1, in the order of RULES"
    members = {row[0]: set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", row[2]))) for row in rows}
    for rule in RULES:
        told = members[rule.params["rule"]] | {"rule"}
        assert told == set(rule.params)
        if rule.params["rule"] != "skip/1":
            assert page.Rule(rule.params).slots == list(rule.slots)


def test_rules_in_the_docs_are_those_of_the_page() -> None:
    """docs/optimizer.md leaves rules and arithmetic to SPEC.md: what it names is there."""
    docs = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+/\d+)`", docs))
    assert named
    assert named <= {*optim.RULES, *optim.SCALED}
    for sentence in (r"`\[b \* 0\]` \(which is -0 or NaN for some b", r"`momentum_buffer`: `\[b \* momentum\]`"):
        assert len(re.findall(sentence, SPEC)) == 1
