"""Plans a compaction from a catalog, sizes and rates. Reads nothing, and does not depend on the time.

1. *Drop* what no kept checkpoint needs. *Materialize* the checkpoints that were requested as uncompressed fulls.
2. *Materialize* kept checkpoints that are the only reason for held bases to stay, if that frees more than it takes.
   A checkpoint that shares a segment with those bases and has another encoding gives up the one in that segment.
3. *Materialize* kept checkpoints that take more links or time to restore than allowed, from the full upwards.
4. *Re-encode* kept fulls as deltas against an earlier kept full, or compressed, if that saves a fifth. Fulls that an
   earlier compaction was asked to write uncompressed stay.
   Steps 2 to 4 are repeated until they find no move.
5. *Merge* runs of small diffs into one segment.

Planning again after a plan was carried out finds no move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from ckptstore.errors import CorruptionError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import users
from ckptstore.formats.history.records import PLAIN, Node, ref_of
from ckptstore.maintenance.compact.delta_moves import DeltaMoves
from ckptstore.maintenance.compact.encoding_choice import EncodingChooser
from ckptstore.maintenance.compact.moves import CompactLimits, Kind, Move, Planned, Rewrite, Unmet
from ckptstore.maintenance.compact.simulated_store import SimulatedStore
from ckptstore.maintenance.compact.size_estimates import Sizes
from ckptstore.maintenance.compact.writer_bases import writer_bases
from ckptstore.restore.restore_plan import TYPICAL, Plan, Rates, plan_all, restore_seconds

__all__ = ["plan_moves"]

_ROUNDS: Final = 8
_SMALL: Final = 8 << 20
"""Maximum bytes of a diff, in all of its segments, that is worth merging with others."""
_TOGETHER: Final = 64 << 20
"""Approximate bytes of a merged segment."""
_RUN: Final = 8
"""Minimum number of consecutive small segments: each merge is a record of the log, and copies bytes."""


def plan_moves(
    catalog: Catalog,
    limits: CompactLimits,
    sizes: Sizes,
    *,
    rates: Rates = TYPICAL,
    stays: Callable[[Node], bool] = lambda _node: True,
    owned: bool = False,
    refused: Collection[Node] = (),
    plain: Collection[Node] = (),
) -> Planned:
    """Plan a compaction of `catalog`.

    Every promised checkpoint is kept. Retire others before.

    Args:
        sizes: estimates of re-encoded sizes.
        rates: used to compute the seconds of a restore.
        stays: tells of a kept checkpoint whether the store's rules will keep it for long. Only such a checkpoint is
            merged, or becomes the base of another.
        owned: no other process writes: bases that the newest term's writer may build on next can be freed, too.
        refused: kept checkpoints that cannot or must not be rewritten.
        plain: kept checkpoints that become uncompressed fulls.
    """
    planner = _Planner(catalog, limits, sizes, rates, stays, owned, frozenset(refused))
    return planner.run(sorted(plain))


class _Planner:
    def __init__(
        self,
        catalog: Catalog,
        limits: CompactLimits,
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
        self._store = SimulatedStore(catalog, rates)
        self._chooser = EncodingChooser(self._store, limits, sizes)
        self._reencoding = DeltaMoves(self._store, limits, sizes)
        self._busy = frozenset[Node]() if owned else writer_bases(catalog)
        self._moves: list[Move] = []

    def run(self, plain: Sequence[Node]) -> Planned:
        before, slowest = self._store.nbytes, self._slowest()
        if drops := self._store.garbage():
            self._moves.append(self._store.move("drop", "nothing kept needs it", (), drops))
        for node in plain:
            rewrite = Rewrite(node, None, self._store.entry(node).nbytes, plain=True)
            freed = self._store.freed([node])
            self._moves.append(self._store.move("materialize", "a full to map", [rewrite], freed, required=True))
        self._refused |= frozenset(plain)
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
            unmet.append(
                Unmet("", f"{self._store.nbytes} bytes stay, more than the target of {target}: no other move saves any")
            )
        return Planned(tuple(self._moves), before, self._store.nbytes, slowest, self._slowest(), tuple(unmet))

    def _slowest(self) -> float:
        times = self._times()
        return max((seconds for _, seconds in times.values()), default=0.0)

    def _times(self) -> dict[Node, tuple[int, float]]:
        """Map every restorable kept checkpoint to the number of links above its full, and its restore seconds."""
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
        """Return fulls that stay as they are, and that get no new deltas against them."""
        catalog = self._store.catalog
        passing = {node for node in catalog.checkpoints if not self._stays(node)}
        asked = set() if self._limits.compress_plain else {node for node in catalog.checkpoints if self._is_plain(node)}
        return self._refused | self._newest() | passing | asked

    def _is_plain(self, node: Node) -> bool:
        """Whether a compaction has stored it uncompressed because it was asked to."""
        return any(edge.extra.get(PLAIN) is True for edge in self._store.catalog.encodings.get(node, ()))

    # -- step 2 of the module's list

    def _free_bases(self) -> None:
        """Add moves that free groups of held bases, so that nothing kept needs their segments any more.

        `exits` build on a base of the group. `sharers` share a segment with one. Both may have to be rewritten, or only
        the exits. The better choice is taken. `spared` need no rewrite: another encoding restores them.
        """
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
                bases = f"{count:,} held base{'s' if count > 1 else ''}"
                kind: Kind = "materialize" if rewrites else "drop"
                self._moves.append(self._store.move(kind, f"frees {bases}", rewrites, drops, spared=spared))

    def _spared(self, component: frozenset[Node], nodes: Collection[Node]) -> dict[Node, Plan]:
        """Return the nodes that need no rewrite: another encoding, apart from `component`, restores them as fast."""
        found = {}
        for node in sorted(nodes):
            others, now = self._store.apart(node, component), self._store.chain(node)
            if others is None or now is None:
                continue
            no_longer = len(others.encodings) <= max(2, len(now.encodings))
            if no_longer and self._store.seconds(others.encodings) <= self._store.seconds(now.encodings):
                found[node] = others
        return found

    def _worth(
        self, component: frozenset[Node], chosen: frozenset[Node], spared: Mapping[Node, Plan]
    ) -> tuple[int, list[Rewrite], tuple[str, ...]] | None:
        """Return the gain of rewriting `chosen`, in bytes; None: none. `spared`: plans that restore others."""
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
        """Return the segments freed if `chosen` are rewritten, and `spared` keep only their other encodings."""
        reached = [edge.checkpoint for others in spared.values() for edge in others.encodings[:-1]]
        kept = {segment for others in spared.values() for segment in others.segments}
        drops = self._store.freed(chosen | spared.keys(), [*kept_bases, *reached])
        return tuple(segment for segment in drops if segment not in kept)

    def _is_kept(self, node: Node) -> bool:
        return node in self._store.catalog.checkpoints

    # -- 3

    def _keep_limits(self) -> list[Unmet]:
        limits, unmet = self._limits, []
        if limits.max_depth is None and limits.max_restore_seconds is None:
            return []
        # Start with a chain's lower links: rewriting them shortens the restores above.
        waiting = sorted((depth, node) for node, (depth, _) in self._times().items())
        for _, node in waiting:
            chain = self._store.chain(node)
            assert chain is not None
            depth, seconds = len(chain.encodings) - 1, self._store.seconds(chain.encodings)
            why = limits.exceeded(depth, seconds)
            if not why:
                continue
            if self._busy and node in self._newest():
                unmet.append(Unmet(ref_of(node), f"{why}; it is the newest, and its writer may build on its bases"))
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
        """Return a diff in small segments of its own that will stay; None if it is not one."""
        catalog = self._store.catalog
        edges = catalog.encodings.get(node, ())
        if len(edges) != 1 or edges[0].base is None or node in self._refused or not self._stays(node):
            return None
        edge, base = edges[0], edges[0].base
        if any(one not in catalog.segments or set(users(catalog, one)) != {node} for one in edge.segments):
            return None
        small = sum(catalog.segments[one].size for one in edge.segments) <= _SMALL
        return Rewrite(node, base.node, edge.bytes) if small and self._store.chain(node) is not None else None
