"""A small change of the log from outside of its writer: tags, retirements. Nothing is written for it but the record.

The writer of the newest term is asked (design: REQUESTS), and the answer waited for; or, by ``take_over``, a term is
opened and the change committed there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ckptstore.errors import ReadOnlyError, RequestError, RequestRefusedError, RequestTimeoutError
from ckptstore.formats.catalog import Catalog
from ckptstore.host.checks import seconds
from ckptstore.log.authors import Requester, Successor
from ckptstore.log.change import Change
from ckptstore.log.journal import Journal
from ckptstore.log.reading import read

__all__ = ["Planner", "change"]

_TRIES: Final = 3

Planner = Callable[[Catalog], Change | None]
"""What is to be changed in a catalog; None: it is as it should be already."""


def change(journal: Journal, what: str, plan: Planner, *, take_over: bool, timeout: float | None) -> Catalog:
    """Have a change committed -> a catalog that has it.

    Args:
        what: one line for people.
        plan: called with every newer view of the log; what it raises ends the matter.
        take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
        timeout: seconds to wait for the live writer's answer; None or infinity: as long as it takes.

    Raises:
        UsageError: `timeout` is no time.
        RequestRefusedError: the writer said no, and why. Nothing was changed.
        RequestTimeoutError: nobody answered; a live writer may still accept it. Or nobody is there who could: then at
            once, and nothing was posted.
        RequestError: newer terms began again and again before it was answered. Nothing was changed.
        ReadOnlyError, StorageError: the medium cannot be written, or failed.
        FencedError, CommitUnknownError: with `take_over`: another writer took the store over at the same time.
        anything `plan` raises.
    """
    timeout = seconds("timeout", timeout)
    if journal.backend.read_only:
        raise ReadOnlyError(f"{journal.url}: read-only, nothing can be changed")
    with journal.backend.upkeep():
        return _changed(journal, what, plan, take_over=take_over, timeout=timeout)


def _changed(journal: Journal, what: str, plan: Planner, *, take_over: bool, timeout: float | None) -> Catalog:
    catalog = read(journal).catalog
    wanted = plan(catalog)  # says what is wrong before anybody is asked or fenced
    if wanted is None:
        return catalog
    if take_over:
        return _commit(Successor(journal, what.split()[0]), what, plan)
    author = Requester(journal, timeout)
    for _ in range(_TRIES):
        outcome = author.commit(catalog.term, what, wanted)
        if outcome.answer == "refused":
            told = f"the writer of term {catalog.term} refused to {what}: {outcome.reason}"
            raise RequestRefusedError(f"{journal.url}: {told}")
        if outcome.answer == "waiting":
            raise RequestTimeoutError(_unanswered(journal, catalog, what, timeout))
        catalog = author.catalog()
        if outcome.answer == "accepted":
            return catalog
        wanted = plan(catalog)
        if wanted is None:
            return catalog
    raise RequestError(f"{journal.url}: {_TRIES} times a newer term began before the request to {what} was answered")


def _commit(author: Successor, what: str, plan: Planner) -> Catalog:
    catalog = author.catalog()
    if (wanted := plan(catalog)) is not None:
        author.commit(catalog.term, what, wanted)
    return author.catalog()


def _unanswered(journal: Journal, catalog: Catalog, what: str, timeout: float | None) -> str:
    opened = catalog.terms[catalog.term]
    about = ", ".join(f"{name} {opened.writer[name]}" for name in ("host", "pid") if name in opened.writer)
    return (
        f"{journal.url}: the writer of term {catalog.term}{f' ({about})' if about else ''} did not answer the request "
        f"to {what} in {timeout:g} s. A writer that is alive looks for requests every 5 s and after each save, and may "
        "still accept it; the next writer does not: a newer term makes it void. If no writer is alive, take_over=True "
        "(--take-over) makes the change here"
    )
