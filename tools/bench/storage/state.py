"""The saved state: weights and two moments of a GPT, fp32, every tensor drawn from its own seed.

A tensor depends only on (seed, its index), so a loaded state is checked without building a second one:
`expected_hashes` makes one tensor at a time. The nested form is what a training script saves (a model's and an AdamW
optimizer's state dict): integer keys, a 0-d ``step`` for every parameter, and several hundred numbers that are no
tensors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

LAYERS = 8
CONTEXT = 256
BYTES_PER_PARAMETER = 12
"""A weight and two moments, 4 bytes each."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def parameter_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a GPT whose weights and two moments take about `nbytes` bytes (within a few percent).

    Three fifths of the parameters are in `LAYERS` transformer blocks, the rest in the embedding.
    """
    parameters = nbytes // BYTES_PER_PARAMETER
    step = 64 if parameters > 8_000_000 else 8
    width = max(step, int(math.sqrt(0.6 * parameters / (12 * LAYERS))) // step * step)
    block = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (3 * width, width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
        "mlp.c_proj.bias": (width,),
    }
    blocks = {f"transformer.h.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in block.items()}
    used = sum(math.prod(shape) for shape in blocks.values()) + (CONTEXT + 2) * width
    vocabulary = max(256, round((parameters - used) / width))
    return {
        "transformer.wte.weight": (vocabulary, width),
        "transformer.wpe.weight": (CONTEXT, width),
        **blocks,
        "transformer.ln_f.weight": (width,),
        "transformer.ln_f.bias": (width,),
    }


def _tensors(nbytes: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Flat names and tensors, one at a time."""
    for index, (name, shape) in enumerate(parameter_shapes(nbytes).items()):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        yield f"model.{name}", torch.empty(shape).normal_(0.0, 0.02, generator=generator)
        moment = f"optimizer.state.{index}"
        yield f"{moment}.step", torch.tensor(float(seed))
        yield f"{moment}.exp_avg", torch.empty(shape).normal_(0.0, 1e-4, generator=generator)
        yield f"{moment}.exp_avg_sq", torch.empty(shape).normal_(0.0, 1e-4, generator=generator).square_()


def small_state(seed: int) -> dict[str, Any]:
    """The other parts of a checkpoint: schedule, data position, Python's RNG state."""
    generator = random.Random(seed)
    return {
        "step": 1000 + seed,
        "scheduler": {"last_epoch": 1000, "_last_lr": [generator.random() for _ in range(4)], "warmup": None},
        "data": {"epoch": 3, "position": 123_456, "order_seed": seed, "done": False},
        "random": list(generator.getstate()[1]),
    }


@dataclass(frozen=True, slots=True)
class BenchState:
    """One state in both forms; the tensors are shared between them."""

    tensors: dict[str, torch.Tensor]
    """Flat name -> tensor: the form that safetensors takes."""
    nested: dict[str, Any]
    """The form that a training script passes to torch.save."""
    small: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def nest(tensors: Mapping[str, torch.Tensor], small: Mapping[str, Any]) -> dict[str, Any]:
    """The nested form of flat tensors and the small state."""
    model: dict[str, torch.Tensor] = {}
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, rest = name.split(".", 1)
        if kind == "model":
            model[rest] = tensor
        else:
            index, field = rest.removeprefix("state.").split(".")
            moments.setdefault(int(index), {})[field] = tensor
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(moments)}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [group]}, "trainer": dict(small)}


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Flat name -> tensor of a nested state, in the order of `BenchState.tensors`."""
    tensors: dict[str, Any] = {}
    for index, (name, weight) in enumerate(nested["model"].items()):
        tensors[f"model.{name}"] = weight
        for field in ("step", *_MOMENTS):
            tensors[f"optimizer.state.{index}.{field}"] = nested["optimizer"]["state"][index][field]
    return tensors


def build(nbytes: int, seed: int) -> BenchState:
    """The state of about `nbytes` bytes that `seed` determines."""
    tensors = dict(_tensors(nbytes, seed))
    small = small_state(seed)
    return BenchState(tensors, nest(tensors, small), small)


def empty_like(nbytes: int, seed: int) -> dict[str, Any]:
    """A nested state of the right shapes with undefined contents, for loaders that fill one in place."""
    flat: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(parameter_shapes(nbytes).items()):
        flat[f"model.{name}"] = torch.empty(shape)
        flat[f"optimizer.state.{index}.step"] = torch.empty(())
        for field in _MOMENTS:
            flat[f"optimizer.state.{index}.{field}"] = torch.empty(shape)
    return nest(flat, small_state(seed))


def tensor_bytes(tensor: Any) -> memoryview:
    """The bytes of a contiguous torch tensor or numpy array, without a copy."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(tensor.reshape(-1)).cast("B")


def tensor_digest(tensor: Any) -> str:
    """XXH3-128 of a tensor's bytes: reads every byte once, and shows whether they are correct."""
    return str(xxhash.xxh3_128_hexdigest(tensor_bytes(tensor)))


def expected_hashes(nbytes: int, seed: int) -> dict[str, str]:
    """Flat name -> `tensor_digest` of the state that `seed` determines, built one tensor at a time."""
    return {name: tensor_digest(tensor) for name, tensor in _tensors(nbytes, seed)}
