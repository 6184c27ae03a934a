"""Power cuts while weights are published: every state of the disk that one may leave has a whole version, and no older
one than the last that was reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.following.publisher import Publisher, PublishOptions
from tests.following.published import example
from tests.forms import short_or
from tools.crash.enumerate import crash_states
from tools.crash.recording import RecordingPosix

reading = example("read_published")
ROOT = "/published"


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), float(step)), "b": torch.arange(4)}


def recorded(store: ckptstore.Store) -> RecordingPosix:
    """A full, a delta, and a full after which the two before it are removed. Each is reported as published."""
    posix = RecordingPosix()
    options = PublishOptions(full_every=2, keep=1, sha256=True)
    with (
        store.writer(threads=1, poll_seconds=None) as writer,
        Publisher(store.journal, LocalBackend(ROOT, posix, recycle="never"), options) as publisher,
    ):
        for step in (1, 2, 3):
            writer.save({"model": weights(step)}, step)
            version = publisher.look()
            assert version is not None
            assert version.removed == ((1, 2) if step == 3 else ())
            posix.acknowledge(step)
    return posix


def violations(posix: RecordingPosix, folder: Path, limit: int) -> list[str]:
    """What is wrong in the states that power cuts may leave."""
    wrong = []
    states = 0
    for state in crash_states(posix, limit=limit, seed=11):
        states += 1
        reported = max(map(int, state.acknowledged), default=0)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        survivor = LocalBackend(ROOT, state.mount(), recycle="never")
        for key in survivor.list(""):
            (folder / key).parent.mkdir(exist_ok=True)
            (folder / key).write_bytes(survivor.get(key))
        try:
            manifest, tensors = reading.read(folder)
        except (OSError, ValueError, KeyError) as error:
            if reported or (folder / "latest.json").exists():
                wrong.append(f"{error!r} after {reported}\n{state.explain()}")
            continue
        step = manifest["step"]
        if step < reported or {name: one.tobytes() for name, one in tensors.items()} != {
            name: tensor.numpy().tobytes() for name, tensor in weights(step).items()
        }:
            wrong.append(f"step {step} after {reported}\n{state.explain()}")
    assert states > 60
    return wrong


def test_every_state_has_a_whole_version(tmp_path: Path) -> None:
    posix = recorded(ckptstore.open(tmp_path / "run"))
    assert violations(posix, tmp_path / "copy", short_or(6, 500)) == []


def test_without_the_sync_of_the_pointer_s_name_it_is_not_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "settle", lambda _self, _prefix: None)
    posix = recorded(ckptstore.open(tmp_path / "run"))
    assert violations(posix, tmp_path / "copy", short_or(6, 500))
