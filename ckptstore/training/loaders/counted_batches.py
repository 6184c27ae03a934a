"""Tracks a data loader's position: by its own state or by counting, with the generators of the epoch.

A loader with ``state_dict`` (torchdata's ``StatefulDataLoader``) restores its own position. With any other the epoch
starts again, and the batches that were used before are loaded and discarded. Both make an iterator in the middle of an
epoch, and that draws random numbers, which an uninterrupted run drew when the epoch began. So the generators are set to
the state of that time before the iterator is made, and to the state of training after that.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from types import GeneratorType
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckptstore.errors import FormatError
from ckptstore.host.caller_warnings import DeterminismWarning, warn
from ckptstore.training import rng
from ckptstore.training.loaders import loader_facts
from ckptstore.training.loaders.loader_facts import Difference
from ckptstore.training.loaders.loader_plans import FORMAT, LoaderPlan, is_stateful, keeps_iterator, plan_loader, read
from ckptstore.training.loaders.rest_of_epoch import RestOfEpoch

__all__ = ["CountedBatches"]

_LOG: Final = logging.getLogger("ckptstore.training")
_OWN: Final = frozenset({"loader", "epoch", "given"})


class CountedBatches:
    """Yields a loader's batches, epoch by epoch, and counts them. Iterate over this, not over the loader.

    All other attributes are the loader's. Only one iteration at a time: a second one begins the next epoch. A shuffling
    sampler has to draw when the epoch begins, as torch's samplers do, from the global generators or from a generator
    that is an attribute of the loader, its sampler or its dataset.

    Attributes:
        loader: the wrapped loader.
        epoch: how many epochs began before the current one (the loader's own attribute, if it has this name).
        given: how many batches of the current epoch were yielded (likewise).
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._made_with = loader_facts.made(loader)
        self._epoch = self._given = self._start = 0
        self._finished = False
        self._begun: dict[str, Any] | None = None
        self._facts: dict[str, Any] | None = None  # of the epoch
        self._made = False  # whether this process has made an iterator
        self._asked = False  # whether `state_dict` has made the iterator of the epoch
        self._raises = False  # whether the loader's state_dict raises
        self._sent: Mapping[str, Any] | None = None  # the state to continue from
        self._plan = LoaderPlan("next")
        self._was_sent = False
        self._turn = object()  # the iteration that counts
        self._stale = False
        self._rest: RestOfEpoch | None = None
        self._remarks: list[str] = []
        self._said_workers = False
        self._saved_with: Mapping[str, Any] | None = None  # the global generators in the checkpoint of the last step
        self._said_drawn = False

    # -- as the loader

    def __len__(self) -> int:
        return len(self.loader)  # the loader's own error, if it has no length

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)  # a copy that is being made has none yet
        try:
            return getattr(self.loader, name)
        except AttributeError:
            if name not in _OWN:
                raise
        return self._epoch if name == "epoch" else self._given

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loader" or name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        turn = self._turn = object()
        self._stale = False
        self.saved(None)  # draws between epochs are allowed: a resumed run repeats them
        batches = self._new_epoch() if self._sent is None else self._continued(self._sent)
        while True:
            if self._turn is turn:
                self._check_drawn()
            try:
                batch = self._next(batches)
            except StopIteration:
                if self._turn is turn:
                    self._finished = True
                return
            if self._turn is turn:
                self._given += 1
            else:
                self._note_replacement()
            yield batch

    @property
    def untouched(self) -> bool:
        """Whether the script should have iterated over this, but has not since it was made or restored.

        A loader that is not iterable yields its batches in another way. A loader with ``state_dict`` outside torch may
        draw nothing while it makes an iterator: this matters only in a resumed run.
        """
        if not self._is_iterable():
            return False
        idle = self._sent is not None or (self._begun is None and not self._made) or self._asked
        return idle and (not is_stateful(self.loader) or isinstance(self.loader, DataLoader) or self._was_sent)

    def finish(self) -> None:
        """Note that no more batches of this epoch will be taken: a run that is resumed from here begins the next one.

        An iteration that ends notes this itself. Call it where a loop stops after the last batch that it wants.
        """
        self._finished = True

    # -- its state

    def state_dict(self) -> Any:
        """The position, and what decides which samples come next.

        ``epoch``, ``given`` (batches), ``start`` (samples before the first of these batches), ``finished`` (the epoch),
        ``begun`` (the generators when the epoch began), ``own`` (the loader's generators now), ``inner`` (the loader's
        own state, if it has one), ``facts`` (see `loader_facts`). A loader that is not iterable has only its own state.
        """
        if not self._is_iterable():
            return self.loader.state_dict()
        inner = self._inner()
        own = loader_facts.own_generators(self.loader)
        return {
            "format": FORMAT,
            "epoch": self._epoch,
            "given": self._given,
            "start": self._start,
            "finished": self._finished,
            "begun": self._begun,
            "own": {name: rng.state_of(one) for name, one in own.items()},
            "inner": inner,
            "facts": self._facts or self._facts_now(contents=False),  # no epoch has begun
        }

    def compare(self, state: Any) -> list[Difference]:
        """What has changed in the loader since a state was saved, with the consequences. It changes nothing.

        Raises:
            FormatError: this loader cannot continue from that state.
        """
        return list(plan_loader(self.loader, read(state), self._made_with).differences)

    def load_state_dict(self, state: Any) -> None:
        """Continue from there: the next iteration yields the rest of the epoch.

        Raises:
            FormatError: this loader cannot continue from that state.
            what the loader's own ``load_state_dict`` raises.
        """
        saved = read(state)
        plan = plan_loader(self.loader, saved, self._made_with)
        self._leave_rest()
        leave: frozenset[str] = frozenset()
        if is_stateful(self.loader) and isinstance(self.loader, DataLoader):
            self._made = False  # it forgets its iterator
            if not plan.asks:
                forget: Any = self.loader
                with contextlib.suppress(Exception):  # a restored position that it has not used yet
                    forget.load_state_dict({})
        if plan.asks:
            plan, leave = self._ask(saved, plan)
        self._set_own(saved["own"], leave)
        self._sent, self._plan, self._was_sent = saved, plan, True
        self._epoch, self._given, self._start = saved["epoch"], saved["given"], saved["start"]
        self._finished, self._begun, self._facts = saved["finished"], saved["begun"], saved["facts"]
        self._asked = False
        self._turn, self._stale = object(), True
        self._remarks = self._said(saved, plan)

    def remark(self) -> None:
        """Warn (`DeterminismWarning`, once) why the resumed run cannot equal the one that was saved."""
        remarks, self._remarks = self._remarks, []
        if remarks:
            warn("; ".join(remarks), DeterminismWarning)

    def saved(self, generators: Mapping[str, Any] | None) -> None:
        """Note with which global generators (`rng.global_states`) the step was saved.

        None: it was not saved, or the generators were restored.
        """
        self._saved_with = generators

    # -- an epoch

    def _new_epoch(self) -> Iterator[Any]:
        """Iterate over an epoch from its beginning."""
        self._leave_rest()
        if self._asked:
            self._asked = False
            return iter(self.loader)
        self._epoch += self._begun is not None
        return self._begin()

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch; StopIteration: there is none."""
        return next(batches)

    def _begin(self) -> Iterator[Any]:
        self._given = self._start = 0
        self._finished = False
        self._facts = self._facts_now()
        self._begun = self._generators()
        batches: Iterator[Any] = iter(self.loader)
        self._made = True
        return batches

    def _continued(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Iterate over the rest of the epoch in a resumed run."""
        self._sent = None
        plan, now = self._plan, self._generators()
        if plan.way == "next" and self._begun is not None:
            self._epoch += 1
            again = plan.asks and isinstance(self.loader, DataLoader)
            created = keeps_iterator(self.loader) and not self._made
            if created and not again and self._is_stream():
                # Its iterator is not made twice: worker processes would read ahead in the dataset.
                batches = self._begin()
                self._set(now)
                return batches
            if again or created:
                # Prevents: draws that the run made in an earlier epoch (the only iterator over persistent workers), or
                # that it never made (torchdata continues the epoch that is over before it begins the next).
                self._make()
                self._set(now)
        if plan.way in ("next", "anew"):
            return self._begin()
        begun = saved["begun"]
        if begun is not None:
            self._restart_epoch(begun, plan)
        if plan.way == "samples":
            self._given, self._start = 0, plan.skipped
        batches = self._batches()
        if plan.way == "samples" or plan.differences or self._facts is None:
            self._facts = self._facts_now()
        if plan.way == "counted":
            self._given = plan.skipped
            for number in range(plan.skipped):
                if next(batches, self) is self:
                    raise FormatError(f"the loader ends after {number} batches, but {plan.skipped} were yielded before")
        lazy = plan.way == "inner" and isinstance(batches, GeneratorType)
        if lazy and isinstance(self.loader, DataLoader):
            batches = self._first_taken(batches)
        elif plan.way == "inner" and self._ended_short():
            # Prevents: another order in the next epoch. To fill that batch, the run asked the sampler beyond its end,
            # where torch's RandomSampler draws once more. torchdata, which skips the samples, does not.
            batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
        self._set(now)  # includes what training drew meanwhile (dropout, above all), which was not drawn again
        return self._first_watched(batches) if lazy and not isinstance(self.loader, DataLoader) else batches

    def _restart_epoch(self, begun: Mapping[str, Any], plan: LoaderPlan) -> None:
        """Restore everything to the beginning of the epoch."""
        sampler = loader_facts.sampler_of(self.loader)
        epoch = begun.get("sampler_epoch")
        if epoch is not None and callable(getattr(sampler, "set_epoch", None)) and sampler.epoch != epoch:
            now = sampler.epoch
            sampler.set_epoch(epoch)
            self._remarks.append(
                f"the sampler's epoch was set to {now}, but the checkpoint is in the middle of epoch {epoch}, which "
                f"continues: call set_epoch({epoch}) for it, and continue to count from there"
            )
            self.remark()
        self._set(begun)
        created = begun.get("created", True)
        if plan.way == "inner" or not keeps_iterator(self.loader) or created != self._made or self._is_stream():
            return
        if created:
            one: Any = [0]
            iter(DataLoader(one, generator=self.loader.generator))  # draws the same numbers as making the iterator did
        else:
            self._make()  # it was made in an earlier epoch
            self._set(begun)

    def _ended_short(self) -> bool:
        """Whether the last batch that was yielded is the epoch's last one, has fewer samples than the others, and was
        loaded by this process."""
        loader = self.loader
        if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.num_workers or self._is_stream():
            return False
        try:
            whole, rest = divmod(len(loader.sampler), loader.batch_size)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return False  # a sampler without a length
        return rest > 0 and not loader.drop_last and self._given == whole + 1

    def _is_stream(self) -> bool:
        """Whether the dataset itself, not a sampler, decides the order of samples."""
        return isinstance(getattr(self.loader, "dataset", None), IterableDataset)

    def _make(self) -> None:
        """Make and discard an iterator of the loader, for the numbers that it draws and the workers that it starts."""
        iter(self.loader)
        self._made = True

    def _batches(self) -> Iterator[Any]:
        """An iterator over the epoch, without its first samples if they are skipped."""
        batches = loader_facts.batch_sampler(self.loader)
        if self._start and batches is not None:
            self._rest = RestOfEpoch(batches, self._start)
        found: Iterator[Any] = iter(self.loader)
        self._made = True
        if self._rest is not None:
            self._rest.draw()
        return found

    def _first_taken(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same iterator after loading its first batch: only then a wrapper of torch's loader makes its iterator."""
        first = list(itertools.islice(batches, 1))
        drawn = str(loader_facts.order(self.loader)).startswith(("shuffled by torch.", "that of"))
        if drawn and getattr(loader_facts.sampler_of(self.loader), "generator", None) is None:
            lost = "its sampler takes its order from the global generators: pass it its own generator=, or samples "
            lost += "may be repeated or skipped in this epoch"
        else:
            lost = (
                "if loading a sample draws random numbers (augmentation), the first batches of this run draw "
                "different ones"
            )
        self._remarks.append(
            f"{type(self.loader).__name__} makes its iterator when the first batch is requested: {lost}"
        )
        self.remark()
        return itertools.chain(first, batches)

    def _first_watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same iterator; warns if loading the first batch draws random numbers, because their use is unknown."""
        before = rng.global_states()
        first = list(itertools.islice(batches, 1))
        if not rng.equal(before, rng.global_states()):
            self._remarks.append(
                f"{type(self.loader).__name__}.__iter__ is a generator, and random numbers were drawn when its first "
                "batch was requested: if they were not for that batch (but to shuffle, say), this run draws "
                "different random numbers. Draw when the epoch begins, or keep the drawn numbers in state_dict"
            )
            self.remark()
        yield from first
        yield from batches

    def _leave_rest(self) -> None:
        if self._rest is not None:
            self._rest.remove()
            self._rest = None

    def _note_replacement(self) -> None:
        """Note that another iteration or a restore replaced this one between two batches. Warn if it was a restore."""
        if self._stale:
            self._stale = False
            warn(
                "an iterator over Checkpointer.loader that was made before resume() or rollback() is used after it: "
                "its batches do not follow the checkpoint. Make a new one: iter(checkpointer.loader)",
                DeterminismWarning,
            )

    def _check_drawn(self) -> None:
        """Warn, once, of random numbers that were drawn after the step was saved, in the middle of an epoch."""
        saved, self._saved_with = self._saved_with, None
        if saved is None or self._said_drawn or (name := rng.first_moved(saved)) is None:
            return
        self._said_drawn = True
        # Prevents: silently different losses after a resume.
        warn(
            f"random numbers were drawn ({name}'s global generator) between checkpointer.step() and the next batch, "
            "as by a DataLoader for validation: a run resumed from that step does not repeat it, and its losses "
            "differ from there on (unless its loop draws the same before it asks for its first batch). Do it before "
            "checkpointer.step(), or give that loader a generator= of its own",
            DeterminismWarning,
        )

    def _facts_now(self, *, contents: bool = True) -> dict[str, Any]:
        return loader_facts.facts(self.loader, contents=contents, made=self._made_with)

    def _is_iterable(self) -> bool:
        kind = type(self.loader)
        return hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")

    # -- generators

    def _generators(self) -> dict[str, Any]:
        own = loader_facts.own_generators(self.loader)
        sampler = loader_facts.sampler_of(self.loader)
        epoch = getattr(sampler, "epoch", None)
        return {
            "global": rng.global_states(),
            "own": {name: rng.state_of(one) for name, one in own.items()},
            "sampler_epoch": epoch if isinstance(epoch, int) and hasattr(sampler, "set_epoch") else None,
            "created": not self._made,
        }

    def _set(self, state: Mapping[str, Any]) -> None:
        rng.restore(state["global"])
        self._set_own(state["own"])

    def _set_own(self, states: Any, leave: frozenset[str] = frozenset()) -> None:
        own = loader_facts.own_generators(self.loader)
        if not isinstance(states, Mapping):  # an earlier version stored only torch's generators, without names
            found = [one for one in own.values() if isinstance(one, torch.Generator)]
            for generator, state in zip(found, states, strict=False):
                rng.set_state(generator, state)
            return
        for name, one in own.items():
            if name in states and name not in leave:
                rng.set_state(one, states[name])

    # -- continuing

    def _inner(self) -> Any:
        """The loader's own state; None: it has none, or an unusable one."""
        if not is_stateful(self.loader) or self._raises or self._start:
            return None  # with a start, the loader does not count from the epoch's first sample
        sent = self._sent
        if sent is not None and self._plan.way != "inner":
            return sent["inner"]  # there was no iteration since the state was restored
        if not isinstance(self.loader, DataLoader) or (sent is None and self._begun is not None):
            return self._asked_for()
        # Prevents: a save that draws random numbers of training, or a resumed run that draws others. If there is no
        # iterator yet, torchdata's `state_dict` makes one, and the next iteration uses that one.
        now = self._generators()
        if sent is not None and sent["begun"] is not None:
            self._set(sent["begun"])
        before = rng.global_states()
        state = self._asked_for()
        drew = not rng.equal(before, rng.global_states())
        if sent is not None:
            self._set(now)
        elif drew:
            self._begun, self._facts = now, self._facts_now()
        if drew:
            self._sent, self._asked, self._made = None, True, True
        return state

    def _asked_for(self) -> Any:
        try:
            return self.loader.state_dict()
        except Exception as error:  # noqa: BLE001  # whatever it raises, counting works without it
            self._raises = True
            _LOG.warning(
                "%s.state_dict() raises %s: %s. Its batches are counted: a resumed run loads the epoch's batches again "
                "up to its position",
                type(self.loader).__name__,
                type(error).__name__,
                error,
            )
            return None

    def _ask(self, saved: Mapping[str, Any], plan: LoaderPlan) -> tuple[LoaderPlan, frozenset[str]]:
        """Restore the loader's own state -> the plan (another one if that fails), and the generators that this set."""
        before = {name: rng.state_of(one) for name, one in loader_facts.own_generators(self.loader).items()}
        try:
            self.loader.load_state_dict(saved["inner"])
        except Exception as error:
            if saved["begun"] is None:
                raise
            _LOG.warning(
                "%s.load_state_dict() raises %s: %s. The epoch's batches up to its position are loaded again",
                type(self.loader).__name__,
                type(error).__name__,
                error,
            )
            plan = plan._replace(way="counted" if plan.way == "inner" else plan.way, asks=False, skipped=saved["given"])
        # The loader may set them to their state when the epoch began, because it uses them to make the iterator.
        after = loader_facts.own_generators(self.loader).items()
        return plan, frozenset(name for name, one in after if not rng.equal(rng.state_of(one), before.get(name)))

    def _said(self, saved: Mapping[str, Any], plan: LoaderPlan) -> list[str]:
        """The warnings on a plan."""
        said = [one.sentence for one in plan.differences]
        created = saved["begun"] is None or saved["begun"].get("created", True)
        fresh = plan.way == "inner" or (plan.way == "counted" and keeps_iterator(self.loader) and not created)
        workers = getattr(self.loader, "num_workers", 0)
        if not said and fresh and workers and saved["given"] and not self._said_workers:
            self._said_workers = True
            said.append(
                f"the random generators of the loader's {workers} worker processes start again, because they cannot be "
                "saved. The samples and their order are those of the run that was saved; but if "
                "loading a sample draws random numbers (augmentation), they differ. Draw them from the sample's "
                "index, use num_workers=0, or filter this warning if loading a sample draws nothing"
            )
        return said
