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
    """Later versions add golden files, and change none. A file that is added is recorded at once (`freeze`)."""
    record = GOLDEN / "frozen-1.json"
    files = [one for folder in (ROOT / "formats" / "golden", GOLDEN) for one in folder.rglob("*") if one.is_file()]
    found = {
        one.relative_to(ROOT).as_posix(): hashlib.sha256(one.read_bytes()).hexdigest() for one in files if one != record
    }
    assert found == json.loads(record.read_text())
