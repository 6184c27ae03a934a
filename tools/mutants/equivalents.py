"""Ordinary mutants that behave exactly like the original program, each with the reason.

They are named by module, function and text, not by line; a test checks that each still applies. Mutants in this list
are not drawn. A mutant that a test could notice does not belong here, however unlikely the input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tools.mutants.sites import Site

__all__ = ["EQUIVALENTS", "Equivalent", "without_equivalents"]


@dataclass(frozen=True, slots=True)
class Equivalent:
    """One equivalent mutant.

    Attributes:
        path: the module, relative to the tree's root.
        where: the function or class.
        source: the change, in the form of `Site.source`.
        reason: why no test can notice it.
    """

    path: str
    where: str
    source: str
    reason: str

    def is_that(self, site: Site) -> bool:
        """Whether this entry matches `site` (and others like it in the same function)."""
        return (self.path, self.where, self.source) == (site.path, site.where, site.source)


EQUIVALENTS: Final[tuple[Equivalent, ...]] = (
    Equivalent(
        "formats/jsontext.py",
        "_letters",
        "text.isascii() or not _RAW_SURROGATE.search(text) => text.isascii() and (not _RAW_SURROGATE.search(text))",
        "of a text in which no surrogate is found, none is replaced either",
    ),
    Equivalent(
        "ckptstore/backends/sharing.py",
        "Sharing.__init__",
        "0 => 1",
        "how many saves have ended is only compared with what it was before",
    ),
    Equivalent(
        "ckptstore/backends/sharing.py",
        "Sharing._end",
        "1 => 2",
        "how many saves have ended is only compared with what it was before",
    ),
    Equivalent(
        "ckptstore/host/buffers.py",
        "MappedRegion.__init__",
        "3 => 4",
        "NumPy reads no version of the array interface; the number is what the protocol says today",
    ),
    Equivalent(
        "ckptstore/log/fold_writer.py",
        "_hides_damage",
        "catalog.damage[-1] > opened.seq => catalog.damage[-1] >= opened.seq",
        "the slot of an OPEN that is known is not damaged, so the two numbers are never equal here",
    ),
    Equivalent(
        "ckptstore/log/fold_writer.py",
        "trim",
        "-1 => 1",
        "of the two newest valid folds, and there are exactly two here, the last is number 1",
    ),
    Equivalent(
        "ckptstore/log/fold_writer.py",
        "_newest_valid",
        "-1 => 1",
        "only keys of folds are passed; the other half of the expression is for the type checker",
    ),
    Equivalent(
        "ckptstore/log/term.py",
        "Term.commit",
        "manifest is not None and record.manifest is not None => manifest is not None or record.manifest is not None",
        "a record names a manifest exactly where one was made; both are asked for the type checker",
    ),
    Equivalent(
        "ckptstore/log/log_reader.py",
        "_LogRead.__init__",
        "-1 => 1",
        "set again by every run, before anything reads it",
    ),
    Equivalent(
        "formats/jsontext.py",
        "_check_depth",
        "text.count(b'[') + text.count(b'{') > max_depth => text.count(b'[') + text.count(b'{') >= max_depth",
        "a quick bound that decides whether the exact scan is made, which then refuses the same texts",
    ),
    Equivalent(
        "formats/history/record_text.py",
        "_checkpoint",
        "_joined(known | {'tensors': entry.tensors, 'bytes': entry.nbytes}, {}, entry.extra) => entry.extra, {}",
        "no features: what is joined is the same, in the same order",
    ),
    Equivalent(
        "formats/history/record_text.py",
        "_encoding",
        "_joined(known | {'lossy': entry.lossy, 'bytes': entry.bytes}, {}, entry.extra) => entry.extra, {}",
        "no features: what is joined is the same, in the same order",
    ),
    Equivalent(
        "formats/history/record_text.py",
        "encode_format",
        "_joined(known | {'features': features}, {}, file.extra) => {}, known | {'features': features}",
        "nothing and something, joined in either order",
    ),
)


def without_equivalents(sites: Iterable[Site], known: Iterable[Equivalent] = EQUIVALENTS) -> list[Site]:
    """Those of `sites` that a test should notice."""
    names = {(one.path, one.where, one.source) for one in known}
    return [site for site in sites if (site.path, site.where, site.source) not in names]
