"""A store in a bucket: the conformance suite on real servers, one class for each."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from ckptstore.backends.object_store.objects import ObjectBackend
from tests.backends.backend_conformance import BackendConformance, Opener
from tools.objects.fast_server import serving_fast
from tools.objects.others import azurite_missing, moto_missing, serving_azurite, serving_moto
from tools.objects.server import Server


@pytest.fixture(scope="module")
def fast() -> Iterator[Server]:
    with serving_fast() as found:
        yield found


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_moto(tmp_path_factory.mktemp("moto")) as found:
        yield found


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_azurite(tmp_path_factory.mktemp("azurite")) as found:
        yield found


class OnAServer(BackendConformance):
    """On the server that the fixture of a subclass gives."""

    rounds = 10
    replacements = 20
    taken_at_seal = True

    @pytest.fixture
    def server(self) -> Server:
        raise NotImplementedError

    @pytest.fixture
    def opener(self, server: Server) -> Opener:
        return functools.partial(ObjectBackend, server.url(), server.options)


class TestS3(OnAServer):
    processes = True
    rounds = 25
    replacements = 40

    @pytest.fixture
    def server(self, s3: Server) -> Server:
        return s3


class TestFastServer(OnAServer):
    """The server of the benchmarks: it must be a correct store."""

    rounds = 25
    replacements = 40

    @pytest.fixture
    def server(self, fast: Server) -> Server:
        return fast


@pytest.mark.skipif(moto_missing() is not None, reason=str(moto_missing()))
class TestMoto(OnAServer):
    """A second opinion: another S3 implementation than that of all other tests."""

    @pytest.fixture
    def server(self, moto: Server) -> Server:
        return moto


@pytest.mark.skipif(azurite_missing() is not None, reason=str(azurite_missing()))
class TestAzurite(OnAServer):
    """``az://``, as far as the emulator supports it."""

    @pytest.fixture
    def server(self, azurite: Server) -> Server:
        return azurite
