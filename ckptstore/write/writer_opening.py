"""Opens a store for writing: chooses the parent, begins the term, and describes the process that writes."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptstore._version import __version__
from ckptstore.errors import CheckpointNotFoundError, CkptError, FencedError, ReadOnlyError, UsageError
from ckptstore.formats.history.catalog import CLOSED, Catalog, TermEntry
from ckptstore.formats.history.records import CheckpointId, CommitRecord, ref_of
from ckptstore.formats.history.space_limits import space_of
from ckptstore.frameworks import bridge
from ckptstore.host import interpreter_exit
from ckptstore.host.caller_warnings import DeterminismWarning, FreshStartWarning, LostStepsWarning, WarningsLast, warn
from ckptstore.log import refs
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_checkpoint
from ckptstore.log.journal import Journal
from ckptstore.log.term import Term, open_term
from ckptstore.write.local_writer import LocalWriter
from ckptstore.write.writer_options import WriterOptions

if TYPE_CHECKING:
    from ckptstore.restore.stored_base import StoredBase
    from ckptstore.write.policy.diff_options import DiffOptions
    from ckptstore.write.second_tier import SecondTier

__all__ = ["Opener", "TermOpener", "open_writer"]

Opener: TypeAlias = Callable[[Journal, Callable[[Catalog], CheckpointId | None], Mapping[str, Any]], Term]
"""Begins a term of a store: arguments are the journal, a function that chooses the parent, and facts on the process."""

_NO_SPACE_OF_RANKS: Final = (
    "not with group=: each rank writes its share by itself, and cannot know what the shares of the others take "
    "meanwhile; collect with `store.gc()` between saves, and leave space for one more state per save in flight"
)


def open_writer(
    journal: Journal,
    parent: str | int | CheckpointInfo | None,
    options: WriterOptions,
    *,
    environment: Mapping[str, Any] | None = None,
    after: int | None = None,
    opener: Opener = open_term,
    tier: SecondTier | None = None,
) -> LocalWriter:
    """Begin a new term, which fences every earlier writer. Creates the store if there is none.

    Args:
        parent: the checkpoint from which the term continues; see `Store.writer`.
        options: the options of the writer.
        environment: what determines the bits of the training process, if that is another process (`agent`).
        after: the term that must be the newest, so that no other writer's term is fenced; None: any term.
        opener: begins a term.
        tier: the second tier of the store.

    Raises:
        as `Store.writer`.
    """
    interpreter_exit.check()
    journal.create()
    if journal.backend.read_only:
        raise ReadOnlyError(f"{journal.url}: read-only, cannot open it for writing")
    journal.backend.probe()
    about = _about_this_process(options.diffs, options.max_in_flight)
    if environment is not None:
        about["environment"] = dict(environment)
    about["asked"] = parent is not None
    chooser = _parent_chooser(parent, after, may_be_none=True)

    def choose(catalog: Catalog) -> CheckpointId | None:
        limit = space_of(options.rules(catalog.keep))
        if limit is not None and tier is not None:
            raise UsageError(
                f"{journal.url}: {limit.rule}: not with remote=: a checkpoint stays here until the remote has it, "
                "however slow that is; limit the time with lag_bytes="
            )
        return chooser(catalog)

    with _end_term_on_error() as begun, WarningsLast():
        term, info = _begin(journal, choose, about, opener)
        begun.append(term)
        _note_rules(term, options)
        own = term.journal
        own.backend.keep_reserve()
        _warn(term, asked=parent is not None)
    return LocalWriter(
        own,
        term,
        info,
        options,
        reopen=lambda identity: _open_base(own, identity),
        begin=lambda ref, after: _began_again(own, ref, after, about, opener),
        tier=tier,
    )


def _open_base(journal: Journal, identity: CheckpointId) -> StoredBase:
    from ckptstore.restore.stored_base import open_base  # a writer of plain fulls decodes nothing

    return open_base(journal, identity)


def _begin(
    journal: Journal,
    parent: Callable[[Catalog], CheckpointId | None],
    about: Mapping[str, Any],
    opener: Opener = open_term,
) -> tuple[Term, CheckpointInfo | None]:
    term = opener(journal, parent, about)
    if term.parent is None:
        return term, None
    return term, describe_checkpoint(term.catalog, term.catalog.checkpoints[term.parent.node])


def _began_again(
    journal: Journal, ref: str | int | CheckpointInfo | None, after: int, about: Mapping[str, Any], opener: Opener
) -> tuple[Term, CheckpointInfo | None]:
    """Begin a term that goes back to an earlier checkpoint."""
    with _end_term_on_error() as begun:
        term, info = _begin(journal, _parent_chooser(ref, after), about, opener)
        begun.append(term)
        _warn(term, asked=True)
    return term, info


@contextlib.contextmanager
def _end_term_on_error() -> Iterator[list[Term]]:
    """A list for a term: if a warning stops its opener, note in the log that the term ended without losing a step."""
    begun: list[Term] = []
    try:
        yield begun
    except Warning:
        # Prevents: the next start mistaking a start that a warning stopped for a term that was killed and lost steps.
        with contextlib.suppress(CkptError):
            for term in begun:
                term.commit(CommitRecord(term.number, extra={CLOSED: True}))
        raise


def _note_rules(term: Term, options: WriterOptions) -> None:
    """Set the store's retention rules, if they differ from the present ones."""
    rules = options.rules(term.catalog.keep)
    if rules != term.catalog.keep:
        term.commit(CommitRecord(term.number, keep=rules))


class TermOpener:
    """Opens the terms of a group of ranks, on the rank that commits."""

    def __init__(self, options: WriterOptions, *, ranks: int, environment: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            options: the options of the group; they determine how many steps a kill may lose.
            ranks: how many ranks write together.
            environment: as for `open_writer`.
        """
        self._about = _about_this_process(options.diffs, options.max_in_flight) | {"ranks": ranks}
        if environment is not None:
            self._about["environment"] = dict(environment)
        self._options: WriterOptions | None = options

    def open(
        self, journal: Journal, parent: str | int | CheckpointInfo | None, after: int | None = None
    ) -> tuple[Term, CheckpointInfo | None]:
        """Begin a term -> the term, and the checkpoint from which it continues.

        Args:
            parent: see `Store.writer`.
            after: the term that must be the newest; None: any term.

        Raises:
            as `open_writer`; `FencedError` if a newer term than `after` exists.
        """
        about = {**self._about, "asked": parent is not None}
        chooser, options = _parent_chooser(parent, after, may_be_none=after is None), self._options

        def choose(catalog: Catalog) -> CheckpointId | None:
            limit = space_of(catalog.keep if options is None else options.rules(catalog.keep))
            if limit is not None:
                raise UsageError(f"{journal.url}: {limit.rule}: {_NO_SPACE_OF_RANKS}")
            return chooser(catalog)

        with _end_term_on_error() as begun, WarningsLast():
            term, info = _begin(journal, choose, about)
            begun.append(term)
            if options is not None:
                _note_rules(term, options)
            self._options = None  # a later rollback keeps the rules that are set by then
            term.journal.backend.keep_reserve()
            _warn(term, asked=parent is not None)
        return term, info


def _parent_chooser(
    parent: str | int | CheckpointInfo | None, after: int | None = None, *, may_be_none: bool = False
) -> Callable[[Catalog], CheckpointId | None]:
    """A function that looks the parent up in the catalog on which the OPEN is built: it must be live there.

    Args:
        after: the term that must be the newest there; None: any term.
        may_be_none: ``latest`` means no parent if there is no checkpoint; if False, that is an error.
    """

    def choose(catalog: Catalog) -> CheckpointId | None:
        if after is not None and catalog.term != after:
            # Prevents: a writer that has ended from fencing the one that replaced it.
            raise FencedError(f"term {after} is over: term {catalog.term} was opened after it")
        if parent is None:
            return None
        if isinstance(parent, CheckpointInfo):
            found = refs.resolve(catalog, parent.ref)
            if found.state != parent.state:
                raise CheckpointNotFoundError(f"{parent.ref} is another checkpoint now: the store was replaced")
            return found.id
        wanted = refs.parsed(catalog, parent)
        if wanted.is_latest and may_be_none:
            latest = catalog.latest()
            return None if latest is None else latest.id
        return refs.resolve(catalog, wanted).id

    return choose


def _about_this_process(diffs: DiffOptions | None, max_in_flight: int) -> dict[str, Any]:
    waiting: dict[str, Any] = {}
    if diffs is not None and diffs.waits:
        # Saves in flight wait to join the batch, so they count, too. None: the batch size changes.
        waiting = {"batch": diffs.batch + max_in_flight - 1 if diffs.controller is None else None}
    return waiting | {
        "version": __version__,
        "host": platform.node(),
        "pid": os.getpid(),
        "environment": bridge.environment(),
    }


def _warn(term: Term, *, asked: bool) -> None:
    """Give all warnings of an opened term, once: if warnings are errors, the next start finds this term, and runs.

    Args:
        asked: whether the caller asked to continue a run.
    """
    # Prevents: a job that is restarted again and again, is stopped by the same warning each time, and never trains. So
    # this comes after the OPEN, which tells the next start what was warned of. All warnings are given together
    # (`WarningsLast`), because the next start gives none of them.
    if term.parent is None:
        if asked:
            _warn_of_fresh_start(term)
            _warn_of_lost_beginning(term)
        return
    between = _openings_between(term.catalog, term.parent, term.number)
    _warn_of_other_environment(term.catalog, term.parent, term.number, between)
    if between:  # the first of them was warned of the parent's term
        _warn_of_lost_term(term.catalog, between[-1], term.parent)
    else:
        _warn_of_lost_steps(term.catalog, term.parent)


def _openings_between(catalog: Catalog, parent: CheckpointId, term: int) -> list[TermEntry]:
    """Training terms that continued from the same checkpoint, opened after the checkpoint's own term."""
    return [one for one in _trainings(catalog) if parent.term < one.term < term and one.parent == parent]


def _warn_of_fresh_start(term: Term) -> None:
    """Warn if the term starts from scratch, though the caller did not ask for that and the store has checkpoints."""
    if not term.catalog.checkpoints:
        return
    before = term.catalog.terms.get(term.number - 1)
    if before is not None and before.parent is None and before.writer.get("asked") is True:
        return  # that term gave the warning, if there was a reason
    newest = ref_of(max(term.catalog.checkpoints))
    warn(
        f"{term.journal.url}: term {term.number} starts from scratch, as the previous term did, which holds no "
        f"checkpoint; the newest of earlier terms is {newest}: to continue from it close this writer, and open one "
        f"with parent={newest!r}",
        FreshStartWarning,
    )


def _warn_of_lost_beginning(term: Term) -> None:
    """Warn if the last run also started from scratch, and was killed before its first checkpoint."""
    number = max((one.term for one in _trainings(term.catalog) if one.term < term.number), default=None)
    if number is not None and (before := term.catalog.terms[number]).parent is None:
        _warn_of_lost_term(term.catalog, before, None)


def _trainings(catalog: Catalog) -> Iterator[TermEntry]:
    """The terms in which a run was trained; the others are those of tags and of upkeep."""
    return (one for one in catalog.terms.values() if "environment" in one.writer)


def _warn_of_other_environment(catalog: Catalog, parent: CheckpointId, term: int, between: Sequence[TermEntry]) -> None:
    before = catalog.terms[parent.term].writer.get("environment") if parent.term in catalog.terms else None
    now = catalog.terms[term].writer.get("environment")
    if not before or not now or any(one.writer["environment"] == now for one in between):
        return
    if differences := bridge.environment_differences(before, now):
        warn(
            f"resuming {parent.ref}: the run will not be bit-identical to one that never stopped: "
            + "; ".join(differences),
            DeterminismWarning,
        )


def _warn_of_lost_term(catalog: Catalog, before: TermEntry, parent: CheckpointId | None) -> None:
    """Warn that a killed term has left no checkpoint, if steps may have waited for a batch in it.

    Args:
        parent: the checkpoint that it and this term continue from; None: both start from scratch.
    """
    if "batch" not in before.writer or before.extra.get(CLOSED):
        return
    if catalog.checkpoints.highest(before.term) is not None:
        return  # going back on purpose
    steps = "" if parent is None else f" ({parent.step + 1} and following)"
    what = "starts from scratch" if parent is None else f"continues from {parent.ref}"
    warn(
        f"term {before.term} ended without closing, before its first checkpoint was durable: no step that it computed"
        f"{steps} is in the store; training {what}",
        LostStepsWarning,
    )


def _warn_of_lost_steps(catalog: Catalog, parent: CheckpointId) -> None:
    """Warn of the steps that a killed term may have computed and not written."""
    before = catalog.terms.get(parent.term)
    if before is None or "batch" not in before.writer or before.extra.get(CLOSED):
        return
    batch = before.writer["batch"]
    some = f"up to {batch} steps" if isinstance(batch, int) else "steps"
    highest = catalog.checkpoints.highest(parent.term)
    if highest is not None and highest[1] > parent.step:
        return  # going back on purpose
    warn(
        f"term {parent.term} ended without closing: {some} after {parent.step} that waited for their "
        f"batch ({parent.step + 1} and following) are not in the store; training continues from {parent.ref}",
        LostStepsWarning,
    )
