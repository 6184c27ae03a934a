"""Every error the project raises, in one tree, each with the exit code that ``ckpt`` gives for it.

::

    CkptError                              1
    ├── UsageError (ValueError)            2   bad option, REF, name or argument
    │   └── StepOrderError                 2   the step exists already, or is not above the parent
    ├── NotFoundError (LookupError)        3
    │   ├── StoreNotFoundError (FileNotFoundError)
    │   ├── KeyNotFoundError (FileNotFoundError)   an object that should be in the store is not
    │   ├── CheckpointNotFoundError
    │   └── TensorNotFoundError
    ├── CorruptionError                    4   bytes differ from what was written
    │   ├── CorruptSegmentError
    │   └── CorruptLogError
    ├── FormatError (ValueError)           5   not our format, or a hostile one
    │   ├── IncompatibleFormatError        5   a newer format than this version understands
    │   ├── StateMismatchError (RuntimeError)  5   a resumed script's objects differ from the checkpoint's
    │   └── ForeignObjectError             5   a folder, link, pipe, device or giant where an object should be
    ├── UnsupportedStateError (TypeError)  6   the state holds something that cannot be stored
    ├── WriterError                        7   this writer must stop
    │   ├── FencedError                        a newer term exists
    │   ├── CommitUnknownError                 the commit may or may not have landed
    │   ├── StoreReplacedError                 another run's store is where this writer's was
    │   └── WriterClosedError
    ├── StorageError (OSError)             8   the medium failed: EIO, ENOSPC, permissions
    │   ├── KeyExistsError (FileExistsError)   create-if-absent found the key present
    │   ├── UnsupportedBackendError            the medium cannot keep a promise the store needs
    │   ├── RemoteLostError                    a store's second tier is gone, or another store is in its place
    │   └── ReadOnlyError
    ├── MissingDependencyError (ImportError) 9 an optional package is needed
    ├── KernelError                        1   a compiled kernel failed half-way; numpy's are used from then on
    ├── RequestError                       10  the live writer was asked for a change, which was not made
    │   ├── RequestRefusedError                it said no, and why
    │   └── RequestTimeoutError (TimeoutError) it did not answer in time
    ├── RankError                          1   ranks that save together could not: nothing was committed
    │   ├── MissingRankError (TimeoutError)    a rank did not hand in its part in time
    │   ├── FailedRankError                    a rank said that it failed, and why
    │   │   └── UnmadeStateError               its agent could not make the state of a step (strategy replica)
    │   ├── RankMismatchError                  the ranks' states do not make one state
    │   ├── DivergedReplicasError              a tensor that all have alike is not
    │   └── MailboxError                       what carries the parts (the process group's store) is gone
    └── AgentError                         1   the process that saves for this one cannot be started or used
        ├── AgentLostError                     it is gone: what it had not acknowledged may or may not be stored
        ├── AgentSilentError                   it is stopped (SIGSTOP, frozen), and answers nobody until it is continued
        └── AgentBusyError                     it serves another trainer, which is alive

Handlers catch by category (``CorruptionError``, ``StorageError`` …); the message always names the file,
tensor or option. What a command finds exits with the code of its kind, whether it is raised or reported: damage that
``ckpt verify`` lists exits with 4, as damage that a load meets does. `EXIT_CODES` is the whole table.
"""

from __future__ import annotations

from typing import Final

EXIT_CODES: Final = {
    0: "success",
    1: "an error without a code of its own",
    2: "usage: an option, REF, name or file that cannot be meant",
    3: "not found: store, checkpoint, tensor, tag",
    4: "damage: bytes differ from what was written",
    5: "not our format, or a newer one",
    6: "a state that cannot be stored",
    7: "this writer must stop: fenced, its commit unknown, the store replaced",
    8: "the medium failed, or something could not be read",
    9: "an optional package is missing",
    10: "a live writer was asked for a change, which was not made",
    70: "a bug in ckpt: run again with --debug",
    130: "interrupted (Ctrl-C)",
    141: "whoever read stdout went away (| head)",
    143: "told to end (SIGTERM)",
}
"""What ``ckpt`` exits with, and why: one code for each kind of finding."""


class CkptError(Exception):
    """Base of every error of this project. ``exit_code`` is what the command exits with.

    Attributes:
        nearest: of damage that a restore met: REF of the newest checkpoint before the one that was asked for which
            needs nothing of it; None: there is none, or nobody looked.
    """

    exit_code = 1
    nearest: str | None = None


class UsageError(CkptError, ValueError):
    """A bad option, REF, name or argument."""

    exit_code = 2


class StepOrderError(UsageError):
    """The step exists already in this term, or is not above the parent's step."""


class NotFoundError(CkptError, LookupError):
    """What was asked for does not exist."""

    exit_code = 3


class StoreNotFoundError(NotFoundError, FileNotFoundError):
    """There is no store at this path or URL."""


class KeyNotFoundError(NotFoundError, FileNotFoundError):
    """An object that should be in the store is absent."""


class CheckpointNotFoundError(NotFoundError):
    """No checkpoint answers to this REF."""


class TensorNotFoundError(NotFoundError):
    """The checkpoint has no tensor of this name (or none matches the selection)."""


class CorruptionError(CkptError):
    """Stored bytes differ from what was written."""

    exit_code = 4


class CorruptSegmentError(CorruptionError):
    """A segment's bytes do not match their checksums or bounds; names file, tensor and offset.

    Attributes:
        computed: the stored bytes match their checksum, and what is decoded from them is not what was saved.
        lacking: ids of the segments of a base's encoding that has not what is built on it; another one may. None: it is
            something else that is wrong.
    """

    computed: bool = False
    lacking: frozenset[str] | None = None


class CorruptLogError(CorruptionError):
    """A log slot, fold or FORMAT file is damaged; names the slot and the last intact checkpoint."""


class FormatError(CkptError, ValueError):
    """The bytes are not in our format."""

    exit_code = 5


class IncompatibleFormatError(FormatError):
    """The store uses features that this version does not know."""


class StateMismatchError(FormatError, RuntimeError):
    """A script's objects differ from those that the checkpoint is of. Nothing was restored.

    Attributes:
        differences: what differs, one each, with its path in the state.
    """

    def __init__(self, message: str, differences: list[str] | tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class ForeignObjectError(FormatError):
    """What lies at a key is nothing that a store writes: no regular file, or longer than its kind may be."""


class UnsupportedStateError(CkptError, TypeError):
    """The state holds an object that is neither a tensor nor typed JSON; names its key path."""

    exit_code = 6


class WriterError(CkptError):
    """This writer must stop."""

    exit_code = 7


class FencedError(WriterError):
    """A newer term exists: another writer took over. Nothing this writer does is acknowledged again."""


class CommitUnknownError(WriterError):
    """The commit may or may not have landed; open the store again to find out. Nothing was deleted."""


class StoreReplacedError(WriterError):
    """The store that this writer opened is gone, and another run's is in its place. Nothing was written to that.

    Or that of `Store.watch` is, which then says so and ends.
    """


class WriterClosedError(WriterError):
    """The writer was closed, or stopped after an earlier error."""


class StorageError(CkptError, OSError):
    """The medium failed (EIO, ENOSPC, permissions, a broken connection).

    Attributes:
        unsent: of an object that was to be created: it certainly was not, and never will be by this attempt.
    """

    exit_code = 8
    unsent: bool = False


class KeyExistsError(StorageError, FileExistsError):
    """Create-if-absent found the key present."""


class UnsupportedBackendError(StorageError):
    """The medium cannot keep a promise that the store needs (for instance exclusive creation)."""


class RemoteLostError(StorageError):
    """A store's second tier is not what was brought there: deleted, in part or whole, or replaced. Says what to do."""


class ReadOnlyError(StorageError):
    """The store, or this handle of it, cannot be written."""


class MissingDependencyError(CkptError, ImportError):
    """An optional package is needed; the message says which extra installs it."""

    exit_code = 9


class KernelError(CkptError):
    """A kernel that numba compiled failed in the middle of its work. This process uses numpy's kernels from then on:
    what was asked for can be asked for again."""


class RequestError(CkptError):
    """The live writer was asked for a change of the store (a tag, a retirement), and it was not made."""

    exit_code = 10


class RequestRefusedError(RequestError):
    """The writer refused: the change breaks a rule in the store as it is by now. The message says which."""


class RequestTimeoutError(RequestError, TimeoutError):
    """The writer did not answer in time, and may still accept it while its term lasts; or it is known to be gone."""


class RankError(CkptError):
    """Ranks that save together could not. Nothing was committed: the checkpoint before stays the newest."""


class MissingRankError(RankError, TimeoutError):
    """A rank did not hand in its part in time: it is dead, slow, or saves other steps. Names it."""


class FailedRankError(RankError):
    """A rank could not write its part, and said so. Names it, and says why."""


class UnmadeStateError(FailedRankError):
    """A rank's agent could not make the state of a step by the optimizers' arithmetic (strategy ``replica``)."""


class RankMismatchError(RankError):
    """What the ranks have does not make one state: other tensors, shapes or steps than the others', holes, overlaps."""


class DivergedReplicasError(RankError):
    """A tensor that is to be the same on several ranks is not: a fault of hardware or program, on one of them.

    Attributes:
        tensor: the first one in the order of the state.
        rank: the first rank that has other bits than most.
        step: of the save that noticed it.
    """

    def __init__(self, text: str, tensor: str = "", rank: int = -1, step: int = -1) -> None:
        super().__init__(text)
        self.tensor = tensor
        self.rank = rank
        self.step = step


class MailboxError(RankError):
    """What carries the parts from rank to rank failed: the process group's store died with its host."""


class AgentError(CkptError):
    """The agent, the process that saves for this one, cannot be started, reached or believed. Says why."""


class AgentLostError(AgentError):
    """The agent is gone. A save that it had not acknowledged may or may not be in the store; what comes next
    begins anew with another agent. Where ranks save together it does not: their term is over, on all of them."""


class AgentSilentError(AgentError):
    """The agent is there and answers nobody: it is stopped by a signal or a debugger, or its control group is frozen.
    What it had not acknowledged may or may not be stored. Once it is continued, later saves work."""


class AgentBusyError(AgentError):
    """The agent serves another trainer, which is alive: two never share one."""
