"""Each recipe of docs/adding.md is followed in a copy of the tree, and the addition works there.

A block of the page that names a file is the text of that file; a block of ``diff`` changes a file at the only place
where its lines occur. The proof of each recipe runs in its own process, which imports the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding.md"
_BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def recipes() -> dict[str, list[tuple[str, str, str]]]:
    """``A codec`` -> its blocks: language, file, text."""
    _, *sections = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.MULTILINE)
    return {name: _BLOCK.findall(text) for name, text in zip(sections[::2], sections[1::2], strict=True)}


def changed(text: str, diff: str, file: str) -> str:
    """Apply a change to `text`: the block's lines without ``+`` occur in it once; the lines with ``+`` are in the
    result."""
    lines = diff.splitlines(keepends=True)
    assert all(line[0] in " -+\n" for line in lines), f"{file}: a line of the diff begins with none of ' ', '-', '+'"
    before = "".join(line[1:] or line for line in lines if line[0] != "+")
    after = "".join(line[1:] or line for line in lines if line[0] != "-")
    assert before.strip(), f"{file}: a diff without a line that is there says no place"
    assert text.count(before) == 1, f"docs/adding.md: {file} has these lines {text.count(before)} times:\n{before}"
    return text.replace(before, after)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with every recipe followed. The backend is a third-party package beside them."""
    tree = tmp_path_factory.mktemp("recipes")
    ignored = shutil.ignore_patterns("__pycache__", "golden", "SPEC.md")
    shutil.copytree(ROOT / "ckptstore", tree / "ckptstore", ignore=ignored)
    for name, blocks in recipes().items():
        for language, file, text in blocks:
            place = tree / ("" if not file.startswith(("cli/", "formats/")) else "ckptstore") / file
            if name == "A backend":
                place = tree / "sqlite" / file
                place.parent.mkdir(exist_ok=True)
            if language == "diff":
                place.write_text(changed(place.read_text(), text, file))
            else:
                assert not place.exists(), f"{file} is there already"
                place.write_text(text)
    return tree


def proof(tree: Path, folder: Path, code: str, *, paths: tuple[Path, ...] = ()) -> str:
    """The output of a script that imports the copy; the script must succeed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (tree, *paths))),
    }
    begin = f"import ckptstore, sys\nassert ckptstore.__file__.startswith({str(tree)!r}), ckptstore.__file__\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", begin + code],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_codec_is_chosen_and_comes_back(tree: Path, tmp_path: Path) -> None:
    said = proof(
        tree,
        tmp_path,
        """
import numpy as np
from ckptstore.formats import codecs
from ckptstore.formats.codecs.fill import Fill

for data in (b"", b"abc", b"\\1\\2\\3\\4" * 9, bytes(range(250)), bytes(3 << 20) + b"xyz", b"\\7" * 40 + b"z"):
    payload = codecs.encode(Fill(4), data)
    assert codecs.decode(codecs.codec("fill", {"word": 4}), payload, len(data)).tobytes() == data
try:
    codecs.decode(Fill(4), b"\\2", 4)
except ckptstore.CorruptSegmentError:
    pass
policy = codecs.Policy(codecs=("planes", "fill"))
state = {"mask": np.full(300_000, 2.5, "<f4"), "noise": np.random.default_rng(0).integers(0, 2**32, 300_000, "<u4")}
with ckptstore.open("store") as store:
    with store.writer(deltas=ckptstore.DeltaOptions(policy=policy, compress_fulls=True)) as writer:
        writer.save(state, 1)
    back = store.load()
    assert all(np.array_equal(back[name], state[name]) for name in state)
    assert store.verify(deep=True).ok
    print({tensor.name: tensor.codec for tensor in store.inspect().tensors})
""",
    )
    assert "'mask': 'fill'" in said


def test_a_backend_is_found_by_its_scheme_and_passes_the_suite(tree: Path, tmp_path: Path) -> None:
    package = tree / "sqlite"
    shutil.copy(ROOT / "examples" / "sqlite_backend" / "ckptstore_sqlite.py", package)
    points = re.findall(
        r'^\[project\.entry-points\."(.+)"\]\n(.*)', (package / "pyproject.toml").read_text(), re.DOTALL
    )
    ((group, rows),) = points
    info = package / "ckptstore_sqlite-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ckptstore_sqlite\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{rows.replace(chr(34), '')}")
    proof(
        tree,
        tmp_path,
        """
import os
url = f"sqlite://{os.getcwd()}/runs/gpt.db"
with ckptstore.open(url) as store, store.writer() as writer:
    writer.save({"step": 7}, 7)
with ckptstore.open(url, create=False) as store:
    assert store.load() == {"step": 7}
import pytest
kept = "what_was_created_is_read_back or second_create_fails or deleted_key or absence or hostile or segments"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", kept, "--rootdir", os.getcwd(), sys.path[-1]]))
""".replace("sys.path[-1]", repr(str(package / "test_ckptstore_sqlite.py"))),
        paths=(package, ROOT),
    )


def test_a_command_answers(tree: Path, tmp_path: Path) -> None:
    proof(
        tree,
        tmp_path,
        """
import json
from click.testing import CliRunner
from ckptstore.cli.main import cli
with ckptstore.open("store") as store, store.writer() as writer:
    for step in range(3):
        writer.save({"step": step}, step)
def ckpt(*words):
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output
assert ckpt("count", "store") == "3\\n"
assert json.loads(ckpt("count", "store", "--json"))["checkpoints"] == 3
assert "Count the checkpoints of a store." in ckpt("--help")
assert ckpt("count", "--help").splitlines()[2].strip() == "Count the checkpoints of a store."
""",
    )


def test_an_optimizer_is_recognised_and_its_steps_replayed(tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    proof(
        tree,
        tmp_path,
        """
import copy, torch
from ckptstore.formats import optim
from ckptstore.training import OptimizerStep

torch.manual_seed(0)
model = torch.nn.Linear(400, 300)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, lr_decay=0.1, weight_decay=0.01)
rule = optim.from_group("Adagrad", optimizer.param_groups[0]).rule(optim.Step(3, 0.01, clip=0.5))
assert optim.rule(rule.params) == rule
there = {}
with ckptstore.open("store") as store:
    with store.writer(diffs=ckptstore.DiffOptions(full_every=100, batch=2)) as writer:
        for step in range(1, 6):
            model(torch.randn(8, 400)).square().mean().backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            there[step] = copy.deepcopy(state)
            writer.save(state, step, updates=OptimizerStep(optimizer))
            optimizer.zero_grad()
    for step, state in there.items():
        back = store.load(str(step))
        for name, tensor in state["model"].items():
            assert torch.equal(back["model"][name], tensor), (step, name)
        for number, slots in state["optimizer"]["state"].items():
            assert torch.equal(back["optimizer"]["state"][number]["sum"], slots["sum"]), (step, number)
    numbers = 400 * 300 + 300
    diffs = [info for info in store.checkpoints() if info.kind != "full"]
    bits = [8 * info.stored / numbers for info in diffs]
    assert len(diffs) == 4
    assert max(bits) < 36, bits  # of the 64 of weight and sum: the gradient, and next to nothing
""",
    )


def test_a_rule_keeps(tree: Path, tmp_path: Path) -> None:
    proof(
        tree,
        tmp_path,
        """
from ckptstore.formats.history.rule_windows import ends
with ckptstore.open("store") as store:
    with store.writer() as writer:
        for step in range(1, 4):
            writer.save({"step": step}, step)
    assert store.keep("first:2", "last:1", take_over=True) == ("first:2", "last:1")
    with store.writer() as writer:
        for step in range(4, 9):
            writer.save({"step": step}, step)
    assert [info.step for info in store.checkpoints()] == [1, 2, 8]
    assert ends("first:2") == "never"
    try:
        store.keep("first:0", take_over=True)
    except ckptstore.UsageError as error:
        assert "first:N" in str(error)
    else:
        raise AssertionError
from click.testing import CliRunner
from ckptstore.cli.main import cli
typed = {"_CKPT_COMPLETE": "bash_complete", "COMP_WORDS": "ckpt keep store fi", "COMP_CWORD": "3"}
assert "first:" in CliRunner().invoke(cli, [], prog_name="ckpt", env=typed).output
""",
    )


ACME = '''
class Array:
    """As frameworks have them: numpy sees the numbers, and nobody writes to them."""

    def __init__(self, numbers):
        import numpy
        self._numbers = numpy.array(numbers, "<f4")

    def __array__(self, dtype=None, copy=None):
        return self._numbers.copy()
'''


def test_arrays_of_a_framework_are_stored_and_never_overwritten_in_a_copy(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(ACME)
    proof(
        tree,
        tmp_path,
        """
import numpy as np
with ckptstore.open("store") as store, store.writer() as writer:
    writer.save({"plain": np.arange(3)}, 1)
    assert "acme" not in sys.modules
    import acme
    state = {"w": acme.Array([1.0, 2.0, 3.0]), "plain": np.arange(3)}
    writer.save(state, 2)
    assert store.load()["w"].tolist() == [1.0, 2.0, 3.0]
    try:
        store.load(into=state)
    except ckptstore.UnsupportedStateError as error:
        assert "acme.Array cannot be overwritten" in str(error) and "['w']" in str(error), error
    else:
        raise AssertionError("restored into a copy")
""",
        paths=(tmp_path,),
    )


def test_the_copy_is_in_the_style_of_the_tree(tree: Path) -> None:
    """Code that a reader copies from the page passes `make lint`."""
    files = [
        tree / ("ckptstore" if file.startswith(("cli/", "formats/")) else "") / file
        for name, blocks in recipes().items()
        if name != "A backend"
        for _, file, _ in blocks
    ]
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *settings, *map(str, files)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_change_has_one_place() -> None:
    assert changed("a\nb\nc\n", " a\n-b\n+B\n", "x") == "a\nB\nc\n"
    with pytest.raises(AssertionError, match="2 times"):
        changed("a\na\n", " a\n+b\n", "x")
    with pytest.raises(AssertionError, match="0 times"):
        changed("a\n", " b\n+c\n", "x")


def test_there_is_a_recipe_for_each_kind() -> None:
    kinds = ["A codec", "A backend", "A command", "An optimizer", "A retention rule", "A framework"]
    assert list(recipes()) == kinds
    assert all(recipes().values())
