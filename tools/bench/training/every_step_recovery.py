"""How soon a trainer that was killed is back: the part of `every_step` that kills.

The clock begins with the SIGKILL and stops when another process has the step again that was trained last:

- *start*: until the trainer that was killed is gone, and its successor runs and has its model. Alike in every case, for
  nothing of it depends on where the state comes from. The successor is forked by a process that has imported torch, as
  a standby would be; with ``--cold`` it is an interpreter that imports everything;
- *restore*: until it has a state: from the agent, from the store's step diffs, or from the store's last full;
- *train again*: until it has trained the steps that this state lacks.

What is drawn does not decide how much is lost: where lost steps are trained again, the last full lies half of the
distance between two of them back, which is what a failure costs on average. That trainer's count begins shortly before
this full, so that it need not train a whole distance first.
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
"""Steps that a trainer takes before its first save, and that save's."""
_AGENT_STEPS: Final = 12


def killed_at(case: Case, distance: int) -> tuple[int, int]:
    """(the step before a trainer's first one, after which it is killed)."""
    half = distance // 2
    if case.strategy == "fulls-50":
        return distance - _WARM, distance + half
    # What is replayed is half a distance, too; where an agent keeps the newest state it does not matter.
    return 0, _WARM + half if case.strategy == "storage" else _AGENT_STEPS


def recovered(plan: Plan, case: Case, folder: Path, distance: int) -> dict[str, Any]:
    """Train, SIGKILL, recover in another process -> seconds, and what they were spent on.

    Raises:
        WorkerError: it ended by itself, or what is recovered is not what was trained.
    """
    first, target = killed_at(case, distance)
    # The same settings in both lives, as a script has: whoever comes with others gets another agent, from the store.
    last, struck = _killed(replace(plan, first=first), case, folder, target)
    if "absent" in last:
        return last
    if case.strategy == "storage":
        _kill(last["agent"])
    trained = last["step"]  # one more than the target, if it was quicker than the signal
    # An interval of 1: that of the saves would round the steps up.
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
    """Train, and SIGKILL after step `target` -> what was said last, and when it was killed."""
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
    """End the agent that the trainer has left, and wait until it is gone."""
    agent = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(agent, signal.SIGKILL)
        select.select([agent], [], [], 30)
    finally:
        os.close(agent)
