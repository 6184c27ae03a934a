"""The long run, in short: a trainer, upkeep and two readers, each a process, on a folder and on an object server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from tests.forms import long_only, short_or
from tools.long_run.plotting import plot
from tools.long_run.promised import Rules, Saved, digest, promised
from tools.long_run.supervising import check, supervise
from tools.objects.server import Server, serving

RULES = Rules(last=5, every=40, best=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("objects")) as found:
        yield found


@pytest.mark.slow
def test_on_a_folder(tmp_path: Path) -> None:
    steps, out = short_or(120, 2000), tmp_path / "out"
    out.mkdir()
    seen = supervise(str(tmp_path / "store"), out, steps=steps, seconds=None, rules=RULES, pause=0.3)
    assert seen["steps"] == steps
    assert seen["checkpoints"] < 5 + 2 + 2 + steps // 40 + steps // 777
    assert seen["restored_by_readers"] > 2
    assert seen["rounds_of_upkeep"] > 0
    assert seen["most_segments"] < 30 + steps // 10  # the checkpoints of `every` need their chains
    plot(out / "sizes.csv", out / "sizes.png")
    assert (out / "sizes.png").stat().st_size > 5000
    # The check can fail: one wrong bit in the trainer's records, one checkpoint too few.
    lines = [json.loads(line) for line in (out / "saved.jsonl").read_text().splitlines()]
    for change in ({"digest": "0" * 64}, {"tag": "another"}):
        (out / "saved.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*lines[:-1], lines[-1] | change]))
        with pytest.raises(AssertionError):
            check(str(tmp_path / "store"), out, RULES)
    (out / "saved.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    ckptstore.open(tmp_path / "store").retire(steps - 1, take_over=True)
    with pytest.raises(AssertionError, match=rf"gone: \[{steps - 1}\]"):
        check(str(tmp_path / "store"), out, RULES)


@long_only
def test_on_objects(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    steps = 400
    seen = supervise(server.url(), tmp_path, steps=steps, seconds=None, rules=RULES, pause=0.5)
    assert seen["steps"] == steps
    assert seen["kinds_before_the_last_compaction"]["gradient"] > 2


def test_the_promised_steps() -> None:
    saved = [Saved(step, "", float(abs(step - 7)), "mine" if step == 2 else None) for step in range(1, 21)]
    assert promised(saved, Rules(last=2, every=8, best=3)) == {2, 6, 7, 8, 16, 19, 20}


def test_a_digest_tells_every_bit() -> None:
    import numpy as np

    state = {"a": {"b": np.arange(4, dtype="f4")}, "n": [1, 2.0, "x"]}
    other = {"a": {"b": np.arange(4, dtype="f4")}, "n": [1, 2.0, "x"]}
    assert digest(state) == digest(other)
    other["a"]["b"][3] = np.nextafter(np.float32(3), np.float32(4))  # type: ignore[index]
    assert digest(state) != digest(other)
    assert digest({"n": 1}) != digest({"n": 1.0})
