"""Steps that are in no checkpoint: what stopped a save, and the last step of a run that was not due."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckptstore.errors import WriterError
from ckptstore.host.caller_warnings import warn
from ckptstore.training.settings import Settings, UnsavedStepWarning
from ckptstore.write.lost import by_error, first_of, lost_steps

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

    def lost(self, failures: Sequence[tuple[int, BaseException]]) -> None:
        """Raise, or warn: training continues. A writer that is finished ends the saving.

        Args:
            failures: every step that was lost, in the order of the failures, and what stopped it.
        """
        if self._settings.on_error == "raise":
            raise first_of(failures)  # and each later call raises what the writer then says
        self.stopped = self.stopped or any(isinstance(error, WriterError) for _, error in failures)
        texts = [
            f"{lost_steps(error, steps)}, and training goes on: {type(error).__name__}: {error}"
            for error, steps in by_error(failures)
        ]
        end = "; no step is saved any more" if self.stopped else ""
        warn(f"{self._url}: {'; '.join(texts)}{end}", UnsavedStepWarning)

    def failed(self, error: Exception) -> None:
        """As `lost`, of what concerns no step, or says itself which ones."""
        if self._settings.on_error == "raise":
            raise error
        self.stopped = self.stopped or isinstance(error, WriterError)
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        end = "; no step is saved any more" if self.stopped else ""
        warn(f"{self._url}: training goes on: {type(error).__name__}: {error}{notes}{end}", UnsavedStepWarning)

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
