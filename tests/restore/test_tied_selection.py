"""A selection names places; targets of `into` that share memory are refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import ckptstore
from ckptstore.cli.main import cli
from ckptstore.errors import FormatError, TensorNotFoundError, UsageError
from ckptstore.exchange.export import export
from ckptstore.exchange.import_files import import_files
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.names import flat_names, place_names
from ckptstore.formats.states.state import flatten, places, select_places
from ckptstore.restore.load_targets import sharing
from tests.formats.test_names import distinct, keys
from tests.store.states import same

X = torch.arange(3.0)


def stored(state: Any, url: str | Path = "memory://tied-selection") -> ckptstore.Store:
    store = ckptstore.open(url)
    with store.writer(parent=None, poll_seconds=None) as writer:
        writer.save(state, step=1)
    return store


def teacher() -> dict[str, Any]:
    x = X.clone()
    return {"teacher": {"w": x, "c": x + 1}, "model": {"w": x, "d": x + 2}}


class TestLoad:
    @pytest.mark.parametrize("select", ["model.*", ["model.w", "model.d"], "model.[dw]"])
    def test_a_tied_tensor_is_at_the_place_that_was_selected(self, select: Any) -> None:
        state = teacher()
        same(stored(state).load(1, select=select), {"teacher": {}, "model": state["model"]})

    @pytest.mark.parametrize("options", [{}, {"framework": "numpy"}, {"mmap": True}])
    def test_however_it_is_read(self, tmp_path: Path, options: dict[str, Any]) -> None:
        found = stored(teacher(), tmp_path / "s").load(1, select="model.w", **options)
        assert found["teacher"] == {}
        assert list(found["model"]) == ["w"]
        assert found["model"]["w"].tolist() == [0, 1, 2]

    def test_a_place_that_does_not_match_is_left_out(self) -> None:
        state = teacher()
        same(stored(state).load(1, select="teacher.*"), {"teacher": state["teacher"], "model": {}})

    def test_places_that_match_are_tied_again(self) -> None:
        found = stored(teacher()).load(1, select="*.w")
        assert found["teacher"]["w"] is found["model"]["w"]
        assert [list(found["teacher"]), list(found["model"])] == [["w"], ["w"]]

    def test_every_container(self) -> None:
        x = np.arange(3)
        state = {"first": x, 5: (x, [1, x]), "o": OrderedDict([(("k", 1), x), ("p", x)]), "n": None}
        store = stored(state)
        assert [place.name for place in places(store.tree(1))] == [
            "first",
            "5.0",
            "5.1.1",
            "o.('k', 1)",
            "o.p",
        ]
        found = store.load(1, select=["5.1.*", "o.('k', 1)"])
        assert list(found) == [5, "o", "n"]
        assert found[5][0][1] is found["o"]["k", 1]
        assert list(found["o"]) == [("k", 1)]
        assert len(found[5]) == 1

    def test_a_selection_that_matches_no_place(self) -> None:
        with pytest.raises(TensorNotFoundError, match=r"'model.ww'; close: model\.w"):
            stored(teacher()).load(1, select="model.ww")

    def test_reads_only_what_is_needed(self, tmp_path: Path) -> None:
        big = torch.zeros(1 << 18)
        store = stored({"a": {"x": big, "w": X}, "b": {"w": X, "y": big + 1}}, tmp_path / "s")
        told: list[tuple[int, int]] = []
        store.load(1, select="b.w", progress=lambda done, total: told.append((done, total)))
        assert told == [(X.nbytes, X.nbytes)]

    def test_one_tensor_by_the_name_of_any_place(self) -> None:
        store = stored(teacher())
        for name in ("teacher.w", "model.w"):
            assert store.read_tensor(1, name).view(np.float32).tolist() == [0, 1, 2]
            ((offset, data),) = [(offset, data.tobytes()) for offset, data in store.chunks(1, name)]
            assert (offset, data) == (0, X.numpy().tobytes())
        with pytest.raises(TensorNotFoundError, match=r"close: model\.w"):
            store.read_tensor(1, "model.x")


class TestKeysWithDots:
    def test_a_path_that_means_two_tensors_is_escaped(self) -> None:
        x, y = X.clone(), X + 1
        store = stored({"first": y, "a": {"b.c": x}, "a.b": {"c": y}})
        assert [place.name for place in places(store.tree(1))] == ["first", "a.b.c", "a%2Eb.c"]
        same(store.load(1, select="a.b.c"), {"a": {"b.c": x}, "a.b": {}})
        same(store.load(1, select="a%2Eb.c"), {"a": {}, "a.b": {"c": y}})
        assert store.read_tensor(1, "a.b.c").tobytes() == x.numpy().tobytes()
        assert store.read_tensor(1, "a%2Eb.c").tobytes() == y.numpy().tobytes()

    def test_a_path_that_means_one_tensor_means_all_its_places(self) -> None:
        x = X.clone()
        found = stored({"a": {"b.c": x, "d": x + 1}, "a.b": {"c": x}}).load(1, select="a.b.*")
        assert found["a"]["b.c"] is found["a.b"]["c"]
        assert list(found["a"]) == ["b.c"]

    @given(
        st.lists(
            st.tuples(st.lists(keys, max_size=3).map(tuple), st.integers(0, 3)),
            max_size=10,
            unique_by=lambda row: distinct(row[0]),
        )
    )
    def test_a_name_means_one_tensor(self, rows: list[tuple[tuple[Any, ...], int]]) -> None:
        first = {tensor: path for path, tensor in reversed(rows)}
        order = list(dict.fromkeys(tensor for _, tensor in rows))
        canonical = dict(zip(order, flat_names([first[tensor] for tensor in order]), strict=True))
        names = place_names([(path, canonical[tensor]) for path, tensor in rows])
        meaning: dict[str, str] = {}
        for name, (path, tensor) in zip(names, rows, strict=True):
            assert meaning.setdefault(name, canonical[tensor]) == canonical[tensor]
            assert name
            name.encode()
            if path is first[tensor]:
                assert name == canonical[tensor]
        assert all(meaning[name] == name for name in canonical.values())


def test_the_tree_of_some_places() -> None:
    x = np.ones(2)
    flat = flatten({"a": x, "b": [x, 5, {"c": x}], 3: {"d": np.zeros(1)}})
    names = [(place.name, place.tensor) for place in places(flat.tree)]
    assert names == [("a", "a"), ("b.0", "a"), ("b.2.c", "a"), ("3.d", "3.d")]
    assert select_places(flat.tree, {2: "new"}) == {"$dict": [["b", [5, {"c": {"$a": "new"}}]], [3, {}]]}
    assert select_places(flat.tree, {index: place.tensor for index, place in enumerate(places(flat.tree))}) == flat.tree
    deep: Any = {"$t": "w"}
    for _ in range(300):
        deep = [deep]
    for hostile in (deep, {"$dict": [["a"]]}, {"$dict": [[["k"], {"$t": "w"}]]}, {"$t": 7}):
        with pytest.raises(FormatError):
            places(hostile)


class TestInto:
    def test_of_a_selected_place(self) -> None:
        state, target = teacher(), {"w": torch.zeros(3), "d": torch.zeros(3)}
        found = stored(state).load(1, into={"model": target}, select="model.*")
        assert found["model"]["w"] is target["w"]
        same(target, state["model"])

    def test_into_the_whole_state(self) -> None:
        """The target's own first place was not selected."""
        state, w = teacher(), torch.zeros(3)
        into = {"teacher": {"w": w, "c": torch.zeros(3)}, "model": {"w": w, "d": torch.zeros(3)}}
        stored(state).load(1, into=into, select="model.*")
        same(into["model"], state["model"])
        assert not into["teacher"]["c"].any()

    def test_one_tensor_in_the_checkpoint_and_two_in_the_target(self) -> None:
        into = {"teacher": {"w": torch.zeros(3)}, "model": {"w": torch.zeros(3)}}
        with pytest.raises(UsageError, match=r"has a tensor 'model\.w' that is not in the checkpoint \(1 in total\)"):
            stored(teacher()).load(1, into=into, select="*.w")
        assert not into["teacher"]["w"].any()
        stored(teacher()).load(1, into=into, select="model.w")
        assert into["model"]["w"].tolist() == [0, 1, 2]
        assert not into["teacher"]["w"].any()

    def test_missing_is_named_as_it_was_asked_for(self) -> None:
        with pytest.raises(UsageError, match=r"no tensor 'model\.w'"):
            stored(teacher()).load(1, into={"model": {"d": torch.zeros(3)}}, select="model.*")

    def test_tied_into_tied(self) -> None:
        w = torch.zeros(3)
        into = {"teacher": {"w": w, "c": torch.zeros(3)}, "model": {"w": w, "d": torch.zeros(3)}}
        stored(teacher()).load(1, into=into)
        same(into, teacher())


def torch_buffer(*shape: int) -> Any:
    return torch.full(shape, -1.0)


def numpy_buffer(*shape: int) -> Any:
    return np.full(shape, -1, np.float32)


@pytest.mark.parametrize("make", [torch_buffer, numpy_buffer])
class TestOverlap:
    @pytest.mark.parametrize(
        ("shape", "views"),
        [
            ((2, 2), lambda y: (y, y.T)),
            ((6,), lambda y: (y[:4], y[2:])),
            ((6,), lambda y: (y[:4], y[3:])),
            ((4, 4), lambda y: (y[:, :3], y[:, 2:])),
            ((8,), lambda y: (y[::2], y[::3])),
            ((4, 4), lambda y: (y[1:3, 1:3], y[2:, 2:])),
            ((4,), lambda y: (y, y.reshape(2, 2))),
            ((4, 1), lambda y: (y[2:], y[:3].T)),
        ],
    )
    def test_refused_before_anything_is_overwritten(self, make: Any, shape: Any, views: Any) -> None:
        y = make(*shape)
        a, b = views(y)
        if isinstance(y, np.ndarray):
            state = {"a": np.zeros(a.shape, y.dtype), "b": np.ones(b.shape, y.dtype)}
        else:
            state = {"a": torch.zeros(a.shape), "b": torch.ones(b.shape)}
        store = stored(state)
        with pytest.raises(UsageError, match="tensors 'a' and 'b' share memory"):
            store.load(1, into={"a": a, "b": b})
        with pytest.raises(UsageError, match="tensors 'a' and 'b' share memory"):
            store.load(1, into={"b": b, "a": a}, select="*")
        assert (y == -1).all()
        store.load(1, into={"b": b}, select="b")
        assert (b == 1).all()

    @pytest.mark.parametrize(
        ("shape", "views"),
        [
            ((4, 4), lambda y: (y[:, :2], y[:, 2:])),
            ((4, 4), lambda y: (y[:, :2], y[:, 2:].T)),
            ((8,), lambda y: (y[::2], y[1::2])),
            ((8,), lambda y: (y[:4], y[4:])),
            ((4, 4), lambda y: (y[::2, ::2], y[1::2])),
            ((4, 6, 5), lambda y: (y[:, 1::2].swapaxes(0, 2), y[:, ::2, 1:])),
            ((4,), lambda y: (y[:0], y)),
        ],
    )
    def test_views_that_lie_in_each_others_gaps(self, make: Any, shape: Any, views: Any) -> None:
        y = make(*shape)
        a, b = views(y)
        fill = np.random.default_rng(0).standard_normal
        values = [fill(tuple(view.shape)).astype(np.float32) for view in (a, b)]
        as_saved = torch.from_numpy if isinstance(y, torch.Tensor) else np.asarray
        stored({"a": as_saved(values[0]), "b": as_saved(values[1])}).load(1, into={"a": a, "b": b})
        assert [np.asarray(view).tolist() for view in (a, b)] == [value.tolist() for value in values]


def test_of_torch_and_numpy() -> None:
    y = torch.full((4,), -1.0)
    store = stored({"a": torch.zeros(4), "b": np.ones(2, np.float32)})
    with pytest.raises(UsageError, match="'a' and 'b' share memory"):
        store.load(1, into={"a": y, "b": y.numpy()[2:]})
    assert (y == -1).all()


def test_one_target_for_two_tensors() -> None:
    y = torch.full((3,), -1.0)
    store = stored({"a": {"u": X, "w": X + 1}, "b": {"w": X + 2}})
    with pytest.raises(UsageError, match=r"'a\.w' and 'b\.w' share memory"):
        store.load(1, into={"a": {"w": y}, "b": {"w": y}}, select="*.w")
    assert (y == -1).all()


sizes = st.integers(1, 4)
slices = st.builds(slice, st.none() | st.integers(0, 3), st.none() | st.integers(1, 5), st.sampled_from([1, 2, 3, -1]))


@given(
    st.tuples(sizes, sizes, sizes), st.lists(st.tuples(slices, slices, slices), min_size=2, max_size=5), st.booleans()
)
def test_exactly_those_that_share_an_element(shape: Any, parts: list[Any], turned: bool) -> None:
    y = np.arange(np.prod(shape)).reshape(shape)
    views = [y[part].T if turned and index % 2 else y[part] for index, part in enumerate(parts)]
    elements = [set(view.ravel().tolist()) for view in views]
    truth = any(elements[i] & elements[j] for i in range(len(views)) for j in range(i))
    assert (sharing([(str(i), NumpySource(view)) for i, view in enumerate(views)]) is not None) == truth


class TestExport:
    def test_under_the_name_of_the_selected_place(self, tmp_path: Path) -> None:
        store = stored(teacher())
        out = tmp_path / "m.safetensors"
        result = export(store.journal, 1, out, select="model.*")
        assert {name: array.tolist() for name, array in load_file(out).items()} == {
            "model.w": [0, 1, 2],
            "model.d": [2, 3, 4],
        }
        assert (result.tensors, result.tied) == (2, ())
        again = ckptstore.open(tmp_path / "again")
        import_files(again.journal, [out], 1)
        same(again.load(1), {"teacher": {}, "model": teacher()["model"]})

    def test_of_several_selected_places_the_first(self, tmp_path: Path) -> None:
        state = teacher()
        state["student"] = {"w": state["model"]["w"]}
        store = stored(state)
        out = tmp_path / "m.safetensors"
        result = export(store.journal, 1, out, select=["student.*", "model.*"])
        assert set(load_file(out)) == {"model.w", "model.d"}
        assert result.tied == (("student.w", "model.w"),)
        whole = export(store.journal, 1, tmp_path / "all.safetensors")
        assert set(load_file(whole.paths[0])) == {"teacher.w", "teacher.c", "model.d"}
        assert whole.tied == (("model.w", "teacher.w"), ("student.w", "teacher.w"))

    def test_pt(self, tmp_path: Path) -> None:
        state = teacher()
        result = export(stored(state).journal, 1, tmp_path / "m.pt", "pt", select="*.w")
        found = torch.load(tmp_path / "m.pt", weights_only=True)
        same(found, {"teacher": {"w": X}, "model": {"w": X}})
        assert found["teacher"]["w"].data_ptr() == found["model"]["w"].data_ptr()
        assert result.tied == ()
        export(stored(state).journal, 1, tmp_path / "n.pt", "pt", select="model.*")
        same(torch.load(tmp_path / "n.pt", weights_only=True), {"teacher": {}, "model": state["model"]})

    def test_shards(self, tmp_path: Path) -> None:
        export(stored(teacher()).journal, 1, tmp_path / "m.safetensors", select="model.*", max_shard_bytes=12)
        where = json.loads((tmp_path / "m.safetensors.index.json").read_text())["weight_map"]
        assert list(where) == ["model.w", "model.d"]
        for name, file in where.items():
            assert name in load_file(tmp_path / file)

    def test_the_command_says_what_is_left_out(self, tmp_path: Path) -> None:
        stored(teacher(), tmp_path / "s")

        def restore(*arguments: str) -> Any:
            out = str(tmp_path / "m.safetensors")
            return CliRunner().invoke(cli, ["restore", str(tmp_path / "s"), "--out", out, "--force", *arguments])

        part = restore("--select", "model.*")
        assert part.exit_code == 0
        assert set(load_file(tmp_path / "m.safetensors")) == {"model.w", "model.d"}
        assert "tied" not in part.stderr
        whole = restore()
        assert "contains a tied tensor once; left out (1): model.w (as teacher.w)" in whole.stderr
        assert restore("--select", "nothing").exit_code == 3


def test_a_tensor_may_be_named_after_another_place_than_its_first() -> None:
    """Ranks' dicts have other orders, so they name it so (SPEC.md 3.3): every place still has its own name."""
    assert place_names([(("z",), "a"), (("a",), "a"), (("b", 0), "a"), (("c",), "c")]) == ["z", "a", "b.0", "c"]
    assert place_names([(("z", "y"), "a%2Eb"), (("a.b",), "a%2Eb")]) == ["a%2Eb", "a.b"]  # none has it as plain name
    assert place_names([(("rng",), "rng@0"), (("alias",), "rng@0")]) == ["rng@0", "alias"]
    # Named after its first place, escaped, it keeps that name, whatever the names of others.
    assert place_names([(("a.b",), "a%2Eb"), (("a%2Eb",), "a%2Eb")]) == ["a%2Eb", "a%2Eb"]
