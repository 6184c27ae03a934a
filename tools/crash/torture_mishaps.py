"""An actor of `tools.crash.torture` that breaks its own stores: slots vanish, copies are put back, folders move.

Nothing can restore the data that such a mishap destroys, but it must never be silent. Every acknowledged checkpoint
loads with the right bits, or `verify` reports damage (except at the very end of a log, which leaves no trace). `latest`
is the newest or an error. A writer whose store was moved continues in that store; one whose store was deleted or set
back stops before it fences anybody. gc deletes nothing that still loads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.errors import CkptError, CorruptLogError, WriterError
from ckptstore.formats.history.checkpoint_ref import node_of
from ckptstore.formats.history.records import slot_of
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.store import Store, verify
from tools.crash.scenario import Violation, same_state

if TYPE_CHECKING:
    from ckptstore.write.writer import Writer
    from tools.crash.stages import FolderStage, Stage

__all__ = ["Saved", "check", "close", "fill", "mishap", "save"]

Saved = dict[str, dict[str, Any]]
"""REF -> the state that was acknowledged under it."""


def mishap(stage: FolderStage) -> None:
    """Make a small store, inflict one mishap on it, and search for silent damage."""
    _tidy(stage.root.parent)
    folder = stage.root.parent / f"mishap-{os.getpid()}-{stage.chance.getrandbits(32):08x}"
    kind = stage.chance.choice(list(_KINDS))
    try:
        _KINDS[kind](stage, folder)
    finally:
        for path in (folder, _beside(folder, "old"), _beside(folder, "copy")):
            shutil.rmtree(path, ignore_errors=True)
    stage.note(**{f"mishap {kind}": 1})


def _tidy(parent: Path) -> None:
    """Remove the leftovers of killed incarnations."""
    for path in parent.glob("mishap-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f"{folder.name}-{what}")


def save(stage: Stage, writer: Writer, saved: Saved, count: int) -> None:
    """Save some steps; acknowledged states are noted in `saved`."""
    first = max((node_of(ref)[1] for ref in saved if ref.endswith(f"@{writer.term}")), default=0)
    first = max(first, 0 if writer.parent is None else writer.parent.step)
    for step in range(first + 1, first + 1 + count):
        state = {"w": np.frombuffer(stage.chance.randbytes(512), np.uint8), "step": step}
        info = writer.save(state, step)
        saved[info.ref] = state


def fill(stage: Stage, store: Store, saved: Saved, terms: int) -> Writer:
    """Some terms, some of them forks; the last one's writer stays open."""
    for index in range(terms):
        known = [info.ref for info in store.checkpoints()] if index else []
        fork = bool(known) and stage.chance.random() < 0.3
        writer = store.writer(parent=stage.chance.choice(known) if fork else "latest", threads=1, poll_seconds=None)
        save(stage, writer, saved, stage.chance.randint(0, 4))
        if index + 1 < terms:
            writer.close()
    return writer


# ------------------------------------------------------------------------------------------------ mishaps


def _slots_vanish(stage: FolderStage, folder: Path) -> None:
    store, saved = Store(stage.backend_in(folder)), Saved()
    fill(stage, store, saved, stage.chance.randint(1, 4)).close()
    catalog = store.view().catalog
    slots = {f"{step}@{term}": seq for (term, step), seq in catalog.slots.items()}
    end = catalog.next_seq
    lost = set(stage.chance.sample(range(end), min(end, stage.chance.randint(1, 4))))
    for seq in lost:
        path = folder / f"log/{seq:020d}"
        if stage.chance.random() < 0.2:
            data = bytearray(path.read_bytes())
            data[stage.chance.randrange(len(data))] ^= 1 << stage.chance.randrange(8)
            path.write_bytes(data)
        else:
            path.unlink()
    left = [slot_of(f"log/{path.name}") for path in (folder / "log").iterdir()]
    top = max((seq for seq in left if seq is not None), default=-1)
    check(Store(LocalBackend(folder)), {ref: state for ref, state in saved.items() if slots[ref] <= top})


def _copy_is_put_back(stage: FolderStage, folder: Path) -> None:
    store, saved, copied = Store(stage.backend_in(folder)), Saved(), Saved()
    writer = fill(stage, store, saved, stage.chance.randint(1, 3))
    copied |= saved
    copy = _beside(folder, "copy")
    shutil.copytree(folder, copy)
    save(stage, writer, saved, stage.chance.randint(0, 3))
    for path in folder.rglob("*"):
        if path.is_file() and not (copy / path.relative_to(folder)).exists():
            path.unlink()
    after = Saved(copied)
    rival = None
    if stage.chance.random() < 0.6:
        rival = Store(LocalBackend(folder)).writer(threads=1, poll_seconds=None)
        save(stage, rival, after, stage.chance.randint(0, 3))
    try:
        before = set(saved)
        save(stage, writer, saved, 2)
        after |= {ref: state for ref, state in saved.items() if ref not in before}
    except WriterError:
        pass
    if rival is not None:
        try:
            save(stage, rival, after, 1)
        except WriterError as error:
            raise Violation(f"a writer was fenced by one whose store was set back: {error}") from error
        rival.close()
    close(writer)
    check(Store(LocalBackend(folder)), after)


def _folder_moves(stage: FolderStage, folder: Path) -> None:
    store, saved, others = Store(stage.backend_in(folder)), Saved(), Saved()
    writer = fill(stage, store, saved, stage.chance.randint(1, 3))
    folder.rename(_beside(folder, "old"))
    new = Store(LocalBackend(folder))
    if stage.chance.random() < 0.8:
        fill(stage, new, others, stage.chance.randint(1, 3)).close()
    save(stage, writer, saved, 3)
    writer.close()
    if others:
        check(new, others)
        if not verify(new).ok:
            raise Violation("a store at another's old place is damaged")
    old = Store(LocalBackend(_beside(folder, "old")))
    check(old, saved)
    if missing := set(saved) - {info.ref for info in old.checkpoints()}:
        raise Violation(f"acknowledged to a store that was moved, and not in it: {sorted(missing)}")


def _folder_is_deleted(stage: FolderStage, folder: Path) -> None:
    store, saved = Store(stage.backend_in(folder)), Saved()
    writer = fill(stage, store, saved, stage.chance.randint(1, 2))
    shutil.rmtree(folder)
    lost = dict(saved)
    try:
        save(stage, writer, saved, 1)
    except CkptError:
        pass
    else:
        raise Violation(f"acknowledged after the store was deleted: {sorted(set(saved) - set(lost))}")
    close(writer)
    again = Saved()
    fill(stage, Store(LocalBackend(folder)), again, 1).close()
    check(Store(LocalBackend(folder)), again)


_KINDS: Final[dict[str, Callable[[FolderStage, Path], None]]] = {
    "slots": _slots_vanish,
    "copy": _copy_is_put_back,
    "moved": _folder_moves,
    "deleted": _folder_is_deleted,
}


def close(writer: Writer) -> None:
    """A writer that has stopped reports it when it closes."""
    with contextlib.suppress(CkptError):
        writer.close()


# ------------------------------------------------------------------------------------------------ checks


def check(store: Store, saved: Saved) -> None:
    """Raises `Violation` if a checkpoint of `saved` is missing or different without an error."""
    try:
        report = verify(store)
    except CkptError:
        return  # nothing can be read, and an error says so
    there = {info.ref: info for info in store.checkpoints()}
    silent = [ref for ref in saved if ref not in there]
    if silent and report.ok:
        raise Violation(f"acknowledged, gone, and verify says intact: {sorted(silent)}")
    loads = set()
    for ref, state in saved.items():
        if ref not in there:
            continue
        try:
            found = store.load(ref, framework="numpy")
        except CkptError as error:
            if ref in report.restorable or report.ok:
                raise Violation(f"{ref} does not load, but verify says that it does: {error}") from error
            continue
        if not same_state(found, state):
            raise Violation(f"{ref} was restored with other bits")
        loads.add(ref)
    latest = ""
    if report.ok or store.backend.cheap_looks:  # otherwise readers do not list the log, and `verify` has reported it
        with contextlib.suppress(CkptError):
            latest = store.checkpoint("latest").ref
    newest = [ref for ref in saved if ref.endswith(f"@{store.view().catalog.term}")]
    if latest and newest:
        last = max(newest, key=lambda ref: node_of(ref)[1])
        if latest != last:
            raise Violation(f"latest is silently {latest}, but {last} was acknowledged")
    try:
        collect(store.journal)
    except CorruptLogError:
        return
    for ref in loads:
        if not same_state(store.load(ref, framework="numpy"), saved[ref]):
            raise Violation(f"{ref} was restored with other bits after gc")
