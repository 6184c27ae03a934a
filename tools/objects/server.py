"""A real S3 server for tests: ministack on loopback, one process for each pytest worker; or a given server.

``CKPTSTORE_TEST_S3_URL=s3://bucket/prefix`` sends the same tests to a real store, with the credentials and the endpoint
of the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...); each test uses its own prefix.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY, SECRET = "AKIACKPTSTORETESTS00", "ckptstoreTestsSecretNobodyMaySee0000000+"


def free_port() -> int:
    """A port of loopback that is free now. The system gives no such port to a connection before a server has it."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)  # below /proc/sys/net/ipv4/ip_local_port_range
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Server:
    """A server for stores.

    Attributes:
        root: URL that prefixes are appended to.
        options: `storage_options` for it.
        port: of a server of our own; 0: it is not ours.
    """

    root: str
    options: dict[str, Any]
    port: int = 0

    def url(self) -> str:
        """The URL of a new, empty place."""
        return f"{self.root}/{uuid.uuid4().hex}"

    def environment(self) -> dict[str, str]:
        """The environment of another process that uses the server."""
        if not self.port:
            return {}
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
        }


def options_for(port: int, *, read_timeout: float = 20.0, tries: int = 5) -> dict[str, Any]:
    return {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"read_timeout": read_timeout, "retries": {"max_attempts": tries}},
    }


def make_bucket(port: int, name: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("PUT", f"/{name}")
    status = connection.getresponse().status
    connection.close()
    assert status == 200, status


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """The server that the environment names, or ministack until the ``with`` ends."""
    if given := os.environ.get("CKPTSTORE_TEST_S3_URL"):
        yield Server(given.rstrip("/"), {})
        return
    port = free_port()
    environment = os.environ | {
        "BIND_HOST": "127.0.0.1",
        "MINISTACK_HOST": "127.0.0.1",
        "SERVICES": "s3",
        "GATEWAY_PORT": str(port),
        "LOG_LEVEL": "ERROR",
        "STATE_DIR": str(folder / "state"),
        "S3_DATA_DIR": str(folder / "data"),
    }
    command = [str(Path(sys.executable).with_name("ministack"))]
    with running(command, environment, port, folder):
        make_bucket(port, "tests")
        yield Server("s3://tests", options_for(port), port)


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], port: int, folder: Path) -> Iterator[None]:
    """Run a program that serves on a loopback port until the ``with`` ends; its `folder` is deleted with it."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        _wait(port, process)
        yield
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, f"{process.args} ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"{process.args} does not listen")
