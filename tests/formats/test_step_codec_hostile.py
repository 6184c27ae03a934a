"""Groups of tensors that one payload restores together: whole and fitting, or refused with the tensor's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import optim
from ckptstore.formats.segment_files import step_codec
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.formats.segment_files.segment import Chunk, TensorEntry

RULE = optim.AdamW(weight_decay=0.1).rule(optim.Step(count=7, lr=1e-3))
SLOTS = len(RULE.slots)
Tensors = dict[str, TensorEntry]


def tensor(name: str, params: Any, numbers: int = 12, **more: Any) -> TensorEntry:
    return TensorEntry(
        name, "F32", (numbers,), (Chunk(4096, 0, 4 * numbers, "0" * 16, None),), step_codec.STEP, params, **more
    )


def group(*parameters: str, numbers: int = 12) -> Tensors:
    members = tuple(tuple(f"{name}.{slot}" for slot in range(SLOTS)) for name in parameters)
    made = step_codec.StepGroup("replayed", RULE, members)
    return {
        name: tensor(name, made.params if name == made.leader else step_codec.follower_params(made.leader), numbers)
        for name in made.names
    }


def tensors() -> Tensors:
    """One parameter alone, two laid end to end, and a tensor of another codec."""
    other = replace(tensor("other", {}), codec="raw")
    return {**group("a"), **group("b", "c"), "other": other}


def test_groups_are_found() -> None:
    found = step_codec.groups_of(tensors(), "here")
    assert [one.leader for one in found] == ["a.0", "b.0"]
    assert found[1].names == tuple(f"{name}.{slot}" for name in "bc" for slot in range(SLOTS))
    assert found[0].rule == RULE
    assert step_codec.groups_of({"other": tensors()["other"]}, "here") == []


def params(**changes: Any) -> Callable[[Tensors], None]:
    """The leader of b and c has other parameters."""
    return lambda found: found.update({"b.0": replace(found["b.0"], params={**found["b.0"].params, **changes})})


def entry(name: str, **changes: Any) -> Callable[[Tensors], None]:
    return lambda found: found.update({name: replace(found[name], **changes)})


NAMES = [[f"{name}.{slot}" for slot in range(SLOTS)] for name in "bc"]

UNKNOWN: dict[str, Callable[[Tensors], None]] = {
    "another member": params(later=1),
    "another encoding": params(encoding="summed"),
    "an encoding of another type": params(encoding=["replayed"]),
    "a rule of another type": params(rule=[1]),
    "no rule": params(rule=None),
    "an unknown rule": params(rule={"rule": "lion"}),
    "members of another type": params(members={"b.0": 1}),
    "no members": params(members=None),
    "none among them": params(members=[]),
    "a text for the members": params(members="b"),
    "a text for a parameter": params(members=["b.0", "b.1"]),
    "a number for a parameter": params(members=[NAMES[0], 7]),
    "a parameter without names": params(members=[[], *NAMES]),
    "names of another type": params(members=[["b.0", 1, 2]]),
    "another leader": params(members=NAMES[::-1]),
    "slots that the rule does not have": params(members=[[*NAMES[0], "c.0"]]),
    "fewer slots than the rule has": params(members=[NAMES[0], NAMES[1][:-1]]),
}
UNFIT: dict[str, Callable[[Tensors], None]] = {
    "a tensor in two groups": params(members=[NAMES[0], [f"a.{slot}" for slot in range(SLOTS)]]),
    "a tensor twice in one": lambda found: (
        params(members=[NAMES[0], NAMES[0]])(found),  # type: ignore[func-returns-value]
        [found.pop(name) for name in NAMES[1]],
    ),
    "a leader that is missing": lambda found: found.pop("b.0"),
    "a follower that is missing": lambda found: found.pop("b.1"),
    "the first of a parameter that is missing": lambda found: found.pop("c.0"),
    "a follower of no group": entry("other", codec=step_codec.STEP, params=step_codec.follower_params("b.0")),
    "a follower of another codec": entry("c.1", codec="raw"),
    "a follower of another leader": entry("c.1", params=step_codec.follower_params("a.0")),
    "a follower that says more": entry("c.1", params={**step_codec.follower_params("b.0"), "later": 1}),
    "a follower with bytes": entry("c.1", chunks=(Chunk(4096, 9, 48, "0" * 16, None),)),
    "a leader of another dtype": entry("b.0", dtype="I32"),
    "a follower of another dtype": entry("b.2", dtype="I32"),
    "a follower of another shape": entry("b.2", shape=(3, 4)),
    "no numbers": lambda found: found.update(group("b", "c", numbers=0)),
    "more than a chunk laid end to end": lambda found: found.update(group("b", "c", numbers=CHUNK // 8 + 1)),
}


@pytest.mark.parametrize("lie", UNKNOWN)
def test_unknown_parameters(lie: str) -> None:
    found = tensors()
    UNKNOWN[lie](found)
    with pytest.raises(FormatError, match=r"here: tensor 'b\.0'"):
        step_codec.groups_of(found, "here")


@pytest.mark.parametrize("lie", UNFIT)
def test_tensors_that_do_not_fit_together(lie: str) -> None:
    found = tensors()
    UNFIT[lie](found)
    with pytest.raises(CorruptSegmentError, match="here: "):
        step_codec.groups_of(found, "here")


def test_a_large_parameter_is_a_group_of_its_own() -> None:
    found = group("b", numbers=CHUNK // 4 + 1)
    assert step_codec.groups_of(found, "here")[0].leader == "b.0"
    just = group("b", "c", numbers=CHUNK // 8)
    assert step_codec.groups_of(just, "here")[0].members[1][0] == "c.0"
