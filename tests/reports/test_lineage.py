"""The lines of terms: which term continues from which."""

from __future__ import annotations

import ckptstore
from ckptstore.reports.lineage import lineage


def fill(name: str, *terms: tuple[str | None, tuple[int, ...]]) -> ckptstore.Store:
    store = ckptstore.open(f"memory://{name}", create=True)
    for parent, steps in terms:
        with store.writer(parent=parent, poll_seconds=None) as writer:
            for step in steps:
                writer.save({"step": step}, step=step)
    return store


def test_forks_roots_and_empty_terms() -> None:
    store = fill("lineage", ("latest", (1, 2, 3)), ("2@1", ()), ("2@1", (3, 9)), (None, (5,)), ("9@3", ()))
    found = lineage(store.journal)
    assert [info.ref for info in found.checkpoints] == ["5@4", "9@3", "3@3", "3@1", "2@1", "1@1"]
    assert found.parents == {
        "5@4": None,
        "9@3": "3@3",
        "3@3": "2@1",
        "3@1": "2@1",
        "2@1": "1@1",
        "1@1": None,
    }
    assert [(term.term, term.parent, term.checkpoints) for term in found.terms] == [
        (5, "9@3", 0),
        (4, None, 1),
        (3, "2@1", 2),
        (2, "2@1", 0),
        (1, None, 3),
    ]
    assert found.latest == "9@3"
    assert found.damage == ()


def test_an_empty_store() -> None:
    found = lineage(fill("lineage-empty").journal)
    assert (found.checkpoints, found.parents, found.terms, found.latest) == ((), {}, (), None)


def test_it_agrees_with_the_store() -> None:
    store = fill("lineage-same", ("latest", (1, 2)), ("1@1", (5,)))
    found = lineage(store.journal)
    assert list(found.checkpoints) == store.checkpoints()[::-1]
    assert list(found.terms) == store.terms()[::-1]
    assert found.latest == store.checkpoint("latest").ref
