"""The baselines, by name."""

from __future__ import annotations

from typing import Final

from tools.baselines.checkfreq import CheckFreqLike
from tools.baselines.dcp import DcpAsync, DcpSync
from tools.baselines.differences import NaiveDifferences, NaiveTopK
from tools.baselines.gemini import GeminiLike
from tools.baselines.gpm import GpmLike
from tools.baselines.strategy import Strategy
from tools.baselines.torch_save import TorchSave

__all__ = ["BASELINES"]

BASELINES: Final[dict[str, type[Strategy]]] = {
    "torch.save": TorchSave,
    "dcp-sync": DcpSync,
    "dcp-async": DcpAsync,
    "checkfreq": CheckFreqLike,
    "gemini": GeminiLike,
    "gpm": GpmLike,
    "naive-diff": NaiveDifferences,
    "naive-topk": NaiveTopK,
}
"""In the order of the tables. `tools.bench.training.training_cases.BASELINES` has the labels without torch."""
