"""Saves that are copied straight into mapped segments: the same checkpoints, and failed saves leave no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions
from ckptstore.backends.local_disk.pmem import PmemSink
from ckptstore.formats.sources import NumpySource
from ckptstore.segments import mapped_fulls
from tests.write.test_layerwise_save import LAYERS, change, fresh_state, same


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    return ckptstore.open(f"pmem://{tmp_path}/store")


def segments(store: ckptstore.Store) -> list[str]:
    return store.backend.list("seg/")


def test_it_holds_what_a_blocking_save_would(store: ckptstore.Store) -> None:
    other = ckptstore.open(f"memory://{uuid.uuid4().hex}")
    with store.writer(poll_seconds=None) as writer, other.writer(poll_seconds=None) as reference:
        for step in range(1, 4):
            state = {**fresh_state(step), "empty": np.zeros((0, 3)), "scalar": np.float32(step) + np.zeros(())}
            save = writer.begin(state, step, LAYERS, direct=True)
            save.ready("first")
            save.wait("first")
            pending = save.finish(state)
            wanted = reference.save(state, step)
            save.wait()
            change(state, "a.w", "b.w")
            info = pending.result(60)
            assert (info.state, info.nbytes, info.tensors) == (wanted.state, wanted.nbytes, wanted.tensors)
        same(other.load(3), store.load(3))
    assert len(segments(store)) == 3
    report = store.verify(deep=True)
    assert not report.damage


def test_safetensors_opens_it(store: ckptstore.Store, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer:
        writer.begin(state, 1, LAYERS, direct=True).finish().result(60)
    found = safetensors.load_file(tmp_path / "store" / segments(store)[0])
    np.testing.assert_array_equal(found["a.w"], state["a"]["w"])


def test_a_state_of_several_segments(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (None, None, None, 40_000)
    monkeypatch.setattr(mapped_fulls.map_segments, "__defaults__", limits[-1:])
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer:
        info = writer.begin(state, 1, LAYERS, direct=True).finish().result(60)
    assert len(info.segments) == len(segments(store)) == 2
    same(store.load(1), state)
    assert not store.verify(deep=True).damage


def test_the_bytes_are_copied_into_the_segment_and_nowhere_else(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    write, persist = PmemSink.write, PmemSink.persist

    def written(sink: Any, offset: int, data: Any) -> None:
        calls.append(f"write at {offset}")
        write(sink, offset, data)

    def persisted(sink: Any, offset: int, length: int) -> None:
        calls.append(f"persist {length}")
        persist(sink, offset, length)

    monkeypatch.setattr(PmemSink, "write", written)
    monkeypatch.setattr(PmemSink, "persist", persisted)
    state = {"a": {"w": np.ones(1 << 20)}, "step": 1}
    with store.writer(poll_seconds=None) as writer:
        calls.clear()  # opening probes the medium
        save = writer.begin(state, 1, {"a": ("a.w",)}, direct=True)
        save.ready("a")
        save.wait()
        assert not calls
        pending = save.finish()
        pending.result(60)
    assert calls == [f"persist {8 << 20}", "write at 0"]  # the header, once everything else is on the medium


def test_values_that_outgrow_the_header(store: ckptstore.Store) -> None:
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS, direct=True)
        state["step"] = "x" * 300_000
        save.finish(state).result(60)
        writer.wait()  # given-up segments are removed after the result is there
        assert len(segments(store)) == 1
        save = writer.begin(state, 2, LAYERS, direct=True)
        save.finish(state).result(60)
    same(store.load(1)["a"], state["a"])
    assert store.load(1)["step"] == store.load(2)["step"] == "x" * 300_000
    assert len(segments(store)) == 2


def test_unsupported_uses(store: ckptstore.Store, tmp_path: Path) -> None:
    state = fresh_state()
    for other in (ckptstore.open(f"memory://{uuid.uuid4().hex}"), ckptstore.open(tmp_path / "plain")):
        with other.writer(poll_seconds=None) as writer:
            with pytest.raises(ckptstore.UsageError, match=r"has no memory to be copied into, as pmem:// has"):
                writer.begin(state, 1, LAYERS, direct=True)
            assert not segments(other)
            writer.begin(state, 1, LAYERS).finish().result(60)
    options: list[dict[str, Any]] = [{"deltas": DeltaOptions()}, {"diffs": DiffOptions()}]
    for step, one in enumerate(options, 1):
        with store.writer(poll_seconds=None, **one) as writer:
            with pytest.raises(ckptstore.UsageError, match="compressed from copies in host memory"):
                writer.begin(state, step, LAYERS, direct=True)
            writer.save_async(state, step).result(60)


def test_a_failed_save_leaves_no_file_and_the_next_commit_drops_it(store: ckptstore.Store) -> None:
    state = fresh_state()

    class Broken(NumpySource):
        def view(self) -> Any:
            return None

        def read(self, offset: int, out: Any) -> None:
            raise OSError("the bus fell off")

    with store.writer(poll_seconds=None) as writer:
        with writer.begin(state, 1, LAYERS, direct=True) as save:
            assert len(segments(store)) == 1
            save.ready("first")
        assert not segments(store)
        save = writer.begin(state, 1, LAYERS, direct=True)
        save.ready("first", {"a.w": Broken(state["a"]["w"])})
        with pytest.raises(OSError, match="the bus fell off"):
            save.finish().result(60)
        writer.begin(state, 1, LAYERS, direct=True).finish().result(60)
        assert len(segments(store)) == 1
        writer.close()
    same(store.load(1), state)


def test_a_medium_that_fails_at_the_seal(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer:
        with monkeypatch.context() as patch:

            def fails(sink: Any, size: int) -> None:
                raise ckptstore.StorageError("no")

            patch.setattr(PmemSink, "seal", fails)
            with pytest.raises(ckptstore.StorageError, match="no"):
                writer.begin(state, 1, LAYERS, direct=True).finish().result(60)
        writer.wait()
        assert not segments(store)
        writer.begin(state, 1, LAYERS, direct=True).finish().result(60)
    same(store.load(1), state)


CHILD = """
import os, signal, sys
import ckptstore
from ckptstore.formats.sources import NumpySource
from tests.write.test_layerwise_save import LAYERS, fresh_state

url, at = sys.argv[1:]
with ckptstore.open(url).writer(poll_seconds=None) as writer:
    writer.begin(fresh_state(1), 1, LAYERS, direct=True).finish().result(60)
    save = writer.begin(fresh_state(2), 2, LAYERS, direct=True)
    if at == "copying":
        NumpySource.read = lambda self, offset, out: os.kill(os.getpid(), signal.SIGKILL)
        NumpySource.view = lambda self: None
    save.ready("first")
    save.finish().result(60)
"""


@pytest.mark.parametrize(
    ("at", "newest"),
    [("copying", 1), ("save.before-header:2", 1), ("save.sealed:2", 1), ("commit.acknowledged:2", 2)],
)
def test_a_killed_run_keeps_the_checkpoint_before(tmp_path: Path, at: str, newest: int) -> None:
    url = f"pmem://{tmp_path}/store"
    environment = {**os.environ, **({} if at == "copying" else {"CKPTSTORE_CRASH_AT": at})}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, url, at], capture_output=True, text=True, check=False, env=environment, cwd=root
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = ckptstore.open(url)
    assert [info.step for info in store.checkpoints()] == list(range(1, newest + 1))
    same(store.load("latest"), fresh_state(newest))
    with store.writer(poll_seconds=None) as writer:
        writer.begin(fresh_state(3), 3, LAYERS, direct=True).finish().result(60)
    store.gc()
    assert len(segments(store)) == newest + 1
    assert not store.verify(deep=True).damage
