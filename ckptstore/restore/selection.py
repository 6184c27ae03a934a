"""Selects what a caller asks for: globs of tensor names, the places of a state that they match, and plain names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import TensorNotFoundError, UsageError
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.states.state import TensorPlace, places, select_places, tensor_names
from ckptstore.host.option_checks import texts

__all__ = ["TensorSelection", "choose", "chosen_box", "one_of", "select_from"]


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """The selected part of a state.

    Attributes:
        whole: the tree of the state.
        kept: position in `formats.states.state.places` -> the place; the selected ones, in tree order.
        all: there was no selection: everything is included.
    """

    whole: Any
    kept: Mapping[int, TensorPlace]
    all: bool

    @property
    def tensors(self) -> dict[str, str]:
        """tensor -> the name of the first of its selected places, in tree order."""
        found: dict[str, str] = {}
        for place in self.kept.values():
            found.setdefault(place.tensor, place.name)
        return found

    def tree(self, names: Mapping[str, str] | None = None) -> Any:
        """The tree with the selected tensors only.

        Args:
            names: tensor -> its name in the result; by default its own.
        """
        if self.all:
            return self.whole
        return select_places(
            self.whole,
            {position: place.tensor if names is None else names[place.tensor] for position, place in self.kept.items()},
        )


def select_from(tree: Any, chosen: str | Sequence[str] | None, where: str) -> TensorSelection:
    """The places of a state's tensors that a selection (one glob or several) matches.

    A tied tensor has several places with different names: places that do not match are left out.

    Raises:
        TensorNotFoundError: a glob matches nothing; suggests names that are close.
        FormatError: the tree is not what `flatten` writes.
    """
    if chosen is None:
        return TensorSelection(
            tree, {index: TensorPlace(name, name) for index, name in enumerate(tensor_names(tree))}, all=True
        )
    found = places(tree)
    names = set(choose(list(dict.fromkeys(place.name for place in found)), chosen, where))
    kept = {position: place for position, place in enumerate(found) if place.name in names}
    return TensorSelection(tree, kept, all=False)


def choose(available: Sequence[str] | dict[str, Any], chosen: str | Sequence[str] | None, where: str) -> list[str]:
    """The names that a selection (one glob or several) matches, in order.

    Raises:
        TensorNotFoundError: a glob matches nothing; suggests names that are close.
        UsageError: `chosen` is neither a text nor a sequence of texts.
    """
    names = list(available)
    if chosen is None:
        return names
    picked: set[str] = set()
    for glob in texts("select", chosen):
        matches = [name for name in names if name == glob] or fnmatch.filter(names, glob)
        if not matches:
            raise TensorNotFoundError(f"checkpoint {where}: no tensor matches {glob!r}; {_close(names, glob)}")
        picked.update(matches)
    return [name for name in names if name in picked]


def one_of(available: Collection[str], name: str, where: str) -> str:
    """`name`, which is not a glob, if it exists. Raises `TensorNotFoundError` with similar names."""
    if name in available:
        return name
    names = list(available)
    if matches := fnmatch.filter(names, name):
        hint = f"this takes one name, and {len(matches)} match: {', '.join(matches[:3])}"
    else:
        hint = _close(names, name)
    raise TensorNotFoundError(f"checkpoint {where}: no tensor is named {name!r}; {hint}")


def chosen_box(shape: Sequence[int], index: Sequence[slice] | slice, where: str) -> Box:
    """The box that slices select of an array of `shape`, as in numpy; dimensions without a slice are taken whole.

    Raises:
        UsageError: not slices of neighboring elements, or more slices than dimensions.
    """
    slices = [index] if isinstance(index, slice) else list(index)
    if not all(isinstance(part, slice) and part.step in (None, 1) for part in slices):
        raise UsageError(f"{where}: box= takes slices without a step, as in numpy.s_[0:10, :]")
    if len(slices) > len(shape):
        raise UsageError(
            f"{where}: box= has {len(slices)} slices, the tensor has {len(shape)} dimensions, of shape {list(shape)}"
        )
    slices += [slice(None)] * (len(shape) - len(slices))
    bounds = [part.indices(length) for part, length in zip(slices, shape, strict=True)]
    return Box(tuple(start for start, _, _ in bounds), tuple(max(0, stop - start) for start, stop, _ in bounds))


def _close(names: Sequence[str], name: str) -> str:
    close = difflib.get_close_matches(name, names, 3, 0.4)
    return f"close: {', '.join(close)}" if close else f"it has {len(names)} tensors"
