"""Writes and reads optimizer updates: numbers in the message, gradients in a buffer beside the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ckptstore.agent.protocol.message_fields import StateLayout, number, number_form, whole_number
from ckptstore.errors import AgentError
from ckptstore.formats import dtypes
from ckptstore.formats.optim import KINDS, Optimizer, SparseGradient, Step, listed
from ckptstore.formats.sources import NumpySource, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.write.capture.snapshot import HostTensor
from ckptstore.write.steps.updates import Update, arrived

__all__ = ["Packed", "read_updates", "updates_form"]

_LINE: Final = 128
_MOST_SLOTS: Final = 16


class Packed:
    """Tensors placed one after another in memory without a layout.

    Attributes:
        nbytes: bytes used so far.
        pieces: source and first byte of each.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.pieces: list[tuple[TensorSource, int]] = []

    def put(self, source: TensorSource) -> list[Any]:
        """Add one tensor -> its dtype, shape and first byte, as JSON."""
        start = self.nbytes
        self.pieces.append((source, start))
        self.nbytes = -(-(start + source.nbytes) // _LINE) * _LINE
        return [source.dtype, list(source.shape), start]

    def copies(self, memory: Bytes) -> list[tuple[TensorSource, Bytes]]:
        """The copies to make: each source with its destination in `memory`."""
        return [(source, memory[start : start + source.nbytes]) for source, start in self.pieces]


def updates_form(updates: Sequence[Update], layout: StateLayout, packed: Packed) -> dict[str, Any]:
    """Updates as JSON. Settings and numbers that several parameters share appear once.

    Args:
        layout: of the state; a slot is written as its position in it.
        packed: takes the gradients.

    Raises:
        KeyError: the state does not have a slot.
    """
    optimizers: dict[Optimizer, int] = {}
    steps: dict[Step, int] = {}
    rows = [
        [
            [layout.numbers[slot] for slot in update.slots],
            optimizers.setdefault(update.optimizer, len(optimizers)),
            steps.setdefault(update.step, len(steps)),
            _gradient_form(arrived(update.gradient), packed),
        ]
        for update in updates
    ]
    return {
        "optimizers": [_settings_form(one) for one in optimizers],
        "steps": [
            [one.count, *map(number_form, (one.lr, one.clip, one.loss_scale)), one.skipped, number_form(one.scale)]
            for one in steps
        ],
        "rows": rows,
    }


def _settings_form(optimizer: Optimizer) -> dict[str, Any]:
    kind = next((name for name, kind in KINDS.items() if kind.settings is type(optimizer)), None)
    if kind is None:
        raise AgentError(f"{type(optimizer).__name__}: an agent supports {listed()}")
    values = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(KINDS[kind].settings)}
    return {"kind": kind} | {
        name: value if isinstance(value, bool) else number_form(value) for name, value in values.items()
    }


def _gradient_form(gradient: TensorSource | SparseGradient | None, packed: Packed) -> list[Any] | None:
    if gradient is None:
        return None
    if isinstance(gradient, SparseGradient):
        indices = packed.put(NumpySource(np.ascontiguousarray(gradient.indices)))
        values = packed.put(NumpySource(np.ascontiguousarray(gradient.values)))
        return ["sparse", indices, values, gradient.size]
    return ["dense", packed.put(gradient)]


def read_updates(form: Any, layout: StateLayout, memory: Bytes) -> list[Update]:
    """Read updates; their gradients are views of `memory`.

    Raises:
        AgentError, ValueError, TypeError, LookupError: the form is invalid.
    """
    optimizers = [_settings(one) for one in form["optimizers"]]
    steps = [
        Step(whole_number(count), number(lr), number(clip), number(loss_scale), bool(skipped), *map(number, scale))
        for count, lr, clip, loss_scale, skipped, *scale in form["steps"]
    ]
    found = []
    for slots, optimizer, step, gradient in form["rows"]:
        if not isinstance(slots, list) or not 0 < len(slots) <= _MOST_SLOTS:
            raise AgentError(f"slots {slots!r:.80}")
        names = tuple(layout.tensors[whole_number(slot, len(layout.tensors) - 1)].name for slot in slots)
        found.append(
            Update(
                names,
                optimizers[whole_number(optimizer, len(optimizers) - 1)],
                steps[whole_number(step, len(steps) - 1)],
                _gradient(gradient, memory),
            )
        )
    return found


def _settings(form: Any) -> Optimizer:
    values: dict[str, Any] = {
        name: value if isinstance(value, bool) else number(value) for name, value in form.items() if name != "kind"
    }
    return KINDS[form["kind"]].settings(**values)


def _gradient(form: Any, memory: Bytes) -> TensorSource | SparseGradient | None:
    if form is None:
        return None
    if form[0] == "sparse":
        _, indices, values, size = form
        return SparseGradient(_array(indices, memory), _array(values, memory), whole_number(size))
    if form[0] != "dense":
        raise AgentError(f"a gradient {form[0]!r:.20}")
    dtype, shape, start = form[1]
    dense: HostTensor = _piece(dtype, shape, start, memory, HostTensor)
    return dense


def _array(form: Any, memory: Bytes) -> Any:
    dtype, shape, start = form
    return _piece(dtype, shape, start, memory, lambda source, image: image.view(dtypes.get(source.dtype).numpy))


@dataclasses.dataclass(frozen=True, slots=True)
class _GradientPiece:
    """The members that `HostTensor` needs of a source."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    origin: str = "numpy"


def _piece(dtype: Any, shape: Any, start: Any, memory: Bytes, make: Callable[[Any, Bytes], Any]) -> Any:
    sizes = tuple(whole_number(size) for size in shape)
    nbytes = dtypes.nbytes(dtypes.get(str(dtype)), sizes)
    first = whole_number(start)
    if first % _LINE or first + nbytes > len(memory):
        raise AgentError(f"a gradient at bytes {first} to {first + nbytes} of {len(memory)}")
    return make(_GradientPiece(str(dtype), sizes, nbytes), memory[first : first + nbytes])
