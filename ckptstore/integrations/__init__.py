"""Doors of training frameworks: each module needs its framework, which is an extra."""

from __future__ import annotations
