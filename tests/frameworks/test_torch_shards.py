"""DTensors: which box a rank has, copying into it; and real ranks that save and load them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.segment_files.boxes import Box, elements_of, gap, overlapping
from ckptstore.frameworks.torch_shards import ShardSource, copy_box_into, place_in_whole, recognise
from tests import warmth

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from tests.frameworks.shard_ranks import SHAPES, whole  # noqa: E402
from tests.torch_versions import needs_groups  # noqa: E402
from tools.objects.server import free_port  # noqa: E402

ROOT = Path(__file__).parents[2]


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of a group without other ranks."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=rank, world_size=size, store=fake.FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_of(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    """This rank's part, cut by the placements, without communication."""
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            parts, _ = placement._split_tensor(full, mesh.shape[axis], with_padding=False, contiguous=False)
            full = parts[coordinate[axis]]
    return full.contiguous()


GRIDS: list[tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = [
    ((4,), (10, 3), [Shard(0)]),  # 3, 3, 3, 1 rows
    ((4,), (2, 3), [Shard(0)]),  # two ranks have nothing
    ((4,), (5, 9), [Shard(1)]),
    ((2, 2), (8, 6), [Shard(0), Shard(1)]),
    ((2, 2), (7, 6), [Shard(0), Shard(0)]),
    ((2, 2), (8, 6), [Replicate(), Shard(0)]),
    ((2, 2), (8, 6), [_StridedShard(0, split_factor=2), Shard(0)]),  # FSDP2 over tensor parallelism
]


@pytest.mark.parametrize(("mesh_shape", "shape", "placements"), GRIDS)
def test_ranks_have_boxes_that_make_up_the_tensor(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], placements: list[Any]
) -> None:
    full = torch.arange(float(np.prod(shape))).reshape(shape)
    boxes: dict[Box, None] = {}
    for rank in range(int(np.prod(mesh_shape))):
        with as_rank(rank, int(np.prod(mesh_shape))):
            names = tuple("ab"[: len(mesh_shape)])
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
            local = local_of(full, mesh, placements)
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
            )
            box = Box(place_in_whole(tensor)[1], place_in_whole(tensor)[0])
            source = recognise(tensor)
            assert isinstance(source, ShardSource)
            assert (source.shape, source.dtype) == (box.shape, "F32")
            if box.shape != shape:
                assert (source.global_shape, source.offset) == (shape, box.offset)
            assert torch.equal(full[box.within(Box.whole(shape))], local)
            if box.size:
                boxes[box] = None
    found = list(boxes)
    assert overlapping(found) is None
    assert gap(shape, found) is None


def test_a_placement_without_a_box_is_refused() -> None:
    with as_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        summed = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False)
        with pytest.raises(UnsupportedStateError, match="partial sums"):
            recognise(summed)
        pieces = DTensor.from_local(
            torch.ones(2, 2), mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=(8, 2), stride=(2, 1)
        )
        with pytest.raises(UnsupportedStateError, match="is not contiguous"):
            recognise(pieces)
        others = DeviceMesh("cpu", [0, 2])
        foreign = DTensor.from_local(torch.ones(2, 2), others, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1))
        with pytest.raises(UnsupportedStateError, match="does not include this rank"):
            recognise(foreign)


def test_one_process_by_itself_refuses_a_part() -> None:
    with as_rank(0, 2):
        tensor = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        with (
            ckptstore.open("memory://part-alone").writer(poll_seconds=None) as writer,
            pytest.raises(UnsupportedStateError, match=r"state\['w'\].*group="),
        ):
            writer.save({"w": tensor}, 1)


DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "grad"])
def test_boxes_are_copied_bit_for_bit(dtype: torch.dtype, layout: str) -> None:
    if layout == "grad" and not (dtype.is_floating_point or dtype.is_complex):
        pytest.skip("has no gradient")
    width = torch.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(0).integers(0, 2 if dtype is torch.bool else 256, 6 * width, np.uint8)
    tensor = torch.zeros(4, 5, dtype=dtype)
    tensor = torch.zeros(5, 4, dtype=dtype).t() if layout == "transposed" else tensor
    if layout == "grad":
        tensor.requires_grad_()
    version = tensor._version
    copy_box_into(tensor, np.s_[1:3, 2:5], elements_of(raw, width).reshape(2, 3))
    found = tensor.detach()[1:3, 2:5].contiguous().reshape(-1).view(torch.uint8).numpy()
    assert found.tobytes() == raw.tobytes()
    assert tensor._version > version
    rest = tensor.detach().clone()
    rest[1:3, 2:5] = 0
    assert not rest.any()


def test_boxes_of_lazy_and_scalar_tensors() -> None:
    lazy = torch.zeros(3, dtype=torch.complex64).conj()
    copy_box_into(lazy, np.s_[1:2], np.array([1 + 2j], "<c8").view("u8"))
    assert lazy.tolist() == [0, 1 + 2j, 0]
    scalar = torch.zeros(())
    copy_box_into(scalar, (), np.array(2.5, "<f4").view("u4"))
    assert scalar.item() == 2.5


@needs_groups
def test_two_ranks_save_three_and_one_load(tmp_path: Path) -> None:
    url, port = str(tmp_path / "store"), str(free_port())
    command = [sys.executable, "-m", "tests.frameworks.shard_ranks", url]
    ranks = [
        warmth.start([*command, str(rank), port], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(3)
    ]
    try:
        told = [rank.communicate(timeout=120)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], "\n".join(told)
    store = ckptstore.open(url)
    state = store.load(framework="torch")  # one process that is not a rank
    for name in SHAPES:
        assert torch.equal(state["model"][name], whole(name)), name
    assert (state["rank"], state["step"]) == (0, 5)
    shards = {tensor.name: tensor.shards for tensor in store.inspect().tensors}
    assert (shards["model.rows"], shards["model.columns"]) == (2, 2)
    assert store.verify(deep=True).ok
