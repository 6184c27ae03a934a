"""Where a warning points: the caller's line, or the outermost line of this package in a thread of its own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

_INNER = "from ckptstore.host.caller_warnings import warn\ndef inner(): warn('here')"
_OUTER = "def outer(): inner()"


def run(source: str, module: str, file: str, **names: Any) -> dict[str, Any]:
    """The names of a module with this source."""
    found: dict[str, Any] = {"__name__": module} | names
    exec(compile(source, file, "exec"), found)  # noqa: S102 - sources of this test
    return found


@pytest.fixture
def inside() -> Callable[[], None]:
    """A function of this package, `outer.py`, that calls one that warns, `inner.py`."""
    inner = run(_INNER, "ckptstore.inner", "inner.py")["inner"]
    found: Callable[[], None] = run(_OUTER, "ckptstore.outer", "outer.py", inner=inner)["outer"]
    return found


def test_it_points_to_the_caller(inside: Callable[[], None]) -> None:
    script = run("def script(): call()", "script", "script.py", call=inside)["script"]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        script()
    assert [one.filename for one in found] == ["script.py"]


def test_in_a_thread_it_points_to_the_outermost_line(inside: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
    assert [one.filename for one in found] == ["outer.py"]
