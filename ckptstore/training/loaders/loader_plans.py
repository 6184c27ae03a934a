"""Plans how a data loader continues from a saved state: by its own state, by batch count, or by sample count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from ckptstore.errors import FormatError
from ckptstore.training.loaders import loader_facts
from ckptstore.training.loaders.loader_facts import Difference
from ckptstore.training.loaders.rest_of_epoch import padding

__all__ = ["FORMAT", "LoaderPlan", "is_stateful", "keeps_iterator", "planned", "read"]

FORMAT: Final = 2


def is_stateful(value: object) -> bool:
    """Whether it has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def keeps_iterator(loader: Any) -> bool:
    """Whether it makes only one iterator, with worker processes that outlive an epoch."""
    return bool(getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0))


class LoaderPlan(NamedTuple):
    """How a loader continues.

    Attributes:
        way: ``inner``: as its own state says. ``counted``: batches are loaded and discarded. ``samples``: indices are
            skipped. ``anew``: the epoch starts again. ``next``: the epoch was over or had not begun.
        asks: its own state is restored.
        skipped: batches (``counted``) or samples (``samples``) to skip.
        differences: what has changed in the loader.
    """

    way: str
    asks: bool = False
    skipped: int = 0
    differences: tuple[Difference, ...] = ()


def planned(loader: Any, saved: Mapping[str, Any], made: Mapping[str, Any]) -> LoaderPlan:
    """Decide how a loader continues from a saved state.

    Args:
        saved: the state, from `read`.
        made: see `loader_facts.made`.

    Raises:
        FormatError: the state belongs to a loader with ``state_dict``, and this loader cannot use it.
    """
    before = saved["facts"]
    now = loader_facts.facts(loader, made=made, beside=before)
    asks = _usable(loader, saved, now)
    changed = [] if before is None else loader_facts.differences(before, now)
    if asks and before is not None and str(now["order"]).startswith("shuffled by torchdata."):
        # torchdata's state records how the order was drawn, so another generator alone changes nothing.
        changed = [] if changed == [loader_facts.redrawn(before, now)] else changed
    if saved["begun"] is None:
        if saved["inner"] is not None and not asks:
            raise FormatError(
                f"loader: the checkpoint holds the state of a loader that says where it is, and "
                f"{type(loader).__name__} cannot be sent there. Give the loader that was saved, with as many "
                "worker processes, or leave loader= out"
            )
        said = _told(changed, "its own state says where it continues", prevents=True) if asks else ()
        return LoaderPlan("inner" if asks else "next", asks, 0, said)
    if saved["finished"]:
        keeps = asks and (not isinstance(loader, DataLoader) or _keeps_state(loader))
        return LoaderPlan("next", keeps, 0, _told(changed, "another epoch begins with that", prevents=False))
    if not changed:
        return LoaderPlan("inner" if asks else "counted", asks, saved["given"])
    assert before is not None
    return _changed(loader, saved, asks, changed, before, now)


def _changed(
    loader: Any,
    saved: Mapping[str, Any],
    asks: bool,
    changed: list[str],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
) -> LoaderPlan:
    """Decide how a changed loader continues in the middle of an epoch."""
    position, given = loader_facts.position(saved), saved["given"]
    if not loader_facts.same_order(before, now):
        out = f"{given} batches" if position is None else f"{position} samples"
        what = (
            f"the epoch starts again: the {out} already yielded are repeated if the loader still has "
            "them, and none is skipped"
            if given
            else "the epoch starts again: it had yielded nothing"
        )
        return LoaderPlan("anew", False, 0, _told(changed, what, prevents=True))
    apart = (before["ranks"], before["shared"]) != (now["ranks"], now["shared"])
    known = not apart or all(one["shared"] or one["ranks"] == 1 for one in (before, now))
    if position is not None and known and loader_facts.batch_sampler(loader) is not None:
        return LoaderPlan("samples", False, position, _told(changed, _exactly(position, now), prevents=False))
    size, new = before["batch_size"], now["batch_size"]
    if asks and size != new and isinstance(loader, DataLoader):
        asks = _keeps_state(loader)  # without its own position torchdata counts batches
    count, again = given, 0
    if asks:
        what = "its own state says where it continues" if size != new else f"the epoch continues after batch {given}"
    elif size == new or size is None or new is None:
        what = f"the epoch continues after {given} batches"
    else:
        count, again = divmod(given * size, new)
        twice = f"{again} of the {given * size} samples already yielded are repeated"
        if not again:
            twice = f"none of the {given * size} samples already yielded is repeated"
        what = f"the epoch continues after {count} batches of {new} samples: {twice}, and none is skipped"
    divided = before["workers"] != now["workers"] and isinstance(getattr(loader, "dataset", None), IterableDataset)
    if divided:
        what += (
            ": if the worker processes divide the samples of this IterableDataset among them, they divided them "
            "differently before: some samples may be repeated or skipped"
        )
    stream = bool(loader_facts.other_stream(before, now))
    if stream:
        what += ". If that changes the order of its samples, some may be repeated or skipped"
    if not known:
        what = (
            "each rank continues where an earlier rank stopped: which samples the other ranks yielded is unknown, so "
            "some may be repeated or skipped"
        )
    inexact = not known or divided or stream or bool(again) or (size != new and (asks or size is None or new is None))
    return LoaderPlan("inner" if asks else "counted", asks, count, _told(changed, what, prevents=inexact))


def _usable(loader: Any, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the loader can restore its own saved state."""
    if saved["inner"] is None or not is_stateful(loader):
        return False
    before, begun = saved["facts"], saved["begun"]
    if before is None or not isinstance(loader, DataLoader):
        return True
    if before["kind"] != now["kind"] or before["workers"] != now["workers"]:
        return False
    # Making an iterator draws a random number, and then torch's sampler draws its seed. With persistent workers a later
    # epoch makes no iterator, so its sampler drew the seed first: a new iterator would draw another seed.
    drawn = str(before["order"]).startswith(("shuffled by torch.", "that of"))
    return not (keeps_iterator(loader) and begun is not None and not begun["created"] and drawn)


def read(state: Any) -> Mapping[str, Any]:
    """A loader's state, of any version."""
    if isinstance(state, Mapping) and state.get("format") == FORMAT and "begun" in state:
        return state
    empty: dict[str, Any] = {"epoch": 0, "given": 0, "start": 0, "finished": False, "begun": None, "own": {}}
    empty |= {"inner": None, "facts": None}
    if isinstance(state, Mapping) and set(state) == {"epoch", "given", "begun"}:
        return {**empty, **state}  # an earlier version counted batches
    return {**empty, "inner": state}  # an earlier version stored only the loader's own state


def _told(changed: list[str], what: str, *, prevents: bool) -> tuple[Difference, ...]:
    """The changes, and their consequence; empty if there are none."""
    if not changed:
        return ()
    return (*(Difference(f"loader: {one}", False) for one in changed), Difference(what, prevents))


def _exactly(position: int, now: Mapping[str, Any]) -> str:
    """The sentence that says after which sample the epoch continues, and what becomes of the others."""
    all_samples = now["samples"] if now["shared"] else now["epoch_samples"]
    if all_samples is None:
        return f"the epoch continues after the {position} samples already yielded"
    left, ranks = all_samples - position, now["ranks"] if now["shared"] else 1
    if left <= 0:
        return f"all samples of the epoch were already yielded ({position})"
    more = padding(left, ranks, drop_last=bool(now["drop_last_share"]))
    dropped = -min(more, 0)
    if now["drop_last"]:
        dropped += (left + more) // ranks % now["batch_size"] * ranks
    said = f"the epoch continues after the {position} samples already yielded: the other {left} are yielded once each"
    if dropped:
        said += f", except {dropped} that drop_last drops"
    return f"{said}, and {more} are repeated so that all ranks get the same number" if more > 0 else said


def _keeps_state(loader: DataLoader[Any]) -> bool:
    """Whether a part of it may carry state from one epoch to the next."""
    parts = (loader.dataset, loader.sampler, loader.batch_sampler)
    return any(callable(getattr(one, "load_state_dict", None)) for one in parts)
