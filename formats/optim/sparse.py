"""``sparse``: ``replayed`` with a gradient that top-k compression left almost empty.

The gradient is stored exactly as training applied it, so the replay is exact too: a third of a bit per parameter and
step at k = 1 % with fp32 values, half of that with bf16 values. Whether error feedback keeps what was left out is
training's affair: what it fed to the optimizer is what counts.
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
    """See `replayed.decode`. Raises ``CorruptSegmentError`` for the payload of a dense gradient too."""
    form, _ = replayed.read_form(Cursor(as_bytes(payload)))
    if not form.sparse:
        raise CorruptSegmentError("a sparse step's payload holds a dense gradient")
    replayed.decode(rule, payload, state)
