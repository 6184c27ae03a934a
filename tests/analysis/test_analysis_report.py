"""The report: one self-contained page."""

from __future__ import annotations

import base64
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ckptstore.analysis import Analysis, Options, analyze, write_report
from ckptstore.analysis.plot_titles import codecs_title, intervals_title, shipping_title, why_not_soonest
from ckptstore.analysis.recommendations import IntervalCost
from ckptstore.analysis.sentences import percent, ratio
from ckptstore.errors import MissingDependencyError, StorageError
from ckptstore.formats.byte_text import size
from tests.analysis.analysis_data import trajectory, write


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    states = trajectory(3, 128)
    hostile = [state | {"<script>alert(1)</script>": np.ones(2 + n)} for n, state in enumerate(states)]
    return analyze(write(tmp_path_factory.mktemp("series"), hostile), Options(sample=None))


@pytest.fixture(scope="module")
def page(found: Analysis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn once: its seven pictures take seconds."""
    pytest.importorskip("matplotlib")
    return write_report(found, tmp_path_factory.mktemp("page") / "new" / "report")


def test_the_page_is_complete_and_loads_nothing(found: Analysis, page: Path) -> None:
    assert [path.name for path in page.parent.iterdir()] == ["index.html"]
    text = page.read_text()
    assert not re.findall(r'(?:src|href)\s*=\s*"?(?!data:)[^"\s>]+', text)
    assert "<script" not in text  # a tensor's name is text
    assert "&lt;script&gt;" in text
    assert f"interval T = {found.advice.best.interval}" in text or "Store fulls" in text
    pictures = [base64.b64decode(data) for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", text)]
    assert len(pictures) == 7
    for picture in pictures:
        assert ElementTree.fromstring(picture).tag.endswith("svg")
        assert b"<image" not in picture
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    best = found.advice.best
    least = best.mean <= min(one.mean for one in found.advice.alternatives)
    rank = "stores least: " if least else "stores as little as T = "
    assert any(heading.startswith(f"T = {best.interval} {rank}") for heading in headings)
    assert any("smaller by" in heading for heading in headings)
    assert any(heading.startswith("Of 512 prefixes of sign and exponent, ") for heading in headings)
    assert "-0.00" not in text
    assert "Teng et al. 2026" in text
    assert text.count("class='scroll plot'") == 7
    for number in found.major:
        assert f"<h3>{found.label(number)}</h3>" in text


def test_the_same_analysis_gives_the_same_page(found: Analysis, page: Path, tmp_path: Path) -> None:
    assert write_report(found, tmp_path / "again").read_bytes() == page.read_bytes()


def test_two_checkpoints_of_one_tensor_are_enough(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    weight = np.random.default_rng(0).normal(0, 1, 5000).astype(np.float32)
    paths = write(tmp_path, [{"w.weight": weight}, {"w.weight": weight}])
    found = analyze(paths, Options(methods=("sub",)))
    assert write_report(found, tmp_path / "report").stat().st_size > 10_000


def test_without_matplotlib_the_extra_is_named(
    found: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"ckptstore\[plot\]"):
        write_report(found, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_place_that_cannot_be_written(found: Analysis, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        write_report(found, tmp_path / "file" / "report")


@pytest.mark.parametrize(
    ("quick", "title"),
    [
        ((), "Sending raw is fastest on every link"),
        (("xor",), "Compressing before sending pays at 1 Gbit/s, but not as recommended"),
        (("xor", "recommended"), "Compressing before sending pays at 1 Gbit/s"),
    ],
)
def test_the_sentences_about_links(found: Analysis, quick: tuple[str, ...], title: str) -> None:
    rows = [
        replace(row, encode=0.0 if row.method == "raw" else 1.0, send=0.0 if row.method in quick else 1.0)
        for row in found.shipping
    ]
    rows = [replace(row, encode=0.0) if row.method in quick and row.link == 1e9 else row for row in rows]
    assert shipping_title(replace(found, shipping=rows)) == title


def test_a_choice_that_arrives_before_the_recommendation(found: Analysis) -> None:
    """The recommendation stores least; if another choice arrives first, the page names it and its link."""
    seconds = {"recommended": 3.0, "xor": 1.0, "raw": 2.0}
    rows = [replace(row, encode=0.0, send=seconds.get(row.method, 9.0)) for row in found.shipping]
    links = [row for row in rows if row.method == "raw"]
    said = why_not_soonest(replace(found, shipping=rows))
    assert "store least; something else is sent soonest: xor at " in said
    assert said.count("bit/s") == len(links)
    rows = [replace(row, send=0.5) if row.method == "recommended" else row for row in rows]
    assert why_not_soonest(replace(found, shipping=rows)) == ""


def test_a_title_says_the_numbers_of_its_picture(found: Analysis) -> None:
    """The picture has one gap; the recommendation may have been measured at another."""
    wrong = [replace(one, estimate=replace(one.estimate, fraction=1e-9)) for one in found.advice.groups]
    assert codecs_title(replace(found, advice=replace(found.advice, groups=tuple(wrong)))) == codecs_title(found)


@pytest.mark.parametrize(
    ("best", "means", "title"),
    [
        (3, {0: 100.0, 2: 60.0, 3: 50.0}, "T = 3 stores least: 50 B per checkpoint"),
        (3, {0: 100.0, 2: 49.96, 3: 50.0}, "T = 3 stores as little as T = 2 within 0.1 %: 50 B per checkpoint"),
        (0, {0: 100.0, 2: 120.0}, "No interval pays: fulls alone store least"),
        (0, {0: 100.0, 2: 99.95}, "No interval pays: none stores 0.1 % less than fulls alone"),
    ],
)
def test_a_title_says_that_an_interval_stores_least_only_where_the_table_does(
    found: Analysis, best: int, means: dict[int, float], title: str
) -> None:
    costs = {interval: IntervalCost(interval, 1, mean, mean, 1.0) for interval, mean in means.items()}
    advice = replace(found.advice, best=costs[best], alternatives=tuple(costs.values()))
    assert intervals_title(replace(found, advice=advice)).startswith(title)


def test_wording(found: Analysis) -> None:
    told = [size(n) for n in (0, 999, 1024, 67_854_336, 1.5e12)]
    assert told == ["0 B", "999 B", "1.00 KiB", "64.7 MiB", "1.36 TiB"]
    estimate = found.measurements[0].estimate
    assert percent(estimate) == ""
    assert ratio(estimate).endswith("×")
