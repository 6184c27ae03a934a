"""A store: where the state of one training run lives. Reading takes no lock."""

from __future__ import annotations

from ckptstore.store.list_methods import Listing
from ckptstore.store.query_methods import Looking
from ckptstore.store.tier_methods import SecondTier
from ckptstore.store.upkeep_methods import Upkeep
from ckptstore.store.write_methods import Writing
from ckptstore.tiers.store_pair import Remote

__all__ = ["Store"]


class Store(Writing, Looking, Upkeep, SecondTier, Listing):
    """One run's checkpoints on one medium.

    Whatever takes ``progress`` also takes True: a line on stderr then says how far it is.

    Every method reads the log afresh, so a `Store` always shows what is committed now.
    """

    def __repr__(self) -> str:
        return f"ckptstore.open({self.url!r})"

    def _repr_html_(self) -> str:
        from ckptstore.reports.notebooks import store_html

        return store_html(self.journal)

    @property
    def remote(self) -> Store | None:
        """The second tier, as a store; None: there is none.

        Raises as `open`.
        """
        pair = self._pair()
        return None if pair is None else Store(pair.remote.backend, Remote(False))
