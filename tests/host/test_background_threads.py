"""Single background threads: they run the given work as often as requested, and end on request."""

from __future__ import annotations

import threading
import time

import pytest

from ckptstore.host import background_threads
from ckptstore.host.background_threads import Periodic


def test_a_job_again_and_again_until_it_is_stopped() -> None:
    done: list[str] = []
    third = threading.Event()

    def work() -> None:
        done.append("work")
        if len(done) == 3:
            third.set()

    periodic = Periodic(0.01, work, "test", lambda: done.append("end"))
    assert not periodic.started
    periodic.start()
    assert periodic.started
    assert third.wait(120)
    periodic.stop()
    periodic.join()
    assert done[-1] == "end"
    assert set(done[:-1]) == {"work"}
    count = len(done)
    time.sleep(0.05)
    assert len(done) == count


def test_stopped_before_it_began_it_only_ends() -> None:
    done: list[str] = []
    periodic = Periodic(0.0, lambda: done.append("work"), "test", lambda: done.append("end"))
    periodic.stop()
    periodic.start()
    periodic.join()
    assert done == ["end"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_is_done_whatever_the_work_raised() -> None:
    ended = threading.Event()

    def work() -> None:
        raise ValueError("no")

    periodic = Periodic(0.01, work, "test", ended.set)
    periodic.start()
    assert ended.wait(120)
    periodic.join()


def test_a_job_after_a_time_can_be_cancelled() -> None:
    done: list[int] = []
    before = set(threading.enumerate())
    cancel = background_threads.after(600, lambda: done.append(1))
    (thread,) = set(threading.enumerate()) - before
    happened = threading.Event()
    background_threads.after(0.01, happened.set)
    assert happened.wait(120)
    cancel()
    thread.join(120)
    assert not thread.is_alive()
    assert done == []


@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_has_its_name(daemon: bool) -> None:
    seen: list[tuple[str, bool]] = []
    thread = background_threads.start(
        lambda: seen.append((threading.current_thread().name, threading.current_thread().daemon)), "job", daemon=daemon
    )
    thread.join()
    assert seen == [("ckptstore-job", daemon)]
