"""Checks the log beyond its bytes: nothing is missing from it, and each slot continues the one before.

A reader starts from a fold, and reads no slot below it. This check compares every existing slot with the one before
it. Every missing slot must be one that the rules of folding allow to be deleted (SPEC 10, ANCHORS).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ckptstore.backends.base import Backend
from ckptstore.errors import CorruptionError, ForeignObjectError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import fold_of, folder_term, object_of, slot_key
from ckptstore.log.fold_writer import KEEP
from ckptstore.log.foreign_segments import all_foreign
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import anchor_above
from ckptstore.log.partial_objects import exists
from ckptstore.log.stale_listings import LOOKS, contradiction
from ckptstore.maintenance.verify.verify_findings import Findings

__all__ = ["UNSAID", "SlotHashes", "check_folds_listed", "check_log"]

UNSAID: Final = "The store was not verified: check the endpoint and the proxies, then verify it again"
_SHOWN: Final = 4


class SlotHashes(NamedTuple):
    """The hash of an intact slot's bytes, and the hash that it states for the slot before."""

    digest: str
    previous: str


def check_log(
    journal: Journal, catalog: Catalog, slots: Mapping[int, SlotHashes], objects: Iterable[str], found: Findings
) -> None:
    """Report slots that are missing or do not continue the log, terms without their parent, and a lost end.

    Args:
        catalog: from a READ after the listing of `state_objects`, which looked above its end.
        slots: every intact slot, by its number.
        objects: every object of the store.

    Raises:
        StorageError: listings contradict each other, or contradict requests by name.
    """
    listed = set(objects)
    for seq in catalog.damage:
        if slot_key(seq) not in listed:
            found.add(slot_key(seq), CorruptionError("the slot is missing, and later ones exist"))
    for seq, slot in sorted(slots.items()):
        before = slots.get(seq - 1)
        if (before is not None and slot.previous != before.digest) or seq in catalog.damage:
            what = "it names another slot before it, or its term was opened by another writer"
            found.add(slot_key(seq), CorruptionError(f"it does not continue the log: {what}"))
    for first, last in _runs(_unexplained(journal, catalog, slots, listed, found)):
        which = "the slot is missing" if first == last else f"the slots from here to {slot_key(last)} are missing"
        found.add(slot_key(first), CorruptionError(f"{which}, and no fold allows this deletion"))
    for opened in catalog.terms.values():
        if opened.parent is not None and not opened.parent_found:
            what = (
                f"term {opened.term} continues from {opened.parent.ref}, and no earlier record promises that checkpoint"
            )
            found.add(slot_key(opened.seq), CorruptionError(what))
    unknown: dict[int, list[str]] = {}
    for key in sorted(listed):
        term = _term_of(key, catalog.term)
        if term is not None and term not in catalog.terms:
            unknown.setdefault(term, []).append(key)
    for term, keys in unknown.items():
        if all_foreign(journal.backend, journal.run, keys):
            found.strangers.update(keys)
            continue
        what = f"of term {term}, which the log does not have: its end was lost, or an older copy put back"
        named = [key for key in keys if object_of(key) is not None]
        if not named:
            what += (
                f". Readers refuse `latest` while seg/{term:010d}/ holds anything, although nothing in it has a "
                "segment's name: if you know who put it there, delete that folder, and the store is whole"
            )
        found.add((named or keys)[-1], CorruptionError(what))


def check_folds_listed(backend: Backend, listed: Iterable[str]) -> list[str]:
    """Return a new listing of the folds.

    Args:
        listed: an older listing of everything.

    Raises:
        StorageError: the old listing has folds and the new one has none, which never happens in a store.
    """
    had = any(map(fold_of, listed))
    for _ in range(LOOKS):
        keys = backend.list("fold/")
        if keys or not had:
            return keys
    raise contradiction(backend, "one listing", "folds", "another", UNSAID)


def _term_of(key: str, newest: int) -> int | None:
    """Return the term in whose folder a key is, by READ's rule: above the newest term any name counts."""
    place = object_of(key)
    if place is not None:
        return place[0]
    above = key.split("/")
    # Prevents: reporting a store as intact although every reader refuses its `latest`.
    return term if above[0] == "seg" and above[2:] and (term := folder_term(above[1])) > newest else None


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last number of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _unexplained(
    journal: Journal, catalog: Catalog, slots: Mapping[int, SlotHashes], listed: set[str], found: Findings
) -> list[int]:
    """Return missing slots that must not have been deleted, including those that a fold ends with."""
    # List folds now, after the slots: folds that still exist explain all earlier deletions.
    folds = sorted({place[0] for key in check_folds_listed(journal.backend, listed) if (place := fold_of(key))})[::-1]
    anchor_every = journal.format.anchor_every
    limit = folds[KEEP - 1] if len(folds) >= KEEP else -1
    opens = {opened.seq for opened in catalog.terms.values() if opened.known}
    top = max(slots, default=-1)
    end = max(top + 1, catalog.next_seq)

    def deletable(seq: int, limit: int) -> bool:
        # The anchor above was created before any slot above it. Whether it still exists is checked for the anchor.
        return seq <= limit and seq % anchor_every > 0 and anchor_above(seq, anchor_every) < end

    absent = [seq for seq in range(end) if seq not in slots and slot_key(seq) not in listed]
    lost = [seq for seq in absent if seq not in catalog.damage and (seq in opens or not deletable(seq, limit))]
    # Prevents: reporting slots as missing because something else answered the request for a page of their listing.
    if _listing_lacks(journal, lost, top):
        newer = set(journal.backend.list("log/"))  # new slots may appear during the listing
        lost = [seq for seq in lost if slot_key(seq) not in newer]
        if _listing_lacks(journal, lost, top):
            raise contradiction(journal.backend, f"a request for {slot_key(lost[0])}", "it", "the listing", UNSAID)
    if 0 < len(folds) < KEEP:
        # Prevents: reporting slots as lost when only a fold was deleted, and the other fold has their contents.
        covered = [seq for seq in lost if seq not in opens and deletable(seq, folds[0])]
        if covered:
            found.add("fold/", _fold_missing(covered, folds[0]))
            lost = [seq for seq in lost if seq not in set(covered)]
    return [seq for seq in lost if seq < top or _is_gone(journal, seq, found)]


def _listing_lacks(journal: Journal, lost: Sequence[int], top: int) -> bool:
    """Whether a request by name finds the first of these slots, although the listing lacks it and has a later slot."""
    if not lost or lost[0] >= top:
        return False
    try:
        return exists(journal.backend, slot_key(lost[0]))
    except ForeignObjectError:
        return False


def _fold_missing(slots: Sequence[int], left: int) -> CorruptionError:
    runs = [
        slot_key(first) if first == last else f"{slot_key(first)} to {slot_key(last)}" for first, last in _runs(slots)
    ]
    shown = ", ".join(runs[:_SHOWN]) + (f" and {len(runs) - _SHOWN} more" if runs[_SHOWN:] else "")
    return CorruptionError(
        f"a fold is missing: slots are deleted ({shown}), which needs {KEEP} folds beyond them, and only one is there "
        f"(through {slot_key(left)}). It has the contents of all of them, so nothing is lost while it is intact; a "
        "writer makes another as it saves"
    )


def _is_gone(journal: Journal, seq: int, found: Findings) -> bool:
    """Tell whether a slot above all intact ones is absent, by name: it may have been written since the listing.

    Prevents: a lost slot that is not reported, because a fold ends with it, so that readers do not need it.
    """
    try:
        return not exists(journal.backend, slot_key(seq))
    except ForeignObjectError as error:  # for example a folder, which no listing of objects shows
        found.add(slot_key(seq), error)
        return False
