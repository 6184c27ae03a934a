"""A trainer's connection, with the test at its other end: answers, refusals, and a process that is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ckptstore.agent.client.agent_link import AgentLink
from ckptstore.agent.client.process_state import stopped
from ckptstore.agent.protocol.frames import Channel, Message
from ckptstore.agent.protocol.message_fields import error_form
from ckptstore.errors import AgentLostError, AgentSilentError, StorageError
from tests import warmth
from tests.agent.lives import until

SECONDS = 30


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A substitute for the agent's process."""
    with subprocess.Popen(["sleep", "600"]) as found:
        yield found
        found.kill()


class Ends:
    """Both ends of a connection."""

    def __init__(self, pid: int) -> None:
        ours, theirs = socket.socketpair()
        self.lost: list[BaseException] = []
        self.link = AgentLink(Channel(ours, pid=pid), lambda _: None, self.lost.append)
        self.agent = Channel(theirs)

    def heard(self) -> dict[str, Any]:
        found = self.agent.receive()
        assert isinstance(found, Message)
        return found.body


@pytest.fixture
def ends(process: subprocess.Popen[bytes]) -> Iterator[Ends]:
    found = Ends(process.pid)
    yield found
    found.link.close()
    until(lambda: bool(found.lost))
    found.agent.close()


def test_each_answer_goes_to_whom_asked_and_an_error_is_raised(ends: Ends) -> None:
    first, second = ends.link.ask("one"), ends.link.ask("two", number=2)
    assert ends.heard() == {"do": "one", "id": 0}
    assert ends.heard() == {"do": "two", "id": 1, "number": 2}
    ends.agent.post({"re": 1, "error": error_form(StorageError("full"))})
    ends.agent.post({"re": 0, "found": 7})
    assert first.result(SECONDS).body["found"] == 7
    with pytest.raises(StorageError, match="full"):
        second.result(SECONDS)


def test_a_request_after_the_end_fails_at_once(ends: Ends) -> None:
    before = ends.link.ask("one")
    ends.agent.hang_up()
    assert isinstance(before.exception(SECONDS), AgentLostError)
    assert isinstance(ends.link.lost, AgentLostError)
    assert isinstance(ends.link.ask("two").exception(0), AgentLostError)


def test_nothing_is_asked_of_a_process_that_is_stopped_but_to_let_go(
    ends: Ends, process: subprocess.Popen[bytes]
) -> None:
    asked = ends.link.ask("one")
    ends.link.give_up()
    assert not asked.done(), "it runs"
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: stopped(process.pid) is not None)
    quiet: list[BaseException] = []
    late: list[dict[str, Any]] = []
    ends.link.quiet, ends.link.late = quiet.append, lambda _, message: late.append(message.body)
    ends.link.give_up()
    assert isinstance(asked.exception(0), AgentSilentError)
    assert [type(error) for error in quiet] == [AgentSilentError]
    assert isinstance(ends.link.ask("two").exception(0), AgentSilentError)
    released = ends.link.ask("release")
    assert [ends.heard()["do"] for _ in range(2)] == ["one", "release"]
    os.kill(process.pid, signal.SIGCONT)
    ends.agent.post({"re": 0, "found": 7})
    ends.agent.post({"re": 1})
    assert released.result(SECONDS).body == {"re": 1}
    assert late == [{"re": 0, "found": 7}], "nobody waits for it any more"
    ends.link.ask("three")
    assert ends.heard()["do"] == "three"


KILLED = """
import os, signal, socket, sys
from ckptstore.agent.protocol.frames import Channel
channel = Channel(socket.socket(fileno=0), pid=os.getppid())
channel.post({"number": 0})  # its threads have started
sys.setswitchinterval(1000)  # from now on they do not run, as on a machine that is busy
for number in range(1, 4):
    channel.post({"number": number})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_process_has_posted_arrives_even_if_it_is_killed_then() -> None:
    """A trainer that is killed loses no step that it had given, however little its threads ran."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = warmth.start([sys.executable, "-c", KILLED], stdin=theirs.fileno())
    channel = Channel(ours, pid=process.pid)
    found = []
    while isinstance(message := channel.receive(), Message):
        found.append(message.body["number"])
    assert found == [0, 1, 2, 3]
    assert process.wait(SECONDS) == -signal.SIGKILL
    channel.close()


def test_messages_that_the_socket_does_not_take_at_once_arrive_in_order(ends: Ends) -> None:
    long = "x" * (1 << 20)
    for number in range(4):
        ends.link.ask("long", text=long)
        ends.link.ask("short", number=number)
    for number in range(4):
        assert ends.heard()["text"] == long
        assert ends.heard()["number"] == number


def test_an_interrupted_request_that_was_sent_is_given_back(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C just after the message has left: its answer comes, and nobody waits for it."""
    post, late = Channel.post, threading.Event()

    def interrupted(self: Channel, body: dict[str, Any], descriptor: int | None = None) -> None:
        post(self, body, descriptor)
        raise KeyboardInterrupt

    ends.link.late = lambda _, message: late.set() if message.body["buffer"] == 7 else None
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ends.link.ask("buffer", layout=0)
    ends.agent.post({"re": ends.heard()["id"], "buffer": 7})
    assert late.wait(SECONDS)
