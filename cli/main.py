"""Defines the ``ckpt`` command group. Imports only click, so that ``ckpt --help`` starts as fast as click does."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click

from ckptstore.cli.closed_pipe import ClosedPipeError
from ckptstore.errors import EXIT_CODES

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Look": {
        "ls": ("ls", "List the runs below a folder: steps, size, age."),
        "log": ("log", "List checkpoints, newest first, with forks as a graph."),
        "inspect": ("inspect", "Show the tensors, the chain and the state of a checkpoint."),
        "diff": ("diff", "Compare two checkpoints tensor by tensor."),
        "watch": ("watch", "Follow a run that is being written."),
        "follow": ("follow", "Fetch each new checkpoint of a run that another process or machine writes."),
        "stats": ("stats", "Show where a store's bytes are, and how it grows."),
    },
    "Check": {
        "verify": ("verify", "Check every byte and hash of a store, or of one checkpoint."),
        "bisect": ("bisect", "Find the checkpoint at which something began."),
        "repair": ("repair", "Make a new store from the intact parts of a damaged one."),
    },
    "Restore, import and copy": {
        "restore": ("restore", "Write a checkpoint to a .safetensors or .pt file, or as a framework reads it."),
        "publish": ("publish", "Keep a folder or a bucket's prefix of weights up to date with a run."),
        "import": ("import_", "Store files and folders of other tools as checkpoints."),
        "copy": ("copy", "Copy checkpoints to another place."),
        "sync": ("sync", "Copy to a second tier what is missing there."),
    },
    "Tag, prune and compact": {
        "tag": ("tag", "Name a checkpoint, or list the tags."),
        "keep": ("keep", "Set which checkpoints a store keeps, or show it."),
        "prune": ("prune", "Retire the checkpoints that no rule keeps."),
        "retire": ("retire", "Give up checkpoints, so that gc may delete them."),
        "compact": ("compact", "Rewrite kept checkpoints, so that bases that are only held can be deleted."),
        "merge": ("merge", "Merge the diffs of a range into one segment."),
        "gc": ("gc", "Delete the segments that nothing needs."),
    },
    "Decide": {
        "analyze": ("analyze", "Estimate the size of checkpoints for each codec and interval."),
        "tune": ("tune", "Choose how often to save, how often to store fulls, how to batch diffs."),
    },
    "The command itself": {
        "doctor": ("doctor", "Report what works on this machine and medium, what is slow, and what to do."),
        "completion": ("completion", "Print the completion script of a shell."),
    },
}
"""Group title -> command -> (module under ``commands/``, first line of its help), as in ``ckpt --help``.

The line is repeated here because the listing must not import the modules. A test compares the two.
"""

COMMANDS: dict[str, tuple[str, str]] = {
    name: described for group in GROUPS.values() for name, described in group.items()
}
"""Command -> (module, first line of its help)."""

_ALIASES: dict[str, str] = {"rm": "retire"}
"""Alias -> command. The command names itself in its help."""

_TRIED: dict[str, str] = {
    "delete": "`ckpt retire` gives up checkpoints; `ckpt gc` frees the space",
    "show": "`ckpt inspect` shows a checkpoint, `ckpt log` the list",
    "list": "`ckpt log` lists the checkpoints of a store, `ckpt ls` the stores below a folder",
    "info": "`ckpt inspect` shows a checkpoint, `ckpt stats` a store",
    "export": "`ckpt restore` writes a checkpoint to a file",
    "load": "`ckpt restore` writes a checkpoint to a file",
    "cp": "`ckpt copy` copies checkpoints to another place",
    "check": "`ckpt verify` checks every byte",
    "fsck": "`ckpt verify` checks every byte, `ckpt repair` makes a store of what is intact",
    "du": "`ckpt stats` shows where the bytes are",
    "squash": "`ckpt merge` puts the diffs of a range into one segment",
}
"""Command names of other tools -> what to use instead."""

_REPORT_DAMAGE = frozenset({"gc", "log", "stats", "watch"})
"""Commands whose own output names damaged slots: they print no warning about them."""

EPILOG = """\b
REF names a checkpoint: latest | STEP | STEP@TERM | tag:NAME
STORE is a path or a URL. If CKPT_STORE is set, it may be omitted before a REF
or at the end, and `-` stands for it anywhere.

\b
Exit codes:
""" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is invoked, and turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Return the names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # click's signature
        """Import and return the command; None if the name is unknown."""
        name = _ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        module = import_module(f"ckptstore.cli.commands.{COMMANDS[name][0]}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, but suggest from `COMMANDS`: no command is registered with click."""
        name = args[0]
        if name in COMMANDS or name in _ALIASES or name.startswith("-"):
            return super().resolve_command(ctx, args)
        if name in _TRIED:
            error = click.UsageError(f"there is no command {name!r}", ctx)
            error.add_note(_TRIED[name])
            raise error
        from difflib import get_close_matches

        close = get_close_matches(name, COMMANDS, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise click.UsageError(f"there is no command {name!r}{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's signature
        """List the commands by group, without importing them."""
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in group.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete command names without importing them."""
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Turns a closed stdout into our own error before click turns it into exit code 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ClosedPipeError from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line. In standalone mode report errors as ``error: message`` and exit with their code."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        arguments = list(sys.argv[1:] if args is None else args)
        if "NO_COLOR" in os.environ:
            extra.setdefault("color", False)
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _remark
                result = super().main(arguments, prog_name, complete_var, False, **extra)
        except BaseException as error:  # noqa: BLE001  # the boundary: every error becomes a line and an exit code
            from ckptstore.cli.error_output import report

            # No error is swallowed: report() raises SystemExit again, and with --debug every error.
            sys.exit(report(error, arguments))
        sys.exit(result if isinstance(result, int) else 0)


def _remark(message: Warning | str, *_where: Any, **_how: Any) -> None:
    """Print a warning without its place in the source: the reader is the user of the command."""
    from ckptstore.cli.output import note
    from ckptstore.host.caller_warnings import DamagedLogWarning

    context = click.get_current_context(silent=True)
    if isinstance(message, DamagedLogWarning) and context is not None and context.info_name in _REPORT_DAMAGE:
        return
    note(str(message))


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        from ckptstore.formats.history.records import MAJOR

        click.echo(f"ckpt {version('ckptstore')} (format {MAJOR})")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    name="ckpt",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    callback=_version,
    expose_value=False,
    is_eager=True,
    help="Print the version, and the format of stores.",
)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def cli() -> None:
    """Inspect, check, restore and fill checkpoint stores.

    \b
    ckpt log runs/gpt                          list the checkpoints
    ckpt restore runs/gpt --out model.safetensors
    """


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    # SystemExit unwinds the stack, so that temporary files are removed. Shells report 143.
    sys.exit(128 + signal.SIGTERM)


def _unraisable(ignored: sys.UnraisableHookArgs) -> None:
    from ckptstore.host import background_threads

    number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(ignored.exc_type)
    if number is None:
        sys.__unraisablehook__(ignored)
    else:
        # Prevents: a command that never ends, because its signal came while a finalizer ran. Python ignores
        # exceptions raised in a finalizer. When the timer fires, the finalizer has returned.
        background_threads.after(0.05, lambda: os.kill(os.getpid(), number))


def open_standard_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed (``>&-``)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Prevents: a file of a store that gets descriptor 1 or 2, so that printed text is written into it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open() returns the lowest free number: this one
        if getattr(sys, name) is None:  # Python marks a closed stream this way; `sys.__stdout__` stays None
            stream = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: SIM115  # until the process ends
            setattr(sys, name, stream)


def heed_signals() -> None:
    """Let SIGTERM end this process as Ctrl-C does, at any point."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.unraisablehook = _unraisable


def main() -> NoReturn:
    """Run the ``ckpt`` script."""
    open_standard_streams()
    heed_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that the terminal cannot show is not an error
    if "_CKPT_COMPLETE" in os.environ:  # a shell asks for completions
        from ckptstore.cli import shell_completion

        shell_completion.register()
    cli.main(prog_name="ckpt")
    raise AssertionError("cli.main exits")
