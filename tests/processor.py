"""What differs between processors, and tests must not take for a mistake."""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["wrong_roots"]


@functools.cache
def wrong_roots() -> float:
    """Fraction of square roots that torch's tensor operations round wrongly on this processor.

    They are MKL's: nearly all are right on Intel's processors, five in six on AMD's.
    """
    import torch

    numbers = torch.rand(50_000, generator=torch.Generator().manual_seed(0))
    return float(np.mean(torch.sqrt(numbers).numpy() != np.sqrt(numbers.numpy())))
