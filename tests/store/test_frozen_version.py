"""Format 1 is frozen: the version that froze it and the working tree work on the same stores in turns."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.forms import LONG, short_or
from tools.frozen import installing, interleaving

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def packages() -> tuple[Path, Path]:
    try:
        return installing.frozen(), installing.present()
    except installing.FrozenVersionError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, short_or(4, 11)))
def test_both_versions_restore_what_either_saved(packages: tuple[Path, Path], seed: int, tmp_path: Path) -> None:
    # Its kernels are compiled in every process, which takes twenty seconds of a core.
    kernels = {} if LONG else {"CKPTSTORE_KERNELS": "numpy"}
    outcome = interleaving.interleave(packages, tmp_path, operations=short_or(20, 60), seed=seed, of_frozen=kernels)
    assert outcome.saved
    assert outcome.compared >= outcome.saved
    assert {line.split(":")[0] for line in outcome.operations} == {"frozen", "present"}


def test_no_golden_file_of_the_frozen_format_has_changed() -> None:
    """Later versions add golden files, and change none."""
    if not (GOLDEN / "frozen-1.json").exists():
        pytest.skip("format 1 is not frozen yet: there is no frozen-1.json")
    expected = json.loads((GOLDEN / "frozen-1.json").read_text())
    found = {
        name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in expected if (ROOT / name).exists()
    }
    assert found == expected
