"""The writers that this process shares between callers: one of a store, for `Store.writer(reuse=True)`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ckptstore.errors import CkptError, StoreNotFoundError, UsageError
from ckptstore.host.caller_warnings import warn
from ckptstore.log.journal import Journal
from ckptstore.write.writer import Writer

__all__ = ["WriterRequest", "close_shared", "found_writer", "shared_writer"]


@dataclass(frozen=True, slots=True)
class WriterRequest:
    """What a caller of `Store.writer` asks for.

    Attributes:
        group: the process group; None: this process alone.
        parent: the checkpoint to continue from.
        options: every other option, by its name.
    """

    group: Any
    parent: Any
    options: Mapping[str, Any]

    def difference(self, other: WriterRequest) -> str | None:
        """The name of an option that differs from that of `other`, by which a writer is open; None: there is none."""
        for name, value in self.options.items():
            if name == "keep" and value is None:
                continue  # the store's rules, which every writer applies
            if value != other.options[name]:
                return name
        # An open writer continues from its own newest checkpoint, whatever it began with.
        return None if self.parent in ("latest", other.parent) else "parent"


@dataclass(frozen=True, slots=True)
class _Shared:
    """An open writer.

    Attributes:
        run: the uuid of its store: another store may be at the same place by now.
        request: with what it was opened; it keeps the group alive, so that no other group has its `id`.
    """

    writer: Writer
    run: str
    request: WriterRequest


_Key = tuple[str, int]
_guard = threading.Lock()
_open: Final[dict[_Key, _Shared]] = {}
_opening: Final[dict[_Key, threading.Lock]] = {}
"""One lock for each place and group: ranks may be threads of one process, and wait for each other as they open."""


def shared_writer(address: str, journal: Journal, request: WriterRequest, opener: Callable[[], Writer]) -> Writer:
    """The open writer of this process for a store, if it can save and has the options of `request`; else a new one.

    Args:
        address: `Backend.address` of the store.
        journal: reads the store's FORMAT again.
        opener: opens a writer.

    Raises:
        UsageError: a writer is open whose options differ.
        as `opener`.
    """
    key = (address, id(request.group))
    with _guard:
        opening = _opening.setdefault(key, threading.Lock())
    with opening:
        with _guard:
            found = _open.get(key)
            others = [one for (where, _), one in _open.items() if where == address and one is not found]
        if found is not None:
            if found.writer.usable and found.run == _run(journal):
                if (name := request.difference(found.request)) is not None:
                    raise _differs(found, request, name)
                return found.writer
            _retire(key, found)
        for one in others:
            if one.writer.usable and (one.request.group is None) != (request.group is None):
                how = "with" if request.group is None else "without"
                raise UsageError(f"{one.writer.url}: this process has a writer open {how} group=: close it first")
        writer = opener()
        try:
            run = journal.run  # opening has created it, if there was none
        except BaseException:
            writer.close()
            raise
        with _guard:
            _open[key] = _Shared(writer, run, request)
        return writer


def found_writer(address: str, journal: Journal) -> Writer | None:
    """The open writer of this process alone for a store, whatever its options; None: there is none that can save.

    Args:
        address, journal: as for `shared_writer`.
    """
    with _guard:
        found = _open.get((address, id(None)))
    if found is None or not found.writer.usable or found.run != _run(journal):
        return None
    return found.writer


def close_shared(address: str, group: Any = None) -> None:
    """Close the shared writer of a store, if there is one, so that another can have other options.

    Raises as `Writer.close`.
    """
    with _guard:
        found = _open.pop((address, id(group)), None)
    if found is not None:
        found.writer.close()


def _run(journal: Journal) -> str | None:
    try:
        return journal.run
    except StoreNotFoundError:
        return None


def _retire(key: _Key, old: _Shared) -> None:
    """Close a writer that is of no use any more: it is closed, fenced or of a fork, or its store was replaced."""
    with _guard:
        _open.pop(key, None)
    try:
        old.writer.close()
    except CkptError as error:  # a save in flight that nobody asked for
        warn(f"{old.writer.url}: the writer of term {old.writer.term}, which another replaces, failed: {error}")


def _differs(found: _Shared, request: WriterRequest, name: str) -> UsageError:
    if name == "parent":
        has, wanted = found.request.parent, request.parent
    else:
        has, wanted = found.request.options[name], request.options[name]
    return UsageError(
        f"{name}: {wanted!r:.80}; this process has a writer of {found.writer.url} open with {has!r:.80}: "
        "give the same, or close that writer first"
    )


def _forget_all() -> None:
    """A fork has none of the threads of its parent's writers, and perhaps copies of locked locks."""
    global _guard
    _guard = threading.Lock()
    _open.clear()
    _opening.clear()


os.register_at_fork(after_in_child=_forget_all)
