"""Everything that needs a GPU, on a machine that has one: ``python -m tools.gpu``.

It has parts, which ``--part`` chooses:

\b
  tests  every test that is marked for a CUDA device; one that skips counts as one that fails
  kills  trained on the device, killed with SIGKILL, restored in another process, compared bit for bit
  peers  the table of costs: torch.save, DCP, CheckFreq-like
  saves  the table of costs: ckptstore's whole states
  diffs  the table of costs: ckptstore's deltas and step diffs
  table  peers, saves and diffs

A part ends after three minutes at most, all of them after --minutes; cases that did not begin until then are reported
as not run. It needs torch, numpy, xxhash, zstandard, click, rich, pytest and hypothesis.

The table: a GPT with AdamW is trained on the device without saves, then with a save every N iterations, then with one
every iteration, each way in a process of its own. Ways with top-k are compared with a loop that compresses its
gradients. The device is synchronized once in each iteration, before the save.

\b
  loss      mean time of an iteration over that of the same process without saves, less 1
  stall     time that the loop stands in the call that saves, and in waits that the way asks for: median, worst
  durable   from the call until the files are synced; with a save every N iterations if the way has such saves
  to host   bytes that one save copies over the bus, from records of torch's profiler; pageable: the host waits for them
  device    the peak of torch's device memory, less that of the loop without saves; kept: what stays between saves
  host      the peak of resident and pinned memory, less what the loop without saves has; and an agent's own
  stored    bytes of the newest checkpoint on the medium; all ways write new files
  equal     the newest checkpoint, restored, has the bits that were trained

Without a device it says which tests there are, and ends with exit code 3 (``--device cpu`` runs the table and the kills
with a tiny model: does it run?). With a failure it ends with 1.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from tools.bench import machine
from tools.gpu import suite, table

__all__ = ["main"]

NO_DEVICE: Final = 3
PART_SECONDS: Final = 178.0
PARTS: Final = ("tests", "peers", "saves", "diffs", "kills")
GROUPS: Final = {"table": ("peers", "saves", "diffs")}
_WAYS: Final = {"peers": table.PEERS, "saves": table.SAVES, "diffs": table.DIFFS}
_SHM: Final = Path("/dev/shm")
_WIDTH: Final = 1024
"""Of the model: 28 layers of it have 352 million parameters."""


@click.command(help=__doc__)
@click.option("--part", "parts", multiple=True, type=click.Choice([*PARTS, *GROUPS]), help="Repeatable; default: all.")
@click.option("--minutes", default=8.5, show_default=True, type=click.FloatRange(0, min_open=True), help="For all.")
@click.option("--only", multiple=True, metavar="GLOB", help="Ways of the table, as 'full*'; repeatable.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--layers", default=28, show_default=True, type=click.IntRange(1), help="Of width 1024: 12.6 M each.")
@click.option("--iteration", default=0.15, show_default=True, help="Seconds of an iteration without saves, about.")
@click.option("--tokens", default=(8, 512), show_default=True, type=int, nargs=2, help="Of one micro-batch.")
@click.option("--interval", default=10, show_default=True, type=click.IntRange(2), help="N: iterations between saves.")
@click.option("--saves", default=5, show_default=True, type=click.IntRange(2), help="Of a block, at most.")
@click.option("--seconds", default=4.0, show_default=True, help="Of a block, at most.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="Of the table.")
@click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Where checkpoints are written: a tmpfs"
              " or a disk; default: /dev/shm if they fit there, else the folder for temporary files.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a document as JSON.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write the document here, as it grows."
)
def main(parts: tuple[str, ...], minutes: float, device: str, as_json: bool, out: Path | None, **asked: Any) -> None:
    """See the module."""
    began = time.monotonic()
    chosen = [one for part in parts or PARTS for one in GROUPS.get(part, (part,))]
    if device == "cuda" and not suite.has_device():
        _without(as_json)
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=240)
    document: dict[str, Any] = {"device": _device(device), "parts": {}}
    end, good = began + 60 * minutes, True
    store = asked.pop("store")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("CKPTSTORE_RUNTIME_DIR", f"{scratch}/runtime")
        for part in dict.fromkeys(chosen):
            until = min(end, time.monotonic() + PART_SECONDS)
            started = time.monotonic()
            console.print(f"[bold]{part}[/bold]: {until - started:.0f} s at most", highlight=False)
            if part in _WAYS:
                rows, well = _table(part, device, until, console, store, document, **asked)
            else:
                rows, well = _rows(part, device, until, console, Path(scratch))
            good = good and well
            document["parts"][part] = {"seconds": time.monotonic() - started, "rows": rows}
            console.print(f"{part}: {time.monotonic() - started:.0f} s", highlight=False)
            if out is not None:
                out.write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(document))
    sys.exit(0 if good else 1)


def _without(as_json: bool) -> None:
    found = suite.marked_tests()
    names = [f"{path.relative_to(suite.ROOT)}::{name}" for path, tests in found.items() for name in tests]
    if as_json:
        click.echo(json.dumps({"device": None, "tests": names}))
    else:
        click.echo(f"no CUDA device here; {len(names)} tests wait for one, and were not run:")
        click.echo("\n".join(f"  {name}" for name in names))
    sys.exit(NO_DEVICE)


def _device(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return str(torch.cuda.get_device_name())


def _rows(part: str, device: str, until: float, console: Console, scratch: Path) -> tuple[list[dict[str, Any]], bool]:
    rows: list[suite.Row] = []
    if part == "tests":
        if device == "cpu":
            rows.append(suite.Row("test", "all", "not run", words="--device cpu: `make test` has their CPU forms"))
        else:
            rows += suite.run_tests(list(suite.marked_tests()), scratch, max(1.0, until - time.monotonic()))
    else:
        for module, options in suite.KILLS:
            left = until - time.monotonic()
            if left < 15:
                rows.append(suite.Row(module, options[1], "not run", words=f"{max(0.0, left):.0f} s were left"))
                continue
            rows += suite.run_benchmark(
                module, options, scratch, quick=device == "cpu", device=device, seconds=60, left=left
            )
            console.print(f"{rows[-1].name}: {rows[-1].outcome} {rows[-1].words}", highlight=False)
    suite.show(console, rows)
    return [asdict(row) for row in rows], all(row.good for row in rows)


def _table(
    part: str, device: str, until: float, console: Console, store: Path | None, document: dict[str, Any], **asked: Any
) -> tuple[list[dict[str, Any]], bool]:
    from tools.gpu.case import BYTES_PER_PARAMETER, Load, Plan

    ways = [way for way in _WAYS[part] if not asked["only"] or any(fnmatch.fnmatch(way, one) for one in asked["only"])]
    if not ways:
        return [], True
    load = Load(device, _WIDTH, asked["layers"], *asked["tokens"])
    plan = Plan(asked["interval"], asked["saves"], asked["seconds"])
    iteration = asked["iteration"]
    if "load" in document:  # another part has found how many micro-batches an iteration takes
        load, iteration = replace(load, micro=document["load"]["micro"]), 0.0
    if device == "cpu":
        load, plan, iteration = Load(device, 32, 1, 1, 8), Plan(3, 2, 3.0, 2), 0.0
    state = BYTES_PER_PARAMETER * 12 * load.layers * load.width**2
    place = _place(store, (table.HELD + plan.saves) * state)
    try:
        plan = replace(plan, saves=table.affordable(plan.saves, state, place))
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    folder = Path(tempfile.mkdtemp(prefix="tools-gpu-", dir=place))
    try:
        setup = table.Setup(load, plan, iteration, folder, least=1.0 if device == "cpu" else table.LEAST)
        described = machine.describe(folder)
        setup, found = table.measure(
            setup, ways, asked["rounds"], until, lambda text: console.print(text, style="dim", highlight=False)
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    document |= {"machine": described, "load": asdict(setup.load), "plan": asdict(setup.plan)}
    console.print(
        f"{document['device']}; {described['cpu']}, {described['cores']} cores; "
        f"torch {described['versions']['torch']}; {state / 1e9:.2f} GB of state and more; "
        f"checkpoints on {described['filesystem']}; {asked['rounds']} rounds; "
        f"{setup.load.micro} micro-batches of {load.batch} x {load.context} tokens",
        highlight=False,
    )
    table.show(console, setup, found)
    rows = [asdict(one) | {"summary": table.summary(one, plan.interval)} for one in found]
    return rows, all(one.good for one in found)


def _place(store: Path | None, needed: int) -> Path:
    """Where checkpoints are written. The tmpfs is memory: half of what is free there is left."""
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
        return store
    return _SHM if _SHM.is_dir() and shutil.disk_usage(_SHM).free > needed else Path(tempfile.gettempdir())


if __name__ == "__main__":
    main()
