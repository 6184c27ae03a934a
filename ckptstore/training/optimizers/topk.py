"""Top-k compression of gradients with error feedback, as a communication hook of DistributedDataParallel.

::

    hook = TopKHook(density=0.01)
    hook.register(ddp)                    # or, in one process, hook.compress(model.parameters()) after backward
    Checkpointer(..., compressor=hook, strategy="gradient")

Each rank adds every gradient to its *residual*, which holds what it has not sent yet. It sends the entries of largest
magnitude and keeps the rest: Stich et al., "Sparsified SGD with Memory", 2018, algorithm 1. With `momentum` it adds the
velocity instead, and removes what was sent from both: Lin et al., "Deep Gradient Compression", 2018, equations 4 and 7
("momentum correction"; the optimizer must then have no momentum).

Infinities and NaNs are the largest entries, so some are sent and a ``GradScaler`` skips the step. None is kept: a
residual would hold it for ever.

The ranks gather one another's entries (indices and values, the same number on each) and add them in the order of the
ranks, so all get the same bits. The optimizer consumes that sum, possibly clipped. Only the gathered entries can differ
from zero, so a step diff stores only these (`consumed`).

Residuals are part of a run's state, and each rank has its own: the Checkpointer saves them. They change by the dense
gradient in each step, so prediction cannot make them small, and they take most of a checkpoint's bytes. With
``exact=False`` they are not saved. Then a checkpoint is as small as what was sent, and a resumed run continues without
what was not sent yet (as LowDiff does). That is not bit-identical, and a warning says so.

With shards (FSDP2, tensor parallelism) there is no hook of communication: call `compress` after backward. Each rank
takes the largest entries of its own parts, whose gradients are summed by then, and sends nothing. What it keeps is
sharded as the parameters are, so another number of ranks can continue.

On a CUDA device the host waits for nothing: every size follows from the density, and the entries that a step diff
stores are copied to the host while training continues (`queued_entries`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Literal

import numpy as np
import torch

from ckptstore.errors import UsageError
from ckptstore.formats.optim import SparseGradient
from ckptstore.frameworks.torch_device_memory import bytes_of, count_in
from ckptstore.frameworks.torch_shards import local_gradient, part_for, sharded_as
from ckptstore.frameworks.torch_tensors import counted_changes
from ckptstore.host.caller_warnings import DeterminismWarning, warn
from ckptstore.training.optimizers.queued_entries import EntriesOnDevice, queued_entries
from ckptstore.write.steps.updates import LateGradient, arrived

__all__ = ["TopKHook"]

_MOST: Final = 2**31
"""Most numbers of a bucket, because indices are sent as int32."""
_SAMPLE: Final = 1 << 14
"""Numbers in the sample that estimates the magnitude of the largest entries."""


class TopKHook:
    """Sends the largest entries of gradients, and keeps the rest for later.

    Attributes:
        density: the share of the entries that each rank sends, at least one of each tensor (or bucket).
        scope: ``tensor``: the largest entries of each parameter. ``bucket``: the largest of all parameters that DDP
            reduces together, so layers of small gradients may have to wait. With ``bucket_cap_mb`` above the model's
            size, and for `compress`, that is the whole model.
        momentum: the factor of the momentum correction; 0: none.
        exact: whether residuals are saved.
    """

    def __init__(
        self,
        density: float = 0.01,
        *,
        scope: Literal["tensor", "bucket"] = "tensor",
        momentum: float = 0.0,
        exact: bool = True,
    ) -> None:
        """Set the options.

        Raises:
            UsageError: a density outside 0 < density <= 1, an unknown scope, or a momentum outside 0 <= momentum < 1.
        """
        if not 0.0 < density <= 1.0:
            raise UsageError(f"density: {density!r}; a share above 0 and at most 1 is needed")
        if scope not in ("tensor", "bucket"):
            raise UsageError(f"scope: {scope!r}; it may be 'tensor' or 'bucket'")
        if not 0.0 <= momentum < 1.0:
            raise UsageError(f"momentum: {momentum!r}; at least 0 and below 1 is needed")
        self.density = density
        self.scope = scope
        self.momentum = momentum
        self.exact = exact
        # By the parameter itself: DDP puts parameters into other buckets after the first step.
        self._residuals: dict[torch.Tensor, torch.Tensor] = {}
        self._velocities: dict[torch.Tensor, torch.Tensor] = {}
        self._indices: dict[torch.Tensor, torch.Tensor] = {}  # ascending, in host memory
        self._on_device: dict[torch.Tensor, EntriesOnDevice] = {}
        self._left: dict[torch.Tensor, _Untouched] = {}
        self._names: dict[torch.Tensor, str] = {}
        self._group: Any = None
        count_in(self)

    def register(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Compress a model's gradients. Call it once, before the first backward."""
        self._group = model.process_group
        model.register_comm_hook(self, _communicate)

    def communicate(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The average of what all ranks send of one of DDP's buckets (a ``GradBucket``)."""
        parameters, gradients = bucket.parameters(), bucket.gradients()
        if not all(one.is_contiguous() for one in gradients):
            raise UsageError("gradients that are not contiguous (channels_last) cannot be compressed")
        buffer: torch.Tensor = bucket.buffer()
        sent = self._sent(parameters, gradients)
        ranks = torch.distributed.get_world_size(self._group)
        # One collective for both: fp32 values travel as the int32 that have their bits.
        letter = torch.cat([sent.places.to(torch.int32), sent.values.float().view(torch.int32)])
        letters = letter.new_empty(ranks * letter.numel())
        handle = torch.distributed.all_gather_into_tensor(letters, letter, group=self._group, async_op=True)

        def averaged(_: Any) -> torch.Tensor:
            with torch.no_grad():
                found = letters.view(ranks, 2, -1)
                buffer.zero_()
                for one in found:
                    buffer.index_add_(0, one[0].long(), one[1].view(torch.float32).to(buffer.dtype))
                buffer.div_(ranks)
                if buffer.is_cuda:
                    self._note_on_device(parameters, found[:, 0], sent.counts)
                else:
                    self._note(parameters, found[:, 0].reshape(-1).long().unique())  # type: ignore[no-untyped-call]
            return buffer

        done: torch.futures.Future[torch.Tensor] = handle.get_future().then(averaged)
        return done

    def compress(self, parameters: Iterable[torch.Tensor]) -> None:
        """Without DDP: keep only the largest entries of each ``.grad``, in place. Call it after ``backward()``.

        Raises:
            UnsupportedStateError: the gradient of a DTensor is not placed as the parameter.
        """
        with torch.no_grad():
            there = [(one, gradient) for one in parameters if (gradient := local_gradient(one)) is not None]
            if not there:
                return
            found, gradients = [one for one, _ in there], [gradient for _, gradient in there]
            sent = self._sent(found, gradients)
            if sent.counts is None:
                self._fill_pooled(gradients, sent)
                self._note_on_device(found, sent.places, None)
            else:
                self._fill(found, gradients, sent)
            for parameter in found:
                self._left[parameter] = _Untouched(parameter)

    def _fill(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], sent: _Sent) -> None:
        """Set gradients to what is sent of them."""
        parts = sent.values.split(sent.counts)  # type: ignore[no-untyped-call]
        for parameter, gradient, at, part in zip(parameters, gradients, sent.picked, parts, strict=True):
            gradient.zero_()
            if gradient.is_contiguous():
                gradient.view(-1)[at] = part.to(gradient.dtype)
            else:
                flat = torch.zeros(gradient.numel(), dtype=part.dtype, device=part.device)
                flat[at] = part
                gradient.copy_(flat.view(gradient.shape))
            if gradient.is_cuda:
                self._on_device[parameter] = EntriesOnDevice((parameter,), at)
            else:
                self._indices[parameter] = at.sort().values

    def _fill_pooled(self, gradients: Sequence[torch.Tensor], sent: _Sent) -> None:
        """Set gradients to what is sent of all of them together."""
        flat = torch.zeros(sum(one.numel() for one in gradients), device=sent.values.device)
        flat[sent.places] = sent.values
        for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):  # type: ignore[no-untyped-call]
            gradient.copy_(part.view(gradient.shape))

    def consumed(self, parameters: Sequence[torch.Tensor]) -> Mapping[torch.Tensor, SparseGradient]:
        """What is left of the gradients, after clipping too: called before the optimizer consumes them.

        A gradient to which something else was added (and so has entries elsewhere) is not in it. Waits for a device.
        """
        read = {one: arrived(found) for one, found in self.consumed_later(parameters).items()}
        return {one: found for one, found in read.items() if isinstance(found, SparseGradient)}

    def consumed_later(
        self, parameters: Sequence[torch.Tensor], *, checked: Collection[torch.Tensor] = ()
    ) -> Mapping[torch.Tensor, SparseGradient | LateGradient]:
        """As `consumed`, but gradients on a CUDA device are copied to the host while training continues.

        Args:
            checked: parameters whose entries are counted even if torch has not seen the gradient change since
                `compress`. A set or mapping: tensors are compared by identity.
        """
        found: dict[torch.Tensor, SparseGradient | LateGradient] = {}
        unchanged: set[torch.Tensor] = set()
        devices: dict[torch.device, dict[EntriesOnDevice, None]] = {}
        for parameter in parameters:
            indices, on_device = self._indices.get(parameter), self._on_device.get(parameter)
            gradient = local_gradient(parameter)
            if gradient is None or gradient.dtype != torch.float32:
                continue
            # Nobody has touched what `compress` has left: the rest need not be read. Who does so past torch's count
            # (``.data``) makes a step dearer to store: what is predicted from this is compared with the state. A
            # replica drops the step, and checks that gradient from then on.
            left = self._left.pop(parameter, None)
            touched = left is None or not left.holds(parameter) or parameter in checked
            if on_device is not None:
                devices.setdefault(gradient.device, {})[on_device] = None
                if not touched:
                    unchanged.add(parameter)
            elif indices is not None:
                flat = gradient.detach().reshape(-1)
                values = flat[indices]
                if touched and _entries(flat) != _entries(values):
                    continue
                found[parameter] = SparseGradient(indices.cpu().numpy(), values.cpu().numpy(), flat.numel())
        with torch.no_grad():
            for entries in devices.values():
                found |= queued_entries(list(entries), unchanged)
        asked = set(parameters)
        return {parameter: one for parameter, one in found.items() if parameter in asked}

    def named(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Say what the parameters are called: `state_dict` and `load_state_dict` go by names."""
        self._names = {parameter: name for name, parameter in parameters}

    def state_dict(self) -> dict[str, Any]:
        """What was not sent yet, and the velocities, by parameter name."""
        if not self.exact:
            return {}
        return {"residuals": self._named(self._residuals), "velocities": self._named(self._velocities)}

    def _named(self, kept: Mapping[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self._names[one]: sharded_as(one, part) for one, part in kept.items() if one in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what was not sent then; without, if that was not saved."""
        if not state or not self.exact:
            warn(
                "resuming without the residuals of compressed gradients (TopKHook(exact=False)): the run will not be "
                "bit-identical to one that never stopped",
                DeterminismWarning,
            )
        parameters = {name: parameter for parameter, name in self._names.items()}
        for own, kept in ((self._residuals, "residuals"), (self._velocities, "velocities")):
            own.clear()
            for name, tensor in (state.get(kept, {}) if self.exact else {}).items():
                own[parameters[name]] = part_for(parameters[name], tensor).to(parameters[name].device).clone()
        self._indices.clear()
        self._on_device.clear()
        self._left.clear()

    def device_bytes(self) -> int:
        """Bytes of device memory that it holds: residuals, velocities, and where it has found entries."""
        # Copies of the values: training may add some meanwhile.
        noted = {id(one): one.places for one in list(self._on_device.values())}
        return bytes_of([*self._residuals.values(), *self._velocities.values(), *noted.values()])

    def _sent(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> _Sent:
        """Take what is sent out of the residuals."""
        kept = [self._accumulated(one, gradient) for one, gradient in zip(parameters, gradients, strict=True)]
        sizes = [one.numel() for one in kept]
        if sum(sizes) >= _MOST:
            raise UsageError(f"a bucket of {sum(sizes)} numbers, at most {_MOST - 1} can be sent; lower bucket_cap_mb")
        starts = [*accumulate(sizes, initial=0)]
        if self.scope == "bucket":
            everything = torch.cat([one.view(-1) for one in kept])
            chosen = _largest(everything, self._count(everything.numel()))
            if everything.is_cuda:
                values = everything[chosen]
                self._take_pooled(parameters, everything, chosen)
                return _Sent([], starts, values, chosen)
            chosen = chosen.sort().values
            bounds = torch.searchsorted(chosen, torch.tensor(starts, device=chosen.device)).tolist()
            picked = [chosen[bounds[n] : bounds[n + 1]] - starts[n] for n in range(len(kept))]
        else:
            picked = [_largest(one.view(-1), self._count(one.numel())) for one in kept]
        values = torch.cat([one.view(-1)[at] for one, at in zip(kept, picked, strict=True)])
        # They are the largest: if they are finite, all are. A device is not asked, which would be a wait.
        finite = not values.is_cuda and bool(values.isfinite().all())
        for parameter, residual, at in zip(parameters, kept, picked, strict=True):
            for own in (residual, self._velocities.get(parameter)):
                if own is not None:
                    own.view(-1)[at] = 0
                    if not finite:
                        own.nan_to_num_(0.0, 0.0, 0.0)
        return _Sent(picked, starts, values)

    def _take_pooled(self, parameters: Sequence[torch.Tensor], everything: torch.Tensor, chosen: torch.Tensor) -> None:
        """Clear what is sent of all parameters together; only the device knows how much that is of each.

        Overwrites `everything`, to need no more memory.
        """
        taken = everything.mul_(0).ne(0)  # what is not finite becomes NaN
        taken[chosen] = True
        sizes = [self._residuals[one].numel() for one in parameters]
        for parameter, part in zip(parameters, taken.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            for kept in (self._residuals, self._velocities):
                if parameter in kept:
                    kept[parameter].view(-1).masked_fill_(part, 0)

    def _accumulated(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """A parameter's residual, with its gradient (or velocity) added."""
        residual = self._residuals.get(parameter)
        if residual is None:
            residual = self._residuals[parameter] = torch.zeros(gradient.shape, device=gradient.device)
        added = gradient.detach()
        if self.momentum:
            velocity = self._velocities.get(parameter)
            if velocity is None:
                velocity = self._velocities[parameter] = torch.zeros_like(residual)
            added = velocity.mul_(self.momentum).add_(added)
        return residual.add_(added)

    def _count(self, numbers: int) -> int:
        return min(numbers, max(1, math.ceil(numbers * self.density)))

    def _note(self, parameters: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Remember where the gradients may differ from zero; `indices` ascend."""
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            first, last = torch.searchsorted(indices, torch.tensor([start, end], device=indices.device)).tolist()
            self._indices[parameter] = indices[first:last] - start
            start = end

    def _note_on_device(
        self, parameters: Sequence[torch.Tensor], places: torch.Tensor, counts: Sequence[int] | None
    ) -> None:
        """Remember where gradients on a device may differ from zero.

        Args:
            places: in all of them, one after another; of each rank.
            counts: how many places there are of each parameter; None: only the device knows.
        """
        if counts is None:
            entries = EntriesOnDevice(tuple(parameters), places.reshape(-1))
            self._on_device.update(dict.fromkeys(parameters, entries))
            return
        start = 0
        for parameter, own in zip(parameters, places.split(counts, dim=-1), strict=True):  # type: ignore[no-untyped-call]
            self._on_device[parameter] = EntriesOnDevice((parameter,), (own - start).reshape(-1))
            start += parameter.numel()


class _Sent:
    """What one rank sends of some gradients.

    Attributes:
        picked: which entries of each; empty if only a device knows.
        counts: how many entries of each; None: only a device knows.
        values: of all, in the order of `places`.
    """

    def __init__(
        self,
        picked: Sequence[torch.Tensor],
        starts: Sequence[int],
        values: torch.Tensor,
        places: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            starts: where each gradient starts, if they are stored one after another.
            places: which entries of all; None: see `picked`.
        """
        self.picked = picked
        self.values = values
        self.counts = [len(at) for at in picked] if places is None else None
        self._starts = starts
        self._places = places

    @property
    def places(self) -> torch.Tensor:
        """Which entries of all gradients, one after another."""
        if self._places is not None:
            return self._places
        return torch.cat([at + start for at, start in zip(self.picked, self._starts, strict=False)])


class _Untouched:
    """A parameter's gradient as `compress` has left it: which tensor, and how often torch has seen it change."""

    def __init__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        # Prevents: a later gradient with the same address and count that is taken for this one.
        self._gradient = weakref.ref(parameter.grad)
        self._changes = _changes(parameter)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether its gradient is that tensor, unchanged."""
        return self._gradient() is parameter.grad and _changes(parameter) == self._changes


def _changes(parameter: torch.Tensor) -> tuple[int, ...]:
    """Torch's counts of a gradient's changes: a DTensor and its local part have counts of their own."""
    assert parameter.grad is not None
    local = local_gradient(parameter)
    assert local is not None
    return counted_changes(parameter.grad), counted_changes(local)


def _entries(values: torch.Tensor) -> int:
    """How many fp32 numbers are other than +0.0, by their bits (-0.0 is an entry: it takes another path in a step)."""
    bits = values.view(torch.int32)
    # numpy counts integers at the speed of memory, torch at a fifth of it.
    return int(np.count_nonzero(bits.numpy()) if bits.device.type == "cpu" else torch.count_nonzero(bits))


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Which entries have the largest magnitudes, in no order: a function of only the values, so that runs repeat.

    A processor looks for them among those above a magnitude that a sample suggests, and among all if these are too few
    (a GPU's own selection takes one launch). NaN is the largest, as `torch.topk` has it: it is sent, not kept for ever.
    """
    magnitudes = values.abs()
    if values.device.type == "cpu" and len(values) > 2 * _SAMPLE:
        stride = len(values) // _SAMPLE | 1  # odd: rows of matrices have even lengths
        sample = magnitudes[::stride]
        expected = count * len(sample) / len(values)
        wanted = math.ceil(1.25 * expected + 4 * math.sqrt(expected))
        if wanted < len(sample) // 4:
            candidates = (magnitudes < sample.topk(wanted, sorted=False).values.min()).logical_not_().nonzero().view(-1)
            if len(candidates) >= count:
                return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices


def _communicate(hook: TopKHook, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    return hook.communicate(bucket)


_communicate.__annotations__.clear()  # DDP compares them with the classes themselves, and these are texts
