"""REF: how people name a checkpoint, on the command line and in the API.

``latest`` is the highest step of the newest term (of an empty term, its parent). ``STEP`` is that step in the newest
term that has it. ``STEP@TERM`` is exact. ``tag:NAME`` is what the tag names.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final

from ckptstore.errors import CheckpointNotFoundError, CorruptLogError, StepOrderError, UsageError
from ckptstore.formats.catalog import Catalog, TermEntry
from ckptstore.formats.records import CheckpointEntry, ref_of, valid_tag

__all__ = ["check_new_tag", "nothing_latest", "resolve", "step_number"]

_STEP: Final = re.compile(r"(\d{1,16})(?:@(\d{1,10}))?\Z", re.ASCII)
_NEAREST: Final = 4


def resolve(catalog: Catalog, ref: str | int) -> CheckpointEntry:
    """The checkpoint that `ref` names.

    Args:
        catalog: the folded log.
        ref: ``latest``, ``STEP``, ``STEP@TERM`` or ``tag:NAME``; a whole number of any type is a STEP.

    Raises:
        UsageError: `ref` is none of these.
        CheckpointNotFoundError: nothing answers to it; the message lists the nearest steps, or the tags.
        CorruptLogError: ``latest``, or a STEP that only an older term has, behind a damaged slot; names the slot and
            what can be named instead.
    """
    text = ref.strip() if isinstance(ref, str) else _number(ref)
    if text == "latest":
        newest = catalog.latest()
        if newest is None:
            raise CheckpointNotFoundError(nothing_latest(catalog))
        return newest
    if text.startswith("tag:"):
        return _tagged(catalog, text.removeprefix("tag:"))
    match = _STEP.match(text)
    if match is None:
        raise _no_ref(text, ["latest", *(f"tag:{tag}" for tag in catalog.tags)])
    step, term = int(match[1]), None if match[2] is None else int(match[2])
    return _numbered(catalog, step, term)


def nothing_latest(catalog: Catalog) -> str:
    """Why there is no ``latest``, and what there is instead, in words."""
    if not catalog.checkpoints:
        return "the store holds no checkpoint yet"
    newest = ref_of(max(catalog.checkpoints))
    return (
        f"term {catalog.term} begins from nothing and holds no checkpoint yet, so there is no latest; the newest of "
        f"earlier terms is {newest}: name it to load it, and to continue from it, as in writer(parent={newest!r})"
    )


def _number(ref: object) -> str:
    try:
        return str(step_number(ref))
    except StepOrderError:
        raise _no_ref(ref) from None


def _no_ref(ref: object, names: Sequence[str] = ()) -> UsageError:
    error = UsageError(f"{ref!r:.80} is no REF; use latest, STEP, STEP@TERM or tag:NAME")
    if isinstance(own := getattr(ref, "ref", None), str):  # a CheckpointInfo
        error.add_note(f"name a checkpoint by its ref: {own!r}")
    bare = {name.removeprefix("tag:"): name for name in names}
    if close := get_close_matches(str(ref)[:80], bare, n=1):
        error.add_note(f"did you mean {bare[close[0]]}?")
    return error


def step_number(step: Any) -> int:
    """A step as Python's int: of a whole number of any type, numpy's and torch's scalars among them.

    Raises:
        StepOrderError: it is something else; truth values and floats are, even whole ones.
    """
    try:
        if isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool"):
            raise TypeError
        return operator.index(step)
    except TypeError:
        raise StepOrderError(f"step {step!r:.80}: a whole number from 0 to 2^53 - 1 is needed") from None


def _numbered(catalog: Catalog, step: int, term: int | None) -> CheckpointEntry:
    terms = [term] if term is not None else sorted(catalog.terms, reverse=True)
    for number in terms:
        if entry := catalog.checkpoints.get((number, step)):
            if term is None:
                _check_newest(catalog, entry)
            return entry
    wanted = f"step {step}" if term is None else ref_of((term, step))
    if lost := _losses(catalog):
        nearest = _nearest(catalog.checkpoints.values(), step)
        error = CheckpointNotFoundError(f"no checkpoint of {wanted} is left; {lost}, which may have held it; {nearest}")
        if not catalog.checkpoints:
            error.add_note(catalog.remedy())
        raise error
    if not catalog.checkpoints:
        raise CheckpointNotFoundError(f"no checkpoint of step {step}: the store holds no checkpoint yet")
    if term is None:
        raise CheckpointNotFoundError(f"no checkpoint of step {step}; {_nearest(catalog.checkpoints.values(), step)}")
    if term not in catalog.terms:
        known = ", ".join(map(str, sorted(catalog.terms)[-_NEAREST:]))
        raise CheckpointNotFoundError(f"no checkpoint {wanted}: there is no term {term}; the newest are {known}")
    raise CheckpointNotFoundError(
        f"no checkpoint {wanted}; "
        + _nearest([entry for entry in catalog.checkpoints.values() if entry.term == term], step, f"term {term}")
    )


def _check_newest(catalog: Catalog, entry: CheckpointEntry) -> None:
    """Refuse a step of an older term if a newer term may have had it, too, in a slot that is damaged or lost."""
    if catalog.lost > catalog.term:
        raise CorruptLogError(
            f"{_losses(catalog)}, and may have held a newer step {entry.step}; "
            f"the newest that is left is {entry.ref}: name it so to use it"
        )
    following = min((opened for opened in catalog.terms.values() if opened.term > entry.term), key=_term, default=None)
    end = catalog.next_seq if following is None else following.seq
    hidden = [seq for seq in catalog.damage if seq >= end]
    if following is None or not following.known or following.term != entry.term + 1:
        # An OPEN and a COMMIT of it may both be lost there. An intact record behind either would tell of the term.
        run = _run_before(catalog.damage, end)
        hidden += run if len(run) > 1 else []
    if hidden:
        raise CorruptLogError(
            f"log slot {hidden[0]} is damaged and may have held a newer step {entry.step}; "
            f"the newest intact one is {entry.ref}: name it so to use it"
        )


def _run_before(damage: Sequence[int], end: int) -> list[int]:
    """The damaged slots right before slot `end`, without a gap."""
    run: list[int] = []
    for seq in reversed([seq for seq in damage if seq < end]):
        if seq != end - 1 - len(run):
            break
        run.insert(0, seq)
    return run


def _term(opened: TermEntry) -> int:
    return opened.term


def _losses(catalog: Catalog) -> str:
    """What is lost of the log, in words; empty: nothing."""
    if catalog.lost > catalog.term:
        return f"the end of the log is lost, with term {catalog.lost}"
    slots = ", ".join(map(str, catalog.damage[:3])) + (" ..." if len(catalog.damage) > 3 else "")
    return f"log slot {slots} is damaged or lost" if slots else ""


def _nearest(entries: Iterable[CheckpointEntry], step: int, where: str = "the store") -> str:
    close = sorted(entries, key=lambda entry: (abs(entry.step - step), -entry.term))[:_NEAREST]
    if not close:
        return f"{where} holds none"
    return "the nearest are " + ", ".join(entry.ref for entry in sorted(close, key=lambda entry: entry.id))


def _tagged(catalog: Catalog, name: str) -> CheckpointEntry:
    if not valid_tag(name):
        raise UsageError(f"{name!r} is no tag name: 1-128 letters, digits and _.+/-")
    node = catalog.tags.get(name)
    entry = None if node is None else catalog.checkpoints.get(node)
    hidden = [seq for seq in catalog.damage if entry is None or seq > catalog.slots[entry.node]]
    if hidden or catalog.lost > catalog.term:
        left = "" if entry is None else f"; what is left of it names {entry.ref}: name that to use it"
        raise CorruptLogError(f"{_losses(catalog)}, and may have held what tag {name!r} names{left}")
    if entry is None:
        there = f"the tags are {', '.join(sorted(catalog.tags)[:20])}" if catalog.tags else "there are no tags"
        error = CheckpointNotFoundError(f"no tag {name!r}; {there}")
        if close := get_close_matches(name, catalog.tags, n=1):
            error.add_note(f"did you mean tag:{close[0]}?")
        raise error
    return entry


def check_new_tag(name: object) -> None:
    """Refuse what may name no tag. Older stores may hold tags that read like a STEP or a range: they stay usable.

    Raises:
        UsageError: it has other signs than a name may have, or reads like another REF: ``latest``, ``20``, ``A..B``.
    """
    if not isinstance(name, str) or not valid_tag(name):
        raise UsageError(f"{name!r:.80} is no tag name: 1-128 letters, digits and _.+/-")
    if name == "latest" or ".." in name or (name.isascii() and name.isdecimal()):
        raise UsageError(f"{name!r:.80} is no tag name: it reads like another REF (latest, a STEP, or a range A..B)")
