"""Buffers of an agent that dies at the worst moment."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from ckptstore.agent.client.buffer_client import BufferClient
from ckptstore.agent.protocol.frames import Message
from ckptstore.agent.protocol.message_fields import StateLayout
from ckptstore.errors import AgentLostError


class Dying:
    """A link to an agent that is gone, and forgotten, when its last answer is checked."""

    pid = 4711

    def __init__(self, lending: BufferClient) -> None:
        self._lending = lending

    def call(self, do: str, **fields: Any) -> dict[str, Any]:
        assert (do, fields) == ("layout", {"tensors": []})
        return {"offsets": [], "layout": 1}

    def ask(self, do: str, **_: Any) -> Future[Message]:
        assert do in ("buffer", "beside")
        self._lending.forget()  # by the thread that detects its end
        answer: Future[Message] = Future()
        answer.set_result(Message({"buffer": 0}))  # a buffer that was mapped before
        return answer

    def answer(self, asked: Future[Message]) -> Message:
        return asked.result()


def test_an_agent_that_dies_after_lending_a_buffer_is_lost() -> None:
    lending = BufferClient()
    link: Any = Dying(lending)
    with pytest.raises(AgentLostError, match=r"process 4711\) is gone"):
        lending.lend(link, StateLayout(()))
    with pytest.raises(AgentLostError, match=r"process 4711\) is gone"):
        lending.lend_beside(link, 10)
