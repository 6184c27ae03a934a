"""torch.distributed.checkpoint with a store as its medium: one process, and ranks of a gloo group."""

from __future__ import annotations

import copy
import errno
import inspect
import io
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP2")

import torch.distributed.checkpoint as dcp  # noqa: E402 - torch decides whether this file runs at all
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.distributed.checkpoint.utils import CheckpointException  # noqa: E402

import ckptstore  # noqa: E402
from ckptstore import DiffOptions  # noqa: E402
from ckptstore.backends.store_names import canonical  # noqa: E402
from ckptstore.errors import UsageError  # noqa: E402
from ckptstore.integrations.dcp import CkptstoreReader, CkptstoreWriter  # noqa: E402
from ckptstore.integrations.dcp.checkpoint_ids import CheckpointPlace, place_of  # noqa: E402
from ckptstore.integrations.dcp.host_copy import HostCopy  # noqa: E402
from ckptstore.integrations.dcp.save_turns import SaveTurns, turns_of  # noqa: E402
from ckptstore.training import OptimizerStep  # noqa: E402
from tests.forms import long_only  # noqa: E402
from tests.integrations import dcp_loop  # noqa: E402
from tests.integrations.dcp_job import same  # noqa: E402
from tests.torch_versions import needs_groups  # noqa: E402
from tools.dcp_tests.__main__ import patched  # noqa: E402
from tools.objects.server import free_port  # noqa: E402
from tools.warm import Warm  # noqa: E402

pytestmark = [
    pytest.mark.skipif("no_dist" not in inspect.signature(dcp.save).parameters, reason="this DCP has no no_dist="),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def state(step: int = 0) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(0)
    return {
        "model": {
            "w": torch.randn(300, 20, generator=chance) * (1 + step * 1e-6),
            "b": torch.randn(20, generator=chance).to(torch.bfloat16),
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 4),
            "turned": torch.randn(4, 6, generator=chance).t(),
        },
        "optimizer": {
            "state": [{"m": torch.randn(5, generator=chance)}, {}],
            "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "step": step,
        "note": "text",
        "nothing": None,
    }


def zeros(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeros(one) for key, one in value.items()}
    if isinstance(value, list):
        return [zeros(one) for one in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def test_a_state_comes_back(tmp_path: Path) -> None:
    writer = CkptstoreWriter(tmp_path / "s", 7, tags="best", metadata={"loss": 0.5})
    dcp.save(state(), storage_writer=writer)
    found = zeros(state())
    reader = CkptstoreReader(tmp_path / "s")
    dcp.load(found, storage_reader=reader)
    same(found, state())
    assert (writer.saved and writer.saved.ref) == reader.ref == "7@1"
    store = ckptstore.open(tmp_path / "s")
    assert store.checkpoint("tag:best").metadata == {"loss": 0.5}
    assert {"model.w", "model.b", "optimizer.state.0.m"} <= set(store.tensors())


def test_the_description_is_that_of_dcp(tmp_path: Path) -> None:
    said = dcp.save(state(), storage_writer=CkptstoreWriter(tmp_path / "s", 1))
    found = CkptstoreReader(tmp_path / "s").read_metadata()
    assert found.planner_data == said.planner_data
    assert found.state_dict_metadata.keys() == said.state_dict_metadata.keys()
    for name, one in said.state_dict_metadata.items():
        mine = found.state_dict_metadata[name]
        assert type(mine) is type(one)
        if isinstance(one, TensorStorageMetadata):
            assert (mine.size, mine.properties.dtype, mine.chunks) == (one.size, one.properties.dtype, one.chunks), name


def test_saves_of_a_process_are_one_term(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        dcp.save(state(step), storage_writer=CkptstoreWriter(tmp_path / "s", step, deltas=5))
    infos = ckptstore.open(tmp_path / "s").checkpoints()
    assert [(info.term, info.kind) for info in infos] == [(1, "full"), (1, "delta"), (1, "delta")]
    for step in (3, 1):
        found = zeros(state())
        dcp.load(found, checkpoint_id=tmp_path / "s" / str(step), storage_reader=CkptstoreReader())
        same(found, state(step))


def test_without_a_step_it_is_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        dcp.save(state(), checkpoint_id=tmp_path / "s", storage_writer=CkptstoreWriter())
    assert [info.step for info in ckptstore.open(tmp_path / "s").checkpoints()] == [1, 2]


class Slow(DefaultSavePlanner):
    """Takes its time to plan."""

    def create_local_plan(self) -> Any:
        time.sleep(0.5)
        return super().create_local_plan()


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Slow])
def test_two_asynchronous_saves_in_flight(tmp_path: Path, planner: type[DefaultSavePlanner]) -> None:
    """They are saved in the order of the calls, also if the thread of the second is faster."""
    one, other = state(1), state(2)
    first: Any = dcp.async_save(one, storage_writer=CkptstoreWriter(tmp_path / "s", 1), planner=planner(), no_dist=True)
    second: Any = dcp.async_save(other, storage_writer=CkptstoreWriter(tmp_path / "s", 2), no_dist=True)
    for tensor in (one["model"]["w"], other["model"]["w"]):
        tensor.zero_()
    first.result()
    second.result()
    for step in (1, 2):
        found = zeros(state())
        dcp.load(found, storage_reader=CkptstoreReader(tmp_path / "s", step))
        same(found, state(step))


@pytest.mark.parametrize("keeps", [True, False])
def test_the_memory_of_the_copy_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    """With two in flight there are two copies; a changed shape gets memory of its own."""
    places: list[int] = []
    stage = CkptstoreWriter.stage

    def noted(self: CkptstoreWriter, given: dict[str, Any]) -> dict[str, Any]:
        found = stage(self, given)
        places.append(found["model"]["w"].data_ptr())
        return found

    monkeypatch.setattr(CkptstoreWriter, "stage", noted)

    def save(step: int, of: dict[str, Any]) -> Any:
        writer = CkptstoreWriter(tmp_path / "s", step, cache_staged_state_dict=keeps)
        return dcp.async_save(of, storage_writer=writer, no_dist=True)

    states = {step: state(step) for step in range(1, 7)}
    states[6]["model"]["w"] = torch.ones(7, 3)
    for step in (1, 2):
        save(step, states[step]).result()
    both = [save(step, states[step]) for step in (3, 4)]
    for one in both:
        one.result()
    for step in (5, 6):
        save(step, states[step]).result()
    if keeps:
        assert places[0] == places[1], "new memory for the second save"
        assert places[2] != places[3], "two saves in flight share their memory"
        assert places[4] in places[2:4]
    for step, one in states.items():
        found = zeros(one)
        dcp.load(found, storage_reader=CkptstoreReader(tmp_path / "s", step))
        same(found, one)


@pytest.mark.parametrize("keeps", [True, False])
def test_step_diffs_of_asynchronous_saves(tmp_path: Path, keeps: bool) -> None:
    """They take what those of synchronous ones take, whatever training does to the gradients meanwhile."""
    stored = []
    for place in ("at-once", "later"):
        torch.manual_seed(0)
        model = torch.nn.Linear(60, 50)
        optimizer = torch.optim.AdamW(model.parameters())
        weights = []
        for step in range(1, 4):
            model(torch.randn(4, 60)).square().mean().backward()
            optimizer.step()
            writer = CkptstoreWriter(
                tmp_path / place,
                step,
                diffs=DiffOptions(full_every=100),
                updates=OptimizerStep(optimizer),
                cache_staged_state_dict=keeps,
            )
            of, moments = get_state_dict(model, optimizer)
            weights.append(model.weight.detach().clone())
            if place == "at-once":
                dcp.save({"model": of, "optimizer": moments}, storage_writer=writer, no_dist=True)
            else:
                saving: Any = dcp.async_save({"model": of, "optimizer": moments}, storage_writer=writer, no_dist=True)
                optimizer.zero_grad(set_to_none=False)
                saving.result()
            optimizer.zero_grad()
        store = ckptstore.open(tmp_path / place)
        assert [one.kind for one in store.checkpoints()] == ["full", "gradient", "gradient"]
        stored.append([one.stored for one in store.checkpoints()])
        for step, wanted in enumerate(weights, 1):
            assert torch.equal(torch.as_tensor(store.load(step)["model.weight"]), wanted)
    assert stored[0] == stored[1]


def test_updates_are_of_one_process(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    writer = CkptstoreWriter(tmp_path / "s", 1, diffs=DiffOptions(), updates=OptimizerStep(optimizer))
    with pytest.raises(UsageError, match="updates="):
        pickle.dumps(writer)


def test_a_copy_has_its_own_memory_and_plain_containers() -> None:
    given = {
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "list": [torch.ones(2), (1, torch.ones(1))],
        "object": {1, 2},
    }
    copied = HostCopy().fill(given)
    given["parameter"].data.zero_()
    given["list"][1][1].zero_()
    assert torch.equal(copied["parameter"], torch.ones(3))
    assert not copied["parameter"].requires_grad
    assert torch.equal(copied["complex"], torch.ones(2, dtype=torch.complex64))
    assert torch.equal(copied["list"][1][1], torch.ones(1))
    assert copied["object"] == {1, 2}
    assert copied["object"] is not given["object"]


def test_a_store_that_was_deleted_and_begun_again_at_the_same_path(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save(state(step), storage_writer=CkptstoreWriter(tmp_path / "s", step), no_dist=True)
    shutil.rmtree(tmp_path / "s")
    dcp.save(state(1), storage_writer=CkptstoreWriter(tmp_path / "s", 1), no_dist=True)
    assert [one.step for one in ckptstore.open(tmp_path / "s").checkpoints()] == [1]


def test_a_turn_that_never_begins_is_given_up() -> None:
    turns = SaveTurns(0.05)
    lost, later, last = turns.take(), turns.take(), turns.take()
    began = time.monotonic()
    with later:
        assert time.monotonic() - began > 0.04
    with last, lost:
        assert lost.over


def test_a_turn_that_nobody_has_any_more_is_over() -> None:
    turns = SaveTurns(200)
    turns.take()  # its thread has ended
    began = time.monotonic()
    with turns.take():
        assert time.monotonic() - began < 100


LONG_TURNS = "ckptstore.integrations.dcp.save_turns._PATIENCE"


def test_each_store_has_turns_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LONG_TURNS, 200.0)
    one, other = turns_of("one").take(), turns_of("other").take()
    began = time.monotonic()
    with other:
        assert time.monotonic() - began < 100
    assert other.over
    assert not one.over


class Broken(DefaultSavePlanner):
    """Fails in the thread that saves."""

    def create_local_plan(self) -> Any:
        raise ValueError("no plan")


def test_a_save_does_not_wait_for_one_whose_planner_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LONG_TURNS, 200.0)
    kept = [CkptstoreWriter(tmp_path / "s", step) for step in (1, 2)]
    failed: Any = dcp.async_save(state(1), storage_writer=kept[0], planner=Broken(), no_dist=True)
    began = time.monotonic()
    dcp.async_save(state(2), storage_writer=kept[1], no_dist=True).result()
    assert time.monotonic() - began < 100
    with pytest.raises(CheckpointException, match="no plan"):
        failed.result()
    dcp.async_save(state(3), storage_writer=kept[0], planner=Broken(), no_dist=True)  # it may be used again


def test_a_second_save_in_flight_of_one_writer_is_refused(tmp_path: Path) -> None:
    writer = CkptstoreWriter()
    first: Any = dcp.async_save(
        state(1), checkpoint_id=tmp_path / "s/1", storage_writer=writer, planner=Slow(), no_dist=True
    )
    with pytest.raises(UsageError, match="make a CkptstoreWriter for each save"):
        dcp.async_save(state(2), checkpoint_id=tmp_path / "s/2", storage_writer=writer, no_dist=True)
    first.result()
    dcp.async_save(state(3), checkpoint_id=tmp_path / "s/3", storage_writer=writer, no_dist=True).result()
    for step in (1, 3):
        found = zeros(state())
        dcp.load(found, storage_reader=CkptstoreReader(tmp_path / "s", step))
        same(found, state(step))
    assert [info.step for info in ckptstore.open(tmp_path / "s").checkpoints()] == [1, 3]


def test_a_writer_that_is_sent_to_a_process_saves_there(tmp_path: Path) -> None:
    writer = CkptstoreWriter(tmp_path / "s", 1)
    writer.reset()
    staged = writer.stage(state(1))
    sent = copy.copy(writer)  # by the members that a pickle has
    dcp.save(staged, storage_writer=sent, no_dist=True)
    with turns_of(canonical(str(tmp_path / "s"))).take():
        assert writer.stage(state(2)), "nothing is in flight here"
    assert ckptstore.open(tmp_path / "s").latest_step() == 1


def test_the_newest_step_is_saved_again(tmp_path: Path) -> None:
    place = tmp_path / "s"
    for number in (1, 2, 3):
        dcp.save(state(number), checkpoint_id=place / "7", storage_writer=CkptstoreWriter(replace=True))
        found = zeros(state())
        dcp.load(found, checkpoint_id=place / "7", storage_reader=CkptstoreReader())
        same(found, state(number))
    assert [info.ref for info in ckptstore.open(place).checkpoints()] == ["7@1", "7@2", "7@3"]
    with pytest.raises(CheckpointException, match="replace=True"):
        dcp.save(state(4), checkpoint_id=place / "7", storage_writer=CkptstoreWriter())


def test_a_target_of_another_dtype_is_cast_as_dcp_does(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=CkptstoreWriter(tmp_path / "s", 1))
    found = {"model": {"w": torch.zeros(300, 20, dtype=torch.float64)}}
    dcp.load(found, storage_reader=CkptstoreReader(tmp_path / "s"))
    assert torch.equal(found["model"]["w"], state()["model"]["w"].double())


def test_what_the_store_saved_by_itself_can_be_loaded(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s", create=True).writer() as writer:
        writer.save({"model": {"w": torch.ones(3)}, "step": 4}, 1)
    found = {"model": {"w": torch.zeros(3)}, "step": 0}
    dcp.load(found, storage_reader=CkptstoreReader(tmp_path / "s"))
    assert torch.equal(found["model"]["w"], torch.ones(3))
    assert found["step"] == 4


def test_a_name_or_shape_that_does_not_fit_is_dcps_error(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=CkptstoreWriter(tmp_path / "s", 1))
    for target, said in (({"other": torch.zeros(3)}, "other"), ({"model": {"w": torch.zeros(3, 3)}}, "model.w")):
        with pytest.raises(CheckpointException, match=said):
            dcp.load(target, storage_reader=CkptstoreReader(tmp_path / "s"))


def test_damage_is_an_error_and_no_number_changes(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=CkptstoreWriter(tmp_path / "s", 1))
    (segment,) = (tmp_path / "s" / "seg").rglob("*.safetensors")
    image = bytearray(segment.read_bytes())
    start = image.find(state()["model"]["w"].numpy().tobytes()[:64])
    image[start + 40] ^= 1
    segment.write_bytes(image)
    with pytest.raises(CheckpointException, match=r"model\.w"):
        dcp.load(zeros(state()), storage_reader=CkptstoreReader(tmp_path / "s"))


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CkptstoreWriter(tmp_path / "s", 1)
    dcp.save(state(), storage_writer=writer)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("pwrite", "pwritev", "posix_fallocate", "write"):
        monkeypatch.setattr(os, name, full)
    with pytest.raises(CheckpointException, match="No space left"):
        dcp.save(state(), storage_writer=CkptstoreWriter(tmp_path / "s", 2))
    monkeypatch.undo()
    assert ckptstore.open(tmp_path / "s").latest_step() == 1
    dcp.save(state(), storage_writer=CkptstoreWriter(tmp_path / "s", 3))
    assert ckptstore.open(tmp_path / "s").latest_step() == 3


def test_the_stores_own_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="is reserved for the store"):
        dcp.save({"ckptstore.dcp": torch.ones(1)}, storage_writer=CkptstoreWriter(tmp_path / "s", 1))


@pytest.mark.parametrize(
    ("checkpoint_id", "url", "place"),
    [
        (None, "runs/a", CheckpointPlace("runs/a", 3)),
        ("runs/a/100", None, CheckpointPlace("runs/a", 100)),
        ("ckpt://runs/a/step-100/", None, CheckpointPlace("runs/a", 100)),
        ("s3://bucket/run/global_step_7", None, CheckpointPlace("s3://bucket/run", 7)),
        (Path("runs/a"), None, CheckpointPlace("runs/a", 3)),
        ("100", "runs/a", CheckpointPlace("runs/a", 100)),
        (100, "runs/a", CheckpointPlace("runs/a", 100)),
        ("runs/a/100", "runs/a", CheckpointPlace("runs/a", 100)),
    ],
)
def test_what_a_checkpoint_id_names(checkpoint_id: Any, url: str | None, place: CheckpointPlace) -> None:
    assert place_of(checkpoint_id, url, 3) == place


def test_a_store_whose_name_is_a_number(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=CkptstoreWriter(tmp_path / "2026", 1))
    dcp.save(state(), checkpoint_id=tmp_path / "2026", storage_writer=CkptstoreWriter())
    assert [info.step for info in ckptstore.open(tmp_path / "2026").checkpoints()] == [1, 2]
    assert not (tmp_path / "FORMAT").exists()


@pytest.mark.parametrize(("checkpoint_id", "url"), [(None, None), ("100", None), ("runs/b/100", "runs/a")])
def test_what_names_no_store_or_two_is_refused(checkpoint_id: Any, url: str | None) -> None:
    with pytest.raises(ckptstore.UsageError, match=r"store"):
        place_of(checkpoint_id, url, None)


def test_dcp_can_ask_whether_an_id_names_a_store() -> None:
    for kind in (CkptstoreReader, CkptstoreWriter):
        assert [kind.validate_checkpoint_id(one) for one in ("runs/a/100", "100")] == [True, False]


def test_the_storage_that_torchs_own_tests_get(tmp_path: Path, warm: Warm) -> None:
    """``python -m tools.dcp_tests`` runs them; it takes minutes, and their files."""
    line, _, rest = patched("# text\nimport torch\n").removeprefix("# text\n").partition("\n")
    assert rest == "import torch\n"
    script = f"""{line}
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
place = {str(tmp_path / "step")!r}
for number in range(2):
    dcp.save({{"w": torch.full((2,), number)}}, checkpoint_id=place, no_dist=True)
found = {{"w": torch.zeros(2, dtype=torch.int64)}}
dcp.load(found, storage_reader=dcp.FileSystemReader(place), no_dist=True)
assert found["w"].tolist() == [1, 1]
try:
    dcp.save(found, storage_writer=FileSystemWriter(place, overwrite=False, thread_count=2), no_dist=True)
except dcp.api.CheckpointException as error:
    assert "already exists" in str(error), error
else:
    raise SystemExit("saved over a checkpoint")
"""
    done = warm.run([sys.executable, "-W", "ignore", "-c", script], timeout=100)
    assert done.returncode == 0, done.stderr
    assert ckptstore.open(tmp_path / "step").latest_step() == 2


def test_a_writer_is_no_group(tmp_path: Path) -> None:
    with pytest.raises(ckptstore.UsageError, match="group='all'"):
        CkptstoreWriter(tmp_path, 1, group="all")


def test_bytes_that_a_state_cannot_hold(tmp_path: Path) -> None:
    dcp.save({"io": io.BytesIO(b"abc")}, storage_writer=CkptstoreWriter(tmp_path / "s", 1))
    with pytest.raises(CheckpointException, match="unpickle=True"):
        dcp.load({"io": io.BytesIO()}, storage_reader=CkptstoreReader(tmp_path / "s"))


# -- ranks


def run(warm: Warm, folder: Path, size: int, *names: str) -> None:
    """Run a job to its end; raises an error with the ranks' output.

    The ranks end as usual, because torch ends the processes that `async_save` started only then.
    """
    port = free_port()
    ranks = [
        warm.start(
            [sys.executable, "-m", "tests.integrations.dcp_job", str(port), str(rank), str(size), str(folder), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            teardown="asynchronous" in names,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)


@long_only
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_is_killed_five_times_has_the_same_losses(tmp_path: Path, warm: Warm, workers: int) -> None:
    """Dropout, shuffling, two micro-batches in a step, every step saved; killed at random."""

    def start(store: str, losses: str, crash: str = "") -> Any:
        command = [sys.executable, "-m", "tests.integrations.dcp_loop", str(tmp_path / store), str(tmp_path / losses)]
        return warm.start([*command, str(workers)], env={**os.environ, "CKPTSTORE_CRASH_AT": crash})

    def lines(losses: str) -> list[str]:
        path = tmp_path / losses
        return path.read_text().splitlines() if path.exists() else []

    with start("whole", "wanted") as whole:
        assert whole.wait() == 0
    wanted = lines("wanted")
    assert len(set(wanted)) == dcp_loop.STEPS
    chance, kills = random.Random(workers), 0
    while kills < 5:
        # At the latest at its fifth commit: on a busy machine this process may notice a step too late.
        with start("run", "losses", "commit.created:5") as run:
            before, enough = len(lines("losses")), chance.randrange(1, 6)
            while run.poll() is None and len(lines("losses")) < before + enough:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.02)
            run.kill()
            ended = run.wait()
        kills += ended == -signal.SIGKILL
        if ended == 0:
            break
    with start("run", "losses") as run:
        assert run.wait() == 0
    assert list(dict.fromkeys(lines("losses"))) == wanted, "a repeated step has the same loss"
    assert kills >= 4
    store = ckptstore.open(tmp_path / "run")
    assert store.latest_step() == dcp_loop.STEPS
    assert store.verify(deep=True).ok


@needs_groups
def test_ranks(tmp_path: Path, warm: Warm) -> None:
    run(warm, tmp_path, 2, "saved", "loaded", "stepped", "placed", "pieces", "grown", "cached", "failing", "blobs")
    run(warm, tmp_path, 1, "loaded")
    states = torch.load(tmp_path / "saved.pt")
    found = ckptstore.open(tmp_path / "saved").load(2)
    for name, one in states[1].items():
        assert torch.equal(found[f"model.{name}"], one)


def test_a_folder_that_ranks_wrote_is_imported(tmp_path: Path, warm: Warm) -> None:
    run(warm, tmp_path, 2, "foreign")
    store = ckptstore.open(tmp_path / "store")
    store.import_files([tmp_path / "foreign"])
    found = store.load()
    whole = torch.arange(7 * 4, dtype=torch.float32).view(7, 4)
    for name in ("rows", "columns", "copy"):
        assert torch.equal(found[name], whole), name
    assert torch.equal(found["one"], torch.ones(3))
    assert found["n"] == 5


@needs_groups
def test_checkpoints_of_ranks_are_exported_as_folders(tmp_path: Path, warm: Warm) -> None:
    run(warm, tmp_path, 2, "exported", "returned")


@needs_groups
def test_a_sharded_model_becomes_a_folder_for_from_pretrained(tmp_path: Path, warm: Warm) -> None:
    transformers = pytest.importorskip("transformers")
    run(warm, tmp_path, 2, "consolidated")
    imported = ckptstore.open(tmp_path / "imported")
    imported.import_files([tmp_path / "hf-1"])
    weights = torch.load(tmp_path / "pretrained.pt")
    for number, store in enumerate((ckptstore.open(tmp_path / "hf"), imported)):
        with pytest.raises(UsageError, match="--config FOLDER"):
            store.export_folder("latest", tmp_path / "no", "hf")
        out = tmp_path / f"exported-{number}"
        result = store.export_folder("latest", out, "hf", config=tmp_path / "pretrained", max_shard_bytes=40_000)
        assert len(result.paths) > 1
        assert result.index == out / "model.safetensors.index.json"
        assert (out / "generation_config.json").is_file()
        found, said = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert not said["missing_keys"], said
        assert not said["unexpected_keys"], said
        assert not said["mismatched_keys"], said
        assert all(torch.equal(one, weights[name]) for name, one in found.state_dict().items())
    assert not (tmp_path / "no").exists()


@needs_groups
def test_ranks_save_asynchronously(tmp_path: Path, warm: Warm) -> None:
    run(warm, tmp_path, 2, "asynchronous")


@needs_groups
@long_only
def test_four_ranks(tmp_path: Path, warm: Warm) -> None:
    run(warm, tmp_path, 4, "saved", "loaded", "placed", "cached", "failing", "blobs", "pieces", "grown", "asynchronous")
    run(warm, tmp_path, 2, "loaded")
