"""Implements ``ckpt tune interval``: measures saves to find how often to save, and how many at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptstore.cli.arguments import REF, SIZE, STORE
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import duration, emit, note, progress, size, table
from ckptstore.cli.quantities import TIME
from ckptstore.cli.text_wrap import say_all

if TYPE_CHECKING:
    from ckptstore.store import Store
    from ckptstore.tuning.save_interval import Choice, Limits, Timing
    from ckptstore.tuning.trial_saves import Profile

_STAGING: Final = (64 << 20, 128 << 20)
"""b: a writer's default, and twice that."""


@make_command(
    "interval",
    examples=[
        "ckpt tune interval runs/gpt                       # state and iteration time from the store's checkpoints",
        "ckpt tune interval runs/new --size 4GB --iteration-time 250ms",
        "ckpt tune interval runs/gpt --like step_1000.safetensors --iteration-time 1.2s --memory 20GB --plot tune.png",
    ],
)
@STORE
@click.option("--iteration-time", "iteration", type=TIME, help="t: one iteration; default: from the store's commits.")
@click.option("--size", "nbytes", type=SIZE, help="m: bytes of the state; default: those of the newest checkpoint.")
@click.option("--like", type=REF, metavar="REF|FILE", help="Take the state's tensors from a checkpoint or a file.")
@click.option(
    "--slowdown",
    type=click.FloatRange(min=1, min_open=True),
    default=1.05,
    show_default=True,
    metavar="Q",
    help="q: the factor by which saving may slow training.",
)
@click.option("--memory", type=SIZE, help="M: host memory that saves may use.")
@click.option("--space", type=SIZE, help="S: bytes that checkpoints may use; default: the free space.")
@click.option("--in-flight", type=click.IntRange(1, 64), default=4, show_default=True, help="Try N up to this.")
@click.option("--threads", type=click.IntRange(1, 64), default=4, show_default=True, help="Try p up to this.")
@click.option(
    "--probe", type=SIZE, default="256MiB", show_default=True, help="Save at most this much; scale the times."
)
@click.option("--saves", type=click.IntRange(2), default=4, show_default=True, help="Measured saves of each setting.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the model (PNG, SVG, PDF).")
def command(
    store: str, nbytes: int | None, like: str | None, iteration: float | None, plot: Path | None, **asked: Any
) -> None:
    """Find how often to save, and how many saves at once.

    Saves a state for a while into a temporary store beside STORE (a store, a folder, or a path that does not exist
    yet), and applies PCcheck's model to find f (the interval), N (saves in flight) and p (threads of each);
    docs/tuning.md explains it.
    """
    from ckptstore.tuning.trial_folder import existing_store, scratch
    from ckptstore.tuning.trial_saves import lengths_like, lengths_of, trial_state

    if nbytes is not None and like is not None:
        raise click.UsageError("--size and --like both describe the state; pass only one")
    if plot is not None:  # fail before measuring, not after
        from ckptstore.exchange.atomic_files import refuse_missing_folder, refuse_store
        from ckptstore.tuning.interval_plot import need_matplotlib

        need_matplotlib()
        refuse_store(plot.resolve())
        refuse_missing_folder(plot)
    there = existing_store(store)
    pace, pace_from = (iteration, "given") if iteration is not None else (_pace(there), "store")
    if nbytes is None and like is None and there is not None and there.latest_step() is not None:
        like = "latest"
    missing = [
        name for name, value in (("--size or --like", nbytes or like), ("--iteration-time", pace)) if value is None
    ]
    if missing or pace is None:
        why = "the store has too few checkpoints to measure" if there else "there is no store yet to measure"
        raise click.UsageError(f"missing: {', '.join(missing)} ({why})")
    lengths = lengths_of(nbytes) if like is None and nbytes is not None else lengths_like(str(like), there)
    if (whole := sum(lengths)) < 1:
        raise click.UsageError(f"{like}: the tensors of this state have no bytes, so there is nothing to measure")
    state = trial_state(lengths, asked["probe"])
    saved = sum(array.nbytes for array in state.values())
    with scratch(store) as place:
        limits = _limits(asked, place.free())
        found = _profiled(place, state, whole, limits, asked).scaled(whole / saved)
    document = _document(found, limits, pace, whole)
    document |= {"probe_bytes": saved, "like": like, "store": store}
    document["sources"] = {"state_bytes": "given" if like is None else like, "iteration": pace_from}
    document["plot"] = None if plot is None else str(plot)
    if plot is not None:
        from ckptstore.tuning.interval_plot import draw

        draw(found.timings, _chosen(found, limits, pace, whole), pace, limits, plot)
    if asked["as_json"]:
        emit({name: document[name] for name in _MEMBERS})
    else:
        say_all(_text(document))
    _remarks(document)


_MEMBERS: Final = (
    *("store", "like", "state_bytes", "probe_bytes", "iteration", "sources", "limits", "settings", "chosen"),
    *("interval", "recovery", "line", "seconds", "plot"),
)


def _pace(store: Store | None) -> float | None:
    """Return the seconds per step, from the commits of a store."""
    from ckptstore.tuning.job_profile import seconds_per_step

    return None if store is None else seconds_per_step(store.checkpoints())


def _limits(asked: Mapping[str, Any], free: int) -> Limits:
    from ckptstore.tuning.save_interval import Limits

    return Limits(asked["slowdown"], asked["memory"], free if asked["space"] is None else asked["space"])


def _profiled(place: Any, state: Any, whole: int, limits: Limits, asked: Mapping[str, Any]) -> Profile:
    """Measure as many N as the limits allow, with a part of the state."""
    from ckptstore.tuning.save_interval import Setting, fits, most_in_flight, writer_memory
    from ckptstore.tuning.trial_saves import TrialPlan, profile

    most = min(asked["in_flight"], most_in_flight(whole, _STAGING[0], limits))
    staging = [one for one in _STAGING if fits(Setting(1, 1, one), limits, whole)]
    saved = sum(array.nbytes for array in state.values())

    def memory(setting: Setting) -> int | None:
        """Return the memory limit for the part that is saved, in proportion to the limit for the whole state."""
        room = writer_memory(whole, setting, limits) if fits(setting, limits, whole) else None
        return None if room is None else room * saved // whole

    _check_probe(whole, saved, memory(Setting(1, 1, staging[-1])))
    if most < asked["in_flight"]:
        note(f"memory or space allow only {most} saves in flight of the {asked['in_flight']} to try")
    plan = TrialPlan(most, range(1, asked["threads"] + 1), staging, asked["saves"], limits.slowdown, memory)
    with progress("saving") as advance:
        return profile(place, state, plan, advance)


def _check_probe(whole: int, saved: int, memory: int | None) -> None:
    """Check that the saved part is so large that its part of M suffices for a writer."""
    from ckptstore.host.arenas import LEAST

    if memory is not None and memory < LEAST:
        least = -(-LEAST * saved // max(memory, 1))
        raise click.UsageError(
            f"--memory is less than a save of {size(whole)}, and the measured part of it would be too small: pass "
            f"--probe {size(least)} or more"
        )


def _chosen(found: Profile, limits: Limits, iteration: float, whole: int) -> Choice:
    from ckptstore.tuning.save_interval import best_setting

    return best_setting(found.timings, iteration, limits, whole)


def _document(found: Profile, limits: Limits, iteration: float, whole: int) -> dict[str, Any]:
    from ckptstore.tuning.save_interval import recovery_bound, slowdown, writer_memory

    choice = _chosen(found, limits, iteration, whole)
    timing, setting = choice.timing, choice.timing.setting
    memory = writer_memory(whole, setting, limits)
    bound = recovery_bound(timing, choice.interval, iteration, found.load)
    staging = "" if setting.staging_bytes == _STAGING[0] else f", staging_bytes={setting.staging_bytes}"
    bounded = "" if memory is None else f", memory={memory}"
    return {
        "state_bytes": whole,
        "iteration": iteration,
        "limits": asdict(limits),
        "settings": [_setting(one, one == timing, limits, iteration, whole) for one in found.timings],
        "chosen": _setting(timing, True, limits, iteration, whole),
        "interval": {
            "iterations": choice.interval,
            "seconds": choice.interval * iteration,
            "equation_3": choice.equation_3,
            "slowdown": slowdown(timing, choice.interval, iteration),
        },
        "recovery": asdict(bound) | {"total": bound.total},
        "line": f"store.writer(max_in_flight={setting.in_flight}, threads={setting.threads}{staging}{bounded})",
        "seconds": found.seconds,
    }


def _setting(timing: Timing, chosen: bool, limits: Limits, iteration: float, whole: int) -> dict[str, Any]:
    from ckptstore.tuning.save_interval import host_bytes, least_interval, writer_memory

    memory = writer_memory(whole, timing.setting, limits)
    return asdict(timing.setting) | {
        "write": timing.write,
        "per_save": timing.per_save,
        "loss": timing.loss,
        "bandwidth": whole / timing.per_save,
        "memory": memory,
        "host_bytes": host_bytes(whole, timing.setting, memory),
        "interval": least_interval(timing, iteration, limits.slowdown),
        "chosen": chosen,
    }


def _remarks(found: Mapping[str, Any]) -> None:
    if found["sources"]["iteration"] == "store":
        note("the iteration time is the time between commits, saving included")
    if found["probe_bytes"] < found["state_bytes"]:
        note(
            f"{size(found['probe_bytes'])} of {size(found['state_bytes'])} were saved, and times scaled by "
            f"{found['state_bytes'] / found['probe_bytes']:.3g}; a larger --probe is more exact"
        )


def _text(found: Mapping[str, Any]) -> Iterator[str]:
    interval, recovery, chosen = found["interval"], found["recovery"], found["chosen"]
    yield click.style(
        f"save every {_iterations(interval['iterations'])} ({_short(interval['seconds'])}), "
        f"{chosen['in_flight']} in flight, {_threads(chosen['threads'])}",
        bold=True,
    )
    yield f"slows training by a factor of {interval['slowdown']:.3f} at most, by the model"
    if interval["iterations"] > interval["equation_3"]:
        yield (
            f"Eq. (3) alone: every {interval['equation_3']:,}; but the call of a save takes {_short(chosen['loss'])} "
            "of the loop"
        )
    yield (
        f"a failure costs at most {_short(recovery['total'])} (Eq. (4)): {_short(recovery['load'])} to load, "
        f"{_short(recovery['since_save'])} since the newest save, {_short(recovery['under_way'])} of saves under way"
    )
    yield ""
    yield (
        f"{size(found['state_bytes'])} of state, iterations of {_short(found['iteration'])}, slowdown at most "
        f"{found['limits']['slowdown']:g}; measured in {duration(found['seconds'])}:"
    )
    heads = ["", ">N", ">THREADS", ">STAGING", ">T_w", ">T_w/N", ">GB/s", ">CALL", ">MEMORY", ">EVERY"]
    yield table(heads, map(_row, sorted(found["settings"], key=lambda one: [*one.values()][:3])))
    yield ""
    yield "to copy:"
    yield f"  writer = {found['line']}"
    yield "  ..."
    if interval["iterations"] == 1:
        yield "  writer.save_async(state, step)"
    else:
        yield f"  if step % {interval['iterations']} == 0:"
        yield "      writer.save_async(state, step)"


def _row(one: Mapping[str, Any]) -> list[str]:
    return [
        "*" if one["chosen"] else "",
        *(f"{one['in_flight']}", f"{one['threads']}", size(one["staging_bytes"])),
        *(_short(one["write"]), _short(one["per_save"]), f"{one['bandwidth'] / 1e9:.3g}", _short(one["loss"])),
        *(size(one["host_bytes"]), f"{one['interval']:,}"),
    ]


def _iterations(number: int) -> str:
    return "iteration" if number == 1 else f"{number:,} iterations"


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def _short(seconds: float) -> str:
    """Format ``1.25 s`` or ``38.1 ms``."""
    return duration(seconds) if seconds >= 1 else f"{seconds * 1000:.3g} ms"
