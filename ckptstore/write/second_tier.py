"""The interface of a store's second tier: checkpoints that the writer has committed are copied there in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckptstore.formats.history.records import Node
from ckptstore.formats.html_tables import HtmlTable

__all__ = ["Lag", "SecondTier"]


@dataclass(frozen=True, slots=True)
class Lag(HtmlTable):
    """How far a second tier is behind.

    Attributes:
        checkpoints: committed checkpoints that it does not have yet and will get.
        steps: how many steps its newest one is behind the store's newest, in the newest term of the store.
        nbytes: bytes of the segments that it will get.
        branch: REFs of checkpoints that it never gets, because the run was continued elsewhere; they stay in the store.
        error: why the last attempt to copy something there failed; None: it succeeded.
    """

    checkpoints: int = 0
    steps: int = 0
    nbytes: int = 0
    branch: tuple[str, ...] = ()
    error: str | None = None


class SecondTier(Protocol):
    """The second tier of the store to which a writer writes. Any thread may call any method."""

    def check(self) -> None:
        """Raise `FencedError` if the run was continued elsewhere: nothing more may be committed here."""

    def admit(self) -> None:
        """Wait while too much is only on the first tier. Raises `StorageError` if that does not shrink; as `check`."""

    def committed(self) -> None:
        """Note that something was committed and must be copied there. Waits for nothing."""

    def has(self, node: Node) -> bool:
        """Whether the second tier has a checkpoint, as far as this process knows."""

    def wait(self, node: Node, timeout: float | None) -> None:
        """Wait until the second tier has a checkpoint.

        Raises:
            TimeoutError: it does not have it within `timeout` seconds.
            FencedError: it will never have it: the run was continued elsewhere.
            WriterClosedError: nothing is copied there any more.
        """

    def lag(self) -> Lag:
        """How far it is behind. Raises `CorruptLogError`, `StorageError` if the store's log cannot be read."""

    def close(self) -> None:
        """Copy the rest there, unless that fails; then end."""
