"""Mailboxes: the suite against threads and against torch's stores."""

from __future__ import annotations

import pytest

from ckptstore.errors import MailboxError
from ckptstore.write.ranks.messages.key_value_store import LocalMailbox
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
