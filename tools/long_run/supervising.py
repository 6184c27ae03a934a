"""Starts the processes, waits for the trainer, and checks the remaining checkpoints."""

from __future__ import annotations

import csv
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Mapping, Set
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import ckptstore
from tools.long_run.beside import keep_up, read_on
from tools.long_run.promised import Rules, digest, promised, read_saved
from tools.long_run.trainer import train

__all__ = ["MOST_SLOTS", "READERS", "check", "supervise"]

READERS = 2
MOST_SLOTS = 1024 + 512
"""Most log slots of a store with few checkpoints: those since the previous anchor, and until a fold."""


def supervise(
    url: str, out: Path, *, steps: int, seconds: float | None, rules: Rules, pause: float, batch: int = 10
) -> dict[str, Any]:
    """Run it -> the observations; raises `AssertionError` if a promise is broken.

    Args:
        url: an empty folder or URL; the environment says how to reach it.
        out: an empty folder for the records.
        seconds: after which the trainer ends; None: after its steps.
        pause: seconds between two rounds of upkeep.
        batch: steps that one record of the log commits.
    """
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    trainer = context.Process(target=train, args=(url, out, steps, seconds, rules, batch))
    others = [context.Process(target=read_on, args=(url, out, number)) for number in range(READERS)]
    others.append(context.Process(target=keep_up, args=(url, out, pause)))
    processes: list[BaseProcess] = [trainer, *others]
    for process in processes:
        process.start()
    try:
        while trainer.is_alive():
            trainer.join(0.5)
            if dead := [one for one in others if not one.is_alive()]:
                raise AssertionError(f"{len(dead)} of the processes beside the trainer ended: see above")
        (out / "stop").touch()
        for process in others:
            process.join(300)
        assert [process.exitcode for process in processes] == [0] * len(processes), "a process failed: see above"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    seen = check(url, out, rules) | {"seconds": round(time.monotonic() - began, 1), "rules": rules.texts()}
    (out / "report.json").write_text(json.dumps(seen, indent=1) + "\n")
    return seen


def check(url: str, out: Path, rules: Rules) -> dict[str, Any]:
    """Check that exactly the promised set exists, each as the trainer recorded it -> further observations."""
    saved = read_saved(out / "saved.jsonl")
    store = ckptstore.open(url)
    store.gc()
    saved_as = Counter(info.kind for info in _compare(store, promised(saved.values(), rules), saved).values())
    before = len(store.backend.list(""))
    compacted = store.compact(take_over=True)
    store.gc()
    there = _compare(store, promised(saved.values(), rules), saved)
    assert store.tags().keys() == {one.tag for one in saved.values() if one.tag is not None}
    report = store.verify()
    assert report.ok, report.damage
    sizes = [json.loads(line) for line in (out / "sizes.jsonl").read_text().splitlines()]
    assert all(one["slots"] <= MOST_SLOTS for one in sizes), "the log grows for ever"
    readers = [json.loads((out / f"reader-{number}.json").read_text()) for number in range(READERS)]
    _write_table(out / "sizes.csv", sizes)
    half = sizes[len(sizes) // 2 :]
    return {
        "steps": len(saved),
        "checkpoints": len(there),
        "kinds": dict(Counter(info.kind for info in there.values())),
        "kinds_before_the_last_compaction": dict(saved_as),
        "restored_by_readers": sum(one["restored"] for one in readers),
        "steps_seen_by_readers": sum(one["steps"] for one in readers),
        "retired_before_read": sum(one["retired_before"] for one in readers),
        "nbytes": sum(entry.size for entry in store.view().catalog.segments.values()),
        "objects": len(store.backend.list("")),
        "most_objects": max((one["objects"] for one in sizes), default=0),
        "most_slots": max((one["slots"] for one in sizes), default=0),
        "most_segments": max((one["segments"] for one in sizes), default=0),
        "most_nbytes": max((one["nbytes"] for one in sizes), default=0),
        "most_segments_second_half": max((one["segments"] for one in half), default=0),
        "rounds_of_upkeep": len(sizes),
        "objects_before_the_last_compaction": before,
        "last_compaction": [compacted.bytes_before, compacted.bytes_after],
    }


def _compare(store: ckptstore.Store, wanted: Set[int], saved: Mapping[int, Any]) -> dict[int, ckptstore.CheckpointInfo]:
    """Check that exactly the wanted steps exist, each as it was recorded -> them."""
    there = {info.step: info for info in store.checkpoints()}
    assert there.keys() == wanted, f"too many: {sorted(there.keys() - wanted)}, gone: {sorted(wanted - there.keys())}"
    for step, info in there.items():
        assert digest(store.load(info.ref, framework="numpy")) == saved[step].digest, (
            f"step {step} differs from the recorded one"
        )
    return there


def _write_table(path: Path, sizes: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, ["seconds", "step", "checkpoints", "nbytes", "segments", "slots", "objects"])
        table.writeheader()
        table.writerows(sizes)
