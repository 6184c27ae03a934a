"""Top-k compression: sent and withheld entries, convergence of training, and small diffs."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.errors import UsageError  # noqa: E402
from ckptstore.training import Checkpointer, TopKHook  # noqa: E402
from tests import warmth  # noqa: E402
from tests.store.states import same  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def parameter(*gradient: float) -> Any:
    one = torch.nn.Parameter(torch.zeros(len(gradient)))
    one.grad = torch.tensor(gradient)
    return one


def test_the_largest_are_sent_and_the_rest_is_kept_for_later() -> None:
    hook = TopKHook(density=0.25)
    one = parameter(1.0, -4.0, 3.0, 0.5)
    hook.compress([one])
    assert one.grad.tolist() == [0.0, -4.0, 0.0, 0.0]
    one.grad = torch.tensor([1.0, 1.0, 1.0, 0.5])
    hook.compress([one])
    assert one.grad.tolist() == [0.0, 0.0, 4.0, 0.0]
    one.grad = torch.zeros(4)
    hook.compress([one])
    assert one.grad.tolist() == [2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("scope", ["tensor", "bucket"])
@pytest.mark.parametrize("what", ["normal", "heavy", "equal", "sparse", "rising", "nan"])
@pytest.mark.parametrize("density", [1e-4, 0.01, 0.3])
def test_of_many_the_largest_are_sent_too(scope: Any, what: str, density: float) -> None:
    size = 200_003
    noise = torch.randn(size, generator=torch.Generator().manual_seed(5))
    gradient = {
        "normal": noise,
        "heavy": noise**9,
        "equal": torch.ones(size),
        "sparse": torch.where(torch.arange(size) % 5000 == 0, noise, 0.0),
        "rising": torch.arange(size, dtype=torch.float32),  # the sample sees it in order
        "nan": torch.where(torch.arange(size) == 77, torch.nan, noise),
    }[what]
    parts = [torch.nn.Parameter(torch.zeros(3, 50_000)), torch.nn.Parameter(torch.zeros(size - 150_000))]
    for one, part in zip(parts, gradient.split([150_000, size - 150_000]), strict=True):
        one.grad = part.clone().view(one.shape)
    TopKHook(density, scope=scope).compress(parts)
    whole = [(part, one.grad.reshape(-1)) for one, part in zip(parts, gradient.split([150_000, 50_003]), strict=True)]
    if scope == "bucket":
        whole = [(gradient, torch.cat([sent for _, sent in whole]))]
    for given, sent in whole:
        count = math.ceil(len(given) * density)
        wanted = given.abs().topk(count).values.sort().values
        found = sent.abs().topk(count).values.sort().values
        assert torch.equal(torch.nan_to_num(found, nan=-1.0), torch.nan_to_num(wanted, nan=-1.0))
        assert int((torch.nan_to_num(sent, nan=1.0) != 0).sum()) <= count


def test_sent_entries_add_up_to_the_gradients() -> None:
    hook = TopKHook(density=0.1)
    one = torch.nn.Parameter(torch.zeros(50))
    sent, given = torch.zeros(50), torch.zeros(50)
    for step in range(20):
        one.grad = torch.full((50,), float(step % 3)) + torch.arange(50) % 4
        given += one.grad
        hook.compress([one])
        assert int(torch.count_nonzero(one.grad)) <= 5
        sent += one.grad
    hook.named([("w", one)])
    assert torch.equal(sent + hook.state_dict()["residuals"]["w"], given)


def test_a_bucket_has_one_share_for_all_of_its_tensors() -> None:
    large, small = parameter(9.0, 8.0, 7.0, 6.0), parameter(1.0, 2.0, 3.0, 4.0)
    TopKHook(density=0.5, scope="bucket").compress([large, small])
    assert torch.count_nonzero(large.grad) == 4
    assert torch.count_nonzero(small.grad) == 0
    large, small = parameter(9.0, 8.0, 7.0, 6.0), parameter(1.0, 2.0, 3.0, 4.0)
    TopKHook(density=0.5).compress([large, small])
    assert torch.count_nonzero(large.grad) == torch.count_nonzero(small.grad) == 2


def test_momentum_correction_sends_velocities() -> None:
    hook = TopKHook(density=0.5, momentum=0.5)
    one = parameter(4.0, 1.0)
    hook.compress([one])
    assert one.grad.tolist() == [4.0, 0.0]
    one.grad = torch.tensor([0.0, 1.0])
    hook.compress([one])  # the first one's velocity went with it; the second one's is 1.5, on a residual of 1
    assert one.grad.tolist() == [0.0, 2.5]


@pytest.mark.parametrize("options", [{"density": 0}, {"density": 1.5}, {"scope": "model"}, {"momentum": 1.0}])
def test_what_cannot_be_meant_is_refused(options: Any) -> None:
    with pytest.raises(UsageError):
        TopKHook(**options)


def test_consumed_is_what_is_left_after_clipping() -> None:
    hook = TopKHook(density=0.5)
    one, other = parameter(4.0, 0.0, 3.0, 0.0), parameter(1.0, 2.0)
    hook.compress([one])
    torch.nn.utils.clip_grad_norm_([one], 1.0)
    found = hook.consumed([one, other])
    assert list(found) == [one]
    assert found[one].indices.tolist() == [0, 2]
    assert found[one].values.tolist() == one.grad[[0, 2]].tolist()
    one.grad[1] = 5.0  # somebody added to it
    assert hook.consumed([one]) == {}


def test_values_added_after_compression_are_not_sent() -> None:
    hook = TopKHook(density=0.5)
    one = parameter(4.0, 0.0, 3.0, 0.0)
    hook.compress([one])
    assert list(hook.consumed([one])) == [one]
    hook.compress([one])
    one.grad.add_(1.0)
    assert hook.consumed([one]) == {}
    hook.compress([one])
    kept = one.grad
    one.grad = torch.ones(4)  # another one
    assert hook.consumed([one]) == {}
    one.grad = kept
    kept.data.fill_(1.0)  # uncounted, and in an uncompressed step
    assert hook.consumed([one]) == {}


def test_a_note_of_an_earlier_gradient_does_not_count_for_another_at_its_address() -> None:
    hook = TopKHook(density=0.5)
    one = parameter(4.0, 0.0, 3.0, 0.0)
    hook.compress([one])
    assert one.grad is not None
    place = one.grad.untyped_storage()  # its memory stays
    changes = one.grad._version
    one.grad = None  # the step was skipped
    one.grad = torch.empty(0).set_(place, 0, (4,))
    with torch.no_grad():
        while one.grad._version < changes:
            one.grad.fill_(1.0)
    assert one.grad._version == changes
    assert hook.consumed([one]) == {}, "entries of the skipped step were taken for all of this one"


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("scope", ["tensor", "bucket"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_sent_and_never_kept(value: float, scope: Any, momentum: float) -> None:
    hook = TopKHook(density=0.25, scope=scope, momentum=momentum)
    one = parameter(value, value, 3.0, value)
    hook.compress([one])
    assert one.grad.isfinite().tolist().count(False) == 1, "a scaler sees it"
    one.grad = torch.tensor([0.0, 0.0, 1.0, 0.0])
    hook.compress([one])
    assert one.grad.tolist() == [0.0, 0.0, 5.5 if momentum else 4.0, 0.0]
    for _ in range(3):
        one.grad = torch.zeros(4)
        hook.compress([one])
        assert bool(one.grad.isfinite().all())


def test_a_gradient_that_torch_does_not_see_change_costs_bytes_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer, hook = torch.optim.AdamW(model.parameters(), lr=0.01), TopKHook(0.05, exact=False)
    states = {}
    with Checkpointer(
        tmp_path / "s", model=model, optimizer=optimizer, strategy="gradient", compressor=hook, group=None
    ) as checkpointer:
        for step in range(1, 7):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            hook.compress(model.parameters())
            if step > 3:
                for one in model.parameters():
                    one.grad.data.add_(0.1)
            optimizer.step()
            checkpointer.step()
            states[step] = {name: one.clone() for name, one in model.state_dict().items()}
    store = ckptstore.open(tmp_path / "s")
    for step, state in states.items():
        same(dict(store.load(step)["model"]), state)


class Script:
    """The demo's kind of model, small; density None trains without compression."""

    def __init__(self, density: float | None, **hook: Any) -> None:
        from tools.demo.config import DemoConfig
        from tools.demo.corpus import read_corpus
        from tools.demo.training import Training

        config = DemoConfig(steps=200, corpus_bytes=8192, batch=8, context=32, width=32, layers=1, heads=2, dropout=0.0)
        self.training = Training(config, read_corpus(config.corpus_bytes))
        self.hook = None if density is None else TopKHook(density, **hook)

    def step(self) -> float:
        one = self.training
        inputs, targets = one.loader.next_batch()
        logits = one.model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.view(-1, 256), targets.view(-1))
        one.optimizer.zero_grad()
        loss.backward()
        if self.hook is not None:
            self.hook.compress(one.model.parameters())
        torch.nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)
        one.optimizer.step()
        one.schedule.step()
        return loss.item()

    def run(self, store: Any, until: int) -> int:
        one = self.training
        with Checkpointer(
            store,
            model=one.model,
            optimizer=one.optimizer,
            scheduler=one.schedule,
            loader=one.loader,
            compressor=self.hook,
            strategy="gradient",
        ) as checkpointer:
            start = checkpointer.resume()
            for _ in range(start, until):
                self.step()
                checkpointer.step()
        return start


def test_the_demos_model_converges_with_compression_as_without() -> None:
    def trained(density: float | None) -> float:
        script = Script(density)
        losses = [script.step() for _ in range(150)]
        assert losses[0] > 5.0
        return sum(losses[-20:]) / 20

    dense, compressed = trained(None), trained(0.05)
    assert dense < 3.6
    assert compressed < dense + 0.35


def test_a_resumed_run_is_bit_identical_with_its_residuals(tmp_path: Path) -> None:
    whole = Script(0.02)
    whole.run(tmp_path / "whole", 9)
    for until in (4, 9):
        parts = Script(0.02)
        parts.run(tmp_path / "parts", until)
    same(parts.training.model.state_dict(), whole.training.model.state_dict())
    same(parts.hook.state_dict(), whole.hook.state_dict())


def test_without_residuals_a_diff_takes_what_was_sent(tmp_path: Path) -> None:
    script = Script(0.01, exact=False)
    script.run(tmp_path / "s", 6)
    parameters = sum(one.numel() for one in script.training.model.parameters())
    stored = [info.stored for info in ckptstore.open(tmp_path / "s").checkpoints() if info.kind == "gradient"]
    assert len(stored) >= 4
    # 1 % of 32 bits and their places, values that no optimizer updates (generators, positions), and headers
    assert min(stored) < 12 * parameters * 0.15
    assert max(stored) < 12_000, "the steps follow from the entries, with the factors of training"
    again = Script(0.01, exact=False)
    with pytest.warns(DeterminismWarning, match="residuals"):
        assert again.run(tmp_path / "s", 7) == 6


RANKS = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from ckptstore.training import TopKHook
rank, port = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
mirror = [torch.zeros_like(one) for one in model.parameters()]
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
hook = TopKHook(density=0.1, scope=sys.argv[3])
hook.register(ddp)
for step in range(6):
    torch.manual_seed(10 * step + rank)
    x = torch.randn(8, 20)
    alone = [one.detach() for one in torch.autograd.grad(model(x).square().sum(), list(model.parameters()))]
    ddp(x).square().sum().backward()
    consumed = hook.consumed(list(model.parameters()))
    for kept, mine, one in zip(mirror, alone, model.parameters()):
        kept += mine
        if sys.argv[3] == "tensor":
            at = kept.flatten().abs().topk(max(1, -(-kept.numel() // 10))).indices
            sent = torch.zeros(kept.numel())
            sent[at] = kept.flatten()[at]
            kept.view(-1)[at] = 0
            everyone = [torch.zeros_like(sent) for _ in range(2)]
            dist.all_gather(everyone, sent)
            assert torch.equal(one.grad.flatten(), (everyone[0] + everyone[1]) / 2), step
        assert torch.equal(torch.from_numpy(consumed[one].dense()), one.grad.flatten())
    with torch.no_grad():
        for one in model.parameters():
            everyone = [torch.zeros_like(one.grad) for _ in range(2)]
            dist.all_gather(everyone, one.grad)
            assert torch.equal(everyone[0], everyone[1])
            one -= 0.01 * one.grad
            one.grad = None
dist.destroy_process_group()
"""


@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_two_ranks_average_what_both_send(tmp_path: Path, scope: str) -> None:
    code = textwrap.dedent(RANKS)
    processes = [
        warmth.start(
            [sys.executable, "-c", code, str(rank), str(tmp_path / "meeting"), scope],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, told = process.communicate(timeout=150)
        assert process.returncode == 0, told
