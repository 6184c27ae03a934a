"""Draw the report's plots as SVG with matplotlib (extra ``plot``), in Okabe and Ito's colours.

Each function returns one SVG text; matplotlib is imported at the first call.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ckptstore.analysis.analysis import Analysis
from ckptstore.analysis.measurement import MethodMeasurement
from ckptstore.analysis.methods import BOUNDS, COMPARED, COPIES, DELTAS, SHOWN
from ckptstore.analysis.recommendations import Shipping, Summary
from ckptstore.errors import MissingDependencyError
from ckptstore.formats.codecs import word_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "STYLE",
    "gaps",
    "intervals",
    "need_matplotlib",
    "prefixes",
    "ratios",
    "shipping",
    "speeds",
    "training",
]

COLOURS: Final = {name: method.colour for name, method in SHOWN.items()} | {"recommended": "#009E73"}
_CLASS_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK: Final = "#22272e"
_FAINT: Final = "#8a929c"
_PER_ROW: Final = 3
_TICK: Final[Any] = {"color": _INK, "marker": "|", "markersize": 11, "markeredgewidth": 2, "linestyle": "none"}
STYLE: Final[Any] = {  # Any: matplotlib types every key
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#c5cad1",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8ebef",
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "path",  # the same on machines without the font
    "svg.hashsalt": "ckptstore",
    "savefig.facecolor": "none",
}


def need_matplotlib() -> None:
    """Raise `MissingDependencyError` if matplotlib is not installed, before minutes of measuring and not after."""
    try:
        import matplotlib  # noqa: F401 - only to check that it is installed
    except ModuleNotFoundError as error:
        raise MissingDependencyError("--report draws plots with matplotlib: pip install 'ckptstore[plot]'") from error


def _grid(count: int, draw: Callable[[Axes, int], None], *, height: float = 2.9, legend: bool = False) -> str:
    """Draw `count` panels, up to three in a row, each with `draw`, and one legend for all of them."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    columns = _columns(count)
    rows = -(-count // columns)
    with rc_context(STYLE):
        width = 8.4 if count == 1 else max(3.75 * columns, 10.6)
        figure: Figure = Figure(figsize=(width, height * rows + 0.3), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for number in range(count):
            draw(axes[number], number)
        for unused in axes[count:]:
            unused.set_axis_off()
        if legend:
            _legend(figure, list(axes[:count]))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _columns(count: int) -> int:
    """Three panels in a row; two if that leaves no empty cell."""
    return 2 if count in (2, 4) else min(_PER_ROW, count)


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    handles: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(8, len(handles)))


def _plain(axis: Any, ticks: Sequence[float]) -> None:
    """Label a logarithmic axis at the given ticks, as plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def _drop_crowded(ticks: Sequence[float]) -> list[float]:
    """Ticks at least a factor of 1.5 apart, so that labels do not touch."""
    kept: list[float] = []
    for tick in sorted(set(ticks)):
        if not kept or tick / kept[-1] >= 1.5:
            kept.append(tick)
    return kept


def ratios(found: Analysis) -> str:
    """Ratio of every codec, with a panel for each group; deltas over `Analysis.gap`; the bounds as ticks."""
    gap = found.gap

    def draw(axes: Axes, position: int) -> None:
        number = found.major[position]
        cells = {one.method: one for one in found.summaries if one.group == number and one.gap in (None, gap)}
        shown = [one for one in cells.values() if one.method in COLOURS and one.method != "raw"]
        shown = sorted((one for one in shown if one.estimate.fraction), key=lambda one: one.estimate.ratio)
        values = [one.estimate.ratio for one in shown]
        axes.barh(range(len(shown)), values, color=[COLOURS[one.method] for one in shown], height=0.72)
        tips = [one.estimate.interval[1] for one in shown if one.estimate.interval]
        longest = max(values + [tip for tip in tips if math.isfinite(tip)], default=1.0)
        for row, one in enumerate(shown):
            if (interval := one.estimate.interval) is not None and interval[1] > interval[0]:
                axes.plot(interval, [row, row], color=_INK, linewidth=1, label="95 % confidence")
            bound = cells.get(BOUNDS.get(one.method, ""))
            if bound is not None and bound.estimate.fraction:
                axes.plot(bound.estimate.ratio, row, label="bound", **_TICK | {"markersize": 15})
                longest = max(longest, bound.estimate.ratio)
            at = max(one.estimate.ratio, interval[1] if interval and math.isfinite(interval[1]) else 0.0)
            at = max(at, bound.estimate.ratio if bound is not None and bound.estimate.fraction else 0.0)
            _number(axes, f"{one.estimate.ratio:.2f}×", (at, row), 5)
        axes.set_yticks(range(len(shown)), [one.method for one in shown])
        axes.axvline(1, color=_FAINT, linewidth=1, label="raw")
        axes.set_xlim(0, longest * 1.28)
        axes.set_xlabel("times smaller")
        axes.grid(axis="y", visible=False)
        free = [name for name in COPIES if name in cells and not cells[name].estimate.fraction]
        note = "".join(f"\n{name}: costs nothing" for name in free)
        axes.set_title(found.label(number) + note)

    return _grid(len(found.major), draw, height=3.1, legend=True)


def training(found: Analysis) -> str:
    """Ratio at each step (the XOR paper's figure 6), with deltas against the previous checkpoint."""
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes, position: int) -> None:
        number = found.major[position]
        for method in COMPARED:
            points = [one for one in found.over_training(number, method) if one.estimate.fraction]
            if points:
                steps = [found.series[one.index].step for one in points]
                style: dict[str, Any] = {"color": COLOURS[method], "marker": SHOWN[method].marker}
                axes.plot(steps, [one.estimate.ratio for one in points], label=method, **style)
                lines = [one.estimate.interval for one in points]
                if all(line is not None and math.isfinite(line[1]) for line in lines):
                    low, high = ([line[side] for line in lines if line] for side in (0, 1))
                    axes.fill_between(steps, low, high, color=COLOURS[method], alpha=0.13, linewidth=0)
        axes.set_ylim(bottom=min(1.0, axes.get_ylim()[0]))
        axes.axhline(1, color=_FAINT, linewidth=1, label="raw")
        axes.set_title(found.label(number))
        axes.set_xlabel("step")
        if position % _columns(len(found.major)) == 0:
            axes.set_ylabel("times smaller")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    return _grid(len(found.major), draw, legend=True)


def _of(found: Analysis, group: int, method: str) -> list[MethodMeasurement]:
    return [one for one in found.measurements if one.group == group and one.method == method]


def gaps(found: Analysis) -> str:
    """Bits per value by gap: XOR and integer difference, their bounds dashed, the best codec without a base dotted."""

    def draw(axes: Axes, position: int) -> None:
        number = found.major[position]
        bits = 8 * word_size(found.groups[number].dtype)
        for method in DELTAS:
            cells = [one for one in _means(found, number, method) if one.gap in found.gaps]
            style: dict[str, Any] = {"color": COLOURS[method], "marker": SHOWN[method].marker}
            axes.plot(
                [one.gap or 1 for one in cells], [bits * one.estimate.fraction for one in cells], label=method, **style
            )
            pairs = _of(found, number, method)  # of every gap, because few gaps of an uneven series are equal
            marks = [bits * one.estimate.fraction for one in pairs]
            axes.scatter([one.gap or 1 for one in pairs], marks, s=9, color=COLOURS[method], alpha=0.35, linewidths=0)
        for method, bound in BOUNDS.items():
            colour = COLOURS[method]
            if method in DELTAS:
                cells = [one for one in _means(found, number, bound) if one.gap in found.gaps]
                marks = [bits * one.estimate.fraction for one in cells]
                axes.plot([one.gap or 1 for one in cells], marks, color=colour, linestyle="--", linewidth=1)
                continue
            for one in _means(found, number, bound):
                axes.axhline(bits * one.estimate.fraction, color=colour, linestyle="--", linewidth=1)
            for one in _means(found, number, method):
                axes.axhline(bits * one.estimate.fraction, color=colour, linestyle=":", label=f"{method}, no base")
        axes.set_xscale("log", base=2)
        _plain(axes.xaxis, _drop_crowded(found.gaps))
        axes.set_title(found.label(number))
        axes.set_xlabel("gap, checkpoints")
        if position % _columns(len(found.major)) == 0:
            axes.set_ylabel("bits per value")

    return _grid(len(found.major), draw, legend=True)


def _means(found: Analysis, group: int, method: str) -> list[Summary]:
    cells = [one for one in found.summaries if one.group == group and one.method == method]
    return sorted(cells, key=lambda one: one.gap or 0)


def prefixes(found: Analysis) -> str:
    """Distinct prefixes by their length at the last step (the XOR paper's figure 7)."""

    def draw(axes: Axes, _number: int) -> None:
        last = max((one.index for one in found.prefixes), default=0)
        numbers = [number for number in found.major if any(one.group == number for one in found.prefixes)]
        ends: list[tuple[float, str, str]] = []
        for order, number in enumerate(numbers):
            points = sorted(
                (one.bits, one.distinct) for one in found.prefixes if (one.group, one.index) == (number, last)
            )
            colour = _CLASS_COLOURS[order % len(_CLASS_COLOURS)]
            axes.plot(*zip(*points, strict=True), color=colour, marker="o")
            ends.append((points[-1][1], found.label(number), colour))
        axes.plot(range(7, 13), [2**bits for bits in range(7, 13)], color=_FAINT, linestyle=":")
        axes.annotate("maximum", (9, 512), (0, 6), textcoords="offset points", color=_FAINT, rotation=27, ha="center")
        axes.plot([7, 9], [28, 101], color=_INK, linestyle="none", marker="*", markersize=9)
        axes.annotate("★ moments in Teng et al. 2026: 28, 101", (0.02, 0.95), xycoords="axes fraction")
        axes.set_yscale("log", base=2)
        _plain(axes.yaxis, [2**power for power in range(2, 13)])
        places: list[float] = []  # positions of the labels at the lines' ends, moved apart where lines meet
        for value, _, _ in sorted(ends):
            places.append(max(math.log2(value), places[-1] + 0.42 if places else 0.0))
        excess = sum(place - math.log2(end[0]) for place, end in zip(places, sorted(ends), strict=True))
        for place, (_, label, colour) in zip(places, sorted(ends), strict=True):
            at = place - excess / len(places)
            axes.annotate(label, (12, 2**at), (9, 0), textcoords="offset points", color=colour, va="center")
        axes.set_xlabel("bits of prefix (sign, exponent, first mantissa bits)")
        axes.set_ylabel("distinct prefixes")

    return _grid(1, draw, height=3.9)


def speeds(found: Analysis) -> str:
    """Ratio against the encoding speed of one core; better is up and to the right."""
    gap = found.gap

    def draw(axes: Axes, position: int) -> None:
        number = found.major[position]
        for one in found.summaries:
            if one.group != number or one.gap not in (None, gap) or one.method in ("raw", *COPIES):
                continue
            if one.encode and one.decode and one.estimate.fraction and one.method in COLOURS:
                colour, height = COLOURS[one.method], one.estimate.ratio
                axes.plot([one.encode / 1e9, one.decode / 1e9], [height, height], color=colour, linewidth=1, alpha=0.6)
                axes.plot(one.encode / 1e9, height, color=colour, marker="o", linestyle="none", label=one.method)
                axes.plot(one.decode / 1e9, height, color=colour, marker="o", linestyle="none", markerfacecolor="white")
        axes.set_xscale("log")
        _plain(axes.xaxis, [0.01, 0.03, 0.1, 0.3, 1, 3])
        axes.set_xlim(0.008, 4)
        axes.set_title(found.label(number))
        axes.set_xlabel("GB/s of one core: ● encode  ○ decode")
        if position % _columns(len(found.major)) == 0:
            axes.set_ylabel("times smaller")

    return _grid(len(found.major), draw, legend=True)


def shipping(found: Analysis) -> str:
    """Time to encode and send a checkpoint over each link (the XOR paper's figures 4 and 5)."""
    links = list(dict.fromkeys(one.link for one in found.shipping))
    # The same unit for all links, so that they can be compared.
    slowest = max(one.serial for one in found.shipping if one.method != "gzip")
    scale, unit = (1.0, "seconds") if slowest >= 1 else (1000.0, "milliseconds")

    def draw(axes: Axes, number: int) -> None:
        rows: list[Shipping] = [one for one in found.shipping if one.link == links[number]][::-1]
        # gzip is so slow that it would hide all differences between the others: its bar is cut off.
        longest = max(one.serial for one in rows if one.method != "gzip")
        raw = next(one for one in rows if one.method == "raw").serial
        send, encode = [one.send * scale for one in rows], [one.encode * scale for one in rows]
        axes.barh(range(len(rows)), send, color="#56B4E9", height=0.7, label="send")
        axes.barh(range(len(rows)), encode, left=send, color="#E69F00", height=0.7, label="encode")
        axes.plot([one.overlapped * scale for one in rows], range(len(rows)), label="when they overlap", **_TICK)
        axes.axvline(raw * scale, color=_FAINT, linewidth=1, linestyle="--", label="raw")
        limit = 1.3 * longest * scale
        for row, one in enumerate(rows):
            outside = one.serial * scale > limit
            text = f"{'▸ ' if outside else ''}{_three(one.serial * scale)}"
            at, align = (limit, "right") if outside else (one.serial * scale, "left")
            weight = "bold" if one.serial < raw else "normal"
            _number(axes, text, (at, row), -4 if outside else 5, ha=align, weight=weight)
        axes.set_xlim(0, limit)
        axes.set_yticks(range(len(rows)), [one.method for one in rows])
        axes.grid(axis="y", visible=False)
        axes.set_title(speed(links[number]))
        axes.set_xlabel(unit)

    return _grid(len(links), draw, height=3.3, legend=True)


def _below(axes: Axes, text: str, where: tuple[float, float]) -> None:
    axes.annotate(text, where, (0, -12), textcoords="offset points", ha="center", va="center", color=_FAINT, fontsize=8)


def _number(axes: Axes, text: str, where: tuple[float, float], offset: float, **style: Any) -> None:
    """Write a number beside a bar, on a white ground that covers lines."""
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.annotate(text, where, (offset, 0), textcoords="offset points", va="center", bbox=ground, zorder=4, **style)


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def speed(link: float) -> str:
    """Format a link speed: ``10 Gbit/s``."""
    for size, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if link >= size:
            return f"{link / size:g} {unit}"
    return f"{link:g} bit/s"


def intervals(found: Analysis) -> str:
    """Bytes per checkpoint and the most expensive restore, by interval."""
    advice = found.advice

    def draw(axes: Axes, number: int) -> None:
        costs = [one for one in advice.alternatives if one.interval]
        values = [one.mean / advice.nbytes * 100 if number == 0 else one.times for one in costs]
        steps = [one.interval for one in costs]
        known = [index for index, step in enumerate(steps) if step <= advice.measured]
        if len(known) < len(steps):
            axes.plot(steps, values, color="#0072B2", linestyle=":", label="beyond the gaps measured")
        axes.plot(steps[: len(known)], values[: len(known)], color="#0072B2", marker="o", label="measured gaps")
        best = advice.best
        if best.interval:
            value = best.mean / advice.nbytes * 100 if number == 0 else best.times
            axes.plot(
                best.interval, value, color="#D55E00", marker="o", markersize=10, linestyle="none", label="recommended"
            )
            text = f"T = {best.interval}\n{value:.1f} %" if number == 0 else f"T = {best.interval}\n{value:.2f}×"
            style: dict[str, Any] = {"color": "#D55E00", "weight": "bold", "ha": "center", "zorder": 5}
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
            where = (best.interval, value)
            axes.annotate(text, where, (0, 13), textcoords="offset points", bbox=box, **style)
        if number == 1:
            for one, value in zip(costs, values, strict=True):  # explains where a chain loses a delta
                _below(axes, str(one.deltas), (one.interval, value))
        if number == 1 and math.isfinite(advice.limit):
            axes.axhline(advice.limit / advice.full, color=_FAINT, linestyle="--", linewidth=1.2, label="restore bound")
        axes.set_xscale("log", base=2)
        _plain(axes.xaxis, _drop_crowded(steps))
        axes.margins(y=0.35)
        title = "bytes per checkpoint" if number == 0 else "the most expensive restore (small: deltas in its chain)"
        axes.set_title(title)
        axes.set_ylabel("% of raw" if number == 0 else "times a full")
        axes.set_xlabel("T: checkpoints that share one base")

    return _grid(2, draw, height=2.9, legend=True)
