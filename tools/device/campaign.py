"""Every strategy on a simulated device, under many seeds: what is restored has the bits that were trained.

    python -m tools.device.campaign --seeds 200 --out seeds.jsonl
    python -m tools.device.campaign --seeds 200 --only 'replica*' --minutes 5 --out seeds.jsonl

A case is a strategy, the default stream or one of the script, and a seed, which decides the order of the device's work.
A small model is trained; every step is queued at once, while the step before is saved. Then every stored step is
compared bit for bit with a copy that the device made of that step, and the device must have found no hazard. Strategies
of an agent start it as a warm fork. `gradient+bucket` and the like compress gradients with a `TopKHook`.

With ``--out`` each line is the result of one strategy and stream under ten seeds; the same command again continues with
those that are missing. ``--broken`` leaves out an order that ckptstore asks of the device: this must fail.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import click

import ckptstore
from tools.device import Machine, machine, simulated, why_not
from tools.warm import Warm

__all__ = ["WAYS", "main", "violation"]

WAYS: Final[dict[str, dict[str, Any]]] = {
    "full": {"strategy": "full"},
    "delta": {"strategy": "delta"},
    "gradient": {"strategy": "gradient", "full_every": 4},
    "gradient+recompute": {"strategy": "gradient", "full_every": 4, "recompute": True},
    "gradient+topk": {"strategy": "gradient", "full_every": 4, "compressed": "tensor"},
    "gradient+bucket": {"strategy": "gradient", "full_every": 4, "compressed": "bucket"},
    "layerwise+host": {},
    "layerwise+device": {},
    "full by an agent": {"strategy": "full", "agent": True},
    "delta by an agent": {"strategy": "delta", "agent": True},
    "gradient by an agent": {"strategy": "gradient", "full_every": 4, "agent": True},
    "gradient+topk by an agent": {"strategy": "gradient", "full_every": 4, "agent": True, "compressed": "tensor"},
    "replica": {"strategy": "replica", "agent": True},
    "replica+topk": {"strategy": "replica", "agent": True, "compressed": "tensor"},
    "replica+bucket": {"strategy": "replica", "agent": True, "compressed": "bucket"},
}
STREAMS: Final = {"default stream": False, "own stream": True}
STEPS: Final = 6
WARM: Final = 3
"""Steps that are waited for, so that memory is registered after them."""
TOGETHER: Final = 10
"""Seeds of a line."""
_MAIN: Final = "import sys; from ckptstore.agent.process import main; sys.exit(main())"


def violation(way: str, own_stream: bool, seed: int, place: Path) -> str | None:
    """Train and save under a seed -> what is wrong; None: nothing.

    Args:
        place: where the store is made.
    """
    import torch

    with simulated(seed) as device, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(TopKHook|tensor|cores|torch.jit).*")
        with torch.cuda.stream(torch.cuda.Stream() if own_stream else None):
            trained, stored = _trained(device, way, place)
        torch.cuda.synchronize()
        wanted = {step: {name: one.cpu() for name, one in tensors.items()} for step, tensors in trained.items()}
        if device.hazards:
            return f"hazard: {device.hazards[0]}"
    if not stored <= wanted.keys() or not {1, STEPS} <= stored:
        return f"steps {sorted(stored)} are stored"
    if not way.startswith("replica") and len(stored) < STEPS:
        return f"only steps {sorted(stored)} are stored"
    store = ckptstore.open(place)
    for step in sorted(stored):
        found = _tensors(store.load(step))
        if found.keys() != wanted[step].keys():
            return f"step {step} has other tensors"
        for name, one in found.items():
            if _bits(one) != _bits(wanted[step][name]):
                return f"step {step}: {name} has other bits"
    return None


def _trained(device: Machine, way: str, place: Path) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """Train -> copies of what each step has to be, which are queued, and the steps that the store has."""
    import torch

    from ckptstore.training import TopKHook

    chance = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 72), torch.nn.Tanh(), torch.nn.Linear(72, 64))
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(0.1 * torch.randn(one.shape, generator=chance))
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scope: Any = WAYS[way].get("compressed")
    hook = TopKHook(0.05, scope=scope, exact=False) if scope else None
    wanted: dict[int, dict[str, Any]] = {}
    late = _LateThreads()
    with late.waiting(), _saving(way, place, model, optimizer, hook) as (begin, save):
        for step in range(1, STEPS + 1):
            model(torch.randn(8, 64, generator=chance).cuda()).square().mean().backward()
            if hook is not None:
                hook.compress(model.parameters())
            begin(step)
            optimizer.step()
            late.go(step)
            optimizer.zero_grad()
            with torch.no_grad():
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                wanted[step] = {name: one.clone() for name, one in _tensors(state).items()}
            pending = save(step)
            if step <= WARM:
                if pending is not None:
                    pending.result()
                _settle(device, many=step > 1)
            late.hold(step >= WARM)
    return wanted, {info.step for info in ckptstore.open(place).checkpoints()}


class _LateThreads:
    """Other threads' waits for the device, which begin only when training has queued the next step.

    Else these threads are nearly always done before the next step of a model that small is queued, and what has no
    order on the device has one on the host.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = 0
        self._held = False
        self._training = threading.get_ident()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Hold waits back inside this ``with`` block."""
        synchronize = machine.Event.synchronize

        def late(event: machine.Event) -> None:
            if threading.get_ident() != self._training:
                with self._changed:
                    begun = self._step
                    self._changed.wait_for(lambda: self._step > begun or not self._held, 0.2)
            synchronize(event)

        with mock.patch.object(machine.Event, "synchronize", late):
            yield

    def hold(self, held: bool) -> None:
        """Whether waits are held back from now on."""
        with self._changed:
            self._held = held
            self._changed.notify_all()

    def go(self, step: int) -> None:
        """A step is queued."""
        with self._changed:
            self._step = step
            self._changed.notify_all()


def _settle(device: Machine, *, many: bool) -> None:
    """Give another thread time to register memory with the device: copies to other memory wait, and prove little."""
    deadline = time.monotonic() + (0.2 if many else 2.0)
    while len(device.ranges.starts) < 1 + many and time.monotonic() < deadline:
        time.sleep(0.002)


@contextlib.contextmanager
def _saving(way: str, place: Path, model: Any, optimizer: Any, hook: Any) -> Iterator[tuple[Any, Any]]:
    """What a script calls before the optimizer's step, and after it."""
    from ckptstore.training import Checkpointer, LayerwiseSnapshots

    strategy, _, mode = way.partition("+")
    if strategy == "layerwise":
        copies: Any = mode
        with (
            ckptstore.open(place, create=True).writer(max_in_flight=2) as writer,
            LayerwiseSnapshots(writer, model, optimizer, mode=copies, packed=0) as snapshots,
        ):
            yield snapshots.begin, snapshots.save
        return
    options = {name: value for name, value in WAYS[way].items() if name != "compressed"}
    if options.get("agent"):
        options["linger_seconds"] = 0
    with Checkpointer(
        place, model=model, optimizer=optimizer, compressor=hook, max_in_flight=2, signals=False, **options
    ) as saved:
        saved.resume()
        yield lambda _: None, lambda _: saved.step()


def _tensors(state: Any, name: str = "") -> dict[str, Any]:
    """The tensors of the model and the optimizer, by place."""
    import torch

    if isinstance(state, torch.Tensor):
        return {name: state.detach()}
    found: dict[str, Any] = {}
    if isinstance(state, dict):
        for key, one in state.items():
            if name or key in ("model", "optimizer"):
                found |= _tensors(one, f"{name}/{key}")
    elif isinstance(state, list | tuple):
        for number, one in enumerate(state):
            found |= _tensors(one, f"{name}/{number}")
    return found


def _bits(tensor: Any) -> bytes:
    import torch

    plain: bytes = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return plain


@contextlib.contextmanager
def _warm_agents(folder: Path) -> Iterator[None]:
    """Agents are forks of a process that has imported torch."""
    from ckptstore.agent.client import agent_launch

    with Warm(env=dict(os.environ)) as warm:

        def popen(_: list[str], *, pass_fds: list[int], stdout: int, stderr: int, **__: Any) -> Any:
            (socket,) = pass_fds  # a fork gets only the standard streams
            given = {"stdin": socket, "stdout": stdout, "stderr": stderr, "cwd": folder, "env": os.environ}
            return warm.start([sys.executable, "-c", _MAIN, "0"], **given)

        replaced = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
        with mock.patch.object(agent_launch, "subprocess", replaced):
            yield


def _broken() -> Any:
    from ckptstore.frameworks.torch_offload import CopyQueue

    return mock.patch.object(CopyQueue, "gate", return_value=None)


def _done(out: Path | None) -> set[tuple[str, str, int]]:
    if out is None or not out.exists():
        return set()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {(line["way"], line["stream"], line["first"]) for line in lines}


@click.command(help=__doc__)
@click.option("--seeds", default=200, show_default=True, type=click.IntRange(1), help="Of each case.")
@click.option("--first", default=0, show_default=True, type=click.IntRange(0), help="The first seed.")
@click.option("--only", multiple=True, metavar="GLOB", help="Strategies, as 'replica*'; repeatable.")
@click.option("--minutes", default=600.0, show_default=True, type=click.FloatRange(0), help="Begin no case after that.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Note results here, and continue.")
@click.option("--broken", is_flag=True, help="Nothing later waits for copies and digests: this must fail.")
def main(*, seeds: int, first: int, only: Sequence[str], minutes: float, out: Path | None, broken: bool) -> None:
    """See the module."""
    if (why := why_not()) is not None:
        click.echo(f"no device is simulated: {why}", err=True)
        sys.exit(3)
    until, done = time.monotonic() + 60 * minutes, _done(out)
    ways = [way for way in WAYS if not only or any(fnmatch.fnmatch(way, one) for one in only)]
    cases = wrong = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, CKPTSTORE_RUNTIME_DIR=f"{folder}/runtime"))
        if any(WAYS[way].get("agent") for way in ways):
            stack.enter_context(_warm_agents(Path(folder)))
        if broken:
            stack.enter_context(_broken())
        for start in range(first, first + seeds, TOGETHER):
            for way in ways:
                for stream, own in STREAMS.items():
                    if (way, stream, start) in done or time.monotonic() > until:
                        continue
                    found, began = {}, time.monotonic()
                    for seed in range(start, min(start + TOGETHER, first + seeds)):
                        with tempfile.TemporaryDirectory(dir=folder) as place:
                            told = _tried(way, own, seed, Path(place) / "store")
                        cases += 1
                        if told is not None:
                            found[seed] = told
                            wrong += 1
                            click.echo(f"{way}, {stream}, seed {seed}: {told}")
                    line = {"way": way, "stream": stream, "first": start, "wrong": found}
                    line["seconds"] = round(time.monotonic() - began, 1)
                    if out is not None:
                        with out.open("a") as file:
                            file.write(json.dumps(line) + "\n")
    click.echo(f"{cases} cases, {wrong} wrong")
    sys.exit(1 if wrong else 0)


def _tried(way: str, own_stream: bool, seed: int, place: Path) -> str | None:
    try:
        return violation(way, own_stream, seed, place)
    except Exception as error:  # noqa: BLE001  # the other cases are tried
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
