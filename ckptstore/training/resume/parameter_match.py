"""Matches an optimizer's parameters in a checkpoint with those of the script: by name, or else by number.

An optimizer's state numbers its parameters. Two scripts that create the same modules in a different order number them
differently, and one layer would get the moments of another. Nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["ParameterMatch", "matched"]


@dataclass(frozen=True, slots=True)
class ParameterMatch:
    """The parameters and groups of a script's optimizer, and their counterparts in a checkpoint.

    Attributes:
        parameters: position among all of the script's -> position among all of the checkpoint's.
        groups: for each group of the script, the number of the checkpoint's group with the same parameters; None: no
            single group has them.
        differences: what does not match, for messages.
    """

    parameters: dict[int, int]
    groups: list[int | None]
    differences: list[str] = field(default_factory=list)

    @property
    def in_place(self) -> bool:
        """Whether all parameters and groups have their old places."""
        same = all(mine == its for mine, its in self.parameters.items())
        return same and not self.differences and self.groups == list(range(len(self.groups)))


def matched(
    saved: Sequence[Sequence[str | None]], mine: Sequence[Sequence[str]], known: Mapping[str, int]
) -> ParameterMatch:
    """Match the parameters.

    Args:
        saved: for each group in the checkpoint, its parameters' names; None: a parameter without a name.
        mine: for each group of the script, its parameters' names for messages; empty: a parameter without a name.
        known: every name of a parameter of the script -> its position among all of them.
    """
    theirs = [name for group in saved for name in group]
    ours = [name for group in mine for name in group]
    if not any(theirs) or not known:
        return _by_number(saved, mine)
    differences: list[str] = []
    parameters: dict[int, int] = {}
    left: list[int] = []  # the checkpoint's parameters without a name
    for number, name in enumerate(theirs):
        if name is None:
            left.append(number)
        elif (position := known.get(name)) is None:
            differences.append(f"{name}: the checkpoint's optimizer has it, the script's has not")
        elif position in parameters:
            differences.append(f"{name}: one parameter with {theirs[parameters[position]]} in the script only")
        else:
            parameters[position] = number
    nameless = [position for position, name in enumerate(ours) if not name]
    if len(nameless) == len(left):
        parameters |= dict(zip(nameless, left, strict=True))
    else:
        differences.append(
            f"{len(left)} parameters of the checkpoint's optimizer are in no model, {len(nameless)} of the script's"
        )
    differences += [
        f"{name}: the script's optimizer has it, the checkpoint's has not"
        for position, name in enumerate(ours)
        if name and position not in parameters
    ]
    groups, divided = _groups(saved, mine, parameters)
    return ParameterMatch(parameters, groups, differences + divided)


def _groups(
    saved: Sequence[Sequence[str | None]], mine: Sequence[Sequence[str]], parameters: Mapping[int, int]
) -> tuple[list[int | None], list[str]]:
    """For each group of the script the checkpoint's group; and a difference if the groups are divided differently."""
    there = _group_of(saved)
    sources: list[set[int]] = []
    position = 0
    for group in mine:
        numbers = range(position, position + len(group))
        sources.append({there[parameters[number]] for number in numbers if number in parameters})
        position += len(group)
    uses = [sum(number in source for source in sources) for number in range(len(saved))]
    found: list[int | None] = []
    # Prevents: the weight decay of one group for parameters that the script has put into another group.
    for source in sources:
        only = next(iter(source)) if len(source) == 1 else None
        found.append(only if only is not None and uses[only] == 1 else None)
    empty = [number for number, group in enumerate(saved) if not group]
    for number, group in enumerate(mine):
        if not group and empty:
            found[number] = empty.pop(0)
    divided = []
    if len(saved) != len(mine):
        divided.append(f"param_groups: {len(saved)} in the checkpoint, {len(mine)} in the script")
    elif None in found:
        which = ", ".join(str(number) for number, one in enumerate(found) if one is None)
        divided.append(f"param_groups: parameters are divided otherwise among the script's (group {which})")
    return found, divided


def _by_number(saved: Sequence[Sequence[str | None]], mine: Sequence[Sequence[str]]) -> ParameterMatch:
    lengths, ours = [len(group) for group in saved], [len(group) for group in mine]
    if lengths == ours:
        return ParameterMatch({number: number for number in range(sum(ours))}, list(range(len(ours))))
    said = f"param_groups: {_said(lengths)} in the checkpoint, {_said(ours)} in the script"
    return ParameterMatch({}, [None] * len(ours), [said])


def _said(lengths: Sequence[int]) -> str:
    return f"{len(lengths)} groups of {', '.join(map(str, lengths))} parameters" if lengths else "none"


def _group_of(groups: Sequence[Sequence[object]]) -> list[int]:
    return [number for number, group in enumerate(groups) for _ in group]
