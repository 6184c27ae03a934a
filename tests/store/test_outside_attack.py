"""Findings of somebody who attacked the package from outside, through its users' interfaces."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import UsageError
from ckptstore.exchange import atomic_files
from ckptstore.exchange.export import export

ROOT = Path(__file__).resolve().parents[2]


def stored(path: Path) -> ckptstore.Store:
    store = ckptstore.open(path)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": np.ones(3)}, 1)
    return store


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


def to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


MAKE: dict[str, tuple[Callable[[Path], None], str]] = {
    "device": (device, "a device"),
    "pipe": (os.mkfifo, "a pipe"),
    "link": (to_pipe, "a link to a pipe"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "a link to nothing"),
    "loop": (lambda path: path.symlink_to(path.name), "a link to nothing"),
    "stdout": (lambda path: path.symlink_to("/proc/self/fd/1"), "a link to an open file of a process"),
}


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("kind", MAKE)
def test_only_files_are_replaced(tmp_path: Path, kind: str, overwrite: bool) -> None:
    store = stored(tmp_path / "run")
    place = tmp_path / "x.safetensors"
    make, called = MAKE[kind]
    make(place)
    before = place.lstat()
    with pytest.raises(UsageError, match=f"x.safetensors is {called}"):
        export(store.journal, 1, place, overwrite=overwrite)
    with pytest.raises(UsageError, match=called):
        atomic_files.refuse_store(place)  # the requests of --csv, --report and --plot
    after = place.lstat()
    assert (after.st_ino, after.st_mode, after.st_rdev) == (before.st_ino, before.st_mode, before.st_rdev)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_no_index_and_no_shard_replaces_a_pipe(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        writer.save({"a": np.ones(3), "b": np.ones(3)}, 1)
    for name in ("x-00002-of-00002.safetensors", "x.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UsageError, match="is a pipe"):
            export(store.journal, 1, tmp_path / "x.safetensors", overwrite=True, max_shard_bytes=1)
        assert stat.S_ISFIFO((tmp_path / name).lstat().st_mode)
        (tmp_path / name).unlink()
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_pipe_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with atomic_files.outputs(overwrite=True) as files:
        files.create(tmp_path / "x", 1).write(b"x")
        os.mkfifo(tmp_path / "x")
        with pytest.raises(UsageError, match="is a pipe"):
            files.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert stat.S_ISFIFO((tmp_path / "x").lstat().st_mode)


def test_files_and_links_to_them_are_replaced(tmp_path: Path) -> None:
    store = stored(tmp_path / "run")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    for name in ("link", "file"):
        export(store.journal, 1, tmp_path / name, overwrite=True)
        assert (tmp_path / name).stat().st_size > 0


def test_the_folder_of_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^the folder nodir does not exist$"):
        export(store.journal, 1, Path("nodir/x"))
    Path("file").write_text("")
    with pytest.raises(UsageError, match=r"^file is not a folder$"):
        export(store.journal, 1, Path("file/x"))
    export(store.journal, 1, Path("x"))
    with atomic_files.outputs(overwrite=False) as files, pytest.raises(UsageError, match="nodir does not exist"):
        files.create(Path("nodir/x"), 1)


LATE = """
import concurrent.futures.thread, sys, threading
import ckptstore
{first}
def train():
    threading.main_thread().join()
    try:
        ckptstore.open(sys.argv[1]).writer()
    except ckptstore.WriterClosedError as error:
        print(error, flush=True)
threading.Thread(target=train).start()
"""


@pytest.mark.parametrize(
    "first",
    ["", "import ckptstore.write.local_writer", "open_ = ckptstore.open(sys.argv[1]).writer()"],
    ids=["first", "imported", "second"],
)
def test_a_writer_opened_after_the_main_thread_returned(tmp_path: Path, first: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(first=first), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("the interpreter is ending: a writer needs the main thread to be alive"), done.stdout
    assert "join the training thread" in done.stdout
    if "open_" in first:  # nor was another writer fenced
        assert max(ckptstore.open(tmp_path / "run").view().catalog.terms) == 1


def test_a_deleted_store_is_complained_of_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ckptstore.open(tmp_path / "run").writer(poll_seconds=None) as writer:
            writer.save({"w": np.ones(3)}, 1)
            shutil.rmtree(tmp_path / "run")
            for step in range(2, 6):
                with pytest.raises(ckptstore.StoreNotFoundError, match="deleted"):
                    writer.save({"w": np.ones(3)}, step)
    texts = [str(one.message) for one in said if "upkeep" in str(one.message)]
    assert len(texts) == 1
    assert "saves go on" not in texts[0]


TERMINATED = """
import os, signal, sys, time
import numpy as np
import ckptstore
from ckptstore.host import interpreter_exit
interpreter_exit.SILENT_SECONDS = 600  # nothing is said of a busy disk
if "exit" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
diffs = ckptstore.DiffOptions() if "diffs" in sys.argv else None
store = ckptstore.open(sys.argv[1])
writer = store.writer(max_in_flight=4, poll_seconds=None, diffs=diffs)
sink = store.backend.open_sink
def slow(*arguments, **options):
    time.sleep(60 if "nothing" in sys.argv else 0.3)  # longer than this process lives
    return sink(*arguments, **options)
store.backend.open_sink = slow
for step in range(1, 4):
    writer.save_async({"w": np.full(1 << 12, step, "<f4")}, step)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "code", "steps"),
    [("exit", 0, [1, 2, 3]), ("diffs", -signal.SIGTERM, [1, 2, 3]), ("nothing", -signal.SIGTERM, [])],
)
def test_the_readmes_claim_about_sigterm(tmp_path: Path, how: str, code: int, steps: list[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, str(tmp_path / "run"), how],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert [info.step for info in ckptstore.open(tmp_path / "run").checkpoints()] == steps


def test_the_readmes_claim_about_views_and_byte_order(tmp_path: Path) -> None:
    import torch

    weights = torch.arange(6.0).reshape(2, 3)
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        writer.save(
            {"w": weights, "again": weights, "t": weights.T, "row": weights[0], "n": np.arange(3, dtype=">f4")}, 1
        )
    state = store.load(1)
    assert state["w"] is state["again"]
    assert state["t"].untyped_storage().data_ptr() != state["w"].untyped_storage().data_ptr()
    assert state["row"].untyped_storage().data_ptr() != state["w"].untyped_storage().data_ptr()
    assert torch.equal(state["t"], weights.T)
    assert state["n"].dtype == np.dtype("<f4")
    assert state["n"].tolist() == [0, 1, 2]
