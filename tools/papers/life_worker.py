"""One life of a trainer that may be killed: restore the newest checkpoint, train and save, up to a step.

``python -m tools.papers.life_worker STRATEGY --dir DIR --until STEP ...`` prints a line of JSON when the model exists
(``begun``), when the state is restored (``restored``), before every save (``noted``), after every step, and at the end
(``digest``); with the digest of the state (``state``), and the seconds that this took (``spent``), which no measurement
counts. Times are
`time.monotonic`'s, which all processes of a machine share. `tools.papers.lives` starts and kills it. SIGTERM preempts
it: it makes its latest step durable, and ends.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tools.baselines import medium
from tools.bench.training.training_checkpointers import Checkpointed
from tools.bench.training.training_loop import Shape, Trainer, digest, divide_cores, pin
from tools.bench.training.training_strategies import Ledger, Options
from tools.bench.training.training_worker import ALL, Run


def live(asked: argparse.Namespace, shape: Shape) -> None:
    """Restore, train to `asked.until`, end."""
    trainer = Trainer(shape)
    kind: type[Any] = ALL[asked.strategy]
    options = Options(asked.interval, asked.full_every, asked.batch)
    say(begun=time.monotonic())
    if issubclass(kind, Checkpointed):
        strategy = kind(asked.dir, trainer, options, Ledger())  # opening resumes
    else:
        if any(asked.dir.iterdir()):
            trainer.take()  # so that there are moments to load into
            if kind.restore(asked.dir, trainer) is None:
                trainer = Trainer(shape)
        strategy = kind(asked.dir, trainer, options, Ledger())
    pid = getattr(strategy, "agent_pid", None)
    now = time.monotonic()
    say(restored=now, step=trainer.step, agent=pid, state=digest(trainer.state()), spent=time.monotonic() - now)

    def noted(step: int) -> None:
        """Before a save: a killed life may have saved what it has not printed."""
        now = time.monotonic()
        state = digest(trainer.state())
        say(noted=step, state=state, spent=time.monotonic() - now)

    run = Run(trainer, strategy, strategy.ledger, asked.interval)
    preempted: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: preempted.append(number))
    while trainer.step < asked.until and not preempted:
        run.take(noted)
        say(step=trainer.step)
    done = time.monotonic()
    if preempted and trainer.step % asked.interval and not strategy.every_step:
        strategy.save(trainer.step)  # its latest step is not saved yet
    strategy.settle()
    say(digest=digest(trainer.state()), trained=done, settled=time.monotonic(), step=trainer.step)
    strategy.close()


def say(**document: Any) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", choices=list(ALL))
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--shape", type=int, nargs=4, required=True, metavar=("WIDTH", "LAYERS", "BATCH", "CONTEXT"))
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--full-every", type=int, default=100)
    parser.add_argument("--batch", type=int)
    asked = parser.parse_args()
    medium.limit()
    pin(*divide_cores(True))
    torch.use_deterministic_algorithms(True)
    asked.dir.mkdir(parents=True, exist_ok=True)
    live(asked, Shape(*asked.shape))


if __name__ == "__main__":
    main()
