"""`ckptstore.analysis`: its numbers compared with direct calls of the codecs and with plain arithmetic."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard

import ckptstore
from ckptstore.analysis import Analysis, Options, analyze, document
from ckptstore.analysis.measurement import MethodMeasurement
from ckptstore.analysis.sentences import what_to_do
from ckptstore.errors import CheckpointNotFoundError, UsageError
from ckptstore.formats import codecs
from ckptstore.formats.codecs import BLOCK
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tests.analysis.analysis_data import trajectory, write

EXACT = Options(sample=None, points=None, threads=2)


@pytest.fixture(scope="module")
def states() -> list[dict[str, np.ndarray]]:
    return trajectory(3)


@pytest.fixture(scope="module")
def found(states: list[dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return analyze(write(tmp_path_factory.mktemp("series"), states), EXACT)


def group_of(found: Analysis, kind: str, dtype: str = "F32") -> int:
    return next(n for n, group in enumerate(found.groups) if (group.kind, group.dtype) == (kind, dtype))


def one(found: Analysis, kind: str, method: str, index: int, base: int | None = None) -> MethodMeasurement:
    number = group_of(found, kind)
    cells = [cell for cell in found.measurements if (cell.group, cell.method) == (number, method)]
    (cell,) = [cell for cell in cells if (cell.index, cell.base) == (index, base)]
    return cell


def blocks(state: dict[str, np.ndarray], names: Sequence[str]) -> list[np.ndarray]:
    """The contents of the units of these tensors: here one large tensor, and one small one alone."""
    images = [state[name].reshape(-1).view(np.uint8) for name in names]
    return [image[at : at + BLOCK] for image in images for at in range(0, len(image), BLOCK)]


@pytest.mark.parametrize("kind", ["weight", "first_moment", "second_moment", "gradient"])
def test_ratios_are_those_of_the_codecs(found: Analysis, states: list[dict[str, np.ndarray]], kind: str) -> None:
    names = found.groups[group_of(found, kind)].tensors
    new, old = blocks(states[2], names), blocks(states[1], names)
    logical = sum(map(len, new))
    for method in ("raw", "planes", "prefix", "prefix-grouped", "xor", "sub", "sub-context"):
        delta = method in ("xor", "sub", "sub-context")
        cell = one(found, kind, method, 2, 1 if delta else None)
        codec = codecs.codec(method.split("-")[0], cell.params)
        stored = [len(codecs.encode(codec, a, b if delta else None)) for a, b in zip(new, old, strict=True)]
        assert cell.estimate.fraction == pytest.approx(sum(stored) / logical, rel=1e-12)
        assert (cell.units, cell.logical, cell.estimate.margin) == (len(new), logical, 0.0)
        assert min(cell.encode or 0, cell.decode or 0) > 0
    squeezed = sum(len(zlib.compress(block, 6)) for block in new)
    assert one(found, kind, "gzip", 2).estimate.fraction == pytest.approx(squeezed / logical, rel=1e-12)
    squeezed = sum(len(zstandard.ZstdCompressor(level=3).compress(block)) for block in new)
    assert one(found, kind, "zstd", 2).estimate.fraction == pytest.approx(squeezed / logical, rel=1e-12)


def entropy(words: np.ndarray) -> float:
    """Order-0 entropy of the byte planes in bytes, histograms per 64 Ki words, the obvious way."""
    bits = 0.0
    for start in range(0, len(words), 1 << 16):
        part = words[start : start + (1 << 16)]
        for byte in range(4):
            _, counts = np.unique((part >> (8 * byte)) & 255, return_counts=True)
            bits -= float((counts * np.log2(counts / counts.sum())).sum())
    return bits / 8


def least_entropy(words: np.ndarray) -> float:
    """Of the numbers unchanged, rotated, or with the sign as lowest bit of those mirrored at zero."""
    rotated = (words << np.uint32(1)) | (words >> np.uint32(31))
    mapped = (words << np.uint32(1)) ^ (np.uint32(0) - (words >> np.uint32(31)))
    return min(map(entropy, (words, rotated, mapped)))


def test_bounds_are_the_least_entropy_of_byte_planes(found: Analysis, states: list[dict[str, np.ndarray]]) -> None:
    names = found.groups[group_of(found, "weight")].tensors
    new = [block.view("<u4") for block in blocks(states[2], names)]
    old = [block.view("<u4") for block in blocks(states[0], names)]
    logical = sum(block.nbytes for block in new)
    alone = list(map(least_entropy, new))
    assert one(found, "weight", "bound", 2).estimate.fraction == pytest.approx(sum(alone) / logical, rel=1e-9)
    xor = [least_entropy(a ^ b) for a, b in zip(new, old, strict=True)]
    expected = sum(map(min, xor, alone)) / logical
    assert one(found, "weight", "bound-xor", 2, 0).estimate.fraction == pytest.approx(expected, rel=1e-9)
    signed = [(a - b).view("<i4").astype(np.int64) for a, b in zip(new, old, strict=True)]
    mapped = [np.where(delta < 0, -2 * delta - 1, 2 * delta).astype("<u4") for delta in signed]
    expected = sum(map(min, map(entropy, mapped), alone)) / logical
    assert one(found, "weight", "bound-sub", 2, 0).estimate.fraction == pytest.approx(expected, rel=1e-9)


def test_no_codec_without_context_is_below_its_bound(found: Analysis) -> None:
    for kind in ("weight", "first_moment", "second_moment"):
        for method, bound in (("xor", "bound-xor"), ("sub", "bound-sub")):
            actual, least = (one(found, kind, name, 2, 1).estimate.fraction for name in (method, bound))
            assert least <= actual <= least * 1.05


@pytest.mark.parametrize("exact", [True, False])
def test_nothing_drawn_is_below_its_bound(tmp_path: Path, exact: bool) -> None:
    """Moments whose signs differ, rows that no token has used, rows with their own scale, new gradients."""
    rng = np.random.default_rng(5)
    scale = np.exp(rng.normal(0, 3, (1500, 1)))
    scale[rng.random(1500) < 0.5] = 0
    states = []
    for _ in range(3):
        gradient = (rng.normal(0, 1e-3, (1500, 512)) * scale).astype(np.float32)
        moment = gradient if not states else (0.9 * states[-1]["exp_avg.w"] + 0.1 * gradient).astype(np.float32)
        states.append({"exp_avg.w": moment, "exp_avg_sq.w": gradient**2, "grad.w": gradient})
    options = Options(sample=None if exact else 2 << 20, methods=("raw", "planes", "prefix-grouped", "xor", "sub"))
    found = analyze(write(tmp_path, states), options)
    bounds = {"bound": ("planes", "prefix-grouped"), "bound-xor": ("planes", "xor"), "bound-sub": ("planes", "sub")}
    cells = {(cell.group, cell.index, cell.base, cell.method): cell.estimate for cell in found.measurements}
    for (group, index, base, name), bound in cells.items():
        for method in bounds.get(name, ()):
            own = base if method in ("xor", "sub") else None
            assert bound.fraction <= cells[group, index, own, method].fraction * (1 + 1e-12), (group, name, method)
    assert sum(name in bounds for _, _, _, name in cells) == 3 * (3 + 2 * 3)


def test_a_rate_is_that_of_the_codec_without_comparisons(tmp_path: Path) -> None:
    """Of two classes of the same numbers the one measured first is as fast as the other, in a new process."""
    pytest.importorskip("ckptstore.formats.core")
    numbers = trajectory(2, 2000)
    for state in numbers:
        state |= {f"grad.{name}": value for name, value in list(state.items()) if name.startswith("model.wte")}
    paths = write(
        tmp_path, [{name: one[name] for name in ("model.wte.weight", "grad.model.wte.weight")} for one in numbers]
    )
    script = f"""
from ckptstore.analysis import Options, analyze
found = analyze({paths!r}, Options(threads=1, methods=("raw", "planes", "prefix", "xor", "sub", "sub-context")))
assert [group.kind for group in found.groups] == ["weight", "gradient"]
for one in found.summaries:
    if one.encode is not None and one.method != "raw":
        print(one.group, one.method, one.encode, one.decode)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"CKPTSTORE_KERNELS": "compiled"},
    )
    rates: dict[str, list[tuple[float, float]]] = {}
    for line in done.stdout.splitlines():
        _, method, encode, decode = line.split()
        rates.setdefault(method, []).append((float(encode), float(decode)))
    assert len(rates) == 5
    for method, (first, second) in rates.items():
        assert first[0] > second[0] / 3, (method, first, second)
        assert first[1] > second[1] / 3, (method, first, second)


def test_an_uneven_series_shows_every_step_against_the_one_before(tmp_path: Path) -> None:
    """A last checkpoint soon after the others is common; its gap is the smallest, and one pair has it."""
    steps = [100, 200, 300, 400, 410]
    names = ("model.wte.weight",)
    states = [{name: state[name] for name in names} for state in trajectory(5, 300)]
    found = analyze(write(tmp_path, states, steps), Options(methods=("raw", "planes", "xor")))
    assert found.gaps[0] == 1
    assert found.gap == 10
    shown = found.over_training(0, "xor")
    assert [(one.index, one.base, one.gap) for one in shown] == [(1, 0, 10), (2, 1, 10), (3, 2, 10), (4, 3, 1)]
    assert [one.index for one in found.over_training(0, "planes")] == [0, 1, 2, 3, 4]
    assert "save every 10 steps, as here" in what_to_do(found)


@pytest.mark.parametrize("bound", [RestoreBound(), RestoreBound.parse("3x,2GB")])
@pytest.mark.parametrize("methods", [("raw", "xor", "sub"), ("raw", "xor", "sub", "sub-context")])
def test_the_last_sentence_can_be_followed(tmp_path: Path, methods: tuple[str, ...], bound: RestoreBound) -> None:
    options = Options(methods=methods, bound=bound, compress_fulls=True)
    states = trajectory(4, 300)
    names = ("model.wte.weight",)
    found = analyze(write(tmp_path, [{name: one[name] for name in names} for one in states]), options)
    said = what_to_do(found)
    assert said.startswith("What to do: save every step, as here, with store.writer(deltas=DeltaOptions(")
    text = said.partition("deltas=")[2].partition("): ")[0]
    given = {"DeltaOptions": DeltaOptions, "SMALL_POLICY": codecs.SMALL_POLICY, "RestoreBound": RestoreBound}
    wanted = eval(text, given)  # noqa: S307  # our own sentence
    assert wanted == DeltaOptions(
        interval=found.advice.best.interval,
        bound=bound,
        policy=codecs.SMALL_POLICY if "sub-context" in methods else codecs.FAST_POLICY,
        compress_fulls=True,
    )
    assert document(found)["recommendation"]["what_to_do"] == said
    impossible = replace(found, advice=replace(found.advice, best=replace(found.advice.best, interval=0)))
    assert what_to_do(impossible).startswith("What to do: keep storing fulls (a writer without deltas=)")


def test_larger_gaps_cost_more(found: Analysis) -> None:
    near, far = (one(found, "weight", "sub", 2, base) for base in (1, 0))
    assert (near.gap, far.gap) == (1, 2)
    assert near.estimate.fraction < far.estimate.fraction < 1


def test_distinct_prefixes_are_counted(found: Analysis, states: list[dict[str, np.ndarray]]) -> None:
    number = group_of(found, "second_moment")
    names = found.groups[number].tensors
    words = np.concatenate([states[1][name].reshape(-1).view("<u4") for name in names])
    counts = {cell.bits: cell for cell in found.prefixes if (cell.group, cell.index) == (number, 1)}
    assert sorted(counts) == list(range(7, 13))
    for bits, cell in counts.items():
        _, expected = np.unique(words >> (32 - bits), return_counts=True)
        assert cell.distinct == len(expected)
        share = expected / expected.sum()
        assert cell.entropy == pytest.approx(-(share * np.log2(share)).sum())


def test_every_checkpoint_is_measured(found: Analysis) -> None:
    assert {cell.index for cell in found.measurements} == {0, 1, 2}
    assert found.gaps == (1, 2)
    assert found.exact
    assert found.sampled == 1.0
    assert sum(group.nbytes for group in found.groups) == found.advice.nbytes == found.series[0].nbytes


def test_a_sample_is_within_its_error(tmp_path: Path) -> None:
    quiet, loud = trajectory(2, 8192, 1), trajectory(2, 4096, 2)
    both = [
        {
            "model.a.weight": a["model.wte.weight"],
            "model.b.weight": b["model.wte.weight"] * np.float32(1 + 0.001 * step),
        }
        for step, (a, b) in enumerate(zip(quiet, loud, strict=True))
    ]
    paths = write(tmp_path, both)
    options = Options(sample=None, methods=("zstd", "xor", "sub"))
    exact = analyze(paths, options)
    sampled = analyze(paths, Options(sample=10 << 20, methods=("zstd", "xor", "sub")))
    again = analyze(paths, Options(sample=10 << 20, methods=("zstd", "xor", "sub")))
    assert (exact.groups[0].blocks, len(sampled.groups[0].units)) == (24, 10)
    for truth, guess, twin in zip(exact.measurements, sampled.measurements, again.measurements, strict=True):
        assert (truth.method, truth.index, truth.base) == (guess.method, guess.index, guess.base)
        assert guess.estimate.margin is not None
        assert abs(guess.estimate.fraction - truth.estimate.fraction) <= guess.estimate.margin
        if guess.method == "xor":  # the two tensors differ, so a sample cannot be sure
            assert guess.estimate.margin > 0.005
        assert guess.estimate == twin.estimate


def test_memory_does_not_grow_with_the_checkpoints(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {"model.weight": rng.normal(0, 1, (24 << 18,)).astype(np.float32)}
    paths = write(tmp_path, [state, {"model.weight": state["model.weight"] * np.float32(1.0001)}])
    del state
    options = Options(sample=None, methods=("planes", "xor", "sub"), threads=1)
    tracemalloc.start()
    try:
        analyze(paths, options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20  # of 48 MiB


def test_a_half_width_copy_costs_nothing(tmp_path: Path) -> None:
    found = analyze(write(tmp_path, trajectory(2, 64, half=True)), EXACT)
    number = next(n for n, group in enumerate(found.groups) if group.dtype == "BF16")
    cells = [cell for cell in found.measurements if (cell.group, cell.method) == (number, "derive")]
    assert [cell.estimate.fraction for cell in cells] == [0.0, 0.0]
    assert found.advice.groups[number].method == "derive"
    assert document(found)["recommendation"]["classes"][number]["ratio"] is None


def test_a_store_gives_what_its_files_give(
    found: Analysis, states: list[dict[str, np.ndarray]], tmp_path: Path
) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None, deltas=1) as writer:
        for step, state in enumerate(states, 1):
            writer.save(state, step)
    few = replace(EXACT, methods=("planes", "sub"))
    stored = analyze([str(tmp_path / "run")], few)
    assert [checkpoint.label for checkpoint in stored.series] == ["1@1", "2@1", "3@1"]
    for kind in ("weight", "second_moment"):
        for method in ("planes", "sub"):
            base = 1 if method == "sub" else None
            expected = one(found, kind, method, 2, base).estimate.fraction
            assert one(stored, kind, method, 2, base).estimate.fraction == pytest.approx(expected, rel=1e-3)
    some = analyze([str(tmp_path / "run")], few, refs=["latest", "1"])
    assert [checkpoint.step for checkpoint in some.series] == [1, 3]
    with pytest.raises(CheckpointNotFoundError):
        analyze([str(tmp_path / "run")], few, refs=["1", "9"])


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    analyze(write(tmp_path, trajectory(2, 64)), EXACT, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_awkward_tensors(tmp_path: Path) -> None:
    odd = {
        "empty": np.empty((0, 3), np.float32),
        "scalar": np.array(1.5, np.float32),
        "flags": np.array([True, False, True]),
        "nan.weight": np.full(1000, np.nan, np.float32),
        "zero.weight": np.zeros(5000, np.float64),
        "bytes": np.arange(256, dtype=np.uint8),
    }
    found = analyze(write(tmp_path, [odd, odd]), EXACT)
    document(found)
    assert "empty" not in {name for group in found.groups for name in group.tensors}
    zero = group_of(found, "weight", "F64")
    diff = [cell for cell in found.measurements if (cell.group, cell.method) == (zero, "sub")]
    assert diff[0].estimate.fraction == 0.0  # an unchanged tensor
    assert math.isinf(diff[0].estimate.ratio)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("lz4", "xor")}, "no codec 'lz4'"),
        ({"methods": ("planes",)}, "need a delta"),
        ({"sample": 1.5}, "share up to 100%"),
        ({"gaps": (0,)}, "at least 1"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Options(**options)  # type: ignore[arg-type]


def test_gzip_is_measured_on_a_part_of_a_sample(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(0, 1, 32 << 18).astype(np.float32)
    paths = write(tmp_path, [{"w.weight": weight}, {"w.weight": weight}])
    found = analyze(paths, Options(sample=16 << 20, methods=("gzip", "xor")))
    counted = {cell.method: (cell.units, cell.logical >> 20) for cell in found.measurements if cell.index == 1}
    assert counted["xor"] == (16, 16)
    assert counted["gzip"] == (8, 8)
    assert found.sampled == 0.5


def test_derive_is_offered_only_where_all_of_a_class_is_a_copy(tmp_path: Path) -> None:
    states = trajectory(2, 64, half=True)
    for state in states:
        state["half.other.weight"] = np.flip(state["half.model.wte.weight"], 0)
    found = analyze(write(tmp_path, states), EXACT)
    assert not [cell for cell in found.measurements if cell.method == "derive"]
