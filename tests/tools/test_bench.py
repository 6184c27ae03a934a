"""The benchmarks: a very small run of each, and their measuring functions."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tests import warmth
from tests.forms import LONG, long_only, short_or
from tools.bench.machine import filesystem_type
from tools.bench.measure import Ballast, Measurement
from tools.bench.storage import (
    commands,
    concurrent,
    markdown,
    pagecache,
    pmem,
    recycling,
    report,
    rounds,
    save_load,
    tensors,
    versions,
)
from tools.bench.storage.compared import SAVES
from tools.bench.storage.rounds import CASES
from tools.bench.training import version_turns
from tools.crash.media import obstacle

TINY = ("--size", "4MB", "--rounds", "1", "--no-settle")
"""The options of `save_load`. A gigabyte of memory that is touched before each measurement is only for real
measurements."""


def run(command: click.Command, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


@pytest.mark.slow
def test_a_small_comparison_is_complete_and_every_loaded_bit_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    if not LONG:
        warmth.warm_starts(monkeypatch, rounds)
    # Workers compare the loaded state with the seed: a wrong bit would be a failed case, and exit code 1.
    only = ["save/ckptstore", "save/safetensors", "warm/ckptstore", *["warm/raw-buffered"][: short_or(0, 1)]]
    on_disk = filesystem_type(tmp_path) != "tmpfs"  # whose pages never leave memory
    only += ["cold/ckptstore"] if on_disk and LONG else []
    arguments = [argument for name in only for argument in ("--only", name)]
    result = run(save_load.main, *TINY, "--out", str(tmp_path), "--json", *arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "save_load.json").read_text())
    assert {f"{entry['phase']}/{entry['method']}" for entry in document["results"]} == set(only)
    for entry in document["results"]:
        assert len(entry["samples"]) == 1
        assert entry["median"]["seconds"] > 0
        if entry["phase"] != "save":
            assert 3_500_000 < entry["median"]["file_bytes"] < 5_500_000
    assert document["machine"]["versions"]["safetensors"]
    text = "\n".join(markdown.tables(document))
    assert "### Save\n" in text
    assert "| safetensors + fsync |" in text
    assert (tmp_path / "save_load.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save_load.json", "save_load.png"]


def test_several_at_once_are_measured(tmp_path: Path) -> None:
    arguments = ["--size", "20MB", "--saves", "2", "--rounds", "1", "--seconds", "0.01", "--dir", str(tmp_path)]
    result = run(concurrent.main, *arguments, "--only", "N=2", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [entry["case"]["in_flight"] for entry in document["results"]] == [2] * 4
    for entry in document["results"]:
        (sample,) = entry["samples"]
        assert 0 <= sample["waited"] <= sample["stall"] <= sample["durable"]
        assert sample["rate"] > 0
    assert not list(tmp_path.iterdir())
    assert run(concurrent.main, "--only", "N=9").exit_code == 2


@pytest.mark.slow
def test_a_worker_that_fails_is_reported_and_the_run_exits_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    if not LONG:
        warmth.warm_starts(monkeypatch, rounds)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
    arguments = ["--only", "save/safetensors", "--only", "warm/safe-open", "--only", "save/raw-buffered"]
    result = run(save_load.main, *TINY, "--out", str(tmp_path), "--json", *arguments)
    assert result.exit_code == 1
    entries = {f"{entry['phase']}/{entry['method']}": entry for entry in json.loads(result.stdout)["results"]}
    assert "broken on purpose" in entries["save/safetensors"]["error"]
    assert "nothing to load" in entries["warm/safe-open"]["error"]
    assert entries["save/raw-buffered"]["samples"]


@pytest.mark.slow
def test_a_segment_on_persistent_memory_is_measured_every_way(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no tmpfs here")
    arguments = ["--size", "2MiB", "--rounds", "1", "--disk", str(tmp_path)]
    document = json.loads(run(pmem.main, *arguments, "--json").stdout)
    ratios = {row["name"]: row["ratio"] for row in document["results"]}
    assert ratios[pmem.LIMIT] == 1.0
    assert len(ratios) == (8 if obstacle("pmem") is None else 5)
    assert all(len(row["samples"]) == 1 and row["seconds"] > 0 for row in document["results"])
    assert "pmem:// msync, on" in run(pmem.main, *arguments).stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_training_loop_is_measured_with_saves_of_every_kind(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tools.bench.training import layerwise

    before = torch.get_num_threads(), os.sched_getaffinity(0)
    small = ["--width=16", "--blocks=1", "--rows=8", "--every=1", "--saves=2", "--rounds=1"]
    document = json.loads(
        run(layerwise.main, *small, "--shared", str(tmp_path / "none"), str(tmp_path), "--json").stdout
    )
    torch.set_num_threads(before[0])
    rows = {row["way"]: row for row in document["results"]}
    assert list(rows) == [way for way in layerwise.WAYS if "direct" not in way]
    assert document["state"] > 3 * 4 * 16 * 2000
    for way, row in rows.items():
        assert (row["loss"] == 0) == (row["stall"] == 0) == way.endswith("no saves"), way
        assert (row["copying"] > 0) == ("layer by layer" in way), way
    assert os.sched_getaffinity(0) == before[1]
    assert list(tmp_path.iterdir()) == []


def test_publishing_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tools.bench.storage import publishing

    lines = run(publishing.main, "--size=4MB", "--rounds=1", "--folder", str(tmp_path)).stdout.splitlines()
    assert [line[:14].strip() for line in lines] == ["full", "delta, hf", "delta, slime"]
    assert list(tmp_path.iterdir()) == []


def test_a_changed_bit_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tools.bench.storage import loaders, savers, state, worker

    nbytes, seed = 60_000, 1
    savers.RUN["safetensors"](state.build(nbytes, seed), tmp_path, Measurement())
    expected = state.expected_hashes(nbytes, seed)
    origin = loaders.Origin(tmp_path, nbytes, seed)
    loaded = loaders.RUN["safe-open"](origin)
    worker.compare(loaders.touch(loaded.tensors, 2), loaded.small, expected, seed)
    path = tmp_path / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    loaded = loaders.RUN["safe-open"](origin)
    with pytest.raises(RuntimeError, match="1 tensors differ"):
        worker.compare(loaders.touch(loaded.tensors, 2), loaded.small, expected, seed)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("method", SAVES)
def test_every_way_of_saving_keeps_the_state_of_the_call(tmp_path: Path, method: str) -> None:
    pytest.importorskip("torch")
    from tools.bench.storage import loaders, savers, state, worker

    # The asynchronous ones change the state as soon as the call returned.
    nbytes, seed = 60_000, 2
    savers.RUN[method](state.build(nbytes, seed), tmp_path, Measurement())
    loaded = loaders.RUN[SAVES[method].reader](loaders.Origin(tmp_path, nbytes, seed))
    worker.compare(loaders.touch(loaded.tensors, 1), loaded.small, state.expected_hashes(nbytes, seed), seed)


@pytest.mark.parametrize("nbytes", [4_000_000, 500_000_000])
def test_the_state_has_the_size_that_was_asked_for(nbytes: int) -> None:
    pytest.importorskip("torch")
    from tools.bench.storage.state import BYTES_PER_PARAMETER, parameter_shapes

    parameters = 0
    for shape in parameter_shapes(nbytes).values():
        product = 1
        for length in shape:
            product *= length
        parameters += product
    assert parameters * BYTES_PER_PARAMETER == pytest.approx(nbytes, rel=0.05)


def test_dropped_files_leave_the_page_cache_and_warmed_ones_fill_it(tmp_path: Path) -> None:
    if filesystem_type(tmp_path) == "tmpfs":
        pytest.skip("tmpfs is the page cache")
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1_000_000)
    pages = -(-1_000_000 // mmap.PAGESIZE)
    pagecache.warm(tmp_path)
    assert pagecache.resident_pages(tmp_path) == (pages, pages)
    pagecache.drop(tmp_path)
    assert pagecache.resident_pages(tmp_path) == (0, pages)


def test_pages_that_somebody_maps_are_not_passed_off_as_cold(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert mapping[50_000] == ord("x")
        with pytest.raises(RuntimeError, match="stayed in the page cache"):
            pagecache.drop(path)


def test_a_measurement_sees_time_processor_and_memory() -> None:
    with Measurement() as measurement:
        # Not from the allocator: earlier tests leave it with free pages that are resident.
        with mmap.mmap(-1, 50_000_000) as memory:
            memory.write(b"x" * len(memory))
        measurement.mark("filled")
    assert 0 < measurement.marks["filled"] <= measurement.seconds
    assert measurement.cpu_seconds > 0
    assert 45_000_000 < measurement.peak_rss < 120_000_000
    assert measurement.as_dict()["filled_s"] == measurement.marks["filled"]


def test_ballast_holds_and_releases() -> None:
    ballast = Ballast(1 << 20)
    for _ in range(2):
        ballast.hold()
        ballast.release()


def test_sizes_are_read_with_their_units() -> None:
    assert save_load.parse_size("500MB") == 500_000_000
    assert save_load.parse_size("1.5 GiB") == 3 << 29
    assert save_load.parse_size("4096") == 4096
    with pytest.raises(click.BadParameter, match="not a size"):
        save_load.parse_size("much")


def test_an_unknown_case_is_refused_with_the_list_of_cases(tmp_path: Path) -> None:
    result = run(save_load.main, "--only", "save/nothing", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "nothing matches" in result.output
    assert CASES[0].name in result.output


def test_ratios_are_taken_to_the_fastest_raw_transfer_and_to_safetensors() -> None:
    def row(method: str, seconds: list[float], *, is_limit: bool = False) -> report.Row:
        return report.Row("save", method, method, tuple({"seconds": value} for value in seconds), is_limit=is_limit)

    rows = [
        row("raw-a", [1.0, 3.0, 2.0], is_limit=True),
        row("raw-b", [4.0], is_limit=True),
        row("safetensors", [4.0, 4.0]),
        row("ckptstore", [3.0, 5.0, 3.0]),
        report.Row("save", "torch", "torch", (), error="it broke"),
    ]
    entries = {str(entry["method"]): entry for entry in report.as_json(rows)}
    assert entries["ckptstore"]["over_raw"] == 1.5
    assert entries["ckptstore"]["over_safetensors"] == 0.75
    assert entries["torch"]["error"] == "it broke"
    assert report.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


@pytest.mark.slow
def test_the_benchmark_of_the_command_writes_its_report(tmp_path: Path) -> None:
    arguments = ["--runs", "1", "--checkpoints", "20", "--age", "5", "--age", "150", "--out", str(tmp_path), "--json"]
    result = run(commands.main, *arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [entry["commits"] for entry in document["opening"]] == [5, 150]
    assert all(entry["objects"] > 0 for entry in document["opening"])
    assert document["help_over_imports"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["commands.json"]


def test_new_files_are_compared_with_overwritten_ones(tmp_path: Path) -> None:
    if filesystem_type(tmp_path) == "tmpfs":
        pytest.skip("tmpfs may have no O_DIRECT")
    result = run(recycling.main, "--dir", str(tmp_path), "--size", "32", "--rounds", "2", "--json")
    document = json.loads(result.stdout)
    assert set(document["seconds"]) == set(recycling.WAYS)
    assert all(len(taken) == 2 and min(taken) > 0 for taken in document["seconds"].values())
    assert len(document["probe"]["ratios"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert "raw, overwritten" in run(recycling.main, "--dir", str(tmp_path), "--size", "32", "--rounds", "1").stdout


def test_many_tensors_are_equal_however_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not LONG:
        warmth.warm_starts(monkeypatch, tensors)
    cases = list(tensors.CASES) if LONG else ["torch.load", "ckptstore load, verified"]  # each is an interpreter
    arguments = ["--count", "30", "--elements", "64", "--rounds", "1", "--dir", str(tmp_path)]
    arguments += [word for name in cases for word in ("--only", name)]
    document = json.loads(run(tensors.main, *arguments, "--json").stdout)
    assert set(document["medians"]) == set(cases)
    loads = [one for name, one in document["medians"].items() if "load" in name or "open" in name]
    assert [one["same"] for one in loads] == [1.0] * short_or(2, 3)
    assert document["nbytes"] == 30 * 64 * 4
    assert not list(tmp_path.iterdir())


def test_a_state_that_differs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors.torch, "load", lambda *_arguments, **_options: tensors.experts(3, 128))
    found = tensors.CASES["torch.load"](tensors.experts(3, 64), tmp_path)
    assert found["same"] == 0.0


@long_only
def test_two_versions_take_turns_in_processes_of_their_own(tmp_path: Path) -> None:
    options = ["--files", "2", "--rounds", "2", "--size", "16", "--warm", "--json", str(tmp_path)]
    result = run(versions.main, "--other", sys.executable, *options)
    document = json.loads(result.stdout)
    assert set(document) == {"other", "this"}
    assert all(len(row["files"]) == 2 and row["median"] > 0 for row in document.values())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "work",
    [work if work == "save" else pytest.param(work, marks=long_only) for work in version_turns.WORKS],
)
def test_two_versions_work_in_turns(tmp_path: Path, work: str) -> None:
    options = ["--work", work, "--rounds", "2", "--size", "16", "--json", str(tmp_path)]
    result = run(version_turns.main, "--other", sys.executable, *options)
    (row,) = json.loads(result.stdout)
    assert row.pop("work") == work
    assert all(value > 0 for value in row.values())
    assert not list(tmp_path.iterdir())
