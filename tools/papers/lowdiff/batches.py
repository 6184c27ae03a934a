"""LowDiff, Exp. 6a, 6b and 8, and Table I: batches of step diffs, and compression ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from ckptstore.tuning.paper_table import TABLE_BATCHES, TABLE_I, TABLE_INTERVALS, TABLE_JOB, table
from tools.bench.measure import Measurement
from tools.bench.training.training_loop import Shape
from tools.papers.lowdiff.diff_run import diff_run
from tools.papers.result import Asked, Cell, Claim, Compared, Figure, Result, Table

__all__ = ["batching", "densities", "grid"]

TINY: Final = Shape(32, 2, 1, 16)
SMALL: Final = Shape(64, 2, 1, 32)
MIDDLE: Final = Shape(128, 6, 4, 64)


# -- Exp. 6


def batching(asked: Asked) -> Result:
    """Exp. 6: time and segments of a diff by batch, and the memory of the waiting ones."""
    shape, count = asked.pick(TINY, MIDDLE, MIDDLE), asked.pick(6, 20, 60)
    sizes = asked.pick((1, 3), (1, 2, 5, 10, 20), (1, 2, 5, 10, 20))
    rows, equal = [], 0
    with diff_run(asked.scratch / "warm", shape) as run:
        run.take(3, wait=True)  # imports, compiled kernels
    for batch in sizes:
        measured = Measurement()
        with diff_run(asked.scratch / str(batch), shape, batch=batch) as run:
            run.take(2)
            run.settle()
            at = len(run.stalls)
            last = run.trainer.step + count
            with measured:
                run.take(count, noted=(last,))
                run.settle()
            sizes_of = run.diffs(last)
            training, busy = sum(run.iterations[at:]), sum(run.busy[at:])
            equal += run.restored(last)[1]
            rows.append(
                (
                    *(batch, len(sizes_of) - 1, sum(sizes_of) / (count + 1) / 1e3),
                    1e3 * (measured.seconds - training) / count,
                    1e3 * (measured.cpu_seconds - busy) / count,
                    *(1e3 * statistics.fmean(run.stalls[at:]), measured.peak_rss / 1e6),
                    *(100 * sum(sizes_of) / (count + 1) * (batch - 1) / (12 * run.trainer.parameters),),
                )
            )
            asked.told(f"batch {batch}: {rows[-1][1]} segments, {rows[-1][3]:.1f} ms a diff")
    with diff_run(asked.scratch / "sum", shape, batch=5, accumulate="sum") as run:
        run.take(1 + 5 * (count // 5))
        run.settle()
        summed = run.diffs(run.trainer.step)
        distance = run.distance(run.trainer.step)
    columns = (
        *("batch", "segments", "kB a diff", "ms a diff", "processor ms a diff", "stall ms", "peak MB"),
        "waiting diffs, % of the state",
    )
    first, last_row = rows[0], rows[-1]
    return Result(
        tables=[Table(f"{count} step diffs, top-k 1 %", columns, rows, dict.fromkeys(columns[2:], ".1f"))],
        claims=[
            Claim(
                "a diff takes 30.9 % less time to write in batches of 20",
                "-30.9 %",
                f"{last_row[3] / first[3] - 1:+.1%} (processor {last_row[4] / first[4] - 1:+.1%})",
                last_row[3] < first[3],
                "an SSD's time per write is what batches save; encoding, which is most of a diff's time here, is the "
                "same, and a batch is encoded as a whole while training waits for memory",
            ),
            Claim(
                "without offloaded batching GPU memory grows by 10-12 %",
                "10-12 % -> 0",
                f"compressed diffs wait in host memory: {last_row[7]:.1f} % of the state at a batch of {sizes[-1]}",
                None,
                "there is no GPU on this machine; what waits is in host memory, compressed. On a device TopKHook's "
                "entries leave with the step (docs/writer.md)",
            ),
        ],
        figures=[
            Figure(
                "Exp. 6a: time of a diff by batch",
                "lines",
                list(sizes),
                {"wall": [row[3] for row in rows], "processor": [row[4] for row in rows]},
                x="diffs in one write",
                y="ms",
            ),
            Figure("Segments", "bars", list(sizes), {"here": [float(row[1]) for row in rows]}, x="diffs in one write"),
        ],
        compared=[
            Compared("the last step, by batch", len(sizes), equal),
            Compared(
                "the last step of batches of 5 that are summed", 1, 0, f"weights differ by {distance:.1e} of their norm"
            ),
        ],
        remarks=[
            "The paper adds the gradients of a batch, and applies the sum once, as its last step's checkpoint. It is "
            f"not the trained state. In batches of 5 it takes {sum(summed) / count / 1e3:.1f} kB a step here; "
            "`DiffOptions(accumulate='sum')` stores that, marked as lossy. All rows above keep every step."
        ],
        settings={"shape": repr(shape), "diffs": count},
    )


# -- Exp. 8


def densities(asked: Asked) -> Result:
    """Exp. 8: how often a diff can be saved, by the share of the gradient that is kept."""
    shape = asked.pick(TINY, Shape(192, 6, 8, 64), Shape(320, 6, 8, 64))
    steps = asked.pick(4, 10, 30)
    kept = asked.pick((0.01, 0.1), (0.001, 0.01, 0.05, 0.1), (0.001, 0.01, 0.025, 0.05, 0.075, 0.1))
    rows, equal = [], 0
    for density in kept:
        with diff_run(asked.scratch / str(density), shape, density=density) as run:
            run.take(3, wait=True)
            last = run.trainer.step + steps
            run.take(steps, noted=(last,), wait=True)
            iteration = statistics.median(run.iterations[3:])
            durable = statistics.median(seconds for step, seconds in run.durable.items() if step > 3)
            nbytes = statistics.fmean(run.diffs(last)[3:])
            equal += run.restored(last)[1]
            rows.append(
                (
                    *(density, max(1, math.ceil(durable / iteration)), nbytes / (12 * run.trainer.parameters)),
                    *(durable * 1e3, iteration * 1e3, 1e3 * statistics.median(run.stalls[3:])),
                )
            )
        asked.told(f"density {density}: durable after {durable * 1e3:.0f} ms, an iteration takes {iteration * 1e3:.0f}")
    columns = (*("density", "iterations between saves", "bytes of a full", "durable ms", "iteration ms", "stall ms"),)
    formats = {"bytes of a full": ".2%"} | dict.fromkeys(columns[3:], ".1f")
    most = max(row[1] for row in rows)
    return Result(
        tables=[Table("A step diff by density", columns, rows, formats)],
        claims=[
            Claim(
                "every iteration for densities from 0.001 to 0.075 (GPT2-L) or 0.1 (GPT2-S), 2 at 0.1 (GPT2-L)",
                "1, 1-2",
                ", ".join(f"{row[0]:g}: {row[1]}" for row in rows),
                most <= 2,
                "As in the paper, an interval is how many iterations one save overlaps. The store "
                "compares every tensor of the state with its prediction, so density changes the bytes "
                "but hardly the time.",
            )
        ],
        figures=[
            Figure(
                "A step diff by density",
                "lines",
                list(kept),
                {"durable": [row[3] for row in rows], "iteration": [row[4] for row in rows]},
                x="density",
                y="ms",
                log="x",
            ),
            Figure("Bytes", "lines", list(kept), {"of a full": [row[2] for row in rows]}, x="density", log="xy"),
        ],
        compared=[Compared("the last step, by density", len(kept), equal)],
        settings={"shape": repr(shape), "steps": steps},
    )


# -- Table I


def grid(asked: Asked) -> Result:
    """Table I: wasted time over (1/f, b)."""
    shape = asked.pick(TINY, SMALL, MIDDLE)
    intervals = asked.pick((4, 8), TABLE_INTERVALS, TABLE_INTERVALS)
    batches = asked.pick((1, 2), TABLE_BATCHES, TABLE_BATCHES)
    distances = sorted({interval // 2 for interval in intervals})
    replay: dict[tuple[int, int], float] = {}
    stalls, fulls, iterations, equal = {}, [], [], 0
    for batch in batches:
        with diff_run(asked.scratch / str(batch), shape, batch=batch, full_every=10_000) as run:
            noted = tuple(1 + distance for distance in distances)
            run.take(1 + -(-distances[-1] // batch) * batch, noted=noted)
            run.settle()
            fulls.append(run.stalls[0])
            stalls[batch] = statistics.fmean(run.stalls[3:])
            iterations += run.iterations[3:]
            for distance in distances:
                found = [run.restored(1 + distance) for _ in range(asked.pick(1, 2, 3))]
                replay[distance, batch] = min(seconds for seconds, _ in found)
                equal += all(same for _, same in found)
        asked.told(f"batch {batch}: restored {len(distances)} distances")
    iteration = statistics.median(iterations)
    full = statistics.median(fulls)
    mtbf = _scaled_mtbf(replay, full / iteration, iteration, intervals, batches)
    waste = [
        [
            (replay[interval // 2, batch] / iteration + batch / 2) / mtbf
            + stalls[batch] / iteration
            + full / iteration / interval
            for batch in batches
        ]
        for interval in intervals
    ]
    least = min(map(min, waste))
    mine = [[one / least for one in row] for row in waste]
    best = min((mine[r][c], intervals[r], batches[c]) for r in range(len(intervals)) for c in range(len(batches)))
    model = table(TABLE_JOB)
    rows: list[tuple[Cell, ...]] = [
        (f"{name}, full every {interval}", *row)
        for name, cells in (("paper", TABLE_I), ("Eq. (8), calibrated", model), ("here", mine))
        for interval, row in zip(intervals, cells, strict=False)
        if len(row) == len(batches)
    ]
    columns = ("", *(f"batch {batch}" for batch in batches))
    lowest = min((model[r][c], TABLE_INTERVALS[r], TABLE_BATCHES[c]) for r in range(4) for c in range(6))
    return Result(
        tables=[Table("Wasted time, of the least in the table", columns, rows, dict.fromkeys(columns[1:], ".3f"))],
        claims=[
            Claim(
                "the model has the least waste where the table has it",
                "(20, 2)",
                f"({lowest[1]}, {lowest[2]})",
                lowest[1:] == (20, 2),
                "the calibration has changed",
                "Eq. (8) with the constants that the paper prints, and the others calibrated (docs/tuning.md)",
            ),
            Claim(
                "the least waste is at a full every 20 iterations, in batches of 2",
                "(20, 2)",
                f"({best[1]}, {best[2]}) at {mtbf:.0f} iterations between failures",
                best[1] in intervals[1:-1],
                "where the minimum is depends on the machine: on how long a full stalls and a diff replays",
            ),
            Claim(
                "fulls too often or too seldom both waste more",
                "x 1.26, x 1.92",
                f"x {min(mine[0]):.2f}, x {min(mine[-1]):.2f}",
                min(*mine[0], *mine[-1]) > 1,
                "the least is at the edge of the table: stalls of fulls, or replays, hardly count here",
            ),
        ],
        figures=[
            Figure(
                "Wasted time by batch, of the least",
                "lines",
                list(batches),
                {f"paper, {interval}": row for interval, row in zip(intervals, TABLE_I, strict=False)}
                | {f"here, {interval}": row for interval, row in zip(intervals, mine, strict=True)}
                if len(batches) == len(TABLE_BATCHES)
                else {f"here, {interval}": row for interval, row in zip(intervals, mine, strict=True)},
                x="diffs in one write",
            )
        ],
        compared=[Compared("steps restored from batches", len(batches) * len(distances), equal)],
        remarks=[
            "Measured: how long a save, a full and a restore of the mean distance take, by batch; the share of "
            "failures is the model's. The mean time between failures is scaled so that fulls and replays weigh the "
            "same in the middle of the table, as they do in the paper's."
        ],
        settings={
            "shape": repr(shape),
            "mtbf_iterations": mtbf,
            "iteration_ms": iteration * 1e3,
            "full_ms": full * 1e3,
        },
        numbers={
            "replay_ms": {f"{distance}/{batch}": 1e3 * one for (distance, batch), one in replay.items()},
            "stall_ms": {str(batch): 1e3 * one for batch, one in stalls.items()},
        },
    )


def _scaled_mtbf(
    replay: dict[tuple[int, int], float],
    full: float,
    iteration: float,
    intervals: Sequence[int],
    batches: Sequence[int],
) -> float:
    """Iterations between failures at which a full's stall and the replay weigh the same at a full every 20 or so."""
    middle = intervals[1]
    low, high = replay[intervals[0] // 2, batches[0]], replay[intervals[-1] // 2, batches[0]]
    each = max(1e-9, (high - low) / (intervals[-1] // 2 - intervals[0] // 2) / iteration)
    # d/dn of each n / (2 M) + full / n vanishes at n^2 = 2 M full / each
    return max(10.0, middle**2 * each / (2 * full))
