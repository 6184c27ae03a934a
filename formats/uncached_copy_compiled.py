"""The compiled form of `uncached_copy` for numba, imported at the first call if numba is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ckptstore.formats.kernel_choice import loop
from ckptstore.formats.sources import Bytes
from ckptstore.formats.uncached_copy import Addresses

_VECTOR: Final = 32
_LOOP_BYTES: Final = 4 * _VECTOR


def _typed_stream(_: Any, _out: Any, _source: Any, _length: Any) -> Any:
    """Generate a loop that copies vectors of 32 bytes with ``!nontemporal`` stores, and ends with a fence.

    The fence lets other threads see the data. Returns the signature (addresses of target and source, length) and the
    function that emits the code, as numba's `intrinsic` wants them.
    """

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        target, origin, size = values
        vector = ir.VectorType(ir.IntType(64), 4)
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])

        def place(base: Any, at: Any, number: int) -> Any:
            address = builder.add(builder.add(base, at), ir.Constant(at.type, _VECTOR * number))
            return builder.inttoptr(address, vector.as_pointer())

        begin, step = ir.Constant(size.type, 0), ir.Constant(size.type, _LOOP_BYTES)
        with cgutils.for_range_slice(builder, begin, size, step, intp=size.type) as (at, _):
            loaded = [builder.load(place(origin, at, number), align=1) for number in range(4)]
            for number, value in enumerate(loaded):
                builder.store(value, place(target, at, number), align=_VECTOR).set_metadata("nontemporal", hint)
        builder.fence("seq_cst")
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64, types.int64), generate


def _typed_move(_: Any, _out: Any, _source: Any, _length: Any) -> Any:
    """``memcpy``."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        target, origin, size = values
        pointer = ir.IntType(8).as_pointer()
        place, source = builder.inttoptr(target, pointer), builder.inttoptr(origin, pointer)
        cgutils.raw_memcpy(builder, place, source, size, 1)  # type: ignore[no-untyped-call,unused-ignore]
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64, types.int64), generate


_stream_vectors: Callable[..., Any] = intrinsic(_typed_stream)
_move: Callable[..., Any] = intrinsic(_typed_move)


@loop("int", "int", "int")
def _stream(out: int, source: int, length: int) -> int:
    done: int = _stream_vectors(out, source, length)
    return done


def stream(source: Bytes, out: Bytes) -> None:
    """See ``uncached_copy.stream``."""
    head = min(-out.ctypes.data % _VECTOR, len(out))
    body = (len(out) - head) // _LOOP_BYTES * _LOOP_BYTES
    _stream(out.ctypes.data + head, source.ctypes.data + head, body)
    np.copyto(out[:head], source[:head])
    np.copyto(out[head + body :], source[head + body :])


@loop("i8", "i8", "i8", "int")
def _moves(to: Addresses, at: Addresses, lengths: Addresses, past: int) -> None:
    for number in range(len(to)):
        target, origin, length = to[number], at[number], lengths[number]
        if length < past:
            _move(target, origin, length)
            continue
        head = min(-target % _VECTOR, length)
        body = (length - head) // _LOOP_BYTES * _LOOP_BYTES
        _move(target, origin, head)
        _stream_vectors(target + head, origin + head, body)
        _move(target + head + body, origin + head + body, length - head - body)


def moves(to: Addresses, at: Addresses, lengths: Addresses, past: int) -> None:
    """See ``uncached_copy.moves``."""
    _moves(to, at, lengths, past)
