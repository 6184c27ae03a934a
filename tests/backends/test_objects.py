"""A store in a bucket: the conformance suite on a real server, options, errors, and what requests cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from ckptstore.backends.objects import ObjectBackend
from tests.backends.backend_conformance import BackendConformance, Opener
from tools.objects.fast_server import serving_fast
from tools.objects.others import azurite_missing, moto_missing, serving_azurite, serving_moto
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


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.mark.skipif(moto_missing() is not None, reason=str(moto_missing()))
class TestMoto(BackendConformance):
    """A second opinion: another implementation of S3 than the one that all other tests run on."""

    rounds = 10
    replacements = 20
    taken_at_seal = True

    @pytest.fixture
    def opener(self, moto: Server) -> Opener:
        return functools.partial(ObjectBackend, moto.url(), moto.options)


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.mark.skipif(azurite_missing() is not None, reason=str(azurite_missing()))
class TestAzurite(BackendConformance):
    """``az://``, as far as its emulator goes."""

    rounds = 10
    replacements = 20
    taken_at_seal = True

    @pytest.fixture
    def opener(self, azurite: Server) -> Opener:
        return functools.partial(ObjectBackend, azurite.url(), azurite.options)
