"""Divides the test files between ``make test`` and ``make test-rest`` by their paths; each file is in exactly one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["EXPRESSIONS", "REST", "in_rest"]

ROOT: Final = Path(__file__).parents[1]
REST: Final = (
    "tests/analysis/",  # offline analysis: no run depends on it
    "tests/integrations/",  # real frameworks, some with many ranks
    "tests/tools/",  # the harnesses' own tests, samples of their campaigns, small runs of the benchmarks
    # The examples of the docs, run as they are printed. The interfaces themselves have their own tests.
    "tests/test_docs.py",
    "tests/test_readme.py",
    "tests/test_recipes.py",
    "tests/agent/test_agent_docs.py",
    "tests/cli/test_operations_docs.py",
    "tests/following/test_docs.py",
    "tests/following/test_publish_docs.py",
    "tests/maintenance/test_retention_docs.py",
    "tests/store/test_shim_example.py",
    "tests/training/test_checkpointer_docs.py",
    "tests/training/test_example_script.py",
    "tests/training/test_layerwise_docs.py",
    # Samples of kills at every crash point.
    "tests/backends/test_fsspec_kills.py",
    "tests/following/test_publish_kills.py",
    "tests/maintenance/test_compact_kills.py",
    "tests/maintenance/test_prune_kills.py",
    "tests/maintenance/test_upkeep_kills.py",
    "tests/tiers/test_sync.py",
    "tests/write/test_diff_kills.py",
    "tests/write/test_replace_kills.py",
    # Jobs of many processes: real ranks, agents and trainers. Other tests check their protocols with threads as ranks.
    "tests/agent/test_handover.py",
    "tests/agent/test_rank_agents.py",
    "tests/agent/test_stopped.py",
    "tests/training/test_checkpointer_agent.py",
    "tests/training/test_checkpointer_fsdp.py",
    "tests/training/test_checkpointer_replica.py",
    "tests/training/test_replica_ranks.py",
    "tests/training/test_device_replica.py",
    "tests/training/test_device_shards.py",
    "tests/training/test_frozen_weights_agent.py",
    "tests/training/test_sparse_replica.py",
    "tests/write/test_diff_training.py",
    "tests/write/test_rank_in_flight.py",
    "tests/write/test_rank_processes.py",
    "tests/training/test_rules_beside_a_run.py",
    # Samples of orders in which a simulated device may work.
    "tests/agent/test_device_copies.py",
    "tests/frameworks/test_torch_offload.py",
    "tests/training/test_recomputed_steps.py",
    "tests/write/test_rank_device_copies.py",
    # Scripts in interpreters of their own that end, are interrupted, or run with warnings that are errors.
    "tests/backends/test_mute_server.py",
    "tests/host/test_interpreter_exit.py",
    "tests/training/test_warnings_as_errors.py",
    "tests/write/test_warnings_as_errors.py",
    # Interpreters that compile kernels, and an older version of this package.
    "tests/maintenance/test_wrong_compiled_kernels.py",
    "tests/store/test_frozen_version.py",
    # Measured memory of processes, and states of more than a hundred megabytes.
    "tests/host/test_memory.py",
    "tests/write/test_concurrent_memory.py",
    "tests/write/test_flat_memory.py",
    "tests/write/test_memory.py",
    "tests/write/test_rank_memory.py",
)
"""Files and folders (with a trailing slash) of ``make test-rest``; all others belong to ``make test``."""

EXPRESSIONS: Final = {"rest": True, "not rest": False}
"""The ``-m`` expressions of the two commands -> whether it selects the rest. The Makefile has the same expressions."""


def in_rest(path: Path) -> bool:
    """Whether a test file belongs to ``make test-rest``."""
    name = path.relative_to(ROOT).as_posix()
    return any(name.startswith(one) if one.endswith("/") else name == one for one in REST)
