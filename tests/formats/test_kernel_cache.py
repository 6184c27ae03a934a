"""Cache files of numba that a power cut damaged are compiled again, and never run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from tests.forms import long_only
from tools.warm import Warm

pytest.importorskip("numba", reason="the compiled kernels need numba: pip install ckptstore[fast]")

_CODE = """
import sys
import numba
numba.config.CACHE_DIR = sys.argv[1]  # which NUMBA_CACHE_DIR gives an interpreter that begins
import numpy as np
from ckptstore.formats import codecs, kernel_choice
kernel_choice.kind()  # now: so few bytes alone would not be worth the compiled kernels
new = np.arange(0, 40960, 3, dtype="<u4").view("u1")
base = np.arange(len(new) // 4, dtype="<u4").view("u1")
codec = codecs.codec("sub", {"word": 4})
payload = codecs.encode(codec, new, base)
assert (codecs.decode(codec, payload, len(new), base) == new).all()
print(kernel_choice.kind())
"""


def _environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in (os.environ | variables).items() if name != "CKPTSTORE_KERNELS"}


def _run(cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a new interpreter."""
    environment = _environment(NUMBA_CACHE_DIR=str(cache), **variables)
    command = [sys.executable, "-c", _CODE, str(cache)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Warm]:
    """It has numba, and nothing of this package: importing that is half of a run's time."""
    with Warm(["numba", "llvmlite.binding", "xxhash", "ml_dtypes", "zstandard"], env=_environment()) as warm:
        yield warm


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Path, bytes]]:
    """The files of an interpreter that got the folder from the environment."""
    cache = tmp_path_factory.mktemp("cache")
    done = _run(cache)
    assert done.stdout == "compiled\n", done.stderr
    files = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    assert {path.suffix for path in files} == {".nbi", ".nbc", ".sums"}
    assert len({path.name.split(".py")[0] for path in files if path.suffix == ".sums"}) == len(
        {path.name.split(".py")[0] for path in files if path.suffix == ".nbi"}
    ), "each function has its list"
    return cache, files


def _page_of_zeros(data: bytes) -> bytes:
    """At the place where a page of zeros in most functions ends the process."""
    return data[:4096] + bytes(8192) + data[12288:]


TEARS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda data: data[: len(data) // 2],
    "page": _page_of_zeros,
}
IN_CI = {(".nbi", "empty"), (".nbc", "half"), (".nbc", "page"), (".sums", "page")}
"""Each file and each tear, and the two that would run wrong code; the others take as long to compile, and differ in
nothing."""


@pytest.mark.parametrize(
    ("suffix", "tear"),
    [
        pytest.param(suffix, tear, marks=() if (suffix, tear) in IN_CI else long_only)
        for suffix in (".nbi", ".nbc", ".sums")
        for tear in TEARS
    ],
)
def test_a_torn_file_is_dropped_and_compiled_again(
    written: tuple[Path, dict[Path, bytes]], nursery: Warm, suffix: str, tear: str
) -> None:
    cache, files = written
    command = [sys.executable, "-c", _CODE, str(cache)]
    for path, data in files.items():
        torn = TEARS[tear](data) if path.suffix == suffix else data
        path.write_bytes(torn)
    done = nursery.run(command, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "compiled\n", "")
    stamp = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")}
    assert stamp, "it was kept"
    assert nursery.run(command, timeout=300).stdout == "compiled\n"
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")} == stamp, "and used"


def test_an_intact_file_that_numba_cannot_load_is_dropped(
    written: tuple[Path, dict[Path, bytes]],
) -> None:
    """As after an update of numba, or of a module that the files name: it is written again, not tried for ever."""
    cache, files = written
    for path, data in files.items():
        path.write_bytes(b"of another time" if path.suffix == ".nbi" else data)
    for path in files:
        if path.suffix == ".sums":
            listed = {name: xxh3_128_hexdigest((path.parent / name).read_bytes()) for name in json.loads(files[path])}
            path.write_text(json.dumps(listed))
    done = _run(cache)
    assert (done.returncode, done.stdout, done.stderr) == (0, "compiled\n", "")
    indexes = [path.read_bytes() for path in cache.rglob("*.nbi")]
    assert indexes
    assert b"of another time" not in indexes


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = _run(tmp_path / "file" / "below", HOME=str(tmp_path / "file"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "compiled\n", "")


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({"NUMBA_DISABLE_JIT": "1"}, "numpy"),
        ({"NUMBA_OPT": "0", "NUMBA_BOUNDSCHECK": "1", "NUMBA_CPU_NAME": "generic"}, "compiled"),
        pytest.param({"NUMBA_OPT": "0"}, "compiled", marks=long_only),
        pytest.param({"NUMBA_BOUNDSCHECK": "1"}, "compiled", marks=long_only),
        pytest.param({"NUMBA_CPU_NAME": "generic"}, "compiled", marks=long_only),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_numba_s_own_variables_change_no_byte(tmp_path: Path, variables: dict[str, str], kind: str) -> None:
    done = _run(tmp_path, **variables)
    assert (done.returncode, done.stdout) == (0, f"{kind}\n"), done.stderr
    assert "KernelWarning" not in done.stderr  # numba warns of files that it cannot keep
