"""A bandwidth limit: transfers to and from a bucket are no faster on average. The tests have their own clocks."""

from __future__ import annotations

import numpy as np
import pytest

import ckptstore
from ckptstore import UsageError
from ckptstore.backends.object_store import object_requests, object_segments
from ckptstore.host import bandwidth
from ckptstore.host.bandwidth import Bandwidth, bytes_per_second
from tools.objects.server import Server


class Clock:
    """Time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_bytes_take_their_time_and_no_more() -> None:
    clock = Clock()
    one = Bandwidth(1000.0, clock, clock.sleep)
    one.take(500)
    assert clock.now == 100.0  # no transfer before
    one.take(2000)
    assert clock.now == pytest.approx(100.5)
    one.take(1)
    assert clock.now == pytest.approx(102.5)
    clock.now += 60
    one.take(3000)  # unused bandwidth is lost: no burst
    one.take(1)
    assert clock.now == pytest.approx(162.5 + 3)


@pytest.mark.parametrize(
    ("text", "rate"), [("50MB", 5e7), ("1.5 GiB/s", 1.5 * 2**30), ("800kB", 8e5), (1000, 1000.0), ("12", 12.0)]
)
def test_rates_as_people_write_them(text: str | int, rate: float) -> None:
    assert bytes_per_second(text) == rate


@pytest.mark.parametrize("wrong", ["fast", "", "-3MB", 0, "0", "5XB", float("nan"), float("inf")])
def test_an_invalid_rate_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="bandwidth"):
        ckptstore.open("s3://bucket/run", storage_options={"bandwidth": wrong})


def test_a_run_is_saved_and_loaded_at_the_rate(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that passed on the limit's clock is that of the counted bytes."""
    clock = Clock()
    monkeypatch.setattr(object_requests, "Bandwidth", lambda rate: Bandwidth(rate, clock, clock.sleep))
    monkeypatch.setattr(object_segments, "SINGLE", 1 << 20)  # the full is uploaded in parts
    monkeypatch.setattr(bandwidth, "PIECE", 1 << 18)
    rate = 1e6
    store = ckptstore.open(s3.url(), storage_options=s3.options | {"bandwidth": rate})
    weight = np.random.default_rng(1).standard_normal(700_000)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": weight}, 1)
    costs = store.backend.costs
    assert costs is not None
    assert store.load(framework="numpy")["w"].tobytes() == weight.tobytes()
    spent = costs.spent
    assert spent.requests["part"] >= 3
    moved = spent.sent + spent.received
    assert moved > 11_000_000
    store.checkpoints()  # which waits until all of that has taken its time
    assert clock.now - 100.0 >= 0.99 * moved / rate
    assert store.verify(deep=True).ok
