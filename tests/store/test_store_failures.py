"""Saves that fail, are refused or interrupted: the caller gets an error, and nothing is lost or written."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.log.log_reader import Patience
from tests.store.states import fill
from tests.write import inside
from tests.write.held import hold

MANY_TAGS = [f"t{number:0127}" for number in range(3000)]
"""More than a slot of the log holds."""


class TestRefusals:
    def test_unsupported_state_names_its_place_and_writes_nothing(self, tmp_path: Path) -> None:
        store = ckptstore.open(tmp_path / "store")
        with store.writer() as writer:
            before = sorted(tmp_path.rglob("*"))
            with pytest.raises(ckptstore.UnsupportedStateError, match=r"\['model'\]\['f'\]"):
                writer.save({"model": {"f": lambda: 1}}, step=1)
            assert sorted(tmp_path.rglob("*")) == before
            writer.save({"model": {}}, step=1)

    @pytest.mark.parametrize(
        "options",
        [
            {"framework": "jax"},
            {"into": {}, "mmap": True},
            {"framework": "numpy", "device": "cpu"},
            {"threads": 0},
            {"threads": -1},
            {"device": "nowhere", "framework": "torch"},
            {"device": "cuda:99", "framework": "torch"},
        ],
    )
    def test_bad_options(self, url: str, options: dict[str, Any]) -> None:
        store = fill(url, 1)
        with pytest.raises(ckptstore.UsageError):
            store.load(1, **options)

    def test_closed_writer(self, url: str) -> None:
        with ckptstore.open(url).writer() as writer:
            pass
        with pytest.raises(ckptstore.WriterError, match="closed"):
            writer.save({}, step=1)


class TestFailures:
    """The effects of a failed or interrupted save, and its errors."""

    @staticmethod
    def fail(monkeypatch: pytest.MonkeyPatch, *steps: int) -> threading.Event:
        """Let the segments of these numbers fail, the first one once the event is set."""
        original = MemoryBackend.open_sink
        count = iter(range(1, 100))
        gate = threading.Event()

        def failing(self: MemoryBackend, key: str, size_hint: int) -> Any:
            assert gate.wait(120)
            if (step := next(count)) in steps:
                raise ckptstore.StorageError(5, f"no disk for the {step}. segment")
            return original(self, key, size_hint)

        monkeypatch.setattr(MemoryBackend, "open_sink", failing)
        return gate

    def test_each_failure_is_heard_of_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = self.fail(monkeypatch, 1, 2, 3)
        with ckptstore.open(f"memory://{uuid.uuid4().hex}").writer(max_in_flight=4) as writer:
            pending = [writer.save_async({"w": torch.zeros(4)}, step=step) for step in (1, 2, 3)]
            gate.set()
            with pytest.raises(ckptstore.StorageError, match="no disk for the") as asked:
                pending[1].result()
            with pytest.raises(ckptstore.StorageError, match="no disk for the") as caught:
                writer.wait()  # seeing one of them hides no other
            own, note = caught.value.__notes__
            assert re.match(r"step [13] was not saved$", own)
            assert re.match(r"step [13] was not saved, either: \[Errno 5\] no disk for the \d\. segment$", note)
            # They are written at the same time, so either may be the first segment.
            told = [str(asked.value), str(caught.value), note]
            assert sorted(text[-10:] for text in told) == ["1. segment", "2. segment", "3. segment"]
            writer.wait()
            writer.save({"w": torch.zeros(4)}, step=2)

    def test_a_failure_that_was_seen_does_not_come_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail(monkeypatch, *range(1, 100, 2)).set()
        with ckptstore.open(f"memory://{uuid.uuid4().hex}").writer(poll_seconds=None) as writer:
            for step in range(1, 60, 2):
                with pytest.raises(ckptstore.StorageError):
                    writer.save_async({"w": torch.zeros(4)}, step=step).result()
                writer.save({}, step=step + 1)

    def test_a_timeout_leaves_the_failure_unseen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = threading.Event()

        def failing(self: MemoryBackend, key: str, size_hint: int) -> Any:
            gate.wait(120)
            raise ckptstore.StorageError(28, "no space")

        monkeypatch.setattr(MemoryBackend, "open_sink", failing)
        writer = ckptstore.open(f"memory://{uuid.uuid4().hex}").writer()
        pending = writer.save_async({"w": torch.zeros(4)}, step=1)
        with pytest.raises(TimeoutError, match="step 1"):
            pending.result(0.01)
        gate.set()
        with pytest.raises(ckptstore.StorageError):
            writer.close()

    def test_an_interrupted_save_async_does_not_block_the_next(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with ckptstore.open(url).writer(poll_seconds=None) as writer:
            inside.interrupt_lane(writer, monkeypatch)
            with pytest.raises(KeyboardInterrupt):
                writer.save_async({"w": torch.zeros(4)}, step=1)
            monkeypatch.undo()
            writer.save_async({"w": torch.ones(4)}, step=1).result(120)
        assert ckptstore.open(url).load(1)["w"].tolist() == [1] * 4

    @pytest.mark.parametrize("options", [{}, {"deltas": 1}], ids=["lanes", "one thread"])
    def test_an_interrupted_close_can_be_repeated(self, url: str, options: dict[str, Any]) -> None:
        """Ctrl-C while it waits for a medium that does not answer."""
        store = ckptstore.open(url)
        writer = store.writer(poll_seconds=None, **options)
        gate = hold(store, writer)
        state = {"w": torch.zeros(1 << 20)}
        pending = writer.save_async(state, step=1)

        def press() -> None:
            with contextlib.suppress(ckptstore.WriterClosedError):
                while True:
                    writer.prepare(state)
                    time.sleep(0.001)
            time.sleep(0.1)  # it is in `close`, and waits there by now
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            writer.close()
        pressing.join()
        assert not pending.done()
        gate.set()
        writer.close()
        assert pending.done()
        assert ckptstore.open(url).checkpoint().step == 1

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({"staging_bytes": 1 << 20}, "staging budget"),
            ({"staging_bytes": 0}, "staging budget"),
            ({"threads": 0}, "threads"),
            ({"max_in_flight": 0}, "max_in_flight"),
            ({"poll_seconds": 0}, "poll_seconds"),
            ({"deltas": 0}, "interval 0"),
            ({"deltas": "always"}, "interval 'always'"),
            ({"diffs": "auto"}, "diffs: 'auto'.*DiffOptions"),
        ],
    )
    def test_invalid_options_fence_nobody(self, url: str, options: dict[str, Any], complaint: str) -> None:
        store = ckptstore.open(url)
        with store.writer() as writer:
            with pytest.raises(ckptstore.UsageError, match=complaint):
                store.writer(**options)
            writer.save({}, step=1)
        assert len(store.terms()) == 1

    def test_segments_of_a_commit_that_was_not_sent_are_dropped(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = ckptstore.open(url)
        with store.writer(poll_seconds=None) as writer:
            create = type(store.backend).create

            def failing(backend: Any, key: str, data: bytes) -> None:
                if key.startswith("seg/"):
                    raise ckptstore.StorageError(28, "no space for the manifest", key)
                create(backend, key, data)

            with monkeypatch.context() as patched:
                patched.setattr(type(store.backend), "create", failing)
                patched.setattr(Patience, "pause", lambda _patience, _done: None)
                with pytest.raises(ckptstore.StorageError, match="no space for the manifest"):
                    writer.save({"w": torch.zeros(4)}, step=1, tags=MANY_TAGS)
            info = writer.save({"w": torch.zeros(4)}, step=1)
        catalog = store.view().catalog
        written = {key.rpartition("/")[2].partition(".")[0] for key in store.backend.list("seg/")}
        assert written - set(info.segments) <= catalog.dropped
        assert len(catalog.dropped) == 1

    def test_a_fork_cannot_use_its_parents_writer(self, tmp_path: Path) -> None:
        import multiprocessing

        with ckptstore.open(tmp_path / "store").writer(deltas=1, poll_seconds=None) as writer:
            writer.save({"w": torch.zeros(4)}, step=1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forks and threads
                child = multiprocessing.get_context("fork").Process(target=_misuse, args=(writer,))
                child.start()
            child.join(60)
            assert child.exitcode == 0
            writer.save({"w": torch.ones(4)}, step=2)
        assert ckptstore.open(tmp_path / "store").load(2)["w"].tolist() == [1] * 4


def _misuse(writer: Any) -> None:
    for call in (lambda: writer.save({}, 9), lambda: writer.save_async({}, 9), writer.wait):
        with pytest.raises(ckptstore.WriterClosedError, match="fork"):
            call()
    writer.close()


def test_upkeep_that_fails_fails_no_save_and_keeps_polling(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def broken(term: Any, prepare: Any) -> None:
        calls.append(1)
        raise ckptstore.CorruptLogError("a request cannot be read")

    monkeypatch.setattr("ckptstore.write.commits.requests.handle", broken)
    with ckptstore.open(url).writer(poll_seconds=0.01) as writer:
        writer.save({"n": 1}, step=1)  # pytest makes errors of warnings, in the writer's thread, too
        deadline = time.monotonic() + 120
        while len(calls) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(calls) >= 4
        writer.save({"n": 2}, step=2)
    assert ckptstore.open(url).load() == {"n": 2}
