"""Sizes, tables, JSON, progress."""

from __future__ import annotations

import json

import pytest

from ckptstore.cli import output


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10_230, "9.99 KiB"),
        (10_239, "10.0 KiB"),
        (102_350, "100 KiB"),
        (1_023_000, "999 KiB"),
        (1_023_500, "0.98 MiB"),
        (1_567_890_123, "1.46 GiB"),
        (5 << 40, "5.00 TiB"),
        (3 << 60, "3072 PiB"),
    ],
)
def test_size(nbytes: int, text: str) -> None:
    assert output.size(nbytes) == text


def test_small_texts() -> None:
    assert output.number(None) == "-"
    assert output.number(1234567) == "1,234,567"
    assert output.number(0.000123456) == "0.0001235"
    assert output.ratio(300, 100) == "3.00x"
    assert output.ratio(300, 0) == "-"
    assert output.shape(()) == "scalar"
    assert output.shape((3, 4)) == "3x4"
    assert output.duration(0.414) == "0.41 s"
    assert output.duration(200) == "3 min 20 s"
    assert output.duration(180) == "3 min"
    assert output.duration(4 * 3600) == "4 h"
    assert output.duration(2 * 3600 + 12 * 60 + 59) == "2 h 12 min"
    assert output.duration(76 * 3600) == "3 d 4 h"
    spans = (None, (0.0, 0.04), (0.2, 0.97), (1.4, 1.9), (2.1, 7.5), (40.5, 130.0), (12.4, 60.0), (100.0, 200.0))
    assert [output.between(span) for span in spans] == [
        *["", "less than 1 s", "less than 1 s", "about 2 s", "3 to 8 s", "41 s to 2 min 10 s", "13 s to 1 min"],
        "1 min 40 s to 3 min 20 s",
    ]
    assert output.moment(1e30) == "1e+30 s"


def test_table_aligns_and_never_cuts() -> None:
    text = output.table(["NAME", ">SIZE", ""], [["a" * 200, "1 B", ""], ["b", "22 B", "x"]])
    assert text.splitlines()[1:] == ["a" * 200 + "   1 B", "b" + " " * 199 + "  22 B  x"]
    assert output.table(["", ">"], [["a", "1"], ["bb", "22"]]) == "a    1\nbb  22"
    assert "NAME" in output.table(["NAME"], [])


def test_emit_is_one_document_with_a_row_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    document = {
        "name": "ü",
        "bad": float("nan"),
        "rows": [{"a": [1, float("inf")]}, {"a": []}],
        "none": [],
        "d": {"x": 1},
    }
    output.emit(document)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out) == {
        "schema": output.SCHEMA,
        "name": "ü",
        "bad": None,
        "rows": [{"a": [1, None]}, {"a": []}],
        "none": [],
        "d": {"x": 1},
    }
    assert '\n    {"a": []}\n' in printed.out


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("working") as advance:
        advance(1, 2)
    assert capsys.readouterr() == ("", "")


def test_progress_draws_on_a_terminal_and_not_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress("working") as advance:
        advance(1 << 20, 2 << 20)
        bar = advance
        assert hasattr(bar, "phase")
        bar.phase("planning", 120, 284, "checkpoints")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "working" in printed.err
    assert "1.0/2.0 MiB" in printed.err
    assert "planning" in printed.err
    assert "120/284 checkpoints" in printed.err
    assert "bytes" not in printed.err


def test_nothing_is_drawn_before_there_is_something_to_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with output.progress("working"):
        pass
    assert capsys.readouterr() == ("", "")
