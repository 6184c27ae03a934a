"""`make docs`: man pages of every command, and a site that has every page. tests/test_docs.py checks the links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ckptstore
from ckptstore.cli.main import COMMANDS
from tools.site.assembling import assemble, public_names, relinked
from tools.site.manuals import write
from tools.site.options import options_page
from tools.site.picture import drawn
from tools.site.screen import drawn as drawn_screen
from tools.site.screen import screen

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "tools/site/mkdocs.yml").read_text()


@pytest.fixture(scope="module")
def manuals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {path.stem: path for path in write(tmp_path_factory.mktemp("man"), "1.2.3")}


def test_every_command_has_a_manual(manuals: dict[str, Path]) -> None:
    assert {"ckpt", "ckpt-tune-interval", *(f"ckpt-{name}" for name in COMMANDS)} <= set(manuals)
    text = manuals["ckpt-restore"].read_text()
    assert '"ckptstore 1.2.3"' in text
    assert "\\-\\-max\\-shard\\-size" in text
    assert "ckpt restore runs/gpt \\-\\-out model.safetensors" in text  # the examples


def test_the_formatter_takes_them_without_a_word(manuals: dict[str, Path]) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    for path in manuals.values():
        done = subprocess.run(
            ["groff", "-man", "-ww", "-Tutf8", path],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/usr/bin:/bin"},
        )
        assert done.stderr == "", path.name
        assert (
            "--json" in re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout).replace("‐", "-")
            or "ckpt.1" in path.name
            or (path.name == "ckpt-tune.1")
        ), path.name


def test_the_page_of_options_is_what_the_commands_say() -> None:
    """`python -m tools.site.options docs/cli-options.md` writes it."""
    page = options_page()
    assert (ROOT / "docs/cli-options.md").read_text() == page
    assert {f"ckpt {name}" for name in COMMANDS if name != "tune"} <= set(re.findall("^## (.*)", page, re.MULTILINE))
    assert "| `--max-shard-size SIZE` | Split into files of at most this size, with an index. |" in page


def test_every_page_has_its_place() -> None:
    placed = set(re.findall(r"([\w-]+\.md)$", CONFIG, re.MULTILINE))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert placed == pages | {"api.md", "api-training.md", "spec.md", "changelog.md"}
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/index.md").read_text()))
    assert pages - linked == {"index.md"}


def test_pages_are_put_together(tmp_path: Path) -> None:
    assemble(ROOT, tmp_path / "docs", public_names(), ["Checkpointer"])
    api = (tmp_path / "docs/api.md").read_text()
    assert set(re.findall(r"^::: ckptstore\.[\w.]*\.(\w+)$", api, re.MULTILINE)) == set(ckptstore.__all__) - {
        "__version__"
    }
    assert "](spec.md)" in (tmp_path / "docs/codecs.md").read_text()


def test_links_are_those_of_the_site() -> None:
    assert relinked("[s](../formats/SPEC.md#seven) [c](cli.md#log) [h](https://x.org)", "docs") == (
        "[s](spec.md#seven) [c](cli.md#log) [h](https://x.org)"
    )
    assert relinked("[`Store`](../ckptstore/store/store.py)", "docs") == "`Store` (`ckptstore/store/store.py`)"
    assert relinked("[retention](../docs/retention.md)", "formats") == "[retention](retention.md)"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning() -> None:
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]' (make docs does it)")
    done = subprocess.run([sys.executable, "-m", "tools.site"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    api = (ROOT / "build/site/api.html").read_text()
    assert "ckptstore.store.store.Store.load" in api
    assert "HtmlTable" not in api  # how it is made
    assert "Bases:" in api  # what an error is a kind of


def test_the_picture_of_the_readme() -> None:
    picture = (ROOT / "docs/kills.svg").read_text()
    assert "kills.svg" in (ROOT / "README.md").read_text()
    for text in (picture, drawn([(1, 1, 3.0), (2, 1, 2.5), (3, 2, 2.0)], [2], "1 < 2")):
        root = ElementTree.fromstring(text)
        kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
        assert set(kinds) <= {"svg", "title", "rect", "text", "path"}  # no script, nothing fetched
    assert kinds.count("path") == 4  # the frame, a line for each term, a kill
    assert "1 &lt; 2" in text


def test_a_screen_of_the_readme() -> None:
    picture = (ROOT / "docs/log.svg").read_text()
    assert "docs/log.svg" in (ROOT / "README.md").read_text()
    lines = ["\x1b[1m2 checkpoints\x1b[0m", "*  \x1b[36m2@1\x1b[0m  <full>", *map(str, range(40))]
    made = drawn_screen(lines, "ckpt log runs/gpt")
    for text in (picture, made):
        root = ElementTree.fromstring(text)
        assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {"svg", "title", "rect", "text", "tspan"}
    assert "&lt;full&gt;" in made
    assert '<tspan x="39.2" textLength="25.2" lengthAdjust="spacingAndGlyphs" fill="#5cc0cc">2@1</tspan>' in made
    assert "... 18 lines more" in made
    assert screen([sys.executable, "-c", "print('\\x1b[1mx\\x1b[0m')"]) == ["\x1b[1mx\x1b[0m"]
