"""Runs one target in its own process, until its time is over; started by `tools.fuzz.campaign`.

``python -m tools.fuzz.worker TARGET --seconds S --seed N --engine plain|atheris --folder F``

Writes into the folder: ``current`` (the input being run, in case this process dies), ``stats.json``, and ``found-...``
for each violation of a new kind, with its message beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import mmap
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["Recorder"]

_ADDRESS_SPACE: Final = 3 << 30
"""Bytes of address space beyond those at the start of the process."""
_CURRENT: Final = (1 << 16) + 8
_PARTICULARS: Final = re.compile(r"/\S+|'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|-?\d+|[^\x20-\x7e]+|<[^>]*>|[\[(].*")
_SHRINKING: Final = 20.0
"""Seconds of CPU time for reducing a finding."""
_MEASURED: Final = 8
"""One run in so many is measured for memory."""


class Recorder:
    """Runs a target on inputs, and keeps those that violate it."""

    def __init__(self, target: Any, folder: Path) -> None:
        from tools.fuzz.guard import SECONDS, Violation, attempt

        self._longest = 3 * SECONDS
        self._attempt, self._violation = attempt, Violation
        self.target = target
        self.folder = folder
        self.runs = self.accepted = 0
        self.kinds: set[str] = set()
        self.found: dict[str, str] = {}
        self.cpu: float | None = None
        self.until: float | None = None
        current = folder / "current"
        current.write_bytes(bytes(_CURRENT))
        with current.open("r+b") as file:
            self._current = mmap.mmap(file.fileno(), _CURRENT)

    @property
    def spent(self) -> bool:
        """Whether the time for this target is used up."""
        if self.cpu is not None:
            return time.process_time() >= self.cpu
        return self.until is not None and time.monotonic() >= self.until

    def run(self, data: bytes) -> bool:
        """Run one input -> whether its outcome is new, as far as the refusals show."""
        self._current[8 : 8 + len(data)] = data
        self._current[:8] = len(data).to_bytes(8, "little")
        self.runs += 1
        # An input that hangs is not waited for: the signal ends this process, and `current` has the input.
        signal.setitimer(signal.ITIMER_PROF, self._longest)
        try:
            outcome = self._attempt(self.target, data, memory=self.runs % _MEASURED == 0)
        except self._violation as violation:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._keep(data, str(violation))
            return False
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.accepted += outcome.accepted
        kind = _kind(outcome.error)
        new = kind not in self.kinds and len(self.kinds) < 2000
        self.kinds.add(kind)
        if self.runs % 64 == 0:
            self.save()
        return new

    def _keep(self, data: bytes, message: str) -> None:
        kind = _kind(message)
        if kind in self.found:
            return
        data = self._smaller(data, kind)
        name = hashlib.blake2b(data, digest_size=6).hexdigest()
        self.found[kind] = name
        (self.folder / f"found-{name}").write_bytes(data)
        (self.folder / f"found-{name}.txt").write_text(message)
        self.save()

    def _smaller(self, data: bytes, kind: str) -> bytes:
        """A shorter input with the same violation, if removing pieces gives one."""
        tries, step, until = 300, len(data) // 2, time.process_time() + _SHRINKING
        while step and tries and time.process_time() < until:
            place = 0
            while place < len(data) and tries and time.process_time() < until:
                tries -= 1
                shorter = data[:place] + data[place + step :]
                try:
                    self._attempt(self.target, shorter, memory=True)
                    place += step
                except self._violation as violation:
                    if _kind(str(violation)) == kind:
                        data = shorter
                    else:
                        place += step
            step //= 2
        return data

    def save(self) -> None:
        """Write the numbers to a file."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        numbers = {
            "runs": self.runs,
            "accepted": self.accepted,
            "kinds": len(self.kinds),
            "found": list(self.found.values()),
            "cpu": usage.ru_utime + usage.ru_stime,
        }
        (self.folder / "stats.json").write_text(json.dumps(numbers))


def _kind(message: str) -> str:
    """The common part of messages about different inputs."""
    return _PARTICULARS.sub("_", message)[:80]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--cpu", action="store_true", help="seconds of CPU time, not of wall time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("plain", "atheris"), default="plain")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    begin = time.monotonic()
    if options.engine == "atheris":
        _instrument()
    from tools.fuzz.targets import TARGETS

    recorder = Recorder(TARGETS[options.target], options.folder)
    _limit_memory()
    engine: Callable[[Recorder, int], None] = _atheris if options.engine == "atheris" else _plain
    if options.cpu:
        recorder.cpu = options.seconds
    else:
        # Loading counts, but on a busy machine a limited share, so that some inputs run.
        recorder.until = max(begin + options.seconds, time.monotonic() + options.seconds / 2)
    engine(recorder, options.seed)
    recorder.save()


def _limit_memory() -> None:
    """An allocation by an unchecked length then fails in this process, as a violation, instead of exhausting the
    machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _plain(recorder: Recorder, seed: int) -> None:
    """Mutate seeds, and inputs that were refused in a way not seen before."""
    from tools.fuzz.mutations import mutate

    source = random.Random(seed)
    corpus = recorder.target.seeds()
    for data in list(corpus):
        recorder.run(data)
    seeds = list(corpus)
    while not recorder.spent:
        data = mutate(source.choice(seeds if source.random() < 0.6 else corpus), corpus, source)
        if recorder.run(data):
            corpus.append(data)


def _instrument() -> None:
    """Import the target's modules with instrumentation of branches and, if those are few, of comparisons.

    Prevents: atheris keeps a reference to the result of every comparison that it looks at; if these are arrays, a
    minute's worth fills the memory.
    """
    import atheris
    from atheris.import_hook import HookManager

    with atheris.instrument_imports(include=["ckptstore"]):
        for name in ("history.record_text", "segment_files.layout", "history.records", "history.catalog"):
            importlib.import_module(f"ckptstore.formats.{name}")
    with HookManager({"ckptstore"}, set(), True, trace_dataflow=False):
        for name in ("codecs", "optim", "digest"):
            importlib.import_module(f"ckptstore.formats.{name}")
    with atheris.instrument_imports(include=["ckptstore"]):
        importlib.import_module("tools.fuzz.targets")


def _atheris(recorder: Recorder, seed: int) -> None:
    """libFuzzer keeps inputs that reach new code; our mutations, which know JSON, and its own take turns."""
    import atheris

    from tools.fuzz.mutations import mutate

    corpus = recorder.folder / "corpus"
    corpus.mkdir(exist_ok=True)
    seeds = recorder.target.seeds()
    for number, data in enumerate(seeds):
        (corpus / f"seed{number}").write_bytes(data)

    def mutator(data: bytes, longest: int, number: int) -> bytes:
        source = random.Random(number)
        if source.random() < 0.3:
            return bytes(atheris.Mutate(data, longest))
        return mutate(data, seeds, source)[:longest]

    arguments = [sys.argv[0], "-timeout=1200", "-rss_limit_mb=0"]
    arguments += ["-max_len=65536", f"-seed={seed + 1}", f"-artifact_prefix={recorder.folder}/died-", str(corpus)]

    def run(data: bytes) -> None:
        recorder.run(data)
        if recorder.spent:
            recorder.save()
            os._exit(0)  # libFuzzer itself would check the clock only after the seeds, and never again

    atheris.Setup(arguments, run, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
