"""Plans a compaction and makes its moves one by one, through a live writer or in its place (``compact``).

Each move is one record (`move_execution`). After a kill, the next call plans again and makes the remaining moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ckptstore.backends.system_errors import is_bad_medium
from ckptstore.errors import (
    CkptError,
    CorruptionError,
    CorruptLogError,
    FencedError,
    ReadOnlyError,
    StorageError,
    UsageError,
)
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Node, ref_of
from ckptstore.formats.history.retention_rules import known, reasons_of
from ckptstore.formats.history.rule_windows import ends
from ckptstore.host.bandwidth import rate_limited
from ckptstore.host.option_checks import seconds, whole
from ckptstore.host.progress import Advance, Progress
from ckptstore.log.change_committer import ChangeCommitter, ChangeRequester, TakeOver
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, read
from ckptstore.log.refs import resolve
from ckptstore.maintenance.compact.compaction_plan import plan_moves
from ckptstore.maintenance.compact.compaction_report import CompactMove, CompactReport, Result
from ckptstore.maintenance.compact.move_execution import ExecutedMove, MoveExecutor
from ckptstore.maintenance.compact.moves import CompactLimits, Move, Planned
from ckptstore.maintenance.compact.size_estimates import known_sizes
from ckptstore.maintenance.compact.size_samples import SampledSizes, measure
from ckptstore.maintenance.merge.merge_range import outside
from ckptstore.maintenance.merge.rewrite_context import RewriteContext
from ckptstore.restore.restore_plan import plan_all, restore_seconds
from ckptstore.restore.stored_files import has_files

__all__ = ["compact", "make_moves", "planned_moves"]

_TRIES: Final = 3


def compact(
    journal: Journal,
    limits: CompactLimits,
    *,
    only: str | None = None,
    bandwidth: int | None = None,
    dry_run: bool = False,
    take_over: bool = False,
    timeout: float | None = 60.0,
    progress: Progress | None = None,
) -> CompactReport:
    """Rewrite kept checkpoints, so that bases that are only held can be deleted.

    Args:
        only: ``A..B``, two REFs of one term: rewrite nothing else; None: everything that is worth it.
        bandwidth: maximum bytes of state decoded, encoded and read back per second; None: no limit.
        dry_run: change nothing; sizes are estimated from samples.
        take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
        timeout: seconds to wait for the live writer's answer to each move; None: without limit.
        progress: called with (bytes done, bytes in all).

    Raises:
        UsageError: an option is invalid.
        CheckpointNotFoundError: an end of `only` does not exist.
        CorruptLogError: the log is damaged, so that it is unknown what others build on. Nothing was changed.
        ReadOnlyError, StorageError: the medium cannot be written, or failed. Earlier moves stay made.
        FencedError: another writer took over the store; without `take_over`: that happened again and again.
        CommitUnknownError: only with `take_over`: it is unknown whether the last move was committed.
    """
    timeout = seconds("timeout", timeout)
    if bandwidth is not None:
        whole("bandwidth", bandwidth, 1)
    if journal.backend.read_only and not dry_run:
        raise ReadOnlyError(f"{journal.url}: read-only, nothing can be compacted")
    view, measured, planned = planned_moves(journal, limits, only=only, owned=take_over)
    if dry_run or not planned.moves:
        done = tuple(_result(move, "planned", "", None) for move in planned.moves)
        return _report(view.catalog, planned, done, planned.bytes_after, planned.seconds_after, dry_run)
    author = TakeOver(journal, "compact", several=True) if take_over else ChangeRequester(journal, timeout, view)
    made = make_moves(journal, author, planned, lambda advance: rate_limited(bandwidth, advance), progress)
    after = author.catalog()
    nbytes = sum(segment.size for segment in after.segments.values())
    return _report(after, planned, made, nbytes, _slowest(after, measured), dry_run)


def planned_moves(
    journal: Journal, limits: CompactLimits, *, only: str | None = None, owned: bool = False
) -> tuple[View, SampledSizes, Planned]:
    """Read the log, measure samples of the store, and plan the moves.

    Args:
        only: as for `compact`.
        owned: no other process writes to the store.

    Raises:
        UsageError, CheckpointNotFoundError, CorruptLogError, StorageError: as `compact`.
    """
    view = read(journal, look_above=True)
    catalog = view.catalog
    if catalog.damage or catalog.lost > catalog.term:
        raise CorruptLogError(
            f"{journal.url}: the log is damaged: checkpoints that it lost may build on segments that would be dropped: "
            "`ckpt verify` names the damage"
        )
    wanted = {resolve(catalog, ref).node: ref for ref in limits.plain}
    mapped = frozenset(node for node, ref in wanted.items() if has_files(journal, ref))
    left = frozenset[Node]() if only is None else outside(catalog, only)
    if beyond := sorted(left.intersection(wanted)):
        raise UsageError(f"{', '.join(map(ref_of, beyond))}, to become an uncompressed full, is not in {only}")
    measured = measure(journal, catalog)
    planned = plan_moves(
        catalog,
        limits,
        known_sizes(catalog, measured.samples),
        rates=measured.rates,
        stays=_kept_for_long(catalog),
        owned=owned,
        refused=left | mapped,
        plain=wanted.keys() - mapped,
    )
    not_meant = frozenset(map(ref_of, left))
    planned = replace(planned, unmet=tuple(one for one in planned.unmet if one.ref not in not_meant))
    return view, measured, planned


def make_moves(
    journal: Journal,
    author: ChangeCommitter,
    planned: Planned,
    held_back: Callable[[Advance], Advance],
    progress: Progress | None = None,
) -> tuple[CompactMove, ...]:
    """Make the moves of a plan one by one, and return the result of each.

    Args:
        author: commits them, or asks the live writer to.
        held_back: wraps the callback that is called after every piece of work (a chunk at most), to slow it down.
        progress: called with (bytes done, bytes in all).

    Raises:
        ReadOnlyError, StorageError, FencedError, CommitUnknownError: as `compact`; and anything `held_back` raises.
    """
    with RewriteContext(journal, progress, dry_run=False, held_back=held_back) as context:
        return _make_all(MoveExecutor(journal, author, context), author, planned)


def _make_all(maker: MoveExecutor, author: ChangeCommitter, planned: Planned) -> tuple[CompactMove, ...]:
    found: list[CompactMove] = []
    for place, move in enumerate(planned.moves):
        found.append(_make(maker, author, move))
        if found[-1].result == "waiting":  # no writer is there to answer the next one, either
            found += [_result(later, "left", "", None) for later in planned.moves[place + 1 :]]
            break
    return tuple(found)


def _make(maker: MoveExecutor, author: ChangeCommitter, move: Move) -> CompactMove:
    """Make one move. Retry if a newer term begins: segments written for one term are useless in the next."""
    for left in reversed(range(_TRIES)):
        try:
            made = maker.make(move)
        except FencedError:
            if author.owned is not None or not left:
                raise
            continue
        except UsageError as error:
            return _result(move, "refused", str(error), None)
        except (CorruptionError, StorageError) as error:
            if isinstance(error, StorageError) and not is_bad_medium(error):
                raise
            return replace(_result(move, "refused", str(error), None), damaged=True)
        outcome = made.outcome
        if outcome.answer == "accepted":
            return _result(move, "done", "", made)
        if outcome.answer == "waiting":
            return _result(move, "waiting", "the live writer did not answer in time", made)
        if outcome.answer == "refused" or not left:
            return replace(_result(move, "refused", outcome.reason, None), asked=True)
    raise AssertionError("every try ends in an answer")


def _result(move: Move, result: Result, reason: str, made: ExecutedMove | None) -> CompactMove:
    stored = {rewrite.node: rewrite.base for rewrite in move.rewrites}
    after = move.bytes_after
    if made is not None:
        stored |= made.stored
        after = move.bytes_before + sum(one.size for one in made.written) - sum(one.size for one in made.dropped)
    return CompactMove(
        move.kind,
        move.why,
        {ref_of(node): "" if base is None else ref_of(base) for node, base in stored.items()},
        result,
        reason,
        move.bytes_before,
        after,
        move.seconds_before,
        move.seconds_after,
        () if made is None else tuple(one.key for one in made.written),
        () if made is None else tuple(one.key for one in made.dropped),
        0 if made is None else sum(one.size for one in made.dropped),
    )


def _report(
    after: Catalog, planned: Planned, moves: tuple[CompactMove, ...], nbytes: int, slowest: float, dry_run: bool
) -> CompactReport:
    if dry_run:
        collectable = sum(_freed(after, move) for move in planned.moves)
    else:
        collectable = sum(done.dropped_nbytes for done in moves if done.result == "done")
    return CompactReport(
        moves,
        planned.bytes_before,
        nbytes,
        planned.seconds_before,
        slowest,
        tuple(ref_of(node) for node in after.checkpoints),
        planned.unmet,
        collectable,
        dry_run,
    )


def _freed(catalog: Catalog, move: Move) -> int:
    return sum(catalog.segments[one].size for one in move.drops if one in catalog.segments)


def _slowest(catalog: Catalog, measured: SampledSizes) -> float:
    cost = restore_seconds(catalog, measured.rates)
    chains = [one for one in plan_all(catalog).values() if not isinstance(one, CkptError)]
    return max((sum(map(cost, chain.encodings)) for chain in chains), default=0.0)


def _kept_for_long(catalog: Catalog) -> Callable[[Node], bool]:
    """Return a function that tells of a kept checkpoint whether the store's rules will keep it for long."""
    if not catalog.keep or not known(catalog.keep):
        return lambda _node: True
    reasons, _ = reasons_of(catalog, catalog.keep)
    lasting = {node for reason, nodes in reasons.items() if ends(reason) == "never" for node in nodes}
    return lasting.__contains__
