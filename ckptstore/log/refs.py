"""Resolves REFs: finds the checkpoint that a REF names (`ckptstore.formats.history.checkpoint_ref` parses it).

``latest`` is the highest step of the newest term (of an empty term, its parent). ``STEP`` is that step in the newest
term that has it. ``STEP@TERM`` is exact. ``tag:NAME`` is the checkpoint that the tag names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

from ckptstore.errors import CheckpointNotFoundError, CorruptLogError, UsageError
from ckptstore.formats.history.catalog import Catalog, TermEntry
from ckptstore.formats.history.checkpoint_ref import LATEST, Ref, check_tag
from ckptstore.formats.history.records import CheckpointEntry, ref_of

__all__ = ["check_new_tag", "nothing_latest", "parsed", "resolve"]

_NEAREST: Final = 4


def parsed(catalog: Catalog, ref: Ref | str | int) -> Ref:
    """The parsed REF; the error for an invalid text suggests a tag of the catalog. Raises `UsageError`."""
    return Ref.parse(ref, catalog.tags)


def resolve(catalog: Catalog, ref: Ref | str | int) -> CheckpointEntry:
    """The checkpoint that `ref` names.

    Args:
        catalog: the folded log.
        ref: ``latest``, ``STEP``, ``STEP@TERM`` or ``tag:NAME``; a whole number of any type is a STEP.

    Raises:
        UsageError: `ref` is none of these.
        CheckpointNotFoundError: no checkpoint matches it; the message lists the nearest steps, or the tags.
        CorruptLogError: a damaged slot leaves ``latest`` undecided, or may have held a newer checkpoint of this STEP;
            names the slot and a REF that can be used instead.
    """
    wanted = parsed(catalog, ref)
    if wanted.tag is not None:
        return _by_tag(catalog, wanted.tag)
    if wanted.step is not None:
        return _by_step(catalog, wanted.step, wanted.term)
    newest = catalog.latest()
    if newest is None:
        raise CheckpointNotFoundError(nothing_latest(catalog))
    return newest


def nothing_latest(catalog: Catalog) -> str:
    """Why there is no ``latest``, and what there is instead, as a sentence."""
    if not catalog.checkpoints:
        return "the store holds no checkpoint yet"
    newest = ref_of(max(catalog.checkpoints))
    return (
        f"term {catalog.term} starts from scratch and holds no checkpoint yet, so there is no latest; the newest of "
        f"earlier terms is {newest}: name it to load it, and to continue from it, as in writer(parent={newest!r})"
    )


def _by_step(catalog: Catalog, step: int, term: int | None) -> CheckpointEntry:
    terms = [term] if term is not None else sorted(catalog.terms, reverse=True)
    for number in terms:
        if entry := catalog.checkpoints.get((number, step)):
            if term is None:
                _check_newest(catalog, entry)
            return entry
    error = CheckpointNotFoundError(_no_step(catalog, step, term))
    error.step, error.term = step, term
    if _loss_text(catalog) and not catalog.checkpoints:
        error.add_note(catalog.remedy())
    raise error


def _no_step(catalog: Catalog, step: int, term: int | None) -> str:
    """The text of an error: a step is missing, and which steps are near."""
    wanted = f"step {step}" if term is None else ref_of((term, step))
    if lost := _loss_text(catalog):
        nearest = _nearest(catalog.checkpoints.values(), step)
        return f"no checkpoint of {wanted} is left; {lost}, which may have held it; {nearest}"
    if not catalog.checkpoints:
        return f"no checkpoint of step {step}: the store holds no checkpoint yet"
    if term is None:
        return f"no checkpoint of step {step}; {_nearest(catalog.checkpoints.values(), step)}"
    if term not in catalog.terms:
        known = ", ".join(map(str, sorted(catalog.terms)[-_NEAREST:]))
        return f"no checkpoint {wanted}: there is no term {term}; the newest are {known}"
    of_term = [entry for entry in catalog.checkpoints.values() if entry.term == term]
    return f"no checkpoint {wanted}; {_nearest(of_term, step, f'term {term}')}"


def _check_newest(catalog: Catalog, entry: CheckpointEntry) -> None:
    """Raise for a step of an older term if a newer term may have had it in a slot that is damaged or lost."""
    if catalog.lost > catalog.term:
        raise CorruptLogError(
            f"{_loss_text(catalog)}, and may have held a newer step {entry.step}; "
            f"the newest that is left is {entry.ref}: to use it, name it"
        )
    following = min((opened for opened in catalog.terms.values() if opened.term > entry.term), key=_term, default=None)
    end = catalog.next_seq if following is None else following.seq
    hidden = [seq for seq in catalog.damage if seq >= end]
    if following is None or not following.known or following.term != entry.term + 1:
        # An OPEN and a COMMIT of the missing term may both be lost. An intact record behind either would name the term.
        run = _run_before(catalog.damage, end)
        hidden += run if len(run) > 1 else []
    if hidden:
        raise CorruptLogError(
            f"log slot {hidden[0]} is damaged and may have held a newer step {entry.step}; "
            f"the newest intact one is {entry.ref}: to use it, name it"
        )


def _run_before(damage: Sequence[int], end: int) -> list[int]:
    """The uninterrupted run of damaged slots right before slot `end`."""
    run: list[int] = []
    for seq in reversed([seq for seq in damage if seq < end]):
        if seq != end - 1 - len(run):
            break
        run.insert(0, seq)
    return run


def _term(opened: TermEntry) -> int:
    return opened.term


def _loss_text(catalog: Catalog) -> str:
    """The losses of the log, as text; empty: none."""
    if catalog.lost > catalog.term:
        return f"the end of the log is lost, with term {catalog.lost}"
    slots = ", ".join(map(str, catalog.damage[:3])) + (" ..." if len(catalog.damage) > 3 else "")
    return f"log slot {slots} is damaged or lost" if slots else ""


def _nearest(entries: Iterable[CheckpointEntry], step: int, where: str = "the store") -> str:
    close = sorted(entries, key=lambda entry: (abs(entry.step - step), -entry.term))[:_NEAREST]
    if not close:
        return f"{where} holds none"
    return "the nearest are " + ", ".join(entry.ref for entry in sorted(close, key=lambda entry: entry.id))


def _by_tag(catalog: Catalog, name: str) -> CheckpointEntry:
    node = catalog.tags.get(name)
    entry = None if node is None else catalog.checkpoints.get(node)
    hidden = [seq for seq in catalog.damage if entry is None or seq > catalog.slots[entry.node]]
    if hidden or catalog.lost > catalog.term:
        left = "" if entry is None else f"; what is left of it names {entry.ref}: name that to use it"
        raise CorruptLogError(f"{_loss_text(catalog)}, and may have held what tag {name!r} names{left}")
    if entry is None:
        there = f"the tags are {', '.join(sorted(catalog.tags)[:20])}" if catalog.tags else "there are no tags"
        error = CheckpointNotFoundError(f"no tag {name!r}; {there}")
        if close := get_close_matches(name, catalog.tags, n=1):
            error.add_note(f"did you mean tag:{close[0]}?")
        raise error
    return entry


def check_new_tag(name: object) -> None:
    """Raise if a new tag may not have this name. Older stores may hold tags that look like a STEP or a range: they stay
    usable.

    Raises:
        UsageError: it has characters that a name may not have, or looks like another REF: ``latest``, ``20``, ``A..B``.
    """
    check_tag(name)
    assert isinstance(name, str)
    if name == LATEST or ".." in name or (name.isascii() and name.isdecimal()):
        raise UsageError(f"{name!r:.80} is not a tag name: it reads like another REF (latest, a STEP, or a range A..B)")
