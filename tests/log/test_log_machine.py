"""Two and three writers, readers and folders at once over one medium, each stalled before every operation for any time.

Hypothesis chooses which actor moves, and which creates lose their answer, arrive late, arrive twice or fail. The
invariants:

- the slots that were created first are a legal history: terms go up, and after a newer OPEN nobody commits to an older;
- whatever was acknowledged is in that history for ever, so a fenced writer never acknowledges again;
- a writer that stops as fenced was fenced, and one that does not know the outcome had a reason;
- a reader's view is the history, exactly, at one instant of the read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptstore.backends.base import Backend
from ckptstore.errors import CommitUnknownError, FencedError, StorageError, WriterError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.records import CheckpointId, CommitRecord, OpenRecord, slot_key
from ckptstore.log import fold_writer
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import Patience
from ckptstore.log.term import Term, View, open_term, read
from tests.forms import short_or
from tests.log.log_world import FATES, Actor, Fate, World, full, segments_of

# More tries than any schedule of a run can exhaust: each needs slots that are folded and deleted during the read.
PATIENCE = Patience(tries=30, sleep=lambda _seconds: None)
RESENDS = Patience(tries=2, sleep=lambda _seconds: None)


@dataclass
class WriterLife:
    """The history of one writer."""

    actor: Actor = field(init=False)
    term: Term | None = None
    acknowledged: list[tuple[int, CommitRecord]] = field(default_factory=list)
    faulty: bool = False
    stopped: WriterError | None = None


@dataclass
class ReaderLife:
    """One READ: the length of the history when it began, and the result."""

    began: int
    actor: Actor = field(init=False)
    view: View | None = None


def latest(catalog: Catalog) -> CheckpointId | None:
    entry = catalog.latest()
    return None if entry is None else entry.id


def write(world: World, life: WriterLife, backend: Backend, commits: int) -> None:
    """A writer's whole life: open, then commit. It does not give up after an error, but every later commit fails."""
    life.term = open_term(Journal(backend, world.fmt), latest, patience=PATIENCE)
    life.term.patience = RESENDS
    for _ in range(commits):
        try:
            commit(life)
        except WriterError as error:
            life.stopped = life.stopped or error
            assert life.term.dead is not None
        else:
            assert life.stopped is None, "acknowledged after it was told to stop"
    if life.stopped is not None:
        raise life.stopped


def commit(life: WriterLife) -> None:
    """Save the next step, often on the last one, and retire one that is more than two steps older and no base."""
    term = life.term
    assert term is not None
    last = latest(term.catalog)
    step = 1 if last is None else last.step + 1
    old = [node for node in term.catalog.checkpoints if node[1] < step - 2 and not _built_on(term.catalog, node)][:1]
    drops = [segment for node in old for segment in segments_of(term.catalog, node)]
    record = full(term.number, step, last if step % 3 else None, retires=tuple(old), drops=tuple(drops))
    life.acknowledged.append((term.commit(record), record))


def _built_on(catalog: Catalog, node: tuple[int, int]) -> bool:
    return any(edge.base and edge.base.node == node for edges in catalog.encodings.values() for edge in edges)


class LogMachine(RuleBasedStateMachine):
    """One store under all actors at once."""

    @initialize(every=st.integers(1, 5))
    def begin(self, every: int) -> None:
        self.world = World(every)
        self.writers: list[WriterLife] = []
        self.readers: list[ReaderLife] = []
        self.folders: list[Actor] = []
        self.history = CatalogBuilder()
        self.catalogs: list[Catalog] = [self.history.snapshot()]
        self.damaged = False
        self.steady = WriterLife()

    # ---- starting actors

    @precondition(lambda self: sum(life.actor.at is not None for life in self.writers) < 3)
    @rule(commits=st.integers(0, 30))
    def start_writer(self, commits: int) -> None:
        life = WriterLife()
        life.actor = Actor(self.world, "writer", lambda backend: write(self.world, life, backend, commits))
        self.writers.append(life)

    @precondition(lambda self: sum(life.actor.at is not None for life in self.readers) < 2)
    @rule(again=st.booleans())
    def start_reader(self, again: bool) -> None:
        since = next((life.view for life in reversed(self.readers) if life.view), None) if again else None
        life = ReaderLife(len(self.world.canon))

        def work(backend: Backend) -> None:
            life.view = read(Journal(backend, self.world.fmt), since, PATIENCE)

        life.actor = Actor(self.world, "reader", work)
        self.readers.append(life)

    @precondition(lambda self: sum(actor.at is not None for actor in self.folders) < 2)
    @rule(trims=st.booleans())
    def start_folder(self, trims: bool) -> None:
        def work(backend: Backend) -> None:
            view = read(Journal(backend, self.world.fmt), patience=PATIENCE)
            if view.end:
                fold_writer.fold(Journal(backend, self.world.fmt), view)
            if trims:
                fold_writer.trim(Journal(backend, self.world.fmt), view)

        self.folders.append(Actor(self.world, "folder", work))

    # ---- moves of actors and the medium

    def actors(self) -> list[Actor]:
        lives: list[WriterLife | ReaderLife] = [*self.writers, *self.readers]
        everyone = [life.actor for life in lives] + self.folders
        return [actor for actor in everyone if actor.at is not None]

    @precondition(lambda self: self.actors())
    @rule(who=st.integers(0, 9), steps=st.integers(1, 12))
    def move(self, who: int, steps: int) -> None:
        """Some steps of one actor; all others are stalled."""
        waiting = self.actors()
        actor = waiting[who % len(waiting)]
        for _ in range(steps):
            if actor.at is not None:
                actor.step()
                self.learn()

    @precondition(lambda self: self.actors())
    @rule(who=st.integers(0, 9), slots=st.integers(0, 3))
    def move_to_slot(self, who: int, slots: int) -> None:
        """One actor continues until it is about to use a slot at or near the end of the log, and stalls there."""
        waiting = self.actors()
        actor = waiting[who % len(waiting)]
        goal = {("get", slot_key(len(self.world.canon) - slots)), ("create", slot_key(len(self.world.canon)))}
        for _ in range(200):
            if actor.at is None or actor.at in goal:
                return
            actor.step()
            self.learn()

    @rule(commits=st.integers(1, 7), trims=st.booleans())
    def churn(self, commits: int, trims: bool) -> None:
        """Meanwhile, at once: the newest term commits, folding after each commit, and folded slots are deleted."""
        for _ in range(commits):
            self.commit_one()
            self.learn()
            if self.world.canon:
                fold_writer.fold(self.world.journal, read(self.world.journal, patience=PATIENCE))
        if trims:
            fold_writer.trim(self.world.journal, read(self.world.journal, patience=PATIENCE))

    def commit_one(self) -> None:
        """One commit of the owner of the newest term; if no living writer owns it, of a writer that opens one."""
        for life in self.writers:
            if life.actor.at and life.term and life.term.number == self.history.catalog.term and not life.term.dead:
                before = len(life.acknowledged)
                while life.actor.at and life.stopped is None and len(life.acknowledged) == before:
                    life.actor.step()
                return
        if self.steady.term is None or self.steady.term.number < self.history.catalog.term:
            self.steady.term = open_term(self.world.journal, latest, patience=PATIENCE)
        commit(self.steady)

    @precondition(lambda self: self.actors())
    @rule(who=st.integers(0, 9))
    def finish(self, who: int) -> None:
        """All remaining operations of one actor, at once."""
        waiting = self.actors()
        waiting[who % len(waiting)].finish()
        self.learn()

    @precondition(lambda self: any(life.actor.at for life in self.writers))
    @rule(who=st.integers(0, 2), fate=st.sampled_from(FATES[1:]), again=st.integers(0, 2))
    def trouble(self, who: int, fate: Fate, again: int) -> None:
        """A writer continues until it is about to create a slot. That create, and maybe the next ones, meet a fate."""
        waiting = [life for life in self.writers if life.actor.at]
        life = waiting[who % len(waiting)]
        for _ in range(again + 1):
            while life.actor.at and life.actor.at[0] != "create":
                life.actor.step()
                self.learn()
            if life.actor.at:
                life.faulty = True
                life.actor.step(fate)
                self.learn()

    @precondition(lambda self: any(actor.at and actor.at[0] in ("get", "listed") for actor in self.actors()))
    @rule(who=st.integers(0, 9))
    def trouble_reading(self, who: int) -> None:
        """A GET fails, or a listing shows objects that appeared, and omits those that vanished, while it ran."""
        busy = [actor for actor in self.actors() if actor.at and actor.at[0] in ("get", "listed")]
        busy[who % len(busy)].step("error")
        self.learn()

    @precondition(lambda self: self.world.net)
    @rule(which=st.integers(0, 9))
    def deliver(self, which: int) -> None:
        """A late or duplicated create takes effect."""
        self.world.deliver(which % len(self.world.net))
        self.learn()

    @precondition(lambda self: not self.damaged and self.world.list("fold/"))
    @rule(which=st.integers(1, 2))
    def damage_a_fold(self, which: int) -> None:
        """One of the two newest folds is damaged."""
        self.damaged = True
        self.world.damage(self.world.list("fold/")[-which:][0])

    # ---- invariants

    def learn(self) -> None:
        """Check the new part of the history against the rules of terms, and fold it into the true catalogs."""
        while len(self.catalogs) <= len(self.world.canon):
            seq = len(self.catalogs) - 1
            record, term = self.world.record(seq), self.history.catalog.term
            if isinstance(record, OpenRecord):
                assert record.term > term
                parent = record.parent
                assert parent is None or parent.node in self.history.catalog.checkpoints
            else:
                assert record.term == term
            self.history.apply(record, seq, xxh3_128(self.world.canon[seq]))
            self.catalogs.append(self.history.snapshot())

    @invariant()
    def what_was_acknowledged_is_history(self) -> None:
        for life in [*getattr(self, "writers", ()), *([self.steady] if hasattr(self, "steady") else [])]:
            for seq, record in life.acknowledged:
                true = self.world.record(seq)
                assert isinstance(true, CommitRecord)
                assert (true.term, true.segments) == (record.term, record.segments)

    @invariant()
    def who_stopped_had_a_reason(self) -> None:
        for life in getattr(self, "writers", ()):
            error = life.actor.error
            if error is None:
                continue
            assert isinstance(error, WriterError | StorageError), error
            if isinstance(error, CommitUnknownError | StorageError):
                assert life.faulty or "get" in str(error)
            if isinstance(error, FencedError) and life.term is not None:
                assert self.history.catalog.term > life.term.number
                assert life.term.dead is error

    @invariant()
    def a_view_is_the_history_at_an_instant_of_the_read(self) -> None:
        for life in getattr(self, "readers", ()):
            assert life.actor.error is None or isinstance(life.actor.error, StorageError)
            if life.view is not None and life.began >= 0:
                assert life.began <= life.view.end <= len(self.world.canon)
                assert life.view.catalog == self.catalogs[life.view.end]
                life.began = -1  # checked
        for actor in getattr(self, "folders", ()):
            assert actor.error is None or isinstance(actor.error, StorageError)

    def teardown(self) -> None:
        """All actors are killed; the store is whole, and the next writer continues from the end of the history."""
        if not hasattr(self, "world"):
            return
        for actor in self.actors():
            actor.kill()
        self.learn()
        assert read(self.world.journal, patience=PATIENCE).catalog == self.catalogs[-1]
        last = WriterLife()
        write(self.world, last, self.world, commits=3)
        assert len(last.acknowledged) == 3
        while self.world.net:
            self.world.deliver(0)
        self.learn()
        self.what_was_acknowledged_is_history()
        assert read(self.world.journal, patience=PATIENCE).catalog == self.catalogs[-1]


LogMachine.TestCase.settings = settings(
    max_examples=short_or(20, 50),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLogMachine = LogMachine.TestCase
