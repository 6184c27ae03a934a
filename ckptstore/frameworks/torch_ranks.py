"""Let the ranks of a `torch.distributed` process group save together, with the group's key-value store as mailbox.

The store is cloned, which makes a separate connection. So saves and the collectives of training do not wait for each
other. No call waits inside the store, because it would occupy the connection.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist

from ckptstore.errors import MailboxError, MissingDependencyError, UsageError

__all__ = ["StoreMailbox", "process_group"]


class StoreMailbox:
    """A `torch.distributed` store as a mailbox, for all threads of a process.

    It uses one connection, one call at a time; a call takes about 60 us. Connections per thread would have to be made
    while a term is being opened. If the host is gone, torch tries to connect until the group's timeout.
    """

    def __init__(self, store: Any) -> None:
        """
        Args:
            store: a `torch.distributed.Store` that is not used elsewhere.
        """
        self._store = store
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """See `Mailbox.set`."""
        with self._call():
            self._store.set(key, value)
            self._store.check([key])  # waits for the set: `set` alone returns before the store has the value

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """See `Mailbox.set_all`."""
        keys = list(values)
        with self._call():
            self._store.multi_set(keys, list(values.values()))
            self._store.check(keys[-1:])

    def get_all(self, keys: list[str]) -> list[bytes] | None:
        """See `Mailbox.get_all`."""
        with self._call():
            return [bytes(value) for value in self._store.multi_get(keys)] if self._store.check(keys) else None

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
        """See `Mailbox.clone`. Returns itself."""
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
        f"the process group's store cannot be reached: {why}; it ends with its host (rank 0, or torchrun's agent): "
        "form the group again, and open a new writer"
    )


def process_group(group: Any) -> tuple[int, int, StoreMailbox]:
    """Rank, size and mailbox of a process group.

    Raises:
        MissingDependencyError: this version of torch gives no access to a group's store.
        UsageError: `group` is not a process group, or this process is not in it.
        MailboxError: the group's store cannot be reached.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"group={group!r:.80}: pass a torch.distributed process group (dist.group.WORLD, after init_process_group)"
        )
    if not hasattr(dist.ProcessGroup, "get_group_store"):
        raise MissingDependencyError(
            f"group= needs torch 2.9 or newer: torch {torch.__version__} gives no access to the key-value store of a "
            "process group; update torch, or save from one rank"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError("group=: this process is not in that group")
    try:
        store: Any = group.get_group_store()  # torch's stubs lack `clone`
        clone = store.clone()
    except (AttributeError, RuntimeError) as error:
        raise MailboxError(f"the process group's store cannot be reached: {error}") from error
    return rank, dist.get_world_size(group), StoreMailbox(clone)
