"""Arguments and options that several commands share, and the class that gives each command ``--json`` and examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckptstore import Store

__all__ = ["REF", "SIZE", "STEP", "STORE", "TENSOR", "command", "opened", "select_option"]


def command(name: str, *, examples: Sequence[str]) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function the command `name`, with ``--json`` (passed as ``as_json``), ``--debug`` and `examples`."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        for option in (
            click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text."),
        ):
            function = option(function)
        # click lists the option that was added last first; these two belong at the end of the list.
        params: list[Any] = function.__click_params__  # type: ignore[attr-defined]
        params[:] = params[-2:] + params[:-2]
        epilog = "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)
        return click.command(name, epilog=epilog, no_args_is_help=True)(function)

    return decorate


def opened(store: str, *, create: bool = False) -> Store:
    """Open the store at a path or URL; the engine is imported here and not before."""
    import ckptstore

    return ckptstore.open(store, create=create)


def select_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--select GLOB``, which may be given several times; the function receives a tuple."""
    return click.option("--select", multiple=True, metavar="GLOB", help=help_text)


if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic only since click 8.2


class _Store(ParamType):
    name = "store"

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="dir")]


def _typed(ctx: click.Context, position: int) -> str | None:
    """STORE (0) or REF (1) as typed so far. After an option without its value click has not assigned them yet."""
    words = [ctx.params.get("store"), ctx.params.get("ref")] if ctx.params.get("store") else ctx.args
    return words[position] if position < len(words) else None


def _of_store(ctx: click.Context, names: Callable[[Store], list[str]], incomplete: str) -> list[CompletionItem]:
    """Completions that are read from the store already typed; none if it cannot be read."""
    from click.shell_completion import CompletionItem

    from ckptstore.errors import CkptError

    if (store := _typed(ctx, 0)) is None:
        return []
    try:
        found = names(opened(store))
    except (CkptError, OSError):
        return []  # a shell has no place for an error message
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


class _Ref(ParamType):
    name = "REF"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002  # click's signature
        incomplete: str,
    ) -> list[CompletionItem]:
        def refs(store: Store) -> list[str]:
            return ["latest", *(info.ref for info in reversed(store.checkpoints()))]

        return _of_store(ctx, refs, incomplete)


class _Tensor(ParamType):
    name = "NAME"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002  # click's signature
        incomplete: str,
    ) -> list[CompletionItem]:
        return _of_store(ctx, lambda store: list(store.tensors(_typed(ctx, 1) or "latest")), incomplete)


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
            self.fail(f"{value!r} is no size: write 5GB, 500MiB or a number of bytes", param, ctx)
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


STORE = click.argument("store", metavar="STORE", type=_Store())
REF = _Ref()
TENSOR = _Tensor()
SIZE = _Size()
STEP = _Step()
