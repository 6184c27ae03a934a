"""The promises of `import ckptstore`: a curated list of names, found lazily, and no import before it is needed."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import ckptstore

EXPECTED = [
    "AgentBusyError",
    "AgentError",
    "AgentLostError",
    "AgentSilentError",
    "Backend",
    "Bisected",
    "BranchWarning",
    "ChainLink",
    "ClassBytes",
    "Share",
    "Shard",
    "Shards",
    "StoreStats",
    "FoundRuns",
    "RunInfo",
    "RunStatus",
    "MappedTensors",
    "StoredFile",
    "find_runs",
    "flat_state",
    "CheckpointDescription",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CkptError",
    "Collected",
    "CompactMove",
    "CompactOptions",
    "CompactPass",
    "CompactReport",
    "CommitUnknownError",
    "Copied",
    "CorruptLogError",
    "CorruptSegmentError",
    "CorruptionError",
    "Damage",
    "DamagedLogWarning",
    "DeltaOptions",
    "DeterminismWarning",
    "DiffOptions",
    "DivergedReplicasError",
    "DivergedReplicasWarning",
    "Explanation",
    "ExportResult",
    "FailedRankError",
    "FallbackWarning",
    "FencedError",
    "FlatState",
    "Followed",
    "RequestCosts",
    "Spent",
    "Follower",
    "Foreign",
    "ForeignObjectError",
    "FormatError",
    "FormatFile",
    "FreshStartWarning",
    "Group",
    "HiddenTensorsWarning",
    "Holder",
    "ImportedFile",
    "IncompatibleFormatError",
    "KernelError",
    "KernelWarning",
    "KeyExistsError",
    "KeyNotFoundError",
    "Lag",
    "LayerCopy",
    "LayeredSave",
    "Lineage",
    "LossyWarning",
    "LostStepsWarning",
    "Mailbox",
    "MailboxError",
    "Merged",
    "MissingDependencyError",
    "MissingRankError",
    "NotFoundError",
    "PendingSave",
    "Plan",
    "PlanStep",
    "Probe",
    "Progress",
    "Pruned",
    "Published",
    "Publisher",
    "RankError",
    "RankMismatchError",
    "RankOptions",
    "RankWriter",
    "ReadOnlyError",
    "Repaired",
    "RequestError",
    "RequestRefusedError",
    "RequestTimeoutError",
    "RestoreBound",
    "RestoreCost",
    "Retired",
    "SaveMetrics",
    "SegmentDoc",
    "SegmentEntry",
    "SideBySide",
    "Snapshot",
    "StateDifference",
    "StateMismatchError",
    "StepOrderError",
    "StorageError",
    "Store",
    "StoreNotFoundError",
    "StoreReplacedError",
    "Synced",
    "TensorDescription",
    "TensorDifference",
    "TensorEntry",
    "TensorNotFoundError",
    "TensorStatistics",
    "TermInfo",
    "UnexplainedStepWarning",
    "RemoteLostError",
    "RemoteWarning",
    "UnmadeStateError",
    "UnpinnedWarning",
    "Unread",
    "UnsupportedBackendError",
    "UnsupportedStateError",
    "Update",
    "UsageError",
    "VerificationReport",
    "View",
    "Writer",
    "WriterClosedError",
    "WriterError",
    "__version__",
    "load",
    "open",
    "register",
    "repair",
    "save",
    "verify",
]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_is_the_list() -> None:
    assert sorted(ckptstore.__all__) == sorted(EXPECTED)
    assert dir(ckptstore) == sorted(EXPECTED)
    for name in EXPECTED:
        assert getattr(ckptstore, name) is not None, name


def test_type_checkers_read_the_same_list() -> None:
    tree = ast.parse(Path(ckptstore.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(homes) == sorted(set(EXPECTED) - {"__version__"})
    for name, home in homes.items():
        module, _, attribute = home.rpartition(".")
        assert getattr(ckptstore, name) is getattr(importlib.import_module(module), attribute), name


def test_star_import_gives_it_all() -> None:
    run(f"from ckptstore import *\nfor name in {[n for n in EXPECTED if n != '__version__']!r}: eval(name)")


def test_unknown_names_say_so() -> None:
    out = run("import ckptstore\ntry: ckptstore.opne\nexcept AttributeError as error: print(error)")
    assert out.strip() == "module 'ckptstore' has no attribute 'opne'"


def test_importing_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'torch', 'fsspec', 'zstandard', 'safetensors', 'rich', 'click'} & set(sys.modules)"
    assert run(f"import sys, ckptstore; print({heavy})").strip() == "set()"
    # opening and listing a store needs no numpy either: the command must start fast on any machine
    assert "numpy" not in run(
        f"import sys, ckptstore; ckptstore.open('memory://x', create=True).checkpoints(); print({heavy})"
    )


def test_nothing_of_the_engine_imports_torch() -> None:
    code = "import sys, pkgutil, importlib, ckptstore, ckptstore.formats, ckptstore.cli\n"
    code += "for package in (ckptstore, ckptstore.formats, ckptstore.cli):\n"
    code += "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
    rooms = ("ckptstore.frameworks.torch_", "ckptstore.integrations", "ckptstore.training")
    code += f"        if not module.name.startswith({rooms}):\n"
    code += "            importlib.import_module(module.name)\n"
    code += "print('torch' in sys.modules)"
    assert run(code).strip() == "False"


def test_the_packages_list_is_the_tree() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    config = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {"ckptstore": "ckptstore", "ckptstore.formats": "formats", "ckptstore.cli": "cli"}
    assert config["package-dir"] == rooms
    found = {
        ".".join([package, *init.parent.relative_to(root / folder).parts])
        for package, folder in rooms.items()
        for init in (root / folder).rglob("__init__.py")
    }
    assert set(config["packages"]) == found


def imported_modules() -> set[str]:
    """The installed package's imports of other packages, at the top of a module or on demand."""
    root = Path(__file__).parents[2]
    found: set[str] = set()
    for folder in ("ckptstore", "cli", "formats"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                    found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"ckptstore", "_typeshed"}


def test_declared_dependencies_are_those_that_are_imported() -> None:
    import re
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=\[]", one)[0] for one in requirements}

    extras = project["optional-dependencies"]
    optional = names([*extras["torch"], *extras["plot"], *extras["s3"]])
    optional |= names([*extras["lightning"], *extras["hf"], *extras["accelerate"]])
    optional.add("boto3")  # reads profile files for users that have it
    optional.add("torchtitan")  # its users have it
    assert imported_modules() - optional == names(project["dependencies"])
    assert optional <= imported_modules()


def public_methods() -> list[tuple[str, types.FunctionType]]:
    """Every function that a user of a `Store`, a `Writer` or a `PendingSave` may call, properties among them."""
    found: list[tuple[str, types.FunctionType]] = [("open", ckptstore.open), ("verify", ckptstore.verify)]
    for kind in (ckptstore.Store, ckptstore.Writer, ckptstore.PendingSave):
        members = {name: member for one in reversed(kind.__mro__) for name, member in vars(one).items()}
        for name, member in members.items():
            function = member.fget if isinstance(member, property) else member
            if not name.startswith("_") and isinstance(function, types.FunctionType):
                found.append((f"{kind.__name__}.{name}", function))
    return found


def ours(annotation: object) -> set[type]:
    """The types of this project in an annotation."""
    import typing

    found = {one for argument in typing.get_args(annotation) for one in ours(argument)}
    if isinstance(annotation, list | tuple):  # the arguments of a Callable
        found |= {one for argument in annotation for one in ours(argument)}
    if isinstance(annotation, type) and annotation.__module__.startswith("ckptstore."):
        found.add(annotation)
    return found


def test_every_type_that_a_public_method_takes_or_returns_is_public() -> None:
    """A user can write it down: annotate with it, test for it, read its attributes' documentation."""
    import typing

    names = everything_named()
    seen: set[type] = set()
    for where, function in public_methods():
        hints = typing.get_type_hints(function, names | inspect.unwrap(function).__globals__)
        assert "return" in hints, where
        for kind in (one for hint in hints.values() for one in ours(hint)):
            assert getattr(ckptstore, kind.__name__, None) is kind, f"{where}: {kind} is not in ckptstore"
            seen.add(kind)
    assert {ckptstore.Store, ckptstore.Writer, ckptstore.CheckpointInfo, ckptstore.Merged, ckptstore.Update} <= seen
    assert len(public_methods()) > 30


def test_every_public_function_is_documented() -> None:
    for where, function in public_methods():
        assert function.__doc__, where


def everything_named() -> dict[str, object]:
    """Names of annotations that are imported for type checkers only."""
    import numpy.typing as npt

    names: dict[str, object] = {"npt": npt, "Path": Path}
    home = Path(ckptstore.__file__).parent
    callers_side = [home / "write" / f"{name}.py" for name in ("writer", "save_calls", "writer_runtime")]
    for file in (*sorted((home / "store").glob("*.py")), *callers_side):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckptstore"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    names[alias.asname or alias.name] = getattr(module, alias.name, None)
    return names


def test_errors_say_where_they_live() -> None:
    """A traceback names ckptstore.errors.X, which can be imported."""
    from ckptstore import errors

    for name, kind in vars(errors).items():
        if isinstance(kind, type):
            assert (kind.__module__, kind.__qualname__) == ("ckptstore.errors", name)
            assert getattr(ckptstore, name) is kind
    out = run(
        "import ckptstore, traceback\n"
        "try: ckptstore.open('memory://none', create=False)\n"
        "except ckptstore.StoreNotFoundError as error: print(traceback.format_exception_only(error)[0])"
    )
    assert out.startswith("ckptstore.errors.StoreNotFoundError: ")
