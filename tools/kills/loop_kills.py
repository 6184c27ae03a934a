"""SIGKILL of training loops at random: every loss is that of a run that was never killed, to the last bit.

    python -m tools.kills.loop_kills --kills 5
    python -m tools.kills.loop_kills --kills 50 --loop peft --workers 2 --strategy gradient --seed 7

Two loops with a `Checkpointer`: ``plain`` trains a small network, ``peft`` the adapters of a small GPT-2. Both have
dropout, a schedule, two micro-batches in each step, and a shuffled loader whose epochs end within a step. The loops of
the frameworks (DCP, Trainer, Accelerate, Lightning) are killed in the same way by ``tests/integrations``.

A life is a process that continues the run. It is killed a random time after a random micro-batch, most of them after a
new checkpoint. A run that has ended is verified, and another one begins, until all kills are done.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

import ckptstore
from tools.crash.scenario import Violation
from tools.warm import MODULES, Script, Warm

__all__ = ["LOOPS", "PEFT_MODULES", "STRATEGIES", "Form", "Result", "main", "sweep", "train"]

STRATEGIES: Final = ("full", "delta", "gradient", "auto")
BATCHES: Final = 38
"""Micro-batches of a run: epochs of nine, and two in a step."""
PEFT_MODULES: Final = (*MODULES, "peft", "transformers")
_BATCH: Final = 4
_EPOCH: Final = 9
_ACCUMULATED: Final = 2
_PROVING: Final = 0.75
"""The part of all lives that have to save a checkpoint before they are killed."""
_LATEST: Final = 0.03
"""The longest time from a micro-batch to the kill, in seconds: several steps."""

Job = tuple[Any, Callable[[Any], Any], Any]
"""A model, the loss of a batch, and the samples."""


def _plain() -> Job:
    import torch

    layers = (torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 16))
    model = torch.nn.Sequential(*layers)
    return model, lambda batch: (model(batch) - batch).square().mean(), torch.randn(_BATCH * _EPOCH, 16)


def _peft() -> Job:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    model: Any = get_peft_model(GPT2LMHeadModel(config), lora)
    samples = torch.randint(0, 64, (_BATCH * _EPOCH, 12))
    return model, lambda batch: model(input_ids=batch, labels=batch).loss, samples


LOOPS: Final[dict[str, Callable[[], Job]]] = {"plain": _plain, "peft": _peft}


def train(loop: str, store: Path, losses: Path, workers: int, strategy: str, *, forgets: bool = False) -> None:
    """Continue the run. A line for each micro-batch goes to `losses`: its number, and the loss in hex.

    Args:
        workers: processes of the loader.
        forgets: the script does not pass its loader. Then losses must differ.
    """
    import torch

    from ckptstore.training import Checkpointer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_of, samples = LOOPS[loop]()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    loader: Any = torch.utils.data.DataLoader(samples, _BATCH, shuffle=True, num_workers=workers)
    with Checkpointer(
        store,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=None if forgets else loader,
        strategy=strategy,
    ) as checkpointer:
        checkpointer.resume()
        while checkpointer.steps_done < BATCHES:
            for batch in loader if forgets else checkpointer.loader:
                loss = loss_of(batch)
                loss.backward()
                number = checkpointer.steps_done + 1
                with losses.open("a") as file:
                    file.write(f"{number} {loss.item().hex()}\n")
                if number % _ACCUMULATED == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                checkpointer.step(metrics={"loss": loss})
                if number == BATCHES:
                    break


@dataclass(frozen=True, slots=True)
class Form:
    """What is killed. See `train`."""

    loop: str
    workers: int
    strategy: str
    forgets: bool = False

    def __str__(self) -> str:
        return f"{self.loop}, {self.workers} workers, {self.strategy}"

    def command(self, store: Path, losses: Path) -> list[str]:
        """The command of a life."""
        words = [self.loop, str(store), str(losses), str(self.workers), self.strategy]
        return [sys.executable, "-m", "tools.kills.loop_kills", "--life", *words, *["--forgets"] * self.forgets]


@dataclass(slots=True)
class Result:
    """What happened to a form.

    Attributes:
        kills: lives that were killed.
        continued: lives that began with a checkpoint.
        repeated: micro-batches that were computed more than once.
        runs: that came to their end.
    """

    kills: int = 0
    continued: int = 0
    repeated: int = 0
    runs: int = 0

    def __str__(self) -> str:
        ends = f"{self.runs} run{'s' if self.runs > 1 else ''}, each loss as if never killed"
        return f"{self.kills} kills, {self.continued} lives continued, {self.repeated} micro-batches repeated; {ends}"


def sweep(start: Callable[[list[str]], Script], folder: Path, form: Form, kills: int, seed: str) -> Result:
    """Kill runs of a form. Raises `Violation`: a loss differs, a run does not come to its end, or a store is damaged.

    Args:
        start: starts a command.
        folder: an empty folder.
        seed: of the moments.
    """
    wanted_path, result, chance = folder / "wanted", Result(), random.Random(seed)
    _end(start, form, folder / "whole", wanted_path)
    wanted = _lines(wanted_path)
    if len(wanted) != BATCHES:
        raise Violation(f"{form}: the run that is never killed has {len(wanted)} losses, not {BATCHES}")
    while result.kills < kills:
        store, losses = folder / f"run-{result.runs}", folder / f"losses-{result.runs}"
        while result.kills < kills and _lives(start, form, store, losses, chance, result):
            _compare(form, _lines(losses), wanted[: len(set(_lines(losses)))])
        result.continued += _newest(store) is not None
        _end(start, form, store, losses)
        found = _lines(losses)
        _compare(form, found, wanted)
        result.repeated += len(found) - len(wanted)
        result.runs += 1
        if not ckptstore.verify(store, deep=True).ok:
            raise Violation(f"{form}: {store} is damaged")
    if not result.continued:
        raise Violation(f"{form}: every kill came before the first checkpoint: the runs prove nothing")
    return result


def _lives(
    start: Callable[[list[str]], Script], form: Form, store: Path, losses: Path, chance: random.Random, result: Result
) -> bool:
    """One life, which is killed -> False: it came to its end before."""
    enough, saved = len(_lines(losses)) + chance.randrange(1, BATCHES // 3), _newest(store)
    result.continued += saved is not None
    proves = chance.random() < _PROVING
    with start(form.command(store, losses)) as life:
        while life.poll() is None and (len(_lines(losses)) < enough or (proves and _newest(store) == saved)):
            time.sleep(0.001)
        time.sleep(chance.random() * _LATEST)
        life.kill()
        status = life.wait()
    if status not in (0, -signal.SIGKILL):
        raise Violation(f"{form}: a life ended with status {status}")
    result.kills += status == -signal.SIGKILL
    return status != 0


def _newest(store: Path) -> int | None:
    """The newest step in a store; None: it has none, or does not exist."""
    return ckptstore.open(store).latest_step() if (store / "FORMAT").exists() else None


def _end(start: Callable[[list[str]], Script], form: Form, store: Path, losses: Path) -> None:
    with start(form.command(store, losses)) as life:
        status = life.wait()
    if status != 0:
        raise Violation(f"{form}: the last life ended with status {status}")


def _lines(path: Path) -> list[str]:
    """The complete lines of a file."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def _compare(form: Form, found: list[str], wanted: list[str]) -> None:
    """A micro-batch that is computed again has the same loss, and each is computed."""
    if wrong := sorted(set(found) - set(wanted), key=lambda line: int(line.split()[0])):
        raise Violation(f"{form}: {len(wrong)} losses that the run that is never killed does not have: {wrong[0]}")
    if missing := sorted(set(wanted) - set(found), key=lambda line: int(line.split()[0])):
        raise Violation(f"{form}: {len(missing)} losses are missing: {missing[0]}")


@click.command(help=__doc__)
@click.option("--kills", default=5, show_default=True, help="Of each form.")
@click.option("--loop", "loops", multiple=True, type=click.Choice([*LOOPS]), help="Default: all.")
@click.option("--workers", multiple=True, type=int, help="Of the loader. Default: 0, and 2.")
@click.option("--strategy", "strategies", multiple=True, type=click.Choice(STRATEGIES), help="Default: all but auto.")
@click.option("--seed", type=int, help="Of the moments. Default: the time.")
@click.option("--life", nargs=5, metavar="LOOP STORE LOSSES WORKERS STRATEGY", help="Be such a life.")
@click.option("--forgets", is_flag=True, help="The loops do not pass their loader: this must fail.")
def main(
    kills: int,
    loops: tuple[str, ...],
    workers: tuple[int, ...],
    strategies: tuple[str, ...],
    seed: int | None,
    life: tuple[str, str, str, str, str] | None,
    forgets: bool,
) -> None:
    """Run the command: see the module."""
    if life is not None:
        warnings.simplefilter("ignore")
        loop, store, losses, count, strategy = life
        train(loop, Path(store), Path(losses), int(count), strategy, forgets=forgets)
        return
    seed = int(time.time()) if seed is None else seed
    click.echo(f"seed {seed}")
    chosen = loops or tuple(LOOPS)
    broken = 0
    with Warm(PEFT_MODULES if "peft" in chosen else MODULES) as warm:
        for loop in chosen:
            for count in workers or (0, 2):
                for strategy in strategies or STRATEGIES[:3]:
                    form = Form(loop, count, strategy, forgets)
                    with tempfile.TemporaryDirectory(prefix="loop-kills-") as folder:
                        try:
                            said = str(sweep(warm.start, Path(folder), form, kills, f"{seed} {form}"))
                        except Violation as error:
                            said, broken = f"BROKEN: {error}", broken + 1
                    click.echo(f"{form}: {said}")
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
