"""The methods of `Store` that restore: load, follow, and reading of single tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.host.progress import as_progress
from ckptstore.store.store_handle import StoreHandle

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckptstore.following.follower import Follower
    from ckptstore.formats.history.records import SegmentEntry
    from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry
    from ckptstore.host.progress import Progress
    from ckptstore.restore.mapped_tensors import MappedTensors
    from ckptstore.restore.stored_files import StoredFile

__all__ = ["RestoreMethods"]

Framework = Literal["torch", "numpy"]


class RestoreMethods(StoreHandle):
    """The methods of `Store` that restore whole states and tensors, and that follow new checkpoints."""

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
        layout: Literal["nested", "flat"] = "nested",
        keep_foreign: bool = False,
    ) -> Any:
        """Restore the state of a checkpoint, bit for bit.

        Args:
            ref: ``latest``, a step, ``STEP@TERM`` or ``tag:NAME``.
            framework: ``torch`` or ``numpy``; by default torch if this process has imported it. Arrays that were
                saved as numpy arrays (numpy's RNG state, say) always come back as numpy arrays.
            into: a state of the same structure, whose tensors are overwritten in place without a second copy in
                memory. Everything but tensors comes from the checkpoint. The result has the tensors of `into`. Of a
                DTensor or `Shard` only this rank's part is filled, whatever the sharding and the number of ranks when
                it was saved; only the chunks that hold this part are read.
            select: names of tensors, or globs (``model.*``); other tensors are left out of the result.
            device: device of the torch tensors.
            mmap: map uncompressed fulls instead of reading them: tensors are private, copy-on-write views of the file.
                Sharded tensors are read and assembled. `map_tensors` verifies each when it is asked for.
            verify: compare every byte read with its checksum. If you turn this off, damage goes unnoticed.
            threads: number of reading threads; default: the number of cores, at most 4.
            progress: called with (bytes done, total bytes) of the tensors that are restored, from any thread, one call
                at a time.
            rank: for a checkpoint that many ranks saved: return this rank's values where the ranks differ (random
                numbers, data loader). If fewer ranks saved, `rank` modulo their number. None: all tensors of all ranks,
                and everything else from the first rank.
            layout: ``nested``: the state as it was saved. ``flat``: a tuple of the tensors by name (a dict) and of the
                data; of a state that `flat_state` did not make, the data is the state without its tensors.
            keep_foreign: of an object whose type is not registered (`ckptstore.register`), or of a kind that a later
                version stored, return the parts, as a `ckptstore.Foreign`.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: no such checkpoint, or nothing matches `select`.
            UnsupportedStateError: such an object, without `keep_foreign`.
            CorruptSegmentError: a checksum differs; nothing is returned. Tensors of `into` may have been overwritten,
                with verified bytes only.
            UsageError: `into` has other tensors, dtypes or shapes; nothing was overwritten.
            StorageError: the medium failed.
        """
        from ckptstore.restore.load import LoadOptions, load  # imports numpy, which only a load needs

        options = LoadOptions(
            framework, into, select, device, mmap, verify, threads, as_progress(progress), rank, layout, keep_foreign
        )
        return self._with_remote_fallback(ref, lambda journal, one: load(journal, one, options))

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
        """Follow a run that another process or machine writes: an iterator over its checkpoints as they appear.

        The first item is the newest checkpoint. After that the iterator yields each new ``latest``, also one that the
        run went back to (`Followed.branched`). The last checkpoint is kept in memory, and the next is built from it:
        only the deltas or steps between them are read, and everything is compared with its hash. If no chain leads from
        the checkpoint in memory (the base was retired, the run went back), the next is read whole. Memory: twice the
        followed tensors (with an optimizer's steps also their moments), and the tensors that are yielded.

        Args:
            after: the REF of the checkpoint that was yielded last, before: only newer ones are yielded. If `into` still
                has its bits, they are not read again.
            into: a state whose tensors are overwritten in place once everything new is in memory, complete and
                verified. Damage or a lost connection leaves them unchanged.
            select, framework, device, rank, threads: as for `load`.
            out: a ``.safetensors`` or ``.pt`` file that each checkpoint replaces, complete and durable, instead of a
                state. An existing ``.safetensors`` file says where to continue, and is not read again.
            each: yield every checkpoint, in order, instead of only the newest of those that are new.
            poll: seconds between two polls, 0.01 to 86,400.
            timeout: seconds without a new checkpoint after which the iteration ends; None: it never ends.
            stop: an event that ends the iteration when any thread sets it.
            progress: called with (bytes done, total bytes) of the tensors of each checkpoint.

        Raises:
            UsageError, CheckpointNotFoundError, TensorNotFoundError: as `load`.
            StoreNotFoundError, StoreReplacedError, CorruptLogError: as `watch`.
            CorruptSegmentError: something is damaged, and no other encoding replaces it. Nothing was yielded; the next
                call of ``next`` tries again.
            StorageError: the medium failed; the next call tries again.

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
        """One tensor's logical bytes, or those of a box of it (1-D uint8). Reads only the chunks that hold them.

        Each call opens the checkpoint; `read_boxes` opens it once for many boxes, and `read_tensors` for many tensors.

        Args:
            box: slices, one for each dimension from the first on, as in ``numpy.s_[0:10, :]``: the elements of this box
                in C order. Chunks of 16 MiB are read whole, because they are verified as a whole.

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
            UsageError: a slice of `box` has a step, or `box` has more slices than the tensor has dimensions.
        """
        from ckptstore.restore.tensor_reads import read_tensor

        return self._with_remote_fallback(ref, lambda journal, one: read_tensor(journal, one, name, verify, box))

    def read_boxes(
        self,
        ref: str | int,
        boxes: Iterable[tuple[str, Sequence[tuple[int, int]] | None]],
        *,
        out: Sequence[Any] | None = None,
        framework: Framework | None = None,
        verify: bool = True,
        threads: int | None = None,
        progress: Progress | bool | None = None,
    ) -> list[Any]:
        """Read many boxes of many tensors: one open of the checkpoint, in parallel, each needed chunk once.

        All names and boxes, and all of `out`, are checked before the first byte is read. Memory: the result, and two
        chunks of 16 MiB for each thread.

        Args:
            boxes: pairs of a tensor's name (or place, as for `read_tensor`) and a box of it: (start, stop) for each
                dimension, or None for the whole tensor. Boxes may overlap.
            out: a tensor or array for each box, of the box's shape and the stored dtype, which is overwritten in place:
                on any device, with any strides, such as a view of a larger tensor. None: new ones.
            framework: of new ones: ``torch`` or ``numpy``; by default torch if this process has imported it.
            verify, threads, progress: as for `load`.

        Returns:
            the members of `out`, or new ones, in the order of `boxes`.

        Raises:
            TensorNotFoundError: there is no tensor of that name; suggests names that are close.
            UsageError: a box is not in its tensor, or a member of `out` does not fit, is read-only, or shares memory
                with another; nothing was overwritten.
            CorruptSegmentError, StorageError: as `load`. Members of `out` may have been overwritten, with verified
                bytes only.

        Example:
            >>> import numpy
            >>> store = open("memory://boxes")
            >>> with store.writer() as writer:
            ...     info = writer.save({"weight": numpy.arange(6).reshape(2, 3)}, step=1)
            >>> column = store.read_boxes(1, [("weight", [(0, 2), (1, 2)])], framework="numpy")[0]
            >>> column.tolist()
            [[1], [4]]
        """
        from ckptstore.restore.tensor_reads import BoxOptions, read_boxes

        requests, options = list(boxes), BoxOptions(out, framework, verify, threads, as_progress(progress))
        return self._with_remote_fallback(ref, lambda journal, one: read_boxes(journal, one, requests, options))

    def read_tensors(
        self, ref: str | int = "latest", names: Iterable[str] | None = None, *, verify: bool = True
    ) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Iterate over tensors: (name, logical bytes as 1-D uint8). Memory: one tensor.

        Opens the checkpoint once; `read_tensor` opens it for each tensor. Reads this store only, not its remote.

        Args:
            names: names or places of tensors, as for `read_tensor`; None: every tensor, in access order.

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
        """
        from ckptstore.restore.tensor_reads import read_tensors

        return read_tensors(self.journal, ref, names, verify)

    def map_tensors(
        self,
        ref: str | int = "latest",
        *,
        select: str | Sequence[str] | None = None,
        framework: Framework | None = None,
    ) -> MappedTensors:
        """Map the tensors of an uncompressed full, and verify each when it is first asked for.

        Nothing but headers is read until then. ``load(mmap=True)`` verifies all tensors before it returns.

        Args:
            ref: a checkpoint of a local store whose tensors are stored uncompressed and whole.
            select: as for `load`.
            framework: ``torch`` or ``numpy``; by default torch if this process has imported it.

        Returns:
            a mapping of names (as in `select`) to private, copy-on-write views. It needs this `Store` no more.

        Raises:
            CheckpointNotFoundError, TensorNotFoundError: as `load`.
            UsageError: the medium cannot map, or a tensor is compressed, part of a delta, or in shards.
            CorruptSegmentError, StorageError: a header is damaged, or cannot be read.
        """
        from ckptstore.restore.mapped_tensors import map_tensors

        return map_tensors(self.journal, ref, select, framework)

    def file_of(self, ref: str | int = "latest") -> list[StoredFile]:
        """The safetensors files that hold a full checkpoint, for programs that map such files.

        Only the headers are verified: `map_tensors` or `verify` compare the tensors with their hashes. A file that a
        program has open or mapped keeps its contents. Before that, a retired checkpoint may be collected: tag it.

        Args:
            ref: a checkpoint whose tensors are stored uncompressed.

        Returns:
            each file, with the tensors that it has: several if the state is large, or many ranks saved it.

        Raises:
            CheckpointNotFoundError: no such checkpoint.
            UsageError: it is a delta, a step diff or compressed (the message says what to do), or other programs cannot
                open the medium.
            CorruptSegmentError, StorageError: a header is damaged, or cannot be read.
        """
        from ckptstore.restore.stored_files import file_of

        return file_of(self.journal, ref)

    def chunks(self, ref: str | int, name: str, *, verify: bool = True) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Iterate over one tensor's logical bytes, chunk by chunk: (offset, uint8 array valid until the next one).

        Raises:
            TensorNotFoundError, CorruptSegmentError, StorageError.
        """
        from ckptstore.restore.tensor_reads import chunks

        return chunks(self.journal, ref, name, verify)

    def describe(self, ref: str | int = "latest") -> list[tuple[SegmentEntry, SegmentDoc]]:
        """The segments that restoring `ref` reads, base first, each with its verified description (SegmentDoc)."""
        from ckptstore.restore.load import describe

        return self._with_remote_fallback(ref, describe)

    def tensors(self, ref: str | int = "latest") -> dict[str, TensorEntry]:
        """Every tensor of the checkpoint: name -> entry, in access order."""
        from ckptstore.restore.load import tensors

        return self._with_remote_fallback(ref, tensors)

    def tree(self, ref: str | int = "latest") -> Any:
        """The typed JSON tree of the checkpoint's state. For a checkpoint of many ranks (SPEC 3.3) the whole tree."""
        from ckptstore.restore.load import tree

        return self._with_remote_fallback(ref, tree)
