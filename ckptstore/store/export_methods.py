"""The methods of `Store` that write checkpoints for other programs: files, folders, and weights that follow a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from ckptstore.errors import UsageError
from ckptstore.host.progress import as_progress
from ckptstore.store.store_handle import StoreHandle

if TYPE_CHECKING:
    from ckptstore.exchange.export import ExportResult
    from ckptstore.exchange.trainer_layouts import Layout
    from ckptstore.following.publisher import Publisher
    from ckptstore.host.progress import Progress

__all__ = ["ExportMethods"]


class ExportMethods(StoreHandle):
    """The methods of `Store` that export checkpoints and publish weights."""

    def export(
        self,
        ref: str | int,
        out: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "pt", "dcp"] | None = None,
        select: str | Sequence[str] | None = None,
        strip: str | None = None,
        overwrite: bool = False,
        max_shard_bytes: int | None = None,
        progress: Progress | bool | None = None,
    ) -> ExportResult:
        """Write a checkpoint to a file for other tools, and verify every byte that is read.

        A ``.safetensors`` file carries the rest of the state in its metadata. A ``.pt`` file loads with
        ``torch.load(weights_only=True)`` as the nested state that was saved; torch is not needed to write it. The file
        appears under its name complete and durable, or not at all.

        The part of a name that `torch.compile` adds (``_orig_mod``) is removed in a ``.safetensors`` file and with
        `strip`. The nested state of a ``.pt`` file keeps the keys that were saved.

        Args:
            ref: the checkpoint.
            out: the file; with shards, the names of the shards and of the index are derived from it.
            format: ``safetensors``, ``pt``, or ``dcp``: a new folder for ``torch.distributed.checkpoint.load``, which
                torch itself writes. None: the format that the name of `out` implies, else safetensors.
            select: only tensors at places that match one of these patterns, as in `load`.
            strip: only tensors whose names begin with this prefix (``model.``), which is removed from them: a flat
                dict, as ``load_state_dict`` takes it, without the rest of the state.
            overwrite: replace files that exist.
            max_shard_bytes: start another file (safetensors, dcp) before one exceeds this size; a larger tensor gets a
                file of its own.
            progress: called with (bytes done, total bytes).

        Returns:
            the files that were written, and what could not be written unchanged.

        Raises:
            UsageError: `out` exists, is inside a store or not a regular file; its folder does not exist; its name is
                that of another kind of file (``.onnx``); shards of a ``.pt`` file are asked for; or, without `strip`, a
                tensor has a name that the file cannot have (empty, or beginning with a dot).
            CheckpointNotFoundError, TensorNotFoundError, CorruptionError: as `load`.
            UnsupportedStateError: the state cannot be stored in such a file.
            StorageError: the output cannot be written. Nothing is left behind then.
        """
        from ckptstore.exchange.export import PrefixSelection, export

        if format == "dcp":
            return self._export_dcp(ref, out, select, strip, overwrite, max_shard_bytes, progress)
        if os.fspath(out).endswith(os.sep):
            raise UsageError(f"{out} is the name of a folder: name the file to write")
        chosen = _format_of(out) if format is None else format
        which = select if strip is None else PrefixSelection(strip, select)
        where = os.fspath(out)
        return self._with_remote_fallback(
            ref,
            lambda journal, one: export(
                journal, one, where, chosen, which, overwrite, max_shard_bytes, as_progress(progress)
            ),
        )

    def _export_dcp(
        self,
        ref: str | int,
        out: str | os.PathLike[str],
        select: str | Sequence[str] | None,
        strip: str | None,
        overwrite: bool,
        max_shard_bytes: int | None,
        progress: Progress | bool | None,
    ) -> ExportResult:
        from ckptstore.exchange.dcp_export import export_dcp
        from ckptstore.exchange.export import PrefixSelection

        if overwrite:
            raise UsageError(f"{out}: format='dcp' writes a new folder: leave overwrite= out")
        which = select if strip is None else PrefixSelection(strip, select)
        where = os.fspath(out)
        return self._with_remote_fallback(
            ref, lambda journal, one: export_dcp(journal, one, where, which, max_shard_bytes, as_progress(progress))
        )

    def export_folder(
        self,
        ref: str | int,
        out: str | os.PathLike[str],
        layout: Layout = "hf",
        *,
        strip: str | None = None,
        config: str | os.PathLike[str] | None = None,
        max_shard_bytes: int | None = None,
        progress: Progress | bool | None = None,
    ) -> ExportResult:
        """Write a checkpoint as a framework reads it, and verify every byte that is read.

        Args:
            ref: the checkpoint.
            out: the folder, which must not exist. It appears complete and durable, or not at all.
            layout: ``hf``: weights, configuration and tokenizer, for ``from_pretrained``. ``hf-trainer``: also what
                ``Trainer.train(resume_from_checkpoint=...)`` reads. ``lightning``: not a folder but a ``.ckpt`` file,
                from which Lightning's ``Trainer.fit(ckpt_path=...)`` continues.
            strip: with ``hf``: the names of the model's tensors begin with this prefix, which is removed; None: with
                ``model.``.
            config: with ``hf``: a folder that has ``config.json`` and the tokenizer of the model, for a checkpoint that
                has none. Its files other than weights are copied.
            max_shard_bytes, progress: as for `export`.

        Raises:
            UsageError: an unknown layout; `out` exists, is inside a store, or its folder does not exist; or the state
                lacks what the layout needs.
            CheckpointNotFoundError, CorruptionError: as `load`.
            StorageError: the output cannot be written. Nothing is left behind then.
        """
        from ckptstore.exchange.trainer_layouts import LAYOUTS, ModelOptions, export_layout

        if layout not in LAYOUTS:
            raise UsageError(f"layout: {layout!r:.80}; it may be {' or '.join(map(repr, LAYOUTS))}")
        if layout != "hf" and (strip, config) != (None, None):
            raise UsageError(
                f"strip= and config= describe a model for layout='hf': they cannot be combined with {layout!r}"
            )
        where = os.fspath(out)
        model = ModelOptions(strip, None if config is None else os.fspath(config))
        return self._with_remote_fallback(
            ref,
            lambda journal, one: export_layout(
                journal, one, where, layout, max_shard_bytes, as_progress(progress), model
            ),
        )

    def publish(
        self,
        to: str | os.PathLike[str],
        *,
        ref: str | int = "latest",
        layout: Literal["hf", "slime"] = "hf",
        strip: str | None = "model.",
        select: str | Sequence[str] | None = None,
        files: str | os.PathLike[str] | None = None,
        keep: int = 2,
        full_every: int = 16,
        sha256: bool = False,
        max_shard_bytes: int | None = None,
        poll: float = 2.0,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        storage_options: Mapping[str, Any] | None = None,
        progress: Progress | bool | None = None,
    ) -> Publisher:
        """Keep a folder, or a bucket's prefix, of weights up to date with this run, for programs without ckptstore.

        The result is an iterator: each item is a version that was published, and ``next`` waits for the next
        checkpoint. ``look()`` publishes what there is and does not wait. A version is a full, which is a folder of
        Hugging Face's, or a delta on the version before; it appears as a whole. Every byte that is read is verified,
        and each tensor is published with a checksum. The docs page "Serving weights" has the format.

        Args:
            to: path or URL of the folder, which the first version creates. Not in a store.
            ref: the checkpoint to publish: each new ``latest``, or each new target of a ``tag:NAME``.
            layout: of deltas. ``hf``: the changed tensors, whole. ``slime``: as slime's delta weight sync has them.
            strip: only tensors whose names begin with this prefix, which is removed. Empty or None: all.
            select: only tensors at places that match one of these patterns, as in `load`.
            files: a folder with a configuration and a tokenizer for each full, if the checkpoint does not hold them.
            keep: number of newest versions that are kept, with those that they build on.
            full_every: every how many versions one is a full. 1: all are.
            sha256: publish a SHA-256 of each tensor, besides its XXH3-128.
            max_shard_bytes: maximum bytes of tensors in a file. None: 5 GB, in a bucket 240 MiB.
            poll, timeout, stop, storage_options, progress: as for `follow`, `open` and, of each version, `load`.

        Raises:
            UsageError: an invalid option; or the place is a store, is inside one, or has another program's versions.
            WriterError: another publisher of this machine is running there (raised by ``next``, as the rest).
            FencedError: another publisher has taken over.
            StorageError: a medium failed; the next call tries again.
            CkptError: of the store, as `load` and `watch`. The previous version stays.

        Example:
            >>> import numpy
            >>> store = open("memory://published")
            >>> with store.writer() as writer, store.publish("memory://weights") as publisher:
            ...     info = writer.save({"model": {"weight": numpy.ones(3)}}, step=1)
            ...     publisher.look().folder
            'weight_v000001'
        """
        from ckptstore.backends import open_backend
        from ckptstore.following.publisher import Publisher, PublishOptions

        chosen = (ref, layout, strip, select, files, keep, full_every, sha256, max_shard_bytes)
        options = PublishOptions(*chosen, poll, timeout, stop, as_progress(progress))
        return Publisher(self.journal, open_backend(to, create=True, storage_options=storage_options), options)


_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt")
_OTHERS: Final = (
    *(".onnx", ".gguf", ".ggml", ".npz", ".npy", ".h5", ".hdf5", ".keras", ".tflite", ".pb", ".msgpack", ".mlmodel"),
    *(".json", ".pkl", ".pickle", ".zip", ".tar", ".gz", ".zst", ".distcp", ".parquet"),
)
"""Names of files that other tools would mistake for another format."""


def _format_of(path: str | os.PathLike[str]) -> Literal["safetensors", "pt"]:
    name = os.fspath(path).lower()
    if name.endswith(_OTHERS):
        known = ", ".join((".safetensors", *_PICKLES))
        raise UsageError(
            f"{path}: files of that kind cannot be written; give a name that ends in {known}, or name the format"
        )
    return "pt" if name.endswith(_PICKLES) else "safetensors"
