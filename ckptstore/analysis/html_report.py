"""Write the report as one self-contained HTML page with embedded plots; it loads nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ckptstore._version import __version__
from ckptstore.analysis import plot_titles, report_plots
from ckptstore.analysis.analysis import PREFIX_BITS, Analysis
from ckptstore.analysis.methods import BOUNDS, METHODS
from ckptstore.analysis.recommendations import Summary
from ckptstore.analysis.sampling import Estimate
from ckptstore.analysis.sentences import headline, percent, ratio, restore_line, sample_line, what_to_do
from ckptstore.analysis.style_sheet import STYLE
from ckptstore.errors import StorageError
from ckptstore.exchange.atomic_files import refuse_store
from ckptstore.formats.byte_text import size
from ckptstore.formats.codecs import word_size

__all__ = ["render", "write_report"]

_LISTED: Final = 20
_PAPER: Final = "Teng et al. 2026"
_CITED: Final = (
    "Teng et al. 2026: Checkpoint accessing performance optimization method for the deep learning model training "
    "process, doi 10.11959/j.issn.2096-0271.2026029"
)
_POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(found: Analysis, folder: Path) -> Path:
    """Write ``index.html`` to `folder`, which is created. The page is written atomically.

    Returns:
        The page's path.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UsageError: the folder is inside a checkpoint store.
        StorageError: the page cannot be written.
    """
    refuse_store(folder / "index.html")
    report_plots.need_matplotlib()
    page = folder / "index.html"
    temporary = folder / f".index.html.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # fail before rendering, which takes seconds
        raise StorageError(error.errno, error.strerror, str(page)) from error
    text = render(found)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(page)
    except OSError as error:
        raise StorageError(error.errno, error.strerror, str(page)) from error
    return page


def render(found: Analysis) -> str:
    """The HTML of the page."""
    first, last = found.series[0], found.series[-1]
    body = [
        f"<header><p class=kicker>ckpt analyze · {len(found.series)} checkpoints, {_text(first.label)} to "
        f"{_text(last.label)} · {size(found.advice.nbytes)} each</p>",
        f"<h1>{_text(headline(found))}</h1>",
        f"<p class=lead>{_text(restore_line(found))}</p></header>",
        _cards(found),
        _recommended(found),
        *_plotted(found),
        _every_codec(found),
        _inputs(found),
        f"<p class=lead>{_text(what_to_do(found))}</p>",
    ]
    title = f"{found.advice.nbytes / found.advice.best.mean:.2f}× smaller" if found.advice.best.mean else "ckpt analyze"
    return (
        f'<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>ckpt analyze: {title}</title><style>{STYLE}</style></head><body><main>"
        + "\n".join(body)
        + f"<footer>ckptstore {__version__} · {_text(sample_line(found))}<br>{_text(_CITED)}</footer>"
        + "</main></body></html>\n"
    )


def _plotted(found: Analysis) -> list[str]:
    """The sections with a plot."""
    return [
        _section(
            plot_titles.codecs_title(found),
            "How many times smaller each codec makes each class: longer is better. "
            f"Deltas are against the checkpoint {_apart(found)} before. "
            "The bound of a codec without context: the order‑0 entropy of the byte planes, the sign where it is best. "
            "These are single deltas. The first line of this page also counts the fulls between them, and the mean "
            "delta of its interval, which has a larger gap: so its number is smaller.",
            report_plots.ratios(found),
        ),
        _section(
            plot_titles.training_title(found),
            f"How many times smaller at each step measured (Fig. 6 of {_PAPER}); deltas against the checkpoint before.",
            report_plots.training(found),
        ),
        _section(
            plot_titles.gaps_title(found),
            "XOR against integer difference: lower is better. Dashed lines are the bounds of their colours, faint dots "
            "single pairs of checkpoints. Above the dotted line a delta no longer pays.",
            report_plots.gaps(found),
        ),
        _section(
            plot_titles.intervals_title(found),
            "T is how many checkpoints share one base. A larger T makes deltas larger and chains "
            "shorter. Each T is shown with the longest chain that keeps the restore bound; the small numbers are its "
            "deltas. Where the chain loses one delta, a restore gets cheaper at once, and fulls are more frequent.",
            report_plots.intervals(found),
        ),
        _section(
            plot_titles.shipping_title(found),
            f"Time to encode with {_cores(found)} and send one checkpoint (Fig. 4 and 5 of {_PAPER}). Left of the "
            "dashed line, compressing beats sending raw bytes. The black tick is the time when both overlap."
            + plot_titles.why_not_soonest(found),
            report_plots.shipping(found),
        ),
        _section(
            plot_titles.speeds_title(found),
            "One core, processor time. Further up: smaller; further right: faster.",
            report_plots.speeds(found),
        ),
        _section(
            plot_titles.prefixes_title(found),
            f"Few distinct prefixes make numbers compressible (Fig. 7 of {_PAPER}). "
            + ("" if found.exact else "Counted in the sample: rare ones may be missing."),
            report_plots.prefixes(found) if found.prefixes else "",
            _prefixes(found),
        ),
    ]


def _cards(found: Analysis) -> str:
    advice, best = found.advice, found.advice.best
    margin = f"± {size(advice.margin)}; " if advice.margin else ""
    cards = [
        ("per checkpoint", size(best.mean), f"{margin}raw is {size(advice.nbytes)}"),
        (
            "smaller, fulls and deltas together",
            ratio(Estimate(best.mean / advice.nbytes, None)),
            f"a full is {size(advice.full)}",
        ),
        (
            "interval T: checkpoints on one base",
            str(best.interval) if best.interval else "fulls only",
            f"{best.deltas} deltas to a chain",
        ),
        ("most expensive restore", f"{best.times:.2f}×", f"a full: {size(best.restore)} read"),
        ("encode / decode", f"{advice.encode / 1e9:.2f} / {advice.decode / 1e9:.2f}", "GB/s of one core"),
    ]
    cells = (
        f"<div><b>{_text(value)}</b><span>{_text(name)}</span><small>{_text(more)}</small></div>"
        for name, value, more in cards
    )
    return f"<section class=cards>{''.join(cells)}</section>"


def _recommended(found: Analysis) -> str:
    rows = []
    for one in found.advice.groups:
        group = found.groups[one.group]
        rows.append(
            [
                found.label(one.group),
                group.dtype,
                f"{len(group.tensors):,}",
                size(group.nbytes),
                f"<b>{_text(one.method)}</b>",
                _with_margin(one.estimate),
                size(group.nbytes * one.estimate.fraction),
                "any" if not one.cost.interval else str(one.cost.interval),
            ]
        )
    heads = ["class", "dtype", ">tensors", ">size", "codec", ">ratio", ">stored in a delta", ">best T alone"]
    gaps = [one.gap for one in found.advice.groups if one.gap is not None]
    note = (
        f"<p>Ratios here are of deltas over a gap of {gaps[0]:,}, the measured one that is nearest to the mean gap of "
        f"T = {found.advice.best.interval}. Below, where codecs are compared, the gap is {found.gap:,}.</p>"
        if gaps and gaps[0] != found.gap
        else ""
    )
    return f"<section><h2>Recommended</h2>{note}{_table(heads, rows)}</section>"


def _every_codec(found: Analysis) -> str:
    parts = []
    gap = found.gap
    for number, group in enumerate(found.groups):
        cells = {one.method: one for one in found.summaries if one.group == number and one.gap in (None, gap)}
        shown = [cells[name] for name in METHODS if name in cells]
        heads = ["codec", ">ratio", ">bits/value", ">bound", ">enc / dec GB/s"]
        rows = [_codec_row(one, cells, 8 * word_size(group.dtype)) for one in shown]
        parts.append(f"<div><h3>{_text(found.label(number))}</h3>{_table(heads, rows)}</div>")
    return f"<section><h2>All numbers</h2><div class=tables>{''.join(parts)}</div></section>"


def _codec_row(one: Summary, cells: dict[str, Summary], bits: int) -> list[str]:
    bound = cells.get(BOUNDS.get(one.method, ""))
    return [
        _text(one.method),
        _with_margin(one.estimate),
        f"{bits * one.estimate.fraction:.2f}",
        "" if bound is None else f"{bits * bound.estimate.fraction:.2f}",
        f"{one.encode / 1e9:.2f} / {one.decode / 1e9:.2f}" if one.encode and one.decode and one.method != "raw" else "",
    ]


def _with_margin(estimate: Estimate) -> str:
    margin = percent(estimate)
    return ratio(estimate) + (f" <small>± {margin}</small>" if margin else "")


def _inputs(found: Analysis) -> str:
    measured = {one.index for one in found.measurements}
    rows = [
        [
            _text(one.label),
            f"{one.step:,}",
            f"{len(one.tensors):,}",
            size(one.nbytes),
            "yes" if index in measured else "",
        ]
        for index, one in enumerate(found.series)
    ]
    listed = _table(["checkpoint", ">step", ">tensors", ">size", "measured"], rows)
    skipped = [[_text(one.name), _text(one.reason)] for one in found.skipped[:_LISTED]]
    more = f"<p>and {len(found.skipped) - _LISTED:,} more</p>" if len(found.skipped) > _LISTED else ""
    left = (
        f"<h3>Left out: {len(found.skipped):,} tensors</h3>{_table(['tensor', 'reason'], skipped)}{more}"
        if skipped
        else ""
    )
    return (
        f"<section><h2>Checkpoints</h2><details><summary>{len(rows)} checkpoints, {len(found.groups)} groups of "
        f"tensors</summary>{listed}{left}</details></section>"
    )


def _prefixes(found: Analysis) -> str:
    last = max((one.index for one in found.prefixes), default=0)
    cells = {(one.group, one.bits): one for one in found.prefixes if one.index == last}
    rows = [
        [
            _text(found.label(number)),
            *(f"{cells[number, bits].distinct:,}" for bits in PREFIX_BITS),
            f"{cells[number, 9].entropy:.2f}",
        ]
        for number in range(len(found.groups))
        if (number, 9) in cells
    ]
    return _table(["class", *(f">{bits} bits" for bits in PREFIX_BITS), ">entropy of 9 bits"], rows)


def _section(title: str, text: str, svg: str, below: str = "") -> str:
    if not svg:
        return ""
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img alt="{_text(title)}" src="data:image/svg+xml;base64,{data}">'
    return (
        f"<section><h2>{_text(title)}</h2><p>{_text(text)}</p><div class='scroll plot'>{image}</div>{below}</section>"
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as HTML; the cells are HTML already."""
    kinds = [" class=n" if heading.startswith(">") else "" for heading in headings]
    head = "".join(f"<th{kind}>{heading.removeprefix('>')}" for kind, heading in zip(kinds, headings, strict=True))
    body = "".join("<tr>" + "".join(f"<td{kind}>{cell}" for kind, cell in zip(kinds, row, strict=True)) for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</thead><tbody>{body}</tbody></table></div>"


def _apart(found: Analysis) -> str:
    gap = found.gap
    return f"{gap} step{'s' if gap > 1 else ''}" if found.spacing == 1 else f"{gap * found.spacing:,} steps"


def _cores(found: Analysis) -> str:
    return "one core" if found.options.cores == 1 else f"{found.options.cores} cores"


def _text(text: str) -> str:
    return html.escape(text)
