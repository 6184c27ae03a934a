"""Adapters, averaged weights, compiled modules and optimizers of other libraries: killed and resumed bit for bit."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for library in ("peft", "transformers", "schedulefree", "bitsandbytes", "torchao"):
    pytest.importorskip(library)
if not hasattr(torch.optim, "Muon"):
    pytest.skip("torch.optim.Muon is new in torch 2.9", allow_module_level=True)

import ckptstore  # noqa: E402 - the libraries decide whether this file runs at all
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.errors import StateMismatchError, UnsupportedStateError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tests.forms import in_turn, long_only, short_or  # noqa: E402
from tools.bench.training.adapters import CASES, QUANTIZED, Job, eager, main, run  # noqa: E402
from tools.kills.loop_kills import Form, sweep  # noqa: E402
from tools.warm import MODULES, Warm  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread", "as_written"),
    # The libraries use what torch has deprecated. Ours stay errors.
    pytest.mark.filterwarnings("ignore", "error::ckptstore.DeterminismWarning"),
]
STEPS = 14
PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"


@pytest.fixture
def as_written() -> Iterator[None]:
    with eager():
        yield


@pytest.fixture(scope="module")
def warm_libraries() -> Iterator[Warm]:
    """Scripts that start with the libraries imported."""
    with Warm((*MODULES, "peft", "transformers", "schedulefree", "bitsandbytes", "torchao.optim")) as warm:
        yield warm


def everything(job: Job) -> Any:
    return [job.model.state_dict(), [one.state_dict() for one in job.optimizers], torch.get_rng_state()]


@pytest.mark.parametrize(
    ("case", "strategy"), in_turn([*CASES, *QUANTIZED], ["auto", "full", "delta", "gradient", "only"])
)
def test_a_run_that_is_stopped_continues_bit_for_bit(tmp_path: Path, case: str, strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy}
    if strategy == "only":
        options = {"strategy": "gradient", "only": "trainable"}
    found: list[Any] = []
    whole = run(case, tmp_path / "whole", until=9, losses=tmp_path / "wanted", on_metrics=found.append, **options)
    for until in (3, 9):
        parts = run(case, tmp_path / "run", until=until, losses=tmp_path / "losses", **options)
    assert (tmp_path / "losses").read_text() == (tmp_path / "wanted").read_text()
    assert_same(parts, whole)
    assert [one.step for one in ckptstore.open(tmp_path / "run").checkpoints()] == list(range(1, 10))
    assert ckptstore.open(tmp_path / "run").verify(deep=True).ok
    if case in ("PEFT", *QUANTIZED) and strategy != "full":
        assert max(one.stored for one in found[1:]) < found[0].nbytes, "frozen weights once"


def assert_same(job: Job, other: Job) -> None:
    mine, its = everything(job), everything(other)
    assert repr(mine) == repr(its)
    tensors, others = (list(_tensors(one)) for one in (mine, its))
    assert len(tensors) == len(others)
    assert all(torch.equal(one, its) for one, its in zip(tensors, others, strict=True))


def _tensors(state: Any) -> Iterator[Any]:
    if isinstance(state, torch.Tensor):
        names = state.__tensor_flatten__()[0] if hasattr(type(state), "__tensor_flatten__") else ()
        yield from (getattr(state, name) for name in names) if names else (state,)
    elif isinstance(state, dict | list | tuple):
        for one in state.values() if isinstance(state, dict) else state:
            yield from _tensors(one)


@pytest.mark.parametrize(
    "case", [one if place % 2 == 0 else pytest.param(one, marks=long_only) for place, one in enumerate(CASES)]
)
def test_a_killed_run_continues_bit_for_bit(tmp_path: Path, case: str, warm_libraries: Warm) -> None:
    """Killed once at random, in every other case; five times in the long form, in all of them."""
    run(case, tmp_path / "whole", "auto", STEPS, tmp_path / "wanted")
    wanted, chance = (tmp_path / "wanted").read_text().splitlines(), random.Random(case)
    command = [sys.executable, "-m", "tools.bench.training.adapters", "--steps", str(STEPS), "--width", "128", "--run"]
    command += [case, str(tmp_path / "run"), str(tmp_path / "losses"), "auto"]

    def start() -> Any:
        return warm_libraries.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def lines() -> list[str]:
        return (tmp_path / "losses").read_text().splitlines() if (tmp_path / "losses").exists() else []

    for number in range(short_or(1, 5)):
        with start() as process:
            enough = len(lines()) + (chance.randrange(2, 8) if not number else chance.randrange(1, 4))
            while process.poll() is None and len(lines()) < min(enough, STEPS):
                time.sleep(0.001)
            time.sleep(chance.random() * 0.02)
            process.kill()
            assert process.wait() in (-signal.SIGKILL, 0), process.communicate()[0]
    with start() as process:
        said = process.communicate(timeout=200)[0]
        assert process.returncode == 0, said
    assert set(lines()) == set(wanted), "losses that the run that was never killed does not have"
    assert list(dict.fromkeys(lines())) == wanted


@pytest.mark.parametrize("strategy", ["auto", *(pytest.param(one, marks=long_only) for one in ("full", "delta"))])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=long_only)])
def test_a_loop_with_peft_that_is_killed(tmp_path: Path, workers: int, strategy: str, warm_libraries: Warm) -> None:
    """Dropout, shuffling, two micro-batches in a step."""
    result = sweep(warm_libraries.start, tmp_path, Form("peft", workers, strategy), short_or(1, 25), "2")
    assert result.kills == short_or(1, 25)


def test_an_adapter_is_left_out_of_nothing_and_its_base_of_everything(tmp_path: Path) -> None:
    job = run("PEFT", tmp_path / "s", "auto", 4, only="trainable")
    names = set(ckptstore.open(tmp_path / "s").load()["model"])
    trained = {name for name, one in job.model.named_parameters() if one.requires_grad}
    assert names == trained
    torch.manual_seed(2)  # another base
    other = CASES["PEFT"](128)
    with (
        Checkpointer(tmp_path / "s", model=other.model, **other.parts) as checkpointer,
        pytest.raises(StateMismatchError, match=r"wte\.weight: frozen, and left out"),
    ):
        checkpointer.resume()


def test_a_merged_adapter_changes_the_base_and_is_noticed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    job = CASES["PEFT"](128)
    with Checkpointer(tmp_path / "s", model=job.model, only="trainable", **job.parts) as checkpointer:
        checkpointer.resume()
        for step in range(3):
            job.loss().backward()
            job.optimizers[0].step()
            job.optimizers[0].zero_grad()
            if step == 1:
                job.model.merge_adapter()
                job.model.unmerge_adapter()  # not the same bits
                with pytest.warns(DeterminismWarning, match="frozen weights have changed"):
                    checkpointer.step()
            else:
                checkpointer.step()
    saved = ckptstore.open(tmp_path / "s").load()["model"]
    name = "base_model.model.transformer.h.0.attn.c_attn.base_layer.weight"
    assert torch.equal(saved[name], job.model.state_dict()[name])
    assert not any("wte" in one for one in saved)


def test_a_class_of_tensors_that_nobody_registered_is_refused(tmp_path: Path) -> None:
    from torchao.optim import AdamW4bit

    layer = torch.nn.Linear(64, 64)
    optimizer = AdamW4bit(layer.parameters())
    with Checkpointer(tmp_path / "s", model=layer, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        layer(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        with pytest.raises(UnsupportedStateError, match=r"OptimState4bit cannot be stored: call ckptstore\.register"):
            checkpointer.step()


def test_layers_that_cannot_load_what_they_saved_have_to_be_the_same(tmp_path: Path) -> None:
    run("bitsandbytes 4 bits", tmp_path / "s", "auto", 2)
    torch.manual_seed(2)  # another base
    other = QUANTIZED["bitsandbytes 4 bits"](128)
    with Checkpointer(tmp_path / "s", model=other.model, **other.parts) as checkpointer:
        before = [one.clone() for one in _tensors(other.model.state_dict())]
        with pytest.raises(RuntimeError, match="absmax"):
            checkpointer.resume()
    assert all(map(torch.equal, before, _tensors(other.model.state_dict())))


def test_the_table_of_the_page_is_that_of_the_command(tmp_path: Path) -> None:
    from click.testing import CliRunner

    told = CliRunner().invoke(main, ["--steps", "3", "--width", "32", str(tmp_path)], catch_exceptions=False).output
    cases = {line[:22].strip() for line in told.splitlines()[1:]} & {*CASES, *QUANTIZED}
    assert cases == {*CASES, *QUANTIZED}
    rows = re.findall(r"^\| [^|]*\| ([^|]+?) \| [\d,]+ \|", PAGE.read_text(), re.MULTILINE)
    assert {*rows} == cases
