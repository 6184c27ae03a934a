"""Every example of the documentation runs, or this file states why it does not.

Python blocks: another test runs those of the pages in `ELSEWHERE`; blocks with ``>>>`` run as doctests; any other block
runs as a script in its own process, after the code that `BEFORE` puts in front of it. Console blocks: the command
itself parses every ``$ ckpt`` line of every page, and the lines of cli.md and cli-options.md run. A new page is found
automatically.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.cli.main import COMMANDS, cli
from tests import transcripts, warmth
from tools.objects.server import free_port

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "agent.md": "tests/agent/test_agent_docs.py",
    "following.md": "tests/following/test_docs.py",
    "serving.md": "tests/following/test_publish_docs.py",
    "checkpointer.md": "tests/training/test_checkpointer_docs.py",
    "operations.md": "tests/cli/test_operations_docs.py",
    "retention.md": "tests/maintenance/test_retention_docs.py",
}
TRANSCRIPTS = ("comparing.md", "quickstart.md", "troubleshooting.md")
"""Pages that run from the top in one folder, with every output compared."""
NOT_RUN = {
    ("demo.md", 0): "an excerpt of tools/demo/training.py, which `make demo` and tests/tools/test_demo.py run",
    ("object-stores.md", 0): "AWS itself; tests/backends/test_objects_store.py opens the same URLs on a server here",
    ("object-stores.md", 1): "a host of somebody's; tests/backends/test_fsspec_files.py opens such file systems",
    ("tiers.md", 0): "a bucket of somebody's; tests/tiers/test_tiers.py has such stores on a server here",
    ("tuning.md", 1): "tests/tuning/test_interval_controller.py runs it, and looks at what it prints",
    (
        "writer.md",
        3,
    ): "an excerpt of a shim's rank; tests/write/test_replace.py calls `forgo`, the shim of DCP likewise",
    ("writer.md", 6): "tests/training/test_layerwise_docs.py runs it, and looks at what it prints",
    ("persistent-memory.md", 0): "a mounted /mnt/pmem0; tests/backends/test_pmem.py opens such URLs in folders",
}
"""(page, number of the block) -> why it does not run."""
TRAINING = """
import torch, ckptstore
from ckptstore.training import OptimizerStep
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
store = ckptstore.open("runs/gpt")
def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
def loss_of_a_batch():
    return model(torch.randn(8, 4)).square().mean()
steps = 5
"""
FIRST_STEP = """
writer = store.writer(diffs=ckptstore.DiffOptions(batch=2)).__enter__()
loss = loss_of_a_batch(); loss.backward(); optimizer.step(); optimizer.zero_grad()
writer.save(state(), 1)
step, loss = 2, loss_of_a_batch()
"""
FOUR_RANKS = """
import numpy, threading, ckptstore
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
box, store, ref = LocalMailbox(), ckptstore.open("runs/a"), 1
def save(rank):
    with store.writer(group=Group(rank, 4, box), ranks=ckptstore.RankOptions(per_rank="rng")) as writer:
        writer.save({"rng": numpy.arange(3) + rank, "weight": numpy.ones(3)}, 1)
ranks = [threading.Thread(target=save, args=(rank,)) for rank in range(4)]
for rank in ranks: rank.start()
for rank in ranks: rank.join()
"""
BEFORE = {
    ("dcp.md", 0): 'import torch; step, state = 1, {"model": {"w": torch.ones(3)}, "lr": 0.1}',
    ("dcp.md", 2): TRAINING
    + """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from ckptstore import DiffOptions
from ckptstore.integrations.dcp import CkptstoreWriter
step, state = 1, lambda step: dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
loss_of_a_batch().backward()
""",
    ("optimizer.md", 3): TRAINING + FIRST_STEP,
    (
        "ranks.md",
        0,
    ): "import os; os.environ |= dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=A_PORT, RANK='0', WORLD_SIZE='1')",
    ("ranks.md", 1): FOUR_RANKS,
    ("ranks.md", 2): TRAINING
    + """
import numpy
class dist:
    get_rank = staticmethod(lambda: 0)
model = torch.nn.ModuleDict({"wte": torch.nn.Embedding(200, 4)})
optimizer = torch.optim.AdamW(model.parameters())
with ckptstore.open("runs/a").writer() as writer:
    writer.save(state(), 1)
""",
    ("tuning.md", 0): "seconds, nbytes = 2000.0, 8_700_000_000",
    ("writer.md", 0): TRAINING + "state = state()",
    ("writer.md", 1): TRAINING + "state = state()",
    ("writer.md", 5): TRAINING,
}
"""(page, number of the block) -> code that the page assumes before that block."""

TWICE = {("ranks.md", 0)}
"""Scripts that resume their own run when they run a second time."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def scripts() -> Iterator[tuple[str, int]]:
    for page in PAGES:
        if page not in ELSEWHERE and page not in TRANSCRIPTS:
            for number, code in enumerate(blocks(page, "python")):
                if ">>>" not in code and (page, number) not in NOT_RUN:
                    yield page, number


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), list(scripts()))
def test_scripts_run(page: str, number: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for _ in range(2 if (page, number) in TWICE else 1):
        before = BEFORE.get((page, number), "").replace("A_PORT", repr(str(free_port())))
        code = f"{before}\n{blocks(page, 'python')[number]}"
        done = warmth.run([sys.executable, "-c", code], cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if ">>>" in (DOCS / page).read_text()])
def test_sessions_print_what_they_show(page: str) -> None:
    failed, tried = doctest.testfile(str(DOCS / page), module_relative=False)
    assert (failed, tried > 3) == (0, True)


def test_the_exceptions_are_real() -> None:
    """Each exception names an existing block, and the pages in `ELSEWHERE` do run there."""
    for page, number in [*NOT_RUN, *BEFORE]:
        assert number < len(blocks(page, "python")), (page, number)
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text(), test


@pytest.mark.slow
@pytest.mark.parametrize("page", TRANSCRIPTS)
def test_pages_that_are_played_from_the_top(page: str, tmp_path: Path) -> None:
    """With ``CKPTSTORE_UPDATE_DOCS=1`` the actual output is written to the page instead."""
    pytest.importorskip("torch")
    text = (DOCS / page).read_text()
    played = transcripts.played(text, tmp_path)
    if os.environ.get("CKPTSTORE_UPDATE_DOCS"):
        (DOCS / page).write_text(played)
    assert transcripts.plain(played) == transcripts.plain(text)


# -- commands


def lines(page: str) -> list[str]:
    """The text after ``$ ckpt`` in the console blocks of a page."""
    shown = "".join((*blocks(page, "console"), *blocks(page, "sh")))
    return re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*ckpt (.*)$", shown, re.MULTILINE)


def words_of(line: str) -> list[str]:
    """The words of a line, up to a comment or a shell operator."""
    found = shlex.shlex(line, posix=True, punctuation_chars=True)
    found.whitespace_split = True
    return list(takewhile(lambda word: word not in ("|", "||", "&&", ">", ";"), found))


@pytest.mark.parametrize("page", [page for page in PAGES if lines(page)])
def test_every_command_is_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_STORE", "runs/gpt")
    for line in lines(page):
        name, *arguments = words_of(line)
        if name.startswith("-"):
            continue
        assert name in COMMANDS, line
        command = cli.get_command(click.Context(cli), name)
        while isinstance(command, click.Group):  # tune
            command = command.get_command(click.Context(command), arguments.pop(0))
        assert command is not None, line
        command.make_context(name, arguments)  # raises UsageError


def state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    weight = np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30) * np.float32(1 + step * 1e-6)
    moments = {"exp_avg": rng.standard_normal(600).astype(np.float32), "exp_avg_sq": np.ones(600, np.float32)}
    return {"model": {"0.weight": weight, "w": weight[0]}, "optimizer": {"weight": moments}, "step": step}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the examples of cli.md use: runs/gpt, and files beside it."""
    root = tmp_path_factory.mktemp("docs")
    store = ckptstore.open(root / "runs/gpt")

    def saved(parent: str, steps: list[int]) -> None:
        with store.writer(parent=parent, deltas=100, poll_seconds=None) as writer:
            for step in steps:
                loss = 2.0 if step < 1010 else float("nan")
                writer.save(state(step), step, metadata={"loss": loss, "accuracy": step / 3000})
            writer.tag("best", steps[0])

    saved("latest", [7, 8, 500, 999, 1000, 1001, 2000])
    saved("999@1", [1000, 1010, 1020])
    saved("7@1", [8, 1000, 2000])
    store.keep("last:3", "best:loss:2", take_over=True)
    for name in ("lr1", "lr2", "a", "b", "gpt-again"):
        shutil.copytree(root / "runs/gpt", root / "runs" / name)
    for step in (500, 1000, 1500):
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        store.export(1000, folder / "model.safetensors")
        shutil.copy(folder / "model.safetensors", root / f"step_{step}.safetensors")
    torch = pytest.importorskip("torch")
    for path in ("step_600.pt", "old/step_500.pt", "run/step_1.pt", "run/step_2.pt"):
        (root / path).parent.mkdir(exist_ok=True)
        torch.save({"weight": torch.ones(500)}, root / path)
    return root


def expanded(word: str) -> list[str]:
    """Expand patterns as a shell does, in the working folder."""
    return (sorted(map(str, Path().glob(word))) if "*" in word else []) or [word]


NOT_RUN_LINES = {
    "tune interval": "saves for seconds; tests/cli/test_tune_interval.py runs it",
    "follow runs/gpt": "goes on until Ctrl-C, or runs a command; tests/cli/test_follow.py runs it",
    "publish runs/gpt --to /shared": "goes on until Ctrl-C, or a folder of somebody's; tests/cli/test_publish.py",
    "compact runs/long": "a long run; tests/maintenance/test_retention_docs.py runs it",
    "sync runs/gpt": "to what the store remembers; tests/tiers/test_sync.py runs it",
    "watch runs/gpt": "ends with Ctrl-C; tests/cli/test_watch.py runs it",
    "s3://": "a bucket of somebody's; tests/backends/test_objects_store.py and tests/doctor have a server",
    "bisect": "needs a script, or values that go bad once; tests/cli/test_bisect.py",
    "import runs/gpt": "steps that are above this store's newest; tests/cli/test_import.py",
    "tune wasted-time --from": "needs diffs in the store; tests/cli/test_tune.py",
    "restore runs/net --layout lightning": "a run of Lightning; tests/integrations/test_lightning_files.py",
    "import runs/net": "a file of Lightning's; tests/integrations/test_lightning_files.py",
    "restore runs/gpt --layout hf": "needs a Trainer's configuration; tests/integrations/test_huggingface.py",
    "doctor": "measures for seconds; tests/doctor",
    "analyze runs/gpt": "a report takes seconds; tests/analysis/test_analysis_report.py",
    "merge": "needs a run that writes, or step diffs; tests/cli/test_merge.py",
    "ls /data/checkpoints": "a folder of somebody's; tests/cli/test_ls.py",
    "--tensor model.wte.weight": "no tensor of this store; tests/cli/test_inspect.py",
    "repair runs/mixed": "two runs in one folder; tests/cli/test_copy_and_repair.py",
    "tag - best": "needs CKPT_STORE; tests/cli/test_default_store.py",
    "compact runs/gpt": "a run that writes is asked; tests/maintenance/test_retention_docs.py compacts",
    "analyze checkpoints/": "a folder of somebody's; tests/cli/test_analyze.py",
    "analyze run/*.pt": "names that are not here; tests/cli/test_analyze.py",
}
"""Beginnings or parts of lines of cli.md and cli-options.md -> why these lines do not run."""


def copied(world: Path, here: Path, line: str) -> None:
    """Copy the files, and of the stores those that a line names; all of them for ``ls runs``."""
    named = {place.name for place in (world / "runs").iterdir() if f"runs/{place.name}" in line}

    def others(folder: str, names: list[str]) -> set[str]:
        whole = re.search(r"runs(?!/)", line) is not None
        return {*names} - named if Path(folder) == world / "runs" and not whole else set()

    shutil.copytree(world, here, ignore=others)


@pytest.mark.slow
def test_the_commands_of_the_reference_run(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = 0
    shown = lines("cli.md") + lines("cli-options.md")
    for number, line in enumerate(shown):
        if any(one in line for one in NOT_RUN_LINES):
            continue
        here = tmp_path / str(number)
        copied(world, here, line)
        monkeypatch.chdir(here)
        words = [path for word in words_of(line) for path in expanded(word)]
        words = [word.replace("/mnt/", f"{here}/").replace("/tmp/", f"{here}/") for word in words]
        if words[0] in ("tag", "retire", "keep", "prune") and len(words) > 2 and "--dry-run" not in words:
            # The page assumes a running writer that answers; here there is none.
            words += [] if "--take-over" in words else ["--take-over"]
        result = CliRunner().invoke(cli, words, prog_name="ckpt")
        assert result.exit_code == 0, (line, result.output, result.exception)
        ran += 1
    assert ran >= 60
    text = "\n".join(shown)
    assert [one for one in NOT_RUN_LINES if one not in text and one not in ("s3://",)] == []


# -- links


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["../README.md", "../formats/SPEC.md", *PAGES])
def test_links_lead_somewhere(page: str) -> None:
    source = (DOCS / page).resolve()
    text = re.sub(r"^```.*?^```", "", source.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", text):
        place, _, anchor = target.partition("#")
        path = (source.parent / place).resolve() if place else source
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


def test_no_page_cites_an_issue_or_a_revision() -> None:
    """A page states what is true now. Changes belong to the change log; a reader has neither tracker nor history."""
    pages = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    cited = r"\bissues? #?\d+|(?<![\w/&(\]])#\d+\b|\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7}\b"
    texts = {page.name: re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S) for page in pages}
    assert {name: found for name, text in texts.items() if (found := re.findall(cited, text))} == {}
