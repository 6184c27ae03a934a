"""The mutation gate: it finds every kind of check, and it can fail."""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.forms import LONG, long_only, short_or
from tools.mutants import __main__ as command
from tools.mutants.copies import repository
from tools.mutants.drawing import changed_since, draw, modules_of
from tools.mutants.equivalents import EQUIVALENTS, Equivalent
from tools.mutants.ordinary import KINDS as ORDINARY_KINDS
from tools.mutants.ordinary import find_ordinary, ordinary_in
from tools.mutants.plan import CONCERNED
from tools.mutants.reach import instrumented
from tools.mutants.sites import KINDS, ROOMS, Site, find_sites, sites_in
from tools.mutants.trial import Bench, baseline, try_all

SAMPLE = '''"""A decoder."""

from ckptstore.errors import FormatError


def decode(data: bytes, limit: int) -> int:
    """The number."""
    if len(data) > limit or not data.isdigit():
        raise FormatError("no number")
    if not (0 < len(data) <= 4 and data != b"0000"):
        raise FormatError("no number in 1..9999")
    return int(data)


def small(number: int) -> bool:
    """Nobody tests this."""
    return number < 10


def durable(posix, descriptor: int) -> None:
    """Syncs."""
    posix.fsync(descriptor)
'''
TESTS = """import pytest

from ckptstore.errors import FormatError
from ckptstore.formats.sample import decode, durable, small


def test_decode():
    assert decode(b"42", 3) == 42
    for bad in (b"4242", b"x1"):
        with pytest.raises(FormatError):
            decode(bad, 3)


def test_small():
    assert small(3)


def test_durable():
    class Posix:
        synced = None

        def fsync(self, descriptor):
            self.synced = descriptor

    posix = Posix()
    durable(posix, 3)
    assert posix.synced == 3


def test_broken_by_itself():
    assert False
"""

ELSEWHERE = """import os
import subprocess
import sys

from ckptstore.formats.sample import small


def test_started():
    code = "from ckptstore.formats.sample import decode; decode(b'42', 1)"
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 1


def test_forked():
    if (child := os.fork()) == 0:
        os._exit(small(30))
    assert os.waitpid(child, 0)[1] == 0
"""


@cache
def all_sites() -> list[Site]:
    """Those of this repository."""
    return find_sites(repository())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one module and its tests."""
    root = tmp_path / "tree"
    for folder in ("ckptstore", "formats", "cli", "tests/formats", "tools"):
        (root / folder).mkdir(parents=True)
    for package in ("ckptstore", "formats", "cli", "tools"):
        (root / package / "__init__.py").touch()
    shutil.copy(repository() / "ckptstore/errors.py", root / "ckptstore")
    shutil.copytree(repository() / "tools/mutants", root / "tools/mutants")
    (root / "formats/sample.py").write_text(SAMPLE)
    (root / "tests/formats/test_sample.py").write_text(TESTS)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\nfilterwarnings = ['error']\n")
    return root


def test_sites_of_a_decoder() -> None:
    sites = sites_in("formats/sample.py", SAMPLE.encode())
    assert [(site.where, site.kind, site.source) for site in sites] == [
        ("decode", "bounds", "len(data) > limit"),
        ("decode", "bounds", "data.isdigit()"),
        ("decode", "bounds", "0 < len(data)"),
        ("decode", "bounds", "len(data) <= 4"),
        ("decode", "bounds", 'data != b"0000"'),
        ("small", "bounds", "number < 10"),
        ("durable", "durability", "posix.fsync(descriptor)"),
    ]
    assert len({site.name for site in sites}) == len(sites)
    mutants = [site.mutate(SAMPLE.encode()).decode() for site in sites]
    assert "if ((len(data) > limit) and False) or not data.isdigit():" in mutants[0]
    assert "or not ((data.isdigit()) or True):" in mutants[1]
    assert "if not ((len(data) <= 4) and data" in mutants[2]
    assert mutants[6].endswith('    """Syncs."""\n    pass\n')
    for mutant in mutants:
        compile(mutant, "mutant", "exec")


def test_an_error_that_a_function_makes_is_a_refusal() -> None:
    """Of the class that the function returns by its annotation; `wrong` is imported, and known by its name."""
    source = """
def bad(what: str) -> FormatError:
    return FormatError(what)

def other(what: str) -> ValueError:
    return ValueError(what)

def decode(data: bytes) -> bytes:
    if len(data) > 4:
        raise bad("long")
    if not data:
        raise other("empty")
    if checksum(data) != 3:
        raise wrong("torn") from None
    return data
"""
    found = [(site.kind, site.source) for site in sites_in("ckptstore/sample.py", source.encode())]
    assert found == [("bounds", "len(data) > 4"), ("checksum", "checksum(data) != 3")]


def test_sites_where_compiled_kernels_are_compared() -> None:
    source = """
def confirmed(work):
    if flaw or not same(found, result):
        distrust("a kernel", "differs")
    if found:
        return
    with doubted():
        return work()

def _same(one: object, other: object) -> bool:
    if one is None:
        return False
    return one == other
"""
    sites = sites_in("formats/kernel_choice.py", source.encode())
    assert [(site.where, site.source) for site in sites] == [
        ("confirmed", "flaw"),
        ("confirmed", "same(found, result)"),
        ("confirmed", 'distrust("a kernel", "differs")'),
        ("confirmed", "doubted()"),
        ("_same", "one is None"),
        ("_same", "one == other"),
    ]
    assert {site.kind for site in sites} == {"kernel"}
    assert not any(site.compiled for site in sites), "it is Python"
    for site in sites:
        compile(site.mutate(source.encode()), "mutant", "exec")


def test_every_pattern_of_the_plan_finds_something() -> None:
    """A renamed module or test file would else leave mutants without the tests that notice them."""
    root = repository()
    modules = [site.path for site in all_sites()]
    modules += [path.relative_to(root).as_posix() for room in ROOMS for path in (root / room).rglob("*.py")]
    assert not [pattern for pattern in CONCERNED if not fnmatch.filter(modules, pattern)]
    tests = {one for patterns in CONCERNED.values() for one in patterns}
    assert not [one for one in sorted(tests) if not any(root.glob(one))]


def test_every_kind_is_found_in_the_tree() -> None:
    sites = all_sites()
    assert {site.kind for site in sites} == set(KINDS)
    assert len(sites) > 400
    assert len({site.name for site in sites}) == len(sites)
    known = {(site.path, site.where, site.kind) for site in sites}
    assert known >= {
        ("ckptstore/backends/local_disk/local.py", "LocalBackend._write_once", "durability"),
        ("ckptstore/backends/local_disk/local.py", "LocalBackend._create_once", "durability"),
        ("ckptstore/backends/local_disk/directio.py", "FileSink.seal", "durability"),
        ("ckptstore/backends/local_disk/directio.py", "FileSink._finish_contents", "durability"),
        ("ckptstore/backends/local_disk/posix.py", "Posix.msync", "durability"),
        ("ckptstore/backends/local_disk/libpmem.py", "Libpmem.flush", "durability"),
        ("ckptstore/backends/local_disk/libpmem.py", "Libpmem.drain", "durability"),
        ("ckptstore/backends/local_disk/pmem.py", "PmemSink.write", "durability"),
        ("ckptstore/backends/local_disk/pmem.py", "PmemSink.persist", "durability"),
        ("ckptstore/backends/local_disk/pmem.py", "PmemSink._finish_contents", "durability"),
        ("ckptstore/backends/local_disk/pmem_stores.py", "NonTemporal.drain", "durability"),
        ("ckptstore/backends/local_disk/pmem_stores.py", "NonTemporal.persist", "durability"),
        ("ckptstore/backends/local_disk/pmem_stores.py", "MsyncStores.persist", "durability"),
        ("ckptstore/backends/local_disk/pmem_stores.py", "MsyncStores.sync", "durability"),
        ("ckptstore/segments/segment_reader.py", "SegmentReader._read_doc", "checksum"),
        ("ckptstore/segments/segment_reader.py", "check_chunk", "checksum"),
        ("ckptstore/restore/open_checkpoint.py", "OpenCheckpoint.check_identity", "checksum"),
        ("formats/history/folds.py", "intact", "checksum"),
        ("formats/history/record_text.py", "unseal", "checksum"),
        ("ckptstore/log/term.py", "Term._create_slot", "fence"),
        ("ckptstore/log/term.py", "_send", "fence"),
        ("ckptstore/log/log_reader.py", "_LogRead._follows", "fence"),
        ("ckptstore/log/log_reader.py", "never_deleted", "anchor"),
        ("ckptstore/log/fold_writer.py", "_deletable", "anchor"),
        ("ckptstore/log/pins.py", "claim", "pin"),
        ("formats/segment_files/segment.py", "header_length", "bounds"),
        ("formats/history/commit_checks.py", "_check_encoding", "rule"),
        ("formats/history/catalog.py", "Catalog.latest", "bounds"),
        ("formats/kernel_choice.py", "confirmed", "kernel"),
        ("formats/kernel_choice.py", "Hot._compared", "kernel"),
        ("formats/kernel_choice.py", "_same", "kernel"),
        ("formats/optim/step_settings.py", "Reader.names", "bounds"),
        ("ckptstore/restore/chains/chain_link.py", "check_decoded", "checksum"),
        ("ckptstore/tiers/remote_check.py", "_check_slot", "fence"),
        ("ckptstore/agent/client/agent_link.py", "AgentLink.ask", "fence"),
        ("ckptstore/agent/client/open_agent_writer.py", "_Opener._fits", "fence"),
        ("ckptstore/log/term.py", "Term._check_not_opened_over", "fence"),
    }
    for path in sorted({site.path for site in sites})[:: short_or(4, 1)]:
        source = (repository() / path).read_bytes()
        compile(instrumented(source, {n: site for n, site in enumerate(sites) if site.path == path}), path, "exec")
        for site in sites:
            if site.path == path:
                compile(site.mutate(source), path, "exec")


def test_instrumented_code_means_the_same() -> None:
    sites = sites_in("formats/sample.py", SAMPLE.encode())
    source = instrumented(SAMPLE.encode(), dict(enumerate(sites))).decode()
    reached: list[int] = []

    def reach(*numbers: int) -> bool:
        reached.extend(numbers)
        return False

    names: dict[str, object] = {"__reach__": reach}
    exec(source, names)  # noqa: S102  # our own text
    assert names["decode"](b"42", 3) == 42  # type: ignore[operator]
    assert names["small"](10) is False  # type: ignore[operator]
    assert sorted(set(reached)) == [0, 1, 2, 3, 4, 5]


def test_the_gate_can_fail(tree: Path, tmp_path: Path) -> None:
    """Checks without a test survive, and so does an equivalent mutant; the others are killed."""
    sites = find_sites(tree)
    source = (tree / "formats/sample.py").read_bytes()
    same = next(site for site in sites if site.source == "len(data) > limit")
    equal = Site(same.path, same.where, same.kind, 1, same.begin, same.end, same.source, "the same program")
    assert equal.mutate(source) == source
    with Bench(tree, tmp_path / "copy") as bench:
        known = baseline([bench], [*sites, same])
        assert known.failing == {"tests/formats/test_sample.py::test_broken_by_itself"}
        assert known.reached[same.name] == {"tests/formats/test_sample.py::test_decode"}
        reached = dict(known.reached) | {equal.name: known.reached[same.name]}
        known = type(known)(known.seconds, known.failing, reached)
        verdicts = try_all([bench], [*sites, equal], known, lambda _verdict: None)
    outcomes = {verdict.site.source: verdict.outcome for verdict in verdicts}
    assert outcomes == {
        "len(data) > limit": "killed",
        "data.isdigit()": "killed",
        "0 < len(data)": "survived",
        "len(data) <= 4": "survived",
        'data != b"0000"': "survived",
        "number < 10": "survived",
        "posix.fsync(descriptor)": "killed",
        "the same program": "survived",
    }
    assert (bench.copy.root / "formats/sample.py").read_bytes() == source
    killed = next(verdict for verdict in verdicts if verdict.site.kind == "durability")
    assert killed.by == "tests/formats/test_sample.py::test_durable"


def test_checks_that_other_processes_come_to_are_tried(tree: Path, tmp_path: Path) -> None:
    (tree / "tests/formats/test_sample.py").write_text(ELSEWHERE)
    sites = find_sites(tree)
    with Bench(tree, tmp_path / "copy") as bench:
        known = baseline([bench], sites)
        verdicts = try_all([bench], sites, known, lambda _verdict: None)
    assert {verdict.site.source: verdict.by.rpartition("::")[2] for verdict in verdicts if verdict.by} == {
        "len(data) > limit": "test_started",
        "number < 10": "test_forked",
    }


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "formats/history/record_text.py::unseal*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("2 sites")
    assert command.main(["--only", "no such file"]) == 2


@pytest.mark.slow
def test_a_sample_of_the_real_gate(capsys: pytest.CaptureFixture[str]) -> None:
    """``make mutants`` tries them all; this test, two whose tests are quick, in the long form a sample of these."""
    short = ["--jobs", "1", "--only", "formats/history/folds.py::_Columns.numbers::bounds::max(value) > MAX_INT"]
    short += ["--only", "formats/history/record_text.py::unseal::checksum::*"]
    status = command.main(["--quick", *(["--jobs", "2", "--seed", "5"] if LONG else short)])
    assert status == 0, capsys.readouterr().out


# ---- ordinary mutants -----------------------------------------------------------------------------------------------

SLIPS = '''"""Slips of every kind."""

import warnings

LIMIT: int = 3
__all__ = ["total"]


@dataclass(frozen=True)
class Counted:
    left: int = 7

    def take(self, wanted: int, most: int = 1) -> int:
        """What is taken."""
        assert wanted >= 0
        if not wanted or (wanted > most and most is not None):
            raise ValueError(f"{wanted} of {most + 5}")
        for _ in range(wanted):
            if any(part < -1 for part in split(wanted, most)):
                continue
            self.left -= 1
        warnings.warn("9 are left", stacklevel=2)
        return max(wanted, 2)
'''


def test_ordinary_mutants_of_a_module() -> None:
    sites = ordinary_in("formats/slips.py", SLIPS.encode())
    assert [(site.where, site.kind, site.source) for site in sites] == [
        ("module", "constant", "3 => 4"),
        ("Counted", "constant", "7 => 8"),
        ("Counted.take", "constant", "1 => 2"),
        ("Counted.take", "negation", "not wanted => wanted"),
        (
            "Counted.take",
            "negation",
            "not wanted or (wanted > most and most is not None) => "
            "not (not wanted or (wanted > most and most is not None))",
        ),
        (
            "Counted.take",
            "logic",
            "not wanted or (wanted > most and most is not None) => not wanted and (wanted > most and most is not None)",
        ),
        ("Counted.take", "comparison", "wanted > most => wanted >= most"),
        ("Counted.take", "logic", "wanted > most and most is not None => wanted > most or most is not None"),
        ("Counted.take", "comparison", "most is not None => most is None"),
        ("Counted.take", "removed", "raise ValueError(f'{wanted} of {most + 5}') => pass"),
        (
            "Counted.take",
            "logic",
            "any((part < -1 for part in split(wanted, most))) => all(...)",
        ),
        (
            "Counted.take",
            "negation",
            "any((part < -1 for part in split(wanted, most))) => "
            "not (any((part < -1 for part in split(wanted, most))))",
        ),
        ("Counted.take", "comparison", "part < -1 => part <= -1"),
        ("Counted.take", "negation", "-1 => 1"),
        ("Counted.take", "constant", "1 => 2"),
        ("Counted.take", "swapped", "split(wanted, most) => most, wanted"),
        ("Counted.take", "removed", "continue => pass"),
        ("Counted.take", "removed", "self.left -= 1 => pass"),
        ("Counted.take", "constant", "1 => 2"),
        ("Counted.take", "removed", "warnings.warn('9 are left', stacklevel=2) => pass"),
        ("Counted.take", "constant", "2 => 3"),
    ]
    assert {site.kind for site in sites} == set(ORDINARY_KINDS)
    assert len({site.name for site in sites}) == len(sites)
    for site in sites:
        mutant = site.mutate(SLIPS.encode())
        assert mutant != SLIPS.encode()
        compile(mutant, "mutant", "exec")
    swapped = next(site for site in sites if site.kind == "swapped").mutate(SLIPS.encode())
    assert b"for part in split(most, wanted))" in swapped


def test_every_ordinary_mutant_of_the_tree_is_a_program() -> None:
    root = repository()
    paths = modules_of(root, ["formats/*", "ckptstore/*", "cli/*"])
    kinds: Counter[str] = Counter()
    for path in paths[:: short_or(8, 1)]:
        source = (root / path).read_bytes()
        sites = find_ordinary(root, [path])
        kinds += Counter(site.kind for site in sites)
        assert len({site.name for site in sites}) == len(sites), path
        compile(instrumented(source, dict(enumerate(sites))), path, "exec")
        for site in sites[:: 1 + len(sites) // 8]:
            mutant = site.mutate(source)
            assert mutant != source, site.name
            compile(mutant, site.name, "exec")
    assert set(kinds) == set(ORDINARY_KINDS)
    assert min(kinds.values()) > short_or(5, 100), kinds


def test_the_draw_is_the_same_for_a_seed_and_moves_with_nothing_else(tree: Path) -> None:
    every = draw(tree, ["formats/sample.py"], 1000, 0)
    some = draw(tree, ["formats/sample.py"], 5, 1)
    assert len(some) == 5 < len(every)
    assert some == draw(tree, ["formats/sample.py"], 5, 1)
    assert {site.name for site in some} <= {site.name for site in every}
    assert any(some != draw(tree, ["formats/sample.py"], 5, seed) for seed in range(2, 5))
    names = [site.name for site in some]
    known = (Equivalent("formats/sample.py", some[0].where, some[0].source, "for this test"),)
    assert known[0].is_that(some[0])
    assert names[0] not in {site.name for site in draw(tree, ["formats/sample.py"], 1000, 1, known)}
    text = (tree / "formats/sample.py").read_text()
    (tree / "formats/sample.py").write_text(text.replace("import FormatError", "import FormatError\n\nNOTHING = ''"))
    moved = draw(tree, ["formats/sample.py"], 5, 1)
    assert [site.name for site in moved] == names
    assert [site.begin for site in moved] != [site.begin for site in some]


def test_modules_are_named_or_those_that_changed(tree: Path) -> None:
    assert modules_of(tree, ["formats/s*.py"]) == ["formats/sample.py"]
    with pytest.raises(LookupError, match="formats/nothing"):
        modules_of(tree, ["formats/sample.py", "formats/nothing.py"])
    with pytest.raises(LookupError, match="git cannot say"):
        changed_since(tree / "formats", "HEAD")

    def git(*words: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    assert changed_since(tree, "HEAD") == []
    (tree / "formats/sample.py").write_text(SAMPLE + "\n")
    (tree / "tests/formats/test_sample.py").write_text("")  # not in the rooms
    git("commit", "-qam", "two")
    (tree / "cli/later.py").write_text("LATER = 1\n")  # not committed yet
    (tree / "ckptstore/errors.py").unlink()
    assert changed_since(tree, "HEAD") == ["cli/later.py"]
    assert changed_since(tree, "HEAD~1") == ["cli/later.py", "formats/sample.py"]
    with pytest.raises(LookupError, match="no such revision"):
        changed_since(tree, "no such revision")


def test_ordinary_mutants_are_tried_and_reported(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command: a mutant that no test notices survives and is reported; the importers notice a changed
    constant."""
    text = SAMPLE.replace("number < 10", "number < 10 and number != TWO").replace("def small", "TWO = 2\n\n\ndef small")
    (tree / "formats/sample.py").write_text(text)
    monkeypatch.setattr(command, "repository", lambda: tree)
    target = tmp_path / "report.json"
    arguments = ["--ordinary", "100", "--jobs", "1", "--json", str(target), "--only", "*::small::*"]
    assert command.main([*arguments, "--only", "*::module::*", "--only", "*::durable::*", "formats/sample.py"]) == 1
    told = {verdict["source"]: verdict["outcome"] for verdict in json.loads(target.read_text())}
    assert told == {
        "2 => 3": "killed",
        "number < 10 => number <= 10": "survived",
        "10 => 11": "survived",
        "number < 10 and number != TWO => number < 10 or number != TWO": "survived",
        "number != TWO => number == TWO": "killed",
        "posix.fsync(descriptor) => pass": "killed",
    }
    shown = capsys.readouterr().out
    assert "SURVIVED formats/sample.py:20: small: 10 => 11" in shown
    assert ["comparison", "2", "1", "0", "1"] in [line.split() for line in shown.splitlines()]
    if LONG:
        assert command.main([*arguments[:-1], "*::durable::*", "formats/sample.py"]) == 0


def test_the_command_refuses_what_it_cannot_draw_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--ordinary", "3", "formats/nothing.py"]) == 2
    assert "no module" in capsys.readouterr().err
    assert command.main(["--ordinary", "3", "--since", "no-such-revision"]) == 2
    assert "no-such-revision" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["formats/history/members.py"])
    assert command.main(["--ordinary", "3", "--list", "formats/history/members.py"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 sites: ")


@pytest.mark.parametrize("known", EQUIVALENTS, ids=lambda known: f"{known.path}-{known.where}-{known.source[:40]}")
def test_the_listed_equivalents_still_apply(known: Equivalent) -> None:
    assert len(known.reason) > 20
    assert any(known.is_that(site) for site in find_ordinary(repository(), [known.path])), "it is gone: leave it out"


@pytest.mark.slow
@long_only
def test_a_sample_of_ordinary_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    """``make mutants-ordinary`` tries more and elsewhere; this test, some of a module whose mutants are all killed."""
    status = command.main(["--ordinary", "4", "--quick", "--jobs", "2", "formats/history/members.py"])
    assert status == 0, capsys.readouterr().out
