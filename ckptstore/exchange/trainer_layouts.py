"""Write a checkpoint in the form that a framework reads: Hugging Face's `from_pretrained` and Trainer, Lightning.

====================  ============================================================================================
``hf``                the weights, the configuration and the tokenizer
``hf-trainer``        these, and what the Trainer continues from: ``optimizer.pt``, ``scheduler.pt``, ``scaler.pt``,
                      ``rng_state.pth`` (of several ranks ``rng_state_0.pth`` ...), ``trainer_state.json``
``lightning``         one file, a ``.ckpt``: see `lightning_files`
====================  ============================================================================================

Two kinds of states have what Hugging Face's two need: those of `ckptstore.integrations.huggingface`, in
``extra.trainer``, and imported folders of the Trainer (`checkpoint_folders`). Nothing is unpickled: files in the state
are written byte by byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from ckptstore.errors import FormatError, UsageError
from ckptstore.exchange.atomic_files import output_folder, outputs, write_plain
from ckptstore.exchange.export import ExportResult, PrefixSelection, write_export
from ckptstore.exchange.lightning_files import export_lightning
from ckptstore.exchange.torch_archive import TensorReference, write_archive
from ckptstore.formats import dtypes
from ckptstore.formats.states.dcp_member import ABOUT
from ckptstore.formats.states.rank_trees import rank_count
from ckptstore.formats.states.state import unflatten
from ckptstore.formats.states.tree import member, only_tensors
from ckptstore.restore.load import restore_with
from ckptstore.restore.tensor_streams import streams

if TYPE_CHECKING:
    from ckptstore.host.progress import Progress
    from ckptstore.log.journal import Journal
    from ckptstore.restore.restore_source import RestoreSource

__all__ = ["LAYOUTS", "Layout", "ModelOptions", "export_layout", "model_files"]

Layout = Literal["hf", "hf-trainer", "lightning"]
LAYOUTS: Final[tuple[Layout, ...]] = ("hf", "hf-trainer", "lightning")

_OWN: Final = "extra.trainer"
"""Where the callback for the Trainer keeps its record (`ckptstore.integrations.trainer_record`)."""
_OF_TRAINER: Final = frozenset({"training_args.bin"})
"""Files that only a Trainer reads."""
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".gguf")
_PARTS: Final = ("optimizer", "scheduler", "scaler")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the caller of layout ``hf`` says of the model.

    Attributes:
        prefix: the names of its tensors begin with this; None: ``model.``.
        config: a folder with ``config.json`` and the tokenizer; None: the checkpoint has them.
    """

    prefix: str | None = None
    config: str | Path | None = None


def _files_of(folder: str | Path) -> dict[str, Any]:
    """The files of a model's folder without its weights: name -> bytes. Raises `UsageError`, `OSError`."""
    found = Path(folder)
    if not (found / "config.json").is_file():
        raise UsageError(f"{folder} is not a model's folder: it has no config.json")
    files = sorted(one for one in found.iterdir() if one.is_file() and not one.name.startswith("."))
    kept = [one for one in files if one.suffix not in _WEIGHTS and not one.name.endswith(".index.json")]
    return {one.name: np.frombuffer(one.read_bytes(), np.uint8) for one in kept if one.name not in _OF_TRAINER}


def export_layout(
    journal: Journal,
    ref: str | int,
    out: str | Path,
    layout: Layout,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
    model: ModelOptions = ModelOptions(),
) -> ExportResult:
    """Write a checkpoint into a new folder, verifying every byte that is read.

    The folder appears complete and durable, or not at all.

    Args:
        journal: the journal of the store.
        ref: the checkpoint.
        out: the folder (with ``lightning`` the file). It must not exist.
        layout: what is written.
        max_shard_bytes: start another file of weights before one exceeds this size.
        progress: called with the number of the weights' bytes written.
        model: what the layout ``hf`` is told.

    Raises:
        UsageError: `out` exists or is inside a store; or the state has no configuration, several models, or (with
            ``hf-trainer``) no state of a Trainer.
        StorageError: the output cannot be written. Nothing is left behind.
        CheckpointNotFoundError, CorruptionError: as `export`.
    """
    if layout == "lightning":
        if max_shard_bytes is not None:
            raise UsageError("--layout lightning writes one file: leave --max-shard-size out")
        return export_lightning(journal, ref, out, progress)
    out = Path(out)
    with output_folder(out) as folder:

        def written(found: RestoreSource) -> ExportResult:
            contents = _Contents(found, layout, model)
            weights, which = folder.empty() / "model.safetensors", PrefixSelection(contents.prefix)
            result = write_export(found, weights, "safetensors", which, False, max_shard_bytes, progress)
            contents.write(folder.temporary)
            return result

        result = restore_with(journal, ref, written)
        folder.publish()
    index = None if result.index is None else out / result.index.name
    return replace(result, paths=tuple(out / path.name for path in result.paths), index=index)


def model_files(found: RestoreSource) -> dict[str, bytes]:
    """The configuration and the tokenizer that a checkpoint holds: name of a file -> its bytes. Empty: it holds none.

    Raises `FormatError`: a name is not a file name.
    """
    try:
        files = _Contents(found, "hf", ModelOptions()).files
    except UsageError:  # no Trainer saved it, and no folder of one was imported
        return {}
    return files


class _Contents:
    """What a layout takes from a checkpoint, besides the weights."""

    def __init__(self, found: RestoreSource, layout: Layout, told: ModelOptions) -> None:
        """Check that the checkpoint has it. Raises `UsageError`."""
        self.prefix = told.prefix or "model."
        self._found = found
        self._chunks = streams(found)
        self._whole = layout == "hf-trainer"
        self._tree = found.tree
        self._own = member(self._tree, _OWN) is not None
        self._check_model(layout)
        files = self._values(self._tree, f"{_OWN}.files" if self._own else "files") or {}
        if told.config is not None:
            files = _files_of(told.config)
        if "config.json" not in files:
            raise UsageError(
                f"checkpoint {found.ref} holds no config.json, which --layout {layout} needs: it was not saved by "
                "ckptstore.integrations.huggingface or imported from a Trainer's folder. With --layout hf pass "
                "--config FOLDER of the model it came from, or leave --layout out to write only the weights"
            )
        self._files: Mapping[str, Any] = files
        if self._whole and self._state() is None:
            raise UsageError(f"checkpoint {found.ref} holds no state of a Trainer: --layout hf writes only the model")

    def _check_model(self, layout: Layout) -> None:
        """Raise `UsageError` unless the tensors with the prefix are a model."""
        ref, part = self._found.ref, member(self._tree, self.prefix.removesuffix("."))
        about = member(self._tree, ABOUT)  # of a save through DCP, whose state is flat
        names = [name for name in self._found.tensors if name.startswith(self.prefix)]
        if not (only_tensors(part) if about is None else names):
            what = "single model" if self.prefix == "model." else f"model at {self.prefix!r}"
            raise UsageError(f"checkpoint {ref}: its state has no {what}; --layout {layout} needs one")
        pieces = member(about, "pieces") or {}
        if about is not None and (cut := [name for name in pieces if name.startswith(self.prefix)]):
            raise UsageError(
                f"checkpoint {ref}: {cut[0]} is stored in pieces that are not one box of each rank: `ckpt restore "
                "--format dcp`, load it and save it again"
            )

    @property
    def files(self) -> dict[str, bytes]:
        """Name of a file that was saved byte by byte -> its bytes. Raises `FormatError`: one is not a file name."""
        found: dict[str, bytes] = {}
        for name, data in self._files.items():
            if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
                raise FormatError(f"checkpoint {self._found.ref}: {name!r:.80} is not a file name")
            if self._whole or name not in _OF_TRAINER:
                found[name] = np.asarray(data, np.uint8).tobytes()
        return found

    def write(self, folder: Path) -> None:
        """Write it. Raises `StorageError`."""
        for name, data in self.files.items():
            write_plain(folder / name, data)
        if not self._whole:
            return
        for part in _PARTS:
            if member(self._tree, part):
                self._archive(folder / f"{part}.pt", self._references(self._tree, part))
        for name, state in self._generators():
            self._archive(folder / name, state)
        # Last, because the Trainer takes a folder with this file for a checkpoint.
        write_plain(folder / "trainer_state.json", (json.dumps(self._state(), indent=2) + "\n").encode())

    def _state(self) -> Any:
        """The parsed ``trainer_state.json``; None: there is none."""
        if not self._own:
            return self._values(self._tree, "trainer_state")
        record = self._values(self._tree, _OWN)
        state = json.loads(record["state"].tobytes())
        history = b"".join(one.tobytes() for one in record["history"])
        state["log_history"] = [json.loads(line) for line in history.splitlines() if line.strip()]
        return state

    def _generators(self) -> Iterator[tuple[str, Any]]:
        """Name of a file, and the states of one rank's generators as the Trainer saves them."""
        if not self._own:
            for rank, state in self._references(self._tree, "rng").items():
                yield "rng_state.pth" if rank == 0 else f"rng_state_{rank}.pth", state
            return
        ranks = rank_count(self._found.merged) or 1
        for rank in range(ranks):
            tree = self._found.tree_of(rank if ranks > 1 else None)
            state = self._values(tree, "random")
            device = self._references(tree, "random")
            python, numpy = state["python"], state["numpy"]
            words, keys = (tuple(one.tolist()) for one in (python["words"], numpy["keys"]))
            made = {
                "python": (python["version"], words, python["spare"]),
                "numpy": (numpy["name"], list(keys), numpy["position"], numpy["has_gauss"], numpy["cached"]),
                "cpu": device["torch"],
            }
            if devices := device.get("cuda"):
                made["cuda"] = devices if ranks > 1 else devices[0]
            yield "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth", made

    # -- parts of the tree

    def _values(self, tree: Any, name: str) -> Any:
        """A part with numpy arrays for tensors; None: there is no such part. It is small."""
        node = member(tree, name)
        return None if node is None else unflatten(node, lambda tensor, _: self._array(tensor))

    def _references(self, tree: Any, name: str) -> Any:
        """A part with references for tensors, as `write_archive` takes it. Raises `UsageError` if there is none."""
        node = member(tree, name)
        return {} if node is None else unflatten(node, lambda tensor, _: self._reference(tensor))

    def _array(self, name: str) -> Any:
        entry = self._found.tensors[name]
        data = b"".join(bytes(chunk) for chunk in self._chunks(name))
        return np.frombuffer(data, dtypes.get(entry.dtype).numpy).reshape(entry.shape)

    def _reference(self, name: str) -> TensorReference:
        entry = self._found.tensors[name]
        return TensorReference(name, entry.dtype, tuple(entry.shape), entry.nbytes)

    def _archive(self, path: Path, state: Any) -> None:
        def chunks(name: str) -> Iterator[memoryview]:
            for data in self._chunks(name):
                yield data.data

        with outputs(overwrite=False) as files:
            write_archive(files.create(path, 1 << 16), state, chunks)
            files.publish()
