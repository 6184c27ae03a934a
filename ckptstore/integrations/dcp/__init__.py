"""A store as the medium of ``torch.distributed.checkpoint`` (DCP).

::

    dcp.save(state, storage_writer=CkptstoreWriter("runs/gpt", step=100))
    dcp.load(state, storage_reader=CkptstoreReader("runs/gpt"))  # the newest step, on any number of ranks

Each ``dcp.save`` makes one checkpoint. All calls of a process share one writer of the store, so ten saves are one term,
and each may be a delta against the one before. A tensor has DCP's name (``model.layer.weight``) in the store.

Nothing is pickled if a state can hold it (numbers, texts, lists, dicts, tensors ...). Anything else is stored as the
bytes that DCP's planner makes of it, which are a pickle. A reader refuses these bytes without ``unpickle=True``.
"""

from __future__ import annotations

from ckptstore.integrations.dcp.storage_reader import CkptstoreReader
from ckptstore.integrations.dcp.storage_writer import CkptstoreWriter

__all__ = ["CkptstoreReader", "CkptstoreWriter"]
