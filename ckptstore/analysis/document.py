"""Write an analysis as one JSON document (``docs/json.md`` shows its shape), and as rows of CSV."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any, Final

from ckptstore.analysis.analysis import Analysis
from ckptstore.analysis.recommendations import IntervalCost
from ckptstore.analysis.sampling import CONFIDENCE, Estimate
from ckptstore.analysis.sentences import what_to_do
from ckptstore.errors import StorageError
from ckptstore.exchange.atomic_files import refuse_store
from ckptstore.formats.codecs import BLOCK, word_size

__all__ = ["COLUMNS", "document", "write_csv"]

COLUMNS: Final = (
    *("class", "dtype", "step", "base_step", "gap", "codec", "ratio", "ratio_low", "ratio_high", "bits_per_value"),
    *("encode_gbps", "decode_gbps", "blocks", "bytes", "params"),
)
"""Columns of the CSV file: the keys of an object of ``steps`` in the JSON document."""


def document(found: Analysis) -> dict[str, Any]:
    """The analysis as JSON values. Sizes are bytes, speeds 10^9 logical bytes per second of one core."""
    advice = found.advice
    return {
        "checkpoints": [
            {
                "label": one.label,
                "step": one.step,
                "tensors": len(one.tensors) if one.described else None,
                "bytes": one.nbytes if one.described else None,
            }
            for one in found.series
        ],
        "spacing": found.spacing,
        "gaps": list(found.gaps),
        "bytes": advice.nbytes,
        "sample": {
            "exact": found.exact,
            "fraction": found.sampled,
            "confidence": CONFIDENCE,
            "block_bytes": BLOCK,
        },
        "skipped": [{"name": one.name, "reason": one.reason} for one in found.skipped],
        "classes": _classes(found),
        "recommendation": _recommendation(found),
        "intervals": [_cost(one) for one in advice.alternatives],
        "codecs": _codecs(found),
        "steps": _steps(found),
        "prefixes": _prefixes(found),
        "shipping": _shipping(found),
    }


def _classes(found: Analysis) -> list[dict[str, Any]]:
    return [
        {
            "class": group.kind,
            "dtype": group.dtype,
            "tensors": len(group.tensors),
            "bytes": group.nbytes,
            "blocks": group.blocks,
            "sampled_blocks": len(group.units),
            "decided_by": {way: group.decided.get(way, 0) for way in ("name", "values", "override")},
        }
        for group in found.groups
    ]


def _recommendation(found: Analysis) -> dict[str, Any]:
    advice = found.advice
    return {
        **_cost(advice.best),
        "ratio": advice.nbytes / advice.best.mean if advice.best.mean else None,
        "bytes_margin": advice.margin,
        "full_bytes": advice.full,
        "restore_limit_bytes": None if advice.limit == math.inf else advice.limit,
        "largest_gap_measured": advice.measured,
        "encode_gbps": _gbps(advice.encode),
        "decode_gbps": _gbps(advice.decode),
        "what_to_do": what_to_do(found),
        "classes": [
            {
                **_group(found, one.group),
                "codec": one.method,
                "gap": one.gap,
                **_ratio(one.estimate),
                "own_interval": one.cost.interval,
                "own_bytes_per_checkpoint": one.cost.mean,
                "own_restore_times": one.cost.times,
            }
            for one in advice.groups
        ],
    }


def _codecs(found: Analysis) -> list[dict[str, Any]]:
    return [
        {
            **_group(found, one.group),
            "codec": one.method,
            "gap": one.gap,
            "steps": one.pairs,
            **_ratio(one.estimate),
            "bits_per_value": _bits(found, one.group, one.estimate),
            "encode_gbps": _gbps(one.encode),
            "decode_gbps": _gbps(one.decode),
        }
        for one in found.summaries
    ]


def _steps(found: Analysis) -> list[dict[str, Any]]:
    return [
        {
            **_group(found, one.group),
            "step": found.series[one.index].step,
            "base_step": None if one.base is None else found.series[one.base].step,
            "gap": one.gap,
            "codec": one.method,
            **_ratio(one.estimate),
            "bits_per_value": _bits(found, one.group, one.estimate),
            "encode_gbps": _gbps(one.encode),
            "decode_gbps": _gbps(one.decode),
            "blocks": one.units,
            "bytes": one.logical,
            "params": dict(one.params),
        }
        for one in found.measurements
    ]


def _prefixes(found: Analysis) -> list[dict[str, Any]]:
    return [
        {
            **_group(found, one.group),
            "step": found.series[one.index].step,
            "bits": one.bits,
            "distinct": one.distinct,
            "entropy": one.entropy,
        }
        for one in found.prefixes
    ]


def _shipping(found: Analysis) -> list[dict[str, Any]]:
    return [
        {
            "link_bits_per_second": one.link,
            "codec": one.method,
            "bytes": one.nbytes,
            "encode_seconds": one.encode,
            "send_seconds": one.send,
            "decode_seconds": one.decode,
            "serial_seconds": one.serial,
            "overlapped_seconds": one.overlapped,
        }
        for one in found.shipping
    ]


def write_csv(found: Analysis, path: Path) -> None:
    """Write one row per measurement (`COLUMNS`). Writes the file atomically.

    Raises:
        UsageError: the path is inside a checkpoint store.
        StorageError: the file cannot be written.
    """
    refuse_store(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            for row in _steps(found):
                params = " ".join(f"{name}={value}" for name, value in row["params"].items())
                writer.writerow(row | {"params": params})
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(error.errno, error.strerror, str(path)) from error


def _group(found: Analysis, number: int) -> dict[str, str]:
    return {"class": found.groups[number].kind, "dtype": found.groups[number].dtype}


def _ratio(estimate: Estimate) -> dict[str, float | None]:
    low, high = estimate.interval or (None, None)
    return {"ratio": _finite(estimate.ratio), "ratio_low": _finite(low), "ratio_high": _finite(high)}


def _finite(value: float | None) -> float | None:
    """None for infinity, which means that nothing is stored: JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def _bits(found: Analysis, number: int, estimate: Estimate) -> float:
    return estimate.fraction * 8 * word_size(found.groups[number].dtype)


def _gbps(rate: float | None) -> float | None:
    return None if rate is None or rate == math.inf else rate / 1e9


def _cost(cost: IntervalCost) -> dict[str, Any]:
    return {
        "interval": cost.interval,
        "deltas": cost.deltas,
        "bytes_per_checkpoint": cost.mean,
        "restore_bytes": cost.restore,
        "restore_times": cost.times,
    }
