"""Restoring a checkpoint to see whether it can be: by the ways that a load takes, and nothing of it is kept.

Verify and repair ask here before they call a checkpoint lost. So they say what a load says.
"""

from __future__ import annotations

from ckptstore.formats.catalog import Catalog
from ckptstore.formats.rank_trees import of_rank
from ckptstore.formats.records import Node, ref_of
from ckptstore.formats.state import unflatten
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.threads import workers
from ckptstore.log.journal import Journal
from ckptstore.restore.alternatives import UNTRIED, Tried
from ckptstore.restore.chain import restore_tensors
from ckptstore.restore.load import restoring
from ckptstore.restore.open_checkpoint import Opened
from ckptstore.restore.restore_plan import Plan

__all__ = ["try_restoring"]


def try_restoring(
    journal: Journal,
    catalog: Catalog,
    node: Node,
    threads: int,
    tried: Tried = UNTRIED,
) -> Plan:
    """The way by which a checkpoint was restored: every tensor decoded, and compared with its hashes.

    Nothing is pinned, and nobody is warned. Memory: two blocks for each thread.

    Args:
        catalog: the log.
        threads: threads that read and decode.
        tried: what is known of ways that fail.

    Raises:
        CorruptionError, FormatError: no way leads to it.
        StorageError: the medium failed; nothing is known of it.
    """

    def nothing(_start: int, _data: Bytes) -> None:
        pass

    def work(found: Opened) -> Plan:
        unflatten(of_rank(found.merged, None), lambda _name, _origin: None)
        targets = {key: (chain, nothing) for key, chain in found.chains.items()}
        with workers(threads, "try") as readers:
            restore_tensors(targets, readers.pool, Staging.for_chunks(2 * threads))
        return found.plan

    return restoring(journal, ref_of(node), work, tried=tried, catalog=catalog)
