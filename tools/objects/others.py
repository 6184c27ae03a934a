"""Servers other than the tests' own, if installed: moto (S3), a second opinion; azurite (Azure blobs).

moto: ``pip install '.[test-moto]'``; azurite: ``npm install -g azurite``, or ``npm install azurite`` in any folder and
``CKPTSTORE_TEST_AZURITE=FOLDER/node_modules/.bin/azurite-blob``. Both keep their data in memory.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Final

from tools.objects.server import Server, free_port, make_bucket, options_for, running

__all__ = ["azurite_missing", "moto_missing", "serving_azurite", "serving_moto"]

_ACCOUNT: Final = "devstoreaccount1"
_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own key, which is public."""


def moto_missing() -> str | None:
    """Why there is no moto; None: there is."""
    found = all(importlib.util.find_spec(one) for one in ("moto", "flask"))
    return None if found else "moto's server is not installed: pip install '.[test-moto]'"


@contextmanager
def serving_moto(folder: Path) -> Iterator[Server]:
    """moto, with a bucket, until the ``with`` ends."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, dict(os.environ), port, folder):
        make_bucket(port, "tests")
        yield Server("s3://tests", options_for(port), port)


def _azurite() -> str | None:
    return shutil.which(os.environ.get("CKPTSTORE_TEST_AZURITE") or "azurite-blob")


def azurite_missing() -> str | None:
    """Why there is no azurite; None: there is."""
    return None if _azurite() else "azurite is not installed: npm install -g azurite, or name CKPTSTORE_TEST_AZURITE"


@contextmanager
def serving_azurite(folder: Path) -> Iterator[Server]:
    """azurite, with a container, until the ``with`` ends."""
    port = free_port()
    program = _azurite()
    assert program is not None
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    with running([*command, "--skipApiVersionCheck"], dict(os.environ), port, folder):
        _make_container(port, "tests")
        endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
        options = {"account_name": _ACCOUNT, "account_key": _KEY, "endpoint_url": endpoint}
        yield Server("az://tests", options | {"config_kwargs": {"read_timeout": 20}}, port)


def _make_container(port: int, name: str) -> None:
    date = formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    named = "".join(f"{key}:{value}\n" for key, value in sorted(headers.items()))
    path = f"/{_ACCOUNT}/{name}"
    text = f"PUT{chr(10) * 12}{named}/{_ACCOUNT}{path}\nrestype:container"
    sign = base64.b64encode(hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)).decode()
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{sign}"}
    link.request("PUT", f"{path}?restype=container", headers=headers)
    status = link.getresponse().status
    link.close()
    assert status == 201, status
