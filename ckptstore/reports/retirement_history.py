"""What became of a checkpoint that is promised no longer, as far as the log still holds that.

Slots that a fold replaced are gone, and with them why something was retired.
"""

from __future__ import annotations

from ckptstore.errors import CkptError
from ckptstore.formats.record_text import decode_record
from ckptstore.formats.records import CommitRecord, Node, ref_of, slot_of
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.log.partial_objects import slot_bytes

__all__ = ["fate"]


def fate(journal: Journal, step: int, term: int | None = None) -> str | None:
    """``75@2 was dropped by a merge into 90@2``, of a step in any term, or in one; None: the log does not say.

    Raises:
        CorruptLogError: nothing of the log can be read.
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
        except CkptError:  # damaged, or folded meanwhile: what it said is lost
            continue
        if not isinstance(record, CommitRecord):
            continue
        for node in record.retires:
            if node[1] == step and term in (None, node[0]):
                return _told(record, node)
    return None


def _told(record: CommitRecord, node: Node) -> str:
    """Who retires and encodes others anew in one change has merged."""
    into = [edge.checkpoint for edge in record.encodings if edge.checkpoint[0] == node[0] and edge.checkpoint > node]
    if into and not record.checkpoints:
        return f"{ref_of(node)} was dropped by a merge into {ref_of(max(into))}"
    return f"{ref_of(node)} was retired"
