"""Defines the arguments and options that several commands share, and adds ``--json`` and examples to each command.

**Where STORE comes from.** STORE is the first argument. If ``CKPT_STORE`` is set, STORE may be omitted in two cases:
no other argument is given, or the first argument is *written* like a REF (for ``merge``: like a range) and the command
takes a REF (a range) next. The decision depends only on the text, never on which files exist: a folder named ``100``
is written ``./100``. ``-`` stands for ``CKPT_STORE`` everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from ckptstore.cli.ref_syntax import LIKE_A_RANGE, LIKE_A_REF

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckptstore import Store

__all__ = [
    "DEFAULT_STORE",
    "PLACE",
    "RANGE",
    "REF",
    "RULE",
    "SIZE",
    "STEP",
    "STORE",
    "STORE_OR_NOTHING",
    "TAG",
    "TENSOR",
    "answer_options",
    "command",
    "opened",
    "select_option",
]

DEFAULT_STORE: Final = "CKPT_STORE"
"""The environment variable that names the default store."""


class _Command(click.Command):
    """A command that can take STORE from the environment."""

    examples: Sequence[str] = ()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's signature
        """Write the examples, in lines that fit the terminal and can be pasted."""
        with formatter.section("Examples"):
            indent = " " * formatter.current_indent
            for example in self.examples:
                for line in _example(example, formatter.width - len(indent)):
                    formatter.write(f"{indent}{line}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments as click does, after inserting STORE if it was omitted."""
        store = os.environ.get(DEFAULT_STORE)
        arguments = [param for param in self.params if isinstance(param, click.Argument)]
        if store and arguments and isinstance(arguments[0].type, _Store) and self._left_out(ctx, args, arguments[1:]):
            args = [store, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Invoke the command as click does. Keeps the typed arguments for the hint of an error."""
        from ckptstore.cli.hints import TYPED

        TYPED.set(dict(ctx.params))
        if "take_over" in ctx.params:
            from ckptstore.cli.output import tell_asked
            from ckptstore.log.change_committer import ASKED

            token = ASKED.set(tell_asked)
            try:
                return super().invoke(ctx)
            finally:
                ASKED.reset(token)
        return super().invoke(ctx)

    def _left_out(self, ctx: click.Context, args: Sequence[str], rest: Sequence[click.Argument]) -> bool:
        words = self._words(ctx, args)
        like = {id(REF): LIKE_A_REF, id(RANGE): LIKE_A_RANGE}.get(id(rest[0].type)) if rest else None
        if not words:  # completing the first word: offer folders unless the next argument is a REF or a range
            return words is not None and (like is not None or not ctx.resilient_parsing)
        return like is not None and like.match(words[0]) is not None

    def _words(self, ctx: click.Context, args: Sequence[str]) -> list[str] | None:
        """Return the arguments among `args` without the options; None if they do not parse (click reports why)."""
        options = click.Command(
            self.name, params=[one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        )
        options.add_help_option = False
        try:
            return options.make_parser(ctx).parse_args(list(args))[1]
        except click.UsageError:
            return None


def _example(example: str, room: int) -> Iterator[str]:
    """Yield the lines of an example: the remark above the command, wrapped at `room` columns before an option."""
    line, _, remark = example.partition("  # ")
    if len(example) <= room:
        yield example
        return
    if remark:
        yield f"# {remark}"
    line = line.rstrip()
    while len(line) > room and (end := line.rfind(" --", 1, room - 2)) > 0:
        yield f"{line[:end]} \\"
        line = f"   {line[end:]}"
    yield line


def command(
    name: str, *, examples: Sequence[str], alone: bool = False
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function the command `name`, with ``--json`` (passed as ``as_json``), ``--debug`` and `examples`.

    Without arguments the command prints its help, unless `alone` is True.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        for option in (
            click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text."),
        ):
            function = option(function)
            # click lists the option added last first. Move these two to the end of the list.
        params: list[Any] = function.__click_params__  # type: ignore[attr-defined]
        params[:] = params[-2:] + params[:-2]
        epilog = "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)  # for man pages
        made = click.command(name, cls=_Command, epilog=epilog, no_args_is_help=not alone)(function)
        made.examples = examples
        return made

    return decorate


def opened(store: str, *, create: bool = False) -> Store:
    """Open the store at a path or URL. The engine is imported here, not earlier, so that ``--help`` stays fast."""
    import ckptstore

    return ckptstore.open(store, create=create)


def select_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``--select GLOB``. It may be given several times; the function receives a tuple."""
    return click.option("--select", multiple=True, metavar="GLOB", help=help_text)


def answer_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--take-over`` and ``--timeout``, for commands that change the log while a run may be writing."""
    for option in (
        click.option(
            "--timeout",
            type=click.FloatRange(min=0),
            default=60.0,
            metavar="SECONDS",
            help="How long to wait for the writing run's answer. Default: 60.",
        ),
        click.option(
            "--take-over",
            is_flag=True,
            help="No run is writing: commit here. Opens a new term, which stops a run that is writing after all.",
        ),
    ):
        function = option(function)
    return function


if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic since click 8.2


def _places(incomplete: str) -> list[CompletionItem]:
    """Complete folders, and URL schemes if no folder name starts that way. Does not list buckets."""
    from pathlib import Path

    from click.shell_completion import CompletionItem

    from ckptstore.backends.schemes import SCHEMES

    if "://" in incomplete:
        return []
    schemes = [f"{name}://" for name in SCHEMES if f"{name}://".startswith(incomplete)] if len(incomplete) > 1 else []
    if schemes and not any(Path().glob(f"{incomplete.rstrip(':/')}*")):
        return [CompletionItem(scheme) for scheme in schemes]
    return [CompletionItem(incomplete, type="dir")]


class _PlaceParam(ParamType):
    """A path or URL, existing or to be created."""

    name = "place"

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        return _places(incomplete)


class _Store(ParamType):
    name = "store"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value != "-":
            return str(value)
        store = os.environ.get(DEFAULT_STORE)
        if not store:
            self.fail(f"'-' stands for {DEFAULT_STORE}, which is not set", param, ctx)
        return store

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        return _places(incomplete)


def _typed(ctx: click.Context, position: int) -> str | None:
    """Return STORE (0) or REF (1) as typed so far. click has not assigned them yet after an option without a value."""
    words = [ctx.params.get("store"), ctx.params.get("ref")] if ctx.params.get("store") else ctx.args
    word = words[position] if position < len(words) else None
    return os.environ.get(DEFAULT_STORE) if word == "-" and not position else word


def _of_store(ctx: click.Context, names: Callable[[Store], list[str]], incomplete: str) -> list[CompletionItem]:
    """Return completions read from the store typed before; none if that store cannot be read."""
    from click.shell_completion import CompletionItem

    from ckptstore.errors import CkptError

    if (store := _typed(ctx, 0)) is None:
        return []
    try:
        found = names(opened(store))
    except (CkptError, OSError):
        return []  # shell completion cannot show an error message
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


class _InStore(ParamType):
    """The name of something in the store typed before. The shell completes it."""

    def __init__(self, name: str, names: Callable[[click.Context, Store], Iterable[str]]) -> None:
        self.name = name
        self._names = names

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002  # click's signature
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        if self is REF and "/" in incomplete:  # with CKPT_STORE set, this may also be a STORE
            return [CompletionItem(incomplete, type="dir")]
        return _of_store(ctx, lambda store: list(self._names(ctx, store)), incomplete)


def _refs(_: click.Context, store: Store) -> Iterable[str]:
    return ["latest", *(f"tag:{name}" for name in store.tags()), *(info.ref for info in reversed(store.checkpoints()))]


class _Range(ParamType):
    """``A..B``: completes A with the dots first, then B."""

    name = "A..B"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002  # click's signature
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        if "/" in incomplete:  # with CKPT_STORE set, this may also be a STORE
            return [CompletionItem(incomplete, type="dir")]
        first, dots, _ = incomplete.partition("..")
        if dots:
            return _of_store(ctx, lambda store: [f"{first}..{ref}" for ref in _refs(ctx, store)], incomplete)
        return _of_store(ctx, lambda store: [f"{ref}.." for ref in _refs(ctx, store) if ref != "latest"], incomplete)


_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {"ki": 2**10, "mi": 2**20, "gi": 2**30}


class _Size(ParamType):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower().removesuffix("b")
        digits = text.rstrip("kmgti ")
        try:
            amount = float(digits) * _UNITS[text[len(digits) :].strip()]
        except (ValueError, KeyError):
            self.fail(f"{value!r} is not a size: write 5GB, 500MiB or a number of bytes", param, ctx)
        if not 1 <= amount < 2**63:
            self.fail(f"{value!r} is out of range", param, ctx)
        return int(amount)


class _Step(ParamType):
    name = "STEP"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        text = str(value)
        if text == "auto":
            return "auto"
        if not text.isdecimal():
            self.fail(f"{text!r} is neither a step nor 'auto'", param, ctx)
        return int(text)


class _Rule(ParamType):
    """A retention rule. The shell completes its name."""

    name = "RULE"

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from ckptstore.formats.history.rule_windows import RULES

        known = (f"{name}:" if ":" in kind.form else name for name, kind in RULES.items())
        return [CompletionItem(rule) for rule in known if rule.startswith(incomplete)]


STORE = click.argument("store", metavar="STORE", type=_Store())
STORE_OR_NOTHING = click.argument("store", metavar="[STORE]", type=_Store(), required=False)
PLACE = _PlaceParam()
"""A path or URL: a folder, another store, or the target of a copy."""
REF = _InStore("REF", _refs)
RANGE = _Range()
RULE = _Rule()
TAG = _InStore("NAME", lambda _, store: store.tags())
TENSOR = _InStore("NAME", lambda ctx, store: store.tensors(_typed(ctx, 1) or "latest"))
SIZE = _Size()
STEP = _Step()
