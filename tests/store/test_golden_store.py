"""The golden stores: every step that an earlier version wrote is restored, bit for bit."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import pytest

import ckptstore
from ckptstore.formats import kernel_choice
from tests.kernel_forms import KINDS
from tools.golden import make_store

GOLDEN = Path(__file__).parents[1] / "golden"
STORES = sorted(path.stem for path in GOLDEN.glob("store-*.json"))


def test_there_is_one() -> None:
    assert STORES == ["store-1"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STORES)
def test_golden_stores_stay_readable(name: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: kernel_choice.use(None))
    kernel_choice.use(kind)
    store = ckptstore.open(shutil.copytree(GOLDEN / name, tmp_path / name))
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    assert {info.ref: info.state for info in store.checkpoints()} == {
        ref: one["state"] for ref, one in expected.items()
    }
    assert ckptstore.verify(store).ok
    for ref, one in expected.items():
        assert store.tree(ref) == one["tree"]
        assert store.checkpoint(ref).lossy == one["lossy"]
        for tensor, data in store.read_tensors(ref, one["tensors"]):
            assert hashlib.sha256(data).hexdigest() == one["tensors"][tensor], (ref, tensor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ckptstore.LossyWarning)
            store.load(ref)


def test_the_golden_store_has_everything() -> None:
    """So a reader that forgets how to read something fails."""
    store = ckptstore.open(GOLDEN / "store-1")
    codecs = set()
    for info in store.checkpoints():
        for tensor in store.tensors(info.ref).values():
            codecs.add(tensor.codec)
            if "encoding" in tensor.params:
                codecs.add(tensor.params["encoding"])
    assert codecs >= {"raw", "planes", "xor", "sub", "derive", "step", "predicted", "replayed", "sparse"}
    assert {"full", "delta", "gradient"} == {info.kind for info in store.checkpoints()}
    assert list((GOLDEN / "store-1" / "fold").iterdir())


def test_the_script_makes_such_a_store_the_same_each_time(tmp_path: Path) -> None:
    """Identities and times, too: making it again changes nothing else."""
    made = []
    for number in range(2):
        folder = tmp_path / str(number) / "store-1"
        make_store.main(folder)
        made.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
        assert json.loads(folder.with_suffix(".json").read_text()) == json.loads((GOLDEN / "store-1.json").read_text())
    assert made[0] == made[1]
    assert {path.name for path in (GOLDEN / "store-1").rglob("*.safetensors")} <= {path.name for path in made[0]}


def test_arithmetic_that_is_not_known_is_no_damage(tmp_path: Path) -> None:
    """A newer version reads it: the error says so, and names the tensor and the arithmetic that this version knows."""
    store = ckptstore.open(shutil.copytree(GOLDEN / "conformance" / "unknown-rule", tmp_path / "store"))
    expected = r"'0.9.fma.predicted.weight': unknown optimizer rule 'adam/2': this version knows adam/1, sgd/1, skip/1"
    for verify in (True, False):
        with pytest.raises(ckptstore.IncompatibleFormatError, match=expected):
            store.load(21, verify=verify)
    store.load(20)
