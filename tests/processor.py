"""What differs between processors, and tests must not take for a mistake."""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["wrong_roots"]


@functools.cache
def wrong_roots() -> float:
    """Fraction of square roots that torch's tensor operations round wrongly on this processor, 0 where they are rare.

    They are MKL's: nearly all are right on Intel's processors, for which the limits of tests are made, five in six on
    AMD's.
    """
    import torch

    numbers = torch.rand(50_000, generator=torch.Generator().manual_seed(0))
    wrong = float(np.mean(torch.sqrt(numbers).numpy() != np.sqrt(numbers.numpy())))
    return wrong if wrong > 0.1 else 0.0
