"""Compares an answer with the expected one; texts of errors are not compared."""

from __future__ import annotations

from typing import Any

__all__ = ["differences"]

_TEXTS = ("error", "refused")


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """The differences, each with its place; empty if the answer is right."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if len(expected) == 1 and (text := next(iter(expected))) in _TEXTS:
            return [] if text in found else [f"{where or 'the store'}: read, but must be refused"]
        wrong = [f"{where}/{name}: missing" for name in expected if name not in found]
        wrong += [f"{where}/{name}: not expected" for name in found if name not in expected]
        for name in expected:
            if name in found:
                wrong += differences(expected[name], found[name], f"{where}/{name}")
        return wrong
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [text for number, (one, other) in pairs for text in differences(one, other, f"{where}/{number}")]
    same = type(expected) is type(found) and expected == found
    return [] if same else [f"{where}: {found!r:.120} instead of {expected!r:.120}"]
