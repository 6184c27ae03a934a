"""The protocol of docs/agent.md, used by an independent trainer; and by a broken one."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
import ckptstore.agent
from ckptstore.agent.protocol.shared_memory import SharedMemory
from tests.agent.lives import agents, alive, until
from tests.agent.shim import VERSION, Shim

# The shim has no torch, and this process may have it: the warning about different versions does not matter here.
pytestmark = pytest.mark.filterwarnings("ignore::ckptstore.DeterminismWarning")


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    made, greeting = Shim.started(tmp_path / "store")
    assert (greeting["term"], greeting["latest"], greeting["newest"]) == (1, None, None)
    yield made
    made.close()
    assert made.agent is not None
    made.agent.kill()
    made.agent.wait()


def test_a_state_is_filled_saved_and_acknowledged(shim: Shim, tmp_path: Path) -> None:
    body, memory = shim.filled(7)
    assert "error" not in shim.ask("save", step=5, metadata={"loss": 1}, tags=["best"], **body)
    told = shim.event()
    assert (told["event"], told["step"], told["info"]["tags"]) == ("saved", 5, ["best"])
    memory.close()
    assert "error" not in shim.ask("close")
    assert shim.agent is not None
    assert shim.agent.wait(60) == 0
    assert (ckptstore.open(tmp_path / "store").load()["x"] == np.full(5000, 7, np.uint8)).all()


def test_a_change_after_the_hand_over_is_noticed(shim: Shim, tmp_path: Path) -> None:
    """A child of the trainer may still have the memory. The agent's answer has the hash that the store has."""
    body, memory = shim.filled(1)
    shim.ask("save", step=1, **body)
    assert shim.event()["event"] == "saved"
    memory[100:101] = b"\x02"
    shim.close()
    with ckptstore.agent.writer(tmp_path / "store", max_in_flight=1, poll_seconds=None, linger_seconds=120) as writer:
        assert writer.inherited is not None
        with pytest.raises(ckptstore.CorruptionError, match="not what was handed over"):
            writer.inherited.load()
        with pytest.warns(UserWarning, match="continuing from 1@1"):
            assert (writer.load()["x"] == 1).all()


def bad(shim: Shim, what: str) -> Callable[[], Any]:
    body, _ = shim.filled(1)
    save = {"step": 1, **body}
    rows = {"optimizers": [{"kind": "SGD"}], "steps": [[1, 0.1, 1.0, 1.0, False]]}
    return {
        "unknown": lambda: shim.ask("fly"),
        "no fields": lambda: shim.ask("save"),
        "no such buffer": lambda: shim.ask("save", **save | {"buffer": 99}),
        "no such layout": lambda: shim.ask("save", **save | {"layout": 99}),
        "step": lambda: shim.ask("save", **save | {"step": -1}),
        "tree names another": lambda: shim.ask("save", **save | {"tree": {"x": {"$a": "y"}}}),
        "tree lacks one": lambda: shim.ask("save", **save | {"tree": {}}),
        "tree is none": lambda: shim.ask("save", **save | {"tree": {"$dict": 3}}),
        "tags": lambda: shim.ask("save", **save | {"tags": [3]}),
        "metadata": lambda: shim.ask("save", **save | {"metadata": {"x": "y" * 20_000}}),
        "slots": lambda: shim.ask("save", **save | {"updates": rows | {"rows": [[[5], 0, 0, None]]}}),
        "optimizer": lambda: shim.ask("save", **save | {"updates": rows | {"rows": [[[0], 1, 0, None]]}}),
        "gradient outside": lambda: shim.ask(
            "save", **save | {"updates": rows | {"rows": [[[0], 0, 0, ["dense", ["F32", [2], 0]]]]}}
        ),
        "dtype": lambda: shim.ask("layout", tensors=[["x", "F99", [1], "numpy", None, None]]),
        "too large": lambda: shim.ask("layout", tensors=[["x", "F32", [1 << 50], "numpy", None, None]]),
        "twice": lambda: shim.ask("layout", tensors=[["x", "F32", [1], "numpy", None, None]] * 2),
        "negative": lambda: shim.ask("layout", tensors=[["x", "F32", [-1], "numpy", None, None]]),
        "released twice": lambda: [shim.ask("release", buffer=save["buffer"]) for _ in range(2)][1],
        "nothing kept": lambda: shim.ask("newest"),
        "a folder": lambda: shim.ask("tag", name="a", ref=["b"]),
    }[what]


BAD = (
    "unknown|no fields|no such buffer|no such layout|step|tree names another|tree lacks one|tree is none|tags|metadata|"
    "slots|optimizer|gradient outside|dtype|too large|twice|negative|released twice|nothing kept|a folder"
)


def test_an_invalid_request_is_answered_with_an_error_and_stores_nothing(shim: Shim, tmp_path: Path) -> None:
    for what in BAD.split("|"):
        answer = bad(shim, what)()
        assert "error" in answer, what
        assert answer["error"]["text"], what
        for lent in range(100):
            shim.ask("release", buffer=lent)
    body, _ = shim.filled(3)
    assert "error" not in shim.ask("save", step=9, **body)  # it serves on
    assert shim.event()["step"] == 9
    assert [info.step for info in ckptstore.open(tmp_path / "store").checkpoints()] == [9]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 0),
        struct.pack(">I", (64 << 20) + 1),
        struct.pack(">I", 5) + b"nojso",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 2) + b"{}",
        struct.pack(">I", 300_000) + b"[" * 300_000,
        struct.pack(">I", 100) + b"{",
    ],
    ids=["nothing", "too long", "no JSON", "no object", "no request", "deep", "cut off"],
)
def test_an_invalid_message_ends_the_connection_and_not_the_agent(shim: Shim, tmp_path: Path, data: bytes) -> None:
    body, _ = shim.filled(4)
    shim.ask("save", step=2, **body)
    assert shim.event()["event"] == "saved"
    shim.socket.sendall(data)
    if len(data) == 5:  # the rest never arrives
        shim.close()
    else:
        assert shim.event()["event"] == "broken"
        with pytest.raises((EOFError, ConnectionResetError)):
            shim.hear()
    with ckptstore.agent.writer(tmp_path / "store", max_in_flight=1, poll_seconds=None, linger_seconds=120) as writer:
        assert (writer.term, writer.step) == (1, 2)
        assert (writer.load()["x"] == 4).all()


def test_another_protocol_is_refused(tmp_path: Path, runtime: Path) -> None:
    shim, answer = Shim.started(tmp_path / "store", protocol_of_tomorrow=True)
    shim.close()
    assert answer["term"] == 1
    assert shim.agent is not None
    assert shim.agent.poll() is None
    late = Shim.connected(runtime)
    for other in (VERSION - 1, VERSION + 1):
        refused = late.ask("hello", protocol=other)["error"]["text"]
        assert f"protocol {other}" in refused
        assert f"speaks {VERSION}" in refused
    assert late.ask("hello", protocol=VERSION)["term"] == 1
    late.close()
    shim.agent.kill()
    shim.agent.wait()


def test_a_trainer_of_another_protocol_is_refused_and_the_agent_keeps_its_state(
    shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, _ = shim.filled(4)
    shim.ask("save", step=2, **body)
    assert shim.event()["event"] == "saved"
    shim.close()

    def opened() -> Any:
        return ckptstore.agent.writer(tmp_path / "store", max_in_flight=1, poll_seconds=None, linger_seconds=120)

    with monkeypatch.context() as patch:
        patch.setattr("ckptstore.agent.client.agent_launch.PROTOCOL", VERSION + 1)
        with pytest.raises(ckptstore.AgentError, match=f"protocol {VERSION + 1}; this agent speaks {VERSION}"):
            opened()
    with opened() as writer:
        assert (writer.term, writer.step) == (1, 2)


def test_a_trainer_that_reads_nothing_does_not_stop_the_writing(shim: Shim, tmp_path: Path) -> None:
    body, _ = shim.filled(1)
    shim.send({"do": "save", "id": 1000, "step": 1, **body})
    text = json.dumps({"do": "poll", "id": 7}).encode()
    for _ in range(300):
        shim.socket.sendall(struct.pack(">I", len(text)) + text)
    until(lambda: (tmp_path / "store" / "FORMAT").exists() and ckptstore.open(tmp_path / "store").latest_step() == 1)


def test_memory_that_may_shrink_is_refused(tmp_path: Path) -> None:
    """Reading memory that no longer exists kills a process."""
    for sealed in (False, True):
        made = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(made, 4096 if not sealed else 10)
        if sealed:
            fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(ckptstore.AgentError, match="shared memory"):
            SharedMemory(made, 4096)
    shared = SharedMemory.made(100)
    with pytest.raises(OSError, match="permitted"):
        os.ftruncate(shared.descriptor, 0)
    shared.close()


def test_an_agent_whose_trainer_says_nothing_ends(tmp_path: Path, runtime: Path) -> None:
    ours, its = socket.socketpair()
    agent = subprocess.Popen(
        [sys.executable, "-m", "ckptstore.agent.process", str(its.fileno())], pass_fds=[its.fileno()]
    )
    its.close()
    ours.close()
    assert agent.wait(60) == 0
    assert not alive(agent.pid)
    assert agents(runtime) == []
