"""One client's save and restore in its own process: prints one line of JSON. Started by `tools.bench.storage.objects`.

The timed save is the second one of the process.

``python -m tools.bench.storage.objects_worker CLIENT --port PORT --size BYTES``. The restored bytes are compared with
the saved ones by hash, outside of the timed part.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import uuid
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import xxhash

from tools.bench.measure import Measurement
from tools.bench.storage.object_clients import CLIENTS, Client
from tools.objects.fast_server import spent

__all__ = ["measured", "state_of"]

_TENSOR: Final = 24 << 20
"""Largest size of a tensor in bytes: that of layers' matrices."""
_SMALL: Final = 6 << 20
"""Bytes of the warm-up state."""


def state_of(size: int) -> dict[str, np.ndarray[Any, Any]]:
    """`size` incompressible bytes, in tensors of at most 24 MiB."""
    cuts = [(start, min(size, start + _TENSOR)) for start in range(0, size, _TENSOR)]
    numbers = np.random.default_rng(size)
    return {
        f"t{number:04}": numbers.integers(0, 1 << 32, (end - start) // 4, np.uint32).view(np.float32)
        for number, (start, end) in enumerate(cuts)
    }


def _hash(parts: Iterable[memoryview]) -> str:
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _client(name: str, port: int) -> Client:
    return CLIENTS[name][0](f"http://127.0.0.1:{port}", f"tests/{uuid.uuid4().hex}")


def measured(name: str, port: int, size: int) -> dict[str, dict[str, float]]:
    """Save, restore, compare -> cost of each: ``seconds``, ``cpu``, ``server`` (CPU seconds), ``memory``.

    Raises:
        RuntimeError: the restored bytes are not the saved ones.
    """
    small = state_of(_SMALL)
    warming = _client(name, port)
    warming.ready(small)
    warming.save(small)
    list(warming.restored(list(small), _SMALL))
    state = state_of(size)
    names, nbytes = list(state), sum(tensor.nbytes for tensor in state.values())
    wanted = _hash(memoryview(tensor).cast("B") for tensor in state.values())
    client = _client(name, port)
    client.ready(state)
    client.save(state)  # a run saves again and again: its buffers are warm
    found: dict[str, dict[str, float]] = {}
    before = spent(port)
    with Measurement() as saving:
        client.save(state)
    found["save"] = _told(saving, spent(port) - before)
    del state, small, warming
    gc.collect()
    before = spent(port)
    with Measurement() as restoring:
        parts = client.restored(names, nbytes)
    found["restore"] = _told(restoring, spent(port) - before)
    if _hash(parts) != wanted:
        raise RuntimeError(f"{name}: what was restored is not what was saved")
    return found


def _told(measurement: Measurement, server: float) -> dict[str, float]:
    return {
        "seconds": measurement.seconds,
        "cpu": measurement.cpu_seconds,
        "server": server,
        "memory": float(measurement.peak_rss),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=list(CLIENTS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    options = parser.parse_args()
    sys.stdout.write(json.dumps(measured(options.client, options.port, options.size)) + "\n")


if __name__ == "__main__":
    main()
