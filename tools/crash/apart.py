"""Runs a call in its own process: a bucket client does not survive a fork, so a process that forks never has one."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

from tools.crash.scenario import Violation

__all__ = ["apart"]


def apart(call: Callable[[], Any]) -> Any:
    """Run a call in a child process -> its result.

    Args:
        call: returns a JSON value.

    Raises:
        Violation: the child raised it; the message is the child's.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                json.dump(_said(call), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise Violation("a process that checks the store ended without a result")
    said = json.loads(text)
    if "violation" in said:
        raise Violation(said["violation"])
    return said["found"]


def _said(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"found": call()}
    except Violation as error:
        return {"violation": str(error)}
    except BaseException:  # noqa: BLE001  # the parent raises it
        return {"violation": traceback.format_exc()}
