"""Marks of tests that an older torch cannot run, which `tools.matrix` installs."""

from __future__ import annotations

import pytest
import torch.distributed as dist

__all__ = ["needs_groups"]

needs_groups = pytest.mark.skipif(not hasattr(dist.ProcessGroup, "get_group_store"), reason="needs torch 2.9")
"""Ranks of a process group save together."""
