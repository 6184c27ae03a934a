"""Estimate what existing checkpoints would cost with each codec and interval: `analyze`, `document`, `write_report`.

Only reads the checkpoints; none has to fit into memory. Imports `store` and the rooms below it.
"""

from __future__ import annotations

from ckptstore.analysis.analysis import Analysis, Options, analyze
from ckptstore.analysis.document import document, write_csv
from ckptstore.analysis.html_report import write_report

__all__ = ["Analysis", "Options", "analyze", "document", "write_csv", "write_report"]
