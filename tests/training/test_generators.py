"""Random generators that are restored alone, and positions of loaders without a Checkpointer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.errors import FormatError, UsageError, WriterClosedError  # noqa: E402
from ckptstore.training import Checkpointer, counted, generator_states, restore_generators  # noqa: E402


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(1).item()]


def test_the_global_generators_alone() -> None:
    states = generator_states()
    before = drawn()
    assert drawn() != before
    restore_generators(states)
    assert drawn() == before
    with pytest.raises(FormatError, match="random generators cannot be restored"):
        restore_generators({"python": 1})


def script() -> tuple[Any, Any]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def test_what_is_drawn_between_resume_and_the_first_batch_is_put_back(tmp_path: Path) -> None:
    found = []
    for draws in (False, True):
        for until in (2, 4):
            torch.manual_seed(1)
            model, optimizer = script()
            data = torch.utils.data.DataLoader(range(8), shuffle=True)
            with Checkpointer(tmp_path / str(draws), model=model, optimizer=optimizer, loader=data) as checkpointer:
                with pytest.raises(UsageError, match=r"call resume\(\) before restore_generators"):
                    checkpointer.restore_generators()
                step = checkpointer.resume()
                if draws:
                    drawn()
                    checkpointer.restore_generators()
                for batch in checkpointer.loader:
                    found.append((draws, step, int(batch), drawn()[2]))
                    model(torch.ones(2)).sum().backward()
                    optimizer.step()
                    checkpointer.step()
                    step = checkpointer.steps_done
                    if step == until:
                        break
            with pytest.raises(WriterClosedError):
                checkpointer.restore_generators()
    half = len(found) // 2
    assert [one[1:] for one in found[:half]] == [one[1:] for one in found[half:]]


def test_a_rollback_is_put_back_too(tmp_path: Path) -> None:
    model, optimizer = script()
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            checkpointer.step()
            after = generator_states()["torch"]
            torch.rand(1)
        checkpointer.rollback(2)
        torch.rand(1)
        checkpointer.restore_generators()
        assert torch.equal(torch.get_rng_state(), after)


def test_a_shim_saves_positions_itself(tmp_path: Path) -> None:
    def batches() -> Any:
        return counted(torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True))

    whole = []
    one = batches()
    with ckptstore.open(tmp_path / "run").writer() as writer:
        for batch in one:
            if one.given == 2:
                writer.save({"loader": one.state_dict(), "random": generator_states()}, step=2)
            whole.append((batch.tolist(), torch.rand(1).item()))
    state = ckptstore.open(tmp_path / "run").load(2)
    again = batches()
    again.load_state_dict(state["loader"])
    restore_generators(state["random"])
    torch.rand(1)  # what training drew after that save
    assert [(batch.tolist(), torch.rand(1).item()) for batch in again] == whole[2:]
    assert (again.epoch, again.given) == (0, 4)
    assert counted(again) is again
