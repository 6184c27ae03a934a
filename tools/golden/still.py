"""A deterministic environment: identities are counted, the clock stands still, every process has the same identity.

In it the same calls write the same bytes. Not for threads that race for identities: the golden writers have none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import secrets
import time
import uuid
from collections.abc import Iterator
from unittest import mock

from ckptstore.frameworks import bridge

MOMENT = 1763793293.125


@contextlib.contextmanager
def still(seed: int) -> Iterator[None]:
    """Run the body in that environment. Other seeds give other identities."""
    numbers = itertools.count(1)

    def identity() -> int:
        mixed = (seed << 64 | next(numbers)) * 0x9E3779B97F4A7C15F39CC0605CEDC835
        return mixed % (1 << 128)

    def counted() -> uuid.UUID:
        return uuid.UUID(int=identity())

    def digits(nbytes: int) -> str:
        return f"{identity():032x}"[: 2 * nbytes]

    with (
        mock.patch.object(uuid, "uuid4", counted),
        mock.patch.object(secrets, "token_hex", side_effect=digits),
        mock.patch.object(time, "time", return_value=MOMENT),
        mock.patch.object(os, "getpid", return_value=4242),
        mock.patch.object(platform, "node", return_value="golden"),
        mock.patch.object(bridge, "environment", return_value={}),
    ):
        yield
