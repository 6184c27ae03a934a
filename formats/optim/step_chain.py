"""Decode a chain of step payloads in one pass over the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.codecs.block_loops import as_bytes
from ckptstore.formats.codecs.codec import Buffer
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.optim import predicted, replayed, scaled
from ckptstore.formats.optim.arithmetic import Floats, exactly
from ckptstore.formats.optim.gradients import GradientForm
from ckptstore.formats.optim.step_settings import Rule
from ckptstore.formats.optim.step_tiles import Array, slots_of

Encoding: TypeAlias = Literal["predicted", "replayed", "sparse", "predicted/2", "replayed/2"]
SCALED: Final = ("predicted/2", "replayed/2")
"""The encodings of module `scaled`."""


@dataclass(frozen=True, slots=True, eq=False)
class StepLink:
    """One step of one chunk: its encoding, its rule and its payload."""

    encoding: Encoding
    rule: Rule
    payload: Buffer


def decode(links: Sequence[StepLink], state: Sequence[Array]) -> None:
    """Apply the steps of all links in place: block by block, all links while the block is in cache.

    Raises:
        CorruptSegmentError, FormatError: as the encodings' ``decode``. ``state`` is then partly changed.
        ValueError: the links' rules have different slots, or the state does not match them.
    """
    if not links:
        return
    if any(link.rule.slots != links[0].rule.slots for link in links):
        raise ValueError("all links of a chain must be steps of one parameter, with the same slots")
    readers = [_LinkReader(link) for link in links]
    with exactly():
        for block in predicted.blocks_of(slots_of(links[0].rule, state)):
            for reader in readers:
                reader.read(block)
    for reader in readers:
        predicted.finished(reader.cursor)


class _LinkReader:
    """Decodes one link, block by block."""

    def __init__(self, link: StepLink) -> None:
        self.rule = link.rule
        self.cursor = Cursor(as_bytes(link.payload))
        self.form: GradientForm | None = None
        self.exceptions = False
        self.scaled = link.encoding in SCALED
        if self.scaled:
            scaled.check(link.rule)
        if link.encoding == "replayed/2":
            self.form, self.exceptions = scaled.read_form(self.cursor)
        elif link.encoding in ("replayed", "sparse"):
            self.form, self.exceptions = replayed.read_form(self.cursor)
            if self.form.sparse != (link.encoding == "sparse"):
                raise CorruptSegmentError(f"the payload of a step said to be {link.encoding} is not")

    def read(self, block: Sequence[Floats]) -> None:
        if self.scaled:
            scaled.read_block(self.rule, self.form, self.exceptions, self.cursor, block)
        elif self.form is None:
            predicted.read_block(self.rule, self.cursor, block)
        else:
            replayed.read_block(self.rule, self.form, self.exceptions, self.cursor, block)
