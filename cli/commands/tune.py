"""Implements ``ckpt tune``: models that choose a run's settings (``interval`` is in `tune_interval`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptstore.cli.arguments import PLACE, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.commands.tune_interval import command as interval
from ckptstore.cli.output import duration, emit, note, number, size, table
from ckptstore.cli.quantities import AMOUNT, RATE, TIME, Typed
from ckptstore.cli.range_text import counted
from ckptstore.cli.text_wrap import say_all

if TYPE_CHECKING:
    from ckptstore.tuning import Configuration, Job, Model
    from ckptstore.tuning.job_profile import JobMeasurement
    from ckptstore.tuning.wasted_time import Recovery


@click.group(
    "tune",
    epilog="\b\nExamples:\n  ckpt tune interval runs/gpt --iteration-time 250ms --size 4GB\n"
    "  ckpt tune wasted-time --paper\n  ckpt tune wasted-time --from runs/gpt --mtbf 4h --json",
)
def command() -> None:
    """Choose how often to save, how often to store fulls, how to batch diffs."""


_OPTIONS: Final = {
    "full_bytes": "--full-bytes",
    "bandwidth": "--bandwidth",
    "mtbf": "--mtbf",
    "iteration": "--iteration-time",
    "load_full": "--load-time",
    "merge_batch": "--merge-time",
    "replay_diff": "--replay-time",
    "write_latency": "--write-latency",
    "diff_bytes": "--diff-bytes",
}
"""Field of `Job` -> option, in the order of the report."""


@make_command(
    "wasted-time",
    examples=[
        "ckpt tune wasted-time --full-bytes 8.7GB --bandwidth 2GB/s --mtbf 4h --iteration-time 500ms --merge-time 80ms",
        "ckpt tune wasted-time --from runs/gpt --mtbf 4h --bandwidth 10Gbit/s --plot wasted.png",
        "ckpt tune wasted-time --paper",
    ],
)
@click.option("--from", "store", type=PLACE, metavar="STORE", help="Measure missing inputs in this store.")
@click.option("--paper", is_flag=True, help="Take missing inputs from LowDiff's Table I, and compare with it.")
@click.option("--full-bytes", type=AMOUNT, help="S: a full, as stored.")
@click.option("--bandwidth", type=RATE, help="W: write bandwidth: 1GB/s, 10Gbit/s.")
@click.option("--mtbf", type=TIME, help="M: mean time between failures of the whole job: 1h, 3d.")
@click.option("--iteration-time", "iteration", type=TIME, help="t: one iteration without checkpoints: 500ms.")
@click.option("--load-time", "load_full", type=TIME, help="R_F: time to read a full (default: S / W).")
@click.option("--merge-time", "merge_batch", type=TIME, help="R_D: time to apply one batch of any size.")
@click.option("--replay-time", "replay_diff", type=TIME, help="Time to apply one diff, if batches keep diffs apart.")
@click.option("--write-latency", type=TIME, help="How long one write of a batch stalls training (default: 0s).")
@click.option("--diff-bytes", type=AMOUNT, help="One diff, as stored: to check whether the bandwidth suffices.")
@click.option("--recovery", type=click.Choice(["serial", "parallel"]), default="serial", show_default=True)
@click.option("--run-time", type=TIME, help="T: length of the run, for the total wasted time.")
@click.option("--gpus", type=click.IntRange(min=1), default=1, metavar="N", help="GPUs that wait, for the same total.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw a heat map (PNG, SVG, PDF).")
def _wasted_time(
    store: str | None,
    paper: bool,
    recovery: Recovery,
    run_time: float | None,
    gpus: int,
    plot: Path | None,
    as_json: bool,
    **given: float | None,
) -> None:
    """Find how often to store fulls, and the size of batches.

    With these, a run wastes the least time. The model is LowDiff's Eq. (8); docs/tuning.md explains every term. Pass
    the inputs, or measure them with --from.
    """
    if store is not None and paper:
        raise click.UsageError("--from and --paper are both sources of numbers; pass only one")
    if plot is not None:  # fail before measuring, not after
        from ckptstore.exchange.atomic_files import refuse_missing_folder, refuse_store

        refuse_store(plot.resolve())
        refuse_missing_folder(plot)
    measured = None
    if store is not None:
        from ckptstore.tuning.job_profile import measure  # imports the engine, which the model alone does not need

        measured = measure(opened(store))
    job, sources = _job(given, measured, paper, recovery)
    if plot is not None:
        from ckptstore.tuning.wasted_time_plot import heat_map

        heat_map(job, plot)
    document = _document(job, paper)
    document["sources"] = sources
    document["run"] = None
    if run_time is not None:
        wasted = document["optimum"]["wasted"]["total"] * run_time * gpus
        document["run"] = {"seconds": run_time, "gpus": gpus, "wasted_gpu_seconds": wasted}
    document["measured"] = None if measured is None else asdict(measured)
    document["steady"] = None if measured is None else _steady(document, _extremes(job, sources, measured))
    document["plot"] = None if plot is None else str(plot)
    if as_json:
        emit(document)
    else:
        typed = {name: one.text for name, one in given.items() if isinstance(one, Typed)}
        say_all(_text(document, typed))
    _remarks(job, sources)
    if document["steady"] is False:
        note("measure again while the machine is idle, or pass the times: --load-time, --merge-time, --replay-time")


command.add_command(interval)
command.add_command(_wasted_time)


def _job(
    given: dict[str, float | None], measured: JobMeasurement | None, paper: bool, recovery: Recovery
) -> tuple[Job, dict[str, str]]:
    """Return the job, and the source of each of its numbers."""
    from ckptstore.tuning import Job
    from ckptstore.tuning.paper_table import TABLE_JOB

    values: dict[str, float] = {}
    sources: dict[str, str] = {}

    def take(source: str, found: dict[str, Any]) -> None:
        for name in _OPTIONS:
            if name not in values and found.get(name) is not None:
                values[name], sources[name] = float(found[name]), source

    take("given", given)
    if paper:
        take("paper", asdict(TABLE_JOB))
    if measured is not None:
        found = asdict(measured) | {"bandwidth": measured.write_floor}
        if recovery == "parallel":
            found |= _as_one_batch(measured)
        take("store", found)
    if "full_bytes" in values and values.get("bandwidth", 0) > 0:
        take("default", {"load_full": values["full_bytes"] / values["bandwidth"]})
    missing = [_OPTIONS[name] for name in ("full_bytes", "bandwidth", "mtbf", "iteration") if name not in values]
    if "merge_batch" not in values and "replay_diff" not in values:
        missing.append("--merge-time or --replay-time")
    if missing:
        why = "the store does not contain them" if measured else "pass them, or --from STORE, or --paper"
        raise click.UsageError(f"missing: {', '.join(missing)} ({why})")
    take("default", {"merge_batch": 0.0, "replay_diff": 0.0, "write_latency": 0.0})
    return Job(**values, recovery=recovery), {name: sources[name] for name in _OPTIONS if name in sources}


def _as_one_batch(measured: JobMeasurement) -> dict[str, float | None]:
    """Return the measured times of parallel recovery: it merges batches, and one diff counts as one batch."""
    if measured.merge_batch is None or measured.replay_diff is None:
        return {}
    return {"merge_batch": measured.merge_batch + measured.replay_diff, "replay_diff": None}


_REGRET: Final = 1.1
"""The most that a configuration may waste, as a multiple of the least, for any of the measured times."""


def _extremes(job: Job, sources: dict[str, str], measured: JobMeasurement) -> list[Job]:
    """Return the job with the least and with the most of each time that the store gave, together."""
    found = []
    used = {name: both for name, both in measured.spread.items() if sources.get(name) == "store"}
    for end in (0, 1):
        values: dict[str, Any] = {name: both[end] for name, both in used.items()}
        if job.recovery == "parallel" and "merge_batch" in values:
            values["merge_batch"] += measured.spread["replay_diff"][end]
        found.append(replace(job, **values))
    return found


def _steady(found: dict[str, Any], extremes: list[Job]) -> bool:
    """Tell whether the advice is good for the shortest and for the longest times that were measured."""
    from ckptstore.tuning import best, fulls_only

    chosen = found["fulls_only" if _fulls_win(found) else "optimum"]
    for job in extremes:
        model = job.model()
        least = min(model.total(one.interval, one.batch) for one in (best(model), fulls_only(model)))
        if model.total(chosen["interval"], chosen["batch"]) > _REGRET * least:
            return False
    return True


def _remarks(job: Job, sources: dict[str, str]) -> None:
    from ckptstore.tuning import best

    if sources["bandwidth"] == "store":
        note("the bandwidth is a lower bound from the times of commits, training included; --bandwidth is more exact")
    if sources["iteration"] == "store":
        note("the iteration time is the time between commits, saving included")
    model = job.model()
    optimum = best(model)
    share = job.bandwidth_share(optimum.interval)
    if share is not None and share > 1 and sources["bandwidth"] != "store":
        note(f"diffs and fulls need {share:.3g} times the bandwidth: writes pile up; store fewer or smaller diffs")
    if model.total(optimum.interval, optimum.batch) > 1:
        note("even the best configuration wastes more time than it trains: the model is valid for rare failures only")
    if model.replay_diff >= 1:
        note("replaying a diff takes as long as an iteration or longer: diffs do not pay off, only fulls do")


def _document(job: Job, paper: bool) -> dict[str, Any]:
    from ckptstore.tuning import best, continuous, fulls_only, neighbours, paper_optimum
    from ckptstore.tuning.paper_table import TABLE_BATCHES, TABLE_I, TABLE_INTERVALS, table

    model = job.model()
    optimum, real, fulls = best(model), continuous(model), fulls_only(model)
    least = model.total(optimum.interval, optimum.batch)
    equation = paper_optimum(model) if model.merge_batch else None
    return {
        "job": asdict(job),
        "sources": {},
        "model": asdict(model),
        "optimum": _configuration(model, optimum),
        "continuous": asdict(real) | {"total": model.total(real.interval, real.batch)},
        "equation_10": None if equation is None else asdict(equation),
        "fulls_only": _configuration(model, fulls),
        "neighbours": [
            asdict(pair) | {"total": total, "ratio": total / least}
            for pair, total in neighbours(model, optimum).items()
        ],
        "bandwidth_share": job.bandwidth_share(optimum.interval),
        "table": {
            "intervals": TABLE_INTERVALS,
            "batches": TABLE_BATCHES,
            "model": table(job),
            "printed": TABLE_I,
        }
        if paper
        else None,
    }


def _configuration(model: Model, pair: Configuration) -> dict[str, Any]:
    waste = model.waste(pair.interval, pair.batch)
    return asdict(pair) | {"wasted": asdict(waste) | {"total": waste.total}}


def _text(found: dict[str, Any], typed: dict[str, str]) -> Iterator[str]:
    optimum, fulls, real = found["optimum"], found["fulls_only"], found["continuous"]
    wasted = optimum["wasted"]
    every = duration(optimum["interval"] * found["job"]["iteration"])
    answer = (
        f"a full every {optimum['interval']:,} iterations ({every}), {counted(optimum['batch'], 'diff')} per write: "
        f"wastes {wasted['total']:.3%} of the time trained"
    )
    alone = f"a full every {fulls['interval']:,} iterations wastes {fulls['wasted']['total']:.3%}"
    if found["steady"] is False:
        yield click.style(
            "no advice: the times measured in the store differ too much from one try to the next", bold=True
        )
        yield f"at their medians: {answer}"
        yield f"without diffs: {alone}"
    elif _fulls_win(found):
        yield click.style(f"no diffs: {alone}", bold=True)
        yield f"with diffs: {answer}"
    else:
        yield click.style(answer, bold=True)
        yield f"without diffs: {alone}"
    if found["bandwidth_share"] is not None:
        yield f"writing takes {found['bandwidth_share']:.1%} of the bandwidth"
    if found["run"]:
        run = found["run"]
        hours = run["wasted_gpu_seconds"] / 3600
        yield f"{hours:.4g} GPU hours wasted in {duration(run['seconds'])} on {counted(run['gpus'], 'GPU')}"
    yield ""
    yield from _inputs(found, typed)
    yield ""
    yield (
        "as real numbers: "
        + _point(real)
        + (f"; Eq. (10): {_point(found['equation_10'])}" if found["equation_10"] else "")
    )
    yield ""
    yield table(["WASTED ON", ">SHARE"], [[_PARTS[name], f"{wasted[name]:.3%}"] for name in _PARTS])
    yield ""
    yield from _around(found)
    if found["table"]:
        yield ""
        yield from _table_one(found["table"])
    if found["steady"] is False:
        return
    yield ""
    yield "to copy:"
    if _fulls_win(found):
        yield f"  if step % {fulls['interval']} == 0: writer.save_async(state, step)   # writer = store.writer()"
    else:
        options = f"full_every={optimum['interval']}, batch={optimum['batch']}"
        yield f"  writer = store.writer(diffs=ckptstore.DiffOptions({options}))"


def _fulls_win(found: dict[str, Any]) -> bool:
    """Tell whether fulls alone waste no more than fulls and diffs do."""
    alone, both = (float(found[name]["wasted"]["total"]) for name in ("fulls_only", "optimum"))
    return alone <= both


_PARTS: Final = {
    "lost_work": "work done again (half a batch per failure)",
    "load": "loading the full",
    "replay": "replaying diffs",
    "fulls": "writing fulls",
    "batches": "writing batches",
}


def _point(place: dict[str, float]) -> str:
    return f"full_every = {place['interval']:.4g}, batch = {place['batch']:.4g}"


def _inputs(found: dict[str, Any], typed: dict[str, str]) -> Iterator[str]:
    job, iteration = found["job"], found["job"]["iteration"]
    rows = []
    for name, source in found["sources"].items():
        value = job[name]
        if name in ("full_bytes", "diff_bytes"):
            text, converted = size(round(value)), ""
        elif name == "bandwidth":
            text, converted = size(round(value)) + "/s", ""
        else:
            text = duration(value) if value >= 1 else _milliseconds(value)
            converted = number(value / iteration)
        if source == "store" and name in found["measured"]["spread"]:
            low, high = found["measured"]["spread"][name]
            told = f"store, {_milliseconds(low)} to {_milliseconds(high)}"
        else:
            told = source
        rows.append([_OPTIONS[name].removeprefix("--"), typed.get(name, text), converted, told])
    yield table(["INPUT", ">VALUE", ">ITERATIONS", "FROM"], rows)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.4g} ms"


def _around(found: dict[str, Any]) -> Iterator[str]:
    """Yield the neighbors as a grid, as multiples of the minimum."""
    around = {(n["interval"], n["batch"]): n["ratio"] for n in found["neighbours"]}
    intervals = sorted({interval for interval, _ in around})
    batches = sorted({batch for _, batch in around})
    yield "multiples of the minimum, around it:"
    yield table(
        [">full_every \\ batch", *(f">{batch:,}" for batch in batches)],
        [
            [f"{interval:,}", *(f"{around[interval, b]:.3f}" if (interval, b) in around else "-" for b in batches)]
            for interval in intervals
        ],
    )


def _table_one(shown: dict[str, Any]) -> Iterator[str]:
    for title, cells in (("Table I by this model", shown["model"]), ("Table I as printed", shown["printed"])):
        yield f"{title} (multiples of its minimum):"
        yield table(
            [">full_every \\ batch", *(f">{batch}" for batch in shown["batches"])],
            [
                [str(interval), *(f"{cell:.3f}" for cell in row)]
                for interval, row in zip(shown["intervals"], cells, strict=True)
            ],
        )
