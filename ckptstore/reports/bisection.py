"""``bisect``: at which checkpoint something began, by binary search on the history of one checkpoint.

Of n checkpoints at most ceil(log2(n + 1)) are looked at, those that are skipped not counted: 14 of 10,000.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptstore.errors import CheckpointNotFoundError, CorruptionError, UsageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.formats.records import CheckpointEntry, ref_of
from ckptstore.host.option_checks import whole
from ckptstore.log import refs
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read

__all__ = ["Answer", "Ask", "Bisected", "Predicate", "Probe", "bisect", "history", "judged", "search"]

Answer = Literal["good", "bad", "skipped"]
Ask = Callable[[CheckpointEntry], tuple[Answer, str]]
"""Says what a checkpoint is, and why it was skipped."""
Predicate = Callable[[Any], bool | None]
"""Called with a state: True: bad; False: good; None: this one cannot be judged."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A checkpoint that was looked at.

    Attributes:
        why: why it was skipped; empty otherwise.
        left: how many checkpoints may still be the first bad one, at most.
    """

    ref: str
    answer: Answer
    why: str
    left: int


@dataclass(frozen=True, slots=True)
class Bisected(HtmlTable):
    """What `bisect` found.

    Attributes:
        last_good: REF of the newest checkpoint that is known to be good before it began; None: none is.
        first_bad: REF of the oldest one that is known to be bad; None: none is.
        between: REFs of those between the two: they were skipped, and any of them, or `first_bad`, may be the first.
        contradictions: what was said that cannot be if it began once and went on: then there is no one place.
        probes: everything that was looked at, in order.
        checkpoints: how many the history has, between `good` and `bad`, those not counted.
    """

    last_good: str | None
    first_bad: str | None
    between: tuple[str, ...]
    contradictions: tuple[str, ...]
    probes: tuple[Probe, ...]
    checkpoints: int


def bisect(
    journal: Journal,
    ask: Ask,
    *,
    ref: str | int = "latest",
    good: str | int | None = None,
    bad: str | int | None = None,
    checks: int = 0,
    on_probe: Callable[[Probe], object] | None = None,
) -> Bisected:
    """Search the history of a checkpoint. See `Store.bisect`."""
    whole("checks", checks, 0)
    catalog = read(journal).catalog
    line = history(catalog, refs.resolve(catalog, ref if bad is None else bad))
    low, high = -1, len(line)
    if bad is not None:
        high -= 1
    if good is not None:
        entry = refs.resolve(catalog, good)
        if entry not in line[:high]:
            end = line[-1].ref
            raise UsageError(f"good={entry.ref} is not before {end} in its history, which begins at {line[0].ref}")
        low = line.index(entry)
    return search(line, ask, low, high, checks=checks, on_probe=on_probe)


def history(catalog: Catalog, entry: CheckpointEntry) -> list[CheckpointEntry]:
    """A checkpoint and all that it continues from, the oldest first: of a fork its own line alone."""
    found: list[CheckpointEntry] = []
    term, highest = entry.term, entry.step
    by_term: dict[int, list[CheckpointEntry]] = {}
    for one in catalog.checkpoints.values():
        by_term.setdefault(one.term, []).append(one)
    while True:
        found += sorted((one for one in by_term.get(term, ()) if one.step <= highest), key=lambda one: -one.step)
        opened = catalog.terms.get(term)
        if opened is None or opened.parent is None:
            return found[::-1]
        term, highest = opened.parent.term, opened.parent.step


def search(
    line: Sequence[CheckpointEntry],
    ask: Ask,
    low: int = -1,
    high: int | None = None,
    *,
    checks: int = 0,
    on_probe: Callable[[Probe], object] | None = None,
) -> Bisected:
    """The first bad one of a line.

    Args:
        low: place of one that is known to be good; -1: none is.
        high: place of one that is known to be bad; None or the line's length: none is.
        checks: so many more on either side are looked at, to see whether it began once and went on.
    """
    if not line:
        raise CheckpointNotFoundError("there is no checkpoint to look at")
    searching = _Search(line, ask, low, len(line) if high is None else high, on_probe)
    count = searching.high - low - 1
    searching.run()
    contradictions = searching.check(low, checks)
    low, high = searching.low, searching.high
    return Bisected(
        last_good=line[low].ref if low >= 0 else None,
        first_bad=line[high].ref if high < len(line) else None,
        between=tuple(one.ref for one in line[low + 1 : high]),
        contradictions=tuple(contradictions),
        probes=tuple(searching.probes),
        checkpoints=count,
    )


class _Search:
    """All up to `low` are good, all from `high` on are bad, as far as that is known."""

    def __init__(
        self,
        line: Sequence[CheckpointEntry],
        ask: Ask,
        low: int,
        high: int,
        on_probe: Callable[[Probe], object] | None,
    ) -> None:
        self.line, self.low, self.high = line, low, high
        self.probes: list[Probe] = []
        self._ask, self._on_probe = ask, on_probe
        self._known: dict[int, Answer] = {}

    def run(self) -> None:
        """Until nothing between is left that has not been looked at."""
        while (place := self._next()) is not None:
            answer, why = self._ask(self.line[place])
            self._known[place] = answer
            if answer == "good":
                self.low = place
            elif answer == "bad":
                self.high = place
            self._tell(place, answer, why)

    def _next(self) -> int | None:
        """The place nearest to the middle that was not skipped."""
        middle = (self.low + self.high) // 2
        for distance in range(self.high - self.low):
            for place in (middle - distance, middle + distance):
                if self.low < place < self.high and place not in self._known:
                    return place
        return None

    def _tell(self, place: int, answer: Answer, why: str) -> None:
        self.probes.append(Probe(self.line[place].ref, answer, why, self.high - self.low - 1))
        if self._on_probe is not None:
            self._on_probe(self.probes[-1])

    def check(self, low: int, checks: int) -> list[str]:
        """Look at `checks` places on either side, evenly -> those that are not as they should be."""
        wrong = []
        sides: Mapping[Answer, range] = {
            "good": range(low + 1, self.low),
            "bad": range(self.high + 1, len(self.line)),
        }
        for expected, side in sides.items():
            picked = {side[number * (len(side) - 1) // max(1, checks - 1)] for number in range(min(checks, len(side)))}
            if checks == 1 and expected == "bad" and side:
                picked = {side[-1]}  # the end of the line says most
            for place in sorted(picked - self._known.keys()):
                answer, why = self._ask(self.line[place])
                self._known[place] = answer
                self._tell(place, answer, why)
                if answer not in (expected, "skipped"):
                    wrong.append(f"{ref_of(self.line[place].node)} is {answer}, and should be {expected}")
        return wrong


def judged(load: Callable[[str], Any], predicate: Predicate) -> Ask:
    """Ask `predicate` about the state that `load` gives for a REF; what is damaged is skipped."""

    def ask(entry: CheckpointEntry) -> tuple[Answer, str]:
        try:
            state = load(entry.ref)
        except (CorruptionError, CheckpointNotFoundError) as error:  # retired meanwhile
            return "skipped", str(error)
        found = predicate(state)
        if found is None:
            return "skipped", "the predicate gave None"
        return ("bad" if found else "good"), ""

    return ask
