"""Chains of steps of many small tensors: an entry is made of each tensor of the last step, and of few of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptstore import DiffOptions
from ckptstore.formats.segment_files.step_tensors import StepTensors
from ckptstore.restore.chains import assembly
from ckptstore.restore.chains.chain import Chain
from ckptstore.restore.chains.held_tensors import LinkRun
from tests.store.states import same
from tests.write.trainer import fill

MANY = {f"layer.{number}": (number % 7 + 1,) for number in range(30)}
STEPS = 9


@pytest.mark.parametrize("batch", [1, 4])
def test_entries_are_made_of_one_step(tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, truth = fill(tmp_path / "store", DiffOptions(full_every=STEPS, batch=batch), STEPS, sizes=MANY)
    made: list[str] = []
    chains: dict[str, Chain] = {}
    take, assemble = StepTensors.__getitem__, assembly.assemble

    def counted(self: StepTensors, name: str) -> Any:
        made.extend([name] * (name not in self._made))
        return take(self, name)

    monkeypatch.setattr(StepTensors, "__getitem__", counted)
    monkeypatch.setattr(
        "ckptstore.restore.open_checkpoint.assemble", lambda *given: chains.update(assemble(*given)) or chains
    )
    same(truth[STEPS], store.load(STEPS))
    entries = 4 * len(MANY)  # the rounded copies, too
    assert entries <= len(made) <= entries + 3 * STEPS, len(made)
    links = chains["m.layer.3"].links
    assert isinstance(links, LinkRun)
    assert [link.step for link in links] == [*range(1, STEPS + 1)]
    assert [link.step for link in links[-3:]] == [STEPS - 2, STEPS - 1, STEPS]
    assert {link.tensor.name for link in links} == {"m.layer.3"}
    for step, state in truth.items():
        same(state, store.load(step))


def test_a_parameter_that_comes_later_is_in_another_group(tmp_path: Path) -> None:
    """The steps of one run have different groups: no step is taken for one of the others."""
    store, truth = fill(tmp_path / "store", DiffOptions(full_every=STEPS, batch=4), 5, sizes=MANY)
    more, later = fill(tmp_path / "more", DiffOptions(full_every=STEPS, batch=3), 5, sizes={**MANY, "late": (5,)})
    for one, states in ((store, truth), (more, later), (store, truth)):
        for step, state in states.items():
            same(state, one.load(step))
