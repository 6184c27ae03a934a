"""The scenario that the crash tests run and check: a small store's life whose every state can be recomputed.

`live` saves, tags, folds, trims, resumes, forks, restores, merges (through the live writer and by taking over),
collects and saves again on any backend, and reports each acknowledgement. `check` inspects the store after a crash:
every acknowledged checkpoint that nobody asked to retire, and every other visible one, restores bit for bit; no byte is
damaged; and the next writer continues.

An acknowledgement is a REF that the store has promised, or ``-REF``: from here on it may be gone.
"""

from __future__ import annotations

import contextlib
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CheckpointNotFoundError, StoreNotFoundError
from ckptstore.formats.history.checkpoint_ref import node_of
from ckptstore.formats.history.record_text import encode_format
from ckptstore.formats.history.records import FORMAT_KEY, FormatFile
from ckptstore.host.caller_warnings import LostStepsWarning
from ckptstore.log import fold_writer
from ckptstore.maintenance.compact import CompactLimits, compact
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.maintenance.merge import merge
from ckptstore.restore import restore_rates
from ckptstore.store import Store, verify
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.policy.diff_options import DiffOptions

__all__ = ["Violation", "check", "compare", "create", "live", "promised", "same_state", "state_of", "warm_up"]

CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))
"""A full, then deltas, each against the one before."""
ANCHOR_EVERY = 4
"""Instead of 1024: slots become deletable within a short life."""


class Violation(AssertionError):  # noqa: N818  # the usual term
    """The store broke a promise."""


def state_of(term: int, step: int) -> dict[str, Any]:
    """The state that the writer of `term` saves at `step`."""
    rng = np.random.default_rng([term, step])
    drift = np.arange(500, dtype=np.float32)
    drift[: step % 50] += step
    return {
        "drift": drift,  # a delta of it is small
        "weight": rng.integers(0, 256, 6000 + 37 * (step // 8), dtype=np.uint8),
        "moment": rng.standard_normal((5, 7)),
        "step": step,
        "term": term,
    }


def live(backend: Backend, acknowledge: Callable[[str], None], *, rounds: int = 1) -> None:
    """One store's life: creation, then `rounds` times six terms: folds, a fork, a restore, diffs, merges, compact, gc.

    Args:
        acknowledge: called with a REF as soon as the store has promised that checkpoint, and with ``-REF`` before it is
            asked to retire it.
    """
    create(backend)
    store = Store(backend)
    with _short_rates():
        for _ in range(rounds):
            _round(store, acknowledge)


def _round(store: Store, acknowledge: Callable[[str], None]) -> None:
    first = _term(store, acknowledge, parent="latest", saves=4)
    _maintain(store)
    _term(store, acknowledge, parent="latest", saves=3)
    _maintain(store)
    store.load(first, framework="numpy")
    _term(store, acknowledge, parent=first, saves=2)  # goes back: a fork
    _maintain(store)
    _stepping_term(store, acknowledge)
    merged = _merging_term(store, acknowledge)
    merge(store.journal, merged, keep_steps=True, take_over=True)
    compact(store.journal, CompactLimits(max_depth=1), take_over=True)
    collect(store.journal)
    _term(store, acknowledge, parent="latest", saves=2)  # in the space of deleted segments, if files are recycled
    _maintain(store)


@contextlib.contextmanager
def _short_rates() -> Iterator[None]:
    """Merges report how fast this machine restores. No promise depends on it, and to measure it took half of a life's
    processor time."""
    numbers = restore_rates.NUMBERS
    restore_rates.NUMBERS = 1 << 8
    try:
        yield
    finally:
        restore_rates.NUMBERS = numbers


def warm_up() -> None:
    """Import and compile everything that a life needs: forks of this process start working in milliseconds."""
    name = f"warm-up-{uuid.uuid4().hex}"
    backend = MemoryBackend(name)
    live(backend, lambda _: None)
    with Store(backend).writer(diffs=DiffOptions(batch=2), threads=1, staging_bytes=32 << 20) as writer:
        for step in (101, 102, 103):
            writer.save_async(state_of(writer.term, step), step)
    check(backend, [], write=False)
    MemoryBackend.forget(name)


def create(backend: Backend) -> None:
    """Create the store if there is none, with anchors so close that slots become deletable within a short life."""
    try:
        Store(backend).format  # noqa: B018  # the property reads the file
    except StoreNotFoundError:
        backend.create(FORMAT_KEY, encode_format(FormatFile(uuid.uuid4().hex, anchor_every=ANCHOR_EVERY)))


def _term(store: Store, acknowledge: Callable[[str], None], *, parent: str, saves: int) -> str:
    """One term; returns the REF of its first checkpoint."""
    with store.writer(parent=parent, threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        begin = 1 + (0 if writer.parent is None else writer.parent.step)
        refs = []
        for step in range(begin, begin + saves):
            if step % 2:
                info = writer.save(state_of(writer.term, step), step=step)
            else:
                info = writer.save_async(state_of(writer.term, step), step=step).result()
            acknowledge(info.ref)
            refs.append(info.ref)
        writer.tag("newest", step)
    return refs[0]


def _stepping_term(store: Store, acknowledge: Callable[[str], None]) -> None:
    """One term of step diffs, two to a segment; closing the term writes the last of them."""
    options = DiffOptions(batch=2, seconds=None, flush_on_sigterm=False)
    pending = []
    with store.writer(diffs=options, threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        begin = 1 + (0 if writer.parent is None else writer.parent.step)
        for step in range(begin, begin + 4):
            pending.append(writer.save_async(state_of(writer.term, step), step=step))
            for one in pending:
                if one.done():
                    acknowledge(one.result().ref)
    for one in pending:
        acknowledge(one.result().ref)


def _merging_term(store: Store, acknowledge: Callable[[str], None]) -> str:
    """One term of deltas, each against the one before; some are merged during the term -> a range that is left."""
    with store.writer(deltas=CHAIN, threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        begin = 1 + (0 if writer.parent is None else writer.parent.step)
        for step in range(begin, begin + 6):
            if step == begin + 4:  # a full and three deltas: the last one stays
                for gone in (begin + 1, begin + 2):
                    acknowledge(f"-{gone}@{writer.term}")
                merge(store.journal, f"{begin}@{writer.term}..{begin + 3}@{writer.term}", timeout=0)
            acknowledge(writer.save(state_of(writer.term, step), step=step).ref)  # then it looks for requests
    return f"{begin}@{writer.term}..{step}@{writer.term}"


def promised(acknowledged: Iterable[str]) -> set[str]:
    """The REFs that must exist after these acknowledgements, in any order."""
    labels = set(acknowledged)
    return {label for label in labels if not label.startswith("-") and f"-{label}" not in labels}


def _maintain(store: Store) -> None:
    view = store.view()
    fold_writer.fold(store.journal, view)
    fold_writer.trim(store.journal, store.view())


def check(backend: Backend, acknowledged: Iterable[str], *, write: bool = True) -> int:
    """Check the store after a crash; returns the number of checkpoints restored.

    Args:
        acknowledged: the acknowledgements before the crash.
        write: also continue writing, and check again.

    Raises:
        Violation: a promise is broken.
    """
    wanted = promised(acknowledged)
    store = Store(backend)
    try:
        store.format  # noqa: B018
    except StoreNotFoundError:
        if wanted:
            raise Violation(f"the store is gone, and with it {sorted(wanted)}") from None
        return 0
    report = verify(store, threads=1)
    if not report.ok:
        raise Violation(f"damage after a crash: {report.damage}")
    visible = {info.ref for info in store.checkpoints()}
    if missing := wanted - visible:
        raise Violation(f"acknowledged and gone: {sorted(missing)}")
    for ref in sorted(visible):  # an unacknowledged checkpoint may be there, but then it is whole
        compare(store, ref)
    restored = len(visible)
    if write:
        with _ignoring_lost_steps(), store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
            step = 1 + (0 if writer.parent is None else writer.parent.step)
            new = writer.save(state_of(writer.term, step), step=step).ref
        restored += check(backend, wanted | {new}, write=False)
    return restored


@contextlib.contextmanager
def _ignoring_lost_steps() -> Iterator[None]:
    """Steps that waited for their batch were never acknowledged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LostStepsWarning)
        yield


def compare(store: Store, ref: str) -> None:
    """Restore `ref` and compare it with what was saved. Raises `Violation`."""
    wanted = state_of(*node_of(ref))
    try:
        found = store.load(ref, framework="numpy")
    except CheckpointNotFoundError as error:
        raise Violation(f"{ref} is listed and cannot be found") from error
    if not same_state(found, wanted):
        raise Violation(f"{ref} was restored with other bits")


def same_state(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two states are equal bit for bit."""
    return list(found) == list(wanted) and all(_same(found[name], wanted[name]) for name in wanted)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes())
    return type(one) is type(two) and bool(one == two)
