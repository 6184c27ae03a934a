"""How often to store a full, and how many diffs to put in one write: LowDiff's wasted-time model and its controller.

`docs/tuning.md` derives the model (LowDiff §V-C, Eq. (8)-(10)) and its units. Imports `store` and what is below it.
"""

from ckptstore.tuning.controller import Change, Controller
from ckptstore.tuning.model import Job, Model, Waste
from ckptstore.tuning.optimum import Configuration, Point, best, continuous, fulls_only, neighbours, paper_optimum

__all__ = [
    "Change",
    "Configuration",
    "Controller",
    "Job",
    "Model",
    "Point",
    "Waste",
    "best",
    "continuous",
    "fulls_only",
    "neighbours",
    "paper_optimum",
]
