"""The encoding ``sparse``: like ``replayed``, with a gradient that top-k compression made sparse (SPEC section 5.5.4).

The gradient is stored exactly as training applied it, so the replay is exact, too. It takes a third of a bit per
parameter and step at k = 1 % with fp32 values, and half of that with bf16 values. Training may keep the dropped entries
for error feedback; only the gradient that the optimizer received matters here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.codecs import FAST
from ckptstore.formats.codecs.block_loops import as_bytes
from ckptstore.formats.codecs.codec import Buffer
from ckptstore.formats.codecs.kernels import Bytes
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.optim import replayed
from ckptstore.formats.optim.gradients import SparseGradient
from ckptstore.formats.optim.step_settings import Rule
from ckptstore.formats.optim.step_tiles import Array

bound = replayed.bound


def encode(
    rule: Rule,
    old: Sequence[Array],
    new: Sequence[Array] | None,
    gradient: SparseGradient,
    *,
    out: Bytes | None = None,
    level: int = FAST,
) -> Bytes:
    """See `replayed.encode`."""
    return replayed.encode(rule, old, new, gradient, out=out, level=level)


def decode(rule: Rule, payload: Buffer, state: Sequence[Array]) -> None:
    """See `replayed.decode`. Also raises ``CorruptSegmentError`` if the payload has a dense gradient."""
    form, _ = replayed.read_form(Cursor(as_bytes(payload)))
    if not form.sparse:
        raise CorruptSegmentError("the payload of a sparse step has a dense gradient")
    replayed.decode(rule, payload, state)
