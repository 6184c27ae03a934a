"""The entropy coder of all codecs: encodes a plane of bytes as a *piece* (SPEC section 5.4.3).

A piece is one mode byte and a body. The reader knows the number of values, so a piece is self-delimiting, and the
reader trusts no stored length::

    RAW     the values
    FILL    one byte: every value
    ZSTD    u32 length, then one zstd frame that declares the exact content size
    SPARSE  zeros, and exceptions
    PACK1   piece of the packed bytes: values below 2**b (b = 1, 2, 4 bits), 8/b to a byte, lowest first,
    PACK2     0 for every greater value; then the greater values as exceptions
    PACK4

    exceptions  u32 number of steps, u32 number of exceptions, piece of the steps, piece of the values less 2**b
                (SPARSE: less 1). A step s < 255 skips s values and meets an exception; 255 skips 255 values.

Byte planes of numbers have no matches. So frames have only Huffman-coded literals (``literals``), unless a sample shows
matches. Then zstd makes them, with parameters that leave it little else than its Huffman coder. Huffman codes take at
least one bit per value. Packing several small values into one symbol brings skewed planes down to their entropy.
Packing nests, at most ``DEPTH`` deep. Exceptions are stored with their positions, not as an escape among the packed
values: finding escapes in a plane takes longer than everything else, and the information is the same.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.codecs import kernels
from ckptstore.formats.codecs.kernels import N_LOG_N, SAMPLE, Bytes
from ckptstore.formats.codecs.literals import literals, matches_pay

RAW, FILL, ZSTD, SPARSE, PACK1, PACK2, PACK4 = range(7)
DEPTH = 2
"""Deepest nesting of packed parts."""
FAST, THRIFTY = 0, 1
_INCOMPRESSIBLE = 7.88  # bits per value of a sample; below it encoding saves at least 1 %
_PIECES = 8
SMALL = 48
"""Planes of fewer values are only encoded as FILL or RAW."""
SAMPLED = 512
"""Planes of fewer values are not sampled to choose a mode."""
_FRAME_WINDOW = 1 << 20
_NOTHING = np.empty(0, np.uint8)
_local = threading.local()
_ONE = 1 << 20  # a bit, as N_LOG_N counts
_length = struct.Struct("<I")
_counts = struct.Struct("<II")
PACKED_BITS = {SPARSE: 0, PACK1: 1, PACK2: 2, PACK4: 4}

# zstd's parameters when only its literal coder matters. target_length > 0 would turn literal coding off. A smaller
# window would make more blocks, each with its own table.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    window_log=17,
    chain_log=6,
    hash_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_content_size=True,
)


class Cursor:
    """A bounds-checked reader of a payload. A ``take`` beyond the end raises ``CorruptSegmentError``."""

    __slots__ = ("data", "position", "size")

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.position = 0
        self.size = len(data)

    @property
    def left(self) -> int:
        """Number of bytes not yet taken."""
        return self.size - self.position

    def take(self, count: int) -> Bytes:
        """Take the next ``count`` bytes, as a view."""
        start, end = self.position, self.position + count
        if end > self.size:
            raise CorruptSegmentError(f"payload ends early: {count} bytes needed at {start}, {self.left} left")
        self.position = end
        return self.data[start:end]

    def byte(self) -> int:
        """Take the next byte."""
        start = self.position
        if start >= self.size:
            self.take(1)  # raises
        self.position = start + 1
        return int(self.data.item(start))

    def length(self) -> int:
        """Take the next four bytes as a little-endian number."""
        return int(_length.unpack(self.take(4).data)[0])


# ---------------------------------------------------------------------------------------------------- choosing


def sample(values: Bytes, count: int = SAMPLE) -> Bytes:
    """Sample about ``count`` values, in eight equal runs spread over the plane. A smaller plane is returned whole."""
    if len(values) <= count:
        return values
    run, stride = count // _PIECES, len(values) // _PIECES
    return values[: stride * _PIECES].reshape(_PIECES, stride)[:, :run].reshape(-1)


def _frame_cost(total: int, top: int, information: int) -> float:
    """Estimate the bits that a zstd frame takes for ``total`` values of a sample (``kernels.survey``).

    A Huffman code takes at least one bit per value, however skewed the values are. If one value makes up more than a
    quarter, zstd finds short matches in its runs, which cost up to a third of a bit more than the codes would. Very
    long runs cost less: some 22 bits for each value that ends a run. (All of this is measured, not derived.)
    """
    matches = 0.33 * total * min(1.0, max(0.0, 5 * (top / total - 0.27)))
    if 5 * top <= 2 * total:
        return _n_log_n(total) - information / _ONE + matches
    rest = total - top
    codes = total + _n_log_n(rest) - information / _ONE + _n_log_n(top) + matches
    return min(codes, 22.0 * rest)


def _exceptions_cost(count: int, information: int, total: int) -> float:
    """Estimate the bits of ``count`` exceptions among ``total`` values: their positions and their values."""
    positions = _n_log_n(total) - _n_log_n(count) - _n_log_n(total - count)
    return 1.05 * positions + _n_log_n(count) - information / _ONE + 0.2 * count


def _n_log_n(count: int) -> float:
    return int(N_LOG_N[count]) / _ONE


def choose_mode(values: Bytes, level: int = FAST, depth: int = 0) -> int:
    """Choose the mode that should make the smallest piece of a plane, from a sample of at most ``SAMPLE`` ``values``.

    At ``FAST`` a slower mode must save a twentieth of a bit per value, and more inside another packed plane.
    """
    zeros, top, information = kernels.survey(values)
    total = len(values)
    if top == total:
        return FILL
    best, mode = _frame_cost(total, top, information), ZSTD
    if best > _INCOMPRESSIBLE * total:
        return RAW
    if 20 * zeros > 19 * total:
        return SPARSE
    if 4 * zeros < total:
        return ZSTD
    worth = 0.05 * (1 + 2 * depth) * total if level == FAST else 0.005 * best
    if 4 * (total - zeros) <= total:
        cost = _exceptions_cost(total - zeros, information - int(N_LOG_N[zeros]), total)
        if cost < best - worth:
            if level == FAST:
                return SPARSE
            best, mode = cost, SPARSE
    for packed_mode, bits in ((PACK4, 4), (PACK2, 2), (PACK1, 1)):
        exceptions, greater, packed_top, packed = kernels.survey_packed(values, bits)
        if 4 * exceptions > total or (level == FAST and packed_mode == PACK1):
            break
        cost = _exceptions_cost(exceptions, greater, total) + _frame_cost(-(-total * bits // 8), packed_top, packed)
        if cost < best - worth:
            best, mode = cost, packed_mode
            if level == FAST:
                break
    return mode


# ----------------------------------------------------------------------------------------------------- encoding


def encode(values: Bytes, out: Bytes, at: int, mode: int | None = None, level: int = FAST, depth: int = 0) -> int:
    """Write the piece of ``values`` to ``out[at:]``. Returns its end, at most ``at + 1 + len(values)``.

    ``mode`` is a hint: the choice made from a sample. ``level`` is ``FAST``, ``THRIFTY`` (the smallest mode, even if
    slower), or 2 to 19: zstd's level, for data with repetitions that no histogram shows.
    """
    count = len(values)
    if mode is None:
        mode = choose_mode(sample(values, SAMPLE >> min(2 * depth, 2)), level, depth) if count >= SAMPLED else ZSTD
    if mode == FILL or count < SAMPLED:
        if count and int(values.min()) == int(values.max()):
            out[at], out[at + 1] = FILL, values[0]
            return at + 2
        mode = ZSTD
    if mode >= SPARSE and depth < DEPTH and count >= SMALL:
        end = _encode_packed(values, out, at, mode, level, depth)
        if end is not None:
            return end
        mode = ZSTD
    if (mode == ZSTD or level > THRIFTY) and count >= SMALL:
        space = out[at + 5 : at + count]
        if level > THRIFTY or matches_pay(values):
            frame = compressed(level, values.data)
            size = len(frame) if len(frame) <= len(space) else 0
            space[:size] = np.frombuffer(frame, np.uint8, size)
        else:
            size = literals(values, space)
        if size:
            out[at] = ZSTD
            _length.pack_into(out.data, at + 1, size)
            return at + 5 + size
    out[at] = RAW
    out[at + 1 : at + 1 + count] = values
    return at + 1 + count


def _encode_packed(values: Bytes, out: Bytes, at: int, mode: int, level: int, depth: int) -> int | None:
    """Write the packed or sparse form. Returns its end, or None if it might not be smaller than the values."""
    bits = PACKED_BITS[mode]
    rest = kernels.scratch(f"small{depth}", len(values)) if bits else _NOTHING
    steps, greater = kernels.take_exceptions(values, 1 << bits, rest)
    if 9 + -(-len(values) * bits // 8) + len(steps) + len(greater) + 3 > len(values):
        return None
    out[at] = mode
    at += 1
    if bits:
        at = encode(kernels.pack_small(rest, bits), out, at, None, level, depth + 1)
    _counts.pack_into(out.data, at, len(steps), len(greater))
    at = encode(steps, out, at + 8, RAW if level == FAST and len(steps) < SAMPLED else ZSTD, level, depth + 1)
    return encode(greater, out, at, None if level and len(greater) >= SAMPLE else ZSTD, level, depth + 1)


def compressed(level: int, values: bytes | memoryview) -> bytes:
    """Return the frame that zstd makes of values at a level."""
    return _compressor(max(level, THRIFTY)).compress(values)


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """This thread's compressor. Compressors are not thread-safe, and making one takes 16 microseconds."""
    cache: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in cache:
        cache[level] = zstandard.ZstdCompressor(
            compression_params=_HUFFMAN if level <= THRIFTY else zstandard.ZstdCompressionParameters.from_level(level)
        )
    return cache[level]


# ----------------------------------------------------------------------------------------------------- decoding


def decode(cursor: Cursor, count: int, role: str = "plane", depth: int = 0) -> Bytes:
    """Decode the ``count`` values of the piece at ``cursor``.

    Returns a view of the payload, or the scratch memory of ``role``, which the next call with this role overwrites.
    Never allocates more than a small multiple of ``count``.

    Raises:
        CorruptSegmentError: the piece is invalid.
    """
    mode = cursor.byte()
    if mode == RAW:
        return cursor.take(count)
    if mode == ZSTD:
        return np.frombuffer(decompressed(cursor.take(cursor.length()).data, count), np.uint8)
    values = kernels.scratch(role, count)
    if mode == FILL:
        values.fill(cursor.byte())
        return values
    bits = PACKED_BITS.get(mode)
    if bits is None or depth >= DEPTH:
        raise CorruptSegmentError(f"unknown plane mode {mode} at byte {cursor.position - 1}, depth {depth}")
    if bits:
        kernels.unpack_small(decode(cursor, -(-count * bits // 8), f"{role}<", depth + 1), bits, values)
    else:
        values.fill(0)
    steps, exceptions = decode_steps(cursor, count, role, depth)
    greater = decode(cursor, exceptions, f"{role}>", depth + 1)
    if not kernels.put_exceptions(steps, greater, 1 << bits, values):
        raise CorruptSegmentError(f"the steps to {exceptions} exceptions among {count} values do not fit")
    return values


def decode_steps(cursor: Cursor, count: int, role: str, depth: int) -> tuple[Bytes, int]:
    """Decode the steps to the exceptions among ``count`` values. Returns them and the number of exceptions."""
    step_count, exceptions = _counts.unpack(cursor.take(8).data)
    if exceptions > count or step_count > exceptions + count // 255:
        raise CorruptSegmentError(f"{exceptions} exceptions in {step_count} steps among {count} values")
    return decode(cursor, step_count, f"{role}+", depth + 1), exceptions


def decompressed(frame: bytes | memoryview, count: int) -> bytes:
    """Decompress a frame. Its header must declare exactly ``count`` bytes; this is checked before any allocation.

    Raises:
        CorruptSegmentError: it declares another number, or does not decode.
    """
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=_FRAME_WINDOW)
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != count:
            raise CorruptSegmentError(f"a zstd frame declares {parameters.content_size} bytes where {count} belong")
        # zstd returns exactly that many bytes or fails. It also fails if the frame names a dictionary.
        return decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptSegmentError(f"a zstd frame of {len(frame)} bytes does not decode: {error}") from error
