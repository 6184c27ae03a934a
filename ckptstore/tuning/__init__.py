"""Tune how often to save (PCcheck's Eq. (3)), how often to store a full, and how many diffs to write at once (LowDiff).

`docs/tuning.md` derives the models and their units; both have a controller. Imports `store` and the rooms below it.
"""

from ckptstore.tuning.frequency_controller import Change, Controller
from ckptstore.tuning.interval_controller import IntervalController
from ckptstore.tuning.optimum import Configuration, Point, best, continuous, fulls_only, neighbours, paper_optimum
from ckptstore.tuning.save_interval import (
    Limits,
    Setting,
    Timing,
    best_setting,
    least_interval,
    recovery_bound,
    slowdown,
)
from ckptstore.tuning.wasted_time import Job, Model, Waste

__all__ = [
    "Change",
    "Configuration",
    "Controller",
    "IntervalController",
    "Job",
    "Limits",
    "Model",
    "Point",
    "Setting",
    "Timing",
    "Waste",
    "best",
    "best_setting",
    "continuous",
    "fulls_only",
    "least_interval",
    "neighbours",
    "paper_optimum",
    "recovery_bound",
    "slowdown",
]
