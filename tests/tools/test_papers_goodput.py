"""The experiments on goodput: their arithmetic with made-up costs, killed processes, and small simulated jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

pytest.importorskip("torch")

from tests.forms import long_only
from tools.baselines import medium
from tools.baselines.medium import Disk as Medium
from tools.bench.storage.rounds import WorkerError
from tools.bench.training.training_cases import Case
from tools.goodput import kills
from tools.goodput.life import Life
from tools.papers.limited_disk import Disk, limited_to, throttled
from tools.papers.pccheck import goodput, pipeline, throughput
from tools.papers.pccheck.measuring import Cost, disk_like_the_papers
from tools.papers.pccheck.throughput import Measured
from tools.papers.result import Asked
from tools.papers.scale import commits, jobs

ITERATION = 0.02


def cost(strategy: str, interval: int, slowdown: float, durable: float = 0.36) -> Cost:
    sample = {"iteration_s": slowdown * ITERATION, "durable_s": durable, "restore_s": 0.05, "stall_s": 0.0}
    return Cost(strategy, interval, [slowdown], [sample])


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(True, tmp_path, lambda _line: None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Costs as a disk that is 18 times as slow as an iteration would make them."""
    slow = {"checkfreq": 18.0, "gemini": 6.0, "ckptstore-4": 8.3}
    found = [cost(name, f, max(1.0, one / f) + 0.02) for name, one in slow.items() for f in (1, 10, 25)]
    found += [cost("gpm", f, 1 + 18.0 / f) for f in (1, 10, 25)]
    found += [cost("topk", 1, 1.1, 0.01)]
    measured = Measured(found, [cost("checkfreq", 1, 1.5)], ITERATION, Disk())
    for module in (goodput, throughput):
        monkeypatch.setattr(module, "measured_frequencies", lambda _asked: measured)
    return measured


@pytest.mark.usefixtures("made")
def test_goodput_on_the_trace_by_formula_and_by_simulation(asked: Asked) -> None:
    result = goodput.recomputed(asked)
    assert result.failed == []
    verdicts = {one.text: one for one in result.claims}
    best = next(one for text, one in verdicts.items() if "2.86" in text)
    assert best.holds
    assert float(best.ours.partition(":")[0]) > 4, "step diffs"
    assert all(one.holds for one in result.claims), [one for one in result.claims if not one.holds]
    rows = {(row[0], row[1]): row for row in result.tables[0].rows}
    assert rows["CheckFreq-like", 1][4] < 0.1 < 0.8 < rows["ckptstore, top-k step diffs", 1][4]  # type: ignore[operator]
    assert rows["ckptstore, N = 4", 10][4] > 1.5 * rows["CheckFreq-like", 10][4]  # type: ignore[operator]


@pytest.mark.usefixtures("made")
def test_throughput_by_interval(asked: Asked) -> None:
    result = throughput.frequencies(asked)
    assert [one.holds for one in result.claims] == [True, True, True]
    assert result.tables[0].columns == ("way", "every 1", "every 10", "every 25", "durable ms", "restore ms")
    assert result.figures[0].series["ckptstore, N = 4"][1] == pytest.approx(1 / 1.02)


def test_the_disk_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = disk_like_the_papers(0.02, 18e6)
    assert disk.rate == pytest.approx(18e6 / 0.36 / 0.46)
    assert disk.rate is not None
    assert 18e6 / disk.rate + 18e6 / disk.stream == pytest.approx(0.36), "one stream takes 18 iterations"
    found, slept = Medium(2e6, 2e6), list[float]()
    with monkeypatch.context() as patch:  # three streams that begin at the same instant
        patch.setattr(medium, "time", SimpleNamespace(monotonic=lambda: 7.0, sleep=slept.append))
        for _ in range(3):
            found.take(100_000)
    assert slept == pytest.approx([0.1, 0.15, 0.2]), "three streams share the channel, and overlap the rest"


def test_the_disk_of_a_loop_and_of_its_agent() -> None:
    disk = limited_to(30e6, 0.1, save=3.0, copy=2.0)
    assert disk.rate == pytest.approx(1e8), "30 MB in three iterations"
    assert disk.link == pytest.approx(1.5e8)
    code = "from ckptstore.backends.local_disk.posix import Posix; print(Posix.pwrite.__name__)"
    names = []
    for one in (disk, Disk()):
        with throttled(one):
            names.append(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True))
    assert [one.stdout.strip() for one in names] == ["paced", "pwrite"]


def test_goodput_of_many_workers(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    durable = {"topk": 0.01, "full-agent": 0.05, "dense-replica": 0.05}

    def measured(_asked: Asked, _plan: Any, ways: list[tuple[str, int]], *_: Any) -> tuple[list[Cost], float]:
        slow = {"checkfreq": 1.8, "gpm": 2.9, "torch.save": 2.9, "gemini": 1.1}
        return [cost(name, f, slow.get(name, 1.05), durable.get(name, 0.36)) for name, f in ways], ITERATION

    monkeypatch.setattr(jobs, "measured", measured)
    monkeypatch.setattr(jobs, "planned", nullcontext)
    monkeypatch.setattr(jobs, "commit_seconds", lambda size: 0.001 * size)
    result = jobs.run(asked)
    rows = {row[0]: row[3:] for row in result.tables[0].rows}
    assert len(rows) == 9
    for name, (one, *_, most, trace) in rows.items():
        assert 0 < most < one <= 1, name  # type: ignore[operator]
        assert 0 < trace < 1, name  # type: ignore[operator]
    assert rows["ckptstore, replica"][-2] > rows["ckptstore, N = 4"][-2] > rows["CheckFreq-like"][-2]  # type: ignore[operator]
    assert result.claims[0].holds


@long_only
def test_both_forms_of_a_pipeline_save_the_same(tmp_path: Path) -> None:
    result = pipeline.run(Asked(True, tmp_path, lambda _line: None, smoke=True))
    assert result.failed == []
    assert result.compared[0].equal == 4
    assert [row[1] for row in result.tables[0].rows] == [*pipeline.FORMS] * 2
    assert list(tmp_path.iterdir()) == []


def test_commits_of_few_ranks(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(commits.SIZES, True, (2, 4))
    result = commits.run(asked)
    assert result.failed == []
    assert result.compared[0].equal == 2
    assert [row[1] for row in result.tables[0].rows] == [2, 4, 2, 4, 2, 4]


_LIFE = """
import json, sys, time
from pathlib import Path
kept = Path(sys.argv[1]) / "kept"
step = int(kept.read_text()) if kept.exists() else 0
print(json.dumps({"restored": time.monotonic(), "step": step, "state": f"d{step}"}), flush=True)
for number in range(int(sys.argv[2])):
    step += 1
    if step % int(sys.argv[3]) == 0:
        kept.write_text(str(step))
    print(json.dumps({"step": step, "at": time.monotonic()}), flush=True)
    time.sleep(0.01)
"""


class Plan:
    """A plan whose worker counts."""

    def __init__(self, scratch: Path, steps: int, every: int = 5) -> None:
        self.scratch, self._steps, self._every = scratch, steps, every

    def begun(self, task: str, _case: Case, folder: Path, trouble: IO[str]) -> Any:
        assert task == "live"
        command = [sys.executable, "-S", "-c", _LIFE, str(folder), str(self._steps), str(self._every)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=trouble, text=True)


def test_lives_are_killed_at_their_times_and_steps_that_count_are_counted(tmp_path: Path) -> None:
    found = kills.lived(Plan(tmp_path, 10**6), Case("live", "any", 5), [0.4, 0.5, 9.0], 0.9)  # type: ignore[arg-type]
    assert len(found.restored) == len(found.down)  # on a busy machine a life may end before it has begun
    assert found.useful <= 90
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WorkerError, match="ended by itself"):
        kills.lived(Plan(tmp_path, 3), Case("live", "any", 5), [], 2.0)  # type: ignore[arg-type]


def test_what_a_kill_cuts_is_left_out() -> None:
    class Said:
        stdout = ('{"step": 1}\n', '{"st')

    assert list(Life([Said()]).says()) == [{"step": 1}]


def test_steps_that_count_and_steps_that_are_trained_again() -> None:
    found = kills.Lives(9.0)
    first = {"restored": 10.0, "step": 0, "state": ""}
    kills.note([first, *({"step": one, "at": 10.0 + one} for one in range(1, 14))], 24.0, 8.5, found)
    assert (found.useful, found.again, found.restored, found.start) == (13, 0, [], 1.5)
    late = {"step": 12, "at": 41.0}
    again = {"restored": 30.0, "step": 10, "state": "d10"}
    kills.note([{"begun": 28.0}, again, {"step": 11, "at": 31.0}, late], 40.0, 24.0, found)
    assert (found.useful, found.again, found.restored) == (11, 3, [(10, "d10")])
    assert found.equal({10: "d10"}) == 1
    assert found.equal({10: "other"}) == 0
    assert found.down == [6.0]
    assert found.each == [1.0] * 14


def test_a_result_is_data(asked: Asked, made: Measured) -> None:
    assert made.iteration == ITERATION
    json.dumps(goodput.recomputed(asked).document())
