"""``ckpt import``: files of other tools as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from ckptstore.cli.arguments import REF, STEP, STORE
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, progress, size, table


@make_command(
    "import",
    examples=[
        "ckpt import runs/gpt model.safetensors --step 1000",
        "ckpt import runs/gpt checkpoint-*/model.safetensors.index.json",
        "ckpt import runs/gpt step_*.pt",
        "ckpt import runs/gpt old/step_500.pt --parent none",
    ],
)
@STORE
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--step",
    type=STEP,
    default="auto",
    metavar="N|auto",
    help="Step of a single file. auto, the default: from the file's or folder's name, else the one after the parent's.",
)
@click.option(
    "--parent",
    type=REF,
    default="latest",
    metavar="REF|none",
    help="What the new term continues from; default: latest.",
)
def command(store: str, files: tuple[Path, ...], step: int | Literal["auto"], parent: str, as_json: bool) -> None:
    """Store .safetensors and .pt files as checkpoints.

    FILE is a .safetensors or .pt file, the .index.json of Hugging Face shards, or a folder that holds one of these.
    Several files are a series, stored by ascending step. The store is created if there is none. Pickled code is never
    run: a .pt file that needs it is refused.
    """
    import ckptstore
    from ckptstore.importing import import_files

    target = ckptstore.open(store)
    with progress("importing") as advance:
        imported = import_files(
            target,
            files,
            step,
            parent=None if parent == "none" else parent,
            progress=advance,
        )
    if as_json:
        emit(
            {
                "store": store,
                "checkpoints": [
                    {
                        "file": str(one.path),
                        "ref": one.info.ref,
                        "step": one.info.step,
                        "term": one.info.term,
                        "tensors": one.info.tensors,
                        "bytes": one.info.nbytes,
                        "stored_bytes": one.info.stored,
                        "state": one.info.state,
                    }
                    for one in imported
                ],
            }
        )
        return
    rows = [[str(one.path), one.info.ref, f"{one.info.tensors:,}", size(one.info.stored)] for one in imported]
    click.echo(table(["FILE", "CHECKPOINT", ">TENSORS", ">STORED"], rows))
