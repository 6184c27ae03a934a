"""Plans how a data loader continues from a saved state: by its own state, by batch count, or by sample count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from ckptstore.errors import FormatError
from ckptstore.training.loaders import loader_facts
from ckptstore.training.loaders.loader_facts import Difference
from ckptstore.training.loaders.rest_of_epoch import padding

__all__ = ["FORMAT", "LoaderPlan", "is_stateful", "keeps_iterator", "keeps_state", "plan_loader", "read"]

FORMAT: Final = 2


def is_stateful(value: object) -> bool:
    """Whether it has ``state_dict`` and ``load_state_dict``, and can use them.

    A loader that Accelerate prepared always has them. They work if it was prepared with ``use_stateful_dataloader``.
    """
    if getattr(value, "use_stateful_dataloader", True) is False:
        return False
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


def plan_loader(loader: Any, saved: Mapping[str, Any], made: Mapping[str, Any]) -> LoaderPlan:
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
                f"loader: the checkpoint holds the state of a loader that saved its own position, and "
                f"{type(loader).__name__} cannot restore it. Give the loader that was saved, with as many "
                "worker processes, or leave loader= out"
            )
        said = _report(changed, "its own state says where it continues", prevents=True) if asks else ()
        return LoaderPlan("inner" if asks else "next", asks, 0, said)
    if saved["finished"]:
        keeps = asks and (not isinstance(loader, DataLoader) or keeps_state(loader))
        return LoaderPlan("next", keeps, 0, _report(changed, "another epoch begins with that", prevents=False))
    asks = asks and not _counts_twice(loader, saved["inner"])
    if not changed:
        return LoaderPlan("inner" if asks else "counted", asks, saved["given"])
    assert before is not None
    return _MidEpoch(loader, saved, asks, before, now).plan(changed)


class _MidEpoch:
    """A loader that has changed in the middle of an epoch, as the rules compare it.

    Attributes:
        given: batches that were yielded. `position`: samples that all ranks yielded; None: unknown.
        same_order: the samples come in the same order.
        known: it is known which samples all ranks yielded.
        by_sample: samples can be skipped one by one.
        own: its own state is restored, and says where the epoch continues.
        old_size, size: samples in a batch, before and now; None: unknown.
        sized: both are known. `resized`: they differ.
        count: batches to skip, if they are counted. `again`: samples that are repeated then.
        divided: worker processes may divide the samples differently. `other_stream`: its `IterableDataset` differs.
    """

    def __init__(
        self, loader: Any, saved: Mapping[str, Any], asks: bool, before: Mapping[str, Any], now: Mapping[str, Any]
    ) -> None:
        self._now = now
        self.given: int = saved["given"]
        self.position = loader_facts.position(saved)
        self.same_order = loader_facts.same_order(before, now)
        apart = (before["ranks"], before["shared"]) != (now["ranks"], now["shared"])
        self.known = not apart or all(one["shared"] or one["ranks"] == 1 for one in (before, now))
        self.by_sample = self.position is not None and loader_facts.batch_sampler(loader) is not None
        self.old_size, self.size = before["batch_size"], now["batch_size"]
        self.sized = self.old_size is not None and self.size is not None
        self.resized = self.old_size != self.size
        self.own = asks
        if asks and self.resized and isinstance(loader, DataLoader):
            self.own = keeps_state(loader)  # without its own position torchdata counts batches
        self.count, self.again = self.given, 0
        if self.sized and self.resized:
            self.count, self.again = divmod(self.samples, self.size)
        iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
        self.divided = before["workers"] != now["workers"] and iterable
        self.other_stream = bool(loader_facts.other_stream(before, now))

    @property
    def samples(self) -> int:
        """Samples in the batches that were yielded."""
        return self.given * int(self.old_size)

    @property
    def amount(self) -> str:
        """What was yielded, in words."""
        return f"{self.given} batches" if self.position is None else f"{self.position} samples"

    @property
    def rest(self) -> str:
        """How the epoch continues after `position`, in words."""
        assert self.position is not None
        return _rest_of_samples(self.position, self._now)

    def plan(self, changed: list[str]) -> LoaderPlan:
        """Decide by the first rule that applies.

        Args:
            changed: what has changed, as sentences.
        """
        rule = next(one for one in _RULES if one.applies(self))
        remarks = [text for applies, text in _REMARKS if rule.remarks and applies(self)]
        skipped = {"inner": self.given, "counted": self.count, "samples": self.position or 0, "anew": 0}[rule.way]
        said = rule.said.format(it=self) + "".join(remarks)
        prevents = not rule.exact or bool(remarks)
        return LoaderPlan(rule.way, rule.way == "inner", skipped, _report(changed, said, prevents=prevents))


class _Rule(NamedTuple):
    """How a changed loader continues in the middle of an epoch.

    Attributes:
        applies: compares the loader with what it was.
        way: see `LoaderPlan`.
        exact: no sample is skipped or repeated.
        said: how the epoch continues, with attributes of `_MidEpoch`.
        remarks: `_REMARKS` are added.
    """

    applies: Callable[[_MidEpoch], bool]
    way: str
    exact: bool
    said: str
    remarks: bool = False


_SHARES: Final = (
    "each rank continues where an earlier rank stopped: which samples the other ranks yielded is unknown, so some may "
    "be repeated or skipped"
)
_RULES: Final = (
    _Rule(
        lambda it: not it.same_order and it.given > 0,
        "anew",
        False,
        "the epoch starts again: the {it.amount} already yielded are repeated if the loader still has them, and none "
        "is skipped",
    ),
    _Rule(lambda it: not it.same_order, "anew", False, "the epoch starts again: it had yielded nothing"),
    _Rule(lambda it: it.known and it.by_sample, "samples", True, "{it.rest}"),
    _Rule(lambda it: not it.known and it.own, "inner", False, _SHARES),
    _Rule(lambda it: not it.known, "counted", False, _SHARES),
    _Rule(lambda it: it.own and it.resized, "inner", False, "its own state says where it continues", True),
    _Rule(lambda it: it.own, "inner", True, "the epoch continues after batch {it.given}", True),
    _Rule(lambda it: not it.resized, "counted", True, "the epoch continues after {it.given} batches", True),
    _Rule(lambda it: not it.sized, "counted", False, "the epoch continues after {it.given} batches", True),
    _Rule(
        lambda it: it.again > 0,
        "counted",
        False,
        "the epoch continues after {it.count} batches of {it.size} samples: {it.again} of the {it.samples} samples "
        "already yielded are repeated, and none is skipped",
        True,
    ),
    _Rule(
        lambda _: True,
        "counted",
        True,
        "the epoch continues after {it.count} batches of {it.size} samples: none of the {it.samples} samples already "
        "yielded is repeated, and none is skipped",
        True,
    ),
)
"""The first one that applies decides."""
_REMARKS: Final[tuple[tuple[Callable[[_MidEpoch], bool], str], ...]] = (
    (
        lambda it: it.divided,
        ": if the worker processes divide the samples of this IterableDataset among them, they divided them "
        "differently before: some samples may be repeated or skipped",
    ),
    (
        lambda it: it.other_stream,
        ". If that changes the order of its samples, some may be repeated or skipped",
    ),
)
"""Each one that applies is added to what is said: samples may be skipped or repeated."""


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


def _counts_twice(loader: Any, inner: Any) -> bool:
    """Whether torchdata's loader would read the batches that were yielded again, and count them again.

    It does so if neither an `IterableDataset` nor its iterator has a state. Its next state then has twice the position,
    from which the next run would skip samples (torchdata 0.11).

    Args:
        inner: the loader's own state. With worker processes it contains the state of each.
    """
    # Prevents: samples that no epoch yields, silently.
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset) or is_stateful(dataset):
        return False
    states = list(_members(inner, "dataset_iter_state"))
    return bool(states) and all(one is None for one in states)


def _members(value: Any, key: str) -> Iterator[Any]:
    """The values that mappings inside `value` have under `key`."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name == key:
                yield one
            else:
                yield from _members(one, key)


def read(state: Any) -> Mapping[str, Any]:
    """A loader's state, of any version."""
    if isinstance(state, Mapping) and state.get("format") == FORMAT and "begun" in state:
        return state
    empty: dict[str, Any] = {"epoch": 0, "given": 0, "start": 0, "finished": False, "begun": None, "own": {}}
    empty |= {"inner": None, "facts": None}
    if isinstance(state, Mapping) and set(state) == {"epoch", "given", "begun"}:
        return {**empty, **state}  # an earlier version counted batches
    return {**empty, "inner": state}  # an earlier version stored only the loader's own state


def _report(changed: list[str], what: str, *, prevents: bool) -> tuple[Difference, ...]:
    """The changes, and their consequence; empty if there are none."""
    if not changed:
        return ()
    return (*(Difference(f"loader: {one}", False) for one in changed), Difference(what, prevents))


def _rest_of_samples(position: int, now: Mapping[str, Any]) -> str:
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


def keeps_state(loader: DataLoader[Any]) -> bool:
    """Whether a part of it may carry state from one epoch to the next."""
    parts = (loader.dataset, loader.sampler, loader.batch_sampler)
    return any(callable(getattr(one, "load_state_dict", None)) for one in parts)
