"""Helpers of targets that run kernels: compare both forms, and poison scratch memory that nothing may rely on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptstore.errors import CkptError
from ckptstore.formats import kernel_choice
from ckptstore.formats.codecs import kernels
from tools.fuzz.guard import Violation

__all__ = ["both_forms", "poison"]

_R = TypeVar("_R")


def both_forms(read: Callable[[], _R], refusals: Sequence[type[CkptError]]) -> _R:
    """The result, or error, of `read` with the kernels in use; if these are compiled, the reference must agree.

    Raises:
        Violation: one form refuses what the other reads, or they read different things.
    """
    if kernel_choice.kind() != "compiled":
        return read()
    kernel_choice.use("numpy")
    try:
        found: _R = read()
        refused = ""
    except tuple(refusals) as error:
        refused = type(error).__name__
    finally:
        kernel_choice.use(None)
    try:
        again = read()
    except tuple(refusals) as error:
        if not refused:
            raise Violation(f"the compiled kernels refuse what those in numpy read: {error}") from error
        raise
    if refused or again != found:
        raise Violation(f"the compiled kernels read what those in numpy {'refuse' if refused else 'read otherwise'}")
    return again


def poison() -> None:
    """Fill this thread's scratch memory: its old contents must not show in decoded data."""
    for buffer in vars(kernels._local).values():
        buffer.fill(0xA5)
