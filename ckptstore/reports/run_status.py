"""How a run is doing: what its log says at one instant, beside what was seen of it before."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from ckptstore.errors import CorruptLogError
from ckptstore.formats import metadata, rule_rankings
from ckptstore.formats.catalog import CLOSED, Catalog
from ckptstore.formats.columns import Rows
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.formats.records import CheckpointEntry, Node, SegmentEntry, ref_of
from ckptstore.formats.tables import Table
from ckptstore.log.change_committer import WriterState, known_writer, last_writer
from ckptstore.log.log_reader import View

__all__ = ["Pace", "RunStatus", "changes_between", "status_of"]

WINDOW: Final = 64
"""Checkpoints of the newest term over which speeds are told."""
_REMEMBERED: Final = 240
"""Checkpoints of which step, time, bytes and metric are remembered."""
_OUT_OF_ORDER: Final = 256
"""Checkpoints that were known already, newest first, after which no new one is looked for."""
_LOOKED_AT: Final = 4096
"""Newest checkpoints of the log that one look goes through at most."""


@dataclass(frozen=True, slots=True)
class RunStatus(HtmlTable):
    """How a run is doing.

    Attributes:
        url: of its store.
        run: its uuid.
        time: seconds since the Unix epoch when this was looked at, by this host's clock.
        changes: what has happened since the status before, in words; nothing in the first one.
        latest: REF of the newest checkpoint; None: there is none. `step`: its step.
        saved: seconds since the Unix epoch when that was saved, by the writer's clock.
        lag: seconds from then until `time`; what two hosts' clocks differ by is in it.
        checkpoints: how many there are.
        term: the newest term; 0: nobody has written yet. `terms`: how many there are.
        parent: REF of what the newest term continues from; None: from nothing.
        steps_per_second: over the last 64 checkpoints of the newest term that were seen; None: there are no two.
        bytes_per_step: stored for a step, over the same ones. Checkpoints that came and went unseen count as much as
            the others on average.
        bytes_per_second: the product.
        ratio: logical bytes of the same checkpoints by what is stored of them: how many times smaller than fulls.
        nbytes: bytes of the segments that the log holds.
        free: bytes free on the disk; None: the medium does not say.
        metric: name of the number in the metadata.
        values: (step, number) of up to 240 checkpoints on the line of the newest, ascending; those without it left out.
        writer, host, pid: see `RunInfo`.
        damage: how many slots of the log are damaged or missing.
        requests: requests that this look took, where a medium charges for them; None: it does not.
    """

    url: str
    run: str
    time: float
    changes: tuple[str, ...]
    latest: str | None
    step: int | None
    saved: float | None
    lag: float | None
    checkpoints: int
    term: int
    terms: int
    parent: str | None
    steps_per_second: float | None
    bytes_per_step: float | None
    bytes_per_second: float | None
    ratio: float | None
    nbytes: int
    free: int | None
    metric: str
    values: tuple[tuple[int, float], ...]
    writer: WriterState
    host: str | None
    pid: int | None
    damage: int
    requests: int | None


@dataclass(frozen=True, slots=True)
class _Point:
    """A checkpoint that was seen: `stored` bytes of `nbytes`; `value` of the metric."""

    step: int
    time: float
    stored: int
    nbytes: int
    value: float | None


class Pace:
    """The newest checkpoints on the line of the newest, remembered after retention has let them go.

    Attributes:
        metric: name of the number in the metadata that is remembered.
        nbytes: see `RunStatus`.
    """

    def __init__(self, metric: str) -> None:
        """Nothing seen yet."""
        self.metric = metric
        self.nbytes = 0
        self._rows: Rows[str, SegmentEntry] | None = None
        self._rows_nbytes = 0
        self._term = 0
        self._spent: Collection[int] = ()
        self._points: dict[Node, _Point] = {}

    def take(self, catalog: Catalog) -> None:
        """Look at the newest checkpoints. What is not on the line of the newest any more is forgotten."""
        on_line = rule_rankings.line(catalog)
        newest_first = filter(on_line, islice(reversed(catalog.checkpoints), _LOOKED_AT))
        for node in islice(newest_first, _REMEMBERED):
            if node not in self._points:
                self._points[node] = _point(catalog, catalog.checkpoints[node], self.metric)
        newest = sorted(node for node in self._points if on_line(node))[-_REMEMBERED:]
        self._points = {node: self._points[node] for node in newest}
        self._term, self._spent = catalog.term, catalog.spent
        self.nbytes = self._summed(catalog.segments)

    def _summed(self, segments: Table[str, SegmentEntry]) -> int:
        """Bytes of all segments. Those that are shared with the catalog before are not summed again."""
        if self._rows is not segments.rows:
            self._rows, self._rows_nbytes = segments.rows, sum(entry.size for entry in segments.rows.values())
        total = self._rows_nbytes
        for identity, entry in segments.changes.items():
            replaced = segments.rows.values(*segments.rows.find(identity))
            total += (0 if entry is None else entry.size) - sum(old.size for old in replaced)
        return total

    @property
    def values(self) -> tuple[tuple[int, float], ...]:
        """See `RunStatus.values`."""
        return tuple((point.step, point.value) for point in self._points.values() if point.value is not None)

    def speeds(self) -> tuple[float | None, float | None, float | None]:
        """``steps_per_second``, ``bytes_per_step`` and ``ratio`` of a `RunStatus`."""
        window = [point for (term, _), point in self._points.items() if term == self._term][-WINDOW:]
        stored = sum(point.stored for point in window)
        nbytes = sum(point.nbytes for point in window)
        ratio = nbytes / stored if nbytes and stored else None
        if len(window) < 2:
            return None, None, ratio
        first, last = window[0], window[-1]
        steps, seconds = last.step - first.step, last.time - first.time
        both: list[Collection[int]] = [range(first.step + 1, last.step), self._spent]
        fewer, more = sorted(both, key=len)  # each may have a million
        seen = {point.step for point in window}
        unseen = sum(step in more and step not in seen for step in fewer)
        per_checkpoint = sum(point.stored for point in window[1:]) / (len(window) - 1)
        per_step = per_checkpoint * (len(window) - 1 + unseen) / steps
        return (steps / seconds if seconds > 0 else None), per_step, ratio


def _point(catalog: Catalog, entry: CheckpointEntry, metric: str) -> _Point:
    stored = sum(encoding.bytes for encoding in catalog.encodings.get(entry.node, ()))
    return _Point(entry.step, entry.time, stored, entry.nbytes, _value(entry, metric))


def _value(entry: CheckpointEntry, metric: str) -> float | None:
    """The number of this name in the metadata; one that is not a number (NaN) as well: who watches wants to see it."""
    if (found := rule_rankings.metric(entry, metric)) is not None:
        return found
    said = metadata.read(entry.extra.get(metadata.MEMBER))
    inner = said.get("metrics")
    value = said.get(metric, inner.get(metric) if isinstance(inner, Mapping) else None)
    return value if isinstance(value, float) and math.isnan(value) else None


def status_of(url: str, run: str, now: float, view: View, pace: Pace) -> RunStatus:
    """What a view says. `pace` has taken it; ``changes``, ``free`` and ``requests`` are not known here.

    Raises:
        CorruptLogError: the log is damaged where the newest would be decided; names the last intact checkpoint.
    """
    catalog = view.catalog
    try:
        newest = catalog.latest()
    except CorruptLogError as error:
        told = CorruptLogError(f"{url}: {error}")
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from error
    opened = catalog.terms.get(catalog.term)
    steps_per_second, bytes_per_step, ratio = pace.speeds()
    known = None not in (steps_per_second, bytes_per_step)
    writer, host, pid = known_writer(catalog)
    return RunStatus(
        url=url,
        run=run,
        time=now,
        changes=(),
        latest=None if newest is None else newest.ref,
        step=None if newest is None else newest.step,
        saved=None if newest is None else newest.time,
        lag=None if newest is None else max(0.0, now - newest.time),
        checkpoints=len(catalog.checkpoints),
        term=catalog.term,
        terms=len(catalog.terms),
        parent=None if opened is None or opened.parent is None else opened.parent.ref,
        steps_per_second=steps_per_second,
        bytes_per_step=bytes_per_step,
        bytes_per_second=(steps_per_second or 0.0) * (bytes_per_step or 0.0) if known else None,
        ratio=ratio,
        nbytes=pace.nbytes,
        free=None,
        metric=pace.metric,
        values=pace.values,
        writer=writer,
        host=host,
        pid=pid,
        damage=len(catalog.damage),
        requests=None,
    )


def changes_between(before: View, after: View) -> list[str]:
    """What has been committed between two views of one log, in words."""
    old, new = before.catalog, after.catalog
    if (before.end, before.damage) == (after.end, after.damage):
        return []
    said = _terms(old, new) + _checkpoints(old, new, before.end)
    for name in sorted(old.tags.keys() | new.tags.keys()):
        if old.tags.get(name) != (node := new.tags.get(name)):
            said.append(f"tag {name} removed" if node is None else f"tag {name} is {ref_of(node)}")
    if old.keep != new.keep:
        said.append(f"keeps {', '.join(new.keep) or 'every checkpoint'}")
    said += [f"log slot {seq} is damaged or missing" for seq in new.damage if seq not in old.damage]
    taken_over = last_writer(new).purpose is not None  # its own change says enough
    if _closed(new) and not taken_over and not (_closed(old) and old.term == new.term):
        said.append(f"term {new.term} is closed")
    records = after.end - before.end
    return said or [f"{records:,} record{'' if records == 1 else 's'} of upkeep"]


def _closed(catalog: Catalog) -> bool:
    opened = catalog.terms.get(catalog.term)
    return opened is not None and opened.extra.get(CLOSED) is True


def _terms(old: Catalog, new: Catalog) -> list[str]:
    """Terms that began, and what each continues from."""
    said = []
    for term in sorted(new.terms.keys() - old.terms.keys()):
        parent, newest = new.terms[term].parent, _newest_before(term, old, new)
        if parent is None:
            said.append(f"term {term} begins from nothing")
        elif newest is None or parent.node == newest:
            said.append(f"term {term} continues from {parent.ref}")
        else:
            said.append(f"term {term} forks from {parent.ref} (the newest was {ref_of(newest)})")
    return said


def _newest_before(term: int, old: Catalog, new: Catalog) -> Node | None:
    """What was newest when `term` began, as far as it was not retired unseen."""
    if not (earlier := [one for one in new.terms if one < term]):
        return None
    before = max(earlier)
    highest = [node for one in (old, new) if (node := one.checkpoints.highest(before)) is not None]
    parent = new.terms[before].parent
    return max(highest, default=None if parent is None else parent.node)


def _checkpoints(old: Catalog, new: Catalog, first: int) -> list[str]:
    """Checkpoints that slots from `first` on promise, and how many are promised no longer."""
    came, known = [], 0
    for node in islice(reversed(new.checkpoints), _LOOKED_AT):
        if new.slots[node] >= first:
            came.append(node)
        elif (known := known + 1) > _OUT_OF_ORDER:
            break
    came.reverse()
    gone = len(old.checkpoints) + len(came) - len(new.checkpoints)
    said = []
    if len(came) == 1:
        said.append(f"saved {ref_of(came[0])}")
    elif came:
        said.append(f"saved {ref_of(came[0])} to {ref_of(came[-1])} ({len(came):,})")
    if gone > 0:
        said.append(f"{gone:,} retired")
    return said
