"""Ranks whose model is sharded (FSDP2), as processes: each runs the named scenarios in one process group.

    python -m tests.training.fsdp_job PORT RANK SIZE FOLDER SCENARIO [SCENARIO ...]

A scenario asserts its own expectations; files for later checks in one process are left in FOLDER.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptstore
from ckptstore import DeterminismWarning
from ckptstore.agent import AgentWriter
from ckptstore.errors import StateMismatchError, UnsupportedStateError, UsageError
from ckptstore.host.caller_warnings import UnexplainedStepWarning
from ckptstore.training import Checkpointer, TopKHook, UnsavedStepWarning
from tests import warmth
from tests.forms import LONG, short_or
from tests.warm_agents import start_warm
from tools.device import simulated, why_not

STRATEGIES = ("full", "delta", "gradient")


class Net(nn.Module):
    """Rows that two and four ranks do not divide, fewer rows than ranks; tied, frozen, unused parameters; buffers."""

    def __init__(self, dropout: float = 0.1, buffers: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.hidden = nn.Linear(16, 37)
        self.norm = nn.BatchNorm1d(37) if buffers else nn.LayerNorm(37)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.back = nn.Linear(37, 16)
        self.one = nn.Parameter(torch.ones(1, 16))  # of one row: the other ranks have none
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = dropout

    def forward(self, tokens: Any) -> Any:
        x = self.frozen(self.norm(self.hidden(self.embed(tokens))))
        return self.head(self.back(nn.functional.dropout(x, self.dropout)) * self.one)


def whole(value: Any) -> Any:
    """The same state with whole tensors. Every rank has to call this."""
    if isinstance(value, dict):
        return {key: whole(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(member) for member in value)
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Whole tensors of both, and this rank's generators."""
    found = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "torch": torch.get_rng_state()}
    return dict(whole(found)) | {"numpy": np.random.get_state()[1].tolist(), "python": random.getstate()}


class Script:
    """A training script. `cut`: how it is sharded; `alike`: all ranks have the same data, and no random numbers are
    drawn."""

    def __init__(self, cut: bool = True, alike: bool = False, hook: TopKHook | None = None, **how: Any) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(0)
        self.model = Net(0.0 if alike else 0.1, buffers="mp_policy" not in how)
        self.alike = alike
        self.hook = hook
        if cut:
            for one in (self.model.hidden, self.model):
                fully_shard(one, **how)
        moved = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(moved, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0 if alike else rank)

    def one(self, step: int) -> float:
        """A step whose gradients are gone when it is saved."""
        tokens = torch.arange(8) * 5 % 13 if self.alike else torch.randint(0, 13, (8,))
        shift = 0 if self.alike else random.randrange(13) + int(np.random.randint(13))
        loss = nn.functional.cross_entropy(self.model((tokens + shift + step) % 13), tokens)
        loss.backward()
        if self.hook is not None:
            self.hook.compress(self.model.parameters())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def run(self, store: Path, until: int, **options: Any) -> list[float]:
        """Resume from the store and train -> the losses."""
        losses = []
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        parts |= {"compressor": self.hook}
        with Checkpointer(store, **parts, **({"rank_timeout": 60.0} | options)) as checkpointer:
            for step in range(checkpointer.resume(), until):
                losses.append(self.one(step))
                checkpointer.step(metrics={"loss": losses[-1]})
        return losses

    def everything(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer)


def same(one: Any, other: Any, where: str = "state") -> None:
    """Assert that the bits are equal."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, member in enumerate(one):
            same(member, other[number], f"{where}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        images = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        assert torch.equal(*images), where
    else:
        assert one == other, where


def resumed(folder: Path) -> None:
    """Every strategy: a run that is ended and resumed has the bits of an uninterrupted run; so does a rollback."""
    for strategy in STRATEGIES:
        script = Script()
        losses = script.run(folder / f"whole-{strategy}", 6, strategy=strategy)
        expected = script.everything()
        found = []
        for until in (2, 3, 6):
            again = Script()
            found += again.run(folder / f"parts-{strategy}", until, strategy=strategy)
        assert found == losses, strategy
        same(again.everything(), expected, strategy)
    torch.save(expected, folder / f"resumed-{dist.get_rank()}.pt")


def compressed(folder: Path) -> None:
    """Each rank takes the largest entries of its shards. What it keeps is sharded, and restored with the rest."""
    for scope in ("tensor", "bucket"):
        hooks = [TopKHook(0.1, scope=scope, momentum=0.5) for _ in range(3)]
        script = Script(hook=hooks[0])
        losses = script.run(folder / f"compressed-{scope}", 5, strategy="gradient")
        found = []
        for hook, until in zip(hooks[1:], (3, 5), strict=True):
            again = Script(hook=hook)
            found += again.run(folder / f"compressed-parts-{scope}", until, strategy="gradient")
        assert found == losses, scope
        same(again.everything(), script.everything(), scope)
        kept = whole(hooks[0].state_dict())
        same(whole(hooks[2].state_dict()), kept, scope)
        loaded = ckptstore.open(folder / f"compressed-{scope}").load(5)["compressor"]
        same(loaded, kept, f"{scope}: stored")
        hidden = kept["residuals"]["model.hidden.weight"]
        assert hidden.shape == (37, 16)
        assert 0 < int((hidden == 0).sum()) < hidden.numel() // 4, "a tenth was sent, and nothing else"
        plain = Script(cut=False)  # as in a process that shards nothing
        alone = TopKHook(0.1, scope=scope, momentum=0.5)
        alone.named((f"model.{name}", one) for name, one in plain.model.named_parameters())
        alone.load_state_dict(loaded)
        same(alone.state_dict(), kept, f"{scope}: whole")
        one: Any = script.model.hidden.weight
        one.grad = DTensor.from_local(torch.ones(one.shape), one.device_mesh, [Partial()])
        with pytest.raises(UnsupportedStateError, match="a gradient is placed as"):
            hooks[0].compress([one])


def precise(folder: Path) -> None:
    """Mixed precision: parameters are gathered in bf16, shards and moments are fp32."""
    again(folder / "precise", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def replicated(folder: Path) -> None:
    """HSDP: shards over one dimension of the mesh, replicas over the other."""
    again(folder / "replicated", mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def mostly_frozen(folder: Path) -> None:
    """Shards of frozen weights are stored once, and a run that is resumed has the bits of one that is not."""

    def tuned(until: int, name: str) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 257).requires_grad_(False), nn.Linear(257, 3))
        fully_shard(model)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        with Checkpointer(
            folder / name, model=model, optimizer=optimizer, full_every=2, on_metrics=found.append, rank_timeout=60.0
        ) as checkpointer:
            for step in range(checkpointer.resume(), until):
                model(torch.full((2, 256), float(step + dist.get_rank()))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
        return state_of(model, optimizer)

    found: list[Any] = []
    expected = tuned(6, "frozen-whole")
    assert {one.kind for one in found} == {"full", "delta", "gradient"}
    assert all(one.stored < 60_000 for one in found if one.kind != "full"), "132 kB of shards are frozen"
    tuned(3, "frozen-parts")
    same(tuned(6, "frozen-parts"), expected)


def offloaded(folder: Path) -> None:
    """Parameters that lie in host memory between steps."""
    again(folder / "offloaded", offload_policy=CPUOffloadPolicy(pin_memory=False))


def again(folder: Path, **how: Any) -> None:
    """Train at once, and in two parts; `how` the model is sharded."""
    script = Script(**how)
    losses = script.run(folder / "whole", 4, strategy="gradient")
    found = []
    for until in (2, 4):
        part = Script(**how)
        found += part.run(folder / "parts", until, strategy="gradient")
    assert found == losses
    same(part.everything(), script.everything())


def parallel_net(mesh: Any, data: Any) -> nn.Module:
    """Columns over the ranks, then rows; values between them are not sharded. `data`: a mesh that also shards it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 38), nn.LayerNorm(38), nn.Linear(38, 38), nn.GELU(), nn.Linear(38, 16))
    plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    if data is not None:
        fully_shard(model, mesh=data)
    return model


def parallel_run(store: Path, until: int, mesh: Any, data: Any, strategy: str) -> tuple[list[float], dict[str, Any]]:
    """Resume from the store and train -> the losses, and the final state."""
    model = parallel_net(mesh, data)
    # One call of foreach cannot have both sharded parameters and whole parameters of only some ranks.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    with Checkpointer(store, model=model, optimizer=optimizer, strategy=strategy, rank_timeout=60.0) as checkpointer:
        for step in range(checkpointer.resume(), until):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            checkpointer.step(metrics={"loss": loss.item()})
    return losses, whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def tensor_parallel(folder: Path) -> None:
    """Tensor parallelism, every strategy; with four ranks also two such groups, each with its own shards (FSDP2)."""
    size = dist.get_world_size()
    cut = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    data = cut["data"] if size > 2 else None
    for strategy in STRATEGIES[-short_or(1, len(STRATEGIES)) :]:
        losses, expected = parallel_run(folder / f"tensor-{strategy}", 5, cut["tensor"], data, strategy)
        found = []
        for until in (2, 5):
            some, state = parallel_run(folder / f"tensor-parts-{strategy}", until, cut["tensor"], data, strategy)
            found += some
        assert found == losses, strategy
        same(state, expected, strategy)
        assert [info.kind for info in ckptstore.open(folder / f"tensor-{strategy}").checkpoints()][1:] == [strategy] * 4


def back(folder: Path) -> None:
    """Rollback in one process, into existing moments."""
    script = Script()
    parts = {"model": script.model, "optimizer": script.optimizer, "scheduler": script.scheduler}
    with Checkpointer(folder / "back", **parts, strategy="gradient", rank_timeout=60.0) as checkpointer:
        checkpointer.resume()
        losses = []
        for step in range(4):
            losses.append(script.one(step))
            checkpointer.step()
        expected = script.everything()
        moments = {id(one) for slots in script.optimizer.state.values() for one in slots.values()}
        assert checkpointer.rollback(2) == 2
        assert {id(one) for slots in script.optimizer.state.values() for one in slots.values()} & moments
        for step in (2, 3):
            assert script.one(step) == losses[step]
            checkpointer.step()
        same(script.everything(), expected)


def sharded_net(cut: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model large enough that headers do not matter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 801), nn.Tanh(), nn.Linear(801, 200))
    if cut:
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def as_one(folder: Path) -> None:
    """A step of the sharded model takes as many bytes as one of the unsharded model, and has the same bits.

    Then a sharded model continues from the checkpoint of the unsharded one.
    """
    sizes, states = {}, {}
    for cut in (True, False):
        if not cut and dist.get_rank():
            continue
        model, optimizer = sharded_net(cut)
        group: Any = {} if cut else {"group": None}
        store = ckptstore.open(folder / f"as-one-{cut}")
        with Checkpointer(store, model=model, optimizer=optimizer, strategy="gradient", **group) as checkpointer:
            checkpointer.resume()
            for step in range(5):
                inputs = torch.randn(16, 200, generator=torch.Generator().manual_seed(step))
                (model(inputs) - inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
        states[cut] = whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        sizes[cut] = [info.stored for info in store.checkpoints()]
        assert [info.kind for info in store.checkpoints()] == ["full", *["gradient"] * 4]
    if dist.get_rank() == 0:
        same(states[True], states[False])
        assert max(sizes[False][1:]) < 0.4 * sizes[False][0]
        for one, other in zip(sizes[True], sizes[False], strict=True):
            assert one < 1.05 * other, sizes
    dist.barrier()
    model, optimizer = sharded_net(cut=True)
    with (
        pytest.warns(DeterminismWarning, match="sharding: unset"),
        Checkpointer(folder / "as-one-False", model=model, optimizer=optimizer, strategy="delta") as checkpointer,
    ):
        assert checkpointer.resume() == 5
    same(whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), states[True])


def chosen(folder: Path) -> None:
    """``auto``, and a metric that is a DTensor, as `clip_grad_norm_` returns it."""
    script = Script()
    with Checkpointer(folder / "chosen", model=script.model, optimizer=script.optimizer) as checkpointer:
        checkpointer.resume()
        for step in range(2):
            script.one(step)
            script.model.hidden.weight.grad = torch.ones_like(script.model.hidden.weight)
            norm = nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
            assert isinstance(norm, DTensor)
            checkpointer.step(metrics={"norm": norm})
        assert checkpointer.strategy == "full"
    found = ckptstore.open(folder / "chosen").checkpoints()[-1].metadata["metrics"]["norm"]
    assert found == norm.full_tensor().item()


def changed_net(names: str) -> tuple[nn.Module, Any]:
    """Layers of one shape, made in this order, with different parameters; sharded; moments by name."""
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.Linear(6, 6))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def changed(folder: Path) -> None:
    """Modules in another order are restored by names; a mismatch is refused before anything is read."""

    def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return whole({name: dict(optimizer.state[one]) for name, one in model.named_parameters()})

    store = folder / "changed"
    model, optimizer = changed_net("ab")
    with Checkpointer(store, model=model, optimizer=optimizer, strategy="gradient") as checkpointer:
        checkpointer.resume()
        for _ in range(2):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, float(number + 1))
            optimizer.step()
            checkpointer.step()
    expected = whole(dict(model.state_dict())), moments(model, optimizer)
    other, fresh = changed_net("ba")
    with Checkpointer(store, model=other, optimizer=fresh, strategy="gradient") as checkpointer:
        assert checkpointer.resume() == 2
    found = whole(dict(other.state_dict())), moments(other, fresh)
    for one, its in zip(expected, found, strict=True):
        same({name: one[name] for name in sorted(one)}, {name: its[name] for name in sorted(its)})
    larger, more = changed_net("abc")
    before = whole(dict(larger.state_dict()))
    with Checkpointer(store, model=larger, optimizer=more, strategy="gradient") as checkpointer:
        with pytest.raises(StateMismatchError, match=r"model\.c\.weight: the checkpoint has none"):
            checkpointer.resume()
        same(whole(dict(larger.state_dict())), before)
        assert not more.state
        with pytest.warns(DeterminismWarning, match="left as the script has it"):
            assert checkpointer.resume(strict=False) == 2
    now = whole(dict(larger.state_dict()))
    same({name: one for name, one in now.items() if name[0] != "c"}, {name: expected[0][name] for name in expected[0]})
    same(now["c.weight"], before["c.weight"])


def refused(folder: Path) -> None:
    """Features that shards do not support."""
    script = Script()
    with pytest.raises(UsageError, match="group=None"):
        Checkpointer(folder / "refused", model=script.model, group=None).resume()
    with pytest.raises(UsageError, match=r"only='trainable'.*shards"):
        Checkpointer(folder / "refused", model=script.model, only="trainable")


class Wide:
    """A script most of whose shards are so large that an agent computes them; one part is frozen."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(97, 131), nn.Tanh(), nn.Linear(131, 97), nn.Linear(97, 97))
        self.model[3].requires_grad_(False)
        for one in (*self.model, self.model):
            fully_shard(one)
        moved = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = {
            "AdamW": lambda: torch.optim.AdamW(moved, lr=1e-2),
            "AdamW fused": lambda: torch.optim.AdamW(moved, lr=1e-2, fused=True),
            "Adam foreach": lambda: torch.optim.Adam(moved, lr=1e-2, amsgrad=True, foreach=True),
            "SGD": lambda: torch.optim.SGD(moved, lr=1e-2, momentum=0.9, nesterov=True),
        }[kind]()

    def train(self, step: int) -> None:
        data = torch.Generator().manual_seed(10 * step + dist.get_rank())
        self.model(torch.randn(8, 97, generator=data)).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        found = whole({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        return {name: copy.deepcopy(one) for name, one in found.items()}


def replica(folder: Path) -> None:
    """Each rank's agent repeats the steps of its shards."""
    os.environ["CKPTSTORE_RUNTIME_DIR"] = str(folder / "runtime")
    if not LONG:
        warmth.borrow()
        start_warm(pytest.MonkeyPatch())
    for kind in ("AdamW", "SGD", "AdamW fused", "Adam foreach")[: short_or(1, 4)]:
        replicated_by_agents(folder / f"replica-{kind}", kind)
    placed_otherwise(folder / "placed")


def placed_otherwise(place: Path) -> None:
    """Gradients that are partial sums, which the optimizer adds first: states are handed over whole, which is said."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(256, 64), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"strategy": "replica", "agent": True, "rank_timeout": 60.0, "linger_seconds": 0}
    states = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Checkpointer(place, model=model, optimizer=optimizer, **options) as checkpointer:
            checkpointer.resume()
            for step in range(1, 4):
                part = torch.full((256, 64), float(step + dist.get_rank()))
                model.weight.grad = DTensor.from_local(part, mesh, [Partial()])
                optimizer.step()
                checkpointer.step()
                states[step] = whole(model.weight).clone()
    (remark,) = [str(one.message) for one in told if issubclass(one.category, UnexplainedStepWarning)]
    assert "a gradient is placed as (Partial" in remark
    for step, wanted in states.items():
        same(ckptstore.open(place).load(step)["model"]["weight"], wanted, f"step {step}")


def replicated_by_agents(place: Path, kind: str) -> None:
    wholes: list[int] = []
    made: list[int] = []
    save, begun = AgentWriter.save_async, AgentWriter.replicate

    def saved(self: AgentWriter, state: Any, step: int, **named: Any) -> Any:
        wholes.append(step)
        return save(self, state, step, **named)

    def noted(self: AgentWriter, recipe: Any) -> Any:
        made.append(len(recipe.made))
        return begun(self, recipe)

    options = {"strategy": "replica", "agent": True, "rank_timeout": 60.0, "linger_seconds": 0}
    states: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(AgentWriter, "save_async", saved)
        patch.setattr(AgentWriter, "replicate", noted)
        warnings.simplefilter("error", UnexplainedStepWarning)
        warnings.simplefilter("error", UnsavedStepWarning)
        script = Wide(kind)
        with Checkpointer(place, model=script.model, optimizer=script.optimizer, **options) as checkpointer:
            checkpointer.resume()
            for step in range(1, 7):
                script.train(step)
                checkpointer.step()
                states[step] = script.state()
    assert wholes == [1]
    assert made[-1] == (2 * (2 if kind == "SGD" else 4 if "foreach" in kind else 3)) + 1, made
    dist.barrier()
    store = ckptstore.open(place)
    assert [one.step for one in store.checkpoints()] == list(states)
    for step, state in states.items():
        loaded = store.load(step)
        same({part: loaded[part] for part in state}, state, f"{kind}, step {step}")
    again = Wide(kind)
    with Checkpointer(place, model=again.model, optimizer=again.optimizer, **options) as checkpointer:
        assert checkpointer.resume("4@1") == 4
        for step in (5, 6):
            again.train(step)
            checkpointer.step()
            same(again.state(), states[step], f"{kind}, step {step} of the resumed run")


class OnDevice:
    """This rank's shards of parameters on a simulated device. Without collectives: both ranks draw the same gradients,
    and keep their rows."""

    SHAPES = ((131, 97), (131,), (97, 131), (96, 96))
    """Rows that two ranks do not divide, a parameter that is too small for an agent, even rows."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.model = nn.Module()
        for number, shape in enumerate(self.SHAPES):
            chance = torch.Generator().manual_seed(number)
            one = nn.Parameter(self.shard(0.1 * torch.randn(shape, generator=chance)))
            self.model.register_parameter(f"w{number}", one)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def shard(self, whole: torch.Tensor) -> DTensor:
        part = whole.chunk(dist.get_world_size())[dist.get_rank()].clone().cuda()
        how: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(part, self.mesh, [Shard(0)], **how)

    def update(self, step: int, hook: TopKHook | None = None) -> None:
        for number, one in enumerate(self.model.parameters()):
            chance = torch.Generator().manual_seed(100 * step + number)
            one.grad = self.shard(torch.randn(one.shape, generator=chance))
        if hook is not None:
            hook.compress(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, hook: TopKHook | None = None) -> dict[str, Any]:
        """A copy, of which the tensors are this rank's parts."""
        found = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        found |= {} if hook is None else {"compressor": hook.state_dict()}
        with torch.no_grad():
            return dict(parts(found, lambda one: one.detach().to_local().clone()))


def parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same state with its DTensors changed, and copies of other tensors."""
    if isinstance(value, dict):
        return {key: parts(member, change) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(parts(member, change) for member in value)
    if isinstance(value, DTensor):
        return change(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def mine(whole: Any, part: Any, where: str) -> None:
    """Assert that a state of whole tensors has this rank's parts: those whose shape differs are cut by rows."""
    if isinstance(part, dict):
        assert whole.keys() == part.keys(), where
        for key in part:
            mine(whole[key], part[key], f"{where}[{key!r}]")
    elif isinstance(part, list | tuple):
        for number, member in enumerate(part):
            mine(whole[number], member, f"{where}[{number}]")
    elif isinstance(part, torch.Tensor) and part.dim() and whole.shape != part.shape:
        same(whole.chunk(dist.get_world_size())[dist.get_rank()], part.cpu(), where)
    else:
        same(whole, part.cpu() if isinstance(part, torch.Tensor) else part, where)


def on_device(folder: Path) -> None:
    """Shards on a simulated device: what an agent computes, and sparse gradients."""
    if why_not() is not None:
        return
    os.environ["CKPTSTORE_RUNTIME_DIR"] = str(folder / "runtime")
    if not LONG:
        warmth.borrow()
        start_warm(pytest.MonkeyPatch())
    ways: dict[str, tuple[dict[str, Any], TopKHook | None]] = {
        "replica": ({"strategy": "replica", "agent": True, "linger_seconds": 0}, None),
        "sparse": (
            {"strategy": "replica", "agent": True, "linger_seconds": 0},
            TopKHook(0.01, scope="bucket", exact=False),
        ),
        "exact": ({"strategy": "gradient"}, TopKHook(0.01, momentum=0.5)),
    }
    for way, (options, hook) in ways.items():
        with simulated(dist.get_rank()) as machine, warnings.catch_warnings():
            warnings.simplefilter("error", UnexplainedStepWarning)
            warnings.simplefilter("error", UnsavedStepWarning)
            trained_on_device(folder / f"device-{way}", machine, options, hook)


def trained_on_device(place: Path, machine: Any, options: dict[str, Any], hook: TopKHook | None) -> None:
    script = OnDevice(init_device_mesh("cuda", (dist.get_world_size(),)))
    whole_bytes = 3 * sum(one.to_local().nbytes for one in script.model.parameters())  # type: ignore[attr-defined]
    states: dict[int, Any] = {}
    crossed: dict[int, int] = {}
    how = {"compressor": hook, "rank_timeout": 60.0} | options
    with Checkpointer(place, model=script.model, optimizer=script.optimizer, **how) as checkpointer:
        checkpointer.resume()
        for step in range(1, 7):
            machine.counts.to_host = 0
            script.update(step, hook)
            pending = checkpointer.step()
            assert pending is not None
            pending.result()
            crossed[step] = machine.counts.to_host
            states[step] = script.state(hook)
    assert not machine.hazards, machine.hazards
    dist.barrier()
    store = ckptstore.open(place)
    assert [one.step for one in store.checkpoints()] == list(states)
    for step, state in states.items():
        loaded = store.load(step)
        mine({part: loaded[part] for part in state}, state, f"{place.name}, step {step}")
    if "sparse" in place.name:
        assert crossed[6] < 0.05 * whole_bytes, "entries, digests, and parameters that are too small"
    again = OnDevice(script.mesh)
    if hook is not None:
        hook = TopKHook(hook.density, scope=hook.scope, momentum=hook.momentum, exact=hook.exact)
    how["compressor"] = hook
    with (
        Checkpointer(place, model=again.model, optimizer=again.optimizer, **how) as checkpointer,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeterminismWarning)  # without residuals
        assert checkpointer.resume("4@1") == 4
        same(again.state(hook), states[4], f"{place.name}: resumed")
        if hook is None or hook.exact:
            for step in (5, 6):
                again.update(step, hook)
                checkpointer.step()
                same(again.state(hook), states[step], f"{place.name}, step {step} of the resumed run")


def other_ranks(folder: Path) -> None:
    """Continue the run of two ranks with another number of them: the same bits, and a warning that the run differs."""
    saved = torch.load(folder / "resumed-0.pt", weights_only=False)
    script = Script()
    parts = {"model": script.model, "optimizer": script.optimizer, "scheduler": script.scheduler}
    copy = folder / f"parts-gradient-{dist.get_world_size()}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Checkpointer(copy, **parts, strategy="gradient", rank_timeout=60.0) as checkpointer:
            assert checkpointer.resume() == 6
            found = script.everything()
            for part in ("model", "optimizer"):
                mine, its = found[part], dict(saved[part])
                for buffer, _ in () if dist.get_rank() % 2 == 0 else script.model.named_buffers():
                    (
                        mine.pop(buffer, None),
                        its.pop(buffer, None),
                    )  # each rank has its own, and rank 0's is saved
                same(mine, its, part)
            script.one(6)
            checkpointer.step()
    (said,) = [str(one.message) for one in caught if one.category is DeterminismWarning]
    assert f"ranks: 2 -> {dist.get_world_size()}" in said
    assert "sharding:" in said
    assert ckptstore.open(copy).latest_step() == 7


def signalled(folder: Path) -> None:
    """One rank is signalled to save a step; then one is told to end; then the time limit ends. All save, and stop
    there."""
    rank, heard = dist.get_rank(), []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: heard.append(number))
    ends = [("usr1", None), ("term", None), ("deadline", 3.0)]
    for name, deadline in ends:
        script = Script(alike=True)
        store = ckptstore.open(folder / f"signalled-{name}")
        with Checkpointer(
            store,
            model=script.model,
            optimizer=script.optimizer,
            strategy="full",
            save_every=10**6,
            deadline_seconds=deadline,
            rank_timeout=60.0,
        ) as checkpointer:
            checkpointer.resume()
            for step in range(20_000):
                script.one(step)
                if step == 3 and rank == 1 and deadline is None:
                    os.kill(os.getpid(), signal.SIGUSR1 if name == "usr1" else signal.SIGTERM)
                if checkpointer.step() is not None:
                    break
                time.sleep(0.005)
            done = checkpointer.steps_done
            assert store.latest_step() == done
            assert checkpointer.should_stop == (name != "usr1")
        (folder / f"signalled-{name}-{rank}").write_text(str(done))
        assert (heard == []) == (rank != 1 or deadline is not None), name
        heard.clear()


def terminated(folder: Path, victim: int = 1) -> None:
    """SIGTERM ends one rank for good, once the step is durable; the others are told to stop after the same step."""
    script = Script(alike=True)
    store = ckptstore.open(folder / "terminated")
    with Checkpointer(
        store, model=script.model, optimizer=script.optimizer, strategy="full", save_every=10**6, rank_timeout=60.0
    ) as checkpointer:
        checkpointer.resume()
        for step in range(20_000):
            script.one(step)
            if step == 3 and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.step()
            if checkpointer.should_stop:
                break
            time.sleep(0.005)
        assert store.latest_step() == checkpointer.steps_done
    os._exit(0)  # the group has lost a rank: its collectives would hang


def first_terminated(folder: Path) -> None:
    """Likewise for the rank that commits and hosts the process group's store."""
    terminated(folder, victim=0)


SAMPLES = 96
ENDS = {0: 4, 4: 10, 10: 15}
"""The step at which a life of `loaded` begins -> where it is killed: 4 and 2 ranks with 2 samples in a batch; the last
one ends the epoch."""


def loaded(folder: Path) -> None:
    """A life of a run that reads a shuffled epoch with a `DistributedSampler`; but for the last one SIGKILL ends it."""
    script, rank = Script(), dist.get_rank()
    data = torch.arange(SAMPLES)
    sampler: Any = torch.utils.data.DistributedSampler(data, seed=7)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    parts = {"model": script.model, "optimizer": script.optimizer, "scheduler": script.scheduler, "loader": loader}
    warnings.simplefilter("ignore", DeterminismWarning)  # of other ranks: the generators are those of other ranks
    with Checkpointer(folder / "loaded", **parts, strategy="gradient", rank_timeout=60.0) as checkpointer:
        until = ENDS[checkpointer.resume()]
        for batch in checkpointer.loader:
            nn.functional.cross_entropy(script.model(batch % 13), batch % 13).backward()
            script.optimizer.step()
            script.scheduler.step()
            script.optimizer.zero_grad()
            with (folder / f"samples-{rank}").open("a") as file:
                file.write("".join(f"{one}\n" for one in batch.tolist()))
            checkpointer.step()
            if checkpointer.steps_done == until < max(ENDS.values()):
                checkpointer.wait()
                dist.barrier()  # the step is durable on all ranks
                os.kill(os.getpid(), signal.SIGKILL)
        assert checkpointer.steps_done == until


SCENARIOS: dict[str, Callable[[Path], None]] = {
    one.__name__: one
    for one in (
        resumed,
        compressed,
        precise,
        replicated,
        mostly_frozen,
        offloaded,
        tensor_parallel,
        back,
        as_one,
        chosen,
        refused,
        replica,
        on_device,
        changed,
        other_ranks,
        signalled,
        terminated,
        first_terminated,
        loaded,
    )
}


def main() -> None:
    """One rank."""
    port, rank, size, folder, *names = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": size}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        began = time.monotonic()
        SCENARIOS[name](Path(folder))
        dist.barrier()
        print(f"{name}: {time.monotonic() - began:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
