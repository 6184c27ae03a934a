"""Frozen weights of a script that an agent saves: stored once, or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from tests.training.test_frozen_weights import FROZEN, MOVED, compare_after_resume  # noqa: E402
from tests.warm_agents import start_warm  # noqa: E402


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numpy_elsewhere: None, one_thread: None) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))
    start_warm(monkeypatch)


@pytest.mark.parametrize(("strategy", "only"), [("replica", None), ("replica", "trainable"), ("gradient", "trainable")])
def test_an_agent_saves_adapters(tmp_path: Path, strategy: str, only: Any) -> None:
    found: list[Any] = []
    options: dict[str, Any] = {"agent": True, "linger_seconds": 0, "full_every": 4, "on_metrics": found.append}
    compare_after_resume(tmp_path, strategy, only=only, **options)
    fulls = [one.stored for one in found if one.kind == "full"]
    rest = [one.stored for one in found if one.kind not in ("full", None)]
    assert only or len(fulls) == 4, "one in each start"
    assert max(rest) < MOVED + FROZEN // 20
    names = set(ckptstore.open(tmp_path / "whole").load()["model"])
    assert names == {"0.a", "0.b", "2.a", "2.b"} if only else "0.base.weight" in names
