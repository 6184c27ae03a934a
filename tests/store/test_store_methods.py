"""The command's operations as methods of `Store`: each once. The functions behind them have their own tests."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptstore
from tests.store.states import same

ROOT = Path(__file__).parents[2]


def state(step: int) -> dict[str, object]:
    return {"w": torch.full((600,), 1 + step / 64), "fixed": torch.arange(5), "lr": 0.5 / step}


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    store = ckptstore.open(tmp_path / "store")
    with store.writer(deltas=ckptstore.DeltaOptions(interval=1)) as writer:
        for step in (1, 2, 3):
            writer.save(state(step), step)
    return store


def test_latest_step(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "new")
    assert store.latest_step() is None, "no store yet"
    assert not (tmp_path / "new").exists()
    store.create()
    assert store.latest_step() is None
    with store.writer() as writer:
        writer.save(state(7), 7)
        assert store.latest_step() == 7
        writer.rollback(7)
        assert store.latest_step() == 7, "an empty term means its parent"
        writer.save(state(8), 8)
    assert store.latest_step() == 8


def test_latest_step_where_the_log_is_damaged(store: ckptstore.Store) -> None:
    slot = sorted(Path(store.url, "log").iterdir())[-1]
    slot.write_bytes(bytes(len(slot.read_bytes())))
    with pytest.raises(ckptstore.CorruptLogError):
        store.latest_step()


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("m.safetensors", None, "safetensors"),
        ("m.PT", None, "pt"),
        ("m.ckpt", None, "pt"),
        ("m.x", None, "safetensors"),
        ("m.x", "pt", "pt"),
    ],
)
def test_export_and_import(store: ckptstore.Store, tmp_path: Path, name: str, format: object, expected: str) -> None:
    done = store.export(2, tmp_path / name, format=format)  # type: ignore[arg-type]
    assert (done.format, done.ref, done.paths) == (expected, "2@1", (tmp_path / name,))
    with pytest.raises(ckptstore.UsageError, match="exists"):
        store.export(2, str(tmp_path / name))
    store.export(2, tmp_path / name, format=format, overwrite=True)  # type: ignore[arg-type]
    other = ckptstore.open(tmp_path / "other")
    told: list[tuple[int, int]] = []
    (imported,) = other.import_files([tmp_path / name], 9, progress=lambda done, total: told.append((done, total)))
    assert imported.info == other.checkpoint(9)
    assert told[-1][0] == told[-1][1] > 0
    same(state(2), other.load(9))


def test_reports(store: ckptstore.Store) -> None:
    assert [info.step for info in store.lineage(limit=2).checkpoints] == [3, 2]
    described = store.inspect("latest", "w")
    assert ([tensor.name for tensor in described.tensors], described.info.ref) == (["w"], "3@1")
    assert store.statistics(np.int64(1), "w").mean == pytest.approx(1 + 1 / 64)
    assert [step.ref for step in store.explain(3).steps][-1] == "3@1"
    assert [(one.name, one.status) for one in store.compare(1, 3)] == [("w", "changed"), ("fixed", "same")]
    assert [one.path for one in store.compare_state(1, 3)] == ["lr"]


def test_upkeep(store: ckptstore.Store) -> None:
    planned = store.merge("2..3", dry_run=True)
    assert (planned.answer, planned.retired) == ("planned", ("2@1",))
    assert store.merge("2..3", take_over=True).answer == "accepted"
    same(state(3), store.load(3))
    assert store.gc(dry_run=True).segments == store.gc().segments != ()
    assert store.gc().segments == ()
    with pytest.raises(ckptstore.UsageError, match="60 s at least"):
        store.gc(pin_ttl=5)
    assert store.verify(deep=True).ok


def test_the_command_asks_the_store() -> None:
    """A script can do everything that it does: it uses only the `Store`."""
    for path in (ROOT / "cli").rglob("*.py"):
        reached = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if is_journal(node)]
        assert not reached, (path, reached)


def is_journal(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("journal", "view", "backend")
