"""The compiled kernels, in C (native/module.c). Arrays are contiguous, at any address; positional arguments only.

Kernels without a docstring have the arguments of the numpy kernel of their name. ``ValueError``: arrays that differ in
size, overlap, or may not be written, or numbers out of range.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy.typing as npt

_Array: TypeAlias = npt.NDArray[Any]

def difference(new: _Array, base: _Array, out: _Array, /) -> None: ...
def zigzag(values: _Array, out: _Array, /) -> None: ...
def rotate_left(values: _Array, out: _Array, /) -> None: ...
def split(words: _Array, planes: list[_Array], /) -> None: ...
def combine(planes: list[_Array], how: int, base: _Array, out: _Array, /) -> None: ...
def pack_small(values: _Array, bits: int, out: _Array, /) -> None:
    """Pack values below ``2**bits`` (2 or 4 bits each) into ``out``."""

def unpack_small(packed: _Array, bits: int, out: _Array, /) -> None: ...
def find_exceptions(values: _Array, limit: int, where: _Array, /) -> int:
    """Write the positions (u4) of values of at least ``limit``, ascending. Returns their number."""

def take_exceptions(values: _Array, limit: int, where: _Array, rest: _Array, steps: _Array, greater: _Array, /) -> int:
    """Write steps, differences to ``limit``, and ``rest`` if it is not empty. Returns the number of steps."""

def put_exceptions(stepped: _Array, greater: _Array, limit: int, out: _Array, /) -> bool: ...
def survey(values: _Array, n_log_n: _Array, /) -> tuple[int, int, int]: ...
def survey_packed(values: _Array, bits: int, n_log_n: _Array, /) -> tuple[int, int, int, int]: ...
def literals(values: _Array, out: _Array, /) -> int: ...
def read_literals(frame: _Array, out: _Array, /) -> bool:
    """Whether a frame has only literals, as many as `out`, which receives them."""

def write_group(
    words: _Array,
    level: int,
    nested: bool,
    n_log_n: _Array,
    space: _Array,
    out: _Array,
    compress: Callable[[int, bytes], bytes],
    /,
) -> int:
    """Return the group's bytes. ``compress`` makes zstd frames."""

def write_chunks(
    new: _Array,
    base: _Array,
    kinds: _Array,
    lengths: _Array,
    level: int,
    n_log_n: _Array,
    space: _Array,
    out: _Array,
    ends: _Array,
    compress: Callable[[int, bytes], bytes],
    /,
) -> int:
    """Return the bytes of all payloads; ``ends`` receives the end of each. ``compress`` makes zstd frames."""

def read_group(
    data: _Array,
    at: int,
    how: int,
    base: _Array,
    out: _Array,
    space: _Array,
    decompress: Callable[[bytes, int], bytes],
    /,
) -> int:
    """Return the position behind the group; -1: it is damaged. ``decompress`` decodes zstd frames that have matches."""

def classify(base: _Array, shift: int, low: int, high: int, out: _Array, counts: _Array, /) -> None:
    """Write the labels and the counts (i8, four rows of one number for each class)."""

def sort(words: _Array, labels: _Array, counts: _Array, out: _Array, /) -> None: ...
def add_unsorted(words: _Array, labels: _Array, counts: _Array, base: _Array, out: _Array, /) -> None: ...
def to_bfloat16(values: _Array, out: _Array, /) -> None: ...
def to_float16(values: _Array, out: _Array, /) -> None: ...
def fma(a: _Array, b: _Array | float, c: _Array, out: _Array, /) -> None: ...
def moments(
    variant: int,
    near: bool,
    first: _Array,
    second: _Array,
    gradient: _Array,
    share: float,
    keep: float,
    weight2: float,
    /,
) -> None:
    """``variant``: 0 fma, 1 plain, 2 divide. ``near``: ``share`` is added to the moment, not to the gradient."""

def second_moment(
    first: _Array, before: _Array, second: _Array, inverse: float, keep: float, weight2: float, out: _Array, /
) -> None:
    """``inverse`` is the reciprocal of the first moment's share."""

def move(
    divide: bool, weight: _Array, first: _Array, second: _Array, shrink: float, root: float, eps: float, rate: float, /
) -> None: ...
def write_adam(
    weight: _Array,
    first: _Array,
    second: _Array,
    new_weight: _Array,
    new_first: _Array,
    new_second: _Array,
    divide: bool,
    inverse: float,
    beta2: float,
    weight2: float,
    shrink: float,
    root: float,
    eps: float,
    rate: float,
    level: int,
    n_log_n: _Array,
    space: _Array,
    out: _Array,
    compress: Callable[[int, bytes], bytes],
    /,
) -> int:
    """Return the bytes of a block of the encoding ``predicted``."""

def read_adam(
    data: _Array,
    at: int,
    weight: _Array,
    first: _Array,
    second: _Array,
    divide: bool,
    inverse: float,
    beta2: float,
    weight2: float,
    shrink: float,
    root: float,
    eps: float,
    rate: float,
    space: _Array,
    decompress: Callable[[bytes, int], bytes],
    /,
) -> int:
    """Take a step of the encoding ``predicted`` in place. Return the position behind the block, or -1."""

def step_adam(
    weight: _Array,
    first: _Array,
    second: _Array,
    gradient: _Array,
    variant: int,
    near: bool,
    maximize: bool,
    scales: _Array,
    share: float,
    beta2: float,
    weight2: float,
    shrink: float,
    root: float,
    eps: float,
    rate: float,
    /,
) -> None:
    """Take a step of Adam in place, with a gradient in fp32 or bf16."""

def write_replayed(
    weight: _Array,
    first: _Array,
    second: _Array,
    new_weight: _Array,
    new_first: _Array,
    new_second: _Array,
    gradient: _Array,
    variant: int,
    near: bool,
    maximize: bool,
    scales: _Array,
    share: float,
    beta2: float,
    weight2: float,
    shrink: float,
    root: float,
    eps: float,
    rate: float,
    level: int,
    n_log_n: _Array,
    space: _Array,
    out: _Array,
    compress: Callable[[int, bytes], bytes],
    /,
) -> int:
    """Return the bytes of the residuals of a block of the encoding ``replayed``."""

def buffered(
    plain: bool,
    nesterov: bool,
    weight: _Array,
    buffer: _Array,
    gradient: _Array,
    momentum: float,
    share: float,
    rate: float,
    /,
) -> None: ...
def missed(true: _Array, predicted: _Array, /) -> int: ...
def mean_scales(values: _Array, second: _Array, centre: int, scales: _Array, /) -> None: ...
def away(values: _Array, second: _Array, scales: _Array, out: _Array, /) -> None: ...
def back(words: _Array, second: _Array, scales: _Array, out: _Array, /) -> None: ...
def classes(base: _Array, second: _Array, scales: _Array, labels: _Array, counts: _Array, /) -> None:
    """Write the labels and the counts (i8, four rows of 16 numbers)."""

def changes(new: _Array, base: _Array, out: _Array, /) -> None: ...
def unsorted_changes(words: _Array, labels: _Array, counts: _Array, base: _Array, out: _Array, /) -> None: ...
def scaled(values: _Array, factor: float, out: _Array, /) -> None: ...
def block_sums(words: _Array, skip: int, weights: _Array, sums: _Array, /) -> None: ...
def piece_sums(words: _Array, ends: _Array, weights: _Array, sums: _Array, /) -> None: ...
def stream(source: _Array, out: _Array, /) -> None: ...
def moves(to: _Array, at: _Array, lengths: _Array, past: int, /) -> None: ...
def sets() -> tuple[str, ...]:
    """Return the instruction sets that this processor has and the loops were compiled for, the best last."""

def selected() -> str:
    """Return the instruction set in use: the best one, unless `select` was called."""

def select(name: str, /) -> None:
    """Use another instruction set from now on, in this process. For tests. Raises ``ValueError``."""
