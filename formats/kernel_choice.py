"""Choose the implementation of each hot kernel: the numpy reference, or its compiled form.

numpy defines what a kernel does. The compiled forms are in C (``native/``), in the extension module
``ckptstore.formats.core``, which is part of every wheel. They return the same bits, and tests compare the two. If no C
compiler worked when the package was installed from source, there is no such module, and numpy does the work. The
environment variable ``CKPTSTORE_KERNELS`` overrides the choice: ``numpy`` never uses compiled forms, ``compiled``
requires them.

A module of kernels marks a function as hot. Its compiled form is the function of the same name and arguments in
``core``, or in another module, which prepares the arguments::

    @hot()
    def difference(new, base, out):
        ...  # in numpy

Compiled kernels release the interpreter lock, never reorder floating point operations, and refuse arrays that do not
fit together with ``ValueError``, before they write. They have one form for each instruction set (``core.sets``); the
best one that the processor has is used.

A compiled kernel that misbehaves must not look like damage of the medium, and must not write a checkpoint that nobody
can read. Three measures ensure this:

- The first call of a kernel with arguments of new types runs both forms and compares the results, and so do calls 2,
  4, 8 and so on. The caller gets numpy's result.
- Before damage is reported in bytes whose checksum is right, `confirmed` decodes them again with numpy.
- An exception that the reference does not raise is an error of the kernel.

In each case all compiled kernels are switched off in this process, a `KernelWarning` names the kernel, and numpy does
the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import update_wrapper, wraps
from typing import Any, Final, Generic, ParamSpec, TypeVar

import numpy as np

from ckptstore.errors import CkptError, CorruptSegmentError, KernelError, MissingDependencyError, UsageError

KINDS = ("numpy", "compiled")
VARIABLE = "CKPTSTORE_KERNELS"
CORE: Final = "ckptstore.formats.core"
"""The module with the compiled forms."""
_P = ParamSpec("_P")
_R = TypeVar("_R")
_lock = threading.RLock()
_compiled: bool | None = None
_own = threading.local()
_doubts = 0
_used = False
_SMALL = 8
"""Integers below this select what a kernel does, such as ``how`` of ``combine``; larger ones are sizes and limits."""


class KernelWarning(UserWarning):
    """A compiled kernel returned other bytes than numpy, or failed. numpy does the rest."""


def comparing_seconds() -> float:
    """Return the processor time that this thread has spent on comparisons with numpy, beyond that of compiled calls."""
    return getattr(_own, "comparing", 0.0)


def kind() -> str:
    """Return ``numpy`` or ``compiled``: the form of hot kernels that this process uses.

    Raises:
        UsageError: ``CKPTSTORE_KERNELS`` has another value.
        MissingDependencyError: it is ``compiled``, but the module with the compiled kernels is missing.
    """
    return KINDS[_use_compiled()]


def use(wanted: str | None) -> None:
    """Select the form of hot kernels for all threads; None: as the environment says. Raises the errors of ``kind``."""
    global _compiled, _used
    with _lock:
        _compiled = None if wanted is None else _decided(wanted)
        _used |= bool(_compiled)


def used() -> bool:
    """Return whether this process uses compiled kernels, or has used them."""
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
        f"Set {VARIABLE}=numpy until ckptstore is installed again, and check what was saved before: ckpt verify --deep"
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
        compiled = before or (before is None and _compiled is not None)  # None: `work` decided it, or called no kernel
        if not (since or compiled) or not getattr(error, "computed", True):
            raise
    with doubted():
        result = work()
    distrust("a compiled kernel", "gave wrong bytes where numpy gives those that were saved")
    return result


def hot(
    module: str = CORE, *, reads: Sequence[str] = (), destroys: Sequence[str] = (), compare: bool = True
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
        if kwargs or not (_use_compiled() if _compiled is None else _compiled):
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
        began = time.thread_time()
        memory: dict[Any, Any] = {}
        copies = [arg if at in self._reads else _copied(arg, memory) for at, arg in enumerate(args)]
        flaw = ""
        found: Any = None
        copied = time.thread_time()
        try:
            compiled: Callable[..., _R] = self.compiled
            found = compiled(*copies)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a broken kernel may raise anything
            flaw = f"failed with {type(error).__name__}: {error}"
        computed, counted = time.thread_time(), comparing_seconds()
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
        # All of the reference is for the comparison, so those of kernels that it calls are not counted again.
        _own.comparing = counted + (time.thread_time() - began) - (computed - copied)
        return result

    @property
    def compiled(self) -> Callable[_P, _R]:
        """The compiled form, whichever form is in use. Raises ``ImportError`` if there is none."""
        if self._fast is None:
            self._fast = getattr(importlib.import_module(self._module), self.reference.__name__)
        return self._fast


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
        importlib.import_module(CORE)
    except ImportError as error:
        if wanted:
            raise MissingDependencyError(
                f"the compiled kernels are missing ({error}): install a wheel of ckptstore, or install it from source "
                f"on a machine with a C compiler (pip install -v says why none was used); or unset {VARIABLE}"
            ) from None
        return False
    return True
