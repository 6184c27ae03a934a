"""Implements ``ckpt import``: stores files of other tools as checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptstore.cli.arguments import REF, STEP, STORE
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note, progress, ratio, size, table

if TYPE_CHECKING:
    from ckptstore.exchange.import_files import ImportedFile
    from ckptstore.write.policy.delta_options import DeltaOptions


@make_command(
    "import",
    examples=[
        "ckpt import runs/gpt model.safetensors --step 1000",
        "ckpt import runs/gpt checkpoint-*/model.safetensors.index.json",
        "ckpt import runs/gpt checkpoint-*/",
        "ckpt import runs/gpt step_*.pt",
        "ckpt import runs/gpt step-1000/                              # of torch.distributed.checkpoint, iter_0001000/",
        "ckpt import runs/net epoch=3-step=1000.ckpt --leave-out-key hyper_parameters      # Lightning",
        "ckpt import runs/gpt model.pt --object train.Config",
        "ckpt import runs/gpt global_step1000_universal/              # DeepSpeed",
        "ckpt import runs/gpt old/step_500.pt --parent none",
        "ckpt import runs/small checkpoint-*/ --delta --max-restore-cost 3x",
    ],
)
@STORE
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--step",
    type=STEP,
    default="auto",
    metavar="N|auto",
    help="Step of a single file. auto (default): from the file's or folder's name, else the one after the parent's.",
)
@click.option(
    "--parent",
    type=REF,
    default="latest",
    metavar="REF|none",
    help="The checkpoint that the new term continues from; default: latest.",
)
@click.option(
    "--leave-out",
    multiple=True,
    metavar="GLOB",
    help="Omit files of this name from a folder; may be repeated. By default nothing is omitted.",
)
@click.option(
    "--leave-out-key",
    multiple=True,
    metavar="GLOB",
    help="Omit these keys of torch files (hyper_parameters, callbacks.*); may be repeated.",
)
@click.option(
    "--object",
    "objects",
    multiple=True,
    metavar="NAME",
    help="Take the objects of this class (train.Config) as values: its fields; may be repeated. Its code is not run.",
)
@click.option("--delta", is_flag=True, help="Store the series as deltas, which take less space.")
@click.option("--interval", metavar="T|auto", help="With --delta: checkpoints that share one base. Default: auto.")
@click.option(
    "--max-restore-cost",
    metavar="COST",
    help="With --delta: what restoring any checkpoint may read or take: 3x (of a full), 2GB, 30s, none. Default: 4x.",
)
def command(
    store: str,
    files: tuple[Path, ...],
    step: int | Literal["auto"],
    parent: str,
    leave_out: tuple[str, ...],
    leave_out_key: tuple[str, ...],
    objects: tuple[str, ...],
    delta: bool,
    interval: str | None,
    max_restore_cost: str | None,
    as_json: bool,
) -> None:
    """Store files and folders of other tools as checkpoints.

    FILE is a .safetensors, .pt or Lightning .ckpt file, the .index.json of Hugging Face shards, or a folder: of a
    trainer, of torch.distributed.checkpoint, Megatron-LM's iter_*, DeepSpeed's universal form. A trainer's folder
    becomes one state: model, optimizer, scheduler, scaler, rng, trainer_state, files. Several files are a series,
    stored by ascending step. The store is created if it does not exist. Pickled code is never run: what needs it is
    refused by its key.
    """
    import ckptstore
    from ckptstore.exchange.atomic_files import refuse_inside_store
    from ckptstore.exchange.import_files import step_of

    if not delta and (interval, max_restore_cost) != (None, None):
        raise click.UsageError("--interval and --max-restore-cost configure deltas: they need --delta")
    if "://" not in store:
        refuse_inside_store(Path(store))
    target = ckptstore.open(store)
    with progress("importing") as advance:
        imported = target.import_files(
            files,
            step,
            parent=None if parent == "none" else parent,
            leave_out=leave_out,
            leave_out_keys=leave_out_key,
            objects=objects,
            deltas=_deltas(interval or "auto", max_restore_cost or "4x") if delta else None,
            progress=advance,
        )
    for one in imported:
        if one.left_out:
            note(f"{one.path}: not in {one.info.ref}: {', '.join(one.left_out)}")
    if step == "auto" and len(imported) == 1 and step_of(files[0]) is None:
        note(f"{files[0]}: its name contains no step, so it is {imported[0].info.ref}; set the step with --step N")
    if as_json:
        emit(_json(store, imported))
    else:
        _print(imported)


def _sizes(imported: Sequence[ImportedFile]) -> tuple[int, int]:
    """Return the bytes of the files, and of the checkpoints made from them."""
    return sum(one.nbytes for one in imported), sum(one.info.stored for one in imported)


def _json(store: str, imported: Sequence[ImportedFile]) -> dict[str, Any]:
    before, after = _sizes(imported)
    return {
        "store": store,
        "bytes_before": before,
        "bytes_after": after,
        "checkpoints": [
            {
                "file": str(one.path),
                "file_bytes": one.nbytes,
                "kind": one.info.kind,
                "ref": one.info.ref,
                "step": one.info.step,
                "term": one.info.term,
                "tensors": one.info.tensors,
                "bytes": one.info.nbytes,
                "stored_bytes": one.info.stored,
                "state": one.info.state,
                "left_out": list(one.left_out),
            }
            for one in imported
        ],
    }


def _print(imported: Sequence[ImportedFile]) -> None:
    before, after = _sizes(imported)
    rows = [
        [str(one.path), one.info.ref, one.info.kind, f"{one.info.tensors:,}", size(one.nbytes), size(one.info.stored)]
        for one in imported
    ]
    click.echo(table(["FILE", "CHECKPOINT", "KIND", ">TENSORS", ">BEFORE", ">STORED"], rows))
    click.echo(f"{size(before)} before, {size(after)} after ({ratio(before, after)})")


def _deltas(interval: str, max_restore_cost: str) -> DeltaOptions:
    from ckptstore.write.policy.delta_interval import RestoreBound
    from ckptstore.write.policy.delta_options import DeltaOptions

    if interval == "auto":
        return DeltaOptions(bound=RestoreBound.parse(max_restore_cost))
    if not interval.isdecimal() or not int(interval):
        raise click.BadParameter(f"{interval!r}: pass a number of 1 or more, or auto", param_hint="--interval")
    return DeltaOptions(interval=int(interval), bound=RestoreBound.parse(max_restore_cost))
