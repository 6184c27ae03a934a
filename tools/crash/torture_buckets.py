"""Like `torture_mishaps`, for stores in a bucket: objects vanish, older ones are put back, everything is deleted.

A bucket moves no store and has no handles: a writer has only its name. A reader there does not notice that two or more
consecutive slots are gone, because it does not list the log for each look; `verify`, gc and the next writer notice it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ckptstore.backends.object_store.objects import ObjectBackend
from ckptstore.errors import CkptError, WriterError
from ckptstore.formats.history.records import slot_of
from ckptstore.store import Store, verify
from tools.crash.scenario import Violation
from tools.crash.torture_mishaps import Saved, check, close, fill, save

if TYPE_CHECKING:
    from tools.crash.stages import BucketStage

__all__ = ["bucket_mishap"]


def bucket_mishap(stage: BucketStage) -> None:
    """Make a small store, inflict one mishap on it, and search for silent damage."""
    server = stage.place.bucket.server
    bucket = ObjectBackend(server.url(), server.options)
    kind = stage.chance.choice(list(_KINDS))
    _KINDS[kind](stage, bucket)
    _wipe(bucket)
    stage.note(**{f"mishap {kind}": 1})


def _wipe(bucket: ObjectBackend) -> None:
    for key in bucket.list(""):
        bucket.delete(key)


def _slots_vanish(stage: BucketStage, bucket: ObjectBackend) -> None:
    store, saved = Store(bucket), Saved()
    fill(stage, store, saved, stage.chance.randint(1, 4)).close()
    catalog = store.view().catalog
    slots = {f"{step}@{term}": seq for (term, step), seq in catalog.slots.items()}
    end = catalog.next_seq
    for seq in stage.chance.sample(range(end), min(end, stage.chance.randint(1, 4))):
        key = f"log/{seq:020d}"
        if stage.chance.random() < 0.2:
            data = bytearray(bucket.get(key))
            data[stage.chance.randrange(len(data))] ^= 1 << stage.chance.randrange(8)
            bucket.replace(key, bytes(data))
        else:
            bucket.delete(key)
    left = [slot_of(key) for key in bucket.list("log/")]
    top = max((seq for seq in left if seq is not None), default=-1)
    check(Store(bucket.reopened()), {ref: state for ref, state in saved.items() if slots[ref] <= top})


def _copy_is_put_back(stage: BucketStage, bucket: ObjectBackend) -> None:
    store, saved, copied = Store(bucket), Saved(), Saved()
    writer = fill(stage, store, saved, stage.chance.randint(1, 3))
    copied |= saved
    copy = {key: bucket.get(key) for key in bucket.list("")}
    save(stage, writer, saved, stage.chance.randint(0, 3))
    for key in bucket.list(""):
        if key not in copy:
            bucket.delete(key)
    for key in copy.keys() - set(bucket.list("")):
        bucket.replace(key, copy[key])
    after = Saved(copied)
    rival = None
    if stage.chance.random() < 0.6:
        rival = Store(bucket.reopened()).writer(threads=1, poll_seconds=None)
        save(stage, rival, after, stage.chance.randint(0, 3))
    try:
        before = set(saved)
        save(stage, writer, saved, 2)
    except WriterError:
        pass
    finally:
        after |= {ref: state for ref, state in saved.items() if ref not in before}
    if rival is not None:
        try:
            save(stage, rival, after, 1)
        except WriterError:
            stage.note(set_back_writer_in_the_way=1)  # nobody checks the slot before: that costs a request
        close(rival)
    close(writer)
    check(Store(bucket.reopened()), after)


def _everything_is_deleted(stage: BucketStage, bucket: ObjectBackend) -> None:
    store, saved = Store(bucket), Saved()
    writer = fill(stage, store, saved, stage.chance.randint(1, 2))
    _wipe(bucket)
    replaced = Saved()
    new = Store(bucket.reopened())
    created = stage.chance.random() < 0.5
    if created:
        fill(stage, new, replaced, 1).close()
    lost = dict(saved)
    try:
        save(stage, writer, saved, 1)
    except CkptError:
        pass
    else:
        raise Violation(f"acknowledged after the store was deleted: {sorted(set(saved) - set(lost))}")
    close(writer)
    if not created:  # (a store that was created may be empty)
        # Its segment was uploaded before it checked FORMAT, and no store is created over foreign segments.
        _wipe(bucket)
        fill(stage, new, replaced, 1).close()
    check(new, replaced)
    if not verify(new).ok:
        raise Violation("a store at another's old place is damaged")


_KINDS: Final[dict[str, Callable[[BucketStage, ObjectBackend], None]]] = {
    "slots": _slots_vanish,
    "copy": _copy_is_put_back,
    "deleted": _everything_is_deleted,
}
