"""The training benchmark: every strategy restores the trained state, and the quick form is complete."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.forms import long_only
from tools.bench.training import strategy_comparison as training
from tools.bench.training import training_cases, training_report
from tools.bench.training.training_cases import Case, Plan, Results

torch = pytest.importorskip("torch")

from tools.bench.training import training_loop, training_strategies, training_worker  # noqa: E402
from tools.bench.training.training_loop import Shape, Trainer, digest  # noqa: E402
from tools.bench.training.training_strategies import STRATEGIES, AbsentError, Ledger, Options  # noqa: E402

SHAPE = Shape(width=32, layers=1, batch=1, context=8)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "none"])
@pytest.mark.parametrize("interval", [1, 3])
def test_a_strategy_restores_the_trained_state(tmp_path: Path, name: str, interval: int) -> None:
    trainer, ledger = Trainer(SHAPE), Ledger()
    trainer.take()
    try:
        strategy = STRATEGIES[name](tmp_path, trainer, Options(interval, full_every=4), ledger)
    except AbsentError as error:
        pytest.skip(str(error))
    run = training_worker.Run(trainer, strategy, ledger, interval)
    digests = {}
    while trainer.step < 12:
        run.take(lambda step: digests.update({step: digest(trainer.state())}))
    strategy.close()
    assert set(ledger.durable) == set(digests)
    assert all(seconds > 0 for seconds in ledger.seconds(0))
    assert len(run.iterations) == 11
    assert len(run.stalls) == 12 // interval - 1 // interval
    other = Trainer(SHAPE, seed=2)
    other.take()
    assert digest(other.state()) != digests[12]
    assert STRATEGIES[name].restore(tmp_path, other) == 12
    assert digest(other.state()) == digests[12]
    other.take()  # and training continues from it, with the same bits
    trainer.take()
    assert digest(other.state()) == digest(trainer.state())


def test_the_update_waits_for_a_snapshot_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, copy = training_strategies.CheckFreqLike, training_strategies.CheckFreqLike.copy_all

    def slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        copy(*arguments)

    monkeypatch.setattr(kind, "copy_all", slowly)
    trainer, ledger = Trainer(SHAPE), Ledger()
    run = training_worker.Run(trainer, kind(tmp_path, trainer, Options(4), ledger), ledger, 4)
    run.until(4)
    saved = digest(trainer.state())
    run.until(6)
    run.strategy.close()
    other = Trainer(SHAPE, seed=2)
    other.take()
    assert kind.restore(tmp_path, other) == 4
    assert digest(other.state()) == saved


def test_nothing_restores_nothing(tmp_path: Path) -> None:
    for name, strategy in STRATEGIES.items():
        if name.startswith(("none", "torch", "dcp", "check", "naive")):
            assert strategy.restore(tmp_path, Trainer(SHAPE)) is None


def test_a_digest_sees_every_bit_and_every_number() -> None:
    trainer = Trainer(SHAPE)
    trainer.take()
    before = digest(trainer.state())
    assert digest(trainer.state()) == before
    weight = next(trainer.model.parameters())
    with torch.no_grad():
        weight.view(torch.int32)[0, 0] ^= 1
    assert digest(trainer.state()) != before
    with torch.no_grad():
        weight.view(torch.int32)[0, 0] ^= 1
    assert digest(trainer.state()) == before
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    assert digest(trainer.state()) != before


def test_threads_are_born_on_the_savers_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # so that it comes back
    trainer, savers = training_loop.divide_cores(pinned=True)
    assert training_loop.divide_cores(pinned=False) == (set(cores), set(cores))
    if len(cores) < 2:
        assert trainer == savers
        pytest.skip("one core")
    assert trainer | savers == set(cores)
    assert not trainer & savers
    try:
        assert training_loop.pin(trainer, savers).startswith("pinned: the training thread on")
        assert os.sched_getaffinity(0) == trainer
        seen: list[set[int]] = []
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert seen == [savers]
        assert os.sched_getaffinity(0) == trainer
    finally:
        os.sched_setaffinity(0, cores)


def test_the_driver_knows_strategies_and_shapes_without_torch() -> None:
    assert list(training_cases.STRATEGIES) == list(STRATEGIES)
    assert {name: kind.label for name, kind in STRATEGIES.items()} == training.LABELS
    for count in (100_000, 999_999, 1_000_000, 25_000_000, 355_000_000):
        shape = Shape.of(count, 2, 64)
        assert training.shape_of(count) == (shape.width, shape.layers)
        if count > 10**6:
            assert Shape.of(count, 2, 64).config().parameters == pytest.approx(count, rel=0.15)


def plan(tmp_path: Path, steps: int = 40) -> Plan:
    return Plan(32, 1, 1, 8, steps, 100, "cpu", True, tmp_path)


def test_loops_end_with_a_save_and_tables_amid_two_fulls(tmp_path: Path) -> None:
    steps = {interval: plan(tmp_path).measured_steps(Case("loop", "x", interval)) for interval in (1, 10, 50, 100)}
    assert steps == {1: 40, 10: 40, 50: 100, 100: 200}
    assert plan(tmp_path).measured_steps(Case("table", "gradient-diffs", 10, 1)) == 45
    assert plan(tmp_path).measured_steps(Case("table", "gradient-diffs", 100, 6)) == 150
    assert plan(tmp_path).measured_steps(Case("table", "gradient-diffs", 10, 4)) % 4 == 0


def sample(seconds: float, **more: float) -> dict[str, Any]:
    return {"iteration_s": seconds, "iterations_per_s": 1 / seconds, **more}


def test_slowdowns_are_to_none_of_the_same_round_and_waste_is_measured() -> None:
    none, torch_save = Case("loop", "none", 10), Case("loop", "torch.save", 10)
    base, cell, other = (
        Case("table", "none", 1),
        Case("table", "gradient-diffs", 20, 2),
        Case("table", "gradient-diffs", 20, 4),
    )
    results = Results(
        {
            none: [sample(1.0), sample(2.0)],
            torch_save: [sample(1.5), sample(2.2)],
            base: [sample(1.0)],
            cell: [sample(1.1, restore_s=5.0)],
            other: [sample(1.1, restore_s=5.0)],
        }
    )
    tables = training_report.Tables(results, mtbf=100.0)
    assert tables.slowdowns(torch_save) == [1.5, 1.1]
    assert tables.wasted(cell) == pytest.approx(0.1 + (1.0 + 5.0) / 100)
    assert tables.wasted(other) == pytest.approx(0.1 + (2.0 + 5.0) / 100)
    intervals, batches, cells = training_report.grid(tables)
    assert (intervals, batches) == ([20], [2, 4])
    assert cells == [[pytest.approx(1.0), pytest.approx(0.17 / 0.16)]]


def test_kills_are_reported_with_and_without_a_restorable_state(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    none, store = Case("kill", "none", 10), Case("kill", "ckptstore-2", 10)
    killed = [{"trained": 30, "restored": step, "lost": 30 - step, "restore_s": 0.5} for step in (20, 28)]
    results = Results({none: [{"trained": 30, "restored": None, "lost": 30, "restore_s": 0.0}], store: killed})
    tables = training_report.Tables(results, 100.0)
    entries = {entry["name"]: entry for entry in tables.document()}
    assert entries["kill/ckptstore-2/10"]["median"]["lost"] == 6
    assert "slowdown" not in entries["kill/ckptstore-2/10"]
    training_report.show(Console(width=200), tables, training.LABELS)
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.split("│")[1:5] == [" none                   ", "    10 ", "     1 ", "          all "] for line in lines
    )
    assert any("2 in flight" in line and "    6 " in line and "   10 " in line for line in lines)


def test_the_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    samples = {Case("loop", "none", number): [sample(1.0)] for number in (1, 10)}
    samples |= {Case("loop", "ckptstore-2", number): [sample(1.0 + 1 / number)] for number in (1, 10)}
    samples |= {Case("table", "none", 1): [sample(1.0)]}
    samples |= {Case("table", "gradient-diffs", 20, batch): [sample(1.1, restore_s=5.0)] for batch in (1, 2)}
    tables = training_report.Tables(Results(samples), 100.0)
    drawn = training_report.draw(tables, training.LABELS, "a title", tmp_path)
    assert [path.name for path in drawn] == ["training.png", "training_table.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert training_report.draw(training_report.Tables(Results({}), 100.0), training.LABELS, "", tmp_path) == []


@pytest.mark.filterwarnings("ignore")
def test_dcp_saves_every_step_where_torch_closes_a_stager_after_its_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11 does."""
    from torch.distributed.checkpoint import staging

    class Closing(staging.DefaultStager):  # type: ignore[misc]
        def stage(self, state_dict: Any, **settings: Any) -> Any:
            staged = super().stage(state_dict, **settings)
            self.close()
            return staged

    monkeypatch.setattr(staging, "DefaultStager", Closing)
    trainer, ledger = Trainer(SHAPE), Ledger()
    trainer.take()
    strategy = STRATEGIES["dcp-async"](tmp_path, trainer, Options(1), ledger)
    training_worker.Run(trainer, strategy, ledger, 1).until(4)
    strategy.close()
    assert set(ledger.durable) == {2, 3, 4}
    other = Trainer(SHAPE, seed=2)
    other.take()
    assert STRATEGIES["dcp-async"].restore(tmp_path, other) == 4
    assert digest(other.state()) == digest(trainer.state())


def test_failed_and_absent_cases_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from tools.bench.storage.rounds import WorkerError

    broken, absent = Case("loop", "torch.save", 1), Case("kill", "layer-host", 1)
    results = Results({broken: [], absent: []})

    def fail() -> dict[str, Any]:
        raise WorkerError("it broke")

    results.take(broken, fail)
    results.take(broken, lambda: sample(1.0))  # given up
    results.take(absent, lambda: {"absent": "no such mode"})
    assert results.samples == {broken: [], absent: []}
    training_report.show(Console(width=200), training_report.Tables(results, 100.0), training.LABELS)
    text = capsys.readouterr().out
    assert "loop/torch.save/1 failed: it broke" in text
    assert "kill/layer-host/1 is absent: no such mode" in text
    entries = training_report.Tables(results, 100.0).document()
    assert [entry.get("error", entry.get("absent")) for entry in entries] == ["it broke", "no such mode"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "loop/nothing/*"], "nothing matches; the cases are loop/none/1"),
        (["--intervals", "0"], "whole numbers from 1 on"),
        (["--limit", "5"], "'5' is not a time"),
        (["--parameters", "many"], "write a number as in 25M"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(training.main, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.output


def test_too_little_space_is_reported(tmp_path: Path) -> None:
    arguments = ["--parameters", "900B", "--only", "loop/torch.save/1", "--out", str(tmp_path)]
    result = CliRunner().invoke(training.main, arguments)
    assert result.exit_code == 1
    assert "GB are needed for checkpoints" in result.output
    assert list(tmp_path.iterdir()) == []


@long_only
@pytest.mark.slow
def test_the_quick_form_is_complete(tmp_path: Path) -> None:
    only = ["loop/none/2", "loop/ckptstore-2/2", "kill/ckptstore-2/2"]
    arguments = [word for name in only for word in ("--only", name)]
    result = CliRunner().invoke(
        training.main, ["--quick", *arguments, "--out", str(tmp_path), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "training.json").read_text())
    entries = {entry["name"]: entry for entry in document["results"]}
    assert list(entries) == only
    loop, kill = entries["loop/ckptstore-2/2"], entries["kill/ckptstore-2/2"]
    assert loop["slowdown"] > 0
    for name in ("stall_s", "durable_s", "peak_rss", "bytes_per_save", "restore_s", "first_stall_s"):
        assert loop["median"][name] > 0, name
    assert 1_000_000 < loop["median"]["bytes_per_save"] < 3_000_000
    assert 0 <= kill["samples"][0]["lost"] <= 8
    assert kill["samples"][0]["trained"] >= 8
    assert document["settings"]["pinning"]
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["training.json", "training.png"]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_are_read() -> None:
    parameter = click.Option(["--x"])
    context = click.Context(training.main)
    assert training.parameters(context, parameter, "25M") == 25_000_000
    assert training.parameters(context, parameter, "300k") == 300_000
    assert training.parameters(context, parameter, "1234") == 1234
    assert training.numbers(context, parameter, "1,10") == (1, 10)
    assert training.numbers(context, parameter, None) is None
