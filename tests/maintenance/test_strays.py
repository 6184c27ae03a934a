"""Files that other programs left in a store's folders: an editor, a file manager, a sync client. The store is whole."""

from __future__ import annotations

import http.client
import json
import re
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.cli.main import cli
from ckptstore.formats.history.records import pin_key, segment_key
from ckptstore.log import partial_objects, requests
from ckptstore.log.change import CatalogChange
from ckptstore.log.pins import Pin
from ckptstore.store import Store
from tools.objects.server import Server

NAMES = ["x~", "Copy of x", ".x.swp", ".nfs000", ".DS_Store", "x (1).json", "näme", "-x", "sub/x", "a" * 32 + "~"]
FOLDERS = ["", "log/", "fold/", "pins/", "req/", "seg/", "seg/0000000001/", "refs/"]
PLAIN = "notes.txt"
"""A name that every medium takes."""

Put = Callable[[str], None]


def filled(url: str, **more: Any) -> Store:
    store = ckptstore.open(url, **more)
    with store.writer(poll_seconds=None, deltas=2) as writer:
        for step in (1, 2, 3):
            writer.save({"a": np.arange(300.0) + step}, step=step)
    return store


def in_folder(root: Path) -> Put:
    def put(key: str) -> None:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"somebody's")

    return put


@pytest.fixture(params=["local", "pmem", "fsspec", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Put, list[str]]]:
    """A store, a function that puts a file among its objects, and the names that this medium takes and lists."""
    if request.param == "memory":
        store = filled(f"memory://{tmp_path.name}")
        yield store, lambda key: store.backend.create(key, b"somebody's"), [PLAIN, "sub/x"]
    elif request.param == "s3":
        s3: Server = request.getfixturevalue("s3")
        url = s3.url()

        def put(key: str) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", s3.port, timeout=20)
            connection.request("PUT", urllib.parse.quote(f"/{url.removeprefix('s3://')}/{key}"), body=b"somebody's")
            assert connection.getresponse().status == 200
            connection.close()

        yield filled(url, storage_options=s3.options), put, NAMES
    else:
        root = tmp_path / "run"
        more: dict[str, Any] = {}
        url = f"pmem://{root}" if request.param == "pmem" else str(root)
        if request.param == "fsspec":
            fsspec = pytest.importorskip("fsspec")
            more = {"filesystem": fsspec.filesystem("file", skip_instance_cache=True)}
        yield filled(url, **more), in_folder(root), [name for name in NAMES if not name.startswith(".")]


def test_the_store_is_whole_and_everything_works_beside_it(place: tuple[Store, Put, list[str]]) -> None:
    store, put, names = place
    keys = sorted(f"{folder}{name}" for folder in FOLDERS for name in names)
    for key in keys:
        put(key)
    report = store.verify()
    assert report.ok
    assert report.strangers == tuple(keys)
    assert (report.orphans, report.restorable) == ((), ("1@1", "2@1", "3@1"))
    store.stats()
    store.retire("1", take_over=True)
    store.backend.create(segment_key(1, "e" * 32), b"never committed")
    assert segment_key(1, "e" * 32) in store.gc().segments
    with store.writer(poll_seconds=None) as writer:
        writer.save({"a": np.arange(300.0)}, step=9)
        request = requests.post(
            store.journal, writer.term, "a test", CatalogChange((), tags={"best": (writer.term, 9)})
        )
        writer.poll()
    assert request.id in store.view().catalog.requests
    assert store.load(9)["a"][7] == 7
    assert store.verify().strangers == tuple(keys), "nothing deletes them"


def test_a_living_pin_still_holds_what_it_names(tmp_path: Path) -> None:
    store = filled(str(tmp_path / "run"))
    garbage = segment_key(1, "e" * 32)
    store.backend.create(garbage, b"never committed")
    store.writer(poll_seconds=None).close()
    in_folder(tmp_path / "run")("pins/x~")
    with Pin(store.backend, ["e" * 32]):
        assert store.gc().pinned == (garbage,)
    assert store.gc().segments == (garbage,)


def ckpt(*arguments: object) -> Any:
    return CliRunner().invoke(cli, [str(one) for one in arguments], prog_name="ckpt", catch_exceptions=False)


def test_the_command_names_them_and_says_what_to_do(tmp_path: Path) -> None:
    run = tmp_path / "run"
    filled(str(run))
    for key in ("pins/x~", "log/Copy of x", "seg/0000000001/x.json"):
        in_folder(run)(key)
    found = ckpt("verify", run)
    assert found.exit_code == 0
    assert "3 files are not part of the store: log/Copy of x, pins/x~, seg/0000000001/x.json" in found.output
    assert "the store is complete without them" in found.output
    assert "delete them, or move them out" in found.output
    assert "gc deletes them" not in found.output
    for command in ("gc", "stats"):
        assert ckpt(command, run).exit_code == 0


def test_a_name_that_is_no_text_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    filled(str(run))
    for folder in ("pins", "seg"):
        (run / folder).mkdir(exist_ok=True)
        with suppress(OSError):  # a file system that takes UTF-8 alone
            (run / folder / "odd\udcff").write_bytes(b"")
    for command in ("verify", "gc"):
        assert ckpt(command, run).exit_code == 0
        assert json.loads(ckpt(command, run, "--json").stdout)["strangers"][-1] == "seg/odd\udcff"


def test_a_folder_of_a_term_to_come_is_named_with_the_way_out(tmp_path: Path) -> None:
    """READ 4: any object there shows that the end of the log is lost. So `verify` may not call the store intact."""
    run = tmp_path / "run"
    store = filled(str(run))
    in_folder(run)("seg/0000000009/x~")
    with pytest.warns(ckptstore.DamagedLogWarning), pytest.raises(ckptstore.CorruptLogError):
        store.checkpoint("latest")
    (damage,) = store.verify().damage
    assert damage.key == "seg/0000000009/x~"
    assert "delete that folder, and the store is whole" in damage.what
    in_folder(run)(segment_key(9, "a" * 32))
    (damage,) = store.verify().damage
    assert damage.key == segment_key(9, "a" * 32)
    assert "delete" not in damage.what


def test_a_folder_that_a_console_made_in_a_bucket_is_empty(s3: Server) -> None:
    for marker in ("", "sub/"):
        url = s3.url()
        connection = http.client.HTTPConnection("127.0.0.1", s3.port, timeout=20)
        connection.request("PUT", f"/{url.removeprefix('s3://')}/{marker}", body=b"")
        assert connection.getresponse().status == 200
        connection.close()
        if marker:
            ckptstore.open(f"{url}/sub", storage_options=s3.options).writer(poll_seconds=None).close()
        else:
            store = filled(url, storage_options=s3.options)
            assert store.verify().strangers == ()


PIN = pin_key("c" * 32)
REQUEST = f"req/{9:010d}-{'d' * 32}"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses in seconds, which take no time."""
    slept: list[float] = []
    monkeypatch.setattr(
        partial_objects.read_all_when_complete,
        "__defaults__",
        (*partial_objects.read_all_when_complete.__defaults__[:-1], slept.append),
    )
    return slept


@pytest.mark.parametrize("data", [b"\0 torn", b"", b"garbage of another kind\n\n"])
@pytest.mark.parametrize(("key", "held"), [(PIN, "gc deletes nothing"), (REQUEST, "blocks nothing")])
def test_a_damaged_pin_or_request_costs_no_checkpoint_and_says_so(
    tmp_path: Path, pauses: list[float], key: str, held: str, data: bytes
) -> None:
    run = tmp_path / "run"
    store = filled(str(run))
    in_folder(run)(key)
    (run / key).write_bytes(data)
    (damage,) = store.verify().damage
    assert damage.key == key
    assert damage.passing
    assert held in damage.what
    assert "no checkpoint needs it" in damage.what
    assert "delete this file" in damage.what
    found = ckpt("verify", run)
    assert found.exit_code == 4
    assert "repair" not in re.sub("nothing needs repair", "", found.output)
    assert "no checkpoint is affected" in found.output
    (run / key).unlink()
    assert ckpt("verify", run).exit_code == 0


def test_damage_that_costs_a_checkpoint_still_sends_to_repair(tmp_path: Path, pauses: list[float]) -> None:
    run = tmp_path / "run"
    store = filled(str(run))
    in_folder(run)(PIN)
    segment = run / store.describe(3)[-1][0].key
    segment.write_bytes(segment.read_bytes()[:-1] + b"\xff")
    found = ckpt("verify", run)
    assert found.exit_code == 4
    assert "ckpt repair" in found.output
    assert "no checkpoint is affected" not in found.output


class Heard:
    """A progress that has phases."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int, int, str]] = []

    def __call__(self, done: int, total: int, /) -> None:
        pass

    def phase(self, *what: Any) -> None:
        self.phases.append(what)


def test_all_torn_objects_are_waited_for_at_once_and_the_wait_is_reported(tmp_path: Path, pauses: list[float]) -> None:
    run = tmp_path / "run"
    store = filled(str(run))
    for number in range(20):
        for key in (pin_key(f"{number:032x}"), f"req/{9:010d}-{number:032x}"):
            in_folder(run)(key)
            (run / key).write_bytes(b"\0")
    heard = Heard()
    report = store.verify(progress=heard)
    assert len(report.damage) == 40
    assert partial_objects.STILL <= sum(pauses) < 2 * partial_objects.STILL
    assert heard.phases[0] == ("waiting for files that may be half written", 0, 40, "files")
    pauses.clear()
    assert len(store.gc().unreadable_pins) == 20
    assert sum(pauses) < 2 * partial_objects.STILL


def test_objects_completed_while_others_stay_torn_are_whole(pauses: list[float]) -> None:
    looks: dict[str, int] = {}

    def get(key: str) -> bytes:
        looks[key] = looks.get(key, 0) + 1
        if key == "gone" and looks[key] > 2:
            raise ckptstore.errors.KeyNotFoundError(key)
        grown = looks[key] if key == "slow" else 1
        return b"whole" if key == "fast" or grown > 30 else b"x" * grown

    found = dict(
        partial_objects.read_all_when_complete(
            ["torn", "slow", "gone", "fast"], get, lambda _key, data: data != b"whole"
        )
    )
    assert list(found) == ["fast", "gone", "torn", "slow"]
    assert (found["fast"], found["torn"], found["slow"]) == (b"whole", b"x", b"whole")
    assert isinstance(found["gone"], ckptstore.errors.KeyNotFoundError)
    assert (looks["fast"], looks["gone"]) == (1, 3)


def test_an_object_that_grows_for_ever_is_read_as_it_is(pauses: list[float]) -> None:
    looks: list[int] = []

    def get(_key: str) -> bytes:
        looks.append(0)
        return b"x" * len(looks)

    ((_, found),) = partial_objects.read_all_when_complete(["a"], get, lambda _key, _data: True)
    assert partial_objects.LONGEST <= sum(pauses) < partial_objects.LONGEST + 1
    assert found == b"x" * len(looks)
