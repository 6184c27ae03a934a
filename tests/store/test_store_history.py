"""Terms, forks, parents and tags of a store; the messages when it is opened."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import ckptstore
from tests.store.states import fill


class TestHistory:
    def test_latest_and_refs(self, url: str) -> None:
        store = fill(url, 1, 2, 10)
        assert store.checkpoint().ref == "10@1"
        assert store.load(2)["step"] == 2
        assert store.load("2@1")["step"] == 2
        assert [c.ref for c in store.checkpoints()] == ["1@1", "2@1", "10@1"]
        with pytest.raises(ckptstore.CheckpointNotFoundError):
            store.load(3)
        with pytest.raises(ckptstore.UsageError):
            store.load("yesterday")

    def test_resume_continues_from_the_parent(self, url: str) -> None:
        fill(url, 1, 2)
        with ckptstore.open(url).writer() as writer:
            assert writer.parent is not None
            assert writer.parent.ref == "2@1"
            assert writer.term == 2
            writer.save({"step": 3}, step=3)
        assert ckptstore.open(url).checkpoint().ref == "3@2"

    def test_rollback_forks(self, url: str) -> None:
        fill(url, 1, 2, 3)
        store = fill(url, 2, parent="1")
        assert [c.ref for c in store.checkpoints()] == ["1@1", "2@1", "3@1", "2@2"]
        assert store.checkpoint().ref == "2@2"
        assert store.load("3@1")["step"] == 3
        assert [(t.term, t.parent) for t in store.terms()] == [(1, None), (2, "1@1")]

    def test_empty_term_means_its_parent(self, url: str) -> None:
        fill(url, 1, 2, 3)
        with ckptstore.open(url).writer(parent="2"):
            pass
        assert ckptstore.open(url).checkpoint().ref == "2@1"

    def test_steps_must_go_up(self, url: str) -> None:
        store = fill(url, 5)
        with store.writer() as writer:
            for step in (5, 4, 0):
                with pytest.raises(ckptstore.StepOrderError, match="not above step 5"):
                    writer.save({}, step=step)
            writer.save({}, step=9)
            with pytest.raises(ckptstore.StepOrderError, match="step 7 is not above step 9, which was saved in term 2"):
                writer.save({}, step=7)
            with pytest.raises(ckptstore.StepOrderError, match="exists already"):
                writer.save({}, step=9)
            for bad in (-1, 1.5, True, "6", 2**60):
                with pytest.raises(ckptstore.StepOrderError):
                    writer.save({}, step=bad)  # type: ignore[arg-type]
        assert store.checkpoint().ref == "9@2"

    def test_an_older_writer_is_fenced(self, url: str) -> None:
        store = ckptstore.open(url)
        old = store.writer()
        old.save({"who": "old"}, step=1)
        new = store.writer()
        with pytest.raises(ckptstore.FencedError):
            old.save({"who": "old"}, step=2)
        new.save({"who": "new"}, step=2)
        with pytest.raises(ckptstore.FencedError):
            old.save({"who": "old"}, step=3)
        old.close()
        new.close()
        assert store.load(2) == {"who": "new"}
        assert ckptstore.verify(store).ok

    def test_a_parent_that_does_not_exist(self, url: str) -> None:
        store = fill(url, 1)
        with pytest.raises(ckptstore.CheckpointNotFoundError):
            store.writer(parent="99")
        assert len(store.terms()) == 1


class TestOpening:
    def test_reading_what_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ckptstore.StoreNotFoundError, match="nowhere"):
            ckptstore.open(tmp_path / "nowhere").load()
        with pytest.raises(ckptstore.StoreNotFoundError):
            ckptstore.open(tmp_path / "nowhere", create=False)
        assert not (tmp_path / "nowhere").exists()

    def test_a_folder_with_other_things_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("important")
        with pytest.raises(ckptstore.UsageError, match=r"thesis\.tex"):
            ckptstore.open(tmp_path).writer()
        assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]

    def test_unknown_scheme(self) -> None:
        with pytest.raises(ckptstore.UsageError, match="gopher"):
            ckptstore.open("gopher://x")


def test_resuming_elsewhere_warns(url: str) -> None:
    fill(url, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(ckptstore.DeterminismWarning, match=f"threads: {threads} -> {threads + 1}"):
            ckptstore.open(url).writer().close()
    finally:
        torch.set_num_threads(threads)


def test_describing_many_tagged_checkpoints_is_not_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.formats.history.catalog import Catalog
    from ckptstore.formats.history.records import CheckpointEntry
    from ckptstore.log.checkpoint_info import describe_all

    nodes = [(1, step) for step in range(20_000)]
    catalog = Catalog(
        checkpoints={node: CheckpointEntry(*node, "0" * 32, 0.0, 0, 0) for node in nodes},
        tags={f"step-{step}": (1, step) for step in range(20_000)},
    )
    began = time.thread_time()
    infos = describe_all(catalog)
    assert time.thread_time() - began < 5  # 400 million comparisons take longer
    assert infos[7].tags == ("step-7",)


def test_tags(url: str) -> None:
    store = ckptstore.open(url)
    with store.writer() as writer:
        writer.save({"n": 1}, step=1)
        writer.save({"n": 2}, step=2)
        writer.tag("best", 1)
    assert store.load("tag:best") == {"n": 1}
    assert store.checkpoint("tag:best").tags == ("best",)
