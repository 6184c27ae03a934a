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
from ckptstore.restore.chains.chain import Chain, master_of
from ckptstore.restore.chains.chain_link import TensorLink
from ckptstore.restore.chains.replay import Cell, KeptBytes, Program, ReplayStage
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["Held", "Spec", "assemble", "held_by", "master_link", "spec_of", "tree_of"]

Held = Mapping[str, TensorLink]
"""The tensors of one encoding, by name; shards by their `ShardKey`."""
Spec = tuple[str, tuple[int, ...]]
"""Logical dtype and shape."""
_Root = tuple[str, int]  # tensor, and the encoding after which it is needed


def held_by(readers: Iterable[SegmentReader], encoding: Encoding) -> dict[str, TensorLink]:
    """The tensors of an encoding, from its open segments. Shards are named by their keys, in the links too.

    Raises:
        CorruptSegmentError: a segment does not build on what the log says, or a tensor occurs twice, or its group is
            incomplete.
        FormatError: an optimizer step that this version does not understand; see `groups_of`.
    """
    found: dict[str, TensorLink] = {}
    step = encoding.checkpoint[1]
    for reader in readers:
        told = reader.doc.encodings.get(step)
        if told is None or (told.term, told.base) != (encoding.checkpoint[0], encoding.base):
            below = "nothing" if encoding.base is None else encoding.base.ref
            what = f"{ref_of(encoding.checkpoint)} on {below}"
            raise CorruptSegmentError(f"{reader.entry.key}: does not build {what}, as the log says")
        tensors = reader.doc.tensors.get(step, {})
        keys = {name: key_of(tensor) for name, tensor in tensors.items()}
        groups: dict[str, StepGroup] = {}
        for group in groups_of(tensors, f"{reader.entry.key}: step {step}"):
            groups |= dict.fromkeys(group.names, group_with_keys(group, keys))
        for name, tensor in tensors.items():
            key = keys[name]
            if key in found:
                raise CorruptSegmentError(f"{reader.entry.key}: tensor {key!r} of step {step} is in two segments")
            found[key] = TensorLink(with_key(tensor, key), reader, step, groups.get(name))
    return found


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
    chains = {name: _chain(held, last, name) for name in names}
    joint = [(name, last) for name, chain in chains.items() if _is_joint(chain)]
    programs = _programs(held, joint) if joint else {}
    masters = _master_programs(held, chains.values())
    return {
        name: Chain(one.links, _with_program(one, len(held), masters), programs.get((name, last)))
        for name, one in chains.items()
    }


def _master_programs(held: Sequence[Held], chains: Iterable[Chain]) -> dict[_Root, Program]:
    """The programs that restore masters which steps have moved. The masters of one step share a program: small ones are
    in groups of thousands, which would otherwise be replayed for each of them."""
    roots: dict[int, dict[_Root, None]] = {}
    for chain in chains:
        if chain.master is not None and _is_joint(chain.master):
            number = len(held) - len(chain.links)
            roots.setdefault(number, {})[chain.master.tensor.name, number] = None
    return {
        root: program for some in roots.values() for root, program in _programs(held, list(some), compare=False).items()
    }


def _with_program(chain: Chain, count: int, programs: Mapping[_Root, Program]) -> Chain | None:
    master = chain.master
    if master is None or not _is_joint(master):
        return master
    return Chain(master.links, master.master, programs[master.tensor.name, count - len(chain.links)])


def _is_joint(chain: Chain) -> bool:
    return any(link.group is not None for link in chain.links)


# -- one tensor


def _chain(held: Sequence[Held], last: int, name: str) -> Chain:
    """The links of one tensor: from encoding `last` down to the newest one that needs no base."""
    links: list[TensorLink] = []
    for number in range(last, -1, -1):
        link = held[number].get(name)
        if link is None:
            raise _misfit_error(f"{links[-1].where}: its base has no such tensor", held[number])
        if links and spec_of(link.tensor) != spec_of(links[-1].tensor):
            raise _misfit_error(f"{links[-1].where}: its base has another shape or dtype", held[number])
        links.append(link)
        if link.base_ratio == 0:
            return Chain(tuple(reversed(links)))
        if link.base_ratio == 2:  # the rounded copy of another tensor of the same step, with deltas on top
            return _with_master(held, number, tuple(reversed(links)))
    raise CorruptSegmentError(f"{links[-1].where}: its chain begins with a delta")


def _misfit_error(what: str, below: Held) -> CorruptSegmentError:
    """The error if an encoding of a base lacks what a link needs; another encoding of the base may have it."""
    error = CorruptSegmentError(what)
    error.lacking = frozenset(link.reader.entry.id for link in below.values())
    return error


def _with_master(held: Sequence[Held], number: int, links: tuple[TensorLink, ...]) -> Chain:
    return Chain(links, _chain(held, number, master_link(held[number], links[0]).tensor.name))


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


def spec_of(tensor: TensorEntry) -> Spec:
    """Logical dtype and shape."""
    return tensor.dtype, tensor.shape


# -- tensors that steps have moved together


@dataclass(slots=True)
class _Requirements:
    """All the work to restore some tensors, and which tensors it joins."""

    held: Sequence[Held]
    work: dict[tuple[int, str], tuple[Cell, ...]] = field(default_factory=dict)  # (encoding, link's tensor) -> cells
    parents: dict[Cell, Cell] = field(default_factory=dict)

    def add(self, root: _Root) -> None:
        waiting: list[tuple[str, int, TensorLink | None]] = [(*root, None)]
        while waiting:
            name, number, above = waiting.pop()
            link = self.held[number].get(name) if number >= 0 else None
            if link is None:
                where = f"tensor {name!r}" if above is None else above.where
                below = self.held[number] if number >= 0 else {}
                raise _misfit_error(f"{where}: its base has no tensor {name!r}, or there is no base", below)
            if above is not None and above.tensor.name == name and spec_of(link.tensor) != spec_of(above.tensor):
                raise _misfit_error(f"{above.where}: its base has another shape or dtype", self.held[number])
            if link.group is not None:
                if (number, link.group.leader) in self.work:
                    continue  # with everything below it: most tensors of a group are found this way
                members = [self.held[number][member] for member in link.group.names]
                cells = tuple(Cell(member.tensor.name, *spec_of(member.tensor)) for member in members)
                self.work[number, link.group.leader] = cells
                self.join(cells)
                waiting += [(member.tensor.name, number - 1, member) for member in members]
                continue
            if (number, name) in self.work:
                continue
            self.work[number, name] = (Cell(name, *spec_of(link.tensor)),)
            if link.base_ratio:
                waiting.append((name, number - 1, link))

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


def _programs(held: Sequence[Held], roots: Sequence[_Root], *, compare: bool = True) -> dict[_Root, Program]:
    """root -> the program that restores it; roots that steps have joined share one.

    Args:
        compare: compare results with their hashes; those of masters are not compared (`chain.decode_chunk`).
    """
    needs = _Requirements(held)
    for root in roots:
        needs.add(root)
    stages: dict[Cell, list[ReplayStage]] = {}
    for (number, name), cells in sorted(needs.work.items(), key=lambda item: item[0][0]):
        _append(stages.setdefault(needs.find(cells[0]), []), held[number], name, cells)
    results: dict[Cell, dict[str, tuple[Cell, TensorLink]]] = {}
    for name, number in roots:
        link = held[number][name]
        cell = Cell(name, *spec_of(link.tensor))
        results.setdefault(needs.find(cell), {})[name] = (cell, link if compare else _without_hashes(link))
    kept = KeptBytes()
    programs = {top: Program(tuple(stages[top]), found, kept) for top, found in results.items()}
    return {
        (name, number): programs[needs.find(Cell(name, *spec_of(held[number][name].tensor)))] for name, number in roots
    }


def _without_hashes(link: TensorLink) -> TensorLink:
    chunks = tuple(replace(chunk, decoded_hash=None) for chunk in link.tensor.chunks)
    return replace(link, tensor=replace(link.tensor, chunks=chunks))


def _append(stages: list[ReplayStage], held: Held, name: str, cells: tuple[Cell, ...]) -> None:
    """Add one link. A step joins the last stage that touches its tensors, if that has steps of the same tensors."""
    link = held[name]
    if link.group is None:
        stages.append(ReplayStage(cells, (link,)))
        return
    followers = (tuple(held[cell.name] for cell in cells),)
    touched = set(cells)
    for place in range(len(stages) - 1, -1, -1):
        before = stages[place]
        if touched.isdisjoint(before.cells):
            continue
        same = before.steps and before.cells == cells and before.links[0].group is not None
        if same and before.links[0].group.rule.slots == link.group.rule.slots:  # type: ignore[union-attr]
            stages[place] = ReplayStage(cells, (*before.links, link), before.followers + followers)
            return
        break
    stages.append(ReplayStage(cells, (link,), followers))
