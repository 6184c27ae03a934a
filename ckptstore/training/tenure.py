"""A term that a `Checkpointer` writes, until it ends: its writer, the saves on their way, what is kept of them."""

from __future__ import annotations

from ckptstore.training.retention import Retention
from ckptstore.training.saving import Saving
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.writer import Writer

__all__ = ["Tenure"]


class Tenure:
    """A term that is open for writing. `Opening` makes it.

    Attributes:
        writer: brings states to the store.
        group: the ranks that save together; None: this process alone.
        by_agent: the writer's work is done by a process of its own.
        saving: the saves on their way; None: the term is being opened still.
        retention: has the best checkpoint kept, and what is retired deleted; None: another rank does it.
    """

    def __init__(self, writer: Writer, group: Group | None, *, by_agent: bool) -> None:
        self.writer = writer
        self.group = group
        self.by_agent = by_agent
        self.saving: Saving | None = None
        self.retention: Retention | None = None

    @property
    def rank(self) -> int | None:
        """Which of the ranks this is; None: there are no others."""
        return None if self.group is None else self.group.rank

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which says what concerns all; or there are no others."""
        return self.group is None or self.group.rank == 0

    @property
    def ranks(self) -> int:
        """How many save together."""
        return 1 if self.group is None else self.group.size

    @property
    def follows(self) -> bool:
        """Steps that are not to be saved are to be offered, too."""
        return self.saving is not None and self.saving.follows

    @property
    def written_by_agent(self) -> bool:
        """Whether the last step is written at the end, due or not. Of several ranks that is for all of them to say."""
        return self.follows and self.group is None

    def finish(self) -> None:
        """No step comes any more: what was given becomes durable, and what was asked of retention is done."""
        if self.saving is not None and (self.retention is not None or self.by_agent):
            self.saving.ended()
        if self.retention is not None:
            self.retention.close()

    def end(self) -> None:
        """Close the writer, and let go of memory and threads."""
        try:
            if self.retention is not None:
                self.retention.abandon()
            self.writer.close()
        finally:
            if self.saving is not None:
                self.saving.close()
