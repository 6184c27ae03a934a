"""The common interface of what tensors are rebuilt from: a checkpoint open in the store, or one in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Final

from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.segment_files.shards import ShardKey, combine_shards
from ckptstore.formats.states.rank_trees import left_out, of_rank, rank_count
from ckptstore.formats.states.tree import tensor_names
from ckptstore.host.caller_warnings import HiddenTensorsWarning, warn
from ckptstore.restore.box_reads import Part
from ckptstore.restore.chains.chain import Chain
from ckptstore.restore.stored_parts import Parts

__all__ = ["RestoreSource"]

_NAMED: Final = 5
"""Number of tensors that a warning names."""


class RestoreSource(ABC):
    """A checkpoint that has a chain for every tensor."""

    @property
    @abstractmethod
    def ref(self) -> str:
        """The REF ``STEP@TERM``, which names this checkpoint for ever."""

    @property
    @abstractmethod
    def lossy(self) -> bool:
        """Whether the state differs from the one that training had, because an encoding on the way is lossy."""

    @property
    @abstractmethod
    def merged(self) -> Any:
        """The typed JSON tree as it is stored: that of all ranks that saved it (`formats.states.rank_trees`)."""

    @property
    @abstractmethod
    def chains(self) -> dict[str, Chain]:
        """name -> its chain, in the tree's order; for a sharded tensor key of shard -> chain."""

    @property
    @abstractmethod
    def parts(self) -> Parts:
        """name -> keys of `chains`: the name itself, or the keys of its shards; in the order of the tree."""

    @cached_property
    def tree(self) -> Any:
        """The typed JSON tree of the state, as a single process reads it that is not one of several ranks.

        Warns (`HiddenTensorsWarning`) of tensors that only `tree_of` a rank has.
        """
        # Prevents: tensors of a rank that are silently missing from the result. No current writer stores such states;
        # earlier ones did.
        whole = of_rank(self.merged, None)
        if hidden := left_out(self.merged, whole):
            warn(self._hidden(hidden), HiddenTensorsWarning)
        return whole

    def _hidden(self, names: list[str]) -> str:
        """A text that names the tensors that are left out when no rank is given, and the ranks that have them."""
        ranks: dict[str, list[int]] = {name: [] for name in names}
        for rank in range(rank_count(self.merged) or 0):
            for name in ranks.keys() & set(tensor_names(of_rank(self.merged, rank))):
                ranks[name].append(rank)
        listed = [f"{name!r} (rank {', '.join(map(str, ranks[name]))})" for name in names[:_NAMED]]
        more = len(names) - len(listed)
        return (
            f"checkpoint {self.ref}: left out, because another rank has something of another kind in their place: "
            f"{', '.join(listed)}{f' and {more} more tensors' if more > 0 else ''}. "
            "load(rank=) of a rank that is named restores its tensors, read_tensor() any one of them"
        )

    def tree_of(self, rank: int | None) -> Any:
        """The same, as rank `rank` reads it; None: `tree`."""
        return self.tree if rank is None else of_rank(self.merged, rank)

    @cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """name -> its entry in the last encoding (`ShardedEntry` if it is sharded), in the order of the tree."""
        return {name: self._entry(keys) for name, keys in self.parts.items()}

    def stored(self, name: str) -> list[Part]:
        """The chains that restore a tensor: its own, or those of its shards, each with its box of the tensor."""
        keys = self.parts[name]
        if isinstance(keys[0], ShardKey):
            return [(self.chains[key], key.box) for key in keys if isinstance(key, ShardKey)]
        return [(self.chains[name], Box.whole(self.chains[name].tensor.shape))]

    def sharded(self, name: str) -> bool:
        """Whether a tensor is stored in shards."""
        return isinstance(self.parts[name][0], ShardKey)

    def _entry(self, keys: tuple[str, ...]) -> TensorEntry:
        if isinstance(keys[0], ShardKey):
            return combine_shards([self.chains[key].tensor for key in keys])
        return self.chains[keys[0]].tensor
