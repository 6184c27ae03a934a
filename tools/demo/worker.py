"""A training process, started and killed by the supervisor: ``python -m tools.demo.worker ROLE CONFIG FOLDER``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tools.demo.config import DemoConfig
from tools.demo.corpus import CorpusError, read_corpus
from tools.demo.events import emit
from tools.demo.persistence import StoreKeeper
from tools.demo.reference import ReferenceRecorder
from tools.demo.training import Training

REFUSED = 3
"""Exit status when the store holds a run on other data."""


def train(training: Training, keeper: StoreKeeper | ReferenceRecorder) -> None:
    """Continue from `keeper`'s state, let it save the state after every step, and report each event."""
    resumed = keeper.resume()
    emit("resumed", step=training.step, **resumed)
    for step in range(training.step + 1, training.config.steps + 1):
        emit("begin", step=step)
        started = time.monotonic()
        loss = training.run_step()
        computed = time.monotonic()
        emit("computed", step=step, loss=loss, seconds=computed - started)
        keeper.keep(step)
        emit("released", step=step, seconds=time.monotonic() - computed)


def main() -> int:
    """Run one worker to its end; 0, or `REFUSED` with a message on standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("store", "reference"))
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    config = DemoConfig.read(options.config)
    training = Training(config, read_corpus(config.corpus_bytes))
    emit("built")
    try:
        with (
            StoreKeeper(options.folder, config, training)
            if options.role == "store"
            else ReferenceRecorder(options.folder, config.steps, training)
        ) as keeper:
            train(training, keeper)
    except CorpusError as error:
        print(error, file=sys.stderr)
        return REFUSED
    emit("finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
