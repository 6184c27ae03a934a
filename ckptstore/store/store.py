"""A store: the checkpoints of one training run. Reading takes no lock."""

from __future__ import annotations

from ckptstore.store.list_methods import ListMethods
from ckptstore.store.query_methods import QueryMethods
from ckptstore.store.tier_methods import TierMethods
from ckptstore.store.upkeep_methods import UpkeepMethods
from ckptstore.store.write_methods import WriteMethods
from ckptstore.tiers.store_pair import Remote

__all__ = ["Store"]


class Store(WriteMethods, QueryMethods, UpkeepMethods, TierMethods, ListMethods):
    """One run's checkpoints on one medium.

    Every ``progress`` parameter also takes True: a line on stderr then shows the progress.

    Every method reads the log again, so a `Store` always shows the latest commits.
    """

    def __repr__(self) -> str:
        return f"ckptstore.open({self.url!r})"

    def _repr_html_(self) -> str:
        from ckptstore.reports.notebooks import store_html

        return store_html(self.journal)

    @property
    def remote(self) -> Store | None:
        """The second tier, as a store; None: there is none.

        Raises the errors of `open`.
        """
        pair = self._pair()
        return None if pair is None else Store(pair.remote.backend, Remote(False))
