"""Implements ``ckpt restore``: writes a checkpoint to ordinary files."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ckptstore.cli.arguments import REF, SIZE, STORE, opened, select_option
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import between, duration, emit, note, progress, size
from ckptstore.cli.plan_output import plan_step, plan_table
from ckptstore.cli.range_text import counted
from ckptstore.cli.spinner import patience
from ckptstore.cli.text_wrap import say

if TYPE_CHECKING:
    from ckptstore.exchange.export import ExportResult


@make_command(
    "restore",
    examples=[
        "ckpt restore runs/gpt --out model.safetensors",
        "ckpt restore runs/gpt --strip model. --out model.safetensors      # for load_state_dict",
        "ckpt restore runs/gpt 1000@2 --out step1000.pt",
        "ckpt restore runs/gpt tag:best --select 'model.*' --out best.safetensors --force",
        "ckpt restore runs/gpt --out model.safetensors --max-shard-size 5GB",
        "ckpt restore runs/gpt --layout hf --out exported            # for from_pretrained",
        "ckpt restore runs/gpt --layout hf --config gpt2-original --max-shard-size 5GB --out exported",
        "ckpt restore runs/gpt --layout hf-trainer --out checkpoint-1000",
        "ckpt restore runs/net --layout lightning --out last.ckpt    # for fit(ckpt_path=)",
        "ckpt restore runs/gpt 1000 --format dcp --out step-1000      # for torch.distributed.checkpoint.load",
        "ckpt restore runs/gpt 1000 --explain",
        "ckpt restore runs/gpt --out - | ssh node-7 'cat > model.safetensors'",
    ],
)
@STORE
@click.argument("ref", type=REF, default="latest", metavar="[REF]")
@click.option("--out", type=click.Path(), metavar="PATH", help="The file to write; - is stdout.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "pt", "dcp"]),
    help="dcp: a new folder for torch.distributed.checkpoint. Default: by the suffix of PATH, else safetensors.",
)
@click.option(
    "--layout",
    type=click.Choice(["hf", "hf-trainer", "lightning"]),
    help="hf: a folder for from_pretrained; hf-trainer: one for the Trainer's resume_from_checkpoint; lightning: a "
    "file for Trainer.fit(ckpt_path=).",
)
@select_option("Only tensors that match; may be repeated.")
@click.option(
    "--config",
    type=click.Path(),
    metavar="DIR",
    help="With --layout hf: copy config.json and the tokenizer from this folder, if the checkpoint has none.",
)
@click.option("--strip", metavar="PREFIX", help="Only tensors named PREFIX..., without it: for load_state_dict.")
@click.option("--max-shard-size", type=SIZE, help="Split into files of at most this size, with an index.")
@click.option("--force", is_flag=True, help="Replace PATH if it exists.")
@click.option("--explain", is_flag=True, help="Write nothing: show what a restore reads and decodes.")
@click.option("--all", "whole", is_flag=True, help="With --explain: every step of a long chain.")
def command(
    store: str,
    ref: str,
    out: str | None,
    file_format: Literal["safetensors", "pt", "dcp"] | None,
    layout: Literal["hf", "hf-trainer", "lightning"] | None,
    select: tuple[str, ...],
    config: str | None,
    strip: str | None,
    max_shard_size: int | None,
    force: bool,
    explain: bool,
    whole: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint to a .safetensors or .pt file, or as a framework reads it.

    The file appears when it is complete and durable, or not at all. A .pt file loads with
    torch.load(weights_only=True). A .safetensors file carries the rest of the state in its
    metadata, where `ckpt import` finds it.
    """
    if explain:
        _explain(store, ref, select, as_json, whole=whole)
        return
    if whole:
        raise click.UsageError("--all needs --explain")
    if out is None:
        raise click.UsageError("Missing option '--out' (or --explain, to see the plan only).")
    _check_options(out, layout, config, file_format, select, strip, force=force)
    piped = out == "-"
    if piped:
        _check_piped(as_json, max_shard_size)
    began = time.perf_counter()
    with ExitStack() as stack:
        if piped:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-restore-"))
            out = str(Path(folder, f"state.{file_format or 'safetensors'}"))
        advance = stack.enter_context(progress("restoring"))
        if layout is not None:
            result = opened(store).export_folder(
                ref, out, layout, strip=strip, config=config, max_shard_bytes=max_shard_size, progress=advance
            )
        else:
            result = opened(store).export(
                ref,
                out,
                format=file_format,
                select=select or None,
                strip=strip,
                overwrite=force,
                max_shard_bytes=max_shard_size,
                progress=advance,
            )
        if piped:
            with Path(out).open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
    _print_result(result, time.perf_counter() - began, as_json, piped)


def _check_options(
    out: str,
    layout: str | None,
    config: str | None,
    file_format: str | None,
    select: tuple[str, ...],
    strip: str | None,
    *,
    force: bool,
) -> None:
    if config is not None and layout != "hf":
        raise click.UsageError("--config is for --layout hf")
    if layout is not None and (file_format is not None or select):
        raise click.UsageError("--layout says what is written: it cannot be combined with --format or --select")
    if layout not in (None, "hf") and strip is not None:
        raise click.UsageError("--layout says what is written: only --layout hf can be combined with --strip")
    form = "--layout" if layout is not None else "--format dcp"
    if layout is None and file_format != "dcp":
        return
    if out == "-":
        raise click.UsageError(f"{form} needs a path: --out - cannot be combined with it")
    if force:
        raise click.UsageError(f"{form} replaces nothing: leave --force out, and remove PATH first")


def _check_piped(as_json: bool, max_shard_size: int | None) -> None:
    if as_json or max_shard_size is not None:
        raise click.UsageError(
            "--out - writes one file to stdout: it cannot be combined with --json or --max-shard-size"
        )
    if sys.__stdout__ is None:  # `cli.main` has replaced it with /dev/null
        raise click.UsageError("--out - writes the file to stdout, which is closed here")
    if sys.stdout.isatty():
        raise click.UsageError("--out - writes the file to stdout, which is a terminal here: use a pipe, or > FILE")


def _print_result(result: ExportResult, seconds: float, as_json: bool, piped: bool) -> None:

    if result.converted:
        some = ", ".join(result.converted[:3]) + (" ..." if len(result.converted) > 3 else "")
        kind = "the folder" if result.format == "dcp" else "a .pt file"
        note(f"{len(result.converted)} values have another type in {kind} (numpy, frozenset, objects): {some}")
    if result.tied:
        some = ", ".join(f"{name} (as {there})" for name, there in result.tied[:3])
        more = " ..." if len(result.tied) > 3 else ""
        note(
            f"a .safetensors file contains a tied tensor once; left out ({len(result.tied)}): {some}{more}; a model "
            "that ties them loads it with load_state_dict(..., strict=False)"
        )
    if result.lossy:
        note(f"{result.ref} is lossy: its bits differ from those of the training; it was stored that way on request")
    if as_json:
        emit(
            {
                "ref": result.ref,
                "lossy": result.lossy,
                "format": result.format,
                "paths": [str(path) for path in result.paths],
                "index": None if result.index is None else str(result.index),
                "tensors": result.tensors,
                "bytes": result.nbytes,
                "converted": list(result.converted),
                "tied": [{"name": name, "as": there} for name, there in result.tied],
                "seconds": round(seconds, 3),
            }
        )
        return
    where = str(result.paths[0]) if result.index is None else f"{len(result.paths)} files and {result.index}"
    where = str(result.paths[0].parent) if result.format == "dcp" else where
    where = "to stdout" if piped else where
    speed = size(int(result.nbytes / max(seconds, 1e-9)))
    (note if piped else say)(
        f"wrote {where}: checkpoint {result.ref}, {counted(result.tensors, 'tensor')}, {size(result.nbytes)} "
        f"in {duration(seconds)} ({speed}/s)"
    )


def _explain(store: str, ref: str, select: tuple[str, ...], as_json: bool, *, whole: bool) -> None:
    with patience("planning"):
        found = opened(store).explain(ref, select or None)
    if as_json:
        emit(
            {
                "ref": found.ref,
                "bytes": found.nbytes,
                "bytes_read": found.bytes_read,
                "seconds": round(found.seconds, 3),
                "read_rate": round(found.rates.read),
                "decode_rate": round(found.rates.decode),
                "steps": [plan_step(step) for step in found.steps],
            }
        )
        return
    rates = f"reading {size(int(found.rates.read))}/s, decoding {size(int(found.rates.decode))}/s, measured now"
    seconds = f": {said}" if (said := between(found.span)) else ""
    costs = f"reads {size(found.bytes_read)} for {size(found.nbytes)}{seconds}"
    say(f"restoring {found.ref} {costs} ({rates})")
    click.echo(plan_table(found, whole=whole))
