"""What decides a training run's bits, recorded per term and compared on resume.

Measured on torch 2.13: results differ from the first step with the thread count, the CPU capability (AVX2 against
AVX-512), MKL's reproducibility mode and oneDNN; the optimizer alone does not.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

__all__ = ["describe_devices", "describe_environment", "inexact_roots"]


def describe_environment() -> dict[str, str]:
    """Name -> value of everything that is known to change bits and is visible from here."""
    found = {
        "torch": str(torch.__version__),  # a subclass of str, which no state may hold
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),  # type: ignore[no-untyped-call]
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["gpu"] = torch.cuda.get_device_name()
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found["cudnn_deterministic"] = str(torch.backends.cudnn.deterministic)
    return found


def describe_devices() -> dict[str, Any]:
    """What torch would compute with: ``threads``, ``devices`` (GPUs), and ``gpu``, the name of the first."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "threads": torch.get_num_threads(),
        "devices": devices,
        "gpu": torch.cuda.get_device_name() if devices else None,
    }


def inexact_roots(count: int = 1 << 16) -> float:
    """The share of fp32 square roots, of 0 to 1, that torch rounds otherwise than to nearest on this processor.

    Args:
        count: how many are tried: numbers of the size of second moments, the same ones every time.
    """
    rng = np.random.default_rng(0)
    numbers = np.exp(rng.uniform(np.log(1e-14), np.log(1e-2), count)).astype(np.float32)
    exact = np.sqrt(numbers.astype(np.float64)).astype(np.float32)  # 53 bits are enough: rounding twice is harmless
    return float(np.mean(torch.from_numpy(numbers).sqrt().numpy() != exact))
