"""Every search: its bounds and its expected result.

``…_HOLDS`` is the protocol as it is, small enough for every change; ``…_HOLDS_FULL`` takes minutes. Each of the
``…_MUTANTS`` omits one rule, and must be caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from tools.protocol.arriving_model import ArrivingModel, ArrivingRules
from tools.protocol.compact_model import CompactModel
from tools.protocol.explore import Model
from tools.protocol.log_model import LogModel, LogRules
from tools.protocol.loss_model import LossModel, LossRules
from tools.protocol.power_model import PowerModel, PowerRules
from tools.protocol.prune_model import PruneModel
from tools.protocol.recycle_model import RecycleModel, RecycleRules
from tools.protocol.remote_model import RemoteModel, RemoteRules
from tools.protocol.store_model import StoreModel, StoreRules
from tools.protocol.tiers_model import TiersModel, TiersRules

__all__ = ["Case", "cases"]

LOG_HOLDS: dict[str, LogRules] = {
    "2 writers, 1 fault": LogRules(readers=0, slots=4),
    "2 writers, 1 of them slow, a reader": LogRules(commits=(2, 0), slots=4, faults=0),
    "2 writers, 1 of them slow, 1 fault": LogRules(opens=(1, 2), commits=(2, 0), slots=4, readers=0),
    "1 writer that opens twice, 1 fault": LogRules(writers=1, readers=0, opens=(2, 2), commits=(3,), slots=5),
    "K = 3, 1 writer, a reader": LogRules(writers=1, every=3, commits=(3,), slots=5, faults=0),
    "1 writer, a reader that continues from its view": LogRules(writers=1, commits=(3,), slots=4, reads=2, faults=0),
}
LOG_HOLDS_FULL: dict[str, LogRules] = {
    "2 writers, a reader": LogRules(slots=4, faults=0),
    "2 writers that restart from their views, 1 fault": LogRules(
        opens=(2, 2), commits=(2, 1), slots=4, readers=0, views=True
    ),
    "2 writers, 1 of them slow, a reader that continues from its view": LogRules(
        commits=(2, 0), slots=4, reads=2, faults=0
    ),
    "2 writers, 1 of them slow, a reader, 1 fault": LogRules(commits=(2, 0), slots=4),
    "2 writers that open twice, 1 fault": LogRules(opens=(2, 2), commits=(2, 1), readers=0),
    "1 writer and a reader, 2 faults": LogRules(writers=1, opens=(2, 2), commits=(3,), faults=2),
    "K = 3: 2 writers, 1 fault": LogRules(every=3, slots=6, commits=(3, 1), readers=0),
    "3 writers": LogRules(writers=3, commits=(1, 1, 1), faults=0, readers=0),
    "3 writers, 1 fault": LogRules(writers=3, slots=4, commits=(1, 1, 1), readers=0),
}
LOG_MUTANTS: dict[str, LogRules] = {
    "an OPEN is not verified": LogRules(verify_open=False, readers=0, commits=(3, 1), faults=0),
    "OPENs are deleted": LogRules(keep_opens=False, readers=0, commits=(1, 2), faults=0),
    "anchors are deleted": LogRules(keep_anchors=False, readers=0, commits=(4, 0), slots=6, faults=0),
    "slots are deleted before the next anchor exists": LogRules(
        anchor_before_deletion=False, readers=0, every=3, commits=(3, 1), faults=0
    ),
    "slots are deleted up to the newest fold": LogRules(delete_up_to="newest", readers=0, commits=(3, 0)),
    "a read is not validated by the anchor": LogRules(
        validate_read=False, writers=1, commits=(4,), slots=5, every=3, faults=0
    ),
    "strays are not recognized by their terms": LogRules(
        check_terms=False, opens=(1, 2), commits=(2, 0), slots=4, readers=0, faults=0
    ),
    "a refused create is taken for success": LogRules(read_back="take for success", readers=0),
    "a refused create is taken for a fence": LogRules(read_back="take for fence", readers=0),
    "a slot gets other bytes after CommitUnknown": LogRules(
        resend_identical=False, writers=1, commits=(5,), faults=2, readers=0
    ),
    "an absent slot is taken for lost without a look at the anchor": LogRules(
        ask_anchor_before_lost=False, writers=1, commits=(4,), faults=0
    ),
    "an anchor after a stray is taken for damage": LogRules(
        anchors_are_no_damage=False, opens=(1, 2), commits=(2, 0), slots=4, readers=0, faults=0
    ),
}

STORE_HOLDS: dict[str, StoreRules] = {
    "a writer, a reader, gc": StoreRules(opens=1, records=4),
    "a writer that crashes and opens again, late creates, gc": StoreRules(
        records=4, checkpoints=1, readers=0, faults=1, redundant=True, sweep=True
    ),
    "a writer, an external compactor, gc": StoreRules(opens=1, records=4, compactors=1, readers=0, redundant=True),
    "a writer that retires, a compactor that frees bases, gc": StoreRules(
        opens=1, checkpoints=3, records=5, compactors=1, readers=0, frees_bases=True
    ),
}
STORE_HOLDS_FULL: dict[str, StoreRules] = {
    "a writer that crashes and opens again, a reader, gc": StoreRules(),
    "2 writers, a reader, gc, forks": StoreRules(writers=2, opens=1),
    "a writer with 2 segments in flight, a reader, gc, dead pins": StoreRules(
        opens=1, checkpoints=3, pins_may_die=True, rounds=2, in_flight=2
    ),
    "2 writers, 2 collectors, late creates": StoreRules(
        writers=2, opens=1, checkpoints=1, collectors=2, readers=0, faults=1
    ),
    "a writer that opens again, 2 in flight, late creates, gc": StoreRules(
        records=6, in_flight=2, readers=0, faults=1, sweep=True
    ),
    "a writer that opens again, a compactor, gc": StoreRules(records=6, compactors=1, readers=0, redundant=True),
    "a writer, a compactor, a reader, gc, 2 in flight": StoreRules(opens=1, checkpoints=3, compactors=1, in_flight=2),
    "2 writers, a compactor, gc, late creates": StoreRules(writers=2, opens=1, compactors=1, readers=0, faults=1),
    "a writer that retires, a compactor that frees bases, a reader, gc": StoreRules(
        opens=1, checkpoints=3, records=5, compactors=1, frees_bases=True
    ),
    "a writer that retires, with 2 in flight, a compactor that frees bases, gc": StoreRules(
        opens=1, checkpoints=3, in_flight=2, compactors=1, readers=0, frees_bases=True
    ),
}
STORE_MUTANTS: dict[str, StoreRules] = {
    "no second read after the pin": StoreRules(read_after_pin=False, opens=1),
    "gc lists the pins before it reads the log": StoreRules(log_before_pins=False, opens=1),
    "a pin names the checkpoint, not its segments": StoreRules(pin_names_segments=False, opens=1),
    "orphans of the current term are collected": StoreRules(orphans="all", opens=1, readers=0),
    "orphans of any other term are collected": StoreRules(orphans="other terms", readers=0),
    "retention ignores bases": StoreRules(keep_bases=False, readers=0, collectors=0),
    "the parent is not looked up again": StoreRules(check_parent=False, writers=2, opens=1, readers=0, collectors=0),
    "the base of a segment in flight is not checked": StoreRules(
        check_base=False, opens=1, checkpoints=3, compactors=1, readers=0, collectors=0
    ),
    "a writer deletes its segments after CommitUnknown": StoreRules(
        delete_after_unknown=True, faults=1, readers=0, collectors=0
    ),
    "a request to an older term is accepted": StoreRules(
        requests_of_own_term=False, compactors=1, readers=0, records=6, collectors=0
    ),
    "a request is accepted twice": StoreRules(
        requests_once=False, opens=1, compactors=1, readers=0, records=7, redundant=True
    ),
    "a request is not checked against the catalog": StoreRules(
        requests_checked=False, opens=1, checkpoints=3, compactors=1, readers=0, records=6
    ),
    "a request is checked for its additions, and not for the needs of others": StoreRules(
        requests_checked_for_others=False,
        frees_bases=True,
        opens=1,
        checkpoints=3,
        in_flight=2,
        compactors=1,
        readers=0,
        collectors=0,
    ),
    "a compactor that frees bases keeps no pin": StoreRules(
        read_after_pin=False, frees_bases=True, opens=1, checkpoints=3, compactors=1, readers=0, records=5
    ),
    "a compactor writes under an invented term": StoreRules(
        compactor_writes_under_the_term=False, opens=1, compactors=1, readers=0
    ),
}

PRUNE_HOLDS: dict[str, PruneModel] = {
    "a writer that opens again, a prune, gc": PruneModel(StoreRules(compactors=1, readers=0)),
    "a writer, a prune, a reader, gc": PruneModel(StoreRules(opens=1, checkpoints=3, compactors=1, tries=1)),
}
PRUNE_HOLDS_FULL: dict[str, PruneModel] = {
    "2 writers, 2 prunes, gc": PruneModel(StoreRules(writers=2, opens=1, compactors=2, readers=0)),
    "a writer that opens again, a prune, gc, late creates": PruneModel(
        StoreRules(compactors=1, readers=0, records=6, faults=1)
    ),
}
PRUNE_MUTANTS: dict[str, PruneModel] = {
    "the newest may be retired": PruneModel(StoreRules(opens=1, compactors=1, readers=0, collectors=0), "none"),
    "the newest is the highest of all": PruneModel(
        StoreRules(compactors=1, readers=0, collectors=0, records=6), "highest"
    ),
    "a prune of an older term is carried out": PruneModel(
        StoreRules(compactors=1, readers=0, collectors=0, records=6, requests_of_own_term=False)
    ),
    "a prune is not checked against the catalog": PruneModel(
        StoreRules(opens=1, checkpoints=3, compactors=1, readers=0, collectors=0, records=6, requests_checked=False)
    ),
    "bases of kept checkpoints are dropped": PruneModel(StoreRules(opens=1, readers=0, collectors=0, keep_bases=False)),
}

COMPACT_HOLDS: dict[str, CompactModel] = {
    "a writer that retires, a requester that prunes or moves, torn writes, gc": CompactModel(
        StoreRules(opens=1, checkpoints=3, records=5, compactors=1, readers=0, frees_bases=True)
    ),
    "a writer, a move killed anywhere and another, damage": CompactModel(
        StoreRules(opens=1, checkpoints=2, records=5, compactors=2, readers=0, collectors=0, frees_bases=True),
        damages=1,
    ),
}
COMPACT_HOLDS_FULL: dict[str, CompactModel] = {
    "a writer that opens again, a prune and a move, gc, damage": CompactModel(
        StoreRules(checkpoints=2, records=6, compactors=2, readers=0, frees_bases=True), damages=1
    ),
    "2 writers, a move, a reader, gc": CompactModel(
        StoreRules(writers=2, opens=1, records=6, compactors=1, frees_bases=True)
    ),
}
_MOVE: Final = StoreRules(opens=1, records=5, compactors=1, readers=0, collectors=0, frees_bases=True)
COMPACT_MUTANTS: dict[str, CompactModel] = {
    "a written segment is not read back": CompactModel(_MOVE, read_back=False),
    "decoded data is not compared": CompactModel(_MOVE, compared=False, damages=1),
    "the drops are requested before the new encoding, and not checked": CompactModel(
        replace(_MOVE, requests_checked=False), one_record=False
    ),
    "a prune may retire the newest": CompactModel(_MOVE, "none"),
    "a move is not checked against later retirements": CompactModel(
        replace(_MOVE, checkpoints=3, records=6, requests_checked=False)
    ),
    "two moves free each other's bases": CompactModel(
        replace(_MOVE, checkpoints=3, records=6, compactors=2, requests_checked_for_others=False)
    ),
    "a move of an older term is carried out": CompactModel(
        replace(_MOVE, opens=2, records=6, requests_of_own_term=False)
    ),
    "a move keeps no pin": CompactModel(replace(_MOVE, checkpoints=3, collectors=1, read_after_pin=False)),
    "gc deletes segments of a move before its request": CompactModel(replace(_MOVE, collectors=1, orphans="all")),
}

POWER_HOLDS: dict[str, PowerRules] = {"everyone settles what it saw before it acts on it": PowerRules()}
POWER_MUTANTS: dict[str, PowerRules] = {
    "a create does not fsync log/": PowerRules(create_syncs=False),
    "a slot that was read back is not settled": PowerRules(read_back_settles=False),
    "an opener does not settle the slots before its OPEN": PowerRules(open_settles=False),
    "a folder does not settle the slots that it folds": PowerRules(fold_settles=False),
    "gc does not settle the drop": PowerRules(gc_settles=False),
    "trim does not settle the fold": PowerRules(trim_settles=False),
    "a requester does not settle the answer": PowerRules(requester_settles=False),
}


LOSS_HOLDS: dict[str, LossRules] = {
    "slots are lost and damaged": LossRules(copies=0),
    "slots are lost and damaged, an older copy is put back": LossRules(),
    "an older copy is put back under writers that look": LossRules(losses=0, damages=0, opens=(2, 1), commits=(2, 2)),
    "an older copy is put back under openers that are slow": LossRules(
        losses=0, damages=0, slow_opens=True, opens=(2, 1), commits=(2, 2)
    ),
}
LOSS_HOLDS_FULL: dict[str, LossRules] = {
    "a writer that opens again, slots are lost and damaged": LossRules(copies=0, opens=(2, 1)),
    "2 folds, slots are lost and damaged": LossRules(copies=0, folds=2),
    "a writer that opens again, losses, and an older copy": LossRules(opens=(2, 1)),
    "2 writers that open twice, an older copy under slow openers": LossRules(
        losses=0, damages=0, slow_opens=True, opens=(2, 2), commits=(3, 2), slots=6
    ),
}
LOSS_MUTANTS: dict[str, LossRules] = {
    "slots above an absent one are not looked for": LossRules(look_above=False, copies=0),
    "slots do not name the one before": LossRules(linked=False, copies=0, opens=(2, 1), commits=(2, 2)),
    "commits do not repeat the nonce of their OPEN": LossRules(nonces=False, copies=0, opens=(2, 1), commits=(2, 2)),
    "folds do not name their last slot": LossRules(folds_carry_last=False, copies=0),
    "a fold is not compared with the slot that it ends with": LossRules(
        compare_folds=False, copies=0, opens=(2, 1), commits=(2, 2)
    ),
    "an OPEN's parent is not looked for": LossRules(parents_found=False, copies=0),
    "a writer does not look at the slot before its own": LossRules(writers_look=False, losses=0, damages=0),
    "latest looks past damage": LossRules(refuse_behind_damage=False, copies=0),
}


ARRIVING_HOLDS: dict[str, ArrivingRules] = {
    "a writer that may be killed, a reader that continues from its view": ArrivingRules(opens=0),
    "a writer that is stopped for a while, a reader": ArrivingRules(opens=0, kills=0, stops=1),
    "a writer that is killed or stopped, another one that opens twice": ArrivingRules(
        reads=0, opens=2, kills=2, stops=1
    ),
    "2 writers, a reader": ArrivingRules(commits=(1, 1), slots=4, reads=1),
    "a medium that creates atomically": ArrivingRules(parts=0),
}
ARRIVING_HOLDS_FULL: dict[str, ArrivingRules] = {
    "2 writers, one of them stopped, a reader": ArrivingRules(kills=0, reads=1, stops=1),
    "2 writers that are killed, a reader that continues from its view": ArrivingRules(slots=4),
}
ARRIVING_MUTANTS: dict[str, ArrivingRules] = {
    "a torn newest slot is damage at once": ArrivingRules(waits=False, opens=0),
    "a torn newest slot is ignored for ever": ArrivingRules(passes_over=True, reads=0),
    "a torn newest slot is waited for for ever": ArrivingRules(gives_up=False, opens=0),
    "a slot that grows is given up": ArrivingRules(growth_counts=False, opens=0, kills=0),
    "a read from before the successor was seen decides": ArrivingRules(reads_after_successor=False, opens=0, kills=0),
    "a reader continues from a view that ends in a torn slot": ArrivingRules(
        view_looks=False, opens=0, kills=0, stops=1
    ),
    "a slot that was given up is not read again when its successor is found": ArrivingRules(
        looks_back=False, reads=0, kills=0, stops=1
    ),
    "an OPEN over a slot that is whole by then counts": ArrivingRules(open_looks=False, reads=0, kills=0, stops=1),
    "a commit is acknowledged although a term was opened over it": ArrivingRules(
        commit_looks=False, reads=0, kills=0, stops=1
    ),
}


RECYCLE_HOLDS: dict[str, RecycleRules] = {
    "locks and leases, a reader, a foreign reader, a zombie, a power cut": RecycleRules(),
    "locks alone protect our reader": RecycleRules(lease=False, strangers=False),
    "leases alone protect all readers": RecycleRules(writers_lock=False, readers_lock=False),
}
RECYCLE_MUTANTS: dict[str, RecycleRules] = {
    "neither a writer's lock nor a lease": RecycleRules(writers_lock=False, lease=False, strangers=False),
    "neither a reader's lock nor a lease": RecycleRules(readers_lock=False, lease=False, strangers=False),
    "no lease": RecycleRules(lease=False),
    "the lease is released before the header is cleared": RecycleRules(lease_until_cleared=False),
    "the header is not cleared": RecycleRules(clear=False),
    "the header is written first": RecycleRules(header_last=False),
    "a reader does not compare the header": RecycleRules(readers_compare=False),
    "a second name is not checked for": RecycleRules(one_name=False),
    "the owner of the name is not checked": RecycleRules(own_name=False),
    "names are checked before the lease is held": RecycleRules(names_under_lease=False),
}


TIERS_HOLDS: dict[str, TiersRules] = {
    "a machine that opens again, another one, kills, a lost disk, gc": TiersRules(commits=(2, 0), late=0),
    "creates that arrive late": TiersRules(opens=(1, 1), losses=0, collect=False),
    "2 drains of a machine": TiersRules(opens=(1, 1), commits=(1, 0), drains=2, losses=0),
}
TIERS_HOLDS_FULL: dict[str, TiersRules] = {
    "two machines that commit, a lost disk, gc": TiersRules(commits=(2, 1), late=0),
    "a machine that opens again, late creates": TiersRules(losses=0, collect=False),
    "2 drains of each machine, a lost disk, late creates, gc": TiersRules(drains=2),
    "both open twice": TiersRules(opens=(2, 2), commits=(2, 2)),
}
TIERS_MUTANTS: dict[str, TiersRules] = {
    "an OPEN is written only to the machine": TiersRules(remote_first=False),
    "a term is opened before undrained commits are drained": TiersRules(drain_before_open=False),
    "the slot is written before the segments": TiersRules(segments_first=False),
    "the newest commit is drained first": TiersRules(in_order=False),
    "a taken slot is treated as its own": TiersRules(read_back=False),
    "a drain does not compare terms": TiersRules(terms_compared=False),
    "a drain resumes from its own memory": TiersRules(resume_from_remote=False),
    "the remote is reported to have all that the machine has": TiersRules(acknowledge_drained=False),
    "gc deletes undrained segments": TiersRules(keep_undrained=False),
    "a machine that rejoins replaces its log by the remote's": TiersRules(keep_branches=False),
    "branches are not reported": TiersRules(report_branches=False),
}


REMOTE_HOLDS: dict[str, RemoteRules] = {
    "a drain, a prune, gc, another machine": RemoteRules(saves=2),
    "local damage, a prune that asks, gc, a reader": RemoteRules(damages=1, opens=0, elsewhere=0, take_over=False),
    "2 drains beside a prune that asks": RemoteRules(drains=2, opens=0, elsewhere=0, take_over=False),
    "the remote begins as a copy of a part": RemoteRules(part=True, elsewhere=0),
    "a term without the remote, one of its number elsewhere, a reader": RemoteRules(
        saves=2, alone=1, damages=1, prunes=0, opens=0
    ),
}
REMOTE_HOLDS_FULL: dict[str, RemoteRules] = {
    "3 saves, a prune, gc, another machine": RemoteRules(),
    "damage, a prune, gc, another machine": RemoteRules(damages=1),
    "2 drains, damage, 2 prunes, gc": RemoteRules(drains=2, damages=1, prunes=2, opens=0, elsewhere=0),
    "a copy of a part, damage, another machine": RemoteRules(part=True, damages=1),
    "a term without the remote, a prune, another machine": RemoteRules(alone=1, elsewhere=2, opens=2),
}
_DAMAGE: Final = RemoteRules(damages=1, opens=0, elsewhere=0, take_over=False)
REMOTE_MUTANTS: dict[str, RemoteRules] = {
    "an OPEN does not have the last step of the term before it": RemoteRules(reached_told=False),
    "missing steps of a term are ignored": RemoteRules(damages=1, prunes=0, lacks_minded=False),
    "left-out steps are noted after everything else": RemoteRules(damages=1, prunes=0, lacks="last"),
    "left-out steps are not noted": RemoteRules(damages=1, prunes=0, lacks="never"),
    "checkpoints are compared by their names": RemoteRules(alone=1, prunes=0, nonces=False),
    "checkpoints retired there are brought there again": replace(_DAMAGE, damages=0, never_again=False),
    "deltas of missing bases are brought": replace(_DAMAGE, bases_there=False),
    "a drain that finds a slot taken uses the next": replace(_DAMAGE, drains=2, read_anew=False),
    "a prune is not checked against the catalog": replace(_DAMAGE, requests_checked=False),
    "a partial copy is not marked": RemoteRules(part=True, elsewhere=0, part_told=False),
    "bases of a partial copy count as promised there": RemoteRules(part=True, elsewhere=0, part_trusted=True),
    "gc deletes segments that are brought and not named yet": replace(
        _DAMAGE, damages=0, prunes=0, gc_spares_newest=False
    ),
    "filled-in data is not compared": RemoteRules(alone=1, damages=1, prunes=0, fill_compares=False),
}


class Case(NamedTuple):
    """One search and its expected result."""

    part: str
    name: str
    model: Model
    verdict: str


def cases(quick: bool) -> Iterator[Case]:
    """Every search; in the quick form only small ones, which together take less than a minute."""
    for name, power in POWER_HOLDS.items():
        yield Case("power", name, PowerModel(power), "holds")
    for name, power in POWER_MUTANTS.items():
        yield Case("power", f"mutant: {name}", PowerModel(power), "violated")
    for name, arriving in (ARRIVING_HOLDS | ({} if quick else ARRIVING_HOLDS_FULL)).items():
        yield Case("arriving", name, ArrivingModel(arriving), "holds")
    for name, arriving in ARRIVING_MUTANTS.items():
        yield Case("arriving", f"mutant: {name}", ArrivingModel(arriving), "violated")
    for name, recycle in RECYCLE_HOLDS.items():
        yield Case("recycle", name, RecycleModel(recycle), "holds")
    for name, recycle in RECYCLE_MUTANTS.items():
        yield Case("recycle", f"mutant: {name}", RecycleModel(recycle), "violated")
    for name, log in (LOG_HOLDS | ({} if quick else LOG_HOLDS_FULL)).items():
        yield Case("log", name, LogModel(log), "holds")
    for name, log in LOG_MUTANTS.items():
        yield Case("log", f"mutant: {name}", LogModel(log), "violated")
    for name, loss in (LOSS_HOLDS | ({} if quick else LOSS_HOLDS_FULL)).items():
        yield Case("loss", name, LossModel(loss), "holds")
    for name, loss in LOSS_MUTANTS.items():
        yield Case("loss", f"mutant: {name}", LossModel(loss), "violated")
    for name, store in (STORE_HOLDS | ({} if quick else STORE_HOLDS_FULL)).items():
        yield Case("store", name, StoreModel(store), "holds")
    for name, store in STORE_MUTANTS.items():
        yield Case("store", f"mutant: {name}", StoreModel(store), "violated")
    for name, prune in (PRUNE_HOLDS | ({} if quick else PRUNE_HOLDS_FULL)).items():
        yield Case("prune", name, prune, "holds")
    for name, prune in PRUNE_MUTANTS.items():
        yield Case("prune", f"mutant: {name}", prune, "violated")
    for name, compact in (COMPACT_HOLDS | ({} if quick else COMPACT_HOLDS_FULL)).items():
        yield Case("compact", name, compact, "holds")
    for name, compact in COMPACT_MUTANTS.items():
        yield Case("compact", f"mutant: {name}", compact, "violated")
    for name, tiers in (TIERS_HOLDS | ({} if quick else TIERS_HOLDS_FULL)).items():
        yield Case("tiers", name, TiersModel(tiers), "holds")
    for name, tiers in TIERS_MUTANTS.items():
        yield Case("tiers", f"mutant: {name}", TiersModel(tiers), "violated")
    for name, remote in (REMOTE_HOLDS | ({} if quick else REMOTE_HOLDS_FULL)).items():
        yield Case("remote", name, RemoteModel(remote), "holds")
    for name, remote in REMOTE_MUTANTS.items():
        yield Case("remote", f"mutant: {name}", RemoteModel(remote), "violated")
