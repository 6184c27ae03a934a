"""Shards (FSDP2) on a device, whose steps an agent repeats, from whole and from sparse gradients: a mesh of one rank.

`fsdp_job.on_device` has two ranks. Here are many orders of the device's work, and mutants.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("torch.distributed.tensor")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402 - torch decides whether this file runs at all
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

from ckptstore.frameworks.torch_optimizers import TorchSteps  # noqa: E402
from ckptstore.host.caller_warnings import UnexplainedStepWarning  # noqa: E402
from ckptstore.training import TopKHook, UnsavedStepWarning  # noqa: E402
from ckptstore.training.replica import arithmetic_probe  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox  # noqa: E402
from tests.forms import short_or  # noqa: E402
from tests.training import test_device_replica  # noqa: E402
from tests.training.test_device_replica import (  # noqa: E402
    MUTANTS,
    SPARSE_MUTANTS,
    STEPS,
    check,
    entries,
    own_place,
    trained,
    wholes,
)
from tools.device import simulated, why_not  # noqa: E402
from tools.device.roundings import UNKNOWN  # noqa: E402

__all__ = ["entries", "own_place", "wholes"]  # fixtures

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SEEDS = range(short_or(2, 40))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank, which a mesh needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Script(test_device_replica.Script):
    """The same, whose optimizer has DTensors over the memory of the parameters that are trained."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__(optimizer)
        self.trained, self.model = self.model, copy.deepcopy(self.model)
        mesh = init_device_mesh("cuda", (1,))
        self.shard: Callable[[Any], Any] = partial(
            DTensor.from_local, device_mesh=mesh, placements=[Shard(0)], run_check=False
        )
        for path, part in self.trained.named_parameters():
            inside, _, name = path.rpartition(".")
            one = torch.nn.Parameter(self.shard(part.detach()), part.requires_grad)
            setattr(self.model.get_submodule(inside), name, one)
        moved = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = test_device_replica.OPTIMIZERS[optimizer](moved)

    def update(self, hook: Any = None) -> None:
        inputs = torch.randn(8, 64, generator=self.chance).cuda()
        self.trained(inputs).square().mean().backward()
        for one, mine in zip(self.trained.parameters(), self.model.parameters(), strict=True):
            mine.grad = None if one.grad is None else self.shard(one.grad.clone())
            one.grad = None
        if hook is not None:
            hook.compress(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        found = local({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        with torch.no_grad():
            return dict(test_device_replica.copied(found))


def local(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: local(one) for name, one in value.items()}
    if isinstance(value, list):
        return [local(one) for one in value]
    return value.detach().to_local() if isinstance(value, DTensor) else value


@pytest.fixture(autouse=True)
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts have shards, and save as the only rank of a group."""
    opened = test_device_replica.opened
    monkeypatch.setattr(test_device_replica, "Script", Script)
    monkeypatch.setattr(
        test_device_replica,
        "opened",
        lambda place, script, **options: opened(place, script, group=Group(0, 1, LocalMailbox()), **options),
    )


def strictly() -> None:
    warnings.simplefilter("error", UnexplainedStepWarning)
    warnings.simplefilter("error", UnsavedStepWarning)


@pytest.mark.parametrize("optimizer", short_or(["AdamW"], list(test_device_replica.OPTIMIZERS)))
def test_an_agent_repeats_the_steps_of_shards_on_a_device(tmp_path: Path, wholes: list[int], optimizer: str) -> None:
    for seed in SEEDS[:1] if optimizer != "AdamW" else SEEDS:
        wholes.clear()
        with simulated(seed) as machine, warnings.catch_warnings():
            strictly()
            wanted = trained(machine, tmp_path / f"{seed}", optimizer)
            assert not machine.hazards, (seed, machine.hazards)
        assert check(tmp_path / f"{seed}", wanted) == list(range(1, STEPS + 1))
        assert wholes == [1]


@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_only_entries_of_compressed_shards_leave_a_device(
    tmp_path: Path, wholes: list[int], entries: dict[int, dict[int, int]], scope: Any
) -> None:
    for seed in SEEDS if scope == "tensor" else SEEDS[-1:]:
        wholes.clear()
        entries.clear()
        with simulated(seed) as machine, warnings.catch_warnings():
            strictly()
            hook = TopKHook(density=0.05, scope=scope, exact=False)
            wanted = trained(machine, tmp_path / f"{seed}", hook=hook)
            assert not machine.hazards, (seed, machine.hazards)
        assert check(tmp_path / f"{seed}", wanted) == list(range(1, STEPS + 1))
        assert wholes == [1]
        assert sorted(entries) == list(range(2, STEPS + 1))
        for found in entries.values():
            assert len(found) == 2, "both parameters that the agent computes"


TOLD = "the agent is told before the event"
"""The other mutant of whole gradients, without a gate, is not here: the host's threads often order the work all the
same, since nothing but the gradients and digests leaves the device (`tools.device.campaign` delays the threads)."""


@pytest.mark.parametrize("mutant", short_or([*SPARSE_MUTANTS][:1], [*SPARSE_MUTANTS, TOLD]))
def test_what_leaves_an_order_of_shards_out_is_caught(tmp_path: Path, mutant: str) -> None:
    """Of sparse gradients or of whole ones: the device reports a hazard, or a step is not what was trained."""
    broken = SPARSE_MUTANTS.get(mutant) or MUTANTS[mutant]
    hook = {"density": 0.05, "exact": False} if mutant in SPARSE_MUTANTS else None
    for seed in range(20):
        with simulated(seed) as machine, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            broken(patch)
            wanted = trained(machine, tmp_path / f"{seed}", hook=hook and TopKHook(**hook))
            if machine.hazards:
                return
        try:
            steps = check(tmp_path / f"{seed}", wanted)
        except AssertionError:
            return
        if steps != list(range(1, STEPS + 1)):
            return
    pytest.fail(f"{mutant}: not caught under any seed")


def test_a_device_that_rounds_shards_otherwise_is_found_by_a_probe_of_shards(
    tmp_path: Path, wholes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = set()

    class Spy(TorchSteps):
        def step(self, settings: Any, gradients: Any) -> None:
            kinds.update((one.device.type, type(one)) for row in gradients for one in row)
            super().step(settings, gradients)

    monkeypatch.setattr(arithmetic_probe, "TorchSteps", Spy)
    with simulated(roundings=UNKNOWN) as machine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wanted = trained(machine, tmp_path / "run")
    assert wholes == check(tmp_path / "run", wanted) == list(range(1, STEPS + 1))
    assert kinds == {("cuda", DTensor), ("cpu", torch.Tensor)}
    (remark,) = (str(one.message) for one in told if issubclass(one.category, UnexplainedStepWarning))
    assert "AdamW on cuda:0 rounds" in remark
