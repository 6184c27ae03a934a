"""One object of a script beside its part of a checkpoint: what differs, what fits, how it is given back.

Everything is compared before anything is restored (`resuming`). Tensors of a checkpoint may be described only, by a
`TensorEntry`: what is compared is of what dtype and shape they are.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ckptstore.formats.segment import TensorEntry
from ckptstore.frameworks.torch_tensors import torch_dtype

__all__ = ["Fit", "Member", "Undo", "castable", "described_form", "form_of", "some"]

Undo = Callable[[], None]
"""Puts an object back as it was."""


class Fit(Protocol):
    """An object and its part of a checkpoint, compared.

    Attributes:
        part: of which part of the state it is: ``model``, ``optimizer``, ...
        path: the place of it in the state, for people.
        differences: why the whole of it cannot be restored; each names a path.
        casts: tensors whose dtype changes, as (path, before, after).
        foreign: restoring it calls code that may raise.
    """

    part: str
    path: str
    differences: list[str]
    casts: list[tuple[str, torch.dtype, torch.dtype]]
    foreign: bool

    def remember(self) -> Undo | None:
        """What puts the object back as it is now; None: nothing can."""

    def put(self) -> None:
        """Restore what fits."""


class Member:
    """Any other object with a state: a scaler, a loader, a generator, whatever is in ``extra``.

    Attributes:
        state: the checkpoint's.
        get: what reads the object's now, without changing anything; None: nothing does.
    """

    def __init__(
        self,
        path: str,
        state: Any,
        get: Callable[[], Any] | None,
        put: Callable[[Any], Any],
        *,
        differences: Sequence[str] = (),
        foreign: bool = True,
    ) -> None:
        """
        Args:
            state, get: see `Member`.
            differences: with any, it is left alone.
        """
        self.part = path.partition("[")[0].partition(".")[0]
        self.path = path
        self.differences = list(differences)
        self.casts: list[tuple[str, torch.dtype, torch.dtype]] = []
        self.foreign = foreign
        self.state = state
        self.get = get
        self._put = put

    def remember(self) -> Undo | None:
        """See `Fit`."""
        if self.get is None:
            return None
        try:
            before, put = copy.deepcopy(self.get()), self._put
        except Exception:  # noqa: BLE001  # of an object of the script's own; it is restored all the same
            return None
        return lambda: put(before)

    def put(self) -> None:
        """See `Fit`."""
        if not self.differences:
            self._put(self.state)


def form_of(value: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Dtype and shape of a tensor, or of the entry that describes one; None: it is neither, or has no shape yet."""
    if isinstance(value, TensorEntry):
        return torch_dtype(value.dtype), tuple(value.shape)
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return value.dtype, tuple(value.shape)


def described_form(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    """``float32 [3, 4]``"""
    return "no tensor" if form is None else f"{str(form[0]).removeprefix('torch.')} {list(form[1])}"


def castable(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether numbers of one dtype are about the same in the other: no fraction and no imaginary part is cut off."""
    if before.is_complex:
        return after.is_complex
    if before.is_floating_point:
        return after.is_floating_point or after.is_complex
    return after != torch.bool or before == torch.bool


def some(said: Sequence[str], most: int = 8) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(said) - most} more" if len(said) > most else ""
    return ", ".join(itertools.islice(said, most)) + more
