"""`ckpt tag`."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented


def test_listing(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    outcome = ckpt("tag", pristine)
    assert (outcome.code, [line.split()[:2] for line in outcome.out.splitlines()[1:]]) == (0, [["best", "5@3"]])
    found = ckpt("tag", pristine, "--json").json
    assert_documented(found, documented("ckpt tag")[0])
    assert found["tags"] == [{"name": "best", "ref": "5@3"}]
    ckptstore.open(tmp_path / "new", create=True)
    assert ckpt("tag", tmp_path / "new").err == "note: no tag yet\n"
    assert ckpt("tag", tmp_path / "new", "--json").json["tags"] == []


def test_naming_moving_removing(ckpt: Run, run: Path) -> None:
    store = ckptstore.open(run)
    assert ckpt("tag", run, "old", "3@1", "--take-over").out == "tag:old is 3@1\n"
    assert ckpt("tag", run, "best", "tag:old", "--take-over", "--json").json["tags"] == [{"name": "best", "ref": "3@1"}]
    # The order is not significant otherwise.
    assert ckpt("tag", run, "3@1", "old", "--take-over").out == "tag:old is 3@1\n"
    assert ckpt("tag", run, "new", "--take-over").out == "tag:new is 5@3\n"
    assert {name: info.ref for name, info in store.tags().items()} == {"best": "3@1", "new": "5@3", "old": "3@1"}
    assert ckpt("tag", run, "best", "--delete", "--take-over").out == "tag:best is removed\n"
    removed = ckpt("tag", run, "new", "--delete", "--take-over", "--json").json
    assert_documented(removed, documented("ckpt tag")[0])
    assert removed["tags"] == [{"name": "new", "ref": None}]
    assert list(store.tags()) == ["old"]


def test_beside_a_run(ckpt: Run, run: Path) -> None:
    with ckptstore.open(run).writer(poll_seconds=0.02) as writer:
        assert ckpt("tag", run, "old", "3@1").code == 0
        assert writer.save({"lr": 0.5}, 6).term == 4


def test_nobody_answers(ckpt: Run, run: Path) -> None:
    with ckptstore.open(run).writer(poll_seconds=None):
        outcome = ckpt("tag", run, "old", "3@1", "--timeout", "0.01")
        found = ckpt("retire", run, "3@1", "--timeout", "0", "--json")
    assert outcome.code == 10
    assert outcome.err.splitlines()[0] == (
        f"note: asked the writer ({platform.node()}, pid {os.getpid()}); waiting up to 0.01 s (--timeout)"
    )
    assert "did not answer" in outcome.err
    assert "--take-over" in outcome.err.splitlines()[-1]
    assert (found.code, found.json["error"]["type"]) == (10, "RequestTimeoutError")


WRITES = """
import os, sys, ckptstore
writer = ckptstore.open(sys.argv[1]).writer(poll_seconds=None)
writer.save({"lr": 0.5}, 6)
os._exit(9)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("tag", "old", "3@1"),
        ("tag", "best", "--delete"),
        ("keep", "last:2"),
        ("prune", "--keep", "last:2"),
        ("retire", "3@1"),
        ("compact",),
    ],
)
def test_the_writer_is_gone_and_nobody_waits(ckpt: Run, run: Path, arguments: tuple[str, ...]) -> None:
    dead = subprocess.Popen([sys.executable, "-c", WRITES, run])
    assert dead.wait() == 9
    name, *rest = arguments
    outcome = ckpt(name, run, *rest)
    assert outcome.code == 10
    *_, said, hint = outcome.err.splitlines()
    assert said == f"error: {run}: no writer is active (process {dead.pid} on this host is gone), so none can answer"
    assert hint.startswith("hint: repeat with --take-over")
    assert "asked the writer" not in outcome.err
    assert ckptstore.open(run).backend.list("req/") == []


def test_mistakes(ckpt: Run, run: Path) -> None:
    for arguments, code, why in (
        (("no tag", "1"), 2, "is not a tag name"),
        (("x", "99"), 3, "no checkpoint of step 99"),
        (("nothing", "--delete"), 3, "no tag 'nothing'"),
        (("--delete",), 2, "pass the name of the tag"),
        (("best", "1", "--delete"), 2, "omit REF"),
        (("best", "soon"), 2, "is not a REF"),
        (("29@1", "best"), 3, "29@1"),
    ):
        outcome = ckpt("tag", run, *arguments, "--take-over")
        assert (outcome.code, why in outcome.err) == (code, True), arguments
    assert len(ckptstore.open(run).terms()) == 3, "nobody was fenced for it"


@pytest.mark.parametrize("name", ["29@1", "29", "1..5", "a..b", "latest"])
def test_no_tag_reads_like_another_ref(ckpt: Run, run: Path, name: str) -> None:
    outcome = ckpt("tag", run, name, "5", "--take-over")
    assert outcome.code == 2
    assert "is not a tag name" in outcome.err
    store = ckptstore.open(run)
    with store.writer(poll_seconds=None) as writer:
        with pytest.raises(ckptstore.UsageError, match="is not a tag name"):
            writer.tag(name, 5)
        with pytest.raises(ckptstore.UsageError, match="is not a tag name"):
            writer.save({"x": 1}, 6, tags=name)
    with pytest.raises(ckptstore.UsageError, match="is not a tag name"):
        store.untag(name + "\n")
    assert set(store.tags()) == {"best"}
