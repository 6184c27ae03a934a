"""The build backend (PEP 517): setuptools, which gets the compiler in ``ziglang`` where there is no other."""

from __future__ import annotations

from typing import Any

import core_build
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

ZIGLANG = "ziglang>=0.13"
_Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """What building a wheel needs in addition to `build-system.requires`."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    """The same for an installation in editable mode."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler()]


def _compiler() -> list[str]:
    return [ZIGLANG] if core_build.zig_is_useful() else []
