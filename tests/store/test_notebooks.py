"""The display in a notebook, a debugger and an interactive session: tables, never a script, never a secret."""

from __future__ import annotations

import copy
import shutil
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from tools.objects.server import KEY, SECRET

HOSTILE = "<script>alert('x')</script>"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style"}

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(thing: Any) -> str:
    """The text of its HTML, which holds nothing but a table."""
    parser = _Tags()
    parser.feed(thing._repr_html_())
    assert parser.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    return parser.text


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 14):
            writer.save({"weight": np.full(100, float(step))}, step, metadata={HOSTILE: HOSTILE, "loss": 1 / step})
    return store


def test_stores_checkpoints_and_reports_are_tables(store: ckptstore.Store, tmp_path: Path) -> None:
    text = shown(store)
    assert "13 checkpoints" in text
    assert "13@1" in text
    assert "3@1" not in text.replace("13@1", "")  # no more than the last ten
    assert HOSTILE in text  # as text
    checkpoint = store.checkpoint()
    assert "stored" in shown(checkpoint)
    assert HOSTILE in shown(checkpoint)
    assert "(13 in all)" in shown(store.verify())
    assert "13@1" in shown(store.stats())
    assert "Share(" not in shown(store.stats())  # the words of a cell
    assert "checkpoints 13, nbytes " in shown(store.stats())
    assert time.strftime("%Y-%m-%d", time.localtime(checkpoint.time)) in shown(checkpoint)
    assert str(checkpoint.time) not in shown(checkpoint)
    assert "weight" in shown(store.compare(1, 2)[0])
    (found,) = ckptstore.find_runs(tmp_path).runs
    assert "4194304" in shown(replace(found, pid=4194304, nbytes=7654321))  # the name of a process is not an amount
    assert "7,654,321" in shown(replace(found, pid=4194304, nbytes=7654321))
    assert shown(store.terms()[0])
    assert shown(store.explain())
    assert shown(store.statistics(1, "weight"))
    assert "there is no checkpoint store here" in shown(ckptstore.open(tmp_path / "none"))
    assert not hasattr(checkpoint, "__dict__")  # slots: a catalog has many of them


def test_writers_and_saves_say_where_they_are(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        assert repr(writer) == f"<Writer of {store.url!r}: term 2, from 13@1>"
        pending = writer.save_async({"weight": np.ones(3)}, 14)
        pending.result()
        assert repr(pending) == "<PendingSave of step 14: durable>"
    assert repr(store) == f"ckptstore.open({store.url!r})"


def test_a_checkpointer_says_where_it_is(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from ckptstore.training import Checkpointer

    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path / "run", model=model, strategy="full", signals=False) as checkpointer:
        assert repr(checkpointer) == f"<Checkpointer of {str(tmp_path / 'run')!r}: full, not open yet>"
        checkpointer.resume()
        checkpointer.step()
        assert "term 1, step 1>" in repr(checkpointer)


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    options = {"key": KEY, "secret": SECRET, "endpoint_url": "http://127.0.0.1:9", "config_kwargs": {}}
    store = ckptstore.open("s3://bucket/run", storage_options=options)
    backend = store.backend
    inside = vars(backend)
    told = [repr(thing) for thing in (store, backend, inside, vars(store), *inside.values())]
    told += [repr(vars(thing)) for thing in inside.values() if hasattr(thing, "__dict__")]
    for text in told:
        assert SECRET not in text
        assert KEY not in text
    assert dict(backend.storage_options) == options  # an agent receives them


def test_progress_is_a_line_on_stderr(
    store: ckptstore.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.verify(progress=True)
    line = capsys.readouterr()
    assert line.out == ""
    assert line.err.startswith("\r")
    assert line.err.endswith("MiB (100%)\n")
    store.load(1, progress=True)
    store.copy(tmp_path / "copy", progress=True)
    store.export(1, tmp_path / "one.safetensors", progress=True)
    store.gc(progress=True)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"weight": np.ones(3)}, 14, progress=True)
    assert capsys.readouterr().err.count("(100%)\n") >= 4
    store.verify(progress=False)
    assert capsys.readouterr().err == ""


def test_results_of_changes_are_shown(store: ckptstore.Store) -> None:
    lineage = store.lineage(3)
    assert repr(lineage) == "<Lineage: 3 of 13 checkpoints, 1 term, latest 13@1>"
    assert "(3 in all)" in shown(lineage) or "13@1" in shown(lineage)
    compacted = store.compact(dry_run=True)
    assert repr(compacted).startswith("<CompactReport: ")
    assert "13 checkpoints would be kept" in shown(compacted)
    store.retire(1, take_over=True)
    collected = store.gc()
    assert repr(collected).startswith("<Collected: 1 segment, ")
    assert "nbytes" in shown(collected)
    assert "checkpoints" in shown(ckptstore.Lag(checkpoints=2))


def test_a_save_is_waited_for_as_long_as_a_time_is(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        pending = writer.save_async({"weight": np.ones(3)}, 14)
        for nonsense in (float("nan"), "soon"):
            with pytest.raises(ckptstore.UsageError, match="timeout"):
                pending.result(timeout=nonsense)  # type: ignore[arg-type]
        assert pending.result(timeout=60).step == 14
        assert pending.result(timeout=-1).step == 14


def test_a_store_whose_log_is_lost_is_not_shown_as_empty(store: ckptstore.Store, tmp_path: Path) -> None:
    for part in ("log", "fold"):
        shutil.rmtree(tmp_path / "run" / part, ignore_errors=True)
    text = shown(ckptstore.open(tmp_path / "run"))
    assert "there are segments of term 1, but the log ends in term 0" in text
    assert "ckpt repair" in text


def test_a_slot_that_is_lost_is_shown(store: ckptstore.Store, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run" / "fold", ignore_errors=True)
    (tmp_path / "run" / "log" / f"{5:020}").unlink()
    text = shown(ckptstore.open(tmp_path / "run"))
    assert "1 log slot is damaged or missing" in text
    assert "13@1" in text


def test_lists_are_tables_and_so_are_their_slices(store: ckptstore.Store) -> None:
    infos = store.checkpoints()
    assert isinstance(infos, list)
    assert infos == list(infos)
    for some in (infos, infos[:3], infos[1:4][:3]):
        assert shown(some).startswith(f"{len(some)} checkpoints")
        assert repr(some).splitlines()[0] == f"{len(some)} checkpoints"
        assert len(repr(some).splitlines()) == len(some) + 2
        assert HOSTILE in shown(some)
    assert [one.ref for one in infos[::-1][:2]] == ["13@1", "12@1"]
    assert infos[-1].ref == "13@1"
    assert infos[:1].append is not None
    assert repr(infos[:0]) == "0 checkpoints"
    assert copy.copy(infos) == copy.deepcopy(infos) == infos
    assert repr(copy.copy(infos)) == repr(infos)
    assert "1 term" in shown(store.terms())
    changed = store.compare(1, 2)
    assert "max_abs" in shown(changed)
    assert "weight" in repr(changed[:1])
    assert "0 differences" in shown(store.compare_state(1, 2))


def test_of_a_long_list_the_ends_are_shown(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "long")
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 121):
            writer.save({"x": step}, step)
    infos = store.checkpoints()
    lines = repr(infos).splitlines()
    assert len(lines) == 2 + 50 + 1
    assert lines[0] == "120 checkpoints"
    assert "... and 70 more" in lines[27]
    assert lines[26].split()[0] == "25@1"
    assert lines[28].split()[0] == "96@1"
    assert "120@1" in shown(infos)


def test_a_checkpoint_taken_apart_is_a_table(store: ckptstore.Store) -> None:
    found = store.inspect(3)
    assert repr(found).startswith("<CheckpointDescription of 3@1: 1 tensor, 800 B, stored in ")
    assert repr(found).endswith("; restored from 3@1 full>")
    assert "F64" in shown(found)
    assert "weight" in shown(found)
    assert "weight" in shown(found.tensors[0])
    assert "full" in shown(found.chain[0])
