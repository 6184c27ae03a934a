"""Names the steps that were not saved: in notes on the error that a call raises, and for several errors at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckptstore.errors import AgentLostError, AgentSilentError, CommitUnknownError
from ckptstore.formats.step_text import named_steps

__all__ = ["by_error", "first_of", "lost_steps", "name_steps", "note_lost"]


def lost_steps(error: BaseException, steps: Sequence[int]) -> str:
    """A text that says that an error stopped these steps."""
    doubted = isinstance(error, CommitUnknownError | AgentLostError | AgentSilentError)
    return f"{named_steps(steps)} {'may or may not have been' if doubted else _was(steps)} saved"


def _was(steps: Sequence[int]) -> str:
    return "was not" if len(steps) == 1 else "were not"


def by_error(failures: Iterable[tuple[int, BaseException]]) -> list[tuple[BaseException, list[int]]]:
    """Each error with the steps that it stopped: those of a batch, or all in flight when a writer ended."""
    stopped: dict[int, tuple[BaseException, list[int]]] = {}
    for step, error in failures:
        stopped.setdefault(id(error), (error, []))[1].append(step)
    return list(stopped.values())


def first_of(failures: Iterable[tuple[int, BaseException]]) -> BaseException:
    """The first error, with notes that name every step of `failures` once."""
    (first, steps), *others = by_error(failures)
    name_steps(first, steps)
    for other, steps in others:
        first.add_note(f"{lost_steps(other, steps)}, either: {other}")
    return first


def name_steps(error: BaseException, steps: Sequence[int]) -> None:
    """Add a note to an error with the steps that it stopped, unless its text names them already."""
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if re.search(rf"{re.escape(named_steps(steps))}\b", said) is None:
        error.add_note(lost_steps(error, steps))


def note_lost(error: BaseException, url: str, lost: BaseException) -> None:
    """Add a note on `lost` to `error`, which the body of a ``with`` raises, so that `lost` does not hide it.

    Args:
        url: the URL of the store.
        lost: the error that closing the writer raised.
    """
    if lost is not error:
        notes = "".join(f"; {note}" for note in getattr(lost, "__notes__", ()))
        error.add_note(f"{url}: closing the writer: {type(lost).__name__}: {lost}{notes}")
