"""The baselines: one suite for all of them. Each saves, is killed, restores, and says what it loses."""

from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forms import long_only
from tools.bench.training import training_cases
from tools.bench.training.training_cases import LOSSY, Case, Plan
from tools.warm import Warm

torch = pytest.importorskip("torch")

from tools.baselines import gemini  # noqa: E402
from tools.baselines.catalog import BASELINES  # noqa: E402
from tools.baselines.gemini import GeminiLike  # noqa: E402
from tools.baselines.gemini_peer import HEAD, digest  # noqa: E402
from tools.baselines.gpm import GpmLike  # noqa: E402
from tools.baselines.strategy import Ledger, Options, Strategy  # noqa: E402
from tools.bench.training import training_loop, training_worker  # noqa: E402
from tools.bench.training.training_loop import Shape, Trainer  # noqa: E402

SHAPE = Shape(width=32, layers=1, batch=1, context=8)
KILLED_IN_CI = ("gemini", "naive-topk")
"""torch.save and DCP are killed in the long form: only the two others have their own process or their own losses."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch, warm: Warm) -> None:
    """Peers start warm, and end with their folder."""

    def start(command: list[str], *, cwd: Path, start_new_session: bool, **streams: Any) -> None:
        assert start_new_session
        warm.start(command, cwd=cwd, **streams)

    monkeypatch.setattr(gemini.subprocess, "Popen", start)


def trained(name: str, folder: Path, steps: int, interval: int = 2) -> tuple[Strategy, Trainer, dict[int, str]]:
    """A strategy after some steps of training, and the digests of what it has saved."""
    trainer, ledger = Trainer(SHAPE), Ledger()
    trainer.take()
    strategy = BASELINES[name](folder, trainer, Options(interval, full_every=4), ledger)
    run, digests = training_worker.Run(trainer, strategy, ledger, interval), {}
    while trainer.step < steps:
        run.take(lambda step: digests.update({step: training_loop.digest(trainer.state())}))
    return strategy, trainer, digests


def restored(kind: type[Strategy], folder: Path) -> tuple[int | None, Trainer]:
    other = Trainer(SHAPE, seed=2)
    other.take()
    return kind.restore(folder, other), other


def test_the_driver_knows_the_baselines_without_torch() -> None:
    assert {name: kind.label for name, kind in BASELINES.items()} == training_cases.BASELINES
    assert {name for name, kind in BASELINES.items() if kind.lossy} == LOSSY


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_restores_its_newest_save(tmp_path: Path, name: str) -> None:
    kind = BASELINES[name]
    assert restored(kind, tmp_path)[0] is None
    strategy, trainer, digests = trained(name, tmp_path, 6)
    strategy.close()
    assert set(strategy.ledger.durable) == set(digests)
    step, other = restored(kind, tmp_path)
    assert step == 6
    assert (training_loop.digest(other.state()) == digests[6]) is not kind.lossy
    if kind.lossy:
        lost = training_worker.lost(other, Trainer(SHAPE), 0)
        assert 0 < lost["distance"] < 0.2
        assert 0.5 < lost["differing"] < 1
        assert lost["loss"] != lost["loss_trained"]
        return
    other.take()  # and training continues from it, with the same bits
    trainer.take()
    assert training_loop.digest(other.state()) == training_loop.digest(trainer.state())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KILLED_IN_CI else long_only) for name in BASELINES]
)
def test_a_baseline_is_killed_and_restored(
    tmp_path: Path, warm: Warm, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_cases, "environment", lambda: dict(os.environ))  # the nursery's
    plan = Plan(32, 1, 1, 8, 6, 4, "cpu", True, tmp_path, warm=warm)
    found = training_cases.killed(plan, Case("kill", name, 1), tmp_path / "run", random.Random(name))
    assert found["equal"] is (name not in LOSSY)
    assert found["restored"] >= found["trained"] - found["lost"]  # perhaps the step under way was saved
    assert found["lost"] <= 4
    assert ("loss" in found) is (name in LOSSY)


def test_a_peer_keeps_the_whole_state_when_half_of_the_next_one_comes(tmp_path: Path) -> None:
    strategy, _, digests = trained("gemini", tmp_path, 4)
    strategy.close()
    text, data = b"text", bytes(1000)
    for sent, told in ((data[:500], digest(text, data)), (data, digest(text, b"other"))):
        peer = gemini.connected(tmp_path)
        assert peer is not None
        with peer:
            peer.sendall(b"P" + HEAD.pack(5, len(text), len(data), told) + text + sent)
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b"", "the peer says that it has all of it"
    step, other = restored(GeminiLike, tmp_path)
    assert step == 4
    assert training_loop.digest(other.state()) == digests[4]


def test_a_slot_that_is_not_durable_is_never_the_valid_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, trainer, digests = trained("gpm", tmp_path, 4)
    assert isinstance(strategy, GpmLike)
    assert strategy.region is not None

    def fails(_begin: int, _end: int) -> None:
        raise OSError("the power is gone")

    monkeypatch.setattr(strategy.region, "persist", fails)
    trainer.take()
    with pytest.raises(OSError, match="the power is gone"):
        strategy.save(5)
    step, other = restored(GpmLike, tmp_path)
    assert step == 4
    assert training_loop.digest(other.state()) == digests[4]


def test_a_peer_ends_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    strategy, _, _ = trained("gemini", folder, 2)
    strategy.close()
    folder.rename(tmp_path / "moved")
    (tmp_path / "moved" / "peer.json").rename(tmp_path / "peer.json")
    end = time.monotonic() + 120
    while (peer := gemini.connected(tmp_path)) is not None:
        peer.close()
        assert time.monotonic() < end
        time.sleep(0.05)
