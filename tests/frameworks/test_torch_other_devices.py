"""Devices of another kind than CUDA: a copy waits, also for the caller's stream if there are any; that is said once.

The streams are those of the simulated machine, by `torch.accelerator`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.frameworks.torch_tensors import TorchSource  # noqa: E402
from tools.device import simulated, why_not  # noqa: E402

if why_not() is None:
    from tools.device.other import another_device, tensor_there

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_that_copies_wait_is_said_once_for_a_kind_of_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ckptstore")
    data = np.arange(200, dtype=np.uint8)
    with simulated(0), another_device():
        state = {"one": tensor_there(data), "two": tensor_there(data[::-1].copy())}
        with ckptstore.open(tmp_path, create=True) as store, store.writer() as writer:
            for step in range(3):
                writer.save_async(state, step).result()
            assert (store.load(2)["two"].numpy() == data[::-1]).all()
    (text,) = [one.getMessage() for one in caplog.records if "while training waits" in one.getMessage()]
    assert "tensors on privateuseone are copied" in text


def test_a_copy_waits_for_the_stream_of_its_caller() -> None:
    with simulated(0) as machine, another_device():
        data = np.zeros(64, np.uint8)
        there = tensor_there(data)
        machine.set_current(torch.Stream())
        machine.launch(0, lambda: data.fill(7), ())
        source = TorchSource(there)
        machine.set_current(machine.default())
        out = np.zeros(64, np.uint8)
        assert not data.any(), "the device has not begun"
        source.read(0, out)
        assert (out == 7).all()


def test_a_device_without_streams_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_stream(*_: Any) -> Any:
        raise RuntimeError("no streams")

    with simulated(0), another_device():
        monkeypatch.setattr(torch.accelerator, "current_stream", no_stream)
        source = TorchSource(tensor_there(np.full(64, 3, np.uint8)))
        out = np.zeros(64, np.uint8)
        source.read(0, out)
        assert (out == 3).all()
