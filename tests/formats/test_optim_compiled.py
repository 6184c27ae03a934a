"""The compiled loops of optimizer arithmetic give the reference's bits for any input."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.formats import kernel_choice, optim
from ckptstore.formats.codecs import kernels
from ckptstore.formats.optim import adam, arithmetic, residuals, scales, sgd
from tests.forms import short_or
from tests.kernel_forms import SETS, needs_core, use_form

pytestmark = needs_core

GROUPS: dict[str, optim.Optimizer] = {
    "adamw": optim.AdamW(beta2=0.95, weight_decay=0.1),
    "adam": optim.Adam(weight_decay=0.1),
    "amsgrad": optim.AdamW(amsgrad=True, maximize=True),
    "large share": optim.AdamW(beta1=0.2),
    "no share": optim.Adam(beta1=0.0, beta2=0.0, eps=0.0),
    "sgd": optim.SGD(weight_decay=5e-4),
    "momentum": optim.SGD(momentum=0.9, weight_decay=5e-4),
    "dampening": optim.SGD(momentum=0.9, dampening=0.3, maximize=True),
    "nesterov": optim.SGD(momentum=0.9, nesterov=True),
}
CASES = [(name, variant) for name in GROUPS for variant in GROUPS[name].variants]
# NaNs of all kinds, infinities, zeros, denormals from the least to the greatest, and the ends of the normal numbers.
_SPECIAL = (
    "7fc00000 ffc00000 7f800001 ffffffff 7f800000 ff800000 00000000 80000000 00000001 80000001 00000002 007fffff"
    " 807fffff 00800000 80800000 7f7fffff ff7fffff 3f800000"
)
SPECIAL = np.array([int(pattern, 16) for pattern in _SPECIAL.split()], "<u4")


@pytest.fixture(autouse=True, params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    use_form(request.param)
    yield
    use_form(None)


def noise(rng: np.random.Generator, count: int) -> np.ndarray:
    """Any patterns: special ones, any at all, tiny ones whose sums are denormal, and some as in training."""
    words = rng.integers(0, 1 << 32, count, "<u4")
    tiny = (rng.normal(0, 1, count) * 1e-38).astype("<f4").view("<u4")
    usual = (rng.normal(0, 1, count) * 10.0 ** rng.uniform(-9, 1, count)).astype("<f4").view("<u4")
    short = usual & np.uint32(0xFFFFF000)  # few bits: their products and sums lie half-way between fp32 numbers
    picked = rng.integers(0, 5, count)
    return np.choose(picked, [rng.choice(SPECIAL, count), words, tiny, usual, short]).astype("<u4").view("<f4")


def patterns(parts: list[np.ndarray]) -> list[bytes]:
    return [part.tobytes() for part in parts]


def both(work: object) -> tuple[object, object]:
    assert callable(work)
    with arithmetic.exactly():
        kernel_choice.use("numpy")
        wanted = work()
        kernel_choice.use("compiled")
        return wanted, work()


@settings(max_examples=short_or(60, 150), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(CASES), st.integers(0, 1200))
def test_steps_and_predictions_are_the_references(seed: int, case: tuple[str, str], count: int) -> None:
    rng = np.random.default_rng(seed)
    name, variant = case
    clip, scale = rng.choice(np.array([1.0, 0.25, 1e-30, np.nan, np.inf])), rng.choice(np.array([1.0, 3.0]))
    step = optim.Step(int(rng.integers(1, 5)), 10.0 ** rng.uniform(-9, 9), float(clip), float(scale))
    rule = GROUPS[name].rule(step, variant)
    old, new = ([noise(rng, count) for _ in rule.slots] for _ in range(2))
    gradient = noise(rng, count)

    def applied() -> list[bytes]:
        state = [part.copy() for part in old]
        rule.apply(state, gradient.copy())
        return patterns(state)

    def predicted() -> list[bytes]:
        found = []
        for slot in range(len(old)):
            if slot not in rule.kept:
                before, after, out = [part.copy() for part in old], [part.copy() for part in new], noise(rng, count)
                rule.predict(slot, before, after, out)
                assert patterns(before) == patterns(old)
                assert patterns(after) == patterns(new)
                found.append(out.tobytes())
        return found

    wanted, found = both(applied)
    assert found == wanted
    wanted, found = both(predicted)
    assert found == wanted


@settings(max_examples=short_or(40, 100), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 600), st.sampled_from(["new", "a", "b", "c"]), st.booleans())
def test_fused_products_are_the_references(seed: int, count: int, target: str, scalar: bool) -> None:
    rng = np.random.default_rng(seed)
    arguments = {name: noise(rng, count) for name in ("a", "b", "c", "new")}
    factor = float(rng.choice(SPECIAL.view("<f4"))) if rng.random() < 0.5 else float(noise(rng, 1)[0])

    def run() -> list[bytes]:
        parts = {name: part.copy() for name, part in arguments.items()}
        out = parts[target]
        arithmetic.fma(parts["a"], factor if scalar else parts["b"], parts["c"], out)
        return patterns(list(parts.values()))

    wanted, found = both(run)
    assert found == wanted


@pytest.mark.parametrize(
    "kernel",
    [
        *(arithmetic.fma, adam.moments, adam.second_moment, adam.move, sgd.buffered, residuals.missed),
        *(scales.mean_scales, scales.away, scales.back, scales.classes, scales.changes, scales.unsorted_changes),
        scales.scaled,
    ],
)
def test_each_hot_kernel_has_a_compiled_form_of_its_own(kernel: kernel_choice.Hot[..., object]) -> None:
    assert kernel.compiled is not kernel.reference
    assert kernel.compiled.__module__ in ("ckptstore.formats.optim.compiled_steps", kernel_choice.CORE)


@settings(max_examples=short_or(60, 150), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 1200), st.integers(-(1 << 30), 3 << 29))
def test_scales_are_the_references(seed: int, count: int, centre: int) -> None:
    rng = np.random.default_rng(seed)
    values, base, second = (noise(rng, count) for _ in range(3))
    any_scales = rng.integers(0, 256, -(-count // scales.RUN), "u1")
    halves = (values.view("<u4") >> 16).astype("<u2")

    def run() -> list[bytes]:
        found = np.zeros_like(any_scales)
        scales.mean_scales(values, second, centre, found)
        made = [found]
        for words in (values.view("<u4"), halves):
            out = np.empty_like(words)
            scales.away(words, second, any_scales, out)
            made.append(out.copy())
            scales.back(out, second, any_scales, out)
            assert np.array_equal(out, words)
        labels, changed, product = np.empty(count, np.uint8), np.empty(count, "<u4"), np.empty(count, "<f4")
        counts = scales.classes(base.view("<u4"), second, any_scales, labels)
        scales.changes(values.view("<u4"), base.view("<u4"), changed)
        gathered, restored = np.empty_like(changed), np.empty_like(changed)
        kernels.sort(changed, labels, counts, gathered)
        scales.unsorted_changes(gathered, labels, counts, base.view("<u4"), restored)
        assert np.array_equal(restored, values.view("<u4"))
        scales.scaled(values, float(base[0]) if count else 1.0, product)
        return patterns([*made, labels, counts, changed, product])

    wanted, found = both(run)
    assert found == wanted


def test_the_fused_product_is_rounded_once() -> None:
    """2^-56 below half-way: an fp64 sum loses it, and would then be rounded up to even."""
    a, b = (np.array([(1 + sign * 2.0**-16) * 2.0**-12], "<f4") for sign in (1, -1))
    c, out = np.array([1 + 2.0**-23], "<f4"), np.zeros(1, "<f4")
    for kind in kernel_choice.KINDS:
        kernel_choice.use(kind)
        arithmetic.fma(a, b, c, out)
        assert out[0] == c[0], kind


@pytest.mark.parametrize("kind", kernel_choice.KINDS)
def test_of_two_zeros_amsgrad_keeps_the_second_moments(kind: str) -> None:
    kernel_choice.use(kind)
    rule = optim.AdamW(amsgrad=True).rule(optim.Step(2, 1e-3))
    zeros = np.zeros(40, "<f4")
    for old, second in ((-zeros, zeros), (zeros, -zeros)):
        out = np.ones(40, "<f4")
        rule.predict(3, [zeros, zeros, zeros, old], [zeros, zeros, second], out)
        assert out.tobytes() == second.tobytes()


@pytest.mark.parametrize("kind", kernel_choice.KINDS)
def test_payloads_of_either_kind_are_read_by_the_other(kind: str) -> None:
    rng = np.random.default_rng(3)
    rule = GROUPS["adamw"].rule(optim.Step(3, 1e-3, 0.5))
    old, new = ([noise(rng, 70_000) for _ in rule.slots] for _ in range(2))
    gradient = noise(rng, 70_000)
    kernel_choice.use(kind)
    links: list[tuple[optim.Encoding, np.ndarray]] = [
        ("predicted", optim.predicted.encode(rule, old, new)),
        ("replayed", optim.replayed.encode(rule, old, new, gradient)),
        ("predicted/2", optim.scaled.encode(rule, old, new, None)),
        ("replayed/2", optim.scaled.encode(rule, old, new, gradient)),
    ]
    kernel_choice.use(kernel_choice.KINDS[1 - kernel_choice.KINDS.index(kind)])
    for encoding, payload in links:
        state = [part.copy() for part in old]
        optim.decode([optim.StepLink(encoding, rule, payload)], state)
        assert patterns(state) == patterns(new)


@settings(max_examples=short_or(5, 100), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(CASES), st.sampled_from([1, 47, 5000, 30_001]), st.booleans())
def test_both_kinds_write_the_same_steps(seed: int, case: tuple[str, str], count: int, half: bool) -> None:
    """States as in training, some of whose numbers were computed otherwise; each kind reads them."""
    rng = np.random.default_rng(seed)
    rule = GROUPS[case[0]].rule(optim.Step(3, 1e-3, float(rng.choice([1.0, 0.3]))), case[1])
    old = [(rng.normal(0, 1, count) * 10.0 ** rng.uniform(-6, 0)).astype("<f4") for _ in rule.slots]
    for slot in range(2, len(old)):
        old[slot] = old[slot] ** 2
    gradient = rng.normal(0, 1e-3, count).astype("<f4")
    if half:
        gradient = (gradient.view("<u4") >> 16).astype("<u2")
    new = [part.copy() for part in old]
    optim.advance(rule, new, gradient)
    for part in new:
        part.view("<u4")[rng.random(count) < rng.choice([0, 0.001, 0.1])] += 1
    coders = (optim.predicted, optim.replayed)
    found = []
    for kind in kernel_choice.KINDS:
        kernel_choice.use(kind)
        for level in (0, 1):
            found.append(optim.predicted.encode(rule, old, new, level=level).tobytes())
            found.append(optim.replayed.encode(rule, old, new, gradient, level=level).tobytes())
        for coder, payload in zip(coders, found[-2:], strict=True):
            state = [part.copy() for part in old]
            coder.decode(rule, payload, state)
            assert patterns(state) == patterns(new), kind
    assert found[:4] == found[4:]


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_missed_words_are_counted_by_their_patterns(count: int) -> None:
    rng = np.random.default_rng(count)
    for share in (0.0, 0.1, 1.0):
        words = noise(rng, count).view("<u4")
        other = np.where(rng.random(count) < share, words ^ np.uint32(0x80000000), words).astype("<u4")
        for kind in kernel_choice.KINDS:
            kernel_choice.use(kind)
            assert residuals.missed(words, other) == int((words != other).sum())
