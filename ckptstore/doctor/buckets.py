"""Examine a bucket or an fsspec file system: source of the credentials, safety of commits, speed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from ckptstore.backends import open_backend
from ckptstore.backends.base import Backend
from ckptstore.backends.schemes import BUCKETS
from ckptstore.doctor.clocks import against_server
from ckptstore.doctor.findings import Finding
from ckptstore.doctor.number_text import bandwidth, span
from ckptstore.errors import CkptError, MissingDependencyError, UnsupportedBackendError

__all__ = ["examine_bucket"]

_OBJECT: Final = 8 << 20
_SLOW: Final = 20 << 20
_VARIABLES: Final = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE"),
}
_OWN: Final = {
    "s3": "https://s3.amazonaws.com",
    "gs": "https://storage.googleapis.com",
    "az": "https://login.microsoftonline.com",
}
"""Servers whose clock is compared if no endpoint is given."""


def examine_bucket(url: str, *, quick: bool) -> Iterator[Finding]:
    """Examine the medium behind a URL.

    Sends three requests for the probe; unless `quick`, also writes and reads an object of 8 MiB. Deletes what it wrote.
    Raises nothing: a failure is a finding.
    """
    scheme = urlsplit(url).scheme.lower()
    if scheme in BUCKETS:
        try:
            yield _credentials(url, scheme)
        except CkptError as error:
            yield _failed("credentials", error)
            return
    try:
        backend = open_backend(url, create=True)
    except CkptError as error:
        yield _failed("medium", error)
        return
    try:
        yield (probed := _probed(backend))
        if probed.verdict == "works" and not quick:
            yield _speed(backend)
        if scheme in BUCKETS:
            yield against_server(_endpoint(url) or _OWN[scheme])
    finally:
        backend.close()


def _endpoint(url: str) -> str | None:
    from ckptstore.backends.object_store.object_options import place_of

    return place_of(url).endpoint


def _failed(name: str, error: CkptError) -> Finding:
    hint = getattr(error, "__notes__", None)
    do = hint[-1] if hint else None
    if isinstance(error, MissingDependencyError):
        do = "pip install 'ckptstore[s3]'"
    return Finding("medium", name, "fails", str(error), do)


def _credentials(url: str, scheme: str) -> Finding:
    """Where the credentials come from. Raises `UsageError`, `MissingDependencyError`."""
    from ckptstore.backends.object_store.object_options import place_of

    place = place_of(url)
    found = [name for name in _VARIABLES[scheme] if os.environ.get(name)]
    values = {"source": "environment" if found else "files" if place.from_files else "service"}
    at = f" for {place.endpoint}" if place.endpoint else ""
    if place.config.get("skip_signature"):
        return Finding(
            "medium",
            "credentials",
            "careful",
            f"none are sent{at}: a public bucket, which can only be read",
            None,
            values,
        )
    if found:
        return Finding("medium", "credentials", "works", f"from the environment ({', '.join(found)}){at}", None, values)
    if place.from_files:
        named = "the default profile" if place.profile is None else f"profile {place.profile!r}"
        return Finding("medium", "credentials", "works", f"from {named} of the vendor's files{at}", None, values)
    what = f"none in the environment{at}: the cloud's metadata service is used, which only machines in a cloud have"
    do = f"set {_VARIABLES[scheme][0]}{' and AWS_SECRET_ACCESS_KEY' if scheme == 's3' else ''}, if the probe fails"
    return Finding("medium", "credentials", "careful", what, do, values)


def _probed(backend: Backend) -> Finding:
    """Check that an object can be created, and that a second create of it fails: every commit depends on this."""
    begin = time.perf_counter()
    try:
        backend.probe()
    except UnsupportedBackendError as error:
        return Finding("medium", "conditional writes", "fails", str(error), "use a store that has them, or a folder")
    except CkptError as error:
        do = "check the bucket's name, the credentials, the endpoint and the network"
        return Finding("medium", "conditional writes", "fails", str(error), do)
    seconds = time.perf_counter() - begin
    what = f"a second create of an object is refused (the probe took {span(seconds)})"
    return Finding("medium", "conditional writes", "works", what, None, {"seconds": seconds})


def _speed(backend: Backend) -> Finding:
    key, data = f"probe/{secrets.token_hex(16)}", secrets.token_bytes(_OBJECT)
    try:
        begin = time.perf_counter()
        backend.create(key, data)
        middle = time.perf_counter()
        same = backend.get(key, _OBJECT) == data
        end = time.perf_counter()
    except CkptError as error:
        return Finding("medium", "speed", "fails", str(error))
    finally:
        with suppress(CkptError):
            backend.delete(key)
    if not same:
        return Finding("medium", "speed", "fails", "the bytes read differ from those written", "store nothing here")
    write, read = _OBJECT / (middle - begin), _OBJECT / (end - middle)
    values = {"write_bytes_per_second": write, "read_bytes_per_second": read, "bytes": _OBJECT}
    what = f"one object of 8 MiB: writes {bandwidth(write)}, reads {bandwidth(read)}; several run in parallel"
    if write < _SLOW:
        do = "save to a local disk and copy from there, or store steps as diffs: DiffOptions(batch=20)"
        return Finding("medium", "speed", "slow", what, do, values)
    return Finding("medium", "speed", "works", what, None, values)
