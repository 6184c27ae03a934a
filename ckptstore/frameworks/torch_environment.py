"""Describe the settings that determine a training run's bits. They are recorded per term and compared on resume.

Measured on torch 2.13: results differ from the first step with the thread count, the CPU capability (AVX2 or AVX-512),
MKL's reproducibility mode and oneDNN. The optimizer alone does not depend on them.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

__all__ = ["describe_devices", "describe_environment", "inexact_roots"]


def describe_environment() -> dict[str, str]:
    """Name -> value of every visible setting that is known to change bits."""
    found = {
        "torch": str(torch.__version__),  # a subclass of str, which states refuse
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
    """The devices that torch finds: ``threads``, ``devices`` (number of GPUs), and ``gpu``, the name of the first."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "threads": torch.get_num_threads(),
        "devices": devices,
        "gpu": torch.cuda.get_device_name() if devices else None,
    }


def inexact_roots(count: int = 1 << 16) -> float:
    """The share (0 to 1) of fp32 square roots that torch does not round to nearest on this processor.

    Args:
        count: how many numbers to try. They are as large as second moments, and the same in every call.
    """
    rng = np.random.default_rng(0)
    numbers = np.exp(rng.uniform(np.log(1e-14), np.log(1e-2), count)).astype(np.float32)
    exact = np.sqrt(numbers.astype(np.float64)).astype(np.float32)  # 53 bits suffice: rounding twice is exact
    return float(np.mean(torch.from_numpy(numbers).sqrt().numpy() != exact))
