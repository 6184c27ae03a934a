"""The example of docs/agent.md runs, continues after a kill, and is as short as the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

import ckptstore
from tests import warmth
from tests.agent.lives import agents

PAGE = Path(__file__).parents[2] / "docs/agent.md"


def example() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def run(script: str, folder: Path) -> tuple[int, str]:
    done = warmth.run([sys.executable, "-W", "error", "-c", script], cwd=folder, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_the_example_continues_where_a_killed_run_was(tmp_path: Path, runtime: Path) -> None:
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    script = example()
    assert len(script.splitlines()) < 70
    assert "torch" not in re.findall(r"import (\w+)", script)
    code, said = run(script, tmp_path / "whole")
    assert code == 0
    assert said.startswith("from step 0, ")
    assert "step 30 durable: True" in said
    killed = script.replace(
        "        train(state)\n", "        train(state)\n        if step == 18:\n            die()\n"
    )
    killed = "import os\ndie = lambda: os.kill(os.getpid(), 9)\n" + killed
    assert run(killed, tmp_path / "killed")[0] == -9
    assert len(agents(runtime)) == 1
    code, said = run(script, tmp_path / "killed")
    assert code == 0
    assert re.match(r"from step 1[67], agent \d+, term 1\n", said)
    whole, broken = (ckptstore.open(tmp_path / folder / "runs/numpy") for folder in ("whole", "killed"))
    assert whole.checkpoint("tag:trained").state == broken.checkpoint("tag:trained").state
    assert np.array_equal(whole.load()["weights"], broken.load()["weights"])
    assert agents(runtime) == []


def test_every_request_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    source = (PAGE.parents[1] / "ckptstore/agent/server/trainer_session.py").read_text(encoding="utf-8")
    does = re.findall(r'^            "(\w+)": self\._', source, re.MULTILINE)
    assert len(does) > 12
    assert [one for one in does if f"`{one}`" not in page] == []
