"""A proxy in front of an S3 server that injects the failures of networks and servers, by rules that tests give.

::

    with FaultProxy(port) as proxy:
        proxy.rules([Rule("lost_ack", operation="create", path="log/", times=1)])
        ...
        proxy.log()   # every request, and the fault that hit it

    python -m tools.objects.proxy --upstream 4566 --port 4900
    curl -X PUT localhost:4900/__faults/rules -d '[{"fault": "503", "operation": "create"}]'
    curl localhost:4900/__faults/log        # also: injected (count of each fault), late (requests still in flight)

Operations: ``create`` (conditional PUT), ``put``, ``begin``, ``part``, ``complete`` and ``abort`` of an upload,
``get``, ``range``, ``head``, ``list``, ``delete``. One client per proxy: rules do not distinguish clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import unquote

import click

CONTROL: Final = "/__faults/"
STATUSES: Final = {
    "409": ("409 Conflict", "ConditionalRequestConflict"),
    "412": ("412 Precondition Failed", "PreconditionFailed"),
    "500": ("500 Internal Server Error", "InternalError"),
    "503": ("503 Slow Down", "SlowDown"),
    "403": ("403 Forbidden", "AccessDenied"),
}
WRITES: Final = ("create", "put", "begin", "part", "complete", "delete")
READS: Final = ("get", "range", "list", "head")
BODIES: Final = ("get", "range", "list")
FAULTS: Final[dict[str, tuple[str, ...]]] = {
    "lost_ack": (*WRITES, *READS),
    "duplicate": (*WRITES, *READS),
    "late": WRITES,
    "reset": (*WRITES, *READS),
    "409": ("create",),
    "412": ("create",),
    "500": (*WRITES, *READS),
    "500_after": WRITES,
    "503": (*WRITES, *READS),
    "slow": (*WRITES, *READS),
    "stall": (*WRITES, *BODIES),
    "truncate": BODIES,
    "short": BODIES,
    "flip_down": ("get", "range"),
    "flip_up": ("create", "put", "part"),
    "stale_list": ("list",),
}
"""The operations that each fault can hit. (``unconditional`` and ``403`` have their own tests.)"""


@dataclass(frozen=True)
class Rule:
    """A fault, and the requests that it hits.

    Attributes:
        fault: one of `FAULTS`, ``unconditional`` (the condition is not forwarded to the server) or ``403``.
        operation: which requests; empty: all.
        path: a regular expression in the path (decoded, without the query).
        times: how many at most; -1: all.
        skip: how many matching requests pass first.
        seconds: how late or slow.
        odds: share of the matching requests that it hits.
    """

    fault: str
    operation: str = ""
    path: str = ""
    times: int = -1
    skip: int = 0
    seconds: float = 0.2
    odds: float = 1.0


@dataclass
class Request:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0])

    @property
    def operation(self) -> str:
        query = self.target.partition("?")[2]
        match self.method:
            case "PUT" if "partNumber=" in query:
                return "part"
            case "PUT":
                return "create" if self.header("if-none-match") else "put"
            case "POST":
                return "complete" if "uploadId=" in query else "begin"
            case "DELETE":
                return "abort" if "uploadId=" in query else "delete"
            case "GET" if "list-type=" in query or "prefix=" in query:
                return "list"
            case "GET":
                # A whole object is requested from its first byte on, so that the answer has its length.
                return "get" if self.header("range") in ("", "bytes=0-") else "range"
        return "head"

    def encoded(self) -> bytes:
        kept = [(key, value) for key, value in self.headers if key.lower() != "connection"]
        lines = [f"{self.method} {self.target} HTTP/1.1", *(f"{key}: {value}" for key, value in kept)]
        return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + self.body


@dataclass
class Response:
    status: str
    headers: list[tuple[str, str]]
    body: bytes
    head: bool = False

    def encoded(self, announced: int | None = None) -> bytes:
        left_out = {"connection", "transfer-encoding", *(() if self.head else ("content-length",))}
        kept = [(key, value) for key, value in self.headers if key.lower() not in left_out]
        length = len(self.body) if announced is None else announced
        lines = [f"HTTP/1.1 {self.status}", *(f"{key}: {value}" for key, value in kept)]
        own = [] if self.head else [f"Content-Length: {length}"]
        return "\r\n".join([*lines, *own, "", ""]).encode("latin-1") + (b"" if self.head else self.body)


def refusal(fault: str) -> Response:
    status, code = STATUSES[fault]
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
    more = [("Retry-After", "1")] if fault == "503" else []
    return Response(status, [("Content-Type", "application/xml"), *more], text.encode())


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    method, target, _ = head[0].split(" ", 2)
    headers = [(line.partition(":")[0], line.partition(":")[2].strip()) for line in head[1:] if line]
    request = Request(method, target, headers, b"")
    request.body = await reader.readexactly(int(request.header("content-length") or 0))
    return request


def parsed_response(data: bytes, head: bool) -> Response:
    start, _, body = data.partition(b"\r\n\r\n")
    lines = start.decode("latin-1").split("\r\n")
    headers = [(line.partition(":")[0], line.partition(":")[2].strip()) for line in lines[1:]]
    if any(key.lower() == "transfer-encoding" for key, _ in headers):
        body = b"".join(unchunked(body))
    return Response(lines[0].partition(" ")[2], headers, body, head)


def unchunked(body: bytes) -> Iterator[bytes]:
    while body:
        length, _, rest = body.partition(b"\r\n")
        size = int(length, 16)
        if not size:
            return
        yield rest[:size]
        body = rest[size + 2 :]


class _GoneError(Exception):
    """The client gets no answer."""


@dataclass
class _Active:
    rule: Rule
    seen: int = 0
    done: int = 0


@dataclass
class Faults:
    """The rules, and the injected faults. Used by one thread, that of the loop."""

    rules: list[_Active] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    numbers: random.Random = field(default_factory=lambda: random.Random(0))
    lists: dict[str, bytes] = field(default_factory=dict)
    """The answer before the last one to each listing."""
    newest: dict[str, bytes] = field(default_factory=dict)

    def chosen(self, request: Request) -> Rule | None:
        operation = request.operation
        for active in self.rules:
            rule = active.rule
            if rule.operation not in ("", operation) or not re.search(rule.path, request.path):
                continue
            if rule.fault in FAULTS and operation not in FAULTS[rule.fault]:
                continue
            active.seen += 1
            if active.seen <= rule.skip or active.done == rule.times or self.numbers.random() >= rule.odds:
                continue
            active.done += 1
            return rule
        return None

    def flipped(self, body: bytes) -> bytes:
        if not body:
            return body
        at = self.numbers.randrange(len(body))
        return body[:at] + bytes([body[at] ^ (1 << self.numbers.randrange(8))]) + body[at + 1 :]


def injected(log: Sequence[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """How often each fault was injected into each operation, by a proxy's log."""
    return Counter((one["fault"], one["operation"]) for one in log if one["fault"])


class FaultProxy:
    """The proxy, in its own thread while the ``with`` lasts.

    Attributes:
        port: where it listens, on loopback.
    """

    def __init__(self, upstream: int, port: int = 0, seed: int = 0) -> None:
        self._upstream = upstream
        self.port = port
        self._faults = Faults(numbers=random.Random(seed))
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faultproxy", daemon=True)
        self._later: set[asyncio.Task[None]] = set()
        self._busy = 0  # requests in flight, also of clients that are gone

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def rules(self, rules: Sequence[Rule]) -> None:
        """Replace the rules."""
        self._in_loop(lambda: setattr(self._faults, "rules", [_Active(rule) for rule in rules]))

    def log(self) -> list[dict[str, Any]]:
        """Every request so far: operation, path, fault (empty: none), status that the client got."""
        return self._in_loop(lambda: list(self._faults.log))

    def injected(self) -> Counter[tuple[str, str]]:
        """How often each fault was injected into each operation."""
        return injected(self.log())

    def settle(self) -> None:
        """Wait until late requests have arrived."""
        while self._in_loop(lambda: bool(self._later)):
            time.sleep(0.02)

    def _in_loop(self, call: Any) -> Any:
        if not self._thread.is_alive():  # it has ended: its state is read directly
            return call()

        async def inside() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(120)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._client, "127.0.0.1", self.port, limit=1 << 20)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await read_request(reader)) is not None:
                if request.path.startswith(CONTROL):
                    writer.write(self._controlled(request).encoded())
                else:
                    self._busy += 1
                    try:
                        await self._serve(request, writer)
                    finally:
                        self._busy -= 1
                await writer.drain()
        except (_GoneError, ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            with contextlib.suppress(ConnectionError):
                writer.close()

    def _controlled(self, request: Request) -> Response:
        if request.method == "PUT":
            rules = [_Active(Rule(**one)) for one in json.loads(request.body)]
            self._faults.rules = rules
        match request.path.removeprefix(CONTROL):
            case "log":
                body: Any = self._faults.log
            case "injected":
                body = [[*kind, count] for kind, count in injected(self._faults.log).items()]
            case "late":
                body = len(self._later) + self._busy
            case _:
                body = [asdict(one.rule) | {"done": one.done} for one in self._faults.rules]
        return Response("200 OK", [("Content-Type", "application/json")], json.dumps(body).encode())

    async def _serve(self, request: Request, writer: asyncio.StreamWriter) -> None:
        rule = self._faults.chosen(request)
        entry = {"operation": request.operation, "path": request.path, "fault": rule.fault if rule else "", "status": 0}
        self._faults.log.append(entry)
        if rule is None:
            response = await self._forward(request)
            entry["status"] = int(response.status[:3])
            writer.write(response.encoded())
            return
        await self._faulty(rule, request, writer, entry)

    async def _faulty(self, rule: Rule, request: Request, writer: asyncio.StreamWriter, entry: dict[str, Any]) -> None:
        fault = rule.fault
        if fault in STATUSES:
            entry["status"] = int(fault)
            writer.write(refusal(fault).encoded())
            return
        if fault == "late":
            task = asyncio.ensure_future(self._apply_later(request, rule.seconds))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
        if fault in ("reset", "late"):
            raise _GoneError
        if fault == "slow":
            await asyncio.sleep(rule.seconds)
        if fault == "flip_up":
            request = replace(request, body=self._faults.flipped(request.body))
        if fault == "unconditional":
            headers = [one for one in request.headers if one[0].lower() != "if-none-match"]
            request = replace(request, headers=headers)
        if fault == "duplicate":
            await self._forward(request)
        response = await self._forward(request)
        entry["status"] = int(response.status[:3])
        if fault == "lost_ack":
            raise _GoneError
        if fault == "500_after":
            entry["status"] = 500
            response = refusal("500")
        await self._answer(rule, request, response, writer)

    async def _answer(self, rule: Rule, request: Request, response: Response, writer: asyncio.StreamWriter) -> None:
        """Send the rest of an answer."""
        fault, body = rule.fault, response.body
        if fault in ("truncate", "stall"):
            half = replace(response, body=body[: len(body) // 2])
            writer.write(half.encoded(len(body)) if fault == "truncate" or body else b"HTTP/1.1 ")
            await writer.drain()
            if fault == "stall":
                await asyncio.sleep(rule.seconds)
            raise _GoneError
        if fault == "short":
            response = replace(response, body=body[: max(0, len(body) - 1 - self._faults.numbers.randrange(7))])
        if fault == "flip_down" and response.status.startswith("2"):
            response = replace(response, body=self._faults.flipped(body))
        if fault == "stale_list":
            response = replace(response, body=self._faults.lists.get(request.target, body))
        writer.write(response.encoded())

    async def _apply_later(self, request: Request, seconds: float) -> None:
        await asyncio.sleep(seconds)
        with contextlib.suppress(_GoneError, OSError):
            await self._forward(request)

    async def _forward(self, request: Request) -> Response:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            writer.write(request.encoded())
            await writer.drain()
            data = await reader.read(-1)
        finally:
            writer.close()
        if not data:
            raise _GoneError
        response = parsed_response(data, request.method == "HEAD")
        if request.operation == "list":
            faults = self._faults
            if request.target in faults.newest:
                faults.lists[request.target] = faults.newest[request.target]
            faults.newest[request.target] = response.body
        return response


@click.command()
@click.option("--upstream", type=int, required=True, help="Port of the server on loopback.")
@click.option("--port", type=int, default=0, help="Where to listen on loopback; 0: anywhere.")
@click.option("--seed", type=int, default=0)
def main(upstream: int, port: int, seed: int) -> None:
    """Run a proxy without rules until rules are PUT to /__faults/rules."""
    with FaultProxy(upstream, port, seed) as proxy:
        click.echo(f"http://127.0.0.1:{proxy.port} -> {upstream}")
        threading.Event().wait()


if __name__ == "__main__":
    main()
