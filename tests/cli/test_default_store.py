"""`CKPT_STORE`: where STORE may be omitted, which depends only on how the arguments are written."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Run
from tests.cli.test_completion import completions


@pytest.fixture
def there(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPT_STORE", str(run))
    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ("log",),
        ("log", "--json"),
        ("log", "-n", "2"),
        ("log", "-"),
        ("inspect",),
        ("inspect", "5"),
        ("inspect", "--tensor", "model.frozen", "2@1"),
        ("inspect", "2@1", "--tensor", "model.frozen"),
        ("inspect", "-", "5"),
        ("inspect", "tag:best"),
        ("verify",),
        ("verify", "4@2", "--deep"),
        ("verify", "--deep", "latest"),
        ("diff", "1", "latest"),
        ("diff", "--sort", "max", "3@1", "3@2"),
        ("tag",),
        ("tag", "-", "best", "--take-over"),
        ("gc",),
        ("gc", "--dry-run"),
        ("restore", "3@1", "--explain"),
        ("restore", "--explain"),
        ("retire", "3@1", "4@1", "--dry-run"),
    ],
)
def test_left_out(ckpt: Run, there: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(there.parent)
    Path("5").mkdir()  # existing paths do not matter
    Path("latest").mkdir()
    found = ckpt(*arguments)
    assert found.code == 0, found.err
    monkeypatch.delenv("CKPT_STORE")
    command, *rest = (word for word in arguments if word != "-")
    first, again = (one.out.splitlines()[0].partition(":")[0] for one in (found, ckpt(command, there, *rest)))
    assert first == again  # the part after a colon may be a metric
    assert ckpt(*arguments).code in (2, 3)


def test_a_merge(ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.maintenance.test_tags_and_retirement import CHAIN, fill

    store = fill(ckptstore.open(tmp_path / "chain"), 1, 2, 3, deltas=CHAIN)
    monkeypatch.setenv("CKPT_STORE", store.url)
    for words in (("2..3",), ("2@1..latest",), ("-", "2..3")):
        assert ckpt("merge", *words, "--dry-run", "--keep-steps").code == 0, words


def test_a_store_that_is_named_is_taken(ckpt: Run, there: Path, tmp_path: Path) -> None:
    other = tmp_path / "5"
    with ckptstore.open(other).writer() as writer:
        writer.save({"lr": 0.5}, 5)
    assert "5@1" in ckpt("log", other).out
    assert "checkpoint 5@1" in ckpt("inspect", other, "5").out
    assert "checkpoint 5@1" in ckpt("inspect", other).out
    assert ckpt("tag", "best", "5").code == 3  # NAME is not a REF: this is a missing store
    assert ckpt("inspect", "5", "5").code == 2


def test_a_folder_written_like_a_ref(ckpt: Run, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ckptstore.open("5").writer() as writer:
        writer.save({"lr": 0.5}, 5)
    assert "checkpoint 5@3" in ckpt("inspect", "5").out
    assert "checkpoint 5@1" in ckpt("inspect", "./5").out
    assert "5@1" in ckpt("log", "5").out, "log takes no REF"
    monkeypatch.delenv("CKPT_STORE")
    assert "checkpoint 5@1" in ckpt("inspect", "5").out


def test_a_dash_without_it(ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("CKPT_STORE", raising=False)
        else:
            monkeypatch.setenv("CKPT_STORE", value)
        outcome = ckpt("log", "-")
        assert (outcome.code, "'-' stands for CKPT_STORE, which is not set" in outcome.err) == (2, True)
        assert "Usage" in ckpt("log").err


def test_mistakes_are_still_explained(ckpt: Run, there: Path) -> None:
    outcome = ckpt("inspect", "--bogus", "5")
    assert (outcome.code, "No such option" in outcome.err) == (2, True)
    assert ckpt("log", "--help").code == 0
    assert ckpt("diff", "1").code == 2


def test_completion(there: Path) -> None:
    assert completions("inspect", incomplete="4") == completions("inspect", "-", incomplete="4") == ["4@2", "4@1"]
    assert completions("diff", "1", incomplete="5") == ["5@3"]
    assert completions("inspect", "--tensor", incomplete="odd") == ["odd.half", "odd.empty", "odd.z"]
    assert completions("inspect", "1@1", "--tensor", incomplete="ex") == ["extra"]
    assert completions("tag", "-", incomplete="b") == ["best"]
    assert completions("inspect", incomplete="runs/") == ["runs/"]  # a folder
    assert completions("log", incomplete="ru") == ["ru"]
    assert completions("tag", incomplete="ru") == ["ru"]
