"""Clients that upload a state to a bucket and download it, each as its docs recommend, at its cheapest settings.

Nothing is signed, and nothing is hashed for signatures: over TLS, which real stores use, clients need neither. Clients
that can send a checksum are measured with it (``obstore``, ``ckptstore``: CRC64NVME) and without.
"""

from __future__ import annotations

import http.client
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

__all__ = ["CLIENTS", "Client", "missing"]

PART: Final = 16 << 20
"""Bytes of an upload part."""
RANGE: Final = 8 << 20
"""Bytes of a range read."""
AT_ONCE: Final = 8
REGION: Final = "us-east-1"

State = Mapping[str, np.ndarray[Any, Any]]
"""Name -> float32, in the order in which `Client.restored` returns the bytes."""


class Client(ABC):
    """One client. In its own process; used for a small state first.

    Args:
        endpoint: of the server.
        place: bucket and prefix.
    """

    def __init__(self, endpoint: str, place: str) -> None:
        self.endpoint = endpoint
        self.bucket, _, self.prefix = place.partition("/")

    def ready(self, state: State) -> None:  # noqa: B027 - most need nothing
        """Do the work that a training run does once, before its first save."""

    @abstractmethod
    def save(self, state: State) -> None:
        """Upload a state; when this returns, it is durable as far as the server goes."""

    @abstractmethod
    def restored(self, names: Iterable[str], nbytes: int) -> Iterable[memoryview]:
        """All of it in memory -> its bytes, in order, in pieces of any length."""


def _cut(state: State, size: int) -> Iterator[memoryview]:
    for tensor in state.values():
        data = memoryview(tensor).cast("B")
        for start in range(0, len(data), size):
            yield data[start : start + size]


def _ranges(nbytes: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)]


class Sockets(Client):
    """No client: plain HTTP over sockets, an object for each 16 MiB. It shows the server's limit."""

    def _asked(self, method: str, number: int, body: memoryview | None = None, out: memoryview | None = None) -> None:
        link = http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=60)
        link.request(method, f"/{self.bucket}/{self.prefix}/{number}", body)
        answer = link.getresponse()
        assert answer.status == 200, answer.status
        if out is None:
            answer.read()
        else:
            done = 0
            while done < len(out):
                done += answer.readinto(out[done:])
        link.close()

    def save(self, state: State) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            parts = list(_cut(state, PART))
            list(pool.map(partial(self._asked, "PUT"), range(len(parts)), parts))
        self._lengths = [len(part) for part in parts]

    def restored(self, names: Iterable[str], nbytes: int) -> Iterable[memoryview]:  # noqa: ARG002
        memory = memoryview(np.empty(nbytes, np.uint8)).cast("B")
        ends = np.cumsum([0, *self._lengths])
        jobs = [memory[start:end] for start, end in pairwise(ends)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda pair: self._asked("GET", pair[0], out=pair[1]), enumerate(jobs)))
        return [memory]


class Obstore(Client):
    """obstore directly: one multipart upload without a copy; ranges in parallel, used where they arrived."""

    checksum: str | None = "crc64nvme"

    def __init__(self, endpoint: str, place: str) -> None:
        from obstore.store import S3Store

        super().__init__(endpoint, place)
        config: Any = {"endpoint": endpoint, "region": REGION, "skip_signature": True}
        if self.checksum:
            config["checksum_algorithm"] = self.checksum
        self._store = S3Store(self.bucket, config=config, client_options={"allow_http": True})

    def save(self, state: State) -> None:
        import obstore

        how: dict[str, Any] = {"use_multipart": True, "chunk_size": PART, "max_concurrency": AT_ONCE}
        obstore.put(self._store, f"{self.prefix}/state", list(_cut(state, PART)), **how)

    def restored(self, names: Iterable[str], nbytes: int) -> Iterable[memoryview]:  # noqa: ARG002
        import obstore

        def one(cut: tuple[int, int]) -> memoryview:
            return memoryview(obstore.get_range(self._store, f"{self.prefix}/state", start=cut[0], length=cut[1]))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, _ranges(nbytes, RANGE)))


class ObstoreWithoutChecksum(Obstore):
    """Likewise without a checksum: only TCP notices a damaged byte."""

    checksum = None


class Ckptstore(Client):
    """`Writer.save` and `Store.load`: hashed, committed, verified."""

    checked = True

    def _open(self) -> Any:
        import ckptstore

        words: dict[str, Any] = {"endpoint_url": self.endpoint, "anon": True, "client_kwargs": {"region_name": REGION}}
        words |= {} if self.checked else {"checksum": False}
        return ckptstore.open(f"s3://{self.bucket}/{self.prefix}", storage_options=words)

    def ready(self, state: State) -> None:  # noqa: ARG002 - `prepare` is for `save_async`: `save` takes no memory
        self._writer = self._open().writer(poll_seconds=None)

    def save(self, state: State) -> None:
        self._step = getattr(self, "_step", 0) + 1
        self._writer.save(dict(state), self._step)

    def restored(self, names: Iterable[str], nbytes: int) -> Iterable[memoryview]:  # noqa: ARG002
        found = self._open().load(framework="numpy")
        return [memoryview(found[name]).cast("B") for name in names]


class CkptstoreWithoutChecksum(Ckptstore):
    """Likewise, without CRC64NVME."""

    checked = False


class Boto3(Client):
    """boto3 with threads: `upload_part` and `get_object` of ranges."""

    def __init__(self, endpoint: str, place: str) -> None:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        super().__init__(endpoint, place)
        config = Config(
            signature_version=UNSIGNED,
            max_pool_connections=2 * AT_ONCE,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._client = boto3.client("s3", endpoint_url=endpoint, region_name=REGION, config=config)
        self._where = {"Bucket": self.bucket, "Key": f"{self.prefix}/state"}

    def save(self, state: State) -> None:
        upload = self._client.create_multipart_upload(**self._where)["UploadId"]

        def one(number: int, part: memoryview) -> dict[str, Any]:
            said = self._client.upload_part(**self._where, UploadId=upload, PartNumber=number, Body=bytes(part))
            return {"PartNumber": number, "ETag": said["ETag"]}

        with ThreadPoolExecutor(AT_ONCE) as pool:
            parts = list(_cut(state, PART))
            done = list(pool.map(one, range(1, 1 + len(parts)), parts))
        self._client.complete_multipart_upload(**self._where, UploadId=upload, MultipartUpload={"Parts": done})

    def restored(self, names: Iterable[str], nbytes: int) -> Iterable[memoryview]:  # noqa: ARG002
        def one(cut: tuple[int, int]) -> memoryview:
            said = self._client.get_object(**self._where, Range=f"bytes={cut[0]}-{sum(cut) - 1}")
            return memoryview(said["Body"].read())

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, _ranges(nbytes, RANGE)))


class S3fs(Client):
    """s3fs as a file: written tensor by tensor, read tensor by tensor."""

    def __init__(self, endpoint: str, place: str) -> None:
        import s3fs

        super().__init__(endpoint, place)
        self._files = s3fs.S3FileSystem(
            anon=True, endpoint_url=endpoint, client_kwargs={"region_name": REGION}, config_kwargs=_QUIET
        )

    def save(self, state: State) -> None:
        self._lengths = [tensor.nbytes for tensor in state.values()]
        with self._files.open(f"{self.bucket}/{self.prefix}/state", "wb") as file:
            for tensor in state.values():
                file.write(memoryview(tensor).cast("B"))

    def restored(self, names: Iterable[str], nbytes: int) -> Iterable[memoryview]:  # noqa: ARG002
        with self._files.open(f"{self.bucket}/{self.prefix}/state", "rb", cache_type="none") as file:
            return [memoryview(file.read(length)) for length in self._lengths]


_QUIET: Final = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}


class Dcp(Client):
    """``torch.distributed.checkpoint`` with its fsspec writer and reader, which is s3fs below."""

    def _options(self) -> dict[str, Any]:
        words = {"anon": True, "endpoint_url": self.endpoint, "client_kwargs": {"region_name": REGION}}
        return {**words, "config_kwargs": _QUIET}

    def _path(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def save(self, state: State) -> None:
        import torch
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        tensors = {name: torch.from_numpy(tensor) for name, tensor in state.items()}
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        # Its sync is `os.sync` of the whole machine if a file has no descriptor.
        save(tensors, storage_writer=FsspecWriter(self._path(), sync_files=False, **self._options()), no_dist=True)

    def restored(self, names: Iterable[str], nbytes: int) -> Iterable[memoryview]:  # noqa: ARG002
        import torch
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
        from torch.distributed.checkpoint.state_dict_loader import load

        found = {name: torch.empty(shape) for name, shape in self._shapes.items()}
        load(found, storage_reader=FsspecReader(self._path(), **self._options()), no_dist=True)
        return [memoryview(found[name].numpy()).cast("B") for name in names]


CLIENTS: Final[dict[str, tuple[Callable[[str, str], Client], tuple[str, ...]]]] = {
    "sockets": (Sockets, ()),
    "obstore": (Obstore, ("obstore",)),
    "ckptstore": (Ckptstore, ("obstore",)),
    "obstore-plain": (ObstoreWithoutChecksum, ("obstore",)),
    "ckptstore-plain": (CkptstoreWithoutChecksum, ("obstore",)),
    "boto3": (Boto3, ("boto3",)),
    "s3fs": (S3fs, ("s3fs",)),
    "dcp": (Dcp, ("torch", "s3fs")),
}
"""Name -> its class, and the packages that it needs."""


def missing(name: str) -> str | None:
    """The package that a client lacks here; None: none."""
    return next((package for package in CLIENTS[name][1] if find_spec(package) is None), None)
