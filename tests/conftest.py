"""Configures the tests: the longest files run first, unused memory is freed after each file, scripts start warm, syncs
cost nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from ckptstore.backends import memory
from ckptstore.formats import kernel_choice
from ckptstore.log.log_reader import Patience
from tests import division, durations, syncs, warmth
from tests.forms import short_or
from tests.warm_agents import start_warm
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
"""Files whose tests damage logs on purpose, so that `DamagedLogWarning` is not an error there. The warning has its own
tests in `store/test_damaged_log.py`. In every other file a log that is reported as damaged is a failure."""

BRISK = (
    ("ckptstore.log.partial_objects", "STILL", 0.1),  # tests tear slots on purpose
    ("ckptstore.log.requests", "POLL", 0.02),  # the writer that answers is in this process
    ("ckptstore.write.ranks.messages.key_value_store", "LONGEST_PAUSE", 0.01),  # threads as ranks
    ("ckptstore.restore.restore_rates", "NUMBERS", 1 << 12),  # each merge and compaction measures the kernels
)
"""Module, constant, its value in tests: waits and measurements that suit disks, networks and large states."""

# The machine may be slow: a timeout while Hypothesis draws or runs an example means nothing.
slow = [HealthCheck.too_slow]
settings.register_profile("tests", max_examples=short_or(40, 100), deadline=None, suppress_health_check=slow)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help=f"write the seconds of each file to {durations.FILE.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder())
    if hasattr(config.option, "loadscopereorder"):
        # Would order files by their number of tests, but the kill tests are few and slow.
        config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files that ``-m`` deselects as a whole: importing them takes each worker seconds."""
    rest = division.EXPRESSIONS.get(config.option.markexpr)
    if rest is None or not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    return True if division.in_rest(collection_path) != rest else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    damaged = {ROOT / "tests" / name for name in DAMAGED}  # built once: one path for each of 12,000 tests took 5 s
    for item in items:
        if division.in_rest(item.path):
            item.add_marker("rest")
        if item.path in damaged:
            item.add_marker(pytest.mark.filterwarnings("ignore::ckptstore.DamagedLogWarning"), append=False)
    # If a worker started a long file last, the other workers would run out of work.
    seconds = {ROOT / name: spent for name, spent in durations.recorded().items()}
    items.sort(key=lambda item: -seconds.get(item.path, 0))


def pytest_collection_finish() -> None:
    # Ten thousand tests and torch are several million objects. Each full collection would visit them all.
    gc.collect()
    gc.freeze()
    for module, name, value in BRISK:
        if (found := sys.modules.get(module)) is not None:  # tests that read no store do not import them
            assert hasattr(found, name)
            setattr(found, name, value)


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before() -> Iterator[None]:
    """A file that changes torch's number of threads for good fails here, and not the files after it.

    A store records the number. A process with another one warns when it continues the run.
    """
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before, f"the tests of this file left {after} threads of torch, and found {before}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch works with one thread. With small tensors, beside other tests, more would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    syncs.choose(item.path)
    # A process decides for compiled kernels once it has enough bytes. The small states of tests use them at once.
    kernel_choice.kind()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path == item.path:
        return
    # A store in memory lives as long as the process. The stores of all files together took gigabytes.
    for name in memory.MemoryBackend.names():
        memory.MemoryBackend.forget(name)
    # Caught errors hold frames, and frames hold arrays: much memory in few objects, which triggers no collection.
    gc.collect()


@pytest.fixture(scope="session")
def warm() -> Warm:
    """Starts scripts as forks of a process that has imported torch, which saves seconds for each script."""
    return warmth.nursery()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real object server, one for each worker. Each test makes its own buckets or prefixes in it."""
    with serving(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once what failed in the log. Otherwise a slot that keeps failing takes four seconds."""
    monkeypatch.setattr(Patience, "pause", lambda _self, _done: None)


@pytest.fixture
def warm_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start agents as warm forks. For tests that are not about their start, nor about what they inherit or import."""
    start_warm(monkeypatch)


def pytest_sessionfinish() -> None:
    warmth.close()
