"""A save whose snapshot is filled layer by layer: its contents, its waits, and its ends."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import uuid
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.state import FlatState
from ckptstore.store import Store
from ckptstore.write.capture.layerwise_save import Awaited, LayeredSave
from tests.waiting import once_it_waits
from tests.write import inside

LAYERS = {"first": ("a.w", "a.m"), "second": ("b.w",)}


def fresh_state(number: int = 0) -> dict[str, Any]:
    """Two layers, and a tensor and a number that are in none."""
    return {
        "a": {"w": np.arange(3000.0) + number, "m": np.full((5, 7), number, np.int32)},
        "b": {"w": np.full(9000, number, np.float32)},
        "rest": np.full(11, number),
        "step": number,
    }


def change(state: dict[str, Any], *names: str) -> None:
    for name in names:
        state[name[0]][name[2:]][:] += 1


def same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            same(found[key], wanted[key])
    else:
        np.testing.assert_array_equal(found, wanted)


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


class Held(NumpySource):
    """A tensor whose copy waits in the middle until the test releases it, or fails there."""

    def __init__(self, array: Any, error: BaseException | None = None) -> None:
        super().__init__(array)
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self.error = error

    def view(self) -> None:  # type: ignore[override]
        return None

    def read(self, offset: int, out: Any) -> None:
        middle = len(out) // 2
        super().read(offset, out[:middle])
        self.reached.set()
        assert self.goes_on.wait(60)
        if self.error is not None:
            raise self.error
        super().read(offset + middle, out[middle:])


# ---------------------------------------------------------------------------------------------------- its contents


@pytest.mark.parametrize(
    "options", [{}, {"deltas": DeltaOptions()}, {"diffs": DiffOptions(batch=2)}], ids=["full", "deltas", "diffs"]
)
def test_it_holds_what_a_blocking_save_would(store: ckptstore.Store, options: dict[str, Any]) -> None:
    other = ckptstore.open(f"memory://{uuid.uuid4().hex}")
    with store.writer(poll_seconds=None, **options) as writer, other.writer(poll_seconds=None) as reference:
        for step in range(1, 6):
            state = fresh_state(step)
            save = writer.begin(state, step, LAYERS)
            save.ready("second")
            pending = save.finish(state, metadata={"loss": 0.5}, tags=f"at-{step}")
            wanted = reference.save(state, step)
            save.wait()
            change(state, "a.w", "b.w")
            assert pending.result(60).state == wanted.state
    for step in range(1, 6):
        same(store.load(step), fresh_state(step))
        info = store.checkpoint(step)
        assert (info.metadata, info.tags) == ({"loss": 0.5}, (f"at-{step}",))


def test_a_layer_may_change_before_it_is_ready_and_after_its_own_gate(store: ckptstore.Store) -> None:
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS)
        change(state, "a.w", "a.m", "b.w")
        wanted = {**fresh_state(), "a": {name: one.copy() for name, one in state["a"].items()}, "step": 0}
        save.ready("first")
        save.wait("first")
        change(state, "a.w", "a.m")
        change(state, "b.w")
        wanted["b"] = {"w": state["b"]["w"].copy()}
        save.ready("second")
        save.wait("second")
        change(state, "b.w")
        pending = save.finish()
        state["rest"][:] = 99  # it was copied before finish returned
        pending.result(60)
    same(store.load(1), wanted)


def test_a_layer_is_waited_for_alone(store: ckptstore.Store) -> None:
    state = fresh_state()
    held = Held(state["b"]["w"])
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS)
        save.ready("second", {"b.w": held})
        assert held.reached.wait(60)
        save.ready("first")
        save.wait("first")
        change(state, "a.w", "a.m")
        assert [copy.ended is None for copy in save.copies()] == [False, True]
        once_it_waits(threading.current_thread(), "LayeredSave.wait", held.goes_on.set, later=0.05)
        assert save.wait("second") > 0.02
        change(state, "b.w")
        assert save.wait("second") == 0.0
        save.finish().result(60)
    same(store.load(1), fresh_state())


def test_nothing_is_committed_before_the_last_layer_is_there(store: ckptstore.Store) -> None:
    state = fresh_state()
    held = Held(state["b"]["w"])
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS)
        save.ready("second", {"b.w": held})
        pending = save.finish()
        with pytest.raises(TimeoutError):
            pending.result(0.2)
        assert not store.backend.list("seg/")
        held.goes_on.set()
        pending.result(60)
    same(store.load(1), fresh_state())


def test_a_layer_that_changed_after_its_copy_is_copied_again(store: ckptstore.Store) -> None:
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer, writer.begin(state, 1, LAYERS) as save:
        save.ready("first")
        save.wait("first")
        change(state, "a.w")
        save.ready("first")
        save.finish().result(60)
    same(store.load(1), state)


def test_two_copies_of_a_layer_are_never_made_at_once(store: ckptstore.Store) -> None:
    """The first, which is late, would overwrite the second's bytes with old ones."""
    state = fresh_state()
    held = Held(np.zeros_like(state["b"]["w"]))
    change(state, "b.w")
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS)
        save.ready("second", {"b.w": held})
        assert held.reached.wait(60)
        threading.Timer(0.1, held.goes_on.set).start()
        save.ready("second", {"b.w": NumpySource(state["b"]["w"])})
        assert held.goes_on.is_set()
        save.finish().result(60)
    same(store.load(1), state)


def test_only_the_form_has_to_be_known_before(store: ckptstore.Store) -> None:
    state = fresh_state()
    flat = ckptstore.FlatState(None, {name: NumpySource(one) for name, one in _arrays(state).items()})
    form = FlatState(None, {name: Awaited(one) for name, one in flat.tensors.items()})
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(form, 1, LAYERS)
        with pytest.raises(ckptstore.UsageError, match="before it was given"):
            save.rest()
        save.ready("first", {name: flat.tensors[name] for name in LAYERS["first"]})
        save.finish(state).result(60)
    same(store.load(1), state)


def _arrays(state: dict[str, Any]) -> dict[str, Any]:
    return {"a.w": state["a"]["w"], "a.m": state["a"]["m"], "b.w": state["b"]["w"], "rest": state["rest"]}


# ------------------------------------------------------------------------------------------------------- failures


def test_calls_that_cannot_begin(store: ckptstore.Store) -> None:
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer:
        for layers, why in (
            ({"x": ("a.w", "nowhere")}, "does not have: 'nowhere'"),
            ({"x": ("a.w",), "y": ("a.w",)}, "'a.w' is in layers 'x' and 'y'"),
        ):
            with pytest.raises(ckptstore.UsageError, match=why):
                writer.begin(state, 1, layers)
        save = writer.begin(state, 1, LAYERS)  # the step is free again
        for call in (
            lambda: writer.begin(state, 2, LAYERS),
            lambda: writer.save_async(state, 2),
            lambda: writer.save(state, 2),
        ):
            with pytest.raises(ckptstore.UsageError, match="step 1 has not ended: finish or abandon it"):
                call()
        with pytest.raises(ckptstore.UsageError, match="no layer 'third'; its layers: 'first', 'second'"):
            save.ready("third")
        with pytest.raises(ckptstore.UsageError, match=r"'b\.w' is not in layer 'first'"):
            save.ready("first", {"b.w": NumpySource(state["b"]["w"])})
        with pytest.raises(ckptstore.UsageError, match=r"'b.w' is F64 \[2\], and the save was begun with F32 \[9000\]"):
            save.ready("second", {"b.w": NumpySource(np.zeros(2))})
        with pytest.raises(ckptstore.UsageError, match=r"other tensors than it has now \('more'\)"):
            save.finish({**state, "more": np.zeros(3)})
        with pytest.raises(ckptstore.UsageError, match=r"'rest' is F64 \[11\], and the save was begun with I64 \[11\]"):
            save.finish({**state, "rest": np.full(11, 0.5)})
        with pytest.raises(ckptstore.UnsupportedStateError):
            save.finish({**state, "more": object()})
        save.finish(state).result(60)
        for call in (lambda: save.ready("first"), save.finish, save.rest):
            with pytest.raises(ckptstore.UsageError, match="was finished already"):
                call()
        assert save.wait() == 0.0
        with pytest.raises(ckptstore.StepOrderError):
            writer.begin(state, 1, LAYERS)
    same(store.load(1), state)


def test_an_error_of_a_copy_is_the_saves_and_not_the_gates(store: ckptstore.Store) -> None:
    state = fresh_state()
    held = Held(state["b"]["w"], OSError("the bus fell off"))
    held.goes_on.set()
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS)
        save.ready("second", {"b.w": held})
        save.wait("second")
        pending = save.finish()
        with pytest.raises(OSError, match="the bus fell off") as caught:
            pending.result(60)
        assert caught.value.__notes__ == ["while layer 'second' was copied for its snapshot"]
        assert not store.backend.list("seg/")
        writer.begin(state, 1, LAYERS).finish().result(60)  # its step and its memory are free
    same(store.load(1), state)


def test_a_failed_callback_after_a_copy_fails_the_save(store: ckptstore.Store) -> None:
    state = fresh_state()

    def complain() -> None:
        raise ValueError("it changed meanwhile")

    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS)
        save.ready("first", copied=complain)
        save.wait("first")
        with pytest.raises(ValueError, match="meanwhile"):
            save.finish().result(60)
        save = writer.begin(state, 2, LAYERS)
        save.ready("first", copied=complain)
        save.ready("first")  # the first copy no longer counts
        save.finish().result(60)
    assert [info.step for info in store.checkpoints()] == [2]


def test_an_abandoned_save_gives_step_and_memory_back(store: ckptstore.Store) -> None:
    state = fresh_state()
    held = Held(state["b"]["w"])
    with store.writer(poll_seconds=None) as writer:  # one snapshot at once
        with writer.begin(state, 1, LAYERS) as save:
            save.ready("second", {"b.w": held})
            assert held.reached.wait(60)
            threading.Timer(0.05, held.goes_on.set).start()
        assert not save.is_open
        assert held.goes_on.is_set()  # no thread reads the layer any more
        save.abandon()
        writer.save_async(state, 1).result(60)
    same(store.load(1), state)


class AbandonedBefore(NumpySource):
    """A tensor whose save another thread abandons, just before the tensor is copied.

    Attributes:
        abandoned: `abandon` has returned.
        late: it was read after that.
    """

    def __init__(self, array: Any, save: LayeredSave) -> None:
        super().__init__(array)
        self.abandoned, self.late = threading.Event(), False
        self.other = threading.Thread(target=self._abandon, args=(save,))

    def _abandon(self, save: LayeredSave) -> None:
        save.abandon()
        self.abandoned.set()

    def view(self) -> Any:
        if self.other.ident is not None:
            return super().view()
        self.other.start()
        self.abandoned.wait(0.1)
        return None  # so that the copy calls `read`

    def read(self, offset: int, out: Any) -> None:
        self.late |= self.abandoned.is_set()
        super().read(offset, out)


@pytest.mark.parametrize("call", ["ready", "rest", "finish"])
def test_nothing_is_copied_once_another_thread_has_abandoned_it(store: ckptstore.Store, call: str) -> None:
    """Its memory then belongs to another save."""
    state = fresh_state()
    flat = FlatState(None, {name: NumpySource(one) for name, one in _arrays(state).items()})
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(flat, 1, LAYERS)
        name = "b.w" if call == "ready" else "rest"
        source = AbandonedBefore(_arrays(state)[name], save)
        if call == "ready":
            save.ready("second", {name: source})
        else:
            getattr(save, call)(FlatState(None, {**flat.tensors, name: source}))
        source.other.join(60)
        save.wait()
        assert source.abandoned.is_set()
        assert not source.late
        assert not save.is_open


def test_a_save_that_was_lost_does_not_stop_the_next(store: ckptstore.Store) -> None:
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer:
        writer.begin(state, 1, LAYERS).ready("first")
        gc.collect()
        writer.begin(state, 1, LAYERS).finish().result(60)
    same(store.load(1), state)


def test_closing_abandons_what_is_not_finished(store: ckptstore.Store) -> None:
    state = fresh_state()
    writer = store.writer(poll_seconds=None)
    save = writer.begin(state, 1, LAYERS)
    save.ready("first")
    writer.close()
    for call in (lambda: save.ready("second"), save.finish):
        with pytest.raises(ckptstore.UsageError, match="was abandoned already"):
            call()
    assert save.wait() == 0.0
    with pytest.raises(ckptstore.WriterClosedError):
        writer.begin(state, 2, LAYERS)
    assert not store.checkpoints()


def test_closing_waits_for_what_is_finished(store: ckptstore.Store) -> None:
    state = fresh_state()
    held = Held(state["b"]["w"])
    writer = store.writer(poll_seconds=None)
    save = writer.begin(state, 1, LAYERS)
    save.ready("second", {"b.w": held})
    pending = save.finish()
    threading.Timer(0.1, held.goes_on.set).start()
    writer.close()
    assert pending.done()
    same(store.load(1), state)


def test_a_fenced_writer_says_so(store: ckptstore.Store) -> None:
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS)
        Store(store.backend).writer(poll_seconds=None).close()
        with pytest.raises(ckptstore.FencedError):
            save.finish().result(60)
        with pytest.raises(ckptstore.FencedError):
            writer.begin(state, 2, LAYERS)
    assert not store.checkpoints()


def test_a_writer_that_knows_that_it_is_fenced_finishes_none(store: ckptstore.Store) -> None:
    state = fresh_state()
    with store.writer(poll_seconds=None) as writer:
        writer.save(state, 1)
        save = writer.begin(state, 2, LAYERS)
        for layer in LAYERS:
            save.ready(layer)
        Store(store.backend).writer(poll_seconds=None).close()
        with pytest.raises(ckptstore.FencedError):
            writer.tag("late", 1)
        with pytest.raises(ckptstore.FencedError):
            save.finish()  # not only its result
        assert not save.is_open


def test_interrupted_while_it_is_handed_on(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    state = fresh_state()
    held = Held(state["b"]["w"])
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS)
        save.ready("second", {"b.w": held})
        assert held.reached.wait(60)
        threading.Timer(0.1, held.goes_on.set).start()
        with monkeypatch.context() as patch:
            inside.interrupt_before_submit(writer, patch)
            with pytest.raises(KeyboardInterrupt):
                save.finish()
        assert held.goes_on.is_set()  # the memory is free, and no thread writes to it any more
        assert not save.is_open
        writer.begin(state, 1, LAYERS).finish().result(60)
    same(store.load(1), state)


def _in_a_fork(save: Any, answer: Any) -> None:
    waited = save.wait()  # it would wait for ever: the threads are the parent's
    try:
        save.ready("first")
    except ckptstore.WriterClosedError:
        save.abandon()
        answer.put(waited)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_waits_for_nothing(store: ckptstore.Store) -> None:
    state = fresh_state()
    held = Held(state["b"]["w"])
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    with store.writer(poll_seconds=None) as writer:
        save = writer.begin(state, 1, LAYERS)
        save.ready("second", {"b.w": held})
        assert held.reached.wait(60)
        child = context.Process(target=_in_a_fork, args=(save, answer))
        child.start()
        try:
            assert answer.get(timeout=120) == 0.0
        finally:
            child.join(120)
            child.kill()
            held.goes_on.set()
        save.finish().result(60)
    same(store.load(1), state)
