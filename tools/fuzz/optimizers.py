"""Optimizer steps: ``encoding, rule, state, 0, numbers`` in eight bytes and a payload; or JSON.

JSON with ``rule`` is a rule's parameters from a segment's metadata; with ``tensors`` it is the entries of a step, which
codec ``step`` groups. If kernels are compiled, both their forms take every step, with the same bits.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CorruptionError, FormatError
from ckptstore.formats import optim
from ckptstore.formats.segment_files import step_codec
from ckptstore.formats.segment_files.segment import TensorEntry
from tools.fuzz.guard import Target, Violation
from tools.fuzz.kernels import both_forms, poison

__all__ = ["OPTIMIZERS"]

Floats = npt.NDArray[np.float32]

_HEAD: Final = struct.Struct("<BBBxI")
_LONGEST: Final = 3 << 17  # one block and a half
_GUARD: Final = 64
_PATTERN: Final = 0xC3C3C3C3
_SCRATCH: Final = 300
"""Limit of memory as a multiple of the numbers: bytes for decoding two steps of four slots, this thread's scratch
memory included."""
ENCODINGS: Final[tuple[optim.Encoding, ...]] = ("predicted", "replayed", "sparse", *optim.SCALED)
_DECODERS: Final[dict[optim.Encoding, Callable[..., None]]] = {
    "predicted": optim.predicted.decode,
    "replayed": optim.replayed.decode,
    "sparse": optim.sparse.decode,
    "predicted/2": partial(optim.scaled.decode, replay=False),
    "replayed/2": partial(optim.scaled.decode, replay=True),
}

_STEP: Final = optim.Step(count=7, lr=1e-3, clip=0.7, loss_scale=1024.0)
RULES: Final[tuple[optim.Rule, ...]] = (
    *(optim.AdamW(weight_decay=0.1).rule(_STEP, variant) for variant in ("fma", "plain", "divide")),
    optim.Adam(beta1=0.5, weight_decay=0.01, amsgrad=True, maximize=True).rule(optim.Step(1, 1e-2)),
    optim.Adam(beta1=0.0, beta2=0.0, eps=0.0).rule(optim.Step(1, 0.1)),
    optim.SGD().rule(_STEP),
    optim.SGD(momentum=0.9, nesterov=True, weight_decay=1e-4).rule(_STEP, "plain"),
    optim.SGD(momentum=0.9, dampening=0.5).rule(optim.Step(1, 1e-2)),
    optim.Skip(("weight",)),
    optim.Skip(("weight", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
)


def _run(data: bytes) -> bool:
    if data[:1] == b"{":
        return _json(data)
    if len(data) < _HEAD.size:
        return False
    encoding, number, seed, count = _HEAD.unpack_from(data)
    link = optim.StepLink(ENCODINGS[encoding % len(ENCODINGS)], RULES[number % len(RULES)], data[_HEAD.size :])
    count %= _LONGEST
    first = both_forms(lambda: _moved([link], seed, count), (CorruptionError,))
    poison()
    if _moved([link], seed, count) != first:
        raise Violation(f"{link.encoding}: one payload makes two states")
    if _moved(None, seed, count, link) != first:
        raise Violation(f"{link.encoding}: a chain of one step is another step")
    if _moved([link, link], seed, count) != _moved(None, seed, count, link, link):
        raise Violation(f"{link.encoding}: a chain of two steps is not one step after the other")
    _encoded_again(link.rule, seed, count, first)
    return True


def _encoded_again(rule: optim.Rule, seed: int, count: int, image: bytes) -> None:
    """The state after any step is encoded without loss."""
    old = _state(rule, seed, count)
    new = list(np.frombuffer(image, np.float32).reshape(len(old), count).copy())
    payload = optim.predicted.encode(rule, old, new)
    if len(payload) > optim.predicted.bound(rule, count):
        raise Violation(f"a payload of {len(payload)} bytes is longer than its bound")
    if _moved([optim.StepLink("predicted", rule, payload)], seed, count) != image:
        raise Violation("the state that a step led to is encoded as another")
    if optim.scaled.suits(rule, None):
        gradient = new[0].view(np.uint32) if seed % 2 else (new[0].view(np.uint32) >> 16).astype(np.uint16)
        for encoding, given in zip(optim.SCALED, (None, gradient), strict=True):
            payload = optim.scaled.encode(rule, old, new, given)
            if len(payload) > optim.scaled.bound(rule, count):
                raise Violation(f"a payload of {len(payload)} bytes is longer than its bound")
            if _moved([optim.StepLink(encoding, rule, payload)], seed, count) != image:
                raise Violation(f"the state that a step led to is encoded as another by {encoding}")


def _state(rule: optim.Rule, seed: int, count: int) -> list[Floats]:
    """Slots of a parameter: as after training, or with every kind of number."""
    rng = np.random.default_rng(seed % 8)
    if seed % 8 == 0:
        return [np.zeros(count, np.float32) for _ in rule.slots]
    if seed % 8 == 1:
        return [rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32) for _ in rule.slots]
    scales = (0.02, 1e-3, 1e-6, 1e-6)[: len(rule.slots)]
    state = [rng.normal(0, scale, count).astype(np.float32) for scale in scales]
    return [np.abs(part) if place >= 2 else part for place, part in enumerate(state)]


def _moved(links: Sequence[optim.StepLink] | None, seed: int, count: int, *one_by_one: optim.StepLink) -> bytes:
    """The bits after some steps, taken as a chain or (`one_by_one`) each by its encoding's own decoder."""
    rule = (links or one_by_one)[0].rule
    space = np.full((len(rule.slots), count + 2 * _GUARD), _PATTERN, np.uint32)
    state = [row[_GUARD : _GUARD + count].view(np.float32) for row in space]
    for part, values in zip(state, _state(rule, seed, count), strict=True):
        part.view(np.uint32)[:] = values.view(np.uint32)
    try:
        if links is not None:
            optim.decode(links, state)
        for link in one_by_one:
            _DECODERS[link.encoding](link.rule, link.payload, state)
    finally:
        if not (space[:, :_GUARD] == _PATTERN).all() or not (space[:, _GUARD + count :] == _PATTERN).all():
            raise Violation(f"{rule}: wrote outside of its memory")
    return b"".join(part.tobytes() for part in state)


# ------------------------------------------------------------------------------------------------ metadata


def _json(data: bytes) -> bool:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if isinstance(given.get("tensors"), dict):
        return _groups(given["tensors"])
    rule = optim.rule(given)  # the segment's reader lets objects through, and nothing else
    again = optim.rule(rule.params)
    if optim.rule(again.params).params != again.params:
        raise Violation(f"{rule}: its parameters make another rule")
    for seed in (1, 2):
        old, new = _state(rule, seed, 500), _state(rule, seed + 1, 500)
        image = b"".join(part.tobytes() for part in new)
        for encoding in ENCODINGS[:2]:
            gradient = new[0] if encoding == "replayed" else None
            payload = _encode(encoding, again, old, new, gradient)
            link = optim.StepLink(encoding, again, payload)
            if both_forms(lambda link=link: _moved([link], seed, 500), ()) != image:  # type: ignore[misc]  # noqa: B023
                raise Violation(f"{rule}: {encoding} loses bits")
    return True


def _groups(described: dict[str, Any]) -> bool:
    """``{"tensors": {name: [shape, parameters]}}``: groups that are restored together, by a segment's parameters."""
    entries = {
        name: TensorEntry(name, "F32", (row[0],), (), step_codec.STEP, row[1])
        for name, row in described.items()
        if isinstance(row, list)
        and len(row) == 2
        and type(row[0]) is int
        and 0 <= row[0] < 1 << 40
        and isinstance(row[1], dict)
    }
    found = step_codec.groups_of(entries, "fuzz")
    names = [name for group in found for name in group.names]
    if sorted(names) != sorted(entries):
        raise Violation("groups that are not the tensors")
    for group in found:
        if any(len({entries[name].shape for name in member}) != 1 for member in group.members):
            raise Violation("slots of several shapes")
        if any(len(member) != len(group.rule.slots) for member in group.members):
            raise Violation("a parameter without its slots")
    return True


# ------------------------------------------------------------------------------------------------ seeds


def _encode(
    encoding: optim.Encoding, rule: optim.Rule, old: list[Floats], new: list[Floats] | None, gradient: Any
) -> bytes:
    if encoding == "predicted":
        assert new is not None
        return optim.predicted.encode(rule, old, new).tobytes()
    return optim.replayed.encode(rule, old, new, gradient).tobytes()


def _gradients(rng: np.random.Generator, count: int) -> list[Any]:
    """A gradient of every form: dense and sparse, of every kind of number."""
    dense = rng.normal(0, 1, count).astype(np.float32)
    kinds = [dense, (dense.view(np.uint32) >> 16).astype(np.uint16), dense.astype(np.float16)]
    where = np.flatnonzero(rng.random(count) < 0.02)
    return [*kinds, *(optim.SparseGradient(where, values[where], count) for values in kinds)]


def _seeds() -> list[bytes]:
    found = [json.dumps(rule.params).encode() for rule in RULES]
    found += [json.dumps({"tensors": tensors}).encode() for tensors in _described()]
    for number, rule in enumerate(RULES):
        for seed, count in ((0, 5), (1, 300), (2, 700), (3, 2001)):
            rng = np.random.default_rng(seed)
            old = _state(rule, seed, count)
            for form, gradient in enumerate(_gradients(rng, count)):
                new = [part.copy() for part in old]
                dense = gradient.dense() if isinstance(gradient, optim.SparseGradient) else gradient
                optim.advance(rule, new, dense)
                exact = [part.copy() for part in new]
                for part in new:  # values that training's own kernel rounded differently
                    part.view(np.uint32)[rng.random(count) < 0.005] += np.uint32(1)
                ways: list[tuple[int, bytes]] = [(0, _encode("predicted", rule, old, new, None))]
                name: optim.Encoding = "sparse" if form >= 3 else "replayed"
                replays = (_encode(name, rule, old, after, gradient) for after in (None, exact, new))
                ways += [(ENCODINGS.index(name), payload) for payload in replays]
                if optim.scaled.suits(rule, gradient):
                    ways.append((3, optim.scaled.encode(rule, old, new, None).tobytes()))
                    ways += [(4, optim.scaled.encode(rule, old, after, gradient).tobytes()) for after in (None, new)]
                found += [_HEAD.pack(way, number, seed, count) + payload for way, payload in ways]
    return [data for data in dict.fromkeys(found) if len(data) < 1 << 15]


def _described() -> list[dict[str, Any]]:
    """One parameter alone, several laid end to end, and both in one step."""
    rule = RULES[0]

    def group(*parameters: str) -> dict[str, Any]:
        members = tuple(tuple(f"{name}.{slot}" for slot in rule.slots) for name in parameters)
        made = step_codec.StepGroup("replayed", rule, members)
        return {
            name: [12, made.params if name == made.leader else step_codec.follower_params(made.leader)]
            for name in made.names
        }

    return [group("a"), group("a", "b"), group("a") | group("b", "c")]


def _declared(data: bytes) -> int:
    if data[:1] == b"{" or len(data) < _HEAD.size:
        return 0
    return _SCRATCH * (int(_HEAD.unpack_from(data)[3]) % _LONGEST)


OPTIMIZERS: Final = Target("optimizer", _run, _seeds, refusals=(FormatError, CorruptionError), declared=_declared)
