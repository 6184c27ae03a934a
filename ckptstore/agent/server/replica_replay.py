"""Computes a replica of the newest state: repeats the optimizers' steps on the state before, and checks digests.

The result is not trusted. The agent compares it with digests of the trainer's tensors. If some differ, the state is
unproven: it is not written, and the trainer sends these tensors whole with a later step. Until then each step is
computed from the unproven one, and is unproven, too, unless digests say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from ckptstore.agent.protocol.message_fields import StateLayout, TensorForm, number, read, read_labels, whole_number
from ckptstore.agent.protocol.replica_arithmetic import rule_of
from ckptstore.agent.protocol.replica_recipe import Proof, Recipe, Row, read_entries, read_recipe
from ckptstore.agent.server.agent_snapshot import FilledBuffer, UnprovenState, UnwrittenState, state_in_buffer
from ckptstore.agent.server.shared_buffers import SharedBuffer
from ckptstore.agent.server.snapshot_keeper import SnapshotKeeper
from ckptstore.errors import AgentError, CkptError, UnsupportedStateError
from ckptstore.formats import optim
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.optim.step_settings import MAX_COUNT
from ckptstore.frameworks import bridge
from ckptstore.host.batched_copies import BatchedCopies, run_shared
from ckptstore.host.buffers import Bytes
from ckptstore.host.prefault import populate
from ckptstore.write.steps.updates import Update

__all__ = ["ReplicaReplay", "read_replica", "warmed"]

_LATER: Final = 2
"""Any count but 1, for optimizers that keep none: the step that creates SGD's buffer is never repeated."""
_PART: Final = 1 << 20
"""Numbers that one thread computes without torch at once."""
_MOST_AREAS: Final = 16
_MOST_THREADS: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class _OptimizerCall:
    """One step of one optimizer.

    Attributes:
        optimizer: position of the optimizer.
        settings: settings of each group.
        moved: rows whose parameters had a gradient; None: all rows of the optimizer.
        scaling: see `TorchSteps.step`.
        sparse: the number of entries of each gradient that is sent as its entries, by row.
    """

    optimizer: int
    settings: list[dict[str, Any]]
    moved: frozenset[int] | None
    scaling: tuple[float | None, float | None]
    sparse: dict[int, int]

    def moves(self, row: int) -> bool:
        """Whether a row's parameter had a gradient."""
        return self.moved is None or row in self.moved


class ReplicaReplay:
    """Computes states by one recipe. Only the session's thread for slow work calls it."""

    def __init__(self, keeper: SnapshotKeeper, recipe: Recipe, areas: Mapping[int, SharedBuffer]) -> None:
        """
        Args:
            areas: buffers that the trainer fills, by number.
        """
        self._keeper = keeper
        self._recipe = recipe
        self._areas = dict(areas)
        self._stages: dict[int, _Stage] = {}
        self._gradients: dict[int, dict[int, Any]] = {}

    def prepare(self) -> None:
        """Touch the memory of the areas, so that the first step need not."""
        for area in self._areas.values():
            try:
                populate(area.shared.memory)
            except MemoryError:
                return  # the step that needs the memory reports it

    def advance(self, body: Mapping[str, Any]) -> UnwrittenState | UnprovenState:
        """Compute the next state. Unproven: some of its tensors differ from the trainer's.

        Args:
            body: the ``advance`` message of docs/agent.md.

        Raises:
            AgentError: the message is invalid, or the state that it builds on is not the last one.
            MemoryError: there is no memory for another state.
        """
        recipe, keeper = self._recipe, self._keeper
        step, after = whole_number(body["step"]), whole_number(body["after"])
        if step <= after:
            raise AgentError(f"step {step} after step {after}")
        area = self._area(body["area"])
        calls = read("calls", body["calls"], self._calls)
        whole = read("whole", body.get("whole", ()), self._whole)
        base = keeper.base(after)
        if base is None or base.layout != recipe.layout:
            raise AgentError(f"the replica is not at step {after}: a whole state is needed")
        size = recipe.layout.plan.size
        buffer = keeper.pool.take(size)
        try:
            stage = self._stage(buffer)
            BatchedCopies([(stage.address, _address(base.buffer.shared.memory), size)]).run(keeper.workers)
            bridge.optimizers().set_threads(max(1, whole_number(body["threads"], _MOST_THREADS)))
            entries = {row: self._entries(area, row, count) for call in calls for row, count in call.sparse.items()}
            for call in calls:
                stage.step(call, self._gradients_of(area))
                run_shared(keeper.workers, stage.exact_steps(call, area))
            stage.sent(area).run(keeper.workers)
            stage.put(whole)
            wrong = stage.proof.differs(recipe.digests_in(area.shared.memory), keeper.workers)
            if wrong:
                follow = self._computed_from(base.unproven) - whole.keys()
                unproven = {recipe.made[one]: recipe.made[one] not in follow for one in wrong}
                return UnprovenState(step, recipe.layout, buffer, unproven)
            filled = FilledBuffer(buffer.number, recipe.layout, body["tree"], *read_labels(body))
            return UnwrittenState(
                step, filled, buffer, state_in_buffer(filled, buffer), self._updates(calls, stage, entries)
            )
        except BaseException:
            keeper.pool.give_back(buffer)
            raise

    def _area(self, form: Any) -> SharedBuffer:
        number = whole_number(form)
        area = self._areas.get(number)
        # Prevents: a gradient that is made dense in memory which was given back, and may hold the newest state now.
        if area is None or self._keeper.pool.lent(number) is not area:
            raise AgentError(f"buffer {number} is not an area of this replica")
        return area

    def _whole(self, form: Any) -> dict[int, Bytes]:
        """The bytes of each tensor that is sent whole once, by position."""
        made, found = set(self._recipe.made), {}
        for buffer, tensors in form:
            memory = self._keeper.pool.lent(whole_number(buffer)).shared.memory
            for position, start in tensors:
                place, begin = whole_number(position), whole_number(start)
                if place not in made:
                    raise AgentError(f"tensor {place} is not one that the agent computes")
                if place in found:
                    raise AgentError(f"tensor {place} is sent whole twice")
                end = begin + self._recipe.layout.tensors[place].nbytes
                if end > len(memory):
                    raise AgentError(f"tensor {place} ends at byte {end} of {len(memory)}")
                found[place] = memory[begin:end]
        return found

    def _computed_from(self, unproven: Collection[int]) -> set[int]:
        """Positions of the tensors that are computed from tensors of which one is unproven."""
        found = set(unproven)
        for row in self._recipe.rows:
            positions = {number for _, number in row.slots}
            if not positions.isdisjoint(unproven):
                found |= positions
        return found

    def _calls(self, form: Any) -> list[_OptimizerCall]:
        found: dict[int, _OptimizerCall] = {}
        for optimizer, settings, moved, scaling, sparse in form:
            place = whole_number(optimizer, len(self._recipe.kinds) - 1)
            if place in found:
                raise AgentError(f"optimizer {place} steps twice")
            if len(settings) != self._recipe.groups[place]:
                raise AgentError(f"settings of {len(settings)} groups for {self._recipe.groups[place]}")
            scale, infinity = (None if one is None else number(one) for one in scaling)
            rows = None if moved is None else frozenset(self._row(row, place) for row in moved)
            counts: dict[int, int] = {}
            for row, count in sparse:
                own = self._sparse_row(row, place)
                if own in counts or (rows is not None and own not in rows):
                    raise AgentError(f"row {own} has entries twice, or no gradient")
                counts[own] = whole_number(count)
            found[place] = _OptimizerCall(place, [_checked(one) for one in settings], rows, (scale, infinity), counts)
        return [*found.values()]

    def _row(self, form: Any, optimizer: int) -> int:
        row = whole_number(form, len(self._recipe.rows) - 1)
        if self._recipe.rows[row].optimizer != optimizer:
            raise AgentError(f"row {row} is not of optimizer {optimizer}")
        return row

    def _sparse_row(self, form: Any, optimizer: int) -> int:
        row = self._row(form, optimizer)
        if row not in self._recipe.gradients or self._weight(row).dtype != "F32":
            raise AgentError(f"row {row} has no fp32 gradient")
        return row

    def _weight(self, row: int) -> TensorForm:
        return self._recipe.layout.tensors[self._recipe.rows[row].weight]

    def _entries(self, area: SharedBuffer, row: int, count: int) -> SparseGradient:
        """Make a gradient in an area dense, of which the entries were sent -> a copy of the entries."""
        start = self._recipe.gradients[row]
        return read_entries(area.shared.memory[start : start + self._weight(row).nbytes], count)

    def _stage(self, buffer: SharedBuffer) -> _Stage:
        for gone in [one for one in self._stages if not self._keeper.pool.has(one)]:
            del self._stages[gone]
        stage = self._stages.get(buffer.number)
        if stage is None:
            stage = self._stages[buffer.number] = _Stage(self._recipe, buffer)
        return stage

    def _gradients_of(self, area: SharedBuffer) -> dict[int, Any]:
        """The gradients in an area, by row, as torch sees them."""
        found = self._gradients.get(area.number)
        if found is None:
            layout, rows = self._recipe.layout, self._recipe.rows
            found = self._gradients[area.number] = {
                row: _tensor(layout, rows[row].weight, area.shared.memory, start)
                for row, start in self._recipe.gradients.items()
            }
        return found

    def _updates(
        self, calls: Sequence[_OptimizerCall], stage: _Stage, entries: Mapping[int, SparseGradient]
    ) -> list[Update]:
        """What the optimizers did, for a writer that stores step diffs. Other tensors are stored as differences."""
        by_optimizer = {call.optimizer: call for call in calls}
        numbers: dict[tuple[int, int], tuple[optim.Optimizer, float]] = {}
        for call in calls:
            for group, its in enumerate(call.settings):
                try:
                    settings = optim.from_group(self._recipe.kinds[call.optimizer], its)
                    numbers[call.optimizer, group] = settings, float(its["lr"])
                except (CkptError, LookupError, TypeError, ValueError):
                    continue
        found: list[Update] = []
        for place, row in enumerate(self._recipe.rows):
            known, its_call = numbers.get((row.optimizer, row.group)), by_optimizer.get(row.optimizer)
            if known is None or its_call is None or (its_call.moved is not None and place not in its_call.moved):
                continue
            skipped = bool(its_call.scaling[1])
            update = _update(self._recipe.layout, dict(row.slots), known, stage.count(row.slots), skipped)
            if update is not None and its_call.scaling[0] is None:  # else the kernel divides the gradient first
                update = replace(update, gradient=entries.get(place))
            if update is not None:
                found.append(update)
        return found


def _update(
    layout: StateLayout, slots: Mapping[str, int], numbers: tuple[optim.Optimizer, float], count: int, skipped: bool
) -> Update | None:
    settings, lr = numbers
    try:
        step = optim.Step(count, lr, skipped=skipped)
        forms = [layout.tensors[slots[name]] for name in settings.rule(step).slots]
    except (LookupError, ValueError):
        return None
    if any(one.dtype != "F32" or one.shape != forms[0].shape or not one.nbytes for one in forms):
        return None
    return Update(tuple(one.name for one in forms), settings, step)


class _Stage:
    """A buffer in which states are computed, as tensors.

    Attributes:
        address: address of its memory.
        proof: digests of the tensors that are computed in it.
    """

    def __init__(self, recipe: Recipe, buffer: SharedBuffer) -> None:
        self._recipe = recipe
        self._memory = buffer.shared.memory
        self.address = _address(self._memory)
        offsets, forms = recipe.layout.plan.offsets, recipe.layout.tensors
        self._starts = [offsets[one.name] for one in forms]
        self._images = [self._memory[at : at + one.nbytes] for at, one in zip(self._starts, forms, strict=True)]
        summed = {place for place, number in enumerate(recipe.made) if number in set(recipe.summed)}
        self.proof = Proof([self._images[number] for number in recipe.made], summed)
        self._copies: dict[int, BatchedCopies] = {}
        self._rows: list[list[list[int]]] = [[[] for _ in range(count)] for count in recipe.groups]
        for place, row in enumerate(recipe.rows):
            if row.made:
                self._rows[row.optimizer][row.group].append(place)
        self._steps = [self._optimizer(kind, groups) for kind, groups in zip(recipe.kinds, self._rows, strict=True)]

    def _optimizer(self, kind: str, groups: Sequence[Sequence[int]]) -> Any:
        """The optimizer over this buffer; None: the agent updates none of its parameters."""
        if not any(groups):
            return None

        def tensor(place: int) -> Any:
            return _tensor(self._recipe.layout, place, self._memory, self._starts[place])

        rows = [[dict(self._recipe.rows[number].slots) for number in group] for group in groups]
        return bridge.optimizers().TorchSteps(kind, rows, tensor)

    def step(self, call: _OptimizerCall, gradients: Mapping[int, Any]) -> None:
        """Perform one step of an optimizer."""
        steps = self._steps[call.optimizer]
        if steps is None:
            return
        found = [
            [
                None if self._recipe.variant(call.optimizer, place) or not call.moves(row) else gradients[row]
                for row in group
            ]
            for place, group in enumerate(self._rows[call.optimizer])
        ]
        steps.step(call.settings, found, call.scaling)

    def exact_steps(self, call: _OptimizerCall, area: SharedBuffer) -> list[Callable[[], None]]:
        """Jobs that perform one step of an optimizer for the parameters whose groups have a variant.

        Raises:
            AgentError: there is no such variant, or these parameters have no such step.
        """
        jobs: list[Callable[[], None]] = []
        for place, group in enumerate(self._rows[call.optimizer]):
            variant = self._recipe.variant(call.optimizer, place)
            moved = [one for one in group if call.moves(one)]
            if variant is None or not moved:
                continue
            if call.scaling != (None, None):
                raise AgentError(f"variant {variant!r} has no step that a scaler scales")
            for at in moved:
                row = self._recipe.rows[at]
                try:
                    kind = self._recipe.kinds[call.optimizer]
                    rule = rule_of(kind, call.settings[place], variant, self._count_after(row, area))
                    slots = dict(row.slots)
                    state = [self._floats(self._images[slots[name]], slots[name]) for name in rule.slots]
                except (CkptError, LookupError, TypeError, ValueError, OverflowError) as error:
                    raise AgentError(f"variant {variant!r:.40}: {error}") from error
                start = self._recipe.gradients[at]
                gradient = area.shared.memory[start : start + 4 * len(state[0])].view(np.float32)
                jobs += [
                    partial(
                        optim.advance,
                        rule,
                        [one[begin : begin + _PART] for one in state],
                        gradient[begin : begin + _PART],
                    )
                    for begin in range(0, len(gradient), _PART)
                ]
        return jobs

    def _floats(self, image: Bytes, number: int) -> Any:
        if self._recipe.layout.tensors[number].dtype != "F32":
            raise AgentError("only parameters and slots in F32 have variants")
        return image.view(np.float32)

    def _count_after(self, row: Row, area: SharedBuffer) -> int:
        """How many steps a parameter was updated in, with this one: the count is sent, and not put here yet."""
        place = dict(row.slots).get("step")
        start = None if place is None else self._recipe.places.get(place)
        if place is None or start is None:
            return _LATER
        form = self._recipe.layout.tensors[place]
        if form.dtype != "F32" or form.nbytes != 4:
            raise AgentError(f"a count of steps is {form.dtype}")
        return int(area.shared.memory[start : start + 4].view(np.float32)[0])

    def sent(self, area: SharedBuffer) -> BatchedCopies:
        """The copies of the tensors that are sent."""
        copies = self._copies.get(area.number)
        if copies is None:
            start, forms = _address(area.shared.memory), self._recipe.layout.tensors
            copies = self._copies[area.number] = BatchedCopies(
                [
                    (self.address + self._starts[number], start + place, forms[number].nbytes)
                    for number, place in self._recipe.places.items()
                ]
            )
        return copies

    def put(self, whole: Mapping[int, Bytes]) -> None:
        """Replace computed tensors, by position."""
        for place, found in whole.items():
            self._images[place][:] = found

    def count(self, slots: Sequence[tuple[str, int]]) -> int:
        """How many steps a parameter was updated in."""
        place = dict(slots).get("step")
        if place is None or self._recipe.layout.tensors[place].dtype != "F32" or len(self._images[place]) != 4:
            return _LATER
        value = float(self._images[place].view(np.float32)[0])
        return min(max(int(value), 1), MAX_COUNT) if np.isfinite(value) else _LATER


def warmed() -> None:
    """Import torch and perform a step, which takes seconds, so that the first replica need not wait."""
    bridge.optimizers().warm_up()


def read_replica(body: Mapping[str, Any], layout: StateLayout, keeper: SnapshotKeeper) -> ReplicaReplay:
    """Read the ``replica`` message of docs/agent.md.

    Raises:
        AgentError: it is invalid.
    """
    recipe = read("recipe", body["recipe"], lambda form: read_recipe(form, layout))
    numbers = [whole_number(one) for one in body["areas"]]
    if not 0 < len(numbers) <= _MOST_AREAS:
        raise AgentError(f"{len(numbers)} areas")
    areas = {one: keeper.pool.lent(one) for one in numbers}
    if any(area.nbytes < recipe.nbytes for area in areas.values()):
        raise AgentError(f"an area has less than {recipe.nbytes} bytes")
    return ReplicaReplay(keeper, recipe, areas)


def _checked(settings: Any) -> dict[str, Any]:
    """Check the settings of a group: numbers, flags, lists of numbers."""
    for name, value in settings.items():
        parts = value if isinstance(value, list) else [value]
        if not all(one is None or isinstance(one, bool | int | float) for one in parts):
            raise AgentError(f"setting {name!r:.40}: {value!r:.80}")
    return dict(settings)


def _tensor(layout: StateLayout, place: int, memory: Bytes, start: int) -> Any:
    form = layout.tensors[place]
    try:
        return bridge.tensors().from_buffer(form.dtype, form.shape, memory[start : start + form.nbytes])
    except (UnsupportedStateError, ValueError) as error:
        raise AgentError(f"tensor {form.name!r:.80}: {error}") from error


def _address(memory: Bytes) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
