"""Finds the places where a check could be missing, in the syntax tree, so that moved and new code is covered, too.

A *site* is one check; its mutant is the program without it. The kinds of sites:

===========  ====================================================================================================
durability   a call of ``fsync``, ``fdatasync``, ``msync``, ``settle`` or a folder's ``sync`` as a statement: left out;
             so are the flushes and fences of persistent memory
checksum     a condition about hashes, a call of ``check_chunk`` and the like, bytes compared with what was read back
fence        a condition about terms, ended writers and slots that others own; facts on which ranks must agree
anchor       a condition about anchors, and about deletions that only they allow
pin          a reader's claim, its second READ, a collector's conclusions from pins
bounds       a condition that guards a ``FormatError`` or ``Corrupt...Error``, and the predicates of decoders
rule         a condition that guards a refusal of the retention rules; which save has space, how an epoch continues
kernel       comparisons of compiled kernels with numpy's, and their consequences
===========  ====================================================================================================

A condition is taken apart: of ``if a or b: raise`` each of ``a`` and ``b`` is a separate check, of ``0 <= x <= n`` each
comparison. The mutant evaluates the check and ignores the result, so that only the decision is missing. A refusal may
raise the result of a function: of ``raise self._bad(...)`` the class counts that ``_bad`` returns by its annotation.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["KINDS", "ROOMS", "Site", "find_sites", "numbered", "sites_in"]

KINDS: Final = ("durability", "checksum", "fence", "anchor", "pin", "bounds", "rule", "kernel")
ROOMS: Final = ("formats", "ckptstore")

_SYNCS: Final = frozenset({"fsync", "fdatasync", "_fsync", "msync", "settle", "sync", "_sync"})
_FENCING: Final = frozenset({"drain", "flush", "persist", "_drain", "_flush"})
"""The same in modules that write to persistent memory; elsewhere these words mean other things."""
_PERSISTENT: Final = ("ckptstore/backends/local_disk/pmem", "ckptstore/backends/local_disk/libpmem")
_CHECKING: Final = re.compile(r"_?(check|require|verify)_\w+|finish|_?finished")
_CHECKSUMS: Final = re.compile(r"check_(header|chunk|identity|decoded|digest)")
_PREDICATES: Final = {"intact": "checksum", "never_deleted": "anchor", "has_ended": "pin"}
_DAMAGE: Final = frozenset(
    {"FormatError", "CorruptSegmentError", "CorruptLogError", "CorruptionError", "IncompatibleFormatError"}
)
_FENCES: Final = frozenset(
    {
        "FencedError",
        "CommitUnknownError",
        "WriterClosedError",
        "_StaleError",
        "RemoteLostError",
        "StoreReplacedError",
        "TakenError",
        "RankMismatchError",
    }
)
_MAKERS: Final = {"wrong": "CorruptSegmentError", "lost": "RemoteLostError"}
"""Functions that other modules import -> the class of the error that they make."""
_KERNELS: Final = frozenset({"formats/kernel_choice.py"})
"""Functions that decide whether compiled code is run, and trusted."""
_DISTRUSTING: Final = frozenset({"distrust", "_compared"})
_ANSWERING: Final = {
    "ckptstore/agent/client/agent_link.py": "fence",  # whose requests an agent receives
    "ckptstore/agent/client/open_agent_writer.py": "fence",  # with which agents a trainer continues
    "ckptstore/backends/sharing.py": "rule",  # which save has space, and which waits
    "ckptstore/training/loaders/loader_contents.py": "rule",  # whether an epoch continues in the same samples
}
"""Modules that refuse by a result (False, None, a request that fails) -> the kind of their checks."""
_REFUSALS: Final = frozenset({"UsageError", "StepOrderError", "CheckpointNotFoundError"})
_RULES: Final = frozenset({"formats/history/commit_checks.py"})
_PROTOCOL: Final = frozenset(
    {
        "ckptstore/host/processes.py",
        "ckptstore/log/partial_objects.py",
        "ckptstore/log/log_reader.py",
        "ckptstore/log/term.py",
        "ckptstore/log/fold_writer.py",
        "ckptstore/log/pins.py",
        "ckptstore/log/requests.py",
        "ckptstore/maintenance/garbage_collection.py",
    }
)
_ENCODES: Final = re.compile(r"_?(write|plan|encode)(_|$)")
_HASHES: Final = re.compile(r"hash|digest|checksum|xxh3|\.state\b|intact")
_ANCHORS: Final = re.compile(r"anchor|never_deleted|\bkept\b|\bpresent\b|\bexists\b")
_PINS: Final = re.compile(r"segments|pinned|\bbefore\b|_dead_after|_seen")
_TERMS: Final = re.compile(r"\bterm\b|\bnumber\b|dead|ended|closed|\bmine\b|identity")


@dataclass(frozen=True, slots=True)
class Site:
    """One check, and the text that replaces it in the mutant.

    Attributes:
        path: the file, relative to the tree's root.
        where: the function or class it is in.
        kind: one of `KINDS`, or of those of `ordinary`.
        line: its present line; for people, nothing depends on it.
        begin, end: the bytes of the file that `text` replaces.
        text: the mutant's text.
        source: the file's text, shortened.
        number: distinguishes equal checks of one function.
    """

    path: str
    where: str
    kind: str
    line: int
    begin: int
    end: int
    text: str
    source: str
    number: int = 1

    @property
    def name(self) -> str:
        """A name that changes elsewhere in the file do not affect: ``--only`` matches it."""
        return f"{self.path}::{self.where}::{self.kind}::{self.source}" + (f"#{self.number}" if self.number > 1 else "")

    @property
    def compiled(self) -> bool:
        """Whether it is in code that is compiled, which can be neither instrumented nor run before it is compiled."""
        return Path(self.path).stem.startswith("compiled") and self.path not in _KERNELS

    def mutate(self, source: bytes) -> bytes:
        """The file with this check missing."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def find_sites(root: Path, rooms: Iterable[str] = ROOMS) -> list[Site]:
    """Every site in the rooms' Python files below `root`, by file and place."""
    found: list[Site] = []
    for room in rooms:
        for path in sorted((root / room).rglob("*.py")):
            found += sites_in(path.relative_to(root).as_posix(), path.read_bytes())
    return found


def sites_in(path: str, source: bytes) -> list[Site]:
    """The sites of one file.

    Args:
        path: relative to the tree's root; it decides which rules apply.
        source: the file's bytes.
    """
    return list(_sites_in(path, source))


@functools.cache
def _sites_in(path: str, source: bytes) -> tuple[Site, ...]:
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return tuple(numbered(finder.found))


def numbered(found: Iterable[Site]) -> list[Site]:
    """The sites of one file by their place, each mutant once, and with different names."""
    unique = {(site.begin, site.end, site.text): site for site in found}
    counts: dict[str, int] = {}
    named: list[Site] = []
    for site in sorted(unique.values(), key=lambda site: (site.begin, site.end)):
        counts[site.name] = number = counts.get(site.name, 0) + 1
        named.append(Site(**{name: getattr(site, name) for name in Site.__slots__ if name != "number"}, number=number))
    return named


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.protocol = path in _PROTOCOL
        self.kernels = path in _KERNELS
        self.decoder = path.startswith("formats/") and not self.kernels  # these read nothing of a store
        self.answering = _ANSWERING.get(path)
        self.makers = dict(_MAKERS)
        self.scopes: list[str] = []
        self.returns: list[str] = []
        self.found: list[Site] = []

    # -- the tree

    def visit_Module(self, node: ast.Module) -> None:
        for inside in ast.walk(node):
            if isinstance(inside, ast.FunctionDef) and isinstance(inside.returns, ast.Name):
                self.makers[inside.name] = inside.returns.id
        self.generic_visit(node)

    def _scoped(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.scopes.append(node.name)
        returns = node.returns if isinstance(node, ast.FunctionDef) else None
        self.returns.append(ast.unparse(returns) if returns is not None else "")
        self.generic_visit(node)
        self.scopes.pop()
        self.returns.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # ast's name
        self._scoped(node)
        if self.decoder or self.protocol:
            self._converse(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scoped(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            called = _called(node.value)
            durable = called in _SYNCS and not self.path.startswith("formats/optim/")  # `settle` there is about NaN
            if durable or (called in _FENCING and self.path.startswith(_PERSISTENT)):
                self._add(node, "durability", "pass")
            elif _CHECKING.fullmatch(called):
                self._add(node, "checksum" if _CHECKSUMS.fullmatch(called) else "bounds", "pass")
            elif self.path == "ckptstore/log/pins.py" and called in ("renew", "finalize"):
                self._add(node, "pin", "pass")
            elif self.kernels and called in _DISTRUSTING:
                self._add(node, "kernel", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = ast.unparse(node.targets[0])
        if self.protocol and isinstance(node.value, ast.Compare):
            self._atoms(node.value, True, "fence")
        elif self.path == "ckptstore/log/pins.py" and target == "view" and len(_arguments(node.value)) > 1:
            self._add(node, "pin", "pass")  # the second READ
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _called(call) == "Pin":
                self._add(call, "pin", f"contextlib.nullcontext({self._text(call)})")
            elif self.kernels and isinstance(call, ast.Call) and _called(call) == "doubted":
                self._add(call, "kernel", "contextlib.nullcontext()")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        kind = self._guarded(node.body)
        if kind is not None:
            self._atoms(node.test, False, kind)
        elif self.protocol and not all(map(_syncs, node.body)):  # a sync is a separate site
            # Without the check the good case is taken: the result, or the branch for valid input. Other consequences of
            # the check (leave, start over, repair) do not happen.
            objects = isinstance(node.body[-1], ast.Return) and self.returns[-1:] == ["str | None"]
            self._atoms(node.test, bool(node.orelse) or self._gives(node.body), "rule" if objects else None)
        self.generic_visit(node)

    def _gives(self, body: list[ast.stmt]) -> bool:
        """Whether a body ends with a result, and not by leaving early; the result of an ``_objection`` is a refusal."""
        if any(isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Yield) for statement in body):
            return True
        return isinstance(body[-1], ast.Return) and not _returns_nothing(body) and self.returns[-1] != "str | None"

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and self.returns and self.returns[-1] == "bool" and (self.decoder or self.protocol):
            asks = isinstance(node.value, ast.Call)  # the functions that it calls have their own sites
            self._atoms(node.value, True, "bounds" if self.decoder else None if asks else "rule")
        elif node.value is not None and self.kernels and self.scopes[-1:] == ["_same"]:
            # The results of other functions decide when to use numpy, which is right at any time.
            self._atoms(node.value, True, "kernel")
        elif node.value is not None and self.answering is not None and self.returns[-1:] == ["bool"]:
            self._atoms(node.value, True, self.answering)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        nothing = isinstance(node.orelse, ast.Constant) and node.orelse.value is None
        nothing_if = isinstance(node.body, ast.Constant) and node.body.value is None
        # An encoder's choices are not checks; nor is the question whether a caller passed a function.
        reads = self.decoder and nothing and not _ENCODES.match("".join(self.scopes[-1:]))
        if reads and not isinstance(node.test, ast.Name | ast.Attribute):
            self._atoms(node.test, True, "bounds")
        elif self.protocol:
            self._atoms(node.test, True, "rule" if self.returns[-1:] == ["str | None"] and nothing_if else None)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if self.protocol:
            for test in node.ifs:
                keeps = self.path == "ckptstore/maintenance/garbage_collection.py" and "pins." in ast.unparse(test)
                self._atoms(test, not keeps, "pin" if keeps else None)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = _called(node)
        if called in _PREDICATES:
            self._ignore(node, True, _PREDICATES[called])
        elif self.protocol and called == "all" and node.args and isinstance(node.args[0], ast.GeneratorExp):
            self._atoms(node, True, None)
        self.generic_visit(node)

    def _converse(self, node: ast.FunctionDef) -> None:
        """``if good: return value`` before a final ``return None``: each part of ``good`` is a check."""
        last = node.body[-1]
        if not (isinstance(last, ast.Return) and isinstance(last.value, ast.Constant) and last.value.value is None):
            return
        self.scopes.append(node.name)
        for statement in node.body[:-1]:
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return):
                nothing = _returns_nothing(statement.body)
                self._atoms(statement.test, not nothing, "bounds" if self.decoder else None)
        self.scopes.pop()

    # -- the guarded code

    def _guarded(self, body: list[ast.stmt]) -> str | None:
        """The kind of a check whose body ends in a refusal."""
        last = body[-1]
        if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and _called(last.value) == "refuse":
            return "bounds"
        no = isinstance(last, ast.Return) and last.value is not None and _returns_nothing(body)
        if self.kernels and (no or any(map(_distrusts, body))):
            return "kernel"
        if self.answering is not None and (no or any(map(_fails, body))):
            return self.answering
        if not isinstance(last, ast.Raise) or last.exc is None:
            return None
        error = _called(last.exc) if isinstance(last.exc, ast.Call) else ast.unparse(last.exc)
        error = self.makers.get(error, error)
        if error in _DAMAGE:
            return "bounds"
        if error in _FENCES or error in ("self.dead", "self.ended", "self._committer.ended"):
            return "fence"
        if self.protocol:
            return "rule"
        if self.path in _RULES and error in _REFUSALS:
            return "rule"
        return None

    # -- taking conditions apart

    def _atoms(self, test: ast.expr, outcome: bool, kind: str | None) -> None:
        """Sites for every part of `test` that alone decides that it is not `outcome`.

        Args:
            outcome: the value of the test if the check is missing.
            kind: of the sites; None: decided by the words of the part, no site if they decide nothing.
        """
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._atoms(test.operand, not outcome, kind)
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is outcome:
            for operand in test.values:
                self._atoms(operand, outcome, kind)
        elif isinstance(test, ast.Compare) and len(test.ops) > 1 and outcome:
            self._links(test, kind)
        elif (
            isinstance(test, ast.Call)
            and _called(test) == ("all" if outcome else "any")
            and test.args
            and isinstance(test.args[0], ast.GeneratorExp)
        ):
            self._atoms(test.args[0].elt, outcome, kind)
        elif not isinstance(test, ast.Constant):
            chosen = self._kind(test, kind)
            if chosen is not None:
                self._ignore(test, outcome, chosen)
            if isinstance(test, ast.BoolOp):  # and each part of a part: ``a or b`` in ``c and (a or b)``
                for operand in test.values:
                    if isinstance(operand, ast.BoolOp):
                        self._atoms(operand, outcome, kind)

    def _links(self, test: ast.Compare, kind: str | None) -> None:
        """``a <= b <= c`` without each of its comparisons."""
        chosen = self._kind(test, kind)
        if chosen is None:
            return
        terms = [test.left, *test.comparators]
        for missing in range(len(test.ops)):
            parts = [
                ast.unparse(ast.Compare(terms[place], [test.ops[place]], [terms[place + 1]]))
                for place in range(len(test.ops))
                if place != missing
            ]
            link = ast.unparse(ast.Compare(terms[missing], [test.ops[missing]], [terms[missing + 1]]))
            self._add(test, chosen, f"({' and '.join(parts)})", link)

    def _kind(self, test: ast.expr, kind: str | None) -> str | None:
        text = ast.unparse(test)
        if kind == "bounds" and _HASHES.search(text) and _compares(test):
            return "checksum"
        if kind is not None and not (kind == "rule" and self.protocol):
            return kind
        if self.path == "ckptstore/host/processes.py":
            return "pin"  # whether a claim's process has ended
        if self.path == "ckptstore/log/pins.py":
            return "pin" if _PINS.search(text) else kind
        if _ANCHORS.search(text):
            return "anchor"
        return "fence" if _TERMS.search(text) else kind

    def _ignore(self, test: ast.expr, outcome: bool, kind: str) -> None:
        text = self._text(test)
        self._add(test, kind, f"(({text}) or True)" if outcome else f"(({text}) and False)")

    def _add(self, node: ast.expr | ast.stmt, kind: str, text: str, source: str | None = None) -> None:
        begin, end = self._extent(node)
        shown = " ".join((source or self.source[begin:end].decode()).split())
        where = ".".join(self.scopes) or "module"
        self.found.append(Site(self.path, where, kind, node.lineno, begin, end, text, shown[:100]))

    def _extent(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        # Columns of the syntax tree count UTF-8 bytes.
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        begin, end = self._extent(node)
        return self.source[begin:end].decode()


def _called(call: ast.expr) -> str:
    """The last name of the called function; of ``_call("msync", ...)``, which calls it in libc, ``msync``."""
    function = call.func if isinstance(call, ast.Call) else call
    if isinstance(function, ast.Name) and function.id.startswith("_call") and _arguments(call):
        named = _arguments(call)[0]
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            return named.value
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _arguments(value: ast.expr) -> list[ast.expr]:
    return value.args if isinstance(value, ast.Call) else []


def _syncs(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and _called(statement.value) in _SYNCS


def _distrusts(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign | ast.Return) else None
    return value is not None and _called(value) in _DISTRUSTING


def _fails(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and _called(statement.value) == "set_exception"


def _returns_nothing(body: list[ast.stmt]) -> bool:
    last = body[-1]
    if not isinstance(last, ast.Return):
        return False
    return last.value is None or (isinstance(last.value, ast.Constant) and last.value.value in (None, False))


def _compares(test: ast.expr) -> bool:
    nodes = ast.walk(test)
    return any(isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq) for node in nodes)
