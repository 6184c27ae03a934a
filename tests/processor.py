"""Differences between processors that tests must not report as errors."""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["wrong_roots"]


@functools.cache
def wrong_roots() -> float:
    """Fraction of square roots that torch's tensor operations round wrongly on this processor; 0 where they are rare.

    MKL computes the roots: nearly all are right on Intel processors, for which the tests' limits are set, and five in
    six on AMD processors.
    """
    import torch

    numbers = torch.rand(50_000, generator=torch.Generator().manual_seed(0))
    wrong = float(np.mean(torch.sqrt(numbers).numpy() != np.sqrt(numbers.numpy())))
    return wrong if wrong > 0.1 else 0.0
