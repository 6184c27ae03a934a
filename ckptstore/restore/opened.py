"""A checkpoint that is open: its plan, every segment of it, what they hold, and what restores each tensor.

While it is open its segments are pinned (`ckptstore.log.pins.claim`), so that no collector takes them away.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptstore.errors import CorruptSegmentError, FormatError, IncompatibleFormatError
from ckptstore.formats import hashing, jsontext
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import CheckpointEntry, Encoding, SegmentEntry
from ckptstore.formats.segment import TensorEntry
from ckptstore.formats.state import tensor_names
from ckptstore.log import refs
from ckptstore.log.checkpoints import CheckpointInfo, describe_checkpoint
from ckptstore.log.journal import Journal
from ckptstore.log.pins import claim
from ckptstore.restore.assembly import Held, assemble, held_by, tree_of
from ckptstore.restore.chain import Chain
from ckptstore.restore.plan import Plan, plan
from ckptstore.segments.reading import SegmentReader

__all__ = ["Opened", "opened"]


@dataclass(frozen=True)  # no slots: what costs a walk over all tensors is computed once
class Opened:
    """A checkpoint with every segment of its plan open and described.

    Attributes:
        catalog: the log as it was read to open this.
        entry: the checkpoint in it.
        plan: how it is restored.
        readers: the plan's segments, by id.
    """

    catalog: Catalog
    entry: CheckpointEntry
    plan: Plan
    readers: dict[str, SegmentReader]

    @property
    def ref(self) -> str:
        """The REF ``STEP@TERM``, which names this checkpoint for ever."""
        return self.entry.ref

    @property
    def info(self) -> CheckpointInfo:
        """What the store tells about it."""
        return describe_checkpoint(self.catalog, self.entry)

    @property
    def lossy(self) -> bool:
        """Whether it is not what training had, because something on the way was stored so."""
        return any(encoding.lossy for encoding in self.plan.encodings)

    @cached_property
    def tree(self) -> Any:
        """The typed JSON tree of the state."""
        last = self.plan.encodings[-1]
        return tree_of([self.readers[segment] for segment in last.segments], last)

    @cached_property
    def chains(self) -> dict[str, Chain]:
        """name -> what restores it, for every tensor of the state, in the order of the tree.

        Raises:
            CorruptSegmentError: a layer is missing, or does not fit the one below it.
        """
        held = [self._held(encoding) for encoding in self.plan.encodings]
        names = tensor_names(self.tree)
        if missing := [name for name in names if name not in held[-1]]:
            raise CorruptSegmentError(f"checkpoint {self.ref}: its segments lack tensor {missing[0]!r}")
        return assemble(held, names)

    @property
    def tensors(self) -> dict[str, tuple[TensorEntry, SegmentReader]]:
        """name -> its entry in the last encoding, and the segment that holds it, in the order of the tree."""
        return {name: (chain.tensor, chain.layers[-1].reader) for name, chain in self.chains.items()}

    def _held(self, encoding: Encoding) -> Held:
        """The tensors of one encoding, which builds on what the plan says."""
        return held_by([self.readers[segment] for segment in encoding.segments], encoding)

    def check_identity(self) -> None:
        """Compare the descriptions with the state hash of the log. Raises `CorruptSegmentError`."""
        try:
            parts = [(name, held.dtype, held.shape, held.hash) for name, (held, _) in self.tensors.items()]
        except IncompatibleFormatError:
            raise  # nothing is damaged: a newer version reads it
        except FormatError as error:  # a chunk whose decoded bytes have no hash
            raise CorruptSegmentError(f"checkpoint {self.ref}: {error}") from error
        if hashing.state_hash(jsontext.dumps(self.tree), parts) != self.entry.state:
            raise CorruptSegmentError(f"checkpoint {self.ref}: its segments describe another state than the log")


@contextmanager
def opened(journal: Journal, ref: str | int) -> Iterator[Opened]:
    """Plan, pin and open everything that restoring `ref` reads."""

    def choose_plan(catalog: Catalog) -> tuple[CheckpointEntry, Plan]:
        entry = refs.resolve(catalog, ref)
        return entry, plan(catalog, entry.id)

    with (
        claim(journal, choose_plan, lambda chosen: chosen[1].segments) as (view, (entry, chosen)),
        ExitStack() as stack,
    ):
        readers: dict[str, SegmentReader] = {}
        for segment in chosen.segments:
            readers[segment] = _open(journal, view.catalog.segments[segment])
            stack.callback(readers[segment].close)
        found = Opened(view.catalog, entry, chosen, readers)
        found.check_identity()
        yield found


def _open(journal: Journal, entry: SegmentEntry) -> SegmentReader:
    reader = SegmentReader(journal.backend, entry)
    try:
        reader.check_identity(journal.run)
    except CorruptSegmentError:
        reader.close()
        raise
    return reader
