"""The requirements on every `Mailbox`, as one suite: subclass `MailboxConformance`, and give a fixture `boxes` of two
ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ckptstore.errors import FormatError, MailboxError
from ckptstore.write.ranks.messages.key_value_store import (
    LETTER_LIMIT,
    PIECE,
    Mailbox,
    ReplyDeadline,
    fetch,
    fetch_all,
    post,
    withdraw,
    withdraw_known,
)

Boxes = tuple[Mailbox, Mailbox]


class MailboxConformance:
    """The suite."""

    def test_one_ranks_value_reaches_the_other(self, boxes: Boxes) -> None:
        one, other = boxes
        assert other.get("a/b") is None
        assert not other.has(["a/b"])
        one.set("a/b", b"\x00\xff binary\x00")
        assert other.get("a/b") == b"\x00\xff binary\x00"
        one.set("a/b", b"")
        assert other.get("a/b") == b""
        assert other.has(["a/b"])
        assert not other.has(["a/b", "missing"])
        assert other.has([])

    def test_values_are_set_and_read_together(self, boxes: Boxes) -> None:
        one, other = boxes
        one.set_all({"a": b"1", "b": b"", "c": b"x" * PIECE})
        assert other.get_all(["b", "a"]) == [b"", b"1"]
        assert other.get_all(["a", "missing"]) is None
        post(one, "letter", b"y" * (PIECE + 1), {"after": b"2"})
        post(one, "short", b"z", {"after": b"3"})
        assert fetch_all(other, ["letter", "short"]) == [b"y" * (PIECE + 1), b"z"]
        assert fetch_all(other, ["letter", "none"]) is None
        assert other.get("after") == b"3"
        withdraw_known(other, {"letter": PIECE + 1, "short": 1})
        assert not any(one.has([key]) for key in ("letter", "letter.0", "letter.1", "short"))

    def test_a_deleted_value_is_gone_and_may_be_set_again(self, boxes: Boxes) -> None:
        one, other = boxes
        one.set("k", b"1")
        other.delete("k")
        other.delete("k")
        assert one.get("k") is None
        one.set("k", b"2")
        assert other.get("k") == b"2"

    @pytest.mark.parametrize("length", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
    def test_letters_of_any_length_arrive_whole_and_leave_nothing(self, boxes: Boxes, length: int) -> None:
        one, other = boxes
        letter = bytes(range(256)) * (length // 256) + b"x" * (length % 256)
        assert fetch(other, "letter") is None
        post(one, "letter", letter)
        assert fetch(other, "letter") == letter
        withdraw(other, ["letter", "none"])
        assert fetch(one, "letter") is None
        assert not any(one.has([f"letter.{number}"]) for number in range(4))

    def test_a_letter_that_lost_a_piece_is_not_taken_for_whole(self, boxes: Boxes) -> None:
        one, other = boxes
        post(one, "letter", b"a" * (2 * PIECE))
        one.delete("letter.1")
        with pytest.raises(FormatError, match="not whole"):
            fetch(other, "letter")
        one.set("letter.1", b"b" * PIECE)  # another message's
        with pytest.raises(FormatError, match="not whole"):
            fetch(other, "letter")
        withdraw(one, ["letter"])

    def test_an_invalid_message_is_refused_at_once(self, boxes: Boxes) -> None:
        one, other = boxes
        one.set("letter", b"short")
        with pytest.raises(FormatError, match="not a letter"):
            fetch(other, "letter")
        one.set("letter", (1 << 62).to_bytes(8, "little") + bytes(8))  # no rank looks for so many pieces
        with pytest.raises(FormatError, match="bytes"):
            fetch(other, "letter")

    def test_a_message_that_is_too_long_is_refused(self, boxes: Boxes) -> None:
        class Long(bytes):
            def __len__(self) -> int:
                return LETTER_LIMIT + 1

        with pytest.raises(MailboxError, match="at most"):
            post(boxes[0], "letter", Long())

    def test_threads_with_clones_do_not_disturb_each_other(self, boxes: Boxes) -> None:
        one, other = boxes
        errors: list[BaseException] = []

        def chat(mine: Callable[[], Mailbox], name: str) -> None:
            try:
                box = mine()
                for number in range(100):
                    box.set(name, str(number).encode())
                    assert box.get(name) == str(number).encode()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [
            threading.Thread(target=chat, args=(box.clone, f"chat-{place}-{again}"))
            for place, box in enumerate((one, other))
            for again in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not errors

    def test_waiting_ends_when_it_comes_or_when_the_time_is_over(self, boxes: Boxes) -> None:
        one, other = boxes
        assert not ReplyDeadline(0.05).wait(lambda: other.has(["late"]))
        threading.Timer(0.05, lambda: one.clone().set("late", b"")).start()
        assert ReplyDeadline(120).wait(lambda: other.has(["late"]))
