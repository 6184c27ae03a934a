"""The conformance set: two readers give the expected answers, ours and the page's; a wrong answer is reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from ckptstore.formats import kernel_choice
from tests.forms import short_or
from tests.kernel_forms import KINDS
from tools.conformance.__main__ import SET, main
from tools.conformance.comparing import differences
from tools.conformance.ours import answer
from tools.conformance.page.codecs import RefusedError
from tools.conformance.page.store import Store
from tools.golden import make_conformance

pytestmark = pytest.mark.usefixtures("haste")  # what is damaged or missing on purpose is asked for again at once
STORES: dict[str, Any] = json.loads(SET.read_text())["stores"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STORES)
def test_our_reader(name: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: kernel_choice.use(None))
    kernel_choice.use(kind)
    folder = shutil.copytree(SET.parent / name, tmp_path / "store", symlinks=True)  # reading leaves a pin for a while
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert differences(STORES[name]["expected"], answer(folder)) == []


@pytest.mark.parametrize("name", STORES)
def test_the_reader_from_the_page(name: str) -> None:
    try:
        found = Store(SET.parent / name).answer()
    except RefusedError as error:
        found = {"refused": str(error)}
    assert differences(STORES[name]["expected"], found) == []


def test_the_reader_from_the_page_knows_nothing_of_ours() -> None:
    """Otherwise it would prove little."""
    code = "import sys, tools.conformance.page.store; sys.exit(any(m.startswith('ckptstore') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=SET.parents[3]).returncode == 0


def test_the_set_has_everything() -> None:
    expected = {name: store["expected"] for name, store in STORES.items()}
    assert {*make_conformance.STORES, "../store-1"} == expected.keys()
    refused = {name for name, one in expected.items() if "refused" in one}
    assert refused == {
        *("incompat", "features-read", "major-2", "wide-gap", "fold-incompat", "log-link"),
        *("gap-deleted", "stray", "stray-anchor"),
    }
    unknown = {name for name, one in expected.items() if isinstance(one.get("latest"), dict)}
    assert unknown == {
        *("orphan", "damage-after", "empty-damaged", "lost-end", "back-damaged", "overtaken"),
        *("closed-7", "lacks-text", "drops-null", "end-other"),
        *("no-stray", "bit-below-anchor", "retired-above", "spent", "highest", "orphan-state"),
    }
    lost = {name for name, one in expected.items() for c in one.get("checkpoints", {}).values() if "error" in c}
    assert lost == {
        *("damaged-segment", "unknown-rule", "shards-broken"),
        *("hashes", "identities", "several", "uses", "rank-members", "ways"),
    }
    assert any(one["lossy"] for one in expected["../store-1"]["checkpoints"].values())


def reader(path: Path, text: str) -> list[str]:
    """An executable that prints `text`."""
    path.write_text(f"print({text!r})\n")
    return [sys.executable, str(path)]


def crashing(path: Path, text: str) -> list[str]:
    """One that prints `text`, and fails after."""
    path.write_text(f"import sys\nprint({text!r})\nsys.exit(3)\n")
    return [sys.executable, str(path)]


def test_the_script_runs_an_executable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right for the one store, wrong for the other, and an executable with unreadable output."""
    stores = {name: STORES[name] for name in ("incompat", "features-write")}
    small = tmp_path / "set.json"
    small.write_text(json.dumps({"stores": stores}))
    assert main(["--set", str(small), *reader(tmp_path / "a.py", '{"refused": "x"}')]) == 1
    out = capsys.readouterr().out
    assert "ok    incompat" in out
    assert "FAIL  features-write" in out
    assert main(["--set", str(small), *reader(tmp_path / "b.py", "what?")]) == 2
    assert "no answer" in capsys.readouterr().out
    assert main(["--set", str(small), str(tmp_path / "nothing-here")]) == 2
    assert main(["--set", str(small), *crashing(tmp_path / "c.py", '{"refused": "x"}')]) == 2
    assert "exit status 3" in capsys.readouterr().out
    some = {str(SET.parent / name): STORES[name] for name in list(STORES)[:: short_or(6, 1)]}
    small.write_text(json.dumps({"stores": some}))
    assert main(["--set", str(small), sys.executable, "-m", "tools.conformance.page"]) == 0
    assert "all as expected" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"latest": "1@1"}, "checkpoints: missing"),
        ({"latest": "1@1", "checkpoints": {"1@1": {"a": [1, 2]}}, "more": 1}, "more: not expected"),
        ({"latest": "2@1", "checkpoints": {"1@1": {"a": [1, 2]}}}, "/latest: '2@1' instead of '1@1'"),
        ({"latest": "1@1", "checkpoints": {"1@1": {"a": [1, 3]}}}, "/checkpoints/1@1/a/1: 3 instead of 2"),
        ({"latest": "1@1", "checkpoints": {"1@1": {"a": [1]}}}, "/checkpoints/1@1/a: [1] instead of [1, 2]"),
        ({"latest": "1@1", "checkpoints": {"1@1": {"a": [True, 2]}}}, "/0: True instead of 1"),
        ({"latest": {"error": ""}, "checkpoints": {"1@1": {"a": [1, 2]}}}, "/latest"),
        ({"refused": "no"}, "latest: missing"),
        ([], "instead of"),
    ],
)
def test_every_difference_is_reported(found: Any, reason: str) -> None:
    expected = {"latest": "1@1", "checkpoints": {"1@1": {"a": [1, 2]}}}
    assert differences(expected, expected) == []
    assert reason in "\n".join(differences(expected, found))


def test_texts_of_errors_are_not_compared() -> None:
    assert differences({"refused": "a"}, {"refused": "b"}) == []
    assert differences({"x": {"error": "a"}}, {"x": {"error": "b"}}) == []
    assert "must be refused" in differences({"refused": "a"}, {"latest": None, "checkpoints": {}})[0]
