"""The forms of the hot kernels: numpy, and compiled for each instruction set that this processor has."""

from __future__ import annotations

import importlib.util
from typing import Final

import pytest

from ckptstore.formats import kernel_choice

__all__ = ["BUILT", "FORMS", "KINDS", "SETS", "needs_core", "use_form"]

_CORE: Final = importlib.util.find_spec(kernel_choice.CORE) is not None
needs_core = pytest.mark.skipif(not _CORE, reason="the kernels are not compiled: python native/core_build.py says why")
"""Marks tests of compiled kernels."""


def _sets() -> tuple[str, ...]:
    if not _CORE:
        return ("baseline",)
    from ckptstore.formats import core

    return core.sets()


SETS: Final = [pytest.param(name, marks=needs_core) for name in _sets()]
"""The instruction sets, the best one last."""
KINDS: Final = ["numpy", pytest.param("compiled", marks=needs_core)]
FORMS: Final = ["numpy", *SETS]
BUILT: Final = ("numpy", "compiled") if _CORE else ("numpy",)
"""The kinds that can be used here: for a test that tries them one after the other."""


def use_form(form: str | None) -> None:
    """Run kernels in a form of `KINDS` or `FORMS`; None: as the environment says, for the best instruction set."""
    named = form not in (None, *kernel_choice.KINDS)
    kernel_choice.use("compiled" if named else form)
    if _CORE:
        from ckptstore.formats import core

        core.select(form if form is not None and named else core.sets()[-1])
