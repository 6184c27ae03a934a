"""Every command on a terminal of 80 columns: nothing is wider, and lines break between words."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.cli.main import COMMANDS
from ckptstore.cli.text_wrap import fitted
from tests import warmth
from tests.maintenance.stores import grown

WIDTH = 80
SCREENS = {
    "ls": ["ls runs", "ls"],
    "log": ["log runs/gpt", "log runs/gpt --all", "log runs/net --sort loss", "log runs/gpt runs/net --all"],
    "inspect": [
        "inspect runs/gpt",
        "inspect runs/gpt 17 --chain --tensors",
        "inspect runs/net --tensors",
        "inspect runs/net --state",
        "inspect runs/net --tensor model.blocks.0.attention.weight",
    ],
    "diff": ["diff runs/gpt 1@1 17@3", "diff runs/net 10 60", "diff runs/gpt latest latest --in runs/net"],
    "watch": ["watch runs/gpt --once"],
    "follow": ["follow runs/gpt --once --out policy.safetensors"],
    "stats": ["stats runs/gpt"],
    "verify": ["verify runs/gpt --deep", "verify bad"],
    "bisect": ["bisect runs/net --nan"],
    "repair": ["repair bad fixed"],
    "restore": ["restore runs/net --out out.safetensors", "restore runs/gpt --explain", "restore bad 17@3 --out a.pt"],
    "publish": ["publish runs/net --to published", "publish runs/net --to published"],
    "import": ["import runs/new shelf/step_1.safetensors shelf/step_2.safetensors --delta"],
    "copy": ["copy runs/gpt copied"],
    "sync": ["sync runs/gpt second"],
    "tag": ["tag runs/gpt", "tag runs/gpt x 17 --timeout 0.1", "tag runs/gpt 29..30 17 --take-over"],
    "keep": ["keep runs/gpt", "keep runs/net last:2 every:7 --take-over"],
    "prune": ["prune runs/net --keep every:7 --keep best:loss:20 --dry-run"],
    "retire": ["retire runs/net 10 20 30 --dry-run"],
    "compact": ["compact runs/net --dry-run"],
    "merge": ["merge runs/gpt 8@3..17@3 --dry-run", "merge runs/gpt 8@3..17@3 --take-over --yes", "log runs/gpt"],
    "gc": ["gc runs/gpt --dry-run"],
    "analyze": ["analyze runs/net --steps 3 --gaps 1,2 --threads 1"],
    "tune": [
        "tune wasted-time --paper",
        "tune interval runs/net --iteration-time 50ms --saves 2 --in-flight 1 --threads 1 --probe 1MiB",
    ],
    "doctor": ["doctor runs/gpt --quick"],
    "completion": [],
}
"""Command -> the typed line. The script that `completion` prints is for a shell."""
MISTAKES = [
    "log runs/gtp",
    "log runs/gpt 20",
    "inspect runs/gpt bset",
    "inspect runs/gpt 77",
    "ls nothing",
    "rm runs/gpt",
]
DRIVER = """
import json, sys
from ckptstore.cli.main import cli
for words in json.loads(sys.argv[1]):
    try:
        cli.main(words, prog_name="ckpt")
    except SystemExit as ended:
        code = ended.code
    print(f"\\x1e{code}\\x1e", flush=True)
"""


def played(lines: list[str], folder: Path) -> list[tuple[str, int]]:
    """The output of each line on one terminal, stdout and stderr, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    kept = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES", "CKPT_STORE", "LESS")}
    process = warmth.nursery().start(
        [sys.executable, "-c", DRIVER, json.dumps([line.split(" ") for line in lines])],
        cwd=folder,
        stdout=theirs,
        stderr=theirs,
        env={**kept, "TERM": "xterm", "PAGER": "cat", "NO_COLOR": "1", "PYTHONPATH": ""},
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # EIO: no process has the terminal open any more
        pass
    finally:
        os.close(ours)
        process.wait(60)
    text = written.decode().replace("\r\n", "\n")
    parts = text.split("\x1e")
    assert len(parts) == 2 * len(lines) + 1, text[-2000:]
    return [(parts[2 * number], int(parts[2 * number + 1])) for number in range(len(lines))]


def shown(text: str) -> list[str]:
    """The lines that remain on the screen: without colours, overwritten text and bars."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.split("\r")[-1].rstrip() for line in text.split("\n") if "━" not in line]


def too_wide(line: str) -> bool:
    """Whether a line could have been broken. A path, a range or a command to paste stays in one piece."""
    if len(line) <= WIDTH:
        return False
    indent = len(line) - len(line.lstrip())
    return fitted(line.lstrip(), WIDTH - indent, 0) != line.lstrip()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/gpt: fulls, deltas, step diffs, branches, tags. runs/net: long names and many fulls. bad: damaged."""
    root = tmp_path_factory.mktemp("screens")
    gpt = grown(root / "runs/gpt")
    rng = np.random.default_rng(1)
    names = [f"{part}.blocks.{n}.attention.weight" for part in ("model", "optimizer.exp_avg") for n in range(3)]
    state = {name.partition(".")[0]: {} for name in names}
    for name in names:
        room, _, rest = name.partition(".")
        state[room][rest] = rng.normal(size=(40, 30)).astype("f4")
    net = ckptstore.open(root / "runs/net")
    with net.writer(poll_seconds=None) as writer:
        for step in range(1, 61):
            for room in state.values():
                for array in room.values():
                    np.multiply(array, np.float32(1.001), out=array)
            writer.save(
                {**state, "epoch": step // 10}, step, metadata={"loss": 1 / step, "lr": 0.1}, tags=f"t{step % 9}"
            )
    shutil.copytree(root / "runs/gpt", root / "bad")
    damaged = max((root / "bad/seg/0000000003").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 255
    damaged.write_bytes(content)
    (root / "shelf").mkdir()
    for step in (1, 2):
        gpt.export(f"{step}@1", root / f"shelf/step_{step}.safetensors")
    return root


@pytest.mark.slow
def test_nothing_is_wider_than_the_terminal(world: Path, tmp_path: Path) -> None:
    assert SCREENS.keys() == COMMANDS.keys(), "SCREENS above has what is typed for each command"
    here = shutil.copytree(world, tmp_path / "here")
    lines = [line for typed in SCREENS.values() for line in typed] + MISTAKES
    wide = []
    for line, (text, code) in zip(lines, played(lines, here), strict=True):
        assert code != 70, text
        assert text.strip(), line
        assert "Traceback" not in text
        wide += [(line, one) for one in shown(text) if too_wide(one)]
    assert wide == []


def test_neither_is_help(world: Path) -> None:
    names = [[name] for name in COMMANDS] + [["tune", "interval"], ["tune", "wasted-time"]]
    lines = [f"{' '.join(words)} --help" for words in names]
    wide = [
        (line, one)
        for line, (text, _) in zip(lines, played(lines, world), strict=True)
        for one in shown(text)
        if len(one) > WIDTH
    ]
    assert wide == []


def test_ranges_commands_and_numbers_stay_whole() -> None:
    text = "would retire 7: 5..30@1 by 5, 40@2; `ckpt compact runs/gpt --gc` frees 36.0 MiB of it"
    for room in range(20, 90):
        lines = fitted(text, room).split("\n")
        assert " ".join(line.strip() for line in lines) == text
        for piece in ("5..30@1 by 5,", "`ckpt compact runs/gpt --gc`", "36.0 MiB"):
            assert sum(piece in line for line in lines) == 1
    assert fitted(text, None) == text
