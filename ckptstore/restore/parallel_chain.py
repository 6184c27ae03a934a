"""Long chains of few chunks: parts of a chain are summed up by several threads, and the sums are added.

Threads usually take whole chunks, and a chain is applied from its first link to its last. Where there are fewer chunks
than threads, that leaves threads idle; but XOR and integer differences may be summed up in any grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ckptstore.formats import codecs, kernel_choice
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.threads import run_all
from ckptstore.restore.chain_link import Link, apply_link, check_decoded

__all__ = ["apply_in_parts", "parts_of"]

_LINKS: Final = 4
"""Deltas that are worth a thread of their own."""


def parts_of(links: Sequence[Link], threads: int) -> list[Sequence[Link]]:
    """Cut a chain into parts for so many threads: the first begins with the full, the others are additive deltas."""
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
    parts: Sequence[Sequence[Link]],
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
    kernel_choice.confirmed(lambda: _summed_up(parts, index, out, pool, staging, verify))


def _summed_up(
    parts: Sequence[Sequence[Link]], index: int, out: Bytes, pool: ThreadPoolExecutor, staging: Staging, verify: bool
) -> None:
    sums = [out, *(aligned(len(out)) for _ in parts[1:])]

    def job(links: Sequence[Link], total: Bytes) -> Callable[[], None]:
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
