"""The engine's structure keeps its limits, and the report on it (`tools.structure`) measures correctly."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

import ckptstore
from tools.structure import Function, Tree, main, modules_page, read_tree

ROOT = Path(__file__).parent.parent
PARAMETERS, LINES = 8, 60
TORCH_ROOMS = ("ckptstore.frameworks", "ckptstore.integrations", "ckptstore.training")


@cache
def tree() -> Tree:
    return read_tree(ROOT)


def public() -> set[str]:
    """Dotted names of the functions that users call: exported functions, and methods of exported classes."""
    values = [value for name in ckptstore.__all__ if callable(value := getattr(ckptstore, name))]
    parts = {one for value in values if isinstance(value, type) for one in value.__mro__}
    exported = {f"{one.__module__}.{one.__name__}" for one in (*values, *parts) if hasattr(one, "__name__")}
    names = {function.name for function in tree().functions()}
    owned = {
        name for name in names if name.rpartition(".")[0] in exported and not name.rpartition(".")[2].startswith("_")
    }
    return (names & exported) | owned


def counted(function: Function, users: set[str]) -> int:
    """The number of parameters that count: options of a command and keyword-only options for users do not."""
    if function.click:
        return 0
    return function.parameters - (function.options if function.name in users else 0)


def _listed(found: dict[str, int]) -> str:
    """The functions that exceed a limit, the worst first."""
    return "\n" + "\n".join(f"{number:4} {name}" for name, number in sorted(found.items(), key=lambda one: -one[1]))


def test_no_list_of_parameters_is_long() -> None:
    users = public()
    # Otherwise the rule below would exempt nothing.
    assert "ckptstore.store.restore_methods.RestoreMethods.load" in users
    assert "ckptstore.store.open_store.verify" in users
    found = {one.name: number for one in tree().functions() if (number := counted(one, users)) > PARAMETERS}
    assert not found, _listed(found)


def test_no_function_is_long() -> None:
    found = {one.name: one.lines for one in tree().functions() if one.lines > LINES}
    assert not found, _listed(found)


def test_torch_is_imported_in_its_rooms_alone() -> None:
    importers = {
        module.name: module.room
        for module in tree().modules.values()
        if any(name.split(".")[0] == "torch" for name in module.imports)
    }
    assert "ckptstore.frameworks.torch_digest" in importers
    assert [name for name, room in importers.items() if not room.startswith(TORCH_ROOMS)] == []


def test_every_room_says_in_three_lines_what_is_in_it_and_what_it_imports() -> None:
    rooms = {room.name for room in tree().rooms()} - {"ckptstore"}
    assert len(rooms) > 10
    said = {name: [line for line in tree().modules[name].docstring.splitlines() if line.strip()] for name in rooms}
    found = {name: len(lines) for name, lines in said.items() if not 1 <= len(lines) <= 3}
    assert not found, _listed(found)
    silent = sorted(name for name, lines in said.items() if not re.search(_IMPORTS, " ".join(lines)))
    assert silent == []


def test_the_page_of_modules_is_up_to_date() -> None:
    page = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
    assert page == modules_page(tree()), "`python -m tools.structure --modules docs/modules.md` writes the page"


def test_no_two_modules_have_one_name() -> None:
    """Exempt are commands, which have the names that users type, and packages."""
    homes: dict[str, list[str]] = {}
    for name in tree().modules.keys() - {room.name for room in tree().rooms()}:
        if not name.startswith("ckptstore.cli.commands."):
            homes.setdefault(name.rpartition(".")[2], []).append(name)
    twice = {name: sorted(found) for name, found in homes.items() if len(found) > 1}
    assert not twice, f"rename one of these modules: {twice}"


def test_no_two_classes_have_one_name() -> None:
    """Exempt are private classes, nested ones too, which no other module imports."""
    homes: dict[str, list[str]] = {}
    for module in tree().modules.values():
        for _, dotted in module.classes:
            name = dotted.removeprefix(f"{module.name}.")
            if "." not in name and not name.startswith("_"):
                homes.setdefault(name, []).append(module.name)
    twice = {name: sorted(found) for name, found in homes.items() if len(found) > 1}
    assert not twice, f"rename one of these classes: {twice}"


_IMPORTS = r"(?i:\bimports?) .*"


def test_a_room_imports_only_what_it_declares() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in next(one for one in contracts if one["id"] == "rooms")["layers"]]
    floor = {room: number for number, rooms in enumerate(layers) for room in rooms}
    for room in floor:
        if (home := tree().modules[f"ckptstore.{room}"]).room == "ckptstore":
            continue  # a module of its own
        said = re.findall(_IMPORTS, home.docstring)[-1]
        allowed = {"", "_version", "errors", room} | floor.keys() & set(re.findall(r"`(?:ckptstore\.)?(\w+)`", said))
        if "below" in said:
            top = min(floor[name] for name in allowed & floor.keys() - {room})
            allowed |= {name for name in floor if floor[name] > top}
        used = {
            (other.name.split(".")[1:] or [""])[0]
            for one, other in tree().edges()
            if one.room == home.name or one.room.startswith(f"{home.name}.")
        }
        assert used <= allowed, f"{home.name} says {said!r} and imports {sorted(used - allowed)}"


# -- private names in tests

BORROWED = {
    "IPython": {"_repr_html_"},
    "os": {"_exit"},
    "sys": {"_current_frames", "_getframe"},
    "threading": {"_register_atexit"},
    "torch.Tensor": {"_version"},
    "torch.cuda": {"_sleep"},
    "torch.utils": {"_pytree"},
    "torch.optim.Optimizer": {
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
    },
    "torch.distributed": {"_split_tensor", "_StridedShard"},
    "namedtuple": {"_asdict", "_fields", "_replace"},
}
"""Private names of other projects that have no public form."""

_PRIVATE = r"_(?!_)\w+"
_OF_ANOTHER = re.compile(rf"(?<![\w.])(?!(?:self|cls)\.)[\w.()\[\]]*[\w)\]]\.({_PRIVATE})")


def private_uses(source: str) -> list[tuple[int, str]]:
    """Line and name of every private attribute of another object that a test reads, sets or imports.

    This includes scripts in multi-line strings. An attribute that a class defines or inherits does not count.
    """
    allowed = {name for names in BORROWED.values() for name in names}
    nodes = list(ast.walk(ast.parse(source)))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found: list[tuple[int, str]] = []
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name):
                found.append((node.lineno, name))
            case ast.ImportFrom(names=names):
                found += ((node.lineno, one.name) for one in names)
            case ast.Constant(value=str() as text) if "\n" in text and id(node) not in prose:
                lines = enumerate(text.splitlines(), node.lineno)
                found += ((line, name) for line, said in lines for name in _OF_ANOTHER.findall(said))
    return sorted((line, name) for line, name in found if re.fullmatch(_PRIVATE, name) and name not in allowed)


def test_private_names_are_used_in_the_inside_modules_alone() -> None:
    """Each module states which private names it uses, and why no public name would do."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "inside.py" and path != Path(__file__)]
    assert len(tests) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in tests
        for line, name in private_uses(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


def test_private_names_are_found_wherever_they_hide() -> None:
    source = """
'''Prose: writer._lock
is not a use.'''
from ckptstore.log.log_reader import _LogRead, read
class Sink(Base):
    def write(self):
        self._inner._lock.acquire()
        super()._write()
        cls._made += 1
    def __eq__(self, other):
        return self.__dict__ == other.__dict__
writer._submit(gate.wait)
found = [one._held for one in makers()[0]._all]
os._exit(1)
NAME = "LocalBackend._write"
SCRIPT = '''
store.writer()._backend.open_sink = self._x
os._exit(store.url)
'''
made = f'''
{name}
bad._submit(1)
'''
"""
    names = [name for _, name in private_uses(source)]
    assert names == ["_LogRead", "_lock", "_submit", "_all", "_held", "_backend", "_submit"]


# -- the report

SOURCES = {
    "pyproject.toml": """
        [tool.setuptools]
        packages = ["ckptstore", "ckptstore.cli", "ckptstore.log"]
        [tool.setuptools.package-dir]
        "ckptstore" = "ckptstore"
        "ckptstore.cli" = "cli"
        """,
    "ckptstore/__init__.py": '"""The face."""\n',
    "ckptstore/log/__init__.py": '"""The log.\n\nImports nothing.\n"""\n',
    "ckptstore/log/term.py": """
        import torch.cuda

        class Term:
            def open(self, a, /, b, *rest, c, **more):
                def inner(x):
                    return x

                return inner

            @staticmethod
            def of(a, b):
                pass

        class Named(typing.Protocol[T]):
            'Not counted as a statement.'
            name: str
        """,
    "cli/__init__.py": "",
    "cli/log.py": """
        import click
        from ckptstore import log
        from ckptstore.cli.arguments import command as make_command
        from ckptstore.log.term import Term

        @make_command("log")
        def show(a, b, c):
            from ckptstore.log import term

        @click.command()
        def other(a, b, c, d): ...
        """,
}


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(r"(?m)^ {8}", "", text))
    return tmp_path


def test_functions_are_measured_with_everything_in_them(made_up: Path) -> None:
    found = {one.name: one for one in read_tree(made_up).functions()}
    assert found["ckptstore.log.term.Term.open"] == Function("ckptstore.log.term.Term.open", 5, 5, 1, False)
    assert found["ckptstore.log.term.Term.open.inner"] == Function("ckptstore.log.term.Term.open.inner", 2, 1, 0, False)
    assert found["ckptstore.log.term.Term.of"].parameters == 2
    assert found["ckptstore.cli.log.show"].click
    assert found["ckptstore.cli.log.other"].click


def test_imports_are_counted_once_for_a_pair_of_modules(made_up: Path) -> None:
    read = read_tree(made_up)
    assert [(one.name, other.name) for one, other in read.edges()] == [
        ("ckptstore.cli.log", "ckptstore.log"),
        ("ckptstore.cli.log", "ckptstore.log.term"),
    ]
    assert "torch.cuda" in read.modules["ckptstore.log.term"].imports


def test_the_report_as_text_and_as_json(made_up: Path) -> None:
    told = CliRunner().invoke(main, [str(made_up), "--json"], catch_exceptions=False)
    rooms = {room["name"]: room for room in json.loads(told.output)["rooms"]}
    assert (rooms["ckptstore.log"]["fan_in"], rooms["ckptstore.log"]["rooms_in"]) == (2, 1)
    assert (rooms["ckptstore.cli"]["fan_out"], rooms["ckptstore.cli"]["rooms_out"]) == (2, 1)
    assert rooms["ckptstore.log"]["largest"] == [10, "ckptstore.log.term.Term"]
    assert rooms["ckptstore.log"]["widest"] == [5, "ckptstore.log.term.Term.open"]
    assert [rooms["ckptstore.log"][name] for name in ("classes", "protocols")] == [2, 1]
    assert rooms["ckptstore.cli"]["statements"] == 8
    assert rooms["ckptstore.cli"]["widest"] == [0, ""]  # functions that click calls have options as parameters
    text = CliRunner().invoke(main, [str(made_up)], catch_exceptions=False).output
    assert "10 term.Term" in text
    assert "5 modules in 3 rooms" in text


def test_threads_pools_and_timers_begin_in_one_room() -> None:
    begins = re.compile(r"\b(threading\.(Thread|Timer)|ThreadPoolExecutor|ProcessPoolExecutor|multiprocessing\.\w+)\(")
    sources = [path for room in ("ckptstore", "cli", "formats") for path in (ROOT / room).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in sources if begins.search(path.read_text())}
    assert found == {f"ckptstore/host/{name}.py" for name in ("background_threads", "task_pool", "threads")}
