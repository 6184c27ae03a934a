"""A small textbook GPT over bytes, without any code for checkpoints."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tools.demo.config import DemoConfig

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then a feed-forward layer, both with dropout."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(batch, context, width)`` to the same shape."""
        batch, context, width = hidden.shape
        dropout = self.dropout if self.training else 0.0
        joined = self.attention_in(self.attention_norm(hidden))
        query, key, value = joined.view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        attended = self.attention_out(attended.transpose(1, 2).reshape(batch, context, width))
        hidden = hidden + functional.dropout(attended, dropout)
        fed = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(hidden))))
        return hidden + functional.dropout(fed, dropout)


class GPT(nn.Module):
    """Byte-level decoder-only transformer; with ``config.tied`` the head's weight *is* the embedding's."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_initialize)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """int64 ``(batch, context)`` to logits ``(batch, context, 256)``."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = functional.dropout(self.tokens(inputs) + self.positions(places), self.dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def _initialize(module: nn.Module) -> None:
    """GPT-2's initialization: normal with deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
