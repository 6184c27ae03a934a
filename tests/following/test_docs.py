"""The example of docs/following.md runs unchanged, beside a writer."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest

import ckptstore

DOCS = Path(__file__).parents[2] / "docs" / "following.md"


def test_the_server_of_the_docs_serves_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    assert len(example.splitlines()) <= 25
    weight = np.ones((512, 512), np.float32)
    served = threading.Semaphore(0)
    example = example.replace("    ...  ", "    SERVED.release()  ")
    with ckptstore.open(tmp_path / "run").writer(deltas=20, poll_seconds=None) as writer:
        writer.save({"model": {"weight": weight}, "other": np.zeros(9)}, 1)
        names = {"URL": tmp_path / "run", "TIMEOUT": 5.0, "np": np, "SERVED": served}
        server = threading.Thread(target=lambda: exec(example, names))  # noqa: S102  # the docs' own
        server.start()
        try:
            assert served.acquire(timeout=60)
            weight[3] = 7
            writer.save({"model": {"weight": weight}, "other": np.zeros(9)}, 2)
            assert served.acquire(timeout=60)
        finally:
            server.join(60)
    policy = names["policy"]
    assert isinstance(policy, dict)
    assert policy["model"]["weight"].tobytes() == weight.tobytes()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("serving 1@1 of None ")
    assert lines[1].startswith("serving 2@1 of 1@1 ")
