"""Python scripts that begin warm: forked by a process that has imported already what takes seconds to import.

    with Warm() as warm:
        script = warm.start([sys.executable, "-m", "tools.examples.train_gpt", "--steps", "3"], stdout=PIPE)
        script.kill()
        assert script.wait() == -signal.SIGKILL

What is started is a process like any other: its own pid and session, arguments, environment, folder and standard
streams; it ends as an interpreter does (what `atexit` and threads have to do is done), and SIGKILL takes it as it is.
It is a child of the *nursery*, a process of one thread that has computed nothing: no pool of OpenMP, no autograd, no
CUDA, no process group. So what a library does at its first use it does in every script anew. The nursery says how each
ended. If it goes, or whoever made it, so do all scripts that it has started.

What is not as in an interpreter that begins cold: what modules read from the environment when they are imported
(`OMP_NUM_THREADS`, ...) is the nursery's, so that other values are refused; hashes of texts have one seed in all.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

__all__ = ["MODULES", "Script", "Warm", "WarmError"]

MODULES: Final = (
    *("numpy", "torch", "torch._dynamo", "torch.utils.data", "torch.optim.swa_utils", "torch.distributed"),
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.nn.parallel"),
    *("ckptstore", "ckptstore.agent", "ckptstore.training"),
    *(["numba"] if importlib.util.find_spec("numba") is not None else []),
)
"""What a training script imports at once, or with its first step."""
_ROOT: Final = Path(__file__).resolve().parents[1]
_EARLY: Final = ("OMP_", "MKL_", "OPENBLAS_", "NUMBA_", "KMP_", "GOMP_", "PYTHON", "CKPTSTORE_KERNELS")
"""Read when modules are imported, or by the interpreter; but for ``PYTHONPATH``, which is heeded later as well."""
_MOST: Final = 1 << 20
_READY_SECONDS: Final = 300.0
_PDEATHSIG: Final = 1
_STREAMS: Final = 3


class WarmError(Exception):
    """No script can be started, or nobody knows how it ended."""


# -- the side that starts


class Script:
    """A script that was started: what `subprocess.Popen` is of a command, as far as it is needed here.

    Attributes:
        args: its command line.
        pid: of the process.
        returncode: None: it runs, as far as anybody has asked; -9: SIGKILL.
        stdout, stderr: of ``PIPE``.
    """

    def __init__(self, args: Sequence[str], status: int, stdout: IO[Any] | None, stderr: IO[Any] | None) -> None:
        self.args = list(args)
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None
        self._status = status
        self._told = b""
        self.pid = int(self._line(None) or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until it has ended, and close its pipes."""
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()

    def poll(self) -> int | None:
        """How it ended; None: it has not."""
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
        """Read its pipes to their ends, and wait -> what they gave. Raises `subprocess.TimeoutExpired`."""
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
        """What the nursery says next; None: nothing in so many seconds."""
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
    """What a pipe gave, and what of it somebody has buffered before, as it would have given it."""
    if pipe is None:
        return None
    with pipe:
        rest = pipe.read()
    return rest + (found[pipe].decode() if isinstance(rest, str) else found[pipe])


class Warm:
    """A nursery, and what starts scripts in it.

    Args:
        modules: imported once, for all scripts.
        env: of the nursery.
        cwd: where modules are imported from, and where scripts run, unless they are told otherwise.

    Raises:
        WarmError: a module cannot be imported, or begins a thread, which forks would not have.
    """

    def __init__(
        self, modules: Sequence[str] = MODULES, *, env: Mapping[str, str] | None = None, cwd: Path = _ROOT
    ) -> None:
        self._env = dict(os.environ if env is None else env)
        # numpy's BLAS begins its threads when it is imported; nothing that trains here multiplies with it.
        self._env.setdefault("OPENBLAS_NUM_THREADS", "1")
        self._cwd = cwd
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tools.warm", str(its.fileno()), *modules]
        paths = [str(_ROOT), *filter(None, [self._env.get("PYTHONPATH")])]
        self._nursery = subprocess.Popen(
            command,
            cwd=cwd,
            env={**self._env, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
        its.close()
        self._control.settimeout(_READY_SECONDS)
        said = self._control.recv(_MOST)
        if said != b"ready":
            self.close()
            raise WarmError(said.decode() or f"it ended with status {self._nursery.returncode}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the nursery, and every script that it has started."""
        self._control.close()
        self._nursery.wait()

    def start(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
    ) -> Script:
        """Start a script.

        Args:
            command: as for `subprocess.Popen`: this interpreter, then ``-W ACTION``, and ``-m MODULE``, ``-c CODE`` or
                a path, and arguments.
            cwd: the nursery's, if none is given.
            env, stdin, stdout, stderr, text: as there; standard input is empty, unless it is given.

        Raises:
            ValueError: the command is another, or the environment has other values of what is read by imports.
            WarmError: there is no nursery any more.
        """
        wanted = {"OPENBLAS_NUM_THREADS": self._env["OPENBLAS_NUM_THREADS"], **(os.environ if env is None else env)}
        self._check(wanted)
        asked = _asked(command) | {"cwd": os.fspath(cwd or self._cwd), "env": wanted}
        with contextlib.ExitStack() as ours:
            reading, writing = os.pipe()
            ours.callback(os.close, writing)
            try:
                source = os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else os.dup(stdin)
                ours.callback(os.close, source)
                out, out_pipe = _target(stdout, 1, ours, text=text)
                err, err_pipe = _target(stderr, 2, ours, text=text) if stderr != subprocess.STDOUT else (out, None)
                socket.send_fds(self._control, [json.dumps(asked).encode()], [source, out, err, writing])
            except OSError as error:
                os.close(reading)
                raise WarmError(f"the process that starts scripts is gone: {error}") from error
        return Script(command, reading, out_pipe, err_pipe)

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end -> status, and what it wrote: of the script alone, not of what it has left running.

        Raises:
            subprocess.TimeoutExpired: it took longer, and is killed.
            and what `start` raises.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            script = self.start(command, cwd=cwd, env=env, stdout=out, stderr=err)
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
            if name.startswith(_EARLY) and name != "PYTHONPATH" and env.get(name) != self._env.get(name):
                words = f"{env.get(name)!r}, and was {self._env.get(name)!r} where modules were imported"
                raise ValueError(f"{name} is {words}: make another Warm, with that environment")


def _asked(command: Sequence[str]) -> dict[str, Any]:
    """A command line, taken apart. Raises `ValueError`."""
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


def _target(
    wanted: int | IO[Any] | None, number: int, ours: contextlib.ExitStack, *, text: bool
) -> tuple[int, IO[Any] | None]:
    """(what a script writes to, our end of it if it is a pipe)."""
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


# -- the nursery


@dataclass(frozen=True, slots=True)
class _Work:
    """What a fork is to do. `streams`: standard input, output and errors."""

    asked: dict[str, Any]
    streams: list[int]


def _serve(control: socket.socket) -> _Work | None:
    """Fork what is asked for, and say how each ended -> in a fork its work; None: nobody asks any more."""
    children: dict[int, tuple[int, int]] = {}  # by descriptor: pid, and where its end is told
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready != control.fileno():
                waiting.unregister(ready)
                os.close(ready)
                _tell_end(*children.pop(ready))
                continue
            data, given, _, _ = socket.recv_fds(control, _MOST, _STREAMS + 1)
            if not data:
                for pid, _ in children.values():
                    os.kill(pid, signal.SIGKILL)
                for child in children.values():
                    _tell_end(*child)
                return None
            *streams, status = given
            pid = os.fork()
            if not pid:
                control.close()
                for one in (status, *children, *(each for _, each in children.values())):
                    os.close(one)
                return _Work(json.loads(data), streams)
            os.write(status, f"{pid}\n".encode())
            for one in streams:
                os.close(one)
            watched = os.pidfd_open(pid)
            children[watched] = pid, status
            waiting.register(watched, select.POLLIN)


def _tell_end(pid: int, status: int) -> None:
    _, code = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
    os.close(status)


def _become(work: _Work, nursery: int, interrupts: Any) -> None:
    """Be a process of one's own: session, streams, folder, environment, chance. `interrupts`: what SIGINT does."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != nursery:
        os._exit(1)  # it went before it could take this one along
    signal.signal(signal.SIGINT, interrupts)
    for number, stream in enumerate(work.streams):
        os.dup2(stream, number)
    for stream in work.streams:
        os.close(stream)
    os.chdir(work.asked["cwd"])
    os.environ.clear()
    os.environ.update(work.asked["env"])
    # For as long as the process lives, as the interpreter's own.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    for action in work.asked["filters"]:
        warnings.simplefilter(action)


def _run(asked: dict[str, Any]) -> None:
    """The script, as ``__main__``, which it stays until the interpreter ends."""
    what = asked["what"]
    main = types.ModuleType("__main__")
    added = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one not in sys.path]
    first = str(Path.cwd()) if asked["kind"] == "-m" else str(Path(what).resolve().parent)
    sys.path[:0] = ["" if asked["kind"] == "-c" else first, *added]
    if asked["kind"] == "-c":
        name, code = "-c", compile(what, "<string>", "exec")
    elif asked["kind"] == "-m":
        name, code = _module(what, main)
    else:
        name, code = what, compile(Path(what).read_bytes(), what, "exec")
        main.__file__ = what
    sys.argv = [name, *asked["arguments"]]
    sys.modules["__main__"] = main
    exec(code, vars(main))  # noqa: S102  # what ``python`` itself does with a script


def _module(name: str, main: types.ModuleType) -> tuple[str, types.CodeType]:
    """(path, code) of a module that is to be `main`."""
    sys.modules.pop(name, None)  # as where nobody has imported it
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None or spec.origin is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
    code: types.CodeType = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]  # of an InspectLoader
    return spec.origin, code


def _nursery(control: socket.socket, modules: Sequence[str]) -> _Work | None:
    """Import what is to be imported, and serve; see `_serve`."""
    try:
        for module in modules:
            importlib.import_module(module)
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads > 1:
            raise WarmError(f"{threads} threads, and a fork would have one")
    except Exception as error:  # noqa: BLE001  # whoever waits for this is told
        control.send(f"{type(error).__name__}: {error}".encode()[:10_000])
        return None
    gc.collect()
    gc.freeze()  # forks shall not copy what nobody changes
    control.send(b"ready")
    return _serve(control)


def _main() -> None:
    interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever starts scripts
    nursery = os.getpid()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        work = _nursery(control, sys.argv[2:])
    if work is not None:
        _become(work, nursery, interrupts)
        _run(work.asked)


if __name__ == "__main__":
    _main()
