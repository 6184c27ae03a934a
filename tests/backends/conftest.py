"""Let failures in the shared suite explain themselves; a real S3 server where a test asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.objects.server import Server, serving

pytest.register_assert_rewrite("tests.backends.backend_conformance")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("ministack")) as server:
        yield server
