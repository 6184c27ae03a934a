"""Bytes as a zstd frame that has only Huffman-coded literals (RFC 8878): any zstd decoder reads it.

The planes of numbers have no matches. zstd's compressor searches for some nevertheless, and takes some that cost more
than they save. Here a block of 128 KiB has its own table of codes, four streams, and no sequences. A block is stored as
it is if codes save less than a byte in 64 (decoding takes longer than reading these), and as one byte if all its bytes
are equal.

numpy and C make the same bytes. So everything that could be done in several ways is fixed here: which of two equally
frequent subtrees is merged first, how codes longer than 11 bits are avoided, and how counts of weights are rounded.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptstore.formats.codecs import kernels
from ckptstore.formats.codecs.kernels import N_LOG_N, Bytes
from ckptstore.formats.kernel_choice import hot

MOST: Final = 1 << 20
"""Most bytes of a frame's contents."""
_BLOCK: Final = 1 << 17
_MOST_BITS: Final = 11
_LOG: Final = 6
_WIDTH: Final = 24
"""Where the number of bits of a pair of codes begins in its entry."""
_TABLE: Final = 1 << _LOG
_LEAST: Final = 64
_SEARCHED: Final = 1024
_WINDOW: Final = 8
_BIT: Final = 1 << 20
_KEPT, _ONE_VALUE, _CODED = range(3)
_MAGIC: Final = 0xFD2FB528
_Integers = npt.NDArray[np.integer]


def matches_pay(values: Bytes) -> bool:
    """Whether the matches that zstd would find save more than one bit in 32.

    A sample is searched: eight runs, 1,024 values in all, spread evenly over the values, or all of them if they are
    fewer. A match begins at a window of eight values that occurred before in the run. It saves what its values take in
    codes (a bit or more each), less the 22 bits that it takes.
    """
    count = len(values)
    runs = values.reshape(1, count)
    if count > _SEARCHED:
        runs = values[: 8 * (count // 8)].reshape(8, count // 8)[:, : _SEARCHED // 8]
    total = runs.size
    if total < _WINDOW:
        return False
    counts = np.bincount(runs.reshape(-1), minlength=256)
    each = max(_BIT, (int(N_LOG_N[total]) - int(N_LOG_N.take(counts).sum())) // total)
    each_window = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(runs, _WINDOW, axis=1))
    windows: npt.NDArray[np.uint64] = each_window.view("<u8").reshape(len(runs), -1)
    found = np.sort(windows, axis=1)
    repeated = int(np.count_nonzero(found[:, 1:] == found[:, :-1]))
    if 32 * 42 * _BIT * repeated <= total * each:  # a match of n + 7 values has n such windows: it saves 8 n + 34 bits
        return False
    saved = sum(_saved(run, found, each) for run, found in zip(runs, windows, strict=True))
    return 32 * saved > total * each


def _saved(values: Bytes, windows: npt.NDArray[np.uint64], each: int) -> int:
    """What matches save in one run, in 2**-20 bits, if a value takes ``each``."""
    last: dict[int, int] = {}
    keys, data, saved, at = windows.tolist(), values.tobytes(), 0, 0
    while at < len(keys):
        before, last[keys[at]], length = last.get(keys[at]), at, 1
        if before is not None:
            length = _WINDOW
            while at + length < len(data) and data[at + length] == data[before + length]:
                length += 1
            saved += max(0, length * each - 22 * _BIT)
        at += length
    return saved


@hot()
def literals(values: Bytes, out: Bytes) -> int:
    """Write the frame of at most ``MOST`` bytes to ``out``.

    Returns:
        The frame's size; 0: it has more bytes than ``out``, or there are no values. Then nothing is written.
    """
    count = len(values)
    blocks = [_block(values[start : start + _BLOCK]) for start in range(0, count, _BLOCK)]
    if count < 256:
        head = struct.pack("<IBB", _MAGIC, 0x20, count)
    elif count < 65792:
        head = struct.pack("<IBH", _MAGIC, 0x60, count - 256)
    else:
        head = struct.pack("<IBI", _MAGIC, 0xA0, count)
    parts = [head]
    for number, (kind, size, body) in enumerate(blocks):
        last = number == len(blocks) - 1
        parts += [(size << 3 | kind << 1 | last).to_bytes(3, "little"), body]
    frame = b"".join(parts)
    if not count or len(frame) > len(out):
        return 0
    out[: len(frame)] = np.frombuffer(frame, np.uint8)
    return len(frame)


def _block(values: Bytes) -> tuple[int, int, bytes]:
    """The kind of a block, the size in its header, and its body."""
    count = len(values)
    kept = _KEPT, count, values.tobytes()
    if count < _LEAST:
        return kept
    quarter = -(-count // 4)
    parts = [values[start : min(start + quarter, count)] for start in range(0, 4 * quarter, quarter)]
    each = np.stack([np.bincount(part, minlength=256) for part in parts])
    counts = each.sum(axis=0)
    if int(counts.max()) == count:
        return _ONE_VALUE, count, values[:1].tobytes()
    lengths = _code_lengths(counts)
    tree = _describe(lengths)
    if tree is None:
        return kept
    sizes = ((each @ lengths + 8) // 8).tolist()  # with the bit that ends a stream
    size = len(tree) + 6 + sum(sizes)
    head, step = (3, 10) if count < 1 << 10 else (4, 14) if count < 1 << 14 else (5, 18)
    if head + size + 1 >= count - count // 64 or max(sizes[:3]) > 65535:
        return kept
    body = (_CODED | (head - 2) << 2 | count << 4 | size << 4 + step).to_bytes(head, "little") + tree
    body += struct.pack("<3H", *sizes[:3]) + _streams(parts, sizes, lengths, _codes(lengths)) + b"\0"
    return _CODED, len(body), body


def _code_lengths(counts: _Integers) -> npt.NDArray[np.uint8]:
    """The length of each byte's code, 0 for bytes that do not occur: Huffman's, then cut to 11 bits."""
    number = int(np.count_nonzero(counts))
    order = np.argsort(counts, kind="stable")[-number:]
    # Two queues, each ascending and with a sum that is never reached at its end: those of leaves and those of subtrees.
    endless = 1 << 62
    leaves, subtrees = [*counts[order].tolist(), endless], [endless] * number
    parents = [0] * (2 * number - 1)
    leaf = inner = 0
    for made in range(number - 1):
        if leaves[leaf] <= subtrees[inner]:  # of equal sums, leaves first
            total, parents[leaf], leaf = leaves[leaf], number + made, leaf + 1
        else:
            total, parents[number + inner], inner = subtrees[inner], number + made, inner + 1
        if leaves[leaf] <= subtrees[inner]:
            subtrees[made], parents[leaf], leaf = total + leaves[leaf], number + made, leaf + 1
        else:
            subtrees[made], parents[number + inner], inner = total + subtrees[inner], number + made, inner + 1
    depths = [0] * (2 * number - 1)
    for node in range(2 * number - 3, -1, -1):
        depths[node] = depths[parents[node]] + 1
    depths = [min(depth, _MOST_BITS) for depth in depths[:number]]
    used, most = sum(1 << _MOST_BITS - depth for depth in depths), 1 << _MOST_BITS
    node = 0
    while used > most:  # the rarest are made longer
        if depths[node] < _MOST_BITS:
            depths[node] += 1
            used -= 1 << _MOST_BITS - depths[node]
        node = (node + 1) % number
    node = number
    while used < most:  # then the most frequent shorter, while that fits
        node = (node or number) - 1
        while depths[node] > 1 and used + (1 << _MOST_BITS - depths[node]) <= most:
            used += 1 << _MOST_BITS - depths[node]
            depths[node] -= 1
    lengths = np.zeros(256, np.uint8)
    lengths[order] = depths
    return lengths


def _codes(lengths: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The code of each byte: the longest codes have the smallest numbers, those of one length are in order."""
    codes, at = np.zeros(256, np.uint64), 0
    for length in range(_MOST_BITS, 0, -1):
        symbols = np.flatnonzero(lengths == length)
        codes[symbols] = np.arange(at, at + len(symbols), dtype=np.uint64)
        at = at + len(symbols) >> 1
    return codes


def _describe(lengths: npt.NDArray[np.uint8]) -> bytes | None:
    """The description of a table: the weights of all bytes but the last one. None: the format has none for it."""
    last, longest = int(np.flatnonzero(lengths)[-1]), int(lengths.max())
    weights = [longest + 1 - length if length else 0 for length in lengths[:last].tolist()]
    coded = _coded(weights) if last > 2 else b""
    if coded and len(coded) < 128 and (last > 128 or len(coded) < (last + 1) // 2):
        return bytes([len(coded)]) + coded
    if last > 128:
        return None
    weights.append(0)
    return bytes([127 + last]) + bytes(weights[at] << 4 | weights[at + 1] for at in range(0, last, 2))


class _Bits:
    """Bits, from the lowest one of the first byte on."""

    def __init__(self) -> None:
        self.value = self.number = 0

    def add(self, value: int, number: int) -> None:
        self.value |= value << self.number
        self.number += number

    def tobytes(self) -> bytes:
        return self.value.to_bytes(-(-self.number // 8), "little")


def _coded(weights: list[int]) -> bytes:
    """The weights as an FSE stream with its table. Empty: they are all equal, which the format cannot describe."""
    counts = [weights.count(weight) for weight in range(_MOST_BITS + 1)]
    top = counts.index(max(counts))
    if counts[top] == len(weights):
        return b""
    shares = [max(1, (2 * _TABLE * n + len(weights)) // (2 * len(weights))) if n else 0 for n in counts]
    shares[top] += _TABLE - sum(shares)
    if shares[top] < 1:
        return b""
    table = _Bits()
    table.add(_LOG - 5, 4)
    remaining, threshold, width, weight = _TABLE + 1, _TABLE, _LOG + 1, 0
    while remaining > 1:
        value, spare = shares[weight] + 1, 2 * threshold - 1 - remaining
        remaining -= shares[weight]
        weight += 1
        if value >= threshold:
            value += spare
        table.add(value, width - (value < spare))
        while remaining < threshold:
            width, threshold = width - 1, threshold >> 1
        if value == 1:  # how many more are zero
            zeros = 0
            while not shares[weight + zeros]:
                zeros += 1
            weight += zeros
            for _ in range(zeros // 3):
                table.add(3, 2)
            table.add(zeros % 3, 2)
    # The entries of the table that each weight has, spread over it.
    spread, at = [0] * _TABLE, 0
    for weight, share in enumerate(shares):
        for _ in range(share):
            spread[at] = weight
            at = (at + _TABLE // 2 + _TABLE // 8 + 3) % _TABLE
    entries: list[list[int]] = [[] for _ in shares]
    for place, weight in enumerate(spread):
        entries[weight].append(_TABLE + place)
    # Two states take turns, from the last weight to the first. The first weight of each costs nothing.
    tops = [_LOG - ((share - 1).bit_length() - 1 if share > 1 else 0) for share in shares]
    stream = at = 0
    states = [0, 0]
    for place in range(len(weights) - 1, -1, -1):
        weight = weights[place]
        share, state, number = shares[weight], states[place & 1], 0
        if not state:
            state = share
        else:
            number = tops[weight]
            if state < share << number:
                number -= 1
            stream |= (state & ((1 << number) - 1)) << at
            at += number
        states[place & 1] = entries[weight][(state >> number) - share]
    stream |= (states[1] - _TABLE | (states[0] - _TABLE) << _LOG | 1 << 2 * _LOG) << at
    return table.tobytes() + stream.to_bytes((at + 2 * _LOG + 8) // 8, "little")


def _streams(
    parts: list[Bytes], sizes: list[int], lengths: npt.NDArray[np.uint8], codes: npt.NDArray[np.uint64]
) -> bytes:
    """The four streams of a block: the codes of values from the last one to the first, and a bit that ends them.

    A table of all pairs of neighbours gives their codes, of at most 22 bits, and above these their number of bits. Only
    pairs of bytes that occur are in it.
    """
    low, high = (int(found) for found in np.flatnonzero(lengths)[[0, -1]])
    some, widths = codes[low : high + 1].astype(np.uint32), lengths[low : high + 1].astype(np.uint32)
    table = kernels.scratch("pairs", 1 << 16, 4).reshape(256, 256)  # [the second one, the first one]
    both = some << widths[:, None]
    both |= some[:, None]
    both |= (widths + widths[:, None]) << np.uint32(_WIDTH)
    table[low : high + 1, low : high + 1] = both
    # Four neighbours are put together. A stream that has fewer ends with some that take no bits.
    fours = -(-len(parts[0]) // 4) + 1
    pairs = np.zeros((4, 2 * fours), np.uint32)
    for row, part in zip(pairs, parts, strict=True):
        odd = len(part) % 2
        if odd:
            row[0] = codes[part[-1]] | np.uint64(int(lengths[part[-1]]) << _WIDTH)
        whole = len(part) // 2
        np.take(table.reshape(-1), part[: 2 * whole].view("<u2")[::-1], out=row[odd : odd + whole], mode="clip")
    each = pairs >> np.uint32(_WIDTH)
    pairs &= np.uint32((1 << _WIDTH) - 1)
    bits = pairs[:, 1::2].astype(np.uint64)
    bits <<= each[:, ::2]
    bits |= pairs[:, ::2]
    number = (each[:, ::2] + each[:, 1::2]).astype(np.int64)
    ends = np.cumsum(number, axis=1)
    begins = 8 * np.cumsum([0, *sizes[:3]])
    closing = begins + ends[:, -1]
    starts = ends
    starts -= number
    starts += begins[:, None]
    words, shifts = (starts >> 6).reshape(-1), (starts & 63).astype(np.uint64).reshape(-1)
    bits, number = bits.reshape(-1), number.reshape(-1)
    out = np.zeros(sum(sizes) // 8 + 2, np.uint64)
    first = np.concatenate([[0], np.flatnonzero(words[1:] != words[:-1]) + 1])
    out[words[first]] = np.bitwise_or.reduceat(bits << shifts, first)
    over = np.flatnonzero(shifts + number.view(np.uint64) > np.uint64(64))
    out[words[over] + 1] |= bits[over] >> (np.uint64(64) - shifts[over])
    for end in closing.tolist():
        out[end // 64] |= np.uint64(1 << end % 64)
    return out.astype("<u8", copy=False).tobytes()[: sum(sizes)]
