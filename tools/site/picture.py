"""The README's picture, from the files of `make demo`: ``python -m tools.site.picture demo-out docs/kills.svg``.

The loss of every checkpoint in the store, a colour for each term, and where the process was killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import ckptstore

__all__ = ["drawn"]

_WIDTH, _HEIGHT = 720, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 700, 46, 232
_COLOURS: Final = ("#1b6ca8", "#2a9d8f", "#b8860b", "#8e44ad", "#c0392b", "#3d5a80")


def drawn(points: Sequence[tuple[int, int, float]], kills: Sequence[int], title: str) -> str:
    """An SVG.

    Args:
        points: step, term and loss of each checkpoint, in the order of steps.
        kills: the step that was being computed at each kill.
        title: the message of the picture.
    """
    steps, losses = [point[0] for point in points], [point[2] for point in points]
    first, last, low, high = min(steps), max(steps), min(losses), max(losses)

    def x(step: float) -> float:
        return round(_LEFT + (step - first) / max(last - first, 1) * (_RIGHT - _LEFT), 1)

    def y(loss: float) -> float:
        return round(_BOTTOM - (loss - low) / ((high - low) or 1) * (_BOTTOM - _TOP - 12), 1)

    text = 'font-family="sans-serif" font-size="12" fill="#555"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-family="sans-serif" font-size="15" fill="#222">{escape(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{_LEFT - 8}" y="{y(high) + 4}" text-anchor="end" {text}>{high:.2f}</text>',
        f'<text x="{_LEFT - 8}" y="{y(low) + 4}" text-anchor="end" {text}>{low:.2f}</text>',
        f'<text x="16" y="{(_TOP + _BOTTOM) / 2}" transform="rotate(-90 16 {(_TOP + _BOTTOM) / 2})" '
        f'text-anchor="middle" {text}>loss</text>',
        f'<text x="{_RIGHT}" y="{_BOTTOM + 18}" text-anchor="end" {text}>step {last}</text>',
        f'<text x="{_LEFT}" y="{_BOTTOM + 18}" {text}>{first}</text>',
    ]
    before: tuple[int, int, float] | None = None
    for number, (term, line) in enumerate(groupby(points, key=lambda point: point[1])):
        found = list(line)
        path = "L".join(f"{x(step)} {y(loss)}" for step, _, loss in ([before] if before else []) + found)
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        label = f"term {term}"
        parts.append(f'<text x="{x(found[0][0]) + 4}" y="{_BOTTOM + 36}" {text} style="fill:{colour}">{label}</text>')
        before = found[-1]
    for step in kills:
        at = x(step)
        parts.append(f'<path d="M{at} {_TOP}V{_BOTTOM}" stroke="#c0392b" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{at + 4}" y="{_TOP + 10}" {text} style="fill:#c0392b">SIGKILL</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(source: str, target: str) -> None:
    """Draw the results of a demo in `source`. Raises if it was not bit-identical: then there is nothing to show."""
    summary: dict[str, Any] = json.loads((Path(source) / "summary.json").read_text())
    if not summary["identical"]:
        raise SystemExit("this run was not bit-identical: see its summary.json")
    infos = ckptstore.open(Path(source) / "store").checkpoints()
    newest = {info.step: info for info in infos}  # by term and step: of a step saved twice the later term's
    points = [(step, info.term, float(info.metadata["metrics"]["loss"])) for step, info in sorted(newest.items())]
    kills = [kill["began"] for kill in summary["kills"]]
    title = f"Killed {len(kills)} times, and the result is the same in every bit as without a kill"
    Path(target).write_text(drawn(points, kills, title))


if __name__ == "__main__":
    main(*sys.argv[1:])
