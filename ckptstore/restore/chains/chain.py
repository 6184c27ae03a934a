"""Restores tensors through chains: the bytes of the full, and every delta applied to them, chunk by chunk.

Each chunk of a tensor has its own chain of links; the oldest is self-contained, the others are deltas on the one
before. Threads take whole chunks: read a link, check its hash, apply it in place, read the next. The states between
base and target never exist as a whole, and each thread needs only the memory of one payload besides the target.

Tensors that one optimizer step updated together are restored together, by a `Program` (`replay`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ckptstore.formats import digest, kernel_choice
from ckptstore.formats.codecs import FROM_MASTER
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.formats.segment_files.segment import RAW, TensorEntry
from ckptstore.host.buffers import SLACK, Bytes, Staging, aligned
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Advance
from ckptstore.host.threads import run_all, workers
from ckptstore.restore.chains.chain_link import TensorLink, apply_link, check_decoded, wrong
from ckptstore.restore.chains.parallel_chain import apply_in_parts, parts_of
from ckptstore.restore.chains.replay import Program

__all__ = ["Chain", "decode_chunk", "iterate_chain", "master_of", "restore_tensors"]

_JOB_BYTES = 2 << 20
"""Logical bytes of neighboring small chunks that one thread takes at once."""

Target = Callable[[int, Bytes], None] | Bytes
"""Memory of a tensor's size, or a function called with (offset within the tensor, bytes)."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The links that restore one tensor, in the order of application; the first needs no base.

    Attributes:
        links: at least one.
        master: the chain of the tensor from which the first link derives (codec ``derive``), or None.
        program: restores the tensor together with others, if some of the links are optimizer steps; it is used instead
            of the links.
    """

    links: Sequence[TensorLink]
    master: Chain | None = None
    program: Program | None = None

    @property
    def tensor(self) -> TensorEntry:
        """The tensor as the last link describes it."""
        return self.links[-1].tensor

    @property
    def raw(self) -> bool:
        """Whether its bytes are uncompressed in a segment."""
        return len(self.links) == 1 and self.tensor.codec == RAW

    @property
    def sources(self) -> Sequence[TensorLink]:
        """Every link that restoring it reads, including those of tensors restored with it, and its master's."""
        own = self.links if self.program is None else self.program.links
        return own if self.master is None else (*self.master.sources, *own)

    @property
    def where(self) -> str:
        """Segment and tensor, for error messages."""
        return self.links[-1].where


def master_of(tensor: TensorEntry) -> str | None:
    """Name of the tensor of the same step of which `tensor` is a rounded copy, or None."""
    if tensor.codec not in FROM_MASTER or "of" not in tensor.params:
        return None
    name = tensor.params["of"]
    return name if isinstance(name, str) else str(name)  # unchanged: errors show the key of a shard


def decode_chunk(
    chain: Chain, index: int, out: Bytes, scratch: Bytes, *, verify: bool = True, compare: bool = True
) -> None:
    """Restore chunk `index` of a tensor into `out`, which is exactly as long as the chunk.

    Args:
        scratch: memory for one payload; its contents do not matter.
        verify: check every payload and the result. Without it, damage may give wrong bytes, or an error.
        compare: as part of the check, compare the result with the hash in its segment.

    Raises:
        CorruptSegmentError: a payload or the result is not what was written; names segment, tensor and offset.
        StorageError: the medium failed.
    """
    if chain.program is not None:
        chain.program.decode_one(chain.tensor.name, index, out, verify=verify)
        return

    def work() -> None:
        for number, link in enumerate(chain.links):
            base: Bytes | None = out if link.base_ratio else None
            if not number and link.base_ratio:
                assert chain.master is not None, chain.where  # otherwise it was never assembled
                base = _master_bytes(chain.master, index, 2 * len(out), scratch, verify)
            apply_link(link, index, base, out, scratch, verify=verify)
        check_decoded(chain.links[-1], index, out, verify=verify and compare)

    kernel_choice.confirmed(work)


def _master_bytes(master: Chain, index: int, length: int, scratch: Bytes, verify: bool) -> Bytes:
    """The `length` bytes of a master from which chunk `index` of its copy, half as long, is rounded.

    Prevents: an intact tensor reported as damaged because of the hash of its master, which need not be a tensor of the
    state. The copy has its own hash, and the master's is compared where the master itself is restored.
    """
    whole = aligned(length)
    begin = 2 * index * CHUNK
    at = 0
    for number in range(begin // CHUNK, len(master.tensor.chunks)):
        logical = master.tensor.chunks[number].logical
        if at == length:
            break
        decode_chunk(master, number, whole[at : at + logical], scratch, verify=verify, compare=False)
        at += logical
    return whole


def restore_tensors(
    targets: Mapping[str, tuple[Chain, Target]],
    pool: ThreadPoolExecutor,
    staging: Staging,
    *,
    verify: bool = True,
    advance: Advance | None = None,
) -> None:
    """Restore tensors in parallel.

    Args:
        targets: name -> its chain, and its destination: memory of its size, or a function called with (offset within
            the tensor, verified bytes) from several threads.
        pool: threads.
        staging: at least two blocks for every thread.
        advance: called with the logical bytes of every restored chunk.
    """
    digests = _Digests(targets) if verify else None
    deliver = _delivery(advance, digests)
    copies = {name for name, (chain, target) in targets.items() if _is_copy(chain, targets) and not callable(target)}
    joint = {name: found for name, found in targets.items() if found[0].program is not None}
    alone = {name: found for name, found in targets.items() if name not in joint and name not in copies}
    with workers(1, "prefetch") as prefetch:
        work = [_joint_job(part, targets, prefetch.pool, staging, verify, deliver) for part in _programs(joint)]
        groups = list(_groups(alone))
        if len(groups) + len(work) < staging.blocks // 2:
            groups = _apply_in_parts(groups, pool, staging, verify, deliver)
        work += [_job(group, staging, verify, deliver) for group in groups]
        run_all(pool, work)
    # Rounded copies of tensors that are in memory now: decoding their masters again would cost more than the rest.
    run_all(pool, [_copy_job(targets[name], targets, staging, verify, deliver) for name in sorted(copies)])
    if digests is not None:
        digests.check()


class _Digests:
    """State digests of the results of deltas and steps, summed chunk by chunk and compared at the end."""

    def __init__(self, targets: Mapping[str, tuple[Chain, Target]]) -> None:
        self._chains = {
            name: chain
            for name, (chain, _) in targets.items()
            if chain.tensor.digest is not None and len(chain.links) > 1
        }
        self._sums = dict.fromkeys(self._chains, 0)
        self._lock = threading.Lock()

    def add(self, name: str, start: int, data: Bytes) -> None:
        """Add the bytes of a tensor from `start` on."""
        if name in self._sums:
            part = digest.partial(data, start // 4)
            with self._lock:
                self._sums[name] += part

    def check(self) -> None:
        """Raises `CorruptSegmentError` naming the tensor and the step whose digest differs."""
        for name, chain in self._chains.items():
            if digest.combine(self._sums[name], nbytes=chain.tensor.nbytes) != chain.tensor.digest:
                kernel_choice.confirmed(partial(self._compare_again, name, chain), since=kernel_choice.used())

    def _compare_again(self, name: str, chain: Chain) -> None:
        """Compare once more; while numpy is used to check a compiled kernel, with bytes that are decoded again."""
        total = self._sums[name]
        if kernel_choice.doubting():
            total = sum(digest.partial(data, start // 4) for start, data in iterate_chain(chain))
        if digest.combine(total, nbytes=chain.tensor.nbytes) != chain.tensor.digest:
            raise wrong(
                f"{chain.where}: its state digest is not that of step {chain.links[-1].step}, as training had it"
            )


Deliver = Callable[[str, int, Bytes], None]
"""Called with a tensor's name, an offset and the bytes there, once they are restored."""


def _delivery(advance: Advance | None, digests: _Digests | None) -> Deliver:
    def deliver(name: str, start: int, data: Bytes) -> None:
        if digests is not None:
            digests.add(name, start, data)
        if advance is not None:
            advance(len(data))

    return deliver


def _is_copy(chain: Chain, targets: Mapping[str, tuple[Chain, Target]]) -> bool:
    """Whether a tensor is a rounded copy of one that is restored into memory as well, at the same step."""
    if chain.master is None or len(chain.links) > 1:
        return False
    found = targets.get(chain.master.tensor.name)
    return found is not None and found[0].tensor is chain.master.tensor and not callable(found[1])


# -- tensors that are restored separately

_Piece = tuple[Chain, int, int, int, Target]  # chain, chunk, start, length, target


def _groups(targets: Mapping[str, tuple[Chain, Target]]) -> Iterator[list[_Piece]]:
    group: list[_Piece] = []
    filled = 0
    for chain, target in targets.values():
        start = 0
        for index, chunk in enumerate(chain.tensor.chunks):
            if group and filled + chunk.logical > _JOB_BYTES:
                yield group
                group, filled = [], 0
            group.append((chain, index, start, chunk.logical, target))
            filled += chunk.logical
            start += chunk.logical
    if group:
        yield group


def _apply_in_parts(
    groups: Sequence[list[_Piece]], pool: ThreadPoolExecutor, staging: Staging, verify: bool, deliver: Deliver
) -> list[list[_Piece]]:
    """Restore chunks with long chains, one after the other, each with all threads -> the other groups."""
    left = []
    threads = staging.blocks // 2
    for group in groups:
        chain, index, start, length, target = group[0]
        parts = parts_of(chain.links, threads) if len(group) == 1 and chain.master is None else []
        if len(parts) < 2:
            left.append(group)
            continue
        out = aligned(length) if callable(target) else target[start : start + length]
        apply_in_parts(parts, index, out, pool, staging, verify=verify)
        if callable(target):
            target(start, out)
        deliver(chain.tensor.name, start, out)
    return left


def _job(group: Sequence[_Piece], staging: Staging, verify: bool, deliver: Deliver) -> Callable[[], None]:
    def work() -> None:
        with staging.block() as scratch, staging.block() as decoded:
            for chain, index, start, length, target in group:
                if callable(target):
                    out = decoded[:length]
                    decode_chunk(chain, index, out, scratch, verify=verify)
                    target(start, out)
                else:
                    out = target[start : start + length]
                    decode_chunk(chain, index, out, scratch, verify=verify)
                deliver(chain.tensor.name, start, out)

    return work


def _copy_job(
    found: tuple[Chain, Target],
    targets: Mapping[str, tuple[Chain, Target]],
    staging: Staging,
    verify: bool,
    deliver: Deliver,
) -> Callable[[], None]:
    chain, target = found
    assert chain.master is not None
    master = targets[chain.master.tensor.name][1]
    assert not callable(target)
    assert not callable(master)
    link = chain.links[0]

    def work() -> None:
        start = 0
        with staging.block() as scratch:
            for index, chunk in enumerate(chain.tensor.chunks):
                out = target[start : start + chunk.logical]
                base = master[2 * start : 2 * (start + chunk.logical)]
                kernel_choice.confirmed(partial(_copied_chunk, link, index, base, out, scratch, verify))
                deliver(chain.tensor.name, start, out)
                start += chunk.logical

    return work


def _copied_chunk(link: TensorLink, index: int, base: Bytes, out: Bytes, scratch: Bytes, verify: bool) -> None:
    apply_link(link, index, base, out, scratch, verify=verify)
    check_decoded(link, index, out, verify=verify)


# -- tensors that are restored together


def _programs(targets: Mapping[str, tuple[Chain, Target]]) -> Iterator[list[tuple[Program, int]]]:
    """The chunks of all programs that restore `targets`, grouped into jobs."""
    programs = {id(chain.program): chain.program for chain, _ in targets.values() if chain.program is not None}
    group: list[tuple[Program, int]] = []
    filled = 0
    for program in programs.values():
        for index in range(program.chunks):
            nbytes = program.nbytes(index)
            if group and filled + nbytes > _JOB_BYTES:
                yield group
                group, filled = [], 0
            group.append((program, index))
            filled += nbytes
    if group:
        yield group


def _joint_job(
    group: Sequence[tuple[Program, int]],
    targets: Mapping[str, tuple[Chain, Target]],
    prefetch: ThreadPoolExecutor,
    staging: Staging,
    verify: bool,
    deliver: Deliver,
) -> Callable[[], None]:
    def one(program: Program, index: int, scratch: tuple[Bytes, Bytes]) -> None:
        start = index * CHUNK
        outs: dict[str, Bytes] = {}
        for name in program.names:
            if name in targets:
                chain, target = targets[name]
                length = chain.tensor.chunks[index].logical
                outs[name] = aligned(length) if callable(target) else target[start : start + length]
        program.decode(index, outs, scratch, prefetch, verify=verify)
        for name, out in outs.items():
            target = targets[name][1]
            if callable(target):
                target(start, out)
            deliver(name, start, out)

    def work() -> None:
        with staging.block() as first, staging.block() as second:
            for program, index in group:
                one(program, index, (first, second))

    return work


def iterate_chain(chain: Chain, *, verify: bool = True) -> Iterator[tuple[int, Bytes]]:
    """The tensor's chunks in order, one at a time: (offset within the tensor, bytes valid until the next one)."""
    longest = max((chunk.logical for chunk in chain.tensor.chunks), default=0)
    decoded = aligned(longest)
    scratch = aligned(min(CHUNK, 2 * longest + BLOCK) + SLACK)
    start = 0
    for index, chunk in enumerate(chain.tensor.chunks):
        out = decoded[: chunk.logical]
        decode_chunk(chain, index, out, scratch, verify=verify)
        yield start, out
        start += chunk.logical
