"""Threads for the duration of a `with`, and their default number."""

from __future__ import annotations

import os
import threading

import pytest

from ckptstore.host.threads import SleepingPool, default_threads, run_all, workers


@pytest.mark.parametrize(("cores", "threads"), [(None, 1), (1, 1), (3, 3), (4, 4), (64, 4)])
def test_one_thread_for_each_core_and_no_more_than_four(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, threads: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert default_threads() == threads


def test_threads_have_a_name_and_end_with_the_block() -> None:
    names: list[str] = []
    both = threading.Barrier(2, timeout=30)

    def job() -> None:
        both.wait()
        names.append(threading.current_thread().name)

    with workers(2, "counted") as found:
        assert found.threads == 2
        run_all(found.pool, [job, job])
    assert sorted(names) == ["ckptstore-counted_0", "ckptstore-counted_1"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptstore-counted")]


def _here() -> str:
    return threading.current_thread().name


def test_a_sleeping_pool_works_where_it_is_called_until_it_is_woken() -> None:
    pool = SleepingPool(3, "test-sleeping")
    assert pool.submit(_here).result() == _here()
    assert isinstance(pool.submit(int, "x").exception(), ValueError)
    assert list(pool.map(abs, [-1, 2])) == [1, 2]
    pool.wake()
    pool.wake()
    assert pool.submit(_here).result().startswith("test-sleeping")
    assert len([one for one in threading.enumerate() if one.name.startswith("test-sleeping")]) == 3
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(_here)


def test_a_sleeping_pool_that_was_shut_down_takes_nothing() -> None:
    pool = SleepingPool(2, "test-sleeping")
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(_here)
    with pytest.raises(RuntimeError):
        pool.wake()


def test_an_interrupt_within_work_that_is_done_at_once_is_the_callers() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SleepingPool(2, "test-sleeping").submit(interrupted)
