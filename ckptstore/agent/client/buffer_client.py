"""Borrows buffers of the agent: maps each once, lets the trainer fill it, and returns it with a save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from ckptstore.agent.client.agent_link import AgentLink
from ckptstore.agent.protocol.frames import Message
from ckptstore.agent.protocol.message_fields import StateLayout
from ckptstore.agent.protocol.shared_memory import SharedMemory
from ckptstore.errors import AgentError, AgentLostError, AgentSilentError
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.write.capture.snapshot import HostTensor, Snapshot

__all__ = ["BorrowedBuffer", "BufferClient"]


class BorrowedBuffer:
    """A buffer that this process may fill, until it is saved or given back.

    Attributes:
        link: the connection to the agent that lent it.
        number: its number at the agent.
        memory: its memory.
        layout: layout of the state that it is for.
        waited: seconds until the agent lent it.
    """

    def __init__(
        self, link: AgentLink, number: int, memory: Bytes, layout: StateLayout, known: _KnownLayout | None = None
    ) -> None:
        self.link = link
        self.number = number
        self.memory = memory
        self.layout = layout
        self.waited = 0.0
        self._known = known
        self._open = True

    @property
    def offsets(self) -> Sequence[int]:
        """First byte of each tensor, in their order; the same list as long as the agent knows the layout."""
        assert self._known is not None  # of a state
        return self._known.offsets

    def place(self, name: str) -> Bytes:
        """The memory of a tensor."""
        assert self._known is not None  # of a state
        start = self._known.offsets[self.layout.numbers[name]]
        return self.memory[start : start + self.layout.tensors[self.layout.numbers[name]].nbytes]

    def snapshot(self, flat: FlatState) -> Snapshot:
        """The buffer as an unfilled snapshot of `flat`. Freeing the snapshot gives the buffer back."""
        tensors: dict[str, TensorSource] = {
            name: HostTensor(one, self.place(name)) for name, one in flat.tensors.items()
        }
        return Snapshot(LaidOutState(flat.tree, tensors, ()), lambda: None, self.give_back)

    def save(self, body: dict[str, Any], failed: Callable[[BaseException], None]) -> None:
        """Give the filled buffer to the agent.

        Args:
            body: members of the ``save`` message.
            failed: called with the error, if the agent refuses.
        """
        assert self._known is not None  # of a state

        def answered(answer: Future[Message]) -> None:
            if (error := answer.exception()) is not None:
                failed(error)

        asked = self.link.ask("save", buffer=self.number, layout=self._known.number, **body)
        self._open = False
        asked.add_done_callback(answered)

    def give_back(self) -> None:
        """Return the buffer unfilled. Does nothing if it was saved; raises nothing."""
        if self._open:
            self._open = False
            self.link.ask("release", buffer=self.number)


class _KnownLayout:
    """A layout that the agent knows: its number, and the first byte of each tensor."""

    def __init__(self, number: int, offsets: list[int]) -> None:
        self.number = number
        self.offsets = offsets


class BufferClient:
    """The mapped buffers of one agent, and the layout that it was sent last. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[int, SharedMemory] = {}
        self._layout: StateLayout | None = None
        self._known: _KnownLayout | None = None

    def forget(self) -> None:
        """The agent is gone: drop the mappings and the layout. Memory that is still used stays mapped until it is not.

        Unmapping also ends its registration with devices.
        """
        with self._lock:
            self._maps.clear()
            self._layout = self._known = None

    def number_of(self, link: AgentLink, layout: StateLayout) -> int:
        """The agent's number of a layout. Raises as `lend`."""
        return self._layout_at_agent(link, layout).number

    def prepare(self, link: AgentLink, layout: StateLayout, count: int) -> None:
        """Ask the agent to allocate and touch `count` buffers. Does not wait for that."""
        known = self._layout_at_agent(link, layout)
        link.ask("prepare", layout=known.number, count=count)

    def lend(self, link: AgentLink, layout: StateLayout) -> BorrowedBuffer:
        """Wait for a buffer for a state.

        Raises:
            AgentLostError: the agent is gone.
            AgentError: its answer is invalid.
            MemoryError: there is not enough memory.
        """
        began = time.monotonic()
        known = self._layout_at_agent(link, layout)
        lent = self._lent(link, link.ask("buffer", layout=known.number), layout, known)
        if len(lent.memory) < max(
            (start + one.nbytes for start, one in zip(known.offsets, layout.tensors, strict=True)), default=0
        ):
            raise AgentError("the agent's buffer is too small for the layout")
        lent.waited = time.monotonic() - began
        return lent

    def lend_beside(self, link: AgentLink, nbytes: int) -> BorrowedBuffer:
        """Wait for a buffer for gradients. Raises as `lend`."""
        lent = self._lent(link, link.ask("beside", nbytes=nbytes), StateLayout(()), None)
        if len(lent.memory) < nbytes:
            raise AgentError("the agent's buffer is too small")
        return lent

    def _layout_at_agent(self, link: AgentLink, layout: StateLayout) -> _KnownLayout:
        with self._lock:
            if self._known is None or self._layout != layout:
                answer = link.call("layout", tensors=layout.rows())
                if len(answer["offsets"]) != len(layout.tensors):
                    raise AgentError("the agent answered for another layout")
                self._layout, self._known = layout, _KnownLayout(answer["layout"], answer["offsets"])
            return self._known

    def _lent(
        self, link: AgentLink, asked: Future[Message], layout: StateLayout, known: _KnownLayout | None
    ) -> BorrowedBuffer:
        try:
            message = link.answer(asked)
        except (AgentLostError, AgentSilentError):
            raise
        except BaseException:  # Ctrl-C: the buffer still comes, and is given back then
            asked.add_done_callback(partial(self._unwanted, link))
            raise
        number = self._mapped(message)
        mapped = self._maps.get(number)
        if mapped is None:  # `forget` was quicker: the agent died after its answer
            raise AgentLostError(f"the agent (process {link.pid}) is gone")
        return BorrowedBuffer(link, number, mapped.memory, layout, known)

    def _mapped(self, message: Message) -> int:
        """Map the buffer of an answer -> its number. Its descriptor comes only the first time."""
        number: int = message.body["buffer"]
        if message.descriptor is not None:
            descriptor, message.descriptor = message.descriptor, None
            shared = SharedMemory(descriptor, message.body["nbytes"])
            shared.close()
            self._maps[number] = shared
        return number

    def _unwanted(self, link: AgentLink, answer: Future[Message]) -> None:
        if answer.exception() is None:
            self.late(link, answer.result())

    def late(self, link: AgentLink, message: Message) -> None:
        """Give back a buffer that nobody waits for any more, and keep its mapping."""
        if "buffer" in message.body:
            link.ask("release", buffer=self._mapped(message))
