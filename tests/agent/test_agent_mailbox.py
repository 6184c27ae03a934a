"""The mailbox of a job's agents: the suite of mailboxes through a Unix socket, access control, missing ranks."""

from __future__ import annotations

import hmac
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.agent.server.socket_mailbox import RemoteMailbox, ServedMailbox
from ckptstore.errors import AgentLostError, MailboxError
from tests.agent.lives import until
from tests.write.mailbox_conformance import Boxes, MailboxConformance

TOKEN = b"t" * 32


class Host:
    """Rank 0's side of a job of three."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "box")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(8)
        self.lost: list[str] = []
        self.served = ServedMailbox(listener, TOKEN, 3, self.lost.append)
        self.heard: list[str] = []

    def guest(self, rank: int = 1, token: bytes = TOKEN) -> RemoteMailbox:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        return RemoteMailbox(connection, token, rank, self.heard.append)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.served.close()


class TestServed(MailboxConformance):
    @pytest.fixture
    def boxes(self, host: Host) -> Boxes:
        return host.served.box, host.guest()


class TestGuests(MailboxConformance):
    @pytest.fixture
    def boxes(self, host: Host) -> Boxes:
        return host.guest(1), host.guest(2)


def test_a_peer_with_another_token_is_refused(host: Host) -> None:
    with pytest.raises(MailboxError):
        host.guest(token=b"x" * 32)
    with pytest.raises(MailboxError):
        host.guest(rank=3)  # of a job of three
    assert host.lost == []  # nobody waits for foreign processes
    host.guest().set("k", b"v")
    assert host.served.box.get("k") == b"v"


def test_a_host_without_the_token_is_refused() -> None:
    ours, its = socket.socketpair()

    def pretend() -> None:
        with its:
            its.sendall(bytes(32))
            its.recv(68, socket.MSG_WAITALL)
            its.sendall(bytes(32))

    threading.Thread(target=pretend).start()
    with pytest.raises(MailboxError, match="not the agent of this job"):
        RemoteMailbox(ours, TOKEN, 1, lambda _: None)


def test_a_rank_that_is_gone_is_missed_and_one_that_took_leave_is_not(host: Host) -> None:
    host.guest(1).close(farewell=True)
    until(lambda: not host.served.here)
    host.served.check()
    host.guest(2).close(farewell=False)
    until(lambda: bool(host.lost))
    assert host.lost == ["the agent of rank 2 is gone"]
    with pytest.raises(AgentLostError, match="rank 2"):
        host.served.check()
    host.served.box.set("k", b"what is there is there still")


@pytest.mark.parametrize("operation", range(6))
def test_a_rank_that_sends_no_whole_request_is_missed(host: Host, operation: int) -> None:
    """No keys, where one is required (1: asks for a value), or an unknown operation (5)."""
    guest = socket.socket(socket.AF_UNIX)
    guest.connect(host.path)
    nonce, rank = guest.recv(32, socket.MSG_WAITALL), struct.pack(">I", 1)
    guest.sendall(bytes(32) + rank + hmac.digest(TOKEN, b"rank" + nonce + rank, "sha256"))
    guest.recv(32, socket.MSG_WAITALL)
    guest.sendall(struct.pack(">IBH", 3, operation, 0))
    answered = bool(guest.recv(9))
    guest.close()
    until(lambda: not host.served.here, 10)
    assert answered == (operation in (2, 4))  # the query for a missing key, and a farewell
    if operation != 4:
        until(lambda: bool(host.lost), 10)
        assert host.lost == ["the agent of rank 1 is gone"]


def test_an_invalid_request_ends_only_its_connection(host: Host) -> None:
    other = host.guest(2)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(host.path)
    stranger.recv(32, socket.MSG_WAITALL)
    stranger.sendall(bytes(200))
    stranger.close()
    other.set("k", b"v")
    assert host.served.box.get("k") == b"v"
