"""The recorded updates of torch optimizers give torch's own new state, bit for bit, at the promised cost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402
from ckptstore import training  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.errors import UsageError  # noqa: E402
from ckptstore.formats import optim  # noqa: E402
from ckptstore.formats.states.state import FlatState, TensorSource  # noqa: E402
from ckptstore.frameworks import bridge  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.training import OptimizerStep, clip_factor  # noqa: E402
from ckptstore.write.steps.updates import Update  # noqa: E402
from tests.processor import wrong_roots  # noqa: E402
from tests.training.unknown_optimizer import UnknownOptimizer  # noqa: E402

SHAPES = ((96, 64), (4000,), (31, 7, 5))
SETTINGS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p, **k: torch.optim.SGD(p, lr=0.1, **k),
    "momentum": lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4, **k),
    "nesterov": lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, **k),
    "dampening": lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3, maximize=True, **k),
    "adam": lambda p, **k: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01, **k),
    "adamw": lambda p, **k: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **k),
    "amsgrad": lambda p, **k: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, **k),
    "maximize": lambda p, **k: torch.optim.Adam(p, lr=1e-3, amsgrad=True, maximize=True, **k),
}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


# The update is small beside the weight, so that most wrong roots do not show; the others miss by a unit.
MISSES = {"for-loop": 0.06 + 1.5 * wrong_roots(), "foreach": 0.06 + 1.5 * wrong_roots(), "fused": 0.03}


def parameters(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in shapes]


def backward(params: Sequence[Any], seed: int) -> None:
    """Gradients of many magnitudes, as in training."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        scale = 10 ** (torch.rand(parameter.shape, generator=generator) * 3 - 6)
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def state_of(params: Sequence[Any], *optimizers: Any) -> FlatState:
    model = {f"layer.{index}": parameter.detach() for index, parameter in enumerate(params)}
    return bridge.flattened({"model": model, "optimizers": [one.state_dict() for one in optimizers]})


def array(source: TensorSource) -> np.ndarray:
    out = np.empty(source.nbytes, np.uint8)
    source.read(0, out)
    return out.view({"F32": "<u4", "BF16": "<u2", "F16": "<f2"}[source.dtype])


def copied(flat: FlatState) -> dict[str, np.ndarray]:
    return {name: array(source) for name, source in flat.tensors.items() if source.dtype == "F32"}


def gradient_of(update: Update) -> optim.Gradient | None:
    if update.gradient is None or isinstance(update.gradient, optim.SparseGradient):
        return update.gradient
    return array(update.gradient)


def restored(update: Update, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> tuple[str, float]:
    """Store one update and restore it -> how, and bits by number besides the gradient's own."""
    old, new = [before[name] for name in update.slots], [after[name] for name in update.slots]
    gradient = gradient_of(update)
    variant = optim.choose_variant(update.optimizer, update.step, old, new, gradient)
    rule = optim.rule(update.optimizer.rule(update.step, variant).params)
    encoding: optim.Encoding = "predicted"
    explained = 0
    if gradient is None:
        payload = optim.predicted.encode(rule, old, new)
    else:
        encoding = "sparse" if isinstance(gradient, optim.SparseGradient) else "replayed"
        payload = optim.replayed.encode(rule, old, new, gradient)
        explained = len(optim.replayed.encode(rule, old, None, gradient))
    state = [part.copy() for part in old]
    optim.decode([optim.StepLink(encoding, rule, payload)], state)
    for part, wanted in zip(state, new, strict=True):
        assert np.array_equal(part, wanted)
    assert optim.choose(update.optimizer, update.step, old, new, gradient, variant).bits < 32 * len(old)
    return encoding, 8 * (len(payload) - explained) / old[0].size


def trained(params: Sequence[Any], *optimizers: Any, steps: int = 2) -> dict[str, np.ndarray]:
    """Some steps, so that every slot exists -> a copy of the state."""
    for step in range(steps):
        backward(params, 100 + step)
        for optimizer in optimizers:
            optimizer.step()
    return copied(state_of(params, *optimizers))


# -------------------------------------------------------------------------------------------------- torch's arithmetic


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SETTINGS)
def test_replaying_what_was_found_is_the_step_that_torch_took(name: str, implementation: str) -> None:
    params = parameters((300, 100), *SHAPES)
    optimizer = SETTINGS[name](params, **IMPLEMENTATIONS[implementation])
    before = trained(params, optimizer)
    for step in range(3):
        optimizer.param_groups[0]["lr"] *= 0.9
        backward(params, step)
        optimizer.step()
        flat = state_of(params, optimizer)
        after = copied(flat)
        updates = OptimizerStep(optimizer)(flat)
        assert [update.slots[0] for update in updates] == [f"model.layer.{i}" for i in range(4)]
        for index, update in enumerate(updates):
            assert update.optimizer.rule(update.step).slots[1:] == tuple(
                slot.rsplit(".", 1)[1] for slot in update.slots[1:]
            )
            encoding, missed = restored(update, before, after)
            assert encoding == "replayed"
            if index == 0:
                assert missed < (0.01 if "SGD" in type(optimizer).__name__ else MISSES[implementation])
        before = after


@pytest.mark.parametrize("name", ["momentum", "adamw", "amsgrad"])
def test_without_gradients_a_step_is_predicted(name: str) -> None:
    params = parameters((300, 100))
    optimizer = SETTINGS[name](params)
    before = trained(params, optimizer, steps=30)
    backward(params, 1)
    optimizer.step()
    flat = state_of(params, optimizer)
    for how in ("none", "freed"):
        if how == "freed":
            optimizer.zero_grad()
        (update,) = OptimizerStep(optimizer, gradients="none" if how == "none" else "grad")(flat)
        assert update.gradient is None
        encoding, bits = restored(update, before, copied(flat))
        assert encoding == "predicted"
        assert bits < 30  # of 96, or 64 with momentum


def test_groups_have_their_own_settings() -> None:
    params = parameters((64, 64), (64,), (64, 32))
    groups = [
        {"params": params[:1], "weight_decay": 0.1},
        {"params": params[1:2], "weight_decay": 0.0, "lr": 3e-4},
        {"params": params[2:], "betas": (0.8, 0.99), "eps": 1e-6, "amsgrad": True},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    before = trained(params, optimizer)
    backward(params, 5)
    optimizer.step()
    flat = state_of(params, optimizer)
    updates = OptimizerStep(optimizer)(flat)
    assert [update.optimizer for update in updates] == [
        optim.AdamW(0.9, 0.999, 1e-8, 0.1),
        optim.AdamW(0.9, 0.999, 1e-8, 0.0),
        optim.AdamW(0.8, 0.99, 1e-6, 0.01, amsgrad=True),
    ]
    assert [(update.step.count, update.step.lr) for update in updates] == [(3, 1e-3), (3, 3e-4), (3, 1e-3)]
    for update in updates:
        assert restored(update, before, copied(flat))[0] == "replayed"


def test_several_optimizers_and_counts_of_their_own() -> None:
    params = parameters((64, 32), (200,))
    first, second = torch.optim.AdamW(params[:1]), torch.optim.SGD(params[1:], lr=0.1, momentum=0.9)
    before = trained(params, first, second)
    backward(params, 9)
    first.step()
    second.step()
    flat = state_of(params, first, second)
    updates = OptimizerStep([first, second])(flat)
    assert [type(update.optimizer).__name__ for update in updates] == ["AdamW", "SGD"]
    assert [update.step.count for update in updates] == [3, 2]
    for update in updates:
        assert restored(update, before, copied(flat))[0] == "replayed"


def test_strided_parameters_are_read_in_logical_order() -> None:
    weight = torch.nn.Parameter(parameters((32, 16, 5, 5))[0].detach().to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([weight], fused=False)  # fused, torch takes the gradient in memory's order
    before = trained([weight], optimizer)
    backward([weight], 3)
    assert weight.grad.is_contiguous()
    assert not weight.is_contiguous()
    optimizer.step()
    flat = state_of([weight], optimizer)
    (update,) = OptimizerStep(optimizer)(flat)
    assert restored(update, before, copied(flat)) == ("replayed", pytest.approx(0, abs=0.1 + 1.5 * wrong_roots()))


# ------------------------------------------------------------------------------------------------------- the gradients


def test_bf16_gradients_over_an_fp32_master() -> None:
    """Mixed precision: a bf16 model, its master in the optimizer, the gradients clipped in fp32."""
    (master,) = parameters((300, 100))
    optimizer = torch.optim.AdamW([master], lr=1e-3, betas=(0.9, 0.95), fused=True)
    before = trained([master], optimizer)
    backward([master], 7)
    half = master.grad.to(torch.bfloat16)
    master.grad = half.float()
    norm = torch.nn.utils.clip_grad_norm_([master], 1e-3)
    optimizer.step()
    flat = state_of([master], optimizer)
    (update,) = OptimizerStep(optimizer, gradients={master: half}, clip=clip_factor(norm, 1e-3))(flat)
    assert update.gradient is not None
    assert 0 < update.step.clip < 1
    assert restored(update, before, copied(flat)) == ("replayed", pytest.approx(0, abs=0.03))


def test_clip_factors_are_torchs() -> None:
    for limit, kind in ((1e-3, torch.float32), (1e9, torch.float32), (1e-3, torch.bfloat16)):
        (parameter,) = parameters((50, 50))
        backward([parameter], 1)
        parameter = torch.nn.Parameter(parameter.detach().to(kind))
        parameter.grad = torch.randn(50, 50).to(kind)
        once = parameter.grad.clone()
        factor = clip_factor(torch.nn.utils.clip_grad_norm_([parameter], limit), limit)
        assert torch.equal(parameter.grad, once.mul_(torch.tensor(factor, dtype=kind)))


def test_top_k_as_training_applied_it() -> None:
    (parameter,) = parameters((300, 100))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    before = trained([parameter], optimizer)
    backward([parameter], 7)
    kept = parameter.grad.abs().flatten().topk(300).indices.sort().values
    values = parameter.grad.flatten()[kept]
    parameter.grad = torch.zeros_like(parameter.grad).view(-1).index_copy_(0, kept, values).view_as(parameter)
    optimizer.step()
    flat = state_of([parameter], optimizer)
    sparse = optim.SparseGradient(kept.numpy(), values.numpy(), parameter.numel())
    (update,) = OptimizerStep(optimizer, gradients={parameter: sparse})(flat)
    assert restored(update, before, copied(flat)) == ("sparse", pytest.approx(0, abs=0.03))


@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_the_loss_scale_is_undone(scale: float) -> None:
    (parameter,) = parameters((300, 100))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    before = trained([parameter], optimizer)
    backward([parameter], 7)
    scaled = (parameter.grad * scale).half()
    parameter.grad = scaled.float() * torch.tensor(1.0).div(scale)  # as GradScaler does, by the reciprocal
    optimizer.step()
    flat = state_of([parameter], optimizer)
    (update,) = OptimizerStep(optimizer, gradients={parameter: scaled}, loss_scale=scale)(flat)
    assert restored(update, before, copied(flat)) == ("replayed", pytest.approx(0, abs=0.01))


def test_a_step_that_the_scaler_skipped() -> None:
    params = parameters((64, 64))
    optimizer = torch.optim.AdamW(params)
    before = trained(params, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    backward(params, 4)
    params[0].grad[3, 3] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    flat = state_of(params, optimizer)
    (update,) = OptimizerStep(optimizer, skipped=scaler.get_scale() < 1024.0)(flat)
    assert update.step.skipped
    assert update.gradient is None
    assert restored(update, before, copied(flat)) == ("predicted", pytest.approx(0, abs=0.01))
    for part, was in zip(update.slots, update.slots, strict=True):
        assert np.array_equal(copied(flat)[part], before[was])


def test_an_object_that_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for wrong in (model, [optimizer, model], model.parameters()):
        with pytest.raises(UsageError, match=r"expected a torch\.optim\.Optimizer"):
            OptimizerStep(wrong)  # type: ignore[arg-type]
    with ckptstore.open(tmp_path / "store").writer(diffs=ckptstore.DiffOptions()) as writer:
        for wrong in (optimizer, [1], "adam"):
            with pytest.raises(UsageError, match=r"updates=training\.OptimizerStep\(optimizer\)"):
                writer.save({"w": torch.ones(2)}, 1, updates=wrong)
            with pytest.raises(UsageError, match="OptimizerStep"):
                writer.save_async({"w": torch.ones(2)}, 1, updates=wrong)
        writer.save({"w": torch.ones(2)}, 1, updates=OptimizerStep(optimizer))
        with pytest.raises(UsageError, match="tag"):
            writer.tag(None, 1)  # type: ignore[arg-type]


def test_gradients_of_another_size_are_mistakes() -> None:
    params = parameters((8, 8))
    optimizer = torch.optim.AdamW(params)
    trained(params, optimizer)
    with pytest.raises(UsageError, match=r"shape \(64,\) for a parameter of \(8, 8\)"):
        OptimizerStep(optimizer, gradients={params[0]: torch.zeros(64)})
    sparse = optim.SparseGradient(np.arange(2), np.zeros(2, "<f4"), 63)
    with pytest.raises(UsageError, match="63 numbers"):
        OptimizerStep(optimizer, gradients={params[0]: sparse})
    with pytest.raises(UsageError, match="loss_scale"):
        OptimizerStep(optimizer, loss_scale=0.0)
    with pytest.raises(UsageError, match="'all'"):
        OptimizerStep(optimizer, gradients="all")  # type: ignore[arg-type]


def test_gradients_that_cannot_be_stored_are_not() -> None:
    table = torch.nn.Embedding(50, 16, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2, 3])).sum().backward()
    optimizer.step()
    (update,) = OptimizerStep(optimizer)(state_of(list(table.parameters()), optimizer))
    assert update.gradient is None
    doubled = {table.weight: torch.zeros(50, 16, dtype=torch.float64)}
    (update,) = OptimizerStep(optimizer, gradients=doubled)(state_of(list(table.parameters()), optimizer))
    assert update.gradient is None


# ------------------------------------------------------------------------------------------------- unsupported cases


def left_out(flat: FlatState, *optimizers: Any) -> bool:
    return not OptimizerStep(list(optimizers))(flat)


def test_only_the_states_own_memory_matches() -> None:
    params = parameters((16, 16))
    optimizer = torch.optim.AdamW(params)
    trained(params, optimizer)
    held = optimizer.state_dict()
    weight = params[0].detach()
    assert len(OptimizerStep(optimizer)(bridge.flattened({"w": weight, "o": held}))) == 1
    for other in (weight.clone(), weight.view(256), weight.t(), weight.view(torch.int32), weight[:8]):
        assert left_out(bridge.flattened({"w": other, "o": held}), optimizer)
    assert left_out(bridge.flattened({"w": weight}), optimizer)  # without moments


def test_slots_of_the_same_memory_are_found_once_under_the_first_name() -> None:
    params = parameters((16, 16))
    optimizer = torch.optim.AdamW(params)
    trained(params, optimizer)
    state = {"a": {"tied": params[0]}, "b": {"tied": params[0].detach()}, "o": optimizer.state_dict()}
    (update,) = OptimizerStep(optimizer)(bridge.flattened(state))
    assert update.slots[0] == "a.tied"


def test_two_parameters_over_one_memory_are_left_out() -> None:
    shared = torch.zeros(16, 16)
    twins = [torch.nn.Parameter(shared), torch.nn.Parameter(shared)]
    other = parameters((8,))
    optimizer = torch.optim.AdamW([*twins, *other])
    trained([*twins, *other], optimizer)
    updates = OptimizerStep(optimizer)(state_of([*twins, *other], optimizer))
    assert [update.slots[0] for update in updates] == ["model.layer.2"]


def test_parameters_that_did_not_move_and_slots_not_made_yet() -> None:
    params = parameters((16, 16), (8,), (4,))
    optimizer = torch.optim.AdamW(params)
    backward(params[:2], 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(params[:1], 1)
    optimizer.step()
    updates = OptimizerStep(optimizer)(state_of(params, optimizer))
    assert [(update.slots[0], update.step.count) for update in updates] == [("model.layer.0", 2)]
    momentum = torch.optim.SGD(parameters((8,)), momentum=0.9)
    assert left_out(state_of([], momentum), momentum)


def test_slots_that_the_arithmetic_is_not_for() -> None:
    half = [torch.nn.Parameter(torch.zeros(16, dtype=torch.bfloat16)), torch.nn.Parameter(torch.zeros(0))]
    optimizer = torch.optim.AdamW(half)
    backward(half[1:], 0)
    half[0].grad = torch.ones(16, dtype=torch.bfloat16)
    optimizer.step()
    assert left_out(state_of(half, optimizer), optimizer)
    torch_has = [getattr(torch.optim, name) for name in ("RMSprop", "NAdam", "Adagrad") if name not in optim.KINDS]
    for kind in (UnknownOptimizer, *torch_has):
        params = parameters((16,))
        unknown = kind(params)
        trained(params, unknown)
        assert left_out(state_of(params, unknown), unknown), kind


def test_settings_that_are_tensors_or_senseless() -> None:
    params = parameters((300, 100), (5,))
    optimizer = torch.optim.AdamW(
        [{"params": params[:1], "lr": torch.tensor(1e-3)}, {"params": params[1:]}], capturable=False, foreach=False
    )
    before = trained(params, optimizer)
    backward(params, 4)
    optimizer.step()
    flat = state_of(params, optimizer)
    optimizer.param_groups[1]["lr"] = float("nan")
    (update,) = OptimizerStep(optimizer)(flat)
    encoding, missed = restored(update, before, copied(flat))
    assert encoding == "replayed"
    assert missed < 3  # torch rounds some scalars to fp32 earlier then


def test_numbers_are_those_of_when_it_was_made() -> None:
    """A scheduler steps between the optimizer and the save."""
    params = parameters((16, 16))
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    backward(params, 0)
    optimizer.step()
    updates = OptimizerStep(optimizer)
    scheduler.step()
    optimizer.zero_grad()
    (update,) = updates(state_of(params, optimizer))
    assert update.step.lr == 1e-3
    assert update.gradient is not None


def test_subclasses_are_taken_for_what_they_derive_from() -> None:
    class Mine(torch.optim.AdamW):
        pass

    params = parameters((16, 16))
    optimizer = Mine(params)
    trained(params, optimizer)
    (update,) = OptimizerStep(optimizer)(state_of(params, optimizer))
    assert isinstance(update.optimizer, optim.AdamW)


# ----------------------------------------------------------------------------------------------------- the package


def test_the_package_finds_its_names_lazily() -> None:
    assert {"LayerwiseSnapshots", "OptimizerStep", "clip_factor"} <= set(dir(training))
    assert dir(training) == sorted(training.__all__)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = training.nothing_such
    code = "import sys, ckptstore.training; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------- reasons for unexplained
#     steps


class Wrapper(torch.optim.Optimizer):
    """Like Accelerate's: it is an optimizer, and has one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state


@pytest.fixture
def run() -> tuple[Any, Any]:
    params = parameters((64, 64), (64,))
    optimizer = torch.optim.AdamW(params)
    trained(params, optimizer)
    return params, optimizer


def stored(path: Path, state: Callable[[], Any], updates: Callable[[], Any], train: Callable[[int], None]) -> float:
    """Share of the state that a step takes; each save gets the same message, and each step must be restored."""
    store = ckptstore.open(path, create=True)
    truth = {}
    with store.writer(diffs=ckptstore.DiffOptions()) as writer:
        for step in range(1, 5):
            train(step)
            how = writer.save if step % 2 else writer.save_async
            how(state(), step, updates=updates())
            truth[step] = copied(bridge.flattened(state()))
    for step, expected in truth.items():
        loaded = copied(bridge.flattened(store.load(step)))
        assert all(np.array_equal(loaded[name], part) for name, part in expected.items())
    last = store.checkpoint()
    assert last.kind == "gradient"
    return last.stored / last.nbytes


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("wrapped", f"Wrapper is none of torch.optim's {optim.listed()}; give OptimizerStep what it wraps, its"),
        ("unknown", f"UnknownOptimizer is none of torch.optim's {optim.listed()} [2]"),
        ("clones", "the state does not hold the memory that the optimizer moves, but copies"),
        ("weights", "the state holds only some of a parameter and what the optimizer keeps for it"),
        ("decay", "AdamW: a learning rate of nan [2]"),
    ],
)
def test_a_hint_that_explains_nothing_says_why_once(tmp_path: Path, run: Any, case: str, reason: str) -> None:
    params, optimizer = run
    held = UnknownOptimizer(params) if case == "unknown" else optimizer

    def state() -> Any:
        if case == "weights":
            return {"w": [parameter.detach() for parameter in params]}
        whole = {"w": [parameter.detach() for parameter in params], "o": held.state_dict()}
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, whole) if case == "clones" else whole

    def updates() -> OptimizerStep:
        return OptimizerStep(Wrapper(held) if case == "wrapped" else held)

    def train(step: int) -> None:
        if case == "decay":  # a rate that no step can be taken with
            held.param_groups[0]["lr"] = float("nan")
            return
        backward(params, step)
        held.step()

    with pytest.warns(ckptstore.UnexplainedStepWarning) as told:
        stored(tmp_path / "store", state, updates, train)
    (warning,) = told
    assert "OptimizerStep: 0 of 2 parameters matched, because" in str(warning.message)
    assert reason in str(warning.message)
    assert warning.filename == __file__


def test_parameters_that_are_left_out_are_counted(tmp_path: Path) -> None:
    params = [*parameters((64, 64), (64,)), torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))]
    optimizer = torch.optim.AdamW(params, foreach=False)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = OptimizerStep(optimizer)(state_of(params, optimizer))
    assert len(found) == 2
    assert found.left_out is not None
    assert "2 of 3 parameters matched, because weight is BF16, and only the arithmetic of fp32 is known [1]" in (
        found.left_out
    )
    tied = parameters((8,))
    both = torch.optim.SGD(tied, lr=0.1), torch.optim.SGD([torch.nn.Parameter(tied[0].detach())], lr=0.1)
    found = OptimizerStep(both, gradients="none")(state_of(tied, *both))
    assert not found
    assert found.left_out is not None
    assert "0 of 2 parameters matched, because two parameters of the optimizers share memory [2]" in found.left_out


def test_unmoved_parameters_cause_no_warning() -> None:
    params = parameters((8, 8), (8,))
    optimizer = torch.optim.AdamW(params)
    assert OptimizerStep(optimizer)(state_of(params, optimizer)).left_out is None, "before the first step"
    params[0].grad = torch.ones(8, 8)
    optimizer.step()
    found = OptimizerStep(optimizer)(state_of(params, optimizer))
    assert (len(found), found.left_out) == (1, None), "the other one had no gradient"


def test_a_wrapper_that_is_no_optimizer_is_refused_with_the_remedy(run: Any) -> None:
    class Engine:
        optimizer = run[1]

    with pytest.raises(UsageError, match=r"Engine; expected a torch\.optim\.Optimizer \(its \.optimizer is one\)"):
        OptimizerStep(Engine())  # type: ignore[arg-type]


@pytest.fixture
def mesh() -> Any:
    """A group of one rank."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def local(state: Any) -> Any:
    """The part of a sharded state that a rank saves."""
    from torch.distributed.tensor import DTensor

    return torch.utils._pytree.tree_map_only(DTensor, lambda tensor: tensor.to_local().detach(), state)


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of this torch does not run on a CPU")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("gradients", ["grad", "none"])
def test_sharded_parameters_are_matched_by_their_local_memory(tmp_path: Path, mesh: Any, gradients: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(step: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    def state() -> Any:
        return local({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    train(0)
    step = OptimizerStep(optimizer, gradients=gradients)
    found = step(bridge.flattened(state()))
    assert (len(found), found.left_out) == (4, None)
    assert all((update.gradient is None) == (gradients == "none") for update in found)
    share = stored(tmp_path / "store", state, lambda: OptimizerStep(optimizer, gradients=gradients), train)
    assert share < 0.45, "a difference takes 0.7 or more"


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # by torch 2.6
def test_a_gradient_that_is_placed_differently_is_not_what_was_consumed(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    flat = bridge.flattened({"w": parameter.detach().to_local()})
    for placement, taken in ((Shard(0), True), (Partial(), False)):
        given = DTensor.from_local(torch.ones(8, 4), mesh, [placement])
        (update,) = OptimizerStep(optimizer, gradients={parameter: given})(flat)
        assert (update.gradient is not None) == taken
    (update,) = OptimizerStep(optimizer, gradients={parameter: torch.ones(8, 4)})(flat)
    assert update.gradient is not None, "a rank's own part, as a plain tensor"
    with pytest.raises(UsageError, match=r"shape \(4, 4\) for a parameter of \(8, 4\)"):
        OptimizerStep(optimizer, gradients={parameter: torch.ones(4, 4)})
