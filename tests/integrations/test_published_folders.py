"""Published folders in the hands of transformers, with what the Trainer's callback and folders of a base model give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptstore
from tests.following.published import example

transformers = pytest.importorskip("transformers")


def llama(*, tied: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["hf", "slime"])
def test_from_pretrained_of_a_full_and_a_module_that_applies_the_deltas(
    tmp_path: Path, tied: bool, layout: str
) -> None:
    model = llama(tied=tied)
    model.config.save_pretrained(tmp_path / "base")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store, place = ckptstore.open(tmp_path / "run"), tmp_path / "published"
    weights = None
    with (
        store.writer(threads=1, poll_seconds=None) as writer,
        store.publish(
            place,
            layout=layout,
            files=tmp_path / "base",
            max_shard_bytes=10_000,
            full_every=3,  # type: ignore[arg-type]
        ) as publisher,
    ):
        for step in range(1, 5):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            writer.save({"model": model.state_dict()}, step)
            version = publisher.look()
            assert version is not None
            if version.base is None:
                assert len(list((place / version.folder).glob("*.safetensors"))) > 2
                found = transformers.AutoModelForCausalLM.from_pretrained(place / version.folder, dtype=torch.bfloat16)
                weights = weights or example("serve_published").PublishedWeights(place, found)
                assert same(found, model)
            assert weights is not None
            assert weights.update()
            assert same(weights.module, model)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
