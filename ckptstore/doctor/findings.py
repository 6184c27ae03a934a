"""What an examination finds: one finding for each thing that was looked at, and the verdict over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

__all__ = ["GROUPS", "Diagnosis", "Finding", "Tell", "Verdict"]

Verdict = Literal["works", "slow", "careful", "absent", "fails"]
"""``slow``: works, and costs time. ``careful``: works, with a limit to know of. ``absent``: optional, and not here."""
GROUPS: Final = ("software", "machine", "medium", "store")
Tell = Callable[[str], None]
"""Told what is examined next."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        group: one of `GROUPS`.
        name: of the thing, the same in every examination: ``O_DIRECT``.
        verdict: see `Verdict`.
        what: what was seen, for people. Never a credential.
        do: what to do about it; None: nothing.
        values: what was measured: bytes, seconds, bytes per second, words.
    """

    group: str
    name: str
    verdict: Verdict
    what: str
    do: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All of an examination.

    Attributes:
        place: path or URL that was examined; where none was given, the folder in which files were written.
        quick: whether speeds were left out.
        findings: in the order of `GROUPS`.
        seconds: how long it took.
    """

    place: str
    quick: bool
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing fails."""
        return not any(finding.verdict == "fails" for finding in self.findings)

    def of(self, name: str) -> Finding:
        """The finding of this name. Raises `KeyError`."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)
