"""Round fp32 bit patterns to bf16 and fp16 in integers, so that no processor mode matters (SPEC section 5.4)."""

from __future__ import annotations

import numpy as np

from ckptstore.formats.codecs.kernels import Words, scratch
from ckptstore.formats.kernel_choice import hot


@hot()
def to_bfloat16(values: Words, out: Words) -> None:
    """Round fp32 bit patterns to bf16, to nearest, ties to even. Every NaN becomes 7fc0.

    Uses integers, because float arithmetic on denormals and NaN depends on the processor's mode. A decoder must not.
    """
    rounding = scratch("sign", len(values), 4)
    np.right_shift(values, 16, out=rounding)
    np.bitwise_and(rounding, 1, out=rounding)
    np.add(rounding, 0x7FFF, out=rounding)
    np.add(rounding, values, out=rounding)
    np.right_shift(rounding, 16, out=rounding)
    np.copyto(out, rounding, casting="unsafe")
    np.bitwise_and(values, 0x7FFFFFFF, out=rounding)
    out[rounding > 0x7F800000] = 0x7FC0


@hot()
def to_float16(values: Words, out: Words) -> None:
    """Round fp32 bit patterns to IEEE half precision, to nearest, ties to even. Every NaN becomes 7e00.

    Uses integers throughout, for the reason given at :func:`to_bfloat16`.
    """
    magnitude, work = scratch("sign", len(values), 4), scratch("shifted", len(values), 4)
    np.bitwise_and(values, 0x7FFFFFFF, out=magnitude)
    # Normal halves: rebias the exponent by 112, then round off 13 bits. Magnitudes beyond the range become infinity.
    np.right_shift(magnitude, 13, out=work)
    np.bitwise_and(work, 1, out=work)
    np.add(work, magnitude, out=work)
    np.add(work, (0xFFF - (112 << 23)) & 0xFFFFFFFF, out=work)
    np.right_shift(work, 13, out=work)
    np.copyto(out, work, casting="unsafe")
    out[magnitude >= 0x47800000] = 0x7C00
    small = np.flatnonzero(magnitude < 0x38800000)
    if len(small):
        out[small] = _subnormal_half(magnitude[small])
    out[magnitude > 0x7F800000] = 0x7E00
    np.right_shift(values, 16, out=work)
    np.bitwise_and(work, 0x8000, out=work)
    work[magnitude > 0x7F800000] = 0
    np.bitwise_or(out, work, out=out, casting="unsafe")


def _subnormal_half(magnitude: Words) -> Words:
    """Half-precision patterns of fp32 magnitudes below 2**-14: multiples of 2**-24, rounded to even."""
    exponent = magnitude >> 23
    shift = np.minimum(126 - exponent, 31)
    mantissa = (magnitude & 0x7FFFFF) | np.where(exponent, np.uint32(0x800000), np.uint32(0))
    whole = mantissa >> shift
    rest = mantissa & ((np.uint32(1) << shift) - 1)
    half = np.uint32(1) << (shift - 1)
    up: Words = ((rest > half) | ((rest == half) & (whole & 1 == 1))).astype(np.uint32)
    rounded: Words = whole + up
    return rounded
