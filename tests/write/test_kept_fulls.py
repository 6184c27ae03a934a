"""Every kind of writer stores checkpoints that the rules keep for good as fulls: they need no retired checkpoint."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, RankOptions, Store, agent
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.records import CheckpointId
from ckptstore.log.change import CatalogChange
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.retainer import Retainer, short_of_space
from tests.formats.log_strategies import digest
from tests.formats.test_catalog import change as changed
from tests.formats.test_catalog import opened, save
from tests.forms import in_turn, short_or
from tests.write.rank_threads import as_ranks
from tests.write.trainer import Trainer

pytestmark = pytest.mark.usefixtures("warm_agents")


RULES = ["last:4", "every:10"]
STEPS = 45
SIZES = {"wide": (60, 70), "bias": (70,)}
WRITERS: dict[str, dict[str, Any]] = {
    "diffs": {"diffs": DiffOptions(full_every=25)},
    "batches": {"diffs": DiffOptions(full_every=25, batch=4)},
    "bounded": {"diffs": DiffOptions(full_every=25), "memory": 64 << 20},
    "deltas": {"deltas": DeltaOptions(interval=3)},
    "paper": {"deltas": DeltaOptions(interval=2, form="paper")},
    "both": {"diffs": DiffOptions(full_every=5), "deltas": DeltaOptions(interval=1)},
}


def check(store: Store, limit: float) -> None:
    """Each checkpoint that is kept for good is restored with such checkpoints alone."""
    infos = store.checkpoints()
    assert [info.step for info in infos] == [10, 20, 30, 40, 42, 43, 44, 45]
    catalog = store.view().catalog
    bases = {
        info.step: [edge.base.step for edge in catalog.encodings[info.term, info.step] if edge.base] for info in infos
    }
    for step in (10, 20, 30, 40):
        assert set(bases[step]) <= {10, 20, 30}, bases
    assert all(40 < step < 45 for _, step in catalog.held), sorted(catalog.held)
    stored = sum(one.size for one in catalog.segments.values())
    assert stored < limit * infos[-1].nbytes, stored
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("how", WRITERS)
def test_by_a_writer(tmp_path: Path, how: str) -> None:
    model, store = Trainer(0, SIZES), ckptstore.open(tmp_path / "run")
    with store.writer(keep=RULES, **WRITERS[how]) as writer:
        for step in range(1, STEPS + 1):
            model.train()
            writer.save_async(model.state(), step, updates=model.updates() if "diffs" in WRITERS[how] else None)
    check(store, 12)


@pytest.mark.parametrize("how", ["diffs", "batches", "deltas", "both"])
def test_by_ranks(tmp_path: Path, how: str) -> None:
    store = ckptstore.open(tmp_path / "run")

    def work(group: Group) -> None:
        model = Trainer(0, SIZES)
        with ckptstore.open(tmp_path / "run").writer(
            group=group, ranks=RankOptions(timeout=120), keep=RULES, **WRITERS[how]
        ) as writer:
            for step in range(1, STEPS + 1):
                model.train()
                writer.save_async(model.state(), step, updates=model.updates() if "diffs" in WRITERS[how] else None)

    assert as_ranks(2, work) == [None, None]
    check(store, 16)


@pytest.mark.parametrize(("how", "ranks"), in_turn(["diffs", "batches", "bounded"], [2, 1]))
def test_where_space_is_short_no_chain_fills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, ranks: int
) -> None:
    store = ckptstore.open(tmp_path / "run")
    state = Trainer(0, SIZES).state()
    space = 8 * sum(array.nbytes for part in ("model", "master", "m", "v") for array in state[part].values())
    monkeypatch.setattr(LocalBackend, "free_bytes", lambda _self: space - store.view().catalog.stored_bytes())
    most: list[int] = []

    def work(group: Group | None) -> None:
        model, options = Trainer(0, SIZES), {**WRITERS[how], "diffs": replace(WRITERS[how]["diffs"], full_every=1000)}
        if group is not None:
            options |= {"group": group, "ranks": RankOptions(timeout=120)}
        with ckptstore.open(tmp_path / "run").writer(keep=["last:1"], **options) as writer:
            for step in range(1, STEPS + 1):
                model.train()
                writer.save(model.state(), step, updates=model.updates())
                if group is None or group.rank == 0:
                    most.append(store.view().catalog.stored_bytes())

    if ranks == 1:
        work(None)
    else:
        assert as_ranks(ranks, work) == [None] * ranks
    assert max(most) < space
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("free", [0.9, 2.0])
def test_a_chain_ends_only_where_a_full_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    store, model = ckptstore.open(tmp_path / "run"), Trainer(0, SIZES)
    nbytes: list[int] = []
    monkeypatch.setattr(LocalBackend, "free_bytes", lambda _self: int(free * nbytes[0]) if nbytes else None)
    options = {**WRITERS["diffs"], "diffs": replace(WRITERS["diffs"]["diffs"], full_every=1000)}
    kinds: list[str] = []
    with store.writer(keep=["last:1"], **options) as writer:
        for step in range(1, STEPS + 1):
            model.train()
            info = writer.save(model.state(), step, updates=model.updates())
            nbytes.append(info.nbytes)
            kinds.append(info.kind)
    assert kinds[0] == "full"
    assert ("full" in kinds[1:]) == (free > 1)


def test_when_space_is_short(tmp_path: Path) -> None:
    """One full fits, three do not, and more checkpoints are retired than kept, by rules that are obeyed."""

    def catalog(steps: int) -> Catalog:
        store, model = ckptstore.open(tmp_path / str(steps)), Trainer(0, SIZES)
        with store.writer(keep=["last:1"], **WRITERS["diffs"]) as writer:
            for step in range(1, steps + 1):
                model.train()
                writer.save(model.state(), step, updates=model.updates())
        found = store.view().catalog
        assert (len(found.held), len(found.checkpoints)) == (steps - 1, 1)
        return found

    found = catalog(3)
    newest = found.latest()
    assert newest is not None
    full = newest.nbytes
    wanted = {None: False, full - 1: False, full: True, 3 * full - 1: True, 3 * full: False}
    assert {free: short_of_space(found, lambda free=free: free) for free in wanted} == wanted  # type: ignore[misc]
    for change in ({"keep": ()}, {"damage": (1,)}, {"lost": found.term + 1}):
        assert not short_of_space(replace(found, **change), lambda: full), change
    assert short_of_space(replace(found, lost=found.term), lambda: full)
    for steps in (1, 2):  # the chain is no longer than the kept part
        assert not short_of_space(catalog(steps), lambda: full), steps


def test_by_an_agent(tmp_path: Path) -> None:
    model, store = Trainer(0, SIZES), ckptstore.open(tmp_path / "run")
    with agent.writer(store, keep=RULES, **WRITERS["diffs"]) as writer:
        for step in range(1, STEPS + 1):
            model.train()
            writer.save_async(model.state(), step, updates=model.updates())
    check(store, 12)


def test_rules_that_come_while_it_writes(tmp_path: Path) -> None:
    model, store = Trainer(0, SIZES), ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=0.1, **WRITERS["diffs"]) as writer:
        for step in range(1, STEPS + 1):
            model.train()
            if step == 8:
                writer.wait()
                store.keep(*RULES)
            writer.save_async(model.state(), step, updates=model.updates())
    check(store, 12)


def test_bytes_that_rules_cannot_free_are_reported_once(tmp_path: Path) -> None:
    """A tag in the middle of a chain, of which the writer did not know."""
    model, store = Trainer(0, SIZES), ckptstore.open(tmp_path / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with store.writer(keep=["last:2"], **WRITERS["diffs"]) as writer:
            for step in range(1, short_or(150, 240)):
                model.train()
                writer.save(model.state(), step, updates=model.updates(), tags=f"good-{step}" if step % 49 == 0 else ())
    told = [str(one.message) for one in caught]
    assert len(told) == 1, told
    assert "retired checkpoints (" in told[0]
    assert f"`ckpt compact {store.url} --gc`" in told[0]
    before = sum(one.size for one in store.view().catalog.segments.values())
    store.compact(take_over=True)
    assert sum(one.size for one in store.view().catalog.segments.values()) < before / 3


def test_temporary_chains_are_not_reported(tmp_path: Path) -> None:
    """Bases that `last` keeps stored for now go when its window moves on."""
    model, store = Trainer(0, SIZES), ckptstore.open(tmp_path / "run")
    with store.writer(keep=["last:5"], **WRITERS["diffs"]) as writer:
        for step in range(1, 120):
            model.train()
            writer.save(model.state(), step, updates=model.updates())
    assert np.isfinite(store.load()["master"]["wide"]).all()


def test_what_an_earlier_term_retired_and_did_not_drop_is_dropped() -> None:
    """A term protects the bases of its next deltas. If it crashes, nobody needs them, and no later retirement does."""
    builder = CatalogBuilder()
    keep = changed(keep=("last:3",), retires=((1, 2),))
    for record in (opened(), save(1), save(2, 1), save(3, 1), keep, opened(2, CheckpointId(1, 3, digest(3)))):
        builder.apply(record, builder.catalog.next_seq)
    retainer = Retainer(lambda: builder.catalog)
    new = save(4, term=2)
    more = retainer.with_retirements(CatalogChange(new.segments, new.checkpoints, new.encodings))
    assert (more.retires, more.drops) == ((), (digest(2),))
    retainer.committed()
    assert retainer.with_retirements(CatalogChange(new.segments, new.checkpoints, new.encodings)).drops == ()
