"""Describes the machine of the measurements: hardware, kernel, file system, versions. No host names, no paths."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("ckptstore", "torch", "safetensors", "numpy", "xxhash", "zstandard", "click", "rich")


def filesystem_type(path: Path) -> str:
    """Type of the file system that holds `path`: ``ext4``, ``xfs``, ``tmpfs`` ..."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[0]
    return "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def busy_cores(seconds: float = 0.5) -> float:
    """How many cores compute while this process sleeps for so long: 0.1 is a tenth of one."""
    before = _processor_seconds()
    time.sleep(seconds)
    return (_processor_seconds() - before) / seconds


def _processor_seconds() -> float:
    """Of all cores since the start, without idle ones and those that wait for a disk."""
    user, nice, system, _idle, _iowait, *others = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def describe(folder: Path) -> dict[str, object]:
    """The machine, and the file system of `folder`, for the report."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "kernel": platform.release(),
        "filesystem": filesystem_type(folder),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }
