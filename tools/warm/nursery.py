"""The nursery: one thread that imports the modules of scripts, and forks them. `tools.warm.starting` starts it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import os
import random
import select
import signal
import socket
import sys
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.warm.script import MOST, WarmError

_PDEATHSIG: Final = 1
_STREAMS: Final = 3
_FAILED_FLUSH: Final = 120
"""The interpreter's exit status if its standard output cannot be flushed."""
_ended: int | None = None
"""The exit status of a fork whose script has ended; None: the interpreter ends it as usual."""


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of a fork. `streams`: standard input, output and errors."""

    asked: dict[str, Any]
    streams: list[int]


def _serve(control: socket.socket) -> _Work | None:
    """Fork on request, and report how each ended -> in a fork its work; None: no more requests."""
    children: dict[int, tuple[int, int]] = {}  # by descriptor: pid, and where its end is reported
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready != control.fileno():
                waiting.unregister(ready)
                os.close(ready)
                _tell_end(*children.pop(ready))
                continue
            data, given, _, _ = socket.recv_fds(control, MOST, _STREAMS + 1)
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
    """Become a separate process: session, streams, folder, environment, random state. `interrupts`: the action of
    SIGINT."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != nursery:
        os._exit(1)  # it died before it could end this one, too
    signal.signal(signal.SIGINT, interrupts)
    for number, stream in enumerate(work.streams):
        os.dup2(stream, number)
    for stream in work.streams:
        os.close(stream)
    os.chdir(work.asked["cwd"])
    os.environ.clear()
    os.environ.update(work.asked["env"])
    # Open for the life of the process, like the interpreter's own.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if (points := sys.modules.get("ckptstore.host.crash_points")) is not None:  # its import read the nursery's variable
        place, _, count = os.environ.get("CKPTSTORE_CRASH_AT", "").partition(":")
        points.arm(place, int(count or 1))
    for action in work.asked["filters"]:
        warnings.simplefilter(action)


def _run(asked: dict[str, Any]) -> None:
    """Run the script as ``__main__``, which it stays until the interpreter ends."""
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
    """(path, code) of a module that becomes `main`."""
    sys.modules.pop(name, None)  # as if nobody had imported it
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None or spec.origin is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
    code: types.CodeType = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]  # of an InspectLoader
    return spec.origin, code


def _nursery(control: socket.socket, modules: Sequence[str]) -> _Work | None:
    """Import the modules, and serve; see `_serve`."""
    try:
        for module in modules:
            importlib.import_module(module)
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads > 1:
            raise WarmError(f"{threads} threads, and a fork would have one")
    except Exception as error:  # noqa: BLE001  # the waiting caller gets it
        control.send(f"{type(error).__name__}: {error}".encode()[:10_000])
        return None
    gc.collect()
    gc.freeze()  # forks must not copy unchanged objects
    control.send(b"ready")
    return _serve(control)


def _run_to_end(asked: dict[str, Any]) -> None:
    """Run the script, and note its exit status for `_leave`."""
    global _ended
    status: int | None = 1
    try:
        _run(asked)
        status = 0
    except SystemExit as error:
        code = error.code
        status = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        raise
    except KeyboardInterrupt:
        status = None  # a signal ends the interpreter
        raise
    finally:
        _ended = None if asked["teardown"] else status


def _leave() -> None:
    """End a fork after all other handlers.

    Prevents: a teardown of the nursery's modules, whose memory every fork would copy first: 0.3 s of a core.
    """
    if _ended is None:
        return
    status = _ended
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the script has closed it
            status = _FAILED_FLUSH if stream is sys.stdout and not stream.closed else status
    os._exit(status)


def _main() -> None:
    atexit.register(_leave)  # before any module registers a handler: the last one comes first
    interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that starts scripts
    nursery = os.getpid()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        work = _nursery(control, sys.argv[2:])
    if work is not None:
        _become(work, nursery, interrupts)
        _run_to_end(work.asked)


if __name__ == "__main__":
    _main()
