"""Load files of ``torch.save`` key by key: parts are left out, taken as values, or named in the error about them.

`torch_files.load` uses torch's restricted unpickler, which knows no keys. This module reads the pickle as a description
(`inert_pickles`), and makes tensors of it by the positions of their storages in the file, which is mapped.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import uuid
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.frameworks.inert_pickles import KeyChoice, Maker, Part, Values, read_inert
from ckptstore.frameworks.pickled_arrays import ALLOWED
from ckptstore.frameworks.pickled_objects import ALLOWED_OBJECTS
from ckptstore.frameworks.torch_objects import SPARSE

__all__ = ["load_keys"]

_PICKLE_LIMIT: Final = 1 << 30
_LOCAL_HEADER: Final = 30
_STORAGES: Final = MappingProxyType(
    {
        "BoolStorage": torch.bool,
        "ByteStorage": torch.uint8,
        "CharStorage": torch.int8,
        "ShortStorage": torch.int16,
        "IntStorage": torch.int32,
        "LongStorage": torch.int64,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "FloatStorage": torch.float32,
        "DoubleStorage": torch.float64,
        "ComplexFloatStorage": torch.complex64,
        "ComplexDoubleStorage": torch.complex128,
    }
)
_LAYOUTS: Final = MappingProxyType({str(layout): layout for layout in SPARSE})
_FACTORIES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **{
            f"builtins.{one.__name__}": one
            for one in (bool, complex, dict, float, frozenset, int, list, set, str, tuple)
        },
        "collections.OrderedDict": OrderedDict,
        "collections.Counter": Counter,
        "collections.deque": deque,
    }
)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A storage in the file: its name in the archive, and its dtype; None: bytes."""

    key: str
    dtype: torch.dtype | None


class _Archive:
    """The records of a file, mapped."""

    def __init__(self, image: torch.Tensor, archive: zipfile.ZipFile) -> None:
        self._records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        self._bytes = image
        self._storages: dict[str, torch.Tensor] = {}

    def storage(self, stored: _Stored) -> torch.Tensor:
        """A storage, as a tensor of bytes. Tensors of one storage share it."""
        if stored.key not in self._storages:
            info = self._records.get(f"data/{stored.key}")
            if info is None:
                raise FormatError(f"the record data/{stored.key:.80} is missing")
            header = bytes(self._bytes[info.header_offset : info.header_offset + _LOCAL_HEADER].numpy())
            name, extra = struct.unpack("<HH", header[26:30])
            begin = info.header_offset + _LOCAL_HEADER + name + extra
            found = self._bytes[begin : begin + info.file_size]
            # Records of torch begin at multiples of 64. Others are copied, because torch needs aligned elements.
            self._storages[stored.key] = found if begin % 16 == 0 else found.clone()
        return self._storages[stored.key]


def load_keys(path: Path | str, choice: KeyChoice, image: bytes | None = None) -> Any:
    """Load the object in a zip archive of ``torch.save``. Records must have been checked before.

    Args:
        path: the file, or a text that names the archive in errors.
        choice: which parts. It notes what is left out.
        image: the bytes of the archive; None: those of the file.

    Raises:
        UnsupportedStateError: parts that cannot be made and are not left out. It names all of them.
        FormatError: the file is damaged.
        OSError: it cannot be read.
    """
    with zipfile.ZipFile(path if image is None else io.BytesIO(image)) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        if "data.pkl" not in names:
            raise FormatError(f"{path}: no archive of torch.save: it has no data.pkl")
        if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
            raise UnsupportedStateError(f"{path}: was written on a machine with another order of bytes")
        if archive.getinfo(names["data.pkl"]).file_size > _PICKLE_LIMIT:
            raise FormatError(f"{path}: its pickle is too long")
        with _in_errors(path):
            found = read_inert(io.BytesIO(archive.read(names["data.pkl"])), _stored)
            values = Values(_makers(_Archive(_mapped(path, image), archive)), _alone, choice)
            state = values.of(found)
    if values.refused:
        raise _refusal(path, values.refused)
    return state


def _mapped(path: Path | str, image: bytes | None) -> torch.Tensor:
    if image is not None:
        return torch.frombuffer(bytearray(image), dtype=torch.uint8)
    return torch.from_file(str(path), shared=False, size=Path(path).stat().st_size, dtype=torch.uint8)


@contextlib.contextmanager
def _in_errors(path: Path | str) -> Iterator[None]:
    """Add the file to errors."""
    try:
        yield
    except RecursionError as error:
        raise FormatError(f"{path}: nested too deep") from error
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def _refusal(path: Path | str, refused: Mapping[str, str]) -> UnsupportedStateError:
    each = "; ".join(f"{key}: {why}" if key else why for key, why in list(refused.items())[:10])
    more = f"; and {len(refused) - 10} more" if len(refused) > 10 else ""
    error = UnsupportedStateError(f"{path}: loading it would run pickled code (which is never done here): {each}{more}")
    again = "save it again with only tensors, dicts, lists and numbers in it, for example a state_dict()"
    if all(refused):
        keys = " ".join(f"--leave-out-key {key!r}" for key in list(refused)[:10])
        again = f"to import the rest: {keys}; to take an object's fields as values: --object CLASS; or {again}"
    error.add_note(again)
    return error


def _stored(pid: Any) -> _Stored:
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[2], str)):
        raise FormatError(f"a reference that is not a storage: {pid!r:.80}")
    module, _, name = str(getattr(pid[1], "known", "")).rpartition(".")
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return _Stored(pid[2], None)
    if module != "torch" or name not in _STORAGES:
        raise FormatError(f"a storage of an unknown type: {name!r:.80}")
    return _Stored(pid[2], _STORAGES[name])


def _alone(name: str) -> Any:
    """The value of a global that is a value itself: a dtype, or the factory of a defaultdict."""
    module, _, last = name.rpartition(".")
    if name == "numpy.ndarray":  # an argument of numpy's own function for a new array
        return np.ndarray
    found = vars(torch).get(last) if module == "torch" else None  # getattr would import modules of some names
    return found if isinstance(found, torch.dtype) else _FACTORIES[name]


# what calls make


def _makers(archive: _Archive) -> Mapping[str, Maker]:
    def tensor(part: Part) -> torch.Tensor:
        stored, offset, size, stride, _grad, _hooks, *more = part.arguments
        return _as_seen(_tensor(archive, stored, offset, size, stride), *more)

    def typed(part: Part) -> torch.Tensor:
        stored, offset, size, stride, _grad, _hooks, dtype, *more = part.arguments
        return _as_seen(_tensor(archive, _Stored(stored.key, dtype), offset, size, stride), *more)

    return {
        **{name: _called(function) for function, name in _TUPLES},
        **_MAKERS,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_tensor_v3": typed,
        "torch._utils._rebuild_parameter": lambda part: _dense(part.arguments[0]),
        "torch._utils._rebuild_sparse_tensor": _sparse,
    }


def _tensor(archive: _Archive, stored: Any, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    numbers = [offset, *size, *stride]
    if not isinstance(stored, _Stored) or len(size) != len(stride) or not all(_is_count(one) for one in numbers):
        raise FormatError(f"a tensor of invalid form: {size!r:.80}")
    dtype = stored.dtype or torch.uint8
    image = archive.storage(stored)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    # Prevents: elements beyond the storage, which are other bytes of the file.
    if 0 not in size and (last + 1) * dtype.itemsize > len(image):
        raise FormatError(f"a tensor of {list(size)!s:.80} reaches beyond its {len(image)} bytes")
    if math.prod(size) == 0:
        return torch.empty(size, dtype=dtype)
    whole = image[: len(image) // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole[offset : last + 1].as_strided(size, stride)


def _as_seen(stored: torch.Tensor, said: Any = None) -> torch.Tensor:
    """The tensor whose elements are stored. torch stores a conjugated or negative view as what it is a view of."""
    if said is None:
        return stored
    if not isinstance(said, dict) or not said.keys() <= {"conj", "neg"}:
        raise UnsupportedStateError(f"a tensor with metadata of its own: {said!r:.80}")
    seen = torch.conj_physical(stored) if said.get("conj") else stored
    return torch.neg(seen) if said.get("neg") else seen


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _sparse(part: Part) -> torch.Tensor:
    """The call ``_rebuild_sparse_tensor(layout, parts)``."""
    layout, parts = part.arguments
    if layout is torch.sparse_coo:
        indices, elements, size, *coalesced = parts
        made = torch.sparse_coo_tensor(_dense(indices), _dense(elements), size, check_invariants=True)
        return made.coalesce() if coalesced == [True] else made
    outer, inner, elements, size = parts
    args = (_dense(outer), _dense(inner), _dense(elements), size)
    return torch.sparse_compressed_tensor(*args, layout=layout, check_invariants=True)


def _dense(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise FormatError(f"a parameter of a {type(value).__name__}")
    return value


def _called(function: Any) -> Maker:
    """A maker that calls one of the functions for torch's unpickler, and sets the state as that does."""

    def make(part: Part) -> Any:
        made = function(*part.arguments)
        if (state := part.state) is not None:
            if hasattr(made, "__setstate__"):
                made.__setstate__(state)
            elif isinstance(state, dict) and all(type(key) is str for key in state):
                vars(made).update(state)
            else:
                raise FormatError(f"a {type(made).__name__} with a state of unknown form")
        return made

    return make


_TUPLES: Final[list[tuple[Callable[..., Any], str]]] = [
    one for one in (*ALLOWED, *ALLOWED_OBJECTS) if isinstance(one, tuple)
]


def _default_dict(part: Part) -> Any:
    (factory,) = part.arguments or (None,)
    if factory is not None and not any(factory is one for one in _FACTORIES.values()):
        raise FormatError(f"a defaultdict whose factory is {factory!r:.80}")
    return defaultdict(factory, part.pairs)


def _counter(part: Part) -> Any:
    counter: Counter[Any] = Counter()
    for one in (*part.arguments, part.pairs):
        dict.update(counter, one)  # Counter.update adds
    return counter


def _deque(part: Part) -> Any:
    initial, longest = (*part.arguments, (), None)[:2]
    if not isinstance(initial, list | tuple) or not (longest is None or _is_count(longest)):
        raise FormatError("a deque of unknown form")
    return deque([*initial, *part.elements], longest)


def _uuid(part: Part) -> uuid.UUID:
    return uuid.UUID(int=part.state["int"])


def _encoded(part: Part) -> bytes:
    text, code = part.arguments
    if code != "latin1":
        raise FormatError(f"bytes in the code {code!r:.20}")
    return bytes(text.encode("latin1"))


def _elements(known: Any) -> Maker:
    return lambda part: known(*part.arguments)


def _ordered(part: Part) -> Any:
    made: OrderedDict[Any, Any] = OrderedDict(*part.arguments)
    dict_update: Callable[..., None] = made.update
    dict_update(part.pairs)
    return made  # its attributes (`_metadata`) are not part of a state


_MAKERS: Final[Mapping[str, Maker]] = MappingProxyType(
    {
        "collections.OrderedDict": _ordered,
        "collections.Counter": _counter,
        "collections.defaultdict": _default_dict,
        "collections.deque": _deque,
        "uuid.UUID": _uuid,
        "_codecs.encode": _encoded,
        "builtins.set": _elements(set),
        "builtins.complex": _elements(complex),
        "builtins.bytearray": _elements(bytearray),
        "torch.serialization._get_layout": lambda part: _LAYOUTS[part.arguments[0]],
        "torch.Size": _elements(torch.Size),
        "torch.device": _elements(torch.device),
    }
)
