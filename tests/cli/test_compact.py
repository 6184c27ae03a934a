"""`ckpt compact`."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptstore
from ckptstore.formats.byte_text import size
from tests.cli.conftest import Run, assert_documented, documented
from tests.cli.terminal import on_a_terminal
from tests.maintenance.test_compaction import CHAIN, filled


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Steps 10, 20, 23 and 24 of a chain are kept; all the others are bases."""
    filled(ckptstore.open(tmp_path / "chain"), range(1, 25), CHAIN, keep=["last:2", "every:10"]).close()
    return tmp_path / "chain"


def _signed(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else '+'}{size(abs(nbytes))}"


def test_dry_run_then_the_moves_then_nothing(ckpt: Run, chain: Path) -> None:
    planned = ckpt("compact", chain, "--dry-run", "--json").json
    assert_documented(planned, documented("ckpt compact")[0] | {"unmet": []})
    assert [move["result"] for move in planned["moves"]] == ["planned"] * 3
    shown = ckpt("compact", chain, "--dry-run")
    assert shown.code == 0
    assert [line.split()[:2] for line in shown.out.splitlines()[1:4]] == [
        ["materialize", "10@1"],
        ["materialize", "20@1"],
        ["materialize", "23@1"],
    ]
    assert shown.out.splitlines()[-1].startswith("4 checkpoints would be kept: ")
    for line, move in zip(shown.out.splitlines()[1:4], planned["moves"], strict=True):  # each move's own bytes, no sum
        assert f"  {_signed(move['bytes_after'] - move['bytes_before'])}  " in line
    done = ckpt("compact", chain, "--take-over", "--gc", "--json").json
    assert [move["stored"] for move in done["moves"]] == [move["stored"] for move in planned["moves"]]
    assert {move["result"] for move in done["moves"]} == {"done"}
    assert done["bytes_deleted"] >= done["bytes_for_gc"] > 0
    assert done["bytes_after"] < done["bytes_before"]
    assert done["checkpoints"] == 4
    assert ckpt("verify", chain, "--deep").code == 0
    again = ckpt("compact", chain, "--take-over")
    assert again.out.splitlines()[0].startswith("nothing to compact")


def test_a_merged_range_is_shown_whole(ckpt: Run, tmp_path: Path) -> None:
    filled(ckptstore.open(tmp_path / "all"), range(1, 13), CHAIN).close()
    (row,) = [
        line for line in ckpt("compact", tmp_path / "all", "--dry-run").out.splitlines() if line.startswith("merge")
    ]
    assert row.split()[1] == "2..12@1"


def test_eighty_columns(chain: Path) -> None:
    shown = on_a_terminal("compact", chain, "--dry-run", errors=False).splitlines()
    assert shown[0].split() == ["MOVE", "CHECKPOINTS", "STORED", "RESTORE", "AFTER", "RESULT"]
    assert max(len(line) for line in shown[:2]) <= 80
    assert "WHY" in on_a_terminal("compact", chain, "--dry-run", columns=140)


def test_limits(ckpt: Run, chain: Path) -> None:
    done = ckpt("compact", chain, "--max-depth", "0", "--take-over", "--bandwidth", "10GB/s", "--target-bytes", "1kB")
    assert done.code == 0
    assert "more than the target of" in done.err
    assert "note: the store has grown by " in done.err  # every checkpoint is a full now
    store = ckptstore.open(chain)
    assert {info.kind for info in store.checkpoints()} == {"full"}
    late = ckpt("compact", chain, "--max-restore-seconds", "1us", "--take-over")
    assert late.code == 0
    assert "note: 10@1: restored in " in late.err


def test_why_the_store_grows(ckpt: Run, chain: Path, tmp_path: Path) -> None:
    limited = ckpt("compact", chain, "--max-depth", "0", "--dry-run").err
    assert ": a limit of depth or time is met with fulls and larger deltas" in limited
    filled(ckptstore.open(tmp_path / "all"), range(1, 7), CHAIN).close()
    plain = [word for step in range(2, 6) for word in ("--plain", f"{step}@1")]
    mapped = ckpt("compact", tmp_path / "all", *plain, "--dry-run").err
    assert ": fulls to map are not compressed" in mapped
    assert "a limit of depth" not in mapped


def test_nobody_answers(ckpt: Run, chain: Path) -> None:
    with ckptstore.open(chain).writer(poll_seconds=None):
        done = ckpt("compact", chain, "--timeout", "0")
    assert done.code == 10
    assert "--take-over" in done.err
    assert "waiting" in done.out
    assert "left" in done.out


def test_damage(ckpt: Run, chain: Path) -> None:
    store = ckptstore.open(chain)
    catalog = store.view().catalog
    path = chain / catalog.segments[catalog.encodings[1, 3][0].segments[0]].key
    data = bytearray(path.read_bytes())
    data[4096:4200] = bytes(104)
    path.write_bytes(data)
    done = ckpt("compact", chain, "--take-over")
    assert done.code == 4
    assert "refused" in done.out
    assert path.name in done.err
    assert path.exists()


@pytest.mark.parametrize("option", [["--max-depth", "-1"], ["--max-restore-seconds", "soon"], ["--bandwidth", "3"]])
def test_invalid_options(ckpt: Run, chain: Path, option: list[str]) -> None:
    assert ckpt("compact", chain, *option).code == 2


def test_only_a_range(ckpt: Run, chain: Path) -> None:
    done = ckpt("compact", chain, "--only", "10..10", "--max-depth", "0", "--take-over", "--json").json
    assert {one["ref"] for move in done["moves"] for one in move["stored"]} == {"10@1"}
    assert done["unmet"] == []  # nothing is printed about the others
    assert ckpt("compact", chain, "--only", "10..999").code == 3
    assert ckpt("compact", chain, "--only", "10").code == 2
