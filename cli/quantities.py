"""Quantities with units as options: times, amounts of bytes, bandwidths."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic only since click 8.2

__all__ = ["AMOUNT", "RATE", "TIME", "Typed"]


class Typed(float):
    """A quantity that remembers how it was typed."""

    text: str


class _Quantity(ParamType):
    """A quantity with its unit, parsed by a function of `ckptstore.tuning.quantity_units`."""

    def __init__(self, name: str, parser: str) -> None:
        self.name = name
        self._parser = parser

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from ckptstore.errors import UsageError
        from ckptstore.tuning import quantity_units

        if isinstance(value, float):
            return value
        parse: Callable[[str], float] = getattr(quantity_units, self._parser)
        try:
            found = Typed(parse(str(value)))
        except UsageError as error:
            self.fail(str(error), param, ctx)
        found.text = str(value)
        return found


TIME, AMOUNT, RATE = _Quantity("TIME", "seconds"), _Quantity("SIZE", "nbytes"), _Quantity("RATE", "bandwidth")
"""``500ms``; ``5GB``, 0 allowed; ``10Gbit/s``."""
