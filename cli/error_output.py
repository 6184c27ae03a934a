"""Reports errors: a line and a hint on stderr, an exit code, and a JSON document with ``--json``."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence

import click

from ckptstore import errors
from ckptstore.cli.closed_pipe import ClosedPipeError
from ckptstore.cli.hints import hint_for

INTERNAL = 70
"""Exit code of an unexpected error, which is a bug (``EX_SOFTWARE`` of sysexits.h)."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""
TERMINATED = 143
"""Exit code after SIGTERM: 128 + SIGTERM."""
CLOSED_PIPE = 141
"""Exit code after the reader of stdout exited (``| head``): 128 + SIGPIPE."""


def report(error: BaseException, arguments: Sequence[str]) -> int:
    """Print `error` as this command line asks for it, and return the exit code.

    With ``--debug`` among `arguments` every exception is raised again. With ``--json`` stdout still gets one
    document: ``{"error": {...}}``.
    """
    if isinstance(error, SystemExit):
        raise error
    # click turns both into an Abort. Prevents: a file that ends too early, reported as "interrupted".
    if isinstance(error, click.exceptions.Abort) and isinstance(error.__cause__, EOFError):
        error = error.__cause__
    if isinstance(error, ClosedPipeError):
        # Redirect stdout to /dev/null. Otherwise the interpreter reports an error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    if "--debug" in arguments and not isinstance(error, click.exceptions.Abort | click.ClickException):
        raise error
    code, message, hint = describe(error)
    color = False if "NO_COLOR" in os.environ else None
    if message:
        _print_stderr(f"{click.style('error:', fg='red', bold=True)} {message}", 7, color)
    if hint:
        _print_stderr(f"{click.style('hint:', bold=True)} {hint}", 6, color)
    if "--json" in arguments and message:
        from ckptstore.cli.output import emit_line

        with contextlib.suppress(OSError):  # stdout itself may have failed (full disk); stderr has the message
            emit_line({"error": {"type": _name(error), "message": message, "hint": hint, "exit_code": code}})
    return code


def _print_stderr(text: str, hanging: int, color: bool | None) -> None:
    from ckptstore.cli.text_wrap import columns, fitted

    with contextlib.suppress(OSError):  # stderr may have failed as well; the exit code still reports the error
        click.echo(fitted(text, columns(err=True), hanging), err=True, color=color)


def describe(error: BaseException) -> tuple[int, str, str | None]:
    """Return the exit code, the one-line message and the hint of any exception."""
    if isinstance(error, click.exceptions.Abort | KeyboardInterrupt):
        return INTERRUPTED, "interrupted", None
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click >= 8.2
        click.echo(str(error), err=True)  # `ckpt` or `ckpt log` without arguments: the help is the message
        return errors.UsageError.exit_code, "", None
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        helps = f"`{context.command_path} --help`" if context else None
        if context and context.info_name == "prune":
            helps = _rules(error.format_message()) or helps
        return error.exit_code, error.format_message(), (getattr(error, "__notes__", None) or [helps])[-1]
    hint = hint_for(error)
    if isinstance(error, errors.CkptError):
        return error.exit_code, _one_line(error), hint
    if isinstance(error, OSError):
        return errors.StorageError.exit_code, _one_line(error), hint
    if isinstance(error, MemoryError):
        return INTERNAL, "out of memory", None
    return INTERNAL, f"unexpected {type(error).__name__}: {error}", "run again with --debug and report the traceback"


def _rules(message: str) -> str | None:
    """Return a hint if rules were passed to `ckpt prune` the way `ckpt keep` takes them."""
    extra = re.match(r"Got unexpected extra arguments? \((.*)\)", message)
    words = extra[1].split() if extra else []
    if not words:
        return None
    from ckptstore.formats.history.rule_windows import kind_of

    if not all(kind_of(word) is not None for word in words):
        return None
    return "pass each rule with its own --keep: " + " ".join(f"--keep {word}" for word in words)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    text = str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)
    return text or type(error).__name__


def _name(error: BaseException) -> str:
    if isinstance(error, click.exceptions.Abort | KeyboardInterrupt):
        return "Interrupted"
    return "UsageError" if isinstance(error, click.UsageError) else type(error).__name__
