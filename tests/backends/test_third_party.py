"""A backend from another package: the example in ``examples/sqlite_backend``, found by its entry point."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest

import ckptstore
from ckptstore.backends import Backend, open_backend
from ckptstore.errors import StoreNotFoundError, UsageError
from tests.backends.backend_conformance import BackendConformance, Opener

EXAMPLE = Path(__file__).parents[2] / "examples" / "sqlite_backend"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ckptstore_sqlite", EXAMPLE / "ckptstore_sqlite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def opened(path: Path) -> Backend:
    return cast("Backend", example().SqliteBackend(path))


class TestSqlite(BackendConformance):
    processes = True
    rounds = 20

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return functools.partial(opened, tmp_path / "store.db")


def declare(folder: Path, monkeypatch: pytest.MonkeyPatch, points: str, package: str = "ckptstore_sqlite") -> None:
    """The files that pip would leave in site-packages, in a separate folder on ``sys.path``."""
    info = folder / f"{package}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[ckptstore.backends]\n{points}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    declare(tmp_path / "site", monkeypatch, "sqlite = ckptstore_sqlite:open_url")
    yield
    sys.modules.pop("ckptstore_sqlite", None)


def test_it_is_opened_by_its_scheme(tmp_path: Path, installed: None) -> None:
    url = f"sqlite://{tmp_path}/runs/gpt.db"
    with pytest.raises(StoreNotFoundError, match=r"gpt\.db does not exist"):
        ckptstore.open(url, create=False)
    state = {"w": np.arange(10_000, dtype=np.float32)}
    with ckptstore.open(url) as store, store.writer() as writer:
        writer.save(state, step=7)
    with ckptstore.open(url, create=False) as store:
        assert np.array_equal(np.asarray(store.load()["w"]), state["w"])
        assert store.verify().ok


def test_options_reach_it(tmp_path: Path, installed: None) -> None:
    with pytest.raises(UsageError, match="sqlite:// takes no storage_options"):
        open_backend(f"sqlite://{tmp_path}/a.db", True, {"key": "value"})


def test_an_unknown_scheme_stays_unknown(installed: None) -> None:
    with pytest.raises(UsageError, match="no backend for nosuch://"):
        open_backend("nosuch://a/b", True)


def test_two_packages_for_one_scheme(tmp_path: Path, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(tmp_path / "other", monkeypatch, "sqlite = other:open_url", "other_one")
    with pytest.raises(UsageError, match=r"sqlite:// is declared by .*other_one.*uninstall"):
        open_backend(f"sqlite://{tmp_path}/a.db", True)


def test_an_unimportable_entry_point_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(tmp_path / "site", monkeypatch, "broken = no_such_module:open_url", "broken_one")
    with pytest.raises(UsageError, match=r"broken_one \(no_such_module:open_url\), which cannot be imported"):
        open_backend("broken://a", True)


def test_an_invalid_backend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(tmp_path / "site", monkeypatch, "strange = builtins:print", "strange_one")
    with pytest.raises(UsageError, match="returned NoneType for strange://, not a Backend"):
        open_backend("strange://a", True)
