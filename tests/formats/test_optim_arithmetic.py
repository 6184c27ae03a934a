"""The optimizer arithmetic: exact by its own definition, and equal to torch's bits where torch computes the same."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats import optim
from ckptstore.formats.optim import arithmetic
from tests.processor import wrong_roots

torch = pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("one_thread")


def bits(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view("<u4")


# ------------------------------------------------------------------------------------------------ multiply and add


def nearest(exact: Fraction) -> float:
    """An exact number rounded once to fp32, ties to even."""
    if exact == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(exact))) if abs(exact) > Fraction(1, 1 << 1000) else -1000
    while Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(exact):
        exponent += 1
    unit = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(exact / unit) * unit
    return math.copysign(math.inf, rounded) if abs(rounded) >= 2**128 else float(rounded)


def check_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    out = np.empty(len(a), "<f4")
    with arithmetic.exactly():
        arithmetic.fma(a, b, c, out)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(out, np.array([nearest(number) for number in exact], "<f4"))
    return out


def test_fma_rounds_once_where_rounding_twice_is_wrong():
    tiny = 2.0**-23
    a = np.array([2.0**-24 * (1 + tiny)] * 2 + [-(2.0**-24) * (1 + tiny)] * 2, "<f4")
    b = np.array([1 - tiny, 1 + tiny, 1 - tiny, 1 + tiny], "<f4")
    c = np.array([1 + tiny, 1.0, 1.0, 1 + 3 * tiny], "<f4")
    out = check_fma(a, b, c)
    twice = (a.astype("f8") * b + c).astype("<f4")
    assert (bits(out) != bits(twice)).any()


def test_fma_is_exact_among_denormals_and_extremes():
    rng = np.random.default_rng(5)
    patterns = np.concatenate([rng.integers(0, 1 << 24, 600), rng.integers(0, 255 << 23, 600), np.arange(1, 40)])
    numbers = patterns.astype("<u4").view("<f4") * rng.choice(np.array([1, -1], "<f4"), len(patterns))
    halves = np.full(len(numbers), 0.5, "<f4")
    check_fma(numbers, halves, rng.permutation(numbers))
    check_fma(numbers, rng.permutation(numbers), rng.permutation(numbers))


def test_fma_is_exact_on_numbers_that_often_meet_half_way():
    rng = np.random.default_rng(6)
    scale = 2.0 ** rng.integers(-40, 1, 3000)
    a = ((1 + rng.integers(0, 4, 3000) * 2.0**-23) * scale).astype("<f4")
    b = (1 + rng.integers(-4, 4, 3000) * 2.0**-23).astype("<f4")
    c = (rng.choice([1, -1], 3000) * (1 + rng.integers(0, 4, 3000) * 2.0**-23)).astype("<f4")
    check_fma(a, b, c)


def test_nan_is_always_the_same():
    values = np.array([0x7F800001, 0xFFC12345, 0x7F800000, 0x80000000], "<u4").view("<f4")
    arithmetic.settle(values)
    assert bits(values).tolist() == [0x7FC00000, 0x7FC00000, 0x7F800000, 0x80000000]


def test_a_thread_that_flushes_denormals_computes_the_same_bits():
    rng = np.random.default_rng(1)
    state = [rng.integers(0, 1 << 24, 5000, "u4").view("<f4") for _ in range(3)]
    gradient = rng.integers(0, 1 << 24, 5000, "u4").view("<f4")
    rule = optim.AdamW().rule(optim.Step(2, 1e-3))
    usual, flushing = [part.copy() for part in state], [part.copy() for part in state]
    optim.advance(rule, usual, gradient)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        optim.advance(rule, flushing, gradient)
        assert float(np.float32(1e-40) * np.float32(1)) == 0.0, "the thread's mode is given back"
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(usual, flushing, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


# ------------------------------------------------------------------------------------------------ torch's own bits


def gradients(shape: tuple[int, ...], step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) * 1e-2


def numbers(tensor: Any) -> np.ndarray:
    return tensor.detach().numpy().reshape(-1).copy()


def state_of(optimizer: Any, parameter: Any, slots: tuple[str, ...]) -> list[np.ndarray]:
    held = optimizer.state[parameter]
    return [numbers(parameter if slot == "weight" else held.get(slot, torch.zeros_like(parameter))) for slot in slots]


def missed(wanted: list[np.ndarray], got: list[np.ndarray]) -> list[int]:
    return [int((bits(a) != bits(b)).sum()) for a, b in zip(wanted, got, strict=True)]


KINDS = {"for": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
ADAM_SETTINGS = [
    {},
    {"weight_decay": 0.1, "betas": (0.9, 0.95)},
    {"weight_decay": 0.01, "amsgrad": True, "eps": 1e-6},
    {"maximize": True, "betas": (0.3, 0.999), "lr": 0.1},
]
VECTOR = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
vector = pytest.mark.skipif(not VECTOR, reason="torch's kernels here are not those of the variant")


def fused(a: np.ndarray, b: np.ndarray | float, c: np.ndarray) -> np.ndarray:
    out = np.empty_like(c)
    arithmetic.fma(a, b, c, out)
    return out


@vector
def test_operations_of_torch_round_as_the_recipe_says():
    """The table under "An optimizer" in docs/adding.md. Square roots are left out: MKL's are not all rounded."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(4096, generator=generator) for _ in range(3))
    a, b, c = (one.numpy().copy() for one in (x, y, z))
    for share in (arithmetic.single(0.3), arithmetic.single(0.7)):
        number = np.float32(share)
        lerp = fused(b - a, share, a) if share < 0.5 else fused(b - a, arithmetic.single(share - 1), b)
        for name, got, wanted in (
            ("mul_", x.clone().mul_(share), a * number),
            ("add_", x.clone().add_(share), a + number),
            ("div_", x.clone().div_(y), a / b),
            ("add_ with alpha", x.clone().add_(y, alpha=share), fused(b, share, a)),
            ("addcmul_", x.clone().addcmul_(y, z, value=share), fused(b * number, c, a)),
            ("addcdiv_", x.clone().addcdiv_(y, z, value=share), a + (b * number) / c),
            ("lerp_", x.clone().lerp_(y, share), lerp),
        ):
            np.testing.assert_array_equal(bits(got.numpy()), bits(wanted), err_msg=name)


def adam_settings(settings: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = settings.get("betas", (0.9, 0.999))
    rest = {key: value for key, value in settings.items() if key not in ("betas", "lr")}
    return {"beta1": beta1, "beta2": beta2, **rest}


@vector
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", ADAM_SETTINGS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_is_torchs(name: str, settings: dict[str, Any], kind: str):
    """Moments are equal; weights too, except for the square roots of the unfused kernels; at shapes without scalar
    tails."""
    lr = settings.get("lr", 1e-3)
    group = getattr(optim, name)(**{"weight_decay": 0.01 if name == "AdamW" else 0.0, **adam_settings(settings)})
    for shape in ((64, 33), (1 << 15,)):
        parameter = torch.nn.Parameter(gradients(shape, 0))
        optimizer = getattr(torch.optim, name)([parameter], **{"lr": lr, **settings}, **KINDS[kind])
        for count in (1, 2, 3, 4, 10, 57, 1000):
            if count > 4:
                optimizer.state[parameter]["step"].fill_(count - 1)
            rate = optimizer.param_groups[0]["lr"] = lr / count**0.5
            rule = group.rule(optim.Step(count, rate))
            state = state_of(optimizer, parameter, rule.slots)
            parameter.grad = gradients(shape, count)
            optim.advance(rule, state, numbers(parameter.grad))
            optimizer.step()
            new = state_of(optimizer, parameter, rule.slots)
            weight, *moments = missed(new, state)
            assert moments == [0] * len(moments)
            assert weight <= (0 if kind == "fused" else parameter.numel() * (0.01 + wrong_roots()))
            # Only torch's square roots are the cause: where these are right, so is the weight.
            right = torch.sqrt(torch.from_numpy(new[-1])).numpy() == np.sqrt(new[-1])
            assert np.array_equal(bits(new[0])[right], bits(state[0])[right])


@vector
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "maximize": True},
    ],
)
def test_sgd_is_torchs(settings: dict[str, Any], kind: str):
    for shape in ((64, 33), (1 << 15,)):
        parameter = torch.nn.Parameter(gradients(shape, 0))
        optimizer = torch.optim.SGD([parameter], lr=0.1, **settings, **KINDS[kind])
        for count in range(1, 6):
            rate = optimizer.param_groups[0]["lr"] = 0.1 / count
            rule = optim.SGD(**settings).rule(optim.Step(count, rate))
            state = state_of(optimizer, parameter, rule.slots)
            parameter.grad = gradients(shape, count)
            optim.advance(rule, state, numbers(parameter.grad))
            optimizer.step()
            assert missed(state_of(optimizer, parameter, rule.slots), state) == [0] * len(state)


@vector
def test_gradients_of_every_kind_of_number():
    """NaN, infinities, denormals and both zeros in the gradient: NaNs where torch has NaNs, all else equal."""
    for kind in KINDS.values():
        parameter = torch.nn.Parameter(gradients((1 << 14,), 0))
        optimizer = torch.optim.AdamW([parameter], **kind)
        rule = optim.AdamW().rule(optim.Step(1, 1e-3))
        state = state_of(optimizer, parameter, rule.slots)
        special = np.array(
            [0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x80000001, 0x7FFFFF], "u4"
        )
        gradient = np.resize(np.concatenate([special, np.float32([1e30, -1e-30, 3e38, 1]).view("u4")]), 1 << 14)
        parameter.grad = torch.from_numpy(gradient.view("f4").copy())
        optim.advance(rule, state, gradient)
        optimizer.step()
        wanted = state_of(optimizer, parameter, rule.slots)
        for a, b in zip(wanted, state, strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert missed([np.nan_to_num(a) for a in wanted[1:]], [np.nan_to_num(b) for b in state[1:]]) == [0, 0]


@vector
def test_mixed_precision_clip_and_loss_scale():
    """bf16 gradients to an fp32 master, unscaled, then clipped; groups with their own settings."""
    shape = (256, 64)
    masters = [torch.nn.Parameter(gradients(shape, seed)) for seed in (1, 2)]
    optimizer = torch.optim.AdamW(
        [{"params": masters[:1], "weight_decay": 0.1}, {"params": masters[1:], "weight_decay": 0.0, "lr": 3e-4}],
        lr=1e-3,
        fused=True,
    )
    for count in range(1, 5):
        halves = [(gradients(shape, 10 * count + i) * 1024).to(torch.bfloat16) for i in range(2)]
        clip = 0.7130001783370972
        rules, states = [], []
        for group, parameter, half in zip(optimizer.param_groups, masters, halves, strict=True):
            parameter.grad = (half.float() * (1 / 1024)).mul_(torch.tensor(clip))
            step = optim.Step(count, group["lr"], clip=clip, loss_scale=1024.0)
            rules.append(optim.AdamW(weight_decay=group["weight_decay"]).rule(step))
            states.append(state_of(optimizer, parameter, rules[-1].slots))
            optim.advance(rules[-1], states[-1], half.view(torch.uint16).numpy().reshape(-1))
        optimizer.step()
        for rule, parameter, state in zip(rules, masters, states, strict=True):
            assert missed(state_of(optimizer, parameter, rule.slots), state) == [0, 0, 0]


OTHER_CAPABILITY = """
import numpy as np, torch
from ckptstore.formats import optim
assert torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"), torch.backends.cpu.get_cpu_capability()
torch.manual_seed(0)
p = torch.nn.Parameter(torch.randn(4096))
t = torch.optim.AdamW([p], fused=True)
def arrays():
    return [a.detach().numpy().copy() for a in (p, t.state[p]["exp_avg"], t.state[p]["exp_avg_sq"])]
p.grad = torch.randn(4096)
t.step()
old, state = arrays(), arrays()
p.grad = torch.randn(4096)
t.step()
optim.advance(optim.AdamW().rule(optim.Step(2, 1e-3), "plain"), state, p.grad.numpy())
assert all(np.array_equal(a, b) for a, b in zip(state, arrays()))
assert optim.choose_variant(optim.AdamW(), optim.Step(2, 1e-3), old, arrays(), p.grad.numpy()) == "plain"
"""


@pytest.mark.slow
def test_kernels_without_fma_are_the_plain_variant():
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OTHER_CAPABILITY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------------------------- rules

RULES = [
    optim.AdamW(weight_decay=0.1, amsgrad=True).rule(optim.Step(7, 1e-3, clip=0.5, loss_scale=4.0), "divide"),
    optim.Adam(weight_decay=0.1, maximize=True).rule(optim.Step(1, 1e-3), "plain"),
    optim.SGD(momentum=0.9, nesterov=True).rule(optim.Step(2, 0.1)),
    optim.SGD(weight_decay=0.1, maximize=True).rule(optim.Step(1, 0.1), "plain"),
    optim.AdamW().rule(optim.Step(3, 1e-3, skipped=True)),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_survive_json_and_refuse_anything_else(rule: optim.Rule):
    from ckptstore.formats import jsontext

    params = jsontext.loads(jsontext.dumps(rule.params), what="rule", max_bytes=10_000)
    assert optim.rule(params) == rule
    with pytest.raises(FormatError, match="unknown parameter"):
        optim.rule({**params, "more": 1})
    for key in params:
        if key != "rule":
            for bad in (None, "x", -1, 1 << 32, 1.5, [None], [1] * 9, {}):
                with pytest.raises(FormatError, match=key):
                    optim.rule({**params, key: bad})
    with pytest.raises(FormatError, match="unknown optimizer rule"):
        optim.rule({**params, "rule": "rmsprop"})


def test_a_clip_factor_that_is_nan_is_kept():
    rule = optim.AdamW().rule(optim.Step(1, 1e-3, clip=float("nan")))
    state = [np.ones(4, "<f4") for _ in range(3)]
    optim.advance(optim.rule(rule.params), state, np.ones(4, "<f4"))
    assert all(np.isnan(part).all() for part in state)


def test_an_invalid_step_is_refused():
    for bad in ({"count": 0, "lr": 1.0}, {"count": 1, "lr": math.inf}, {"count": 1, "lr": 1.0, "loss_scale": 0.0}):
        with pytest.raises(ValueError):
            optim.Step(**bad)
    with pytest.raises(ValueError, match="betas"):
        optim.AdamW(beta1=1.0)
    with pytest.raises(ValueError, match="variant"):
        optim.SGD().rule(optim.Step(1, 1.0), "divide")
    rule = optim.SGD().rule(optim.Step(1, 1.0))
    for state, gradient in (
        ([np.zeros(3, "<f4")] * 2, np.zeros(3, "<f4")),
        ([np.zeros(3, "<f8")], np.zeros(3, "<f4")),
        ([np.zeros((4, 4), "<f4").T[:2]], np.zeros(8, "<f4")),
        ([np.zeros(3, "<f4")], np.zeros(4, "<f4")),
        ([np.zeros(3, "<f4")], np.zeros(3, "<f8")),
    ):
        with pytest.raises(ValueError):
            optim.advance(rule, state, gradient)


def test_a_skipped_step_changes_nothing():
    rule = optim.SGD(momentum=0.9).rule(optim.Step(2, 0.1, skipped=True))
    state = [np.array([0x7F800001, 5, 6], "<u4") for _ in range(2)]
    optim.advance(rule, state, np.full(3, np.inf, "<f4"))
    assert all(part.tolist() == [0x7F800001, 5, 6] for part in state)


def test_settings_from_torchs_groups():
    parameter = torch.nn.Parameter(torch.zeros(3))
    for made, wanted in (
        (torch.optim.AdamW([parameter], betas=(0.8, 0.9), weight_decay=0.3), optim.AdamW(0.8, 0.9, weight_decay=0.3)),
        (torch.optim.Adam([parameter], amsgrad=True, maximize=True), optim.Adam(amsgrad=True, maximize=True)),
        (torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=True), optim.SGD(0.9, nesterov=True)),
    ):
        assert optim.from_group(type(made).__name__, made.param_groups[0]) == wanted
    group = torch.optim.Adam([parameter], weight_decay=0.2).param_groups[0]
    assert optim.from_group("Adam", {**group, "decoupled_weight_decay": True}) == optim.AdamW(weight_decay=0.2)
    group.pop("decoupled_weight_decay", None)  # which older versions of torch do not have
    assert optim.from_group("Adam", group) == optim.Adam(weight_decay=0.2)
    assert optim.from_group("AdamW", group) == optim.AdamW(weight_decay=0.2)
    for name, bad in (("Lion", group), ("Adam", {**group, "betas": None}), ("SGD", group)):
        with pytest.raises(UnsupportedStateError, match=name):
            optim.from_group(name, bad)
    with pytest.raises(UnsupportedStateError, match="Adam has a setting that cannot be used: could not"):
        optim.from_group("Adam", {**group, "eps": "tiny"})
