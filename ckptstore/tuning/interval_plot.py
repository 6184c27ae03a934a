"""Plot the measurements and the model: T_w over N, and slowdown over the interval."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ckptstore.errors import MissingDependencyError, UsageError
from ckptstore.exchange.atomic_files import refuse_store
from ckptstore.tuning.save_interval import Choice, Limits, Timing, slowdown

__all__ = ["draw", "need_matplotlib"]

_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000")
"""Okabe and Ito's colours, which are distinct with any colour vision."""
_STAR: Final[dict[str, Any]] = {
    "marker": "*",
    "color": "#d55e00",
    "markersize": 16,
    "zorder": 5,
    "linestyle": "none",
}


def need_matplotlib() -> None:
    """Raise `MissingDependencyError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'ckptstore[plot]'") from error


def draw(
    timings: Sequence[Timing], choice: Choice, iteration: float, limits: Limits, path: str | os.PathLike[str]
) -> None:
    """Write a picture; its suffix determines the format.

    Left: T_w and T_w / N for every N with the chosen threads, and for every number of threads at N = 1. Right: the
    model's slowdown over the interval (the shape of PCcheck's Fig. 8), with q and f*.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UsageError: matplotlib cannot write this suffix, or the path is inside a checkpoint store.
        OSError: the picture cannot be written.
    """
    refuse_store(Path(path).resolve())
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    suffix = os.fspath(path).rpartition(".")[2].lower()
    if suffix not in (known := figure.canvas.get_supported_filetypes()):
        raise UsageError(
            f"{os.fspath(path)}: no picture of this kind can be drawn; there are {', '.join(sorted(known))}"
        )
    left, right = figure.subplots(1, 2)
    _measured(left, timings, choice)
    _modelled(right, timings, choice, iteration, limits)
    figure.savefig(path, dpi=150)


def _finish(axes: Any) -> None:
    """Finish either plot. The legend is below, where it hides no numbers."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _measured(axes: Any, timings: Sequence[Timing], choice: Choice) -> None:
    scale, unit = (1, "seconds") if max(one.write for one in timings) >= 1 else (1000, "milliseconds")
    for number, threads in enumerate(sorted({one.setting.threads for one in timings})):
        line = sorted(
            (
                one
                for one in timings
                if one.setting.threads == threads and one.setting.staging_bytes == timings[0].setting.staging_bytes
            ),
            key=lambda one: one.setting.in_flight,
        )
        if not line:
            continue
        colour, places = _COLOURS[number % len(_COLOURS)], [one.setting.in_flight for one in line]
        label = f"{threads} thread{'s' if threads > 1 else ''}"
        axes.plot(places, [scale * one.write for one in line], "o-", color=colour, label=f"T_w: a save, {label}")
        shares = [scale * one.per_save for one in line]
        axes.plot(places, shares, "o--", color=colour, mfc="white", label=f"T_w / N, {label}")
    setting = choice.timing.setting
    axes.plot(setting.in_flight, scale * choice.timing.per_save, **_STAR, label="chosen")
    title = f"Measured: one save in {scale * choice.timing.per_save:.3g} {unit}, with N = {setting.in_flight}"
    axes.set(xlabel="N: saves in flight", ylabel=unit, title=title, ylim=(0, None))
    axes.set_xticks(sorted({one.setting.in_flight for one in timings}))
    _finish(axes)


def _modelled(axes: Any, timings: Sequence[Timing], choice: Choice, iteration: float, limits: Limits) -> None:
    from matplotlib.ticker import FuncFormatter

    chosen = choice.timing.setting
    longest = max(10, 4 * choice.interval)
    intervals = sorted({max(1, round(longest ** (number / 80))) for number in range(81)})
    shown = [
        one
        for one in timings
        if (one.setting.threads, one.setting.staging_bytes) == (chosen.threads, chosen.staging_bytes)
    ]
    for number, one in enumerate(sorted(shown, key=lambda one: one.setting.in_flight)):
        values = [slowdown(one, interval, iteration) for interval in intervals]
        axes.plot(intervals, values, color=_COLOURS[number % len(_COLOURS)], label=f"N = {one.setting.in_flight}")
    axes.axhline(limits.slowdown, color="0.4", linestyle=":", label=f"q = {limits.slowdown:g}: allowed")
    axes.plot(
        choice.interval,
        slowdown(choice.timing, choice.interval, iteration),
        **_STAR,
        label=f"f* = {choice.interval:,}: chosen",
    )
    slowed = slowdown(choice.timing, choice.interval, iteration)
    title = f"By the model: every {choice.interval:,} iterations, {slowed:.3f} times as slow"
    title = title.replace("every 1 iterations", "every iteration")
    axes.set(xscale="log", xlabel="f: iterations from one save to the next", ylabel="slowdown", title=title)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,g}"))
    above = max(limits.slowdown, *(slowdown(one, 1, iteration) for one in shown)) - 1
    axes.set_ylim(1 - 0.04 * min(above, 2.5), 1 + 1.15 * min(above, 2.5))
    _finish(axes)
