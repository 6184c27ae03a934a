"""What the codec benchmark prints: a table for each case, the promises, the chart, and the tables of the docs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Case = Mapping[str, Any]
GIGA = 1e9


def row_of(case: Case, method: str) -> Mapping[str, Any] | None:
    """The case's row of a method."""
    return next((row for row in case["rows"] if row["method"] == method), None)


def bits(case: Case, row: Mapping[str, Any]) -> float:
    """Stored bits per number."""
    return 8 * _word(case) / row["ratio"] if row["ratio"] else 0.0


def _word(case: Case) -> int:
    return 2 if case["dtype"] == "BF16" else 4


def title(case: Case) -> str:
    """What a case is, in a line."""
    gap = f", {case['gap']} step{'s' if case['gap'] > 1 else ''} apart" if case["gap"] else ""
    return f"{case['label']}{gap} ({case['dtype']}, {case['nbytes'] / 1e6:.0f} MB)"


def show(case: Case) -> None:
    """Print one case."""
    bound = ", ".join(f"{name} {value:.2f}" for name, value in case["bound"].items())
    table = Table(title=f"{title(case)}; order-0 planes: {bound} bits", title_justify="left")
    table.add_column("method", no_wrap=True)
    columns = ("ratio", "bits", "enc GB/s", "dec GB/s", "enc all", "dec all", "ratio x enc")
    for column in columns:
        table.add_column(column, justify="right")
    for row in sorted(case["rows"], key=lambda row: -(row["ratio"] or float("inf"))):
        table.add_row(row["method"], *_cells(case, row))
    Console(width=110).print(table)


def _cells(case: Case, row: Mapping[str, Any]) -> list[str]:
    rates = [
        f"{row[name] / GIGA:.3f}" if name in row else "-" for name in ("encode", "decode", "encode_all", "decode_all")
    ]
    product = f"{row['ratio'] * row['encode'] / GIGA:.2f}" if row["ratio"] else "-"
    return [f"{row['ratio']:.3f}" if row["ratio"] else "all", f"{bits(case, row):.2f}", *rates, product]


# --------------------------------------------------------------------------------------------------- promises


def promises(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What the project promises of its codecs, and what this run measured.

    A ratio's ``bound`` is what a perfect entropy coder of the difference's byte planes would reach: where that lies
    below the promise, no codec of this kind can keep it. With context it is the bound given the base's exponents.
    """
    found = []
    for case in cases:
        diff, peer = row_of(case, "sub"), row_of(case, "ZipNN")
        if diff is None or not case["label"].lower().replace("bf16 ", "").startswith("weights"):
            continue
        name = title(case)
        if case["dtype"] == "F32":
            excess = bits(case, diff) / case["bound"]["sub"] - 1
            found.append(_promise(f"{name}: above the order-0 bound", excess, "<=", 0.02, "{:+.2%}"))
        if peer is None:
            continue
        least = 1.05 if case["dtype"] == "F32" else 1.3
        for row, kind in ((diff, "sub"), (row_of(case, "sub + context"), "context")):
            if row is not None:
                what = f"{name}: ratio of {row['method']} / ZipNN+XOR"
                bound = {"bound": 8 * _word(case) / case["bound"][kind] / peer["ratio"]}
                found.append(_promise(what, row["ratio"] / peer["ratio"], ">=", least, "{:.3f}") | bound)
        found += [
            _promise(f"{name}: {rate} rate / ZipNN+XOR", diff[rate] / peer[rate], ">=", 1.0, "{:.2f}")
            for rate in ("encode", "decode")
        ]
    return found


def _promise(what: str, value: float, sense: str, limit: float, form: str) -> dict[str, Any]:
    kept = value <= limit if sense == "<=" else value >= limit
    return {"what": what, "value": value, "shown": form.format(value), "limit": f"{sense} {limit}", "kept": kept}


def show_promises(found: Sequence[Mapping[str, Any]]) -> None:
    """Print the promises."""
    table = Table(title="Promises", title_justify="left")
    for column in ("what", "measured", "promised", "order-0 bound", ""):
        table.add_column(column)
    for promise in found:
        verdict = "[green]kept[/]" if promise["kept"] else "[red]broken[/]"
        bound = f"{promise['bound']:.3f}" if "bound" in promise else ""
        table.add_row(promise["what"], promise["shown"], promise["limit"], bound, verdict)
    Console(width=140).print(table)


# ------------------------------------------------------------------------------------------------------ chart


def draw(cases: Sequence[Case], path: Path) -> None:
    """Ratio against encoding rate for the deltas, a panel for each case."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [
        case
        for case in cases
        if case["gap"] in (1, 10) and case["label"].lower().endswith(("late", "fine-tune", "weights"))
    ]
    if not shown:
        return
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 4 * lines), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(shown) :]:
        panel.set_visible(False)
    for panel, case in zip(panels.flat, shown, strict=False):
        for row in case["rows"]:
            own = row["method"] in ("xor", "sub", "sub + context")
            if row["method"] == "planes" or not row["ratio"]:
                continue
            panel.plot(row["encode"] / GIGA, row["ratio"], "o" if own else "s", color="#2563eb" if own else "#9ca3af")
            panel.annotate(
                row["method"], (row["encode"] / GIGA, row["ratio"]), (4, 4), textcoords="offset points", fontsize=7
            )
        bound = 8 * _word(case) / case["bound"]["sub"]
        panel.axhline(bound, color="#d97706", linewidth=1, linestyle="--", label="order-0 bound, integer difference")
        panel.set(title=title(case), xlabel="encode, GB/s of one core", ylabel="ratio", xscale="log")
        panel.title.set_fontsize(9)
        panel.legend(fontsize=7, loc="lower left")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# ----------------------------------------------------------------------------------------------- for the docs


def markdown(report: Mapping[str, Any]) -> str:
    """Every table; ``docs/codecs.md`` has the most important rows."""
    lines = ["| data | bound | " + " | ".join(_DOC_METHODS) + " |", "|---|---:|" + "---:|" * len(_DOC_METHODS)]
    for case in report["cases"]:
        cells = []
        for method in _DOC_METHODS:
            row = row_of(case, method)
            cells.append(f"{row['ratio']:.2f}" if row and row["ratio"] else "-")
        bound = 8 * _word(case) / case["bound"].get("sub", case["bound"]["raw"])
        lines.append(f"| {title(case)} | {bound:.2f} | " + " | ".join(cells) + " |")
    lines += ["", *_against_zipnn(report)]
    lines += [
        "",
        "| data | method | ratio | encode | decode | encode, all cores | decode, all cores |",
        "|---|---|" + "---:|" * 5,
    ]
    for case in report["cases"]:
        if case["case"] in _DOC_RATES:
            for row in sorted(case["rows"], key=lambda row: -(row["ratio"] or 1e9)):
                lines.append(
                    f"| {title(case)} | {row['method']} | "
                    + " | ".join(_cells(case, row)[:1] + _cells(case, row)[2:6])
                    + " |"
                )
    for case in report["cases"]:
        if "prefixes" in case:
            lines += ["", f"{title(case)}; planes: {case['prefixes']['planes']:.3f}", ""]
            lines += ["| prefix bits | " + " | ".join(case["prefixes"]["distinct"]) + " |", "|---|" + "---:|" * 6]
            lines.append("| distinct | " + " | ".join(str(n) for n in case["prefixes"]["distinct"].values()) + " |")
            for group, ratios in case["prefixes"]["ratio"].items():
                name = "ratio, one dictionary" if group == "0" else f"ratio, groups of {group}"
                lines.append(f"| {name} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios.values()) + " |")
    return "\n".join(lines)


def _against_zipnn(report: Mapping[str, Any]) -> list[str]:
    """Ratio and rates of the deltas over ZipNN's on the XOR with the base."""
    lines = [
        "| data | `sub`: bound | ratio | encode | decode | with context: bound | ratio | encode | decode |",
        "|---|" + "---:|" * 8,
    ]
    for case in report["cases"]:
        peer = row_of(case, "ZipNN")
        if not case["gap"] or peer is None:
            continue
        cells = []
        for method, kind in (("sub", "sub"), ("sub + context", "context")):
            row = row_of(case, method)
            if row is None:
                cells += ["-"] * 4
                continue
            bound = 8 * _word(case) / case["bound"][kind] / peer["ratio"]
            cells += [f"{bound:.3f}", f"{row['ratio'] / peer['ratio']:.3f}"]
            cells += [f"{row[rate] / peer[rate]:.2f}" for rate in ("encode", "decode")]
        lines.append(f"| {title(case)} | " + " | ".join(cells) + " |")
    return lines


_DOC_METHODS = (
    "gzip-6",
    "zstd-3",
    "lz4",
    "blosc2 shuffle+zstd",
    "pcodec",
    "ZipNN",
    "planes",
    "xor",
    "sub",
    "sub + context",
)
_DOC_RATES = ("delta/weights, mid/1", "delta/bf16 weights/1", "raw/weights, mid")


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
