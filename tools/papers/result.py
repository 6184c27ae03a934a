"""What an experiment returns: tables, claims, figures, and what was compared. All of it is data, and goes to the JSON.

Result(
    tables=[Table("Bytes", ("checkpoint", "paper", "ours", "MB"), [("full", "1.4 GB", "1", 17.2)], {"MB": ".1f"})],
    claims=[Claim("a diff takes 6 % of a full", paper="6.2 %", ours="1.1 %", holds=True)],
    figures=[Figure("Bytes of a checkpoint", "bars", ("full", "diff"), {"ours": [17.2, 0.2]}, y="MB")],
    compared=[Compared("restored after every save", 20, 20)],
)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

__all__ = ["Asked", "Cell", "Claim", "Compared", "Figure", "Result", "Table"]

Cell = str | int | float | None
"""One cell of a table; None: empty."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an experiment is given.

    Attributes:
        quick: the short form, of a minute or less on two cores: fewer and smaller models, fewer steps.
        scratch: an empty folder for checkpoints, deleted afterwards. Its file system is the measured one.
        told: called with one line of progress at a time.
        seed: of everything random: models, data, times of failures.
    """

    quick: bool
    scratch: Path
    told: Callable[[str], None]
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Table:
    """A table of numbers and texts.

    Attributes:
        title: a line above it.
        columns: their heads, with units.
        rows: as many cells as columns. Rows of the paper say so in their first cell or have a column of their own.
        formats: column -> format of its numbers, as of `format`; ``.3g`` if it has none.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    formats: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if wrong := [row for row in self.rows if len(row) != len(self.columns)]:
            raise ValueError(f"{self.title}: {len(self.columns)} columns, and a row of {len(wrong[0])}: {wrong[0]}")

    def texts(self) -> list[list[str]]:
        """The cells as they are shown."""
        return [
            [_text(cell, self.formats.get(name, ".3g")) for name, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]


def _text(cell: Cell, how: str) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    return str(cell) if isinstance(cell, int) and how == ".3g" else format(cell, how)


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of the paper, and whether it holds here.

    Attributes:
        text: the claim, in a line.
        paper, ours: its figure, and ours.
        holds: None: it cannot be measured on this machine.
        why: why it does not hold, or cannot be measured; may say more where it holds.
    """

    text: str
    paper: str
    ours: str
    holds: bool | None
    why: str = ""

    def __post_init__(self) -> None:
        if self.holds is not True and not self.why:
            raise ValueError(f"{self.text}: it does not hold, or is not measured; say why")

    @property
    def verdict(self) -> str:
        """For tables."""
        return VERDICTS[self.holds]


VERDICTS: Final[Mapping[bool | None, str]] = {True: "holds", False: "does not hold", None: "not measured"}


@dataclass(frozen=True, slots=True)
class Compared:
    """What was compared with what had been trained.

    Attributes:
        what: the restored states.
        states, equal: how many were compared, and how many had every bit.
        loss: what a lossy baseline of a paper loses, in words and numbers; empty: every state must be equal.
    """

    what: str
    states: int
    equal: int
    loss: str = ""

    @property
    def failed(self) -> bool:
        """A state that should have been equal is not, or nothing was compared."""
        return not self.states or (self.equal < self.states and not self.loss)


@dataclass(frozen=True, slots=True)
class Figure:
    """One panel of the PNG.

    Attributes:
        title: above the panel.
        kind: ``bars``: groups of bars, one for each of `at`; ``lines``: `at` are numbers.
        at: the groups, or the values of x.
        series: name -> a value for each of `at`; None leaves it out. Names that begin with ``paper`` are drawn pale.
        x, y: labels of the axes, with units.
        log: axes that are logarithmic: ``""``, ``"x"``, ``"y"``, ``"xy"``.
        limit: a horizontal line: a bound of the paper.
    """

    title: str
    kind: Literal["bars", "lines"]
    at: Sequence[Any]
    series: Mapping[str, Sequence[float | None]]
    x: str = ""
    y: str = ""
    log: str = ""
    limit: float | None = None

    def __post_init__(self) -> None:
        for name, values in self.series.items():
            if len(values) != len(self.at):
                raise ValueError(f"{self.title}: {name} has {len(values)} values for {len(self.at)} places")


@dataclass(frozen=True, slots=True)
class Result:
    """What an experiment found.

    Attributes:
        remarks: lines below the tables: what differs from the paper's setting, and what the numbers mean.
        settings: of the run: models, steps, rounds, times; goes to the JSON, and a line of it to the page.
        numbers: everything measured that is in no table.
    """

    tables: Sequence[Table]
    claims: Sequence[Claim]
    figures: Sequence[Figure]
    compared: Sequence[Compared]
    remarks: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """What was not equal, though it should have been."""
        wrong = [f"{one.what}: {one.equal} of {one.states} states are equal" for one in self.compared if one.failed]
        return wrong or ([] if self.compared else ["nothing was compared"])

    def document(self) -> dict[str, Any]:
        """For the JSON."""
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Result:
        """From the JSON."""
        parts = {"tables": Table, "claims": Claim, "figures": Figure, "compared": Compared}
        given: dict[str, Any] = {name: [kind(**one) for one in document[name]] for name, kind in parts.items()}
        return cls(**given, **{name: document[name] for name in ("remarks", "settings", "numbers")})
