"""Unsaved steps in errors: each is named once, by the error that stopped it."""

from __future__ import annotations

import pytest

from ckptstore.errors import AgentLostError, AgentSilentError, CommitUnknownError, StorageError
from ckptstore.write.saves.lost_steps import by_error, first_of, lost_steps, name_steps, note_lost


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def test_the_outcomes_of_steps() -> None:
    assert lost_steps(StorageError("full"), [3]) == "step 3 was not saved"
    assert lost_steps(StorageError("full"), [3, 4]) == "steps 3 and 4 were not saved"


@pytest.mark.parametrize("kind", [CommitUnknownError, AgentLostError, AgentSilentError])
def test_steps_that_may_be_saved_are_not_called_lost(kind: type[Exception]) -> None:
    assert lost_steps(kind("gone"), [3, 4]) == "steps 3 and 4 may or may not have been saved"


def test_errors_that_are_equal_are_not_the_same() -> None:
    first, other = StorageError("full"), StorageError("full")
    failures = [(2, first), (3, other), (4, first)]
    assert by_error(failures) == [(first, [2, 4]), (other, [3])]
    assert first_of(failures) is first
    assert notes(first) == ["steps 2 and 4 were not saved", f"step 3 was not saved, either: {other}"]
    assert notes(other) == []


def test_steps_that_an_error_names_are_not_named_again() -> None:
    named = StorageError("step 12: full")
    name_steps(named, [12])
    assert notes(named) == []
    name_steps(named, [1])  # its text shows the beginning of the list
    assert notes(named) == ["step 1 was not saved"]
    name_steps(named, [1])
    assert notes(named) == ["step 1 was not saved"]


def test_errors_of_closing_are_notes_on_the_error_of_the_body() -> None:
    body, lost = KeyError("own"), StorageError("full")
    name_steps(lost, [7])
    note_lost(body, "file:///run", lost)
    assert notes(body) == [f"file:///run: closing the writer: StorageError: {lost}; step 7 was not saved"]
    note_lost(lost, "file:///run", lost)
    assert notes(lost) == ["step 7 was not saved"]
