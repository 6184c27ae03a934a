"""Reads every segment's own description below ``seg/``, without the log (SPEC 5.1, Making the log again)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass

from ckptstore.backends.base import Backend, SegmentSource
from ckptstore.errors import CkptError, CorruptSegmentError, StorageError
from ckptstore.formats import checksums
from ckptstore.formats.history.records import CheckpointId, SegmentEntry, object_of
from ckptstore.formats.segment_files.segment import SegmentDoc, header_length, parse
from ckptstore.formats.segment_files.segment_steps import StepEncoding, read_ranks
from ckptstore.maintenance.verify.verify_findings import Damage, is_bad_medium

__all__ = ["SegmentDescription", "survey"]


@dataclass(frozen=True, slots=True)
class SegmentDescription:
    """A segment's own description, without its tensors and trees.

    Attributes:
        entry: what a COMMIT would say of it.
        run: its run.
        parents: term -> the checkpoint it continues from.
        steps: step -> how it is encoded here.
        stored: step -> bytes of its encoding here.
        rank: step -> the rank that wrote the segment, and `ranks`: number of segments of each rank (SPEC 5.1).
    """

    entry: SegmentEntry
    run: str
    parents: Mapping[int, CheckpointId | None]
    steps: Mapping[int, StepEncoding]
    stored: Mapping[int, int]
    rank: Mapping[int, int]
    ranks: Mapping[int, tuple[int, ...]]


def survey(backend: Backend, keys: Iterable[str]) -> tuple[dict[str, SegmentDescription], list[Damage]]:
    """Read the description of every segment. Return them by id, and the damage of those that cannot be read.

    Raises:
        StorageError: the medium failed, and not because of this one object.
    """
    found: dict[str, SegmentDescription] = {}
    damage: list[Damage] = []
    for key in keys:
        place = object_of(key)
        if place is None or not key.endswith(".safetensors"):
            continue
        try:
            with closing(backend.open_source(key)) as source:
                description = _describe(source, key)
            if (description.entry.term, description.entry.id) != place:
                raise CorruptSegmentError(
                    f"{key}: holds segment {description.entry.id} of term {description.entry.term}"
                )
        except StorageError as error:
            if not is_bad_medium(error):
                raise
            damage.append(Damage(key, str(error)))
        except CkptError as error:
            damage.append(Damage(key, str(error).removeprefix(f"{key}: ")))
        else:
            found[description.entry.id] = description
    return found, damage


def _describe(source: SegmentSource, key: str) -> SegmentDescription:
    def read(offset: int, length: int) -> bytes:
        out = bytearray(length)
        source.read_into(offset, memoryview(out))
        return bytes(out)

    size = source.size
    header = read(0, header_length(read(0, min(8, size)), size, key))
    doc = parse(header, size, key, read)
    entry = SegmentEntry(doc.segment, doc.term, size, len(header), checksums.header_hash(header))
    return SegmentDescription(
        entry, doc.run, doc.parents, doc.encodings, _shares(doc, size), *read_ranks(doc.extra, doc.steps, key)
    )


def _shares(doc: SegmentDoc, size: int) -> dict[int, int]:
    """Return the bytes of each step: its chunks, and an equal share of the rest; the last gets the remainder."""
    stored = {step: sum(tensor.stored for tensor in doc.tensors.get(step, {}).values()) for step in doc.steps}
    rest, left = divmod(max(0, size - sum(stored.values())), len(stored))
    return {step: nbytes + rest + (left if step == doc.steps[-1] else 0) for step, nbytes in stored.items()}
