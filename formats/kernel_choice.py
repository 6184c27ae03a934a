"""Choose the implementation of each hot kernel: the numpy reference, or the same loops compiled by numba.

numpy defines what a kernel does. If the optional package numba is installed (``pip install ckptstore[fast]``), compiled
forms of the hot kernels run instead. They return the same bits, and tests compare the two. The environment variable
``CKPTSTORE_KERNELS`` overrides the choice: ``numpy`` never uses numba, ``compiled`` requires it.

A module of kernels marks a function as hot and names the module with its compiled form, which is imported at the first
call::

    @hot("ckptstore.formats.codecs.compiled_planes")
    def difference(new, base, out):
        ...  # in numpy

A function of the same name in that module takes the same arguments. It calls *loops*, which declare their argument
types, so that each loop is compiled exactly once, at its first call. numba stores the machine code for later processes
in ``__pycache__``, or in the user's cache folder, or not at all if it can write to neither. `kernel_cache` checks the
code before it runs. numba notices changes of the file with the loop, but not of constants which that file imports::

    @loop("u4", "u4", "u4!")
    def _difference(new, base, out):
        for i in range(len(out)):
            ...

Loops release the interpreter lock, never reorder floating point operations, and do not check bounds: a kernel that
takes positions from a payload must check them first. Integers are promoted to 64 bits between loads and stores. Mixing
``np.uint64`` with a plain integer makes a float, as in numpy, so cast constants. A loop can use vector instructions
only if the arrays it writes are not among those it reads: write a separate loop for work in place.

A compiled kernel that misbehaves must not look like damage of the medium, and must not write a checkpoint that nobody
can read. Three measures ensure this:

- The first call of a kernel with arguments of new types runs both forms and compares the results, and so do calls 2,
  4, 8 and so on. The caller gets numpy's result.
- Before damage is reported in bytes whose checksum is right, `confirmed` decodes them again with numpy.
- An exception that the reference does not raise is an error of the kernel.

In each case all compiled kernels are switched off in this process, a `KernelWarning` names the kernel, and numpy does
the rest. ``NUMBA_DISABLE_JIT`` also means no numba: run as plain Python, the loops would compute something else.

numba's import and its first loops take half a second. So unless ``CKPTSTORE_KERNELS`` is set, numpy does the work of a
process until a call has `LARGE` bytes, or all calls together have had `MANY`: a script that saves a few small states
never imports numba.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import update_wrapper, wraps
from typing import Any, Final, Generic, ParamSpec, TypeVar

import numpy as np

from ckptstore.errors import CkptError, CorruptSegmentError, KernelError, MissingDependencyError, UsageError
from ckptstore.formats.broken_imports import by_signal
from ckptstore.formats.kernel_cache import machine_code

KINDS = ("numpy", "compiled")
VARIABLE = "CKPTSTORE_KERNELS"
WORDS = (1, 2, 4, 8)
LARGE: Final = 1 << 20
"""Bytes of one call that are worth the import of numba."""
MANY: Final = 64 << 20
"""Bytes of all calls that are worth it: in numpy they take about as long as the import."""
_CALL: Final = 1 << 12
"""What a call counts for in addition to its bytes: numpy takes some microseconds for the smallest array."""
_P = ParamSpec("_P")
_R = TypeVar("_R")
_lock = threading.RLock()
_compiled: bool | None = None
_loaded = 0
_doubts = 0
_done = 0
_used = False
_SMALL = 8
"""Integers below this select what a kernel does, such as ``how`` of ``combine``; larger ones are sizes and limits."""


class KernelWarning(UserWarning):
    """A compiled kernel returned other bytes than numpy or failed, or numba cannot be imported. numpy does the rest."""


def loaded() -> int:
    """Return how many loops were compiled or loaded from the cache so far. A timing during which it grew is invalid."""
    return _loaded


def kind() -> str:
    """Return ``numpy`` or ``compiled``: the form of hot kernels that this process uses.

    Raises:
        UsageError: ``CKPTSTORE_KERNELS`` has another value.
        MissingDependencyError: it is ``compiled``, but numba is not installed or does not support this numpy.
    """
    return KINDS[_use_compiled()]


def use(wanted: str | None) -> None:
    """Select the form of hot kernels for all threads; None: as the environment says. Raises the errors of ``kind``."""
    global _compiled, _done, _used
    with _lock:
        _compiled = None if wanted is None else _decided(wanted)
        _used |= bool(_compiled)
        _done = 0


def used() -> bool:
    """Return whether this process uses compiled kernels, or has used them. Does not import numba."""
    return _used


def steady(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Declare a function that changes no argument but ``out``: it is run again if a compiled kernel in it fails."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except KernelError:  # compiled kernels are off now
            return function(*args, **kwargs)

    return run


def distrust(kernel: str, why: str) -> None:
    """Switch the compiled kernels off in this process, and warn, once."""
    global _compiled
    with _lock:
        if _compiled is False:
            return
        _compiled = False
    _warn(
        f"{kernel}: {why}; this process continues with numpy's kernels, which are slower and write the same bytes. "
        f"Set {VARIABLE}=numpy until numba is repaired, and check what was saved before: ckpt verify --deep"
    )


def _warn(text: str) -> None:
    try:
        warnings.warn(text, KernelWarning, stacklevel=3)
    except KernelWarning:
        # Warnings are turned into errors. Raising here would fail a save or load that numpy can complete.
        print(f"KernelWarning: {text}", file=sys.stderr)


@contextlib.contextmanager
def doubted() -> Iterator[None]:
    """While this context is open, all threads get numpy's results, and each compiled kernel is compared with them."""
    global _doubts
    with _lock:
        _doubts += 1
    try:
        yield
    finally:
        with _lock:
            _doubts -= 1


def doubting() -> bool:
    """Whether some thread is inside `doubted`."""
    return _doubts > 0


def confirmed(work: Callable[[], _R], *, since: bool = False) -> _R:
    """Return the result of `work`. Damage that it computes is reported only if numpy computes it, too.

    Args:
        work: may be run twice; the second run starts over, whatever the first one left in its memory.
        since: whether `work` uses earlier results, from a time when compiled kernels were in use.

    Raises:
        CorruptSegmentError: numpy finds damage, too; or the stored bytes do not match their checksum, which does not
            depend on kernels (`CorruptSegmentError.computed` is False).
    """
    before = _compiled
    try:
        return work()
    except (CorruptSegmentError, KernelError) as error:
        # Prevents: an intact checkpoint reported as damaged, or dropped, because a compiled kernel is wrong.
        compiled = before or (before is None and _compiled is not None)  # None: `work` decided it, or had too few bytes
        if not (since or compiled) or not getattr(error, "computed", True):
            raise
    with doubted():
        result = work()
    distrust("a compiled kernel", "gave wrong bytes where numpy gives those that were saved")
    return result


def hot(
    module: str, *, reads: Sequence[str] = (), destroys: Sequence[str] = (), compare: bool = True
) -> Callable[[Callable[_P, _R]], Hot[_P, _R]]:
    """Declare a reference kernel whose compiled form is the function of the same name in ``module``.

    Args:
        module: dotted name of the module, which is imported at the first call.
        reads: arguments that may be large and are only read; they are not copied for a comparison.
        destroys: arguments whose contents are useless afterwards; they are not compared.
        compare: whether calls are compared. False: the kernel's module tests it in another way.
    """
    return lambda reference: Hot(reference, module, reads, destroys, compare)


class Hot(Generic[_P, _R]):
    """A kernel with two forms. A call runs the form in use; ``reference`` is the numpy form."""

    def __init__(
        self,
        reference: Callable[_P, _R],
        module: str,
        reads: Sequence[str] = (),
        destroys: Sequence[str] = (),
        compare: bool = True,
    ) -> None:
        self.reference = reference
        self._module = module
        self._fast: Callable[_P, _R] | None = None
        names = reference.__code__.co_varnames
        self._reads = frozenset(map(names.index, reads))
        self._destroys = frozenset(map(names.index, destroys))
        self._compare = compare
        self._calls: dict[tuple[Any, ...], int] = {}
        update_wrapper(self, reference)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run the form in use.

        Raises:
            KernelError: the compiled form failed, and the arguments may be partly changed. It is now switched off.
            Anything that the reference raises.
        """
        if kwargs or not (_worth_compiling(args) if _compiled is None else _compiled):
            return self.reference(*args, **kwargs)
        arguments: tuple[Any, ...] = args
        if self._compare:
            kind = tuple([one.dtype.char if type(one) is np.ndarray else _kind_of(one) for one in arguments])
            number = self._calls.get(kind, 0) + 1
            # Prevents: a miscompiled encoder that writes payloads which nobody can decode.
            if _doubts or not number & (number - 1):
                result = self._compared(arguments)
                self._calls[kind] = number  # only now: another thread must not run the form that is being compared
                return result
            self._calls[kind] = number
        elif _doubts:
            return self.reference(*args, **kwargs)
        try:
            return (self._fast or self.compiled)(*args, **kwargs)
        except (CkptError, ValueError, MemoryError):  # caused by the arguments, as in the reference
            raise
        except Exception as error:
            why = f"failed with {type(error).__name__}: {error}"
            distrust(self._name, why)
            raise KernelError(f"{self._name} {why}; numpy's kernels are used from now on: try again") from error

    @property
    def _name(self) -> str:
        return f"compiled kernel {self.reference.__name__!r} ({self._module})"

    def _compared(self, args: Sequence[Any]) -> _R:
        """Run both forms and return numpy's result. The compiled form works on copies."""
        memory: dict[Any, Any] = {}
        copies = [arg if at in self._reads else _copied(arg, memory) for at, arg in enumerate(args)]
        flaw = ""
        found: Any = None
        try:
            compiled: Callable[..., _R] = self.compiled
            found = compiled(*copies)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a broken kernel may raise anything
            flaw = f"failed with {type(error).__name__}: {error}"
        reference: Callable[..., _R] = self.reference
        result = reference(*args)  # raises if the arguments are invalid
        if not flaw:
            same = _same(found, result) and (
                result is False  # the arguments were refused; what was written before that does not matter
                or all(
                    _same(mine, its)
                    for at, (mine, its) in enumerate(zip(args, copies, strict=True))
                    if at not in self._destroys
                )
            )
            flaw = "" if same else "gives other bytes than numpy"
        if flaw:
            distrust(self._name, flaw)
        return result

    @property
    def compiled(self) -> Callable[_P, _R]:
        """The compiled form, whichever form is in use. Raises ``ImportError`` without numba."""
        if self._fast is None:
            self._fast = getattr(importlib.import_module(self._module), self.reference.__name__)
        return self._fast


def loop(*arguments: str) -> Callable[[Callable[_P, _R]], Loop[_P, _R]]:
    """Declare a loop to be compiled for arguments of exactly these types.

    ``u1 u2 u4 u8 i1 i2 i4 i8 f4 f8`` are contiguous one-dimensional arrays that are only read; with ``!`` appended they
    are written, too. ``int``, ``float`` and ``bool`` are scalars of 64, 64 and 8 bits. Arrays need no alignment.
    """
    return lambda function: Loop(function, arguments)


def loops(*arguments: str) -> Callable[[Callable[..., Any]], dict[int, Loop[..., Any]]]:
    """Declare one loop per word size and return them by size: ``u`` (or ``u!``) in ``arguments`` is the word type."""

    def declare(function: Callable[..., Any]) -> dict[int, Loop[..., Any]]:
        kinds = {word: [a.replace("u", f"u{word}") if a in ("u", "u!") else a for a in arguments] for word in WORDS}
        return {word: loop(*kinds[word])(function) for word in WORDS}

    return declare


class Loop(Generic[_P, _R]):
    """A function that numba compiles at its first call."""

    def __init__(self, function: Callable[_P, _R], arguments: tuple[str, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self._machine: Callable[_P, _R] | None = None
        update_wrapper(self, function)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run the machine code. Raises ``TypeError`` for arguments of other types than declared."""
        return (self._machine or self._compile())(*args, **kwargs)

    def _compile(self) -> Callable[_P, _R]:
        global _loaded
        with _lock:
            if self._machine is None:
                self._machine = _jit(self._function, self._arguments)
                _loaded += 1
            return self._machine


def inner(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a helper function that loops of the same module call. Imports numba immediately, as such modules may."""
    import numba

    found: Callable[_P, _R] = numba.njit(nogil=True, error_model="numpy")(function)
    return found


def _jit(function: Callable[_P, _R], arguments: tuple[str, ...]) -> Callable[_P, _R]:
    signature = tuple(map(_numba_type, arguments))
    options: dict[str, Any] = {"nopython": True, "nogil": True, "fastmath": False, "error_model": "numpy"}
    return machine_code(function, signature, options)


def _kind_of(argument: Any) -> Any:
    """Return the property of an argument that determines which loop a kernel runs."""
    if isinstance(argument, np.ndarray):
        return argument.dtype.char
    if isinstance(argument, int):
        return argument if -1 < argument < _SMALL else _SMALL
    if isinstance(argument, list):
        return tuple(map(_kind_of, argument))
    return type(argument), getattr(argument, "variant", None)


def _copied(argument: Any, memory: dict[Any, Any]) -> Any:
    """Copy an argument. Arrays that share an object or memory share their copy."""
    if isinstance(argument, list):
        return [_copied(part, memory) for part in argument]
    if not isinstance(argument, np.ndarray):
        return argument
    for key in (id(argument), (argument.__array_interface__["data"][0], argument.nbytes)):
        if key in memory:
            found = memory[key]
            return found if found.dtype == argument.dtype else found.view(argument.dtype)
    copy = argument.copy()
    memory[id(argument)] = copy
    if argument.nbytes:
        memory[argument.__array_interface__["data"][0], argument.nbytes] = copy
    return copy


def _same(one: Any, other: Any) -> bool:
    """Whether two results, or two arguments after a call, are equal bit for bit."""
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.shape == other.shape
            and one.dtype == other.dtype
            and np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
        )
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _numba_type(argument: str) -> Any:
    from numba import types

    scalars = {"int": types.int64, "float": types.float64, "bool": types.boolean}
    if argument in scalars:
        return scalars[argument]
    kinds = {"u": "uint", "i": "int", "f": "float"}
    element = getattr(types, f"{kinds[argument[0]]}{8 * int(argument[1])}")
    return types.Array(element, 1, "C", readonly=not argument.endswith("!"), aligned=False)


def _worth_compiling(args: Sequence[Any]) -> bool:
    """Whether to run the compiled form, while that is undecided: calls of few bytes decide nothing."""
    global _done
    if not os.environ.get(VARIABLE):
        nbytes = next((_nbytes(one) for one in args if isinstance(one, np.ndarray | list)), 0)
        with _lock:
            _done += nbytes + _CALL
            if nbytes < LARGE and _done < MANY and _compiled is None:
                return False
    return _use_compiled()


def _nbytes(argument: Any) -> int:
    return sum(map(_nbytes, argument)) if isinstance(argument, list) else int(getattr(argument, "nbytes", 0))


def _use_compiled() -> bool:
    global _compiled, _used
    with _lock:
        if _compiled is None:
            _compiled = _decided(os.environ.get(VARIABLE, ""))
            _used |= _compiled
        return _compiled


def _decided(wanted: str) -> bool:
    """Whether to run compiled forms. An empty `wanted` means: if they can run."""
    if wanted not in ("", *KINDS):
        raise UsageError(f"{VARIABLE} is {wanted!r}; it may be {' or '.join(KINDS)}")
    if wanted == "numpy":
        return False
    try:
        config = importlib.import_module("numba").config
    except BaseException as error:  # absent, for another numpy version, an invalid variable NUMBA_…, or broken
        # Prevents: a process that ends silently because a broken numba calls sys.exit when it is imported.
        if not isinstance(error, Exception) and by_signal(error):
            raise
        if wanted:
            raise MissingDependencyError(f"numba is needed: pip install ckptstore[fast] ({error})") from None
        if not isinstance(error, Exception):
            _warn(
                f"numba cannot be imported: it raises {type(error).__name__}({error}). This process uses numpy's "
                f"kernels, which are slower and write the same bytes; install numba again, or set {VARIABLE}=numpy"
            )
        return False
    # Prevents: loops run as plain Python, where integers grow instead of wrapping.
    if config.DISABLE_JIT:
        if wanted:
            raise UsageError(f"{VARIABLE} is {wanted}, and NUMBA_DISABLE_JIT turns numba's compiler off: unset one")
        return False
    return True
