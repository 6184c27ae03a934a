"""Buckets in memory that speak enough of S3 for obstore, boto3 and s3fs: signatures are not checked, nothing persists.

The parts that a store's protocol needs are exact: conditional creates and conditional completes with one winner,
consistent listings, ranges, copies. Bodies are kept as received, an upload as its parts: nothing is copied.
"""

from __future__ import annotations

import contextlib
import email.utils
import itertools
import mmap
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote
from xml.sax.saxutils import escape, unescape

__all__ = ["Answer", "Asked", "Body", "Buckets"]

_LARGE: Final = 1 << 20
"""Bytes from which a body's memory is reused after its last user."""
_PAGE: Final = 1000
_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")
_free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
"""Memory by length. Memory that is returned to the system and taken again costs ten times a page fault on some virtual
machines."""


class Body:
    """Memory for the body of a request.

    Attributes:
        view: all of it.
    """

    def __init__(self, length: int) -> None:
        self._memory: mmap.mmap | None = None
        if length < _LARGE:
            self.view = memoryview(bytearray(length))
            return
        try:
            self._memory = _free[length].pop()
        except IndexError:
            self._memory = mmap.mmap(-1, length)
            with contextlib.suppress(OSError, AttributeError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)

    def __del__(self) -> None:
        if self._memory is not None:  # a thread that still sent it would hold this object, too
            _free[len(self._memory)].append(self._memory)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    Attributes:
        bucket, key: decoded; empty where the path has none.
        query: decoded.
        headers: by lower-case name.
    """

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer.

    Attributes:
        parts: the body.
        length: the Content-Length; None: the length of `parts`.
        keeps: the owners of `parts`' memory.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    parts: Sequence[memoryview] = ()
    length: int | None = None
    keeps: object = None


@dataclass(frozen=True, slots=True)
class _Stored:
    bodies: tuple[Body, ...]
    size: int
    tag: str
    modified: float

    def headers(self) -> tuple[tuple[str, str], ...]:
        date = email.utils.formatdate(self.modified, usegmt=True)
        return ("ETag", self.tag), ("Last-Modified", date), ("Accept-Ranges", "bytes"), ("Content-Type", _ANY)

    def cut(self, start: int, end: int) -> Iterator[memoryview]:
        """Bytes `start` to `end`, of as many parts as have them."""
        at = 0
        for body in self.bodies:
            length = len(body.view)
            if at < end and at + length > start:
                yield body.view[max(0, start - at) : min(length, end - at)]
            at += length


@dataclass(slots=True)
class _Bucket:
    objects: dict[str, _Stored] = field(default_factory=dict)
    uploads: dict[str, dict[int, Body]] = field(default_factory=dict)


_ANY: Final = "binary/octet-stream"
_XML: Final = (("Content-Type", "application/xml"),)


def _xml(text: str, status: int = 200) -> Answer:
    data = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Answer(status, _XML, (memoryview(data),))


def _refused(status: int, code: str) -> Answer:
    return _xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>", status)


def _field(text: bytes, name: str) -> list[str]:
    return [unescape(found.decode()) for found in re.findall(rf"<{name}>([^<]*)</{name}>".encode(), text)]


class Buckets:
    """Everything a server has. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, _Bucket] = {}
        self._numbers = itertools.count(1)

    def answer(self, asked: Asked) -> Answer:
        """Answer a request."""
        if not asked.bucket:
            names = "".join(f"<Bucket><Name>{name}</Name></Bucket>" for name in sorted(self._buckets))
            return _xml(f"<ListAllMyBucketsResult><Buckets>{names}</Buckets></ListAllMyBucketsResult>")
        if not asked.key and asked.method == "PUT":
            with self._lock:
                self._buckets.setdefault(asked.bucket, _Bucket())
            return Answer(200)
        bucket = self._buckets.get(asked.bucket)
        if bucket is None:
            return _refused(404, "NoSuchBucket")
        if not asked.key:
            return self._of_bucket(bucket, asked)
        match asked.method:
            case "PUT":
                return self._put(bucket, asked)
            case "POST":
                return self._post(bucket, asked)
            case "DELETE":
                with self._lock:
                    if "uploadId" in asked.query:
                        bucket.uploads.pop(asked.query["uploadId"], None)
                    else:
                        bucket.objects.pop(asked.key, None)
                return Answer(204)
            case "GET" | "HEAD":
                return _read(bucket, asked)
        return _refused(405, "MethodNotAllowed")

    def _of_bucket(self, bucket: _Bucket, asked: Asked) -> Answer:
        match asked.method:
            case "HEAD":
                return Answer(200, _XML)
            case "GET" if "location" in asked.query:
                return _xml("<LocationConstraint/>")
            case "GET" if asked.query.get("list-type") == "2":
                with self._lock:
                    return _listed(bucket, asked)
            case "POST" if "delete" in asked.query:
                keys = _field(bytes(asked.body.view), "Key")
                with self._lock:
                    for key in keys:
                        bucket.objects.pop(key, None)
                told = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
                return _xml(f"<DeleteResult>{told}</DeleteResult>")
            case "DELETE":
                with self._lock:
                    self._buckets.pop(asked.bucket, None)
                return Answer(204)
        return _refused(501, "NotImplemented")

    def _put(self, bucket: _Bucket, asked: Asked) -> Answer:
        if "uploadId" in asked.query:
            with self._lock:
                upload = bucket.uploads.get(asked.query["uploadId"])
                if upload is None:
                    return _refused(404, "NoSuchUpload")
                upload[int(asked.query["partNumber"])] = asked.body
            return Answer(200, (("ETag", self._tag()),))
        if source := asked.headers.get("x-amz-copy-source"):
            return self._copied(bucket, asked, unquote(source).lstrip("/"))
        return self._stored(bucket, asked, (asked.body,))

    def _copied(self, bucket: _Bucket, asked: Asked, source: str) -> Answer:
        name, _, key = source.partition("/")
        with self._lock:
            found = self._buckets[name].objects.get(key) if name in self._buckets else None
        if found is None:
            return _refused(404, "NoSuchKey")
        done = self._stored(bucket, asked, found.bodies)
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
        told = f"<LastModified>{date}</LastModified><ETag>{escape(found.tag)}</ETag>"
        return done if done.status != 200 else _xml(f"<CopyObjectResult>{told}</CopyObjectResult>")

    def _stored(self, bucket: _Bucket, asked: Asked, bodies: tuple[Body, ...]) -> Answer:
        """Make an object of bodies, unless the request's condition forbids it. Of concurrent requests one succeeds."""
        size = sum(len(body.view) for body in bodies)
        stored = _Stored(bodies, size, self._tag(), time.time())
        with self._lock:
            if asked.headers.get("if-none-match") == "*" and asked.key in bucket.objects:
                return _refused(412, "PreconditionFailed")
            bucket.objects[asked.key] = stored
        return Answer(200, (("ETag", stored.tag),))

    def _tag(self) -> str:
        return f'"{next(self._numbers):016x}"'  # not as long as an MD5: clients might take it for one

    def _post(self, bucket: _Bucket, asked: Asked) -> Answer:
        if "uploads" in asked.query:
            name = f"upload-{next(self._numbers)}"
            with self._lock:
                bucket.uploads[name] = {}
            where = f"<Bucket>{escape(asked.bucket)}</Bucket><Key>{escape(asked.key)}</Key>"
            told = f"{where}<UploadId>{name}</UploadId>"
            return _xml(f"<InitiateMultipartUploadResult>{told}</InitiateMultipartUploadResult>")
        numbers = [int(text) for text in _field(bytes(asked.body.view), "PartNumber")]
        with self._lock:
            upload = bucket.uploads.get(asked.query.get("uploadId", ""))
            if upload is None:
                return _refused(404, "NoSuchUpload")
            if not numbers or any(number not in upload for number in numbers):
                return _refused(400, "InvalidPart")
            bodies = tuple(upload[number] for number in numbers)
        done = self._stored(bucket, asked, bodies)
        if done.status != 200:
            return done
        with self._lock:
            bucket.uploads.pop(asked.query["uploadId"], None)
        tag = escape(done.headers[0][1])
        return _xml(f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>")


def _read(bucket: _Bucket, asked: Asked) -> Answer:
    found = bucket.objects.get(asked.key)
    if found is None:
        return _refused(404, "NoSuchKey")
    start, end, status, more = 0, found.size, 200, ()
    if (wanted := _RANGE.fullmatch(asked.headers.get("range", ""))) and any(wanted.groups()):
        first, last = wanted.groups()
        start = int(first) if first else max(0, found.size - int(last))
        end = min(found.size, int(last) + 1) if first and last else found.size
        if start >= end:
            return _refused(416, "InvalidRange")
        status, more = 206, (("Content-Range", f"bytes {start}-{end - 1}/{found.size}"),)
    parts = () if asked.method == "HEAD" else tuple(found.cut(start, end))
    return Answer(status, (*found.headers(), *more), parts, end - start, found)


def _listed(bucket: _Bucket, asked: Asked) -> Answer:
    """A page of a listing (version 2)."""
    query = asked.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = max(query.get("start-after", ""), query.get("continuation-token", ""))
    most = min(_PAGE, int(query.get("max-keys") or _PAGE))
    told: list[str] = []
    folders: list[str] = []
    last = ""
    more = False
    for key in sorted(key for key in bucket.objects if key.startswith(prefix)):
        folder = ""
        if delimiter and delimiter in key[len(prefix) :]:
            folder = prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter
        if (folder or key) <= after or (folder and folders[-1:] == [folder]):
            continue
        if len(told) + len(folders) == most:
            more = True
            break
        last = folder or key
        if folder:
            folders.append(folder)
            continue
        found = bucket.objects[key]
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
        about = f"<LastModified>{date}</LastModified><ETag>{escape(found.tag)}</ETag><Size>{found.size}</Size>"
        told.append(f"<Contents><Key>{escape(key)}</Key>{about}<StorageClass>STANDARD</StorageClass></Contents>")
    told += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders]
    ended = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
    flags = f"<KeyCount>{len(told)}</KeyCount><MaxKeys>{most}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
    name = f"<Name>{escape(asked.bucket)}</Name><Prefix>{escape(prefix)}</Prefix>"
    return _xml(f"<ListBucketResult>{name}{flags}{ended}{''.join(told)}</ListBucketResult>")
