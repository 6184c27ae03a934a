"""Training trajectories made by the project itself: the data that the codec benchmarks measure.

Every trajectory is deterministic (fixed seeds, thread count and data: the Python standard library's own
sources as text, drawn images) for one version of Python and torch, and is cached outside git::

    .cache/trajectories/<name>-<key>/<step>.safetensors
    .cache/trajectories/<name>-<key>/done.json              written last; holds the recipe and the losses

A file holds one state. Its tensors are named by what they are:

==========================  =====================================================================
``model.<parameter>``       the weights the model computes with (bf16 in ``bf16``), and its buffers
``master.<parameter>``      the fp32 master of a bf16 weight
``exp_avg.<parameter>``     Adam's first moment; ``exp_avg_sq.<parameter>`` its second
``momentum.<parameter>``    SGD's momentum
``gradient.<parameter>``    what backward produced for the step that made this state, before clipping
==========================  =====================================================================

The file's metadata holds ``scalars``: a JSON object with ``step``, ``lr``, ``clip`` (the factor that scaled the
gradient, as a hexadecimal float) and ``loss``. Run ``python tools/bench/codecs/trajectories.py [NAME ...]`` to make
them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "trajectories"
THREADS = 2
GAPS = (0, 1, 2, 10, 100)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a trajectory is made. ``phases`` maps a phase's name to the step at which its base state is saved; the states
    ``gaps`` steps later are saved with it. ``start`` is a trajectory and step to branch from."""

    name: str
    kind: str
    phases: Mapping[str, int]
    steps: int
    lr: float
    final_lr: float
    gaps: tuple[int, ...] = GAPS
    every: int = 0
    start: tuple[str, int] | None = None
    width: int = 256
    layers: int = 4
    vocabulary: int = 4096
    context: int = 128
    batch: int = 8
    warmup: int = 20

    def saved(self) -> list[int]:
        """The steps whose states are saved, ascending."""
        steps = {base + gap for base in self.phases.values() for gap in self.gaps}
        if self.every:
            steps |= set(range(self.every, self.steps + 1, self.every))
        return sorted(step for step in steps if step <= self.steps)


def _small() -> Iterator[Recipe]:
    """Trajectories of some seconds each: models of 0.6 M parameters, with what `tools.papers.xor` measures."""
    size: dict[str, int] = {"width": 128, "layers": 2, "vocabulary": 1024, "context": 64}
    phases, gaps = {"1": 20, "2": 50, "3": 80, "4": 109}, (0, 1, 10)
    yield Recipe("small-lm", "lm", phases, 120, 1e-3, 1e-4, gaps=gaps, every=120, **size)  # type: ignore[arg-type]
    start = ("small-lm", 120)
    yield Recipe("small-bf16", "bf16", {"1": 1}, 11, 1e-4, 1e-4, gaps=gaps, start=start, warmup=0, **size)  # type: ignore[arg-type]
    yield Recipe("small-finetune", "lm", {"1": 1}, 11, 1e-5, 1e-5, gaps=gaps, start=start, warmup=0, **size)  # type: ignore[arg-type]
    yield Recipe("small-cnn", "cnn", phases, 120, 0.1, 0.0, gaps=gaps, width=16, batch=16, warmup=10)


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("lm", "lm", {"early": 40, "mid": 350, "late": 590}, 700, 1e-3, 1e-4),
        Recipe("bf16", "bf16", {"late": 1}, 101, 1e-4, 1e-4, start=("lm", 590), warmup=0),
        Recipe("finetune", "lm", {"finetune": 1}, 101, 1e-5, 1e-5, start=("lm", 690), warmup=0),
        Recipe("cnn", "cnn", {"mid": 100, "end": 298}, 300, 0.1, 0.0, width=64, batch=32, warmup=10),
        *_small(),
        Recipe("series", "lm", {}, 1000, 1e-3, 1e-4, every=5, width=128, layers=2, vocabulary=1024),
    )
}
DEFAULT = ("lm", "bf16", "finetune", "cnn")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A trajectory on disk."""

    recipe: Recipe
    folder: Path

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def steps(self) -> list[int]:
        return self.recipe.saved()

    def path(self, step: int) -> Path:
        """The safetensors file of the state after ``step``."""
        return self.folder / f"{step:06d}.safetensors"

    def load(self, step: int, prefix: str = "") -> dict[str, np.ndarray]:
        """The tensors whose names start with ``prefix``, as flat little-endian unsigned integers of their item size."""
        words = {1: np.uint8, 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
        state = {}
        with safe_open(self.path(step), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                if name.startswith(prefix):
                    tensor = file.get_tensor(name).contiguous()
                    size = tensor.element_size()
                    state[name] = tensor.reshape(-1).view(torch.uint8).numpy().view(words[size])
        return state

    def scalars(self, step: int) -> dict[str, float | str]:
        """The step's learning rate, clip factor and loss."""
        with safe_open(self.path(step), framework="pt") as file:
            loaded = json.loads(file.metadata()["scalars"])
        assert isinstance(loaded, dict)
        return loaded


def ensure(name: str, cache: Path = CACHE) -> Trajectory:
    """The trajectory ``name``, trained now unless it is in ``cache``."""
    recipe = RECIPES[name]
    trajectory = Trajectory(recipe, cache / f"{name}-{_key(recipe)}")
    done = trajectory.folder / "done.json"
    if not done.exists():
        trajectory.folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1 if name.startswith("small-") else THREADS)
        torch.use_deterministic_algorithms(True)
        start = ensure(recipe.start[0], cache) if recipe.start else None
        began, losses = time.monotonic(), []
        for step, loss in _TRAINERS[recipe.kind](recipe, start, trajectory):
            losses.append(loss)
            if step % 50 == 0:
                print(f"{name}: step {step}/{recipe.steps} loss {loss:.3f} {time.monotonic() - began:.0f} s")
        done.write_text(json.dumps({"recipe": asdict(recipe), "losses": losses}))
    return trajectory


def _key(recipe: Recipe) -> str:
    """The key of the bits: the recipe (and the one it branches from), the versions, the thread count."""
    parents = [asdict(recipe)]
    while recipe.start:
        recipe = RECIPES[recipe.start[0]]
        parents.append(asdict(recipe))
    text = json.dumps([parents, sys.version_info[:3], torch.__version__, THREADS], default=dict)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


# ---------------------------------------------------------------------------------------------------- the text


def _tokens(vocabulary: int, packages: bool) -> Tensor:
    """The standard library as tokens: frequent words of its top-level modules, and bytes for the rest.

    ``packages`` selects the sources of its packages instead (the fine-tuning text), with the same vocabulary.
    """
    library = Path(sysconfig.get_path("stdlib"))
    pattern = re.compile(r"\w+|[^\w\s]|\s+")

    def text(paths: list[Path]) -> str:
        return "\n".join(path.read_text("utf-8", "replace") for path in paths)

    modules = pattern.findall(text(sorted(library.glob("*.py"))))
    frequent = sorted(Counter(modules).items(), key=lambda item: (-item[1], item[0]))[: vocabulary - 256]
    index = {word: 256 + i for i, (word, _) in enumerate(frequent)}
    words = modules
    if packages:
        folders = ("asyncio", "email", "importlib", "json", "logging", "unittest", "xml", "multiprocessing")
        words = pattern.findall(text([p for folder in folders for p in sorted((library / folder).rglob("*.py"))]))
    ids: list[int] = []
    for word in words:
        if word in index:
            ids.append(index[word])
        else:
            ids.extend(word.encode())
    return torch.tensor(ids)


def _batch(tokens: Tensor, recipe: Recipe, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 + step)
    starts = torch.randint(len(tokens) - recipe.context - 1, (recipe.batch,), generator=generator)
    rows = torch.stack([tokens[s : s + recipe.context + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


# -------------------------------------------------------------------------------------------------- the models


class _Block(nn.Module):
    """A pre-norm transformer block, as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, width // 64, 64).transpose(1, 2)
            for part in self.attention(self.norm1(x)).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class _LanguageModel(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embedding = nn.Embedding(recipe.vocabulary, recipe.width)
        self.position = nn.Embedding(recipe.context, recipe.width)
        self.blocks = nn.Sequential(*(_Block(recipe.width) for _ in range(recipe.layers)))
        self.norm = nn.LayerNorm(recipe.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * recipe.layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.embedding.weight)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def cnn(width: int) -> nn.Module:
    """A residual CNN with BatchNorm for the drawn images."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        _Residual(width, width, 2),
        _Residual(width, 2 * width, 2),
        _Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def images(count: int, step: int) -> tuple[Tensor, Tensor]:
    """Ten classes of drawn 32 x 32 images: gratings of one orientation each, with random phase, colour and noise."""
    generator = torch.Generator().manual_seed(2_000_003 + step)
    labels = torch.randint(10, (count,), generator=generator)
    angle = (labels * (math.pi / 10)).view(-1, 1, 1)
    phase, pitch = 6.3 * torch.rand(2, count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    grating = torch.sin((x * angle.cos() + y * angle.sin()) * (0.4 + 0.1 * pitch) + phase)
    colour = torch.rand(count, 3, 1, 1, generator=generator)
    return grating.unsqueeze(1) * colour + torch.randn(count, 3, 32, 32, generator=generator), labels


# ------------------------------------------------------------------------------------------------ the training


def _rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine from ``lr`` to ``final_lr``; ``step`` counts from 1."""
    if step <= recipe.warmup:
        return recipe.lr * step / recipe.warmup
    fraction = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.final_lr + (recipe.lr - recipe.final_lr) * 0.5 * (1 + math.cos(math.pi * fraction))


def _save(path: Path, tensors: Mapping[str, Tensor], scalars: Mapping[str, float | str]) -> None:
    save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, path, {"scalars": json.dumps(scalars)})


def _moments(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's tensors, named by what they are and by the parameter."""
    kinds = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}
    return {
        f"{kinds[kind]}.{name}": tensor
        for name, parameter in names.items()
        for kind, tensor in optimizer.state[parameter].items()
        if kind in kinds
    }


def _clip(gradients: list[Tensor]) -> float:
    """Scale fp32 gradients to a norm of at most 1, as ``clip_grad_norm_`` does; returns the factor."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    factor = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return float(factor)


@dataclass(frozen=True, slots=True)
class Taken:
    """One step of a language model: backward's gradient (before clipping, by parameter), and the step's numbers.

    With ``keep``, the optimizer consumed ``sparse`` in place of the clipped gradient: indices and values by parameter.
    """

    gradients: Mapping[str, Tensor]
    lr: float
    clip: float
    loss: float
    sparse: Mapping[str, tuple[Tensor, Tensor]]


class LanguageRun:
    """An fp32 language model under AdamW; with ``kind`` "bf16", bf16 weights and gradients over an fp32 master."""

    def __init__(self, recipe: Recipe, start: Trajectory | None) -> None:
        self.recipe = recipe
        half = recipe.kind == "bf16"
        torch.manual_seed(7)
        self.tokens = _tokens(recipe.vocabulary, packages=recipe.name.endswith("finetune"))
        model = _LanguageModel(recipe)
        if start is not None:
            assert recipe.start is not None
            with safe_open(start.path(recipe.start[1]), framework="pt") as file:
                model.load_state_dict({name: file.get_tensor(f"model.{name}") for name in model.state_dict()})
        self.master = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()} if half else {}
        self.model = model.to(torch.bfloat16) if half else model
        self.weights = dict(self.model.named_parameters())
        self.trained = self.master or self.weights
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self._left: dict[str, Tensor] = {}  # what compression withheld (error feedback)
        if half and start is not None:
            assert recipe.start is not None
            _continue(self.optimizer, self.trained, start, recipe.start[1], recipe.start[1])

    def resume(self, trajectory: Trajectory, step: int) -> None:
        """Go to the state that a trajectory of the same recipe has saved."""
        with safe_open(trajectory.path(step), framework="pt") as file, torch.no_grad():
            for prefix, tensors in (("model", self.weights), ("master", self.master)):
                for name, tensor in tensors.items():
                    tensor.copy_(file.get_tensor(f"{prefix}.{name}"))
        before = self.recipe.start[1] if self.master and self.recipe.start else 0
        _continue(self.optimizer, self.trained, trajectory, step, before + step)

    def take(self, step: int, keep: float | None = None, kind: torch.dtype = torch.float32) -> Taken:
        """Step ``step`` of the run; with ``keep``, only this share of the clipped gradient is applied, as ``kind``."""
        lr = self.optimizer.param_groups[0]["lr"] = _rate(self.recipe, step)
        inputs, targets = _batch(self.tokens, self.recipe, step)
        loss = functional.cross_entropy(self.model(inputs).flatten(0, 1).float(), targets.flatten())
        self.model.zero_grad()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.weights.items() if p.grad is not None}
        for name, parameter in self.master.items():
            parameter.grad = gradients[name].float()
        factor = _clip([p.grad for p in self.trained.values() if p.grad is not None])
        sparse = {} if keep is None else self._compress(keep, kind)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.master.items():
                self.weights[name].copy_(parameter)
        return Taken(gradients, lr, factor, loss.item(), sparse)

    def _compress(self, keep: float, kind: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """Keep the largest entries of the whole model's gradient, and withhold the others for the next steps."""
        dense = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        for name, gradient in dense.items():
            gradient.add_(self._left.get(name, torch.zeros(())))
        sizes = torch.cat([gradient.abs().flatten() for gradient in dense.values()])
        least = sizes.topk(int(keep * len(sizes))).values[-1]
        found = {}
        for name, gradient in dense.items():
            indices = torch.nonzero(gradient.abs().flatten() >= least).flatten()
            values = gradient.flatten()[indices].to(kind)
            applied = torch.zeros_like(gradient).flatten().index_copy_(0, indices, values.float()).view_as(gradient)
            self._left[name] = gradient - applied
            gradient.copy_(applied)
            found[name] = indices, values
        return found

    def state(self) -> dict[str, Tensor]:
        """The weights and the optimizer's tensors, live, named as in a trajectory's files."""
        state: dict[str, Tensor] = {f"model.{name}": p for name, p in self.weights.items()}
        state |= {f"master.{name}": p for name, p in self.master.items()}
        return state | _moments(self.optimizer, self.trained)


def _train_lm(recipe: Recipe, start: Trajectory | None, out: Trajectory) -> Iterator[tuple[int, float]]:
    run, saved = LanguageRun(recipe, start), set(recipe.saved())
    for step in range(1, recipe.steps + 1):
        taken = run.take(step)
        if step in saved:
            state = run.state() | {f"gradient.{name}": g for name, g in taken.gradients.items()}
            _save(out.path(step), state, {"step": step, "lr": taken.lr, "clip": taken.clip.hex(), "loss": taken.loss})
        yield step, taken.loss


def run_from(trajectory: Trajectory, step: int) -> LanguageRun:
    """The run of a cached trajectory, at one of its saved steps: its next steps are those of the trajectory."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    recipe = trajectory.recipe
    run = LanguageRun(recipe, ensure(recipe.start[0], trajectory.folder.parent) if recipe.start else None)
    run.resume(trajectory, step)
    return run


def _continue(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor], start: Trajectory, step: int, count: int
) -> None:
    """Give a branch the moments of the state it starts from, so that it is as late as its parent."""
    with safe_open(start.path(step), framework="pt") as file:
        for name, parameter in trained.items():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(count)),
                "exp_avg": file.get_tensor(f"exp_avg.{name}"),
                "exp_avg_sq": file.get_tensor(f"exp_avg_sq.{name}"),
            }


def _train_cnn(recipe: Recipe, start: Trajectory | None, out: Trajectory) -> Iterator[tuple[int, float]]:
    """A residual CNN with BatchNorm under SGD with momentum; the rate falls to zero at the end."""
    del start
    torch.manual_seed(11)
    model = cnn(recipe.width)
    weights = dict(model.named_parameters())
    optimizer = torch.optim.SGD(weights.values(), lr=recipe.lr, momentum=0.9, weight_decay=5e-4)
    saved = set(recipe.saved())
    for step in range(1, recipe.steps + 1):
        lr = optimizer.param_groups[0]["lr"] = _rate(recipe, step)
        inputs, labels = images(recipe.batch, step)
        loss = functional.cross_entropy(model(inputs), labels)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if step in saved:
            state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
            state |= _moments(optimizer, weights)
            state |= {f"gradient.{name}": p.grad for name, p in weights.items() if p.grad is not None}
            _save(out.path(step), state, {"step": step, "lr": lr, "clip": (1.0).hex(), "loss": loss.item()})
        yield step, loss.item()


_TRAINERS = {"lm": _train_lm, "bf16": _train_lm, "cnn": _train_cnn}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and cache the trajectories that the codec benchmarks measure.")
    parser.add_argument("names", nargs="*", choices=[*RECIPES, []], help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    for name in options.names or DEFAULT:
        trajectory = ensure(name, options.cache)
        size = sum(path.stat().st_size for path in trajectory.folder.glob("*.safetensors"))
        print(f"{name}: {len(trajectory.steps)} states, {size / 1e6:.0f} MB, {trajectory.folder}")


if __name__ == "__main__":
    main()
