"""Following a run: only new data is read, every yielded checkpoint is whole, and no fault costs a bit."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import CorruptSegmentError, Followed, Store, Update, UsageError
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.formats import codecs, optim
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.state import flatten
from tests.following.conftest import Opener
from tools.golden.shard_stores import ShardStore, by_rank, columns, cut

STEPS = 6
ADAM = optim.AdamW(weight_decay=0.1)


def state(step: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((400, 300)).astype(np.float32)
    weight[step % 400] += np.float32(step)
    return {"model": {"weight": weight, "table": np.arange(900)}, "opt": {"m": rng.standard_normal(50)}, "step": step}


def zeros() -> dict[str, Any]:
    empty = state(0)
    for tensor in flatten(empty).tensors.values():
        tensor.array[...] = 0  # type: ignore[attr-defined]  # all are numpy's
    return empty


def image(found: Any) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(one.array).tobytes() for name, one in flatten(found).tensors.items()}  # type: ignore[attr-defined]


def same(found: Any, wanted: Any) -> bool:
    return image(found) == image(wanted) and found.get("step") == wanted.get("step")


def trained(steps: int) -> list[tuple[dict[str, Any], list[Update]]]:
    """A state and its moments after each step, and the updates."""
    slots = [np.random.default_rng(3).standard_normal((60, 40)).astype("<f4"), *np.zeros((2, 60, 40), "<f4")]
    found: list[tuple[dict[str, Any], list[Update]]] = []
    for step in range(1, steps + 1):
        gradient = np.random.default_rng([step, 9]).standard_normal((60, 40)).astype("<f4")
        numbers = optim.Step(count=step, lr=1e-3)
        slots = [slot.copy() for slot in slots]
        optim.advance(ADAM.rule(numbers), slots, gradient)
        tensors = dict(zip(("w", "m", "v"), slots, strict=True))
        state = {"model": {"w": tensors["w"]}, "opt": {"m": tensors["m"], "v": tensors["v"]}, "step": step}
        found.append((state, [Update(("model.w", "opt.m", "opt.v"), ADAM, numbers, NumpySource(gradient))]))
    return found


def test_only_deltas_are_read_and_the_tensors_stay_the_callers(opener: Opener) -> None:
    into = zeros()
    weight = into["model"]["weight"]
    with opener().writer(deltas=20, poll_seconds=None) as writer:
        writer.save(state(1), 1)
        with opener().follow(into=into, timeout=0) as follower:
            full = next(follower)
            assert (full.info.ref, full.base, full.plan, full.branched) == ("1@1", None, ("full",), False)
            read = []
            for step in range(2, STEPS):
                writer.save(state(step), step)
                found = next(follower)
                assert (found.info.ref, found.base, found.plan) == (f"{step}@1", "1@1", ("delta",))
                assert found.state["model"]["weight"] is weight
                assert same(found.state, state(step))
                assert (found.requests is None) == (opener().backend.costs is None)
                read.append(found.bytes_read)
            assert full.bytes_read > 480_000  # all of it
            assert max(read) < 30_000  # headers, and the rows that changed
            with pytest.raises(StopIteration):
                next(follower)


def test_gradient_diffs_are_replayed_from_what_is_held(opener: Opener) -> None:
    found: list[Followed] = []
    with opener().writer(diffs=ckptstore.DiffOptions(full_every=50, batch=2), poll_seconds=None) as writer:
        follower = None
        for number, (one, updates) in enumerate(trained(9), 1):
            pending = writer.save_async(one, number, updates=updates)
            if number % 2:
                continue
            pending.result()
            follower = follower or opener().follow(each=True, timeout=0, framework="numpy")
            for got in follower:
                assert same(got.state, trained(9)[got.info.step - 1][0]), got.info.ref
                found.append(got)
    refs = [one.info.ref for one in found]
    assert refs == [f"{step}@1" for step in range(2, 9)]  # the first is the newest of that time
    assert {one.plan for one in found[1:]} == {("gradient",)}
    assert [one.base for one in found[1:]] == refs[:-1]


def test_a_selection_brings_the_moments_that_its_steps_need(tmp_path: Path) -> None:
    states = trained(5)
    store = ckptstore.open(tmp_path / "run")
    with store.writer(diffs=ckptstore.DiffOptions(full_every=50), poll_seconds=None) as writer:
        into = {"model": {"w": np.zeros((60, 40), "<f4")}}
        follower = store.follow(into=into, select="model.*", timeout=0)
        bases = []
        for number, (one, updates) in enumerate(states, 1):
            writer.save(one, number, updates=updates)
            got = next(follower)
            bases.append(got.base)
            assert into["model"]["w"].tobytes() == one["model"]["w"].tobytes()
            assert not got.state["opt"]
    # The first full gave only the weights; the first step reads everything that the next ones need.
    assert bases == [None, None, "2@1", "3@1", "4@1"]


def test_the_run_goes_back_and_forks(opener: Opener) -> None:
    with opener().writer(deltas=20, poll_seconds=None) as writer:
        for step in (1, 2, 3):
            writer.save(state(step), step)
        follower = opener().follow(timeout=0, framework="numpy")
        assert next(follower).info.ref == "3@1"
        writer.rollback(2)
        back = next(follower)
        assert (back.info.ref, back.branched, back.fork) == ("2@1", True, "2@1")
        assert same(back.state, state(2))
        writer.save(state(3, seed=1), 3)
        other = next(follower)
        assert (other.info.ref, other.branched, other.base) == ("3@2", False, None)
        assert same(other.state, state(3, seed=1))
    with opener().writer(1, poll_seconds=None) as writer:
        writer.save(state(9), 9)
    forked = next(follower)
    assert (forked.info.ref, forked.branched, forked.fork) == ("9@3", True, "1@1")
    assert same(forked.state, state(9))
    with opener().writer(None, poll_seconds=None) as writer:
        writer.save(state(1), 1)
    anew = next(follower)
    assert (anew.info.ref, anew.branched, anew.fork) == ("1@4", True, None)


@pytest.mark.parametrize("first", [1, 3])
def test_the_run_goes_back_to_the_base_that_is_held(tmp_path: Path, first: int) -> None:
    store = ckptstore.open(tmp_path / "run")
    follower = store.follow(timeout=0, framework="numpy")
    with store.writer(deltas=20, poll_seconds=None) as writer:
        for step in (1, 2, 3):
            writer.save(state(step), step)
            if step >= first:
                assert next(follower).info.ref == f"{step}@1"
        writer.rollback(1)
        back = next(follower)
        assert (back.info.ref, back.branched, back.fork) == ("1@1", True, "1@1")
        assert same(back.state, state(1))
        assert (back.bytes_read == 0) == (first == 1)  # otherwise the base came without the rest of its state


def test_a_base_that_is_gone_costs_a_full_and_no_bits(opener: Opener) -> None:
    store = opener()
    with store.writer(deltas=3, poll_seconds=None) as writer:
        writer.save(state(1), 1)
        writer.save(state(2), 2)
        follower = opener().follow(after="1@1", timeout=0, framework="numpy")
        assert next(follower).info.ref == "2@1"
    with store.writer(poll_seconds=None) as writer:  # another term begins with a full
        for step in range(3, 9):
            writer.save(state(step), step)
    store.retire(*[info.ref for info in store.checkpoints()[:-1]], take_over=True)
    store.gc()
    found = next(follower)
    assert (found.info.ref, found.base, found.branched, found.skipped) == ("8@2", None, False, 0)
    assert same(found.state, state(8))


def damage(store: Store, ref: str, place: Path) -> None:
    (segment,) = store.checkpoint(ref).segments
    (path,) = place.rglob(f"{segment}.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damage_leaves_the_tensors_as_they_are(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    into = zeros()
    with store.writer(deltas=20, poll_seconds=None) as writer:
        writer.save(state(1), 1)
        follower = store.follow(into=into, timeout=0)
        next(follower)
        writer.save(state(2), 2)
        damage(store, "2@1", tmp_path)
        before = image(into)
        for _ in range(2):  # it is tried again, and warns again
            with pytest.raises(CorruptSegmentError):
                next(follower)
            assert image(into) == before
        writer.save(state(3), 3)
        found = next(follower)
        assert (found.info.ref, found.base) == ("3@1", "1@1")
        assert same(into, state(3) | {"step": 0})


def test_tensors_that_do_not_fit_are_refused_untouched(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    into = zeros()
    into["model"]["weight"] = np.zeros((300, 400), np.float32)
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
    before = image(into)
    with pytest.raises(UsageError, match="weight"):
        next(store.follow(into=into))
    assert image(into) == before


def test_tensors_that_the_caller_has_are_not_read_again(opener: Opener) -> None:
    store = opener()
    with store.writer(deltas=20, poll_seconds=None) as writer:
        writer.save(state(1), 1)
        into = zeros()
        store.load(1, into=into)
        writer.save(state(2), 2)
        found = next(opener().follow("1@1", into=into))
        assert (found.base, found.plan) == ("1@1", ("delta",))
        assert found.bytes_read < 30_000
        assert same(found.state, state(2))
        into["model"]["weight"][7] += 1  # not 2@1 any more
        writer.save(state(3), 3)
        found = next(opener().follow("2@1", into=into))
        assert (found.base, found.bytes_read > 480_000) == (None, True)
        assert same(found.state, state(3))


def test_a_file_is_replaced_and_records_where_to_continue(opener: Opener, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    store, out = opener(), tmp_path / "policy.safetensors"
    with store.writer(deltas=20, poll_seconds=None) as writer:
        for step in (1, 2, 3):
            writer.save(state(step), step)
            (found,) = opener().follow(out=out, select="model.*", timeout=0)
            # The file has the base of the second; the third builds on the first, which the file lacks.
            assert (found.state, found.base) == (None, "1@1" if step == 2 else None)
            tensors = load_file(out)
            assert sorted(tensors) == ["model.table", "model.weight"]
            assert tensors["model.weight"].tobytes() == state(step)["model"]["weight"].tobytes()
        assert list(opener().follow(out=out, select="model.*", timeout=0)) == []
        out.write_bytes(out.read_bytes()[:-9] + b"damaged..")
        writer.save(state(4), 4)
        (found,) = opener().follow(out=out, timeout=0)
        assert (found.info.ref, found.base, len(load_file(out))) == ("4@1", None, 3)


def test_shards_are_followed_and_put_together() -> None:
    """A chain of deltas, each on the one before, of a tensor that two ranks have halves of, cut by columns."""
    rng = np.random.default_rng(2)
    states = [rng.standard_normal((64, 30)).astype("<f4") for _ in range(3)]
    made, boxes = ShardStore(), columns((64, 30), 2)
    made.commit(1, by_rank(cut("w", states[0], boxes)))
    into = {"w": np.zeros((64, 30), "<f4")}
    follower = made.store.follow(into=into, timeout=0)
    for step, (one, before) in enumerate(zip(states, [None, *states], strict=False), 1):
        if before is not None:
            pieces = by_rank(cut("w", one, boxes, codec=codecs.Xor(4), base=before))
            made.commit(step, pieces, base=step - 1)
        found = next(follower)
        assert (found.info.ref, found.base) == (f"{step}@1", f"{step - 1}@1" if step > 1 else None)
        assert into["w"].tobytes() == one.tobytes()


def test_a_rank_s_own_tensors_are_followed() -> None:
    """`rank=` gives that rank's state, including parts that a reader without a rank does not see."""
    made, rng = ShardStore(), np.random.default_rng(4)
    shared = cut("w", rng.standard_normal((8, 4)).astype("<f4"), columns((8, 4), 2))
    tree = {"w": {"$a": "w"}, "rng": {"$ranks": [[0, 1], [{"$a": "rng@0"}, {"$a": "rng@1"}]]}}
    into = {"w": np.zeros((8, 4), "<f4"), "rng": np.zeros(6, "<f4")}
    follower = made.store.follow(rank=1, each=True, timeout=0, framework="numpy")
    filling = made.store.follow(rank=1, each=True, timeout=0, into=into)
    for step in (1, 2, 3):
        own = [rng.standard_normal(6).astype("<f4") for _ in range(2)]
        states = [cut(f"rng@{rank}", one, [Box.whole((6,))]) for rank, one in enumerate(own)]
        made.commit(step, [[shared[0], states[0][0]], [shared[1], states[1][0]]], tree)
        assert next(follower).state["rng"].tobytes() == own[1].tobytes()
        assert next(filling).state["rng"].tobytes() == into["rng"].tobytes() == own[1].tobytes()
    (found,) = (*made.store.follow("2@1", rank=1, timeout=0, into=into),)
    assert found.info.step == 3
    assert made.store.follow("3@1", rank=1, timeout=0, into=into).look() is None
    with pytest.raises(UsageError, match="rank= and out="):
        made.store.follow(rank=1, out="file.safetensors")


def test_it_waits_for_checkpoints_and_ends_on_request(opener: Opener) -> None:
    stop = threading.Event()
    seen: list[str] = []
    with opener().writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
        follower = opener().follow(poll=0.01, stop=stop, framework="numpy")
        thread = threading.Thread(target=lambda: seen.extend(one.info.ref for one in follower))
        thread.start()
        deadline = time.monotonic() + 60
        for step in (2, 3):
            writer.save(state(step), step)
            while seen[-1:] != [f"{step}@1"] and time.monotonic() < deadline:
                time.sleep(0.01)
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert seen[-1] == "3@1"
    other = opener().follow(poll=60.0, after="3@1")
    waiting = threading.Thread(target=lambda: seen.extend(one.info.ref for one in other))
    waiting.start()
    other.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert seen[-1] == "3@1"


def test_closing_waits_for_no_look_and_breaks_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckptstore.open(tmp_path / "run").writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
    follower = ckptstore.open(tmp_path / "run").follow(poll=60.0, framework="numpy")
    within, closed = threading.Event(), threading.Event()
    listed = LocalBackend.list

    def late(self: LocalBackend, prefix: str) -> list[str]:
        within.set()
        assert closed.wait(60)
        return listed(self, prefix)

    monkeypatch.setattr(LocalBackend, "list", late)
    seen: list[Followed] = []
    thread = threading.Thread(target=lambda: seen.extend(follower))
    thread.start()
    assert within.wait(60)
    follower.close()
    closed.set()
    thread.join(60)
    assert not thread.is_alive()
    assert [one.info.ref for one in seen] == ["1@1"]  # the look that was under way found it, whole
    assert same(seen[0].state, state(1))


def test_invalid_arguments_are_refused_at_once(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    for wrong in ({"poll": 0}, {"poll": float("nan")}, {"timeout": -1}, {"framework": "jax"}, {"threads": 0}):
        with pytest.raises(UsageError):
            store.follow(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="into= and out="):
        store.follow(into={}, out=tmp_path / "x.safetensors")
    with pytest.raises(ckptstore.StoreNotFoundError):
        next(store.follow())
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
    with pytest.raises(ckptstore.CheckpointNotFoundError):
        next(store.follow(7))
