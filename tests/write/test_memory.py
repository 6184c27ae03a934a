"""`memory=` with deltas and step diffs: the same bytes are stored, with little memory, whatever fails."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import CancelledError
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions, SaveMetrics, Update
from ckptstore.formats import optim
from ckptstore.formats.codecs import PAPER_POLICY, SMALL_POLICY
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host.arenas import LEAST
from ckptstore.write import delta_encoding
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.steps import bounded_step
from ckptstore.write.steps import step_encoding as step_encoding
from tests.forms import long_only
from tests.store.states import same
from tests.write import inside
from tests.write.medium import Medium
from tests.write.test_deltas import trajectory
from tests.write.trainer import Trainer

MIB = 1 << 20


def new() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)


def same_stored(left: ckptstore.Store, right: ckptstore.Store) -> None:
    """Assert that two stores hold the same checkpoints in the same payloads: lengths, places, hashes and digests."""
    assert [(one.step, one.kind) for one in left.checkpoints()] == [(one.step, one.kind) for one in right.checkpoints()]
    for one in left.checkpoints():
        stored = [[doc.tensors[one.step] for _, doc in store.describe(one.step)[-1:]] for store in (left, right)]
        assert stored[0] == stored[1], one.step


def check(store: ckptstore.Store, truth: dict[int, Any]) -> None:
    assert [info.step for info in store.checkpoints()] == sorted(truth)
    for step, state in truth.items():
        same(state, store.load(step, framework="numpy"))
    assert ckptstore.verify(store).ok


# -- the same as without


def train(
    steps: int, options: DiffOptions, how: dict[str, Any], **writer: Any
) -> tuple[ckptstore.Store, dict[int, Any]]:
    trainer, truth, store = Trainer(), {}, new()
    with store.writer(diffs=options, poll_seconds=None, **writer) as opened:
        for step in range(1, steps + 1):
            trainer.train(how.get("keep"))
            truth[step] = trainer.frozen()
            updates = trainer.updates(how.get("gradients", True))
            save = opened.save if step % 5 == 0 else opened.save_async
            save(trainer.state(), step, updates=updates)
    return store, truth


@pytest.mark.parametrize("how", [{}, {"gradients": False}, {"keep": 0.02}], ids=["dense", "none", "sparse"])
@pytest.mark.parametrize("batch", [1, 4])
def test_gradient_diffs_are_stored_as_without(batch: int, how: dict[str, Any]) -> None:
    options = DiffOptions(full_every=8, batch=batch)
    plain, _ = train(12, options, how)
    bounded, truth = train(12, options, how, memory=LEAST)
    same_stored(plain, bounded)
    for step, state in truth.items():
        same(state, bounded.load(step))
    assert ckptstore.verify(bounded).ok


@pytest.mark.parametrize(
    "options",
    [
        DeltaOptions(interval=1),
        DeltaOptions(interval=3),
        DeltaOptions(interval=3, form="paper"),
        DeltaOptions(interval=2, policy=SMALL_POLICY, compress_fulls=True),
        DeltaOptions(interval=2, policy=PAPER_POLICY),
        DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=3)),
    ],
    ids=["T=1", "T=3", "paper", "small", "paper-codecs", "depth"],
)
def test_deltas_are_stored_as_without(options: DeltaOptions) -> None:
    states = trajectory(9)
    stores = []
    for memory in (None, LEAST):
        stores.append(new())
        with stores[-1].writer(deltas=options, memory=memory, poll_seconds=None) as writer:
            for step, state in enumerate(states, 1):
                (writer.save if step % 3 else writer.save_async)(state, step)
    same_stored(*stores)
    for step, state in enumerate(states, 1):
        same(state, stores[1].load(step))
    assert ckptstore.verify(stores[1]).ok


def test_a_step_of_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that may be longer than a segment is divided before anything is encoded."""
    write = bounded_step.ArrivingStep.write
    monkeypatch.setattr(bounded_step.ArrivingStep, "write", lambda self, *what: write(self, *what, limit=1_000_000))
    store, truth = train(6, DiffOptions(full_every=9), {}, memory=LEAST)
    segments = [len(store.describe(step)) for step in truth]
    assert all(later - before > 1 for before, later in pairwise(segments))
    for step, state in truth.items():
        same(state, store.load(step))
    assert ckptstore.verify(store).ok


def test_tensors_longer_than_a_chunk_and_their_half_precision_copies() -> None:
    """The least memory holds a chunk and the part of the master from which it is derived."""
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.02, 8 * MIB + 1000).astype("<f4")
    truth, store = {}, new()
    told: list[SaveMetrics] = []
    with store.writer(deltas=1, memory=LEAST, poll_seconds=None, on_metrics=told.append) as writer:
        for step in (1, 2, 3):
            master = master * np.float32(1.001)
            half = master.astype(ml_dtypes.bfloat16)
            truth[step] = {"half": half, "master": master, "tied": master}
            writer.save_async(dict(truth[step]), step)
        assert inside.bounded_memory(writer).most <= LEAST
    check(store, truth)
    tensors = store.describe(3)[-1][1].tensors[3]
    assert tensors["half"].codec == "derive"
    assert set(tensors) == {"half", "master"}
    told.sort(key=lambda one: one.step)
    assert [one.kind for one in told] == ["full", "delta", "delta"]
    assert all(one.waited > 0 for one in told[1:])  # for its turn, and for memory: the state is larger


# -- memory


def test_one_state_is_held_beside_the_budget() -> None:
    store, trainer = new(), Trainer()
    with store.writer(diffs=DiffOptions(full_every=4), memory=LEAST, poll_seconds=None) as writer:
        for step in range(1, 10):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
            writer.wait()
            assert inside.snapshots_held(writer) == 1
        assert inside.bounded_memory(writer).used == 0


@pytest.mark.parametrize("mode", ["diffs", "deltas"])
def test_the_memory_of_a_process(tmp_path: Path, mode: str) -> None:
    """Without `memory` it is nearly three times the state."""
    script = _PEAK.format(path=str(tmp_path / "store"), mode=mode, memory=64 * MIB)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.9


@pytest.mark.parametrize(
    ("options", "copies"), [({"diffs": DiffOptions()}, 2), ({"deltas": DeltaOptions(memory=0)}, 1)]
)
def test_memory_of_what_stays_is_touched_with_that_of_the_first_save(options: dict[str, Any], copies: int) -> None:
    state = {"a": np.ones(32 * MIB, np.uint8)}
    with ckptstore.open(f"memory://{uuid.uuid4().hex}").writer(poll_seconds=None, **options) as writer:
        gc.collect()  # otherwise memory that other tests have left may be freed meanwhile
        before = resident()
        writer.prepare(state)
        until = time.monotonic() + 60
        while resident() - before < (copies - 0.2) * 32 * MIB and time.monotonic() < until:
            time.sleep(0.01)
        assert (copies - 0.2) * 32 * MIB < resident() - before < (copies + 0.8) * 32 * MIB


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


_PEAK = """
from pathlib import Path
import numpy as np
import ckptstore
from ckptstore import DiffOptions, Update
from ckptstore.formats import kernel_choice, optim
from ckptstore.formats.sources import NumpySource

kernel_choice.kind()  # its import takes memory, too

def figure(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

ADAM = optim.AdamW()
names = [f"w{{n}}" for n in range(8)]
rng = np.random.default_rng(0)
state = {{part: {{name: np.full(3 << 20, 1e-9, "<f4") for name in names}} for part in ("w", "m", "v")}}
gradients = {{name: rng.normal(0, 1e-3, 3 << 20).astype("<f4") for name in names}}
for name in names:
    state["w"][name][:] = gradients[name] * 20
size = 3 * 8 * (12 << 20)

def numbers(step):
    return optim.Step(count=step, lr=1e-4)

store = ckptstore.open({path!r}, create=True)
options = {{"diffs": DiffOptions(full_every=9)}} if {mode!r} == "diffs" else {{"deltas": 1}}
optim.advance(ADAM.rule(numbers(1)), [np.ones(9, "<f4") for _ in range(3)], np.ones(9, "<f4"))
own = figure("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
with store.writer(memory={memory}, poll_seconds=None, **options) as writer:
    writer.prepare(state)
    for step in range(1, 4):
        for name in names:
            moved = [state[part][name] for part in ("w", "m", "v")]
            optim.advance(ADAM.rule(numbers(step)), moved, gradients[name])
        updates = [Update(tuple(f"{{part}}.{{name}}" for part in ("w", "m", "v")), ADAM, numbers(step),
                          NumpySource(gradients[name])) for name in names]
        writer.save_async(state, step, updates=updates if {mode!r} == "diffs" else None)
kinds = {{info.kind for info in store.checkpoints()}}
assert len(kinds) == 2, kinds
print((figure("VmHWM") - own) / size)
"""


def adam(value: float, count: int) -> tuple[dict[str, Any], list[Update]]:
    """A parameter of so many numbers with its moments, and the update of its step."""
    state = {name: np.full(count, value, "<f4") for name in ("w", "m", "v")}
    gradient = NumpySource(np.full(count, 1e-3, "<f4"))
    return state, [Update(("w", "m", "v"), optim.AdamW(), optim.Step(count=1, lr=1e-3), gradient)]


def test_too_little_memory_for_one_unit_is_reported() -> None:
    """Three slots and the gradient of a chunk of numbers: 64 MiB."""
    store = new()
    rng = np.random.default_rng(0)
    state = {name: np.abs(rng.normal(0, 0.02, 4 * MIB)).astype("<f4") for name in ("w", "m", "v")}
    said = rf"memory: {LEAST} bytes; 'w' .* need {4 * 16 * MIB} at once"
    with store.writer(diffs=DiffOptions(), memory=LEAST, poll_seconds=None) as writer:
        for step in range(1, 5):
            _, updates = adam(0.0, 4 * MIB)
            rule = updates[0].optimizer.rule(updates[0].step)
            optim.advance(rule, list(state.values()), np.full(4 * MIB, 1e-3, "<f4"))
            if step % 2:
                assert writer.save(state, step, updates=updates).kind == "full"
                continue
            with pytest.raises(ckptstore.UsageError, match=said):
                (writer.save_async if step == 2 else writer.save)(state, step, updates=updates)
            writer.wait()  # does not warn of it
    assert [info.step for info in store.checkpoints()] == [1, 3]
    assert ckptstore.verify(store).ok


# -- states that change


def test_tensors_that_come_go_and_change_their_size() -> None:
    rng = np.random.default_rng(0)
    truth: dict[int, Any] = {}
    kinds = []
    store = new()
    wide = {f"w{n}": rng.standard_normal(30_000) for n in range(4)}
    with store.writer(diffs=DiffOptions(), memory=LEAST, poll_seconds=None) as writer:
        for step in range(1, 9):
            state: dict[str, Any] = {name: array + step for name, array in wide.items()}
            state |= {
                "grows": np.arange(step),
                f"only{step}": np.ones(3),
                "kind": np.zeros(40, ("<f4", "<i8")[step % 2]),
            }
            if step >= 5:
                state["large"] = rng.standard_normal(20_000)  # more than one byte in sixteen: the layout is new
            truth[step] = state
            kinds.append(writer.save(dict(state), step).kind)
    assert kinds == ["full", *["gradient"] * 3, "full", *["gradient"] * 3]
    check(store, truth)


def test_a_payload_that_is_too_long_makes_the_step_a_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that an optimizer moved otherwise than it reported is detected when the one before has been written."""
    rng = np.random.default_rng(0)
    truth: dict[int, Any] = {}
    kinds = []
    store = new()
    with store.writer(diffs=DiffOptions(), memory=160 * MIB, poll_seconds=None) as writer:
        for step in range(1, 5):
            state, updates = adam(step / 100, 5 * MIB)
            state["other"] = rng.standard_normal(1000)
            if step in (2, 4):  # in its second chunk
                for name in ("w", "m", "v"):
                    state[name][4 * MIB :] = rng.integers(0, 1 << 32, MIB, np.uint32).view("<f4")
            truth[step] = {name: array.copy() for name, array in state.items()}
            if step == 2:
                monkeypatch.setattr(step_encoding, "CHUNK", 10 * MIB)
            kinds.append(writer.save(state, step, updates=updates).kind)  # the fourth is known not to fit
    assert kinds == ["full", "full", "gradient", "gradient"]
    check(store, truth)


# -- failures


class Broken:
    """A tensor that cannot be copied while `fails`."""

    def __init__(self, array: Any) -> None:
        self._source = NumpySource(array)
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def view(self) -> None:
        return None

    def read(self, offset: int, out: Any) -> None:
        if self.fails and len(out) > MIB // 2:  # the part that is examined beforehand is smaller
            raise ZeroDivisionError
        self._source.read(offset, out)


def big(step: int) -> dict[str, Any]:
    return {f"w{n}": np.full(5 * MIB, step * 0.5 + n, "<f4") for n in range(3)}


OPTIONS: dict[str, dict[str, Any]] = {
    "deltas": {"deltas": DeltaOptions(interval=1)},
    "paper": {"deltas": DeltaOptions(interval=2, form="paper")},
    "diffs": {"diffs": DiffOptions()},
    "batch": {"diffs": DiffOptions(batch=3, seconds=None)},
}


def in_short(*chosen: str) -> list[object]:
    """The modes; CI tries only the chosen ones: one with deltas and one with step diffs."""
    return [mode if mode in chosen else pytest.param(mode, marks=long_only) for mode in OPTIONS]


def broken(state: dict[str, Any], name: str | None = None) -> FlatState:
    """A state of which the tensor `name` cannot be copied as a whole."""
    flat = bridge.flattened(state)
    tensors: dict[str, Any] = {one: Broken(state[one]) for one in flat.tensors}
    if name is not None:
        tensors[name].fails = True
    return FlatState(flat.tree, tensors)


@pytest.mark.parametrize("mode", in_short("paper", "batch"))
def test_a_failed_copy_is_reported_once_and_the_next_save_is_a_full(mode: str) -> None:
    store = new()
    with store.writer(memory=LEAST, poll_seconds=None, **OPTIONS[mode]) as writer:
        writer.save_async(broken(big(1)), 1)
        writer.save_async(broken(big(2)), 2)
        for _ in range(2):  # a delta or a diff, then a full: its step may be given again
            with pytest.raises(ZeroDivisionError):
                writer.save_async(broken(big(3), "w2"), 3)
            writer.wait()  # does not report it
            assert inside.bounded_memory(writer).used == 0
        assert writer.save(broken(big(3)), 3).kind == "full"
        assert writer.save(big(4), 4).kind in ("delta", "gradient")
    check(store, {step: big(step) for step in range(1, 5)})
    assert ckptstore.verify(store, deep=True).ok


@pytest.mark.parametrize("mode", in_short("deltas", "diffs"))
def test_a_medium_that_fails_midway(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is partly overwritten by then: it is not a base any more."""
    medium = Medium(monkeypatch, 40, held=False)
    store = new()
    truth: dict[int, Any] = {}
    with store.writer(memory=LEAST, poll_seconds=None, **OPTIONS[mode]) as writer:
        for step in (1, 2):
            truth[step] = random(step)
            writer.save(dict(truth[step]), step)
        medium.fails = {medium.opened}
        with pytest.raises(ckptstore.StorageError, match="no space"):
            writer.save(random(3), 3)
        assert inside.bounded_memory(writer).used == 0
        truth[3] = random(3)
        assert writer.save(dict(truth[3]), 3).kind == "full"
        truth[4] = random(4)
        assert writer.save(dict(truth[4]), 4).kind in ("delta", "gradient")
    check(store, truth)


def random(step: int) -> dict[str, Any]:
    """A state of which half changes incompressibly."""
    rng = np.random.default_rng(step)
    return {"same": np.ones(4 * MIB, "<f4"), "other": rng.integers(0, 1 << 32, 4 * MIB, np.uint32)}


@pytest.mark.parametrize("mode", ["deltas", "diffs"])
def test_a_slow_medium_gets_the_encoded_bytes(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompressed data outlives the memory that it was copied to."""
    Medium(monkeypatch, 9, held=False).delay = 0.05
    store = new()
    truth: dict[int, Any] = {}
    with store.writer(memory=LEAST, staging_bytes=32 * MIB, poll_seconds=None, **OPTIONS[mode]) as writer:
        for step in (1, 2):
            rng = np.random.default_rng(step)
            truth[step] = {f"w{n}": rng.integers(0, 1 << 32, 4 * MIB, np.uint32) for n in range(6)}
            writer.save(dict(truth[step]), step)
    assert store.checkpoints()[-1].kind != "full"
    check(store, truth)


@pytest.mark.parametrize("mode", in_short("paper", "batch"))
def test_an_unencodable_tensor_fails_only_its_save(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new()
    truth: dict[int, Any] = {}
    with store.writer(memory=LEAST, poll_seconds=None, **OPTIONS[mode]) as writer:
        for step in (1, 2):
            truth[step] = random(step)
            writer.save_async(dict(truth[step]), step)
        writer.wait()
        code, calls = delta_encoding.code_group, []

        def fails(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError("none left")
            return code(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(delta_encoding, "code_group", fails)
            pending = writer.save_async(random(3), 3)
            with pytest.raises(MemoryError, match="none left"):
                pending.result(60)
        assert inside.bounded_memory(writer).used == 0
        truth[3] = random(3)
        assert writer.save(dict(truth[3]), 3).kind == "full"
        truth[4] = random(4)
        assert writer.save(dict(truth[4]), 4).kind in ("delta", "gradient")
    check(store, truth)


def test_waiting_steps_survive_a_failed_step() -> None:
    """Its digests are of its own bytes, not of memory that the failed step has begun to overwrite."""
    store = new()
    truth: dict[int, Any] = {}
    with store.writer(memory=LEAST, poll_seconds=None, **OPTIONS["batch"]) as writer:
        for step in (1, 2):
            truth[step] = random(step)
            pending = writer.save_async(dict(truth[step]), step)
        with pytest.raises(ZeroDivisionError):
            writer.save_async(broken({**random(3), "z": np.ones(MIB // 8)}, "z"), 3)
        assert not pending.done()
        truth[4] = random(4)
        assert writer.save(dict(truth[4]), 4).kind == "full"
        assert pending.result(60).kind == "gradient"
    check(store, truth)
    assert ckptstore.verify(store, deep=True).ok


def test_a_delta_that_is_cancelled_makes_the_next_one_a_full(monkeypatch: pytest.MonkeyPatch) -> None:
    medium = Medium(monkeypatch, 20, held=False)
    store = new()
    truth = {1: random(1), 3: random(3), 4: random(4)}
    with store.writer(memory=LEAST, poll_seconds=None, deltas=DeltaOptions(interval=1)) as writer:
        writer.save(dict(truth[1]), 1)
        medium.may[medium.opened].clear()
        pending = writer.save_async(random(2), 2)
        assert pending.cancel()
        for may in medium.may:
            may.set()
        with pytest.raises(CancelledError):
            pending.result(60)
        assert writer.save(dict(truth[3]), 3).kind == "full"
        assert writer.save(dict(truth[4]), 4).kind == "delta"
    check(store, truth)


def test_a_gradient_diff_cannot_be_cancelled() -> None:
    store = new()
    with store.writer(memory=LEAST, poll_seconds=None, diffs=DiffOptions()) as writer:
        writer.save(random(1), 1)
        pending = writer.save_async(random(2), 2)
        assert not pending.cancel()
        assert pending.result(60).kind == "gradient"


@pytest.mark.parametrize("mode", in_short("deltas", "batch"))
def test_saves_of_several_threads_wait_for_their_turn(mode: str) -> None:
    store = new()
    truth = {step: random(step) for step in range(1, 7)}
    with store.writer(memory=LEAST, poll_seconds=None, max_in_flight=4, **OPTIONS[mode]) as writer:
        writer.save_async(dict(truth[1]), 1)
        threads = []
        for step in range(2, 7):
            given = threading.Event()
            threads.append(threading.Thread(target=saver(writer, dict(truth[step]), step, given)))
            threads[-1].start()
            assert given.wait(60)
            time.sleep(0.02)  # most of them meet in this order; the others are refused
        for thread in threads:
            thread.join()
    stored = [info.step for info in store.checkpoints()]
    assert stored[:1] == [1]
    assert len(stored) > 1
    check(store, {step: truth[step] for step in stored})


def saver(writer: ckptstore.Writer, state: dict[str, Any], step: int, given: threading.Event) -> Callable[[], None]:
    def run() -> None:
        given.set()
        with contextlib.suppress(ckptstore.StepOrderError):
            writer.save_async(state, step)

    return run


@pytest.mark.parametrize("mode", in_short("paper", "diffs"))
def test_going_back(mode: str) -> None:
    store = new()
    with store.writer(memory=LEAST, poll_seconds=None, **OPTIONS[mode]) as writer:
        for step in (1, 2, 3):
            writer.save_async(random(step), step)
        writer.rollback(1)
        kinds = [writer.save(random(10 * step), step).kind for step in (2, 3)]
        term = writer.term
        assert inside.snapshots_held(writer) == (2 if mode == "paper" else 1)
    assert kinds == ["full", kinds[1]]
    assert kinds[1] != "full"
    for step in (2, 3):
        same(random(10 * step), store.load(f"{step}@{term}", framework="numpy"))
    assert ckptstore.verify(store).ok


def test_layers_are_no_units() -> None:
    with new().writer(memory=LEAST, poll_seconds=None, deltas=1) as writer:
        with pytest.raises(ckptstore.UsageError, match=r"begin: .* leave out memory="):
            writer.begin(random(1), 1, {"one": ["same"]})
        writer.save(random(1), 1)


def test_ctrl_c_while_it_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer owns its tensors again when it raises, and the step may be given again."""
    medium = Medium(monkeypatch, 20, held=False)
    store = new()
    truth = {1: random(1), 2: random(2), 3: random(3)}
    with store.writer(memory=LEAST, poll_seconds=None, deltas=1, max_in_flight=2) as writer:
        medium.may[0].clear()
        writer.save_async(dict(truth[1]), 1)  # a full, which does not become durable yet
        with monkeypatch.context() as patched:
            inside.interrupt_feeding(patched)
            with pytest.raises(KeyboardInterrupt):
                writer.save_async(random(9), 2)
        medium.may[0].set()
        assert writer.save(dict(truth[2]), 2).kind == "delta"
        assert writer.save(dict(truth[3]), 3).kind == "delta"
    check(store, truth)
