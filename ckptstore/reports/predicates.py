"""Makes predicates for ``bisect``: a Python expression on the tensors, a shell command on a file of the checkpoint."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptstore.errors import CheckpointNotFoundError, CkptError, CorruptionError, UsageError
from ckptstore.formats.history.records import CheckpointEntry
from ckptstore.reports.bisection import Answer, Ask, Predicate

__all__ = ["Export", "commanded", "expression", "not_finite", "tensors_of"]

Export = Callable[[str, str], object]
"""Writes the checkpoint of a REF to a file: called with the REF and the path."""
SKIP: Final = 125
_SIGNALLED: Final = 128


def tensors_of(state: Any) -> dict[str, Any]:
    """Return every array of a numpy state, by its keys joined with dots."""
    return dict(_arrays(state, ()))


def _arrays(node: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, np.ndarray):
        yield ".".join(keys), node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _arrays(value, (*keys, str(key)))
    elif isinstance(node, list | tuple):
        for number, value in enumerate(node):
            yield from _arrays(value, (*keys, str(number)))


def not_finite(state: Any) -> bool:
    """Tell whether a tensor of a numpy state has a NaN or an infinity."""
    return any(_is_not_finite(array) for array in tensors_of(state).values())


def _is_not_finite(array: Any) -> bool:
    try:
        return not bool(np.isfinite(array).all())
    except TypeError:  # a dtype without NaN and infinity
        return False


def expression(text: str) -> Predicate:
    """Make a predicate of a Python expression: true is bad, None skips the checkpoint.

    The expression can use ``tensors`` (name -> array), ``state`` (as it was saved, with numpy arrays), and ``np``.

    Raises:
        UsageError: `text` is not an expression. The predicate raises it, too, if the evaluation raises an exception.
    """
    try:
        code = compile(text, "--expr", "eval")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{text!r} is not a Python expression: {error}") from error

    def predicate(state: Any) -> bool | None:
        names = {"np": np, "state": state, "tensors": tensors_of(state)}
        try:
            found = eval(code, names)  # noqa: S307  # the user's own code, as a shell command is
            return None if found is None else bool(found)
        except CkptError:
            raise
        except SystemExit as error:
            raise UsageError(f"{text!r} ends the process; the expression has to be true or false") from error
        except Exception as error:
            raise UsageError(f"{text!r} raised {type(error).__name__}: {error}") from error

    return predicate


def commanded(command: str, export: Export) -> Ask:
    """Make an `Ask` of a shell command, which gets a safetensors file of the checkpoint as ``$1``.

    The command exits with 0 for good, 125 to skip the checkpoint, another code up to 127 for bad, as for
    ``git bisect run``.

    Args:
        export: writes the file. It is removed when the command has ended.
    """

    def ask(entry: CheckpointEntry) -> tuple[Answer, str]:
        with tempfile.TemporaryDirectory(prefix="ckpt-bisect-") as folder:
            path = str(Path(folder) / f"step-{entry.step}.safetensors")
            try:
                export(entry.ref, path)
            except (CorruptionError, CheckpointNotFoundError) as error:
                return "skipped", str(error)
            environment = {**os.environ, "CKPT_FILE": path, "CKPT_REF": entry.ref, "CKPT_STEP": str(entry.step)}
            done = subprocess.run(["/bin/sh", "-c", command, "ckpt", path], env=environment, check=False)
        if done.returncode == SKIP:
            return "skipped", f"the command exited with {SKIP}"
        if not 0 <= done.returncode < _SIGNALLED:
            raise UsageError(
                f"{command!r} exited with {done.returncode} on {entry.ref}: it was killed, or asked to stop"
            )
        return ("bad" if done.returncode else "good"), ""

    return ask
