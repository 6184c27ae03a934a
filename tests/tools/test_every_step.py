"""The benchmark of saves after every step: each restored state is the trained one, and the quick form is complete."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

torch = pytest.importorskip("torch")

from tests.forms import long_only  # noqa: E402
from tests.warm_agents import start_warm  # noqa: E402
from tools.bench.training import every_step, every_step_turns, training_worker  # noqa: E402
from tools.bench.training.step_profile import PHASES, Phases, StepParts  # noqa: E402
from tools.bench.training.training_cases import SPIN, Case, Results  # noqa: E402
from tools.bench.training.training_checkpointers import CHECKPOINTERS, LEFT  # noqa: E402
from tools.bench.training.training_loop import Shape, Trainer, digest  # noqa: E402
from tools.bench.training.training_strategies import AbsentError, Ledger, Options  # noqa: E402

_QUICK = ("--quick", "--json", "--only", "loop/none", "--only", "recover/dense-agent")
SHAPE = Shape(width=32, layers=1, batch=1, context=8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in CHECKPOINTERS if not name.startswith(("none", "fulls"))])
def test_a_checkpointer_restores_the_trained_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))
    start_warm(monkeypatch)
    trainer, ledger = Trainer(SHAPE), Ledger()
    trainer.take()
    try:
        strategy = CHECKPOINTERS[name](tmp_path, trainer, Options(1, full_every=4), ledger)
    except AbsentError as error:
        pytest.skip(str(error))
    run = training_worker.Run(trainer, strategy, ledger, 1)
    run.until(7)
    strategy.close()
    every = set(range(2, 8))
    assert set(ledger.durable) <= every if name in ("dense-replica", "topk-replica") else set(ledger.durable) == every
    other = Trainer(SHAPE, seed=2)
    other.take()
    assert CHECKPOINTERS[name].restore(tmp_path, other) == 7
    assert digest(other.state()) == digest(trainer.state())
    for left in LEFT:
        left.close()
    LEFT.clear()


def test_a_strategy_that_refuses_the_device_is_absent_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))
    trainer = Trainer(SHAPE)
    trainer.model.to("meta")
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters())
    trainer.device = torch.device("meta")
    with pytest.raises(AbsentError, match="parameters are on meta") as caught:
        CHECKPOINTERS["dense-replica"](tmp_path, trainer, Options(1), Ledger())
    case = Case("loop", "dense-replica", 1)
    results = Results({case: []})
    results.take(case, lambda: {"absent": str(caught.value)})
    every_step.show(Console(width=300), results)
    assert "loop/dense-replica is absent: strategy='replica': parameters are on meta" in capsys.readouterr().out


def test_every_case_is_a_strategy() -> None:
    assert set(every_step.LABELS) | set(every_step.RECOVERIES) <= set(training_worker.ALL)
    assert [case.strategy for case in every_step.cases(["loop/topk"], 50)] == ["none-topk", "topk"]
    assert {case.interval for case in every_step.cases(["recover/*"], 50)} == {1, 50}


def test_overhead_is_that_of_the_same_round() -> None:
    plain, dense, topk = (Case("loop", name, 1) for name in ("none", "dense-agent", "topk-agent"))
    base = Case("loop", "none-topk", 1)
    seconds = {plain: (1.0, 2.0), dense: (1.5, 2.2), base: (2.0, 2.0), topk: (2.1, 2.2)}
    results = Results({case: [{"iteration_s": one} for one in each] for case, each in seconds.items()})
    assert every_step.overheads(results, dense) == pytest.approx([0.5, 0.1])
    assert every_step.overheads(results, topk) == pytest.approx([0.05, 0.1])


def test_the_overhead_of_turns_is_that_of_pairs() -> None:
    turns = every_step_turns.Turns(plain=[1.0, 2.0, 4.0], saving=[1.1, 2.1, 4.2])
    assert turns.overheads() == pytest.approx([0.1, 0.05, 0.05])
    lowest, highest = every_step_turns.interval_of(turns.overheads())
    assert (lowest, highest) == pytest.approx((0.05, 0.1))


def test_the_difference_of_a_step_is_the_sum_of_its_phases() -> None:
    plain = [{phase: [1.0, 0.5] for phase in PHASES}, {phase: [2.0, 1.0] for phase in PHASES}]
    saving = [{phase: [1.0 + place, 0.5] for place, phase in enumerate(PHASES)}, plain[1]]
    phases = Phases(plain, saving)
    assert phases.differences("save", 0) == [2.0, 0.0]
    assert phases.whole(0) == [0.0 + 1 + 2 + 3, 0.0]
    assert phases.whole(1) == [0.0, 0.0]


def test_a_part_within_another_counts_for_itself_alone() -> None:
    parts = StepParts()
    inner = parts.timed("inner", lambda: time.sleep(0.02))
    outer = parts.timed("outer", lambda: (inner(), inner()))
    outer()
    spent = parts.take()
    assert spent["inner"][0] >= 0.04
    assert spent["outer"][0] < spent["inner"][0]
    assert parts.take() == {}


@long_only
@pytest.mark.slow
def test_turns_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path))  # the command has its own
    monkeypatch.setenv(SPIN, "0.001")  # the nursery's messages end with the test
    small = ("--parameters", "30k", "--tokens", "1", "16", "--steps", "2", "--pairs", "2", "--json")
    asked = ["full-agent", "--control", "--profile", *small, "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(every_step_turns.main, asked)
    assert done.exit_code == 0, done.output
    result, control, copying = json.loads((tmp_path / "out" / "every_step_turns.json").read_text())["results"]
    assert len(result["plain"]) == len(result["saving"]) == len(control["saving"]) == 2
    assert result["result"]["restore_s"] > 0, "its last state was restored and compared"
    assert [control["strategy"], copying["strategy"]] == ["none-spin", "none-stream"]
    phases = result["phases"]
    assert set(phases["plain"][0]) == set(phases["saving"][1]) == set(PHASES)
    assert {"copies", "plan", "messages"} <= set(phases["parts"][1])
    assert sum(each[0] for each in phases["saving"][1].values()) == pytest.approx(result["saving"][1], rel=1e-3)
    assert not control["phases"]["parts"][0]
    assert "restore_s" not in control["result"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["every_step_turns.json"]


@pytest.mark.slow
def test_the_quick_form_measures_recovers_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path))  # the command has its own
    done = CliRunner().invoke(every_step.main, [*_QUICK, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    results = {
        f"{one['kind']}/{one['strategy']}": one
        for one in json.loads((tmp_path / "out" / "every_step.json").read_text())["results"]
    }
    assert set(results) == {"loop/none", "recover/dense-agent"}
    assert results["loop/none"]["median"]["iteration_s"] > 0
    assert results["recover/dense-agent"]["median"]["lost"] <= 1, "the agent had what its trainer had given it"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["every_step.json"]
