"""A `torch.distributed` process group as ranks that save together: its key-value store is the mailbox.

The store is a clone of the group's own: a connection of its own, so that nothing waits for training's collectives, and
they for nothing here. No call waits in the store, because that would hold the connection.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist

from ckptstore.errors import MailboxError, MissingDependencyError, UsageError

__all__ = ["StoreMailbox", "process_group"]


class StoreMailbox:
    """A `torch.distributed` store as a mailbox, for all threads of a process.

    A `write.ranks.messages.key_value_store.Mailbox`.
    One connection, one call at a time: each takes some 60 us. A connection for each thread would have to be made while
    a term is being opened, and torch connects to a host that is gone for as long as the group's time-out says.
    """

    def __init__(self, store: Any) -> None:
        """
        Args:
            store: a `torch.distributed.Store`, used by nobody else.
        """
        self._store = store
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """See `Mailbox.set`."""
        with self._call():
            self._store.set(key, value)
            self._store.check([key])  # answered after it: a set by itself is only on its way when it returns

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`."""
        with self._call():
            return bytes(self._store.get(key)) if self._store.check([key]) else None

    def has(self, keys: list[str]) -> bool:
        """See `Mailbox.has`."""
        with self._call():
            return not keys or bool(self._store.check(keys))

    def delete(self, key: str) -> None:
        """See `Mailbox.delete`."""
        with self._call():
            self._store.delete_key(key)

    def clone(self) -> Self:
        """See `Mailbox.clone`: itself."""
        return self

    @contextmanager
    def _call(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except RuntimeError as error:
            raise _gone(error) from error


def _gone(error: RuntimeError) -> MailboxError:
    why = str(error).partition("\n")[0]
    return MailboxError(
        f"the process group's store cannot be reached: {why}; it lives with its host (rank 0, or torchrun's agent): "
        "form the group again, and open a new writer"
    )


def process_group(group: Any) -> tuple[int, int, StoreMailbox]:
    """Rank, size and mailbox of a process group.

    Raises:
        MissingDependencyError: this torch does not let anyone use a group's store.
        UsageError: it is none, or this process is not in it.
        MailboxError: its store cannot be reached.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"group={group!r:.80}: a torch.distributed process group is needed (dist.group.WORLD, once "
            "init_process_group was called)"
        )
    if not hasattr(dist.ProcessGroup, "get_group_store"):
        raise MissingDependencyError(
            f"group= needs torch 2.9 or newer, and this is torch {torch.__version__}, which does not give anyone the "
            "key-value store of a process group: update torch, or save from one rank"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError("group=: this process is not in that group")
    try:
        store: Any = group.get_group_store()  # torch's stubs know no clone
        clone = store.clone()
    except (AttributeError, RuntimeError) as error:
        raise MailboxError(f"the process group's store cannot be reached: {error}") from error
    return rank, dist.get_world_size(group), StoreMailbox(clone)
