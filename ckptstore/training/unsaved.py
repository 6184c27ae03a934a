"""Steps that are in no checkpoint: what stopped a save, and the last step of a run that was not due."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from ckptstore.errors import WriterError
from ckptstore.host.caller_warnings import warn
from ckptstore.training.settings import Settings, UnsavedStepWarning

__all__ = ["Unsaved"]

_LOG: Final = logging.getLogger("ckptstore.training")


class Unsaved:
    """What is said of steps that were not saved, and whether any is saved still.

    Attributes:
        last: the metrics of the last step, if it was not saved; None: it was, or there is none.
        stopped: the writer is finished, and training goes on without (``on_error="warn"``).
    """

    def __init__(self, url: str, settings: Settings) -> None:
        """
        Args:
            url: the store's.
        """
        self.last: Mapping[str, Any] | None = None
        self.stopped = False
        self._url = url
        self._settings = settings

    def failed(self, step: int, error: Exception) -> None:
        """Raise, or warn and go on: a writer that is finished ends the saving, anything else one step's.

        Args:
            step: the last one that is done.
        """
        if self._settings.on_error == "raise":
            raise error  # and each later call raises what the writer then says
        self.stopped = self.stopped or isinstance(error, WriterError)
        what = "no step is saved any more" if self.stopped else f"step {step} or one before it was not saved"
        warn(f"{self._url}: {what}, and training goes on: {type(error).__name__}: {error}", UnsavedStepWarning)

    def remark(self, step: int, why: str, *, follows: bool) -> None:
        """Say that the last step is in no checkpoint: its state may have been changed since, so it is not saved now.

        Args:
            step: the last one.
            why: it is not saved.
            follows: an agent has it in memory.
        """
        if self.last is not None and not self.stopped:
            every, self.last = self._settings.save_every, None
            lost = "and is lost"
            if follows:  # one of several ranks: whether all of their agents have it nobody knows yet
                lost = "and is lost unless the trainers of all ranks end soon: then their agents write it"
            what = f"step {step} was not saved (save_every={every}), {lost}"
            _LOG.warning("%s: %s: %s", self._url, what, why)
