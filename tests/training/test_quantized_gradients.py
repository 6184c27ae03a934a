"""Gradients of 8 bits with a scale: recorded as they are, and replayed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DiffOptions  # noqa: E402
from ckptstore.agent.protocol.message_fields import StateLayout  # noqa: E402
from ckptstore.agent.protocol.update_fields import Packed, read_updates, updates_form  # noqa: E402
from ckptstore.errors import UsageError  # noqa: E402
from ckptstore.formats import optim  # noqa: E402
from ckptstore.frameworks import bridge  # noqa: E402
from ckptstore.training import OptimizerStep, QuantizedGradient  # noqa: E402
from tests.store.states import same  # noqa: E402

DTYPES = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
COUNT = 40_000


def quantized(gradient: Any, dtype: Any) -> QuantizedGradient:
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = float(gradient.abs().max() / most)
    numbers = gradient / scale
    return QuantizedGradient((numbers.round() if dtype == torch.int8 else numbers).to(dtype), scale)


@pytest.mark.parametrize("name", DTYPES)
def test_steps_are_replayed_from_8_bits(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size) * 0.05) for size in (COUNT, 300)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    wanted, stored = [], []
    store = ckptstore.open(tmp_path / "run", create=True)
    with store.writer(diffs=DiffOptions()) as writer:
        for step in range(1, 5):
            sent = {one: quantized(torch.randn_like(one) * 1e-3, DTYPES[name]) for one in parameters}
            for one, gradient in sent.items():
                one.grad = gradient.values.float() * gradient.scale * 0.5
            optimizer.step()
            state = {"weights": list(parameters), "optimizer": optimizer.state_dict()}
            updates = OptimizerStep(optimizer, gradients=sent, clip=0.5)
            stored.append(writer.save(state, step, updates=updates).stored)
            wanted.append([one.detach().clone() for one in parameters])
    for step, weights in enumerate(wanted, 1):
        same(weights, store.load(step)["weights"], f"step {step}")
    assert 8 * stored[-1] / COUNT < 11, "8 bits, and what describes the step"


def test_every_number_of_8_bits_is_its_bf16_number() -> None:
    for name, dtype in DTYPES.items():
        image = np.arange(256, dtype=np.uint8)
        wide = optim.numbers_of_image(name, image)
        true = torch.from_numpy(image.copy()).view(dtype).float()
        found = torch.from_numpy(wide.astype(np.uint32) << 16).view(torch.float32)
        assert torch.equal(found[~true.isnan()], true[~true.isnan()])
        assert found[true.isnan()].isnan().all()


def test_an_agent_gets_values_and_scale() -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.5)
    parameter.grad = torch.ones(8)
    optimizer.step()
    flat = bridge.flattened({"w": parameter, "optimizer": optimizer.state_dict()})
    values = torch.arange(8, dtype=torch.int8)
    (update,) = OptimizerStep(optimizer, gradients={parameter: QuantizedGradient(values, 0.25)})(flat)
    packed, layout = Packed(), StateLayout.of(flat.tensors)
    form = updates_form([update], layout, packed)
    memory = np.zeros(packed.nbytes, np.uint8)
    for source, out in packed.copies(memory):
        source.read(0, out)
    (read,) = read_updates(form, layout, memory)
    assert read.step.scale == 0.25
    assert read.step.scales == (0.25,)
    assert read.gradient is not None
    assert read.gradient.dtype == "I8"


def test_invalid_ones_are_refused_or_left_out() -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.5)
    parameter.grad = torch.ones(8)
    optimizer.step()
    flat = bridge.flattened({"w": parameter, "optimizer": optimizer.state_dict()})
    with pytest.raises(UsageError, match="a scale of nan"):
        OptimizerStep(
            optimizer, gradients={parameter: QuantizedGradient(torch.ones(8, dtype=torch.int8), float("nan"))}
        )
    with pytest.raises(UsageError, match="shape"):
        OptimizerStep(optimizer, gradients={parameter: QuantizedGradient(torch.ones(7, dtype=torch.int8), 1.0)})
    given = {parameter: QuantizedGradient(torch.ones(8, dtype=torch.int16), 1.0)}
    (update,) = OptimizerStep(optimizer, gradients=given)(flat)
    assert update.gradient is None
