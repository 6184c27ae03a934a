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
from typing import Any, Final, Literal, TypeVar

__all__ = ["Asked", "Bound", "Cell", "Claim", "Compared", "Figure", "Result", "Table"]

_T = TypeVar("_T")
Cell = str | int | float | None
"""One cell of a table; None: empty."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an experiment is given.

    Attributes:
        quick: the short form, of a minute or less on two cores: fewer and smaller models, fewer steps.
        smoke: the shortest form, which only shows that the experiment runs: its numbers mean nothing.
        scratch: an empty folder for checkpoints, deleted afterwards. Its file system is the measured one.
        told: called with one line of progress at a time.
        seed: of everything random: models, data, times of failures.
    """

    quick: bool
    scratch: Path
    told: Callable[[str], None]
    seed: int = 1
    smoke: bool = False

    @property
    def short(self) -> bool:
        """Not the long form."""
        return self.quick or self.smoke

    def pick(self, smoke: _T, quick: _T, whole: _T) -> _T:
        """The setting of the form that was asked for."""
        return smoke if self.smoke else quick if self.quick else whole


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
        why: why it does not hold, or cannot be measured; shown only then.
        note: shown always.
    """

    text: str
    paper: str
    ours: str
    holds: bool | None
    why: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.holds is not True and not self.why:
            raise ValueError(f"{self.text}: it does not hold, or is not measured; say why")

    @property
    def remark(self) -> str:
        """What is said below the table; empty: nothing."""
        return ". ".join(filter(None, ("" if self.holds else self.why, self.note)))

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
class Bound:
    """A number that must not exceed a limit; if it does, the command fails. Not for speeds: a busy machine is no fault.

    Attributes:
        what: what it says, in a line.
        value, limit: the number, and its limit.
    """

    what: str
    value: float
    limit: float

    @property
    def failed(self) -> bool:
        """It is beyond the limit, or is no number."""
        return not self.value <= self.limit


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
        bounds: numbers that must stay within limits.
        remarks: lines below the tables: what differs from the paper's setting, and what the numbers mean.
        settings: of the run: models, steps, rounds, times; goes to the JSON, and a line of it to the page.
        numbers: everything measured that is in no table.
    """

    tables: Sequence[Table]
    claims: Sequence[Claim]
    figures: Sequence[Figure]
    compared: Sequence[Compared]
    bounds: Sequence[Bound] = ()
    remarks: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """What was not equal, though it should have been, and what is beyond its bound."""
        wrong = [f"{one.what}: {one.equal} of {one.states} states are equal" for one in self.compared if one.failed]
        wrong += [f"{one.what}: {one.value:.3g}, at most {one.limit:g} is allowed" for one in self.bounds if one.failed]
        return wrong or ([] if self.compared else ["nothing was compared"])

    def document(self) -> dict[str, Any]:
        """For the JSON."""
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Result:
        """From the JSON."""
        parts = {"tables": Table, "claims": Claim, "figures": Figure, "compared": Compared, "bounds": Bound}
        given: dict[str, Any] = {name: [kind(**one) for one in document.get(name, ())] for name, kind in parts.items()}
        return cls(**given, **{name: document[name] for name in ("remarks", "settings", "numbers")})
