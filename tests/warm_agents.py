"""Starts agents as forks of the nursery, for tests of what an agent does after its start.

An agent that takes optimizer steps imports torch, and torch._dynamo with the first step: four seconds of a core each.
`tests/agent` tests how trainers really start agents.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore.agent.client import agent_launch
from tests import warmth

__all__ = ["start_warm"]

_MAIN = "import sys; from ckptstore.agent.process import main; sys.exit(main())"
_LISTENS = "import os; assert not os.path.exists('/proc/self/fd/{0}'); os.dup2(1, {0}); os.dup2(2, 1)"
"""Takes the socket on which the agents of a group meet from the standard output, which becomes the log."""


def start_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process start agents as warm forks until the test ends."""

    def popen(command: list[str], *, pass_fds: list[int], stdout: int, stderr: int, **_: Any) -> Any:
        # A fork gets only the standard streams, so its standard input is the connection.
        connection, *listeners = pass_fds
        code = "; ".join([*map(_LISTENS.format, listeners), _MAIN])
        output = listeners[0] if listeners else stdout
        return warmth.start([sys.executable, "-c", code, "0"], stdin=connection, stdout=output, stderr=stderr)

    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    monkeypatch.setattr(agent_launch, "subprocess", replaced)
