"""Measures how soon a killed trainer is back: the part of `every_step` that kills.

The clock starts with the SIGKILL and stops when another process has the last trained step again:

- *start*: until the killed trainer is gone, and its successor runs and has its model. It is the same in every case,
  because it does not depend on the source of the state. The successor is forked by a process that has imported torch,
  as a standby would be; with ``--cold`` it is an interpreter that imports everything;
- *restore*: until it has a state: from the agent, from the store's step diffs, or from the store's last full;
- *train again*: until it has trained the steps that this state lacks.

The loss is not random: where lost steps are trained again, the last full lies half of the distance between two of them
back, the average loss of a failure. That trainer's count begins shortly before this full, so that it need not train a
whole distance first.
"""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tools.bench.storage.rounds import WorkerError
from tools.bench.training.training_cases import Case, Plan, finished, noted_digests

__all__ = ["RECOVERIES", "killed_at", "recovered"]

RECOVERIES: Final = {
    "dense-agent": "from the agent",
    "dense-replica": "from the agent's replica",
    "storage": "from the store, step diffs replayed",
    "fulls-50": "from the store's full, trained again",
}
_WARM: Final = 4
"""Steps of a trainer before its first save, and that save's."""
_AGENT_STEPS: Final = 12


def killed_at(case: Case, distance: int) -> tuple[int, int]:
    """(the step before a trainer's first one, after which it is killed)."""
    half = distance // 2
    if case.strategy == "fulls-50":
        return distance - _WARM, distance + half
    # The replay is half a distance, too; if an agent keeps the newest state, the distance does not matter.
    return 0, _WARM + half if case.strategy == "storage" else _AGENT_STEPS


def recovered(plan: Plan, case: Case, folder: Path, distance: int) -> dict[str, Any]:
    """Train, SIGKILL, recover in another process -> seconds, by phase.

    Raises:
        WorkerError: the trainer ended without a kill, or the recovered state is not the trained one.
    """
    first, target = killed_at(case, distance)
    # Both lives have the same settings, as a script has: with other settings a trainer gets a new agent, from the
    # store.
    last, struck = _killed(replace(plan, first=first), case, folder, target)
    if "absent" in last:
        return last
    if case.strategy == "storage":
        _kill(last["agent"])
    trained = last["step"]  # one more than the target, if it was faster than the signal
    # An interval of 1: the interval of the saves would round the steps up.
    found = finished(replace(plan, steps=trained), "recover", replace(case, interval=1), folder)
    if found["reached"] != trained or found["digest"] != noted_digests(folder).get(trained):
        raise WorkerError(f"recovered from step {found['step']}: step {trained} is not the one that was trained")
    return {
        "lost": trained - (found["step"] or 0),
        "start_s": found["began_at"] - struck,
        "restore_s": found["restore_s"],
        "recompute_s": found["recompute_s"],
        "recover_s": found["restore_s"] + found["recompute_s"],
        "from_kill_s": found["ended_at"] - struck,
    }


def _killed(plan: Plan, case: Case, folder: Path, target: int) -> tuple[dict[str, Any], float]:
    """Train, and SIGKILL after step `target` -> the last report, and the time of the kill."""
    last: dict[str, Any] = {}
    struck = 0.0
    with tempfile.TemporaryFile("w+", dir=plan.scratch) as trouble:
        with plan.begun("kill", case, folder, trouble) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last = json.loads(line)
                if last.get("step") == target:
                    struck = time.monotonic()
                    process.send_signal(signal.SIGKILL)
            status = process.wait()
        if "absent" not in last and status != -signal.SIGKILL:
            trouble.seek(0)
            raise WorkerError((trouble.read().strip().splitlines() or [f"it ended with status {status}"])[-1])
    return last, struck


def _kill(pid: int) -> None:
    """End the agent of the killed trainer, and wait until it is gone."""
    agent = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(agent, signal.SIGKILL)
        select.select([agent], [], [], 30)
    finally:
        os.close(agent)
