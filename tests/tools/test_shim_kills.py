"""The kill test of scripts that use a Checkpointer, in short (in full: ``python -m tools.shim_kills --kills 100``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forms import long_only, short_or

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def kills(*options: str) -> str:
    """In a process of its own: it forks, which must not be done with the tests' threads."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.shim_kills", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["full", pytest.param("delta", marks=long_only), pytest.param("gradient", marks=long_only)]
)
def test_one_process(strategy: str) -> None:
    count = str(short_or(2, 3))
    assert f"{count} kills" in kills("--kills", count, "--seed", "1", "--ranks", "1", "--strategy", strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param("full", marks=long_only), pytest.param("delta", marks=long_only), "gradient"]
)
def test_two_ranks(strategy: str) -> None:
    count = str(short_or(1, 2))
    assert f"{count} kill" in kills("--kills", count, "--seed", "1", "--ranks", "2", "--strategy", strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param("full", marks=long_only), pytest.param("delta", marks=long_only), "gradient"]
)
def test_two_ranks_of_a_model_in_shards(strategy: str) -> None:
    count = str(short_or(1, 2))
    assert f"{count} kill" in kills("--kills", count, "--seed", "1", "--fsdp", "--strategy", strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("gradient", marks=long_only), "replica"])
def test_one_process_and_its_agent(strategy: str) -> None:
    assert "2 kills" in kills("--kills", "2", "--seed", "3", "--agent", "--strategy", strategy)


@long_only
def test_a_run_that_forgets_its_generators_is_found_out() -> None:
    """The harness sees what is wrong: here a restore that leaves numpy's generator alone."""
    code = (
        "import numpy as np\n"
        "from ckptstore.training import rng\n"
        "real = rng.restored\n"
        "def restored(state):\n"
        "    before = np.random.get_state()\n"
        "    real(state)\n"
        "    np.random.set_state(before)\n"
        "rng.restored = restored\n"
        "import sys\n"
        "from tools.shim_kills import main\n"
        "sys.exit(main(['--kills', '6', '--seed', '1', '--ranks', '1', '--strategy', 'full']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout
    assert "loss" in done.stdout
