"""torchtitan's own checkpoint manager, optimizers and schedulers on two ranks, with a store: killed, resumed, compared.

Runs where torchtitan is installed: ``make test-torchtitan``.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from tests.forms import short_or
from tools.objects.server import free_port

pytest.importorskip(
    "torchtitan", reason="`make test-torchtitan` installs it apart: its package needs wandb and datasets"
)

LAST = 31
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def job(folder: Path, mode: str, pace: float = 0.0, last: int = LAST) -> Iterator[list[subprocess.Popen[str]]]:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.titan_job"]
            + [str(word) for word in (folder, rank, 2, port, last, mode, pace)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for one in ranks:
            one.kill()
            one.wait()
            if one.stdout is not None:
                one.stdout.close()


def losses(said: str) -> dict[int, str]:
    """Step -> loss, of the lines that are complete."""
    words = [line.split() for line in said.splitlines(keepends=True) if line.endswith("\n")]
    return {int(step): loss for step, loss in words if step != "from"}


def finished(folder: Path, mode: str, last: int = LAST) -> list[dict[int, str]]:
    with job(folder, mode, last=last) as ranks:
        said = [one.communicate(timeout=280)[0] for one in ranks]
        assert [one.returncode for one in ranks] == [0, 0]
    return [losses(one) for one in said]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_killed_and_resumed_it_has_the_same_losses(tmp_path: Path, mode: str) -> None:
    whole = finished(tmp_path / "whole", mode)
    assert [sorted(one) for one in whole] == [list(range(1, LAST + 1))] * 2
    chance, resumed = random.Random(mode), 0
    for _ in range(short_or(2, 5)):
        with job(tmp_path / "killed", mode, pace=0.1) as ranks:
            assert ranks[0].stdout is not None
            assert ranks[1].stdout is not None
            began = ranks[0].stdout.readline().split()
            resumed += int(began[1]) > 0
            said = [ranks[0].stdout.readline() for _ in range(chance.randint(4, 6))]
            for one in ranks:
                one.kill()
            found = losses("".join(said) + ranks[0].stdout.read())
            other = losses(ranks[1].stdout.read())
            assert found.items() <= whole[0].items()
            assert other.items() <= whole[1].items()
    assert resumed, "it was killed after a checkpoint was durable"
    for found, wanted in zip(finished(tmp_path / "killed", mode), whole, strict=True):
        assert found.items() <= wanted.items()
        assert max(found) == LAST
    store = ckptstore.open(tmp_path / "killed")
    assert store.latest_step() == LAST
    assert len(store.checkpoints()) == 3, "keep_latest_k"
    assert store.verify(deep=True).ok


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_is_at_its_last_step_saves_it_again_or_continues(tmp_path: Path) -> None:
    first = finished(tmp_path / "run", "disabled", last=4)
    again = finished(tmp_path / "run", "disabled", last=4)
    assert again == [{}, {}], "it was loaded at its end"
    longer = finished(tmp_path / "run", "disabled", last=6)
    whole = finished(tmp_path / "whole", "disabled", last=6)
    assert [one | more for one, more in zip(first, longer, strict=True)] == whole
