"""The store under power cuts: short forms of ``python -m tools.crash.states``, and what their check notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forms import short_or
from tools.crash import faults, states
from tools.crash.scenario import Violation

# A killed writer of diffs may have lost steps that waited for their batch; the next one reports it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning")]


def test_every_state_after_a_power_cut_keeps_its_promises() -> None:
    done = states.explore(limit=short_or(2, 12))
    assert done.states > short_or(80, 200)
    assert done.restored > done.states
    assert done.states > 50, "the enumerator reaches past an acknowledgement after a fault"


def test_a_store_that_recycles_files_keeps_them_as_well() -> None:
    done = states.explore(limit=short_or(2, 4), medium="recycled")
    assert done.restored > done.states > short_or(50, 100)


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        (frozenset({"fsync", "fdatasync"}), "no sync at all"),
        (frozenset({"fdatasync"}), "segments are not synced"),
        (frozenset({"fsync"}), "slots, names and folders are not synced"),
    ],
)
def test_a_disk_that_forgets_is_caught(calls: frozenset[str], what: str) -> None:
    """Negative control: the same search finds a store that does not sync."""
    with pytest.raises(Violation):
        states.explore(limit=40, broken=faults.Fault(calls, times=None))


def test_the_check_notices_what_it_is_for(tmp_path: Path) -> None:
    """Negative control: a promised checkpoint that is missing, or has other bits, is a violation."""
    from ckptstore.backends.local_disk.local import LocalBackend
    from ckptstore.store import open as open_store
    from tools.crash.scenario import check

    store = open_store(tmp_path / "store")
    with store.writer() as writer:
        writer.save({"not": "the state of step 1"}, step=1)
    with pytest.raises(Violation, match="other bits"):
        check(LocalBackend(tmp_path / "store"), [], write=False)
    with pytest.raises(Violation, match="acknowledged and gone"):
        check(LocalBackend(tmp_path / "store"), ["7@1"], write=False)
