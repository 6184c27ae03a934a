"""Formats command output: JSON, aligned tables, sizes, progress bars. rich is imported only to draw a bar."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from ckptstore.cli.text_wrap import columns, fitted, say, width
from ckptstore.formats.byte_text import size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from ckptstore import Progress
    from ckptstore.log.change_committer import LastWriter

__all__ = [
    "SCHEMA",
    "age",
    "between",
    "breadth",
    "duration",
    "emit",
    "emit_line",
    "moment",
    "note",
    "number",
    "paged",
    "pause",
    "printable",
    "progress",
    "ratio",
    "shape",
    "short_key",
    "size",
    "some",
    "spark",
    "table",
    "tables",
    "tell_asked",
    "who",
    "writing",
]

SCHEMA: Final = 1
"""Schema version of every JSON document that the command prints (docs/json.md)."""
_MINUTE: Final = 60


def emit(document: dict[str, Any]) -> None:
    """Print one JSON document to stdout: a member per line, and an object per line within a list of objects.

    Numbers that JSON cannot represent (NaN, infinities) become null.
    """
    import json

    def text(value: Any) -> str:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)

    def member(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n    " + ",\n    ".join(map(text, value)) + "\n  ]"
        return text(value)

    members = ",\n".join(f"  {text(key)}: {member(value)}" for key, value in _with_schema(document).items())
    click.echo(_encodable(f"{{\n{members}\n}}"))


def emit_line(document: dict[str, Any]) -> None:
    """Print one JSON document on one line, for streams of documents."""
    import json

    click.echo(_encodable(json.dumps(_finite(_with_schema(document)), ensure_ascii=False, allow_nan=False)))


def _encodable(text: str) -> str:
    """Escape lone surrogates in JSON text. File names that are not UTF-8 contain them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _with_schema(document: dict[str, Any]) -> dict[str, Any]:
    """Add the schema version. Removing a member or changing its meaning raises it to 2."""
    return {"schema": SCHEMA, **document}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def note(message: str) -> None:
    """Print a note to stderr, so that it does not end up in a pipe."""
    say(f"{click.style('note:', bold=True)} {message}", hanging=6, err=True)


def tell_asked(host: str | None, pid: int | None, timeout: float | None) -> None:
    """Print that a writer was asked, and how long the command waits for its answer."""
    process = [printable(host)] if host is not None else []
    process += [f"pid {pid}"] if pid is not None else []
    who_is = f" ({', '.join(process)})" if process else ""
    waiting = "waiting" if timeout is None else f"waiting up to {timeout:.3g} s (--timeout)"
    note(f"asked the writer{who_is}; {waiting}")


def number(value: float | None) -> str:
    """Format a measured number with four digits, an integer in full, None as ``-``."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def ratio(before: int, after: int) -> str:
    """Format how many times smaller `after` is: ``1.00x``."""
    return f"{before / after:.2f}x" if after else "-"


def some(names: Sequence[str], most: int = 8) -> str:
    """Join names with commas. The middle of a long list is omitted."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most // 2])} ... {', '.join(names[-most // 2 :])} ({len(names):,} in all)"


def shape(dimensions: Sequence[int]) -> str:
    """Format a shape: ``50257x768``; a 0-d tensor is a ``scalar``."""
    return "x".join(map(str, dimensions)) if dimensions else "scalar"


def short_key(key: str, *, short: bool) -> str:
    """Format a segment's key; `short`, for a terminal, is the term and the start of its name: ``6/ad8eac53``."""
    parts = key.removesuffix(".safetensors").split("/")
    if not short or len(parts) != 3 or not parts[1].isdecimal():
        return key
    return f"{int(parts[1])}/{parts[2][:8]}"


def moment(seconds: float) -> str:
    """Format a Unix time stamp as local date and time. An absurd one is printed as a number: it is only informative."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s"


def duration(seconds: float) -> str:
    """Format seconds: ``0.41 s``, ``3 min 20 s``, ``2 h 12 min``, ``3 d 4 h``. A second part of zero is omitted."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    whole = int(seconds)
    for unit, length, lower, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length:,} {unit}" + (f" {rest} {lower}" if rest else "")
    raise AssertionError("at least a minute")


def between(span: tuple[float, float] | None) -> str:
    """Format an estimate: ``less than 1 s``, ``about 12 s``, ``3 to 8 s``, ``40 s to 2 min 10 s``; empty for None."""
    if span is None:
        return ""
    low, high = (math.ceil(value) for value in span)
    if high <= 1:
        return "less than 1 s"
    if low == high:
        return f"about {_whole(high)}"
    return f"{low} to {high} s" if high < _MINUTE else f"{_whole(low)} to {_whole(high)}"


def _whole(seconds: int) -> str:
    return f"{seconds} s" if seconds < _MINUTE else duration(seconds)


def age(seconds: float) -> str:
    """Format how long ago: ``12 s``, ``3 min``, ``5 h``, ``8 d``; ``0 s`` for a time in the future."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def _named(host: str | None, pid: int | None) -> tuple[str, str]:
    """Format a process and its host: ``process 411`` and `` on node-7``."""
    return (f"process {pid}" if pid is not None else "somebody", f" on {printable(host)}" if host is not None else "")


def who(writer: str, host: str | None, pid: int | None) -> str:
    """Describe the writer's state (see `ckptstore.RunInfo`): ``process 411 is writing``, ``closed, ...``."""
    process, where = _named(host, pid)
    return {
        "alive": f"{process} is writing",
        "gone": "gone without closing (killed?)",
        "closed": "closed, all saves done",
        "unknown": f"{process}{where}, not closed",
        "none": "-",
    }[writer]


def writing(last: LastWriter) -> str:
    """Format the line about a store's writer: ``writer: process 411 is writing``, ``no writer: ...; last sign ...``."""
    process, where = _named(last.host, last.pid)
    if last.state == "none":
        return "no writer yet"
    since = "" if last.time is None else f"{age(time.time() - last.time)} ago"
    if last.purpose is not None:  # a command took over while no run was writing
        before = {"closed": "; the run was closed", "gone": "; the run had not closed (killed?)"}.get(last.state, "")
        return f"no writer: taken over {since or 'once'} to {printable(last.purpose)}{before}"
    said = {
        "alive": f"writer: {process} is writing",
        "unknown": f"writer: {process}{where}, which cannot be seen from here; it has not closed",
        "closed": "no writer: it was closed, all saves done",
        "gone": f"no writer: {process} is gone without closing (killed?)",
    }[last.state]
    return said + (f"; last sign of it {since}" if since else "")


def printable(text: str) -> str:
    """Replace unprintable characters, such as terminal escapes, in text from elsewhere."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def spark(values: Sequence[float], width: int, encoding: str | None) -> str:
    """Draw the last `width` numbers as small bars, scaled from their lowest to their highest.

    A number that is not finite is a ``!``. If the terminal's encoding has no bars, ASCII characters are used.
    """
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    bars = "▁▂▃▄▅▆▇█"
    try:
        bars.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        bars = "_.-~=+*#"
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    # Halve first: the difference of two finite numbers may overflow.
    span = high / 2 - low / 2

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "!"
        return bars[min(len(bars) - 1, int((value / 2 - low / 2) / span * len(bars)))] if span else bars[0]

    return "".join(map(bar, shown))


_LEAST: Final = 16
"""Minimum columns for the last column of a table to be wrapped on a terminal."""
_INDENT: Final = "  "
"""Indentation of the other columns, if the first one is on its own line."""


def breadth(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    """Return the width in columns of a table without wrapping."""
    cells = [[heading.removeprefix(">") for heading in headings], *rows]
    return sum(max(width(row[i]) for row in cells) for i in range(len(headings))) + 2 * (len(headings) - 1)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, fit: bool = True) -> str:
    """Draw aligned columns, two spaces apart, without cutting text off, so that it can be searched.

    ``>HEADING`` aligns right. If all headings are empty, the heading line is omitted. On a narrow terminal the last
    column is wrapped if it is aligned left; otherwise the first column is on a line above the others.
    Without `fit` each row is one line in any case.
    """
    drawn = _drawn(headings, [list(row) for row in rows], columns() if fit else None)
    return "\n".join(drawn if any(heading.removeprefix(">") for heading in headings) else drawn[1:])


def _drawn(headings: Sequence[str], body: Sequence[Sequence[str]], room: int | None) -> list[str]:
    """Return the heading and each row, wrapped to at most `room` columns."""
    right = [heading.startswith(">") for heading in headings]
    names = [heading.removeprefix(">") for heading in headings]
    widths = [max([len(name), *(width(row[i]) for row in body)]) for i, name in enumerate(names)]
    margin = sum(widths[:-1]) + 2 * (len(widths) - 1)
    narrow = room is not None and margin + widths[-1] > room
    broken = narrow and room is not None and room - margin >= _LEAST and not right[-1]
    if narrow and not broken and len(headings) > 2 and names[0] not in ("", _INDENT):
        lower = _drawn([_INDENT, *headings[1:]], [[_INDENT, *row[1:]] for row in body], room)
        upper = [click.style(names[0], bold=True), *(row[0] for row in body)]
        return [f"{above}\n{below}" for above, below in zip(upper, lower, strict=True)]

    def padded(text: str, across: int, flush: bool) -> str:
        blank = " " * (across - width(text))
        return blank + text if flush else text + blank

    def line(row: Sequence[str]) -> str:
        last, *more = fitted(row[-1], room - margin if broken and room is not None else None, 0).split("\n")
        cells = zip([*row[:-1], last], widths, right, strict=True)
        return "\n".join(["  ".join(padded(*cell) for cell in cells).rstrip(), *(" " * margin + one for one in more)])

    return [click.style(line(names), bold=True), *map(line, body)]


def tables(headings: Sequence[str], rows: Sequence[Sequence[str]], first: int = 1, together: int = 1) -> str:
    """Draw a table. On a terminal that is too narrow, draw several, each starting with the first columns.

    Args:
        first: number of columns that every part begins with.
        together: columns that belong together; the number of other columns is a multiple of it.
    """
    room = columns()
    if room is None or breadth(headings, rows) <= room:
        return table(headings, rows)
    parts, shown = [], first
    while shown < len(headings):
        end = shown + together
        part = ""
        while end <= len(headings):
            wanted = [*range(first), *range(shown, end)]
            cells = [headings[i] for i in wanted], [[row[i] for i in wanted] for row in rows]
            if part and breadth(*cells) > room:
                break
            part, end = table(*cells), end + together
        parts.append(part)
        shown = end - together if part else end
    return "\n\n".join(parts)


def paged(lines: Sequence[str], *, pager: bool = True) -> None:
    """Print lines. Text longer than the terminal's screen goes through a pager (``PAGER``)."""
    if pager and sys.stdout.isatty() and len(lines) >= shutil.get_terminal_size().lines:
        click.echo_via_pager("\n".join(lines))
    else:
        click.echo("\n".join(lines))


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """Show a progress bar on stderr while the block runs, if stderr is a terminal; otherwise print nothing.

    The bar appears with the first report of progress, so that the command can ask a question before.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    bar = _Bar(label)
    try:
        yield bar
    finally:
        bar.stop()


def pause(advance: Progress) -> None:
    """Remove a bar from the screen, before a line is printed during the work."""
    if isinstance(advance, _Bar):
        advance.stop()


class _Bar:
    """A bar, such as ``restoring`` with MiB and a rate; phases by name: ``planning 120/284 checkpoints``."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._began = 0.0

    def __call__(self, done: int, total: int, /) -> None:
        rate = done / max(time.monotonic() - self._began, 1e-3) if self._bar is not None else 0
        text = f"{done / 2**20:,.1f}/{total / 2**20:,.1f} MiB" + (f"  {rate / 2**20:,.0f} MiB/s" if rate else "")
        self._show(self._label, done, total, text)

    def phase(self, name: str, done: int, total: int, unit: str) -> None:
        """Show a phase. See `ckptstore.host.progress.phase`."""
        self._show(name, done, total, f"{done:,}/{total:,} {unit}")
        self._began = time.monotonic()

    def _show(self, label: str, done: int, total: int, text: str) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[text]}")
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(label, total=total, text=text)
            self._began = time.monotonic()
            self._bar.start()
        self._bar.update(self._task, description=label, completed=done, total=total, text=text)

    def stop(self) -> None:
        """Remove the bar from the screen. The next report of progress draws it again."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
