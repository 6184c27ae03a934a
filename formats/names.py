"""Flat, readable tensor names from key paths.

The tree is what says which tensor stands where; names only have to be distinct, stable while the structure of the
state is, and familiar: ``("model", "encoder.weight")`` is ``model.encoder.weight``, as people know it from
safetensors files. State-dict keys contain dots, so two paths can ask for one name: all of those are escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ckptstore.formats.values import is_plain_text

__all__ = ["bare_name", "flat_names", "place_names"]

_RESERVED = "ckptstore/"
_COMPILED = "_orig_mod"


def bare_name(name: str) -> str:
    """A name without what `torch.compile` puts into those of a compiled module, at any depth."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) or name if _COMPILED in name else name


def flat_names(paths: Sequence[tuple[object, ...]]) -> list[str]:
    """One name per path, distinct, none empty, ``__metadata__`` or below ``ckptstore/``.

    A path's plain name is its keys' `str` joined by dots. If two paths share it, or it is not allowed, each of them
    takes its escaped name; should that be taken too, ``~2``, ``~3`` ... follows.

    Args:
        paths: distinct key paths; each key is a dict key or a position in a list.
    """
    plain = [".".join(map(str, path)) for path in paths]
    uses = Counter(plain)
    names: list[str] = []
    unique = {name for name, count in uses.items() if count == 1 and _allowed(name)}
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
    """One name per place at which a tensor stands: what a selection calls it. A name means one tensor.

    The place that a tensor is named after has the tensor's name: its first one, as `flat_names` does it, or the one
    whose plain name it is; if there is none, its first one. Any other has its plain name if that is allowed and means
    no other tensor (neither is one's name, nor is the plain name of a place of another), else its escaped one, as in
    `flat_names`. Two places of one tensor may share a plain name.

    Args:
        places: (distinct key path, name of the tensor), in the order of the tree.
    """
    plain = [".".join(map(str, path)) for path, _ in places]
    owner = {tensor: tensor for _, tensor in places}
    shared: set[str] = set()
    for (_, tensor), name in zip(places, plain, strict=True):
        if owner.setdefault(name, tensor) != tensor or not _allowed(name):
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


def _allowed(name: str) -> bool:
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
