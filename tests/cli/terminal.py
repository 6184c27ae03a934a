"""`ckpt` in a real terminal: the output that a person sees, at a given number of columns and lines."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests import warmth

__all__ = ["on_a_terminal"]

_CKPT = "from ckptstore.cli.entry import main; main()"


def on_a_terminal(
    *arguments: object,
    columns: int = 80,
    lines: int = 24,
    errors: bool = True,
    typed: str = "",
    **environment: str | None,
) -> str:
    """The output of `ckpt` on a terminal: stdout, and with `errors` stderr.

    Args:
        typed: keys that were pressed before it began.
        environment: variables; None removes one, as in ``NO_COLOR=None``.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    settings: dict[str, str | None] = {
        name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES", "PAGER", "LESS")
    }
    settings = {**settings, "TERM": "xterm", "PAGER": "cat", "NO_COLOR": "1", **environment}
    process = warmth.nursery().start(
        [sys.executable, "-c", _CKPT, *map(str, arguments)],
        cwd=Path.cwd(),
        env={name: text for name, text in settings.items() if text is not None},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs if errors else subprocess.DEVNULL,
    )
    os.close(theirs)
    os.write(ours, typed.encode())
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # EIO: no process has the terminal open any more
        pass
    finally:
        os.close(ours)
        process.wait(60)
    return written.decode().replace("\r\n", "\n")
