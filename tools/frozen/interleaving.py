"""Runs two versions in turns on one store; each must find what the other wrote, bit for bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

from ckptstore.formats.history.checkpoint_ref import node_of

__all__ = ["InterleavingError", "Outcome", "Version", "interleave"]

_WORKER: Final = Path(__file__).with_name("worker.py")
_MODES: Final = ("full", "delta", "diffs")
_RULES: Final = ([], ["last:5"], ["last:3", "every:4"], ["best:loss:2", "last:2"])


class InterleavingError(AssertionError):
    """One version did not find a written state; the text has the seed and every operation so far."""


class Version:
    """A process that runs one version."""

    def __init__(
        self, name: str, package: Path, store: Path, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Args:
        name: its name in the list of operations.
        package: the folder that has its ``ckptstore``.
        store: the path of the store.
        variables: of its environment, beside this process's.
        """
        self.name = name
        environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", **variables}
        # -P: the folder of the script is the working tree's, and must not come before PYTHONPATH.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.told = self._answer()
        if not Path(self.told["from"]).is_relative_to(package):
            raise InterleavingError(f"{name}: runs {self.told['from']}, not the version in {package}")

    def do(self, command: str, **arguments: Any) -> Any:
        """Send a command -> the answer; one with ``error`` if ckptstore raised."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InterleavingError(f"{self.name} died: exit status {self._process.wait(30)}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process as process:  # which closes both pipes, and waits
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        operations: a line each, with the version's name.
        saved: checkpoints that were saved.
        compared: states that were restored and compared.
        counts: operations by kind that were done, not refused.
    """

    operations: list[str] = field(default_factory=list)
    saved: int = 0
    compared: int = 0
    counts: dict[str, int] = field(default_factory=dict)


class _Run:
    def __init__(self, versions: tuple[Version, Version], place: Path, seed: int, told: Callable[[str], None]) -> None:
        self.versions = versions
        self.place = place
        self.random = random.Random(seed)
        self.seed = seed
        self.told = told
        self.outcome = Outcome()
        self.known: dict[str, str] = {}
        """Digest of every state that was ever saved, by REF."""
        self.there: set[str] = set()
        self.tags: dict[str, str] = {}
        self.rules: list[str] = []
        self.writing: Version | None = None

    def did(self, who: Version, what: str, answer: Any) -> bool:
        """Note an operation -> whether it was done. Only refusals that name their reason are allowed."""
        error = answer.get("error")
        line = f"{who.name}: {what}" + (f" -> {error}: {answer['text']}" if error else "")
        self.outcome.operations.append(line)
        self.told(line)
        if error not in (None, "UsageError", "RequestRefusedError", "CheckpointNotFoundError", "FencedError"):
            raise self.wrong("an error that is not a refusal")
        if error is None:
            kind = what.split()[0]
            self.outcome.counts[kind] = self.outcome.counts.get(kind, 0) + 1
        return error is None

    def wrong(self, text: str) -> InterleavingError:
        return InterleavingError("\n".join([f"seed {self.seed}: {text}", *self.outcome.operations]))

    def train(self, who: Version) -> None:
        mode = self.random.choice(_MODES)
        before, self.writing = self.writing, None
        if before is who or (before is not None and self.random.random() < 0.5):
            self.did(before, "end", before.do("end"))
            before = None
        if not self.did(who, f"begin {mode}", who.do("begin", mode=mode, parent="latest")):
            raise self.wrong("no writer could be opened")
        if before is not None:  # its writer is still open, and the other version has taken over the store
            answer = before.do("train", steps=1)
            if self.did(before, "save behind a newer term", answer) or answer["error"] != "FencedError":
                raise self.wrong(f"{before.name} saved behind a newer term")
            before.do("end")
        self.writing = who
        self.save(who)

    def save(self, who: Version) -> None:
        steps = self.random.randint(1, 8)
        answer = who.do("train", steps=steps)
        if not self.did(who, f"train {steps}", answer):
            raise self.wrong("a save failed")
        self.known.update(answer["saved"])
        self.outcome.saved += len(answer["saved"])

    def end(self) -> None:
        if self.writing is not None:
            self.did(self.writing, "end", self.writing.do("end"))
            self.writing = None

    def maintain(self, who: Version) -> None:
        """Change the store without training, beside a live writer of either version or without one."""
        alone = self.writing is None
        refs = sorted(self.there, key=node_of)
        choice = self.random.choice(("tag", "retire", "keep", "merge", "compact", "gc"))
        if choice == "tag" and refs:
            ref = self.random.choice(refs)
            name = f"t{len(self.tags)}"
            if self.did(who, f"tag {name} {ref}", who.do("tag", name=name, ref=ref, take_over=alone)):
                self.tags[name] = ref
        elif choice == "retire" and len(refs) > 3:
            ref = self.random.choice(refs)
            self.did(who, f"retire {ref}", who.do("retire", ref=ref, take_over=alone))
        elif choice == "keep" and refs:
            rules = list(self.random.choice(_RULES))
            if self.did(who, f"keep {rules}", who.do("keep", rules=rules, take_over=alone)):
                self.rules = rules
        elif choice == "merge" and len(refs) > 4:
            newest = node_of(refs[-1])[0]
            line = [ref for ref in refs if ref.endswith(f"@{newest}")]
            if len(line) > 2:
                between = f"{line[0]}..{line[-2]}"
                self.did(who, f"merge {between}", who.do("merge", refs=between, take_over=alone))
        elif choice == "compact" and refs and alone:
            self.did(who, "compact", who.do("compact", take_over=True))
        elif choice == "gc":
            self.did(who, "gc", who.do("gc"))

    def check(self) -> None:
        """Both versions read everything, and must find the same."""
        found = [who.do("read") for who in self.versions]
        for who, one in zip(self.versions, found, strict=True):
            if "error" in one:
                raise self.wrong(f"{who.name} cannot read: {one['error']}: {one['text']}")
            if not one["ok"]:
                raise self.wrong(f"{who.name}: verify finds damage")
            for ref, digest in one["states"].items():
                if self.known.get(ref) != digest:
                    raise self.wrong(f"{who.name} restores {ref} into other bits than were saved")
                self.outcome.compared += 1
            missing = {name: ref for name, ref in self.tags.items() if one["tags"].get(name) != ref}
            if missing:
                raise self.wrong(f"{who.name} lost tags {missing}")
        if found[0] != found[1]:
            differs = [key for key in found[0] if found[0][key] != found[1][key]]
            raise self.wrong(f"the versions differ in {differs}")
        self.there = set(found[0]["steps"])

    def copies(self, who: Version, number: int) -> None:
        """One version copies the store; the other reads the copy."""
        target = self.place / f"copy-{number}"
        if not self.did(who, "copy", who.do("copy", target=str(target))):
            raise self.wrong("a copy was refused")
        for reader in self.versions:
            there = reader.do("read", path=str(target))
            here = reader.do("read")
            if "error" in there or there["states"] != here["states"]:
                raise self.wrong(f"{reader.name} finds something else in the copy")


def interleave(
    packages: tuple[Path, Path],
    place: Path,
    *,
    operations: int,
    seed: int,
    told: Callable[[str], None] = lambda _: None,
    of_frozen: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Let two versions work in turns -> the results.

    Args:
        packages: the folders that have ``ckptstore`` of the one and of the other version.
        place: an empty folder.
        operations: how many turns.
        seed: chooses them.
        told: called with a line for each operation; None: nothing is called.
        of_frozen: variables of the first version's environment.

    Raises:
        InterleavingError: a state was not found, or differs from the saved one.
    """
    store = place / "store"
    with Version("frozen", packages[0], store, of_frozen) as old, Version("present", packages[1], store) as new:
        run = _Run((old, new), place, seed, told or (lambda _: None))
        for number in range(operations):
            who = run.random.choice((old, new))
            kind = run.random.choice(("train", "train", "save", "maintain", "maintain", "end", "copy"))
            if number == 0 or kind == "train":
                run.train(who)
            elif kind == "save" and run.writing is not None:
                run.save(run.writing)
            elif kind == "maintain":
                run.maintain(who)
            elif kind == "end":
                run.end()
            elif kind == "copy" and number % 3 == 0:
                run.copies(who, number)
            run.check()
        run.end()
        run.check()
        return run.outcome
