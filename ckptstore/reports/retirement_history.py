"""Finds out what happened to a retired checkpoint, as far as the log still says.

Slots that a fold has replaced are gone, and with them the reason of a retirement.
"""

from __future__ import annotations

from ckptstore.errors import CkptError
from ckptstore.formats.history.record_text import decode_record
from ckptstore.formats.history.records import CommitRecord, Node, ref_of, slot_of
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.log.partial_objects import slot_bytes

__all__ = ["fate"]


def fate(journal: Journal, step: int, term: int | None = None) -> str | None:
    """Return a sentence such as ``75@2 was dropped by a merge into 90@2``; None: the log does not say.

    Args:
        step: the step to look for.
        term: only in this term; None: in any term.

    Raises:
        CorruptLogError: no part of the log can be read.
        StorageError: the medium failed.
    """
    wanted = _seek(journal, step, term)
    if wanted is not None:
        return wanted
    held = [node for node in read(journal).catalog.held if node[1] == step and term in (None, node[0])]
    return f"{ref_of(max(held))} was retired; it is stored only because others build on it" if held else None


def _seek(journal: Journal, step: int, term: int | None) -> str | None:
    backend, run = journal.backend, journal.run
    slots = {seq: key for key in backend.list("log/") if (seq := slot_of(key)) is not None}
    for seq in sorted(slots, reverse=True):
        try:
            data = slot_bytes(backend, run, seq)
            record = decode_record(data, seq=seq, run=run, what=slots[seq], fetch=backend.get)
        except CkptError:  # damaged, or folded in the meantime: its content is lost
            continue
        if not isinstance(record, CommitRecord):
            continue
        for node in record.retires:
            if node[1] == step and term in (None, node[0]):
                return _sentence(record, node)
    return None


def _sentence(record: CommitRecord, node: Node) -> str:
    """Describe a retirement. A change that also re-encodes later checkpoints of the term is a merge."""
    into = [edge.checkpoint for edge in record.encodings if edge.checkpoint[0] == node[0] and edge.checkpoint > node]
    if into and not record.checkpoints:
        return f"{ref_of(node)} was dropped by a merge into {ref_of(max(into))}"
    return f"{ref_of(node)} was retired"
