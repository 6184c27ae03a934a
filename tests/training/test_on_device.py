"""A training loop on a device: each strategy restores the same bits; on the CPU everywhere, on a GPU if any."""

from __future__ import annotations

import contextlib
import copy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
import ckptstore.agent  # noqa: E402
from ckptstore import DeltaOptions, DeterminismWarning, RankOptions  # noqa: E402
from ckptstore.errors import DivergedReplicasError  # noqa: E402
from ckptstore.host.caller_warnings import UnexplainedStepWarning  # noqa: E402
from ckptstore.training import Checkpointer, TopKHook  # noqa: E402
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox  # noqa: E402
from tests import warmth  # noqa: E402
from tests.forms import long_only  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.write.rank_threads import as_ranks  # noqa: E402

STEPS = 8

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "Adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
}
CAPTURABLE = "AdamW capturable"
"""Its step counts are tensors on the device; torch makes one only there."""

WAYS: dict[str, dict[str, Any]] = {
    "full": {"strategy": "full"},
    "delta": {"strategy": "delta"},
    "gradient": {"strategy": "gradient", "full_every": 5},
    "gradient+recompute": {"strategy": "gradient", "full_every": 5, "recompute": True},
    "full by an agent": {"strategy": "full", "agent": True},
    "gradient by an agent": {"strategy": "gradient", "full_every": 5, "agent": True},
    "auto": {},
}


class Script:
    """A training script all of whose random numbers come from torch's generators."""

    def __init__(self, device: str, optimizer: str = "AdamW", *, scaled: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.GELU(), torch.nn.Dropout(0.1),
            torch.nn.Linear(256, 64),
        ).to(device)  # fmt: skip
        make = OPTIMIZERS.get(optimizer) or (lambda ps: torch.optim.AdamW(ps, lr=1e-2, capturable=True))
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * STEPS)
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**14, growth_interval=3) if scaled else None
        self.steps = 0

    def update(self, hook: Any = None) -> None:
        """One step. A scaled one meets an infinite gradient in its fourth step, and skips it."""
        self.steps += 1
        loss = self.model(torch.randn(32, 64, device=self.device)).square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None and self.steps == 4:
            self.model[0].weight.grad[0, 0] = float("inf")
        if hook is not None:
            hook.compress(self.model.parameters())
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def checkpointer(self, store: Path, **options: Any) -> Checkpointer:
        return Checkpointer(
            store, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler, **options
        )

    def state(self) -> dict[str, Any]:
        """A copy of everything that a restore must give, on the host."""
        found = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if self.device == "cuda" else [])],
        }
        return copy.deepcopy(on_host(found))


def on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_host(one) for key, one in value.items()}
    return [on_host(one) for one in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings about a machine with few cores."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeterminismWarning, message=".*TopKHook.*")
        yield


def check(
    place: Path, device: str, way: str, optimizer: str = "AdamW", *, scaled: bool = False, own_stream: bool = False
) -> None:
    """Each stored step has the bits of the trained one; so has a run that continues in new objects from the middle."""
    stream = torch.cuda.stream(torch.cuda.Stream()) if own_stream else contextlib.nullcontext()
    with stream, quiet():
        script = Script(device, optimizer, scaled=scaled)
        states: dict[int, dict[str, Any]] = {}
        with script.checkpointer(place, **WAYS[way]) as checkpointer:
            assert checkpointer.resume() == 0
            for step in range(1, STEPS + 1):
                script.update()
                pending = checkpointer.step()
                states[step] = script.state()
                if step == STEPS // 2:
                    assert pending is not None
                    pending.result()
        store = ckptstore.open(place)
        assert not store.verify(deep=True).damage
        for step, state in states.items():
            loaded = store.load(step)
            for part in ("model", "optimizer"):
                same(listed(state[part]), listed(on_host(loaded[part])), f"{way}, {optimizer}, step {step}: {part}")
        again = Script(device, optimizer, scaled=scaled, seed=7)
        with again.checkpointer(place, **WAYS[way]) as checkpointer:
            assert checkpointer.resume(f"{STEPS // 2}@1") == STEPS // 2
            same(listed(states[STEPS // 2]), listed(again.state()), "resumed")
            again.steps = STEPS // 2
            for step in range(STEPS // 2 + 1, STEPS + 1):
                again.update()
                checkpointer.step()
                same(listed(states[step]), listed(again.state()), f"{way}, {optimizer}: step {step} of the resumed run")
        same(listed(states[STEPS]["model"]), listed(on_host(store.load("latest")["model"])))


def listed(value: Any) -> Any:
    """The same without the difference of ordered and plain dicts."""
    if isinstance(value, dict):
        return {str(key): listed(one) for key, one in sorted(value.items(), key=lambda item: str(item[0]))}
    return [listed(one) for one in value] if isinstance(value, list | tuple) else value


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_agents: None) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.mark.parametrize("way", WAYS)
def test_every_strategy(tmp_path: Path, way: str) -> None:
    check(tmp_path / "run", "cpu", way)


@long_only  # CI does the same on a simulated device
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(tmp_path: Path, optimizer: str) -> None:
    check(tmp_path / "run", "cpu", "gradient", optimizer)


@long_only
@pytest.mark.parametrize("way", ["delta", "gradient"])
def test_steps_that_a_scaler_skips(tmp_path: Path, way: str) -> None:
    check(tmp_path / "run", "cpu", way, scaled=True)


def check_sparse(place: Path, device: str, scope: Any = "tensor") -> None:
    """Gradients that are compressed on their device."""
    with quiet():
        script = Script(device)
        hook = TopKHook(density=0.05, scope=scope)
        states = {}
        with script.checkpointer(place, strategy="gradient", compressor=hook, full_every=5) as checkpointer:
            checkpointer.resume()
            for step in range(1, STEPS + 1):
                script.update(hook)
                checkpointer.step()
                states[step] = script.state()
        store = ckptstore.open(place)
        for step, state in states.items():
            same(listed(state["model"]), listed(on_host(store.load(step)["model"])), f"step {step}")
        again, hook = Script(device, seed=7), TopKHook(density=0.05, scope=scope)
        with again.checkpointer(place, strategy="gradient", compressor=hook, full_every=5) as checkpointer:
            assert checkpointer.resume("4@1") == 4
            for step in range(5, STEPS + 1):
                again.update(hook)
                checkpointer.step()
                same(listed(states[step]), listed(again.state()), f"step {step} of the resumed run")


def test_compressed_gradients(tmp_path: Path) -> None:
    check_sparse(tmp_path / "run", "cpu")


# ------------------------------------------------------------------------------------------------------------------ gpu

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, CAPTURABLE])
@pytest.mark.parametrize("way", WAYS)
def test_every_strategy_on_a_gpu(tmp_path: Path, way: str, optimizer: str, own_stream: bool) -> None:
    check(tmp_path / "run", "cuda", way, optimizer, own_stream=own_stream)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("optimizer", ["AdamW foreach", "AdamW fused", CAPTURABLE])
@pytest.mark.parametrize("way", ["full", "delta", "gradient"])
def test_steps_that_a_scaler_skips_on_a_gpu(tmp_path: Path, way: str, optimizer: str) -> None:
    check(tmp_path / "run", "cuda", way, optimizer, scaled=True)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_compressed_gradients_on_a_gpu(tmp_path: Path, scope: str) -> None:
    check_sparse(tmp_path / "run", "cuda", scope)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("way", ["full", "delta", "gradient", "full by an agent", "gradient by an agent"])
def test_a_step_is_saved_as_it_was_while_the_device_lags_behind(tmp_path: Path, way: str) -> None:
    """The device still has 0.2 s of other work when the step is given, and the next update is queued at once."""
    with quiet():
        script = Script("cuda", "AdamW fused")
        copies = []
        with script.checkpointer(tmp_path / "run", **WAYS[way]) as checkpointer:
            checkpointer.resume()
            for _ in range(STEPS):
                torch.cuda._sleep(200_000_000)
                script.update()
                copies.append({name: one.detach().clone() for name, one in script.model.state_dict().items()})
                checkpointer.step()
        store = ckptstore.open(tmp_path / "run")
        for step, wanted in enumerate(copies, 1):
            same(listed(on_host(wanted)), listed(on_host(store.load(step)["model"])), f"step {step}")


QUEUED: dict[str, Callable[[], dict[str, Any]]] = {
    **{way: (lambda way=way: WAYS[way]) for way in WAYS if way != "auto"},  # type: ignore[misc]
    "compressed gradients": lambda: {"strategy": "gradient", "full_every": 5, "compressor": TopKHook(0.05)},
    "compressed in buckets": lambda: {
        "strategy": "gradient",
        "full_every": 5,
        "compressor": TopKHook(0.05, scope="bucket"),
    },
    "full by a rank": lambda: {"strategy": "full", "group": Group(0, 1, LocalMailbox())},
    "gradient by a rank": lambda: {"strategy": "gradient", "full_every": 5, "group": Group(0, 1, LocalMailbox())},
}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("way", QUEUED)
def test_a_step_returns_while_its_copies_are_queued_on_a_gpu(tmp_path: Path, way: str) -> None:
    """Once memory is registered: the device still has a second of other work to do when the call returns."""
    with quiet():
        script = Script("cuda", "AdamW foreach")
        options = QUEUED[way]()
        hook = options.get("compressor")
        with script.checkpointer(tmp_path / "run", **options) as checkpointer:
            checkpointer.resume()
            for _ in range(STEPS):
                script.update(hook)
                pending = checkpointer.step()
                assert pending is not None
                pending.result()
                time.sleep(0.2)  # memory is registered meanwhile
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)
            script.update(hook)
            wanted = {name: one.detach().clone() for name, one in script.model.state_dict().items()}
            pending = checkpointer.step()
            behind = not torch.cuda.current_stream().query()
            script.update(hook)
            assert behind, "the call waited for the device"
        found = ckptstore.open(tmp_path / "run").load(STEPS + 1)["model"]
        same(listed(on_host(wanted)), listed(on_host(found)))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("deltas", [None, DeltaOptions(interval=1)], ids=["full", "delta"])
def test_ranks_whose_copies_and_digests_are_queued_on_a_gpu(tmp_path: Path, deltas: DeltaOptions | None) -> None:
    """Two ranks, each with a stream of its own; what is saved changes at once. At last their replicas differ."""
    ended = []

    def work(group: Group) -> None:
        store = ckptstore.open(tmp_path / "run", create=True)
        with (
            torch.cuda.stream(torch.cuda.Stream()),
            store.writer(group=group, ranks=RankOptions(timeout=60), deltas=deltas, max_in_flight=2) as writer,
        ):
            sizes = (8_000_000, 300_000, 70_001, 7, 1)
            state = {f"w{size}": torch.zeros(size, device="cuda") for size in sizes}
            state |= {"odd": torch.zeros(7, dtype=torch.uint8, device="cuda")}
            state |= {"strided": torch.zeros(5, 4, device="cuda").t(), "host": torch.zeros(5)}
            for step in range(1, 2 * STEPS + 1):
                if step > STEPS:
                    torch.cuda._sleep(50_000_000)
                for one in state.values():
                    one.fill_(step)
                pending = writer.save_async(state, step)
                if step <= STEPS:
                    pending.result()
                    time.sleep(0.2)
                for one in state.values():
                    one.zero_()
            pending.result()
            state["w7"][-1] = group.rank
            try:
                writer.save_async(state, 2 * STEPS + 1).result()
            except DivergedReplicasError as error:
                ended.append(str(error))

    assert as_ranks(2, work) == [None, None]
    assert len(ended) == 2
    assert all("w7" in one for one in ended)
    store = ckptstore.open(tmp_path / "run")
    assert not store.verify(deep=True).damage
    for step in range(1, 2 * STEPS + 1):
        assert all(bool((one == step).all()) for one in store.load(step).values()), step


KILLED_COPYING = """
import os, signal, sys, time
import torch
import ckptstore.agent
writer = ckptstore.agent.writer(sys.argv[1], max_in_flight=2, linger_seconds=120)
x = torch.zeros(1 << 28, device="cuda")
for step in range(1, 6):
    x.fill_(step)
    writer.save_async({"x": x}, step).result()
    time.sleep(1)
x.fill_(6)
writer.save_async({"x": x}, 6)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.gpu
@on_gpu
def test_a_trainer_killed_while_its_copies_are_queued_on_a_gpu(tmp_path: Path) -> None:
    """A gigabyte is on the bus when it dies. The agent keeps the step before; what the next trainer saves is right."""
    script = [sys.executable, "-W", "ignore", "-c", KILLED_COPYING, str(tmp_path / "run")]
    done = warmth.run(script, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ckptstore.agent.writer(tmp_path / "run", max_in_flight=2) as writer:
            kept = writer.step
            assert kept in (5, 6)
            assert bool((writer.load(device="cuda")["x"] == kept).all())
            state = {"x": torch.full((1 << 28,), 7.0, device="cuda")}
            writer.save_async(state, 7).result()
    store = ckptstore.open(tmp_path / "run")
    assert store.latest_step() == 7
    for step in (5, kept, 7):
        assert bool((store.load(step, device="cuda")["x"] == step).all())


@pytest.mark.gpu
@on_gpu
def test_restoring_is_ordered_with_the_stream_of_the_caller(tmp_path: Path) -> None:
    """Work that the caller queued before reads the old values, work that is queued afterwards the restored ones."""
    stored = torch.full((1 << 22,), 3.0)
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save({"x": stored}, step=1)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        target = torch.ones(1 << 22, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            before = target.clone()
            store.load(1, into={"x": target})
            after = target.clone()
            target.zero_()
        torch.cuda.synchronize()
        assert bool((before == 1).all())
        assert bool((after == 3).all())


NCCL = """
import os, sys
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
import torch, torch.distributed as dist
import ckptstore
from ckptstore.training import Checkpointer, TopKHook
from tests.training.test_on_device import Script, listed, on_host
from tests.store.states import same
store = dist.TCPStore("127.0.0.1", 0, 1, True)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
script = Script("cuda")
ddp = torch.nn.parallel.DistributedDataParallel(script.model)
hook = TopKHook(density=0.05)
hook.register(ddp)
states = []
with Checkpointer(sys.argv[1], model=ddp, optimizer=script.optimizer, compressor=hook, strategy="gradient") as it:
    it.resume()
    for _ in range(6):
        ddp(torch.randn(32, 64, device="cuda")).square().mean().backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
        it.step()
        states.append(on_host(script.model.state_dict()))
found = ckptstore.open(sys.argv[1])
for step, state in enumerate(states, 1):
    same(listed(state), listed(on_host(found.load(step)["model"])), f"step {step}")
dist.destroy_process_group()
print("equal")
"""


@pytest.mark.gpu
@on_gpu
def test_compressed_gradients_over_nccl(tmp_path: Path) -> None:
    done = warmth.run([sys.executable, "-c", NCCL, str(tmp_path / "run")], cwd=Path(__file__).parents[2], timeout=120)
    assert done.stdout.split() == ["equal"], done.stderr


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training.test_on_device import WAYS, Script
script = Script("cuda", "AdamW fused")
with script.checkpointer(Path(sys.argv[1]), **WAYS[sys.argv[2]]) as checkpointer:
    start = checkpointer.resume()
    for step in range(start + 1, 100):
        script.update()
        checkpointer.step()
        if step == start + 9:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("way", ["full", "delta", "gradient", "gradient by an agent"])
def test_a_killed_run_on_a_gpu(tmp_path: Path, way: str) -> None:
    """The run is killed twice. The state that it then resumes from has the bits of an undisturbed run."""
    place = tmp_path / "run"
    for _ in range(2):
        done = warmth.run(
            [sys.executable, "-W", "ignore", "-c", KILLED, str(place), way], cwd=Path(__file__).parents[2], timeout=120
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
    script = Script("cuda", "AdamW fused", seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with script.checkpointer(place, **WAYS[way]) as checkpointer:
            start = checkpointer.resume()
            restored = script.state()
    assert start > 9
    never = Script("cuda", "AdamW fused")
    for _ in range(start):
        never.update()
    same(listed(never.state()), listed(restored), f"{way}: step {start}")


def check_replica(place: Path, device: str, optimizer: str, hook: Any = None) -> tuple[list[int], list[str]]:
    """Save every step as a replica; each stored step has its bits -> the stored steps, and what was said of steps.

    A device whose arithmetic the agent does not have is said to have one, and its states are sent whole.

    Args:
        hook: compresses the gradients.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        script, states = Script(device, optimizer), {}
        with script.checkpointer(place, strategy="replica", agent=True, compressor=hook) as checkpointer:
            checkpointer.resume()
            for step in range(1, STEPS + 1):
                script.update(hook)
                checkpointer.step()
                states[step] = script.state()
                checkpointer.wait()
    store = ckptstore.open(place)
    steps = [info.step for info in store.checkpoints()]
    for step in steps:
        loaded = store.load(step)
        for part in ("model", "optimizer"):
            same(listed(states[step][part]), listed(on_host(loaded[part])), f"{optimizer}, step {step}: {part}")
    return steps, [str(one.message) for one in told if issubclass(one.category, UnexplainedStepWarning)]


def test_a_replica(tmp_path: Path) -> None:
    steps, told = check_replica(tmp_path / "run", "cpu", "AdamW")
    assert steps == list(range(1, STEPS + 1))
    assert not told


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_replica_of_parameters_on_a_gpu(tmp_path: Path, optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing wrong is stored. The log names the arithmetic of the device's kernels; if none is known, this skips."""
    caplog.set_level("DEBUG", "ckptstore.training")
    steps, told = check_replica(tmp_path / "run", "cuda", optimizer)
    assert steps[-1] == STEPS
    if told:
        pytest.skip("; ".join(told))
    assert steps == list(range(1, STEPS + 1))
    assert "variant=" in caplog.text


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_a_replica_of_compressed_gradients_on_a_gpu(tmp_path: Path, scope: Any) -> None:
    hook = TopKHook(density=0.05, scope=scope, exact=False)
    steps, told = check_replica(tmp_path / "run", "cuda", "AdamW foreach", hook)
    assert steps[-1] == STEPS
    if told:
        pytest.skip("; ".join(told))
    assert steps == list(range(1, STEPS + 1))
