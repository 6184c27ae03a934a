"""Lightning: `StepCheckpoint` saves every step, `CkptstoreIO` stores what Lightning itself saves."""

from __future__ import annotations

from ckptstore.errors import MissingDependencyError

try:
    from ckptstore.integrations.lightning_callback import StepCheckpoint
    from ckptstore.integrations.lightning_io import CkptstoreIO
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("lightning", "torch"):
        raise
    raise MissingDependencyError(
        "ckptstore.integrations.lightning needs lightning: pip install 'ckptstore[lightning]'"
    ) from error

__all__ = ["CkptstoreIO", "StepCheckpoint"]
