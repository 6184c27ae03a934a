"""Integrations with training frameworks: each module needs its framework, which is an extra.

Imports `training`, `store` and what is below; importing the package itself imports nothing.
"""

from __future__ import annotations
