"""Breaks parts of the engine, so that the tests see the tools notice; each function states why."""

from __future__ import annotations

from typing import Literal

import pytest

from ckptstore.log import log_reader
from ckptstore.log.term import Term

__all__ = ["break_rule"]

Rule = Literal["look above", "look before", "chain"]


def break_rule(patch: pytest.MonkeyPatch, rule: Rule) -> None:
    """Omit one rule of the log: `reading._Reading`, its `_slot_above` and `_follows`, `Term._check_log_is_mine`.

    No option of the engine turns a rule off, and none should.
    """

    def only_the_next(one: log_reader._LogRead) -> int:
        return one.seq + 1 if log_reader.exists(one.backend, log_reader.slot_key(one.seq + 1)) else -1

    if rule == "look above":
        patch.setattr(log_reader._LogRead, "_slot_above", only_the_next)
        return
    patch.setattr(Term, "_check_last_slot", lambda _term, _seq: None)
    if rule == "chain":
        patch.setattr(log_reader._LogRead, "_follows", lambda _reading, _record: True)
