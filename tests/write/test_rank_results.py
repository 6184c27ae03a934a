"""Each rank gets the checkpoint that was saved. Its segments are those of this rank, and the one with the tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import CheckpointInfo, DiffOptions
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from tests.write.rank_states import PATIENT, state
from tests.write.rank_threads import as_ranks
from tests.write.test_rank_diffs import OPTIONS, trainer

WAYS: dict[str, dict[str, Any]] = {
    "fulls": {},
    "deltas": {"deltas": 1},
    "step diffs, two in a batch": {"diffs": DiffOptions(batch=2, seconds=None)},
    "step diffs, summed": {"diffs": DiffOptions(batch=2, seconds=None, accumulate="sum")},
}
STEPS = 5


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_gets_the_segments_that_it_has_written_and_rank_0_gets_all(tmp_path: Path, way: str) -> None:
    def work(group: Group) -> list[CheckpointInfo]:
        model = trainer()
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, **WAYS[way]) as writer:
            pending = []
            for step in range(1, STEPS + 1):
                model.train()
                updates = model.updates() if "diffs" in WAYS[way] else None
                pending.append(writer.save_async(model.state(), step, updates=updates))
            writer.wait()
            return [one.result() for one in pending]

    found = as_ranks(3, work)
    store = ckptstore.open(tmp_path)
    for infos in zip(*found, strict=True):
        whole = store.checkpoint(infos[0].ref)
        documents = {entry.id: document for entry, document in store.describe(whole.ref)}
        assert infos[0] == whole
        for rank, info in enumerate(infos[1:], 1):
            own = [one for one in whole.segments if (rank in dict(documents[one].extra.get("rank", ())).values())]
            assert own, "each rank has a share of this state"
            assert info.segments == (whole.segments[0], *own)
            assert replace(info, segments=whole.segments) == whole


class Posted(LocalMailbox):
    """Notes the bytes of the results that rank 0 posts."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[int] = []

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/verdict"):
            self.results.append(len(value))
        super().set(key, value)


def test_the_result_of_a_step_is_as_long_for_many_ranks_as_for_few(tmp_path: Path) -> None:
    """Every rank reads it: names of all segments in it would be bytes by the square of the ranks."""

    def lengths(size: int) -> int:
        box = Posted()

        def work(group: Group) -> None:
            with ckptstore.open(tmp_path / str(size)).writer(group=group, ranks=PATIENT) as writer:
                writer.save(state(group.rank), 1)

        assert as_ranks(size, work, box) == [None] * size
        return max(box.results)

    assert lengths(12) < lengths(2) + 32
