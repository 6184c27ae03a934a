"""Implements ``ckpt publish``: keeps a folder or a bucket's prefix of weights up to date with a run."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptstore.cli.arguments import PLACE, REF, SIZE, STORE, opened, select_option
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import duration, emit, emit_line, note, pause, progress, size
from ckptstore.cli.range_text import counted
from ckptstore.cli.text_wrap import say
from ckptstore.errors import ReadOnlyError, StorageError, UnsupportedBackendError

if TYPE_CHECKING:
    from ckptstore import Published, Publisher

_LONGEST_PAUSE = 60.0
"""Most seconds until a medium that failed is tried again."""


@make_command(
    "publish",
    examples=[
        "ckpt publish runs/gpt --to /shared/gpt --follow        # until Ctrl-C",
        "ckpt publish runs/gpt --to s3://bucket/serve/gpt --files base-model --sha256",
        "ckpt publish runs/gpt --to /shared/gpt --ref tag:best --full-every 1     # only fulls",
        "ckpt publish s3://bucket/gpt --to /shared/gpt --layout slime --follow --json",
    ],
)
@STORE
@click.option("--to", required=True, type=PLACE, metavar="PLACE", help="Path or URL to publish to; made if missing.")
@click.option("--ref", type=REF, default="latest", metavar="REF", help="What to publish. Default: latest.")
@click.option(
    "--layout",
    type=click.Choice(["hf", "slime"]),
    default="hf",
    help="Form of the deltas: hf, the changed tensors; slime, as slime's delta weight sync reads them. Default: hf.",
)
@click.option(
    "--strip",
    default="model.",
    metavar="PREFIX",
    help="Only tensors named PREFIX..., without it; '' takes all. Default: model.",
)
@select_option("Only tensors that match; may be repeated.")
@click.option(
    "--files",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A folder with the model's config.json and tokenizer, which each full gets.",
)
@click.option("--keep", type=click.IntRange(min=1), default=2, metavar="N", help="Newest versions to keep. Default: 2.")
@click.option(
    "--full-every", type=click.IntRange(min=1), default=16, metavar="N", help="One version of N is a full. Default: 16."
)
@click.option("--sha256", is_flag=True, help="Publish a SHA-256 of each tensor, besides its XXH3.")
@click.option("--max-shard-size", type=SIZE, help="Split into files of at most this size. Default: 5GB.")
@click.option(
    "--follow",
    is_flag=True,
    help="Publish each new checkpoint until it is interrupted. Default: publish the newest, and exit.",
)
@click.option(
    "--every", type=float, default=2.0, metavar="SECONDS", help="With --follow: time between two polls. Default: 2."
)
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Exit after this long without one.")
def command(
    store: str,
    to: str,
    ref: str,
    layout: Literal["hf", "slime"],
    strip: str,
    select: tuple[str, ...],
    files: Path | None,
    keep: int,
    full_every: int,
    sha256: bool,
    max_shard_size: int | None,
    follow: bool,
    every: float,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Keep a folder or a bucket's prefix of weights up to date with a run.

    PLACE gets a folder for each version: a full, as from_pretrained reads it, then deltas on it, with a checksum of
    each tensor. A version appears whole, by one rename or one PUT of latest.json. Old versions are removed. A killed
    command leaves the previous version; the same command continues. Ctrl-C ends it.
    """
    with progress("publishing") as advance:
        publisher = opened(store).publish(
            to,
            ref=ref,
            layout=layout,
            strip=strip,
            select=select or None,
            files=files,
            keep=keep,
            full_every=full_every,
            sha256=sha256,
            max_shard_bytes=max_shard_size,
            poll=every,
            timeout=timeout,
            progress=advance,
        )
        with publisher:
            if not follow:
                found = publisher.look()
                pause(advance)
                if found is not None:
                    _print(found, to, emit if as_json else None)
                elif not as_json:
                    note(f"{to} has the newest checkpoint already, or there is none yet")
                return
            try:
                while (found := _next(publisher, every)) is not None:
                    pause(advance)
                    _print(found, to, emit_line if as_json else None)
            except KeyboardInterrupt:
                pass


def _next(publisher: Publisher, every: float) -> Published | None:
    wait = every
    while True:
        try:
            return next(publisher, None)
        except (ReadOnlyError, UnsupportedBackendError):
            raise
        except StorageError as error:
            note(f"{error}; trying again")
            time.sleep(wait)
            wait = min(_LONGEST_PAUSE, 2 * wait)


def _print(found: Published, to: str, print_json: Any) -> None:
    if print_json is not None:
        print_json({"to": to, **asdict(found), "removed": list(found.removed), "seconds": round(found.seconds, 3)})
        return
    what = f"a full ({found.reason})" if found.base is None else f"a delta on version {found.base}"
    if found.base is not None:
        what += f", {found.changed:,} of {counted(found.tensors, 'tensor')} changed"
    say(
        f"published {found.ref} as {found.folder}: {what}; {size(found.written)} for {size(found.nbytes)} "
        f"in {duration(found.seconds)}"
    )
    if found.lossy:
        note(f"{found.ref} is lossy: its bits differ from those of the training; it was stored that way on request")
