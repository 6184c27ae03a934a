"""Rewrites assertions of the shared suite, so that failures explain themselves; provides a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.objects.server import Server, serving

pytest.register_assert_rewrite("tests.backends.backend_conformance")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("ministack")) as server:
        yield server
