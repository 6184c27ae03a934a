"""A fault proxy in its own process, for processes that fork: a thread would exist only in the parent."""

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
    """Commands to and queries of a `FaultProxy`, over its control path.

    Attributes:
        port: where it listens, on loopback.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def rules(self, rules: Sequence[Rule]) -> None:
        """Replace the rules."""
        self._asked("PUT", "rules", json.dumps([asdict(rule) for rule in rules]))

    def injected(self) -> Counter[tuple[str, str]]:
        """How often each fault was injected into each operation."""
        return Counter({(fault, operation): count for fault, operation, count in self._asked("GET", "injected")})

    def settle(self) -> None:
        """Wait until late requests have arrived."""
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
    """A proxy in front of the server at a loopback port, without rules, until the ``with`` ends."""
    command = [sys.executable, "-m", "tools.objects.proxy", "--upstream", str(upstream), "--seed", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield DistantProxy(int(process.stdout.readline().partition(" ")[0].rpartition(":")[2]))
        finally:
            process.kill()
