"""A small GPT on bytes of text, like nanoGPT: every step is saved."""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ckptstore.training import Checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=2)
options = parser.parse_args()

torch.manual_seed(1337)
torch.set_num_threads(1)
context, batch = 32, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


data = torch.from_numpy(np.frombuffer(options.text.read_bytes(), np.uint8).astype(np.int64))


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - context - 1, (batch,))
    return (
        torch.stack([data[i : i + context] for i in starts]),
        torch.stack([data[i + 1 : i + 1 + context] for i in starts]),
    )


model = GPT(options.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

checkpointer = Checkpointer(options.out, model=model, optimizer=optimizer, scheduler=scheduler, strategy="gradient")

for step in range(checkpointer.resume(), options.steps):
    for _ in range(options.accumulate):
        x, y = get_batch()
        loss = model(x, y) / options.accumulate
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    checkpointer.step(metrics={"loss": loss})
    print(f"{step} {loss.item().hex()}", flush=True)
