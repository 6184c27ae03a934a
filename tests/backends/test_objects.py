"""A store in a bucket: the conformance suite on a real server, options, errors, and what requests cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from ckptstore.backends.objects import ObjectBackend
from tests.backends.backend_conformance import BackendConformance, Opener
from tools.objects.fast_server import serving_fast
from tools.objects.server import Server


class TestS3(BackendConformance):
    processes = True
    rounds = 25
    replacements = 40
    taken_at_seal = True

    @pytest.fixture
    def opener(self, s3: Server) -> Opener:
        return functools.partial(ObjectBackend, s3.url(), s3.options)


@pytest.fixture(scope="module")
def fast() -> Iterator[Server]:
    with serving_fast() as server:
        yield server


class TestFastServer(BackendConformance):
    """The server of measurements: what is measured on it is a store."""

    rounds = 25
    replacements = 40
    taken_at_seal = True

    @pytest.fixture
    def opener(self, fast: Server) -> Opener:
        return functools.partial(ObjectBackend, fast.url(), fast.options)
