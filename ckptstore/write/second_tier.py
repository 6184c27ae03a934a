"""What a writer knows of a store's second tier: somebody brings there, in order, what the writer has committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckptstore.formats.html_tables import HtmlTable
from ckptstore.formats.records import Node

__all__ = ["Lag", "SecondTier"]


@dataclass(frozen=True, slots=True)
class Lag(HtmlTable):
    """How far a remote is behind.

    Attributes:
        checkpoints: promised checkpoints that it does not have and will get.
        steps: how many steps its newest one is behind the store's newest, in the newest term of the store's.
        nbytes: bytes of the segments that it will get.
        branch: REFs of checkpoints that it never gets, because the run was continued elsewhere; they stay in the store.
        error: why the last try to bring something there failed; None: it did not.
    """

    checkpoints: int = 0
    steps: int = 0
    nbytes: int = 0
    branch: tuple[str, ...] = ()
    error: str | None = None


class SecondTier(Protocol):
    """The second tier of the store that a writer writes to. Every method may be called by any thread."""

    def check(self) -> None:
        """Raise `FencedError` if the run was continued elsewhere: nothing more may be committed here."""

    def admit(self) -> None:
        """Wait while too much is on this tier alone. Raises `StorageError` where that does not get less; as `check`."""

    def committed(self) -> None:
        """Something was committed, and is to be brought there. Waits for nothing."""

    def has(self, node: Node) -> bool:
        """Whether the second tier has a checkpoint, as far as this process knows."""

    def wait(self, node: Node, timeout: float | None) -> None:
        """Return when the second tier has a checkpoint.

        Raises:
            TimeoutError: not within `timeout` seconds.
            FencedError: it never will: the run was continued elsewhere.
            WriterClosedError: nobody brings it there any more.
        """

    def lag(self) -> Lag:
        """How far it is behind. Raises `CorruptLogError`, `StorageError`: the store's log cannot be read."""

    def close(self) -> None:
        """Bring there what is left, unless that fails; then end."""
