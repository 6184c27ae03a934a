"""Runs a target once and checks it: only our errors may leave it, in time, and with bounded memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import CkptError, CorruptionError, FormatError

__all__ = ["Outcome", "Target", "Violation", "attempt"]

SECONDS: Final = 10.0
"""Limit of CPU time for one input of at most 64 KiB (they take milliseconds; wall time depends on the machine)."""
MEMORY: Final = 24 << 20
"""Limit of bytes that reading may allocate beyond the allowance for the input's length."""
PER_BYTE: Final = 400
"""Limit of bytes that reading may allocate for each byte of input (objects of small JSON numbers cost most)."""


class Violation(AssertionError):  # noqa: N818  # the usual term
    """An input was neither refused with our own error nor read correctly."""


@dataclass(frozen=True, slots=True)
class Target:
    """A reader of unchecked bytes.

    Attributes:
        name: of the target, its corpus and its regression files.
        run: reads the input -> whether it was accepted. Raises `Violation` if the result is wrong.
        seeds: valid inputs.
        refusals: the errors that it may raise.
        declared: bytes that an input may request within the declared limits, whatever its length.
    """

    name: str
    run: Callable[[bytes], bool]
    seeds: Callable[[], list[bytes]]
    refusals: tuple[type[CkptError], ...] = (FormatError, CorruptionError)
    declared: Callable[[bytes], int] = lambda _: 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run: accepted or refused, and the error's text."""

    accepted: bool
    error: str


def attempt(target: Target, data: bytes, *, memory: bool = False) -> Outcome:
    """Run `target` on `data`.

    Args:
        memory: measure allocations, too; several times slower.

    Raises:
        Violation: another error, too slow, too much memory, or wrong data.
    """
    if memory:
        tracemalloc.start()
    begin = time.process_time()
    try:
        accepted, error = target.run(data), ""
    except Violation:
        raise
    except target.refusals as refused:
        accepted, error = False, f"{type(refused).__name__}: {refused}"
        _check_message(refused)
    except Exception as foreign:
        raise Violation(f"{target.name}: {type(foreign).__name__}: {foreign!s:.300}") from foreign
    finally:
        peak = tracemalloc.get_traced_memory()[1] if memory else 0
        if memory:
            tracemalloc.stop()
    seconds = time.process_time() - begin
    if seconds > SECONDS:
        raise Violation(f"{target.name}: took {seconds:.1f} s of CPU time")
    if peak > (allowed := MEMORY + PER_BYTE * len(data) + target.declared(data)):
        raise Violation(f"{target.name}: allocated {peak} bytes for {len(data)} of input, {allowed} are allowed")
    return Outcome(accepted, error)


def _check_message(refused: CkptError) -> None:
    """A message for people must not be as long as the input."""
    if len(str(refused)) > 20_000:
        raise Violation(f"an error message of {len(str(refused))} characters: {str(refused)[:200]}")
