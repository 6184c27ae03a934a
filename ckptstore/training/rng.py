"""The random generators of a process: python's, numpy's, torch's on the CPU and on every CUDA device.

As tensors, not as lists of Python numbers: they are in every checkpoint, and 625 numbers take longer to be written as
JSON than a layer does to be copied.
"""

from __future__ import annotations

import array
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckptstore.errors import FormatError

__all__ = ["gathered", "restored"]


def gathered() -> dict[str, Any]:
    """The state of every global generator of this process, copied.

    CUDA devices are asked only once this process uses CUDA: before that they have drawn nothing.
    """
    version, words, spare = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": {"version": version, "words": np.array(array.array("I", words), np.uint32), "spare": spare},
        "numpy": {
            "name": name,
            "keys": np.array(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def restored(state: Mapping[str, Any]) -> None:
    """Give the generators back what `gathered` found.

    Raises:
        FormatError: it is no such state.
    """
    try:
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(int(word) for word in python["words"]), python["spare"]))
        keys = np.asarray(numpy["keys"])
        np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
        torch.set_rng_state(torch.as_tensor(state["torch"]).cpu())
        devices = state.get("cuda", [])
        if devices and torch.cuda.is_available():
            for number, one in enumerate(devices[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(torch.as_tensor(one).cpu(), number)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"the checkpoint's random generators cannot be restored: {error!r:.200}") from error
