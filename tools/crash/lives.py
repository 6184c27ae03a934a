"""Lives of a store on paths that `scenario.live` does not take: with a memory budget or limited space, layer by layer,
by ranks.

`scenario.check` can check the store after each of them: every visible checkpoint is `state_of` its term and step, bit
for bit. Ranks are threads here, on one file system; `tools.kills.rank_kills` kills them one by one, as processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from ckptstore.backends.base import Backend
from ckptstore.backends.local_disk.pmem import PmemBackend
from ckptstore.errors import RankError
from ckptstore.formats.sources import BoxSource, NumpySource
from ckptstore.formats.states.state import FlatState, flatten
from ckptstore.host.arenas import LEAST
from ckptstore.host.crash_points import CRASH_POINTS, RANK_POINTS
from ckptstore.log import fold_writer
from ckptstore.store import Store
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.saves.ledger import PendingSave
from ckptstore.write.writer import Writer
from tools.crash.scenario import CHAIN, create, live, state_of

__all__ = ["LIVES", "POINTS", "Life"]

Make: TypeAlias = Callable[[], Backend]
"""Makes a backend for the store, as a separate process would."""
Life: TypeAlias = Callable[[Make, Callable[[str], None]], None]
"""Like `scenario.live`, on backends that it makes."""

_WRITER: Final[Mapping[str, Any]] = {"threads": 1, "staging_bytes": 32 << 20, "poll_seconds": None}
_BATCHES: Final = DiffOptions(batch=2, seconds=None, flush_on_sigterm=False)
_LAYERS: Final = {"first": ("drift",), "second": ("weight",)}
RANKS: Final = RankOptions(timeout=20.0)


def whole(make: Make, acknowledge: Callable[[str], None]) -> None:
    """`scenario.live`."""
    live(make(), acknowledge)


def bounded(make: Make, acknowledge: Callable[[str], None]) -> None:
    """Fulls, two at once, deltas, and gradient diffs singly and in batches: all of them with a memory budget."""
    store = _created(make)
    codings: list[dict[str, Any]] = [
        {"max_in_flight": 2},
        {"deltas": CHAIN},
        {"diffs": DiffOptions(flush_on_sigterm=False)},
        {"diffs": _BATCHES},
    ]
    for coding in codings:
        with store.writer(memory=LEAST, **coding, **_WRITER) as writer:
            first = _next(writer.parent)
            pending = [writer.save_async(state_of(writer.term, step), step) for step in range(first, first + 3)]
            for one in pending:
                acknowledge(one.result().ref)
            acknowledge(writer.save(state_of(writer.term, first + 3), first + 3).ref)
        _maintain(store)


def limited(make: Make, acknowledge: Callable[[str], None]) -> None:
    """Fulls, two at once, deltas, and step diffs in batches, in little space: most saves first delete what went.

    A crash and the writer that checks the store may each retire one checkpoint more than was announced.
    """
    store = _created(make)
    kept = [info.ref for info in store.checkpoints()]  # of earlier victims
    codings: list[tuple[str, dict[str, Any]]] = [
        ("6 states", {}),
        ("7 states", {"max_in_flight": 2}),
        ("11 states", {"deltas": CHAIN}),
        ("11 states", {"diffs": _BATCHES}),
    ]
    for space, coding in codings:
        with store.writer(keep=["last:4"], space=space, **coding, **_WRITER) as writer:
            first = _next(writer.parent)
            for step in range(first, first + 8, 2):
                while len(kept) > 1:
                    acknowledge(f"-{kept.pop(0)}")
                pending = [writer.save_async(state_of(writer.term, one), one) for one in (step, step + 1)]
                for one in pending:
                    kept.append(one.result().ref)
                    acknowledge(kept[-1])
        _maintain(store)


def layered(make: Make, acknowledge: Callable[[str], None]) -> None:
    """Save layer by layer: each layer changes once its copy is made; on persistent memory it is copied straight into
    it."""
    store = _created(make)
    codings: list[dict[str, Any]] = [{}, {"deltas": CHAIN}, {"diffs": _BATCHES}]
    for coding in codings:
        direct = not coding and isinstance(store.backend, PmemBackend)
        with store.writer(max_in_flight=2, **coding, **_WRITER) as writer:
            first = _next(writer.parent)
            pending = [_by_layers(writer, step, direct) for step in range(first, first + 3)]
            for one in pending:
                acknowledge(one.result().ref)
        _maintain(store)


def _by_layers(writer: Writer, step: int, direct: bool) -> PendingSave:
    """Save a state, and train on."""
    state = state_of(writer.term, step)
    save = writer.begin(state, step, _LAYERS, direct=direct)
    for layer in _LAYERS:
        save.ready(layer)
    pending = save.finish()
    state["moment"].fill(-1)
    for layer, names in _LAYERS.items():
        save.wait(layer)
        for name in names:
            state[name].view(np.uint8)[:] = 255  # a checkpoint that mixes steps would contain this
    return pending


def ranks(make: Make, acknowledge: Callable[[str], None]) -> None:
    """Groups of two and three ranks: fulls, deltas and batches of gradient diffs, with and without a memory budget."""
    store = _created(make)
    groups: list[tuple[int, dict[str, Any]]] = [
        (2, {"memory": LEAST, "max_in_flight": 2}),
        (3, {"deltas": CHAIN, "memory": LEAST}),
        (2, {"diffs": _BATCHES}),
        (2, {"diffs": _BATCHES, "memory": LEAST}),
    ]
    for size, coding in groups:
        together(size, partial(_rank, make, coding, acknowledge))
        _maintain(store)


def _rank(make: Make, coding: Mapping[str, Any], acknowledge: Callable[[str], None], group: Group) -> None:
    with Store(make()).writer(group=group, ranks=RANKS, **coding, **_WRITER) as writer:
        first = _next(writer.parent)
        acknowledge(writer.save(_share(writer.term, first, group), first).ref)
        pending = [writer.save_async(_share(writer.term, step, group), step) for step in range(first + 1, first + 4)]
        for one in pending:
            acknowledge(one.result().ref)


def _share(term: int, step: int, group: Group) -> FlatState:
    """The share of a rank: all of most tensors, and rows of one."""
    state = state_of(term, step)
    flat, array = flatten(state), state["moment"]
    rows = [len(array) * place // group.size for place in range(group.size + 1)]
    part = np.ascontiguousarray(array[rows[group.rank] : rows[group.rank + 1]])
    flat.tensors["moment"] = BoxSource(NumpySource(part), part.shape, 0, array.shape, (rows[group.rank], 0))
    return flat


def together(size: int, work: Callable[[Group], None]) -> None:
    """Run `size` ranks at once; raises the error of one of them, preferably its own rather than one that another
    caused."""
    mailbox, errors = LocalMailbox(), dict[int, BaseException]()

    def one(rank: int) -> None:
        try:
            work(Group(rank, size, mailbox))
        except BaseException as error:  # noqa: BLE001  # raised below
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors.values(), key=lambda error: isinstance(error, RankError)):
        raise error


def _created(make: Make) -> Store:
    backend = make()
    create(backend)
    return Store(backend)


def _next(parent: Any) -> int:
    return 1 + (0 if parent is None else int(parent.step))


def _maintain(store: Store) -> None:
    fold_writer.fold(store.journal, store.view())
    fold_writer.trim(store.journal, store.view())


LIVES: Final[Mapping[str, Life]] = {
    "whole": whole,
    "bounded": bounded,
    "limited": limited,
    "layered": layered,
    "ranks": ranks,
}

_SAVING: Final = tuple(
    point for point in CRASH_POINTS if point.split(".")[0] in ("save", "commit", "create", "open", "fold")
)
POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "whole": tuple(CRASH_POINTS),
    "bounded": _SAVING,
    "limited": (*_SAVING, *(point for point in CRASH_POINTS if point.startswith("gc."))),
    "layered": _SAVING,
    "ranks": (*_SAVING, *RANK_POINTS),
}
"""The crash points that each life passes."""
