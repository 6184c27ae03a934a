"""The conformance set notices slips: each is put into the page's reader, and a store shows it."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.conformance.__main__ import SET
from tools.conformance.comparing import differences
from tools.conformance.page.codecs import RefusedError

PAGE = Path(sys.modules[RefusedError.__module__].__file__ or "").parent
STORES: dict[str, Any] = json.loads(SET.read_text())["stores"]

SLIPS = (
    ("store", "if state_hash(self) != ", "if False and state_hash(self) != ", "hashes"),
    ("store", 'if xxhash.xxh3_64_hexdigest(found) != chunk["stored_hash"]', "if False", "hashes"),
    ("store", '.get("state") != edge["base"][2]', '.get("state") is None', "hashes"),
    ("store", 'if chunk["decoded_hash"] != found', 'if chunk["decoded_hash"] not in (None, found)', "hashes"),
    ("store", ' or told["base"] != edge["base"]', "", "identities"),
    ("store", ' or told["term"] != node[0]', "", "identities"),
    ("segments", 'require(not doc["incompat"])', "", "identities"),
    ("store", "if len(self.trees) != 1:", "if not self.trees:", "several"),
    ("segments", 'require(document.pop("uses", sorted(uses)) == sorted(uses))', 'document.pop("uses", None)', "uses"),
    ("segments", "    check_ranks(document,", "    len and (document,", "rank-members"),
    (
        "store",
        "                reason = error\n                continue",
        "                raise LostError from error",
        "ways",
    ),
    ("store", "for below in bases]", "for below in bases[:1]]", "ways"),
    ("store", 'lossy = all(edge["lossy"]', 'lossy = any(edge["lossy"]', "lossy"),
    ("store", "for edge in there or every)", "for edge in every)", "lossy"),
    ("steps", "np.where(np.isfinite(error) & (error != 0) & even, moved, total)", "total", "rounding"),
    ("steps", "np.where(x > v, x, v)", "np.where(x >= v, x, v)", "rounding"),
    ("codecs", "np.uint16(nan), found)", "found, found)", "nans"),
    ("store", 'separators=(",", ":"))', 'separators=(",", ":")).replace("\\\\u007f", "\\x7f")', "trees"),
    (
        "store",
        "sorted(state.parts.items())",
        'sorted(state.parts.items(), key=lambda i: i[0].encode("utf-16-be"))',
        "trees",
    ),
    ("log", 'catalog.last is not None and slot["previous"] != catalog.last', "False", "continues"),
    ("log", 'return catalog.nonces.get(slot["term"]) == slot["nonce"]', "return True", "continues"),
    ("log", 'for name in ("ckptstore", "previous", "term", "nonce")', "for name in ()", "manifest-repeats"),
    ("log", '(slot.get("run"), slot.get("seq")) == (run, seq)', 'slot.get("seq") == seq', "end-other-run"),
    ("log", '(slot.get("run"), slot.get("seq")) == (run, seq)', 'slot.get("run") == run', "end-other-seq"),
    ("log", "catalog.last = None  # behind", "# behind", "end-followed"),
    ("log", "any(run_of(path) in (run, None) for", "any(run for", "end-other-segment"),
    (
        "log",
        "if slot != above and not never_deleted(",
        "if slot != above and not len and never_deleted(",
        "gap-deleted",
    ),
    ("log", "if seq and not (seq % every and", "if False and not (seq % every and", "stray"),
    ("log", "if seq and not (seq % every and", "if seq and not (", "stray-anchor"),
    ("log", "catalog.highest[term] = max(catalog.highest[term], node[1])", "pass", "retired-above"),
    ("log", '*found.get("spent", [])', "0", "spent"),
    ("log", 'members.get("highest", 0)', "0", "highest"),
    ("log", "found[1] >= self.highest.get(self.term, 0)", "False", "before"),
    ("log", "if one == term and step <= below]", "if one == term]", "search"),
    ("log", ' or catalog.checkpoints[node]["state"] != parent[2]', "", "orphan-state"),
    ("log", "columns, ids + loose)", "columns, loose + ids)", "loose"),
    ("log", "catalog.tags.pop(name, None)", "pass", "tags"),
    ("log", "not TAG_NAME.fullmatch(name) or", "", "tags-damaged"),
    ("log", "not (node is None or is_node(node))", "False", "tags-damaged"),
    (
        "log",
        "any(slot > settled for slot in self.damage):\n            raise DamagedError\n        return node",
        "False: raise\n        return node",
        "tags-damaged",
    ),
    ("log", 'not isinstance(one.get("metadata", {}), dict)', "False", "metadata"),
    ("log", "**extra.get(str(row), {})", "", "metadata-folded"),
)


@pytest.mark.parametrize("row", range(len(SLIPS)), ids=[f"{store}-{row}" for row, (*_, store) in enumerate(SLIPS)])
def test_a_slip_is_noticed(row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong, name = SLIPS[row]
    package = f"slipped_{row}"
    shutil.copytree(PAGE, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tmp_path / package).glob("*.py"):
        text = path.read_text().replace("tools.conformance.page", package)
        if path.stem == module:
            assert text.count(right) == 1, right
            text = text.replace(right, wrong)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found: Any
    try:
        found = importlib.import_module(f"{package}.store").Store(SET.parent / name).answer()
    except Exception as error:
        if type(error).__name__ != "RefusedError":
            raise  # a slip that only crashes shows nothing
        found = {"refused": ""}
    finally:
        for one in [one for one in sys.modules if one.split(".")[0] == package]:
            del sys.modules[one]
    assert differences(STORES[name]["expected"], found) != []
