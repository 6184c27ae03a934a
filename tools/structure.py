"""Measures the engine's structure: ``python -m tools.structure [PATH] [--json]``; its modules: ``--modules``.

For every room (a package of `pyproject.toml`): its modules, lines, statements, classes and protocols, the number of
imports into it and out of it, and its longest function, longest list of parameters and largest class. Sources are
parsed, never imported, so that any tree can be measured, also an old one. ``tests/test_structure.py`` holds the present
tree to limits.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

__all__ = ["Function", "Module", "Room", "Tree", "modules_page", "read_tree"]

ROOT = "ckptstore"


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method.

    Attributes:
        name: dotted, with its module: ``ckptstore.store.restore_methods.RestoreMethods.load``.
        lines: from ``def`` to its end, signature and docstring included.
        parameters: how many it takes; ``self`` and ``cls`` are not counted.
        options: how many of them are keyword-only.
        click: whether the command line calls it, with one parameter for every option.
    """

    name: str
    lines: int
    parameters: int
    options: int
    click: bool


@dataclass(frozen=True, slots=True)
class Module:
    """One source file.

    Attributes:
        name: dotted.
        room: the package that it lies in.
        imports: dotted names of everything that it imports, in functions as well: modules, and ``module.name`` where
            a name is imported from a module.
        classes: (lines, dotted name) of its classes.
        statements: how many it has; docstrings are not counted, nor an ``else``.
        protocols: how many of its classes are a ``typing.Protocol``.
    """

    name: str
    room: str
    lines: int
    statements: int
    protocols: int
    docstring: str
    imports: frozenset[str]
    functions: tuple[Function, ...]
    classes: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Room:
    """A package.

    Attributes:
        fan_in: imports of its modules by modules of other rooms (pairs of modules).
        fan_out: imports by its modules of modules of other rooms.
        rooms_in: how many other rooms import it.
        rooms_out: how many other rooms it imports.
        longest: (lines, name) of its longest function.
        widest: (parameters, name) of its longest list of parameters; what click calls is not looked at.
        largest: (lines, name) of its largest class.
    """

    name: str
    modules: int
    lines: int
    statements: int
    classes: int
    protocols: int
    fan_in: int
    fan_out: int
    rooms_in: int
    rooms_out: int
    longest: tuple[int, str]
    widest: tuple[int, str]
    largest: tuple[int, str]


@dataclass(frozen=True, slots=True)
class Tree:
    """All modules of the engine, by dotted name."""

    modules: dict[str, Module]

    def functions(self) -> Iterator[Function]:
        """Every function of every module."""
        for module in self.modules.values():
            yield from module.functions

    def edges(self) -> Iterator[tuple[Module, Module]]:
        """(importer, imported) of every pair of modules in which the first imports the second."""
        for module in self.modules.values():
            for name in sorted({found for found in map(self._module_of, module.imports) if found} - {module.name}):
                yield module, self.modules[name]

    def rooms(self) -> list[Room]:
        """Every room, in the order of their names."""
        between = [(one.room, other.room) for one, other in self.edges() if one.room != other.room]
        return [self._room(name, between) for name in sorted({module.room for module in self.modules.values()})]

    def _room(self, name: str, between: Sequence[tuple[str, str]]) -> Room:
        modules = [module for module in self.modules.values() if module.room == name]
        functions = [function for module in modules for function in module.functions]
        users = [one for one, other in between if other == name]
        used = [other for one, other in between if one == name]
        return Room(
            name=name,
            modules=len(modules),
            lines=sum(module.lines for module in modules),
            statements=sum(module.statements for module in modules),
            classes=sum(len(module.classes) for module in modules),
            protocols=sum(module.protocols for module in modules),
            fan_in=len(users),
            fan_out=len(used),
            rooms_in=len(set(users)),
            rooms_out=len(set(used)),
            longest=_greatest((function.lines, function.name) for function in functions),
            widest=_greatest((function.parameters, function.name) for function in functions if not function.click),
            largest=_greatest(found for module in modules for found in module.classes),
        )

    def _module_of(self, name: str) -> str | None:
        """The imported module: the name itself, or the module that has its last part as a name."""
        for candidate in (name, name.rpartition(".")[0]):
            if candidate in self.modules:
                return candidate
        return None


def read_tree(path: Path) -> Tree:
    """Read the sources below `path`, a root of the repository, by the packages that its `pyproject.toml` lists.

    Raises:
        OSError: there is no `pyproject.toml`, or a package that it lists has no folder.
        SyntaxError: a source is not Python.
    """
    told = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    modules: dict[str, Module] = {}
    for package in told["packages"]:
        for source in sorted(_folder(path, package, told["package-dir"]).iterdir()):
            if source.suffix == ".py":
                name = package if source.stem == "__init__" else f"{package}.{source.stem}"
                modules[name] = _read(source.read_text(encoding="utf-8"), name, package)
    return Tree(modules)


def _folder(path: Path, package: str, mapping: dict[str, str]) -> Path:
    """The folder of a package: that of the longest mapped package around it, plus the rest of its name."""
    around = package
    while around not in mapping:
        around = around.rpartition(".")[0]
    return path.joinpath(mapping[around], *package[len(around) :].split(".")[1:])


def _read(text: str, name: str, room: str) -> Module:
    parsed = ast.parse(text)
    statements = list(_statements(parsed))
    return Module(
        name=name,
        room=room,
        lines=len(text.splitlines()),
        statements=sum(not _is_docstring(node) for node in statements),
        protocols=sum(map(_is_protocol, statements)),
        docstring=ast.get_docstring(parsed) or "",
        imports=frozenset(_imports(statements)),
        functions=tuple(_functions(parsed, name, _command_names(statements))),
        classes=tuple(_classes(parsed, name)),
    )


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement below a node. No expression has one, and most nodes are in expressions: they are not visited."""
    for child in _children(node):
        yield child
        yield from _statements(child)


def _children(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a node's own blocks."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, ast.stmt):
                yield child
            else:  # an `except` or a `case`
                yield from _children(child)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_protocol(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        ast.unparse(base).partition("[")[0].rpartition(".")[2] == "Protocol" for base in node.bases
    )


def _imports(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _command_names(statements: Iterable[ast.stmt]) -> set[str]:
    """The names of decorators in a module that make a command."""
    names = {"click.command", "click.group"}
    for node in statements:
        if isinstance(node, ast.ImportFrom) and node.module == f"{ROOT}.cli.arguments":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "command"}
    return names


def _scopes(node: ast.AST, name: str) -> Iterator[tuple[ast.AST, str, bool]]:
    """Functions and classes below a node: (node, dotted name, whether it is in a class)."""
    for child in _children(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child, f"{name}.{child.name}", isinstance(node, ast.ClassDef)
            yield from _scopes(child, f"{name}.{child.name}")
        else:
            yield from _scopes(child, name)


def _functions(parsed: ast.Module, name: str, commands: set[str]) -> Iterator[Function]:
    for node, full, method in _scopes(parsed, name):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list}
        given = node.args
        positional = len(given.posonlyargs) + len(given.args) - (method and "staticmethod" not in decorators)
        options = len(given.kwonlyargs)
        collected = (given.vararg is not None) + (given.kwarg is not None)
        yield Function(full, _length(node), positional + options + collected, options, bool(decorators & commands))


def _classes(parsed: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    for node, full, _ in _scopes(parsed, name):
        if isinstance(node, ast.ClassDef):
            yield _length(node), full


def _length(node: ast.stmt) -> int:
    assert node.end_lineno is not None  # always present in trees of `ast.parse`
    return node.end_lineno - node.lineno + 1


def _greatest(found: Iterable[tuple[int, str]]) -> tuple[int, str]:
    return max(found, default=(0, ""))


def _short(measured: tuple[int, str], room: str) -> str:
    number, name = measured
    return f"{number} {name.removeprefix(room + '.')}" if name else ""


def _table(rooms: Sequence[Room]) -> Iterator[str]:
    head = (
        "room",
        "modules",
        "lines",
        "statements",
        "classes",
        "protocols",
        "in",
        "out",
        "longest function",
        "most parameters",
        "largest class",
    )
    rows = [
        (
            room.name,
            str(room.modules),
            str(room.lines),
            str(room.statements),
            str(room.classes),
            str(room.protocols),
            f"{room.fan_in} of {room.rooms_in}",
            f"{room.fan_out} of {room.rooms_out}",
            _short(room.longest, room.name),
            _short(room.widest, room.name),
            _short(room.largest, room.name),
        )
        for room in rooms
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _document(tree: Tree) -> dict[str, Any]:
    rooms = tree.rooms()
    return {
        "rooms": [asdict(room) for room in rooms],
        "modules": len(tree.modules),
        **{
            name: sum(getattr(room, name) for room in rooms) for name in ("lines", "statements", "classes", "protocols")
        },
        "imports": sum(1 for _ in tree.edges()),
        "imports_between_rooms": sum(room.fan_out for room in rooms),
    }


def modules_page(tree: Tree) -> str:
    """The page docs/modules.md: the modules of every room, each with the first line of its docstring."""
    parts = [_HEAD]
    for room in tree.rooms():
        if room.name == ROOT:
            continue
        about = tree.modules[room.name].docstring
        parts.append(f"## {room.name.removeprefix(ROOT + '.')}\n\n{about}\n")
        modules = [one for one in tree.modules.values() if one.room == room.name and one.name != room.name]
        rows = [f"| `{one.name.rpartition('.')[2]}` | {_cell(one.docstring)} |" for one in modules]
        parts.append("\n".join(["| module | what it does |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


_HEAD = """# Modules

What each module does. [Architecture](architecture.md) has the order of the rooms and a tensor's way through them.
`python -m tools.structure --modules docs/modules.md` writes this page from the first lines of the modules' docstrings.
"""


def _cell(docstring: str) -> str:
    """The first paragraph of a docstring as a cell of a table."""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("|", "\\|")


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False), default=".")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--modules", "page", type=click.Path(path_type=Path), help="Write the page of modules to this file.")
def main(path: Path, as_json: bool, page: Path | None) -> None:
    """Print the structure of the engine below PATH (a root of the repository)."""
    tree = read_tree(path)
    if page is not None:
        page.write_text(modules_page(tree), encoding="utf-8")
        return
    document = _document(tree)
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    click.echo("\n".join(_table(tree.rooms())))
    click.echo(
        f"\n{document['modules']} modules in {len(document['rooms'])} rooms, {document['lines']} lines,"
        f" {document['statements']} statements, {document['classes']} classes ({document['protocols']} protocols);"
        f" {document['imports']} imports between modules, {document['imports_between_rooms']} of them between rooms"
    )


if __name__ == "__main__":
    main()
