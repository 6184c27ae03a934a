"""The processes beside the trainer: readers that restore checkpoints, and upkeep: prune, gc, compaction."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.errors import CheckpointNotFoundError, RequestError, StoreNotFoundError
from tools.long_run.promised import digest, read_saved

__all__ = ["keep_up", "read_on"]

_COMPACT_EVERY = 5
_AT_LEAST = 2
"""Checkpoints that each reader restores, however late it starts: a short run may end before the readers begin."""


def read_on(url: str, out: Path, number: int) -> None:
    """Restore random live checkpoints until the file ``stop`` exists; a wrong bit ends it with an error.

    Writes ``reader-N.json``: how many were restored, of how many steps, and how many were retired before they could be.
    """
    chance, restored, steps, late = random.Random(number), 0, set[int](), 0
    store = None
    while restored < _AT_LEAST or not (out / "stop").exists():
        try:
            store = store or ckptstore.open(url)
            found = store.checkpoints()
        except StoreNotFoundError:
            store = None
            found = []
        if not found:
            time.sleep(0.1)
            continue
        info = chance.choice(found)
        try:
            state = store.load(info.ref, framework="numpy") if store is not None else None
        except CheckpointNotFoundError:
            late += 1  # retired between the two calls
            continue
        wanted = read_saved(out / "saved.jsonl")[info.step].digest
        if digest(state) != wanted:
            raise AssertionError(f"reader {number}: step {info.step} is not what was saved")
        restored += 1
        steps.add(info.step)
    told = {"restored": restored, "steps": len(steps), "retired_before": late}
    (out / f"reader-{number}.json").write_text(json.dumps(told))


def keep_up(url: str, out: Path, pause: float) -> None:
    """Prune by the store's rules, collect, compact now and then, and measure, until ``stop`` exists; at least once.

    Writes ``sizes.jsonl``: seconds, newest step, checkpoints, bytes and number of segments, slots, objects of all.
    """
    began, done = time.monotonic(), 0
    with (out / "sizes.jsonl").open("w") as book:
        store: Any = None
        while not done or not (out / "stop").exists():
            time.sleep(pause)
            try:
                store = store or ckptstore.open(url)
                if not store.checkpoints():
                    continue
            except StoreNotFoundError:
                store = None
                continue
            done += 1
            try:
                store.prune(timeout=10)
                if done % _COMPACT_EVERY == 0:
                    store.compact(timeout=30)
            except RequestError:
                pass  # the trainer has ended meanwhile
            store.gc()
            book.write(json.dumps(_sizes(store) | {"seconds": time.monotonic() - began}) + "\n")
            book.flush()


def _sizes(store: ckptstore.Store) -> dict[str, int]:
    catalog = store.view().catalog
    newest = max((step for _, step in catalog.checkpoints), default=0)
    keys = store.backend.list("")
    return {
        "step": newest,
        "checkpoints": len(catalog.checkpoints),
        "nbytes": sum(entry.size for entry in catalog.segments.values()),
        "segments": sum(key.startswith("seg/") for key in keys),
        "slots": sum(key.startswith("log/") for key in keys),
        "objects": len(keys),
    }
