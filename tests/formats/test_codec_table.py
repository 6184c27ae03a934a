"""A codec's class is its only description: an added codec is written, read, tried, measured and shown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptstore.errors import UsageError
from ckptstore.formats import codecs
from tests.formats.codec_data import base_of, codecs_of
from tools.fuzz.codecs import KINDS as FUZZED

ROOT = Path(__file__).parents[2]

TOYS = '''
"""Two codecs that a test adds."""

from __future__ import annotations

from ckptstore.formats.codecs.block_loops import Fields
from ckptstore.formats.codecs.xor_sub import Xor
from ckptstore.formats.codecs.codec import Bound, Method, word_size
from ckptstore.formats.codecs.raw_planes import WORD_SIZES, Planes


class Twin(Planes):
    __slots__ = ()
    name = "twin"
    methods = (Method("twin", "#123456", 21, "*", Bound("bound-twin", lambda new, old: 1.0)),)

    @staticmethod
    def parse(params):
        fields = Fields("twin", params)
        found = Twin(fields.integer("word", None, WORD_SIZES))
        fields.finish()
        return found

    @staticmethod
    def suited(dtype, samples, *, context):
        return [Twin(word_size(dtype))]


class Apart(Xor):
    __slots__ = ()
    name = "apart"
    methods = (Method("apart", "#654321", 31, "p"),)

    @staticmethod
    def parse(params):
        return Apart(params["word"])

    @staticmethod
    def suited(dtype, samples, *, context):
        return [Apart(word_size(dtype))]
'''

CHECKS = """
import sys
import numpy as np
import ckptstore
from ckptstore import DeltaOptions
from ckptstore.analysis import analysis
from ckptstore.analysis.recommendations import SHIPPED, STORED
from ckptstore.analysis.methods import BOUNDS, COMPARED, DELTAS, METHODS
from ckptstore.analysis.report_plots import COLOURS
from ckptstore.cli.main import cli
from ckptstore.formats import codecs
from ckptstore.formats.codecs import toys

assert ckptstore.__file__.startswith(sys.argv[1]), ckptstore.__file__
assert codecs.codec("twin", {"word": 4}) == toys.Twin(4)
assert {"twin", "apart"} <= {*codecs.Policy().codecs}
assert ("twin" in codecs.WITHOUT_BASE, "apart" in codecs.WITHOUT_BASE) == (True, False)
assert STORED.index("planes") + 1 == STORED.index("twin") and STORED.index("xor") + 1 == STORED.index("apart")
assert {"twin", "apart"} <= {*SHIPPED} & {*COMPARED} & {*METHODS}
assert "apart" in DELTAS and "twin" not in DELTAS and BOUNDS["twin"] == "bound-twin"
assert (COLOURS["twin"], COLOURS["apart"]) == ("#123456", "#654321")
assert toys.Apart(4).additive and not toys.Twin(4).additive
summed = np.full(8, 3, np.uint8)
codecs.add(toys.Apart(4), np.full(8, 5, np.uint8), summed)
assert (summed == 6).all()

chance = np.random.default_rng(1)
state = {"w": (chance.standard_normal(70_000) * 0.02).astype(np.float32)}
store = ckptstore.open(sys.argv[2])
options = DeltaOptions(interval=3, policy=codecs.Policy(codecs=("twin", "apart")), compress_fulls=True)
saved = {}
with store.writer(deltas=options, poll_seconds=None) as writer:
    for step in range(1, 7):
        state = {"w": state["w"] + np.float32(1e-6) * chance.standard_normal(70_000).astype(np.float32)}
        saved[step] = state["w"]
        writer.save(state, step)
for step, wanted in saved.items():
    assert (store.load(step, framework="numpy")["w"].view(np.uint32) == wanted.view(np.uint32)).all()
assert store.verify(deep=True).ok
found = analysis.analyze([sys.argv[2]])
measured = {one.method for one in found.summaries}
assert {"twin", "bound-twin", "apart", "planes", "xor", "bound"} <= measured, measured
cli.main(["analyze", sys.argv[2]], prog_name="ckpt")
"""


def test_a_codec_that_is_added_appears_everywhere(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ckptstore", tree / "ckptstore", ignore=ignored)
    folder = tree / "ckptstore" / "formats" / "codecs"
    (folder / "toys.py").write_text(TOYS)
    table = (folder / "codec_table.py").read_text()
    changed = table.replace(
        "_KINDS: tuple[type[Codec], ...] = (Raw,",
        "from ckptstore.formats.codecs.toys import Apart, Twin\n\n_KINDS: tuple[type[Codec], ...] = (Twin, Apart, Raw,",
    )
    assert changed != table
    (folder / "codec_table.py").write_text(changed)
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHECKS, str(tree), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(tree), "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for name in ("twin", "bound-twin", "apart"):
        assert re.search(rf"^\W*{name}\s", done.stdout, re.M), done.stdout


def test_no_other_module_has_a_list_of_codecs() -> None:
    names = re.compile("|".join(rf'"({name})"' for name in codecs.METHODS if name != "raw"))
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for room in ("ckptstore", "cli", "formats")
        for path in (ROOT / room).rglob("*.py")
        if "formats/codecs" not in str(path)
        for line in path.read_text().splitlines()
        if len({match[0] for match in names.finditer(line)}) > 1
    }
    assert not found


def test_every_codec_has_a_method_of_its_own_and_makes_it() -> None:
    labels = [method.name for kind in codecs.KINDS.values() for method in kind.methods]
    assert len(labels) == len({*labels}) == len(codecs.METHODS)
    assert len({method.rank for method in codecs.METHODS.values()}) == len(labels), "two methods have one rank"
    for method in codecs.METHODS.values():
        assert re.fullmatch("#[0-9A-F]{6}", method.colour), method
    made = {codec.method for dtype in ("F32", "BF16") for codec in codecs_of(dtype)}
    assert made == {*labels}, "codecs_of in tests/formats/codec_data.py makes one of each"


@pytest.mark.parametrize("dtype", ["F32", "BF16", "U8", "I64", "C64"])
def test_deltas_that_add_up(dtype: str) -> None:
    """A codec's claim about its sums holds: decoding onto zeros, then adding, equals decoding onto the base."""
    chance = np.random.default_rng(3)
    old, new = (chance.integers(0, 256, 4096, np.uint8) for _ in range(2))
    seen = set()
    for codec in codecs_of(dtype):
        if codec.base_ratio != 1:
            assert not codec.additive
            with pytest.raises(ValueError, match="do not add up"):
                codecs.add(codec, new, old.copy())
            continue
        if codec.additive:
            payload = codecs.encode(codec, new, base_of(codec, old))
            onto = codecs.decode(codec, payload, len(new), np.zeros_like(old))
            summed = old.copy()
            codecs.add(codec, onto, summed)
            assert (summed == new).all(), codec
            seen.add(codec.name)
    assert seen == {"xor", "sub"}


def test_the_fuzzer_knows_every_codec() -> None:
    assert {name for name, _ in FUZZED} == {*codecs.CODECS}, "KINDS in tools/fuzz/codecs.py has them"


def test_the_page_has_every_codec() -> None:
    page = (ROOT / "docs" / "codecs.md").read_text()
    table = page[: page.index("## From Python")]
    assert {*re.findall(r"^\| `(\w+)` \|", table, re.M)} == {*codecs.CODECS}, "the table in docs/codecs.md"


def test_a_policy_with_an_unknown_codec_is_refused() -> None:
    with pytest.raises(UsageError, match="no codec is called 'zx'; there are raw, planes, xor"):
        codecs.Policy(codecs=("planes", "zx"))
