"""SIGKILL at every point that a publisher passes, and at any time: readers find whole versions, and a rerun goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import ckptstore
from ckptstore.host import crash_points
from ckptstore.host.crash_points import PUBLISH_POINTS
from tests import warmth
from tests.following.published import pull_as_slime
from tests.following.test_publishing import Place, images, model, publisher, reading, told
from tests.forms import short_or
from tests.waiting import until
from tools.objects.server import Server

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "from ckptstore.cli.main import main; main()", "publish"]
OPTIONS: dict[str, Any] = {"full_every": 2, "keep": 1, "sha256": True}
"""The third version is a full, and the two before it are removed."""


def save(store: ckptstore.Store, step: int) -> None:
    with store.writer(parent="latest", threads=1, poll_seconds=None) as writer:
        writer.save({"model": model(step)}, step)


def killed_at(point: str, count: int, work: Callable[[], None]) -> bool:
    """Run `work` in a fork until it passes `point` for the `count`-th time -> whether it did."""
    victim = os.fork()
    if victim == 0:
        status = 1
        try:
            crash_points.arm(point, count)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(victim, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def passed(work: Callable[[], object]) -> list[str]:
    """The points that `work` passes."""
    found: dict[str, None] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("ckptstore.") and name != crash_points.__name__ and hasattr(module, "crash_point"):
                patch.setattr(module, "crash_point", found.setdefault)
        work()
    return list(found)


def read(root: Path, layout: str) -> tuple[int, dict[str, bytes]]:
    """The newest version, as a program without ckptstore reads it."""
    if layout == "hf":
        manifest, tensors = reading.read(root)
        return manifest["version"], told(tensors)
    newest = json.loads((root / "latest.json").read_text())["version"]
    return newest, told(pull_as_slime(root, newest))


@pytest.mark.parametrize("layout", ["hf", "slime"])
@pytest.mark.parametrize("step", [2, 3])
def test_a_kill_at_every_point(tmp_path: Path, layout: Literal["hf", "slime"], step: int) -> None:
    """Of a delta, and of a full after which versions are removed."""

    def work(root: Path) -> None:
        with ckptstore.open(root / "run").publish(root / "published", layout=layout, **OPTIONS) as published:
            published.look()

    origin = tmp_path / "origin"
    for number in range(1, step + 1):
        save(ckptstore.open(origin / "run"), number)
        if number < step:
            work(origin)
    places = 0

    def fresh() -> Path:
        nonlocal places
        shutil.rmtree(tmp_path / f"copy-{places}", ignore_errors=True)
        places += 1
        return Path(shutil.copytree(origin, tmp_path / f"copy-{places}"))

    work(fresh())  # imports what it needs
    points = passed(lambda: work(fresh()))
    assert set(PUBLISH_POINTS) - {"publish.removing"} <= set(points)
    assert ("publish.removing" in points) == (step == 3)
    died = 0
    for point in points:
        for count in range(1, short_or(2, 99)):
            root = fresh()
            if not killed_at(point, count, lambda root=root: work(root)):
                break
            died += 1
            version, tensors = read(root / "published", layout)
            assert version in (step - 1, step), point
            landed = ("publish.pointed", "publish.committed", "publish.removing")
            assert version == step if point in landed else version < step or not point.startswith("publish."), point
            assert tensors == images(model(version)), point
            work(root)
            again, tensors = read(root / "published", layout)
            assert again == version if version == step else again in (step, step + 1), point
            assert tensors == images(model(step)), point
            save(ckptstore.open(root / "run"), step + 1)
            work(root)
            assert read(root / "published", layout)[1] == images(model(step + 1)), point
    assert died >= 10


@pytest.mark.parametrize("point", PUBLISH_POINTS)
def test_a_kill_of_the_command_at_a_bucket(s3: Server, tmp_path: Path, point: str) -> None:
    store, place = ckptstore.open(tmp_path / "run"), Place(s3.url(), tmp_path / "copy", s3.options)
    with publisher(store, place, **OPTIONS) as published:
        for step in (1, 2):
            save(store, step)
            assert published.look() is not None
    save(store, 3)
    command = [*COMMAND, str(tmp_path / "run"), "--to", place.url, "--full-every", "2", "--keep", "1", "--sha256"]
    environment = {**os.environ, **s3.environment(), "CKPTSTORE_CRASH_AT": point}
    died = warmth.nursery().run(command, env=environment, timeout=240)
    assert died.returncode == -signal.SIGKILL, died.stderr
    step = 3 if point in ("publish.pointed", "publish.committed", "publish.removing") else 2
    manifest, tensors = place.read()
    assert (manifest["step"], tensors) == (step, images(model(step)))
    with publisher(store, place, **OPTIONS) as published:
        assert (published.look() is None) == (step == 3)
        assert place.read()[1] == images(model(3))
        save(store, 4)
        assert published.look() is not None
    assert place.read()[1] == images(model(4))


def newest(seen: list[list[int]]) -> int:
    """The newest version that a reader has seen; 0: none has seen any."""
    return max((version for versions in seen for version in versions[-1:]), default=0)


def test_readers_beside_a_publisher_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """Every read finds a whole version, never an older one than before, and at last the newest."""
    store, root = ckptstore.open(tmp_path / "run"), tmp_path / "published"
    save(store, 1)
    command = [*COMMAND, str(tmp_path / "run"), "--to", str(root), "--follow", "--every", "0.01", "--sha256"]
    command += ["--full-every", "3", "--keep", "2"]
    seen: list[list[int]] = [[], []]
    wrong: list[str] = []
    ended = threading.Event()

    def read_on(versions: list[int]) -> None:
        while not ended.is_set():
            try:
                manifest, tensors = reading.read(root)
            except FileNotFoundError:  # nothing is published yet, or it was removed meanwhile: read again
                continue
            except ValueError as error:
                wrong.append(str(error))
                return
            if told(tensors) != images(model(manifest["step"])):
                wrong.append(f"version {manifest['version']} is mixed")
            versions.append(manifest["version"])

    readers = [threading.Thread(target=read_on, args=(versions,)) for versions in seen]
    for one in readers:
        one.start()
    chance, step = random.Random(7), 1
    try:
        for _ in range(short_or(4, 60)):
            before = newest(seen)
            victim = warmth.start(command)
            for _ in range(3):
                step += 1
                save(store, step)
                time.sleep(chance.uniform(0.0, 0.2))
            until(lambda before=before: wrong or newest(seen) > before)  # a busy machine may have begun nothing yet
            time.sleep(chance.uniform(0.0, 0.1))
            victim.kill()
            victim.wait()
        with store.publish(root, full_every=3, sha256=True) as published:
            published.look()
        last = reading.read(root)[0]["version"]
        until(lambda: wrong or all(versions[-1:] == [last] for versions in seen))
    finally:
        ended.set()
        for one in readers:
            one.join(60)
    assert not wrong
    assert seen == [sorted(versions) for versions in seen]
    assert len({*seen[0], *seen[1]}) >= short_or(2, 30)
    manifest, tensors = reading.read(root)
    assert (manifest["step"], told(tensors)) == (step, images(model(step)))
