"""What holds for all tests: long files begin first, and what no test needs any more is let go; scripts begin warm."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.backends import memory
from tools.warm import Warm

ROOT = Path(__file__).parents[1]
LONGEST = (
    "training/test_checkpointer_replica.py",
    "test_docs.py",
    "tools/test_crash_store.py",
    "tools/test_shim_kills.py",
    "tools/test_bench.py",
    "agent/test_handover.py",
    "write/test_rank_memory.py",
    "test_readme.py",
    "tools/test_agent_kills.py",
    "tools/test_protocol.py",
    "training/test_checkpointer_fsdp.py",
    "training/test_checkpointer.py",
    "maintenance/test_prune_kills.py",
    "tools/test_crash_pmem.py",
    "tools/test_mutants.py",
    "write/test_flat_memory.py",
    "segments/test_plain.py",
    "tools/test_conformance.py",
    "tools/test_catalog_bench.py",
    "tools/test_demo.py",
    "store/test_damage.py",
    "maintenance/test_upkeep_kills.py",
    "tools/test_every_step.py",
    "maintenance/test_compact_kills.py",
    "write/test_rank_processes.py",
)
"""Files of 20 seconds and more. A worker that comes to one of them last would leave the others without work."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # by the number of tests: those that kill are few, and take long


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    # Ten thousand tests and torch are some million objects, which each full collection would go through.
    gc.collect()
    gc.freeze()


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
def warm() -> Iterator[Warm]:
    """Starts scripts in forks of a process that has imported torch: each saves the seconds that this takes."""
    with Warm() as found:
        yield found
