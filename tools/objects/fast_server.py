"""A small and fast S3 server in memory, for measurements that the server must not limit.

    python -m tools.objects.fast_server --port 9000
    export AWS_ENDPOINT_URL=http://127.0.0.1:9000 AWS_ACCESS_KEY_ID=any AWS_SECRET_ACCESS_KEY=any AWS_REGION=us-east-1
    CKPTSTORE_TEST_S3_URL=s3://tests pytest tests/backends/test_objects.py

One thread for each connection; a body is received by one system call into its final memory, and sent by one from there,
without the GIL. Signatures and checksums are ignored, and nothing outlives the process: use a real server for a store
that must persist. ``GET /__spent`` reports its CPU time.

Loopback is as fast as the processor, which then has no time for anything else. With ``--link 10Gbit/s`` bodies are
transferred no faster than that in each direction, however many connections there are: clients wait for it as for a
network.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from urllib.parse import parse_qsl, unquote

import click

from ckptstore.cli.quantities import RATE
from ckptstore.host.bandwidth import PIECE, Bandwidth
from tools.objects.fast_bucket import Answer, Asked, Body, Buckets
from tools.objects.server import Server, options_for

__all__ = ["FastServer", "main", "serving_fast", "spent"]

_HEAD: Final = 64 << 10
"""Largest size of a request's head in bytes."""
_BUCKET: Final = "tests"
_SPENT: Final = "/__spent"
_AHEAD: Final = 512 << 10
"""Bytes that a client may send ahead of a link, in the system's memory; the system counts twice that."""
_REASONS: Final = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}


class _GoneError(Exception):
    """The client has ended the connection."""


class _Wire:
    """The network that all connections of a server share, with one speed for each direction; None: no limit."""

    def __init__(self, rate: float | None) -> None:
        self._ways = None if rate is None else {True: _held(rate), False: _held(rate)}

    def turns(self, length: int, *, up: bool) -> Iterator[int]:
        """Cut `length` bytes in pieces, and wait for each -> their lengths."""
        if self._ways is None:
            if length:
                yield length
            return
        for start in range(0, length, PIECE):
            size = min(PIECE, length - start)
            self._ways[up].take(size)
            yield size


def _held(rate: float) -> Bandwidth:
    return Bandwidth(rate, sleep=time.sleep)


class _Connection:
    """One client's requests, one after the other."""

    def __init__(self, link: socket.socket, buckets: Buckets, wire: _Wire) -> None:
        self._link = link
        self._buckets = buckets
        self._wire = wire
        self._ahead = bytearray()  # bytes received behind the present request

    def serve(self) -> None:
        """Serve until the client disconnects."""
        link = self._link
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                self._one()
        except (_GoneError, OSError):
            pass
        finally:
            link.close()

    def _one(self) -> None:
        method, target, headers = self._head()
        path, _, query = target.partition("?")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        if headers.get("expect", "").lower() == "100-continue":
            self._link.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._body(headers)
        if path == _SPENT:
            told = json.dumps({"cpu": time.process_time()}).encode()
            self._say(method, Answer(200, (), (memoryview(told),)))
            return
        words = dict(parse_qsl(query, keep_blank_values=True))
        self._say(method, self._buckets.answer(Asked(method, bucket, key, words, headers, body)))
        if headers.get("connection", "").lower() == "close":
            raise _GoneError  # the fault proxy reads an answer to its end

    def _head(self) -> tuple[str, str, dict[str, str]]:
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            data = self._link.recv(_HEAD)
            if not data or len(self._ahead) > _HEAD:
                raise _GoneError
            self._ahead += data
        lines = self._ahead[:end].decode("latin-1").split("\r\n")
        del self._ahead[: end + 4]
        method, target, _ = lines[0].split(" ", 2)
        cut = (line.partition(":") for line in lines[1:])
        return method, target, {name.lower(): value.strip() for name, _, value in cut}

    def _body(self, headers: Mapping[str, str]) -> Body:
        if "chunked" in headers.get("transfer-encoding", ""):
            raise _GoneError  # none of the compared clients does that
        body = Body(int(headers.get("content-length") or 0))
        had = min(len(self._ahead), len(body.view))
        body.view[:had] = self._ahead[:had]
        del self._ahead[:had]
        for size in self._wire.turns(len(body.view) - had, up=True):
            end = had + size
            while had < end:
                count = self._link.recv_into(body.view[had:end], 0, socket.MSG_WAITALL)
                if not count:
                    raise _GoneError
                had += count
        if "aws-chunked" in headers.get("content-encoding", ""):
            return _unchunked(body)
        return body

    def _say(self, method: str, answer: Answer) -> None:
        length = sum(map(len, answer.parts)) if answer.length is None else answer.length
        lines = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Refused')}"]
        lines += [f"{name}: {value}" for name, value in (*answer.headers, ("Content-Length", str(length)))]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if method == "HEAD" or not length:
            self._link.sendall(head)
            return
        if length <= _HEAD:
            self._link.sendall(b"".join((head, *answer.parts)))
            return
        self._link.sendall(head)
        for part in answer.parts:
            at = 0
            for size in self._wire.turns(len(part), up=False):
                self._link.sendall(part[at : at + size])
                at += size


def _unchunked(body: Body) -> Body:
    """The bytes of a body in AWS' own framing: ``length in hex;chunk-signature=...``, bytes, and so on."""
    raw, at, found = bytes(body.view), 0, bytearray()
    while True:
        end = raw.index(b"\r\n", at)
        length = int(raw[at:end].partition(b";")[0], 16)
        if not length:
            break
        found += raw[end + 2 : end + 2 + length]
        at = end + 4 + length
    plain = Body(len(found))
    plain.view[:] = found
    return plain


class FastServer:
    """Listens on loopback.

    Attributes:
        port: the port.
    """

    def __init__(self, port: int = 0, rate: float | None = None) -> None:
        """Args:
        rate: bytes per second in each direction, all connections together; None: no limit.
        """
        self._buckets = Buckets()
        self._wire = _Wire(rate)
        self._link = socket.create_server(("127.0.0.1", port), backlog=256)
        if rate is not None:
            # Prevents: many megabytes of each body that arrive at once, at the speed of loopback.
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _AHEAD)
        self.port = int(self._link.getsockname()[1])

    def create(self, bucket: str) -> None:
        """Make a bucket."""
        self._buckets.answer(Asked("PUT", bucket, "", {}, {}, Body(0)))

    def serve(self) -> None:
        """Serve for ever."""
        while True:
            link, _ = self._link.accept()
            connection = _Connection(link, self._buckets, self._wire)
            threading.Thread(target=connection.serve, daemon=True).start()


@contextmanager
def serving_fast(link: str | None = None) -> Iterator[Server]:
    """The server in a separate process, with a bucket, until the ``with`` ends.

    Args:
        link: the speed of the simulated network, as ``10Gbit/s``; None: no network.
    """
    command = [sys.executable, "-m", "tools.objects.fast_server", "--bucket", _BUCKET]
    command += ["--link", link] if link else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            yield Server(f"s3://{_BUCKET}", options_for(port), port)
        finally:
            process.kill()


def spent(port: int) -> float:
    """Seconds of CPU time that the server at a port took so far."""
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", _SPENT)
    seconds = float(json.loads(connection.getresponse().read())["cpu"])
    connection.close()
    return seconds


@click.command()
@click.option("--port", type=int, default=0, help="Where to listen on loopback; 0: anywhere.")
@click.option("--bucket", default=_BUCKET, help="A bucket that exists from the start.")
@click.option("--link", type=RATE, help="How fast the network is, each way: 10Gbit/s. Default: as fast as loopback.")
def main(port: int, bucket: str, link: float | None) -> None:
    """Serve until the process is ended; the first line of output is the address."""
    server = FastServer(port, link)
    server.create(bucket)
    click.echo(f"http://127.0.0.1:{server.port}")
    sys.stdout.flush()
    server.serve()


if __name__ == "__main__":
    main()
