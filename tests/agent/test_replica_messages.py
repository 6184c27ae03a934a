"""The replica's messages of docs/agent.md, from an independent trainer, well and badly formed.

Whatever a message says, the agent answers with an error, keeps the state that was proven last, and stores no other.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

pytest.importorskip("torch")

import ckptstore
from tests.agent.shim import Shim

pytestmark = pytest.mark.filterwarnings("ignore::ckptstore.DeterminismWarning")

SIDE = 64
LARGE = 4 * SIDE * SIDE
NAMES = ("w", "w.m", "v", "v.m", "bias")
TENSORS = [[name, "F32", [4] if name == "bias" else [SIDE, SIDE], "torch", None, None] for name in NAMES]
TREE = {name: {"$t": name} for name in NAMES}
RECIPE: dict[str, Any] = {
    "kinds": ["SGD", "AdamW"],
    "groups": [1, 1],
    "rows": [
        [0, 0, [["weight", 0], ["momentum_buffer", 1]], True],
        [0, 0, [["weight", 2], ["momentum_buffer", 3]], True],
        [1, 0, [["weight", 4]], False],
    ],
    "made": [0, 1, 2, 3],
    "summed": [],
    "variants": [],
}
SETTINGS = {"lr": 0.5, "momentum": 0.5, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
CALLS: list[Any] = [[0, [SETTINGS], None, [None, None], []]]
BIAS = 2 * LARGE
DIGESTS = BIAS + 128
AREA = DIGESTS + 8 * 4


class Trainer:
    """A trainer whose numbers are so small that every rounding is exact.

    Attributes:
        step: the step that the agent has proven last.
        values: the state of that step.
        area, memory: the number of the area, and its memory.
    """

    def __init__(self, store: Path) -> None:
        self.shim, _ = Shim.started(store)
        self.layout = self.shim.ask("layout", tensors=TENSORS)
        self.step = 1
        self.values = {name: np.ones([4] if name == "bias" else [SIDE, SIDE], np.float32) for name in NAMES}
        self.save()
        self.area, self.memory = self.beside(AREA)
        self.replica = self.shim.ask("replica", layout=self.layout["layout"], recipe=RECIPE, areas=[self.area])

    def beside(self, nbytes: int) -> tuple[int, mmap.mmap]:
        lent = self.shim.ask("beside", nbytes=nbytes)
        return lent["buffer"], mmap.mmap(self.shim.descriptors[-1], lent["nbytes"])

    def save(self) -> None:
        """Send the whole state."""
        lent = self.shim.ask("buffer", layout=self.layout["layout"])
        memory = mmap.mmap(self.shim.descriptors[-1], lent["nbytes"])
        for start, value in zip(self.layout["offsets"], self.values.values(), strict=True):
            memory[start : start + value.nbytes] = value.tobytes()
        body = {"buffer": lent["buffer"], "layout": self.layout["layout"], "tree": TREE, "step": self.step}
        assert "error" not in self.shim.ask("save", **body)
        assert self.shim.event()["step"] == self.step

    def gradient(self, step: int) -> np.ndarray[Any, Any]:
        return np.full([SIDE, SIDE], 2.0 * step, np.float32)

    def after(self, step: int) -> dict[str, np.ndarray[Any, Any]]:
        """The state after one more step."""
        found = copy.deepcopy(self.values)
        for weight in ("w", "v"):
            found[f"{weight}.m"] = found[f"{weight}.m"] * np.float32(0.5) + self.gradient(step)
            found[weight] = found[weight] - np.float32(0.5) * found[f"{weight}.m"]
        found["bias"] = np.full(4, step, np.float32)
        return found

    def fill(self, step: int, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Put the gradients of a step, its small tensor and the digests of a state into the area."""
        for start in (0, LARGE):
            self.memory[start : start + LARGE] = self.gradient(step).tobytes()
        self.memory[BIAS : BIAS + 16] = state["bias"].tobytes()
        digests = [xxhash.xxh3_64_intdigest(state[name].tobytes()) for name in NAMES[:4]]
        self.memory[DIGESTS:AREA] = np.array(digests, np.uint64).tobytes()

    def message(self, **other: Any) -> dict[str, Any]:
        """A right ``advance`` to the next step, but for the given members; a member that is ``...`` is left out."""
        body = {"replica": self.replica["replica"], "area": self.area, "after": self.step, "step": self.step + 1}
        body |= {"calls": CALLS, "threads": 1, "tree": TREE, "persist": True}
        return {name: value for name, value in (body | other).items() if value is not ...}

    def advance(self, **other: Any) -> dict[str, Any]:
        """Fill the area for the next step, and ask for it."""
        self.fill(self.step + 1, self.after(self.step + 1))
        return self.shim.ask("advance", **self.message(**other))

    def proven(self) -> None:
        """A right step."""
        values = self.after(self.step + 1)
        assert self.advance() == {"re": self.shim.number}
        self.step, self.values = self.step + 1, values
        told = self.shim.event()
        assert (told["event"], told["step"]) == ("saved", self.step)

    def newest(self) -> tuple[int, str]:
        found = self.shim.ask("newest")
        return found["step"], found["state"]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path / "store")
    yield made
    made.memory.close()
    made.shim.close()
    assert made.shim.agent is not None
    made.shim.agent.kill()
    made.shim.agent.wait()


def check(store: Path, states: dict[int, dict[str, Any]]) -> None:
    """These steps, with these bits, and no others are in the store."""
    found = ckptstore.open(store)
    assert [info.step for info in found.checkpoints()] == list(states)
    for step, state in states.items():
        loaded = found.load(step, framework="numpy")
        assert all(loaded[name].tobytes() == state[name].tobytes() for name in NAMES), step
    assert not found.verify(deep=True).damage


def call(**other: Any) -> list[Any]:
    """The calls, with other members of the one."""
    names = ("optimizer", "settings", "moved", "scaling", "sparse")
    return [[other.get(name, value) for name, value in zip(names, CALLS[0], strict=True)]]


BAD_STEPS: dict[str, dict[str, Any]] = {  # in place of step 3 after step 2
    "no replica": {"replica": ...},
    "another replica": {"replica": 77},
    "a replica that is a list": {"replica": [1]},
    "no area": {"area": ...},
    "an unknown area": {"area": 99},
    "an area that is a text": {"area": "0"},
    "an area that is true": {"area": True},
    "no step": {"step": ...},
    "a negative step": {"step": -1},
    "a step that is a float": {"step": 3.0},
    "the same step": {"step": 2},
    "an earlier step": {"step": 1},
    "no step before": {"after": ...},
    "after a step that is not the last": {"after": 1},
    "after a step that is to come": {"after": 3, "step": 4},
    "no persist": {"persist": ...},
    "persist that is a text": {"persist": "false"},
    "persist that is a number": {"persist": 1},
    "no threads": {"threads": ...},
    "too many threads": {"threads": 1 << 30},
    "threads that are a text": {"threads": "1"},
    "no tree": {"tree": ...},
    "a tree of other tensors": {"tree": {**TREE, "w": {"$t": "u"}}},
    "a tree in another order": {"tree": dict(reversed(TREE.items()))},
    "a tree that is a number": {"tree": 3},
    "tags that are numbers": {"tags": [3]},
    "no calls": {"calls": ...},
    "calls that are a number": {"calls": 5},
    "a call that is too short": {"calls": [[0, [SETTINGS]]]},
    "an optimizer out of range": {"calls": call(optimizer=2)},
    "an optimizer that is a text": {"calls": call(optimizer="SGD")},
    "an optimizer that steps twice": {"calls": CALLS * 2},
    "settings of no group": {"calls": call(settings=[])},
    "settings of two groups": {"calls": call(settings=[SETTINGS, SETTINGS])},
    "settings that are a list": {"calls": call(settings=[[1]])},
    "an unknown setting": {"calls": call(settings=[{**SETTINGS, "warp": 1}])},
    "a setting that is a text": {"calls": call(settings=[{**SETTINGS, "lr": "0.5"}])},
    "a setting that is an object": {"calls": call(settings=[{**SETTINGS, "lr": {}}])},
    "parameters as a setting": {"calls": call(settings=[{**SETTINGS, "params": []}])},
    "a row out of range": {"calls": call(moved=[0, 3])},
    "a row of another optimizer": {"calls": call(moved=[0, 2])},
    "a row that is a text": {"calls": call(moved=["0"])},
    "rows that are a number": {"calls": call(moved=1)},
    "scaling that is too short": {"calls": call(scaling=[None])},
    "scaling that is a text": {"calls": call(scaling=["one", None])},
    "entries that are a number": {"calls": call(sparse=1)},
    "entries without a count": {"calls": call(sparse=[[0]])},
    "entries of a row out of range": {"calls": call(sparse=[[3, 0]])},
    "entries of a row that is sent": {"calls": call(sparse=[[2, 0]])},
    "entries of a row twice": {"calls": call(sparse=[[0, 0], [0, 0]])},
    "entries of a row without a gradient": {"calls": call(moved=[1], sparse=[[0, 0]])},
    "more entries than fit": {"calls": call(sparse=[[0, SIDE * SIDE // 2 + 1]])},
    "a negative count of entries": {"calls": call(sparse=[[0, -1]])},
    "entries that are not positions": {"calls": call(sparse=[[0, 2]])},
    "whole that is a number": {"whole": 7},
    "whole of an unknown buffer": {"whole": [[99, [[0, 0]]]]},
    "whole of a buffer that is a text": {"whole": [["0", [[0, 0]]]]},
    "whole without a start": {"whole": [[0, [[0]]]]},
    "whole of a tensor that is sent": {"whole": [[0, [[4, 0]]]]},
    "whole of a tensor out of range": {"whole": [[0, [[5, 0]]]]},
    "whole that ends outside": {"whole": [[0, [[0, 1 << 20]]]]},
    "whole that begins before": {"whole": [[0, [[0, -128]]]]},
    "a tensor whole twice": {"whole": [[0, [[0, 0], [0, 0]]]]},
    "a tensor whole twice, of two buffers": {"whole": [[0, [[0, 0]]], [0, [[0, 0]]]]},
}


def test_a_step_that_is_badly_described_is_refused_and_changes_nothing(trainer: Trainer, tmp_path: Path) -> None:
    states = {1: trainer.values}
    trainer.proven()
    states[2] = trainer.values
    before = trainer.newest()
    for what, other in BAD_STEPS.items():
        body = copy.deepcopy(other)
        for part in body["whole"] if isinstance(body.get("whole"), list) else ():
            part[0] = trainer.area if part[0] == 0 else part[0]  # it is lent, and large enough
        answer = trainer.advance(**body)
        assert answer.get("error", {}).get("text"), (what, answer)
        assert trainer.newest() == before, what
    trainer.proven()  # it serves on
    states[3] = trainer.values
    assert "error" not in trainer.shim.ask("close")
    check(tmp_path / "store", states)


def test_metadata_that_cannot_be_written_fails_that_save_alone(trainer: Trainer, tmp_path: Path) -> None:
    """The step itself is proven: the next one builds on it."""
    states = {1: trainer.values}
    values = trainer.after(2)
    trainer.fill(2, values)
    trainer.shim.send({"do": "advance", "id": 1001, **trainer.message(metadata={"x": "y" * 20_000})})
    told = trainer.shim.event()  # it comes before the answer
    assert trainer.shim.hear() == {"re": 1001}
    assert (told["event"], told["step"]) == ("failed", 2)
    assert "metadata" in told["error"]["text"]
    trainer.step, trainer.values = 2, values
    trainer.proven()
    states[3] = trainer.values
    assert "error" not in trainer.shim.ask("close")
    check(tmp_path / "store", states)


def changed(**other: Any) -> dict[str, Any]:
    return RECIPE | other


def rows(*wanted: Any) -> dict[str, Any]:
    return changed(rows=list(wanted))


FIRST, SECOND, THIRD = RECIPE["rows"]
BAD_RECIPES: dict[str, Any] = {
    "nothing": None,
    "a text": "SGD",
    "no kinds": {name: one for name, one in RECIPE.items() if name != "kinds"},
    "kinds that are numbers": changed(kinds=[1, 2]),
    "a kind that is long": changed(kinds=["S" * 100, "AdamW"]),
    "groups that are texts": changed(groups=["1", "1"]),
    "groups of one optimizer": changed(groups=[1]),
    "negative groups": changed(groups=[-1, 1]),
    "no rows": {name: one for name, one in RECIPE.items() if name != "rows"},
    "rows that are numbers": rows(1, 2),
    "a row that is too short": rows(FIRST[:3]),
    "an optimizer out of range": rows([2, *FIRST[1:]]),
    "a group out of range": rows([0, 1, *FIRST[2:]]),
    "no slots": rows([0, 0, [], True]),
    "slots without a weight": rows([0, 0, [["momentum_buffer", 0]], True]),
    "too many slots": rows([0, 0, [["weight", 0], *([f"s{number}", 1] for number in range(16))], True]),
    "a slot twice": rows([0, 0, [["weight", 0], ["weight", 1]], True]),
    "a slot whose name is a number": rows([0, 0, [["weight", 0], [5, 1]], True]),
    "a slot out of range": rows([0, 0, [["weight", 5]], True]),
    "a slot that is negative": rows([0, 0, [["weight", -1]], True]),
    "made that is a number": rows([*FIRST[:3], 1]),
    "a slot of another size": rows([0, 0, [["weight", 0], ["momentum_buffer", 4]], True]),
    "a tensor of two parameters": rows(FIRST, [0, 0, [["weight", 2], ["momentum_buffer", 1]], True]),
    "a tensor in two slots": rows([0, 0, [["weight", 0], ["momentum_buffer", 0]], True]),
    "no made": {name: one for name, one in RECIPE.items() if name != "made"},
    "made out of range": changed(made=[0, 5]),
    "made twice": changed(made=[0, 1, 1]),
    "made that is a text": changed(made="0"),
    "summed that is not made": changed(summed=[4]),
    "summed out of range": changed(summed=[99]),
    "summed twice": changed(summed=[0, 0]),
    "summed that is a number": changed(summed=0),
    "summed that is null": changed(summed=None),
    "summed of texts": changed(summed=["0"]),
    "variants of one optimizer": changed(variants=[[None]]),
    "variants of too many groups": changed(variants=[[None, None], [None]]),
    "variants that are numbers": changed(variants=[[1], [None]]),
    "variants that are objects": changed(variants=[{"fma": 1}, [["fma"]]]),
    "variants that are null": changed(variants=None),
    "a variant that is long": changed(variants=[["f" * 100], [None]]),
}


def test_a_recipe_that_is_badly_described_is_refused_and_the_one_before_stays(trainer: Trainer, tmp_path: Path) -> None:
    states = {1: trainer.values}
    ask, layout = trainer.shim.ask, trainer.layout["layout"]
    for what, recipe in BAD_RECIPES.items():
        answer = ask("replica", layout=layout, recipe=recipe, areas=[trainer.area])
        assert answer.get("error", {}).get("text"), (what, answer)
    for areas in (None, 5, [], [99], ["0"], [-1], [trainer.area] * 17, [True]):
        answer = ask("replica", layout=layout, recipe=RECIPE, areas=areas)
        assert answer.get("error", {}).get("text"), (areas, answer)
    small, memory = trainer.beside(100)
    large = 1 << 26
    (wide,) = ([["x", "F32", [large // 4], "torch", None, None]],)
    other = ask("layout", tensors=wide)["layout"]
    form = {"kinds": [], "groups": [], "rows": [], "made": []}
    assert "less than" in ask("replica", layout=other, recipe=form, areas=[small])["error"]["text"]
    for wrong in (None, 99, "0", [0]):
        assert ask("replica", layout=wrong, recipe=RECIPE, areas=[trainer.area])["error"]["text"]
    memory.close()
    trainer.proven()  # with the recipe that was right
    states[2] = trainer.values
    assert "error" not in ask("close")
    check(tmp_path / "store", states)


@pytest.mark.parametrize("variant", ["warp", "", "plain"])
def test_a_variant_that_the_optimizer_lacks_is_refused_when_it_steps(trainer: Trainer, variant: str) -> None:
    """Which variants there are depends on settings, which come with a step."""
    recipe = changed(kinds=["SGD", "AdamW"], variants=[[variant], [None]])
    before = trainer.newest()
    trainer.replica = trainer.shim.ask("replica", layout=trainer.layout["layout"], recipe=recipe, areas=[trainer.area])
    answer = trainer.advance()
    if variant != "plain":
        assert f"variant {variant!r}" in answer["error"]["text"]
        assert trainer.newest() == before


def test_wrong_digests_leave_a_state_unproven_until_its_tensors_are_sent(trainer: Trainer, tmp_path: Path) -> None:
    """Malformed or wrong tensors in between are refused, or stay unproven; nothing of it is written."""
    states = {1: trainer.values}
    wanted = trainer.after(2)
    wanted["w"] = wanted["w"] + np.float32(1)  # as if something else had changed it
    trainer.fill(2, wanted)
    answer = trainer.shim.ask("advance", **trainer.message())
    assert (answer["differs"], answer["unproven"]) == (["w"], [[0, True]])
    before = trainer.newest()
    assert before[0] == 1
    trainer.values = wanted
    third = trainer.after(3)
    trainer.fill(3, third)
    number, memory = trainer.beside(LARGE)
    for whole in ([[number, [[0, 4]]]], [[number, [[4, 0]]]], [[number, [[0, 0], [0, 0]]]], [[number, 5]]):
        answer = trainer.shim.ask("advance", **trainer.message(after=2, step=3, whole=whole))
        assert answer["error"]["text"], whole
    memory[:LARGE] = bytes(LARGE)  # other bits than the digest says
    answer = trainer.shim.ask("advance", **trainer.message(after=2, step=3, whole=[[number, [[0, 0]]]]))
    assert answer["differs"] == ["w"]
    assert trainer.newest() == before
    trainer.values = third
    fourth = trainer.after(4)
    trainer.fill(4, fourth)
    memory[:LARGE] = fourth["w"].tobytes()
    answer = trainer.shim.ask("advance", **trainer.message(after=3, step=4, whole=[[number, [[0, 0]]]]))
    assert answer == {"re": trainer.shim.number}
    assert trainer.shim.event()["step"] == 4
    states[4] = fourth
    memory.close()
    assert "error" not in trainer.shim.ask("close")
    check(tmp_path / "store", states)


def test_an_area_that_was_given_back_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    """Its memory may hold the newest state by then, which a gradient that is made dense there would destroy."""
    first = trainer.values
    second, memory = trainer.beside(AREA)
    trainer.replica = trainer.shim.ask(
        "replica", layout=trainer.layout["layout"], recipe=RECIPE, areas=[trainer.area, second]
    )
    trainer.fill(2, trainer.after(2))
    memory[:AREA] = trainer.memory[:AREA]
    assert "error" not in trainer.shim.ask("release", buffer=trainer.area)
    values = trainer.after(2)
    assert "error" not in trainer.shim.ask("advance", **trainer.message(area=second, persist=False))
    trainer.step, trainer.values = 2, values
    before = trainer.newest()
    # A gradient of one entry in the area that was given back.
    answer = trainer.advance(calls=call(sparse=[[0, 1]]))
    assert "is not lent" in answer["error"]["text"] or "no area" in answer["error"]["text"]
    assert trainer.newest() == before
    memory.close()
    assert "error" not in trainer.shim.ask("close")
    check(tmp_path / "store", {1: first, 2: values})


def test_a_state_that_a_released_buffer_could_overwrite_waits_for_the_step_that_reads_it(
    trainer: Trainer, tmp_path: Path
) -> None:
    """A release is done in the order of the requests: the step before it reads the memory that it was given."""
    first, wanted = trainer.values, trainer.after(2)
    trainer.fill(2, wanted)
    number, memory = trainer.beside(LARGE)
    memory[:LARGE] = wanted["w"].tobytes()
    shim = trainer.shim
    body = trainer.message(whole=[[number, [[0, 0]]]])
    shim.send({"do": "advance", "id": 1001, **body})
    shim.send({"do": "release", "id": 1002, "buffer": number})
    shim.send({"do": "release", "id": 1003, "buffer": number})
    answers = {}
    while len(answers) < 3:
        found = shim.hear()
        if "re" in found:
            answers[found["re"]] = found
    assert list(answers) == [1001, 1002, 1003]
    assert "error" not in answers[1001]
    assert "error" not in answers[1002]
    assert "is not lent" in answers[1003]["error"]["text"]
    memory.close()
    assert "error" not in shim.ask("close")
    check(tmp_path / "store", {1: first, 2: wanted})
