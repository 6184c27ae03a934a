"""Operations on checkpoints whose tensors are stored in shards: they work, or refuse with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file

from ckptstore.cli.main import cli
from ckptstore.errors import UsageError
from ckptstore.formats import codecs
from ckptstore.formats.segment_files.boxes import Box
from tools.golden.shard_stores import Array, Piece, ShardStore, by_rank, columns, cut, rows

SHAPE = (40, 12)


def numbers(seed: int, shape: tuple[int, ...] = SHAPE) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype("<f4")


@pytest.fixture
def made(tmp_path: Path) -> ShardStore:
    """Step 1: a full cut by rows; 2: a delta on it; 3: the same state as 2, cut by columns; `n` is whole."""
    made = ShardStore(str(tmp_path / "store"))
    old, new = numbers(1), numbers(2)
    whole = [Piece("n", np.arange(5))]
    made.commit(1, by_rank(cut("w", old, rows(SHAPE, 4)), whole))
    made.commit(2, by_rank(cut("w", new, rows(SHAPE, 4), codec=codecs.Xor(4), base=old), whole), base=1)
    made.commit(3, by_rank(cut("w", new, columns(SHAPE, 3)), whole))
    return made


@pytest.mark.parametrize("step", [1, 2, 3])
def test_export_is_a_plain_file(made: ShardStore, step: int, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    made.store.export(step, out)
    found = load_file(out)
    assert found["w"].tobytes() == numbers(min(step, 2)).tobytes()
    assert found["w"].shape == SHAPE
    made.store.export(step, tmp_path / "out.pt")
    tensors = torch.load(tmp_path / "out.pt", weights_only=True)
    assert tensors["w"].numpy().tobytes() == found["w"].tobytes()
    assert tensors["n"].tolist() == [0, 1, 2, 3, 4]


def test_export_does_not_hold_the_tensor_in_memory(tmp_path: Path) -> None:
    """96 MiB cut by rows, with a chunk of at most 16 MiB of each of two neighbours in memory, and the result."""
    shape = (24, 1 << 20)
    made = ShardStore(str(tmp_path / "store"))
    whole = np.arange(24 << 20, dtype="<f4").reshape(shape)
    made.commit(1, by_rank(cut("w", whole, rows(shape, 4))))
    measured: list[int] = []
    import ckptstore.restore.shard_streams as assembled

    real = assembled.aligned

    def counted(nbytes: int) -> Any:
        measured.append(nbytes)
        return real(nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembled, "aligned", counted)
        made.store.export(1, tmp_path / "out.safetensors")
    assert np.array_equal(load_file(tmp_path / "out.safetensors")["w"], whole)
    assert max(measured) < 17 << 20
    assert sum(measured) <= 6 * (17 << 20)  # space for each shard, one after the other, the output and a payload


def test_inspect_shows_shards(made: ShardStore) -> None:
    tensors = {tensor.name: tensor for tensor in made.store.inspect(2).tensors}
    assert (tensors["w"].shape, tensors["w"].shards, tensors["w"].codec) == (SHAPE, 4, "xor")
    assert (tensors["n"].shards, tensors["n"].codec) == (None, "raw")
    assert tensors["w"].stored > 0
    assert tensors["w"].hash is None
    shown = CliRunner().invoke(cli, ["inspect", made.store.url, "3", "--tensors"])
    assert "40x12 in 3 shards" in shown.output
    document = json.loads(CliRunner().invoke(cli, ["inspect", made.store.url, "3", "--json"]).output)
    assert {tensor["name"]: tensor["shards"] for tensor in document["tensors"]} == {"w": 3, "n": None}
    assert made.store.statistics(3, "w").values == 480
    assert made.store.statistics(3, "w").norm == pytest.approx(float(np.linalg.norm(numbers(2))), rel=1e-6)
    entry = made.store.tensors(3)["w"]
    assert (entry.shape, entry.nbytes, entry.dtype) == (SHAPE, 1920, "F32")


def test_explain_counts_every_shard(made: ShardStore) -> None:
    plan = made.store.explain(3)
    assert plan.nbytes == 1920 + 40
    assert plan.bytes_read == 1920 + 40
    assert plan.steps[0].tensors == 2
    assert [step.tensors for step in made.store.explain(2, "w").steps] == [1, 1]


def test_compare_is_of_whole_tensors(made: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {one.name: one for one in made.store.compare(1, 2)}
    assert (found["w"].status, found["n"].status) == ("changed", "same")
    assert found["w"].norm_diff == pytest.approx(float(np.linalg.norm(numbers(2).astype("f8") - numbers(1))), rel=1e-6)
    assert {one.status for one in made.store.compare(2, 3)} == {"same"}  # cut in another way: read, and equal
    monkeypatch.setattr("ckptstore.restore.shard_streams.decode_chunk", None)
    assert {one.status for one in made.store.compare(2, 2)} == {"same"}  # by their hashes


def test_verify_proves_shards(made: ShardStore) -> None:
    assert made.store.verify().ok
    report = made.store.verify(deep=True)
    assert report.ok
    assert report.restorable == ("1@1", "2@1", "3@1")


def test_other_commands_still_work(made: ShardStore) -> None:
    made.store.tag("kept", 2, take_over=True)
    made.store.retire(1, take_over=True)
    made.store.gc()
    assert made.store.load("tag:kept", framework="numpy")["w"].tobytes() == numbers(2).tobytes()
    assert [info.step for info in made.store.checkpoints()] == [2, 3]
    assert made.store.checkpoint(2).tensors == 2


def test_merge_keeps_the_shards(tmp_path: Path) -> None:
    made = ShardStore(str(tmp_path / "store"))
    states = [numbers(seed) for seed in range(4)]
    made.commit(1, by_rank(cut("w", states[0], rows(SHAPE, 2))))
    for step in (2, 3, 4):
        coded = cut("w", states[step - 1], rows(SHAPE, 2), codec=codecs.Xor(4), base=states[step - 2])
        made.commit(step, by_rank(coded), base=step - 1)
    done = made.store.merge("2..4", keep_steps=True, take_over=True)
    assert (done.answer, done.method, len(done.written), len(done.dropped)) == ("accepted", "concatenated", 2, 6)
    described = [doc for _, doc in made.store.describe(3) if 3 in doc.steps]
    assert [doc.steps for doc in described] == [(2, 3, 4)] * 2
    assert [doc.tensors[3]["w"].offset for doc in described] == [(0, 0), (20, 0)]
    assert [len(doc.trees) for doc in described] == [3, 0]
    assert [doc.encodings[3].part.number for doc in described] == [0, 1]
    for step, state in enumerate(states, 1):
        assert made.store.load(step, framework="numpy")["w"].tobytes() == state.tobytes()
    assert made.store.verify(deep=True).ok


def test_compact_keeps_each_way_of_cutting(made: ShardStore) -> None:
    made.store.retire(1, take_over=True)
    report = made.store.compact(max_depth=0, take_over=True)
    assert (report.unmet, report.complete, len(report.moves)) == ((), True, 1)
    assert made.store.checkpoint(2).kind == "full"
    for step, count in ((2, 4), (3, 3)):
        held = [doc.tensors[step] for _, doc in made.store.describe(step)]
        assert sum("w" in one for one in held) == count
        assert sum("n" in one for one in held) == 1
        assert made.store.load(step, framework="numpy")["w"].tobytes() == numbers(2).tobytes()
    assert made.store.verify(deep=True).ok


def test_analyze_refuses(made: ShardStore) -> None:
    shown = CliRunner().invoke(cli, ["analyze", made.store.url])
    assert shown.exit_code == 2, shown.output
    assert "stored in shards" in shown.output + str(shown.exception)


def test_a_reader_that_is_no_rank_reads_what_ranks_saved(tmp_path: Path) -> None:
    """The tree of two ranks that differ, as many ranks write it (SPEC 3.3)."""
    made = ShardStore(str(tmp_path / "store"))
    tree = {
        "w": {"$a": "w"},
        "seed": {"$ranks": [[0, 1], [5, 6]]},
        "own": {"$ranks": [[0, 1], [{"$a": "own@0"}, {"$a": "own@1"}]]},
    }
    own = [Piece(f"own@{rank}", np.full(3, rank)) for rank in range(2)]
    pieces = [[*shards, one] for shards, one in zip(by_rank(cut("w", numbers(1), rows(SHAPE, 2))), own, strict=True)]
    made.commit(1, pieces, tree)
    for rank, seed in ((None, 5), (0, 5), (1, 6), (3, 6)):
        state = made.store.load(1, framework="numpy", rank=rank)
        assert state["seed"] == seed
        assert state["own"].tolist() == [seed - 5] * 3
        assert state["w"].tobytes() == numbers(1).tobytes()
    with pytest.raises(UsageError, match="rank: -1"):
        made.store.load(1, rank=-1)
    assert made.store.tree(1) == tree
    assert made.store.verify(deep=True).ok
    made.store.export(1, tmp_path / "out.safetensors")
    assert set(load_file(tmp_path / "out.safetensors")) == {"w", "own@0"}
    shown = CliRunner().invoke(cli, ["inspect", made.store.url, "--state"]).output
    assert "rank 0: 5" in shown
    assert "rank 1: 6" in shown
    made.commit(2, pieces, tree | {"seed": {"$ranks": [[0, 1], [5, 7]]}})
    assert [(one.path, one.before, one.after) for one in made.store.compare_state(1, 2)] == [("seed.rank 1", 6, 7)]


def test_a_box_says_where_it_is() -> None:
    assert str(Box((4, 0), (2, 8))) == "[4:6, 0:8]"


def test_more_segments_than_descriptors(tmp_path: Path) -> None:
    """A thousand ranks, or long chains of a hundred: a process often has only a thousand descriptors."""
    resource = pytest.importorskip("resource")
    made = ShardStore(str(tmp_path / "store"))
    whole = numbers(1, (300, 4))
    made.commit(1, by_rank(cut("w", whole, rows(whole.shape, 300))))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened_now = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened_now + 200, hard))
    try:
        assert made.store.load(1, framework="numpy")["w"].tobytes() == whole.tobytes()
        assert made.store.load(1, into={"w": np.zeros_like(whole)})["w"].tobytes() == whole.tobytes()
        made.store.export(1, tmp_path / "out.safetensors")
        assert made.store.verify(deep=True).ok
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert load_file(tmp_path / "out.safetensors")["w"].tobytes() == whole.tobytes()
    assert len(list(Path("/proc/self/fd").iterdir())) <= opened_now + 1
