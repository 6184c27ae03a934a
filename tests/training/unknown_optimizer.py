"""An optimizer that `optim.KINDS` will never have: torch's own may be added to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["UnknownOptimizer"]


class UnknownOptimizer(torch.optim.Optimizer):
    """Descent along the sign of the momentum. It keeps ``step`` and ``exp_avg``, as optimizers of torch do."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step with the gradients."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kept = self.state[parameter]
                if not kept:
                    kept.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter))
                kept["step"] += 1
                kept["exp_avg"].lerp_(parameter.grad, 0.1)
                parameter.sub_(kept["exp_avg"].sign(), alpha=group["lr"])
