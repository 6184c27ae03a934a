"""Reports the state of a run: what its log says at one instant, compared with earlier looks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from ckptstore.errors import CorruptLogError
from ckptstore.formats.history import metadata, rule_rankings
from ckptstore.formats.history.catalog import CLOSED, Catalog
from ckptstore.formats.history.columns import TableRows
from ckptstore.formats.history.records import CheckpointEntry, Node, SegmentEntry, ref_of
from ckptstore.formats.history.tables import Table
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.log.change_committer import WriterState, known_writer, last_writer
from ckptstore.log.log_reader import View

__all__ = ["RunPace", "RunStatus", "changes_between", "status_of"]

WINDOW: Final = 64
"""Number of checkpoints of the newest term over which speeds are computed."""
_REMEMBERED: Final = 240
"""Number of checkpoints whose step, time, bytes and metric are remembered."""
_OUT_OF_ORDER: Final = 256
"""Number of known checkpoints, newest first, after which the search for new ones stops."""
_LOOKED_AT: Final = 4096
"""Maximum number of newest checkpoints of the log that one look examines."""


@dataclass(frozen=True, slots=True)
class RunStatus(HtmlTable):
    """The state of a run.

    Attributes:
        url: URL of its store.
        run: its uuid.
        time: time of this look in seconds since the Unix epoch, by this host's clock.
        changes: what has happened since the previous status, in words; empty in the first one.
        latest: REF of the newest checkpoint; None: there is none. `step`: its step.
        saved: time at which it was saved, in seconds since the Unix epoch, by the writer's clock.
        lag: seconds from then until `time`, including any difference of the two hosts' clocks.
        checkpoints: number of checkpoints.
        term: the newest term; 0: there is none yet. `terms`: number of terms.
        parent: REF of the checkpoint that the newest term continues from; None: it starts from scratch.
        steps_per_second: over the last 64 seen checkpoints of the newest term; None: there are fewer than two.
        bytes_per_step: stored bytes per step, over the same checkpoints. Checkpoints that were retired unseen count
            with the average of the others.
        bytes_per_second: the product.
        ratio: logical bytes of the same checkpoints divided by their stored bytes: how many times smaller than fulls.
        nbytes: bytes of the segments that the log names.
        free: bytes free on the disk; None: the medium does not say.
        metric: name of the number in the metadata.
        values: (step, number) of up to 240 checkpoints in the history of the newest, ascending; without those that
            have no such number.
        writer, host, pid: see `RunInfo`.
        damage: number of slots of the log that are damaged or missing.
        requests: requests that this look took, if the medium charges for them; None: it does not.
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
    """A checkpoint that was seen: `stored` of `nbytes` bytes; `value` of the metric."""

    step: int
    time: float
    stored: int
    nbytes: int
    value: float | None


class RunPace:
    """The newest checkpoints in the history of the newest one. They are remembered after retention retired them.

    Attributes:
        metric: name of the number in the metadata that is remembered.
        nbytes: see `RunStatus`.
    """

    def __init__(self, metric: str) -> None:
        """Start with no checkpoints."""
        self.metric = metric
        self.nbytes = 0
        self._rows: TableRows[str, SegmentEntry] | None = None
        self._rows_nbytes = 0
        self._term = 0
        self._spent: Collection[int] = ()
        self._points: dict[Node, _Point] = {}

    def take(self, catalog: Catalog) -> None:
        """Add the newest checkpoints. Forget those that are no longer in the history of the newest one."""
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
        """Return the bytes of all segments. The sum over rows shared with the previous catalog is reused."""
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
        """Return ``steps_per_second``, ``bytes_per_step`` and ``ratio`` of a `RunStatus`."""
        window = [point for (term, _), point in self._points.items() if term == self._term][-WINDOW:]
        stored = sum(point.stored for point in window)
        nbytes = sum(point.nbytes for point in window)
        ratio = nbytes / stored if nbytes and stored else None
        if len(window) < 2:
            return None, None, ratio
        first, last = window[0], window[-1]
        steps, seconds = last.step - first.step, last.time - first.time
        both: list[Collection[int]] = [range(first.step + 1, last.step), self._spent]
        fewer, more = sorted(both, key=len)  # each may have a million entries
        seen = {point.step for point in window}
        unseen = sum(step in more and step not in seen for step in fewer)
        per_checkpoint = sum(point.stored for point in window[1:]) / (len(window) - 1)
        per_step = per_checkpoint * (len(window) - 1 + unseen) / steps
        return (steps / seconds if seconds > 0 else None), per_step, ratio


def _point(catalog: Catalog, entry: CheckpointEntry, metric: str) -> _Point:
    stored = sum(encoding.bytes for encoding in catalog.encodings.get(entry.node, ()))
    return _Point(entry.step, entry.time, stored, entry.nbytes, _value(entry, metric))


def _value(entry: CheckpointEntry, metric: str) -> float | None:
    """Return the number of this name in the metadata. NaN is returned, too: the reader of a status wants to see it."""
    if (found := rule_rankings.metric(entry, metric)) is not None:
        return found
    said = metadata.read(entry.extra.get(metadata.MEMBER))
    inner = said.get("metrics")
    value = said.get(metric, inner.get(metric) if isinstance(inner, Mapping) else None)
    return value if isinstance(value, float) and math.isnan(value) else None


def status_of(url: str, run: str, now: float, view: View, pace: RunPace) -> RunStatus:
    """Make a status of a view that `pace` has taken. ``changes``, ``free`` and ``requests`` are left empty.

    Raises:
        CorruptLogError: damage hides which checkpoint is the newest. The error names the last intact one.
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
    """Describe in words what was committed between two views of one log."""
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
    taken_over = last_writer(new).purpose is not None  # the change of a take-over is described already
    if _closed(new) and not taken_over and not (_closed(old) and old.term == new.term):
        said.append(f"term {new.term} is closed")
    records = after.end - before.end
    return said or [f"{records:,} record{'' if records == 1 else 's'} of upkeep"]


def _closed(catalog: Catalog) -> bool:
    opened = catalog.terms.get(catalog.term)
    return opened is not None and opened.extra.get(CLOSED) is True


def _terms(old: Catalog, new: Catalog) -> list[str]:
    """Describe new terms, and what each continues from."""
    said = []
    for term in sorted(new.terms.keys() - old.terms.keys()):
        parent, newest = new.terms[term].parent, _newest_before(term, old, new)
        if parent is None:
            said.append(f"term {term} starts from scratch")
        elif newest is None or parent.node == newest:
            said.append(f"term {term} continues from {parent.ref}")
        else:
            said.append(f"term {term} forks from {parent.ref} (the newest was {ref_of(newest)})")
    return said


def _newest_before(term: int, old: Catalog, new: Catalog) -> Node | None:
    """Return the newest checkpoint at the start of `term`, unless it was retired unseen."""
    if not (earlier := [one for one in new.terms if one < term]):
        return None
    before = max(earlier)
    highest = [node for one in (old, new) if (node := one.checkpoints.highest(before)) is not None]
    parent = new.terms[before].parent
    return max(highest, default=None if parent is None else parent.node)


def _checkpoints(old: Catalog, new: Catalog, first: int) -> list[str]:
    """Describe checkpoints that slots from `first` on commit, and count those retired since."""
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
