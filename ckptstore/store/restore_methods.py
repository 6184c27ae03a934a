"""What is restored from a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from ckptstore.errors import CkptError, CorruptionError, NotFoundError, UsageError
from ckptstore.host.progress import as_progress
from ckptstore.store.store_handle import Handle

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckptstore.exchange.export import ExportResult
    from ckptstore.following.follower import Follower
    from ckptstore.formats.records import SegmentEntry
    from ckptstore.formats.segment import SegmentDoc, TensorEntry
    from ckptstore.host.progress import Progress
    from ckptstore.log.journal import Journal

__all__ = ["Reading"]

Framework = Literal["torch", "numpy"]
_T = TypeVar("_T")


class Reading(Handle):
    """The part of `Store` that restores: whole states, tensors, files, and each new checkpoint as it comes."""

    def load(
        self,
        ref: str | int = "latest",
        *,
        framework: Framework | None = None,
        into: Any = None,
        select: str | Sequence[str] | None = None,
        device: Any = None,
        mmap: bool = False,
        verify: bool = True,
        threads: int | None = None,
        progress: Progress | bool | None = None,
        rank: int | None = None,
    ) -> Any:
        """Restore the state of a checkpoint, bit for bit.

        Args:
            ref: ``latest``, a step, ``STEP@TERM`` or ``tag:NAME``.
            framework: ``torch`` or ``numpy``; by default torch when this process has imported it. Arrays that were
                saved as numpy arrays (numpy's RNG state, say) always come back as numpy arrays.
            into: a state of the same structure whose tensors are overwritten in place, without a second copy in
                memory; what is not a tensor is taken from the checkpoint. The result's tensors are those of `into`. Of
                a DTensor this rank's part is filled, however the tensor was cut when it was saved, and by how many
                ranks; of the store no more is read than the chunks that have it.
            select: names of tensors, or globs (``model.*``); the others are left out of the result.
            device: where torch tensors go.
            mmap: map uncompressed fulls instead of reading them: tensors are private, copy-on-write views of the file.
                Tensors that are stored in shards are read and put together.
            verify: compare every byte read with its checksum. Turning it off is on you.
            threads: reading threads; default: the number of cores, at most 4.
            progress: told (bytes done, bytes in all) of the tensors that are restored, from any thread, one call at a
                time.
            rank: of a checkpoint that many ranks saved, give what this rank saved where they differ (random numbers,
                data loader): of rank modulo their number, if they were fewer. None: all tensors that any rank had, and
                of the rest the first rank's.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: no such checkpoint, or nothing matches `select`.
            CorruptSegmentError: a checksum differs; nothing is returned. Tensors of `into` may have been overwritten,
                with verified bytes only.
            UsageError: `into` has other tensors, dtypes or shapes; nothing was overwritten.
            StorageError: the medium failed.
        """
        from ckptstore.restore.load import LoadOptions, load  # numpy: only those who load need it

        options = LoadOptions(framework, into, select, device, mmap, verify, threads, as_progress(progress), rank)
        return self._from_either(ref, lambda journal, one: load(journal, one, options))

    def _from_either(self, ref: str | int, work: Callable[[Journal, str | int], _T]) -> _T:
        """What `work` makes of the store; of its remote, if that has what is missing or damaged here."""
        try:
            return work(self.journal, ref)
        except (NotFoundError, CorruptionError) as error:
            try:
                pair = self._pair()
            except CkptError as why:
                error.add_note(f"nor can the remote be reached: {why}")
                raise error from why
            if pair is None:
                raise
        from ckptstore.tiers.remote_fetch import reading

        return reading(pair, ref, work)

    def follow(
        self,
        after: str | int | None = None,
        *,
        into: Any = None,
        select: str | Sequence[str] | None = None,
        framework: Framework | None = None,
        device: Any = None,
        rank: int | None = None,
        out: str | os.PathLike[str] | None = None,
        each: bool = False,
        poll: float = 2.0,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        threads: int | None = None,
        progress: Progress | bool | None = None,
    ) -> Follower:
        """Keep up with a run that another process or machine writes: an iterator over its checkpoints as they come.

        The first is the newest there is; then whenever there is another ``latest``, also one that the run went back to
        (`Followed.branched`). What is handed over is held in memory, so that the next is made of it: only the deltas or
        steps between are read, and everything is compared with its hash. Where no chain of them leads from what is held
        (the base was retired, the run went back) it is read whole. Memory: what is followed (with an optimizer's steps
        also the moments that they move) twice, and the tensors that are handed over.

        Args:
            after: the REF that was handed over last, before: only what is newer comes. If `into` still has its bits,
                they are not read again.
            into: a state whose tensors are overwritten in place, when everything new is in memory, complete and
                verified: damage or a lost connection leaves them as they are.
            select, framework, device, rank, threads: as for `load`.
            out: a ``.safetensors`` or ``.pt`` file that each checkpoint replaces, whole and durable, instead of a
                state. A ``.safetensors`` file that is there already tells where to go on, and is not read again.
            each: hand over every checkpoint, in order, and not only the newest of those that came meanwhile.
            poll: seconds between two looks, 0.01 to 86,400.
            timeout: seconds without a new checkpoint after which the iteration ends; None: it does not.
            stop: ends the iteration when it is set, by whatever thread.
            progress: told (bytes done, bytes in all) of the tensors of each checkpoint.

        Raises:
            UsageError, CheckpointNotFoundError, TensorNotFoundError: as `load`.
            StoreNotFoundError, StoreReplacedError, CorruptLogError: as `watch`.
            CorruptSegmentError: something is damaged, and there is no other way. Nothing was handed over; the next call
                of ``next`` tries again.
            StorageError: the medium failed; likewise.

        Example:
            >>> store = open("memory://followed")
            >>> with store.writer() as writer:
            ...     info = writer.save({"weight": 1.5}, step=1)
            >>> followed = next(store.follow())
            >>> followed.info.ref, followed.state
            ('1@1', {'weight': 1.5})
        """
        from ckptstore.following.follower import Follower, FollowOptions

        options = FollowOptions(
            into, select, framework, device, rank, each, poll, timeout, stop, threads, as_progress(progress), out
        )
        return Follower(self.journal, after, options)

    def read_tensor(
        self, ref: str | int, name: str, *, box: Sequence[slice] | slice | None = None, verify: bool = True
    ) -> npt.NDArray[Any]:
        """One tensor's logical bytes, or those of a box of it (1-D uint8). Reads only the chunks that have them.

        Args:
            box: slices, one for each dimension from the first on, as in ``numpy.s_[0:10, :]``: the elements of this box
                in C order. Chunks of 16 MiB are read whole, because they are verified so.

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
            UsageError: `box` is not of slices of neighbours, or has more of them than the tensor dimensions.
        """
        from ckptstore.restore.load import read_tensor

        return self._from_either(ref, lambda journal, one: read_tensor(journal, one, name, verify, box))

    def read_tensors(
        self, ref: str | int = "latest", names: Iterable[str] | None = None, *, verify: bool = True
    ) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """One tensor after the other: (name, its logical bytes, 1-D uint8). Memory: one of them.

        The checkpoint is opened once, where `read_tensor` opens it for each tensor. Of two tiers here alone.

        Args:
            names: of tensors, or places, as for `read_tensor`; None: every tensor, in access order.

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
        """
        from ckptstore.restore.load import read_tensors

        return read_tensors(self.journal, ref, names, verify)

    def chunks(self, ref: str | int, name: str, *, verify: bool = True) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """One tensor's logical bytes, chunk by chunk: (offset, uint8 array valid until the next one).

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
        """
        from ckptstore.restore.load import chunks

        return chunks(self.journal, ref, name, verify)

    def describe(self, ref: str | int = "latest") -> list[tuple[SegmentEntry, SegmentDoc]]:
        """The segments that restoring `ref` reads, base first, each with its verified description."""
        from ckptstore.restore.load import describe

        return self._from_either(ref, describe)

    def tensors(self, ref: str | int = "latest") -> dict[str, TensorEntry]:
        """name -> entry of every tensor of the checkpoint, in access order."""
        from ckptstore.restore.load import tensors

        return self._from_either(ref, tensors)

    def tree(self, ref: str | int = "latest") -> Any:
        """The typed JSON tree of the checkpoint's state; of many ranks that saved it together (SPEC 3.3), all of it."""
        from ckptstore.restore.load import tree

        return self._from_either(ref, tree)

    def export(
        self,
        ref: str | int,
        out: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "pt"] | None = None,
        select: str | Sequence[str] | None = None,
        strip: str | None = None,
        overwrite: bool = False,
        max_shard_bytes: int | None = None,
        progress: Progress | bool | None = None,
    ) -> ExportResult:
        """Write a checkpoint to a file for other tools, verifying every byte that is read.

        A ``.safetensors`` file carries the rest of the state in its metadata. A ``.pt`` file loads with
        ``torch.load(weights_only=True)`` as the nested state that was saved; torch is not needed to write it. The file
        appears under its name complete and durable, or not at all.

        What `torch.compile` puts into names (``_orig_mod``) is in none of a ``.safetensors`` file or after `strip`. The
        nested state of a ``.pt`` file has its keys as they were saved.

        Args:
            ref: the checkpoint.
            out: the file; with shards, the name they and the index are derived from.
            format: ``safetensors`` or ``pt``; None: what the name of `out` says, else safetensors.
            select: only tensors at places that match one of these patterns, as in `load`.
            strip: only tensors whose names begin with this (``model.``), which is dropped from them: a flat dict, as
                ``load_state_dict`` takes it, without the rest of the state.
            overwrite: replace files that exist.
            max_shard_bytes: start another safetensors file before one grows beyond this; a larger tensor stands alone.
            progress: told (bytes done, bytes in all).

        Returns:
            which files there are, and what could not be written as it was.

        Raises:
            UsageError: `out` exists, is inside a store or no regular file, its folder does not exist, its name is one
                of another kind of file (``.onnx``), or shards of a ``.pt`` file are asked for; without `strip` a tensor
                had no name that a file can have (none, or one that begins with a dot).
            CheckpointNotFoundError, TensorNotFoundError, CorruptionError: as `load`.
            UnsupportedStateError: a state that has no place in such a file.
            StorageError: the output cannot be written. Nothing is left behind then.
        """
        from ckptstore.exchange.export import PrefixSelection, export

        if os.fspath(out).endswith(os.sep):
            raise UsageError(f"{out} is the name of a folder: name the file to write")
        chosen = _format_of(out) if format is None else format
        which = select if strip is None else PrefixSelection(strip, select)
        where = os.fspath(out)
        return self._from_either(
            ref,
            lambda journal, one: export(
                journal, one, where, chosen, which, overwrite, max_shard_bytes, as_progress(progress)
            ),
        )


_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt")
_OTHERS: Final = (
    *(".onnx", ".gguf", ".ggml", ".npz", ".npy", ".h5", ".hdf5", ".keras", ".tflite", ".pb", ".msgpack", ".mlmodel"),
    *(".json", ".pkl", ".pickle", ".zip", ".tar", ".gz", ".zst", ".distcp", ".parquet"),
)
"""Names of files that other tools would take for something else than what is written."""


def _format_of(path: str | os.PathLike[str]) -> Literal["safetensors", "pt"]:
    name = os.fspath(path).lower()
    if name.endswith(_OTHERS):
        known = ", ".join((".safetensors", *_PICKLES))
        raise UsageError(
            f"{path}: no file of that kind is written; give a name that ends in {known}, or say the format"
        )
    return "pt" if name.endswith(_PICKLES) else "safetensors"
