"""Writes and reads the members of messages as JSON: layouts, options, checkpoints, errors, labels.

Reading trusts nothing: every value is checked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

from ckptstore import errors
from ckptstore.errors import AgentError, CkptError, UsageError
from ckptstore.formats import dtypes
from ckptstore.formats.codecs import Policy
from ckptstore.formats.history import metadata as metadata_format
from ckptstore.formats.kernel_choice import KernelWarning
from ckptstore.formats.sources import Origin, place_of
from ckptstore.formats.states.state import TensorSource
from ckptstore.host import caller_warnings
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.segments.aligned_regions import RegionPlan, plan_regions
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.saves.ledger import Labels
from ckptstore.write.writer_options import WriterOptions

__all__ = [
    "StateLayout",
    "TensorForm",
    "error_form",
    "info_form",
    "labels_form",
    "number",
    "number_form",
    "options_form",
    "read",
    "read_error",
    "read_info",
    "read_labels",
    "read_layout",
    "read_options",
    "read_warning",
    "texts",
    "warning_form",
    "whole_number",
]

_T = TypeVar("_T")
_MOST: Final = 1 << 46
"""Most bytes of a state, and of one tensor."""


def read(what: str, body: Any, make: Callable[[Any], _T]) -> _T:
    """Return `make(body)` for a part of a message. Raises `AgentError` if the part is invalid in any way."""
    try:
        return make(body)
    except AgentError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, CkptError) as error:
        raise AgentError(f"{what}: {body!r:.200}: {error}") from error


def whole_number(value: Any, most: int = 1 << 53) -> int:
    """Check a whole number from 0 to `most`. Raises `AgentError`."""
    if type(value) is not int or not 0 <= value <= most:
        raise AgentError(f"{value!r:.80} in place of a whole number up to {most}")
    return value


def number_form(value: float) -> float | str:
    """A number as JSON; infinities and NaN, which JSON lacks, become texts."""
    number = float(value)
    return number if math.isfinite(number) else repr(number)


def number(value: Any) -> float:
    """Read a number. Raises `AgentError`."""
    if type(value) in (int, float) or value in ("nan", "inf", "-inf"):
        return float(value)
    raise AgentError(f"{value!r:.80} in place of a number")


# -- layouts


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor without its bytes; `global_shape` and `offset` are those of a shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    origin: Origin
    global_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its image."""
        return dtypes.nbytes(dtypes.get(self.dtype), self.shape)

    def row(self) -> list[Any]:
        """Its form as JSON."""
        return [
            self.name,
            self.dtype,
            list(self.shape),
            self.origin,
            None if self.global_shape is None else list(self.global_shape),
            None if self.offset is None else list(self.offset),
        ]


@dataclass(frozen=True)
class StateLayout:
    """The tensors of a state in access order, and where they are in a buffer."""

    tensors: tuple[TensorForm, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, TensorSource]) -> StateLayout:
        """The layout of the tensors of a flattened state."""
        return cls(
            tuple(
                TensorForm(name, source.dtype, tuple(source.shape), source.origin, *place_of(source))
                for name, source in tensors.items()
            )
        )

    @cached_property
    def plan(self) -> RegionPlan:
        """Where the tensors are: as in the segments that will be written."""
        return plan_regions(
            tuple((one.name, one.dtype, one.shape, one.global_shape, one.offset) for one in self.tensors)
        )

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Position of each tensor, by name."""
        return {one.name: number for number, one in enumerate(self.tensors)}

    def rows(self) -> list[Any]:
        """Its form as JSON."""
        return [one.row() for one in self.tensors]


def read_layout(rows: Any) -> StateLayout:
    """Read a layout. Raises `AgentError`: a name twice, an unknown dtype, an impossible size."""
    found: list[TensorForm] = []
    for row in rows if isinstance(rows, list) else [rows]:
        name, dtype, shape, origin, global_shape, offset = row
        if type(name) is not str or origin not in ("torch", "numpy"):
            raise AgentError(f"tensor {name!r:.80} of {origin!r:.20}")
        sizes = _sizes(shape)
        whole = None if global_shape is None else _sizes(global_shape)
        found.append(TensorForm(name, str(dtype), sizes, origin, whole, None if offset is None else _sizes(offset)))
        if found[-1].nbytes > _MOST:
            raise AgentError(f"tensor {name!r:.80} of {found[-1].nbytes} bytes")
    layout = StateLayout(tuple(found))
    if len(layout.numbers) != len(found):
        raise AgentError("two tensors of one name")
    if layout.plan.size > _MOST:
        raise AgentError(f"a state of {layout.plan.size} bytes")
    return layout


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > 64:
        raise AgentError(f"{values!r:.80} in place of a shape")
    return tuple(whole_number(value, _MOST) for value in values)


# -- options


def options_form(options: WriterOptions) -> dict[str, Any]:
    """The options of the agent's writer as JSON. `on_metrics` stays with the client.

    Raises:
        UsageError: an option is not available with an agent.
    """
    if options.memory is not None:
        raise UsageError("memory: an agent keeps whole states; limit them with max_in_flight")
    deltas, diffs = options.deltas, options.diffs
    if diffs is not None and diffs.controller is not None:
        raise UsageError("DiffOptions.controller: not available with an agent; give full_every and batch")
    return {
        "staging_bytes": options.staging_bytes,
        "threads": options.threads,
        "max_in_flight": options.max_in_flight,
        "poll_seconds": options.poll_seconds,
        "deltas": None if deltas is None else _fields(deltas),
        "diffs": None if diffs is None else _fields(diffs),
        "keep": None if options.keep is None else list(options.keep),
        "space": options.space,
    }


def _fields(options: Any) -> dict[str, Any]:
    """The fields of a dataclass, and of dataclasses in it."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        found[field.name] = _fields(value) if dataclasses.is_dataclass(value) else value
    found.pop("controller", None)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def read_options(form: Any) -> WriterOptions:
    """Read options. Raises what their constructors raise, `TypeError` or `AgentError`."""
    values = dict(form)
    deltas, diffs = values.pop("deltas"), values.pop("diffs")
    if deltas is not None:
        deltas = DeltaOptions(**deltas | {"bound": RestoreBound(**deltas["bound"]), "policy": _policy(deltas)})
    if diffs is not None:
        # The agent's main thread has its own handler of SIGTERM.
        diffs = DiffOptions(**diffs | {"policy": _policy(diffs), "flush_on_sigterm": False})
    return WriterOptions(**values, deltas=deltas, diffs=diffs)


def _policy(form: Mapping[str, Any]) -> Policy:
    values = dict(form["policy"])
    codecs, by_class = values.pop("codecs"), {kind: tuple(own) for kind, own in values.pop("by_class").items()}
    for names in (codecs, *by_class.values()):
        if not all(type(codec) is str for codec in names):
            raise AgentError(f"codecs {names!r:.80}")
    return Policy(codecs=tuple(codecs), by_class=by_class, **values)


# -- checkpoints, errors, warnings, labels


def info_form(info: CheckpointInfo | None) -> dict[str, Any] | None:
    """A checkpoint as JSON."""
    if info is None:
        return None
    return dataclasses.asdict(info) | {"metadata": metadata_format.form(info.metadata)}


def read_info(form: Any) -> CheckpointInfo | None:
    """Read a checkpoint."""
    if form is None:
        return None
    told = {name: tuple(form[name]) for name in ("segments", "tags")}
    return CheckpointInfo(**form | told | {"metadata": metadata_format.read(form["metadata"])})


def error_form(error: BaseException) -> dict[str, Any]:
    """An error as JSON: kind, text, notes."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return {"kind": type(error).__name__, "text": str(error) or type(error).__name__, "notes": notes}


def read_error(form: Any) -> BaseException:
    """Read an error: one of `ckptstore.errors`, otherwise an `AgentError`."""
    try:
        kind, text, notes = str(form["kind"]), str(form["text"]), [str(note) for note in form.get("notes", ())]
    except (TypeError, LookupError, AttributeError):
        return AgentError(f"the agent failed and gave no readable reason: {form!r:.200}")
    found = getattr(errors, kind, None)
    error: BaseException
    if kind == "CancelledError":
        error = CancelledError(text)
    elif kind == "MemoryError":
        error = MemoryError(text)
    elif isinstance(found, type) and issubclass(found, CkptError):
        error = found(text)
    else:
        error = AgentError(f"{kind} in the agent: {text}")
    for note in notes:
        error.add_note(note)
    return error


def warning_form(category: type[Warning], text: str) -> list[str]:
    """A warning as JSON."""
    return [category.__name__, text]


def read_warning(form: Any) -> tuple[type[Warning], str]:
    """Read a warning: a class of `host.caller_warnings`, `KernelWarning`, otherwise `UserWarning`."""
    kind, text = form
    found = KernelWarning if kind == KernelWarning.__name__ else getattr(caller_warnings, str(kind), None)
    known = isinstance(found, type) and issubclass(found, Warning)
    return (found if known else UserWarning), str(text)  # type: ignore[return-value]


def labels_form(labels: Labels) -> dict[str, Any]:
    """Metadata and tags as members of a message. Raises `UsageError` if the metadata is late."""
    labels.check_known()
    return {"metadata": labels.known.get(metadata_format.MEMBER), "tags": list(labels.tags)}


def read_labels(body: Mapping[str, Any]) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Read metadata and tags of a message. Raises `AgentError`."""
    metadata = body.get("metadata")
    return None if metadata is None else metadata_format.read(metadata), tuple(texts(body.get("tags", [])))


def texts(values: Any) -> Sequence[str]:
    """Check a list of texts. Raises `AgentError`."""
    if not isinstance(values, list) or not all(type(value) is str for value in values):
        raise AgentError(f"{values!r:.80} in place of texts")
    return values
