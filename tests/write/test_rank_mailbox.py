"""Mailboxes: the suite against threads and against torch's stores."""

from __future__ import annotations

import pytest

from ckptstore.errors import MailboxError
from ckptstore.write.ranks.messages import key_value_store
from ckptstore.write.ranks.messages.key_value_store import LocalMailbox, ReplyDeadline
from tests.write.mailbox_conformance import Boxes, MailboxConformance


class TestLocalMailbox(MailboxConformance):
    @pytest.fixture
    def boxes(self) -> Boxes:
        box = LocalMailbox()
        return box, box.clone()

    def test_one_that_is_gone_fails_every_call(self) -> None:
        box = LocalMailbox()
        box.die()
        for call in (
            lambda: box.get("k"),
            lambda: box.has([]),
            lambda: box.set("k", b""),
            lambda: box.delete("k"),
        ):
            with pytest.raises(MailboxError):
                call()


class Waiting:
    """A clock that only sleeping puts forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.looks = 0.0, 0
        monkeypatch.setattr(key_value_store, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self, arrives: float) -> bool:
        self.looks += 1
        return self.now >= arrives


@pytest.mark.parametrize(
    ("arrives", "looks"), [(0.0, 1), (0.0005, 2), (0.005, 11), (0.02, 23), (0.1, 37), (1.0, 61), (10.0, 241)]
)
def test_a_letter_is_found_an_eighth_later_than_it_came_at_most(
    monkeypatch: pytest.MonkeyPatch, arrives: float, looks: int
) -> None:
    monkeypatch.setattr(key_value_store, "LONGEST_PAUSE", 0.05)  # tests have a shorter one
    clock = Waiting(monkeypatch)
    assert ReplyDeadline(60).wait(lambda: clock.look(arrives))
    assert clock.now <= arrives + min(0.05, max(0.0005, arrives / 8)) + 1e-9
    assert clock.looks <= looks, "each is a request to the host of the store"


def test_ranks_that_wait_for_long_look_a_thousand_times_a_second_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (50, 500, 5000):
        clock = Waiting(monkeypatch)
        assert ReplyDeadline(1e6, ranks=ranks).wait(lambda: clock.look(1000.0))  # noqa: B023
        assert clock.now <= 1000 + 1000 / 8
        assert ranks * clock.looks <= 1.05 * 1000 * 1000 + 80 * ranks, "80 each before the longest pause"


def test_what_came_while_this_process_was_stopped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for hours, between a look and the next line."""
    clock = Waiting(monkeypatch)

    def look() -> bool:
        found = clock.look(1.0)
        clock.now += 10_000
        return found

    assert ReplyDeadline(60).wait(look)
    assert not ReplyDeadline(60).wait(lambda: clock.look(1e9))


class TestTcpStore(MailboxConformance):
    @pytest.fixture
    def boxes(self) -> Boxes:
        dist = pytest.importorskip("torch.distributed")
        from ckptstore.frameworks.torch_ranks import StoreMailbox

        host = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        guest = dist.TCPStore("127.0.0.1", host.port, 2, is_master=False)
        return StoreMailbox(dist.PrefixStore("a", host)), StoreMailbox(dist.PrefixStore("a", guest))


def test_a_store_whose_host_is_gone_says_so() -> None:
    dist = pytest.importorskip("torch.distributed")
    from ckptstore.frameworks.torch_ranks import StoreMailbox

    host = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    box = StoreMailbox(dist.TCPStore("127.0.0.1", host.port, 2, is_master=False))
    box.set("k", b"1")
    del host
    with pytest.raises(MailboxError, match="form the group again"):
        box.get("k")
    with pytest.raises(MailboxError):
        box.set("k", b"2")
