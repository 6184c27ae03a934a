"""Which tests concern a module: those of its own name first, then these, quick ones first."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tools.mutants.sites import Site

__all__ = ["tests_of"]

_FORMATS: Final = "tests/formats/test_"
_ENGINE: Final = "tests/[!c]*/test_"  # of every room but the command's, which has a `log`, too
_REGRESSIONS: Final = (f"{_FORMATS}limits.py", f"{_FORMATS}regressions.py")
_CRASHES: Final = tuple(
    f"tests/tools/test_{name}.py" for name in ("crash_toolbox", "crash_pmem", "powercut", "crash_store")
)
_LOG: Final = tuple(
    f"{_ENGINE}{name}.py" for name in ("log", "lost_slots", "replaced", "folding", "pins", "requests", "log_machine")
)
_STORE: Final = tuple(
    f"{_ENGINE}{name}.py" for name in ("hostile_segments", "store", "deltas*", "diff*", "inspection", "damage")
)

CONCERNED: Final[Mapping[str, Sequence[str]]] = {
    "formats/*compiled*.py": (
        f"{_FORMATS}codecs_exceptions_hostile.py",
        f"{_FORMATS}codecs_kernels.py",
        f"{_FORMATS}optim_compiled.py",
    ),
    "formats/optim/*": (f"{_FORMATS}optim_hostile.py", f"{_FORMATS}optim.py", f"{_FORMATS}optim_arithmetic.py"),
    "formats/steps.py": (f"{_ENGINE}diffs.py", f"{_ENGINE}diff_*.py"),
    "formats/codecs/sums.py": (f"{_ENGINE}parallel_chain.py",),
    "formats/codecs/*": (f"{_FORMATS}codecs_params.py", f"{_FORMATS}codecs_hostile.py", f"{_FORMATS}codecs*.py"),
    "formats/jsontext.py": (f"{_FORMATS}jsontext.py", f"{_FORMATS}state.py"),
    "formats/segment*.py": (f"{_FORMATS}segment_hostile.py", f"{_FORMATS}segment.py"),
    "formats/layout.py": (f"{_FORMATS}layout.py", f"{_FORMATS}segment_hostile.py", f"{_FORMATS}segment.py"),
    "formats/records.py": (f"{_FORMATS}texts_hostile.py", f"{_FORMATS}records.py"),
    "formats/tree.py": (f"{_FORMATS}state.py",),
    "formats/values.py": (f"{_FORMATS}state.py",),
    "formats/sources.py": (f"{_FORMATS}sources.py", f"{_FORMATS}state.py"),
    "formats/names.py": (f"{_FORMATS}names.py", f"{_FORMATS}state.py"),
    "formats/members.py": (f"{_FORMATS}texts_hostile.py", f"{_FORMATS}records.py", f"{_FORMATS}segment_hostile.py"),
    "formats/fold*.py": (
        f"{_FORMATS}folds_hostile.py",
        f"{_FORMATS}bounds.py",
        f"{_FORMATS}catalog.py",
        f"{_FORMATS}tables.py",
    ),
    "formats/columns.py": (f"{_FORMATS}tables.py", f"{_FORMATS}catalog.py"),
    "formats/retention.py": (f"{_FORMATS}catalog.py", f"{_FORMATS}records.py"),
    "formats/*.py": (f"{_FORMATS}records.py", f"{_FORMATS}catalog.py", f"{_FORMATS}layout.py", f"{_FORMATS}dtypes.py"),
    "ckptstore/backends/*": (
        *(f"{_ENGINE}{tests}.py" for tests in ("recycling", "space", "local_backend", "backends")),
        *_CRASHES,
    ),
    "ckptstore/exchange/weight_files.py": (f"{_ENGINE}weight_files.py", f"{_ENGINE}importing.py"),
    "ckptstore/exchange/safetensors_files.py": (f"{_ENGINE}weight_files.py",),
    "ckptstore/exchange/checkpoint_folders.py": (f"{_ENGINE}checkpoint_folders.py",),
    "ckptstore/exchange/exporting.py": (f"{_ENGINE}exporting.py",),
    "ckptstore/exchange/atomic_files.py": (f"{_ENGINE}exporting.py",),
    "ckptstore/host/sigterm.py": (f"{_ENGINE}diffs_review.py", f"{_ENGINE}diff_kills.py"),
    "ckptstore/frameworks/torch_files.py": (f"{_ENGINE}weight_files.py", f"{_ENGINE}pickled_arrays.py"),
    "ckptstore/frameworks/*": (f"{_ENGINE}torch_*.py",),
    "ckptstore/training/*": (f"{_ENGINE}torch_*.py",),
    "ckptstore/maintenance/merge/*": tuple(
        f"{_ENGINE}{tests}.py" for tests in ("merging", "merging_diffs", "hostile_segments")
    ),
    "ckptstore/maintenance/verify/*": (
        *(f"{_ENGINE}{tests}.py" for tests in ("verification", "crafted_stores", "damage")),
        "tests/cli/test_verify.py",
    ),
    "ckptstore/maintenance/gc.py": (f"{_ENGINE}recycling.py", *_LOG),
    **{
        f"ckptstore/maintenance/{name}.py": (f"{_ENGINE}tags_and_retirement.py", "tests/cli/test_tag.py")
        for name in ("changing", "retiring", "tagging")
    },
    "ckptstore/log/*": _LOG,
    **{
        f"ckptstore/write/{name}.py": tuple(
            f"{_ENGINE}{tests}.py" for tests in ("writer", "rollback", "folding_beside", "store", "diffs", "deltas*")
        )
        for name in ("writer", "committer", "ledger", "opening")
    },
    **{
        f"ckptstore/{name}.py": tuple(f"{_ENGINE}{tests}.py" for tests in ("diff_damage", "hostile_segments", "diffs"))
        for name in ("restore/replay", "restore/link", "write/steps/*")
    },
    "ckptstore/restore/assembly.py": tuple(
        f"{_ENGINE}{tests}.py" for tests in ("crafted_stores", "diff_damage", "hostile_segments", "diffs")
    ),
    "ckptstore/restore/plan.py": (f"{_ENGINE}store.py", *_LOG),
    "ckptstore/segments/reading.py": tuple(
        f"{_ENGINE}{tests}.py" for tests in ("damage", "hostile_segments", "store", "diff*")
    ),
    "ckptstore/*": _STORE,
}
"""Pattern of a module -> patterns of test files; the first that fits counts. Those that do not exist are left out."""


def tests_of(site: Site, root: Path) -> list[str]:
    """Test files that may notice that this check is missing, relative to `root`, in the order to run them."""
    rules = next((tests for pattern, tests in CONCERNED.items() if fnmatch.fnmatch(site.path, pattern)), ())
    stem = Path(site.path).stem
    room = (
        "formats" if site.path.startswith("formats/") else Path(site.path).parts[1]
    )  # first: the command has a `log`, too
    own = [f"tests/{place}/test_{stem}{more}.py" for place in (room, "*") for more in ("_hostile", "", "_*")]
    crashes = _CRASHES if site.kind == "durability" else ()
    found: dict[str, None] = {}
    regressions = _REGRESSIONS if site.path.startswith("formats/") or "weight_files" in site.path else ()
    for pattern in (*own, *crashes, *rules, *regressions):
        found |= dict.fromkeys(path.relative_to(root).as_posix() for path in sorted(root.glob(pattern)))
    return list(found)
