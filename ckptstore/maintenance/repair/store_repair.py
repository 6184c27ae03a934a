"""Repairs a store: copies what is intact of a damaged one to another place. The damaged one is only read.

1. Read every segment's own description, and what is left of the log (`segment_descriptions`, `evidence`).
2. Combine both (`candidates`): what the log promises, and what segments yield where it is damaged.
3. Read every byte of that, compare every description, decode every state (`segment_scan.examine`). Only what passes
   is kept.
4. Copy it (`copies.transfer`), verified again on the way. Rewrite what is intact in a damaged segment, and what a load
   restores in spite of damage in its chain.

A kill at any instant leaves a place that is not yet a store; the same command continues there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckptstore.backends.base import Backend
from ckptstore.backends.exclusion import exclusive_access
from ckptstore.errors import CorruptionError, StoreNotFoundError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import needed
from ckptstore.formats.history.records import Encoding, FormatFile, Node, SegmentEntry, ref_of
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.host.crash_points import crash_point
from ckptstore.host.option_checks import MOST_THREADS, whole
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import default_threads
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import CopyOrigin, LogCopy
from ckptstore.log.log_reader import LOOKS, overtaken
from ckptstore.log.stale_listings import every_object
from ckptstore.maintenance.copies.copy_selection import lines_of
from ckptstore.maintenance.copies.parallel_copies import SegmentCopies
from ckptstore.maintenance.copies.store_copy import check_apart, check_known
from ckptstore.maintenance.copies.transfer import Transfer
from ckptstore.maintenance.repair.candidates import Candidates, candidates
from ckptstore.maintenance.repair.damage_assessment import Assessment, Loss, assess
from ckptstore.maintenance.repair.evidence import Log, choose_run, format_of, in_progress, read_log
from ckptstore.maintenance.repair.segment_descriptions import survey
from ckptstore.maintenance.repair.segment_rewrite import Rewritten, rewrite, rewrite_as_fulls
from ckptstore.maintenance.verify.lost_checkpoints import lost_checkpoints
from ckptstore.maintenance.verify.segment_scan import examine
from ckptstore.maintenance.verify.verify_findings import Damage, Findings, edge_of
from ckptstore.restore.restore_plan import Plan, plan_all
from ckptstore.restore.trial_restore import try_restoring

__all__ = ["Repaired", "repair"]

LogState = Literal["whole", "damaged", "gone"]


@dataclass(frozen=True, slots=True)
class Repaired(HtmlTable):
    """What `repair` found and made.

    Attributes:
        run: the run's uuid.
        log: state of the log: ``whole``; ``damaged``: read as far as possible; ``gone``.
        kept: REFs of the checkpoints in the new store, ascending. Each was restored.
        lost: REF -> why, of every checkpoint that is recorded somewhere and cannot be restored.
        found: those of `kept` that only segments describe, not the log.
        unproven: those of `found` whose hash is recorded nowhere else. Their tensors are what was saved; a change of
            the rest of the state, in an uncompressed segment, would not have been noticed.
        rewritten: those of `kept` that were rewritten, because their segment is damaged elsewhere, or because their
            chain is damaged where they do not need it.
        tags: lost tags, with the REF of the lost checkpoint.
        damage: everything that is wrong with the old store's objects.
        lost_bases: REF -> REF of the checkpoint that it builds on, of those of `lost` whose base is lost.
        latest: REF of the new store's latest checkpoint; None: it has none, or ``latest`` is an error there, too.
        segments, nbytes: what was written by this call.
    """

    run: str
    log: LogState
    kept: tuple[str, ...]
    lost: Mapping[str, str]
    found: tuple[str, ...]
    unproven: tuple[str, ...]
    rewritten: tuple[str, ...]
    tags: Mapping[str, str]
    damage: tuple[Damage, ...]
    latest: str | None
    segments: int
    nbytes: int
    lost_bases: Mapping[str, str] = field(default_factory=dict)


def repair(
    source: Backend,
    target: Backend,
    *,
    run: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Repaired:
    """Make a new store from the intact parts of a damaged one. See `ckptstore.repair`."""
    threads = default_threads() if threads is None else whole("threads", threads, 1, MOST_THREADS)
    check_apart(source, target)
    look = _look(source, run)
    with exclusive_access(target, make=True):
        run, format_file = look.format_file.run, look.format_file
        replica = LogCopy(target, CopyOrigin(format_file, "repair", f"{run} of {source.url}"))
        journal = Journal(source, format_file)
        for _ in range(LOOKS):
            found = Findings(Tally(progress))
            assessment = _examined(journal, look.options.catalog, found, threads)
            # Prevents: steps that are cut off, because the writer of the last slot was stopped for longer than a reader
            # waits for a torn slot.
            if not overtaken(journal, look.log.judged):
                break
            look = _look(source, run)
        log, options = look.log, look.options
        crash_point("repair.judged")
        written = rewrite(source, replica, options.catalog, assessment.rewritten, run, threads)
        rewrite_as_fulls(journal, replica, options.catalog, assessment.otherwise, threads, written)
        part = _part(options, log, assessment, written, replica.catalog)
        supply = _Supply(source, target, run, threads, found.tally.advance)
        supply.there = {entry.id for entry in written.segments}
        transfer = Transfer(part, replica, supply)
        found.tally.total += sum(entry.size for entry in transfer.missing() if entry.id not in supply.there)
        transfer.run()
        replica.finish()
    all_damage = [*look.damage, *(Damage(*one) for one in found.damage)]
    all_damage += [Damage(key, what) for key, what in found.unread.items()]
    return _report(run, log, options, assessment, replica.catalog, all_damage, (supply, written))


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What a damaged place contains of one run."""

    format_file: FormatFile
    log: Log
    options: Candidates
    damage: tuple[Damage, ...]


def _look(source: Backend, run: str | None) -> _Evidence:
    """Read the segments' descriptions, and what is left of the log. Raises as `repair`."""
    keys = every_object(source, "Nothing was repaired: check the endpoint and the proxies, then run repair again")
    told, damage = survey(source, keys)
    run = choose_run(source, keys, told, run)
    format_file, bad = format_of(source, run)
    log = read_log(source, format_file, keys)
    # A writer may be active. What it was writing a moment ago is complete by now, or not committed.
    again, damage = survey(source, [one.key for one in damage])
    told |= again
    damage = [one for one in damage if not in_progress(log, one.key)]
    check_known(source.url, format_file, log.catalog)
    options = candidates(source, run, log, told)
    if not (options.catalog.checkpoints or options.broken):
        raise StoreNotFoundError.at(source.url, f": no part of a checkpoint is left of run {run}")
    return _Evidence(format_file, log, options, (*bad, *log.damage, *damage))


def _examined(journal: Journal, everything: Catalog, found: Findings, threads: int) -> Assessment:
    """Decide what is intact. Every kept encoding was decoded on a kept base.

    If a planned encoding is damaged and another one of its checkpoint is not, what builds on it is examined again.
    """
    lost: dict[Node, Loss] = {}
    catalog, gone, restorable = everything, None, dict[Node, Plan]()
    while True:
        flaws = Findings(found.tally)
        plans = {node: one for node, one in plan_all(catalog).items() if isinstance(one, Plan)}
        examine(journal.backend, journal.run, catalog, plans, flaws, threads, deep=True)
        if gone is None:
            gone = lost_checkpoints(journal, catalog, plans, flaws, threads)
            restorable = {node: one for node, one in plans.items() if node not in gone.nodes | gone.unknown}
        assessment = assess(journal.backend, catalog, flaws)
        found.damage.update(flaws.damage)
        found.unread.update(flaws.unread)
        assessment.lost = lost = {**assessment.lost, **lost}
        kept = {edge_of(edge) for edge in (*assessment.edges, *assessment.rewritten)}
        planned = {edge_of(edge) for one in plans.values() for edge in one.encodings}
        if all(edge in kept for edge in planned if edge[0] in assessment.nodes):
            # Prevents: a checkpoint that is dropped, although a load restores it.
            for node in lost.keys() & restorable.keys():
                assessment.otherwise[node] = try_restoring(journal, everything, node, threads)
                del lost[node]
            return assessment
        catalog = _reduced(catalog, assessment)


def _reduced(catalog: Catalog, assessment: Assessment) -> Catalog:
    """Return the catalog of what is kept so far."""
    part = Catalog(term=catalog.term, terms=catalog.terms)
    for edge in (*assessment.edges, *assessment.rewritten):
        node = edge.checkpoint
        entry = catalog.find(node)
        assert entry is not None, node  # otherwise no kept encoding would restore it
        (part.checkpoints if node in catalog.checkpoints else part.held)[node] = entry
        part.encodings[node] = (*part.encodings.get(node, ()), edge)
        part.segments.update((segment, catalog.segments[segment]) for segment in edge.segments)
    return part


class _Supply(SegmentCopies):
    """Copies segments that were not rewritten."""

    there: set[str]

    def bring(self, segments: Sequence[SegmentEntry]) -> None:
        """Copy the segments, except rewritten ones. See `SegmentCopies.bring`."""
        super().bring([entry for entry in segments if entry.id not in self.there])


def _part(options: Candidates, log: Log, assessment: Assessment, written: Rewritten, there: Catalog) -> Catalog:
    """Return the history to keep: promised checkpoints, and what they build on."""
    catalog = options.catalog
    edges: dict[Node, list[Encoding]] = {}
    for edge in (*assessment.edges, *written.encodings):
        edges.setdefault(edge.checkpoint, []).append(edge)
    for node in written.present:  # from an earlier try that was killed
        edges.setdefault(node, []).extend(there.encodings[node])
    segments = {**dict(there.segments.items()), **dict(catalog.segments.items())}
    segments |= {entry.id: entry for entry in written.segments}
    promised = [node for node in catalog.checkpoints if node in edges]
    draft = Catalog()
    draft.encodings.update((node, tuple(found)) for node, found in edges.items())
    part = Catalog(term=catalog.term)
    for node in sorted(needed(draft, promised)):
        entry = catalog.find(node)
        if entry is None or node not in edges:
            continue
        (part.checkpoints if node in catalog.checkpoints else part.held)[node] = entry
        part.encodings[node] = tuple(edges[node])
        part.segments.update((one, segments[one]) for edge in edges[node] for one in edge.segments)
    part.tags.update((name, node) for name, node in catalog.tags.items() if node in part.checkpoints)
    part.keep, part.keep_seq = catalog.keep, catalog.keep_seq
    terms = {*log.catalog.terms, *(entry.term for entry in part.segments.values())}
    terms |= {node[0] for node in (*part.checkpoints, *part.held)}
    part.terms.update((number, catalog.terms[number]) for number in sorted(lines_of(catalog, terms)))
    return part


def _report(
    run: str,
    log: Log,
    options: Candidates,
    assessment: Assessment,
    made: Catalog,
    damage: Sequence[Damage],
    work: tuple[SegmentCopies, Rewritten],
) -> Repaired:
    lost = {node: Loss(why) for node, why in options.broken.items()} | assessment.lost
    lost = {node: loss for node, loss in sorted(lost.items()) if node not in made.checkpoints}
    try:
        newest = made.latest()
    except CorruptionError:  # a term continues from another state than the one that exists
        newest = None
    catalog, (supply, written) = options.catalog, work
    return Repaired(
        run=run,
        log="whole" if log.whole else "damaged" if log.catalog.term else "gone",
        kept=tuple(ref_of(node) for node in made.checkpoints),
        lost={ref_of(node): loss.why for node, loss in lost.items()},
        lost_bases={ref_of(node): ref_of(loss.base) for node, loss in lost.items() if loss.base is not None},
        found=tuple(ref_of(node) for node in made.checkpoints if node in options.found),
        unproven=tuple(ref_of(node) for node in made.checkpoints if node in options.unproven),
        rewritten=tuple(
            ref_of(node)
            for node in sorted({*assessment.otherwise, *(edge.checkpoint for edge in assessment.rewritten)})
        ),
        tags={name: ref_of(node) for name, node in sorted(catalog.tags.items()) if node not in made.checkpoints},
        damage=tuple(dict.fromkeys(damage)),
        latest=None if newest is None else newest.ref,
        segments=supply.brought + len(written.segments),
        nbytes=supply.nbytes + sum(entry.size for entry in written.segments),
    )
