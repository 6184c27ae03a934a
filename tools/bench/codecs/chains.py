"""Delta chains on a real run: bytes against restore time for several intervals, and the cost of a long chain.

    python -m tools.bench.codecs.chains --steps 200            # the table
    python -m tools.bench.codecs.chains --chain 30 --mib 192   # a 30-delta chain against its parts

The table: one training run (the demo's GPT, every step a checkpoint) goes into one store per strategy at once, so all
see the same states; the most expensive checkpoint of each store is restored, and its bits are compared with the run's
own. The chain: raw read of every byte it needs (checksums off), decoding from memory, and the restore, interleaved;
medians.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore.formats import checksums, codecs, jsontext
from ckptstore.formats.history.checkpoint_ref import node_of
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import aligned
from ckptstore.reports.restore_explanation import explain
from ckptstore.restore.open_checkpoint import opened
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tools.bench.storage.pagecache import drop

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy. Bytes are all stored bytes; seconds are medians."""

    strategy: str
    stored: int
    bytes_per_checkpoint: float
    bits_per_parameter: float
    fulls: int
    longest_chain: int
    worst_bytes: int
    worst_seconds: float
    save_seconds: float


def strategies(times: float) -> dict[str, DeltaOptions | None]:
    """The strategies of the table, all but the first under one restore bound."""
    bound = RestoreBound(times=times)
    found: dict[str, DeltaOptions | None] = {"fulls only": None}
    for interval in (1, 2, 4, 10, 20, 40):
        found[f"T = {interval}"] = DeltaOptions(interval=interval, bound=bound)
    found["T = 10, paper form"] = DeltaOptions(interval=10, form="paper", bound=bound)
    found["auto"] = DeltaOptions(bound=bound)
    found["auto, compressed fulls"] = DeltaOptions(bound=bound, compress_fulls=True)
    return found


def table(steps: int, times: float, width: int, folder: Path, threads: int = 2) -> list[Row]:
    """Train once, store with every strategy, restore the most expensive checkpoint of each."""
    from contextlib import ExitStack

    from tools.demo.config import DemoConfig
    from tools.demo.corpus import read_corpus
    from tools.demo.training import Training

    config = DemoConfig(steps=max(steps, 40), width=width, threads=threads)
    training = Training(config, read_corpus(config.corpus_bytes))
    parameters = sum(p.numel() for p in training.model.parameters())
    stores = {name: ckptstore.open(folder / re.sub(r"\W+", "-", name)) for name in strategies(times)}
    spent: dict[str, list[float]] = {name: [] for name in stores}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(stores[name].writer(deltas=options, poll_seconds=None))
            for name, options in strategies(times).items()
        }
        for step in range(1, steps + 1):
            training.run_step()
            state = training.state()
            for name, writer in writers.items():
                began = time.perf_counter()
                writer.save(state, step=step)
                spent[name].append(time.perf_counter() - began)
            print(f"\rstep {step}/{steps}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = []
    for name, store in stores.items():
        infos = store.checkpoints()
        plans = {info.ref: store.plan(info.ref) for info in infos}
        worst = max(plans, key=lambda ref: plans[ref].cost)
        times_taken = []
        for _ in range(3):
            drop(folder)
            began = time.perf_counter()
            loaded = store.load(worst, framework="torch")
            times_taken.append(time.perf_counter() - began)
        reference = stores["fulls only"].load(node_of(worst)[1], framework="torch")
        if fingerprint(loaded) != fingerprint(reference):
            raise SystemExit(f"{name}: {worst} was restored with other bits")
        stored = sum(path.stat().st_size for path in (folder / re.sub(r"\W+", "-", name)).rglob("*") if path.is_file())
        rows.append(
            Row(
                name,
                stored,
                stored / len(infos),
                8 * stored / len(infos) / parameters,
                sum(info.kind == "full" for info in infos),
                max(len(plan.encodings) - 1 for plan in plans.values()),
                int(plans[worst].cost),
                statistics.median(times_taken),
                statistics.median(spent[name]),
            )
        )
    return rows


def fingerprint(state: Any) -> str:
    """The state's hash, as the store computes it."""
    flat = bridge.flattened(state)
    parts = []
    for name, source in flat.tensors.items():
        image = np.empty(source.nbytes, np.uint8)
        source.read(0, image)
        parts.append((name, source.dtype, source.shape, checksums.xxh3_128(image.data)))
    return checksums.state_hash(jsontext.dumps(flat.tree), parts)


def make_chain(store: ckptstore.Store, deltas: int, mib: int) -> None:
    """A full and `deltas` deltas of a state of `mib` MiB that changes as in late training."""
    rng = np.random.default_rng(0)
    count = mib * MIB // 4 // 12
    weights = {f"layer{n}.weight": rng.standard_normal(count, dtype=np.float32) * np.float32(0.02) for n in range(12)}
    options = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=deltas))
    with store.writer(deltas=options, poll_seconds=None) as writer:
        for step in range(1, deltas + 2):
            for weight in weights.values():
                weight[:] += rng.standard_normal(count, dtype=np.float32) * np.float32(1e-5)
            writer.save({"model": weights, "step": step}, step=step)


def chain_cost(deltas: int, mib: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Raw read, decode and restore of the end of a chain; peak memory of a restore in a fresh process."""
    store = ckptstore.open(folder / "chain")
    make_chain(store, deltas, mib)
    read_times, decode_times, restore_times = [], [], []
    for _ in range(rounds):
        drop(folder)
        read_times.append(_read_everything(store, deltas + 1))
        decode_times.append(_decode_everything(store, deltas + 1))
        drop(folder)
        began = time.perf_counter()
        store.load(deltas + 1, framework="numpy")
        restore_times.append(time.perf_counter() - began)
    read, decode, restore = map(statistics.median, (read_times, decode_times, restore_times))
    plan = explain(store.journal, deltas + 1)
    return {
        "deltas": deltas,
        "state_bytes": plan.nbytes,
        "bytes_read": plan.bytes_read,
        "read_seconds": read,
        "decode_seconds": decode,
        "restore_seconds": restore,
        "restore_over_read_plus_decode": restore / (read + decode),
        "explained_seconds": plan.seconds,
        "peak_above_state_mib": _peak(folder / "chain", deltas + 1) / MIB,
    }


def _read_everything(store: ckptstore.Store, step: int) -> float:
    """Seconds to read every payload of the chain, by two threads, 16 MiB at a time, unchecked."""
    with opened(store.journal, step) as found, ThreadPoolExecutor(2) as pool:
        pieces = [
            (reader, at, min(16 * MIB, reader.entry.size - at))
            for reader in found.readers.values()
            for at in range(0, reader.entry.size, 16 * MIB)
        ]
        buffers = [aligned(16 * MIB), aligned(16 * MIB)]

        def work(lane: int) -> None:
            for reader, at, length in pieces[lane::2]:
                reader.source.read_into(at, buffers[lane][:length].data)

        began = time.perf_counter()
        for future in [pool.submit(work, lane) for lane in range(2)]:
            future.result()
        return time.perf_counter() - began


def _decode_everything(store: ckptstore.Store, step: int) -> float:
    """Seconds to decode the chain by two threads, with payloads already in memory, unchecked."""
    with opened(store.journal, step) as found, ThreadPoolExecutor(2) as pool:
        jobs = []
        for chain in found.chains.values():
            for index, chunk in enumerate(chain.tensor.chunks):
                links = []
                for link in chain.links:
                    stored = link.tensor.chunks[index]
                    payload = aligned(stored.length)
                    link.reader.source.read_into(stored.offset, payload.data)
                    links.append((link.codec, payload))
                jobs.append((links, aligned(chunk.logical)))

        def work(lane: int) -> None:
            for links, out in jobs[lane::2]:
                codecs.apply(links, out)

        began = time.perf_counter()
        for future in [pool.submit(work, lane) for lane in range(2)]:
            future.result()
        return time.perf_counter() - began


def _peak(url: Path, step: int) -> int:
    """Peak resident bytes of a restore above its start and the state itself, in a fresh process."""
    code = f"""
import pathlib, re, ckptstore, ckptstore.restore.load
status = pathlib.Path("/proc/self/status")
def field(name): return int(re.search(name + r":\\s+(\\d+)", status.read_text())[1]) * 1024
store = ckptstore.open({str(url)!r})
nbytes = store.checkpoint({step}).nbytes
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = field("VmRSS")
state = store.load({step}, framework="numpy")
print(field("VmHWM") - before - nbytes)
"""
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="train so many steps and print the table")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--bound", type=float, default=4.0, help="restore bound, in fulls")
    parser.add_argument("--chain", type=int, default=0, help="measure a chain of so many deltas")
    parser.add_argument("--mib", type=int, default=192, help="state of the chain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to make the stores")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ckptstore-chains-", dir=options.dir))
    try:
        if options.steps:
            rows = table(options.steps, options.bound, options.width, folder)
            print(
                "| strategy | stored MB | kB per checkpoint | bits/param | fulls | longest chain "
                "| restore MB | restore s | save s |"
            )
            print("|---|---|---|---|---|---|---|---|---|")
            for row in rows:
                print(
                    f"| {row.strategy} | {row.stored / 1e6:.1f} | {row.bytes_per_checkpoint / 1e3:.0f} "
                    f"| {row.bits_per_parameter:.1f} | {row.fulls} | {row.longest_chain} "
                    f"| {row.worst_bytes / 1e6:.1f} | {row.worst_seconds:.3f} | {row.save_seconds:.3f} |"
                )
            (options.out / "chains-table.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
        if options.chain:
            found = chain_cost(options.chain, options.mib, options.rounds, folder)
            for name, value in found.items():
                print(f"{name:32} {value:.3f}" if isinstance(value, float) else f"{name:32} {value}")
            (options.out / "chains-cost.json").write_text(json.dumps(found, indent=1))
        if not options.steps and not options.chain:
            parser.error("give --steps or --chain")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
