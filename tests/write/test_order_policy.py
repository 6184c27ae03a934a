"""The policy alone: its orders for given earlier saves. No store, no threads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore import DeltaOptions, DiffOptions
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.history.retention_forecast import Chains
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.policy.orders import FULL_ORDER, Order

FULL = 1000


def name(step: int) -> CheckpointId:
    return CheckpointId(1, step, f"{step:032x}")


def always(_: CheckpointId) -> bool:
    return True


def never(_: CheckpointId) -> bool:
    return False


def stored(policy: OrderPolicy, step: int, size: int = 100) -> Order:
    """Ask for an order, and follow it."""
    order = policy.state_order(step, always)
    policy.committed(order, name(step), FULL if order.base is None else size, FULL)
    return order


def test_without_deltas_every_state_is_a_full_that_nothing_builds_on() -> None:
    policy = OrderPolicy()
    assert [stored(policy, step) for step in (1, 2)] == [FULL_ORDER] * 2
    assert policy.bases() == []
    assert policy.step_order(3, always, waiting=0) is None


def test_an_order_names_checkpoints() -> None:
    policy = OrderPolicy(DeltaOptions(interval=2))
    assert stored(policy, 10) == Order(keep=True)
    assert stored(policy, 20) == Order(name(10), 1)
    assert policy.bases() == [name(10)]
    assert stored(policy, 30) == Order(name(10), 2, True, (name(10),))
    assert policy.bases() == [name(30)]
    assert stored(policy, 40) == Order(name(30), 1)


def test_a_base_that_cannot_be_restored_is_given_up() -> None:
    policy = OrderPolicy(DeltaOptions(interval=4))
    stored(policy, 1)
    asked = []
    order = policy.state_order(2, lambda identity: bool(asked.append(identity)))
    assert asked == [name(1)]
    assert order == Order(keep=True)
    assert policy.bases() == []


def test_an_order_whose_base_was_given_up_meanwhile_leaves_no_base() -> None:
    policy = OrderPolicy(DeltaOptions(interval=1))
    stored(policy, 1)
    order = policy.state_order(2, always)
    policy.forget_bases()
    policy.committed(order, name(2), 100, FULL)
    assert policy.bases() == []
    assert policy.state_order(3, always).base is None


@pytest.mark.parametrize(("size", "kind"), [(100, "delta"), (900, "full")])
def test_a_checkpoint_that_rules_keep_for_good_is_a_full_where_its_chain_takes_more(size: int, kind: str) -> None:
    policy = OrderPolicy(DeltaOptions(interval=1), chains=Chains(lambda: ("every:10",)))
    for step in (10, 15):
        stored(policy, step, size)
    assert policy.state_order(20, always).kind == kind
    steps = OrderPolicy(diffs=DiffOptions(), chains=Chains(lambda: ("every:10",)))
    steps.committed(FULL_ORDER, name(10), FULL, FULL)
    steps.begin_steps(name(10), FULL, 1.0)
    steps.compressed(name(15), 10, size, FULL)
    order = steps.step_order(20, always, waiting=1)
    assert (order is None) == (kind == "full")


def test_step_diffs_begin_with_a_full_and_end_with_the_next_one() -> None:
    policy = OrderPolicy(diffs=DiffOptions(full_every=4))
    assert policy.step_order(1, always, waiting=0) is None
    policy.begin_steps(name(1), FULL, 1.0)
    for step in (2, 3, 4):
        assert policy.step_order(step, always, waiting=0) == Order(after=step - 1, last=True)
        policy.compressed(name(step), step - 1, 10, FULL)
        policy.count_step()
    assert policy.step_order(5, always, waiting=0) is None


def test_another_term_does_not_know_yet_how_large_its_step_diffs_are() -> None:
    policy = OrderPolicy(diffs=DiffOptions(), chains=Chains(lambda: ("every:10",)))
    policy.begin_steps(name(11), FULL, 1.0)
    policy.count_step()
    policy.compressed(name(12), 11, 900, FULL)
    policy.begin_term()
    policy.committed(FULL_ORDER, name(15), FULL, FULL)
    policy.begin_steps(name(15), FULL, 1.0)
    assert policy.step_order(20, always, waiting=0) is not None


def test_a_batch_ends_when_it_is_full_when_a_step_cannot_wait_or_by_its_bytes() -> None:
    policy = OrderPolicy(diffs=DiffOptions(batch=3, batch_bytes=100))
    policy.begin_steps(name(1), FULL, 1.0)
    lasts = []
    for waiting in range(4):
        order = policy.step_order(2, always, waiting=waiting)
        assert order is not None
        lasts.append(order.last)
    assert lasts == [False, False, True, True]
    order = policy.step_order(2, always, waiting=0, waits=False)
    assert order == Order(after=1, last=True)
    assert [policy.too_large(nbytes) for nbytes in (100, 101)] == [False, True]


def test_waiting_steps_keep_a_base_that_was_retired() -> None:
    policy = OrderPolicy(diffs=DiffOptions(batch=9))
    policy.begin_steps(name(1), FULL, 1.0)
    assert policy.step_order(2, never, waiting=0) is None
    assert policy.step_order(2, never, waiting=1) is not None


def test_steps_that_ended_do_not_begin_with_a_batch_that_is_written_late() -> None:
    policy = OrderPolicy(diffs=DiffOptions(batch=9, accumulate="sum"))
    policy.begin_steps(name(1), FULL, 1.0)
    policy.lost()
    policy.compressed(name(3), 1, 10, FULL)
    policy.batch_committed(name(3))
    assert policy.step_order(4, always, waiting=0) is None
    policy.begin_steps(name(4), FULL, 1.0)
    assert policy.step_order(5, always, waiting=0) == Order(after=4)


def test_a_step_that_is_lost_ends_sums_alone() -> None:
    policy = OrderPolicy(diffs=DiffOptions())
    policy.begin_steps(name(1), FULL, 1.0)
    policy.lost()
    assert policy.step_order(3, always, waiting=0) == Order(after=1, last=True)


class Controlled:
    """A controller that records its inputs."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.interval, self.batch = 2, 1

    @property
    def configuration(self) -> Controlled:
        return self

    def wrote(self, nbytes: float, seconds: float) -> None:
        self.said.append((nbytes, seconds))

    def ran(self, seconds: float) -> None:
        self.said.append(seconds)

    def adapt(self) -> None:
        self.interval, self.batch = 9, 5


def test_a_controller_gets_the_costs_of_fulls_and_decides() -> None:
    now = [10.0]
    controller = Controlled()
    policy = OrderPolicy(diffs=DiffOptions(controller=controller), clock=lambda: now[0])
    assert (policy.full_every, policy.batch) == (2, 1)
    now[0] = 12.5
    policy.begin_steps(name(1), FULL, 0.5)
    assert controller.said == [2.5, (FULL, 0.5)]
    assert (policy.full_every, policy.batch) == (9, 5)
    now[0] = 20.0
    policy.begin_term()
    assert policy.step_order(2, always, waiting=0) is None
    now[0] = 21.0
    policy.begin_steps(name(2), FULL, 0.5)
    assert controller.said[2] == 1.0


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 2, 3, "auto"]),
    st.sampled_from(["anchor", "paper"]),
    st.lists(st.tuples(st.sampled_from(["save", "save", "save", "fail", "restart", "retired"]), st.integers(1, 1100))),
)
def test_two_policies_that_follow_the_same_orders_agree(interval: int, form: str, life: list[tuple[str, int]]) -> None:
    """So another rank's agrees with rank 0's: on both the named base was kept and not forgotten."""
    options = DeltaOptions(interval=interval, form=form)  # type: ignore[arg-type]
    asked, told = OrderPolicy(options), OrderPolicy(options)
    kept: set[CheckpointId] = set()
    for step, (what, size) in enumerate(life):
        if what == "restart":
            kept.clear()
            asked.forget_bases()
            told.forget_bases()
            continue
        order = asked.state_order(step, never if what == "retired" else always)
        if what == "retired":
            assert order.base is None
        if not asked.bases():
            kept.clear()
        assert order.base is None or order.base in kept
        assert set(order.forget) <= kept
        if what == "fail":
            continue
        for policy in (asked, told):
            policy.committed(order, name(step), FULL if order.base is None else size, FULL)
        if order.base is None:
            kept.clear()
        kept -= set(order.forget)
        if order.keep:
            kept.add(name(step))
        assert set(asked.bases()) == set(told.bases()) == kept
