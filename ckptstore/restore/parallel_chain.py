"""Long chains of few chunks: parts of a chain are summed up by several threads, and the sums are added.

Threads usually take whole chunks, and a chain is applied from its first layer to its last. Where there are fewer chunks
than threads, that leaves threads idle; but XOR and integer differences may be summed up in any grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ckptstore.formats import codecs
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.threads import run_all
from ckptstore.restore.link import Layer, apply_layer, check_decoded

__all__ = ["apply_in_parts", "parts_of"]

_LAYERS: Final = 4
"""Deltas that are worth a thread of their own."""


def parts_of(layers: Sequence[Layer], threads: int) -> list[Sequence[Layer]]:
    """Cut a chain into parts for so many threads: the first begins with the full, the others are additive deltas."""
    first = len(layers)
    while first > 1 and layers[first - 1].group is None and codecs.is_additive(layers[first - 1].codec):
        if layers[first - 1].codec != layers[-1].codec:
            break
        first -= 1
    count = min(threads, (len(layers) - first) // _LAYERS)
    if count < 2:
        return [layers]
    starts = [first + part * (len(layers) - first) // count for part in range(count)]
    return [layers[: starts[1]], *(layers[a:b] for a, b in zip(starts[1:], [*starts[2:], len(layers)], strict=True))]


def apply_in_parts(
    parts: Sequence[Sequence[Layer]],
    index: int,
    out: Bytes,
    pool: ThreadPoolExecutor,
    staging: Staging,
    *,
    verify: bool,
) -> None:
    """Restore chunk `index` of a tensor into `out`.

    Args:
        parts: as `parts_of` gave them, at least two.

    Raises:
        CorruptSegmentError: a payload or the result is not what was written; names segment, tensor and step.
        StorageError: the medium failed.
    """
    sums = [out, *(aligned(len(out)) for _ in parts[1:])]

    def job(layers: Sequence[Layer], total: Bytes) -> Callable[[], None]:
        def work() -> None:
            with staging.block() as scratch:
                for layer in layers:
                    apply_layer(layer, index, total if layer.base_ratio else None, total, scratch, verify=verify)

        return work

    run_all(pool, [job(layers, total) for layers, total in zip(parts, sums, strict=True)])
    last = parts[-1][-1]
    for total in sums[1:]:
        codecs.add(last.codec, total, out)
    check_decoded(last, index, out, verify=verify)
