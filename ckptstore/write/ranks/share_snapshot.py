"""Do the work of a save that needs the caller's state as it is now: agree who writes what, compute digests, copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.crash_points import crash_point
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.ranks.messages.key_value_store import ReplyDeadline
from ckptstore.write.ranks.rank_agreement import agree
from ckptstore.write.ranks.rank_resources import RankResources
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.ranks.rank_term import RankTerm
from ckptstore.write.ranks.shares import ChosenDigests, digests_of, holding_of, share_of, steady, updates_of
from ckptstore.write.saves.in_flight import Place
from ckptstore.write.saves.save_metrics import from_devices
from ckptstore.write.stage import Bounded, Copies, InPlace
from ckptstore.write.steps.updates import Explaining, Found, Hold, Update, Updates, with_copies, with_sparse_copies

__all__ = ["prepare", "with_digests"]


def prepare(
    resources: RankResources,
    rank_term: RankTerm,
    one: RankSave,
    state: Any,
    updates: Updates | None,
    explaining: Explaining,
) -> None:
    """Agree what this rank stores, and copy it if the caller continues.

    Args:
        state: as for `RankWriter.save`, or for `RankWriter.take_over`. `updates`: likewise.
        explaining: looks up the updates.
    """
    adopted = state if isinstance(state, Copies) else None
    if adopted is not None:
        state = adopted.flat
    flat = bridge.flattened(state, sharded=True)
    resources.wake_for(flat.nbytes)
    named = steady(flat, resources.ranks.globs)
    given = explaining.found(updates, flat)
    found, hold = named.moved(given), given.hold if isinstance(given, Found) else None
    flat = named.flat
    one.explained = bool(found)
    families = len(rank_term.families)
    _learn(rank_term, found)
    if rank_term.agreed is not None and len(rank_term.families) > families:
        explaining.say(
            "the ranks divide their tensors again, because earlier saves did not say what an optimizer moves together: "
            "the next checkpoint is a full. Give updates= with the first save, too"
        )
    holding = holding_of(named, resources.group.rank, resources.ranks.globs, list(rank_term.families))
    before, apart = rank_term.agreed, resources.ranks.diverged != "warn"
    deadline = ReplyDeadline(resources.ranks.timeout, resources.group.ended, resources.group.size)
    agreement = rank_term.agreed = one.agreement = agree(one.exchange, holding, before, deadline, replicas_apart=apart)
    one.kept = agreement is before
    crash_point("ranks.divided")
    compared = {name: flat.tensors[name] for name in flat.tensors if name in agreement.compared}
    one.digests = {} if resources.ranks.diverged == "ignore" else digests_of(compared, resources.workers.pool)
    one.tree = holding.tree
    share = share_of(holding, agreement.writes)
    own = updates_of(holding, agreement.writes, found)
    if adopted is not None:
        _adopt(one, share, adopted, own)
    else:
        _copy(resources, one, share, own, hold, diffs=explaining.wanted)


def _copy(
    resources: RankResources,
    one: RankSave,
    share: FlatState,
    updates: Sequence[Update],
    hold: Hold | None,
    *,
    diffs: bool,
) -> None:
    """Copy the share, or prepare the copy unit by unit, unless it may be read in place.

    Args:
        updates: those of the share.
        hold: see `Found`.
        diffs: steps are stored as step diffs.
    """
    if bridge.uses_devices():
        one.crossing.nbytes = from_devices(share)
    bounded = resources.bounded
    if bounded is not None and (one.asynchronous or not resources.options.plain):
        one.stage = Bounded(bounded.copy_of(share, _known(share, one.digests)), with_sparse_copies(updates))
        return
    if one.asynchronous:
        with resources.recomputed.sending(share, updates, hold, one.crossing) as sending:
            snapshot = resources.snapshots.placed(share, resources.blocks, queued=True, without=sending.names)
            sending.copied(_copied(resources, one, snapshot, updates, sending.tensors))
    elif diffs:  # the next step is compressed against this one
        resources.recomputed.forget()
        _copied(resources, one, resources.snapshots.copy(share, resources.workers.pool), updates, {})
    else:
        one.stage = InPlace(share)


def _copied(
    resources: RankResources,
    one: RankSave,
    snapshot: Snapshot,
    updates: Sequence[Update],
    also: Mapping[str, TensorSource],
) -> Copies:
    """The stage of a share that is copied, with copies of the gradients, and of other tensors."""
    one.stage = stage = Copies(snapshot)
    stage.flat = with_digests(snapshot.flat, one.digests)
    stage.updates, stage.gradients = with_copies(updates, resources.snapshots, resources.blocks, queued=True, also=also)
    return stage


def _adopt(one: RankSave, share: FlatState, adopted: Copies, updates: Sequence[Update]) -> None:
    """Leave the share where it is: the adopted snapshot owns the whole state that contains it."""
    flat = LaidOutState(share.tree, dict(share.tensors), ())
    one.stage = Copies(Snapshot(flat, lambda: None, adopted.state.free), updates, adopted.gradients)
    one.stage.flat = with_digests(flat, one.digests)
    one.enter(Place(adopted.state.land))


def _learn(rank_term: RankTerm, updates: Sequence[Update]) -> None:
    """Note which tensors an optimizer moves together.

    Once the ranks have agreed, only tensors that several ranks hold are divided again. For other tensors each rank
    writes its own part anyway.
    """
    known = rank_term.agreed
    for update in updates:
        if known is None or not known.compared.isdisjoint(update.slots):
            rank_term.families.setdefault(tuple(update.slots))


def with_digests(share: LaidOutState, digests: Mapping[str, int] | None) -> LaidOutState:
    """Use the digests that were computed for comparison: a tensor that is stored whole needs no second computation."""
    return replace(share, digests=_known(share, digests))


def _known(share: FlatState, digests: Mapping[str, int] | None) -> Mapping[str, int]:
    """The digests of the tensors that a share stores whole. Reading one may wait for a device."""
    known = {} if digests is None else digests
    tensors = share.tensors.items()
    return ChosenDigests(
        known, [name for name, source in tensors if name in known and place_of(source) == (None, None)]
    )
