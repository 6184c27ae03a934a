"""SIGKILL of a training script that uses a `Checkpointer`, at random: it ends in the bits of one that never was killed.

    python -m tools.shim_kills --kills 100
    python -m tools.shim_kills --kills 100 --agent
    python -m tools.shim_kills --kills 100 --agent --strategy replica
    python -m tools.shim_kills --kills 100 --fsdp

For each strategy, and for one process and two ranks of DDP (with ``--fsdp``: of FSDP2). A run goes on in a new process
(or group) after each kill.
Then:

- every loss that was ever computed for a step is the one that the uninterrupted run had there;
- a step that was acknowledged is never lost;
- the last state (weights, moments, schedule, scaler, buffers, generators, loader) is the uninterrupted run's, bit for
  bit.

With ``--agent`` an agent saves, for one process, and the trainer, the agent or both are killed. When the trainer alone
is, the next life goes on from the agent's memory: at most the step in flight is lost. When the agent alone is, training
goes on in the same life. With ``replica``, which needs an agent, that memory is what the agent has made of gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

__all__ = ["STEPS", "Violation", "main", "sweep"]

STEPS: Final = 24
_STRATEGIES: Final = ("full", "delta", "gradient")
_PATIENCE: Final = 120.0
_RANK_TIMEOUT: Final = 20.0


class Violation(Exception):  # noqa: N818  # not of the project: of its promises
    """A promise that was broken."""


@dataclass(slots=True)
class Life:
    """What one process, or group, has told.

    Attributes:
        losses: by step and rank, as hexadecimal text.
        acknowledged: the highest step that was told to be durable.
        resumed: where it began.
        digests: of the last state, by rank.
        errors: what a rank died of that was not killed.
        agent: the process that saves; 0: there is none, or it has not been told of.
        given: the highest step that the writer had taken.
    """

    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    acknowledged: int = 0
    resumed: int | None = None
    digests: dict[int, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    agent: int = 0
    given: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """What is run.

    Attributes:
        strategy: how it saves.
        ranks: how many processes: one, or of DDP, or of FSDP2.
        by_agent: an agent saves.
        sharded: FSDP2, in shards that are not of one size.
    """

    strategy: str
    ranks: int = 1
    by_agent: bool = False
    sharded: bool = False

    def __str__(self) -> str:
        how = " of FSDP2" if self.sharded else ""
        return f"{self.strategy}, {self.ranks} rank{'s' if self.ranks > 1 else ''}{how}"


# -- the script


def train(store: Path, job: Job, rank: int, port: int, tell: Callable[[str], None]) -> None:
    """The script of issue 13, with every part that it may have."""
    import torch

    from ckptstore.training import Checkpointer

    torch.set_num_threads(1)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(0)
    hidden = 97 if job.sharded else 96
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(48, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Dropout(0.1), torch.nn.Linear(hidden, 48)
    )
    bare = model
    ema = torch.optim.swa_utils.AveragedModel(bare, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    if job.ranks > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=job.ranks,
            timeout=timedelta(seconds=_RANK_TIMEOUT),
        )
        torch.manual_seed(rank)
        if job.sharded:
            for one in (bare[3], bare, ema.module):
                torch.distributed.fsdp.fully_shard(one)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)
    data = torch.utils.data.TensorDataset(torch.randn(80, 48, generator=torch.Generator().manual_seed(rank)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    with Checkpointer(
        store,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        strategy=job.strategy,
        extra={"ema": ema},
        full_every=8,
        rank_timeout=_RANK_TIMEOUT,
        agent=job.by_agent,
        linger_seconds=60.0,
    ) as checkpointer:
        start = checkpointer.resume()
        tell(f"resumed {start}")
        if job.by_agent:
            tell(f"agent {checkpointer.agent_pid}")
        batches = endless(checkpointer.loader)
        for step in range(start, STEPS):
            (x,) = next(batches)
            loss = (model(x + 0.1 * np.random.random()) - x * random.random()).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.update_parameters(bare)
            tell(f"loss {step} {loss.item().hex()}")
            pending = checkpointer.step(metrics={"loss": loss})
            assert pending is not None or job.strategy == "replica"  # the agent has it in memory
            tell(f"given {step + 1}")
            if job.by_agent:
                tell(f"agent {checkpointer.agent_pid}")
            if pending is not None:
                pending.when_done(lambda durable, step=step: tell(f"durable {step + 1}") if durable else None)
        checkpointer.wait()
        parts = [bare.state_dict(), optimizer.state_dict(), scheduler.state_dict(), ema.state_dict()]
        parts += [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]
        tell(f"end {digest(parts)}")
    if job.ranks > 1:
        torch.distributed.destroy_process_group()


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def digest(value: Any) -> str:
    """Of every bit of a nested value."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, dict):
            for key, member in one.items():
                add(key)
                add(member)
        elif isinstance(one, list | tuple):
            for member in one:
                add(member)
        elif hasattr(one, "detach"):
            part = one.to_local() if hasattr(one, "to_local") else one
            found.update(repr((part.dtype, tuple(part.shape))).encode() + part.detach().cpu().numpy().tobytes())
        else:
            found.update(f"{type(one).__name__} {one!r};".encode())

    add(value)
    return found.hexdigest()


# -- lives and deaths


def forked(work: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Run `work(tell)` in a process -> its pid, and where it tells to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        signal.alarm(int(_PATIENCE) + 20)  # whatever becomes of the harness
        work(lambda line: (os.write(writing, f"{line}\n".encode()), None)[1])
        status = 0
    except BaseException:  # noqa: BLE001  # told to the harness
        os.write(writing, f"error {traceback.format_exc()!r}\n".encode())
    os._exit(status)


_AGENT: Final = 1  # as a victim: one process has no rank 1


def live(store: Path, job: Job, doom: tuple[int, float, int] | None) -> tuple[Life, bool]:
    """One life -> what it told, and whether it was killed.

    Args:
        doom: after how many losses of rank 0, how many seconds later, and which rank is killed (-1: all); the others
            follow soon after, as under a scheduler. With an agent: 0 the trainer, 1 the agent, -1 both.
    """
    port = free_port()

    def work(rank: int) -> Callable[[Callable[[str], None]], None]:
        return lambda tell: train(store, job, rank, port, tell)

    processes = [forked(work(rank)) for rank in range(job.ranks)]
    life, killed = Life(), False
    pipes = {pipe: (rank, "") for rank, (_, pipe) in enumerate(processes)}
    began, strike = time.monotonic(), None
    try:
        while pipes:
            now = time.monotonic()
            if now - began > _PATIENCE:
                raise Violation(f"{job}: a life takes more than {_PATIENCE:g} s")
            if doom is not None and strike is None and len([one for one in life.losses if one[1] == 0]) >= doom[0]:
                strike = now + doom[1]
            if doom is not None and strike is not None and not killed and now >= strike:
                killed = True
                if not job.by_agent or doom[2] != _AGENT:
                    strike_down(processes, doom[2])
                if job.by_agent and doom[2] != 0 and life.agent > 1:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(life.agent, signal.SIGKILL)
            ready, _, _ = select.select(list(pipes), [], [], 0.002 if strike is not None and not killed else 0.05)
            for pipe in ready:
                rank, rest = pipes[pipe]
                data = os.read(pipe, 1 << 16)
                if not data:
                    del pipes[pipe]
                    continue
                *lines, rest = (rest + data.decode()).split("\n")
                pipes[pipe] = rank, rest
                for line in lines:
                    note(life, rank, line)
    finally:
        for pid, pipe in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
    return life, killed


def strike_down(processes: list[tuple[int, int]], victim: int) -> None:
    chosen = [processes[victim]] if victim >= 0 else []
    for pid, _ in chosen:
        os.kill(pid, signal.SIGKILL)
    if chosen and len(processes) > 1:
        time.sleep(0.05)
    for pid, _ in processes:
        os.kill(pid, signal.SIGKILL)


def note(life: Life, rank: int, line: str) -> None:
    what, _, rest = line.partition(" ")
    if what == "loss":
        step, _, loss = rest.partition(" ")
        life.losses[int(step), rank] = loss
    elif what == "durable":
        life.acknowledged = max(life.acknowledged, int(rest))
    elif what == "resumed":
        life.resumed = int(rest)
    elif what == "given":
        life.given = max(life.given, int(rest))
    elif what == "agent":
        life.agent = int(rest)
    elif what == "end":
        life.digests[rank] = rest
    else:
        life.errors.append(f"rank {rank}: {line[:3000]}")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


# -- the sweep


def sweep(kills: int, job: Job, seed: int, say: Callable[[str], object]) -> int:
    """Kill a run `kills` times -> how many runs that took. Raises `Violation`."""
    draw = random.Random(f"{seed} {job.strategy} {job.ranks}")
    folder = Path(tempfile.mkdtemp(prefix="shim-kills-"))
    os.environ["CKPTSTORE_RUNTIME_DIR"] = str(folder / "runtime")
    try:
        whole = replace(job, strategy="full", by_agent=False) if job.strategy == "replica" else job
        reference, _ = live(folder / "reference", whole, None)
        if reference.errors or len(reference.digests) != job.ranks:
            raise Violation(f"the uninterrupted run failed: {reference.errors}")
        done, runs = 0, 0
        resumed: list[int] = []
        while done < kills:
            runs += 1
            done += one_run(folder / f"run-{runs}", job, kills - done, reference, draw, resumed)
            shutil.rmtree(folder / f"run-{runs}")
            say(f"{job}: {done} kills in {runs} runs, {sum(step > 0 for step in resumed)} resumed")
        if not any(resumed):
            raise Violation(f"{job}: every kill came before the first durable step: nothing is shown")
        return runs
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def one_run(store: Path, job: Job, kills: int, reference: Life, draw: random.Random, resumed: list[int]) -> int:
    """A run from nothing to its end, killed at most so often -> how often; `resumed` gets where each life began."""
    done, acknowledged, given = 0, 0, 0
    while True:
        victim = draw.choice([-1, 0, _AGENT] if job.by_agent else [-1, *range(job.ranks)])
        doom = (draw.randrange(STEPS // 2), draw.random() * draw.choice([0.01, 0.1]), victim) if done < kills else None
        life, killed = live(store, job, doom)
        resumed.append(life.resumed or 0)
        about = f"{job}, after {done} kills"
        if life.resumed is not None and life.resumed < acknowledged:
            raise Violation(f"{about}: step {acknowledged} was acknowledged, and the run resumed at {life.resumed}")
        if life.resumed is not None and life.resumed < given - 1:  # the message may have been on its way
            raise Violation(f"{about}: step {given} was given to the agent, and the run resumed at {life.resumed}")
        given = life.given if job.by_agent and doom is not None and victim == 0 else 0
        for key, loss in life.losses.items():
            if loss != reference.losses[key]:
                raise Violation(f"{about}: the loss of step {key[0]} on rank {key[1]} is another")
        acknowledged = max(acknowledged, life.acknowledged)
        if not killed or len(life.digests) == job.ranks:
            if life.errors or life.digests != reference.digests:
                raise Violation(f"{about}: the last state differs ({life.digests}); {life.errors}")
            return done + killed
        done += 1


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 with what was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each strategy")
    parser.add_argument("--strategy", choices=(*_STRATEGIES, "replica"), action="append")
    parser.add_argument("--ranks", type=int, choices=(1, 2), action="append")
    parser.add_argument("--agent", action="store_true", help="an agent saves, and is killed, too (one process)")
    parser.add_argument("--fsdp", action="store_true", help="the ranks have shards of the model (two processes)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args(arguments)
    if "replica" in (options.strategy or ()) and not options.agent:
        parser.error("replica: an agent keeps the replica: --agent")
    if options.agent and options.fsdp:
        parser.error("--agent is for one process, --fsdp for two")
    warnings.simplefilter("ignore")
    import torch.distributed.fsdp  # here, and not once for each life  # noqa: F401

    print(f"seed {options.seed}")
    for ranks in (1,) if options.agent else (2,) if options.fsdp else options.ranks or (1, 2):
        for strategy in options.strategy or (*_STRATEGIES, *(["replica"] if options.agent else [])):
            began = time.monotonic()
            try:
                sweep(options.kills, Job(strategy, ranks, options.agent, options.fsdp), options.seed, print)
            except Violation as error:
                print(f"BROKEN: {error}")
                return 1
            print(f"{time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
