"""Optimizer steps are restored bit for bit: any values, computed by any arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import optim
from ckptstore.formats.optim import step_tiles
from tests.forms import short_or

ADAM = optim.AdamW(beta2=0.95, weight_decay=0.1)
STEP = optim.Step(count=40, lr=1e-3, clip=0.5)
GROUPS: dict[str, optim.Optimizer] = {
    "adamw": ADAM,
    "amsgrad": optim.Adam(weight_decay=0.1, amsgrad=True, maximize=True),
    "large share": optim.AdamW(beta1=0.2),
    "momentum": optim.SGD(momentum=0.9, weight_decay=5e-4),
    "dampening": optim.SGD(momentum=0.9, dampening=0.3),
    "nesterov": optim.SGD(momentum=0.9, nesterov=True),
    "sgd": optim.SGD(),
}
SPECIAL = np.array(
    [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF], "<u4"
)


def training(rule: optim.Rule, count: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """An old state as in training, a gradient, and the new state by the rule."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-6, -3, count)
    old = [(rng.normal(0, 0.02, count)).astype("<f4")]
    old += [(rng.normal(0, 1, count) * scale * 0.3).astype("<f4") for _ in rule.slots[1:2]]
    old += [(scale**2 * rng.uniform(0.5, 2, count)).astype("<f4") for _ in rule.slots[2:]]
    gradient = (rng.normal(0, 1, count) * scale).astype("<f4")
    new = [part.copy() for part in old]
    optim.advance(rule, new, gradient)
    return old, gradient, new


def noise(rng: np.random.Generator, count: int) -> np.ndarray:
    """Any patterns at all, many of them special."""
    words = rng.integers(0, 1 << 32, count, "<u4")
    return np.where(rng.random(count) < 0.3, rng.choice(SPECIAL, count), words).astype("<u4")


def equal(state: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    return all(np.array_equal(a.view("<u4"), b.view("<u4")) for a, b in zip(state, wanted, strict=True))


def copy(state: list[np.ndarray]) -> list[np.ndarray]:
    return [part.copy() for part in state]


def sparse_of(gradient: np.ndarray, share: float = 0.01) -> optim.SparseGradient:
    kept = np.sort(
        np.argpartition(np.abs(gradient), -max(1, int(share * len(gradient))))[-max(1, int(share * len(gradient))) :]
    )
    return optim.SparseGradient(kept, gradient[kept], len(gradient))


# ------------------------------------------------------------------------------------------------------ restored bits


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("count", [0, 1, 100, step_tiles.BLOCK_NUMBERS + 37])
def test_every_encoding_restores_a_step(name: str, count: int):
    for variant in GROUPS[name].variants:
        rule = GROUPS[name].rule(STEP, variant)
        old, gradient, new = training(rule, count)
        if count:
            new[0].view("<u4")[count // 2] ^= 0x00400001
        state = copy(old)
        optim.predicted.decode(rule, optim.predicted.encode(rule, old, new), state)
        assert equal(state, new)
        state = copy(old)
        payload = optim.replayed.encode(rule, old, new, gradient)
        optim.replayed.decode(rule, payload, state)
        assert equal(state, new)


@settings(max_examples=short_or(24, 60), deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(sorted(GROUPS)),
    st.integers(0, 3000),
    st.sampled_from(("f4", "f2", "u2", "u4")),
)
def test_any_patterns_come_back(seed: int, name: str, count: int, kind: str):
    """States that no optimizer made, gradients of any bits: only the size, never the bits, depend on the prediction."""
    rng = np.random.default_rng(seed)
    variant = rng.choice(GROUPS[name].variants)
    clip = float(rng.choice(np.array([1.0, 0.25, np.nan, np.inf])))
    rule = GROUPS[name].rule(optim.Step(int(rng.integers(1, 5)), 10.0 ** rng.uniform(-9, 9), clip=clip), variant)
    old = [noise(rng, count) for _ in rule.slots]
    new = [np.where(rng.random(count) < 0.5, noise(rng, count), part).astype("<u4") for part in old]
    gradient = noise(rng, count)[: count if np.dtype(kind).itemsize == 4 else -(-count // 2)].view(kind)[:count]
    for encoding, payload in (
        ("predicted", optim.predicted.encode(rule, old, new)),
        ("replayed", optim.replayed.encode(rule, old, new, gradient)),
        ("sparse", optim.sparse.encode(rule, old, new, optim.SparseGradient(np.arange(count), gradient, count))),
    ):
        state = copy(old)
        getattr(optim, encoding).decode(optim.rule(rule.params), payload, state)
        assert equal(state, new)


@pytest.mark.parametrize("name", GROUPS)
def test_nothing_computed_depends_on_the_processors_nan(name: str):
    """Every NaN that a rule makes is 7fc00000; patterns that it only keeps stay."""
    rng = np.random.default_rng(9)
    for variant in GROUPS[name].variants:
        rule = GROUPS[name].rule(STEP, variant)
        old, new = ([noise(rng, 5000).view("<f4") for _ in rule.slots] for _ in range(2))
        out = np.empty(5000, "<f4")
        with np.errstate(all="ignore"):
            for slot in set(rule.order) - set(rule.kept):
                rule.predict(slot, old, new, out)
                assert set(out.view("<u4")[np.isnan(out)].tolist()) == {0x7FC00000}
        state = copy(old)
        optim.advance(rule, state, noise(rng, 5000))
        assert {int(word) for part in state for word in part.view("<u4")[np.isnan(part)]} == {0x7FC00000}


def test_gradients_come_back_as_they_were():
    """Without residuals the payload is only the gradient, and decoding is the replay."""
    rule = ADAM.rule(STEP)
    old, gradient, _ = training(rule, 70_000)
    halves = (gradient.view("<u4") >> 16).astype("<u2")
    for given_gradient in (gradient, gradient.view("<u4"), halves, gradient.astype("f2"), sparse_of(gradient)):
        dense = given_gradient.dense() if isinstance(given_gradient, optim.SparseGradient) else given_gradient
        wanted = copy(old)
        optim.advance(rule, wanted, dense)
        state = copy(old)
        optim.replayed.decode(rule, optim.replayed.encode(rule, old, None, given_gradient), state)
        assert equal(state, wanted)


def test_a_skipped_step_and_a_step_of_other_settings():
    rule = ADAM.rule(STEP)
    old, gradient, new = training(rule, 50_000)
    skipped = ADAM.rule(optim.Step(40, 1e-3, skipped=True))
    assert len(optim.predicted.encode(skipped, old, old)) <= 16
    state = copy(old)
    optim.predicted.decode(skipped, optim.predicted.encode(skipped, old, new), state)
    assert equal(state, new)
    other = optim.AdamW(weight_decay=0.3).rule(optim.Step(7, 2e-3))
    for payload, decode in (
        (optim.predicted.encode(other, old, new), optim.predicted.decode),
        (optim.replayed.encode(other, old, new, gradient), optim.replayed.decode),
    ):
        state = copy(old)
        decode(other, payload, state)
        assert equal(state, new)


def test_chunks_and_threads_give_the_same_bits():
    rule = ADAM.rule(STEP)
    count = 3 * step_tiles.BLOCK_NUMBERS // 2
    old, gradient, new = training(rule, count)
    cuts = [0, 1, 777, step_tiles.BLOCK_NUMBERS - 5, count]
    ranges = list(itertools.pairwise(cuts))

    def part(arrays: list[np.ndarray], start: int, stop: int) -> list[np.ndarray]:
        return [array[start:stop] for array in arrays]

    with ThreadPoolExecutor(4) as pool:
        payloads = list(pool.map(lambda r: optim.predicted.encode(rule, part(old, *r), part(new, *r)), ranges))
        state = copy(old)
        list(pool.map(lambda r, p: optim.predicted.decode(rule, p, part(state, *r)), ranges, payloads))
        assert equal(state, new)
        state = copy(old)
        list(pool.map(lambda r: optim.advance(rule, part(state, *r), gradient[r[0] : r[1]]), ranges))
        assert equal(state, new)


def test_a_chain_is_its_links_one_after_another():
    count = step_tiles.BLOCK_NUMBERS + 100
    rule = ADAM.rule(STEP)
    start, _, _ = training(rule, count)
    state, links = copy(start), []
    for index, encoding in enumerate(("predicted", "replayed", "sparse", "predicted")):
        rule = ADAM.rule(optim.Step(41 + index, 1e-3, skipped=index == 3))
        gradient = training(rule, count, seed=index)[1]
        kept = sparse_of(gradient)
        after = copy(state)
        optim.advance(rule, after, kept.dense() if encoding == "sparse" else gradient)
        after[0].view("<u4")[index] ^= 1
        if encoding == "predicted":
            payload = optim.predicted.encode(rule, state, after)
        else:
            payload = optim.replayed.encode(rule, state, after, kept if encoding == "sparse" else gradient)
        links.append(optim.StepLink(encoding, rule, payload))
        state = after
    restored = copy(start)
    optim.decode(links, restored)
    assert equal(restored, state)
    optim.decode([], restored)
    with pytest.raises(CorruptSegmentError, match="sparse"):
        optim.decode([optim.StepLink("sparse", links[1].rule, links[1].payload)], copy(start))
    with pytest.raises(ValueError, match="slots"):
        optim.decode([links[0], optim.StepLink("predicted", optim.SGD().rule(STEP), b"")], copy(start))


# ----------------------------------------------------------------------------------------------------- sizes and memory


def bits(payload: np.ndarray, count: int) -> float:
    return 8 * len(payload) / count


def test_the_cost_of_the_encodings():
    rule, count = ADAM.rule(STEP), 1 << 18
    old, gradient, new = training(rule, count)
    assert bits(optim.predicted.encode(rule, old, new), count) < 27.5
    assert bits(optim.replayed.encode(rule, old, new, gradient), count) < 28
    halves = (gradient.view("<u4") >> 16).astype("<u2")
    new = copy(old)
    optim.advance(rule, new, halves)
    assert bits(optim.replayed.encode(rule, old, new, halves), count) < 12.5
    sparse = sparse_of(gradient)
    new = copy(old)
    optim.advance(rule, new, sparse.dense())
    assert bits(optim.sparse.encode(rule, old, new, sparse), count) < 0.36
    for group in ("momentum", "nesterov"):
        rule = GROUPS[group].rule(STEP)
        old, gradient, new = training(rule, count)
        assert bits(optim.predicted.encode(rule, old, new), count) < 29


def test_choosing():
    rule = ADAM.rule(STEP, "plain")
    old, gradient, new = training(rule, 300_000)
    assert optim.choose_variant(ADAM, STEP, old, new, gradient) == "plain"
    assert optim.choose_variant(ADAM, STEP, old, new) in ADAM.variants
    choice = optim.choose(ADAM, STEP, old, new)
    assert (choice.encoding, choice.throughput > 0) == ("predicted", True)
    halves = (gradient.view("<u4") >> 16).astype("<u2")
    new = copy(old)
    optim.advance(rule, new, halves)
    found = optim.evaluate(ADAM, STEP, old, new, halves)
    assert [choice.encoding for choice in found] == ["replayed", "predicted", "predicted"]
    assert found[0].variant == "plain"
    assert isinstance(found[2].rule, optim.Skip)
    assert optim.choose(ADAM, STEP, old, new, sparse_of(gradient), variant="fma").encoding == "predicted"
    skipped = optim.choose(ADAM, optim.Step(41, 1e-3, skipped=True), old, old, gradient)
    assert skipped.bits < 0.01
    assert isinstance(skipped.rule, optim.Skip)
    empty = [np.empty(0, "<f4")] * 3
    assert optim.choose(ADAM, STEP, empty, empty).bits == 0


# --------------------------------------------------------------------------------------------------------- refusals


def payloads(rule: optim.Rule) -> list[tuple[Callable[..., None], np.ndarray, list[np.ndarray]]]:
    old, gradient, new = training(rule, 5000)
    return [
        (optim.predicted.decode, optim.predicted.encode(rule, old, new), old),
        (optim.replayed.decode, optim.replayed.encode(rule, old, new, gradient), old),
        (optim.sparse.decode, optim.sparse.encode(rule, old, new, sparse_of(gradient)), old),
    ]


def test_cut_extended_and_changed_payloads():
    rng = np.random.default_rng(3)
    rule = ADAM.rule(STEP)
    for decode, payload, old in payloads(rule):
        for stop in [*range(40), *rng.integers(40, len(payload), 40)]:
            with pytest.raises(CorruptSegmentError):
                decode(rule, payload[:stop], copy(old))
        with pytest.raises(CorruptSegmentError, match="follow"):
            decode(rule, np.concatenate([payload, payload[:1]]), copy(old))
        for _ in range(300):
            damaged = payload.copy()
            damaged[rng.integers(0, min(len(payload), 60) if rng.random() < 0.5 else len(payload))] = rng.integers(
                0, 256
            )
            try:
                decode(rule, damaged, copy(old))
            except CorruptSegmentError:
                continue


@settings(max_examples=short_or(60, 150), deadline=None)
@given(st.binary(max_size=200), st.sampled_from(("predicted", "replayed", "sparse")), st.integers(0, 2000))
def test_any_bytes_are_a_payload_or_an_error(data: bytes, encoding: str, count: int):
    rule = ADAM.rule(STEP)
    try:
        getattr(optim, encoding).decode(rule, data, [np.zeros(count, "<f4") for _ in rule.slots])
    except CorruptSegmentError:
        return


def test_positions_beyond_the_block():
    rule = ADAM.rule(STEP)
    old, _, _ = training(rule, 2000)
    payload = optim.sparse.encode(rule, old, None, optim.SparseGradient(np.array([3, 1999]), np.ones(2, "<f4"), 2000))
    optim.sparse.decode(rule, payload, copy(old))
    for count in (1999, 300, 3, 1, 0):
        with pytest.raises(CorruptSegmentError):
            optim.sparse.decode(rule, payload, [part[:count].copy() for part in old])


def test_states_and_gradients_that_do_not_fit():
    rule = ADAM.rule(STEP)
    old, gradient, new = training(rule, 100)
    large = [np.zeros(optim.CHUNK_NUMBERS + 1, "<f4")] * 3
    with pytest.raises(ValueError, match="at most"):
        optim.predicted.encode(rule, large, large)
    with pytest.raises(FormatError, match="at most"):
        optim.predicted.decode(rule, b"", large)
    with pytest.raises(ValueError, match="numbers"):
        optim.predicted.encode(rule, old, [part[:50] for part in new])
    with pytest.raises(ValueError, match="out has"):
        optim.predicted.encode(rule, old, new, out=np.empty(10, np.uint8))
    for bad in (gradient[:50], gradient.astype("<f8"), gradient.reshape(10, 10), gradient.repeat(2)[::2]):
        with pytest.raises(ValueError):
            optim.replayed.encode(rule, old, new, bad)
    for indices, values, size in (
        ([0, 0], 2, 5),
        ([2, 1], 2, 5),
        ([-1, 1], 2, 5),
        ([1, 5], 2, 5),
        ([1], 2, 5),
        ([0.5], 1, 5),
    ):
        with pytest.raises(ValueError):
            optim.SparseGradient(np.array(indices), np.zeros(values, "<f4"), size)


def test_reused_room_gives_the_same_payload():
    rule = ADAM.rule(STEP)
    old, gradient, new = training(rule, 9000)
    out = np.full(optim.replayed.bound(rule, 9000), 170, np.uint8)
    for _ in range(2):
        assert bytes(optim.replayed.encode(rule, old, new, gradient, out=out)) == bytes(
            optim.replayed.encode(rule, old, new, gradient)
        )
        assert bytes(optim.predicted.encode(rule, old, new, out=out)) == bytes(optim.predicted.encode(rule, old, new))


def test_the_examples_in_the_docs_run():
    import doctest

    docs = Path(__file__).parents[2] / "docs" / "optimizer.md"
    failed, attempted = doctest.testfile(str(docs), module_relative=False)
    assert attempted > 15
    assert not failed


# ---- gradients that follow from the moments, and scales


@pytest.mark.parametrize("group", [ADAM, optim.Adam(weight_decay=1e-5, maximize=True)], ids=["adamw", "adam"])
def test_a_bf16_gradient_is_inferred(group: optim.Adam) -> None:
    """From moments and clipping factor, whatever decay, sign and loss scale; the step is then replayed."""
    step = optim.Step(count=9, lr=1e-3, clip=0.37, loss_scale=1024.0)
    rule = group.rule(step)
    old, gradient, _ = training(rule, 40_000)
    halves = (gradient * np.float32(1024)).view("<u4") >> np.uint32(16)
    new = copy(old)
    optim.advance(rule, new, halves.astype("<u2"))
    assert optim.inferred.explains(rule, old, new)
    assert np.mean(optim.inferred.gradient(rule, old, new) != halves) < 0.01
    (first, *_) = optim.evaluate(group, step, old, new, variant="fma")
    assert (first.encoding, first.bits < 14) == ("replayed", True)
    payload = optim.encode(first.encoding, first.rule, old, new, None)
    state = copy(old)
    optim.decode([optim.StepLink(first.encoding, first.rule, payload)], state)
    assert equal(state, new)


def test_an_fp32_gradient_is_not_inferred() -> None:
    rule = GROUPS["adamw"].rule(optim.Step(count=9, lr=1e-3))
    old, _, new = training(rule, 4000)
    assert not optim.inferred.explains(rule, old, new)
    assert not optim.inferred.explains(GROUPS["sgd"].rule(optim.Step(count=9, lr=1e-3)), old[:1], new[:1])
    assert isinstance(rule, optim.AdamRule)
    assert not optim.inferred.explains(replace(rule, weight1=0.0), old, new)


def test_scales_pay_where_rows_differ() -> None:
    """The scales of rows: a gradient whose rows have other sizes than their second moments say."""
    group, step = GROUPS["adamw"], optim.Step(count=9, lr=1e-3)
    rule = group.rule(step)
    old, gradient, new = training(rule, 1 << 16)
    gradient *= np.repeat(10.0 ** np.random.default_rng(1).uniform(-2, 1, 256), 256).astype("<f4")
    new = copy(old)
    optim.advance(rule, new, gradient)
    for known in (None, gradient):
        found = optim.evaluate(group, step, old, new, known, "fma", small=True)
        bits = {one.encoding: one.bits for one in found if one.variant}
        assert bits["predicted/2"] < bits["predicted"] - 0.5
        if known is not None:
            assert bits["replayed/2"] < bits["replayed"] - 0.5
