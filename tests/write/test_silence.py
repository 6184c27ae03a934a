"""The effect of a rank's timeout on other steps."""

from __future__ import annotations

import time

import pytest

from ckptstore.write.ranks.messages.silent_ranks import SilentRanks


def test_a_loss_is_for_steps_that_were_given_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    silence = SilentRanks()
    assert not silence.since(0.0)
    assert silence.about([0, 1, 2], 0.0) is None
    silence.note([1], 7, "rank 1 said nothing")
    now = 9.0
    silence.note([2], 8, "rank 2 said nothing")
    assert silence.about([0, 1], 4.0) == "as step 7: rank 1 said nothing"
    assert silence.about([2], 4.0) == "as step 8: rank 2 said nothing"
    assert silence.about([0], 4.0) is None, "another rank is waited for"
    assert silence.about([1], 5.0) is None, "given then: it may be there again"
    assert silence.about([1, 2], 6.0) == "as step 8: rank 2 said nothing"
    assert silence.since(6.0), "of one of the two"
    assert not silence.since(9.0)
    silence.note([1], 9, "rank 1 said nothing again")
    assert silence.about([1], 8.0) == "as step 9: rank 1 said nothing again"
