"""What tests of many rooms share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.warm import Warm


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Starts scripts in forks of a process that has imported torch: each saves the seconds that this takes."""
    with Warm() as found:
        yield found
