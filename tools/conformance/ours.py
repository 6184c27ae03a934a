"""ckptstore itself, as an executable under test: ``python -m tools.conformance.ours STORE``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.errors import CheckpointNotFoundError, CkptError, CorruptionError, FormatError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.jsontext import dumps
from ckptstore.formats.states.rank_trees import of_rank
from ckptstore.store import Store

__all__ = ["answer"]


def answer(folder: Path) -> dict[str, Any]:
    """The contents of the store at `folder`: see `tools.conformance`."""
    try:
        store = ckptstore.open(folder)
        found = store.checkpoints()
    except CkptError as error:
        return {"refused": str(error).removeprefix(f"{folder}: ")}  # wherever the set lies
    try:
        latest: Any = store.checkpoint("latest").ref
    except CheckpointNotFoundError:
        latest = None
    except CkptError as error:
        latest = {"error": str(error)}
    checkpoints = {info.ref: _checkpoint(store, info.ref) for info in found}
    tags = {name: _tagged(store, name) for name in store.view().catalog.tags}
    return {"latest": latest, "checkpoints": checkpoints} | ({"tags": tags} if tags else {})


def _tagged(store: Store, name: str) -> Any:
    try:
        return store.checkpoint(f"tag:{name}").ref
    except CheckpointNotFoundError:
        return None
    except CkptError as error:
        return {"error": str(error)}


def _checkpoint(store: Store, ref: str) -> dict[str, Any]:
    try:
        info = store.checkpoint(ref)
        entries = store.tensors(ref)
        tensors = {
            name: {"dtype": entries[name].dtype, "shape": list(entries[name].shape), "hash": xxh3_128(data.tobytes())}
            for name, data in store.read_tensors(ref)
        }
        tree = store.tree(ref)
        found = {"state": info.state, "lossy": info.lossy, "tree": tree, "tensors": tensors}
        entry = store.view().catalog.checkpoints[info.term, info.step]
        if said := entry.extra.get("metadata"):
            found["metadata"] = said  # as it is stored: the metadata of `info` may have NaN
        return found if (whole := of_rank(tree, None)) == tree else found | {"unranked": dumps(whole).decode()}
    except (CorruptionError, FormatError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(answer(Path(sys.argv[1]))))
