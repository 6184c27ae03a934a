"""The XOR paper, Fig. 4 and 5: time to send checkpoints between four nodes, and time to compress them.

Four processes in a ring, each with its own checkpoints, send to their neighbours over loopback TCP, paced to the speed
of a link. Each sends its weights as they are, and then its store's delta (exclusive or) against the checkpoint before,
which the neighbour has. The neighbour restores from what it received, and compares.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from tools.bench.training.training_cases import ROOT
from tools.papers.result import Asked, Claim, Compared, Figure, Result, Table
from tools.papers.xor.states import pairs

__all__ = ["run"]

NODES: Final = 4


def run(asked: Asked) -> Result:
    """Run the experiment."""
    found = [pair for pair in pairs(asked, "lm") if pair.gap == 1]
    chosen = [found[number % len(found)] for number in range(NODES)]
    copies = asked.pick(1, 4, 1)  # the small model's weights several times: a checkpoint worth sending
    for number, pair in enumerate(chosen):
        for place, step in enumerate((pair.step, pair.step + pair.gap)):
            state = {name: words.view("<f4") for name, words in pair.trajectory.load(step, "model.").items()}
            whole = {f"{copy}.{name}": array for copy in range(copies) for name, array in state.items()}
            np.savez(asked.scratch / f"{number}-{place}.npz", **whole)  # type: ignore[arg-type]
    rates = asked.pick((1e9,), (1e8, 1e9), (1e8, 1e9, 1e10))
    said = {rate: _ring(asked, rate) for rate in rates}
    rows = []
    for rate, nodes in said.items():
        mean = {name: statistics.fmean(one[name] for one in nodes) for name in nodes[0]}
        rows.append(
            (
                *(f"{rate / 1e9:g} Gbit/s", mean["raw"] / 1e6, mean["raw"] / mean["sent"], mean["raw_s"]),
                *(mean["delta_s"], mean["compress_s"], mean["processor_s"], mean["decompress_s"]),
                mean["delta_s"] + mean["compress_s"] < mean["raw_s"],
            )
        )
        asked.told(f"{rows[-1][0]}: {mean['raw_s']:.3f} s raw, {mean['delta_s']:.3f} s as a delta")
    columns = (
        *("link", "weights MB", "ratio", "sent raw s", "sent as a delta s", "compressing s"),
        *("of the processor s", "restoring, processor s", "delta and compressing are faster"),
    )
    table = [(*row[:-1], "yes" if row[-1] else "no") for row in rows]
    slow, fast = rows[0], rows[-1]
    return Result(
        tables=[Table(f"Means of {NODES} nodes", columns, table, dict.fromkeys(columns[1:8], ".3f"))],
        claims=[
            Claim(
                "sending a delta takes less time than sending the weights (Fig. 4)",
                "less, by the ratio",
                ", ".join(f"{row[0]}: {row[3] / row[4]:.2f}x" for row in rows),
                slow[4] < slow[3],
                "the link is faster than these processes can feed it" if fast[4] >= fast[3] else "",
            ),
            Claim(
                "compressing takes a negligible time beside what it saves (Fig. 5)",
                "negligible",
                ", ".join(f"{row[0]}: {_part(row[5], row[3] - row[4])}" for row in rows),
                all(row[5] < 0.1 * (row[3] - row[4]) for row in rows),
                "four nodes share two cores here, and compressing includes making the checkpoint durable. On one core "
                "it pays if the codec is faster than link / (1 - 1 / ratio) (docs/codecs.md)",
            ),
            Claim(
                "decompressing takes about as long as compressing",
                "similar",
                f"{slow[7] / slow[6]:.2f} of it, processor time",
                slow[7] < 3 * slow[6],
                "restoring includes every check of the store" if slow[7] >= 3 * slow[6] else "",
            ),
        ],
        figures=[
            Figure(
                "Time of one checkpoint between nodes",
                "bars",
                [row[0] for row in rows],
                {
                    "raw": [row[3] for row in rows],
                    "delta": [row[4] for row in rows],
                    "compressing": [row[5] for row in rows],
                },
                y="s",
                log="y",
            )
        ],
        compared=[
            Compared(
                "checkpoints restored by the neighbour",
                NODES * len(rates),
                sum(one["equal"] for nodes in said.values() for one in nodes),
            )
        ],
        settings={"nodes": NODES, "rates_bit_per_s": list(rates), "copies": copies},
        numbers={f"{rate:g}": nodes for rate, nodes in said.items()},
    )


def _part(spent: float, saved: float) -> str:
    """Seconds of compressing beside what they save."""
    return f"{spent / saved:.2f} of the saved time" if saved > 0 else "it saves no time"


def _ring(asked: Asked, rate: float) -> list[dict[str, Any]]:
    """Run the nodes at one speed of the link -> what each printed."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(NODES)]
    ports = [one.getsockname()[1] for one in sockets]
    top = asked.scratch / f"{rate:g}"
    nodes = []
    for number, listening in enumerate(sockets):
        command = [sys.executable, "-W", "ignore", "-m", "tools.papers.xor.node", str(listening.fileno())]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        node = subprocess.Popen(command, cwd=ROOT, pass_fds=[listening.fileno()], **pipes)
        nodes.append(node)
        neighbour = (number + 1) % NODES
        config = {
            "folder": str(_made(top / str(number))),
            "states": [str(asked.scratch / f"{number}-{place}.npz") for place in (0, 1)],
            "port": ports[neighbour],
            "rate": rate / 8,
            "replica": str(_made(top / str(neighbour)) / "replica"),
            "receives": str(top / str(number) / "replica"),
        }
        _tell(node, json.dumps(config))
    try:
        for node in nodes:
            assert node.stdout is not None
            if node.stdout.readline() != "ready\n":
                raise RuntimeError(f"a node ended with status {node.wait()}")
        for node in nodes:
            _tell(node, "go")
        found = [json.loads(node.communicate()[0]) for node in nodes]
    finally:
        for node, listening in zip(nodes, sockets, strict=True):
            node.kill()
            node.wait()
            listening.close()
    return found


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tell(node: subprocess.Popen[str], line: str) -> None:
    assert node.stdin is not None
    node.stdin.write(line + "\n")
    node.stdin.flush()
