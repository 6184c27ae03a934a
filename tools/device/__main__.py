"""Counts the device work of one training step with a Checkpointer, on a simulated device.

python -m tools.device [--strategy full] [--parameters 30] [--seed 0] [--agent] [--json]

Trains a small model with AdamW, and prints the device work of ``Checkpointer.step()`` and of ckptstore until the next
step begins, for one step in the middle: bytes over the bus, waits of the host and their callers, launches, device
memory that ckptstore allocates.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from tools.device import simulated, why_not

__all__ = ["Row", "main", "measured"]

STRATEGIES: Final = ("full", "delta", "gradient")
STEPS: Final = 9
MIDDLE: Final = 6
_WIDTH: Final = 32


@dataclass(frozen=True, slots=True)
class Row:
    """Counts of one step.

    Attributes:
        state_bytes: of the model and the optimizer on the device.
        to_host, to_device: bytes over the bus.
        copies: how many copies over the bus ckptstore requested.
        launches: kernels that ckptstore launched.
        launched_by, copied_by: the places that did, and how often.
        held: bytes of device memory that ckptstore had allocated, at most.
        waits: the places that waited for the device, the innermost first, and how often.
        script_launches: launches of the script itself.
        hazards: the hazards that were found.
    """

    strategy: str
    agent: bool
    state_bytes: int
    to_host: int
    to_device: int
    copies: int
    launches: int
    held: int
    waits: dict[str, int]
    launched_by: dict[str, int]
    copied_by: dict[str, int]
    script_launches: int
    hazards: list[str]


def measured(place: Path, strategy: str, *, parameters: int = 30, seed: int = 0, agent: bool = False) -> Row:
    """Train, and count one step in the middle.

    Args:
        place: where the store is made.
        strategy: of the Checkpointer.
        parameters: how many tensors the model has, an even number.
        seed: of the simulated machine.
        agent: let an agent save.
    """
    import torch

    from ckptstore.training import Checkpointer

    with simulated(seed) as machine:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(parameters // 2)]
        model = torch.nn.Sequential(*layers).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        counts, row = machine.counts, None
        with Checkpointer(place, model=model, optimizer=optimizer, strategy=strategy, agent=agent) as checkpointer:
            checkpointer.resume()
            for step in range(1, STEPS + 1):
                model(torch.randn(8, _WIDTH, device="cuda")).square().mean().backward()
                if step == MIDDLE:
                    torch.cuda.synchronize()
                    machine.settle()
                    counts.reset()
                optimizer.step()
                pending = checkpointer.step()
                if step in (MIDDLE - 1, MIDDLE) and pending is not None:
                    pending.result()  # so that exactly one step's work is counted
                if step == MIDDLE:
                    machine.settle()
                    slots = [one for found in optimizer.state.values() for one in found.values()]
                    state = [*model.parameters(), *slots]
                    launches, copies = counts.launches, counts.copies
                    row = Row(
                        strategy,
                        agent,
                        sum(one.numel() * one.element_size() for one in state if one.is_cuda),
                        counts.to_host,
                        counts.to_device,
                        counts.of_product(copies),
                        counts.of_product(launches),
                        counts.product_peak,
                        dict(Counter(f"{one.why}: {' < '.join(one.where)}" for one in counts.waits if one.where)),
                        {where: number for where, number in launches.most_common() if where is not None},
                        {where: number for where, number in copies.most_common() if where is not None},
                        launches[None],
                        list(machine.hazards),
                    )
                optimizer.zero_grad()
        assert row is not None
        return row


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the table, and below it the places."""
    table = Table("strategy", title=f"Step {MIDDLE} of {STEPS}: the device work of ckptstore", title_justify="left")
    for name in ("state B", "to host B", "to device B", "copies", "launches", "host waits", "held B"):
        table.add_column(name, justify="right")
    for row in rows:
        waits = sum(row.waits.values())
        numbers = (row.state_bytes, row.to_host, row.to_device, row.copies, row.launches, waits, row.held)
        table.add_row(row.strategy + (" by an agent" if row.agent else ""), *(f"{one:,}" for one in numbers))
    console.print(table)
    for row in rows:
        console.print(f"\n{row.strategy}{' by an agent' if row.agent else ''}:", highlight=False)
        for what, places in (("waits", row.waits), ("launches", row.launched_by), ("copies", row.copied_by)):
            for where, number in sorted(places.items(), key=lambda item: -item[1]):
                console.print(f"  {number:5} {what:8} {where}", highlight=False, soft_wrap=True)


@click.command(help=__doc__)
@click.option(
    "--strategy", "strategies", type=click.Choice(STRATEGIES), multiple=True, help="Only this one; repeat it."
)
@click.option("--parameters", type=click.IntRange(min=2), default=30, show_default=True, help="Tensors of the model.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the order of device work; 0: as late as possible."
)
@click.option("--agent", is_flag=True, help="Let an agent save.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def main(*, strategies: Sequence[str], parameters: int, seed: int, agent: bool, as_json: bool) -> None:
    """Run the command: see the module."""
    if (why := why_not()) is not None:
        click.echo(f"no device is simulated: {why}", err=True)
        sys.exit(3)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model's size and the like
        before: Any = os.environ.get("CKPTSTORE_RUNTIME_DIR")
        os.environ["CKPTSTORE_RUNTIME_DIR"] = f"{folder}/runtime"
        try:
            for strategy in strategies or STRATEGIES:
                place = Path(folder) / strategy
                rows.append(measured(place, strategy, parameters=parameters, seed=seed, agent=agent))
        finally:
            if before is None:
                del os.environ["CKPTSTORE_RUNTIME_DIR"]
            else:
                os.environ["CKPTSTORE_RUNTIME_DIR"] = before
    if as_json:
        click.echo(json.dumps({"step": MIDDLE, "seed": seed, "rows": [asdict(row) for row in rows]}))
    else:
        show(Console(width=None if sys.stdout.isatty() else 160), rows)


if __name__ == "__main__":
    main()
