"""Ordinary mutants: small slips that anybody could make, anywhere; beside the checks of `sites`, that are left out.

===========  ====================================================================================================
comparison   ``<`` is ``<=``, ``==`` is ``!=``, ``in`` is ``not in``, ``is`` is ``is not``, and back
constant     a number is one more, True is False
negation     a condition says the opposite, ``not`` and a minus are left out
removed      a statement is left out: a call, a change of an object, a ``return`` or ``raise`` that leaves early
swapped      two neighbouring arguments of a call change places
logic        ``and`` is ``or``, ``any`` is ``all``, and back
===========  ====================================================================================================

No site: annotations, decorators, assertions, ``__all__``, and what only makes the text of an error or a warning.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tools.mutants.sites import Site, numbered

__all__ = ["KINDS", "ROOMS", "find_ordinary", "ordinary_in"]

KINDS: Final = ("comparison", "constant", "negation", "removed", "swapped", "logic")
ROOMS: Final = ("formats", "ckptstore", "cli")

_OTHER: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_SIGNS: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
_TALKS: Final = frozenset({"warn", "remark", "TypeVar", "crash_point", "refuse"})
"""Calls whose arguments are for people or for tests."""
_SYMMETRIC: Final = frozenset({"min", "max", "isinstance", "maximum", "minimum", "array_equal"})
"""Calls whose arguments can change places, or fail at once if they do."""
_UNLIKE: Final = (ast.Starred, ast.Constant, ast.JoinedStr, ast.Lambda)
"""Arguments that have the wrong type in another's place: swapping them proves nothing."""
_TRUSTED: Final = frozenset({"strict", "stacklevel", "repr", "compare"})
"""Keywords that assert, or change only what people see."""
_SHOWN: Final = 160
"""Characters of a site's `source`."""


def find_ordinary(root: Path, paths: Iterable[str]) -> list[Site]:
    """Every ordinary mutant of the files `paths`, relative to `root`."""
    return [site for path in paths for site in ordinary_in(path, (root / path).read_bytes())]


def ordinary_in(path: str, source: bytes) -> list[Site]:
    """The ordinary mutants of one file; their `source` describes the change."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return numbered(finder.found)


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.scopes: list[str] = []
        self.found: list[Site] = []

    # -- visited code

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # ast's name
        self.scopes.append(node.name)
        if node.name != "__repr__":
            self._all([*node.args.defaults, *(default for default in node.args.kw_defaults if default)])
            self._body(node.body, last=True)
        self.scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append(node.name)
        self._all(node.body)
        self.scopes.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._changes(node, [node.target])
            self._all([node.target, node.value])

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion is already a test."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people."""

    def visit_match_case(self, node: ast.match_case) -> None:
        self._body(node.body)  # patterns are not expressions

    def visit_Raise(self, node: ast.Raise) -> None:
        """The class of the error counts; its words are for people."""

    def visit_Assign(self, node: ast.Assign) -> None:
        if ast.unparse(node.targets[0]) != "__all__":
            self._changes(node, node.targets)
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "removed", "pass", f"{ast.unparse(node)} => pass")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node, "removed", "pass", f"{ast.unparse(node)} => pass")
        self.generic_visit(node)

    def _changes(self, node: ast.Assign | ast.AnnAssign, targets: Sequence[ast.expr]) -> None:
        # A name that is never bound fails at once, and proves nothing.
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            self._add(node, "removed", "pass", f"{ast.unparse(node)} => pass")

    # -- statements with a body

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.visit(node.test)
            self._body(node.body)
            self._body(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.visit(node.test)
        self._body(node.body)
        self._body(node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._body(node.body)
        self._body(node.orelse)

    def visit_With(self, node: ast.With) -> None:
        self._all(item.context_expr for item in node.items)
        self._body(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        for body in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
            self._body(body)

    def _body(self, body: Sequence[ast.stmt], *, last: bool = False) -> None:
        """Statements, and the change if one that leaves early is removed; a function's last one gives its result."""
        for number, statement in enumerate(body):
            ends = last and number == len(body) - 1
            if isinstance(statement, ast.Raise | ast.Continue | ast.Break | ast.Return) and not ends:
                self._add(statement, "removed", "pass", f"{ast.unparse(statement)} => pass")
            self.visit(statement)

    def _all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # -- expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        terms = [node.left, *node.comparators]
        for changed in range(len(node.ops)):
            text = f"({self._text(node.left)})"
            signs = [_SIGNS[type(sign)] for sign in node.ops]
            signs[changed] = _OTHER[type(node.ops[changed])]
            text += "".join(f" {sign} ({self._text(term)})" for sign, term in zip(signs, terms[1:], strict=True))
            shown = ast.unparse(node.left)
            shown += "".join(f" {sign} {ast.unparse(term)}" for sign, term in zip(signs, terms[1:], strict=True))
            self._add(node, "comparison", f"({text})", f"{ast.unparse(node)} => {shown}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._becomes(node, "constant", str(not node.value))
        elif isinstance(node.value, int | float):
            self._becomes(node, "constant", repr(node.value + 1))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._becomes(node, "negation", f"({self._text(node.operand)})", ast.unparse(node.operand))
        self.visit(node.operand)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        text = word.join(f"({self._text(value)})" for value in node.values)
        other = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        self._becomes(node, "logic", f"({text})", ast.unparse(other))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if called in _TALKS:
            return
        if called in ("any", "all") and isinstance(node.func, ast.Name):
            other = "all" if called == "any" else "any"
            self._add(node.func, "logic", other, f"{ast.unparse(node)} => {other}(...)")
        if called not in _SYMMETRIC:
            for first, second in zip(node.args, node.args[1:], strict=False):
                self._swap(node, first, second)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:  # ast's name
        if node.arg not in _TRUSTED:
            self.visit(node.value)

    def _swap(self, call: ast.Call, first: ast.expr, second: ast.expr) -> None:
        if isinstance(first, _UNLIKE) or isinstance(second, _UNLIKE) or ast.dump(first) == ast.dump(second):
            return
        begin, end = self._extent(call)
        (one, one_end), (two, two_end) = self._extent(first), self._extent(second)
        parts = (self.source[begin:one], self.source[two:two_end], self.source[one_end:two])
        text = b"".join([*parts, self.source[one:one_end], self.source[two_end:end]]).decode()
        pair = f"{ast.unparse(second)}, {ast.unparse(first)}"
        self._add(call, "swapped", text, f"{ast.unparse(call)} => {pair}")

    def _negate(self, test: ast.expr) -> None:
        plain = isinstance(test, ast.Constant) or (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))
        single = (
            isinstance(test, ast.Compare)
            and len(test.ops) == 1
            and isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn)
        )
        if not plain and not single:  # those are separate mutants
            self._becomes(test, "negation", f"(not ({self._text(test)}))", f"not ({ast.unparse(test)})")

    # -- sites

    def _becomes(self, node: ast.expr, kind: str, text: str, shown: str | None = None) -> None:
        self._add(node, kind, text, f"{ast.unparse(node)} => {shown or text}")

    def _add(self, node: ast.expr | ast.stmt, kind: str, text: str, source: str) -> None:
        begin, end = self._extent(node)
        where = ".".join(self.scopes) or "module"
        shown = " ".join(source.split())
        if len(shown) > _SHOWN:  # both ends tell mutants apart
            shown = f"{shown[: _SHOWN // 2 - 2]} .. {shown[-_SHOWN // 2 + 2 :]}"
        self.found.append(Site(self.path, where, kind, node.lineno, begin, end, text, shown))

    def _extent(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        # Columns of the syntax tree count UTF-8 bytes.
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        begin, end = self._extent(node)
        return self.source[begin:end].decode()
