"""A simulated accelerator: tensors that say ``cuda:0`` on a torch without CUDA, whose work is queued on streams.

::

    with simulated(seed=3) as device:
        x = torch.arange(4.0, device="cuda")
        host = torch.zeros(4).pin_memory()
        host.copy_(x, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        host                                  # the old bytes, unless the seed let the device be quick
        event.synchronize()
        host                                  # 0, 1, 2, 3
        device.counts.to_host                 # 16

Seed 0 runs everything as late as streams and events permit; any other seed decides how eager each stream is. So the
order of a program's device work is tested: a missing order shows as wrong results under some seed. In addition
``device.hazards`` lists, under any seed, memory that streams use without an order between them. See `machine` for the
counts and hazards, `kernels` for the simulated operations.

Not simulated: time, CUDA graphs, custom generators on a device, collectives of several devices, operations that draw
numbers without a generator (dropout is simulated).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import MappingProxyType

import torch

from tools.device import guard
from tools.device.kernels import Kernels
from tools.device.machine import Machine
from tools.device.patches import patched
from tools.device.roundings import Roundings

__all__ = ["Machine", "simulated", "why_not"]

why_not = guard.why_not
_ONE = threading.Lock()


@contextlib.contextmanager
def simulated(seed: int = 0, devices: int = 1, roundings: Roundings = MappingProxyType({})) -> Iterator[Machine]:
    """Simulate a machine with CUDA devices in this process until the block ends.

    Its tensors must not be used afterwards. Backward passes run in the thread that calls them, as its stream requires
    (torch would use a thread for each device).

    Args:
        seed: decides the order of work; 0: everything as late as possible.
        devices: how many.
        roundings: operations that its kernels compute otherwise than torch does on the CPU (`tools.device.roundings`).

    Raises:
        RuntimeError: this torch has CUDA, or is too old; or a machine is simulated already.
    """
    if (why := guard.why_not()) is not None:
        raise RuntimeError(why)
    if not _ONE.acquire(blocking=False):
        raise RuntimeError("a machine is simulated already")
    _forget_devices()
    machine = Machine(seed, devices)
    kernels = Kernels(machine, roundings)
    try:
        guard.installed()
    except BaseException:
        _ONE.release()
        raise
    try:
        kernels.install()
        with patched(machine), torch.autograd.set_multithreading_enabled(False):
            yield machine
    finally:
        _forget_devices()
        kernels.remove()
        guard.removed()
        _ONE.release()


def _forget_devices() -> None:
    """Empty the caches of ckptstore's modules that use torch: they keep streams and tensors of each device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ckptstore.") and getattr(module, "torch", None) is torch:
            for one in list(vars(module).values()):
                if hasattr(one, "cache_clear"):
                    one.cache_clear()
