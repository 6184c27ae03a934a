"""Sets a store's retention rules, and prunes by them, with or without a live writer.

`ckptstore.formats.history.retention_rules` decides which checkpoints the rules keep, here and in a writer.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ckptstore.errors import CorruptLogError, RequestRefusedError, UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import droppable, users
from ckptstore.formats.history.records import CommitRecord, Node, ref_of
from ckptstore.formats.history.retention_rules import checked, known, reasons_of, unmatched
from ckptstore.formats.history.rule_rankings import names
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.host.caller_warnings import warn
from ckptstore.host.crash_points import crash_point
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, read
from ckptstore.maintenance.catalog_changes import change, look

__all__ = ["Pruned", "prunable_nbytes", "prune", "rules", "set_rules"]

_AT_ONCE: Final = 50_000
"""Maximum number of checkpoints that one record retires."""
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Pruned(HtmlTable):
    """The result of `prune`, or with ``dry_run`` its plan.

    Attributes:
        rules: the rules that decided.
        kept: ``newest``, ``tagged`` and every rule -> REFs of the checkpoints it keeps, by term and step. Several may
            keep the same one. ``undrained``: checkpoints that no rule keeps, but that the second tier lacks.
        checkpoints: number of kept checkpoints.
        retired: REFs of the retired checkpoints, by term and step.
        held: REFs of retired checkpoints, of this and earlier calls, that stay stored because others build on them or
            share their segment. `held_nbytes`: bytes of the segments that contain nothing else.
        dropped: keys of segments that nothing needs now, for gc; `dropped_nbytes`: their bytes.
    """

    rules: tuple[str, ...]
    kept: Mapping[str, tuple[str, ...]]
    checkpoints: int
    retired: tuple[str, ...]
    held: tuple[str, ...]
    held_nbytes: int
    dropped: tuple[str, ...]
    dropped_nbytes: int


def rules(journal: Journal) -> tuple[str, ...]:
    """Return the store's retention rules as they were given; empty: every checkpoint is kept."""
    return read(journal).catalog.keep


def set_rules(
    journal: Journal, wanted: Iterable[str], *, take_over: bool = False, timeout: float | None = 60.0
) -> tuple[str, ...]:
    """Set the store's rules, and return them. A writer applies them from its next save on.

    Raises:
        UsageError: a rule is invalid; or the store was never written to, and `take_over` is not given.
        as `catalog_changes.change`.
    """
    chosen = checked(wanted)
    view = look(journal, take_over=take_over)
    before = view.catalog
    if not take_over and not before.term:
        raise UsageError(
            f"{journal.url}: no run has written here yet, so none can be asked: pass the rules to the first writer "
            "(keep=), or pass take_over=True (--take-over)"
        )

    _warn_unmatched(before, chosen)

    def plan(catalog: Catalog) -> CatalogChange | None:
        return None if catalog.keep == chosen else CatalogChange(keep=chosen)

    what = f"keep {', '.join(chosen) or 'every checkpoint'}"
    return change(journal, view, what, plan, take_over=take_over, timeout=timeout).catalog.keep


def prune(
    journal: Journal,
    wanted: Iterable[str] | None = None,
    *,
    dry_run: bool = False,
    take_over: bool = False,
    timeout: float | None = 60.0,
    drained: Callable[[Node], bool] | None = None,
) -> Pruned:
    """Retire what no rule keeps. Drop also what was retired before and is not needed now.

    Args:
        wanted: rules to use this time instead of the store's; None: the store's.
        drained: tells whether the store's second tier has, or had, a checkpoint: others are not retired; None: there
            is not a second tier.

    Raises:
        UsageError: a rule is invalid, or there are none; or this version does not know all of the store's rules.
        CorruptLogError: the log is damaged, so that it is unknown what others build on. Nothing was changed.
        as `catalog_changes.change`; records committed before the failure stay.
    """
    chosen = None if wanted is None else checked(wanted)
    if chosen == ():
        raise UsageError("no rule is given: nothing would be kept but the newest checkpoint, and those with tags")
    view = read(journal, look_above=True)
    before = view.catalog
    _warn_unmatched(before, _rules_for(journal, before, chosen))  # raises before a writer is asked
    if dry_run:
        found = _plan(journal, before, chosen, all_at_once=True, drained=drained)
        record = CommitRecord(before.term, drops=tuple(found.drops), retires=found.retires)
        after = before.apply(record, before.next_seq) if found else before
        return _report(after, _rules_for(journal, before, chosen), [found], drained)
    crash_point("prune.planned")
    done: list[_PrunePlan] = []
    # Checkpoints that a live writer saves meanwhile are left to a later prune. Otherwise this loop might never end.
    until = math.inf if timeout is None else time.monotonic() + timeout
    full = True
    while full:
        found, view = _retire_some(journal, view, before, chosen, take_over, until, drained)
        full = len(found.retires) == _AT_ONCE  # a smaller record was the last
        if found:
            done.append(found)
            crash_point("prune.retired")
    return _report(view.catalog, _rules_for(journal, view.catalog, chosen), done, drained)


def _warn_unmatched(catalog: Catalog, chosen: Iterable[str]) -> None:
    """Warn of a rule whose metric no checkpoint has: a misspelled name keeps everything."""
    for rule, name in unmatched(catalog, chosen).items():
        there = ", ".join(names(catalog)) or "none"
        warn(f"no checkpoint has {name!r} (there are: {there}): {rule} keeps everything until one has", UserWarning)


@dataclass(frozen=True, slots=True)
class _PrunePlan:
    """What one record retires and drops: id -> (key, bytes)."""

    retires: tuple[Node, ...] = ()
    drops: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.retires or self.drops)


def prunable_nbytes(journal: Journal) -> int | None:
    """Return the bytes that `prune` by the store's rules would drop; None: no rules, or they cannot be applied."""
    catalog = read(journal).catalog
    try:
        return sum(size for _, size in _plan(journal, catalog, None, all_at_once=True).drops.values())
    except (UsageError, CorruptLogError):
        return None


def _retire_some(
    journal: Journal,
    view: View,
    before: Catalog,
    chosen: tuple[str, ...] | None,
    take_over: bool,
    until: float,
    drained: Callable[[Node], bool] | None,
) -> tuple[_PrunePlan, View]:
    """Commit one record that retires. Return its plan, and a view that has it; an empty plan: nothing to do.

    Args:
        view: the log as it was last seen.
        before: the catalog when `prune` began: nothing newer is retired.
    """
    found = _PrunePlan()

    def plan(catalog: Catalog) -> CatalogChange | None:
        nonlocal found
        found = _plan(journal, catalog, chosen, among=before, drained=drained)
        return CatalogChange(retires=found.retires, drops=tuple(found.drops)) if found else None

    for done in itertools.count(1):
        left = until - time.monotonic()
        try:
            patience = None if math.isinf(left) else max(left, 0.001)
            after = change(journal, view, "prune", plan, take_over=take_over, timeout=patience)
        except RequestRefusedError:
            # The writer has changed the catalog: a planned checkpoint is tagged by now, or retired. Plan again.
            if done >= _TRIES and time.monotonic() >= until:
                raise
            view = look(journal, take_over=take_over)
        else:
            return found, after
    raise AssertionError("it is tried until it is done, or given up")


def _plan(
    journal: Journal,
    catalog: Catalog,
    chosen: tuple[str, ...] | None,
    *,
    all_at_once: bool = False,
    among: Catalog | None = None,
    drained: Callable[[Node], bool] | None = None,
) -> _PrunePlan:
    _, gone = reasons_of(catalog, _rules_for(journal, catalog, chosen))
    if drained is not None:
        gone = [node for node in gone if drained(node)]
    if among is not None:
        gone = [node for node in gone if among.find(node) is not None]
    retires = tuple(gone if all_at_once else gone[:_AT_ONCE])
    # Include what was retired before: its last dependent may have been dropped since.
    dropped = [
        catalog.segments[one]
        for one in droppable(catalog, [*retires, *catalog.held])
        if one in catalog.segments and (among is None or one in among.segments)
    ]
    return _PrunePlan(retires, {one.id: (one.key, one.size) for one in dropped})


def _rules_for(journal: Journal, catalog: Catalog, chosen: tuple[str, ...] | None) -> tuple[str, ...]:
    found = catalog.keep if chosen is None else chosen
    if not found:
        error = UsageError(f"{journal.url}: the store has no rules of retention: give some, for now or for good")
        error.no_rules = True
        raise error
    if not known(found):
        raise UsageError(f"{journal.url}: this version does not know all of its rules {', '.join(found)}")
    if catalog.damage or catalog.lost > catalog.term:
        raise CorruptLogError(
            f"{journal.url}: the log is damaged: checkpoints that it lost may build on segments that would be dropped: "
            "`ckpt verify` names the damage"
        )
    return found


def _report(
    after: Catalog, chosen: tuple[str, ...], done: Sequence[_PrunePlan], drained: Callable[[Node], bool] | None
) -> Pruned:
    kept, others = reasons_of(after, chosen)
    if drained is not None and (waiting := [node for node in others if not drained(node)]):
        kept = {**kept, "undrained": waiting}
    retired = sorted(node for plan in done for node in plan.retires)
    segments = {segment for node in after.held for edge in after.encodings.get(node, ()) for segment in edge.segments}
    alone = [
        after.segments[segment].size
        for segment in segments
        if segment in after.segments and not any(node in after.checkpoints for node in users(after, segment))
    ]
    drops = [place for plan in done for place in plan.drops.values()]
    return Pruned(
        rules=chosen,
        kept={reason: tuple(map(ref_of, nodes)) for reason, nodes in kept.items()},
        checkpoints=len(after.checkpoints),
        retired=tuple(map(ref_of, retired)),
        held=tuple(map(ref_of, after.held)),
        held_nbytes=sum(alone),
        dropped=tuple(key for key, _ in drops),
        dropped_nbytes=sum(size for _, size in drops),
    )
