"""Define the results of an examination: one finding for each check, and the overall verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

__all__ = ["GROUPS", "Diagnosis", "Finding", "Tell", "Verdict"]

Verdict = Literal["works", "slow", "careful", "absent", "fails"]
"""``slow``: works, but costs time. ``careful``: works, with a limitation. ``absent``: optional, not available here."""
GROUPS: Final = ("software", "machine", "medium", "store")
Tell = Callable[[str], None]
"""Called with the name of the next part of the examination."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        group: one of `GROUPS`.
        name: what was checked, the same in every examination: ``O_DIRECT``.
        verdict: see `Verdict`.
        what: what was found, for people. Never contains a credential.
        do: what to do about it; None: nothing.
        values: measured values: bytes, seconds, bytes per second, words.
    """

    group: str
    name: str
    verdict: Verdict
    what: str
    do: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The results of an examination.

    Attributes:
        place: path or URL that was examined; if none was given, the folder in which files were written.
        quick: whether speeds were left out.
        findings: in the order of `GROUPS`.
        seconds: duration of the examination.
    """

    place: str
    quick: bool
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not any(finding.verdict == "fails" for finding in self.findings)

    def of(self, name: str) -> Finding:
        """The finding with this name. Raises `KeyError`."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)
