"""What existing checkpoints would cost with each codec and interval: the engine behind ``ckpt analyze``.

::

    from ckptstore.analysis import Options, analyze

    found = analyze(["step_*.safetensors"])
    found.advice.best            # interval, bytes per checkpoint, restore cost
    document(found)              # all of it, as JSON
    write_report(found, folder)  # a page with plots

Nothing is written to the checkpoints, and no checkpoint has to fit into memory.
"""

from __future__ import annotations

from ckptstore.analysis.analyzing import Analysis, Options, analyze
from ckptstore.analysis.document import document, write_csv
from ckptstore.analysis.report import write_report

__all__ = ["Analysis", "Options", "analyze", "document", "write_csv", "write_report"]
