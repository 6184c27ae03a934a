"""Every error that this project raises, in one tree, each with the exit code that ``ckpt`` returns for it.

::

    CkptError                              1
    ├── UsageError (ValueError)            2   an invalid option, REF, name or argument
    │   └── StepOrderError                 2   the step exists already, or is not above the parent's step
    ├── NotFoundError (LookupError)        3
    │   ├── StoreNotFoundError (FileNotFoundError)
    │   ├── KeyNotFoundError (FileNotFoundError)   an object of the store is missing
    │   ├── CheckpointNotFoundError
    │   └── TensorNotFoundError
    ├── CorruptionError                    4   stored bytes differ from the bytes that were written
    │   ├── CorruptSegmentError
    │   └── CorruptLogError
    ├── FormatError (ValueError)           5   the bytes are in another format, or are malformed
    │   ├── IncompatibleFormatError        5   a newer format than this version understands
    │   ├── StateMismatchError (RuntimeError)  5   a resumed script's objects differ from the checkpoint's
    │   └── ForeignObjectError             5   a folder, link, pipe, device or oversized file where an object should be
    ├── UnsupportedStateError (TypeError)  6   the state holds something that cannot be stored
    ├── WriterError                        7   this writer must stop
    │   ├── FencedError                        a newer term exists
    │   ├── CommitUnknownError                 the outcome of the commit is unknown
    │   ├── StoreReplacedError                 another run's store is in the place of this writer's store
    │   └── WriterClosedError
    ├── StorageError (OSError)             8   the medium failed: EIO, ENOSPC, permissions
    │   ├── KeyExistsError (FileExistsError)   an exclusive create found the key present
    │   ├── UnsupportedBackendError            the medium cannot give a guarantee that the store needs
    │   ├── RemoteLostError                    a store's second tier is missing, or another store is in its place
    │   └── ReadOnlyError
    ├── MissingDependencyError (ImportError) 9 an optional package is needed
    ├── KernelError                        1   a compiled kernel failed; numpy's kernels are used from then on
    ├── RequestError                       10  a change that was requested from the live writer was not made
    │   ├── RequestRefusedError                the writer refused; the message says why
    │   └── RequestTimeoutError (TimeoutError) the writer did not answer in time
    ├── RankError                          1   ranks that save together failed: nothing was committed
    │   ├── MissingRankError (TimeoutError)    a rank did not deliver its part in time
    │   ├── FailedRankError                    a rank reported that it failed, and why
    │   │   └── UnmadeStateError               its agent could not compute the state of a step (strategy replica)
    │   ├── RankMismatchError                  the ranks' states do not form one state
    │   ├── DivergedReplicasError              a replicated tensor differs between ranks
    │   └── MailboxError                       the store of the process group, which carries the parts, failed
    └── AgentError                         1   the agent process cannot be started or used
        ├── AgentLostError                     the agent died: unacknowledged saves may or may not be stored
        ├── AgentSilentError                   the agent is stopped (SIGSTOP, frozen): it answers after it is continued
        └── AgentBusyError                     the agent serves another trainer, which is alive

Handlers catch by category (``CorruptionError``, ``StorageError`` …); the message always names the file,
tensor or option. A command exits with the code of what it found, whether that was raised or reported: damage that
``ckpt verify`` lists exits with 4, and so does damage that a load meets. `EXIT_CODES` is the whole table.
"""

from __future__ import annotations

from typing import Final, Literal

EXIT_CODES: Final = {
    0: "success",
    1: "an error that has no code of its own",
    2: "usage: an invalid option, REF, name or file",
    3: "not found: store, checkpoint, tensor, tag",
    4: "damage: stored bytes differ from the bytes that were written",
    5: "not our format, or a newer one",
    6: "a state that cannot be stored",
    7: "this writer must stop: fenced, outcome of its commit unknown, store replaced",
    8: "the medium failed, or something could not be read",
    9: "an optional package is missing",
    10: "a change that was requested from a live writer was not made",
    70: "a bug in ckpt: run again with --debug",
    130: "interrupted (Ctrl-C)",
    141: "the reader of stdout closed it (| head)",
    143: "terminated (SIGTERM)",
}
"""The exit codes of ``ckpt`` and their meanings: one code for each kind of error."""


class CkptError(Exception):
    """Base class of every error of this project. ``exit_code`` is the exit code of the command.

    Attributes:
        nearest: REF of the newest earlier checkpoint that does not need the damaged data. A restore that met damage
            sets it. None: there is no such checkpoint, or none was searched for.
    """

    exit_code = 1
    nearest: str | None = None


class UsageError(CkptError, ValueError):
    """An invalid option, REF, name or argument.

    Attributes:
        no_rules: the store has no rules of retention, and none were given.
    """

    exit_code = 2
    no_rules: bool = False


class StepOrderError(UsageError):
    """The step exists already in this term, or is not above the parent's step."""


class NotFoundError(CkptError, LookupError):
    """The requested object does not exist."""

    exit_code = 3


class StoreNotFoundError(NotFoundError, FileNotFoundError):
    """There is no store at this path or URL.

    Attributes:
        url: the path or URL, as it was given. None: the error is about another place.
        instead: what is there: ``file``; ``no bucket``; ``no FORMAT``: the folders of a store without that file. None:
            nothing of these.
    """

    url: str | None = None
    instead: Literal["file", "no bucket", "no FORMAT"] | None = None

    @classmethod
    def at(
        cls, url: str, text: str, instead: Literal["file", "no bucket", "no FORMAT"] | None = None
    ) -> StoreNotFoundError:
        """The error about `url`; `text` follows it in the message."""
        error = cls(f"{url}{text}")
        error.url, error.instead = url, instead
        return error


class KeyNotFoundError(NotFoundError, FileNotFoundError):
    """An object that should be in the store is missing."""


class CheckpointNotFoundError(NotFoundError):
    """No checkpoint matches this REF.

    Attributes:
        step: the step that was looked for. `term`: in which term; None: in any. A REF without a step leaves both None.
    """

    step: int | None = None
    term: int | None = None


class TensorNotFoundError(NotFoundError):
    """The checkpoint has no tensor of this name (or none matches the selection)."""


class CorruptionError(CkptError):
    """Stored bytes differ from the bytes that were written."""

    exit_code = 4


class CorruptSegmentError(CorruptionError):
    """A segment's bytes do not match their checksums or bounds; names file, tensor and offset.

    Attributes:
        computed: the stored bytes match their checksum, but the result of decoding them is not what was saved.
        lacking: ids of the segments of an encoding of a base that does not have what the checkpoint on it needs.
            Another encoding of the base may have it. None: the error has another cause.
    """

    computed: bool = False
    lacking: frozenset[str] | None = None


class CorruptLogError(CorruptionError):
    """A log slot, fold or FORMAT file is damaged; names the slot and the last intact checkpoint."""


class FormatError(CkptError, ValueError):
    """The bytes are not in this project's format."""

    exit_code = 5


class IncompatibleFormatError(FormatError):
    """The store uses features that this version does not know."""


class StateMismatchError(FormatError, RuntimeError):
    """A script's objects differ from those of the checkpoint. Nothing was restored.

    Attributes:
        differences: one text for each difference, with its path in the state.
    """

    def __init__(self, message: str, differences: list[str] | tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class ForeignObjectError(FormatError):
    """The object at a key is not one that a store writes: not a regular file, or longer than the limit of its kind."""


class UnsupportedStateError(CkptError, TypeError):
    """The state holds an object that is neither a tensor nor typed JSON; names its key path."""

    exit_code = 6


class WriterError(CkptError):
    """This writer must stop."""

    exit_code = 7


class FencedError(WriterError):
    """A newer term exists: another writer took over. Nothing that this writer does is acknowledged from now on."""


class CommitUnknownError(WriterError):
    """The outcome of the commit is unknown; open the store again to find out. Nothing was deleted."""


class StoreReplacedError(WriterError):
    """Another run's store is in the place of the store that this writer opened. Nothing was written to it.

    `Store.watch` also raises it, and ends.
    """


class WriterClosedError(WriterError):
    """The writer was closed, or stopped after an earlier error."""


class StorageError(CkptError, OSError):
    """The medium failed (EIO, ENOSPC, permissions, a broken connection).

    Attributes:
        unsent: the object was certainly not created, and this attempt never will create it.
    """

    exit_code = 8
    unsent: bool = False


class KeyExistsError(StorageError, FileExistsError):
    """An exclusive create found the key present."""


class UnsupportedBackendError(StorageError):
    """The medium cannot give a guarantee that the store needs (for instance exclusive creation)."""


class RemoteLostError(StorageError):
    """A store's second tier was deleted, in part or as a whole, or replaced. The message says what to do."""


class ReadOnlyError(StorageError):
    """The store, or this handle of it, is read-only."""


class MissingDependencyError(CkptError, ImportError):
    """An optional package is needed; the message says which extra installs it."""

    exit_code = 9


class KernelError(CkptError):
    """A compiled kernel failed while it ran. This process uses numpy's kernels from then on: call the
    function again."""


class RequestError(CkptError):
    """A change (a tag, a retirement) was requested from the live writer, and it was not made."""

    exit_code = 10


class RequestRefusedError(RequestError):
    """The writer refused: the change breaks a rule in the current state of the store. The message names the rule."""


class RequestTimeoutError(RequestError, TimeoutError):
    """The writer did not answer in time. It may still accept the request while its term lasts, unless it is gone."""


class RankError(CkptError):
    """Ranks that save together failed. Nothing was committed: the previous checkpoint stays the newest."""


class MissingRankError(RankError, TimeoutError):
    """A rank did not deliver its part in time: it is dead, slow, or saves other steps. Names the rank."""


class FailedRankError(RankError):
    """A rank could not write its part, and reported that. Names the rank and the reason."""


class UnmadeStateError(FailedRankError):
    """A rank's agent could not compute the state of a step with the optimizer's arithmetic (strategy ``replica``)."""


class RankMismatchError(RankError):
    """The ranks' parts do not form one state: tensors, shapes or steps differ, or there are gaps or overlaps.

    Attributes:
        agree_anew: the tensors of only some ranks have changed since the ranks agreed who writes what. They agree again
            at the next save.
    """

    def __init__(self, text: str, *, agree_anew: bool = False) -> None:
        super().__init__(text)
        self.agree_anew = agree_anew


class DivergedReplicasError(RankError):
    """A tensor that must be the same on several ranks differs: the hardware or the program of one of them is faulty.

    Attributes:
        tensor: the first such tensor in the order of the state.
        rank: the first rank whose bits differ from those of most ranks.
        step: the step of the save that noticed it.
    """

    def __init__(self, text: str, tensor: str = "", rank: int = -1, step: int = -1) -> None:
        super().__init__(text)
        self.tensor = tensor
        self.rank = rank
        self.step = step


class MailboxError(RankError):
    """The messages between the ranks failed: the process group's store died with its host."""


class AgentError(CkptError):
    """The agent (the process that saves for this one) cannot be started, reached or trusted. The message says why."""


class AgentLostError(AgentError):
    """The agent is gone. A save that it had not acknowledged may or may not be in the store. The next save starts
    another agent. Where ranks save together it does not: their term is over on all of them."""


class AgentSilentError(AgentError):
    """The agent is alive but does not answer: a signal or a debugger stopped it, or its control group is frozen.
    Saves that it had not acknowledged may or may not be stored. Once it is continued, later saves work."""


class AgentBusyError(AgentError):
    """The agent serves another trainer, which is alive. Two trainers never share an agent."""
