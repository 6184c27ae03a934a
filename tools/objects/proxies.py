"""A fault proxy in a process of its own, for whoever forks: a thread would be in the parent alone."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from tools.objects.proxy import CONTROL, Rule

__all__ = ["DistantProxy", "proxying"]


class DistantProxy:
    """What `FaultProxy` can be told and asked, over its control path.

    Attributes:
        port: where it listens, on loopback.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def rules(self, rules: Sequence[Rule]) -> None:
        """Replace the rules."""
        self._asked("PUT", "rules", json.dumps([asdict(rule) for rule in rules]))

    def injected(self) -> Counter[tuple[str, str]]:
        """How often each fault was done to each operation."""
        return Counter({(fault, operation): count for fault, operation, count in self._asked("GET", "injected")})

    def settle(self) -> None:
        """Wait until what comes late has come."""
        while self._asked("GET", "late"):
            time.sleep(0.02)

    def _asked(self, method: str, name: str, body: str = "") -> Any:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            link.request(method, CONTROL + name, body)
            return json.loads(link.getresponse().read())
        finally:
            link.close()


@contextmanager
def proxying(upstream: int, seed: int = 0) -> Iterator[DistantProxy]:
    """A proxy before the server at a port of loopback, without rules, until the ``with`` ends."""
    command = [sys.executable, "-m", "tools.objects.proxy", "--upstream", str(upstream), "--seed", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield DistantProxy(int(process.stdout.readline().partition(" ")[0].rpartition(":")[2]))
        finally:
            process.kill()
