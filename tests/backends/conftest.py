"""Rewrites assertions of the shared suite, so that failures explain themselves."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.backends.backend_conformance")
