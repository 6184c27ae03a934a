"""Commits a small change of the log from outside its writer, such as a tag or a retirement. Writes only the record.

The writer of the newest term is asked to commit it (SPEC 10, REQUESTS), and the caller waits for the answer. With
``take_over`` a term is opened and the change committed there. `look` reads the log once; later steps fetch only newer
slots. If another process takes a slot in the meantime, the log is read again (`log.term`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ckptstore.errors import ReadOnlyError, RequestError, RequestRefusedError, RequestTimeoutError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.host.option_checks import seconds
from ckptstore.log.change import CatalogChange
from ckptstore.log.change_committer import ChangeRequester, TakeOver
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, read

__all__ = ["Planner", "change", "look"]

_TRIES: Final = 3

Planner = Callable[[Catalog], CatalogChange | None]
"""Returns the change to make to a catalog; None: no change is needed."""


def look(journal: Journal, *, take_over: bool) -> View:
    """READ (SPEC 10), as far as `change` needs it. Raises as `read`."""
    return read(journal, look_above=True if take_over else None)


def change(journal: Journal, view: View, what: str, plan: Planner, *, take_over: bool, timeout: float | None) -> View:
    """Have a change committed, and return a view of the log that has it.

    Args:
        view: the log as `look` has just read it.
        what: one line for people.
        plan: called with every newer view of the log. If it raises, the change is abandoned.
        take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
        timeout: seconds to wait for the live writer's answer; None or infinity: without limit.

    Raises:
        UsageError: `timeout` is not a time.
        RequestRefusedError: the writer refused, with its reason. Nothing was changed.
        RequestTimeoutError: there was no answer in time; a live writer may still accept the request. Or there is no
            live writer: then it is raised at once, and no request was posted.
        RequestError: newer terms began again and again before the answer. Nothing was changed.
        ReadOnlyError, StorageError: the medium cannot be written, or failed.
        FencedError, CommitUnknownError: with `take_over`: another writer took over the store at the same time.
        anything `plan` raises.
    """
    timeout = seconds("timeout", timeout)
    if journal.backend.read_only:
        raise ReadOnlyError(f"{journal.url}: read-only, nothing can be changed")
    with journal.backend.upkeep():
        wanted = plan(view.catalog)  # raises what is wrong before a writer is asked or fenced
        if wanted is None:
            return view
        if take_over:
            return _commit(TakeOver(journal, what.split()[0], view=view), what, plan)
        return _asked(journal, ChangeRequester(journal, timeout, view), what, wanted, plan, timeout)


def _asked(
    journal: Journal, author: ChangeRequester, what: str, wanted: CatalogChange, plan: Planner, timeout: float | None
) -> View:
    for _ in range(_TRIES):
        asked = author.view.catalog
        outcome = author.commit(asked.term, what, wanted)
        if outcome.answer == "refused":
            told = f"the writer of term {asked.term} refused to {what}: {outcome.reason}"
            raise RequestRefusedError(f"{journal.url}: {told}")
        if outcome.answer == "waiting":
            raise RequestTimeoutError(_unanswered(journal, asked, what, timeout))
        if outcome.answer == "accepted":
            return author.view
        changed = plan(author.view.catalog)
        if changed is None:
            return author.view
        wanted = changed
    raise RequestError(f"{journal.url}: {_TRIES} times a newer term began before the request to {what} was answered")


def _commit(author: TakeOver, what: str, plan: Planner) -> View:
    # Plan again: another term may have begun between the reading and this one.
    # Prevents: naming a checkpoint that was retired meanwhile, or dropping what others build on since.
    catalog = author.catalog()
    if (wanted := plan(catalog)) is not None:
        author.commit(catalog.term, what, wanted)
    return author.view


def _unanswered(journal: Journal, catalog: Catalog, what: str, timeout: float | None) -> str:
    opened = catalog.terms[catalog.term]
    about = ", ".join(f"{name} {opened.writer[name]}" for name in ("host", "pid") if name in opened.writer)
    return (
        f"{journal.url}: the writer of term {catalog.term}{f' ({about})' if about else ''} did not answer the request "
        f"to {what} in {timeout:g} s. A live writer looks for requests every 5 s and after each save, and may still "
        "accept it; the next writer does not: a newer term makes it void. If no writer is alive, take_over=True "
        "(--take-over) makes the change here"
    )
