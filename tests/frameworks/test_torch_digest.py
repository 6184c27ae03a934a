"""The digest computed by torch is the one computed by numpy."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckptstore.formats import digest as reference  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.frameworks import torch_digest as d  # noqa: E402
from ckptstore.frameworks import torch_tensors as tensors  # noqa: E402
from ckptstore.frameworks.torch_tensors import TorchSource  # noqa: E402
from tools.device import simulated, why_not  # noqa: E402

B = reference.BLOCK_WORDS
FIRSTS = [0, 1, B - 1, 70 * B + 5, 65536 * B - 1]
SIZES = [0, 1, 3, 4, 4 * B - 4, 4 * B, 4 * B + 7, 66 * 4 * B + 2]


@pytest.fixture(params=["cpu", "other"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """``other``: host tensors that take the paths of a device, so that machines without one test those."""
    if request.param == "other":
        monkeypatch.setattr(tensors, "on_host", lambda tensor: False)
    return "cpu"


def noise(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def check_partial(size: int, first: int, device: str) -> None:
    image = noise(size)
    found = d.partial_on_device(torch.from_numpy(image.copy()).to(device), first)
    assert found.dtype == torch.int64
    assert found.shape == ()
    assert reference.combine(int(found), nbytes=0) == reference.partial(image, first)


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("size", SIZES)
def test_partials_in_torch_operations(size: int, first: int) -> None:
    check_partial(size, first, "cpu")


def check_start(device: str) -> None:
    image = torch.from_numpy(noise(4099)).to(device)
    for start in range(4):
        part = image[start:]
        assert int(d.partial_on_device(part, 9)) % 2**64 == reference.partial(part.cpu().numpy(), 9)


def test_an_image_that_starts_anywhere() -> None:
    check_start("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_tensors(dtype: torch.dtype, device: str) -> None:
    tensor = torch.arange(3 * 333).reshape(3, 333).to(dtype).to(device)
    forms = [tensor, tensor.T, tensor[:, ::2], tensor[0, 0], tensor[0, ::7][:1], tensor[:0]]
    for form in [*forms, torch.nn.Parameter(tensor, requires_grad=False)]:
        plain = form.detach().cpu().clone(memory_format=torch.contiguous_format)
        assert d.digest(form) == reference.digest(plain.reshape(-1).view(torch.uint8).numpy())
    if dtype.is_complex:
        assert d.digest(tensor.conj()) == d.digest(tensor.conj().resolve_conj())


def test_many_tensors_at_once(device: str) -> None:
    several = [torch.randn(size, device=device) for size in (0, 1, 100, 70_000)]
    assert d.digests(several) == [d.digest(tensor) for tensor in several]
    assert d.digests([]) == []


SMALL = [1, 2, 3, 4, 5, 7, 1000, 4 * B - 4, 4 * B, 4 * B + 3, (1 << 20) - 1, 1, 12]


def check_small(sizes: list[int], device: str) -> None:
    images = [noise(size) for size in sizes]
    images[0][:] = 255  # the largest words
    found = d.partials_of_small([torch.from_numpy(image.copy()).to(device) for image in images])
    assert found.dtype == torch.int64
    wanted = [reference.partial(image, 0) for image in images]
    assert [reference.combine(one, nbytes=0) for one in found.tolist()] == wanted


@pytest.mark.parametrize("sizes", [SMALL, SMALL[::-1], [4], [3]], ids=["all", "reversed", "word", "bytes"])
def test_small_tensors_together(sizes: list[int]) -> None:
    check_small(sizes, "cpu")


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("small", [False, True])
def test_digests_of_a_device_are_known_by_name_before_they_are_there(small: bool) -> None:
    """More small tensors than are digested at once, and large ones."""
    with simulated(0) as machine:
        tensors = {"large": torch.arange(300_000.0, device="cuda"), "strided": torch.ones(5, 4, device="cuda").t()}
        tensors |= {f"w{number}": torch.full((250_000 + number,), 1.5, device="cuda") for number in range(20)}
        tensors["odd"], tensors["empty"] = torch.arange(7, device="cuda").byte(), torch.zeros(0, device="cuda")
        for wait in (True, False):
            found = d.device_digests({name: TorchSource(one) for name, one in tensors.items()}, small=small)
            if wait:  # what is kept on the device is uploaded now
                dict(found)
        before = len(machine.counts.waits)
        names = [name for name in tensors if name != "empty"] if small else ["large"]
        assert sorted(found) == sorted(names)
        assert ("odd" in found, "absent" in found, len(found)) == (small, False, len(names))
        assert len(machine.counts.waits) == before
        for name in names:
            plain = tensors[name].cpu().contiguous().reshape(-1).view(torch.uint8)
            assert found[name] == reference.digest(plain.numpy()), name
        assert not machine.hazards


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    for first in FIRSTS:
        for size in SIZES:
            check_partial(size, first, "cuda")
    check_start("cuda")
    for sizes in (SMALL, SMALL[::-1], [3]):
        check_small(sizes, "cuda")
    test_tensors(torch.bfloat16, "cuda")
    test_many_tensors_at_once("cuda")
