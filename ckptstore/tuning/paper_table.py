"""Reproduce Table I of the LowDiff paper, for a job for which Eq. (8) has its minimum at the same place as the table.

The table is a measurement (GPT2-L on eight A100), printed without its constants. S is in the paper's Exp. 7,
W is its network (25 Gbit/s) and M one of the MTBFs of Exp. 3. Iteration time, R_F and R_D are not printed: they are
*calibrated* here. The place of the minimum depends only on R_D and M S/W (both in iterations); R_F only makes the
minimum flatter.
"""

from __future__ import annotations

from typing import Final

from ckptstore.tuning.wasted_time import Job

__all__ = ["TABLE_BATCHES", "TABLE_I", "TABLE_INTERVALS", "TABLE_JOB", "table"]

TABLE_INTERVALS: Final = (10, 20, 50, 100)
"""Rows of Table I: FCF, iterations from one full to the next."""
TABLE_BATCHES: Final = (1, 2, 3, 4, 5, 6)
"""Columns of Table I: BS, diffs per write."""
TABLE_I: Final = (
    (1.258, 1.226, 1.279, 1.330, 1.408, 1.513),
    (1.052, 1.000, 1.031, 1.085, 1.149, 1.202),
    (1.394, 1.290, 1.255, 1.312, 1.387, 1.481),
    (1.916, 1.783, 1.712, 1.752, 1.869, 1.952),
)
"""Wasted time as a multiple of the table's minimum, as printed."""

_ITERATION: Final = 15.1
TABLE_JOB: Final = Job(
    full_bytes=8.7e9,
    bandwidth=25e9 / 8,
    mtbf=1800.0,
    iteration=_ITERATION,
    load_full=2.6 * _ITERATION,
    merge_batch=0.22 * _ITERATION,
    diff_bytes=541e6,
)
"""S, W, M and the diff's size as printed; t, R_F = 2.6 t and R_D = 0.22 t calibrated so that (20, 2) is the optimum."""


def table(job: Job) -> tuple[tuple[float, ...], ...]:
    """Table I for a job: waste at `TABLE_INTERVALS` x `TABLE_BATCHES`, as a multiple of the minimum in the table."""
    model = job.model()
    cells = [[model.total(interval, batch) for batch in TABLE_BATCHES] for interval in TABLE_INTERVALS]
    least = min(map(min, cells))
    return tuple(tuple(cell / least for cell in row) for row in cells)
