"""The comparison of clients on a bucket, very small; and its server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.forms import long_only, short_or
from tools.bench.storage import objects
from tools.objects.fast_server import serving_fast, spent
from tools.objects.server import Server

WANTED = ["obstore", "ckptstore"]
LINK = "200Mbit/s"


@long_only
@pytest.mark.slow
def test_the_saved_state_comes_back_and_everything_is_reported(tmp_path: Path) -> None:
    """A worker that gets other bytes back fails the command."""
    clients = [word for name in WANTED for word in ("--client", name)]
    size = short_or(12, 64)
    result = CliRunner().invoke(
        objects.main,
        ["--size", f"{size}MB", "--rounds", "1", "--link", LINK, "--out", str(tmp_path), "--json", *clients],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "objects.json").read_text())
    assert {(row["client"], row["phase"]) for row in document["clients"]} == {
        (name, phase) for name in WANTED for phase in ("save", "restore")
    }
    assert all(row["rate"] > 0 and row["cpu"] > 0 for row in document["clients"])
    ratios = {(row["client"], row["phase"]): row["ratio"] for row in document["clients"]}
    assert ratios["obstore", "save"] == ratios["obstore", "restore"] == 1.0 != ratios["ckptstore", "save"] > 0
    found = {(row["link"], row["mode"]): row for row in document["loop_rows"]}
    assert list(found) == [(link, mode) for link in ("loopback", LINK) for mode in ("thread", "agent", "apart")]
    assert all(row["kept"] > 0 and row["spread"] == [row["kept"]] * 2 for row in found.values())
    for mode in ("thread", "agent", "apart"):
        assert found[LINK, mode]["upload"] > 0.8 * (size - 1) * 1e6 / 25e6, "nothing is faster than its link"
    assert CliRunner().invoke(objects.main, ["--link", "1Gb/s"]).exit_code == 2


@pytest.fixture(scope="module")
def fast() -> Iterator[Server]:
    with serving_fast() as server:
        yield server


def store_of(fast: Server, **more: Any) -> Any:
    from obstore.store import S3Store

    config: Any = {"endpoint": f"http://127.0.0.1:{fast.port}", "region": "us-east-1", "skip_signature": True}
    return S3Store("tests", config=config, client_options={"allow_http": True}, **more)


def test_the_server_lists_by_pages_and_by_folders(fast: Server) -> None:
    import obstore

    store = store_of(fast, prefix="listed")
    for number in range(1003):
        obstore.put(store, f"{number % 3}/{number:04}", b"x")
    found = [one["path"] for batch in obstore.list(store) for one in batch]
    assert len(found) == len(set(found)) == 1003
    below = obstore.list_with_delimiter(store)
    assert sorted(below["common_prefixes"]) == ["0", "1", "2"]
    assert len(obstore.list_with_delimiter(store, "1")["objects"]) == 334


def test_the_server_copies_cuts_and_refuses(fast: Server) -> None:
    import obstore
    from obstore import exceptions

    store = store_of(fast, prefix="odd")
    data = bytes(range(256)) * 50_000
    obstore.put(store, "a", data, use_multipart=True, chunk_size=5 << 20)
    obstore.copy(store, "a", "b")
    assert bytes(obstore.get(store, "b").bytes()) == data
    around = (5 << 20) - 3
    assert bytes(obstore.get_range(store, "b", start=around, length=9)) == data[around : around + 9]
    with pytest.raises(exceptions.AlreadyExistsError):
        obstore.put(store, "a", b"other", mode="create", use_multipart=False)
    obstore.delete(store, "a")
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "a")
    assert obstore.head(store, "b")["size"] == len(data)


def test_a_shared_link_is_no_faster_than_its_speed() -> None:
    """Each direction has its own speed, and all connections share it."""
    import obstore

    data, rate = bytes(10 << 20), 400e6 / 8
    with serving_fast("400Mbit/s") as server:
        store = store_of(server)
        began = time.perf_counter()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda number: obstore.put(store, f"{number}", data, use_multipart=False), range(3)))
        up = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(lambda number: obstore.get(store, f"{number}").bytes() == data, range(2)))
        down = time.perf_counter()
    lead = 3 << 20  # what each connection may have ahead: a piece in flight
    assert up - began > (3 * len(data) - lead) / rate
    assert down - up > (2 * len(data) - lead) / rate


def test_the_server_takes_the_framing_of_signed_streams(fast: Server) -> None:
    link = HTTPConnection("127.0.0.1", fast.port, timeout=20)
    framed = b"5;chunk-signature=0\r\nhello\r\n1;chunk-signature=0\r\n!\r\n0;chunk-signature=0\r\n\r\n"
    link.request("PUT", "/tests/framed", framed, {"Content-Encoding": "aws-chunked"})
    assert link.getresponse().read() == b""
    link.request("GET", "/tests/framed")
    assert link.getresponse().read() == b"hello!"
    link.close()
    assert spent(fast.port) > 0
