"""`memory=` with `group=`: ranks store the same with little memory as without a limit, whatever fails.

Threads as ranks, numpy tensors; at the end real process groups (gloo), whose memory is measured.
"""

from __future__ import annotations

import functools
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions, FailedRankError, RankOptions, SaveMetrics, Update, UsageError
from ckptstore.formats import optim
from ckptstore.formats.sources import BoxSource, NumpySource
from ckptstore.formats.states.state import FlatState, flatten
from ckptstore.host.arenas import LEAST
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.steps import step_encoding as step_encoding
from tests.forms import in_turn, long_only
from tests.store.states import same
from tests.write import inside
from tests.write.medium import Medium
from tests.write.rank_threads import as_ranks
from tests.write.test_rank_diffs import sharded, trainer, truths
from tests.write.trainer import ADAM

MIB = 1 << 20
OPTIONS = RankOptions(timeout=120, per_rank="own")
CODED: dict[str, dict[str, Any]] = {
    "plain": {},
    "deltas": {"deltas": DeltaOptions(interval=1)},
    "anchor": {"deltas": DeltaOptions(interval=3)},
    "paper": {"deltas": DeltaOptions(interval=2, form="paper", compress_fulls=True)},
    "diffs": {"diffs": DiffOptions(full_every=6)},
    "batch": {"diffs": DiffOptions(full_every=6, batch=3)},
}
DIFFERENT = ("plain", "deltas", "batch")
"""Each of these takes another path through the writer; the others are variants of them."""
IN_TURN = [mode if mode in DIFFERENT else pytest.param(mode, marks=long_only) for mode in CODED]
"""All modes; in CI only the different ones."""


def rows(group: Group, whole: np.ndarray[Any, Any]) -> tuple[slice, int]:
    bounds = [len(whole) * place // group.size for place in range(group.size + 1)]
    return slice(bounds[group.rank], bounds[group.rank + 1]), bounds[group.rank]


def box(group: Group, whole: np.ndarray[Any, Any]) -> BoxSource:
    """This rank's rows."""
    where, first = rows(group, whole)
    part = np.ascontiguousarray(whole[where])
    return BoxSource(NumpySource(part), part.shape, 0, whole.shape, (first,) + (0,) * (whole.ndim - 1))


def stored(store: ckptstore.Store, step: int) -> list[Any]:
    """Each rank's segments of a step: places, lengths, hashes, codecs, digests."""
    return [doc.tensors[step] for _, doc in store.describe(step) if step in doc.tensors]


def same_stored(left: ckptstore.Store, right: ckptstore.Store) -> None:
    assert [(one.step, one.kind) for one in left.checkpoints()] == [(one.step, one.kind) for one in right.checkpoints()]
    for one in left.checkpoints():
        assert stored(left, one.step) == stored(right, one.step), one.step


def train(path: Path, mode: str, memory: int | None, *, shards: bool, keep: float | None = None) -> list[Any]:
    """Three ranks save ten steps, some of them at once."""

    def work(group: Group) -> list[str]:
        model = trainer()
        pending: list[Any] = []
        how = {**CODED[mode], "memory": memory, "max_in_flight": 2, "ranks": OPTIONS}
        with ckptstore.open(path).writer(group=group, **how) as writer:
            for step in range(1, 11):
                model.train(keep)
                flat, updates = sharded(group, model) if shards else (flatten(model.state()), model.updates())
                told = updates if "diffs" in how else None
                if step % 4 == 0:
                    assert writer.save(flat, step, updates=told).step == step
                else:
                    pending.append(writer.save_async(flat, step, updates=told))
        return [one.result().kind for one in pending]

    return as_ranks(3, work)


@pytest.mark.parametrize(("mode", "shards"), in_turn(list(CODED), [False, True]))
def test_ranks_store_what_they_store_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, shards: bool
) -> None:
    monkeypatch.setattr("ckptstore.write.ranks.division.CUT_FROM", 4096)
    found = [train(tmp_path / str(memory), mode, memory, shards=shards) for memory in (None, LEAST)]
    assert found[0] == found[1]
    plain, bounded = (ckptstore.open(tmp_path / str(memory)) for memory in (None, LEAST))
    same_stored(plain, bounded)
    for step, truth in truths(10).items():
        same(bounded.load(step), truth)
    assert bounded.verify(deep=True).ok


def test_sparse_gradients_are_taken_as_a_whole(tmp_path: Path) -> None:
    found = [train(tmp_path / str(memory), "batch", memory, shards=False, keep=0.02) for memory in (None, LEAST)]
    assert found[0] == found[1]
    plain, bounded = (ckptstore.open(tmp_path / str(memory)) for memory in (None, LEAST))
    same_stored(plain, bounded)
    for step, truth in truths(10, 0.02).items():
        same(bounded.load(step), truth)


@functools.lru_cache(maxsize=4)  # each rank requests it, and so does the comparing reader
def _large(step: int) -> np.ndarray[Any, Any]:
    bits = np.random.default_rng(step).integers(0, 1 << 32, (7, 4, MIB), np.uint32)
    bits[:, 0] = 7  # the unchanged part
    bits.flags.writeable = False
    return bits


def large(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """112 MiB, of which two ranks have more than the least memory each."""
    return {"w": _large(step)}


def parts(group: Group, whole: dict[str, np.ndarray[Any, Any]]) -> FlatState:
    flat = flatten(dict(whole))
    for name, array in whole.items():
        flat.tensors[name] = box(group, array)
    return flat


@pytest.mark.parametrize("mode", ["plain", "deltas"])
def test_a_share_larger_than_its_memory_waits_with_a_warning(tmp_path: Path, mode: str) -> None:
    """Each rank uses no more than the budget, and training may change the state when the call returns."""
    truth = {step: large(step) for step in (1, 2, 3)}
    told: dict[int, list[SaveMetrics]] = {0: [], 1: []}

    def work(group: Group) -> int:
        tell = told[group.rank].append
        how = {**CODED[mode], "memory": LEAST, "on_metrics": tell, "max_in_flight": 2, "ranks": OPTIONS}
        with ckptstore.open(tmp_path).writer(group=group, **how) as writer:
            for step, whole in truth.items():
                own = {name: array.copy() for name, array in whole.items()}
                writer.save_async(parts(group, own), step)
                for array in own.values():
                    array.view(np.uint8)[:] = 255
        return inside.rank_memory(writer).most

    most = as_ranks(2, work)
    assert all(MIB < one <= LEAST for one in most), most
    store = ckptstore.open(tmp_path)
    for step, whole in truth.items():
        same(dict(whole), store.load(step, framework="numpy"))
    for metrics in told.values():
        metrics.sort(key=lambda one: one.step)
        assert [one.step for one in metrics] == [1, 2, 3]
        for one in metrics[1:]:
            assert 0 < one.waited <= one.stall
        assert {one.nbytes for one in metrics} <= {3 * 16 * MIB, 4 * 16 * MIB}  # of its share


# -- failures


class Broken:
    """A tensor that cannot be copied while `error` is set."""

    def __init__(self, array: Any, error: type[BaseException] | None = None) -> None:
        self._source = NumpySource(array)
        self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def view(self) -> None:
        return None

    def read(self, offset: int, out: Any) -> None:
        # The part that is examined beforehand, and digested, is smaller.
        if self.error is not None and len(out) > MIB // 2:
            raise self.error
        self._source.read(offset, out)


def shards_of(group: Group, step: int, error: type[BaseException] | None = None) -> FlatState:
    """The rows that a rank has of `whole_of`; those of "b" cannot be copied."""
    whole = whole_of(step)
    flat = flatten(dict(whole))
    for name, array in whole.items():
        where, first = rows(group, array)
        part: Any = Broken(np.ascontiguousarray(array[where]), error if name == "b" else None)
        flat.tensors[name] = BoxSource(part, part.shape, 0, array.shape, (first, 0))
    return flat


@functools.lru_cache(maxsize=16)
def _random(seed: int) -> np.ndarray[Any, Any]:
    """8 MiB."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, (2, MIB), np.uint32)
    bits.flags.writeable = False
    return bits


def whole_of(step: int) -> dict[str, Any]:
    """Incompressible data; half of it changes."""
    return {"a": _random(0), "b": _random(step)}


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    yield
    _large.cache_clear()
    _random.cache_clear()


def check(path: Path, steps: set[int]) -> None:
    store = ckptstore.open(path)
    assert {info.step for info in store.checkpoints()} == steps
    for step in steps:
        same(whole_of(step), store.load(step, framework="numpy"))
    assert store.verify(deep=True).ok


def met(error: type[Exception], save: Callable[..., Any], *what: Any) -> Exception:
    """The error of a save, `save` or `save_async`."""
    with pytest.raises(error) as found:
        save(*what).result(60)
    return found.value


@pytest.mark.parametrize(("mode", "who"), in_turn(list(CODED), [0, 1]))
def test_a_failed_copy_is_reported_once_on_that_rank_and_on_the_others(tmp_path: Path, mode: str, who: int) -> None:
    """No save builds on the changed base; and the step may be saved again."""

    def work(group: Group) -> list[str]:
        kinds = []
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, memory=LEAST, **CODED[mode]) as writer:
            kinds += [writer.save(shards_of(group, step), step).kind for step in (1, 2)]
            for attempt in range(2):
                save = writer.save_async if attempt == 0 or mode == "plain" else writer.save
                if group.rank == who:
                    with pytest.raises(ZeroDivisionError):
                        save(shards_of(group, 3, ZeroDivisionError), 3)
                else:
                    assert f"rank {who}: ZeroDivisionError" in str(met(FailedRankError, save, shards_of(group, 3), 3))
                writer.wait()  # does not report it
            kinds += [writer.save_async(shards_of(group, step), step).result(60).kind for step in (3, 4)]
        assert inside.rank_memory(writer).used == 0
        return kinds

    found = as_ranks(2, work)
    assert found[0] == found[1], found
    assert found[0][2] == "full"
    assert mode == "plain" or found[0][3] in ("delta", "gradient")
    check(tmp_path, {1, 2, 3, 4})


@pytest.mark.parametrize("mode", IN_TURN)
def test_ctrl_c_while_a_share_is_copied(tmp_path: Path, mode: str) -> None:
    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, memory=LEAST, **CODED[mode]) as writer:
            for step in (1, 2):
                writer.save(shards_of(group, step), step)
            if group.rank == 1:
                with pytest.raises(KeyboardInterrupt):
                    writer.save_async(shards_of(group, 3, KeyboardInterrupt), 3)
            else:
                with pytest.raises(FailedRankError, match="rank 1: KeyboardInterrupt"):
                    writer.save_async(shards_of(group, 3), 3).result(60)
            assert writer.save(shards_of(group, 4), 4).kind == "full"
            writer.save_async(shards_of(group, 5), 5)

    assert as_ranks(2, work) == [None] * 2
    check(tmp_path, {1, 2, 4, 5})


def test_ctrl_c_while_a_share_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks hear of it at once: they do not wait for a part that never comes."""

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, memory=LEAST, max_in_flight=2) as writer:
            writer.save(shards_of(group, 1), 1)
            with monkeypatch.context() as patch:
                if group.rank == 1:
                    inside.interrupt_turn(writer, patch)
                    with pytest.raises(KeyboardInterrupt):
                        writer.save_async(shards_of(group, 2), 2)
                else:
                    with pytest.raises(FailedRankError, match="rank 1: KeyboardInterrupt"):
                        writer.save_async(shards_of(group, 2), 2).result(60)
            writer.save_async(shards_of(group, 3), 3).result(60)
        assert inside.rank_memory(writer).used == 0

    assert as_ranks(2, work) == [None] * 2
    check(tmp_path, {1, 3})


@pytest.mark.parametrize("mode", ["plain", "deltas", "batch"])
def test_a_medium_that_fails_midway_frees_waiting_saves(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The caller waits for memory that the failed write will not free."""
    medium = Medium(monkeypatch, 99, held=False)
    place = f"memory://{uuid.uuid4().hex}"

    def turn() -> None:
        medium.fails = set() if medium.fails else set(range(99))

    met = threading.Barrier(2, turn, timeout=60)

    def work(group: Group) -> None:
        with ckptstore.open(place).writer(group=group, ranks=OPTIONS, memory=LEAST, **CODED[mode]) as writer:
            for step in (1, 2):
                writer.save(parts(group, large(step)), step)
            met.wait()
            with pytest.raises(ckptstore.CkptError, match="no space"):
                writer.save_async(parts(group, large(3)), 3).result(60)
            writer.wait()
            assert inside.rank_memory(writer).used == 0
            met.wait()
            assert writer.save(parts(group, large(3)), 3).kind == "full"

    assert as_ranks(2, work) == [None] * 2
    store = ckptstore.open(place)
    for step in (1, 2, 3):
        same(dict(large(step)), store.load(step, framework="numpy"))


def adam(step: int, count: int) -> tuple[dict[str, Any], list[Update]]:
    """A parameter with its moments after some steps, and the update of the last."""
    state = {name: np.full(count, 0.02, "<f4") for name in ("w", "m", "v")}
    gradient = np.full(count, 1e-3, "<f4")
    for number in range(1, step + 1):
        optim.advance(ADAM.rule(optim.Step(count=number, lr=1e-3)), list(state.values()), gradient)
    return state, [Update(("w", "m", "v"), ADAM, optim.Step(count=step, lr=1e-3), NumpySource(gradient))]


def test_too_little_memory_on_one_rank_is_reported_there_and_on_the_others(tmp_path: Path) -> None:
    """Three slots and the gradient of a chunk of numbers: 64 MiB."""

    def work(group: Group) -> None:
        chance = np.random.default_rng(0)
        state = {name: np.abs(chance.normal(0, 0.02, 8 * MIB)).astype("<f4") for name in ("w", "m", "v")}
        memory = LEAST if group.rank == 1 else 4 * LEAST
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=DiffOptions(), memory=memory) as writer:
            for step in range(1, 4):
                _, updates = adam(step, 8 * MIB)
                rule = ADAM.rule(updates[0].step)
                optim.advance(rule, list(state.values()), np.full(8 * MIB, 1e-3, "<f4"))
                flat = flatten(dict(state))
                for name, array in state.items():
                    flat.tensors[name] = box(group, array)
                assert isinstance(updates[0].gradient, NumpySource)
                where, _ = rows(group, state["w"])
                updates = [replace(updates[0], gradient=NumpySource(updates[0].gradient.array[where].copy()))]
                if step != 2:
                    assert writer.save(flat, step, updates=updates).kind == "full"
                elif group.rank == 1:
                    with pytest.raises(UsageError, match=rf"memory: {LEAST} bytes; 'w' .* need {64 * MIB} at once"):
                        writer.save_async(flat, step, updates=updates)
                else:
                    with pytest.raises(FailedRankError, match=r"rank 1: UsageError: memory"):
                        writer.save(flat, step, updates=updates)

    assert as_ranks(2, work) == [None] * 2
    store = ckptstore.open(tmp_path)
    assert [info.step for info in store.checkpoints()] == [1, 3]
    assert store.verify().ok


def test_a_step_that_turns_out_too_long_is_encoded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank cannot make it a full: all others encode it as a diff. Nothing is lost, and the next is a diff again."""
    rng = np.random.default_rng(0)
    truth: dict[int, Any] = {}
    for step in (1, 2, 3):
        truth[step] = adam(step, 10 * MIB)[0]
        if step == 2:  # in the second chunk of rank 1's half
            for array in truth[step].values():
                array[9 * MIB :] = rng.integers(0, 1 << 32, MIB, np.uint32).view("<f4")
    monkeypatch.setattr(step_encoding, "CHUNK", 10 * MIB)

    def work(group: Group) -> list[str]:
        kinds = []
        with ckptstore.open(tmp_path).writer(
            group=group, ranks=OPTIONS, diffs=DiffOptions(), memory=160 * MIB
        ) as writer:
            for step, state in truth.items():
                flat = flatten(dict(state))
                for name, array in state.items():
                    flat.tensors[name] = box(group, array)
                numbers = optim.Step(count=step, lr=1e-3)
                gradient = NumpySource(np.full(5 * MIB, 1e-3, "<f4"))
                kinds.append(writer.save(flat, step, updates=[Update(("w", "m", "v"), ADAM, numbers, gradient)]).kind)
        return kinds

    assert as_ranks(2, work) == [["full", "gradient", "gradient"]] * 2
    store = ckptstore.open(tmp_path)
    codecs = [{entry.codec for entry in tensors.values()} for tensors in stored(store, 2)]
    assert {"step"} in codecs
    assert any("step" not in one for one in codecs)
    for step, state in truth.items():
        same(state, store.load(step, framework="numpy"))
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("mode", IN_TURN[1:])
def test_a_rank_s_own_tensors_may_change_their_sizes(tmp_path: Path, mode: str) -> None:
    """No other rank need agree to that; its share gets its own memory, and no full is due."""

    def state(rank: int, step: int) -> dict[str, Any]:
        return {"same": np.arange(5000.0) + step, "own": np.full(1000 * step * (1 + rank), step + rank)}

    def work(group: Group) -> list[str]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, memory=LEAST, **CODED[mode]) as writer:
            return [writer.save(state(group.rank, step), step).kind for step in range(1, 6)]

    found = as_ranks(2, work)
    assert found[0] == found[1]
    assert found[0].count("full") == 1, found[0]
    store = ckptstore.open(tmp_path)
    for step in range(1, 6):
        for rank in range(2):
            same(state(rank, step), store.load(step, rank=rank, framework="numpy"))
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("mode", IN_TURN)
def test_a_rank_of_which_nothing_is_stored(tmp_path: Path, mode: str) -> None:
    def work(group: Group) -> list[str]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, memory=LEAST, **CODED[mode]) as writer:
            pending = [writer.save_async({"only": np.arange(100.0) + step}, step) for step in range(1, 5)]
            return [one.result(60).kind for one in pending]

    found = as_ranks(3, work)
    assert found[0] == found[1] == found[2]
    for step in range(1, 5):
        same({"only": np.arange(100.0) + step}, ckptstore.open(tmp_path).load(step, framework="numpy"))


@pytest.mark.parametrize("mode", IN_TURN)
def test_going_back(tmp_path: Path, mode: str) -> None:
    def work(group: Group) -> list[str]:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, memory=LEAST, **CODED[mode]) as writer:
            for step in (1, 2, 3):
                writer.save_async(shards_of(group, step), step)
            writer.wait()
            writer.rollback(1)
            return [writer.save(shards_of(group, 10 * step), step).kind for step in (2, 3)]

    found = as_ranks(2, work)
    assert found[0] == found[1]
    assert found[0][0] == "full"
    store = ckptstore.open(tmp_path)
    for step in (2, 3):
        same(whole_of(10 * step), store.load(f"{step}@2", framework="numpy"))
    assert store.verify(deep=True).ok


class Announced(Broken):
    """Reports when it is copied."""

    def __init__(self, array: Any, copied: threading.Event) -> None:
        super().__init__(array)
        self._copied = copied

    def read(self, offset: int, out: Any) -> None:
        self._copied.set()
        super().read(offset, out)


def test_saves_of_several_threads_of_a_rank_are_copied_in_turn(tmp_path: Path) -> None:
    """Prevents: each holding memory for which the other waits, while one thread writes."""

    def work(group: Group) -> None:
        how: dict[str, Any] = {"memory": LEAST, "max_in_flight": 4, "ranks": OPTIONS}
        with ckptstore.open(tmp_path).writer(group=group, **how) as writer:
            writer.save(parts(group, large(1)), 1)
            threads = []
            for step in (2, 3, 4):
                whole, copied = large(step), threading.Event()
                flat = parts(group, whole)
                where, first = rows(group, whole["w"])
                part: Any = Announced(np.ascontiguousarray(whole["w"][where]), copied)
                flat.tensors["w"] = BoxSource(part, part.shape, 0, whole["w"].shape, (first, 0, 0))
                threads.append(threading.Thread(target=writer.save_async, args=(flat, step)))
                threads[-1].start()
                assert copied.wait(60)
            for thread in threads:
                thread.join()

    assert as_ranks(2, work) == [None] * 2
    store = ckptstore.open(tmp_path)
    assert [info.step for info in store.checkpoints()] == [1, 2, 3, 4]
    for step in (2, 3, 4):
        same(dict(large(step)), store.load(step, framework="numpy"))


def test_inconsistent_options_are_reported_before_anything_is_saved(tmp_path: Path) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("but not with both", {"deltas": 1, "diffs": DiffOptions()}),
        (r"not with DeltaOptions\(memory", {"deltas": DeltaOptions(memory=0)}),
        ("accumulate='sum'", {"diffs": DiffOptions(accumulate="sum")}),
        (f"at least {LEAST} are needed", {"memory": LEAST - 1}),
    ]
    from ckptstore.write.ranks.messages.key_value_store import LocalMailbox

    for said, how in refused:
        with pytest.raises(UsageError, match=said):
            ckptstore.open(tmp_path).writer(group=Group(0, 1, LocalMailbox()), **{"memory": LEAST, **how})
    assert not (tmp_path / "FORMAT").exists()


# -- processes

SHARE = 96 * MIB
"""Bytes of each rank in the scenario `bounded_memory` of `rank_job`."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch.distributed.tensor")
    from tests.write.test_rank_processes import run

    folder = tmp_path_factory.mktemp("bounded")
    run(folder, ["bounded_memory"], size=2)
    return folder


@pytest.mark.parametrize("mode", ["plain", "deltas", "diffs"])
def test_the_memory_of_a_groups_processes(job: Path, mode: str) -> None:
    """Of plain fulls half a share, the budget; without it a share. For encoded saves only the bits are checked."""
    for rank in range(2 if mode == "plain" else 0):  # the allocator keeps the encoders' memory for a while
        told = json.loads((job / f"bounded-{mode}-{rank}.json").read_text())
        assert told["bounded"] < 0.8 * SHARE < told["free"], told
    store = ckptstore.open(job / f"bounded-{mode}")
    kinds = {info.kind for info in store.checkpoints()}
    assert kinds == {"plain": {"full"}, "deltas": {"full", "delta"}, "diffs": {"full", "gradient"}}[mode]
    import torch

    expected = torch.load(job / f"bounded-{mode}.pt", weights_only=True)
    loaded = store.load("latest")
    assert all(torch.equal(loaded["w"][name], tensor) for name, tensor in expected.items())
    assert store.verify().ok
