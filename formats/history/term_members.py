"""Members of OPENs and COMMITs that are stored with the entry of their term (`catalog.TermEntry.extra`), also in folds.

All are optional. Their types are checked wherever they are read: a wrong type makes the slot, or the fold, damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ckptstore.errors import FormatError
from ckptstore.formats.history.members import natural

__all__ = ["CLOSED", "HIGHEST", "LACKS", "REACHED", "REMOTE", "check_types"]

CLOSED: Final = "closed"
"""In a COMMIT: the term has ended, and nothing that its writer was given is missing."""
HIGHEST: Final = "highest"
"""In a COMMIT: the highest step that its term promised earlier, if the COMMIT adds a step below that. It shows that a
COMMIT in a lost or damaged slot had a higher step."""
LACKS: Final = "lacks"
"""In a COMMIT of a second tier or copy: the lowest step of the term that was left out there."""
REACHED: Final = "reached"
"""In an OPEN: the highest step that the previous term promised there, even if it is retired by now."""
REMOTE: Final = "remote"
"""In an OPEN: the URL of the store's second tier. Each OPEN repeats the URL of the previous one."""

_Check = Callable[[Any], bool]
_TYPES: Final[Mapping[str, tuple[_Check, str]]] = {
    CLOSED: (lambda value: type(value) is bool, "a boolean"),
    HIGHEST: (natural, "an integer in 0..2^53"),
    LACKS: (natural, "an integer in 0..2^53"),
    REACHED: (natural, "an integer in 0..2^53"),
    REMOTE: (lambda value: type(value) is str, "a string"),
}


def check_types(members: Mapping[str, Any], what: str) -> None:
    """Raise `FormatError`, naming `what`, if one of these members has a wrong type, whatever record it is in.

    Prevents: a slot or fold that one reader accepts and another refuses, and a member that is silently ignored.
    """
    for name in _TYPES.keys() & members.keys():
        has_type, wanted = _TYPES[name]
        if not has_type(members[name]):
            raise FormatError(f"{what}: member {name!r} is not {wanted}")
