"""The model of the commit protocol: it holds, every mutant is caught, and an unexpected result is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forms import LONG
from tools.protocol import model
from tools.protocol.cases import Case, cases
from tools.protocol.explore import explore
from tools.protocol.log_model import LogModel, LogRules

LARGE = {
    ("log", "2 writers, 1 of them slow, a reader"),
    ("log", "2 writers, 1 of them slow, 1 fault"),
    ("store", "a writer that retires, a compactor that frees bases, gc"),
    ("prune", "a writer, a prune, a reader, gc"),
}
"""Two thirds of the quick searches' total time: for the long form. Mutants of the same rules are caught without."""


def in_short(quick: bool) -> Iterator[Case]:
    names = {(case.part, case.name) for case in cases(quick)}
    assert names >= LARGE
    yield from (case for case in cases(quick) if LONG or (case.part, case.name) not in LARGE)


@pytest.mark.slow
def test_the_protocol_holds_and_every_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "cases", in_short)
    assert model.main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert said.count("mutant") == sum(case.verdict == "violated" for case in cases(quick=True))
    assert "***" not in said


def test_a_surprise_is_reported_with_the_way_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = LogModel(LogRules(read_back="take for success", readers=0))

    def surprising(quick: bool) -> Iterator[Case]:
        yield Case("log", "broken", broken, "holds")

    monkeypatch.setattr(model, "cases", surprising)
    assert model.main([]) == 1
    said = capsys.readouterr().out
    assert "expected: holds" in said
    assert "takes the refusal for its own success" in said


def test_the_bound_is_reported_not_taken_for_proof(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore(LogModel(LogRules()), max_states=100).verdict == "bounded"
    assert model.main(["--quick", "--states", "100", "log", "--match", "K = 3"]) == 1
    assert "bounded" in capsys.readouterr().out
    assert model.main(["--states", "100", "log", "--match", "K = 3"]) == 0


def test_the_full_form_has_what_the_quick_form_has() -> None:
    quick, full = list(cases(quick=True)), list(cases(quick=False))
    assert [case for case in full if case in quick] == quick
    assert len(full) > len(quick)
