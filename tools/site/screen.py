"""A command's screen as a picture, with its colours: ``python -m tools.site.screen docs/log.svg ckpt log runs/gpt``.

The command runs on a terminal of 80 columns. Only the colour codes of `ckpt log` are supported: bold, and the sixteen
of a terminal. A screen that is longer than `ROWS` is cut in the middle, with a note.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

__all__ = ["drawn", "screen"]

COLUMNS: Final = 80
ROWS: Final = 26
_WIDE, _HIGH, _MARGIN = 8.4, 18, 14
_TEXT, _BACK = "#d5dae1", "#1d2229"
_COLOURS: Final = {
    "31": "#e06c75",
    "32": "#8fc77f",
    "33": "#e0bf6b",
    "34": "#6aa7f0",
    "35": "#c58be0",
    "36": "#5cc0cc",
    "94": "#8fc1ff",
    "95": "#e0a8f5",
    "96": "#8be0ea",
}
_CODE: Final = re.compile(r"\x1b\[([0-9;]*)m")


def screen(command: Sequence[str]) -> list[str]:
    """The lines that a command prints on a terminal, with their codes for colours."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 200, COLUMNS, 0, 0))
    environment = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm", "PAGER": "cat"}
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
    os.close(other)
    data = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        data += part
    os.close(main)
    if process.wait():
        raise SystemExit(data.decode())
    return data.decode().replace("\r\n", "\n").rstrip("\n").split("\n")


def drawn(lines: Sequence[str], title: str) -> str:
    """An SVG of a terminal: the typed line, then `lines`."""
    shown = [f"$ {title}", *lines]
    if len(shown) > ROWS:
        left = len(shown) - ROWS + 1
        shown = [*shown[: ROWS - 5], f"... {left} lines more", *shown[-4:]]
    width, height = round(COLUMNS * _WIDE + 2 * _MARGIN), len(shown) * _HIGH + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="{_BACK}"/>',
    ]
    for number, line in enumerate(shown):
        spans = "".join(_spans(line))
        y = _MARGIN + number * _HIGH + 13
        parts.append(
            f'<text x="{_MARGIN}" y="{y}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" '
            f'fill="{_TEXT}" xml:space="preserve">{spans}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _spans(line: str) -> Iterator[str]:
    """The pieces of a line, each at its column, whatever the width of the font's letters."""
    bold, colour, column = False, _TEXT, 0
    for number, piece in enumerate(_CODE.split(line)):
        if number % 2:
            for code in piece.split(";"):
                if code in ("", "0"):
                    bold, colour = False, _TEXT
                elif code == "1":
                    bold = True
                else:
                    colour = _COLOURS.get(code, colour)
        elif piece:
            style = f' fill="{colour}"' + (' font-weight="bold"' if bold else "")
            x, long = round(_MARGIN + column * _WIDE, 1), round(len(piece) * _WIDE, 1)
            yield f'<tspan x="{x}" textLength="{long}" lengthAdjust="spacingAndGlyphs"{style}>{escape(piece)}</tspan>'
            column += len(piece)


if __name__ == "__main__":
    target, *typed = sys.argv[1:]
    Path(target).write_text(drawn(screen(typed), " ".join(typed)))
