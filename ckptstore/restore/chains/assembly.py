"""Turns the encodings of a plan into what restores each tensor: chains of links, and programs where steps join them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.history.records import Encoding, ref_of
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.segment_files.shards import group_with_keys, key_of, with_key
from ckptstore.formats.segment_files.step_codec import StepGroup, groups_of
from ckptstore.formats.segment_files.step_tensors import StepTensors
from ckptstore.restore.chains.chain import Chain, master_of
from ckptstore.restore.chains.chain_link import TensorLink
from ckptstore.restore.chains.held_tensors import (
    EncodingTensors,
    Held,
    HeldPart,
    LinkRun,
    Spec,
    same_group,
    spec_in,
    spec_of,
)
from ckptstore.restore.chains.replay import Cell, KeptBytes, Program, ReplayStage
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["Held", "Spec", "assemble", "held_by", "master_link", "spec_of", "tree_of"]

_Root = tuple[str, int]  # tensor, and the encoding after which it is needed


def held_by(readers: Iterable[SegmentReader], encoding: Encoding) -> Held:
    """The tensors of an encoding, from its open segments. Shards are named by their keys, in the links too.

    Raises:
        CorruptSegmentError: a segment does not build on what the log says, or a tensor occurs twice, or its group is
            incomplete.
        FormatError: an optimizer step that this version does not understand; see `groups_of`.
    """
    step = encoding.checkpoint[1]
    parts: list[HeldPart] = []
    sharded = False
    for reader in readers:
        told = reader.doc.encodings.get(step)
        if told is None or (told.term, told.base) != (encoding.checkpoint[0], encoding.base):
            below = "nothing" if encoding.base is None else encoding.base.ref
            what = f"{ref_of(encoding.checkpoint)} on {below}"
            raise CorruptSegmentError(f"{reader.entry.key}: does not build {what}, as the log says")
        tensors = reader.doc.tensors.get(step, {})
        groups: dict[str, StepGroup] = {}
        for group in groups_of(tensors, f"{reader.entry.key}: step {step}"):
            groups |= dict.fromkeys(group.names, group)
        parts.append(HeldPart(reader, tensors, groups))
        sharded = sharded or _has_shards(tensors)
    if sharded:
        return _with_keys(parts, step)
    seen: set[str] = set()
    for part in parts:
        if not seen.isdisjoint(part.tensors):
            raise _twice_error(part.reader, next(name for name in part.tensors if name in seen), step)
        seen.update(part.tensors)
    return EncodingTensors(step, parts)


def _has_shards(tensors: Mapping[str, TensorEntry]) -> bool:
    if isinstance(tensors, StepTensors):
        return tensors.rows.sharded
    return any(tensor.offset is not None for tensor in tensors.values())


def _with_keys(parts: Iterable[HeldPart], step: int) -> Held:
    """The tensors and shards of an encoding."""
    found: dict[str, TensorLink] = {}
    for part in parts:
        keys = {name: key_of(tensor) for name, tensor in part.tensors.items()}
        groups = {id(group): group_with_keys(group, keys) for group in part.groups.values()}
        for name, tensor in part.tensors.items():
            key = keys[name]
            if key in found:
                raise _twice_error(part.reader, key, step)
            group = part.groups.get(name)
            found[key] = TensorLink(
                with_key(tensor, key), part.reader, step, None if group is None else groups[id(group)]
            )
    return found


def _twice_error(reader: SegmentReader, key: str, step: int) -> CorruptSegmentError:
    return CorruptSegmentError(f"{reader.entry.key}: tensor {key!r} of step {step} is in two segments")


def tree_of(readers: Iterable[SegmentReader], encoding: Encoding) -> Any:
    """The typed JSON tree of the state that an encoding restores. Raises `CorruptSegmentError` unless there is one."""
    step = encoding.checkpoint[1]
    trees = [reader.doc.trees[step] for reader in readers if step in reader.doc.trees]
    if len(trees) != 1:
        where = f"checkpoint {ref_of(encoding.checkpoint)}"
        raise CorruptSegmentError(f"{where}: its segments hold {len(trees)} trees of its state, not one")
    return trees[0]


def assemble(held: Sequence[Held], names: Sequence[str]) -> dict[str, Chain]:
    """name -> the chain that restores it, for the tensors of the last encoding.

    Args:
        held: the tensors of each encoding of a plan, the full's first; each builds on the one before.

    Raises:
        CorruptSegmentError: a link is missing, or does not fit the one below it.
    """
    last = len(held) - 1
    runs = _Runs(held)
    chains = {name: _chain(held, last, name, runs) for name in names}
    joint = [(name, last) for name, chain in chains.items() if _is_joint(chain)]
    programs = _programs(held, joint, runs) if joint else {}
    masters = _master_programs(held, chains.values(), runs)
    return {
        name: Chain(one.links, _with_program(one, len(held), masters), programs.get((name, last)))
        for name, one in chains.items()
    }


def _master_programs(held: Sequence[Held], chains: Iterable[Chain], runs: _Runs) -> dict[_Root, Program]:
    """The programs that restore masters which steps have moved. The masters of one step share a program: small ones are
    in groups of thousands, which would otherwise be replayed for each of them."""
    roots: dict[int, dict[_Root, None]] = {}
    for chain in chains:
        if chain.master is not None and _is_joint(chain.master):
            number = len(held) - len(chain.links)
            roots.setdefault(number, {})[chain.master.tensor.name, number] = None
    return {
        root: program
        for some in roots.values()
        for root, program in _programs(held, list(some), runs, compare=False).items()
    }


def _with_program(chain: Chain, count: int, programs: Mapping[_Root, Program]) -> Chain | None:
    master = chain.master
    if master is None or not _is_joint(master):
        return master
    return Chain(master.links, master.master, programs[master.tensor.name, count - len(chain.links)])


def _is_joint(chain: Chain) -> bool:
    return isinstance(chain.links, LinkRun)


class _Runs:
    """Runs of consecutive encodings that have one group: the same tensors, of the same dtypes and shapes."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._first: dict[tuple[int, str], int] = {}
        self._cells: dict[tuple[int, str], tuple[Cell, ...]] = {}

    def first(self, number: int, group: StepGroup) -> int:
        """The lowest encoding of the run that ends with encoding `number`, which has `group`."""
        key = number, group.leader
        if key not in self._first:
            found = number
            while found and same_group(self._held[found - 1], self._held[number], group):
                found -= 1
            self._first[key] = found
        return self._first[key]

    def cells(self, number: int, group: StepGroup) -> tuple[Cell, ...]:
        """The cells of a group of encoding `number`. All encodings of a run have one tuple."""
        key = self.first(number, group), group.leader
        if key not in self._cells:
            held = self._held[number]
            self._cells[key] = tuple(Cell(name, *spec_in(held, name)) for name in group.names)
        return self._cells[key]


# -- one tensor


def _chain(held: Sequence[Held], last: int, name: str, runs: _Runs) -> Chain:
    """The links of one tensor: from encoding `last` down to the newest one that needs no base."""
    links: list[TensorLink] = []  # where a group is in several encodings, only the highest of them
    number = last
    joint = False
    while number >= 0:
        link = held[number].get(name)
        if link is None:
            raise _misfit_error(f"{held[number + 1][name].where}: its base has no such tensor", held[number])
        if links and spec_of(link.tensor) != spec_of(links[-1].tensor):
            raise _misfit_error(f"{held[number + 1][name].where}: its base has another shape or dtype", held[number])
        links.append(link)
        if link.group is not None:
            joint = True
            number = runs.first(number, link.group)
        elif link.base_ratio != 1:
            every = LinkRun(held, number, last, name) if joint else tuple(reversed(links))
            # A rounded copy of another tensor of the same step, perhaps with deltas on top, has a master.
            return Chain(every) if link.base_ratio == 0 else _with_master(held, number, every, runs)
        number -= 1
    raise CorruptSegmentError(f"{held[0][name].where}: its chain begins with a delta")


def _misfit_error(what: str, below: Held) -> CorruptSegmentError:
    """The error if an encoding of a base lacks what a link needs; another encoding of the base may have it."""
    error = CorruptSegmentError(what)
    error.lacking = frozenset(link.reader.entry.id for link in below.values())
    return error


def _with_master(held: Sequence[Held], number: int, links: Sequence[TensorLink], runs: _Runs) -> Chain:
    return Chain(links, _chain(held, number, master_link(held[number], links[0]).tensor.name, runs))


def master_link(held: Held, copy: TensorLink) -> TensorLink:
    """The tensor of the same encoding of which `copy` is a rounded copy. Raises `CorruptSegmentError` if none fits."""
    name = master_of(copy.tensor)
    found = None if name is None else held.get(name)
    if found is None:
        raise CorruptSegmentError(f"{copy.where}: derived from {name!r}, which is not there")
    # Only an fp32 tensor is a master, and only dtypes of half its width derive: so chains of masters have one link.
    wanted = ("F32", copy.tensor.shape)
    if copy.tensor.dtype not in ("BF16", "F16") or spec_of(found.tensor) != wanted:
        raise CorruptSegmentError(f"{copy.where}: derived from {name!r}, which has another dtype or shape")
    return found


# -- tensors that steps have moved together


@dataclass(slots=True)
class _Requirements:
    """All the work to restore some tensors, and which tensors it joins."""

    held: Sequence[Held]
    runs: _Runs
    work: dict[tuple[int, str], tuple[Cell, ...]] = field(default_factory=dict)  # (encoding, link's tensor) -> cells
    parents: dict[Cell, Cell] = field(default_factory=dict)

    def add(self, root: _Root) -> None:
        waiting: list[tuple[str, int, bool]] = [(*root, False)]  # tensor, encoding, whether the one above builds on it
        while waiting:
            name, number, based = waiting.pop()
            link = self.held[number].get(name) if number >= 0 else None
            if link is None:
                where = self.held[number + 1][name].where if based else f"tensor {name!r}"
                below = self.held[number] if number >= 0 else {}
                raise _misfit_error(f"{where}: its base has no tensor {name!r}, or there is no base", below)
            if based and spec_of(link.tensor) != spec_in(self.held[number + 1], name):
                where = self.held[number + 1][name].where
                raise _misfit_error(f"{where}: its base has another shape or dtype", self.held[number])
            if link.group is not None:
                lower = self._add_group(number, link.group)
                if lower is not None:
                    waiting += [(member, lower, True) for member in link.group.names]
                continue
            if (number, name) in self.work:
                continue
            self.work[number, name] = (Cell(name, *spec_of(link.tensor)),)
            if link.base_ratio:
                waiting.append((name, number - 1, True))

    def _add_group(self, number: int, group: StepGroup) -> int | None:
        """Add a group of an encoding, and of those below it that have the same one -> the encoding below them.

        None: they were added before, with everything below. Most tensors of a group are found this way.
        """
        if (number, group.leader) in self.work:
            return None
        first, cells = self.runs.first(number, group), self.runs.cells(number, group)
        self.join(cells)
        while number >= first:
            if (number, group.leader) in self.work:
                return None
            self.work[number, group.leader] = cells
            number -= 1
        return number

    def find(self, cell: Cell) -> Cell:
        top = cell
        while (parent := self.parents.get(top, top)) != top:
            top = parent
        while (parent := self.parents.get(cell, cell)) != top:
            self.parents[cell], cell = top, parent
        return top

    def join(self, cells: Sequence[Cell]) -> None:
        top = self.find(cells[0])
        for cell in cells[1:]:  # most belong to `top` since the step after this one
            if self.parents.get(cell) is not top:
                self.parents[self.find(cell)] = top


def _programs(
    held: Sequence[Held], roots: Sequence[_Root], runs: _Runs, *, compare: bool = True
) -> dict[_Root, Program]:
    """root -> the program that restores it; roots that steps have joined share one.

    Args:
        compare: compare results with their hashes; those of masters are not compared (`chain.decode_chunk`).
    """
    needs = _Requirements(held, runs)
    for root in roots:
        needs.add(root)
    stages: dict[Cell, list[ReplayStage]] = {}
    for (number, name), cells in sorted(needs.work.items(), key=lambda item: item[0][0]):
        _append(stages.setdefault(needs.find(cells[0]), []), held[number], name, cells)
    results: dict[Cell, dict[str, tuple[Cell, TensorLink]]] = {}
    tops: list[Cell] = []
    for name, number in roots:
        link = held[number][name]
        cell = Cell(name, *spec_of(link.tensor))
        tops.append(needs.find(cell))
        results.setdefault(tops[-1], {})[name] = (cell, link if compare else _without_hashes(link))
    kept = KeptBytes()
    programs = {top: Program(tuple(stages[top]), found, kept) for top, found in results.items()}
    return {root: programs[top] for root, top in zip(roots, tops, strict=True)}


def _without_hashes(link: TensorLink) -> TensorLink:
    chunks = tuple(replace(chunk, decoded_hash=None) for chunk in link.tensor.chunks)
    return replace(link, tensor=replace(link.tensor, chunks=chunks))


def _append(stages: list[ReplayStage], held: Held, name: str, cells: tuple[Cell, ...]) -> None:
    """Add one link. A step joins the last stage that touches its tensors, if that has steps of the same tensors."""
    link = held[name]
    if link.group is None:
        stages.append(ReplayStage(cells, (link,)))
        return
    place = len(stages) - 1
    if not stages or stages[-1].cells is not cells:
        touched = set(cells)
        while place >= 0 and touched.isdisjoint(stages[place].cells):
            place -= 1
    before = stages[place] if place >= 0 else None
    if (
        before is not None
        and before.cells == cells
        and before.links[0].group is not None
        and before.links[0].group.rule.slots == link.group.rule.slots
    ):
        stages[place] = ReplayStage(cells, (*before.links, link), (*before.followers, held))
        return
    stages.append(ReplayStage(cells, (link,), (held,)))
