"""Train a small network with Accelerate. Kill it at any time and start it again: it continues.

pip install 'ckptstore[torch,accelerate]'
python train.py runs/net --epochs 3
torchrun --nproc-per-node 2 train.py runs/net-of-two --epochs 3
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ckptstore.integrations.accelerate import checkpointer


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("store")
    options.add_argument("--epochs", type=int, default=3)
    given = options.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    inputs = torch.randn(256, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(16, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    with checkpointer(accelerator, given.store, model, optimizer, loader, schedule) as saved:
        saved.resume()
        for epoch in range(saved.loader.iteration, given.epochs):
            for inputs, wanted in saved.loader:
                with accelerator.accumulate(model):
                    loss = (model(inputs) - wanted).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                saved.step(metrics={"loss": loss})
            accelerator.print(f"epoch {epoch}: step {saved.steps_done}, loss {loss.item():.6f}")
    weights = b"".join(one.detach().cpu().numpy().tobytes() for one in model.parameters())
    accelerator.print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
