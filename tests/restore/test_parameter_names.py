"""``into=`` with an optimizer's state: named parameters are read into those of the same names, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402
from ckptstore.errors import UsageError  # noqa: E402


def optimizer(names: str, *, named: bool = True) -> Any:
    """Stepped once; each parameter's moments have its name."""
    parameters = [(name, torch.nn.Parameter(torch.zeros(2))) for name in names]
    made = torch.optim.Adam(parameters if named else [one for _, one in parameters])
    for name, one in parameters:
        one.grad = torch.full((2,), float(ord(name)))
    made.step()
    return made


def stored(state: Any) -> ckptstore.Store:
    store = ckptstore.open("memory://parameter-names")
    with store.writer(parent=None, poll_seconds=None) as writer:
        writer.save(state, step=1)
    return store


@pytest.mark.parametrize("select", [None, "optimizer.*", "optimizer*.state.*"])
@pytest.mark.parametrize("nested", [False, True])
def test_another_order_is_refused_before_a_byte_is_read(select: str | None, nested: bool) -> None:
    def state(one: Any) -> Any:
        return {"optimizer": [one.state_dict()] if nested else one.state_dict(), "w": torch.zeros(1)}

    store = stored(state(optimizer("ab")))
    other = state(optimizer("ba"))
    before = [
        one["exp_avg"].clone() for one in (other["optimizer"][0] if nested else other["optimizer"])["state"].values()
    ]
    with pytest.raises(UsageError, match=r"into= has 'b' in optimizer.*\.param_groups where the checkpoint has 'a'"):
        store.load(1, into=other, select=select)
    after = [one["exp_avg"] for one in (other["optimizer"][0] if nested else other["optimizer"])["state"].values()]
    assert all(map(torch.equal, before, after))
    assert store.load(1, into=other, select="w")["w"] is other["w"]
    store.load(1, into=state(optimizer("ab")), select=select)


def test_without_names_on_both_sides_it_is_by_number() -> None:
    for saved, mine in ((True, False), (False, True), (False, False)):
        target = {"optimizer": optimizer("ba", named=mine).state_dict()}
        stored({"optimizer": optimizer("ab", named=saved).state_dict()}).load(1, into=target)
        assert target["optimizer"]["state"][0]["exp_avg"][0] == pytest.approx(9.7)
