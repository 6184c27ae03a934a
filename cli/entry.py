"""Entry point of the ``ckpt`` script: Ctrl-C exits without a traceback even while Python is still importing.

Importing this module installs a SIGINT handler, unless another one is installed. Only the script imports it.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

_INTERRUPTED = 130


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(_INTERRUPTED)  # nothing has been printed or opened yet


_OURS = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _OURS:
    signal.signal(signal.SIGINT, _end)


def main() -> NoReturn:
    """Run the command. See `ckptstore.cli.main.main`."""
    from ckptstore.cli.main import main as run

    try:
        if _OURS:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # the command had not started; once started it reports the interrupt itself
        sys.exit(_INTERRUPTED)
