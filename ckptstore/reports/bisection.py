"""Finds the checkpoint at which something began, by binary search in the history of one checkpoint (``bisect``).

It tests at most ceil(log2(n + 1)) of n checkpoints, not counting skipped ones: 14 of 10,000.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptstore.errors import CheckpointNotFoundError, CorruptionError, UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, ref_of
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.host.option_checks import whole
from ckptstore.log import refs
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read

__all__ = ["Answer", "Ask", "Bisected", "Predicate", "Probe", "bisect", "history", "judged", "search"]

Answer = Literal["good", "bad", "skipped"]
Ask = Callable[[CheckpointEntry], tuple[Answer, str]]
"""Returns whether a checkpoint is good, bad or skipped, and the reason if it was skipped."""
Predicate = Callable[[Any], bool | None]
"""Called with a state. Returns True: bad; False: good; None: skip this checkpoint."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A checkpoint that was tested.

    Attributes:
        why: why it was skipped; empty otherwise.
        left: the maximum number of checkpoints that may still be the first bad one.
    """

    ref: str
    answer: Answer
    why: str
    left: int


@dataclass(frozen=True, slots=True)
class Bisected(HtmlTable):
    """The result of `bisect`.

    Attributes:
        last_good: REF of the newest checkpoint known to be good before the first bad one; None if there is none.
        first_bad: REF of the oldest one known to be bad; None if there is none.
        between: REFs of the skipped checkpoints between the two. Any of them, or `first_bad`, may be the first bad one.
        contradictions: answers that are impossible if it began once and never stopped. If there are any, there is no
            single place where it began.
        probes: all tested checkpoints, in the order of the tests.
        checkpoints: number of checkpoints in the history between `good` and `bad`, excluding both.
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
    """Return a checkpoint and all that it continues from, oldest first. Other branches of a fork are excluded."""
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
    """Find the first bad checkpoint of a line.

    Args:
        low: index of a checkpoint known to be good; -1: none.
        high: index of a checkpoint known to be bad; None or the line's length: none.
        checks: test this many more on either side, to see whether it began once and never stopped.

    Raises:
        CheckpointNotFoundError: the line is empty.
    """
    if not line:
        raise CheckpointNotFoundError("there is no checkpoint to test")
    searching = _BisectSearch(line, ask, low, len(line) if high is None else high, on_probe)
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


class _BisectSearch:
    """State of a search: as far as known, all up to `low` are good, and all from `high` on are bad."""

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
        """Search until every checkpoint between the two has been tested."""
        while (place := self._next()) is not None:
            answer, why = self._ask(self.line[place])
            self._known[place] = answer
            if answer == "good":
                self.low = place
            elif answer == "bad":
                self.high = place
            self._tell(place, answer, why)

    def _next(self) -> int | None:
        """Return the index nearest to the middle that has not been tested."""
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
        """Test `checks` evenly spaced indices on either side. Return a sentence for each unexpected answer."""
        wrong = []
        sides: Mapping[Answer, range] = {
            "good": range(low + 1, self.low),
            "bad": range(self.high + 1, len(self.line)),
        }
        for expected, side in sides.items():
            picked = {side[number * (len(side) - 1) // max(1, checks - 1)] for number in range(min(checks, len(side)))}
            if checks == 1 and expected == "bad" and side:
                picked = {side[-1]}  # the end of the line is the most informative
            for place in sorted(picked - self._known.keys()):
                answer, why = self._ask(self.line[place])
                self._known[place] = answer
                self._tell(place, answer, why)
                if answer not in (expected, "skipped"):
                    wrong.append(f"{ref_of(self.line[place].node)} is {answer}, and should be {expected}")
        return wrong


def judged(load: Callable[[str], Any], predicate: Predicate) -> Ask:
    """Return an `Ask` that calls `predicate` with the state that `load` returns. Damaged checkpoints are skipped."""

    def ask(entry: CheckpointEntry) -> tuple[Answer, str]:
        try:
            state = load(entry.ref)
        except (CorruptionError, CheckpointNotFoundError) as error:  # it was retired in the meantime
            return "skipped", str(error)
        found = predicate(state)
        if found is None:
            return "skipped", "the predicate returned None"
        return ("bad" if found else "good"), ""

    return ask
