"""The codec benchmark on made-up tensors: its measurements are consistent, and its report is true to them."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from ckptstore.formats import codecs
from tools.bench.codecs import codec_comparison as bench
from tools.bench.codecs import codec_methods, codec_report
from tools.bench.codecs.codec_cases import CASES, Case, Part

CASE = Case("weights, late", "lm", "model.", "F32", 2, 1, group="delta")


def parts(*sizes: int) -> list[Part]:
    rng = np.random.default_rng(1)
    found = []
    for size in sizes or (60_000, 5_000):
        base = rng.normal(0, 0.02, size).astype("<f4")
        data = base + rng.normal(0, 1e-5, size).astype("<f4")
        found.append(Part(codecs.as_bytes(data), codecs.as_bytes(base), None))
    return found


def test_every_method_returns_what_it_was_given() -> None:
    """``measure`` compares every byte; the sizes it reports are those of the payloads."""
    found, _ = codec_methods.others(CASE)
    methods = [*codec_methods.ours(CASE, parts()), *found]
    labels = {method.label for method in methods}
    assert {"planes", "xor", "sub", "sub + context", "gzip-6", "zstd-1", "zstd-3", "zstd-9"} <= labels
    for method, row in zip(methods, bench.measure(methods, parts(), 2), strict=True):
        stored = sum(len(bytes(method.encode(part, {}))) for part in parts())
        assert row["stored"] == stored
        assert row["ratio"] == pytest.approx(260_000 / stored)
        assert row["encode"] > 0
        assert row["decode"] > 0


def test_a_method_that_lies_is_caught() -> None:
    liar = codec_methods.Other("liar", bytes, lambda payload: payload[:-1] + b"!")
    with pytest.raises(AssertionError, match="liar does not return"):
        bench.measure([liar], parts(), 1)


def test_a_whole_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Large enough for code tables to weigh little: with blocks of 60,000 values they are a percent of the payload.
    monkeypatch.setattr(bench, "load", lambda case, limit: parts(524_288, 5_000))
    options = argparse.Namespace(limit=None, methods="[sxz]*", rounds=1, one_core=False)
    result = bench.run(CASE, options)
    diff, xor = codec_report.row_of(result, "sub"), codec_report.row_of(result, "xor")
    assert diff is not None
    assert xor is not None
    assert diff["ratio"] > xor["ratio"] > 1
    assert diff["encode_all"] > 0
    assert result["bound"]["sub"] < codec_report.bits(result, diff) < 1.02 * result["bound"]["sub"]
    promised = codec_report.promises([result])
    assert promised[0]["kept"]
    assert promised[0]["what"].endswith("above the order-0 bound")
    codec_report.show(result)
    codec_report.show_promises(promised)
    assert "sub" in capsys.readouterr().out
    codec_report.draw([result], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
    assert "| weights, late, 1 step apart (F32, 2 MB) |" in codec_report.markdown({"cases": [result]})


def test_a_broken_promise_is_shown_as_broken() -> None:
    rows = [
        {"method": "sub", "ratio": 1.5, "encode": 1e9, "decode": 1e9},
        {"method": "ZipNN", "ratio": 1.45, "encode": 2e9, "decode": 1e9},
    ]
    case = {"label": "weights, mid", "dtype": "F32", "gap": 1, "nbytes": 4, "bound": {"sub": 21.0}, "rows": rows}
    found = codec_report.promises([case])
    assert found[1]["bound"] == pytest.approx(32 / 21 / 1.45)
    assert [(p["shown"], p["kept"]) for p in found] == [
        ("+1.59%", True),
        ("1.034", False),
        ("0.50", False),
        ("1.00", True),
    ]


def test_prefix_counts_are_of_the_whole() -> None:
    found = bench.prefixes(parts())
    assert list(found["distinct"]) == list(range(7, 13))
    assert sorted(found["distinct"].values()) == list(found["distinct"].values())
    assert found["ratio"][1024][9] > found["ratio"][0][9] > 1


def test_case_names_are_unique() -> None:
    names = [bench.name_of(case) for case in CASES]
    assert len(set(names)) == len(names)
