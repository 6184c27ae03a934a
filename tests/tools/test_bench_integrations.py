"""The benchmark of docs/shims.md runs, small."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from tools.bench.storage.integrations import main


def test_it_compares_all_calls(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [str(tmp_path), "--megabytes", "2", "--boxes", "60", "--rounds", "1"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert len(lines) == 3 * 3 + 7
    assert all(line.endswith((" s", " ms")) for line in lines)
