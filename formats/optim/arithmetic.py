"""fp32 arithmetic with the same bits on every machine, for optimizer steps (SPEC section 5.5.2).

Every operation is one IEEE 754 operation, rounded once to nearest, ties to even: numpy's fp32 add, subtract, multiply,
divide and square root, and ``fma``. numpy has no fma. A product of fp32 numbers is exact in fp64, and the sum is
corrected there (see ``fma``). So a compiled implementation may use the processor's instruction, with this module as its
reference.

Two properties of the machine could change the bits. The pattern of a NaN: ``settle`` makes every predicted NaN
7fc00000. A thread that flushes denormals or rounds differently: ``exactly`` resets its mode during a call.

Functions work on *tiles*: runs of ``TILE`` numbers, whose temporaries stay in a core's second-level cache. numpy
releases the interpreter lock within them, so threads scale.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CkptError
from ckptstore.formats.codecs import kernels
from ckptstore.formats.kernel_choice import hot

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Patterns: TypeAlias = npt.NDArray[np.uint32]

TILE = 1 << 15
CANONICAL_NAN = 0x7FC00000
FLOAT = np.dtype("<f4")
PATTERN = np.dtype("<u4")
_DOUBLE = np.dtype("<f8")
# The addends: the least denormal twice, and 1 and -1 with 2**-25 and -2**-25. Given as patterns, because a thread that
# flushes denormals may import this module.
_PROBE = np.array([1, 0x3F800000, 0xBF800000], PATTERN).view(FLOAT)
_ADDED = np.array([1, 0x33000000, 0xB3000000], PATTERN).view(FLOAT)
_EXPECTED = np.array([2, 0x3F800000, 0xBF800000], PATTERN).tobytes()
_HALF = np.uint64(1 << 28)
_SMALLEST_NORMAL = 2.0**-126
_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl, on x86 and on ARM


def tiles(count: int) -> Iterator[slice]:
    """Cut ``range(count)`` into runs of ``TILE``."""
    for start in range(0, count, TILE):
        yield slice(start, min(start + TILE, count))


def floats(role: str, count: int) -> Floats:
    """This thread's scratch memory for ``count`` fp32 numbers. Only one caller may use a role at a time."""
    return cast(Floats, kernels.scratch(f"optim {role}", count, 4).view(FLOAT))


def patterns(role: str, count: int) -> Patterns:
    """The memory of ``floats``, as bit patterns."""
    return cast(Patterns, kernels.scratch(f"optim {role}", count, 4))


def doubles(role: str, count: int) -> Doubles:
    """This thread's scratch memory for ``count`` fp64 numbers."""
    return cast(Doubles, kernels.scratch(f"optim {role}", count, 8).view(_DOUBLE))


def single(value: float) -> float:
    """Round ``value`` to fp32, as torch's kernels round their scalars."""
    with np.errstate(all="ignore"):
        return float(np.float32(value))


@hot()
def fma(a: Floats, b: Floats | float, c: Floats, out: Floats) -> None:
    """``out = a * b + c``, rounded once, and settled. ``out`` may be any argument. A scalar ``b`` is an fp32 number.

    The product is exact in fp64. The sum is rounded to fp64 and then to fp32. Rounding twice is wrong only if the fp64
    sum lies exactly half-way between two fp32 numbers and was itself rounded. The low 28 bits of such a sum are zero,
    even if the fp32 result is denormal. Such sums are found and moved by one fp64 unit towards the exact sum. (A scalar
    ``b`` of 1 is handled first, because its sums would often have zero bits.)
    """
    if isinstance(b, float) and b == 1.0:
        np.add(a, c, out=out)
        settle(out)
        return
    count = len(out)
    product, total = doubles("product", count), doubles("total", count)
    np.copyto(product, a)
    if isinstance(b, float):
        np.multiply(product, b, out=product)
    else:
        np.copyto(total, b)
        np.multiply(product, total, out=product)
    np.copyto(total, c)
    np.add(product, total, out=total)
    low = patterns("low", count)
    np.copyto(low, total.view("<u8"), casting="unsafe")
    np.left_shift(low, 4, out=low)
    if count and int(low.min()) == 0:
        where = _half_way(low == 0, total)
        if len(where):
            _round_to_side(where, product, c, total)
    np.copyto(out, total, casting="unsafe")
    settle(out)  # which NaN it is depends on the order of a processor's operands: the forms would differ


def _half_way(ends_in_zeros: npt.NDArray[np.bool_], total: Doubles) -> npt.NDArray[np.intp]:
    """The indices of sums that may be half-way between fp32 numbers, among those whose low 28 bits are zero.

    These are sums with the 29th bit set, and fp32 denormals. Sums that are fp32 numbers are left out, because there may
    be many (zero gradients make zero products).
    """
    doubtful = (total.view("<u8") & _HALF) != 0
    magnitude = np.abs(total)
    doubtful |= (magnitude < _SMALLEST_NORMAL) & (magnitude > 0)
    doubtful &= ends_in_zeros
    return np.flatnonzero(doubtful)


def _round_to_side(where: npt.NDArray[np.intp], product: Doubles, addend: Floats, total: Doubles) -> None:
    """Move the inexact sums at ``where`` by one fp64 unit towards the exact sum (Knuth's two-sum)."""
    x, y, rounded = product[where], addend[where].astype(_DOUBLE), total[where]
    virtual = rounded - x
    error = (x - (rounded - virtual)) + (y - virtual)
    inexact = np.flatnonzero((error != 0) & np.isfinite(error))
    sides = np.where(error[inexact] > 0, np.inf, -np.inf)
    total[where[inexact]] = np.nextafter(rounded[inexact], sides)


def multiply_add(a: Floats, b: Floats | float, c: Floats, out: Floats) -> None:
    """``out = a * b + c``, rounding the product and then the sum. ``out`` may be any of the arguments."""
    product = floats("rounded", len(out))
    np.multiply(a, np.float32(b) if isinstance(b, float) else b, out=product)
    np.add(product, c, out=out)


def settle(values: Floats) -> None:
    """Replace every NaN by the canonical one, because the processor chooses which NaN an operation makes."""
    if len(values) and np.isnan(np.maximum.reduce(values)):
        values.view(PATTERN)[np.isnan(values)] = CANONICAL_NAN


@contextmanager
def exactly() -> Iterator[None]:
    """Run the body with IEEE 754 arithmetic: denormals kept, ties to even, no warnings for NaN and infinities.

    ``torch.set_flush_denormal(True)``, and libraries built with fast-math, make the calling thread flush denormals.
    Such a thread would predict other bits. So its mode is reset here, and restored at the end.

    Raises:
        CkptError: the thread's arithmetic does not follow IEEE 754 and cannot be reset on this platform.
    """
    with np.errstate(all="ignore"):
        if _is_exact():
            yield
            return
        library: Any = ctypes.CDLL(None)
        saved = ctypes.create_string_buffer(256)
        try:
            library.fegetenv(saved)
            library.fesetenv(_DEFAULT_ENVIRONMENT)
        except AttributeError as error:
            raise CkptError("this thread flushes denormals, and the platform has no fesetenv to reset it") from error
        try:
            if not _is_exact():
                raise CkptError("this thread's fp32 arithmetic does not follow IEEE 754, even after fesetenv")
            yield
        finally:
            library.fesetenv(saved)


def _is_exact() -> bool:
    return np.add(_PROBE, _ADDED).tobytes() == _EXPECTED
