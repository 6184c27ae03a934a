"""Write a checkpoint as the ``.ckpt`` file from which Lightning's ``Trainer.fit(ckpt_path=)`` continues.

Three kinds of states have what Lightning needs: imported ``.ckpt`` files (and what `CkptstoreIO` stored), imported
folders of `ModelParallelStrategy`, whose optimizers are ``optimizer_0`` ..., and those of `StepCheckpoint`, whose loops
and callbacks are in ``extra.lightning``. The file loads with ``weights_only=True``.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckptstore.errors import UsageError
from ckptstore.exchange.atomic_files import outputs, refuse_missing_folder
from ckptstore.exchange.export import ExportResult, with_references
from ckptstore.exchange.torch_archive import PlainParts, TensorReference, write_archive
from ckptstore.host.progress import Progress, Tally
from ckptstore.restore.load import restore_with
from ckptstore.restore.tensor_streams import streams

if TYPE_CHECKING:
    from ckptstore.log.journal import Journal
    from ckptstore.restore.restore_source import RestoreSource

__all__ = ["export_lightning"]

_VERSION: Final = "pytorch-lightning_version"
_TESTED: Final = "2.6.6"
"""The version of Lightning whose form this is, where none is installed."""
_MARK: Final = "ckptstore.lightning/"
"""Begins the key of a marked dict, which stands for a namespace, a path or a duration (`lightning_values`)."""
_OPTIMIZER: Final = re.compile(r"optimizer_(\d+)")
_OF_THE_CHECKPOINTER: Final = "extra.lightning"


def export_lightning(
    journal: Journal, ref: str | int, out: str | Path, progress: Progress | None = None
) -> ExportResult:
    """Write a new file. It appears complete and durable, or not at all.

    Args:
        journal: the journal of the store.
        ref: the checkpoint.
        out: the file.
        progress: called with the number of tensor bytes written.

    Raises:
        UsageError: `out` exists or is inside a store; or the state has not what Lightning needs.
        UnsupportedStateError: such a file cannot have the state.
        StorageError: the output cannot be written. Nothing is left behind.
        CheckpointNotFoundError, CorruptionError: as `export`.
    """
    out = Path(out)

    def written(found: RestoreSource) -> ExportResult:
        state, arrays = with_references(found.tree, found.tensors)
        checkpoint = _checkpoint(state, found.ref)
        converted: list[str] = []
        checkpoint = _unmarked(checkpoint, "", converted)
        kept = {one.name: one.nbytes for one in _references(checkpoint)}
        tally, stream = Tally(progress, sum(kept.values())), streams(found)

        def chunks(name: str) -> Iterator[memoryview]:
            for data in stream(name):
                yield data.data
                tally.advance(len(data))

        with outputs(overwrite=False) as files:
            file = files.create(out, sum(kept.values()))
            converted += write_archive(file, checkpoint, chunks)
            files.publish()
        named = tuple([name for name in arrays if name in kept] + converted)
        return ExportResult(found.ref, "pt", (out,), None, sum(kept.values()), len(kept), named, lossy=found.lossy)

    with outputs(overwrite=False) as files:
        files.refuse_existing(out)  # before anything is read
        refuse_missing_folder(out)
    return restore_with(journal, ref, written)


def _checkpoint(state: Any, ref: str) -> dict[str, Any]:
    """Lightning's dict."""
    if not isinstance(state, dict):
        raise _not_lightning(ref)
    if isinstance(state.get("state_dict"), dict) and _VERSION in state:
        return _with_optimizers(state)
    extra = state.get("extra")
    own = extra.get("lightning") if isinstance(extra, dict) else None
    if isinstance(own, dict) and isinstance(own.get("loops"), dict) and isinstance(state.get("model"), dict):
        return _of_steps(state, own)
    raise _not_lightning(ref)


def _not_lightning(ref: str) -> UsageError:
    return UsageError(
        f"checkpoint {ref} is not of Lightning: it was neither imported from a .ckpt, nor saved by CkptstoreIO or "
        "StepCheckpoint. Leave --layout out to write the state as it is"
    )


def _with_optimizers(state: dict[str, Any]) -> dict[str, Any]:
    """The dict, with the optimizers of a sharded folder where other checkpoints of Lightning have them."""
    numbered = {int(match[1]): key for key in state if isinstance(key, str) and (match := _OPTIMIZER.fullmatch(key))}
    if "optimizer_states" in state or not numbered:
        return state
    kept = {key: one for key, one in state.items() if key not in numbered.values()}
    return kept | {"optimizer_states": [state[numbered[number]] for number in sorted(numbered)]}


def _of_steps(state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Lightning's dict of a state of `StepCheckpoint`."""
    try:
        version = importlib.metadata.version("lightning")
    except importlib.metadata.PackageNotFoundError:
        version = _TESTED
    loops = own["loops"]
    progress = loops.get("epoch_progress", {}).get("current", {})
    made: dict[str, Any] = {
        "epoch": int(progress.get("processed", 0)),
        "global_step": int(state.get("step", 0)),
        _VERSION: version,
        "state_dict": state["model"],
        "loops": {"fit_loop": loops},
        "callbacks": own.get("callbacks", {}),
        "optimizer_states": _several(state.get("optimizer")),
        "lr_schedulers": _several(state.get("scheduler")),
    }
    if "precision" in own:
        made["MixedPrecision"] = own["precision"]  # the only plugin of Lightning that has a state
    module = own.get("module", {})
    return made | {key: one for key, one in module.items() if key not in made}


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _unmarked(value: Any, path: str, converted: list[str]) -> Any:
    """The value without marked dicts: a file that loads with ``weights_only=True`` cannot have what they stand for."""
    if isinstance(value, Counter | PlainParts):
        return value
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(key := next(iter(value)), str) and key.startswith(_MARK):
            converted.append(path)
            return _unmarked(value[key], path, converted)
        return type(value)((key, _unmarked(one, f"{path}.{key}".lstrip("."), converted)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value)(_unmarked(one, f"{path}.{number}", converted) for number, one in enumerate(value))
    return value


def _references(value: Any) -> Iterator[TensorReference]:
    if isinstance(value, TensorReference):
        yield value
    elif isinstance(value, PlainParts):
        yield from _references(value.value)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _references(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _references(one)
