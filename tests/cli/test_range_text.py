"""Checkpoints as ranges."""

from __future__ import annotations

import pytest

from ckptstore.cli.range_text import checkpoints, counted, ranges


@pytest.mark.parametrize(
    ("refs", "text"),
    [
        ([], ""),
        (["7@2"], "7@2"),
        (["7@2", "8@2"], "7@2, 8@2"),
        (["7@2", "8@2", "9@2"], "7..9@2"),
        (["9@2", "7@2", "8@2", "8@2"], "7..9@2"),
        ([f"{step}@1" for step in range(5, 31, 5)], "5..30@1 by 5"),
        (["1@1", "2@1", "3@1", "3@2", "4@2", "5@2"], "1..3@1, 3..5@2"),
        (
            [*(f"{n}@2" for n in range(46, 71)), "144@3", *(f"{n}@6" for n in range(212, 241))],
            "46..70@2, 144@3, 212..240@6",
        ),
        (["1@1", "5@1", "6@1", "7@1", "20@1"], "1@1, 5..7@1, 20@1"),
        (["2@1", "4@1", "6@1", "9@1"], "2@1, 4@1, 6@1, 9@1"),
        (["1@1", "tag:best", "2@1", "3@1"], "1..3@1, tag:best"),
    ],
)
def test_ranges(refs: list[str], text: str) -> None:
    assert ranges(refs) == text


def test_every_checkpoint_is_in_one_of_them() -> None:
    steps = [n for n in range(400) if n % 7 in (0, 1, 3)]
    named: list[int] = []
    for part in ranges(f"{n}@3" for n in steps).split(", "):
        first, _, rest = part.partition("..")
        last, _, gap = (rest or first).partition(" by ")
        named += range(int(first.split("@")[0]), int(last.split("@")[0]) + 1, int(gap or 1))
    assert named == steps


def test_counted() -> None:
    assert counted(1, "segment") == "1 segment"
    assert counted(0, "segment") == "0 segments"
    assert counted(1204, "segment") == "1,204 segments"
    assert [counted(n, "file", "is", "are") for n in (1, 2)] == ["1 file is", "2 files are"]
    assert checkpoints(["7@1"]) == "7@1"
    assert checkpoints(["7@1", "8@1", "9@1"]) == "3 checkpoints: 7..9@1"
