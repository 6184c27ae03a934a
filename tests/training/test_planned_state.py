"""Plans of a state: they hold while only bits change, and any other change is in the next checkpoint."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.agent import AgentWriter  # noqa: E402
from ckptstore.frameworks import bridge  # noqa: E402
from ckptstore.host.batched_copies import BatchedCopies  # noqa: E402
from ckptstore.host.prefault import Prefault  # noqa: E402
from ckptstore.host.threads import started_pool  # noqa: E402
from ckptstore.training import Checkpointer, TopKHook  # noqa: E402
from ckptstore.training.capture.capture_plan import StatePlan  # noqa: E402
from tests.kernel_forms import KINDS, use_form  # noqa: E402
from tests.store.states import same  # noqa: E402
from tests.training import inside  # noqa: E402


class Run:
    """A model that has been trained for a step, its Checkpointer, and how often a plan was made."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 8)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.extra: dict[str, Any] = {"ema": copy.deepcopy(self.model), "box": Box()}
        self.made = 0
        made = StatePlan.made.__func__  # type: ignore[attr-defined]

        def counted(cls: Any, *arguments: Any) -> Any:
            self.made += 1
            return made(cls, *arguments)

        monkeypatch.setattr(StatePlan, "made", classmethod(counted))
        self.checkpointer = Checkpointer(
            tmp_path / "store",
            model=self.model,
            optimizer=self.optimizer,
            strategy=strategy,
            extra=self.extra,
            **options,
        )
        self.compressor = options.get("compressor")
        self.checkpointer.resume()

    def train(self) -> Any:
        """Take a step, save it and load it again -> the expected state."""
        self.model(torch.randn(6, 8)).square().mean().backward()
        if self.compressor is not None:
            self.compressor.compress(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        expected = copy.deepcopy(self.state())
        pending = self.checkpointer.step()
        assert pending is not None
        info = pending.result()
        loaded = ckptstore.open(self.checkpointer.store.url).load(info.ref)
        found = {"model": loaded["model"], "optimizer": loaded["optimizer"], "ema": loaded["extra"]["ema"]}
        same({**found, "box": loaded["extra"]["box"]}, expected)
        return loaded

    def state(self) -> Any:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.extra["ema"].state_dict(),
            "box": self.extra["box"].state_dict(),
        }


class Box:
    """State of any form."""

    def __init__(self) -> None:
        self.value: Any = {"number": 1}

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def replaced_parameter(run: Run) -> None:
    run.model[0].weight = torch.nn.Parameter(torch.randn(16, 8))


def replaced_data(run: Run) -> None:
    run.model[0].weight.data = torch.randn(16, 8)


def swapped_data(run: Run) -> None:
    first, second = run.model[2].weight, next(run.extra["ema"][2].parameters())
    first.data, second.data = second.data, first.data


def resized(run: Run) -> None:
    run.model[3] = torch.nn.Linear(16, 4)


def resized_in_place(run: Run) -> None:
    buffer = run.model[1].running_mean
    run.model.register_buffer("late", torch.zeros(12))
    run.train()
    assert buffer is run.model[1].running_mean
    run.model.late.resize_(6)


def other_shape_of_the_same_memory(run: Run) -> None:
    run.extra["ema"][0].weight.data = run.extra["ema"][0].weight.data.view(8, 16)


def other_type_of_the_same_memory(run: Run) -> None:
    run.extra["ema"][0].weight.requires_grad_(False)
    run.extra["ema"][0].weight.data = run.extra["ema"][0].weight.data.view(torch.int32)


def other_type(run: Run) -> None:
    run.extra["ema"].to(torch.bfloat16)


def transposed(run: Run) -> None:
    run.extra["ema"][2].weight.data = run.extra["ema"][2].weight.data.t()


def strided(run: Run) -> None:
    run.model[2].weight.data = torch.randn(16, 16).t()


def new_parameter(run: Run) -> None:
    run.model.add_module("late", torch.nn.Linear(8, 8))
    run.optimizer.add_param_group({"params": list(run.model.late.parameters()), "lr": 0.5})


def new_optimizer_state(run: Run) -> None:
    run.optimizer.state[run.model[0].weight]["max_exp_avg_sq"] = torch.ones(16, 8)


def replaced_moment(run: Run) -> None:
    slots = run.optimizer.state[run.model[0].weight]
    slots["exp_avg"] = slots["exp_avg"] * 2


def state_of_another_kind(run: Run) -> None:
    run.optimizer.state[run.model[0].bias]["exp_avg"] = None
    run.model[0].bias.requires_grad_(False)


def other_parameter_of_the_optimizer(run: Run) -> None:
    group = run.optimizer.param_groups[0]
    run.model[0].bias.requires_grad_(False)
    group["params"] = [
        torch.nn.Parameter(torch.ones(16)) if one is run.model[0].bias else one for one in group["params"]
    ]
    del run.optimizer.state[run.model[0].bias]


def moved_to_another_type_by_swapping(run: Run) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        run.extra["ema"].to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def no_state_any_more(run: Run) -> None:
    del run.optimizer.state[run.model[0].weight]
    run.model[0].weight.requires_grad_(False)


def frozen(run: Run) -> None:
    run.model[0].requires_grad_(False)


def tied(run: Run) -> None:
    run.model[3].weight = torch.nn.Parameter(torch.randn(8, 16))
    run.model.add_module("again", torch.nn.Linear(16, 8, bias=False))
    run.model.again.weight = run.model[3].weight
    run.model.forward = torch.nn.Sequential(*list(run.model)[:4]).forward


def untied(run: Run) -> None:
    """From `tied_before` on the two are the same parameter."""
    again = run.extra["ema"][2]
    assert again.weight is run.extra["ema"][4].weight
    again.weight = torch.nn.Parameter(again.weight.detach() + 1)


def untied_by_data(run: Run) -> None:
    """From `tied_before` on the two parameters share memory."""
    weight = run.extra["ema"][5].weight
    assert weight.data_ptr() == run.extra["ema"][2].weight.data_ptr()
    weight.data = weight.data + 1


def tied_before(run: Run) -> None:
    average = run.extra["ema"]
    average.extend([torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False)])
    average[4].weight = average[2].weight
    average[5].weight.data = average[2].weight.data


def tied_with_the_average(run: Run) -> None:
    run.extra["ema"][3].weight.data = run.model[3].weight.data


def tied_with_what_moves(run: Run) -> None:
    run.extra["box"].value = {"number": 1, "weight": run.model[3].weight.detach()}


def renamed(run: Run) -> None:
    members = inside.members_of(run.extra["ema"])
    members["last"] = members.pop("3")


def reordered(run: Run) -> None:
    members = inside.members_of(run.extra["ema"])
    members["0"] = members.pop("0")


def other_class(run: Run) -> None:
    class Louder(torch.nn.Linear):  # type: ignore[misc]
        def get_extra_state(self) -> Any:
            return {"loud": 1}

        def set_extra_state(self, state: Any) -> None: ...

    run.model[0].__class__ = Louder


def own_state_dict(run: Run) -> None:
    run.model.state_dict = lambda *_, **__: OrderedDict(only=torch.ones(3))


def own_way_of_one_module(run: Run) -> None:
    def only(destination: Any, prefix: str, _: bool) -> None:
        destination[prefix + "only"] = torch.ones(3)

    inside.save_by(run.extra["ema"][0], only)


def other_class_of_optimizer(run: Run) -> None:
    class Counting(torch.optim.AdamW):  # type: ignore[misc]
        def state_dict(self) -> Any:
            return {**super().state_dict(), "more": 1}

    run.optimizer.__class__ = Counting


def hook(run: Run) -> None:
    def add(_: Any, state: Any, prefix: str, __: Any) -> None:
        state[prefix + "more"] = torch.full((3,), 2.0)

    inside.hook_state_dict(run.extra["ema"], add)


def not_persistent(run: Run) -> None:
    inside.not_persistent(run.extra["ema"][1], "running_mean")


def optimizer_hook(run: Run) -> None:
    run.optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})


def numbers(run: Run) -> None:
    run.extra["box"].value = {"number": 2, "more": ["x", 1.5]}


def tensor_where_there_was_none(run: Run) -> None:
    run.extra["box"].value = {"number": torch.arange(5)}


def schedule(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 3e-3


def settings(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.0


def loaded(run: Run) -> None:
    run.model.load_state_dict({name: one + 1 for name, one in run.model.state_dict().items()}, assign=True)


HOLDS = (numbers, schedule, settings, frozen)
CHANGES = (
    replaced_parameter, replaced_data, swapped_data, resized, resized_in_place, other_shape_of_the_same_memory,
    other_type_of_the_same_memory, other_type, moved_to_another_type_by_swapping, transposed, strided, new_parameter,
    new_optimizer_state, replaced_moment, state_of_another_kind, other_parameter_of_the_optimizer, no_state_any_more,
    tied, tied_with_the_average, tied_with_what_moves, renamed, reordered, other_class, own_state_dict,
    own_way_of_one_module, other_class_of_optimizer, hook, not_persistent, optimizer_hook, tensor_where_there_was_none,
    loaded, *HOLDS,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_between_steps_are_in_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Run], None]
) -> None:
    run = Run(tmp_path, monkeypatch, "gradient")
    with run.checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.train()
        run.train()
        assert run.made == 1, "the plan does not hold from one step to the next"
        change(run)
        run.train()
        if change in (numbers, schedule, settings):
            assert run.made == 1
        run.train()


def swapped_objects(run: Run) -> None:
    torch.utils.swap_tensors(run.extra["ema"][2].weight, torch.nn.Parameter(torch.randn(16, 16)))


def other_storage(run: Run) -> None:
    run.extra["ema"][2].weight.data.set_(torch.randn(256).untyped_storage(), 0, (16, 16), (16, 1))


def persistent_by_another_set(run: Run) -> None:
    run.extra["ema"][1].__dict__["_non_persistent_buffers_set"] = {"running_var"}


def other_members(run: Run) -> None:
    inside.other_members(run.extra["ema"])


def reset_optimizer_state(run: Run) -> None:
    state = run.optimizer.state
    kept = {one: {name: slot.clone() for name, slot in slots.items()} for one, slots in state.items()}
    run.optimizer.state = type(state)(dict, kept)


@pytest.mark.parametrize(
    "change",
    [swapped_objects, other_storage, persistent_by_another_set, other_members, reset_optimizer_state],
    ids=lambda change: change.__name__,
)
def test_moved_objects_are_in_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Run], None]
) -> None:
    test_changes_between_steps_are_in_the_next_checkpoint(tmp_path, monkeypatch, change)


@pytest.mark.parametrize("change", [untied, untied_by_data], ids=lambda change: change.__name__)
def test_tensors_that_are_one_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    run = Run(tmp_path, monkeypatch, "gradient")
    tied_before(run)
    with run.checkpointer:
        run.train()
        run.train()
        assert run.made == 1
        change(run)
        run.train()
        assert run.made == 2
        run.train()


def test_attributes_that_change_in_every_step_cost_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, "full")
    with run.checkpointer:
        for number in range(8):
            run.model[0].seen = [number]
            run.extra["ema"].train(number % 2 == 0)
            run.train()
        assert run.made == 1
        replaced_data(run)
        run.train()
        assert run.made == 2


@pytest.mark.usefixtures("warm_agents")
@pytest.mark.parametrize("strategy", ["full", "gradient"])
def test_saves_by_an_agent_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))
    run = Run(tmp_path, monkeypatch, strategy, agent=True, linger_seconds=30)
    with run.checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            run.train()
        assert run.made == 1, "the plan does not hold from one step to the next"
        for change in (replaced_data, tied_with_what_moves, frozen):
            change(run)
            run.train()
        assert run.made > 1
        pid = run.checkpointer.agent_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for _ in range(3):  # another agent has other memory
            run.train()
        assert run.checkpointer.agent_pid != pid


@pytest.mark.parametrize("strategy", ["full", "delta"])
def test_every_strategy_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    run = Run(tmp_path, monkeypatch, strategy)
    with run.checkpointer:
        for _ in range(4):
            run.train()
    assert run.made == 1


def test_a_change_of_shape_or_strides_makes_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, "full")
    with run.checkpointer:
        run.train()
        run.train()
        assert run.made == 1
        for change in (other_shape_of_the_same_memory, transposed):
            before = run.made
            change(run)
            run.train()
            assert run.made == before + 1


def test_a_state_that_always_changes_its_form_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, "gradient")
    with run.checkpointer:
        for number in range(12):
            run.extra["box"].value = {"list": torch.arange(number + 1)}
            run.train()
    assert run.made <= inside.MOST_MISFITS + 1


def test_a_diff_of_a_planned_step_is_as_small_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    for number, with_plans in enumerate((True, False)):
        run = Run(tmp_path / str(number), monkeypatch, "gradient", full_every=100)
        if not with_plans:
            inside.plan_nothing(run.checkpointer)
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.7)
        with run.checkpointer:
            for _ in range(5):
                run.train()
                scheduler.step()
        assert bool(run.made) is with_plans
        sizes.append([info.stored for info in ckptstore.open(tmp_path / str(number) / "store").checkpoints()])
    for with_plan, without in zip(*sizes, strict=True):
        assert with_plan <= without * 1.02 + 64


@pytest.mark.usefixtures("warm_agents")
@pytest.mark.parametrize("agent", [False, True])
def test_compressed_gradients_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: bool) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))
    sizes = []
    for number, with_plans in enumerate((True, False)):
        hook = TopKHook(0.05, exact=False)
        options: dict[str, Any] = {"agent": True, "linger_seconds": 30} if agent else {}
        run = Run(tmp_path / str(number), monkeypatch, "gradient", full_every=100, compressor=hook, **options)
        if not with_plans:
            inside.plan_nothing(run.checkpointer)
        with run.checkpointer:
            for _ in range(6):
                run.train()
        assert run.made == int(with_plans)
        sizes.append([info.stored for info in ckptstore.open(tmp_path / str(number) / "store").checkpoints()])
    for with_plan, without in zip(*sizes, strict=True):
        assert with_plan <= without * 1.02 + 64
    assert max(sizes[0][1:]) < max(sizes[0]) / 2, "the step diffs are as large as the full"


def test_a_save_that_is_refused_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, "full", max_in_flight=1)
    with run.checkpointer:
        run.train()
        for _ in range(3):
            run.optimizer.step()
            with pytest.raises(ckptstore.UsageError):
                run.checkpointer.step(tags="not a tag")
        run.train()
    assert run.made == 1


@pytest.mark.parametrize("agent", [False, True])
def test_memory_is_touched_before_the_first_step_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: bool
) -> None:
    """At the end of the first step the amount is known; that step is not saved."""
    told: list[int] = []
    touch = Prefault.run
    monkeypatch.setattr(Prefault, "run", lambda one: (touch(one), told.append(one.touched))[0])
    if agent:
        prepare = AgentWriter.prepare
        monkeypatch.setattr(AgentWriter, "prepare", lambda one, flat: (prepare(one, flat), told.append(flat.nbytes))[0])
    options: dict[str, Any] = {"agent": True, "linger_seconds": 30} if agent else {}
    run = Run(tmp_path, monkeypatch, "full", save_every=3, max_in_flight=1, **options)
    with run.checkpointer:
        for _ in range(2):
            run.model(torch.randn(6, 8)).square().mean().backward()
            run.optimizer.step()
            assert run.checkpointer.step() is None
        until = time.monotonic() + 60
        while not told and time.monotonic() < until:
            time.sleep(0.01)
        assert len(told) == 1
        assert told[0] > 0
        run.train()
    assert run.made == 1
    assert len(told) == 1


@pytest.mark.parametrize("form", KINDS)
def test_pieces_of_all_sizes_are_gathered(form: str, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: use_form(None))
    use_form(form)
    draw = np.random.default_rng(0)
    sizes = [0, 1, 4, 3000, 65535, 65536, 9 << 20, *draw.integers(1, 200, 3000).tolist()]
    sources = [draw.integers(0, 256, size, np.uint8) for size in sizes]
    target = np.zeros(sum(sizes) + len(sizes), np.uint8)
    copies, start = [], 0
    for source in sources:
        copies.append((target.ctypes.data + start, source.ctypes.data, len(source)))
        start += len(source) + 1
    pool = started_pool(2, "test-gathering")
    for change in (0, 1):
        for source in sources:
            np.add(source, change, out=source)
        BatchedCopies(copies).run(pool)
        assert target.tobytes() == b"".join(source.tobytes() + b"\0" for source in sources)
    pool.shutdown()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_saved_without_a_plan(tmp_path: Path) -> None:
    """Its parameters are in no dict; its state_dict is as usual."""
    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path / "store", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for _ in range(3):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            checkpointer.step()
    same(ckptstore.open(tmp_path / "store").load("latest")["model"], model.state_dict())


def test_a_module_with_its_own_state_dict_has_no_plan() -> None:
    from ckptstore.training.capture.script_state import ScriptState

    model = torch.nn.Linear(2, 2)
    captured = ScriptState(model)
    state = captured.state(1)
    assert StatePlan.made(captured, state, bridge.flattened(state), 1, 1) is not None
    model.get_extra_state = lambda: {"more": 1}
    state = captured.state(1)
    assert StatePlan.made(captured, state, bridge.flattened(state), 1, 1) is None


def test_a_lazy_conjugate_is_resolved_in_every_step() -> None:
    from ckptstore.training.capture.script_state import ScriptState

    model = torch.nn.Linear(2, 2)
    base = torch.tensor([1 + 2j, 3 - 4j])
    model.register_buffer("turned", base.conj())
    captured = ScriptState(model)
    state = captured.state(1)
    plan = StatePlan.made(captured, state, bridge.flattened(state), 1, 1)
    assert plan is not None
    base.mul_(2)
    light = plan.taken(2, 1)
    assert light is not None
    found = np.zeros(2, np.complex64)
    plan.whole(light).tensors["model.turned"].read(0, found.view(np.uint8))
    assert found.tolist() == [2 - 4j, 6 + 8j]
