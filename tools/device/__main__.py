"""Counts the device work of one training step with a Checkpointer, on a simulated device.

python -m tools.device [--strategy full] [--parameters 30] [--seed 0] [--agent] [--ranks 2] [--json]

Trains a small model with AdamW, and prints for one step in the middle what ``Checkpointer.step()``, and whatever else
ckptstore does until the next step begins, has the device do: bytes over the bus, waits of the host (those of the
threads that train are counted apart) and who asked for them, launches, device memory that ckptstore allocates. Ranks
are threads, each with a device of its own and the same model; their numbers are added up.

``gradient+topk`` is ``gradient`` with a `TopKHook` (density 1 %, of each tensor or, ``+bucket``, of all of them); its
``compress`` counts, too. ``+recompute``: the host computes the new state again. ``replica+topk`` and
``replica+bucket`` are ``replica`` with ``TopKHook(0.01, exact=False)``.
``layerwise`` is `LayerwiseSnapshots` in one process, with copies to the host or, ``+device``, on the device first.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

import ckptstore
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from ckptstore.write.saves.save_metrics import SaveMetrics
from tools.device import Machine, simulated, why_not

__all__ = ["Row", "main", "measured"]

STRATEGIES: Final = (
    *("full", "delta", "gradient", "gradient+recompute", "gradient+topk", "gradient+topk+recompute"),
    *("gradient+bucket", "layerwise", "layerwise+device"),
)  # fmt: skip
REPLICA: Final = ("replica", "replica+topk", "replica+bucket")
"""Strategies of an agent alone."""
STEPS: Final = 9
MIDDLE: Final = 6
_WIDTH: Final = 32
_REPLICATED_WIDTH: Final = 64
"""An agent does not compute parameters of less than 16 KiB."""


@dataclass(frozen=True, slots=True)
class Row:
    """Counts of one step.

    Attributes:
        ranks: how many there are; 0: one process that saves alone.
        state_bytes: of the models and the optimizers on the devices.
        to_host, to_device: bytes over the bus.
        copies: how many copies over the bus ckptstore requested.
        launches: kernels that ckptstore launched.
        launched_by, copied_by: the places that did, and how often.
        held: bytes of device memory that ckptstore had allocated, at most.
        kept: of these, what it keeps from step to step.
        reported: what `SaveMetrics` says that it keeps.
        waits: the places that waited for the device, the innermost first, and how often.
        training_waits: how many of these waits were in a thread that trains.
        script_launches: those of the script itself.
        hazards: what was found to be wrong.
    """

    strategy: str
    agent: bool
    ranks: int
    state_bytes: int
    to_host: int
    to_device: int
    copies: int
    launches: int
    held: int
    kept: int
    reported: int
    waits: dict[str, int]
    training_waits: int
    launched_by: dict[str, int]
    copied_by: dict[str, int]
    script_launches: int
    hazards: list[str]


def measured(
    place: Path, strategy: str, *, parameters: int = 30, seed: int = 0, agent: bool = False, ranks: int = 0
) -> Row:
    """Train, and count one step in the middle.

    Args:
        place: where the store is made.
        strategy: one of `STRATEGIES`, or with `agent` of `REPLICA`.
        parameters: how many tensors the model has, an even number.
        seed: of the simulated machine.
        agent: have an agent save.
        ranks: how many save together; 0: one process alone.
    """
    import torch

    gc.collect()  # Prevents: counting what the hook of an earlier call still holds.
    with simulated(seed, devices=max(ranks, 1)) as machine:
        torch.manual_seed(0)
        width = _REPLICATED_WIDTH if strategy in REPLICA else _WIDTH
        layers = [torch.nn.Linear(width, width) for _ in range(parameters // 2)]
        step = _Step(machine, strategy, torch.nn.Sequential(*layers), agent, ranks)
        if not ranks:
            step.train(place, 0, None)
        else:
            mailbox = LocalMailbox()
            with ThreadPoolExecutor(ranks) as pool:
                groups = [Group(rank, ranks, mailbox) for rank in range(ranks)]
                trained = [pool.submit(step.train, place, group.rank, group) for group in groups]
                for one in trained:
                    one.result()
        assert step.row is not None
        return replace(step.row, reported=step.reported)


class _Step:
    """One step of a training, counted.

    Attributes:
        row: what was counted.
        reported: see `Row`.
    """

    def __init__(self, machine: Machine, strategy: str, model: Any, agent: bool, ranks: int) -> None:
        self.row: Row | None = None
        self._machine = machine
        self._strategy = strategy
        self._model = model
        self._agent = agent
        self._ranks = ranks
        self._together = threading.Barrier(max(ranks, 1), timeout=120)
        self._training: set[int] = set()
        self._state_bytes = 0
        self.reported = 0

    def train(self, place: Path, rank: int, group: Group | None) -> None:
        """Train a copy of the model, on the device of the rank's number."""
        import torch

        try:
            self._training.add(threading.get_ident())
            device = torch.device("cuda", rank)
            with torch.cuda.device(device), torch.autograd.set_multithreading_enabled(False):
                model = copy.deepcopy(self._model).to(device)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                chance = torch.Generator().manual_seed(0)
                with self._saving(place, model, optimizer, group) as (prepare, save):
                    for step in range(1, STEPS + 1):
                        inputs = torch.randn(8, model[0].in_features, generator=chance).to(device)
                        model(inputs).square().mean().backward()
                        if step == MIDDLE:
                            self._begin(rank)
                        prepare(step)
                        optimizer.step()
                        pending = save(step)
                        if step in (MIDDLE - 1, MIDDLE) and pending is not None:
                            pending.result()  # so that one step's work is counted, and all of it
                        if step == MIDDLE:
                            self._end(rank, [*model.parameters(), *_slots(optimizer)])
                        optimizer.zero_grad()
        except BaseException:
            self._together.abort()
            raise

    @contextlib.contextmanager
    def _saving(
        self, place: Path, model: Any, optimizer: Any, group: Group | None
    ) -> Iterator[tuple[Callable[[int], object], Callable[[int], Any]]]:
        """What a script calls before the optimizer's step, and after it -> the save."""
        from ckptstore.training import Checkpointer, LayerwiseSnapshots, TopKHook

        strategy, *kinds = self._strategy.split("+")
        recompute = "recompute" in kinds
        kind = next((one for one in kinds if one != "recompute"), "")
        if strategy == "layerwise":
            mode: Any = kind or "host"
            with (
                ckptstore.open(place, create=True) as store,
                store.writer(max_in_flight=2, on_metrics=self._measured) as writer,
                LayerwiseSnapshots(writer, model, optimizer, mode=mode, packed=0) as snapshots,
            ):
                yield snapshots.begin, snapshots.save
            return
        scope: Any = "bucket" if kind == "bucket" else "tensor"
        hook = TopKHook(0.01, scope=scope, exact=strategy != REPLICA[0]) if kind else None
        options: dict[str, Any] = {} if group is None else {"group": group}
        with Checkpointer(
            place,
            model=model,
            optimizer=optimizer,
            strategy=strategy,
            agent=self._agent,
            on_metrics=self._measured,
            compressor=hook,
            recompute=recompute,
            **options,
        ) as checkpointer:
            checkpointer.resume()
            yield lambda _: hook and hook.compress(model.parameters()), lambda _: checkpointer.step()

    def _measured(self, metrics: SaveMetrics) -> None:
        if metrics.step == MIDDLE:
            self.reported = metrics.device_bytes  # the same of all ranks, which are one process here

    def _begin(self, rank: int) -> None:
        import torch

        self._together.wait()
        if rank == 0:
            torch.cuda.synchronize()
            self._machine.settle()
            self._machine.counts.reset()
        self._together.wait()

    def _end(self, rank: int, state: Sequence[Any]) -> None:
        self._state_bytes += sum(one.numel() * one.element_size() for one in state if one.is_cuda)
        self._together.wait()
        if rank == 0:
            self._machine.settle()
            self._machine.scheduler.run_all()  # memory that another stream used is free once that stream has gone on
            self.row = self._counted()
        self._together.wait()

    def _counted(self) -> Row:
        counts = self._machine.counts
        waits = [one for one in counts.waits if one.where]
        launches, copies = counts.launches, counts.copies
        return Row(
            self._strategy,
            self._agent,
            self._ranks,
            self._state_bytes,
            counts.to_host,
            counts.to_device,
            counts.of_product(copies),
            counts.of_product(launches),
            counts.product_peak,
            counts.product,
            0,
            dict(Counter(f"{one.why}: {' < '.join(one.where)}" for one in waits)),
            sum(one.thread in self._training for one in waits),
            {where: number for where, number in launches.most_common() if where is not None},
            {where: number for where, number in copies.most_common() if where is not None},
            launches[None],
            list(self._machine.hazards),
        )


def _slots(optimizer: Any) -> list[Any]:
    return [one for found in optimizer.state.values() for one in found.values()]


def _title(row: Row) -> str:
    by = " by an agent" if row.agent else ""
    return f"{row.strategy}{by}{f', {row.ranks} ranks' if row.ranks else ''}"


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the table, and below it the places."""
    table = Table("strategy", title=f"Step {MIDDLE} of {STEPS}, as ckptstore asks it of a device", title_justify="left")
    columns = (
        "state B",
        "to host B",
        "to device B",
        "copies",
        "launches",
        "host waits",
        "training waits",
        "held B",
        "kept B",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        waits = sum(row.waits.values())
        moved = (row.state_bytes, row.to_host, row.to_device, row.copies, row.launches)
        numbers = (*moved, waits, row.training_waits, row.held, row.kept)
        table.add_row(_title(row), *(f"{one:,}" for one in numbers))
    console.print(table)
    for row in rows:
        console.print(f"\n{_title(row)}:", highlight=False)
        for what, places in (("waits", row.waits), ("launches", row.launched_by), ("copies", row.copied_by)):
            for where, number in sorted(places.items(), key=lambda item: -item[1]):
                console.print(f"  {number:5} {what:8} {where}", highlight=False, soft_wrap=True)


@click.command(help=__doc__)
@click.option(
    "--strategy",
    "strategies",
    type=click.Choice((*STRATEGIES, *REPLICA)),
    multiple=True,
    help="Only this one; repeat it. replica needs --agent.",
)
@click.option("--parameters", type=click.IntRange(min=2), default=30, show_default=True, help="Tensors of the model.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the order of device work; 0: as late as possible."
)
@click.option("--agent", is_flag=True, help="Have an agent save.")
@click.option("--ranks", type=click.IntRange(min=0), default=0, show_default=True, help="How many save together.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def main(*, strategies: Sequence[str], parameters: int, seed: int, agent: bool, ranks: int, as_json: bool) -> None:
    """See the module."""
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
                rows.append(measured(place, strategy, parameters=parameters, seed=seed, agent=agent, ranks=ranks))
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
