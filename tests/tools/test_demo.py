"""The demo's parts, and one very small run of the whole with real processes and real kills."""

from __future__ import annotations

import copy
import io
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests import warmth
from tests.forms import LONG, short_or
from tools.demo.config import FULL, QUICK, DemoConfig
from tools.demo.corpus import CorpusError, read_corpus
from tools.demo.events import Event
from tools.demo.fingerprint import PARTS, Leaf, compare, leaves, part_hashes, read_leaves, write_leaves
from tools.demo.killing import POINTS_IN_COMMIT, Kill, plan_kills
from tools.demo.output import OutputFolder
from tools.demo.supervisor import Attempt, DemoError, Strike, strikes

TINY = DemoConfig(
    steps=16,
    kills=2,
    kills_in_commit=1,
    samples=3,
    side_by_side=True,
    corpus_bytes=4096,
    batch=4,
    context=32,
    width=16,
    layers=1,
    heads=2,
)
RUN = replace(TINY, kills=short_or(1, 2))
"""The configuration of the whole run; `make demo` is a longer one, which CI has run before."""


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """`Training` sets global RNGs and the thread count; restore the old ones."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads(), random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    torch.set_num_threads(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])
    torch.set_rng_state(before[3])


def total(differences: list[Any]) -> dict[str, int]:
    return {part.part: part.differing_bits for part in differences if not part.same}


class TestConfig:
    def test_survives_the_file_that_workers_read(self, tmp_path: Path) -> None:
        QUICK.write(tmp_path / "config.json")
        assert DemoConfig.read(tmp_path / "config.json") == QUICK

    @pytest.mark.parametrize("config", [FULL, QUICK, TINY, replace(TINY, tied=False)])
    def test_counts_the_models_parameters(self, config: DemoConfig) -> None:
        pytest.importorskip("torch")
        from tools.demo.model import GPT

        assert config.parameters == sum(parameter.numel() for parameter in GPT(config).parameters())

    def test_stays_within_the_disk_budget(self) -> None:
        assert (FULL.steps + FULL.kills) * FULL.checkpoint_bytes < 3e9
        assert (QUICK.steps + QUICK.kills) * QUICK.checkpoint_bytes < 600e6

    @pytest.mark.parametrize("wrong", [{"kills_in_commit": 9}, {"steps": 5}, {"heads": 3}])
    def test_refuses_what_cannot_run(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"\d"):
            replace(TINY, **wrong)


class TestCorpus:
    def test_is_the_librarys_own_text_and_always_the_same(self) -> None:
        first, second = read_corpus(10_000), read_corpus(10_000)
        assert first.identity() == second.identity()
        assert first.text.size == 10_000
        assert b"import" in first.text.tobytes()

    def test_reads_files_by_name_and_leaves_out_what_is_installed(self, tmp_path: Path) -> None:
        for name, text in {"b.py": "1", "a.py": "0", "a/z.py": "2", "site-packages/x.py": "9", "c.txt": "8"}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        assert read_corpus(3, tmp_path).text.tobytes() == b"012"
        with pytest.raises(CorpusError, match="only 3 bytes"):
            read_corpus(4, tmp_path)

    def test_refuses_another_text(self) -> None:
        with pytest.raises(CorpusError, match="refusing to resume"):
            read_corpus(1000).require(read_corpus(1001).identity())


class TestBits:
    @pytest.mark.parametrize(
        ("left", "right", "bits"),
        [
            (0.0, -0.0, 1),
            (np.float32(0), np.float32(-0.0), 1),
            (np.array([1.0, np.nan], np.float32), np.array([1.0, np.nan], np.float32), 0),
            (np.array([0x7FC00000, 0], np.uint32).view(np.float32), np.array([0x7FC00001, 0], np.uint32).view("f4"), 1),
            (np.zeros(3, np.int32), np.array([0, 7, 0], np.int32), 3),
            (float("nan"), float("nan"), 0),
        ],
    )
    def test_counts_differing_bits_not_values(self, left: Any, right: Any, bits: int) -> None:
        found = compare(list(leaves({"model": left})), list(leaves({"model": right})))
        assert total(found) == ({"weights": bits} if bits else {})
        assert (part_hashes({"model": left}) == part_hashes({"model": right})) == (bits == 0)

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            ([1], (1,)),
            (1, True),
            (1, 1.0),
            ("1", 1),
            (None, "None"),
            (np.zeros(2, np.int32), np.zeros(2, np.float32)),
            (np.zeros((2, 1)), np.zeros((1, 2))),
            ({1: 0}, {"1": 0}),
            ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
            ([1], [1, None]),
        ],
    )
    def test_types_shapes_keys_and_order_count(self, left: Any, right: Any) -> None:
        found = compare(list(leaves({"loader": left})), list(leaves({"loader": right})))
        assert list(total(found)) == ["data position"]
        assert part_hashes({"loader": left}) != part_hashes({"loader": right})

    def test_an_array_counts_the_same_whoever_holds_it(self) -> None:
        torch = pytest.importorskip("torch")
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        assert part_hashes({"model": torch.from_numpy(array)}) == part_hashes({"model": array})

    def test_every_part_has_its_own_hash(self) -> None:
        state: dict[str, Any] = {
            "optimizer": {"state": {0: 1}, "param_groups": []},
            "rng": {"torch": 1, "numpy": 1, "python": 1},
        }
        other = copy.deepcopy(state)
        other["rng"]["numpy"] = 2
        before, after = part_hashes(state), part_hashes(other)
        assert [part for part in before if before[part] != after[part]] == ["numpy RNG"]
        assert list(before) == [name for name, _ in PARTS]

    def test_a_stranger_is_an_error_not_a_guess(self) -> None:
        with pytest.raises(TypeError, match=r"loader\.x"):
            part_hashes({"loader": {"x": object()}})

    def test_leaves_survive_their_file(self, tmp_path: Path) -> None:
        found = list(leaves({"model": {"w": np.arange(5.0)}, "rng": {"python": (3, tuple(range(625)), None)}}))
        write_leaves(tmp_path / "leaves", found)
        assert read_leaves(tmp_path / "leaves") == found
        assert all(isinstance(leaf, Leaf) for leaf in found)


class TestKills:
    @pytest.mark.parametrize("config", [FULL, QUICK, TINY])
    def test_plan_follows_the_seed_and_spreads_over_the_run(self, config: DemoConfig) -> None:
        def plan(seed: int) -> list[Kill]:
            return plan_kills(seed, steps=config.steps, kills=config.kills, in_commit=config.kills_in_commit)

        assert plan(1) == plan(1)
        assert len({tuple(kill.step for kill in plan(seed)) for seed in range(20)}) > 1
        for seed in range(50):
            steps = [kill.step for kill in plan(seed)]
            assert steps == sorted(set(steps))
            assert steps[0] >= 2
            assert steps[-1] <= config.steps - 3
            assert sum(kill.point in POINTS_IN_COMMIT for kill in plan(seed)) == config.kills_in_commit

    def test_no_kills_no_plan(self) -> None:
        assert plan_kills(1, steps=10, kills=0, in_commit=0) == []

    @pytest.mark.parametrize("line", ["", "{", "[]", '{"event": "unknown", "at": 1}', '{"at": 1}'])
    def test_only_events_are_events(self, line: str) -> None:
        with pytest.raises(ValueError):  # json's own message or ours
            Event.parse(line)

    def test_tells_what_a_kill_cost_from_the_events_alone(self) -> None:
        killed = Attempt(
            Kill(3, None, 0.5), 0.0, 9.0, -9,
            (
                event("built", 1), event("resumed", 2, step=0, term=1, mode="save"),
                event("begin", 3, step=1), event("computed", 4, step=1), event("durable", 5, step=1),
                event("begin", 6, step=2), event("computed", 7, step=2),
            ),
        )  # fmt: skip
        following = Attempt(
            None, 10.0, 20.0, 0,
            (event("built", 12), event("resumed", 13, step=1, term=2, mode="save"), event("begin", 14, step=2)),
        )  # fmt: skip
        (strike,) = strikes([killed, following])
        assert (strike.doing, strike.began, strike.acknowledged, strike.resumed) == ("saving 2", 2, 1, 1)
        assert (strike.lost, strike.restart_seconds, strike.build_seconds, strike.restore_seconds) == (1, 5, 2, 1)
        assert strike.broken_promises() == []

    @pytest.mark.parametrize(
        ("acknowledged", "resumed", "mode", "broken"),
        [(9, 9, "save", 0), (9, 8, "save", 2), (8, 8, "save", 1), (8, 8, "save_async", 0), (7, 7, "save_async", 1)],
    )
    def test_an_acknowledged_step_that_is_gone_breaks_a_promise(
        self, acknowledged: int, resumed: int, mode: str, broken: int
    ) -> None:
        strike = Strike(1, Kill(10, None, 0.0), 1.0, "computing 10", 10, acknowledged, resumed, 1.0, 1.0, 1.0, mode)
        assert len(strike.broken_promises()) == broken


def event(kind: Any, at: float, **fields: Any) -> Event:
    return Event(kind, at, fields)


class TestOutputFolder:
    def test_never_clears_what_no_demo_made(self, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir()
        with pytest.raises(DemoError, match="not empty"):
            OutputFolder(tmp_path).prepare(TINY)
        assert (tmp_path / "store").exists()

    def test_clears_what_an_earlier_demo_made(self, tmp_path: Path) -> None:
        out = OutputFolder(tmp_path / "out")
        out.prepare(TINY)
        (out.store / "log").mkdir(parents=True)
        out.plot.write_text("")
        out.prepare(TINY)
        assert not out.store.exists()
        assert not out.plot.exists()


@pytest.mark.usefixtures("torch_settings")
class TestTraining:
    def run(self, config: DemoConfig, until: int, state: Any = None) -> Any:
        from tools.demo.training import Training

        training = Training(config, read_corpus(config.corpus_bytes))
        if state is not None:
            training.restore(copy.deepcopy(state))
        while training.step < until:
            training.run_step()
        return copy.deepcopy(training.state())

    @pytest.mark.parametrize("tied", [True, False])
    def test_repeats_and_resumes_bit_for_bit_over_an_epochs_end(self, tied: bool) -> None:
        # 4096 bytes are 127 windows, 31 batches an epoch
        config = replace(TINY, steps=40, tied=tied)
        whole = self.run(config, 40)
        assert part_hashes(whole) == part_hashes(self.run(config, 40))
        assert whole["loader"]["epoch"] == 1
        for stop in (1, 30, 31, 32):
            assert (
                total(compare(*(list(leaves(s)) for s in (whole, self.run(config, 40, self.run(config, stop)))))) == {}
            )

    @pytest.mark.parametrize(
        ("keys", "also"),
        [
            (("rng", "python"), "weights"),
            (("rng", "numpy"), "weights"),
            (("rng", "torch"), "weights"),
            (("loader",), "weights"),
            (("optimizer", "state"), "weights"),
            (("schedule",), "weights"),
        ],
    )
    def test_every_part_of_the_state_decides_the_weights(self, keys: tuple[str, ...], also: str) -> None:
        state, beginning = self.run(TINY, 6), self.run(TINY, 1)
        holder, other = state, beginning
        for key in keys[:-1]:
            holder, other = holder[key], other[key]
        whole = self.run(TINY, 12)
        holder[keys[-1]] = other[keys[-1]]
        found = total(compare(list(leaves(whole)), list(leaves(self.run(TINY, 12, state)))))
        assert also in found

    def test_refuses_to_resume_on_other_data(self) -> None:
        state = self.run(TINY, 1)
        with pytest.raises(CorpusError, match="refusing to resume"):
            self.run(replace(TINY, corpus_bytes=5000), 2, state)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[OutputFolder, Any, str]:
    pytest.importorskip("torch")
    from tools.demo import report, supervisor
    from tools.demo.demo import Demo

    out = OutputFolder(tmp_path_factory.mktemp("demo") / "out")
    console = Console(file=io.StringIO(), width=140)
    with pytest.MonkeyPatch.context() as patch:
        if not LONG:
            warmth.warm_starts(patch, supervisor)
        outcome = Demo(RUN, out, console).run()
    report.conclude(console, outcome, out)
    assert isinstance(console.file, io.StringIO)
    return out, outcome, console.file.getvalue()


@pytest.mark.slow
class TestWholeDemo:
    def test_ends_bit_identical_after_its_kills(self, finished: tuple[OutputFolder, Any, str]) -> None:
        out, outcome, printed = finished
        assert outcome.failures() == []
        assert len(outcome.strikes) == RUN.kills
        assert any(strike.kill.point for strike in outcome.strikes)
        assert len(outcome.checks.restored) == RUN.samples
        assert "bit-identical" in printed
        assert out.plot.read_bytes().startswith(b"\x89PNG")
        summary = json.loads(out.summary.read_text())
        assert summary["identical"] is True
        assert summary["store"]["checkpoints"] == RUN.steps
        assert summary["store"]["terms"] == RUN.kills + 1

    def test_each_step_of_each_term_takes_what_an_explained_one_does(
        self, finished: tuple[OutputFolder, Any, str]
    ) -> None:
        """Also right after a kill, when plans and forms of states are made again. In bits a parameter."""
        import ckptstore

        terms: dict[int, list[ckptstore.CheckpointInfo]] = {}
        for info in ckptstore.open(finished[0].store).checkpoints():
            terms.setdefault(info.term, []).append(info)
        assert len(terms) == RUN.kills + 1
        assert max(map(len, terms.values())) > 4
        diffs = {}
        for first, *others in terms.values():
            assert first.kind == "full"
            diffs |= {info.ref: info.stored * 8 / RUN.parameters for info in others}
            assert {info.kind for info in others} <= {"gradient"}
        usual = sorted(diffs.values())[len(diffs) // 2]
        assert usual < 42, diffs  # a difference takes 55 and more
        assert max(diffs.values()) < 1.15 * usual, diffs

    def test_the_supervisor_never_imports_torch(self, finished: tuple[OutputFolder, Any, str]) -> None:
        import subprocess

        code = "import sys, tools.demo.demo, tools.demo.__main__; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_one_flipped_bit_is_seen(self, finished: tuple[OutputFolder, Any, str]) -> None:
        import ckptstore
        from tools.demo.checking import check
        from tools.demo.reference import Reference

        out, outcome, _ = finished
        reference = Reference.read(out.reference)
        index, weight = next(
            (index, leaf) for index, leaf in enumerate(reference.final) if leaf.path == ("model", "positions.weight")
        )
        flipped = bytes([weight.data[0] ^ 0x80]) + weight.data[1:]
        reference.final[index] = replace(weight, data=flipped)
        found = replace(outcome, checks=check(ckptstore.open(out.store), reference, RUN, lambda: None))
        assert total(found.checks.parts) == {"weights": 1}
        assert any("positions.weight" in failure for failure in found.failures())
