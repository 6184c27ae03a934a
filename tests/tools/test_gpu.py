"""The command for a GPU machine: it finds every marked test, keeps its time limits, and its table's ways run on the CPU
and on a simulated device as on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tools.gpu import __main__ as gpu
from tools.gpu import suite, table
from tools.gpu.table import Measured

torch = pytest.importorskip("torch")

from tests import warmth  # noqa: E402
from tests.forms import LONG, in_turn, long_only  # noqa: E402 - torch decides whether this file runs at all
from tests.warm_agents import start_warm  # noqa: E402
from tools.bench.training.training_loop import Trainer, tensors  # noqa: E402
from tools.bench.training.training_strategies import AbsentError  # noqa: E402
from tools.device import simulated, why_not  # noqa: E402
from tools.device.roundings import UNKNOWN  # noqa: E402
from tools.gpu import bus, case, ways  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PLAN = case.Plan(interval=3, saves=2, seconds=30.0, plain=2)
EVERY_STEP = {"topk", "topk-agent", "gradient", "gradient-agent", "replica"}


IN_CI = ("full-agent", "layer-device", "topk-agent", "torch.save", "dcp-async")
"""Ways that CI tries; the others differ from them by an option."""
MORE = [pytest.param(way, 0, marks=long_only) for way in ("full-agent", "layer-device", "dcp-async")]


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))
    if not LONG:  # each table makes a nursery, which imports torch, and each agent imports it
        start_warm(monkeypatch)
        monkeypatch.setattr(table, "Warm", lambda *_, **__: contextlib.nullcontext(warmth.nursery()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------------- the tests


def test_every_marked_test_is_found() -> None:
    found = suite.marked_tests()
    marks = {path: path.read_text().count("\n@pytest.mark.gpu\n") for path in (ROOT / "tests").rglob("*.py")}
    assert {path: len(names) for path, names in found.items()} == {path: n for path, n in marks.items() if n}
    assert "test_on_a_gpu" in found[ROOT / "tests" / "frameworks" / "test_torch_digest.py"]


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "has_device", lambda: False)
    said = CliRunner().invoke(gpu.main, [])
    assert said.exit_code == 3
    assert "no CUDA device here" in said.output
    assert "tests/frameworks/test_torch_digest.py::test_on_a_gpu" in said.output
    document = json.loads(CliRunner().invoke(gpu.main, ["--json"]).output)
    assert document["device"] is None
    assert len(document["tests"]) == sum(map(len, suite.marked_tests().values()))


def test_a_skipped_test_is_no_success(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(
        "import pytest\n\n\n@pytest.mark.gpu\ndef test_fine(): ...\n\n\n"
        "@pytest.mark.gpu\n@pytest.mark.skip(reason='no device')\ndef test_skipped(): ...\n\n\n"
        "@pytest.mark.gpu\ndef test_wrong():\n    assert 1 == 2\n\n\ndef test_unmarked(): ...\n"
    )
    assert suite.marked_tests(tmp_path) == {file: ["test_fine", "test_skipped", "test_wrong"]}
    rows = {row.name.rpartition(".")[2]: row for row in suite.run_tests([file], tmp_path)}
    assert {name: (row.outcome, row.good) for name, row in rows.items()} == {
        "test_fine": ("passed", True),
        "test_skipped": ("skipped", False),
        "test_wrong": ("failed", False),
    }
    assert "no device" in rows["test_skipped"].words


def test_what_had_ended_when_the_time_was_up_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(
        "import time\n\nimport pytest\n\n\n@pytest.mark.gpu\ndef test_fine(): ...\n\n\n"
        "@pytest.mark.gpu\ndef test_wrong():\n    assert 1 == 2\n\n\n"
        "@pytest.mark.gpu\ndef test_without_end():\n    time.sleep(600)\n"
    )
    for seconds in (8, 30, 120):  # on a busy machine the start of pytest takes long
        rows = list(suite.run_tests([file], tmp_path, seconds=seconds))
        if len(rows) == 3:
            break
    assert [row.outcome for row in rows] == ["passed", "failed", "not run"]
    assert "2 had ended" in rows[-1].words


def test_a_benchmark_that_cannot_run_is_a_failure(tmp_path: Path) -> None:
    (row,) = suite.run_benchmark("tools.bench.no_such_module", (), tmp_path, quick=True)
    assert not row.good
    assert "no_such_module" in row.words


@pytest.mark.parametrize("left", [100.0, 0.4])
def test_a_benchmark_that_does_not_end_is_ended(tmp_path: Path, left: float) -> None:
    module, options = suite.KILLS[0]
    began = time.monotonic()
    (row,) = suite.run_benchmark(module, options, tmp_path, quick=True, device="cpu", seconds=0.5, left=left)
    assert time.monotonic() - began < 200
    assert (row.outcome, row.name) == ("not run" if left < 0.5 else "failed", options[1])
    assert "ended after" in row.words


# ---------------------------------------------------------------------------------------------------------- the table


def test_the_parts_have_every_way_that_saves() -> None:
    assert [*table.PEERS, *table.SAVES, *table.DIFFS] == [way for way in ways.WAYS if not way.startswith("none")]


def checked(way: str, place: Path, device: str) -> dict[str, Any]:
    """Measure a tiny model, and check the requirements on every way."""
    found = case.measured(way, case.Load(device, 32, 1, 1, 8, micro=2), PLAN, place)
    json.dumps(found)
    assert found["differs"] is None
    every = way in EVERY_STEP
    assert set(found["blocks"]) == set(found["losses"]) == ({"1"} if every else {"1", "3"})
    for interval, block in found["blocks"].items():
        assert (block["iterations"], block["saves"]) == (2 * int(interval), 2)
        assert block["durable"] == 2 or way == "replica"
        assert block["worst_stall_s"] >= block["stall_s"] > 0
        assert found["losses"][interval] == block["iteration_s"] / found["plain_s"] - 1
    assert found["host_bytes"] >= 0
    assert found["stored_bytes"] > 0
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way in IN_CI else long_only) for way in ways.WAYS if not way.startswith("none")],
)
def test_every_way_on_the_cpu(tmp_path: Path, way: str) -> None:
    try:
        found = checked(way, tmp_path, "cpu")
    except AbsentError as error:
        assert way == "dcp-pinned"
        pytest.skip(str(error))
    assert found["traffic"] is None
    assert "cpu" in found["no_traffic"]
    assert ("agent_bytes" in found) == (way.endswith("-agent") or way == "replica")
    if way in ("torch.save", "full", "layer-host"):
        assert found["stored_bytes"] == pytest.approx(found["state_bytes"], rel=0.3)
    if (
        way not in EVERY_STEP and way != "delta"
    ):  # older ones are deleted between blocks: the last, and one of the profile
        assert sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file()) < 4 * found["state_bytes"]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "seed"), in_turn(("full", "topk", "replica"), (0, 5)) + MORE)
def test_ways_on_a_simulated_device(tmp_path: Path, way: str, seed: int) -> None:
    with simulated(seed) as machine:
        found = checked(way, tmp_path, "cuda")
        assert not machine.hazards
    assert "device_peak_bytes" in found
    assert "profiler" in found["no_traffic"]  # this torch has no CUDA, and so no CUPTI


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.filterwarnings("ignore")
def test_a_replica_on_a_device_of_unknown_arithmetic_is_absent_with_the_reason(tmp_path: Path) -> None:
    with simulated(roundings=UNKNOWN), pytest.raises(AbsentError, match=r"on cuda:0 rounds .* numbers of a probe"):
        case.measured("replica", case.Load("cuda", 64, 1, 1, 8), PLAN, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_differs_in_one_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Trainer.load

    def changed(trainer: Trainer, state: dict[str, Any]) -> None:
        load(trainer, state)
        with torch.no_grad():
            last = list(tensors(trainer.state()))[-1][1]
            last.reshape(-1)[-1:].view(torch.int32).bitwise_xor_(1)

    monkeypatch.setattr(Trainer, "load", changed)
    found = case.measured("torch.save", case.Load("cpu", 32, 1, 1, 8), PLAN, tmp_path)
    assert "optimizer" in found["differs"]


def test_an_iteration_of_so_many_seconds() -> None:
    assert case.fitting(case.Load("cpu", 32, 1, 1, 8), 0.0) == 1
    assert case.fitting(case.Load("cpu", 32, 1, 1, 8), 3.0) > 5


def test_micro_batches_add_up_and_are_compressed_once() -> None:
    one, three = (case.Training(case.Load("cpu", 32, 1, 1, 8, micro=micro)) for micro in (1, 3))
    calls = []

    class Hook:
        def compress(self, parameters: Any) -> None:
            calls.append([parameter.grad.clone() for parameter in parameters])

    for training in (one, three):
        training.compressor = Hook()
        training.backward()
        assert training.compressor is not None
    assert len(calls) == 2
    for alone, added in zip(*calls, strict=True):
        torch.testing.assert_close(added, 3 * alone)


def test_bytes_of_copies_from_a_trace() -> None:
    def copy(name: str, nbytes: int) -> dict[str, Any]:
        return {"cat": "gpu_memcpy", "name": f"Memcpy {name}", "args": {"bytes": nbytes}}

    events = [
        copy("DtoH (Device -> Pinned)", 100),
        copy("DtoH (Device -> Pageable)", 20),
        copy("HtoD (Pageable -> Device)", 3),
        copy("DtoD (Device -> Device)", 5),
        {"cat": "kernel", "name": "Memcpy DtoH of somebody's own", "args": {"bytes": 7}},
    ]
    assert bus.copies_in({"traceEvents": events}) == bus.Traffic(120, 20, 3, 5)
    assert bus.copies_in({"traceEvents": events[4:]}) is None
    assert bus.watched(lambda: None, torch.device("cpu")) == "cpu: no bus"


def test_the_command_on_the_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--part", "table", "--only", "full", "--only", "torch.save", "--json"]
    said = CliRunner().invoke(gpu.main, [*options, "--store", str(tmp_path), "--out", str(tmp_path / "document.json")])
    assert said.exit_code == 0, said.output
    document = json.loads(said.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "document.json").read_text()) == document
    rows = {row["way"]: row for part in document["parts"].values() for row in part["rows"]}
    assert set(rows) == {"full", "torch.save"}
    for row in rows.values():
        assert (row["failed"], row["absent"], row["not_run"]) == ("", "", "")
        assert row["summary"]["stall_s"] > 0
        assert row["summary"]["loss_rare"] is not None
    assert "ckptstore full, async" in said.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"document.json", "runtime"}


def test_cases_whose_time_does_not_come_are_reported(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--part", "saves", "--part", "tests", "--minutes", "0.001", "--json"]
    said = CliRunner().invoke(gpu.main, [*options, "--store", str(tmp_path)])
    assert said.exit_code == 0, said.output
    parts = json.loads(said.stdout.splitlines()[-1])["parts"]
    assert [row["way"] for row in parts["saves"]["rows"]] == list(table.SAVES)
    assert all("the time was up" in row["not_run"] for row in parts["saves"]["rows"])
    assert [row["outcome"] for row in parts["tests"]["rows"]] == ["not run"]


def test_a_case_that_fails_is_a_failure(tmp_path: Path) -> None:
    lines: list[str] = []
    setup = table.Setup(case.Load("nowhere", 32, 1, 1, 8), PLAN, 0.0, tmp_path, least=1.0)
    _, (one,) = table.measure(setup, ["full"], 2, time.monotonic() + 200, lines.append)
    assert not one.good
    assert "nowhere" in one.failed
    assert len(lines) == 2


@pytest.mark.parametrize(("case_seconds", "good"), [(0.2, False), pytest.param(500.0, True, marks=long_only)])
def test_a_case_is_ended_when_its_time_is_up_or_that_of_all(tmp_path: Path, case_seconds: float, good: bool) -> None:
    """The first is a failure. The second is none: the case did not run."""
    setup = table.Setup(case.Load("cpu", 512, 6, 8, 256, micro=50), PLAN, 0.0, tmp_path, case_seconds, least=0.0)
    _, (one,) = table.measure(setup, ["full"], 1, time.monotonic() + 20, lambda _: None)
    assert one.good == good
    assert "was ended after" in (one.not_run if good else one.failed)


def test_a_row_has_medians_and_the_worst_stall_of_all_rounds() -> None:
    sample = {"plain_s": 1.0, "losses": {"1": 0.5, "10": 0.1}, "host_bytes": 100, "agent_bytes": 10,
              "blocks": {"1": {"stall_s": 0.2, "worst_stall_s": 0.4, "durable_s": 3.0}}}  # fmt: skip
    slower = {**sample, "plain_s": 3.0, "blocks": {"1": {"stall_s": 0.4, "worst_stall_s": 0.3, "durable_s": 5.0}}}
    row = table.summary(Measured("full", (sample, slower)), 10)
    assert (row["iteration_s"], row["loss"], row["loss_rare"]) == (2.0, 0.5, 0.1)
    assert (row["stall_s"], row["worst_stall_s"]) == (pytest.approx(0.3), 0.4)
    assert (row["durable_s"], row["host_bytes"], row["to_host_bytes"]) == (4.0, 110, None)


def test_so_many_saves_as_fit(tmp_path: Path) -> None:
    assert table.affordable(5, 1000, tmp_path) == 5
    with pytest.raises(ValueError, match="--store"):
        table.affordable(5, 1 << 60, tmp_path)
