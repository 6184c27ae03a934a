"""Starts scripts warm: a nursery, and the requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

from tools.warm.script import MOST, Script, WarmError

__all__ = ["MODULES", "Warm"]

MODULES: Final = (
    *("numpy", "torch", "torch._dynamo", "torch.utils.data", "torch.optim.swa_utils", "torch.distributed"),
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.nn.parallel"),
    *("ckptstore.store.open_store", "ckptstore.training.checkpointer", "ckptstore.restore.load"),
    *("ckptstore.agent.client.open_agent_writer", "ckptstore.agent.process", "ckptstore.write.writer_opening"),
    *("ckptstore.write.ranks.rank_writer_factory", "ckptstore.maintenance.garbage_collection"),
    "ckptstore.maintenance.verify.verification",
)
"""Modules that a training script imports at once, or with its first step."""
_ROOT: Final = Path(__file__).resolve().parents[2]
_EARLY: Final = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "PYTHON")
"""Variables that modules read at import, or the interpreter at its start; except those that also work later:"""
_LATER: Final = ("PYTHONPATH", "PYTHONUNBUFFERED")
_READY_SECONDS: Final = 300.0


class Warm:
    """A nursery, and the functions that start scripts in it.

    Args:
        modules: imported once, for all scripts.
        env: of the nursery.
        cwd: where modules are imported from, and where scripts run by default.

    Raises:
        WarmError: a module cannot be imported, or starts a thread, which forks would not have.
    """

    def __init__(
        self, modules: Sequence[str] = MODULES, *, env: Mapping[str, str] | None = None, cwd: Path = _ROOT
    ) -> None:
        self._env = dict(os.environ if env is None else env)
        # numpy's BLAS starts its threads at import; no training here multiplies with it.
        self._env.setdefault("OPENBLAS_NUM_THREADS", "1")
        self._cwd = cwd
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tools.warm.nursery", str(its.fileno()), *modules]
        paths = [str(_ROOT), *filter(None, [self._env.get("PYTHONPATH")])]
        self._nursery: subprocess.Popen[bytes] | None = subprocess.Popen(
            command,
            cwd=cwd,
            env={**self._env, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
        its.close()
        self._control.settimeout(_READY_SECONDS)
        said = self._control.recv(MOST)
        if said != b"ready":
            self.close()
            raise WarmError(said.decode() or f"it ended with status {self._nursery.wait()}")

    @classmethod
    def borrowed(cls) -> Self:
        """The nursery of the process that started this one, with its `lent` as the standard input."""
        one = cls.__new__(cls)
        one._env, one._cwd, one._nursery = dict(os.environ), _ROOT, None
        one._control = socket.socket(fileno=os.dup(0))
        return one

    @property
    def lent(self) -> socket.socket:
        """The standard input of a script that starts others in this nursery, see `borrowed`. They may outlive it."""
        return self._control

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the nursery, and every script that it has started; if it is borrowed, only start no more."""
        if self._nursery is None:
            self._control.close()
            return
        # Processes that were forked from this one, workers of a DataLoader for instance, have this socket, too.
        with contextlib.suppress(OSError):  # the nursery is gone
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        self._nursery.wait()

    def start(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | socket.socket = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
        teardown: bool = False,
    ) -> Script:
        """Start a script.

        Args:
            command: as for `subprocess.Popen`: this interpreter, then ``-W ACTION``, and ``-m MODULE``, ``-c CODE`` or
                a path, and arguments.
            cwd: the nursery's by default.
            env, stdin, stdout, stderr, text: as there; standard input is empty by default.
            teardown: also tear the modules down at the end, which copies the nursery's memory: 0.3 s of a core. False:
                the process ends after its last `atexit` handler.

        Raises:
            ValueError: the command is another, or the environment has other values of variables that are read at
                import.
            WarmError: the nursery has ended.
        """
        wanted = {"OPENBLAS_NUM_THREADS": self._env["OPENBLAS_NUM_THREADS"], **(os.environ if env is None else env)}
        self._check(wanted)
        asked = _asked(command) | {"cwd": os.fspath(cwd or self._cwd), "env": wanted, "teardown": teardown}
        with contextlib.ExitStack() as ours:
            reading, writing = os.pipe()
            ours.callback(os.close, writing)
            try:
                source, in_pipe = _source(stdin, text=text)
                ours.callback(os.close, source)
                out, out_pipe = _target(stdout, 1, ours, text=text)
                err, err_pipe = _target(stderr, 2, ours, text=text) if stderr != subprocess.STDOUT else (out, None)
                socket.send_fds(self._control, [json.dumps(asked).encode()], [source, out, err, writing])
            except OSError as error:
                os.close(reading)
                raise WarmError(f"the process that starts scripts is gone: {error}") from error
        return Script(command, reading, out_pipe, err_pipe, in_pipe)

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        teardown: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end -> status and output: of the script alone, not of processes that it has left running.

        Raises:
            subprocess.TimeoutExpired: it took longer, and is killed.
            and the errors of `start`.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            script = self.start(command, cwd=cwd, env=env, stdout=out, stderr=err, teardown=teardown)
            try:
                status = script.wait(timeout)
            except BaseException:
                script.kill()
                script.wait()
                raise
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(list(command), status, out.read(), err.read())

    def _check(self, env: Mapping[str, str]) -> None:
        for name in sorted({*env, *self._env}):
            if name.startswith(_EARLY) and name not in _LATER and env.get(name) != self._env.get(name):
                words = f"{env.get(name)!r}, and was {self._env.get(name)!r} where modules were imported"
                raise ValueError(f"{name} is {words}: make another Warm, with that environment")


def _asked(command: Sequence[str]) -> dict[str, Any]:
    """Parse a command line. Raises `ValueError`."""
    words = list(command)
    if not words or words.pop(0) != sys.executable:
        raise ValueError(f"{command!r:.200}: only scripts of {sys.executable}")
    filters = []
    while words[:1] == ["-W"]:
        filters.append(words[1])
        del words[:2]
    if not words:
        raise ValueError(f"{command!r:.200}: no script")
    kind = words.pop(0) if words[0] in ("-c", "-m") else "path"
    if not words or (kind == "path" and words[0].startswith("-")):
        raise ValueError(f"{command!r:.200}: -W, and then -c, -m or a path")
    return {"kind": kind, "what": words[0], "arguments": words[1:], "filters": filters}


def _source(wanted: int | IO[Any] | socket.socket, *, text: bool) -> tuple[int, IO[Any] | None]:
    """(the descriptor that a script reads from, our end of it if it is a pipe)."""
    if wanted == subprocess.PIPE:
        reading, writing = os.pipe()
        return reading, open(writing, "w" if text else "wb")
    if wanted == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDONLY), None
    return os.dup(wanted if isinstance(wanted, int) else wanted.fileno()), None


def _target(
    wanted: int | IO[Any] | None, number: int, ours: contextlib.ExitStack, *, text: bool
) -> tuple[int, IO[Any] | None]:
    """(the descriptor that a script writes to, our end of it if it is a pipe)."""
    if wanted == subprocess.PIPE:
        reading, writing = os.pipe()
        ours.callback(os.close, writing)
        return writing, open(reading, "r" if text else "rb")
    if wanted == subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_WRONLY)
        ours.callback(os.close, null)
        return null, None
    if wanted is None:
        return number, None
    return wanted if isinstance(wanted, int) else wanted.fileno(), None
