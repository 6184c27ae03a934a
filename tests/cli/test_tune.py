"""`ckpt tune wasted-time`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.tuning import job_profile
from tests.cli.conftest import Run, assert_documented, documented

GIVEN = ["--full-bytes", "8.7GB", "--bandwidth", "25Gbit/s", "--mtbf", "30min", "--iteration-time", "15.1s"]
MERGE = ["--merge-time", "3.322s"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one full and five deltas."""
    root = tmp_path_factory.mktemp("tune") / "run"
    weight = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    with ckptstore.open(root, create=True).writer(deltas=8, poll_seconds=None) as writer:
        for step in range(1, 7):
            weight = weight + np.float32(1e-6)
            writer.save({"weight": weight}, step=step)
    return root


def test_given_inputs(ckpt: Run) -> None:
    outcome = ckpt("tune", "wasted-time", *GIVEN, *MERGE)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("a full every 20 iterations (5 min 2 s), 2 diffs per write: wastes 2.7")
    assert "Eq. (10): full_every = 20.63, batch = 2.13" in outcome.out
    assert outcome.out.splitlines()[-2:] == [
        "to copy:",
        "  writer = store.writer(diffs=ckptstore.DiffOptions(full_every=20, batch=2))",
    ]
    assert "without diffs: a full every 7 iterations wastes" in outcome.out
    assert "Table I" not in outcome.out


def test_the_paper(ckpt: Run) -> None:
    outcome = ckpt("tune", "wasted-time", "--paper", "--json")
    found = outcome.json
    assert_documented(found, documented("ckpt tune")[0])
    assert (found["optimum"]["interval"], found["optimum"]["batch"]) == (20, 2)
    for cells in (found["table"]["model"], found["table"]["printed"]):
        least = min((cell, n, b) for n, row in enumerate(cells) for b, cell in enumerate(row))
        assert least == (1.0, 1, 1)
    assert found["table"]["intervals"][1] == 20
    assert found["table"]["batches"][1] == 2
    assert set(found["sources"].values()) == {"paper"}
    text = ckpt("tune", "wasted-time", "--paper").out
    assert "Table I as printed" in text
    assert "20  1.105  1.000  1.023" in text


def test_options_override_the_papers_numbers(ckpt: Run) -> None:
    found = ckpt("tune", "wasted-time", "--paper", "--mtbf", "10h", "--json").json
    assert found["job"]["mtbf"] == 36000
    assert found["sources"]["mtbf"] == "given"
    assert found["sources"]["bandwidth"] == "paper"
    assert found["optimum"]["interval"] > 20


def test_the_parts_and_neighbours_add_up(ckpt: Run) -> None:
    found: Any = ckpt("tune", "wasted-time", *GIVEN, *MERGE, "--run-time", "3d", "--gpus", "8", "--json").json
    wasted = found["optimum"]["wasted"]
    total = wasted.pop("total")
    assert sum(wasted.values()) == pytest.approx(total)
    assert found["run"] == {"seconds": 259200, "gpus": 8, "wasted_gpu_seconds": pytest.approx(total * 259200 * 8)}
    assert min(entry["ratio"] for entry in found["neighbours"]) == 1
    assert found["continuous"]["total"] <= total <= found["fulls_only"]["wasted"]["total"]
    assert found["model"]["mtbf"] == pytest.approx(1800 / 15.1)
    assert found["sources"]["load_full"] == "default"
    assert found["job"]["load_full"] == pytest.approx(8.7e9 / 3.125e9)


def test_from_a_store(ckpt: Run, trained: Path) -> None:
    outcome = ckpt("tune", "wasted-time", "--from", trained, "--mtbf", "1h", "--json")
    found = outcome.json
    assert outcome.code == 0
    assert_documented(found, documented("ckpt tune")[0] | {"measured": documented("ckpt tune")[1]["measured"]})
    assert found["sources"] | {"mtbf": "store"} == dict.fromkeys(found["sources"], "store") | {
        "write_latency": "default",
        "mtbf": "store",
    }
    assert found["job"]["full_bytes"] == found["measured"]["full_bytes"]
    assert "lower bound" in outcome.err
    given = ckpt(
        *("tune", "wasted-time", "--from", trained, "--mtbf", "1h", "--bandwidth", "1GB/s"),
        *("--iteration-time", "1s", "--json"),
    )
    assert given.err == ""
    assert given.json["job"]["bandwidth"] == 1e9


def test_times_are_measured_again_and_their_spread_is_shown(
    ckpt: Run, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try does not count. The medians count, and the advice holds from the least to the most."""
    tries = iter([9.0, 0.010, 0.012, 0.011, 0.010, 0.013])
    monkeypatch.setattr(job_profile, "_times", lambda *_: _replayed_in(next(tries)))
    given = ["--mtbf", "1h", "--bandwidth", "100MB/s", "--iteration-time", "0.5s"]
    found = ckpt("tune", "wasted-time", "--from", trained, *given, "--json").json
    assert found["measured"]["replay_diff"] == 0.011
    assert found["measured"]["spread"]["replay_diff"] == [0.010, 0.013]
    assert found["steady"] is True
    tries = iter([9.0, 0.010, 0.012, 0.011, 0.010, 0.013])
    told = ckpt("tune", "wasted-time", "--from", trained, *given)
    assert "store, 10 ms to 13 ms" in told.out
    assert "to copy:" in told.out


def test_advice_that_flips_within_the_spread_is_refused(
    ckpt: Run, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 10 ms, where diffs pay, to 0.6 s, where only fulls do."""
    times = [0.0, 0.010, 0.3, 0.02, 0.6, 0.5]
    tries = iter(times)
    monkeypatch.setattr(job_profile, "_times", lambda *_: _replayed_in(next(tries)))
    given = ["--mtbf", "1h", "--bandwidth", "1MB/s", "--iteration-time", "0.5s"]
    told = ckpt("tune", "wasted-time", "--from", trained, *given)
    assert told.out.startswith("no advice: the times measured in the store differ too much")
    assert "to copy" not in told.out
    assert "measure again while the machine is idle" in told.err
    tries = iter(times)
    assert ckpt("tune", "wasted-time", "--from", trained, *given, "--json").json["steady"] is False
    tries = iter(times)
    given_too = ckpt("tune", "wasted-time", "--from", trained, *given, "--replay-time", "10ms")
    assert "to copy:" in given_too.out  # what was passed was not measured


def _replayed_in(seconds: float) -> dict[str, float]:
    return {"load_full": 0.1, "merge_batch": 0.001, "replay_diff": seconds}


def test_from_a_store_with_parallel_recovery(ckpt: Run, trained: Path) -> None:
    found = ckpt("tune", "wasted-time", "--from", trained, "--mtbf", "1h", "--recovery", "parallel", "--json").json
    measured = found["measured"]
    assert found["job"]["merge_batch"] == pytest.approx(measured["merge_batch"] + measured["replay_diff"])
    assert found["job"]["replay_diff"] == 0
    given = ["--merge-time", "80ms", "--recovery", "parallel", "--json"]
    found = ckpt("tune", "wasted-time", "--from", trained, "--mtbf", "1h", *given).json
    assert found["job"]["merge_batch"] == 0.08, "as given, without the time that the store takes to replay a diff"
    assert found["sources"]["merge_batch"] == "given"


def test_from_a_store_without_diffs(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("tune", "wasted-time", "--from", pristine, "--mtbf", "1h")
    assert outcome.code == 2
    assert "missing: --merge-time or --replay-time (the store does not contain them)" in outcome.err
    assert ckpt("tune", "wasted-time", "--from", pristine, "--mtbf", "1h", "--replay-time", "1ms").code == 0


def test_no_plot_inside_a_store(ckpt: Run, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "link.png").symlink_to(run / "FORMAT")
    before = (run / "FORMAT").read_bytes()
    for picture in (run / "wasted.png", tmp_path / "link.png"):
        outcome = ckpt("tune", "wasted-time", "--paper", "--plot", picture)
        assert outcome.code == 2
        assert "is inside the checkpoint store" in outcome.err
    assert (run / "FORMAT").read_bytes() == before


def test_a_plot(ckpt: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "wasted.png"
    outcome = ckpt("tune", "wasted-time", "--paper", "--plot", picture, "--json")
    assert outcome.json["plot"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert ckpt("tune", "wasted-time", "--paper", "--plot", tmp_path / "wasted.xyz").code == 2
    assert ckpt("tune", "wasted-time", "--paper", "--plot", tmp_path / "no" / "wasted.png").code == 2
    measured = ("--from", tmp_path / "nothing", "--plot", tmp_path / "no" / "wasted.png")
    assert "/no does not exist" in ckpt("tune", "wasted-time", *measured).err, "before anything is measured"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mtbf", "1h"], "missing: --full-bytes, --bandwidth, --iteration-time, --merge-time or --replay-time"),
        (["--paper", "--from", "x"], "--from and --paper"),
        (["--paper", "--mtbf", "5"], "'5' is not a time: write 500ms"),
        (["--paper", "--bandwidth", "1Gb/s"], "bits or bytes"),
        (["--paper", "--full-bytes", "big"], "'big' is not a size"),
        (["--paper", "--mtbf", "0s"], "mtbf: 0, more than 0"),
        (["--paper", "--bandwidth", "0GB/s"], "bandwidth: 0, more than 0"),
        (["--paper", "--merge-time", "0s"], "applying diffs costs nothing"),
        (["--paper", "--recovery", "parallel", "--replay-time", "1s"], "merges whole batches"),
        (["--paper", "--gpus", "0"], "0"),
    ],
)
def test_errors_say_what_to_write(ckpt: Run, arguments: list[str], message: str) -> None:
    outcome = ckpt("tune", "wasted-time", *arguments)
    assert outcome.code == 2
    assert message in outcome.err.splitlines()[0]
    as_json = ckpt("tune", "wasted-time", *arguments, "--json")
    assert message in as_json.json["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "remark"),
    [
        (["--diff-bytes", "60GB"], "writes pile up"),
        (["--mtbf", "30s"], "wastes more time than it trains"),
        (["--replay-time", "20s"], "diffs do not pay"),
    ],
)
def test_remarks(ckpt: Run, arguments: list[str], remark: str) -> None:
    outcome = ckpt("tune", "wasted-time", "--paper", *arguments)
    assert outcome.code == 0
    assert remark in outcome.err


def test_a_missing_store(ckpt: Run, tmp_path: Path) -> None:
    assert ckpt("tune", "wasted-time", "--from", tmp_path / "nothing", "--mtbf", "1h").code == 3


def test_the_group_and_its_help(ckpt: Run) -> None:
    assert ckpt("tune").code == 2
    assert "wasted-time" in ckpt("tune", "--help").out
    assert ckpt("tune", "wasted-time").code == 2
    assert "--bandwidth RATE" in ckpt("tune", "wasted-time", "--help").out


def test_a_model_alone_needs_no_engine() -> None:
    script = """
import sys
from ckptstore.cli.main import cli
try:
    cli.main(["tune", "wasted-time", "--paper"], prog_name="ckpt")
except SystemExit as error:
    assert error.code == 0, error.code
loaded = {"numpy", "fsspec", "torch", "rich", "ml_dtypes", "matplotlib", "ckptstore.store"} & sys.modules.keys()
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
