"""Which tests ``make test`` runs, and which ``make test-rest``: a file is in one of the two, by its path."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["EXPRESSIONS", "REST", "in_rest"]

ROOT: Final = Path(__file__).parents[1]
REST: Final = (
    "tests/tools/",  # the harnesses' own tests, samples of their campaigns, benchmarks in small
    # What the docs show, run as it stands there; the interfaces themselves have tests of their own.
    "tests/test_docs.py",
    "tests/test_readme.py",
    "tests/agent/test_agent_docs.py",
    "tests/cli/test_operations_docs.py",
    "tests/following/test_docs.py",
    "tests/maintenance/test_retention_docs.py",
    "tests/training/test_checkpointer_docs.py",
    "tests/training/test_example_script.py",
    "tests/training/test_layerwise_docs.py",
    # Samples of kills at every crash point.
    "tests/backends/test_fsspec_kills.py",
    "tests/maintenance/test_compact_kills.py",
    "tests/maintenance/test_prune_kills.py",
    "tests/maintenance/test_upkeep_kills.py",
    "tests/write/test_diff_kills.py",
    # Memory of processes, measured.
    "tests/host/test_memory.py",
    "tests/write/test_flat_memory.py",
)
"""Files and folders (with a slash at the end) of ``make test-rest``; all others are of ``make test``."""

EXPRESSIONS: Final = {"rest": True, "not rest": False}
"""``-m`` of the two commands -> whether it is the rest. The Makefile has them, too."""


def in_rest(path: Path) -> bool:
    """Whether a file of tests is of ``make test-rest``."""
    name = path.relative_to(ROOT).as_posix()
    return any(name.startswith(one) if one.endswith("/") else name == one for one in REST)
