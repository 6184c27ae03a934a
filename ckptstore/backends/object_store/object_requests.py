"""Send requests to one bucket through obstore: counted, retried a bounded number of times, with the project's errors.

obstore sends each request once (its own retries are off), so that every request is counted and no conditional create is
repeated without our knowledge. The parts of a multipart upload are the exception.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import numpy as np
import obstore
from obstore.store import AzureStore, GCSStore, S3Store

from ckptstore.backends.base import OBJECT_LIMIT, too_long
from ckptstore.backends.costs import Costs
from ckptstore.backends.object_store.object_errors import RAISED, Failure, understood
from ckptstore.backends.object_store.object_options import ObjectPlace
from ckptstore.backends.system_errors import ON_THE_WAY
from ckptstore.errors import CkptError, CorruptSegmentError, MissingDependencyError, StorageError, UsageError
from ckptstore.host.bandwidth import PIECE, Bandwidth
from ckptstore.host.cancellable_calls import cancellable, nap

__all__ = ["PART", "Requests"]

PART: Final = 16 << 20
"""Bytes of a part of a multipart upload."""
_PARTS_AT_ONCE: Final = 8
_PAGE: Final = 1000
"""Keys per list request."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0
_MD5: Final = 32
_FROM_THE_START: Final = {"range": {"offset": 0}}

_T = TypeVar("_T")
_asked_by: int | None = None
"""The process in which obstore's threads run: set by the first request, and wrong in its forks."""


class Requests:
    """Requests of a backend to its bucket. Thread-safe.

    Attributes:
        costs: requests and bytes so far.
        tries: maximum number of times that a request is sent.
        bandwidth: limits the rate of objects' bytes; None: no limit.
    """

    def __init__(self, place: ObjectPlace) -> None:
        """Prepare the clients; sends nothing. Raises `UsageError`, `MissingDependencyError`, `StorageError`."""
        self.costs = Costs()
        self.tries = place.tries
        self.bandwidth = None if place.bandwidth is None else Bandwidth(place.bandwidth)
        self._url = place.url
        self._process = os.getpid()
        self.check_process()
        self._endpoint = place.endpoint
        self._patience = place.patience
        self._now = threading.local()
        self._once = _store(place, 0)
        self._again = _store(place, max(0, place.tries - 1))
        self._tags_are_md5 = place.scheme == "s3"

    def check_process(self) -> None:
        """Raise `UsageError` in a forked child: obstore's threads run in the parent, and a request would never end."""
        here = os.getpid()
        # Prevents: a child that hangs forever, silently.
        if here != self._process:
            raise UsageError(
                f"{self._url}: this store was opened before a fork, and its connections belong to the parent: open it "
                "again in the child, after spawn or forkserver"
            )
        if _asked_by is not None and here != _asked_by:
            raise UsageError(
                f"{self._url}: this process was forked from process {_asked_by}, which had used a bucket and has the "
                "threads that send requests: start this process with multiprocessing's spawn or forkserver (for a "
                "DataLoader: multiprocessing_context='spawn')"
            )

    def name(self, key: str) -> str:
        """The name of an object in errors."""
        return f"{self._url}: {key}" if key else self._url

    def pause(self, done: int) -> None:
        """Sleep before a retry, after `done` tries: longer each time, with a random part that separates clients."""
        nap(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**done) * random.SystemRandom().uniform(0.5, 1.0))

    @contextmanager
    def patient(self) -> Iterator[Callable[[], bool]]:
        """Treat the requests within as one operation -> a function that tells whether there is time for a retry."""
        before: float | None = getattr(self._now, "end", None)
        self._now.end = before or time.monotonic() + (self._patience or math.inf)
        end = self._now.end
        try:
            yield lambda: time.monotonic() < end
        finally:
            self._now.end = before

    # -- reading

    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        """Read the whole object. Raises as `Backend.get`.

        It is requested as a range, because the answer then contains the object's size. A body that was cut short on the
        way may come with a matching Content-Length, and would be mistaken for damage in the store.

        If the server's ETag is the MD5 of the bytes, the two are compared, and the object is requested again if they
        differ. Otherwise a bit that flipped on the way would look like a damaged slot.
        """
        before: bytes | None = None
        for done in range(self.tries):
            data, tag = self._whole(key, limit)
            if not self._tags_are_md5 or len(tag) != _MD5 or _md5(data) == tag:
                return data
            if data == before:  # the same bytes twice: the tag is not an MD5 (SSE-KMS)
                self._tags_are_md5 = False
                return data
            before = data
            self.pause(done)
        raise StorageError(ON_THE_WAY, "cannot read: each answer had other bytes", self.name(key))

    def _whole(self, key: str, limit: int) -> tuple[bytes, str]:
        try:
            return self._run("get", key, lambda: self._got(key, limit, _FROM_THE_START))
        except StorageError as error:
            if error.errno != errno.ERANGE:
                raise
        # An empty object has no byte that a range could name.
        return self._run("get", key, lambda: self._got(key, limit, {}))

    def _got(self, key: str, limit: int, options: Any) -> tuple[bytes, str]:
        self.costs.count("get")

        def whole() -> tuple[bytes | None, int, str]:
            result = obstore.get(self._once, key, options=options)
            size = result.meta["size"]
            return None if size > limit else bytes(result.bytes()), size, result.meta["e_tag"] or ""

        data, size, tag = cancellable(whole)
        self._pay(0 if data is None else len(data))  # its length was unknown before, so later requests wait for it
        if data is None:
            raise too_long(self.name(key), size, limit)
        self.costs.receive(len(data))
        if len(data) != size:
            raise _ShortError
        return data, tag.strip('"')

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start`. Raises `CorruptSegmentError` if the object has fewer."""

        def call() -> None:
            self._pay(len(out))
            self.costs.count("range")
            # Copy the bytes here: a request that was abandoned must not write to memory that is in use again.
            data = memoryview(cancellable(lambda: obstore.get_range(self._once, key, start=start, length=len(out))))
            self.costs.receive(len(data))
            if len(data) != len(out):  # obstore accepts a short body with a matching Content-Length
                raise _ShortError
            np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))  # releases the GIL

        if not len(out):
            return
        try:
            self._run("range", key, call)
        except StorageError as error:
            if error.errno == errno.ERANGE:
                text = f"{self.name(key)} ends before byte {start + len(out)}, although it was longer"
                raise CorruptSegmentError(text) from None
            raise

    def get_start(self, key: str, length: int) -> tuple[bytes, int]:
        """The first bytes of an object, at most `length`, and the size of all of it. Raises as `size`."""

        def call() -> tuple[bytes, int]:
            self.costs.count("range")

            def start() -> tuple[bytes, int]:
                result = obstore.get(self._once, key, options={"range": (0, length)})
                return bytes(result.bytes()), result.meta["size"]

            data, size = cancellable(start)
            self._pay(len(data))  # its length was unknown before, so later requests wait for it
            self.costs.receive(len(data))
            if len(data) != min(length, size):
                raise _ShortError
            return data, size

        try:
            return self._run("range", key, call)
        except StorageError as error:
            if error.errno != errno.ERANGE:
                raise
            return b"", 0  # an empty object has no byte that a range could name

    def size(self, key: str) -> int:
        """Length of an object. Raises as `Backend.size`."""

        def call() -> int:
            self.costs.count("head")
            return cancellable(lambda: obstore.head(self._once, key)["size"])

        return self._run("head", key, call)

    def keys(self, prefix: str) -> list[str]:
        """List the keys below a folder. Raises `StorageError`, `ForeignObjectError`."""
        return list(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """List the keys below a folder, each with the bytes of its object. Raises as `keys`."""

        def call() -> dict[str, int]:
            self.costs.count("list")
            batches = cancellable(lambda: list(obstore.list(self._once, prefix or None, chunk_size=_PAGE)))
            found = {one["path"]: one["size"] for batch in batches for one in batch}
            self.costs.count("list", max(0, len(found) - 1) // _PAGE)
            return found

        return self._run("list", prefix, call)

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below a folder. Raises as `keys`."""

        def call() -> list[str]:
            self.costs.count("list")
            found = cancellable(lambda: obstore.list_with_delimiter(self._once, prefix or None))
            return [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]

        return self._run("list", prefix, call)

    # -- writing

    def create(self, key: str, data: bytes | Sequence[memoryview]) -> None:
        """Send one PUT with ``If-None-Match: *``, and a second only if the first certainly had no effect.

        Raises:
            KeyExistsError: the server answered 412 or 409. After 409 the key may still be absent.
            StorageError: anything else; whether the object exists is unknown, except with `unsent`.
        """
        parts: list[bytes | memoryview] = [data] if isinstance(data, bytes) else list(data)
        size = sum(map(len, parts))

        def call() -> None:
            self._pay(size)
            self.costs.count("create", sent=size)
            cancellable(lambda: obstore.put(self._once, key, parts, mode="create", use_multipart=False))

        self._run("create", key, call, writing=True, doubtful=False)

    def replace(self, key: str, data: bytes) -> None:
        """Send one PUT that overwrites. Raises `StorageError`."""

        def call() -> None:
            self._pay(len(data))
            self.costs.count("put", sent=len(data))
            cancellable(lambda: obstore.put(self._once, key, data, use_multipart=False))

        self._run("put", key, call, writing=True)

    def upload(self, key: str, parts: Sequence[memoryview], size: int) -> None:
        """Send one multipart upload; each part may be sent several times. Raises `CkptError`: the result is unknown."""

        def call() -> None:
            self.costs.count("part", 2 + -(-size // PART), sent=size)
            how: dict[str, Any] = {"chunk_size": PART, "max_concurrency": _PARTS_AT_ONCE}
            data: Any = parts if self.bandwidth is None else self._paced(parts)
            cancellable(lambda: obstore.put(self._again, key, data, use_multipart=True, **how))

        self._run("part", key, call, writing=True, doubtful=False)

    def _paced(self, parts: Sequence[memoryview]) -> Iterator[memoryview]:
        """The bytes of an upload, in pieces that the bandwidth limit allows."""
        for part in parts:
            for start in range(0, len(part), PIECE):
                piece = memoryview(part)[start : start + PIECE]
                self._pay(len(piece))
                yield piece

    def _pay(self, nbytes: int) -> None:
        if self.bandwidth is not None:
            self.bandwidth.take(nbytes)

    def delete(self, key: str) -> None:
        """Delete the object; a missing key is not an error. Raises `StorageError`."""

        def call() -> None:
            self.costs.count("delete")
            try:
                cancellable(lambda: obstore.delete(self._once, key))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise

        self._run("delete", key, call, writing=True)

    # -- both

    def _run(self, kind: str, key: str, call: Callable[[], _T], *, writing: bool = False, doubtful: bool = True) -> _T:
        """Send a request, and send it again while that is useful.

        Args:
            doubtful: retry also after a request that may have had an effect or may still have one.
        """
        global _asked_by
        self.check_process()
        _asked_by = os.getpid()
        failure, done = _SHORT, 0
        with self.patient() as in_time:
            for done in range(self.tries):
                if done:
                    self.pause(done - 1)
                    self.costs.count(kind, 0, repeated=True)
                result = _tried(call)
                if not isinstance(result, Failure):
                    return result
                failure = result
                if not failure.passing or not (doubtful or failure.undone) or not in_time():
                    break
        if failure.status == 416:
            raise StorageError(errno.ERANGE, "the object is shorter", self.name(key))
        where = f" at {self._endpoint}" if self._endpoint and not failure.status else ""
        raise failure.error(self.name(key), f"{where}, {done + 1} times" if done else where, writing=writing)


class _ShortError(Exception):
    """The answer had fewer bytes than announced or requested. Not raised outside this module."""


_SHORT: Final = Failure("fewer bytes came than were asked for", kind="Decode")


def _tried(call: Callable[[], _T]) -> _T | Failure:
    """The result of a request, or why it failed. Drops obstore's error, because its text may hold credentials."""
    try:
        return call()
    except CkptError:
        raise
    except _ShortError:
        return _SHORT
    except RAISED as error:
        return understood(error)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _store(place: ObjectPlace, retries: int) -> Any:
    """Make obstore's store for a place. Raises `UsageError`, `MissingDependencyError`, `StorageError`."""
    config: Any = dict(place.config)
    more: dict[str, Any] = {
        "prefix": place.prefix or None,
        "client_options": dict(place.client),
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=min(180, place.patience or 180))},
    }
    failure: Failure | None = None
    try:
        if place.from_files:
            more["credential_provider"] = _from_files(place, config)
        if place.scheme == "s3":
            return S3Store(place.bucket, config=config, **more)
        if place.scheme == "gs":
            return GCSStore(place.bucket, config=config, **more)
        return AzureStore(place.bucket, config=config, **more)
    except CkptError:
        raise
    except RAISED as error:
        failure = understood(error)
    raise UsageError(f"{place.url}: cannot be opened: {failure.what}")


def _from_files(place: ObjectPlace, config: dict[str, Any]) -> Any:
    """Credentials through boto3: from profile files, SSO, or an external process."""
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise MissingDependencyError("profile files are read by boto3: pip install boto3") from None
    try:
        session = boto3.Session(profile_name=place.profile)
        if session.region_name:
            config.setdefault("region", session.region_name)
        return Boto3CredentialProvider(session)
    except Exception as error:  # noqa: BLE001 - botocore's errors share no useful base class; none is quoted
        kind = type(error).__name__
    named = "the default profile" if place.profile is None else f"profile {place.profile!r}"
    raise UsageError(f"{place.url}: no credentials in {named} of ~/.aws ({kind})")
