"""Where the ``ckpt`` script begins. Ctrl-C while Python is importing ends it as a later one does, without a traceback.

Importing this module takes SIGINT over, if nobody has: that is what it is for, and only the script does it.
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
    os._exit(_INTERRUPTED)  # nothing was printed yet, and nothing is open


_OURS = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _OURS:
    signal.signal(signal.SIGINT, _end)


def main() -> NoReturn:
    """Run the command: see `ckptstore.cli.main.main`."""
    from ckptstore.cli.main import main as run

    try:
        if _OURS:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before the command had begun, which tells of it by itself
        sys.exit(_INTERRUPTED)
