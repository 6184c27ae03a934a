"""The kernels are chosen once, by the environment and the installed packages, and the choice never slows the start."""

from __future__ import annotations

import builtins
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.errors import CorruptSegmentError, MissingDependencyError, UsageError
from ckptstore.formats import kernel_choice
from ckptstore.formats.codecs import kernels

NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not NUMBA, reason="numba is not installed")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    kernel_choice.use(None)


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    kernel_choice.use(None)
    assert kernel_choice.kind() == ("compiled" if NUMBA else "numpy")
    monkeypatch.setenv(kernel_choice.VARIABLE, "numpy")
    assert kernel_choice.kind() == ("compiled" if NUMBA else "numpy"), "decided once"
    kernel_choice.use(None)
    assert kernel_choice.kind() == "numpy"
    monkeypatch.setenv(kernel_choice.VARIABLE, "fortran")
    kernel_choice.use(None)
    with pytest.raises(UsageError, match="CKPTSTORE_KERNELS is 'fortran'; it may be numpy or compiled"):
        kernel_choice.kind()
    with pytest.raises(UsageError):
        kernel_choice.use("c")


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    def importing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "numba":
            raise ImportError("Numba needs NumPy 1.0 or less")
        return found(name, *rest, **more)

    found = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", importing)
    monkeypatch.setattr("importlib.import_module", importing)
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    kernel_choice.use(None)
    assert kernel_choice.kind() == "numpy"
    with pytest.raises(MissingDependencyError, match=r"ckptstore\[fast\]"):
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
    if NUMBA:
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


@needs_numba
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


@needs_numba
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


@kernel_choice.loop("u2", "u4!", "int", "float")
def scaled(values: Any, out: Any, add: int, factor: float) -> int:
    total = 0
    for i in range(len(out)):
        out[i] = values[i] * factor + add
        total += values[i]
    return total


@needs_numba
def test_loops_take_arrays_at_any_address() -> None:
    buffer = np.zeros(11, np.uint8)
    readonly = np.frombuffer(b"\0\1\0\2\0\3\0\4\0"[1:], "<u2")
    unaligned = buffer[1:9].view("<u2")
    unaligned[:] = readonly
    for values in (readonly, unaligned, readonly.copy()):
        out = np.zeros(4, "<u4")
        assert scaled(values, out, 1, 2.0) == 10
        assert out.tolist() == [3, 5, 7, 9]
    with pytest.raises(TypeError):
        scaled(readonly.astype("<u4"), np.zeros(4, "<u4"), 1, 2.0)
    with pytest.raises(TypeError):
        scaled(readonly, np.frombuffer(bytes(16), "<u4"), 1, 2.0)  # not to be written


@kernel_choice.loop("f4", "f4!")
def reciprocals(values: Any, out: Any) -> None:
    for i in range(len(out)):
        out[i] = np.float32(1) / values[i]


@needs_numba
def test_division_is_as_in_numpy() -> None:
    values = np.array([0.0, -0.0, np.inf, np.nan, 1e-45, 3.0], "<f4")
    out = np.empty_like(values)
    reciprocals(values, out)
    with np.errstate(all="ignore"):
        assert (out.view("<u4") == (np.float32(1) / values).view("<u4")).all()


@needs_numba
def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    jit, asked = numba.jit, []

    def refusing(*args: Any, cache: bool = False, **options: Any) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return jit(*args, **options)

    monkeypatch.setattr(numba, "jit", refusing)

    def successor(values: Any, out: Any) -> None:
        for i in range(len(out)):
            out[i] = values[i] + 1

    out = np.zeros(2, np.uint8)
    kernel_choice.loop("u1", "u1!")(successor)(np.array([1, 255], np.uint8), out)
    assert out.tolist() == [2, 0]
    assert asked == [True, False]


@pytest.mark.parametrize("code", ["import ckptstore", "from ckptstore.formats import codecs, optim"])
def test_importing_compiles_nothing(code: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print([n for n in sys.modules if n.startswith('numba')])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == "[]"


@needs_numba
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


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    monkeypatch.setattr(kernel_choice, "_decided", lambda wanted: decisions.append(wanted) is None and False)
    decisions.clear()
    kernel_choice.use(None)


decisions: list[str] = []


def zigzag(nbytes: int) -> None:
    values = np.zeros(nbytes // 4, np.uint32)
    kernels.zigzag(values, np.empty_like(values))


@pytest.mark.usefixtures("undecided")
def test_a_few_small_calls_decide_nothing() -> None:
    for _ in range(10):
        zigzag(1 << 16)
    assert not decisions
    zigzag(kernel_choice.LARGE)
    assert decisions == [""]


@pytest.mark.usefixtures("undecided")
def test_many_small_calls_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "MANY", 1 << 20)
    for _ in range(15):
        zigzag(1 << 16)
    assert not decisions
    zigzag(1 << 16)
    assert decisions == [""]


@pytest.mark.usefixtures("undecided")
def test_a_list_of_arrays_counts_as_their_sum() -> None:
    words = np.zeros(kernel_choice.LARGE // 4, np.uint32)
    kernels.combine([np.zeros(words.size, np.uint8)] * 4, 0, np.zeros_like(words), words)
    assert decisions


@pytest.mark.usefixtures("undecided")
def test_the_variable_decides_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_choice.VARIABLE, "compiled")
    zigzag(4)
    assert decisions == ["compiled"]


@pytest.mark.usefixtures("undecided")
def test_damage_found_by_numpy_alone_is_not_looked_at_again() -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        zigzag(4)
        error = CorruptSegmentError("damage")
        error.computed = True
        raise error

    with pytest.raises(CorruptSegmentError):
        kernel_choice.confirmed(work)
    assert len(calls) == 1
    assert not decisions


@needs_numba
def test_damage_is_looked_at_again_if_the_work_itself_began_to_use_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    kernel_choice.use(None)
    calls = []

    def work() -> None:
        calls.append(kernel_choice.doubting())
        zigzag(kernel_choice.LARGE)
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
import ckptstore
with ckptstore.open(sys.argv[1]).writer() as writer:
    writer.save({"x": np.zeros(3)}, 1)
ours = {name.removeprefix("ckptstore.") for name in sys.modules if name.startswith("ckptstore.")}
print("numba" in sys.modules, "formats.codecs" in ours, "formats.optim" in ours, "restore.chain" in ours)
assert len(ours) < 180, sorted(ours)
ckptstore.open(sys.argv[1]).load()
print("numba" in sys.modules)
"""


def test_the_first_save_of_a_small_state_imports_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    command = [sys.executable, "-c", _FIRST, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 5
