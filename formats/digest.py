"""The state digest: one number for a tensor's bytes, equal in numpy, torch CPU and CUDA (SPEC.md 4).

Definition (normative). Let the tensor's C-contiguous, little-endian image have ``n`` bytes, padded with zero bytes to a
multiple of 4 and read as little-endian u32 words ``w_0, w_1, ...``. All arithmetic is modulo 2^64::

    D  =  n * L  +  sum over p of  w_p * K[p mod B] * M[p div B]

    B    = 65536 words (256 KiB)
    L    = 0x9E3779B97F4A7C15
    K[i] = output i of SplitMix64 seeded with 0, its lowest bit set       (0 <= i < B)
    M[c] = output c of SplitMix64 seeded with 5, its lowest bit set       (c >= 0)

    output j of SplitMix64 seeded with s:
        z = s + (j + 1) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z ^ (z >> 31)

What it detects. Weights are odd, so a change of one word always changes D. Flipping bit b of two words changes D by
2^b * (±W_p ± W_q), which is zero only if W_p = ±W_q modulo 2^(64-b). b is at most 31, and the seeds were chosen so that
no two K, and no two of the first 65536 M, are equal up to sign modulo 2^33. Therefore two flipped sign bits in one
block, or at one position of two blocks of a tensor up to 16 GiB, always change D. Any other fixed difference is missed
with probability about 2^-(63-v), where 2^v divides all differences of words: 2^-63 for arbitrary bits, 2^-32 if only
sign bits of F32 differ. The digest checks arithmetic and placement; it does not detect tampering.

Partial digests may be added in any order and cut at any word, so threads, GPU blocks and streamed chunks can each
compute a part. One core processes about 5 GB/s in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore.formats.kernel_choice import hot, steady

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]  # Python 3.12 names it

    import numpy.typing as npt

__all__ = ["BLOCK_WORDS", "Running", "combine", "digest", "multipliers", "partial", "partials", "weights"]

BLOCK_WORDS = 65536
"""Number of words (u32) that share one multiplier."""

_MASK = (1 << 64) - 1
_LENGTH = 0x9E3779B97F4A7C15
_WEIGHT_SEED = 0
_MULTIPLIER_SEED = 5
_Words = np.ndarray[Any, np.dtype[np.uint64]]


def _splitmix64(seed: int, first: int, count: int) -> _Words:
    """Return outputs `first` ... `first` + `count` - 1 of SplitMix64 seeded with `seed`."""
    z = np.arange(count, dtype=np.uint64)
    z += np.uint64((first + 1) & _MASK)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _odd(seed: int, first: int, count: int) -> _Words:
    table = _splitmix64(seed, first, count) | np.uint64(1)
    table.flags.writeable = False
    return table


_WEIGHTS = _odd(_WEIGHT_SEED, 0, BLOCK_WORDS)
# Enough for tensors up to 1 GiB: computing multipliers for each small tensor would cost more than the digest itself.
_MULTIPLIERS = _odd(_MULTIPLIER_SEED, 0, 4096)


def multipliers(first: int, count: int) -> _Words:
    """Return M[first] ... M[first + count - 1], uint64, read-only."""
    if first + count <= _MULTIPLIERS.size:
        return _MULTIPLIERS[first : first + count]
    return _odd(_MULTIPLIER_SEED, first, count)


def weights() -> _Words:
    """Return K, uint64, shape (BLOCK_WORDS,), read-only."""
    return _WEIGHTS


def digest(data: Buffer | npt.NDArray[Any]) -> int:
    """Return the digest D of a tensor's image, as an unsigned 64-bit number. `data` is any C-contiguous buffer."""
    flat = _bytes(data)
    return combine(partial(flat, 0), nbytes=flat.size)


def combine(*partials: int, nbytes: int) -> int:
    """Return the digest of a tensor of `nbytes` bytes from the partial digests of all its words, in any order."""
    return (sum(partials) + nbytes * _LENGTH) & _MASK


@steady
def partial(data: Buffer | npt.NDArray[Any], first_word: int) -> int:
    """Return the contribution of the words of `data` to D, without the length term.

    Runs without the GIL except between blocks, and needs at most 512 KiB of scratch memory.

    Args:
        data: C-contiguous buffer that starts at word `first_word` of the tensor's image. Only the tensor's last part
            may have a length that is not a multiple of 4.
        first_word: position of the first word, counted from the start of the tensor.

    Raises:
        ValueError: `first_word` is negative.
    """
    if first_word < 0:
        raise ValueError(f"first_word is {first_word}")
    flat = _bytes(data)
    whole = flat.size // 4
    words = flat[: whole * 4].view("<u4")
    first_block, skip = divmod(first_word, BLOCK_WORDS)
    blocks = -(-(skip + whole) // BLOCK_WORDS)
    sums = np.zeros(blocks, np.uint64)
    block_sums(words, skip, _WEIGHTS, sums)
    total = int(np.dot(sums, multipliers(first_block, blocks))) if blocks else 0
    if flat.size % 4:
        block, index = divmod(first_word + whole, BLOCK_WORDS)
        last = int.from_bytes(flat[whole * 4 :].tobytes(), "little")
        total += last * int(_WEIGHTS[index]) * int(multipliers(block, 1)[0])
    return total & _MASK


@steady
def partials(data: npt.NDArray[np.uint8], lengths: Sequence[int]) -> list[int]:
    """Return `partial` of many small contiguous tensors in one call, each counted from its own first word.

    Args:
        data: C-contiguous; the bytes of all of them.
        lengths: bytes of each, a multiple of 4 up to a block (`BLOCK_WORDS` words); their sum is the size of `data`.

    Raises:
        ValueError: invalid lengths.
    """
    if sum(lengths) != data.size or any(length % 4 or not 0 <= length <= 4 * BLOCK_WORDS for length in lengths):
        raise ValueError(f"{data.size} bytes are not {len(lengths)} tensors of whole words, each at most one block")
    ends = _ends(tuple(lengths))
    sums = np.zeros(len(lengths), np.uint64)
    piece_sums(data.view("<u4"), ends, _WEIGHTS, sums)
    sums *= multipliers(0, 1)
    found: list[int] = sums.tolist()
    return found


@lru_cache(maxsize=64)  # a run saves the same tensors again and again
def _ends(lengths: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Where each tensor ends, in words; read-only."""
    ends: npt.NDArray[np.int64] = np.cumsum(np.array(lengths, np.int64)) // 4
    ends.flags.writeable = False
    return ends


class Running:
    """The digest of a tensor whose bytes are passed in order, in pieces of any length."""

    def __init__(self) -> None:
        self._sum = 0
        self._nbytes = 0
        self._rest = b""

    def update(self, data: Buffer | npt.NDArray[Any]) -> None:
        """Add the next bytes: any C-contiguous buffer."""
        flat = _bytes(data)
        if self._rest:
            missing = 4 - len(self._rest)
            self._rest += flat[:missing].tobytes()
            if len(self._rest) < 4:
                return
            flat = flat[missing:]
            self._add(np.frombuffer(self._rest, np.uint8))
        whole = flat.size // 4 * 4
        self._add(flat[:whole])
        self._rest = flat[whole:].tobytes()

    def result(self) -> int:
        """Return the digest of all bytes so far, as an unsigned 64-bit number."""
        last = partial(self._rest, self._nbytes // 4) if self._rest else 0
        return combine(self._sum, last, nbytes=self._nbytes + len(self._rest))

    def _add(self, words: npt.NDArray[np.uint8]) -> None:
        self._sum += partial(words, self._nbytes // 4)
        self._nbytes += words.size


@hot(reads=["words", "weights"])
def block_sums(words: npt.NDArray[np.uint32], skip: int, weights: _Words, sums: _Words) -> None:
    """Sum words times weights, block by block, into ``sums``. ``skip`` words of the first block precede ``words``."""
    scratch = np.empty(min(len(words), BLOCK_WORDS), np.uint64)
    start, begin = 0, skip
    for block in range(len(sums)):
        count = min(BLOCK_WORDS - begin, len(words) - start)
        # Widen into scratch that stays in the cache, then multiply and add in one fused pass: twice as fast as summing
        # an array of products.
        np.copyto(scratch[:count], words[start : start + count])
        sums[block] = np.dot(scratch[:count], weights[begin : begin + count])
        start, begin = start + count, 0


@hot(reads=["words", "ends", "weights"])
def piece_sums(words: npt.NDArray[np.uint32], ends: npt.NDArray[np.int64], weights: _Words, sums: _Words) -> None:
    """Sum words times weights, piece by piece, into ``sums``. Each piece begins with the first weight."""
    start = 0
    for piece, end in enumerate(ends):
        block_sums.reference(words[start:end], 0, weights, sums[piece : piece + 1])
        start = end


def _bytes(data: Buffer | npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if isinstance(data, np.ndarray):  # also for dtypes that the buffer protocol cannot describe, such as bfloat16
        if not data.flags.c_contiguous:
            raise ValueError("the digest needs a C-contiguous array")
        return data.reshape(-1).view(np.uint8)
    view = memoryview(data)
    if not view.nbytes:  # numpy refuses empty buffers, and a memoryview with a zero in its shape cannot be cast
        return np.empty(0, np.uint8)
    return np.frombuffer(view if view.ndim == 1 and view.format == "B" else view.cast("B"), np.uint8)
