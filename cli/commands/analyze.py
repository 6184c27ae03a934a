"""Implements ``ckpt analyze``: measures what existing checkpoints would cost with each codec and interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import REF, SIZE
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note, progress, size, table, tables
from ckptstore.cli.range_text import counted
from ckptstore.cli.text_wrap import say_all

if TYPE_CHECKING:
    from ckptstore.analysis import Analysis, Options

_NAMED = 3


class _Sample(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.2
    name = "SIZE|PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        text = str(value).strip()
        if not text.endswith("%"):
            nbytes: int = SIZE.convert(value, param, ctx)
            return nbytes
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            self.fail(f"{text!r} is not a share: write 5%, or a size like 64MiB", param, ctx)
        return share


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in (value or "").split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(f"{value!r}: write numbers of checkpoints, as in 1,10,100", ctx, param) from None


def _words(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


@make_command(
    "analyze",
    examples=[
        "ckpt analyze step_*.safetensors",
        "ckpt analyze checkpoints/ --report report/     # a page with plots",
        "ckpt analyze runs/gpt --ref 1000 --ref 1001 --exact --json",
        "ckpt analyze run/*.pt --class 'ema.*=weight' --max-restore-cost 3x --link 1Gbit,25Gbit",
    ],
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
@click.option(
    "--ref", "refs", type=REF, multiple=True, metavar="REF", help="With a store: measure this checkpoint; repeatable."
)
@click.option(
    "--sample", type=_Sample(), metavar="SIZE|N%", help="Measure this much of each class and step; default 8MiB."
)
@click.option("--exact", is_flag=True, help="Measure every byte of every checkpoint.")
@click.option("--steps", type=click.IntRange(2), metavar="N", help="Measure N steps, evenly spread; default 12.")
@click.option(
    "--gaps", callback=_numbers, metavar="T,T...", help="Gaps to compare over, in checkpoints; default: chosen."
)
@click.option("--codecs", callback=_words, metavar="NAME,...", help="Measure only these (and always raw).")
@click.option("--class", "classes", multiple=True, metavar="GLOB=CLASS", help="Class of tensors; may be repeated.")
@click.option(
    "--max-restore-cost", default="4x", metavar="COST", help="Bound for every restore: 4x (a full), 2GB, 30s, none."
)
@click.option("--compress-fulls", is_flag=True, help="Compress fulls, too; default: they stay plain .safetensors.")
@click.option(
    "--link", default="1Gbit,10Gbit,100Gbit", callback=_words, metavar="SPEED,...", help="Links to send over (bits/s)."
)
@click.option(
    "--cores", type=click.IntRange(1), default=1, metavar="N", help="Cores that encode, for the times; default 1."
)
@click.option("--threads", type=click.IntRange(1), metavar="N", help="Threads that measure; default: all cores.")
@click.option("--csv", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write all measurements.")
@click.option(
    "--report", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write a page with plots."
)
def command(paths: tuple[str, ...], csv: Path | None, report: Path | None, as_json: bool, **asked: Any) -> None:
    """Estimate the size of checkpoints for each codec and interval.

    PATH is a .safetensors or .pt file, an .index.json of shards, a folder or a glob of these, or a store. Pass two or
    more checkpoints of one run. CLASS is weight, first_moment, second_moment, gradient or other.
    """
    from ckptstore.analysis import analyze, document, write_csv, write_report
    from ckptstore.analysis.report_plots import need_matplotlib
    from ckptstore.exchange.atomic_files import refuse_missing_folder, refuse_store

    if report is not None:  # fail before minutes of measuring, not after
        need_matplotlib()
        refuse_store(report / "index.html")
    if csv is not None:
        refuse_store(csv)
        refuse_missing_folder(csv)
    options = _options(asked)
    with progress("measuring") as advance:
        found = analyze(paths, options, refs=asked["refs"], progress=advance)
    if csv is not None:
        write_csv(found, csv)
    page = None if report is None else write_report(found, report)
    if as_json:
        emit(document(found))
        return
    say_all(_text(found))
    for one in (csv, page):
        if one is not None:
            note(f"wrote {one}")


def _options(asked: Mapping[str, Any]) -> Options:
    """Return the analysis options, from the values of the command's options."""
    from ckptstore.analysis import Options
    from ckptstore.analysis.analysis import SAMPLE
    from ckptstore.analysis.comparison_plan import POINTS
    from ckptstore.analysis.methods import METHODS
    from ckptstore.analysis.recommendations import parse_link
    from ckptstore.analysis.tensor_roles import parse_overrides
    from ckptstore.write.policy.delta_interval import RestoreBound

    sample, steps, exact = asked["sample"], asked["steps"], asked["exact"]
    if exact and sample is not None:
        raise click.UsageError("--exact measures every byte: it cannot be combined with --sample")
    return Options(
        sample=None if exact else SAMPLE if sample is None else sample,
        gaps=asked["gaps"],
        points=steps if steps is not None else None if exact else POINTS,
        methods=asked["codecs"] or METHODS,
        overrides=tuple(parse_overrides(asked["classes"])),
        bound=RestoreBound.parse(asked["max_restore_cost"]),
        compress_fulls=asked["compress_fulls"],
        links=tuple(map(parse_link, asked["link"])),
        cores=asked["cores"],
        threads=asked["threads"],
    )


def _text(found: Analysis) -> Iterator[str]:
    from ckptstore.analysis.sentences import (
        headline,
        other_mode,
        prefix_lines,
        restore_line,
        sample_line,
        to_copy,
        what_to_do,
    )

    yield click.style(headline(found), bold=True)
    if (other := other_mode(found)) is not None:
        yield click.style(other, bold=True)
    yield restore_line(found)
    yield sample_line(found)
    if found.skipped:
        names = ", ".join(f"{one.name} ({one.reason})" for one in found.skipped[:_NAMED])
        more = f" and {len(found.skipped) - _NAMED:,} more" if len(found.skipped) > _NAMED else ""
        yield f"left out: {names}{more}"
    yield ""
    yield table(["CLASS", ">TENSORS", ">SIZE", ">MEASURED", "CODEC", ">RATIO", ">+-", ">BEST T"], _classes(found))
    yield ""
    gap = found.gap
    yield f"ratio, and GB/s of one core to encode / decode; deltas over a gap of {gap} ({gap * found.spacing:,} steps):"
    yield tables(*_codecs(found), together=2)
    yield ""
    yield "bits per value by gap; a bound is the least that a codec without context can reach:"
    yield tables(*_gaps(found), first=2)
    yield ""
    yield f"distinct prefixes by length, at step {found.series[-1].step:,}:"
    yield tables(*_prefixes(found))
    yield from prefix_lines(found)
    yield ""
    chosen = found.advice.best.interval
    yield table(
        ["", ">T", ">DELTAS", ">BYTES PER CHECKPOINT", ">RATIO", ">MOST EXPENSIVE RESTORE", ">x A FULL"],
        [
            [
                *(
                    "*" if one.interval == chosen else "",
                    str(one.interval) if one.interval else "fulls",
                    str(one.deltas),
                ),
                *(size(one.mean), f"{found.advice.nbytes / one.mean:.2f}x" if one.mean else "-"),
                *(size(one.restore), f"{one.times:.2f}"),
            ]
            for one in found.advice.alternatives
        ],
    )
    yield ""
    yield (
        f"seconds to encode ({counted(found.options.cores, 'core')}) and send one checkpoint, one after the other / "
        "overlapped"
    )
    yield tables(*_shipping(found))
    yield ""
    yield what_to_do(found)
    yield "to copy:"
    yield from (f"  {line}" for line in to_copy(found))


def _classes(found: Analysis) -> Iterator[list[str]]:
    from ckptstore.analysis.sentences import percent, ratio

    for one in found.advice.groups:
        group = found.groups[one.group]
        yield [
            *(found.label(one.group), f"{len(group.tensors):,}", size(group.nbytes)),
            *(f"{group.sampled / group.nbytes:.1%}", one.method, ratio(one.estimate)),
            *(percent(one.estimate) or "exact", str(one.cost.interval or "any")),
        ]


def _codecs(found: Analysis) -> tuple[list[str], list[list[str]]]:
    from ckptstore.analysis.methods import BOUNDS, METHODS
    from ckptstore.analysis.sentences import ratio

    gap = found.gap
    cells = {(one.group, one.method): one for one in found.summaries if one.gap in (None, gap)}
    rows = []
    for method in (*METHODS, *BOUNDS.values()):
        row = [method]
        for number in range(len(found.groups)):
            one = cells.get((number, method))
            row.append("-" if one is None else ratio(one.estimate))
            timed = one is not None and one.encode and one.decode and method != "raw"
            row.append(f"{one.encode / 1e9:.2f}/{one.decode / 1e9:.2f}" if timed else "")  # type: ignore[union-attr,operator]  # checked: timed
        if any((number, method) in cells for number in range(len(found.groups))):
            rows.append(row)
    heads = [head for number in range(len(found.groups)) for head in (f">{found.label(number)}", ">GB/s")]
    return ["CODEC", *heads], rows


def _gaps(found: Analysis) -> tuple[list[str], list[list[str]]]:
    from ckptstore.analysis.methods import BOUNDS, DELTAS
    from ckptstore.formats.codecs import word_size

    shown = [name for method in DELTAS for name in (method, BOUNDS.get(method)) if name is not None]
    cells = {(one.group, one.method, one.gap): one for one in found.summaries}
    rows = []
    for number, group in enumerate(found.groups):
        for method in shown:
            found_here = [cells.get((number, method, gap)) for gap in found.gaps]
            if any(found_here):
                bits = 8 * word_size(group.dtype)
                texts = ["-" if one is None else f"{bits * one.estimate.fraction:.2f}" for one in found_here]
                rows.append([found.label(number), method, *texts])
    return ["CLASS", "CODEC", *(f">GAP {gap}" for gap in found.gaps)], rows


def _prefixes(found: Analysis) -> tuple[list[str], list[list[str]]]:
    from ckptstore.analysis.analysis import PREFIX_BITS

    last = max((one.index for one in found.prefixes), default=0)
    cells = {(one.group, one.bits): one.distinct for one in found.prefixes if one.index == last}
    rows = [
        [found.label(number), *(f"{cells[number, bits]:,}" for bits in PREFIX_BITS)]
        for number in range(len(found.groups))
        if (number, PREFIX_BITS[0]) in cells
    ]
    return ["CLASS", *(f">{bits} BITS" for bits in PREFIX_BITS)], rows


def _shipping(found: Analysis) -> tuple[list[str], list[list[str]]]:
    from ckptstore.analysis.report_plots import speed

    links = list(dict.fromkeys(one.link for one in found.shipping))
    rows: dict[str, list[str]] = {}
    for one in found.shipping:
        rows.setdefault(one.method, [one.method]).append(f"{one.serial:.3g} / {one.overlapped:.3g}")
    return ["CODEC", *(f">{speed(link)}" for link in links)], list(rows.values())
