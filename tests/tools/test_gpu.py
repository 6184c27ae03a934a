"""The command for a GPU machine: it finds every test that is marked for a GPU, and reports a missing device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools import gpu

ROOT = Path(__file__).resolve().parents[2]


def test_every_marked_test_is_found() -> None:
    found = gpu.marked_tests()
    marks = {path: path.read_text().count("\n@pytest.mark.gpu\n") for path in (ROOT / "tests").rglob("*.py")}
    assert {path: len(names) for path, names in found.items()} == {path: n for path, n in marks.items() if n}
    assert "test_on_a_gpu" in found[ROOT / "tests" / "frameworks" / "test_torch_digest.py"]


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_device", lambda: False)
    said = CliRunner().invoke(gpu.main, [])
    assert said.exit_code == 3
    assert "no CUDA device here" in said.output
    assert "tests/frameworks/test_torch_digest.py::test_on_a_gpu" in said.output
    document = json.loads(CliRunner().invoke(gpu.main, ["--json"]).output)
    assert document["device"] is None
    assert len(document["tests"]) == sum(map(len, gpu.marked_tests().values()))


def test_a_skipped_test_is_no_success(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(
        "import pytest\n\n\n@pytest.mark.gpu\ndef test_fine(): ...\n\n\n"
        "@pytest.mark.gpu\n@pytest.mark.skip(reason='no device')\ndef test_skipped(): ...\n\n\n"
        "@pytest.mark.gpu\ndef test_wrong():\n    assert 1 == 2\n\n\ndef test_unmarked(): ...\n"
    )
    assert gpu.marked_tests(tmp_path) == {file: ["test_fine", "test_skipped", "test_wrong"]}
    rows = {row.name.rpartition(".")[2]: row for row in gpu.run_tests([file], tmp_path)}
    assert {name: (row.outcome, row.good) for name, row in rows.items()} == {
        "test_fine": ("passed", True),
        "test_skipped": ("skipped", False),
        "test_wrong": ("failed", False),
    }
    assert "no device" in rows["test_skipped"].words


def test_a_benchmark_that_cannot_run_is_a_failure(tmp_path: Path) -> None:
    (row,) = gpu.run_benchmark("tools.bench.no_such_module", (), tmp_path, quick=True)
    assert not row.good
    assert "no_such_module" in row.words
