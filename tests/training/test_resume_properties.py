"""Random changes of a small script: each is restored by names, or reported, or refused with nothing changed."""

from __future__ import annotations

import itertools
import logging
import uuid
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import assume, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import ckptstore  # noqa: E402
from ckptstore.errors import StateMismatchError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tests.forms import short_or  # noqa: E402

nn = torch.nn
_SEEDS = itertools.count()


@dataclass(frozen=True)
class Form:
    """The form of a script.

    Attributes:
        layers: name -> rows, in the order in which they are made.
        heads: names of those that are in the second group of parameters; None: there is one group.
        compiled: names of those that are compiled.
        scheduler: its class and its number.
    """

    layers: tuple[tuple[str, int], ...]
    optimizer: str = "AdamW"
    heads: frozenset[str] | None = None
    heads_first: bool = False
    named: bool = False
    dtype: str = "float32"
    compiled: frozenset[str] = frozenset()
    scheduler: tuple[str, int] = ("StepLR", 2)
    spread: bool = False

    @property
    def groups(self) -> dict[frozenset[str], float | None]:
        """The layers of each group of parameters, and its weight decay; None: the optimizer's own."""
        names = frozenset(name for name, _ in self.layers)
        if self.heads is None:
            return {names: None}
        return {names & self.heads: 0.1, names - self.heads: 0.0}

    @property
    def refused(self) -> tuple[Any, ...]:
        """Differences that are refused."""
        return frozenset(self.layers), self.optimizer, frozenset(self.groups), self.scheduler[0]

    @property
    def told(self) -> tuple[Any, ...]:
        """Values that are restored, or kept, and differ from one of the scripts."""
        return self.dtype, self.scheduler, self.groups


class Script:
    """A script of such a form, with different weights."""

    def __init__(self, form: Form) -> None:
        torch.manual_seed(next(_SEEDS))
        self.model = nn.Module()
        for name, rows in form.layers:
            layer = nn.Linear(2, rows)
            self.model.add_module(name, torch.compile(layer, backend="eager") if name in form.compiled else layer)
        spread = torch.rand(()).expand(3) if form.spread else torch.rand(3)
        self.model.register_buffer("spread", spread)
        self.model.to(getattr(torch, form.dtype)) if form.dtype != "float32" else None
        make = getattr(torch.optim, form.optimizer)
        also = {"momentum": 0.9} if form.optimizer == "SGD" else {}
        self.optimizer = make(self._groups(form), lr=0.01, **also)
        kind, number = form.scheduler
        schedules = torch.optim.lr_scheduler
        self.scheduler = {
            "StepLR": lambda: schedules.StepLR(self.optimizer, number),
            "CosineAnnealingLR": lambda: schedules.CosineAnnealingLR(self.optimizer, number),
            "LambdaLR": lambda: schedules.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / number)),
        }[kind]()

    def _groups(self, form: Form) -> Any:
        parameters = list(self.model.named_parameters())
        if form.heads is None:
            return parameters if form.named else [one for _, one in parameters]
        found: list[Any] = []
        for wanted in (form.heads_first, not form.heads_first):
            chosen = [(name, one) for name, one in parameters if (name.split(".")[0] in form.heads) is wanted]
            decay = 0.1 if wanted else 0.0
            found.append({"params": chosen if form.named else [one for _, one in chosen], "weight_decay": decay})
        return found

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, store: ckptstore.Store) -> None:
        with Checkpointer(store, **self.parts(), strategy="full") as checkpointer:
            for _ in range(checkpointer.resume(), 2):
                for parameter in self.model.parameters():
                    parameter.grad = torch.rand_like(parameter)
                self.optimizer.step()
                self.scheduler.step()
                checkpointer.step()

    def tensors(self) -> dict[str, Any]:
        """Weights, moments and decays by names."""
        found = {
            f"model.{name.replace('_orig_mod.', '')}": one.clone() for name, one in self.model.state_dict().items()
        }
        decay = {id(one): group["weight_decay"] for group in self.optimizer.param_groups for one in group["params"]}
        for name, parameter in self.model.named_parameters():
            bare = name.replace("_orig_mod.", "")
            found[f"decay of {bare}"] = torch.tensor(decay[id(parameter)])
            for key, one in self.optimizer.state.get(parameter, {}).items():
                found[f"{key} of {bare}"] = torch.as_tensor(one).clone()
        return found

    def schedule(self) -> dict[str, Any]:
        return {key: one for key, one in self.scheduler.state_dict().items() if key != "lr_lambdas"}


NAMES = "abcd"
CHANGES: dict[str, Any] = {
    "order": lambda form, n: replace(
        form, layers=next(itertools.islice(itertools.cycle(itertools.permutations(form.layers)), n, None))
    ),
    "rows": lambda form, n: replace(form, layers=((form.layers[0][0], 3 + n % 3), *form.layers[1:])),
    "added": lambda form, n: replace(form, layers=(*form.layers[:-1], (f"e{n}", 3), form.layers[-1])),
    "removed": lambda form, n: replace(form, layers=form.layers[1:] or form.layers),
    "renamed": lambda form, n: replace(form, layers=((f"z{n}", form.layers[0][1]), *form.layers[1:])),
    "optimizer": lambda form, n: replace(form, optimizer=("AdamW", "SGD", "RMSprop")[n % 3]),
    "groups": lambda form, n: replace(form, heads=(None, frozenset("a"), frozenset("bc"))[n % 3]),
    "group order": lambda form, n: replace(form, heads_first=not form.heads_first),
    "named": lambda form, n: replace(form, named=not form.named),
    "dtype": lambda form, n: replace(form, dtype=("float32", "bfloat16", "float64")[n % 3]),
    "compiled": lambda form, n: replace(form, compiled=frozenset(NAMES[: n % 3])),
    "scheduler": lambda form, n: replace(form, scheduler=(("StepLR", "CosineAnnealingLR", "LambdaLR")[n % 3], 2)),
    "number": lambda form, n: replace(form, scheduler=(form.scheduler[0], 2 + n % 3)),
    "spread": lambda form, n: replace(form, spread=not form.spread),
}
change = st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 5))


@st.composite
def forms(draw: Any) -> tuple[Form, Form]:
    """A script, and the same one after some changes."""
    form = Form(tuple((name, 3) for name in NAMES[: draw(st.integers(3, 4))]))
    for name, number in draw(st.lists(change, max_size=3)):
        form = CHANGES[name](form, number)
    other = form
    for name, number in draw(st.lists(change, max_size=2)):
        other = CHANGES[name](other, number)
    for one in (form, other):
        assume(len(dict(one.layers)) == len(one.layers))
        assume(all(one.groups) or not one.named)  # torch requires names for a group without parameters
    return form, other


def resumed(store: ckptstore.Store, script: Script, heard: list[str], **how: Any) -> int:
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckptstore.training")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with Checkpointer(store, **script.parts(), strategy="full") as checkpointer:
                step = checkpointer.resume(**how)
        heard += [str(one.message) for one in found]
        return step
    finally:
        logger.removeHandler(handler)


def alike(found: Any, saved: Any) -> bool:
    """The same numbers, in the present dtype."""
    return found.shape == saved.shape and torch.equal(found, saved.to(found.dtype))


def with_each_change(test: Any) -> Any:
    """Each change alone is an example, whatever else is drawn."""
    form = Form(tuple((name, 3) for name in NAMES[:3]), heads=frozenset("a"))
    for made in CHANGES.values():
        for number in (1, 2):
            test = example((form, made(form, number)))(test)
    return test


@with_each_change
@given(forms())
@settings(max_examples=short_or(24, 200), deadline=None)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_change_is_restored_reported_or_refused(both: tuple[Form, Form]) -> None:
    form, other = both
    store = ckptstore.open(f"memory://resumed-{uuid.uuid4().hex}")
    before = Script(form)
    before.train(store)
    saved = before.tensors()
    script = Script(other)
    untouched, schedule = script.tensors(), script.schedule()
    heard: list[str] = []
    if form.refused != other.refused:
        with pytest.raises(StateMismatchError) as caught:
            resumed(store, script, heard)
        assert caught.value.differences
        now = script.tensors()
        assert now.keys() == untouched.keys()
        assert all(torch.equal(one, now[name]) for name, one in untouched.items())
        assert script.schedule() == schedule
        assert resumed(store, script, heard, strict=False) == 2
        assert any("left as the script has it" in one for one in heard)
        for name, one in script.tensors().items():
            if name.startswith("decay") and name not in saved:
                continue  # a new parameter in an old group
            assert (name in saved and alike(one, saved[name])) or torch.equal(one, untouched[name]), name
        weights = [name for name in saved if name.startswith("model.") and name in untouched]
        fitting = [name for name in weights if saved[name].shape == untouched[name].shape]
        assert all(alike(script.tensors()[name], saved[name]) for name in fitting)
        return
    assert resumed(store, script, heard) == 2
    now = script.tensors()
    assert now.keys() == saved.keys()
    for name, one in now.items():
        assert alike(one, saved[name]), name
        assert name.startswith(("step", "decay")) or one.dtype == untouched.get(name, one).dtype
    assert script.schedule() == before.schedule()
    assert bool(heard) is (form.told != other.told), heard
    for parameter in script.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    script.optimizer.step()
    script.scheduler.step()
