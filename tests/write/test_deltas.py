"""Delta chains: every checkpoint restores bit for bit, through any chain, form and interval."""

from __future__ import annotations

import errno
import functools
import json
import mmap
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.agent.protocol.message_fields import options_form, read_options
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.formats import digest
from ckptstore.formats.codecs import PAPER_POLICY, SMALL_POLICY, Policy
from ckptstore.log.change import CatalogChange
from ckptstore.write import delta_encoding
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.writer_options import WriterOptions
from tests.store.states import every_dtype, same
from tests.write import inside
from tests.write.held import hold


def trajectory(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """States of a mixed-precision run: fp32 masters, their bf16 copies, moments, tiny and constant tensors."""
    rng = torch.Generator().manual_seed(seed)
    weights = {f"layer{n}.weight": torch.randn(300 + n, 70, generator=rng) * 0.02 for n in range(3)}
    moments = {name: torch.randn(w.shape, generator=rng) * 1e-3 for name, w in weights.items()}
    states = []
    for step in range(1, count + 1):
        for name in weights:
            moments[name] = moments[name] * 0.9 + torch.randn(weights[name].shape, generator=rng) * 1e-4
            weights[name] = weights[name] - 1e-3 * moments[name]
        states.append(
            {
                "model": {name: w.to(torch.bfloat16) for name, w in weights.items()},
                "optimizer": {"master": dict(weights), "exp_avg": dict(moments), "step": torch.tensor(float(step))},
                "rng": torch.randint(0, 256, (512,), dtype=torch.uint8, generator=rng),
                "order": np.arange(step, dtype=np.int64),  # another shape every step: never a delta
                "constant": torch.ones(2000),
                "step": step,
            }
        )
    return states


def fill(url: str | Path, states: list[dict[str, Any]], options: Any, **writer: Any) -> ckptstore.Store:
    store = ckptstore.open(url)
    with store.writer(deltas=options, **writer) as opened:
        for number, state in enumerate(states, 1):
            if number % 2:
                opened.save(state, step=number)
            else:
                opened.save_async(state, step=number)
    return store


@pytest.mark.parametrize(
    "options",
    [
        "auto",
        1,
        3,
        DeltaOptions(interval=3, form="paper"),
        DeltaOptions(interval=2, policy=SMALL_POLICY, compress_fulls=True),
        DeltaOptions(interval=2, policy=PAPER_POLICY),
        DeltaOptions(interval=2, memory=0),
        DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=4)),
    ],
    ids=["auto", "T=1", "T=3", "paper", "small", "paper-codecs", "no-memory", "depth-4"],
)
def test_every_checkpoint_comes_back(tmp_path: Path, options: Any) -> None:
    states = trajectory(11)
    store = fill(tmp_path / "store", states, options)
    infos = store.checkpoints()
    assert [info.kind for info in infos].count("delta") >= 7
    for step, state in enumerate(states, 1):
        same(state, store.load(step))
    assert ckptstore.verify(store).ok
    deltas = [info.stored / info.nbytes for info in infos if info.kind == "delta"]
    assert max(deltas) < 0.85


def test_every_dtype_as_a_delta() -> None:
    states = [every_dtype(), every_dtype()]
    for tensor in states[1].values():
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 3:
            tensor.view(-1) if tensor.is_contiguous() else tensor
            flat = tensor.reshape(-1)
            flat[0] = flat[2]
    store = fill(f"memory://{uuid.uuid4().hex}", states, 1)
    assert store.checkpoint(2).kind == "delta"
    for step, state in enumerate(states, 1):
        same(state, store.load(step))


def test_the_bf16_copy_of_a_master_costs_nothing(tmp_path: Path) -> None:
    store = fill(tmp_path / "store", trajectory(3), 1)
    entries = store.tensors(3)
    copies = [entry for name, entry in entries.items() if name.startswith("model.")]
    assert {entry.codec for entry in copies} == {"derive"}
    assert sum(entry.stored for entry in copies) == 0
    only = store.load(3, select="model.*")  # the master is read for it, and not returned
    same(trajectory(3)[2]["model"], only["model"])
    assert only["optimizer"]["master"] == {}


def test_the_moments_of_a_policy_by_class_are_stored_by_their_prefixes(tmp_path: Path) -> None:
    """As the XOR paper stores them, also where another codec would be smaller; weights are not."""
    policy = Policy(by_class={"first_moment": ("prefix",), "second_moment": ("prefix",)})
    rng = np.random.default_rng(1)
    states = [
        {name: rng.normal(0, 1e-3, 9000).astype(np.float32) for name in ("model.weight", "optim.exp_avg", "optim.v")}
        for _ in range(2)
    ]
    states[1]["model.weight"] = states[0]["model.weight"] * np.float32(1.0001)
    options = DeltaOptions(interval=1, policy=policy, compress_fulls=True)
    store = fill(tmp_path / "store", states, options)
    codecs = [{name: entry.codec for name, entry in store.tensors(step).items()} for step in (1, 2)]
    assert codecs == [
        {"model.weight": "planes", "optim.exp_avg": "prefix", "optim.v": "planes"},
        {"model.weight": "sub", "optim.exp_avg": "prefix", "optim.v": "planes"},
    ]
    for step, state in enumerate(states, 1):
        same(state, store.load(step))
    form = json.loads(json.dumps(options_form(WriterOptions(deltas=options))))
    assert read_options(form).deltas == options, "an agent's writer gets it, too"


def test_a_delta_may_build_on_a_derived_copy(tmp_path: Path) -> None:
    """The master is removed while its copy stays: the copy's chain is a rounding with a delta on top."""
    master = torch.randn(300, 70)
    states: list[dict[str, Any]] = [{"c": (master + n).bfloat16(), "m": master + n} for n in range(3)]
    states += [{"c": (master + 3).bfloat16()}, {"c": (master + 4).bfloat16()}]
    store = fill(tmp_path / "store", states, 1)
    assert [store.tensors(step)["c"].codec for step in (3, 4, 5)] == ["derive", "sub", "sub"]
    for step, state in enumerate(states, 1):
        same(state, store.load(step))
    same(states[4], store.load(5, into={"c": torch.zeros(300, 70, dtype=torch.bfloat16)}))
    assert store.read_tensor(4, "c").tobytes() == states[3]["c"].view(torch.uint8).numpy().tobytes()


def test_derived_copies_of_several_chunks(tmp_path: Path) -> None:
    """A copy's chunk is rounded from two of its master's, and the last ones are shorter."""
    master = torch.randn(9 << 20)  # fp32: 36 MiB in 3 chunks; its copy: 18 MiB in 2
    states = [{"m": master + n, "c": (master + n).bfloat16()} for n in (0.0, 1e-3)]
    states[1]["c"][-1] += 1  # one exception
    store = fill(tmp_path / "store", states, 1)
    assert store.tensors(2)["c"].codec == "derive"
    same(states[1], store.load(2))


@pytest.mark.parametrize("change", ["shape", "dtype", "copy"])
def test_a_remembered_master_may_change(tmp_path: Path, change: str) -> None:
    master = torch.randn(300, 70)
    states: list[dict[str, Any]] = [{"c": (master + n).bfloat16(), "m": master + n} for n in range(3)]
    other = {
        "shape": {"c": states[2]["c"], "m": torch.randn(200, 70)},
        "dtype": {"c": states[2]["c"], "m": states[2]["m"].double()},
        "copy": {"c": states[2]["c"].half(), "m": states[2]["m"]},
    }[change]
    states += [other, other]
    store = fill(tmp_path / "store", states, DeltaOptions(interval=1, compress_fulls=True))
    for step, state in enumerate(states, 1):
        same(state, store.load(step))


def test_in_place_and_partial_restores_of_chains(tmp_path: Path) -> None:
    states = trajectory(6)
    store = fill(tmp_path / "store", states, 1)
    target = trajectory(1, seed=9)[0]
    target["order"] = np.zeros(6, dtype=np.int64)
    restored = store.load(6, into=target)
    same(states[5], restored)
    same(states[5]["optimizer"]["master"], target["optimizer"]["master"])
    name = "optimizer.master.layer1.weight"
    assert store.read_tensor(6, name).tobytes() == states[5]["optimizer"]["master"]["layer1.weight"].numpy().tobytes()
    pieces = list(store.chunks(6, name))
    assert pieces[0][0] == 0
    with pytest.raises(ckptstore.UsageError, match="uncompressed full"):
        store.load(6, mmap=True)


def test_a_resumed_term_begins_with_a_full_and_a_fork_restores(tmp_path: Path) -> None:
    states = trajectory(8)
    fill(tmp_path / "store", states[:4], 1)
    store = ckptstore.open(tmp_path / "store")
    with store.writer(parent="2", deltas=1) as writer:
        for step in (3, 4):
            writer.save(states[step + 2], step=step)
    assert [info.kind for info in store.checkpoints()][4:] == ["full", "delta"]
    same(states[3], store.load("4@1"))
    same(states[6], store.load("4@2"))


def test_a_damaged_base_names_what_is_left(tmp_path: Path) -> None:
    states = trajectory(9)
    options = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=3))
    store = fill(tmp_path / "store", states, options)
    kinds = {info.step: info.kind for info in store.checkpoints()}
    assert [step for step, kind in kinds.items() if kind == "full"] == [1, 5, 9]
    second = tmp_path / "store" / store.describe(2)[-1][0].key
    data = bytearray(second.read_bytes())
    data[6000] ^= 16
    second.write_bytes(data)
    report = ckptstore.verify(store)
    assert report.lost == ("2@1", "3@1", "4@1")
    assert report.damage[0].checkpoints == ("2@1", "3@1", "4@1")
    for step in (2, 3, 4):
        with pytest.raises(ckptstore.CorruptSegmentError, match=second.name):
            store.load(step)
    for step in (1, 5, 9):
        same(states[step - 1], store.load(step))


def test_wrong_bases_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is compared with the saved state, not only the stored bytes."""
    states = trajectory(2)
    store = fill(tmp_path / "store", states, 1)
    from ckptstore.restore.chains import chain_link

    original = chain_link.read_payload

    def spoiled(one: chain_link.TensorLink, index: int, scratch: Any, *, verify: bool) -> Any:
        return original(one, index, scratch, verify=verify) ^ (1 if one.tensor.codec == "raw" else 0)

    monkeypatch.setattr(chain_link, "read_payload", spoiled)
    with pytest.raises(ckptstore.CorruptSegmentError, match="other bytes than were saved in step 2"):
        store.load(2)


def test_a_failed_save_breaks_no_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.backends.local_disk.directio import FileSink

    states = trajectory(6)
    store = ckptstore.open(tmp_path / "store")
    original = FileSink.seal
    with store.writer(deltas=2) as writer:
        for step, state in enumerate(states, 1):
            if step in (3, 4):

                def full(self: FileSink, size: int) -> None:
                    raise ckptstore.StorageError(28, "no space")

                monkeypatch.setattr(FileSink, "seal", full)
                with pytest.raises(ckptstore.StorageError):
                    writer.save(state, step=step)
                monkeypatch.setattr(FileSink, "seal", original)
            else:
                writer.save(state, step=step)
    assert [info.step for info in store.checkpoints()] == [1, 2, 5, 6]
    for info in store.checkpoints():
        same(states[info.step - 1], store.load(info.step))
    assert ckptstore.verify(store).ok


def test_tensors_may_come_go_and_change(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {"a": torch.randn(5000), "b": torch.randn(100)},
        {"a": torch.randn(5001), "c": torch.randn(100)},
        {"a": torch.randn(5001), "b": torch.randn(100), "c": torch.randn(100, dtype=torch.float64)},
        {"only": "text"},
        {"a": torch.randn(5001)},
    ]
    store = fill(tmp_path / "store", states, 1)
    for step, state in enumerate(states, 1):
        same(state, store.load(step))


def test_long_chains(tmp_path: Path) -> None:
    weight = torch.zeros(50)
    states = []
    for step in range(120):
        weight = weight.clone()
        weight[step % 50] += 1
        states.append({"w": weight, "s": step})
    store = fill(tmp_path / "store", states, DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100)))
    same(states[99], store.load(100))
    same(states[119], store.load(120))


def test_a_big_delta_is_split_over_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.segments.plain_segments import write_full
    from ckptstore.write.delta_encoding import write_packed

    monkeypatch.setattr("ckptstore.write.delta_encoding.write_packed", functools.partial(write_packed, limit=100_000))
    monkeypatch.setattr("ckptstore.write.deltas.write_full", functools.partial(write_full, limit=100_000))
    states = trajectory(4)
    store = fill(tmp_path / "store", states, 1)
    infos = store.checkpoints()
    assert [info.kind for info in infos] == ["full", "delta", "delta", "delta"]
    assert all(len(info.segments) > 3 for info in infos)
    for step, state in enumerate(states, 1):
        same(state, store.load(step))
    only = store.load(4, select="model.*")  # copies and their masters lie in different segments
    same(states[3]["model"], only["model"])
    assert ckptstore.verify(store).ok


def test_a_base_that_was_retired_is_not_built_on(tmp_path: Path) -> None:
    """A request retires and drops the writer's base: the next save is a full."""
    from ckptstore.log import requests

    states = trajectory(5)
    store = ckptstore.open(tmp_path / "store")
    with store.writer(deltas=3, poll_seconds=None) as writer:
        first = writer.save(states[0], step=1)
        writer.poll()  # else the upkeep that follows the save may answer before the tag is there
        asked = requests.post(
            store.journal, writer.term, "retire", CatalogChange(retires=((first.term, 1),), drops=first.segments)
        )
        writer.wait()
        writer.tag("nothing", 1)
        # Answered by the upkeep that follows the next save, which is still a delta of the base and keeps it needed.
        second = writer.save(states[1], step=2)
        assert second.kind == "delta"
        writer.wait()
        assert requests.outcome(store.view().catalog, asked).answer == "refused"
        drops = [*first.segments, *second.segments]
        nodes = [(first.term, 1), (first.term, 2)]
        tags = {"nothing": None}
        asked = requests.post(
            store.journal, writer.term, "retire", CatalogChange(retires=tuple(nodes), drops=tuple(drops), tags=tags)
        )
        writer.poll()
        assert requests.outcome(store.view().catalog, asked).answer == "accepted"
        kinds = [writer.save(states[step - 1], step=step).kind for step in (3, 4, 5)]
    assert kinds == ["full", "delta", "delta"]
    for step in (3, 4, 5):
        same(states[step - 1], store.load(step))


def test_a_base_that_cannot_be_kept_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is committed by then: the save succeeds, and the next one is a full."""
    states = trajectory(4)
    store = ckptstore.open(tmp_path / "store")
    with store.writer(deltas=DeltaOptions(interval=1, memory=0)) as writer:

        def broken(_backend: Any, key: str, _data: bytes) -> None:
            raise ckptstore.StorageError(5, "input/output error", key)

        with monkeypatch.context() as patched:
            patched.setattr(LocalBackend, "replace", broken)  # a base that is not in memory is pinned
            with pytest.warns(UserWarning, match="1@1 cannot be kept as a base.*pins/"):
                assert writer.save(states[0], step=1).ref == "1@1"
        kinds = [writer.save(states[step - 1], step=step).kind for step in (2, 3, 4)]
    assert kinds == ["full", "delta", "delta"]
    for step, state in enumerate(states, 1):
        same(state, store.load(step))
    assert not list((tmp_path / "store" / "pins").iterdir())


def test_a_stored_base_that_was_damaged_costs_a_full(tmp_path: Path) -> None:
    states = trajectory(4)
    store = ckptstore.open(tmp_path / "store")
    with store.writer(deltas=DeltaOptions(interval=1, memory=0)) as writer:
        writer.save(states[0], step=1)
        damaged = tmp_path / "store" / store.describe(1)[-1][0].key
        data = bytearray(damaged.read_bytes())
        data[9000:40000:100] = bytes(310)
        damaged.write_bytes(data)
        with pytest.warns(UserWarning, match=f"base 1@1 is damaged, step 2 becomes a full.*{damaged.name}"):
            assert writer.save(states[1], step=2).kind == "full"
        assert writer.save(states[2], step=3).kind == "delta"
    for step in (2, 3):
        same(states[step - 1], store.load(step))
    report = ckptstore.verify(store)
    assert report.lost == ("1@1",)
    assert report.orphans == ()  # the delta that was begun was given up


def test_bases_use_the_memory_they_may(tmp_path: Path) -> None:
    states = trajectory(7)
    nbytes = sum(tensor.nbytes for tensor in ckptstore_flat(states[6]).values())
    with ckptstore.open(tmp_path / "store").writer(
        deltas=DeltaOptions(interval=3, form="paper", memory=int(1.5 * nbytes))
    ) as writer:
        for step, state in enumerate(states, 1):
            writer.save(state, step=step)
            held = [type(base).__name__ for base in inside.bases(writer)]
            assert held.count("MemoryBase") == 1, (step, held)


def ckptstore_flat(state: dict[str, Any]) -> Any:
    from ckptstore.frameworks import bridge

    return bridge.flattened(state).tensors


def test_nothing_reads_the_state_once_a_save_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.backends.local_disk.directio import FileSink
    from ckptstore.write import delta_encoding

    running = threading.Semaphore(0)
    active: list[int] = []
    original = delta_encoding.code_group

    def slow(*arguments: Any) -> Any:
        active.append(1)
        running.release()
        time.sleep(0.05)
        try:
            return original(*arguments)
        finally:
            active.pop()

    def fails(self: FileSink, offset: int, data: memoryview) -> None:
        raise ckptstore.StorageError(28, "no space")

    rng = np.random.default_rng(0)
    states = [{f"w{n}": rng.standard_normal(1 << 19) for n in range(12)} for _ in range(2)]
    with ckptstore.open(tmp_path / "store").writer(deltas=1, poll_seconds=None) as writer:
        writer.save(states[0], step=1)
        monkeypatch.setattr(delta_encoding, "code_group", slow)
        monkeypatch.setattr(FileSink, "write", fails)
        with pytest.raises(ckptstore.StorageError):
            writer.save(states[1], step=2)
        assert not active


def test_after_an_interrupt_no_save_builds_on_bits_that_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, and again while the writer waits for its thread: the copy of the base may be torn."""
    states = trajectory(3)
    store = ckptstore.open(tmp_path / "store")
    with store.writer(deltas=1, poll_seconds=None) as writer:
        changed = threading.Event()
        copying = threading.Event()

        def late() -> None:
            copying.set()
            assert changed.wait(120)

        def reached() -> None:
            assert copying.wait(120)

        inside.copies_late(writer, monkeypatch, late)
        inside.interrupt_after_submit(monkeypatch, reached)
        state = {"w": states[0]["optimizer"]["master"]["layer0.weight"].clone()}
        with pytest.raises(KeyboardInterrupt):
            writer.save(state, step=1)
        monkeypatch.undo()
        before = state["w"].clone()
        state["w"].add_(1)  # training continues
        changed.set()
        writer.wait()
        info = writer.save({"w": before + 1e-4}, step=2)
    assert info.kind == "full"
    same({"w": before}, store.load(1))
    same({"w": before + 1e-4}, store.load(2))


@pytest.mark.filterwarnings("error")
def test_a_base_that_only_a_warning_keeps_from_being_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is durable by then: if warnings are errors, neither that save nor a later one may fail."""

    def full(_self: Any, key: str, _data: bytes) -> None:
        raise ckptstore.StorageError(errno.ENOSPC, "cannot write: full", key)

    weight = np.arange(5000, dtype=np.float32)
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(poll_seconds=None, deltas=DeltaOptions(interval=4, memory=0)) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(LocalBackend, "replace", full)
            writer.save_async({"w": weight}, 1).result()
        for step in (2, 3):
            writer.save({"w": weight + step}, step)
    assert [(info.step, info.kind) for info in store.checkpoints()] == [(1, "full"), (2, "delta"), (3, "delta")]


@pytest.mark.parametrize("compress_fulls", [False, True])
def test_every_encoded_tensor_has_its_state_digest(tmp_path: Path, compress_fulls: bool) -> None:
    """Of every tensor of every delta and full: a missing one would silently not be compared."""
    states = trajectory(4)
    options = DeltaOptions(interval=3, compress_fulls=compress_fulls)
    store = fill(tmp_path / "store", states, options)
    assert [info.kind for info in store.checkpoints()] == ["full", "delta", "delta", "delta"]
    codecs = {tensor.codec for tensor in store.tensors(1).values()}
    assert (codecs == {"raw"}) != compress_fulls
    for step, state in enumerate(states, 1):
        same(state, store.load(step))
        held = store.tensors(step)
        assert len(held) > 9
        for name, data in store.read_tensors(step):
            assert held[name].digest == digest.digest(data), name


def test_a_delta_that_leads_elsewhere_than_training_was_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        right = digest.combine
        patched.setattr(delta_encoding.digest, "combine", lambda *parts, nbytes: right(*parts, nbytes=nbytes) ^ 1)
        store = fill(tmp_path / "store", trajectory(2), 3)
    with pytest.raises(ckptstore.CorruptSegmentError, match="its state digest is not that of step 2"):
        store.load(2)


def test_a_bound_in_seconds_is_held_to_the_rate_that_was_measured(tmp_path: Path) -> None:
    """A minute is enough for these few kilobytes, a nanosecond for no chain."""
    for seconds, kinds in ((60.0, {"full", "delta"}), (1e-9, {"full"})):
        bound = RestoreBound(times=None, seconds=seconds)
        store = fill(tmp_path / f"{seconds}", trajectory(5), DeltaOptions(interval=1, bound=bound))
        assert {info.kind for info in store.checkpoints()} == kinds


def test_a_bound_in_seconds_is_one(tmp_path: Path) -> None:
    """Bytes per second, not seconds per byte: an hour is enough for a chain of small deltas, a microsecond for none."""
    weight = np.random.default_rng(0).standard_normal(200_000).astype("<f4")
    kinds = {}
    for seconds in (3600.0, 1e-6):
        store = ckptstore.open(tmp_path / str(seconds))
        options = DeltaOptions(interval=1, bound=RestoreBound(times=None, seconds=seconds, depth=100))
        with store.writer(deltas=options, poll_seconds=None) as writer:
            kinds[seconds] = [writer.save({"w": weight + np.float32(step)}, step).kind for step in range(1, 6)]
    assert kinds == {3600.0: ["full"] + ["delta"] * 4, 1e-6: ["full"] * 5}


@pytest.mark.parametrize("size", [1000, 5 << 20])
def test_reading_chunk_by_chunk_takes_a_chunk_and_a_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """And no more for a small tensor than it needs: there may be thousands of those."""
    weight = np.random.default_rng(0).integers(0, 1 << 20, size, dtype=np.uint32)
    store = ckptstore.open(tmp_path / "store")
    with store.writer(deltas=DeltaOptions(interval=1), poll_seconds=None) as writer:
        writer.save({"w": weight}, 1)
        weight[::3] += 1
        assert writer.save({"w": weight}, 2).kind == "delta"
    taken: list[int] = []

    class Recorded(mmap.mmap):
        def __new__(cls, number: int, length: int, **how: Any) -> Recorded:
            if number == -1:
                taken.append(length)
            return super().__new__(cls, number, length, **how)

    monkeypatch.setattr("ckptstore.host.buffers.mmap.mmap", Recorded)
    assert b"".join(part.tobytes() for _, part in store.chunks(2, "w")) == weight.tobytes()
    chunk = min(weight.nbytes, 16 << 20)
    assert chunk <= sum(taken) <= min(3 * chunk, 2 * (16 << 20)) + (32 << 10), taken


def test_saves_that_are_cancelled_before_their_turn_give_their_places_and_memory_back(tmp_path: Path) -> None:
    """Otherwise the next `save_async` waits for ever."""
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(deltas=DeltaOptions(), max_in_flight=3, poll_seconds=None) as writer:
        writer.save({"x": np.zeros(10)}, 1)
        gate = hold(store, writer)
        waiting = [writer.save_async({"x": np.full(10, step)}, step) for step in (2, 3, 4)]
        assert [one.cancel() for one in waiting] == [True] * 3
        again = [writer.save_async({"x": np.full(10, step)}, step) for step in (5, 6, 7)]  # before any turn comes
        gate.set()
        assert [one.result(60).step for one in again] == [5, 6, 7]
    assert [info.step for info in store.checkpoints()] == [1, 5, 6, 7]
