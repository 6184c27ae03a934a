"""SIGTERM while writers are open: every order of opening and closing them and of installing handlers, in processes."""

from __future__ import annotations

import signal
import sys
import warnings
from pathlib import Path

import pytest

import ckptstore
from tests import warmth
from tests.forms import long_only

SCRIPT = """
import os, signal, sys, threading, time
import ckptstore
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from tests.write.held import hold
from tests.write.trainer import Trainer

folder, *words = sys.argv[1:]
writers, stores, calls = {}, {}, []

def handler(name, chain):
    before = signal.getsignal(signal.SIGTERM)
    def called(number, frame):
        calls.append(name)
        if chain and callable(before):
            before(number, frame)
    signal.signal(signal.SIGTERM, called)

def open_writer(name, **options):
    trainer, store = Trainer(), ckptstore.open(f"{folder}/{name}", create=True)
    writer = store.writer(diffs=ckptstore.DiffOptions(batch=50, seconds=None), poll_seconds=None, **options)
    for step in (1, 2, 3):
        trainer.train()
        writer.save_async(trainer.state(), step, updates=trainer.updates())
    writer.poll()
    writers[name], stores[name] = writer, store

def elsewhere(work, *args):
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join()

original = lambda *_: calls.append("original")
if words[0] == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif words[0] != "default":
    signal.signal(signal.SIGTERM, original)
for word in words:
    kind, name = word[0], word[1:]
    if word in ("default", "ignore"):
        pass
    elif kind == "w":
        open_writer(name)
    elif kind == "r":
        open_writer(name, group=Group(0, 1, LocalMailbox()))
    elif kind == "t":
        elsewhere(open_writer, name)
    elif kind == "x":
        writers.pop(name).close()
    elif kind == "y":
        elsewhere(writers.pop(name).close)
    elif kind in "UC":
        handler(word, kind == "C")
    elif kind == "R":  # as a library does that leaves its context
        signal.signal(signal.SIGTERM, original)
    elif kind == "K":
        calls.append("kill")
        seen = len(calls)
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 60
        while len(calls) < seen + int(name) and time.monotonic() < end:
            time.sleep(0.005)
        end = time.monotonic() + 60  # its thread has ended: nothing is sent again
        while any(one.name == "ckptstore-sigterm" for one in threading.enumerate()) and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.02)  # the signal that this thread sent last is delivered
    elif kind == "S":
        while not all(ckptstore.open(f"{folder}/{name}").latest_step() == 3 for name in writers):
            time.sleep(0.005)
    elif kind == "A":  # two signals, and a medium that does not answer
        hold(stores[name], writers[name])
        for _ in range(2):
            print("signal", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "B":  # a signal while the writer is closed, and waits for its medium
        hold(stores[name], writers[name], 1.5)
        def late():
            time.sleep(0.3)
            print("signal", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=late, daemon=True).start()
        writers.pop(name).close()
        print("closed", flush=True)
        time.sleep(60)
    elif kind == "F":
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
            os._exit(1)
        calls += ["child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
print(*calls, signal.getsignal(signal.SIGTERM) is original, flush=True)
os._exit(0)  # nothing is written from here on
"""


def run(folder: Path, words: str) -> tuple[int, list[str]]:
    """A process that does what the words say -> its status; which handlers ran, and whether the first one is back."""
    done = warmth.run(
        [sys.executable, "-c", SCRIPT, str(folder), *words.split()],
        cwd=Path(__file__).resolve().parents[2],
        timeout=120,
    )
    assert done.returncode in (0, -signal.SIGTERM), done.stderr
    return done.returncode, done.stdout.split()


def flushed(folder: Path, name: str) -> bool:
    """Whether all three steps of a writer are in its store, and the next writer need not warn of lost ones."""
    store = ckptstore.open(folder / name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        store.writer().close()
    steps = [info.step for info in store.checkpoints()]
    assert (steps == [1, 2, 3]) == (told == []), (steps, told)
    return steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "calls", "back"),
    [
        ("U w1 w2 K1", "U", False),  # a handler that was there before the writers
        ("w1 U w2 K1", "U", False),  # one that replaced ours, between two writers
        ("w1 C K3 w2 K2", "C C original kill C original", False),  # one that calls ours, before and after the second
        ("r1 U r2 K1", "U", False),
        ("w1 U R w2 K1", "original", True),  # one that was taken away again
        pytest.param("w1 C1 w2 C2 w3 U w4 K1", "U", False, marks=long_only),
        pytest.param("w1 C1 w2 C2 w3 K3", "C2 C1 original", False, marks=long_only),
        ("w1 K1 w2 K1 U w3 K1", "original kill original kill U", False),  # the program continues with other writers
        # Closed in any order.
        pytest.param("w1 w2 x1 K1", "original", True, marks=long_only),
        ("w1 w2 x2 x1 K1", "original", True),
        ("w1 U w2 x1 K1", "U", False),
        pytest.param("w1 U w2 x2 K1", "U", False, marks=long_only),
        pytest.param("w1 C w2 x1 x2 w3 K2", "C original", False, marks=long_only),
        ("w1 C w2 x2 x1 K2", "C original", False),  # nothing is open: once, and at once
        # Another thread cannot restore a handler.
        ("w1 U w2 y2 x1 w3 y3 K1", "U", False),
        pytest.param("w1 y1 K1", "original", True, marks=long_only),
        # A writer that another thread opens is not flushed, and takes the signal from nobody.
        ("t9 K1", "original", True),
        pytest.param("w1 U t9 w2 K1", "U", False, marks=long_only),
        # Some launchers ignore it: it flushes, and ends nothing.
        ("ignore w1 w2 K0 S", "", False),
        ("ignore w1 C w2 K1 S", "C", False),
    ],
)
def test_every_open_writer_is_flushed_and_the_handlers_below_are_called(
    tmp_path: Path, words: str, calls: str, back: bool
) -> None:
    code, said = run(tmp_path, words)
    assert (code, said) == (0, ["kill", *calls.split(), str(back)])
    opened = [word[1:] for word in words.split() if word[0] in "wtr"]
    assert [name for name in opened if not flushed(tmp_path, name)] == [name for name in opened if name == "9"]


@pytest.mark.parametrize("words", ["default w1 w2 K9", "default w1 C w2 K9", "default w1 y1 w2 y2 K9"])
def test_the_default_handler_ends_the_process_when_everything_is_written(tmp_path: Path, words: str) -> None:
    assert run(tmp_path, words) == (-signal.SIGTERM, [])
    assert all(flushed(tmp_path, word[1:]) for word in words.split() if word[0] == "w")


@pytest.mark.parametrize("kind", ["w", "r"])
def test_while_closing_writes_what_waits_the_signal_waits_for_it(tmp_path: Path, kind: str) -> None:
    code, said = run(tmp_path, f"default {kind}1 B1")
    assert (code, said[0]) == (-signal.SIGTERM, "signal")
    assert flushed(tmp_path, "1")


def test_a_second_signal_does_not_wait_for_the_medium(tmp_path: Path) -> None:
    code, said = run(tmp_path, "default w1 A1")
    assert (code, said) == (-signal.SIGTERM, ["signal", "signal"])
    assert not flushed(tmp_path, "1")


@pytest.mark.parametrize("kind", ["w", "r"])
def test_a_forked_child_waits_for_no_writer_of_its_parent(tmp_path: Path, kind: str) -> None:
    """Its threads are not there. As without a writer, the child ends at once."""
    assert run(tmp_path, f"default {kind}1 F x1") == (0, ["child", str(int(-signal.SIGTERM)), "False"])
    assert flushed(tmp_path, "1")
