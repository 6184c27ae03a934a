"""Which implementation of the hot kernels runs: the numpy reference, or the same loops compiled by numba.

numpy defines what a kernel does. Where the optional package numba is installed (``pip install ckptstore[fast]``),
compiled forms of the hot ones run instead; they return the same bits, and tests compare the two. The environment
variable ``CKPTSTORE_KERNELS`` decides otherwise: ``numpy`` leaves numba alone, ``compiled`` insists on it.

A module of kernels says that one of its functions is hot, and names the module with the compiled forms, which is
imported at the first call and not before::

    @hot("ckptstore.formats.codecs.compiled")
    def difference(new, base, out):
        ...  # in numpy

There a function of the same name takes the same arguments. What it calls are *loops*, which declare their arguments,
so that every one is compiled exactly once, at its first call (numba keeps the machine code in ``__pycache__`` for
later processes, or in the user's cache folder, or not at all where neither can be written; it notices changes of the
file that holds the loop, not of constants that this file imports)::

    @loop("u4", "u4", "u4!")
    def _difference(new, base, out):
        for i in range(len(out)):
            ...

Loops release the interpreter lock, never reorder floating point, and check no bounds: whoever reads positions from
a payload compares them first. Integers are promoted to 64 bits between loads and stores; mixing ``np.uint64`` with
a plain integer makes a float, as in numpy, so cast constants. An array that is written may not be one that is read
if the loop is to use vector instructions: give what works in place a loop of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from ckptstore.errors import MissingDependencyError, UsageError

KINDS = ("numpy", "compiled")
VARIABLE = "CKPTSTORE_KERNELS"
WORDS = (1, 2, 4, 8)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_lock = threading.RLock()
_compiled: bool | None = None
_loaded = 0


def loaded() -> int:
    """How many loops this process has compiled or fetched from the cache: where that grew, a time is no measurement."""
    return _loaded


def kind() -> str:
    """``numpy`` or ``compiled``: what hot kernels run as in this process.

    Raises:
        UsageError: ``CKPTSTORE_KERNELS`` is neither.
        MissingDependencyError: it is ``compiled``, and numba is not installed or does not fit this numpy.
    """
    return KINDS[_use_compiled()]


def use(wanted: str | None) -> None:
    """Run hot kernels as ``wanted`` from now on, in all threads; None: as the environment says. Raises as ``kind``."""
    global _compiled
    with _lock:
        _compiled = None if wanted is None else _decided(wanted)


def hot(module: str) -> Callable[[Callable[_P, _R]], Hot[_P, _R]]:
    """Declare a reference kernel that ``module`` has a compiled form of, under the same name."""
    return lambda reference: Hot(reference, module)


class Hot(Generic[_P, _R]):
    """A kernel with two forms. Called, it runs the one in use; ``reference`` is the one in numpy."""

    def __init__(self, reference: Callable[_P, _R], module: str) -> None:
        self.reference = reference
        self._module = module
        self._fast: Callable[_P, _R] | None = None
        update_wrapper(self, reference)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run the form in use."""
        if not (_use_compiled() if _compiled is None else _compiled):
            return self.reference(*args, **kwargs)
        return (self._fast or self.compiled)(*args, **kwargs)

    @property
    def compiled(self) -> Callable[_P, _R]:
        """The compiled form, whatever is in use. Raises ``ImportError`` without numba."""
        if self._fast is None:
            self._fast = getattr(importlib.import_module(self._module), self.reference.__name__)
        return self._fast


def loop(*arguments: str) -> Callable[[Callable[_P, _R]], Loop[_P, _R]]:
    """Declare a loop to be compiled for arguments of exactly these kinds.

    ``u1 u2 u4 u8 i1 i2 i4 i8 f4 f8`` are contiguous one-dimensional arrays that are only read, with ``!`` such that
    are written; ``int``, ``float`` and ``bool`` are scalars of 64, 64 and 8 bits. Arrays may lie at any address.
    """
    return lambda function: Loop(function, arguments)


def loops(*arguments: str) -> Callable[[Callable[..., Any]], dict[int, Loop[..., Any]]]:
    """Declare a loop for every word size, by that size: ``u`` (or ``u!``) among ``arguments`` stands for the words."""

    def declare(function: Callable[..., Any]) -> dict[int, Loop[..., Any]]:
        kinds = {word: [a.replace("u", f"u{word}") if a in ("u", "u!") else a for a in arguments] for word in WORDS}
        return {word: loop(*kinds[word])(function) for word in WORDS}

    return declare


class Loop(Generic[_P, _R]):
    """A function that numba compiles when it is first called."""

    def __init__(self, function: Callable[_P, _R], arguments: tuple[str, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self._machine: Callable[_P, _R] | None = None
        update_wrapper(self, function)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run the machine code. Raises ``TypeError`` for arguments of other kinds than declared."""
        return (self._machine or self._compile())(*args, **kwargs)

    def _compile(self) -> Callable[_P, _R]:
        global _loaded
        with _lock:
            if self._machine is None:
                self._machine = _jit(self._function, self._arguments)
                _loaded += 1
            return self._machine


def inner(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let loops of the same module call a function of their own. Imports numba at once, as such modules may."""
    import numba

    found: Callable[_P, _R] = numba.njit(nogil=True, error_model="numpy")(function)
    return found


def _jit(function: Callable[_P, _R], arguments: tuple[str, ...]) -> Callable[_P, _R]:
    import numba

    signature = tuple(map(_numba_type, arguments))
    options: dict[str, Any] = {"nopython": True, "nogil": True, "fastmath": False, "error_model": "numpy"}
    try:
        compiled: Callable[_P, _R] = numba.jit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):
        # Neither folder for machine code can be written, or the disk is full: compile for this process alone.
        compiled = numba.jit(signature, **options)(function)
    return compiled


def _numba_type(argument: str) -> Any:
    from numba import types

    scalars = {"int": types.int64, "float": types.float64, "bool": types.boolean}
    if argument in scalars:
        return scalars[argument]
    kinds = {"u": "uint", "i": "int", "f": "float"}
    element = getattr(types, f"{kinds[argument[0]]}{8 * int(argument[1])}")
    return types.Array(element, 1, "C", readonly=not argument.endswith("!"), aligned=False)


def _use_compiled() -> bool:
    global _compiled
    with _lock:
        if _compiled is None:
            _compiled = _decided(os.environ.get(VARIABLE, ""))
        return _compiled


def _decided(wanted: str) -> bool:
    """Whether to run compiled forms; an empty wish is for them where they can run."""
    if wanted not in ("", *KINDS):
        raise UsageError(f"{VARIABLE} is {wanted!r}; it may be {' or '.join(KINDS)}")
    if wanted == "numpy" or (not wanted and importlib.util.find_spec("numba") is None):
        return False
    try:
        importlib.import_module("numba")
    except ImportError as error:  # absent, or made for another numpy
        if wanted:
            raise MissingDependencyError(f"numba is needed: pip install ckptstore[fast] ({error})") from None
        return False
    return True
