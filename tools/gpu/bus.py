"""Bytes that crossed the bus between a device and its host: from the records of torch's profiler (CUPTI).

Where there are no such records (no CUPTI, no CUDA), there is a reason instead of numbers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Traffic", "copies_in", "watched"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of all copies.

    Attributes:
        to_host: from the device to its host.
        pageable: of these to memory that is not pinned: the host waits for such copies.
        to_device: from the host to the device.
        on_device: from device memory to device memory, by copies (kernels that copy are not in it).
    """

    to_host: int
    pageable: int
    to_device: int
    on_device: int


def copies_in(trace: dict[str, Any]) -> Traffic | None:
    """The traffic in a trace that the profiler exported; None: it has no record of a copy."""
    found = {"DtoH": 0, "HtoD": 0, "DtoD": 0}
    pageable = records = 0
    for event in trace.get("traceEvents", []):
        if event.get("cat") != "gpu_memcpy":
            continue
        records += 1
        name, nbytes = str(event.get("name", "")), int(event.get("args", {}).get("bytes", 0))
        kind = next((one for one in found if one in name), None)
        if kind is not None:
            found[kind] += nbytes
            pageable += nbytes if kind == "DtoH" and "Pageable" in name else 0
    return Traffic(found["DtoH"], pageable, found["HtoD"], found["DtoD"]) if records else None


def watched(work: Callable[[], None], device: torch.device) -> Traffic | str:
    """Run `work` under the profiler -> what it copied, or why that is not known. `work` runs in either case."""
    if device.type != "cuda":
        work()
        return f"{device.type}: no bus"
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        work()
        return "torch's profiler records no copies here (no CUPTI)"
    seen = profile(activities=[ProfilerActivity.CUDA])
    try:
        seen.start()
    except RuntimeError as error:
        work()
        return f"torch's profiler did not start: {error}"
    work()
    torch.cuda.synchronize(device)
    try:
        seen.stop()
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "trace.json"
            seen.export_chrome_trace(str(path))
            found = copies_in(json.loads(path.read_text()))
    except (RuntimeError, OSError, ValueError) as error:
        return f"torch's profiler gave no trace: {error}"
    return "torch's profiler recorded no copies (no CUPTI?)" if found is None else found
