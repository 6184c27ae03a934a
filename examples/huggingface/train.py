"""Train a small GPT-2 with Hugging Face's Trainer. Kill it at any time and start it again: it continues.

pip install 'ckptstore[torch,hf]'
python train.py runs/gpt --steps 40
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ckptstore.integrations.huggingface import CkptstoreCallback


class Numbers(torch.utils.data.Dataset):
    """Sequences that count up from a random number."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = int(torch.randint(0, 48, (), generator=torch.Generator().manual_seed(index)))
        tokens = torch.arange(first, first + 16)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("store")
    options.add_argument("--steps", type=int, default=40)
    given = options.parse_args()

    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir=f"{given.store}-output",
        max_steps=given.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
    )
    callback = CkptstoreCallback(given.store)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Numbers(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.latest())


if __name__ == "__main__":
    main()
