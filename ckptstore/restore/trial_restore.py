"""Restores a checkpoint as a test, by the ways that a load takes, and keeps nothing of it.

Verify and repair call this before they report a checkpoint as lost. So they agree with a load.
"""

from __future__ import annotations

from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Node, ref_of
from ckptstore.formats.states.rank_trees import of_rank
from ckptstore.formats.states.state import unflatten
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.threads import workers
from ckptstore.log.journal import Journal
from ckptstore.restore.alternatives import NO_FAILED_WAYS, FailedWays
from ckptstore.restore.chains.chain import restore_tensors
from ckptstore.restore.load import restore_with
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.restore.restore_plan import Plan

__all__ = ["try_restoring"]


def try_restoring(
    journal: Journal,
    catalog: Catalog,
    node: Node,
    threads: int,
    tried: FailedWays = NO_FAILED_WAYS,
) -> Plan:
    """Restore a checkpoint: decode every tensor and compare it with its hashes -> the way that succeeded.

    Nothing is pinned, and no warning is given. Memory: two blocks for each thread.

    Args:
        catalog: the log.
        threads: number of threads that read and decode.
        tried: what is known of failed ways.

    Raises:
        CorruptionError, FormatError: no way leads to it.
        StorageError: the medium failed; the result is unknown.
    """

    def nothing(_start: int, _data: Bytes) -> None:
        pass

    def work(found: OpenCheckpoint) -> Plan:
        unflatten(of_rank(found.merged, None), lambda _name, _origin: None)
        targets = {key: (chain, nothing) for key, chain in found.chains.items()}
        with workers(threads, "try") as readers:
            restore_tensors(targets, readers.pool, Staging.for_chunks(2 * threads))
        return found.plan

    return restore_with(journal, ref_of(node), work, tried=tried, catalog=catalog)
