"""`ckpt inspect`."""

from __future__ import annotations

from pathlib import Path

import ckptstore
from ckptstore.backends import open_backend
from ckptstore.cli import output
from ckptstore.write.policy.diff_options import DiffOptions
from tests.cli.conftest import Run, assert_documented, documented
from tests.write.trainer import Trainer


def test_text(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("inspect", pristine)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0] == "checkpoint 5@3  tag:best"
    assert lines[1].startswith("5 tensors, 11.8 KiB; stored in")
    assert lines[2].startswith("restores from: 5@3 full (reads 11.8 KiB, ")
    assert lines[4] == f"medium: {open_backend(pristine, create=False).medium()}"
    assert not any(line.startswith("model.embedding.weight") for line in lines)
    assert ".safetensors" not in outcome.out
    assert sum(int(line.split()[2]) for line in lines if line.startswith(("F", "I", "C"))) == 5


def test_rows_on_request(ckpt: Run, pristine: Path) -> None:
    lines = ckpt("inspect", pristine, "--tensors", "--chain").out.splitlines()
    assert any(line.startswith("5@3    full") and line.endswith(".safetensors") for line in lines)
    assert next(line for line in lines if line.startswith("model.embedding.weight")).split() == [
        *["model.embedding.weight", "F32", "100x30", "11.7", "KiB", "11.7", "KiB", "raw"]
    ]
    assert next(line for line in lines if line.startswith("odd.z")).split()[1:3] == ["C128", "scalar"]
    selected = ckpt("inspect", pristine, "--select", "odd.*").out
    assert "odd.half" in selected
    assert "model.embedding.weight" not in selected
    assert ckpt("inspect", pristine, "--tensor", "odd.z", "--chain").code == 2


def test_a_chain_of_step_diffs_in_one_line(ckpt: Run, tmp_path: Path) -> None:
    trainer, store = Trainer(), ckptstore.open(tmp_path / "run", create=True)
    with store.writer(diffs=DiffOptions(batch=4)) as writer:
        for step in range(1, 7):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
    text = ckpt("inspect", store.url, "--chain", "--tensors").out
    assert "\nrestores from: 1@1 full > 5 step diffs (reads " in text
    assert "gradient" not in text
    found = ckpt("inspect", store.url, "--json").json
    assert [step["kind"] for step in found["plan"]["steps"]] == ["full", *["gradient"] * 5]
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith(("m", "v"))}
    with_others = {one["name"]: one["stored_with"] for one in found["tensors"]}
    assert with_others["master.wide"] is None
    assert with_others["m.wide"] == "master.wide"
    assert "  with master.wide  step" in rows["m.wide"]
    assert "with" not in rows["master.wide"]
    key = found["chain"][-1]["segments"][0]
    assert key in text
    assert output.short_key(key, short=True) == f"1/{key.split('/')[-1][:8]}"
    assert output.short_key("log/7", short=True) == "log/7"


def test_json(ckpt: Run, pristine: Path) -> None:
    found = ckpt("inspect", pristine, "3@1", "--json").json
    assert_documented(found, documented("ckpt inspect")[0])
    assert found["ref"] == "3@1"
    assert [tensor["name"] for tensor in found["tensors"]] == [
        *["model.embedding.weight", "model.frozen", "odd.half", "odd.empty", "odd.z"]
    ]
    assert sum(tensor["bytes"] for tensor in found["tensors"]) == found["bytes"]
    assert len(found["chain"]) == 1
    assert found["medium"].startswith("folder (")


def test_the_medium_of_a_store_on_persistent_memory(ckpt: Run, pristine: Path) -> None:
    assert ckpt("inspect", f"pmem://{pristine}", "3@1", "--json").json["medium"].startswith("pmem (")
    assert "\nmedium: pmem (" in ckpt("inspect", f"pmem://{pristine}", "3@1").out


def test_select(ckpt: Run, pristine: Path) -> None:
    found = ckpt("inspect", pristine, "--select", "model.*", "--select", "odd.z", "--json").json
    assert [tensor["name"] for tensor in found["tensors"]] == ["model.embedding.weight", "model.frozen", "odd.z"]
    missing = ckpt("inspect", pristine, "--select", "nothing*")
    assert missing.code == 3
    assert "no tensor matches 'nothing*'" in missing.err


def test_the_rest_of_the_state(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("inspect", pristine, "--state")
    assert outcome.out.splitlines()[:5] == [
        "state",
        "├── model: (2 tensors)",
        "├── odd: (3 tensors)",
        "├── python",
        "│   ├── 0: 3",
    ]
    assert "├── step: 5" in outcome.out
    assert "└── 3: ('tuple', None, nan, b'bytes')" in outcome.out
    assert "(625 in all)" in outcome.out
    tree = ckpt("inspect", pristine, "--state", "--json").json["tree"]
    assert ["step", 5] in tree["$dict"]


def test_statistics_of_a_tensor(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("inspect", pristine, "2", "--tensor", "model.embedding.weight")
    assert outcome.code == 0
    assert outcome.out.splitlines()[:2] == ["model.embedding.weight", "F32 100x30, 11.7 KiB"]
    assert "\nmax           2\n" in outcome.out
    assert "one bar per power of two" in outcome.out
    found = ckpt("inspect", pristine, "2", "--tensor", "model.embedding.weight", "--json").json
    assert_documented(found, documented("ckpt inspect")[1])
    assert (found["min"], found["max"], found["values"]) == (-2.0, 2.0, 3000)
    assert sum(found["exponents"].values()) == 3000 - found["zeros"]


def test_statistics_of_awkward_tensors(ckpt: Run, pristine: Path) -> None:
    assert ckpt("inspect", pristine, "--tensor", "odd.empty", "--json").json["mean"] is None
    assert ckpt("inspect", pristine, "--tensor", "odd.empty").code == 0
    assert ckpt("inspect", pristine, "--tensor", "odd.z", "--json").json["values"] == 2
    assert ckpt("inspect", pristine, "--tensor", "model.frozen", "--json").json["max"] == 11


def test_only_lossy_checkpoints_are_marked_lossy(ckpt: Run, tmp_path: Path) -> None:
    trainer, store = Trainer(), ckptstore.open(tmp_path / "run", create=True)
    with store.writer(diffs=DiffOptions(batch=4, accumulate="sum")) as writer:
        for step in range(1, 6):
            trainer.train(0.02)
            writer.save_async(trainer.state(), step, updates=trainer.updates())
    for ref, lossy in (("1", False), ("5", True)):
        text = ckpt("inspect", store.url, ref)
        assert text.code == 0
        assert ("LOSSY" in text.out) == lossy
        found = ckpt("inspect", store.url, ref, "--json").json
        assert found["lossy"] == lossy
        assert [link["lossy"] for link in found["chain"]] == [False, True][: 1 + lossy]
        restored = ckpt("restore", store.url, ref, "--out", tmp_path / f"{ref}.pt")
        assert (f"note: {ref}@1 is lossy" in restored.err) == lossy
    listed = [line.split()[1:] for line in ckpt("log", store.url).out.splitlines()[2:]]
    assert [line[: 2 + (line[1] == "step")] for line in listed] == [["5@1", "step", "diff"], ["1@1", "full"]]
    assert ["lossy" in line for line in ckpt("log", store.url).out.splitlines()[2:]] == [True, False]


def test_errors(ckpt: Run, pristine: Path) -> None:
    unknown = ckpt("inspect", pristine, "--tensor", "model.frozn")
    assert unknown.code == 3
    assert "close: model.frozen" in unknown.err
    assert ckpt("inspect", pristine, "77").code == 3
    assert ckpt("inspect", pristine, "7@seven").code == 2
    assert ckpt("inspect", pristine, "tag:worst").code == 3
    assert ckpt("inspect", pristine, "--tensor", "x", "--state").code == 2


def test_a_damaged_segment(ckpt: Run, run: Path) -> None:
    segment = next((run / "seg" / "0000000003").iterdir())
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    outcome = ckpt("inspect", run)
    assert outcome.code == 4
    assert segment.name in outcome.err
    assert "hint: 4@2 is the nearest earlier checkpoint that does not need this segment: " in outcome.err
    assert f"`ckpt restore {run} 4@2 --out FILE`; `ckpt verify {run}` names what is damaged" in outcome.err
