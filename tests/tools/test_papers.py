"""The papers' experiments: the command, what a result must have, and the cheapest experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.forms import long_only
from tools.papers import command, page, registry, report
from tools.papers.registry import EXPERIMENTS, Experiment
from tools.papers.result import Bound, Claim, Compared, Figure, Result, Table

ROOT = Path(__file__).parents[2]


def result(**members: Any) -> Result:
    whole: dict[str, Any] = {
        "tables": [Table("Bytes", ("model", "MB"), [("GPT", 1.25), ("none", None)], {"MB": ".1f"})],
        "claims": [Claim("it is small", "1", "2", holds=False, why="two is more than one")],
        "figures": [
            Figure("bars", "bars", ["a", "b"], {"paper": [1.0, None], "ours": [2.0, 3.0]}, limit=1.5),
            Figure("lines", "lines", [1, 10], {"ours": [2.0, 3.0]}, log="xy"),
        ],
        "compared": [Compared("states", 2, 2), Compared("a baseline", 2, 1, loss="half of it")],
        "remarks": ["a remark | with a bar"],
    }
    return Result(**(whole | members))


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A registry of one experiment, which returns or raises the last element."""
    outcome: list[Any] = [result()]

    class Made(Experiment):
        def run(self, asked: Any) -> Result:
            asked.told("at work")
            (asked.scratch / "file").write_text("x")
            if isinstance(outcome[-1], Exception):
                raise outcome[-1]
            return outcome[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(registry, "EXPERIMENTS", (Made("made-1", "LowDiff", "Exp. 1", "A title", "none", 1),))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it
    return outcome


def run(*asked: str) -> Any:
    return CliRunner().invoke(command.main, asked)


def test_an_experiment_writes_its_document_and_picture(tmp_path: Path, one: list[Any]) -> None:
    image = pytest.importorskip("matplotlib.image")
    done = run("all", "--quick", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"made-1.json", "made-1.png"}, "scratch is deleted"
    document = json.loads((tmp_path / "made-1.json").read_text())
    assert document["quick"] is True
    assert document["machine"]["cores"] >= 1
    assert Result.read(document["result"]).document() == json.loads(json.dumps(one[0].document()))
    assert image.imread(tmp_path / "made-1.png").std() > 0.01
    for said in ("made-1", "it is small", "does not hold", "two is more than one", "half of it", "a remark | with"):
        assert said in done.output
    printed = run("made-*", "--json", "--out", str(tmp_path))
    (found,) = json.loads(printed.stdout)
    assert found["result"] == document["result"]


def test_a_state_that_is_not_equal_fails_the_command(tmp_path: Path, one: list[Any]) -> None:
    pytest.importorskip("matplotlib")
    for compared, said in (
        ([Compared("states", 3, 2)], "states: 2 of 3 states are equal"),
        ([Compared("states", 0, 0)], "0 of 0"),
        ([], "nothing was compared"),
    ):
        one.append(result(compared=compared))
        done = run("made-1", "--out", str(tmp_path))
        assert done.exit_code == 1
        assert said in done.output


def test_a_number_beyond_its_bound_fails() -> None:
    for value, said, failed in (
        (0.1, "Within its bound: the model's error: 0.1 of at most 0.1.", []),
        (
            0.12,
            "Beyond its bound: the model's error: 0.12 of at most 0.1.",
            ["the model's error: 0.12, at most 0.1 is allowed"],
        ),
        (float("nan"), "Beyond its bound: the model's error: nan", ["the model's error: nan, at most 0.1 is allowed"]),
    ):
        found = result(bounds=[Bound("the model's error", value, 0.1)])
        assert found.failed == failed
        assert said in "".join(report.markdown(Result.read(found.document())))


def test_an_experiment_that_fails_does_not_stop_the_others(tmp_path: Path, one: list[Any]) -> None:
    one.append(RuntimeError("no disk"))
    done = run("made-1", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert "made-1 failed" in done.output
    assert list(tmp_path.iterdir()) == []


def test_names() -> None:
    assert run("nothing-1").exit_code == 2
    assert run().exit_code == 2
    listed = run("--list")
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == [one.name for one in EXPERIMENTS]


def test_every_experiment_exists_and_has_a_place_on_the_page() -> None:
    pytest.importorskip("torch")
    names = [one.name for one in EXPERIMENTS]
    assert len(set(names)) == len(names)
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    for one in EXPERIMENTS:
        assert callable(one.function())
        assert f"`{one.name}`" in text, "python -m tools.papers.page adds it"
    quick = sum(one.quick_seconds for one in EXPERIMENTS)
    assert quick < 25 * 60


def test_what_does_not_hold_says_why() -> None:
    with pytest.raises(ValueError, match="say why"):
        Claim("fast", "2x", "1x", holds=False)
    with pytest.raises(ValueError, match="say why"):
        Claim("fast", "2x", "-", holds=None)
    with pytest.raises(ValueError, match="2 columns, and a row of 1"):
        Table("t", ("a", "b"), [("x",)])
    with pytest.raises(ValueError, match="1 values for 2 places"):
        Figure("f", "bars", ["a", "b"], {"ours": [1.0]})


def test_the_page_is_made_of_the_documents(tmp_path: Path, one: list[Any]) -> None:
    pytest.importorskip("matplotlib")
    assert run("all", "--quick", "--out", str(tmp_path)).exit_code == 0
    target = tmp_path / "page.md"
    target.write_text(f"# Title\n\nProse.\n\n{page.MARK}\nformer numbers\n")
    done = CliRunner().invoke(page.main, [str(tmp_path), str(target)])
    assert done.exit_code == 0, done.output
    text = target.read_text()
    assert text.startswith("# Title\n\nProse.\n")
    assert "former numbers" not in text
    assert "A title" in text
    assert "| it is small | 1 | 2 | does not hold |" in text
    assert "a remark | with a bar" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
def test_the_cheapest_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from tools.papers.lowdiff import stored_bytes

    monkeypatch.setattr(stored_bytes, "SHAPES", dict(list(stored_bytes.SHAPES.items())[:1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it
    done = run("lowdiff-7", "--quick", "--json", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "lowdiff-7.png").exists()


def test_the_interval_of_a_bound_is_that_of_a_saves_loss() -> None:
    pytest.importorskip("torch")
    from tools.bench.training.training_cases import Case
    from tools.papers.loops import Cost

    cost = Cost(Case("loop", "torch.save", 2), 6, plain=[0.1, 0.2, 0.1], saving=[0.11, 0.22, 0.2])
    assert cost.overhead == pytest.approx(0.1)
    assert cost.loss == pytest.approx(0.02), "two iterations, a tenth longer"
    assert [cost.interval(bound) for bound in (0.035, 0.1, 0.2, 1.0)] == [6, 2, 1, 1]
    cost.saving = [0.09, 0.19, 0.1]
    assert (cost.loss, cost.interval(0.035)) == (0.0, 1)


def test_every_way_fails_at_the_same_moments() -> None:
    pytest.importorskip("torch")
    from tools.papers.lives import Life, Way, moments

    found = moments(20.0, seed=3, most=20_000)
    assert found == moments(20.0, seed=3, most=20_000)
    assert found == sorted(found)
    assert len(found) == pytest.approx(1000, rel=0.1)
    life = Life(Way("torch.save", 10, "torch.save"), steps=100, seconds=12.5)
    assert life.wasted(0.1) == pytest.approx(2.5)
    assert life.effective(0.1) == pytest.approx(0.8)


def test_pieces_with_the_same_prefixes_share_a_dictionary_wherever_they_are() -> None:
    from tools.papers.xor.similarity import ratio

    rng = np.random.default_rng(1)
    pieces = rng.integers(0, 2, 150)[:, None] << 29  # two kinds of pieces, mixed, each with one prefix
    words = (pieces + rng.integers(0, 1 << 20, (150, 64))).astype(np.uint32).reshape(-1)
    assert 32 / (32 - 9) * 0.98 < ratio(words) < 32 / (32 - 9)
    noise = rng.integers(0, 1 << 32, 1000, np.uint32)
    assert 0.9 < ratio(noise) < 1.0


def test_a_dearer_switch_completes_jobs_later() -> None:
    pytest.importorskip("torch")
    from tools.papers.lightcheck.scheduling import average_completion

    free, dear = (average_completion(2.0, lost, 2000, seed=1) for lost in (0.0, 60.0))
    assert free < dear
    assert average_completion(0.1, 0.0, 2000, seed=1) == pytest.approx(900, rel=0.1), "half a round until it starts"
    assert average_completion(5.5, 0.0, 2000, seed=1) > 2 * free, "more work comes than is done"


def test_separated_tensors_begin_at_lines() -> None:
    pytest.importorskip("torch")
    from tools.papers.lightcheck import layout

    found = layout.parted({"a": (0, 64), "b": (64, 64), "c": (128, 256), "d": (385, 127)})
    assert found == 1 + 1 + 0 + 1


@long_only
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_experiment_in_its_quick_form(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    done = run("all", "--quick", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert {path.stem for path in tmp_path.glob("*.json")} == {one.name for one in EXPERIMENTS}
