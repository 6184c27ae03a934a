"""What holds for all tests: long files begin first, and what no test needs any more is let go; scripts begin warm."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ckptstore.backends import memory
from ckptstore.formats import kernel_choice
from tests import division, durations, warmth
from tests.forms import short_or
from tools.objects.server import Server, serving
from tools.warm import Warm

ROOT = Path(__file__).parents[1]
DAMAGED = (
    "backends/test_hostile_keys.py",
    "cli/test_gc.py",
    "cli/test_log.py",
    "cli/test_operations_docs.py",
    "cli/test_ls.py",
    "cli/test_stats.py",
    "cli/test_verify.py",
    "log/test_flipped_slots.py",
    "log/test_fold_once.py",
    "log/test_fold_writer.py",
    "log/test_fold_writer_edges.py",
    "log/test_log.py",
    "log/test_log_edges.py",
    "log/test_log_machine.py",
    "log/test_lost_slots.py",
    "log/test_refs.py",
    "maintenance/test_compaction.py",
    "maintenance/test_store_copy.py",
    "maintenance/test_crafted_stores.py",
    "maintenance/test_lost_ends.py",
    "maintenance/test_pruning.py",
    "maintenance/test_store_repair.py",
    "reports/test_store_stats.py",
    "reports/test_run_watch.py",
    "store/test_damage.py",
    "store/test_store_methods.py",
    "tiers/test_remote_lost.py",
    "tools/test_crash_buckets.py",
    "tools/test_torture_mishaps.py",
)
"""Files whose tests damage logs on purpose, so that `DamagedLogWarning` is no error there. It has tests of its own,
`store/test_damaged_log.py`. Anywhere else a log that is taken for damaged is a failure."""

# A machine may be slow: neither a time-out of an example nor one of drawing it says anything.
slow = [HealthCheck.too_slow]
settings.register_profile("tests", max_examples=short_or(40, 100), deadline=None, suppress_health_check=slow)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help=f"write the seconds of each file to {durations.FILE.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder())
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # by the number of tests: those that kill are few, and take long


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that ``-m`` deselects as a whole are not imported: that takes each worker seconds."""
    rest = division.EXPRESSIONS.get(config.option.markexpr)
    if rest is None or not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    return True if division.in_rest(collection_path) != rest else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    damaged = {ROOT / "tests" / name for name in DAMAGED}  # made once: a path for each of 12,000 tests took 5 s
    for item in items:
        if division.in_rest(item.path):
            item.add_marker("rest")
        if item.path in damaged:
            item.add_marker(pytest.mark.filterwarnings("ignore::ckptstore.DamagedLogWarning"), append=False)
    # A worker that comes to a long file last would leave the others without work.
    seconds = {ROOT / name: spent for name, spent in durations.recorded().items()}
    items.sort(key=lambda item: -seconds.get(item.path, 0))


def pytest_collection_finish() -> None:
    # Ten thousand tests and torch are some million objects, which each full collection would go through.
    gc.collect()
    gc.freeze()
    # Torn slots that tests make on purpose are found so in a moment. (Tests that read no store do not import it.)
    if (arriving := sys.modules.get("ckptstore.log.partial_objects")) is not None:
        arriving.STILL = 0.3  # type: ignore[attr-defined]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path == item.path:
        return
    # A store in memory lives as long as the process; those of a file took gigabytes when all files had run.
    for name in memory.MemoryBackend.names():
        memory.MemoryBackend.forget(name)
    # Errors that were caught hold frames, which hold arrays: much memory, but few objects, so nothing collects them.
    gc.collect()


@pytest.fixture(scope="session")
def warm() -> Warm:
    """Starts scripts in forks of a process that has imported torch: each saves the seconds that this takes."""
    return warmth.nursery()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server of objects, one for each worker; a test makes places of its own in it."""
    with serving(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture
def numpy_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts run kernels in numpy: to import numba takes each of them a second."""
    kernel_choice.kind()  # of this process it is decided
    monkeypatch.setenv(kernel_choice.VARIABLE, "numpy")


def pytest_sessionfinish() -> None:
    warmth.close()
