"""Tracks the position of a loader that Accelerate prepared (``DataLoaderShard``, ``DataLoaderDispatcher``).

Such a loader wraps torch's or torchdata's, its ``base_dataloader``, and differs from it in what a resumed run repeats:

- ``__iter__`` is a generator. It makes the base's iterator, and draws random numbers for the order, when the first
  batch is requested.
- It fetches each batch before it yields the one before. When a step is saved, the next batch is already loaded.
- It counts epochs (``iteration``), and tells its sampler and dataset (``set_epoch``). The base does not know of this.
- With ``use_stateful_dataloader`` its constructor makes an iterator, which the first epoch would use.

So the positions of the two differ, and each is restored at the batch at which the run had reached it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ckptstore.errors import FormatError
from ckptstore.host.caller_warnings import DeterminismWarning, warn
from ckptstore.training import rng
from ckptstore.training.loaders import loader_facts
from ckptstore.training.loaders.counted_batches import CountedBatches
from ckptstore.training.loaders.loader_facts import Difference
from ckptstore.training.loaders.loader_plans import (
    LoaderPlan,
    is_stateful,
    keeps_iterator,
    keeps_state,
    plan_loader,
    read,
)
from ckptstore.training.loaders.rest_of_epoch import RestOfEpoch

__all__ = ["PreparedBatches", "is_prepared"]

_MARKS: Final = ("base_dataloader", "use_stateful_dataloader", "iteration", "end_of_dataloader")
"""Public attributes by which a prepared loader is recognized."""
_SEED: Final = ".initial_seed"
"""Of Accelerate's seedable sampler: the seed of the process that made it. It is restored like a generator's state."""


def is_prepared(loader: Any) -> bool:
    """Whether Accelerate prepared it."""
    return all(hasattr(loader, name) for name in _MARKS) and callable(getattr(loader, "set_epoch", None))


class PreparedBatches(CountedBatches):
    """Yields the batches of a prepared loader, epoch by epoch, and counts them; see `CountedBatches`."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        if made := self._made_with["made_with"]:
            # Prevents: an epoch that starts again because the script has another seed: the checkpoint's is restored.
            kept = {name: one for name, one in made.items() if not name.endswith(_SEED)}
            self._made_with = {**self._made_with, "made_with": kept or None}
        self._untouched_base = is_stateful(loader)  # it has the iterator that its constructor made
        self._settled = False  # the base's iterator is made, and the next call only fetches a batch
        self._watched = False  # the last call was such a one
        self._late = False  # the next epoch starts workers that the run had started before; their stream is read once
        self._ahead: Mapping[str, Any] | None = None  # the generators before the last batch was fetched
        self._drew = False  # fetching a batch draws random numbers in this process

    # -- its state

    def state_dict(self) -> Any:
        """What `CountedBatches` has, and the rest of a prepared loader's position.

        ``iteration`` (its number of the epoch), ``seed`` (of its sampler), ``ended`` (the epoch's last batch was
        yielded), ``ahead`` (the generators before the batch was fetched that the next call yields; None: fetching
        draws nothing).
        """
        state = super().state_dict()
        state["iteration"] = self.loader.iteration
        state["seed"] = getattr(loader_facts.sampler_of(self.loader), "initial_seed", None)
        if self._sent is not None:  # there was no iteration since the state was restored
            return {**state, "ended": self._sent.get("ended", False), "ahead": self._sent.get("ahead")}
        state["ended"] = self._given > 0 and not self._finished and bool(self.loader.end_of_dataloader)
        state["ahead"] = self._ahead if self._drew else None
        return state

    def compare(self, state: Any) -> list[Difference]:
        """As `CountedBatches.compare`."""
        return super().compare(self._read(state))

    def load_state_dict(self, state: Any) -> None:
        """Continue from there: the next iteration yields the rest of the epoch. Raises as `CountedBatches`."""
        super().load_state_dict(self._read(state))
        saved = self._sent
        assert saved is not None
        self._untouched_base = self._settled = self._late = False
        self._ahead, self._drew = saved.get("ahead"), saved.get("ahead") is not None
        if isinstance(saved.get("iteration"), int):
            self.loader.set_epoch(saved["iteration"])
        sampler = loader_facts.sampler_of(self.loader)
        if isinstance(saved.get("seed"), int) and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = saved["seed"]

    def _read(self, state: Any) -> Mapping[str, Any]:
        """The state; if the loader has changed since an epoch's last batch was yielded, that of the next epoch."""
        saved = read(state)
        if not saved.get("ended") or not plan_loader(self.loader, saved, self._made_with).differences:
            return saved
        # Prevents: an epoch that is over, and starts again with other batches.
        return {**saved, "ended": False, "finished": True, "iteration": saved["iteration"] + 1}

    def _ask(self, saved: Mapping[str, Any], plan: LoaderPlan) -> tuple[LoaderPlan, frozenset[str]]:
        if not _is_over(saved, plan) or keeps_state(self.loader):
            return super()._ask(saved, plan)
        # Prevents: an epoch that begins with one iterator more, which draws: torchdata would make that of the epoch
        # that is over first.
        self.loader.load_state_dict({})
        return plan, frozenset()

    def _inner(self) -> Any:
        """The base's own state; None: the position cannot be restored from it, so batches are counted."""
        if not is_stateful(self.loader) or self._raises or self._start:
            return None
        if self._sent is not None:
            return self._sent["inner"]
        # A dispatcher fetches the batches of all ranks at once, and its state counts them as one.
        dispatched = getattr(getattr(self.loader, "state", None), "num_processes", 1) > 1
        # torchdata reads the beginning of such a stream again, and then counts these batches twice.
        reread = self._is_stream() and not keeps_state(self.loader)
        # After the first call it is unknown whether fetching draws: that call made the iterator, too.
        unknown = self._draws_here() and not self._watched
        if self._begun is None or dispatched or reread or self._drew or unknown:
            return None
        return self._asked_for()

    # -- an epoch

    def _next(self, batches: Iterator[Any]) -> Any:
        self._watched, self._settled = self._settled, True
        if not self._watched or not self._draws_here():
            self._ahead = None
            return next(batches)
        before, own = rng.global_states(), self._dataset_states()
        batch = next(batches)
        self._ahead = before
        self._drew = self._drew or rng.first_moved(before) is not None or not rng.equal(own, self._dataset_states())
        return batch

    def _begin(self) -> Iterator[Any]:
        if self._untouched_base:
            # Prevents: a first epoch that no other process can repeat, because its iterator was made, and with worker
            # processes its order was drawn, by the constructor.
            self.loader.load_state_dict({})
        self._untouched_base = self._settled = False
        self._ahead, self._drew = None, False
        self.loader.set_epoch(self.loader.iteration)  # as its __iter__ does
        return super()._begin()

    def _new_epoch(self) -> Iterator[Any]:
        late, self._late = self._late, False
        now = self._generators()
        batches = super()._new_epoch()
        return self._opened(batches, now, fetched=False) if late else batches

    def _continued(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        plan, now = self._plan, self._generators()
        if _is_over(saved, plan):
            return self._ended(now)
        begun = saved["begun"]
        if begun is None or plan.way not in ("inner", "counted", "samples"):
            if plan.way == "next" and begun is not None and self._starts_workers() and self._is_stream():
                self._sent, self._late = None, True
                return self._new_epoch()
            return super()._continued(saved)
        self._sent = None
        self._check_epoch(saved)
        self._restart_epoch(begun, plan)
        if plan.way == "samples":
            self._given, self._start = 0, plan.skipped
        batches = self._batches()
        if plan.way == "samples" or plan.differences or self._facts is None:
            self._facts = self._facts_now()
        if plan.way != "counted":
            return self._opened(batches, now, fetched=True)
        self._count(batches, plan, saved.get("ahead"))
        self._set(now)
        return batches

    def _ended(self, now: Mapping[str, Any]) -> Iterator[Any]:
        """No more batches of an epoch whose last one was yielded, without loading them again."""
        self._sent = None
        self.loader.set_epoch(self.loader.iteration + 1)
        if self._starts_workers() and self._is_stream():
            self._late = True
        elif self._starts_workers() or (is_stateful(self.loader) and keeps_state(self.loader)):
            # Prevents: draws that the run made in an earlier epoch, or that it never made; see `CountedBatches`.
            self._make()
            self._set(now)
        return iter(())

    def _check_epoch(self, saved: Mapping[str, Any]) -> None:
        """Set the epoch that continues, and warn if the script has set another one."""
        wanted, now = saved.get("iteration"), self.loader.iteration
        if not isinstance(wanted, int) or now == wanted:
            return
        self.loader.set_epoch(wanted)
        warn(
            f"the loader's epoch was set to {now}, but the checkpoint is in the middle of epoch {wanted}, which "
            f"continues: call set_epoch({wanted}) for it, and continue to count from there "
            "(checkpointer.loader.iteration)",
            DeterminismWarning,
        )

    def _count(self, batches: Iterator[Any], plan: LoaderPlan, ahead: Mapping[str, Any] | None) -> None:
        """Fetch and discard the batches that were yielded before."""
        self._given = plan.skipped
        for number in range(plan.skipped):
            if ahead is not None and 0 < number == plan.skipped - 1:
                rng.restore(ahead)  # this call fetches the batch that is yielded next
            if next(batches, self) is self:
                raise FormatError(f"the loader ends after {number} batches, but {plan.skipped} were yielded before")
        self._settled = plan.skipped > 0

    def _opened(self, batches: Iterator[Any], now: Mapping[str, Any], *, fetched: bool) -> Iterator[Any]:
        """The same iterator, which sets the generators to `now` when it has made the base's iterator.

        Args:
            fetched: not before the first batch was fetched. The run had fetched it when the step was saved; the second
                one, which is fetched in the same call, it had not.
        """
        self.loader.base_dataloader = _Opening(self.loader, lambda: self._set(now), fetched=fetched)
        return batches

    def _batches(self) -> Iterator[Any]:
        batches = loader_facts.batch_sampler(self.loader)
        if self._start and batches is not None:
            self._rest = RestOfEpoch(batches, self._start)
        found: Iterator[Any] = iter(self.loader)
        self._made, self._settled = True, False
        return found

    def _make(self) -> None:
        iter(self.loader.base_dataloader)  # an iterator of the loader itself would draw nothing yet
        self._made = True

    def _starts_workers(self) -> bool:
        """Whether the next iteration starts the workers that the run had started in an earlier epoch."""
        return keeps_iterator(self.loader) and not self._made

    def _draws_here(self) -> bool:
        """Whether this process loads samples, so that its generators may be used for that."""
        return not self.loader.num_workers

    def _dataset_states(self) -> dict[str, Any]:
        own = loader_facts.own_generators(self.loader).items()
        return {name: rng.state_of(one) for name, one in own if name.startswith("dataset.")}


def _is_over(saved: Mapping[str, Any], plan: LoaderPlan) -> bool:
    """Whether the epoch's last batch was yielded, and nothing in the loader has changed."""
    return bool(saved.get("ended")) and not plan.differences and plan.way in ("inner", "counted")


class _Opening:
    """Stands for a loader's base until the loader asks for an iterator."""

    def __init__(self, loader: Any, opened: Callable[[], None], *, fetched: bool) -> None:
        self.base_in_use = loader.base_dataloader
        self._loader = loader
        self._opened = opened
        self._fetched = fetched

    def __getattr__(self, name: str) -> Any:
        if name == "base_in_use":
            raise AttributeError(name)  # a copy that is being made has none yet
        return getattr(self.base_in_use, name)

    def __len__(self) -> int:
        return len(self.base_in_use)

    def __iter__(self) -> Iterator[Any]:
        self._loader.base_dataloader = self.base_in_use
        batches: Iterator[Any] = iter(self.base_in_use)
        if not self._fetched:
            self._opened()
            return batches
        return self._first_apart(batches)

    def _first_apart(self, batches: Iterator[Any]) -> Iterator[Any]:
        first = list(itertools.islice(batches, 1))
        self._opened()
        yield from first
        yield from batches
