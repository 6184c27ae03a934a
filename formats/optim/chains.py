"""Several steps on end: a chain of payloads decoded in one pass over the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.codecs.coding import Buffer, as_bytes
from ckptstore.formats.codecs.planecoder import Cursor
from ckptstore.formats.optim import predicted, replayed
from ckptstore.formats.optim.arithmetic import Floats, exactly
from ckptstore.formats.optim.gradients import Form
from ckptstore.formats.optim.settings import Rule
from ckptstore.formats.optim.stepping import Array, slots_of

Encoding: TypeAlias = Literal["predicted", "replayed", "sparse"]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One step of one chunk: how its payload was made, by which rule, and the payload."""

    encoding: Encoding
    rule: Rule
    payload: Buffer


def decode(layers: Sequence[Layer], state: Sequence[Array]) -> None:
    """Take the steps of all layers, in place: block by block, every layer while the block is in cache.

    Raises:
        CorruptSegmentError, FormatError: as the encodings' ``decode``. ``state`` is then partly changed.
        ValueError: layers whose rules have different slots, or a state that is not theirs.
    """
    if not layers:
        return
    if any(layer.rule.slots != layers[0].rule.slots for layer in layers):
        raise ValueError("the layers of a chain are steps of one parameter, with the same slots")
    readers = [_Reader(layer) for layer in layers]
    with exactly():
        for block in predicted.blocks_of(slots_of(layers[0].rule, state)):
            for reader in readers:
                reader.read(block)
    for reader in readers:
        predicted.finished(reader.cursor)


class _Reader:
    """Where the decoding of one layer has come to."""

    def __init__(self, layer: Layer) -> None:
        self.rule = layer.rule
        self.cursor = Cursor(as_bytes(layer.payload))
        self.form: Form | None = None
        self.exceptions = False
        if layer.encoding != "predicted":
            self.form, self.exceptions = replayed.read_form(self.cursor)
            if self.form.sparse != (layer.encoding == "sparse"):
                raise CorruptSegmentError(f"the payload of a step said to be {layer.encoding} is not")

    def read(self, block: Sequence[Floats]) -> None:
        if self.form is None:
            predicted.read_block(self.rule, self.cursor, block)
        else:
            replayed.read_block(self.rule, self.form, self.exceptions, self.cursor, block)
