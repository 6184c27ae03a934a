"""The plan of a compaction: from a catalog, sizes and rates; nothing is read and no clock is asked.

1. *Drop* what nothing kept needs.
2. *Materialize* kept checkpoints that alone make bases stay which nobody keeps, where that frees more than it takes;
   one that shares a segment with those bases and has another encoding gives up the one that lies there.
3. *Materialize* kept checkpoints that take more links or time to restore than is allowed, from the full upwards.
4. *Re-encode* kept fulls as deltas against an earlier kept full, or compressed, where that saves a fifth.
   2 to 4 are repeated until nothing is found.
5. *Merge* runs of small diffs into one segment.

Planning what a plan leads to finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from ckptstore.errors import CorruptionError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.commit_checks import users
from ckptstore.formats.records import Node, ref_of
from ckptstore.maintenance.compact.delta_moves import Reencoding
from ckptstore.maintenance.compact.encoding_choice import Chooser
from ckptstore.maintenance.compact.moves import Kind, Limits, Move, Planned, Rewrite, Unmet
from ckptstore.maintenance.compact.simulated_store import Imagined
from ckptstore.maintenance.compact.size_estimates import Sizes
from ckptstore.maintenance.compact.writer_bases import built_on
from ckptstore.restore.restore_plan import TYPICAL, Plan, Rates, plan_all, restore_seconds

__all__ = ["plan_moves"]

_ROUNDS: Final = 8
_SMALL: Final = 8 << 20
"""Bytes of a diff, in all of its segments, that is worth merging with others."""
_TOGETHER: Final = 64 << 20
"""Bytes of what becomes of them, about."""
_RUN: Final = 8
"""So many small segments in a row at least: each merge is a record of the log, and copies bytes."""


def plan_moves(
    catalog: Catalog,
    limits: Limits,
    sizes: Sizes,
    *,
    rates: Rates = TYPICAL,
    stays: Callable[[Node], bool] = lambda _node: True,
    owned: bool = False,
    refused: Collection[Node] = (),
) -> Planned:
    """What a compaction of `catalog` does.

    Every promised checkpoint is kept: what is not to be has been retired before.

    Args:
        sizes: guesses of what is coded anew.
        rates: what a restore's seconds are reckoned by.
        stays: tells of a kept checkpoint whether the store's rules will keep it for long: no other is merged, or
            becomes the base of another.
        owned: nobody else writes: what the newest term's writer may build on next is free to go, too.
        refused: kept checkpoints that cannot be stored anew, or are not to be.
    """
    return _Planner(catalog, limits, sizes, rates, stays, owned, frozenset(refused)).run()


class _Planner:
    def __init__(
        self,
        catalog: Catalog,
        limits: Limits,
        sizes: Sizes,
        rates: Rates,
        stays: Callable[[Node], bool],
        owned: bool,
        refused: frozenset[Node],
    ) -> None:
        self._limits = limits
        self._rates = rates
        self._stays = stays
        self._refused = refused
        self._store = Imagined(catalog, rates)
        self._chooser = Chooser(self._store, limits, sizes)
        self._reencoding = Reencoding(self._store, limits, sizes)
        self._busy = frozenset[Node]() if owned else built_on(catalog)
        self._moves: list[Move] = []

    def run(self) -> Planned:
        before, slowest = self._store.nbytes, self._slowest()
        if drops := self._store.garbage():
            self._moves.append(self._store.move("drop", "nothing kept needs it", (), drops))
        for _ in range(_ROUNDS):
            done = len(self._moves)
            self._free_bases()
            unmet = self._keep_limits()
            self._moves += self._reencoding.moves(self._left_alone())
            if len(self._moves) == done:
                break
        self._merge()
        target = self._limits.target_bytes
        if target is not None and self._store.nbytes > target:
            unmet.append(Unmet("", f"{self._store.nbytes} bytes stay, and {target} are wanted: nothing else saves any"))
        return Planned(tuple(self._moves), before, self._store.nbytes, slowest, self._slowest(), tuple(unmet))

    def _slowest(self) -> float:
        times = self._times()
        return max((seconds for _, seconds in times.values()), default=0.0)

    def _times(self) -> dict[Node, tuple[int, float]]:
        """Every kept checkpoint that can be restored -> links on its full, and seconds."""
        seconds = restore_seconds(self._store.catalog, self._rates)
        found: dict[Node, tuple[int, float]] = {}
        for node, chain in plan_all(self._store.catalog, restore_seconds(self._store.catalog, TYPICAL)).items():
            if not isinstance(chain, CorruptionError):
                found[node] = len(chain.encodings) - 1, sum(map(seconds, chain.encodings))
        return found

    def _newest(self) -> frozenset[Node]:
        nodes = [max(self._store.catalog.checkpoints)] if self._store.catalog.checkpoints else []
        return frozenset(nodes)

    def _left_alone(self) -> frozenset[Node]:
        """Fulls that stay as they are, and that nothing is coded against but what is already."""
        passing = {node for node in self._store.catalog.checkpoints if not self._stays(node)}
        return self._refused | self._newest() | passing

    # -- 2

    def _free_bases(self) -> None:
        for component in list(self._store.components()):
            if component & self._busy:
                continue
            exits = {other for node in component for other in self._store.dependents(node) if self._is_kept(other)}
            sharers = {user for node in component for user in self._store.sharers(node) if self._is_kept(user)}
            spared = self._spared(component, exits | sharers)
            found = [
                choice
                for chosen in dict.fromkeys(
                    (frozenset(exits - spared.keys()), frozenset((exits | sharers) - spared.keys()))
                )
                if (chosen or spared)
                and not chosen & self._refused
                and (choice := self._worth(component, chosen, spared)) is not None
            ]
            if found:
                _, rewrites, drops = max(found, key=lambda choice: choice[0])
                count = len(component)
                bases = f"{count:,} base{'s' if count > 1 else ''} that nobody keeps"
                kind: Kind = "materialize" if rewrites else "drop"
                self._moves.append(self._store.move(kind, f"frees {bases}", rewrites, drops, spared=spared))

    def _spared(self, component: frozenset[Node], nodes: Collection[Node]) -> dict[Node, Plan]:
        """Those that need not be stored anew: they have another encoding apart from `component`, as easy to restore."""
        found = {}
        for node in sorted(nodes):
            besides, now = self._store.apart(node, component), self._store.chain(node)
            if besides is None or now is None:
                continue
            no_longer = len(besides.encodings) <= max(2, len(now.encodings))
            if no_longer and self._store.seconds(besides.encodings) <= self._store.seconds(now.encodings):
                found[node] = besides
        return found

    def _worth(
        self, component: frozenset[Node], chosen: frozenset[Node], spared: Mapping[Node, Plan]
    ) -> tuple[int, list[Rewrite], tuple[str, ...]] | None:
        """What storing `chosen` anew gains, in bytes; None: nothing. `spared`: what restores others besides."""
        freed = self._store.size(self._freed(chosen, spared))
        rewrites = self._chooser.rewrites(sorted(chosen), component, freed)
        if rewrites is None:
            return None
        drops = self._freed(chosen, spared, [rewrite.base for rewrite in rewrites if rewrite.base is not None])
        freed = self._store.size(drops)
        gain = freed - sum(rewrite.nbytes for rewrite in rewrites)
        return (gain, rewrites, drops) if gain > 0 and gain * 10 >= freed else None

    def _freed(
        self, chosen: frozenset[Node], spared: Mapping[Node, Plan], kept_bases: Collection[Node] = ()
    ) -> tuple[str, ...]:
        """What goes where `chosen` are stored anew, and of `spared` only what restores them besides stays."""
        reached = [edge.checkpoint for besides in spared.values() for edge in besides.encodings[:-1]]
        kept = {segment for besides in spared.values() for segment in besides.segments}
        drops = self._store.freed(chosen | spared.keys(), [*kept_bases, *reached])
        return tuple(segment for segment in drops if segment not in kept)

    def _is_kept(self, node: Node) -> bool:
        return node in self._store.catalog.checkpoints

    # -- 3

    def _keep_limits(self) -> list[Unmet]:
        limits, unmet = self._limits, []
        if limits.max_depth is None and limits.max_restore_seconds is None:
            return []
        # A chain's lower links come first: stored anew, they shorten what lies above.
        waiting = sorted((depth, node) for node, (depth, _) in self._times().items())
        for _, node in waiting:
            chain = self._store.chain(node)
            assert chain is not None
            depth, seconds = len(chain.encodings) - 1, self._store.seconds(chain.encodings)
            why = limits.exceeded(depth, seconds)
            if not why:
                continue
            if self._busy and node in self._newest():
                unmet.append(Unmet(ref_of(node), f"{why}; it is the newest, on whose bases its writer may build"))
                continue
            rewrite = None if node in self._refused else self._chooser.shorter(node, chain)
            if rewrite is None:
                reason = self._chooser.reason(node, seconds, node in self._refused)
                unmet.append(Unmet(ref_of(node), why + reason))
                continue
            drops = self._store.freed([node], [] if rewrite.base is None else [rewrite.base])
            self._moves.append(self._store.move("materialize", why, [rewrite], drops, required=True))
        return unmet

    # -- 5

    def _merge(self) -> None:
        run: list[Rewrite] = []
        term = 0
        for node in [*self._store.catalog.checkpoints, (0, 0)]:
            small = self._small(node)
            total = sum(rewrite.nbytes for rewrite in run)
            if run and (small is None or node[0] != term or total + small.nbytes > _TOGETHER):
                self._merge_run(run)
                run = []
            if small is not None:
                run.append(small)
            term = node[0]

    def _merge_run(self, run: list[Rewrite]) -> None:
        if len(run) < _RUN:
            return
        catalog = self._store.catalog
        drops = tuple(segment for rewrite in run for segment in catalog.encodings[rewrite.node][0].segments)
        why = f"{len(run):,} small segments in a row"
        self._moves.append(self._store.move("merge", why, run, drops))

    def _small(self, node: Node) -> Rewrite | None:
        """A diff in small segments of its own, which will stay; None: it is none."""
        catalog = self._store.catalog
        edges = catalog.encodings.get(node, ())
        if len(edges) != 1 or edges[0].base is None or node in self._refused or not self._stays(node):
            return None
        edge, base = edges[0], edges[0].base
        if any(one not in catalog.segments or set(users(catalog, one)) != {node} for one in edge.segments):
            return None
        small = sum(catalog.segments[one].size for one in edge.segments) <= _SMALL
        return Rewrite(node, base.node, edge.bytes) if small and self._store.chain(node) is not None else None
