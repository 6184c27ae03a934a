"""Implements ``ckpt compact``: rewrites kept checkpoints, so that bases that are only held can be deleted."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import RANGE, SIZE, STORE, answer_options, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import duration, emit, note, progress, size, table
from ckptstore.cli.quantities import RATE, TIME
from ckptstore.cli.range_text import counted, ranges
from ckptstore.cli.text_wrap import say
from ckptstore.errors import CorruptionError, RequestError

if TYPE_CHECKING:
    from ckptstore import CompactMove, CompactReport

NOT_ANSWERED = RequestError.exit_code
"""Exit code if the writing run refused a move, or did not answer in time."""


@make_command(
    "compact",
    examples=[
        "ckpt compact runs/gpt --dry-run                          # what would be rewritten, and what that frees",
        "ckpt compact runs/gpt --max-depth 20                     # a training run is writing: it is asked",
        "ckpt compact runs/gpt --max-restore-seconds 30s --take-over --gc",
        "ckpt compact runs/gpt --only 1000..2000                  # the fulls of a range as deltas; all are kept",
        "ckpt compact runs/gpt --plain tag:best                   # a file that safetensors maps: store.file_of",
    ],
)
@STORE
@click.option(
    "--max-depth",
    type=click.IntRange(min=0),
    metavar="N",
    help="Let no restore apply more than N deltas and step diffs to its full.",
)
@click.option(
    "--max-restore-seconds",
    "max_seconds",
    type=TIME,
    metavar="S",
    help="Let no restore take longer than this on this machine: 30s, 500ms.",
)
@click.option(
    "--target-bytes",
    "target",
    type=SIZE,
    help="Stop turning fulls into deltas when the store is this small. Default: make it as small as possible.",
)
@click.option("--only", type=RANGE, help="Rewrite only these, --plain too: two REFs of one term.")
@click.option(
    "--plain",
    multiple=True,
    metavar="REF",
    help="Store this checkpoint as an uncompressed full, which other programs can map; may be repeated. Later "
    "compactions leave it so.",
)
@click.option("--compress-plain", is_flag=True, help="Also compress fulls that an earlier --plain has stored.")
@click.option("--bandwidth", type=RATE, help="Decode and encode at most this much per second: 100MB/s.")
@click.option("--gc", "collect", is_flag=True, help="Also delete the segments that nothing needs, as ckpt gc does.")
@click.option(
    "--dry-run", is_flag=True, help="Change nothing: show what would be done. Sizes are estimated from samples."
)
@answer_options
def command(
    store: str,
    max_depth: int | None,
    max_seconds: float | None,
    target: int | None,
    only: str | None,
    plain: tuple[str, ...],
    compress_plain: bool,
    bandwidth: float | None,
    collect: bool,
    dry_run: bool,
    take_over: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Rewrite kept checkpoints, so that bases that are only held can be deleted.

    Every checkpoint is kept, bit for bit. Rewritten data is read back and compared before the old data is given up.
    Each move is one record: an interrupted run continues where it stopped. Then `ckpt gc`, or --gc, frees the space.
    """
    target_store = opened(store)
    with progress("compacting") as advance:
        done = target_store.compact(
            max_depth=max_depth,
            max_restore_seconds=max_seconds,
            target_bytes=target,
            only=only,
            plain=plain,
            compress_plain=compress_plain,
            bandwidth=None if bandwidth is None else max(1, int(bandwidth)),
            dry_run=dry_run,
            take_over=take_over,
            timeout=timeout,
            progress=advance,
        )
    collected = None
    if collect and not dry_run:
        with progress("deleting") as advance:
            collected = target_store.gc(progress=advance).nbytes
    if as_json:
        emit(_json(store, done, collected))
    else:
        _print(done, collected, timeout)
    return exit_code(done)


def exit_code(done: CompactReport) -> int:
    """Whether every move was made: 0, or the exit code that says why not."""
    if any(move.result in ("waiting", "left") or move.asked for move in done.moves):
        return NOT_ANSWERED
    return CorruptionError.exit_code if any(move.damaged for move in done.moves) else 0


def _json(store: str, done: CompactReport, collected: int | None) -> dict[str, Any]:
    return {
        "store": store,
        "dry_run": done.dry_run,
        "moves": [_move(move) for move in done.moves],
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "restore_seconds_before": round(done.restore_seconds_before, 4),
        "restore_seconds_after": round(done.restore_seconds_after, 4),
        "checkpoints": len(done.kept),
        "unmet": [{"ref": one.ref or None, "why": one.why} for one in done.unmet],
        "bytes_for_gc": done.collectable_nbytes,
        "bytes_deleted": collected,
    }


def _move(move: CompactMove) -> dict[str, Any]:
    return {
        "kind": move.kind,
        "why": move.why,
        "stored": [{"ref": ref, "base": base or None} for ref, base in move.stored.items()],
        "result": move.result,
        "reason": move.reason,
        "bytes_before": move.bytes_before,
        "bytes_after": move.bytes_after,
        "restore_seconds_before": round(move.seconds_before, 4),
        "restore_seconds_after": round(move.seconds_after, 4),
        "written": list(move.written),
        "dropped": list(move.dropped),
    }


_WIDE = 110
"""Columns of the table with the reasons."""
_SHOWN = 40
"""Maximum number of moves in the table. If there are more, the first and the last are shown."""


def _print(done: CompactReport, collected: int | None, timeout: float) -> None:
    if not done.moves:
        click.echo("nothing to compact: no held base can be released, and no other rewrite saves bytes")
    else:
        shown = [*done.moves[: _SHOWN // 2], *done.moves[max(_SHOWN // 2, len(done.moves) - _SHOWN // 2) :]]
        headings = ["MOVE", "CHECKPOINTS", "WHY", ">STORED", ">RESTORE BEFORE", ">AFTER", "RESULT"]
        rows = [_row(move) for move in shown]
        if sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE:
            headings = ["MOVE", "CHECKPOINTS", ">STORED", ">RESTORE", ">AFTER", "RESULT"]
            for row in rows:
                del row[2]
            click.echo(table(headings, rows))
            note("a terminal of 110 columns shows why each move is made, and so does --json")
        else:
            click.echo(table(headings, rows))
        if len(shown) < len(done.moves):
            note(f"{len(done.moves) - len(shown):,} moves between them are not shown; --json has all")
    for move in done.moves:
        if move.reason:
            note(f"{move.kind} {ranges(move.stored)}: {move.reason}")
    for one in done.unmet:
        note(f"{one.ref}: {one.why}" if one.ref else one.why)
    _closing(done, collected, timeout)


def _row(move: CompactMove) -> list[str]:
    times = [duration(move.seconds_before), duration(move.seconds_after)] if move.stored else ["", ""]
    return [
        move.kind,
        _what(move),
        move.why,
        _change(move.bytes_after - move.bytes_before),
        *times,
        move.result,
    ]


def _change(nbytes: int) -> str:
    """Format what a move adds to the store or removes: ``-1.20 MiB``, ``+512 B``, ``0 B``."""
    return f"{'-' if nbytes < 0 else '+' if nbytes else ''}{size(abs(nbytes))}"


def _what(move: CompactMove) -> str:
    """Format what a move rewrites, and on which base: ``20..80@1 by 20 on 5@1``."""
    bases = {base for base in move.stored.values() if base}
    if not bases or move.kind == "merge":
        return ranges(move.stored)
    if len(bases) == 1 and all(move.stored.values()):
        return f"{ranges(move.stored)} on {bases.pop()}"
    return ", ".join(f"{ref} on {base}" if base else ref for ref, base in move.stored.items())


def _closing(done: CompactReport, collected: int | None, timeout: float) -> None:
    would = "would be " if done.dry_run else ""
    say(
        f"{counted(len(done.kept), 'checkpoint')} {would}kept: {size(done.bytes_before)} -> {size(done.bytes_after)}, "
        f"slowest restore {duration(done.restore_seconds_before)} -> {duration(done.restore_seconds_after)}"
    )
    more = done.bytes_after - done.bytes_before
    if more > 0:
        mapped = any(move.why == "a full to map" for move in done.moves)
        why = (
            "fulls to map are not compressed"
            if mapped
            else "a limit of depth or time is met with fulls and larger deltas"
        )
        note(f"the store {'would grow' if done.dry_run else 'has grown'} by {size(more)}: {why}")
    if collected is not None:
        click.echo(f"deleted {size(collected)}")
    elif done.collectable_nbytes:
        note(f"`ckpt gc` {'would then free' if done.dry_run else 'frees'} {size(done.collectable_nbytes)}")
    if any(move.result == "waiting" for move in done.moves):
        note(
            f"no answer in {timeout:g} s. A live run looks for requests every 5 s and after each save, and may still "
            "accept this one; a newer term makes it void. If no run is writing: --take-over"
        )
