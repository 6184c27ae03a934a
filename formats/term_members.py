"""Members of OPENs and COMMITs that are kept with the entry of their term (`catalog.TermEntry.extra`), also in folds.

All are optional. Their types are checked wherever they are read: a wrong one makes the slot, or the fold, damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ckptstore.errors import FormatError
from ckptstore.formats.members import natural

__all__ = ["CLOSED", "HIGHEST", "LACKS", "REACHED", "REMOTE", "check_types"]

CLOSED: Final = "closed"
"""Of a COMMIT: the term has ended, and nothing that it was given is missing."""
HIGHEST: Final = "highest"
"""Of a COMMIT: the highest step that its term promised before, where that is above a step that the COMMIT adds. It
shows that a COMMIT in a lost or damaged slot held a higher step."""
LACKS: Final = "lacks"
"""Of a COMMIT in a second tier: the lowest step of the term that was left out there."""
REACHED: Final = "reached"
"""Of an OPEN: up to which step the newest term before it was promised there, retired since or not."""
REMOTE: Final = "remote"
"""Of an OPEN: the URL of the store's second tier. Each OPEN repeats that of the one before."""

_Check = Callable[[Any], bool]
_TYPES: Final[Mapping[str, tuple[_Check, str]]] = {
    CLOSED: (lambda value: type(value) is bool, "a boolean"),
    HIGHEST: (natural, "an integer in 0..2^53"),
    LACKS: (natural, "an integer in 0..2^53"),
    REACHED: (natural, "an integer in 0..2^53"),
    REMOTE: (lambda value: type(value) is str, "a string"),
}


def check_types(members: Mapping[str, Any], what: str) -> None:
    """Raise `FormatError`, naming `what`, if one of these has another type. Where they stand does not matter.

    Prevents: a slot or fold that one reader takes and another refuses, and a member that is passed over without a word.
    """
    for name in _TYPES.keys() & members.keys():
        has_type, wanted = _TYPES[name]
        if not has_type(members[name]):
            raise FormatError(f"{what}: member {name!r} is not {wanted}")
