"""What becomes of a step: whether it is saved, how its save begins, and what a step that is in no checkpoint causes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ckptstore.errors import MissingRankError, WriterError
from ckptstore.host.caller_warnings import warn
from ckptstore.training.capture.script_state import ScriptState
from ckptstore.training.open_term import OpenTerm
from ckptstore.training.optimizers.optimizer_tracker import OptimizerTracker
from ckptstore.training.save_pace import SavePace
from ckptstore.training.save_reports import SaveReports
from ckptstore.training.script_checks import ScriptChecks
from ckptstore.training.settings import SaveSettings, SlowSavesWarning, UnsavedStepWarning
from ckptstore.training.urgency import Urgency
from ckptstore.write.saves.ledger import PendingSave
from ckptstore.write.saves.lost_steps import by_error, first_of, lost_steps, name_steps

__all__ = ["StepSaves"]

_LOG: Final = logging.getLogger("ckptstore.training")


class StepSaves:
    """Decides after each step of a run whether to save it, and saves it. The script's thread calls it.

    A step is *due* if `save_every`, ``save=`` or an urgent reason says so. It is saved only if it has *moved*: an
    optimizer has stepped since the call before, or the scaler skipped its step.

    Attributes:
        urgency: signals and the deadline.
        checks: warns of mistakes in the script.
        reports: gets the metrics of saves.
        pace: when to save, and what saves take.
        unsaved: the metrics of the last step, if it was not saved; None: it was, or there is none.
        stopped: the writer failed, and training continues without saves (``on_error="warn"``).
    """

    def __init__(
        self,
        url: str,
        settings: SaveSettings,
        captured: ScriptState,
        tracker: OptimizerTracker,
        flush: Callable[[], object],
    ) -> None:
        """
        Args:
            url: the store's.
            flush: finishes the saves in flight, before SIGTERM ends the process.
        """
        self.urgency = Urgency(settings, flush)
        self.checks = ScriptChecks(captured, settings.keep.metric)
        self.reports = SaveReports(self.urgency.saved, settings.on_metrics, settings.tensorboard)
        self.pace = SavePace(settings.save_every)
        self.unsaved: Mapping[str, Any] | None = None
        self.stopped = False
        self._url = url
        self._settings = settings
        self._tracker = tracker

    def after(
        self,
        term: OpenTerm,
        step: int,
        metrics: Mapping[str, Any] | None,
        tags: str | Sequence[str],
        save: bool | None,
    ) -> PendingSave | None:
        """Save a finished step -> its save; None: it is not saved (see `Checkpointer.step`).

        Args:
            step: its number.
            save: whether the caller wants it saved; None: what `save_every` says.

        Raises:
            with ``on_error="raise"`` whatever stops a save.
        """
        moved = self._tracker.has_moved()
        urgent = self._is_urgent(step, moved)
        due = urgent or (moved and self.pace.due(step) if save is None else save)
        self.checks.stepped(moved)
        if moved:  # a call without an optimizer's step takes nothing from the step before
            self.unsaved = None if due else metrics or {}
        if self.stopped:
            if urgent:
                self.urgency.settled(step)
            return None
        if not moved:
            if save or tags:
                warn(
                    f"step {step} is not saved, in spite of save= or tags=: no optimizer has stepped since the call "
                    "before",
                    UnsavedStepWarning,
                )
            return None
        if not due and not term.follows:
            term.saves.passed(step)
            return None
        forced = due and (urgent or save is True or bool(tags))
        return self._saved(term, step, (metrics, tags), due=due, forced=forced, urgent=urgent)

    def _is_urgent(self, step: int, moved: bool) -> bool:
        try:
            return self.urgency.after(step, moved)
        except MissingRankError as error:
            self.fail(error)
            return False

    def _saved(
        self,
        term: OpenTerm,
        step: int,
        labels: tuple[Mapping[str, Any] | None, str | Sequence[str]],
        *,
        due: bool,
        forced: bool,
        urgent: bool,
    ) -> PendingSave | None:
        """Save a step, durably at once if it is urgent -> its save; None: none was begun, or it failed."""
        try:
            pending = self.pace.save(lambda: self.save(term, step, *labels, due=due, forced=forced))
            if urgent and pending is not None:
                pending = term.saves.durable(pending)
                self.urgency.settled(step)
        except Exception as error:  # noqa: BLE001  # with on_error="warn" whatever it is
            if urgent and term.group is not None:
                self.urgency.settled(step)  # the other ranks end, too
            lost = term.saves.settle()
            if not any(other == step for other, _ in lost):
                lost.append((step, error))
            self._lose(lost)
            return None
        self.urgency.pass_on()
        if term.is_first and (slow := term.saves.slowed_by(self.pace)) is not None:
            warn(slow, SlowSavesWarning)
        return pending

    def save(
        self,
        term: OpenTerm,
        step: int,
        metrics: Mapping[str, Any] | None,
        tags: str | Sequence[str],
        *,
        due: bool = True,
        forced: bool = True,
    ) -> PendingSave | None:
        """Begin the save of a step, as `StateSaves.offer`. Raises what that does, and what stopped an earlier save."""
        lost = term.saves.settle()
        while True:
            if lost:
                self._lose(lost)
            try:
                pending = term.saves.offer(step, metrics, tags, due=due, forced=forced)
                break
            except Exception as error:
                # Prevents: a step that is lost with an earlier one, whose failure was raised by its own call. It was
                # not begun, so it can be offered again, even if other ranks save it, too.
                lost = term.saves.settle()
                if not any(earlier is error for _, earlier in lost):
                    if lost:
                        self._lose(lost)
                    raise
        self.checks.saved()
        if term.is_first:
            self.checks.measured(metrics)
        self.reports.draw(metrics or {}, step)
        return pending

    def finish(self, term: OpenTerm, step: int, *, save: bool) -> None:
        """Training is over after `step`: save it if it was not and `save` says so, and make all saves durable."""
        if save and self.unsaved is not None:
            try:
                self.save(term, step, self.unsaved, ())
            except Exception as error:
                name_steps(error, [step])
                raise
            self.unsaved = None
        term.finish()
        self.checks.ended()

    # -- steps that are in no checkpoint

    def failed(self, term: OpenTerm | None, error: Exception) -> None:
        """Raise, or warn of, what stopped saves that were waited for. Every lost step is named once."""
        lost = [] if term is None else term.saves.settle()
        if lost:
            self._lose(lost)
        if not any(other is error for _, other in lost):
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Raise, or warn of, an error that concerns no step, or names its steps."""
        if self._settings.on_error == "raise":
            raise error
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        self._warn_continuing([error], f"training continues: {type(error).__name__}: {error}{notes}")

    def _lose(self, failures: Sequence[tuple[int, BaseException]]) -> None:
        """Raise, or warn of, steps that were lost.

        Args:
            failures: every lost step, in the order of the failures, and what stopped its save.
        """
        if self._settings.on_error == "raise":
            raise first_of(failures)  # and each later call raises what the writer then says
        texts = [
            f"{lost_steps(error, steps)}, and training continues: {type(error).__name__}: {error}"
            for error, steps in by_error(failures)
        ]
        self._warn_continuing([error for _, error in failures], "; ".join(texts))

    def _warn_continuing(self, errors: Sequence[BaseException], text: str) -> None:
        """Warn, and stop saving if one of the errors ended the writer."""
        self.stopped = self.stopped or any(isinstance(error, WriterError) for error in errors)
        end = "; no step is saved any more" if self.stopped else ""
        warn(f"{self._url}: {text}{end}", UnsavedStepWarning)

    def remark_unsaved(self, term: OpenTerm | None, step: int, why: str) -> None:
        """Log that the last step is in no checkpoint, unless an agent writes it.

        It is not saved now: the script may have changed its state since.

        Args:
            step: the last one.
            why: it is not saved.
        """
        if self.unsaved is None or self.stopped or (term is not None and term.written_by_agent):
            return
        self.unsaved = None
        lost = "and is lost"
        if term is not None and term.follows:  # one of several ranks: it is unknown whether all of their agents have it
            lost = "and is lost unless the trainers of all ranks end soon: then their agents write it"
        _LOG.warning(
            "%s: %s: %s", self._url, f"step {step} was not saved (save_every={self._settings.save_every}), {lost}", why
        )
