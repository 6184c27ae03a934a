"""States that a `Checkpointer` does not restore, each with its error; and a closed one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.errors import FormatError, UsageError, WriterClosedError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402


def linear() -> Any:
    return torch.nn.Linear(2, 2)


def begun(place: Path, **parts: Any) -> Checkpointer:
    checkpointer = Checkpointer(place, strategy="full", **({"model": linear()} | parts))
    checkpointer.resume()
    return checkpointer


def saved(place: Path, **parts: Any) -> None:
    with begun(place, **parts) as checkpointer:
        checkpointer.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: [state],
        lambda state: {**state, "format": 2},
        lambda state: {name: one for name, one in state.items() if name != "random"},
    ],
    ids=["a list", "another format", "no generators"],
)
def test_states_of_others(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    saved(tmp_path)
    store = ckptstore.open(tmp_path)
    with store.writer() as writer:
        writer.save(change(store.load()), 2)
    with pytest.raises(FormatError, match="not made by a Checkpointer"):
        begun(tmp_path)


@pytest.mark.parametrize(
    ("had", "wanted", "told"),
    [
        ({"a": 1, "b": 1}, {"a": 1}, r"\['a'\] are to be restored, the checkpoint has \['a', 'b'\]"),
        ([1, 1], {"a": 1}, r"\['a'\] are to be restored, the checkpoint has 2 of them, by number"),
        ([1, 1], [1], "1 are to be restored, the checkpoint has 2 of them"),
        (1, [1, 1], r"2 are to be restored, the checkpoint has \['bias', 'weight'\]"),
    ],
    ids=["names", "numbers for names", "fewer", "one"],
)
def test_others_than_were_saved(tmp_path: Path, had: Any, wanted: Any, told: str) -> None:
    def models(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: linear() for name in one}
        return [linear() for _ in one] if isinstance(one, list) else linear()

    saved(tmp_path, model=models(had))
    with pytest.raises(FormatError, match=f"model: {told}"):
        begun(tmp_path, model=models(wanted))


def test_a_part_that_was_not_saved(tmp_path: Path) -> None:
    saved(tmp_path)
    model = linear()
    with pytest.raises(FormatError, match="the checkpoint holds no optimizer: it was saved by a Checkpointer"):
        begun(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters()))


def test_something_more_by_name_than_was_saved(tmp_path: Path) -> None:
    saved(tmp_path, extra={"a": torch.Generator()})
    with pytest.raises(FormatError, match=r"no extra\['b'\]"):
        begun(tmp_path, extra={"a": torch.Generator(), "b": torch.Generator()})


def test_a_loader_that_has_fewer_batches_than_were_given_out(tmp_path: Path) -> None:
    with begun(tmp_path, loader=["a", "b", "c"]) as checkpointer:
        for number, _ in enumerate(checkpointer.loader, 1):
            if number == 3:
                checkpointer.step()
                break
    with (
        begun(tmp_path, loader=["a", "b"]) as checkpointer,
        pytest.raises(FormatError, match="ends after 2 batches, but 3 were yielded before"),
    ):
        next(iter(checkpointer.loader))


def test_one_that_is_closed_does_nothing_any_more(tmp_path: Path) -> None:
    checkpointer = begun(tmp_path)
    checkpointer.step()
    checkpointer.close()
    for call in (
        checkpointer.resume,
        lambda: checkpointer.rollback(1),
        checkpointer.step,
        checkpointer.wait,
        lambda: checkpointer.tag("late", 1),
    ):
        with pytest.raises(WriterClosedError, match="this Checkpointer is closed"):
            call()
    checkpointer.close()


def test_a_resume_that_does_not_end_saves_nothing(tmp_path: Path) -> None:
    """A state that was not restored, or not completely, is not a step that follows the checkpoint."""
    saved(tmp_path)
    lacking = Checkpointer(tmp_path, model=linear(), extra={"a": torch.Generator()}, strategy="full")
    with lacking as checkpointer:
        with pytest.raises(FormatError, match="holds no extra"):
            checkpointer.resume()
        with pytest.raises(UsageError, match=r"call resume\(\) before the first step"):
            checkpointer.step()
    assert [one.ref for one in ckptstore.open(tmp_path).checkpoints()] == ["1@1"]
