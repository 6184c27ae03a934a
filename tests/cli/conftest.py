"""A store with a fork, and a way to run `ckpt` on it as a user would."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.cli.main import cli
from ckptstore.cli.output import SCHEMA

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
JSON = DOCS.with_name("json.md")
FREE_FORM = {
    "exponents",
    "tree",
    "before",
    "after",
    "was",
    "metadata",
    "values",
}  # members whose shape depends on the data


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def ckpt() -> Run:
    def run(*arguments: object, **extra: Any) -> Outcome:
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="ckpt", **extra)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


def state(step: int) -> dict[str, Any]:
    """A small state: weights that drift, a frozen tensor, random states, some JSON."""
    rng = np.random.default_rng(step)
    return {
        "model": {
            "embedding.weight": np.linspace(-1, 1, 3000, dtype=np.float32).reshape(100, 30) * np.float32(step),
            "frozen": np.arange(12, dtype=np.int64),
        },
        "odd": {"half": rng.standard_normal(7).astype(np.float16), "empty": np.empty((0, 3)), "z": np.array(1 + 2j)},
        "python": random.Random(step).getstate(),
        "lr": 0.1 / step,
        "step": step,
        3: ("tuple", None, float("nan"), b"bytes"),
    }


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Term 1: steps 1-4. Term 2 forks from 2@1: steps 3-4. Term 3 continues it: step 5, tagged "best"."""
    root = tmp_path_factory.mktemp("cli") / "run"
    store = ckptstore.open(root)
    for parent, steps in (("latest", (1, 2, 3, 4)), ("2@1", (3, 4)), ("latest", (5,))):
        with store.writer(parent=parent, poll_seconds=None) as writer:
            for step in steps:
                writer.save(state(step) if step > 1 else state(1) | {"extra": np.ones(3)}, step=step)
            if step == 5:
                writer.tag("best", 5)
    return root


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    """A copy of `pristine` that the test may break."""
    return Path(shutil.copytree(pristine, tmp_path / "run"))


def documented(command: str) -> list[Any]:
    """The JSON documents that docs/json.md shows below a heading, in order."""
    section = JSON.read_text().split(f"\n## {command}\n")[1].split("\n## ")[0]
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", section, re.S)]


def assert_documented(actual: Any, shown: Any, where: str = "") -> None:
    """`actual` has the members that the documentation shows, in that order, and values of the same types.

    `schema`, which every document begins with, is shown once for all.
    """
    if not where and isinstance(actual, dict) and "schema" in actual:
        actual = dict(actual)
        assert next(iter(actual)) == "schema"
        assert actual.pop("schema") == SCHEMA
    if where.rpartition(".")[2] in FREE_FORM or actual is None or shown is None:
        return
    if isinstance(shown, dict):
        assert list(actual) == list(shown), where
        for key in shown:
            assert_documented(actual[key], shown[key], f"{where}.{key}")
    elif isinstance(shown, list):
        assert isinstance(actual, list), where
        for item in actual:
            assert_documented(item, shown[0] if shown else item, where)
    elif isinstance(shown, bool) or isinstance(actual, bool) or isinstance(shown, str):
        assert type(actual) is type(shown), where
    else:
        assert isinstance(actual, int | float), where
