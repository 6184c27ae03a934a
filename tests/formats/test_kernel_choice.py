"""The kernels are chosen once, by the environment and the installed packages, and the choice never slows the start."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.errors import CorruptSegmentError, MissingDependencyError, UsageError
from ckptstore.formats import kernel_choice
from ckptstore.formats.codecs import kernels
from tests.kernel_forms import needs_core

CORE = importlib.util.find_spec(kernel_choice.CORE) is not None


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    kernel_choice.use(None)


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    kernel_choice.use(None)
    assert kernel_choice.kind() == ("compiled" if CORE else "numpy")
    monkeypatch.setenv(kernel_choice.VARIABLE, "numpy")
    assert kernel_choice.kind() == ("compiled" if CORE else "numpy"), "decided once"
    kernel_choice.use(None)
    assert kernel_choice.kind() == "numpy"
    monkeypatch.setenv(kernel_choice.VARIABLE, "fortran")
    kernel_choice.use(None)
    with pytest.raises(UsageError, match="CKPTSTORE_KERNELS is 'fortran'; it may be numpy or compiled"):
        kernel_choice.kind()
    with pytest.raises(UsageError):
        kernel_choice.use("c")


def test_without_the_module_numpy_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kernel_choice.CORE, None)
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    kernel_choice.use(None)
    assert kernel_choice.kind() == "numpy"
    with pytest.raises(MissingDependencyError, match=r"the compiled kernels are missing .*C compiler"):
        kernel_choice.use("compiled")
    assert twice.reference(2) == 4


@kernel_choice.hot("tests.formats.test_compiled_forms")
def twice(value: int) -> int:
    """The reference."""
    return 2 * value


def test_a_hot_kernel_runs_in_the_form_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = type(sys)("tests.formats.test_compiled_forms")
    forms.twice = lambda value: 2.0 * value  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, forms.__name__, forms)
    kernel_choice.use("numpy")
    assert isinstance(twice(3), int)
    if CORE:
        kernel_choice.use("compiled")
        assert isinstance(twice(3), int), "the first call is compared, and gives what the reference does"
        assert isinstance(twice(3), int), "and the second"
        assert isinstance(twice(3), float)
    assert twice.compiled(3) == twice.reference(3)
    assert twice.__doc__ == "The reference."


@kernel_choice.hot("tests.formats.test_compiled_forms")
def given(which: str) -> Any:
    """The reference of the next test."""
    return _GIVEN[which][0]


_GIVEN: dict[str, tuple[Any, Any]] = {
    "a bit": (np.array([1, 2], "<u4"), np.array([1, 3], "<u4")),
    "no array": (np.array([1, 2], "<u4"), [1, 2]),
    "an array": ([1, 2], np.array([1, 2], "<u4")),
    "shape": (np.zeros((2, 3), "<u4"), np.zeros((3, 2), "<u4")),
    "type": (np.zeros(2, "<u4"), np.zeros(2, "<i4")),
    "fewer": ((1, 2), (1,)),
    "more": ([1], [1, 2]),
    "one of two": ([np.zeros(2), np.zeros(2)], [np.zeros(2), np.ones(2)]),
    "number": (3, 4),
}


@needs_core
@pytest.mark.parametrize("which", _GIVEN)
def test_whatever_a_kernel_returns_is_compared_with_numpy(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = type(sys)("tests.formats.test_compiled_forms")
    forms.given = lambda which: _GIVEN[which][1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, forms.__name__, forms)
    monkeypatch.setattr(given, "_calls", {})
    kernel_choice.use("compiled")
    with pytest.warns(kernel_choice.KernelWarning, match="compiled kernel 'given' .* gives other bytes than numpy"):
        assert given(which) is _GIVEN[which][0]
    assert kernel_choice.kind() == "numpy"


@needs_core
def test_damage_that_numpy_does_not_find_switches_the_kernels_off() -> None:
    """Also if no comparison shows which kernel was wrong: one that is not compared, or wrong now and then."""
    found: list[str] = []

    def work() -> str:
        found.append(kernel_choice.kind())
        if len(found) == 1:
            error = CorruptSegmentError("other bytes than were saved")
            error.computed = True
            raise error
        assert kernel_choice.doubting()
        return "intact"

    kernel_choice.use("compiled")
    with pytest.warns(kernel_choice.KernelWarning, match="gave wrong bytes where numpy gives those that were saved"):
        assert kernel_choice.confirmed(work) == "intact"
    assert found == ["compiled", "compiled"]
    assert kernel_choice.kind() == "numpy"
    assert not kernel_choice.doubting()


@pytest.mark.parametrize("code", ["import ckptstore", "from ckptstore.formats import codecs, optim"])
def test_importing_loads_no_compiled_kernel(code: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print({kernel_choice.CORE!r} in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == "False"


@needs_core
def test_a_base_that_is_not_added_to_may_overlap_what_is_made() -> None:
    """If words are copied unchanged, the base is not read, and a comparison with numpy must not read it, either."""
    kernel_choice.use("compiled")
    planes = [np.arange(500, dtype=np.uint8) + number for number in range(4)]
    memory = np.zeros(2000, np.uint32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.combine(planes, kernels.PUT, memory, memory[300:800])
    assert kernel_choice.kind() == "compiled", "a kernel that is right was switched off"
    assert memory[301] == sum((1 + number) << (8 * number) for number in range(4))


def zigzag() -> None:
    values = np.zeros(100, np.uint32)
    kernels.zigzag(values, np.empty_like(values))


def test_damage_found_by_numpy_alone_is_not_looked_at_again() -> None:
    kernel_choice.use("numpy")
    calls = []

    def work() -> None:
        calls.append(1)
        zigzag()
        error = CorruptSegmentError("damage")
        error.computed = True
        raise error

    with pytest.raises(CorruptSegmentError):
        kernel_choice.confirmed(work)
    assert len(calls) == 1


@needs_core
def test_damage_is_looked_at_again_if_the_work_itself_began_to_use_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    kernel_choice.use(None)
    calls = []

    def work() -> None:
        calls.append(kernel_choice.doubting())
        zigzag()
        error = CorruptSegmentError("damage")
        error.computed = True
        raise error

    with pytest.raises(CorruptSegmentError):
        kernel_choice.confirmed(work)
    assert calls == [False, True]
    assert kernel_choice.used()


_FIRST = """
import sys
import numpy as np
before = set(sys.modules)
import ckptstore
with ckptstore.open(sys.argv[1]).writer() as writer:
    writer.save({"x": np.zeros(3)}, 1)
ours = {name.removeprefix("ckptstore.") for name in sys.modules if name.startswith("ckptstore.")}
print("formats.codecs" in ours, "formats.optim" in ours, "restore.chains.chain" in ours)
assert len(ours) < 160, sorted(ours)
rare = {"ml_dtypes", "numpy.random", "numpy.typing", "decimal", "fractions", "zoneinfo"}
assert not rare & (set(sys.modules) - before)
"""


def test_the_first_save_of_a_small_state_imports_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    command = [sys.executable, "-c", _FIRST, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 3


def test_a_build_in_place_that_fails_leaves_no_older_module(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    tree = tmp_path / "a clone"
    shutil.copytree(root / "native", tree / "native")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tree)
    (tree / "formats").mkdir()
    (tree / "ckptstore").mkdir()
    older = tree / "formats" / "core.abi3.so"
    older.write_bytes(b"of other sources")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | {"CC": "none"}, capture_output=True, text=True, check=True
    )
    assert "the kernels will run in numpy" in done.stdout + done.stderr
    assert not older.exists()


def test_the_core_is_there_where_it_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it all tests of compiled kernels skip, and nothing would say that it no longer compiles."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "native")
    core_build = importlib.import_module("core_build")
    if core_build.compiler() is None or not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        pytest.skip("no C compiler, or no C headers of Python")
    assert importlib.util.find_spec(kernel_choice.CORE) is not None, "python native/core_build.py says why"
