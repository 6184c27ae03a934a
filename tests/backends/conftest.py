"""Let failures in the shared suite explain themselves."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.backends.backend_conformance")
