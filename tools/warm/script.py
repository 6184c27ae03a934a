"""A handle of a script that was started warm."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, Self

__all__ = ["MOST", "Script", "WarmError"]

MOST: Final = 1 << 20
"""Largest size of a message to or from the nursery in bytes."""


class WarmError(Exception):
    """No script can be started, or the status of one is unknown."""


class Script:
    """A started script: the parts of `subprocess.Popen` that are needed here.

    Attributes:
        args: its command line.
        pid: of the process.
        returncode: None: it was running at the last check; -9: SIGKILL.
        stdin, stdout, stderr: of ``PIPE``.
    """

    def __init__(
        self,
        args: Sequence[str],
        status: int,
        stdout: IO[Any] | None,
        stderr: IO[Any] | None,
        stdin: IO[Any] | None = None,
    ) -> None:
        self.args = list(args)
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode: int | None = None
        self._status = status
        self._told = b""
        self.pid = int(self._line(None) or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until it has ended, and close its pipes."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # it ended before it had read all
                    pipe.close()
        self.wait()

    def poll(self) -> int | None:
        """Its status; None: it is running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end -> status. Raises `subprocess.TimeoutExpired`, `WarmError`."""
        if self.returncode is None:
            line = self._line(timeout)
            if line is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(line)
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is known to have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Read its pipes to their ends, and wait -> their contents. Raises `subprocess.TimeoutExpired`.

        Its standard input ends.
        """
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        until = None if timeout is None else time.monotonic() + timeout
        found = {pipe: b"" for pipe in (self.stdout, self.stderr) if pipe is not None}
        open_ = {pipe.fileno(): pipe for pipe in found}
        while open_:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = select.select(list(open_), [], [], left)[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            for one in ready:
                data = os.read(one, 1 << 16)
                found[open_[one]] += data
                if not data:
                    del open_[one]
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return _text(self.stdout, found), _text(self.stderr, found)

    def _line(self, timeout: float | None) -> str | None:
        """The next message of the nursery; None: none within the timeout."""
        until = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._told:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._status], [], [], left)[0]:
                return None
            data = os.read(self._status, 100)
            if not data:
                raise WarmError(f"the process that starts scripts is gone, and with it {self.args}")
            self._told += data
        line, _, self._told = self._told.partition(b"\n")
        return line.decode()


def _text(pipe: IO[Any] | None, found: Mapping[IO[Any], bytes]) -> Any:
    """The contents of a pipe, including what was buffered before, as text or bytes like the pipe."""
    if pipe is None:
        return None
    with pipe:
        rest = pipe.read()
    return rest + (found[pipe].decode() if isinstance(rest, str) else found[pipe])
