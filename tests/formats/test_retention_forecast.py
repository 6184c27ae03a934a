"""Which checkpoint becomes a full because rules keep it for good: rules and steps, without a store."""

from __future__ import annotations

import pytest

from ckptstore.formats.history.retention_forecast import Chains, kept_for_good

DIFF = 0.3


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (["every:100"], [0, 100, 200]),
        (["last:50", "every:100"], [0, 100, 200]),
        (["every:50", "every:100"], [0, 50, 100, 150, 200]),
        (["last:50"], []),
        (["newer-than:7d", "branches", "tagged", "best:loss:3"], []),
        ([], []),
        (["every:100", "of-another-version:3"], []),
    ],
)
def test_checkpoints_that_rules_keep_for_good(rules: list[str], kept: list[int]) -> None:
    assert [step for step in range(0, 201, 10) if kept_for_good(rules, step)] == kept


def stored(rules: list[str], steps: int, full_every: int) -> dict[int, float]:
    """A run of step diffs -> each full, and the bytes of the store once only `rules` keep checkpoints."""
    chains, fulls, below = Chains(lambda: rules), [], {}
    since = full_every
    for step in range(1, steps + 1):
        since += 1
        if since >= full_every or chains.wants_full(step, step - 1, DIFF):
            fulls.append(step)
            chains.stored(step, None, 1.0)
            since, below[step] = 0, None
        else:
            chains.stored(step, step - 1, DIFF)
            below[step] = step - 1
    needed: set[int] = set()
    for step in range(1, steps + 1):
        at: int | None = step if kept_for_good(rules, step) else None
        while at is not None and at not in needed:
            needed.add(at)
            at = below[at]
    return {step: float(step in fulls) for step in sorted(needed)}


def test_a_kept_step_is_the_full_and_pins_nothing() -> None:
    kept = stored(["last:50", "every:100"], 1000, 100)
    assert list(kept) == list(range(100, 1001, 100))
    assert all(kept.values())


@pytest.mark.parametrize("every", [7, 10, 30, 99, 101, 150, 250])
def test_no_kept_step_needs_more_than_a_full(every: int) -> None:
    kept = stored([f"every:{every}"], 2000, 100)
    assert list(kept) == list(range(every, 2001, every))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_steps_that_stand_close_build_on_each_other(every: int) -> None:
    """Three step diffs take less than a full."""
    kept = stored([f"every:{every}"], 1000, 100)
    assert sum(kept.values()) < 1000 / 40
    assert sum(1.0 if full else DIFF for full in kept.values()) < 1000 * 0.33


def test_without_rules_nothing_changes() -> None:
    assert not Chains(tuple).wants_full(100, 99, DIFF)


def test_rules_that_come_late_count_from_then_on() -> None:
    rules: list[str] = []
    chains = Chains(lambda: rules)
    chains.stored(1, None, 1.0)
    for step in range(2, 10):
        chains.stored(step, step - 1, DIFF)
    assert not chains.wants_full(10, 9, DIFF)
    rules.append("every:10")
    assert chains.wants_full(10, 9, DIFF)
    assert not chains.wants_full(11, 10, DIFF)


def test_a_kept_base_costs_nothing_more() -> None:
    chains = Chains(lambda: ["every:2"])
    chains.stored(2, None, 1.0)
    chains.stored(3, 2, 0.9)
    assert not chains.wants_full(4, 2, 0.99)
    assert chains.wants_full(4, 3, 0.2)


def test_many_steps_are_not_remembered() -> None:
    chains = Chains(lambda: ["every:1000000"])
    for step in range(1, 5000):
        chains.stored(step, step - 1, DIFF)
    assert chains.wants_full(1_000_000, 4999, 0.1)
    assert not chains.wants_full(1_000_000, 1, 0.9), "it is not a base of anything any more"


@pytest.mark.parametrize("short", [True, False])
def test_a_chain_of_retired_steps_ends_where_space_is_short(short: bool) -> None:
    chains, fulls, base = Chains(lambda: ["last:1"], lambda: short), [1], 1
    chains.stored(1, None, 1.0)
    for step in range(2, 14):
        if chains.wants_full(step, base, DIFF):
            fulls.append(step)
            chains.stored(step, None, 1.0)
        else:
            chains.stored(step, base, DIFF)
        base = step
    assert fulls == ([1, 5, 9, 13] if short else [1])  # three differences take less than a full, four do not
