"""Compares one object of a script with its part of a checkpoint, and restores it.

Everything is compared before anything is restored (`resume_checks`). A `TensorEntry` may stand for a tensor of the
checkpoint: then only dtypes and shapes are compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.frameworks.torch_tensors import torch_dtype

__all__ = ["Fit", "PartFit", "Undo", "described_form", "form_of", "some", "uncastable"]

Undo = Callable[[], None]
"""Restores the state that an object had before."""


class Fit(Protocol):
    """An object and its part of a checkpoint, compared.

    Attributes:
        part: the part of the state that it belongs to: ``model``, ``optimizer``, ...
        path: its path in the state, for messages.
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
        """A function that undoes `put`; None: it cannot be undone."""

    def put(self) -> None:
        """Restore what fits."""


class PartFit:
    """Any other object with a state: a scaler, a loader, a generator, an object in ``extra``.

    Attributes:
        state: the checkpoint's.
        get: reads the object's current state without changing it; None: nothing can.
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
            state, get: see `PartFit`.
            differences: if there are any, the object is not restored.
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
        except Exception:  # noqa: BLE001  # raised by the script's own class; it is restored all the same
            return None
        return lambda: put(before)

    def put(self) -> None:
        """See `Fit`."""
        if not self.differences:
            self._put(self.state)


def form_of(value: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Dtype and shape of a tensor or of an entry that describes one; None: it is neither, or has no shape yet."""
    if isinstance(value, TensorEntry):
        return torch_dtype(value.dtype), tuple(value.shape)
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return value.dtype, tuple(value.shape)


def described_form(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    """``float32 [3, 4]``"""
    return "no tensor" if form is None else f"{_name(form[0])} {list(form[1])}"


def uncastable(value: Any, after: torch.dtype) -> str:
    """Why a checkpoint's tensor cannot be cast to a dtype, for messages; empty: it loses only precision.

    Args:
        value: a tensor of any shape, or an entry that describes one, of which only the dtype is compared.
    """
    form = form_of(value)
    if form is None or form[0] == after:
        return ""
    if not _castable(form[0], after):
        return f"{described_form(form)} in the checkpoint cannot become {_name(after)}"
    # Prevents: 500 that becomes -12 in int8, and 1e6 that becomes infinite in float16.
    lost = _beyond(value, after) if isinstance(value, torch.Tensor) and value.numel() else 0
    if not lost:
        return ""
    return (
        f"{described_form(form)} in the checkpoint cannot become {_name(after)}: {lost} of {value.numel()} values are "
        "too large for it"
    )


def _castable(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast keeps numbers approximately: it cuts off no fraction and no imaginary part."""
    if before.is_complex:
        return after.is_complex
    if before.is_floating_point:
        return after.is_floating_point or after.is_complex
    return after != torch.bool or before == torch.bool


def _beyond(value: torch.Tensor, after: torch.dtype) -> int:
    """How many values are outside a dtype's range: integers that would wrap, finite numbers that would be infinite.

    The smallest and the largest finite number of a float dtype do not count: masks use them for the infinities. They
    become what `torch.Tensor.to` makes of them.
    """
    value = value.detach()
    value = value if value.layout == torch.strided else value.to_dense()
    if after.is_floating_point or after.is_complex:
        lost = _is_finite(value) != _is_finite(value.to(after))
        if after.itemsize == 1:  # for 8 bits torch saturates at the largest number instead
            lost |= _is_finite(value) & (value.float().abs() > torch.finfo(after).max)
        return int((lost & ~_is_mask(value, after)).sum())
    if value.dtype == torch.bool:
        return 0
    low, high = torch.iinfo(after).min, torch.iinfo(after).max
    numbers = value.cpu().numpy()  # torch compares no uint16, uint32 and uint64
    return int(((numbers < low) | (numbers > high)).sum())


def _is_mask(value: torch.Tensor, after: torch.dtype) -> torch.Tensor:
    """Where the value is the smallest or the largest number, and the other dtype can represent a similar one."""
    if not value.is_floating_point():
        return torch.zeros(value.shape, dtype=torch.bool, device=value.device)
    limits = torch.finfo(value.dtype)
    wide = value.float() if value.itemsize < 4 else value  # torch compares nothing in 8 bits
    return ((wide == limits.min) | (wide == limits.max)) & ~value.to(after).float().isnan()


def _is_finite(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
        return _is_finite(value).all(-1)
    # torch has no isfinite for 8 bits
    return (value.float() if value.is_floating_point() and value.itemsize < 4 else value).isfinite()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def some(said: Sequence[str], most: int = 8) -> str:
    """The first `most` of them, and how many more there are."""
    more = f" and {len(said) - most} more" if len(said) > most else ""
    return ", ".join(itertools.islice(said, most)) + more
