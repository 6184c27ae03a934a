"""The criterion of an unexplained step, and its warning."""

from __future__ import annotations

import warnings

from ckptstore import UnexplainedStepWarning
from ckptstore.write.steps.unexplained_bytes import Excess, Unexplained

NUMBERS = 100_000


def told(unexplained: Unexplained, step: int, base: int, *excess: Excess) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unexplained.look(step, base, excess)
    assert all(one.category is UnexplainedStepWarning for one in caught)
    return "".join(str(one.message) for one in caught)


def test_bytes_that_are_too_many() -> None:
    assert Excess.of("w", 1, 3, NUMBERS, 36 * NUMBERS // 8) is None
    assert Excess.of("w", 1, 3, NUMBERS, 36 * NUMBERS // 8 + 1) == Excess("w", 1, 36.00008)
    assert Excess.of("w", 1, 2, NUMBERS, 37 * NUMBERS // 8) == Excess("w", 1, 37.0)
    assert Excess.of("w", 1, 1, NUMBERS, 37 * NUMBERS // 8) is None  # without moments
    assert Excess.of("w", 1, 3, 100, 4096) is None  # too little for a warning
    assert Excess.of("w", 1, 3, 100, 4097) is not None
    assert Excess.of("w", 1, 3, NUMBERS, None) == Excess("w", 1, None)
    assert Excess.of("w", 1, 1, NUMBERS, None) is None


def test_each_of_two_reasons_is_reported_once() -> None:
    unexplained, excess = Unexplained(), Excess("w", 1, 40.0)
    assert told(unexplained, 2, 1) == ""
    changed = told(unexplained, 3, 2, excess)
    assert "step 3 takes" in changed
    assert "changed in another way than updates= says" in changed
    assert told(unexplained, 4, 3, excess) == ""
    assert told(unexplained, 6, 5) == ""
    skipped = told(unexplained, 6, 4, excess)
    assert "step 5 before it is not in the store" in skipped
    assert told(unexplained, 9, 6, excess) == told(unexplained, 10, 9, excess) == ""


def test_the_named_parameters() -> None:
    assert "for 'w' (40 bits a number, where 32 are enough): " in told(Unexplained(), 2, 1, Excess("w", 1, 40.0))
    more = "for 'w' (more bits than its tensors have, where 32 are enough): "
    assert more in told(Unexplained(), 2, 1, Excess("w", 1, None))
    together = "for one or more of 2 small parameters that are compressed together, 'w' the first (more bits than"
    assert together in told(Unexplained(), 2, 1, Excess("w", 2, None))
    several = told(Unexplained(), 2, 1, Excess("w", 3, 40.0), Excess("x", 1, 50.0), Excess("y", 1, 45.0))
    assert "for 'x' (50 bits a number, where 32 are enough) and 2 more payloads: " in several
    assert "steps 2 to 4 before it are not in the store" in told(Unexplained(), 5, 1, Excess("w", 1, 40.0))
