"""Run torch's own tests of its distributed checkpoint with our writer and reader in the place of its own."""

from __future__ import annotations
