"""Build flat, readable tensor names from key paths.

The tree defines which tensor is where. Names only need to be distinct, to stay the same while the structure of the
state does, and to be familiar: ``("model", "encoder.weight")`` becomes ``model.encoder.weight``, as in most safetensors
files. State-dict keys contain dots, so two paths can lead to one name; all such paths get escaped names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ckptstore.formats.states.values import is_plain_text

__all__ = ["bare_name", "flat_names", "is_name", "place_names"]

_RESERVED = "ckptstore/"
_COMPILED = "_orig_mod"


def bare_name(name: str) -> str:
    """Return a name without the parts that `torch.compile` adds to names of a compiled module, at any depth."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) or name if _COMPILED in name else name


def flat_names(paths: Sequence[tuple[object, ...]]) -> list[str]:
    """Return one name per path: distinct, not empty, not ``__metadata__`` and not below ``ckptstore/``.

    The plain name of a path is the `str` of its keys, joined by dots. If two paths have the same plain name, or it is
    not allowed, each of them gets its escaped name. If that is taken, too, ``~2``, ``~3`` ... is appended.

    Args:
        paths: distinct key paths; each key is a dict key or a position in a list.
    """
    plain = [".".join(map(str, path)) for path in paths]
    uses = Counter(plain)
    names: list[str] = []
    unique = {name for name, count in uses.items() if count == 1 and is_name(name)}
    taken = set(unique)
    for path, name in zip(paths, plain, strict=True):
        if name in unique:
            names.append(name)
            continue
        escaped = candidate = _escaped(path)
        suffix = 2
        while candidate in taken:
            candidate = f"{escaped}~{suffix}"
            suffix += 1
        taken.add(candidate)
        names.append(candidate)
    return names


def place_names(places: Sequence[tuple[tuple[object, ...], str]]) -> list[str]:
    """Return one name per place of a tensor, for use in a selection. A name belongs to only one tensor.

    One place of each tensor has the tensor's own name: the first place, if `flat_names` derives that name from it; else
    the place whose plain name it is; else the first one. Every other place has its plain name if that is allowed and
    belongs to no other tensor (as its name, or as the plain name of one of its places), else its escaped name, as in
    `flat_names`. Two places of one tensor may share a plain name.

    Args:
        places: (distinct key path, name of the tensor), in the order of the tree.
    """
    plain = [".".join(map(str, path)) for path, _ in places]
    owner = {tensor: tensor for _, tensor in places}
    shared: set[str] = set()
    for (_, tensor), name in zip(places, plain, strict=True):
        if owner.setdefault(name, tensor) != tensor or not is_name(name):
            shared.add(name)
    names: list[str] = []
    home: dict[str, int] = {}
    for position, ((_, tensor), name) in enumerate(zip(places, plain, strict=True)):
        if tensor not in home or (name == tensor and not _is_named_after(*places[home[tensor]])):
            home[tensor] = position
    for position, ((path, tensor), name) in enumerate(zip(places, plain, strict=True)):
        candidate = name
        if home[tensor] == position:
            candidate = tensor
        elif name in shared:
            escaped = candidate = _escaped(path)
            suffix = 2
            while candidate in owner:
                candidate = f"{escaped}~{suffix}"
                suffix += 1
            owner[candidate] = tensor
        names.append(candidate)
    return names


def _is_named_after(path: tuple[object, ...], tensor: str) -> bool:
    return tensor in (".".join(map(str, path)), _escaped(path))


def is_name(name: str) -> bool:
    """Whether a tensor of a state may have this name."""
    return bool(name) and name != "__metadata__" and not name.startswith(_RESERVED) and is_plain_text(name)


def _escaped(path: tuple[object, ...]) -> str:
    """Percent-escape ``%``, ``.``, ``/``, a leading ``#`` or ``_``, lone surrogates; ``#`` marks a non-string key."""
    return ".".join(map(_component, path)) or "#"  # "#": the state is itself a tensor


def _component(key: object) -> str:
    text = str(key)
    parts = []
    for position, letter in enumerate(text):
        special = letter in "%./" or (position == 0 and letter in "#_") or not is_plain_text(letter)
        escape = letter.encode("utf-8", "surrogatepass") if special else b""
        parts.append("".join(f"%{byte:02X}" for byte in escape) or letter)
    return ("" if isinstance(key, str) else "#") + ("".join(parts) or "%")  # "%": an empty key
