"""ckptstore: every step of a PyTorch run a durable, verified checkpoint, restored bit for bit.

    store = ckptstore.open("runs/gpt")
    with store.writer(parent="latest") as writer:
        if writer.parent:
            state = store.load(writer.parent.ref)
        ...
        writer.save(state, step=100)

Importing this package imports nothing else: neither numpy nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckptstore._version import __version__

if TYPE_CHECKING:
    from ckptstore.checkpoint import CheckpointInfo, TermInfo
    from ckptstore.deltas import DeltaOptions
    from ckptstore.diffs import DiffOptions
    from ckptstore.formats.errors import (
        CheckpointNotFoundError,
        CkptError,
        CommitUnknownError,
        CorruptionError,
        CorruptLogError,
        CorruptSegmentError,
        FencedError,
        FormatError,
        IncompatibleFormatError,
        MissingDependencyError,
        NotFoundError,
        ReadOnlyError,
        StepOrderError,
        StorageError,
        StoreNotFoundError,
        StoreReplacedError,
        TensorNotFoundError,
        UnsupportedBackendError,
        UnsupportedStateError,
        UsageError,
        WriterClosedError,
        WriterError,
    )
    from ckptstore.intervals import RestoreBound
    from ckptstore.remarks import (
        DeterminismWarning,
        LossyWarning,
        LostStepsWarning,
        UnexplainedStepWarning,
        UnpinnedWarning,
    )
    from ckptstore.saves import PendingSave
    from ckptstore.store import Store, verify
    from ckptstore.store import open_store as open
    from ckptstore.updates import Update
    from ckptstore.verification import Damage, Unread, VerificationReport
    from ckptstore.writer import Writer

_HOMES = {
    "checkpoint": "CheckpointInfo TermInfo",
    "deltas": "DeltaOptions",
    "diffs": "DiffOptions",
    "intervals": "RestoreBound",
    "formats.errors": (
        "CheckpointNotFoundError CkptError CommitUnknownError CorruptionError CorruptLogError CorruptSegmentError"
        " FencedError FormatError IncompatibleFormatError MissingDependencyError NotFoundError ReadOnlyError"
        " StepOrderError StorageError StoreNotFoundError StoreReplacedError TensorNotFoundError"
        " UnsupportedBackendError UnsupportedStateError UsageError WriterClosedError WriterError"
    ),
    "remarks": "DeterminismWarning LossyWarning LostStepsWarning UnexplainedStepWarning UnpinnedWarning",
    "saves": "PendingSave",
    "store": "Store open verify",
    "updates": "Update",
    "verification": "Damage Unread VerificationReport",
    "writer": "Writer",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CkptError",
    "CommitUnknownError",
    "CorruptLogError",
    "CorruptSegmentError",
    "CorruptionError",
    "Damage",
    "DeltaOptions",
    "DeterminismWarning",
    "DiffOptions",
    "FencedError",
    "FormatError",
    "IncompatibleFormatError",
    "LossyWarning",
    "LostStepsWarning",
    "MissingDependencyError",
    "NotFoundError",
    "PendingSave",
    "ReadOnlyError",
    "RestoreBound",
    "StepOrderError",
    "StorageError",
    "Store",
    "StoreNotFoundError",
    "StoreReplacedError",
    "TensorNotFoundError",
    "TermInfo",
    "UnexplainedStepWarning",
    "UnpinnedWarning",
    "Unread",
    "UnsupportedBackendError",
    "UnsupportedStateError",
    "Update",
    "UsageError",
    "VerificationReport",
    "Writer",
    "WriterClosedError",
    "WriterError",
    "__version__",
    "open",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ckptstore' has no attribute {name!r}")
    value = getattr(import_module(f"ckptstore.{_HOME[name]}"), "open_store" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
