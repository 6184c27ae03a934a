"""Files of torch.save whose parts need code: named by their keys, left out, or taken as values. No code is run."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import io
import os
import pathlib
import pickle
import uuid
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.errors import CkptError, FormatError, UnsupportedStateError, UsageError
from tests.store.states import same

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Config:
    width: int
    rates: dict[str, Any]


class Plain:
    """Whose form is not a dataclass's."""

    def __init__(self) -> None:
        self.size = 3


class Dict(dict[str, Any]):
    """As Lightning's AttributeDict."""


Point = collections.namedtuple("Point", "x y")


def weights() -> dict[str, Any]:
    tied = torch.arange(12.0).reshape(3, 4)
    return {
        "w": torch.nn.Parameter(torch.randn(3, 5, generator=torch.Generator().manual_seed(0))),
        "turned": tied.t(),
        "tied": tied,
        "part": torch.arange(100)[10:20:3],
        "bits": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "eight": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
        "wide": torch.tensor([1], dtype=torch.uint64),
        "complex": torch.tensor([1 + 2j]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 2),
    }


def values() -> dict[str, Any]:
    return {
        "deque": collections.deque([1, 2.5], 7),
        "uuid": uuid.UUID(int=5),
        "names": argparse.Namespace(rate=1e-3, inner=argparse.Namespace(one=collections.deque())),
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(b=1, a=(2, None)),
        "when": datetime.datetime(2024, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "path": pathlib.PosixPath("a/b"),
        "array": np.arange(6.0).reshape(2, 3),
        "number": np.float32(2.5),
        "set": {1, 2},
        "frozen": frozenset({3}),
        "bytes": b"\x00\xff",
        "complex": 1 + 2j,
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "large": 2**70,
    }


def imported(path: Path, **options: Any) -> Any:
    store = ckptstore.open(path.parent / f"run-{path.stem}-{len(list(path.parent.iterdir()))}")
    (found,) = store.import_files([path], 1, **options)
    return store.load(), found.left_out


def saved(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def test_values_that_torch_refuses_and_no_code_is_needed_for(tmp_path: Path) -> None:
    state = {**weights(), **{f"v-{name}": one for name, one in values().items()}}
    found, left_out = imported(saved(tmp_path / "a.pt", state))
    same(found, {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in state.items()})
    assert left_out == ()


def test_a_key_is_left_out_and_the_rest_is_whole(tmp_path: Path) -> None:
    state = {**weights(), "hyper_parameters": {"config": Plain(), "lr": 0.1}, "callbacks": {"One": {"f": len}}}
    path = saved(tmp_path / "a.pt", state)
    with pytest.raises(UnsupportedStateError) as raised:
        imported(path)
    said = str(raised.value)
    assert f"{path}: loading it would run pickled code" in said
    assert f"hyper_parameters.config: it is a {__name__}.Plain, which only its own code can make" in said
    assert "callbacks.One.f: it is builtins.len, a class or function" in said
    assert "--leave-out-key 'hyper_parameters.config' --leave-out-key 'callbacks.One.f'" in raised.value.__notes__[0]
    found, left_out = imported(path, leave_out_keys=["hyper_parameters", "callbacks.*"])
    expected = {name: one.detach() for name, one in weights().items()}
    same(found, {**expected, "callbacks": {}})
    assert left_out == ("hyper_parameters", "callbacks.One")


def test_objects_are_taken_as_values_on_request(tmp_path: Path) -> None:
    state = {"config": Config(3, {"w": torch.ones(2)}), "color": Color.RED, "plain": Plain(), "more": Dict(a=1)}
    found, _ = imported(saved(tmp_path / "a.pt", state), objects=[f"{__name__}.*"])
    config = found["config"]
    assert (config.name, config.kind) == (f"{__name__}.Config", "dataclass")
    same(config.value, {"width": 3, "rates": {"w": torch.ones(2)}})
    assert found["color"] == ckptstore.Foreign(f"{__name__}.Color", "red", "enum")
    assert found["plain"].value == {"size": 3}
    assert found["more"].value == {"a": 1}


def test_views_that_are_conjugated_or_negative(tmp_path: Path) -> None:
    whole = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": whole.conj(), "neg": whole.clone().conj().imag, "whole": whole}
    found, _ = imported(saved(tmp_path / "a.pt", {**state, "plain": Plain()}), leave_out_keys=["plain"])
    same(found, {name: one.resolve_conj().resolve_neg() for name, one in state.items()})


def test_a_member_with_the_name_of_an_attribute(tmp_path: Path) -> None:
    more = Dict(a=1, b=2)
    vars(more)["a"] = 5
    with pytest.raises(UnsupportedStateError, match=r"more: a .*Dict has 'a' as a member and as an attribute"):
        imported(saved(tmp_path / "a.pt", {"more": more}), objects=[f"{__name__}.*"])


def test_objects_of_registered_classes_are_made_again(tmp_path: Path) -> None:
    from ckptstore.formats.states.registered_types import forget

    path = saved(tmp_path / "a.pt", {"config": Config(3, {}), "color": Color.RED})
    ckptstore.register(Config)
    ckptstore.register(Color)
    try:
        found, _ = imported(path, objects=[f"{__name__}.*"])
        assert found == {"config": Config(3, {}), "color": Color.RED}
    finally:
        forget(Config)
        forget(Color)


@pytest.mark.parametrize("value", [Point(1, 2), functools.partial(int, base=2), torch.nn.Linear(1, 1), os.getcwd])
def test_what_has_no_values_is_refused_by_its_key(tmp_path: Path, value: Any) -> None:
    path = saved(tmp_path / "a.pt", {"w": torch.ones(1), "in": [{"x": value}]})
    with pytest.raises(UnsupportedStateError, match=r"in\.0\.x: "):
        imported(path)
    found, _ = imported(path, leave_out_keys=["in.0.x"])
    assert found["in"] == [{}]


def test_sparse_tensors(tmp_path: Path) -> None:
    dense = torch.eye(3) * 2
    state = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "x": Plain()}
    found, _ = imported(saved(tmp_path / "a.pt", state), leave_out_keys=["x"])
    for name, one in found.items():
        assert one.layout == state[name].layout
        assert torch.equal(one.to_dense(), dense)


class Attack:
    """Runs a command when it is unpickled as usual."""

    made = ""

    def __reduce__(self) -> Any:
        return os.mkdir, (Attack.made,)


def archive(path: Path, pickled: bytes, records: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        for name, data in (records or {}).items():
            file.writestr(f"archive/{name}", data)
        file.writestr("archive/version", b"3\n")
    return path


def test_nothing_that_a_pickle_names_is_imported_or_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Attack.made = str(tmp_path / "attacked")
    (tmp_path / "evil_module.py").write_text(f"import os; os.mkdir({Attack.made!r})")
    monkeypatch.syspath_prepend(tmp_path)
    named = b"\x80\x02}q\x00X\x01\x00\x00\x00ackevil_module\nThing\n)R.".replace(b"ack", b"c")
    for options in ({}, {"objects": ["*"]}, {"leave_out_keys": ["nothing"]}):
        for pickled in (pickle.dumps({"a": Attack()}, 2), named, pickle.dumps(Attack(), 4)):
            with suppress(CkptError):
                imported(archive(tmp_path / "a.pt", pickled), **options)
            assert not (tmp_path / "attacked").exists()
    found, _ = imported(archive(tmp_path / "b.pt", pickle.dumps({"a": Attack(), "b": 1}, 2)), leave_out_keys=["a"])
    assert found == {"b": 1}


REBUILT = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOSTILE = {
    # (storage, key, location, elements), offset, size, stride, requires_grad, hooks
    "beyond its": b"K\x00(K\x09t(K\x01t",
    "invalid form": b"K\x00(K\x02K\x02t(K\x01t",
    "invalid form ": b"K\x00(J\xff\xff\xff\xfft(K\x01t",
    "reaches beyond": b"K\x07(K\x02t(K\x01t",
}


@pytest.mark.parametrize("said", HOSTILE)
def test_tensors_beyond_their_storage(tmp_path: Path, said: str) -> None:
    body = b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x08tQ"
    body += HOSTILE[said] + b"\x89ccollections\nOrderedDict\n)RtR"
    extra = pickle.dumps(Plain(), 2)[2:-1]  # so that torch refuses the file first
    pickled = b"\x80\x02}(X\x01\x00\x00\x00w" + REBUILT + body + b"X\x01\x00\x00\x00x" + extra + b"u."
    path = archive(tmp_path / "a.pt", pickled, {"data/0": bytes(32), "byteorder": b"little"})
    with pytest.raises(CkptError, match=f"a.pt: .*{said.strip()}"):
        imported(path, leave_out_keys=["x"])


def test_damage_is_an_error_of_ours(tmp_path: Path) -> None:
    image = io.BytesIO()
    torch.save({**weights(), "x": Plain(), "deque": collections.deque([1])}, image)
    with zipfile.ZipFile(io.BytesIO(image.getvalue())) as file:
        (name,) = (one for one in file.namelist() if one.endswith("data.pkl"))
        pickled = file.read(name)
    records = {"data/0": bytes(64), "byteorder": b"little"}
    for place in range(0, len(pickled), 11):
        broken = bytearray(pickled)
        broken[place] ^= 0x55
        with suppress(CkptError):  # any other error fails the test
            imported(archive(tmp_path / "a.pt", bytes(broken), records), leave_out_keys=["x"])
    for length in range(0, len(pickled), 97):
        with pytest.raises(CkptError):
            imported(archive(tmp_path / "a.pt", pickled[:length], records), leave_out_keys=["x"])
    (tmp_path / "cut.pt").write_bytes(image.getvalue()[:-100])
    with pytest.raises(CkptError, match=r"cut\.pt"):
        imported(tmp_path / "cut.pt", leave_out_keys=["x"])


def test_nested_too_deep(tmp_path: Path) -> None:
    pickled = b"\x80\x02" + b"](" * 5000 + b"e" * 5000 + b"."
    with pytest.raises((FormatError, UnsupportedStateError)):
        imported(archive(tmp_path / "a.pt", pickled), leave_out_keys=["x"])


def test_the_older_form_has_no_keys(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": 1}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert imported(tmp_path / "a.pt")[0]["x"] == 1
    with pytest.raises(UnsupportedStateError, match="older form"):
        imported(tmp_path / "a.pt", leave_out_keys=["x"])


def test_an_option_of_another_type_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"w": torch.ones(2)})
    with pytest.raises(UsageError, match="leave_out_keys"):
        imported(path, leave_out_keys=[3])
