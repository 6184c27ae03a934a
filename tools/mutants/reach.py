"""Records which tests reach a check: only those can notice that it is missing.

Before the mutation the tests run once on a copy in which every site calls ``__reach__`` with its number. The call
returns a false value, so each condition keeps its value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tools.mutants.sites import Site

__all__ = ["instrumented"]


def instrumented(source: bytes, sites: Mapping[int, Site]) -> bytes:
    """A file in which each of its `sites` reports its number when it is reached."""
    extents: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, site in sites.items():
        extents[site.begin, site.end].append(number)
    inserts: list[tuple[int, int, int, str]] = []
    for (begin, end), numbers in extents.items():
        called = f"__reach__({', '.join(map(str, numbers))})"
        if sites[numbers[0]].text == "pass":
            inserts.append((begin, 1, -end, f"{called}; "))
        else:
            # If one condition contains another, the outer one opens first and closes last.
            inserts.append((begin, 1, -end, f"({called} or ("))
            inserts.append((end, 0, -begin, "))"))
    return _inserted(source, inserts)


def _inserted(source: bytes, inserts: Sequence[tuple[int, int, int, str]]) -> bytes:
    parts: list[bytes] = []
    done = 0
    for place, _, _, text in sorted(inserts):
        parts += [source[done:place], text.encode()]
        done = place
    return b"".join([*parts, source[done:]])
