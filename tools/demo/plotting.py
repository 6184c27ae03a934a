"""The picture of a run: its loss with the kills, and its progress over time."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.demo.save_costs import losses_of
from tools.demo.supervisor import Attempt, Strike

_BY_CLOCK, _IN_COMMIT = "#d95f02", "#c2185b"


def draw(path: Path, reference: Attempt, attempts: list[Attempt], struck: list[Strike], identical: bool) -> None:
    """Write a PNG: loss by step above, step by wall time below, each kill marked in both."""
    figure = Figure(figsize=(10, 8), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    verdict = "bit-identical to the uninterrupted run" if identical else "NOT identical to the uninterrupted run"
    figure.suptitle(f"Killed {len(struck)} times with SIGKILL, a checkpoint of every step: {verdict}")
    losses = {step: found[0] for step, found in losses_of([reference]).items()}
    _draw_losses(above, losses, attempts, struck)
    _draw_timeline(below, attempts, struck)
    figure.savefig(path)


def _draw_losses(axes: Axes, losses: dict[int, float], attempts: list[Attempt], struck: list[Strike]) -> None:
    axes.plot(list(losses), list(losses.values()), color="#bdbdbd", linewidth=5, label="uninterrupted")
    for number, attempt in enumerate(attempts):
        computed = {step: event.fields["loss"] for step, event in attempt.steps("computed").items()}
        resumed = attempt.require("resumed").fields["step"]
        line = {resumed: losses[resumed], **computed} if resumed else computed
        label = "through the store, a colour per term" if number == 0 else None
        axes.plot(list(line), list(line.values()), color=_colour(number, attempts), linewidth=1.3, label=label)
    labelled = set()
    for strike in struck:
        colour = _IN_COMMIT if strike.kill.point else _BY_CLOCK
        name = "kill inside a commit" if strike.kill.point else "kill at a random instant"
        axes.axvline(strike.began, color=colour, linewidth=0.8, linestyle="--", zorder=1)
        _cross(axes, strike.began, losses[strike.began], colour, None if name in labelled else name)
        axes.annotate(
            f"{strike.number}: {strike.kill.point or strike.doing}, lost {strike.lost}",
            (strike.began, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            horizontalalignment="left",
            verticalalignment="top",
            fontsize=8,
            color=colour,
        )
        labelled.add(name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def _draw_timeline(axes: Axes, attempts: list[Attempt], struck: list[Strike]) -> None:
    start = attempts[0].spawned
    for number, attempt in enumerate(attempts):
        resumed = attempt.require("resumed")
        line = {resumed.at - start: resumed.fields["step"]}
        line.update({event.at - start: step for step, event in attempt.steps("durable").items()})
        axes.plot(list(line), list(line.values()), color=_colour(number, attempts), linewidth=2)
    for strike in struck:
        axes.hlines(strike.resumed, strike.at, strike.at + strike.restart_seconds, color="#9e9e9e", linestyle=":")
        _cross(axes, strike.at, strike.began, _IN_COMMIT if strike.kill.point else _BY_CLOCK, None)
        axes.annotate(
            f"restart {strike.restart_seconds:.1f} s",
            (strike.at, strike.resumed),
            xytext=(4, -12),
            textcoords="offset points",
            fontsize=7,
            color="#616161",
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the first start")
    axes.set_ylabel("last durable step")
    axes.grid(alpha=0.25)


def _colour(number: int, attempts: list[Attempt]) -> tuple[float, float, float, float]:
    red, green, blue, opacity = colormaps["viridis"](0.85 * number / max(1, len(attempts) - 1))
    return red, green, blue, opacity


def _cross(axes: Axes, x: float, y: float, colour: str, label: str | None) -> None:
    axes.plot([x], [y], "X", color=colour, markersize=10, markeredgecolor="white", label=label, zorder=3)
