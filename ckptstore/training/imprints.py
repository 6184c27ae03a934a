"""Whether dicts and tensors are as they were, told by the bytes of the objects themselves.

To ask twelve thousand tensors where they lie and of what shape they are takes milliseconds of a step, most of them for
calls and for memory that is fetched one object after another. Here the objects' own bytes are compared with those that
they had: an object of a tensor names its ``TensorImpl``, in which type, sizes and strides stand, and that its storage,
in which the address stands; a dict has a number that every change makes another (PEP 509, until Python 3.13).

Neither Python nor torch promises any of that. So nothing of it is believed: before it is used, every kind of change is
made to tensors and dicts, and seen, or this is not used (`tensors`, `dicts`: None), and all is asked as ever. Bytes
that differ prove no change, either: then all is asked, and the bytes are taken anew (`Watch`).
"""

from __future__ import annotations

import logging
import sys
import sysconfig
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Imprint", "Watch", "dicts", "how", "kinds", "tensors"]

_LOG: Final = logging.getLogger("ckptstore.training")

_WORD: Final = 8
_HEAD: Final = 16
"""Of every object: Python's count of references and type, torch's table of methods and count of references."""
_IMPL: Final = 192 - _HEAD
"""Bytes of a ``TensorImpl`` that are looked at for where it ends."""
_STORAGE: Final = 40
"""Of a ``StorageImpl``: where its memory is, who frees it, on which device, and its size."""
MOST_DIMENSIONS: Final = 5
"""A tensor of more keeps sizes and strides elsewhere."""
_TOP: Final = 1 << 47
"""No address of a process is above it."""
_BLOCK: Final = 500
"""Objects looked at together: their bytes stay in the caches, and numpy keeps the interpreter lock meanwhile."""
_TRIALS: Final = 5
"""Of how the bytes of tensors change."""
_IN_VAIN: Final = 5
_NO_VERSIONS: Final = (3, 13)
"""From this Python on dicts have no number any more."""


class _Memory:
    """All memory, as numpy sees it: at every word the bytes that follow."""

    def __init__(self, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (_WORD, True),  # at address 0 numpy would take memory of its own
            "shape": (_TOP // _WORD - 2,),
            "strides": (_WORD,),
            "typestr": f"|V{nbytes}",
            "version": 3,
        }


class Imprint:
    """Bytes of objects, as they were when this was made. Who makes it keeps the objects."""

    def __init__(self, addresses: Iterable[int], start: int, nbytes: int) -> None:
        """
        Args:
            addresses: of the objects.
            start, nbytes: which of the bytes of each.

        Raises:
            ValueError: no such address.
        """
        at = np.fromiter(addresses, np.int64)
        if at.size and (at.min() <= 0 or at.max() >= _TOP - 4096 or (at % _WORD).any()):
            raise ValueError("an address that no object has")
        index = (at + (start - _WORD)) // _WORD
        self._memory = np.asarray(_Memory(nbytes))
        self._index = [index[number : number + _BLOCK] for number in range(0, len(index), _BLOCK)]
        self._before = [self._now(each) for each in self._index]

    def same(self) -> bool:
        """Whether all of them have the same bytes still."""
        return all(self._now(each) == before for each, before in zip(self._index, self._before, strict=True))

    def words(self) -> npt.NDArray[np.uint64]:
        """What they were, as numbers."""
        return np.frombuffer(b"".join(self._before), np.uint64)

    def _now(self, index: npt.NDArray[np.int64]) -> bytes:
        found: bytes = self._memory[index].tobytes()
        return found


class Watch:
    """Something that was found to be so, and is so still as long as the bytes that say it are the same."""

    def __init__(self, taken: Callable[[], Sequence[Imprint] | None], asked: Callable[[], bool]) -> None:
        """
        Args:
            taken: the imprints, each of objects that the one before is the reason to believe in; None: they do not say.
            asked: finds it out without.
        """
        self._taken = taken
        self._asked = asked
        self._imprints = taken()
        self._in_vain = 0

    def holds(self) -> bool:
        """Whether it is so now."""
        if self._imprints is not None and all(one.same() for one in self._imprints):
            self._in_vain = 0
            return True
        if not self._asked():
            return False
        self._in_vain += 1  # they change by something else, in every step perhaps
        self._imprints = self._taken() if self._in_vain < _IN_VAIN else None
        return True


def how() -> str:
    """How it is told here whether a state stands still, in one line."""
    asked = [name for name, told in (("tensors", _form() is not None), ("dicts", _dicts_tell())) if not told]
    if not asked:
        return "the bytes of tensors and dicts tell whether they have changed"
    return f"{' and '.join(asked)} are asked one by one whether they have changed: their bytes do not tell here"


def _remark(level: int, what: str, why: str) -> None:
    """Say that this cannot be used; once, because who asks remembers the answer."""
    _LOG.log(level, "%s do not tell of changes (%s): all are asked in every step, which takes longer", what, why)


# -- tensors


class _Form(NamedTuple):
    """Which bytes say it: (start, length) in Python's object, in the ``TensorImpl`` and in the ``StorageImpl``."""

    wrapper: tuple[int, int]
    impl: tuple[int, int]
    storage: tuple[int, int]


def tensors(found: Sequence[torch.Tensor]) -> list[Imprint] | None:
    """Imprints of where tensors lie, of their types, shapes and strides; None: not here, or not of these."""
    form = _form()
    if form is None or any(one.dim() > MOST_DIMENSIONS for one in found):
        return None
    try:
        return _imprints(found, form)
    except (ValueError, AttributeError, RuntimeError):
        return None


def _imprints(found: Sequence[torch.Tensor], form: _Form) -> list[Imprint]:
    """In this order: a storage is there as long as the tensor names it, and a ``TensorImpl`` as long as its object."""
    storages = [one.untyped_storage()._cdata for one in found]
    return [
        Imprint(map(id, found), *form.wrapper),
        Imprint([one._cdata for one in found], *form.impl),
        Imprint(storages, *form.storage),
    ]


@cache
def _form() -> _Form | None:
    """Which bytes of tensors tell of every change to them, here; None: none do."""
    if not _is_known():
        _remark(logging.INFO, "objects of this Python", f"{sys.implementation.name}, or without a GIL")
        return None
    try:
        with torch.no_grad(), torch.device("cpu"):
            form = _agreed_form()
        why = "a change of a tensor does not show in them"
    except Exception as error:  # noqa: BLE001  # another torch, whatever it says: then tensors are asked
        form, why = None, f"{type(error).__name__}: {error}"
    if form is None:
        _remark(logging.WARNING, f"bytes of torch {torch.__version__}'s tensors", why)
    return form


def _is_known() -> bool:
    """Whether objects lie where their ``id`` says, and one thread at a time changes them."""
    return (
        sys.implementation.name == "cpython"
        and sys.maxsize == 2**63 - 1
        and sys.byteorder == "little"
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
    )


def _agreed_form() -> _Form | None:
    """The fewest bytes of which a trial says that they tell; None: not even two trials say that any do.

    What follows a ``TensorImpl`` in memory belongs to others. If that is written to meanwhile, it looks like a change
    of the tensor: one trial in five says too much then (a state that stands still would seem to change), or that
    nothing tells.
    """
    said = [form for _ in range(_TRIALS) if (form := _tried_form()) is not None]
    return min(said, key=lambda form: form.impl[1]) if len(said) > 1 else None


def _tried_form() -> _Form | None:
    probe = torch.zeros(4, 6, dtype=torch.float32)
    size = torch._C.TensorBase.__basicsize__ - _HEAD
    wrapped = Imprint([id(probe)], _HEAD, size).words().tolist()
    if probe._cdata not in wrapped or Imprint([probe.untyped_storage()._cdata], _HEAD, _STORAGE).words()[0] != (
        probe.data_ptr()
    ):
        return None
    wrapper = (_WORD, _HEAD + _WORD * wrapped.index(probe._cdata))
    form = _Form(wrapper, (_HEAD, _IMPL), (_HEAD, _STORAGE))
    last = 0
    for made, change in _changes():
        before = _imprints([made], form)
        made.data_ptr(), made.stride(), made.detach(), made.is_contiguous()  # asking is no change
        if not all(one.same() for one in before):
            return None
        change(made)
        # Each says where the next one is: from the first that differs on, nothing is believed.
        after = next((number for number, one in enumerate(before) if not one.same()), None)
        if after is None:
            return None
        if after == 1:
            now = Imprint([made._cdata], *form.impl).words()
            last = max(last, int(np.flatnonzero(now != before[1].words())[-1]))
    # Not beyond what changes of it: what comes after it in memory is somebody else's.
    form = form._replace(impl=(_HEAD, _WORD * (last + 1)))
    steady = torch.nn.Parameter(torch.zeros(4, 6))
    steady.grad = torch.ones(4, 6)
    before = _imprints([steady], form)
    steady.add_(1.0)
    steady.grad = None
    return form if all(one.same() for one in before) and _all_seen(form) else None


def _all_seen(form: _Form) -> bool:
    """Whether no change goes unseen in the bytes that are left."""
    for made, change in _changes():
        before = _imprints([made], form)
        change(made)
        if all(one.same() for one in before):
            return False
    return True


def _changes() -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], object]]]:
    """Tensors, and what may become of each without another object in its place."""
    numbers = torch.zeros(64, dtype=torch.float32)
    pairs = torch.zeros(8, dtype=torch.complex64)

    def put(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], object]:
        return lambda one: setattr(one, "data", value(one.data))

    for change in (
        put(lambda one: one.clone()),
        put(lambda one: one.view(6, 4)),
        put(lambda one: one.view(24)),
        put(lambda one: one.t()),
        put(lambda one: one.view(torch.int32)),
        put(lambda one: one.double()),
        put(lambda one: one.bfloat16()),
        put(lambda one: one[:3]),
        put(lambda one: one[1:]),
        put(lambda one: one.unsqueeze(0)),
        lambda one: one.resize_(2, 6),
        lambda one: one.resize_(40, 60),
        lambda one: one.t_(),
        lambda one: one.unsqueeze_(0),
        lambda one: one.set_(one.untyped_storage(), 1, (4, 5), (5, 1)),
        lambda one: one.set_(torch.zeros(24).untyped_storage(), 0, (4, 6), (6, 1)),
        lambda one: one.untyped_storage().resize_(0),
        lambda one: one.untyped_storage().resize_(4096),
        lambda one: setattr(one, "__class__", _Other),
        lambda one: torch._C._swap_tensor_impl(one, torch.zeros(4, 6)),  # as `torch.utils.swap_tensors`
    ):
        yield torch.zeros(4, 6, dtype=torch.float32), change
    yield numbers[2:12], put(lambda _: numbers[3:13])
    yield pairs.view(8), put(lambda _: pairs.conj())
    yield pairs.imag, put(lambda _: pairs.conj().imag)
    for dimensions in range(MOST_DIMENSIONS + 1):
        shape, strides = [2] * dimensions, [1] * dimensions
        others = [(shape, strides, 5)]
        for number in range(dimensions):
            others.append((shape, [*strides[:number], 3, *strides[number + 1 :]], 0))
            others.append(([*shape[:number], 1, *shape[number + 1 :]], strides, 0))
        for other in others:
            yield numbers.as_strided(shape, strides), partial(_restride, other)
        yield numbers.as_strided(shape, strides), lambda one: one.unsqueeze_(0)


def _restride(other: tuple[list[int], list[int], int], one: torch.Tensor) -> None:
    one.as_strided_(*other)


class _Other(torch.Tensor):
    """Another type of tensors."""


# -- Python's objects


def dicts(found: Sequence[Any], empty: Sequence[Any] = ()) -> Imprint | None:
    """An imprint of what stands in dicts, and in which order; None: not here, or not in these.

    Args:
        found: dicts.
        empty: dicts and sets with nothing in them.
    """
    if not _dicts_tell() or any(type(one) is not dict and type(one) is not defaultdict for one in found):
        return None
    if any(empty) or not all(isinstance(one, dict | set) for one in empty):
        return None
    return Imprint(map(id, (*found, *empty)), _HEAD, 2 * _WORD)


def kinds(found: Sequence[Any]) -> Imprint | None:
    """An imprint of objects' types."""
    return Imprint(map(id, found), _WORD, _WORD) if _dicts_tell() else None


@cache
def _dicts_tell() -> bool:
    """Whether a dict's second word after its head is another one after each change, here, and a set's when it grows."""
    if not _is_known():
        return False
    try:
        tell = all(map(_told, _dict_changes())) and _type_told()
        why = "a change of a dict does not show in them"
    except Exception as error:  # noqa: BLE001  # another Python, whatever it says: then dicts are asked
        tell, why = False, f"{type(error).__name__}: {error}"
    if not tell:
        expected = sys.version_info >= _NO_VERSIONS
        level = logging.INFO if expected else logging.WARNING
        _remark(level, f"bytes of Python {sys.version_info.major}.{sys.version_info.minor}'s dicts", why)
    return tell


def _told(changes: tuple[Any, Sequence[Callable[[Any], object]]]) -> bool:
    """Whether each of the changes is seen, and none makes it look as it did before."""
    made, each = changes
    seen = [Imprint([id(made)], _HEAD, 2 * _WORD).words().tobytes()]
    for change in each:
        if Imprint([id(made)], _HEAD, 2 * _WORD).words().tobytes() != seen[-1]:
            return False  # without a change
        change(made)
        seen.append(Imprint([id(made)], _HEAD, 2 * _WORD).words().tobytes())
    return len(set(seen)) == len(seen)


class _Plain:
    """What has a dict of attributes."""

    def __init__(self) -> None:
        self.one: Any = 1
        self.two: Any = 2


def _dict_changes() -> Iterator[tuple[Any, Sequence[Callable[[Any], object]]]]:
    """Dicts, and changes to make to them; sets and dicts with nothing in them, and what makes them more."""
    one, other = object(), object()
    common: list[Callable[[Any], object]] = [
        lambda found: found.update(a=one),
        lambda found: found.update(a=other),
        lambda found: found.update(a=one),
        lambda found: found.setdefault("c", one),
        lambda found: found.__setitem__("a", found.pop("a")),
        lambda found: found.__setitem__("c", other),
        lambda found: found.popitem(),
        lambda found: found.__ior__({"d": one}),
        lambda found: found.__delitem__("d"),
        lambda found: found.__setitem__(one, 3),
        lambda found: found.clear(),
    ]
    yield {}, common
    yield defaultdict(dict), [*common, lambda found: found["missing"]]
    yield {"a": 1, "b": 2}, common
    plain = _Plain()
    yield vars(plain), [partial(_set, plain, value) for value in range(1000, 1040)]
    yield vars(plain), [lambda _: delattr(plain, "two"), lambda _: setattr(plain, "three", 3)]
    yield OrderedDict(), [lambda found: found.__setitem__("a", 1)]
    yield {}, [lambda found: found.__setitem__("a", 1)]
    yield set(), [lambda found: found.add(1)]


def _set(plain: _Plain, value: int, _: Any) -> None:
    plain.one = value  # the interpreter makes another instruction of it after some times


def _type_told() -> bool:
    class First:
        pass

    class Second:
        pass

    made = First()
    seen = [Imprint([id(made)], _WORD, _WORD)]
    made.__class__ = Second  # type: ignore[assignment]  # that is what may happen
    seen.append(Imprint([id(made)], _WORD, _WORD))
    words = [one.words().tolist() for one in seen]
    return words == [[id(First)], [id(Second)]] and all(a != b for a, b in pairwise(words))
