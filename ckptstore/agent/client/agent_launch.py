"""Starts an agent, or finds a running one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ckptstore.agent.client.agent_link import AgentLink
from ckptstore.agent.client.process_state import stopped
from ckptstore.agent.protocol.agent_address import AgentAddress
from ckptstore.agent.protocol.frames import PROTOCOL, Channel
from ckptstore.agent.protocol.message_fields import read_warning
from ckptstore.errors import AgentError, AgentLostError, AgentSilentError
from ckptstore.host import background_threads

__all__ = ["RunningAgent", "find_agent", "start_agent"]

_END_SECONDS: Final = 30.0


class RunningAgent:
    """An agent that has answered.

    Attributes:
        link: the connection.
        greeting: its first answer.
        process: the process, if this process started it.
    """

    def __init__(
        self, link: AgentLink, greeting: dict[str, Any], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.link = link
        self.greeting = greeting
        self.process = process

    def warnings(self) -> list[tuple[type[Warning], str]]:
        """The warnings in its greeting."""
        return [read_warning(one) for one in self.greeting.get("warnings", ())]

    def let_go(self) -> None:
        """Disconnect without a wait: the agent ends later."""
        self.link.close()
        if self.process is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                background_threads.start(self.process.wait, "agent-ending")

    def await_exit(self) -> None:
        """Disconnect, and wait a while until the agent has ended. A stopped agent is not waited for."""
        self.link.close()
        if stopped(self.link.pid) is not None:
            self.let_go()
            return
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)
            return
        with contextlib.suppress(OSError):  # it has ended already
            process = os.pidfd_open(self.link.pid)
            try:
                select.select([process], [], [], _END_SECONDS)
            finally:
                os.close(process)


OnEvent = Callable[[dict[str, Any]], None]
OnLost = Callable[[BaseException], None]


def start_agent(
    place: AgentAddress, body: dict[str, Any], told: OnEvent, lost: OnLost, descriptors: Sequence[int] = ()
) -> RunningAgent:
    """Start an agent.

    Args:
        place: its address.
        body: members of the ``start`` message of docs/agent.md.
        told, lost: see `AgentLink`.
        descriptors: further descriptors to inherit, under their numbers.

    Raises:
        AgentError: it cannot be started, or serves another trainer.
        and what opening the store for writing raises.
    """
    startup = Path(__file__).parents[1] / "startup.py"
    if not startup.is_file():
        raise AgentError(
            f"cannot start an agent: {startup} is not a file (is ckptstore imported from a zip archive?); an agent is "
            "a process that runs this file: install ckptstore, or unpack the archive, or save without an agent"
        )
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    log = place.log()
    try:
        command = [*_python(), str(startup), str(its.fileno()), json.dumps(_paths())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[its.fileno(), *descriptors],
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise AgentError(f"no agent can be started: {error}") from error
    finally:
        its.close()
        os.close(log)
    link = AgentLink(Channel(ours, pid=process.pid), told, lost)
    try:
        greeting = link.call("start", protocol=PROTOCOL, **body)
    except AgentSilentError:
        link.close()
        process.kill()  # it has no state yet
        process.wait()
        raise
    except AgentLostError as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        words = place.last_words()
        raise AgentError(f"the agent ended before it answered (status {process.returncode}): {words}") from error
    except BaseException:
        link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        raise
    return RunningAgent(link, greeting, process)


def _python() -> list[str]:
    """The interpreter with the options of this one that decide what is imported; never with a script's folder."""
    command = [sys.executable, "-P"]
    if sys.flags.isolated:
        command.append("-I")
    elif sys.flags.ignore_environment:
        command.append("-E")
    if sys.flags.no_user_site and not sys.flags.isolated:
        command.append("-s")
    return command


def _paths() -> list[str]:
    """The folders where this process finds packages, which the agent searches last; without the script's folder."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    left_out = {Path.cwd(), *([] if main is None else [Path(main).resolve().parent])}
    return [path for path in sys.path if path and Path(path).is_absolute() and Path(path) not in left_out]


def find_agent(place: AgentAddress, told: OnEvent, lost: OnLost) -> RunningAgent | None:
    """Find the agent that an earlier trainer left; None: there is none.

    Raises:
        AgentBusyError: it serves a live trainer.
        AgentError: it speaks another protocol.
    """
    connection = place.connect()
    if connection is None:
        return None
    link = AgentLink(Channel(connection), told, lost)
    try:
        return RunningAgent(link, link.call("hello", protocol=PROTOCOL))
    except AgentLostError:
        return None  # it ended at this moment
    except BaseException:
        link.close()
        raise
