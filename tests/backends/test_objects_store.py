"""Runs in a bucket from end to end: written, read, collected, verified, exported, fenced, killed; also by command."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckptstore
from ckptstore.backends.object_store import segment_ranges
from ckptstore.backends.object_store.objects import ObjectBackend
from ckptstore.cli.main import cli
from ckptstore.host import crash_points
from ckptstore.training import Checkpointer
from tests.backends.backend_conformance import SEGMENT, write_segment
from tools.objects.server import KEY, SECRET, Server
from tools.warm import Warm

STEPS = 9


def state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    weight = rng.standard_normal((60, 50)).astype(np.float32)
    weight[step % 60] += np.float32(step)
    return {"model": {"weight": weight, "frozen": np.arange(9)}, "step": step, "lr": 0.5 / (step + 1)}


def same(found: dict[str, Any], step: int) -> bool:
    wanted = state(step)
    tensors = all(found["model"][name].tobytes() == wanted["model"][name].tobytes() for name in wanted["model"])
    return tensors and (found["step"], found["lr"]) == (wanted["step"], wanted["lr"])


def open_store(s3: Server, url: str, **more: Any) -> ckptstore.Store:
    return ckptstore.open(url, storage_options=s3.options, **more)


def fill(store: ckptstore.Store, steps: int = STEPS, first: int = 1) -> None:
    with store.writer(deltas=3, poll_seconds=None) as writer:
        for step in range(first, first + steps):
            writer.save(state(step), step=step)


@pytest.fixture(scope="module")
def filled(s3: Server) -> str:
    """A store that tests do not change."""
    url = s3.url()
    fill(open_store(s3, url, create=True))
    return url


def test_another_handle_reads_the_written_state(s3: Server, filled: str) -> None:
    store = open_store(s3, filled, create=False)
    assert [one.step for one in store.checkpoints()] == list(range(1, STEPS + 1))
    kinds = {store.plan(one.ref).encodings[-1].kind for one in store.checkpoints()}
    assert {"full", "delta"} <= kinds
    for step in range(1, STEPS + 1):
        assert same(store.load(step, framework="numpy"), step)
    into = state(0)
    store.load("latest", into=into)
    assert same(into | {"step": STEPS, "lr": 0.5 / (STEPS + 1)}, STEPS)


def test_every_byte_and_every_state_verifies(s3: Server, filled: str) -> None:
    report = open_store(s3, filled).verify(deep=True)
    assert report.ok
    assert not report.strangers
    assert report.objects >= STEPS


def test_a_checkpoint_is_exported(s3: Server, filled: str, tmp_path: Path) -> None:
    open_store(s3, filled).export(4, tmp_path / "model.safetensors")
    again = ckptstore.open(tmp_path / "local", create=True)
    again.import_files([tmp_path / "model.safetensors"], 4)
    assert same(again.load(4, framework="numpy"), 4)


def test_gradient_diffs_go_there_and_back(s3: Server) -> None:
    torch = pytest.importorskip("torch")
    from ckptstore.training import OptimizerStep

    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    store = open_store(s3, s3.url(), create=True)
    kept = {}
    with store.writer(diffs=ckptstore.DiffOptions(full_every=50, batch=4), poll_seconds=None) as writer:
        for step in range(1, 9):
            optimizer.zero_grad()
            model(torch.ones(3, 40) * step).square().sum().backward()
            optimizer.step()
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            kept[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            writer.save(saved, step=step, updates=OptimizerStep(optimizer))
    for step, tensors in kept.items():
        found = store.load(step, framework="torch")["model"]
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_watching_takes_four_requests_a_look_and_one_a_record(s3: Server) -> None:
    url = s3.url()
    watched = open_store(s3, url).watch(0.01, wait=True, quiet=True)
    with open_store(s3, url, create=True).writer(poll_seconds=None) as writer:
        writer.save(state(1), step=1)
        assert next(watched).latest == "1@1"
        assert next(watched).requests == 4
        writer.save(state(2), step=2)
        status = next(watched)
        assert (status.latest, status.requests, status.free) == ("2@1", 5, None)
        assert next(watched).requests == 4


def test_retired_checkpoints_are_collected(s3: Server) -> None:
    store = open_store(s3, s3.url(), create=True)
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 4):
            writer.save(state(step), step=step)
    before = len(store.backend.list("seg/"))
    store.retire(1, 2, take_over=True)
    collected = store.gc()
    assert len(collected.segments) == 2
    assert len(store.backend.list("seg/")) == before - 2
    assert same(store.load(3, framework="numpy"), 3)
    assert store.verify(deep=True).ok


def test_the_second_writer_fences_the_first(s3: Server) -> None:
    url = s3.url()
    first = open_store(s3, url, create=True).writer(poll_seconds=None)
    first.save(state(1), step=1)
    second = open_store(s3, url).writer(poll_seconds=None)
    second.save(state(2), step=2)
    with pytest.raises(ckptstore.FencedError, match="term 2"):
        first.save(state(3), step=3)
    first.close()
    second.save(state(4), step=4)
    second.close()
    assert [one.ref for one in open_store(s3, url).checkpoints()] == ["1@1", "2@2", "4@2"]


def test_a_store_that_is_replaced_gets_no_foreign_slot(s3: Server) -> None:
    url = s3.url()
    store = open_store(s3, url, create=True)
    writer = store.writer(poll_seconds=None)
    writer.save(state(1), step=1)
    backend = ObjectBackend(url, s3.options)
    for key in backend.list(""):
        backend.delete(key)
    open_store(s3, url, create=True)
    with pytest.raises(ckptstore.StoreReplacedError):
        writer.save(state(2), step=2)
    writer.close()
    assert backend.list("log/") == []


def test_late_segments_of_a_writer_do_not_damage_the_next_store(s3: Server) -> None:
    url = s3.url()
    store = open_store(s3, url, create=True)
    store.writer(poll_seconds=None).close()
    writer = store.writer(poll_seconds=None)
    writer.save(state(1), step=1)
    backend = ObjectBackend(url, s3.options)
    for key in backend.list(""):
        backend.delete(key)
    new = open_store(s3, url, create=True)
    with new.writer(poll_seconds=None) as other:
        other.save(state(7), step=7)
    with pytest.raises(ckptstore.StoreReplacedError):
        writer.save(state(2), step=2)
    writer.close()
    left = backend.list("seg/0000000002/")
    assert left, "the segment goes up before the slot, and nothing is deleted by who does not know whose it is"
    report = new.verify()
    assert report.ok
    assert list(report.strangers) == left
    assert not report.orphans
    assert new.latest_step() == 7
    for _ in range(2):
        new.writer(poll_seconds=None).close()
    new.gc()
    assert backend.list("seg/0000000002/") == [], "once the new store's own terms have passed its number"


KILLED = """
import os, sys
import ckptstore
from ckptstore.host import crash_points
from tests.backends.test_objects_store import state
store = ckptstore.open(sys.argv[1])
with store.writer(deltas=3, poll_seconds=None) as writer:
    for step in range(1, 6):
        if step == 3:
            crash_points.arm(sys.argv[2])
        writer.save(state(step), step=step)
        print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", ["save.before-seal", "save.sealed", "commit.before-create", "commit.created"])
def test_a_killed_writer_loses_nothing_that_it_acknowledged(s3: Server, warm: Warm, point: str) -> None:
    url = s3.url()
    open_store(s3, url, create=True)
    assert point in crash_points.CRASH_POINTS
    environment = os.environ | s3.environment()
    command = [sys.executable, "-c", KILLED, url, point]
    done = warm.run(command, env=environment, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == -9, done.stderr
    acknowledged = [int(line) for line in done.stdout.split()]
    assert acknowledged == [1, 2]
    store = open_store(s3, url)
    found = [one.step for one in store.checkpoints()]
    assert found == ([1, 2, 3] if point == "commit.created" else [1, 2])
    for step in found:
        assert same(store.load(step, framework="numpy"), step)
    fill(store, 2, first=10)
    store.gc()
    assert store.verify(deep=True).ok
    assert [one.step for one in store.checkpoints()] == [*found, 10, 11]


# -- by command


def ckpt(s3: Server, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, arguments, prog_name="ckpt", env=s3.environment())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_commands_take_the_url_and_the_environment(s3: Server, filled: str, tmp_path: Path) -> None:
    code, out = ckpt(s3, "log", filled, "--json")
    assert (code, len(json.loads(out)["checkpoints"])) == (0, STEPS), out
    code, out = ckpt(s3, "inspect", filled, "latest")
    assert code == 0
    assert "object store (S3, http://127.0.0.1:" in out or not s3.port
    assert SECRET not in out
    assert KEY not in out
    code, out = ckpt(s3, "verify", filled)
    assert (code, "intact" in out) == (0, True), out
    target = tmp_path / "model.safetensors"
    code, out = ckpt(s3, "restore", filled, "3", "--out", str(target))
    assert code == 0, out
    assert target.stat().st_size > 12_000


def test_help_and_import_need_neither_obstore_nor_fsspec() -> None:
    script = (
        "import sys, ckptstore; from click.testing import CliRunner; from ckptstore.cli.main import cli;"
        "CliRunner().invoke(cli, ['--help']); ckptstore.open;"
        "print({'obstore', 'fsspec', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_agent_reaches_the_bucket_and_nobody_sees_the_secret(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    from ckptstore.agent import writer as agent_writer

    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "run"))
    store = open_store(s3, s3.url(), create=True)
    with agent_writer(store, linger_seconds=1) as writer:
        writer.save(state(1), step=1)
        told = [" ".join(one.cmdline()) for one in psutil.Process().children(recursive=True)]
        told += [path.read_text() for path in (tmp_path / "run").rglob("*.log")]
    assert same(store.load(1, framework="numpy"), 1)
    assert told
    assert not any(SECRET in text for text in told)
    backend = store.backend
    assert not any(SECRET.encode() in backend.get(key) or KEY.encode() in backend.get(key) for key in backend.list(""))


# -- requests


def test_a_commit_takes_three_requests_and_no_listing(s3: Server) -> None:
    """Except the listing of other processes' requests, which follows the acknowledgement."""

    class Listless(ObjectBackend):
        armed = False

        def list(self, prefix: str) -> list[str]:
            if self.armed:
                raise ckptstore.StorageError(f"a listing of {prefix}")
            return super().list(prefix)

    backend = Listless(s3.url(), s3.options)
    store = ckptstore.Store(backend)
    with store.writer(deltas=9, diffs=ckptstore.DiffOptions(full_every=9, batch=3), poll_seconds=None) as writer:
        writer.save(state(1), step=1)
        backend.armed = True
        before = backend.costs.spent
        for step in range(2, 5):  # a batch of diffs
            pending = writer.save_async(state(step), step=step)
        pending.result()
        spent = backend.costs.spent - before
        backend.armed = False
    assert {kind: number for kind, number in spent.requests.items() if kind != "list"} == {"get": 1, "create": 2}
    assert spent.repeated == 0
    assert [one.step for one in store.checkpoints()] == [1, 2, 3, 4]


@pytest.mark.parametrize(("ref", "select"), [(1, None), (STEPS, None), ("latest", "model.weight")])
def test_the_cost_of_a_restore_is_estimated(s3: Server, filled: str, ref: str | int, select: str | None) -> None:
    found = open_store(s3, filled).request_costs(ref, select)
    loader = open_store(s3, filled)
    loader.load(ref, select=select, framework="numpy")
    assert found is not None
    assert loader.backend.costs is not None
    spent = loader.backend.costs.spent
    assert (dict(found.restore.requests), found.restore.received) == (dict(spent.requests), spent.received)


def test_a_small_segment_takes_two_requests(s3: Server) -> None:
    """Whatever it holds: 21 steps of a model of 8 tensors took 157 before."""
    url = s3.url()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(open_store(s3, url, create=True), model=model, optimizer=optimizer, strategy="gradient") as run:
        for _ in range(21):
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            run.step()
    store = open_store(s3, url)
    segments = len(store.plan("latest").segments)
    assert segments == 21
    found = store.request_costs("latest")
    assert found is not None
    reading = open_store(s3, url)
    same_bits = all(
        bool(torch.equal(value, model.state_dict()[name])) for name, value in reading.load("latest")["model"].items()
    )
    assert same_bits
    assert reading.backend.costs is not None
    assert reading.backend.costs.spent.requests["range"] <= 2 * segments
    assert dict(reading.backend.costs.spent.requests) == dict(found.restore.requests)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 47, 48, 49, 200])
def test_a_segments_bytes_are_read_in_any_order(s3: Server, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Of segments around the sizes at which another number of requests reads them, by many threads at once."""
    for name, value in (("FIRST", 16), ("REST", 32), ("RANGE", 24)):
        monkeypatch.setattr(segment_ranges, name, value)
    backend = open_store(s3, s3.url(), create=True).backend
    data = np.random.default_rng(size).bytes(size)
    write_segment(backend, memoryview(data), SEGMENT)
    chance = random.Random(size)
    places = [sorted((chance.randint(0, size), chance.randint(0, size))) for _ in range(40)]
    with backend.open_source(SEGMENT) as source, ThreadPoolExecutor(4) as pool:
        assert source.size == size

        def read(begin: int, end: int) -> bytes:
            out = bytearray(end - begin)
            source.read_into(begin, memoryview(out))
            return bytes(out)

        found = list(pool.map(lambda place: read(*place), places))
    assert found == [data[begin:end] for begin, end in places]


def test_costs_by_command(s3: Server, filled: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    told = CliRunner().invoke(cli, ["inspect", filled, "--cost", "--prices", "1e6,0,0", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    kinds = found["restore"]["kinds"]
    assert found["restore"]["requests"] == sum(kinds.values())
    assert found["restore"]["money"] == kinds["get"] + kinds["range"] + kinds["head"]
    assert found["command"]["kinds"]["get"] >= kinds["get"]
    text = CliRunner().invoke(cli, ["inspect", filled, "--cost"]).stdout
    assert "RESTORE" in text
    assert "money" not in text
    assert CliRunner().invoke(cli, ["inspect", filled, "--cost", "--prices", "cheap"]).exit_code == 2
    assert CliRunner().invoke(cli, ["inspect", filled, "--cost", "--state"]).exit_code == 2
    ckptstore.open(tmp_path / "run", create=True).writer(poll_seconds=None).close()
    assert "cost nothing" in CliRunner().invoke(cli, ["inspect", str(tmp_path / "run"), "--cost"]).stdout


def test_a_store_of_many_commits_is_opened_with_a_few_requests(s3: Server) -> None:
    """The end of a term folds it: FORMAT, folds, the newest fold, its last slot, and the absent next slot."""
    store = open_store(s3, s3.url(), create=True)
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 80):
            writer.save({"step": step}, step=step)
    again = open_store(s3, store.url)
    assert len(again.checkpoints()) == 79
    costs = again.backend.costs
    assert costs is not None
    assert dict(costs.spent.requests) == {"get": 4, "list": 1, "head": 2}


def test_one_tensor_reads_little_more_than_its_bytes(s3: Server) -> None:
    store = open_store(s3, s3.url(), create=True)
    tensors = {name: np.random.default_rng(1).standard_normal(150_000) for name in "abcd"}
    with store.writer(poll_seconds=None) as writer:
        writer.save(tensors, step=1)
    costs = store.backend.costs
    assert costs is not None
    before = costs.spent
    assert np.array_equal(store.read_tensor(1, "b").view(np.float64), tensors["b"])
    assert (costs.spent - before).received <= 1.1 * tensors["b"].nbytes


# -- retention


@pytest.mark.slow
def test_rules_of_retention_beside_a_live_writer(s3: Server) -> None:
    url = s3.url()
    with open_store(s3, url, create=True).writer(keep=["last:2", "every:4"], deltas=3, poll_seconds=0.1) as writer:
        for step in range(1, 8):
            writer.save(state(step), step=step, tags="mine" if step == 1 else ())
        store = open_store(s3, url)  # another client, as on another machine
        assert [one.step for one in store.checkpoints()] == [1, 4, 6, 7]
        done = store.prune("last:1")
        assert [one.step for one in store.checkpoints()] == [1, 7]
        assert done.retired == ("4@1", "6@1")
        before = len(store.backend.list("seg/"))
        store.gc()
        assert len(store.backend.list("seg/")) < before
        assert store.keep("every:4") == ("every:4",)
        for step in (8, 9):
            writer.save(state(step), step=step)
    assert [one.step for one in store.checkpoints()] == [1, 8, 9]
    store.gc()
    for step in (1, 8, 9):
        assert same(store.load(step, framework="numpy"), step)
    assert store.verify(deep=True).ok
