"""Scripts that end without closing their writers: submitted steps are in the store, or an error names the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from tests import warmth
from tests.forms import in_turn

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import os, sys, threading, time
import numpy as np
import ckptstore
from ckptstore import DiffOptions
from ckptstore.host import interpreter_exit
from tests.write.held import hold

interpreter_exit.SILENT_SECONDS = 600  # nothing is said of a busy disk

def state(step):
    return {"w": np.full(1 << 18, step, "<f4") + np.arange(1 << 18, dtype="<f4") / (1 << 20)}

def fill(path, steps, **options):
    store = ckptstore.open(path, create=True)
    writer = store.writer(**options)
    for step in steps:
        writer.save_async(state(step), step)
    return store, writer

path = sys.argv[1]
"""
DIFFS = """
from tests.write.trainer import Trainer
trainer = Trainer()
writer = ckptstore.open(path, create=True).writer(diffs=DiffOptions(batch=100, seconds=None))
for step in range(1, 6):
    trainer.train()
    writer.save_async(trainer.state(), step, updates=trainer.updates())
"""
ENDS = {
    "end": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "exception": ("raise ValueError('training failed')", 1, "ValueError: training failed"),
}


def run(code: str, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BEGIN + code, str(path), *arguments]
    environment = {**os.environ, "CKPTSTORE_KERNELS": "numpy"}
    return warmth.nursery().run(command, cwd=ROOT, env=environment, timeout=120, teardown=True)


def check(path: Path, steps: list[int]) -> ckptstore.Store:
    store = ckptstore.open(path)
    assert [info.step for info in store.checkpoints()] == steps
    assert ckptstore.verify(store).ok
    for step in steps:
        weights = store.load(step, framework="numpy").get("w")
        assert weights is None or int(weights[0]) == step
    return store


WRITERS = {
    "deltas": "fill(path, range(1, 5), deltas='auto')",
    "in-flight": "fill(path, range(1, 5), max_in_flight=4)",
    "both": "store, writer = fill(path, range(1, 5), deltas='auto', max_in_flight=4, threads=4, poll_seconds=None)",
}


@pytest.mark.parametrize(("writer", "end"), in_turn(list(WRITERS), list(ENDS)))
def test_submitted_steps_are_finished(tmp_path: Path, writer: str, end: str) -> None:
    code, status, said = ENDS[end]
    done = run(f"{WRITERS[writer]}\n{code}", tmp_path / "store")
    assert done.returncode == status, done.stderr
    assert done.stderr.strip().splitlines()[-1:] == ([said] if said else []), done.stderr
    check(tmp_path / "store", [1, 2, 3, 4])


@pytest.mark.parametrize("end", ENDS)
def test_a_batch_that_waits_is_written_and_the_term_is_closed(tmp_path: Path, end: str) -> None:
    code, status, _ = ENDS[end]
    done = run(DIFFS + code, tmp_path / "store")
    assert done.returncode == status, done.stderr
    store = check(tmp_path / "store", [1, 2, 3, 4, 5])
    with store.writer() as writer:  # warnings are errors: no step was lost
        assert writer.parent is not None
        assert writer.parent.step == 5


def test_a_writer_that_nobody_refers_to_any_more(tmp_path: Path) -> None:
    code = DIFFS.replace("seconds=None)", "seconds=None), poll_seconds=None")
    done = run(code + "del writer\nimport gc\ngc.collect()", tmp_path / "store")
    assert (done.returncode, done.stderr) == (0, "")
    check(tmp_path / "store", [1, 2, 3, 4, 5])


def test_several_writers_of_which_one_fails(tmp_path: Path) -> None:
    """The failing one is named with its steps; the others lose nothing."""
    code = """
fill(path + "/first", range(1, 4), max_in_flight=4)
store, bad = fill(path + "/bad", [], max_in_flight=4)
gate = threading.Event()

gate = threading.Event()

def full(*_):
    gate.wait(60)  # the second save shall not hear of the first
    raise ckptstore.StorageError(5, "the test's disk is broken")

store.backend.open_sink = full
for step in (1, 2):
    bad.save_async(state(step), step)
gate.set()
fill(path + "/last", range(1, 4), deltas="auto")
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    where = tmp_path / "bad"
    # Both fail at once, in lanes of their own.
    assert sorted(done.stderr.splitlines()) == [
        f"ckptstore: {where}: step {step} was not saved: [Errno 5] the test's disk is broken" for step in (1, 2)
    ]
    check(tmp_path / "first", [1, 2, 3])
    check(tmp_path / "last", [1, 2, 3])
    check(where, [])


def test_reported_errors_are_not_repeated(tmp_path: Path) -> None:
    code = """
store, writer = fill(path, [])
store.backend.open_sink = None
try:
    writer.save_async(state(1), 1).result()
except TypeError:
    print("heard")
"""
    done = run(code, tmp_path / "store")
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\n", "")


def test_a_fenced_writer_says_what_it_could_not_save(tmp_path: Path) -> None:
    code = """
store, old = fill(path, [], max_in_flight=2)
gate = hold(store, old)
old.save_async(state(1), 1)
new = store.writer()
gate.set()
new.save(state(2), 2)
"""
    done = run(code, tmp_path / "store")
    assert done.returncode == 0
    assert "step 1 was not saved" in done.stderr
    assert "term 1 is over" in done.stderr
    check(tmp_path / "store", [2])


@pytest.mark.parametrize("how", ["multiprocessing", "os.fork"])
def test_a_fork_does_not_end_its_parents_writers(tmp_path: Path, how: str) -> None:
    """It has none of their threads: it would wait for ever. It does finish its own writers."""
    child = "fill(path + '/child', range(1, 4), deltas='auto')"
    forks = {
        "multiprocessing": f"""
import multiprocessing
def work():
    {child}
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join(60)
assert child.exitcode == 0, child.exitcode
""",
        "os.fork": f"""
pid = os.fork()
if pid == 0:
    {child}
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
""",
    }
    code = f"""
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
store, writer = fill(path + "/parent", range(1, 4), max_in_flight=4)
{forks[how]}
writer.save_async(state(4), 4)
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    check(tmp_path / "parent", [1, 2, 3, 4])
    check(tmp_path / "child", [1, 2, 3])


SLOW = """
import ckptstore.host.interpreter_exit as exiting
exiting.SILENT_SECONDS = 0.2
store, writer = fill(path, [1], max_in_flight=4)
writer.wait()
gate = hold(store, writer, 600)

def report(text, write=sys.stderr.write):
    if sys.argv[2] == "reported" and "the interpreter ends" in text:
        gate.set()
    return write(text)

def told():
    os.read(0, 1)
    time.sleep(0.2)
    gate.set()

sys.stderr.write = report
if sys.argv[2] == "told":
    threading.Thread(target=told, daemon=True).start()
for step in (2, 3):
    writer.save_async(state(step), step)
print("ready", flush=True)
"""


def test_the_wait_is_reported_with_its_reason(tmp_path: Path) -> None:
    done = run(SLOW, tmp_path / "store", "reported")
    assert done.returncode == 0
    assert f"ckptstore: {tmp_path / 'store'}: the interpreter ends once steps 2 to 3 (2) are written" in done.stderr
    check(tmp_path / "store", [1, 2, 3])


def test_ctrl_c_gives_up(tmp_path: Path) -> None:
    """A medium that hangs blocks no process for longer than people want to wait."""
    # A shell's background job begins with SIGINT ignored, and so do its children.
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + BEGIN + SLOW
    child: Any = subprocess.Popen(
        [
            sys.executable,
            "-c",
            begin + "threading.Thread(target=lambda: None).start()",
            tmp_path / "store",
            "never",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        assert "Ctrl-C gives up" in child.stderr.readline()
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=120)  # the medium would take longer
        assert "interrupted: steps 2 to 3 (2) are perhaps not saved" in said
    finally:
        child.kill()
    check(tmp_path / "store", [1])


def test_writers_that_come_and_go_while_the_interpreter_ends(tmp_path: Path) -> None:
    """Other threads open and close them at the worst moments: while the existing ones are being finished."""
    code = """
import ckptstore.host.interpreter_exit as exiting

class Ending:
    url = path

    def __hash__(self):
        if exiting.under_way() and others:
            exiting.watch(others.pop())
        return id(self)

    def _unfinished(self):
        exiting.forget(self)
        return [7]

others = [object(), object()]
for _ in range(2):
    one = Ending()
    exiting.watch(one)
    exiting.give_up(one)
fill(path, [1])
"""
    done = run(code, tmp_path / "store")
    said = f"ckptstore: {tmp_path / 'store'}: interrupted: step 7 is perhaps not saved"
    assert (done.returncode, done.stderr.splitlines()) == (0, [said, said])
    check(tmp_path / "store", [1])


def test_a_thread_that_continues_to_save_gets_the_reason(tmp_path: Path) -> None:
    code = """
store, writer = fill(path, [1])
def train():
    threading.main_thread().join()
    try:
        writer.save(state(2), 2)
    except ckptstore.WriterClosedError as error:
        print(error, flush=True)
writer.wait()
threading.Thread(target=train).start()
"""
    done = run(code, tmp_path / "store")
    assert done.stdout.startswith("the writer of term 1 is closed because the interpreter is ending: "), done.stderr
    check(tmp_path / "store", [1])


def test_a_writer_that_is_opened_while_the_interpreter_ends_is_refused(tmp_path: Path) -> None:
    """Nothing would finish it: the list of writers to finish is already fixed."""
    code = """
import ckptstore.host.interpreter_exit as exiting
store, writer = fill(path, [1])
writer.wait()
gate = hold(store, writer)
writer.save_async(state(2), 2)
def train():
    while not exiting.under_way():
        time.sleep(0.001)
    assert threading.main_thread().is_alive()
    try:
        other = ckptstore.open(path + "-other", create=True).writer()
    except ckptstore.WriterClosedError as error:
        print(error, flush=True)
    finally:
        gate.set()
threading.Thread(target=train, daemon=True).start()
"""
    done = run(code, tmp_path / "store")
    assert done.stdout.startswith("the interpreter is ending: "), done.stderr
    check(tmp_path / "store", [1, 2])


def test_a_closed_writer_is_let_go_of(tmp_path: Path) -> None:
    import gc
    import weakref

    writer = ckptstore.open(tmp_path / "store", create=True).writer(poll_seconds=None)
    gone = weakref.ref(writer)
    writer.close()
    del writer
    gc.collect()
    assert gone() is None


def test_sigterm_while_the_interpreter_ends(tmp_path: Path) -> None:
    """Waiting steps are being written already: the signal neither interrupts that nor starts a thread, which 3.12
    refuses."""
    code = SLOW.replace(
        "fill(path, [1], max_in_flight=4)", "fill(path, [1], max_in_flight=4, diffs=DiffOptions(batch=9))"
    )
    child: Any = subprocess.Popen(
        [sys.executable, "-c", BEGIN + code, tmp_path / "store", "told"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert "Ctrl-C gives up" in child.stderr.readline()
        child.send_signal(signal.SIGTERM)
        _, said = child.communicate("\n", timeout=120)  # the medium answers only after the signal
    finally:
        child.kill()
    assert said == ""
    check(tmp_path / "store", [1, 2, 3])


def test_no_thread_can_be_started_any_more(tmp_path: Path) -> None:
    """As on Python 3.12 while the interpreter ends."""
    code = """
def refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

store, writer = fill(path, [1], deltas="auto", max_in_flight=4, threads=4)
gate = hold(store, writer)
for step in (2, 3, 4):
    writer.save_async(state(step), step)

def ending():
    threading.Thread.start = refuse
    gate.set()

threading._register_atexit(ending)  # called before ours
"""
    done = run(code, tmp_path / "store")
    assert (done.returncode, done.stderr) == (0, "")
    check(tmp_path / "store", [1, 2, 3, 4])
