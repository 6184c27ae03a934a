"""Applies long chains of few chunks in parallel: threads sum parts of a chain, and the sums are added.

Usually a thread takes a whole chunk, and applies its chain from the first link to the last. If there are fewer chunks
than threads, that leaves threads idle; but XOR and integer differences may be summed in any grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ckptstore.formats import codecs, kernel_choice
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.threads import run_all
from ckptstore.restore.chains.chain_link import TensorLink, apply_link, check_decoded

__all__ = ["apply_in_parts", "parts_of"]

_LINKS: Final = 4
"""Number of deltas that are worth a thread."""


def parts_of(links: Sequence[TensorLink], threads: int) -> list[Sequence[TensorLink]]:
    """Cut a chain into parts for this many threads: the first begins with the full, the others are additive deltas."""
    first = len(links)
    while first > 1 and links[first - 1].group is None and links[first - 1].codec.additive:
        if links[first - 1].codec != links[-1].codec:
            break
        first -= 1
    count = min(threads, (len(links) - first) // _LINKS)
    if count < 2:
        return [links]
    starts = [first + part * (len(links) - first) // count for part in range(count)]
    return [links[: starts[1]], *(links[a:b] for a, b in zip(starts[1:], [*starts[2:], len(links)], strict=True))]


def apply_in_parts(
    parts: Sequence[Sequence[TensorLink]],
    index: int,
    out: Bytes,
    pool: ThreadPoolExecutor,
    staging: Staging,
    *,
    verify: bool,
) -> None:
    """Restore chunk `index` of a tensor into `out`.

    Args:
        parts: from `parts_of`, at least two.

    Raises:
        CorruptSegmentError: a payload or the result is not what was written; names segment, tensor and step.
        StorageError: the medium failed.
    """
    kernel_choice.confirmed(lambda: _sum_parts(parts, index, out, pool, staging, verify))


def _sum_parts(
    parts: Sequence[Sequence[TensorLink]],
    index: int,
    out: Bytes,
    pool: ThreadPoolExecutor,
    staging: Staging,
    verify: bool,
) -> None:
    sums = [out, *(aligned(len(out)) for _ in parts[1:])]

    def job(links: Sequence[TensorLink], total: Bytes) -> Callable[[], None]:
        def work() -> None:
            with staging.block() as scratch:
                for link in links:
                    apply_link(link, index, total if link.base_ratio else None, total, scratch, verify=verify)

        return work

    run_all(pool, [job(links, total) for links, total in zip(parts, sums, strict=True)])
    last = parts[-1][-1]
    for total in sums[1:]:
        codecs.add(last.codec, total, out)
    check_decoded(last, index, out, verify=verify)
