"""Labels of a checkpoint at its save: metadata and tags, in the record that commits it."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import DiffOptions
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import slot_of
from tests.write.trainer import Trainer

SAID = {
    "loss": 2.5,
    "data": {"epoch": 3, "files": ["a", "b"]},
    "note": "größer",
    "best": True,
    "none": None,
    "": 1 << 70,
}


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


def commits(store: ckptstore.Store) -> int:
    """Slots of the log, an OPEN's among them."""
    return sum(slot_of(key) is not None for key in store.backend.list("log/"))


def test_metadata_and_tags_come_back(store: ckptstore.Store) -> None:
    with store.writer() as writer:
        info = writer.save({"w": np.ones(5)}, 1, metadata=SAID, tags=["first", "best"])
        assert (info.metadata, info.tags, info.extra) == (SAID, ("best", "first"), {})
        done = writer.save_async({"w": np.ones(5)}, 2, metadata={"loss": 2.25}, tags="best").result()
        assert (done.metadata, done.tags) == ({"loss": 2.25}, ("best",))
        assert writer.save({"w": np.ones(5)}, 3, metadata={}).metadata == {}
    assert commits(store) == 5, "one record each, and one that the writer was closed"
    assert [info.metadata for info in store.checkpoints()] == [SAID, {"loss": 2.25}, {}]
    assert [info.tags for info in store.checkpoints()] == [("first",), ("best",), ()]
    assert store.checkpoint("tag:first").metadata == SAID


def test_numbers_without_a_json_form(store: ckptstore.Store) -> None:
    said = {"loss": torch.tensor(0.5), "step": np.int32(3), "nan": math.nan, "far": (-math.inf, np.float32(math.inf))}
    with store.writer() as writer:
        writer.save({"w": np.ones(5)}, 1, metadata=said)
    found = dict(store.checkpoint(1).metadata)
    assert math.isnan(found.pop("nan"))
    assert found == {"loss": 0.5, "step": 3, "far": [-math.inf, math.inf]}
    assert [type(found[name]) for name in ("loss", "step")] == [float, int]


DEEP: Any = "end"
for _ in range(40):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([("loss", 1)], "metadata: list; pass a mapping"),
        ({"a": {"b": [1, object()]}}, r"^metadata\['a'\]\['b'\]\[1\]: object is not a JSON value"),
        ({"w": np.ones(3)}, r"^metadata\['w'\]: ndarray is not a JSON value"),
        ({"b": b"bytes"}, r"^metadata\['b'\]: bytes is not a JSON value"),
        ({1: 2}, r"^metadata: key 1; a name is a string"),
        ({"a": {"$float": "nan"}}, r"^metadata\['a'\]: key '\$float'"),
        ({"a": DEEP}, "nested deeper than 32"),
        ({"a": "x" * 16_400}, r"^metadata: 16,408 bytes of JSON, at most 16,384 are allowed"),
    ],
)
def test_values_that_cannot_be_stored_are_refused_before_anything_is_written(
    store: ckptstore.Store, said: Any, why: str
) -> None:
    with store.writer() as writer:
        for save in (writer.save, writer.save_async):
            with pytest.raises(ckptstore.UsageError, match=why):
                save({"w": np.ones(5)}, 1, metadata=said)
            with pytest.raises(ckptstore.UsageError, match="'no tag' is not a tag name"):
                save({"w": np.ones(5)}, 1, tags=["fine", "no tag"])
        writer.save({"w": np.ones(5)}, 1, metadata={"a": "x" * 16_376})
    assert store.backend.list("seg/") == [f"seg/0000000001/{store.checkpoint(1).segments[0]}.safetensors"]


@pytest.mark.parametrize("wait", [False, True])
def test_steps_of_a_batch_have_their_own_in_its_record(tmp_path: Path, wait: bool) -> None:
    trainer, store = Trainer(), ckptstore.open(tmp_path / "store")
    with store.writer(diffs=DiffOptions(batch=100, seconds=None), poll_seconds=None) as writer:
        for step in range(1, 5):
            trainer.train()
            how = {"updates": trainer.updates(), "metadata": {"loss": 1 / step}, "tags": ["newest", f"step-{step}"]}
            pending = writer.save_async(trainer.state(), step, **how)
        if wait:
            assert pending.result().tags == ("newest", "step-4")
        else:
            trainer.train()
            writer.save(trainer.state(), 5, updates=trainer.updates(), metadata={"loss": 0.2}, tags="newest")
    infos = store.checkpoints()
    assert [info.kind for info in infos] == ["full", *["gradient"] * (len(infos) - 1)]
    assert [info.metadata for info in infos] == [{"loss": 1 / info.step} for info in infos]
    assert store.checkpoint("tag:newest").step == len(infos)
    assert [store.checkpoint(f"tag:step-{step}").step for step in range(1, 5)] == [1, 2, 3, 4]
    assert commits(store) == 4, "OPEN, the full, the batch, the term closed"


def test_of_summed_steps_the_last_represents_all(tmp_path: Path) -> None:
    trainer, store = Trainer(), ckptstore.open(tmp_path / "store")
    with store.writer(diffs=DiffOptions(batch=3, seconds=None, accumulate="sum"), poll_seconds=None) as writer:
        for step in range(1, 5):
            trainer.train(0.02)
            how = {"updates": trainer.updates(), "metadata": {"step": step}, "tags": f"step-{step}"}
            writer.save_async(trainer.state(), step, **how)
    assert [info.metadata for info in store.checkpoints()] == [{"step": 1}, {"step": 4}]
    assert [store.checkpoint(f"tag:step-{step}").step for step in range(1, 5)] == [1, 4, 4, 4]


def test_it_survives_folds(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 140):
            writer.save({"lr": 0.5}, step, metadata={"step": step}, tags="odd" if step % 2 else ())
    assert store.backend.list("fold/")
    catalog: Catalog = ckptstore.open(store.url).view().catalog
    assert len(catalog.checkpoints) == 139
    infos = store.checkpoints()
    assert [info.metadata for info in infos] == [{"step": step} for step in range(1, 140)]
    assert [info.step for info in infos if info.tags] == [139]
