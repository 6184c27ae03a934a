"""The mutation gate: it finds every kind of check, and it can fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.mutants import __main__ as command
from tools.mutants.copies import repository
from tools.mutants.reach import instrumented
from tools.mutants.sites import KINDS, Site, find_sites, sites_in
from tools.mutants.trial import Bench, baseline, try_all

SAMPLE = '''"""A decoder."""

from ckptstore.formats.errors import FormatError


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

from ckptstore.formats.errors import FormatError
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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one module and its tests."""
    root = tmp_path / "tree"
    for folder in ("ckptstore", "formats", "cli", "tests/formats", "tools"):
        (root / folder).mkdir(parents=True)
    for package in ("ckptstore", "formats", "cli", "tools"):
        (root / package / "__init__.py").touch()
    shutil.copy(repository() / "formats/errors.py", root / "formats")
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


def test_every_kind_is_found_in_the_tree() -> None:
    sites = find_sites(repository())
    assert {site.kind for site in sites} == set(KINDS)
    assert len(sites) > 400
    assert len({site.name for site in sites}) == len(sites)
    known = {(site.path, site.where, site.kind) for site in sites}
    assert known >= {
        ("ckptstore/backends/local.py", "LocalBackend._write", "durability"),
        ("ckptstore/backends/local.py", "LocalBackend._create", "durability"),
        ("ckptstore/backends/directio.py", "FileSink.seal", "durability"),
        ("ckptstore/reading.py", "SegmentReader._read_doc", "checksum"),
        ("ckptstore/reading.py", "check_chunk", "checksum"),
        ("ckptstore/loading.py", "Opened.check_identity", "checksum"),
        ("formats/folds.py", "intact", "checksum"),
        ("formats/texts.py", "unseal", "checksum"),
        ("ckptstore/log.py", "Term._create_slot", "fence"),
        ("ckptstore/log.py", "_send", "fence"),
        ("ckptstore/view.py", "_Reading._follows", "fence"),
        ("ckptstore/view.py", "never_deleted", "anchor"),
        ("ckptstore/folding.py", "_deletable", "anchor"),
        ("ckptstore/pins.py", "claim", "pin"),
        ("formats/segment.py", "header_length", "bounds"),
        ("formats/retention.py", "_check_encoding", "rule"),
    }
    for path in {site.path for site in sites}:
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
    """Checks without a test survive, and so does a mutant that is no other program; the rest is killed."""
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


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "formats/texts.py::unseal*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("2 sites")
    assert command.main(["--only", "no such file"]) == 2


@pytest.mark.slow
def test_a_sample_of_the_real_gate(capsys: pytest.CaptureFixture[str]) -> None:
    """``make mutants`` tries them all; this, some of those whose tests are quick."""
    status = command.main(["--quick", "--jobs", "2", "--seed", "5"])
    assert status == 0, capsys.readouterr().out
