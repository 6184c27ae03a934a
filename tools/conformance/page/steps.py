"""SPEC.md 5.5: optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tools.conformance.page.codecs import Array, RefusedError, Stored, group, grouped, unzigzag

BLOCK = 1 << 18
SCALED = ("predicted/2", "replayed/2")
FORMS = {"replayed": (0, 1, 2), "sparse": (3, 4, 5), "replayed/2": (0, 1)}
SCALARS = {
    "adam/1": ("l2", "shrink", "weight1", "beta2", "weight2", "root", "eps", "rate"),
    "sgd/1": ("decay", "momentum", "share", "rate"),
}


MEMBERS = {
    "adam/1": {"variant", "amsgrad", "maximize", "scales", *SCALARS["adam/1"]},
    "sgd/1": {"variant", "buffer", "first", "nesterov", "maximize", "scales", *SCALARS["sgd/1"]},
    "skip/1": {"slots"},
}


def require(holds: bool) -> None:
    if not holds:
        raise RefusedError("an optimizer step")


def check_groups(own: Mapping[str, Any]) -> None:
    """Check the groups of a segment's step; `own`: its entries."""
    found: list[str] = []
    of_step = {name: tensor for name, tensor in own.items() if tensor["codec"] == "step"}
    for leader, tensor in of_step.items():
        if "leader" in tensor["params"]:
            continue
        require(tensor["params"].keys() == {"encoding", "rule", "members"})
        encoding, rule, members = (tensor["params"][name] for name in ("encoding", "rule", "members"))
        require(encoding in ("predicted", "replayed", "sparse", *SCALED) and isinstance(rule, dict))
        require(encoding not in SCALED or rule.get("rule") == "adam/1")
        require(isinstance(members, list) and all(member and isinstance(member, list) for member in members))
        require(all(isinstance(name, str) for member in members for name in member))
        require(bool(members) and members[0][0] == leader)
        slots, size = len(Rule(rule).slots), 0
        for member in members:
            require(len(member) == slots and of_step.keys() >= set(member))
            found += member
            size += check_member(leader, [own[name] for name in member])
        require(len(members) == 1 or size <= 1 << 24)
    require(len(found) == len(set(found)) and of_step.keys() == set(found))


def check_member(leader: str, slots: list[Any]) -> int:
    """The bytes of each slot of a parameter."""
    for slot in slots:
        require(slot["dtype"] == "F32" and bool(slot["chunks"]))
        require(all(slot[part] == slots[0][part] for part in ("shape", "global_shape", "offset")))
        if slot["name"] != leader:
            require(slot["params"] == {"leader": leader} and not any(chunk["length"] for chunk in slot["chunks"]))
    return sum(chunk["logical"] for chunk in slots[0]["chunks"])


def numbers(patterns: Array) -> Array:
    return patterns.astype("<u4").view("<f4")


def canonical(values: Array) -> Array:
    """Every NaN as 7fc00000."""
    bits = values.astype("<f4").view("<u4")
    return numbers(np.where(np.isnan(values), np.uint32(0x7FC00000), bits))


def fused(a: Array, b: Any, c: Array) -> Array:
    """``[a * b + c]``: the product is exact in fp64; the sum is rounded to odd there, and then to fp32."""
    product, addend = a.astype(np.float64) * np.float64(b), c.astype(np.float64)
    total = product + addend
    other = total - product
    error = (product - (total - other)) + (addend - other)
    even = total.view(np.uint64) % np.uint64(2) == 0
    moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(np.isfinite(error) & (error != 0) & even, moved, total).astype(np.float32)


def rounded_first(a: Array, b: Any, c: Array) -> Array:
    """``[[a * b] + c]``"""
    return a * np.float32(b) + c if not isinstance(b, np.ndarray) else a * b + c


class Rule:
    """A rule (5.5.1)."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.id = params.get("rule")
        require(self.id in MEMBERS and params.keys() == {"rule", *MEMBERS[self.id]})
        self.params = params
        self.scalars = {name: number(params[name]) for name in SCALARS.get(self.id, ())}
        self.add = rounded_first if params.get("variant") == "plain" else fused

    def __getattr__(self, name: str) -> Any:
        return self.scalars[name] if name in self.scalars else self.params[name]

    @property
    def slots(self) -> Sequence[str]:
        if self.id == "skip/1":
            return list(self.params["slots"])
        if self.id == "sgd/1":
            return ["weight", "momentum_buffer"] if self.buffer else ["weight"]
        return ["weight", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * self.amsgrad

    @property
    def order(self) -> Sequence[str]:
        """The order of prediction."""
        return self.slots if self.id == "skip/1" else [*self.slots[1:], "weight"]


def number(pattern: int) -> np.float32:
    return numbers(np.array([pattern]))[0]


def largest(x: Array, v: Array) -> Array:
    either = np.isnan(x) | np.isnan(v)
    return np.where(either, np.float32(np.nan), np.where(x > v, x, v))


# ---- 5.5.2


def step(rule: Rule, old: Mapping[str, Array], gradient: Array) -> dict[str, Array]:
    """Compute the new slots."""
    if rule.id == "skip/1":
        return dict(old)
    g = gradient
    for scale in rule.scales:
        g = g * number(scale)
    if rule.maximize:
        g = -g
    new = adam(rule, old, g) if rule.id == "adam/1" else sgd(rule, old, g)
    return {slot: canonical(values) for slot, values in new.items()}


def adam(rule: Rule, old: Mapping[str, Array], g: Array) -> dict[str, Array]:
    w, m, v = old["weight"], old["exp_avg"], old["exp_avg_sq"]
    if rule.l2 != 0:
        g = rule.add(w, rule.l2, g)
    if abs(rule.weight1) < 0.5:
        first = rule.add(g - m, rule.weight1, m)
    else:
        first = rule.add(g - m, np.float32(rule.weight1 - np.float32(1)), g)
    if rule.variant == "divide":
        second = fused(g * g, rule.weight2, v * rule.beta2)
    else:
        second = rule.add(g * rule.weight2, g, v * rule.beta2)
    new = {"exp_avg": first, "exp_avg_sq": second}
    if rule.amsgrad:
        new["max_exp_avg_sq"] = largest(old["max_exp_avg_sq"], second)
    return {"weight": moved(rule, w, new), **new}


def moved(rule: Rule, w: Array, new: Mapping[str, Array]) -> Array:
    """Compute w'."""
    y = new["max_exp_avg_sq" if rule.amsgrad else "exp_avg_sq"]
    below = np.sqrt(y) / rule.root + rule.eps
    kept = w if rule.shrink == 1 else w * rule.shrink
    if rule.variant == "divide":
        return fused(new["exp_avg"] / below, rule.rate, kept)
    return kept + new["exp_avg"] * rule.rate / below


def sgd(rule: Rule, old: Mapping[str, Array], g: Array) -> dict[str, Array]:
    w = old["weight"]
    if rule.decay != 0:
        g = rule.add(w, rule.decay, g)
    if not rule.buffer:
        return {"weight": rule.add(g, rule.rate, w)}
    b = old["momentum_buffer"]
    buffer = g if rule.first else rule.add(g, rule.share, b * rule.momentum)
    u = rule.add(buffer, rule.momentum, g) if rule.nesterov else buffer
    return {"weight": rule.add(u, rule.rate, w), "momentum_buffer": buffer}


# ---- 5.5.3


def prediction(rule: Rule, slot: str, old: Mapping[str, Array], new: Mapping[str, Array]) -> Array:
    """``new`` holds the true slots before it."""
    if slot == "exp_avg" or rule.id == "skip/1" or (rule.id == "sgd/1" and not rule.buffer):
        return old[slot]
    return canonical(predicted(rule, slot, old, new))


def predicted(rule: Rule, slot: str, old: Mapping[str, Array], new: Mapping[str, Array]) -> Array:
    if slot == "exp_avg_sq":
        m = old["exp_avg"].astype(np.float64)
        r = 1 / np.float64(rule.weight1) if rule.weight1 else np.float64(0)
        h = (new["exp_avg"].astype(np.float64) - m) * r + m
        kept = (old["exp_avg_sq"] * rule.beta2).astype(np.float64)
        return ((h * h) * np.float64(rule.weight2) + kept).astype(np.float32)
    if slot == "max_exp_avg_sq":
        return largest(old["max_exp_avg_sq"], new["exp_avg_sq"])
    if slot == "momentum_buffer":
        return old[slot] * (np.float32(0) if rule.first else rule.momentum)
    if rule.id == "adam/1":
        return moved(rule, old["weight"], new)
    u = buffer = new["momentum_buffer"]
    if rule.nesterov:
        g = buffer
        if not rule.first:
            g = buffer - old["momentum_buffer"] * rule.momentum
            if rule.share not in (0, 1):
                g = g / rule.share
        u = rule.add(buffer, rule.momentum, g)
    return rule.add(u, rule.rate, old["weight"])


# ---- 5.5.4


def decode(encoding: str, params: Mapping[str, Any], payload: bytes, old: Sequence[Array]) -> list[Array]:
    """The new patterns of a chunk's slots, in the order of the rule's slots, from the old ones."""
    rule, stored = Rule(params), Stored(payload)
    require(encoding not in SCALED or rule.id == "adam/1")
    form = stored.byte() if encoding in FORMS else -1
    require(encoding not in FORMS or form % 128 in FORMS[encoding])
    made: list[list[Array]] = [[] for _ in rule.slots]
    with np.errstate(all="ignore"):
        for start in range(0, len(old[0]), BLOCK):
            parts = [numbers(part[start : start + BLOCK]) for part in old]
            before = dict(zip(rule.slots, parts, strict=True))
            if form < 0:
                after = foretold(rule, stored, before, encoding in SCALED)
            else:
                after = replayed(rule, stored, before, form, encoding in SCALED)
            for slot, blocks in zip(rule.slots, made, strict=True):
                blocks.append(after[slot].view("<u4"))
    if stored.at < len(stored.data):
        raise RefusedError("more")
    return [np.concatenate(blocks) for blocks in made]


def foretold(rule: Rule, stored: Stored, before: Mapping[str, Array], scaled: bool) -> dict[str, Array]:
    after: dict[str, Array] = {}
    if scaled:
        after["exp_avg"] = changed(rule, stored, before)
    for slot in rule.order[scaled:]:
        after[slot] = corrected(stored, prediction(rule, slot, before, after))
    return after


def replayed(rule: Rule, stored: Stored, before: Mapping[str, Array], form: int, scaled: bool) -> dict[str, Array]:
    count = len(before[rule.slots[0]])
    gradient = np.zeros(count, np.float32)
    if scaled:
        gradient = distances(stored, before["exp_avg_sq"], 2 if form % 128 else 4)
    elif form % 128 < 3:
        gradient = values(stored, count, form % 128)
    else:
        places = positions(stored, count)
        gradient[places] = values(stored, len(places), form % 128 - 3)
    after = step(rule, before, gradient)
    if form < 128:
        return after
    return {slot: corrected(stored, after[slot]) for slot in rule.slots}


def corrected(stored: Stored, guess: Array) -> Array:
    """A residual: the codec ``sub``."""
    return numbers(guess.view("<u4") + unzigzag(group(stored, len(guess), 4)))


def values(stored: Stored, count: int, kind: int) -> Array:
    """The codec ``planes``, rotated."""
    if not count:
        return np.zeros(0, np.float32)
    word = 2 if kind else 4
    z = group(stored, count, word)
    one, last = z.dtype.type(1), z.dtype.type(8 * word - 1)
    words = z >> one | z << last
    if kind == 0:
        return numbers(words)
    return numbers(words.astype("<u4") << np.uint32(16)) if kind == 1 else words.view("<f2").astype(np.float32)


def positions(stored: Stored, count: int) -> list[int]:
    steps, expected = stored.u32(), stored.u32()
    if expected > count or steps > expected + count // 255:
        raise RefusedError("too many")
    found, at = [], 0
    for passed in group(stored, steps, 1).tolist() if steps else []:
        at += passed
        if passed < 255:
            found.append(at)
            at += 1
    if len(found) != expected or (found and found[-1] >= count):
        raise RefusedError("steps")
    return found


# ---- 5.5.5


def expected(stored: Stored, second: Array) -> Array:
    """The expected patterns of a block, by the scales that are read."""
    count = len(second)
    scales = group(stored, -(-count // 256), 1).astype(np.int64) if count else np.zeros(0, np.int64)
    return (second.view("<u4").astype(np.int64) % 2**31) // 2 + np.repeat((scales + 126) * 2**21, 256)[:count]


def distances(stored: Stored, second: Array, width: int) -> Array:
    """A gradient as fp32."""
    e, half = expected(stored, second) // 2 ** (32 - 8 * width), 2 ** (8 * width - 1)
    words = group(stored, len(second), width).astype(np.int64) if len(second) else np.zeros(0, np.int64)
    d = words // 2
    magnitudes = np.where(d == 0, 0, np.where(d + e == half, e, (d + e) % half))
    return numbers((magnitudes + half * (words % 2)) << (32 - 8 * width))


def changed(rule: Rule, stored: Stored, before: Mapping[str, Array]) -> Array:
    """The new first moments."""
    kept = canonical(before["exp_avg"] * (np.float32(1) - rule.weight1)).view("<u4").astype(np.int64)
    labels = np.clip((expected(stored, before["exp_avg_sq"]) - kept % 2**31 + 2**31) // 2**23, 246, 261) - 246
    c = grouped(stored, labels, 16, 4).astype(np.int64)
    difference = c % 2**24 + 2**24 * (c // 2**26)
    difference = np.where(c // 2**24 % 2, -1 - difference, difference)
    return numbers((kept + difference) % 2**31 + 2**31 * ((kept // 2**31 + c // 2**25) % 2))
