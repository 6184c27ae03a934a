"""Steps as people read them: in warnings and errors that say which ones were lost."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["named_steps"]


def named_steps(steps: Iterable[int]) -> str:
    """``step 3``, ``steps 3 and 4``, ``steps 2 to 5, 8 and 11``: every one of them, ascending."""
    ascending = sorted(set(steps))
    runs: list[tuple[int, int]] = []
    for step in ascending:
        if runs and runs[-1][1] == step - 1:
            runs[-1] = runs[-1][0], step
        else:
            runs.append((step, step))
    texts: list[str] = []
    for first, last in runs:
        if last - first < 2:
            texts += [str(step) for step in range(first, last + 1)]
        else:
            texts.append(f"{first} to {last}")
    joined = " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
    return f"step {joined}" if len(ascending) == 1 else f"steps {joined}"
