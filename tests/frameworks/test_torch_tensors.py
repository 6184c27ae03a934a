"""torch tensors into host bytes and back: every dtype, every layout in memory."""

from __future__ import annotations

import io
import random
import threading
import warnings
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckptstore.errors import FormatError, UnsupportedStateError  # noqa: E402
from ckptstore.formats import dtypes, jsontext  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.formats.sources import TensorSource  # noqa: E402
from ckptstore.formats.states.state import flatten, unflatten  # noqa: E402
from ckptstore.frameworks import torch_tensors as tensors  # noqa: E402

# torch warns once per process that complex32 is experimental; its bits are not.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DEVICES = ["cpu", "other"]


def known(name: str) -> bool:
    """Whether this torch has a dtype of that name."""
    try:
        tensors.torch_dtype(name)
    except UnsupportedStateError:
        return False
    return True


NAMES = [name for name in sorted(dtypes.DTYPES) if known(name)]


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """``other``: host tensors that take the paths of a device, so that machines without one test those."""
    if request.param == "other":
        monkeypatch.setattr(tensors, "on_host", lambda tensor: False)
    return "cpu"


def random_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Random bits: NaN payloads, subnormals and negative zeros among them."""
    size = dtypes.nbytes(dtypes.get(name), shape)
    image = np.random.default_rng(seed).integers(0, 2 if name == "BOOL" else 256, size, np.uint8)
    return tensors.from_buffer(name, shape, image)


def image_of(tensor: Any) -> bytes:
    """The bytes according to torch itself."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def read_all(source: TensorSource, piece: int = 5) -> bytes:
    """In odd pieces, so that elements are cut."""
    out = np.zeros(source.nbytes, np.uint8)
    for start in range(0, source.nbytes, piece):
        source.read(start, out[start : start + piece])
    return out.tobytes()


def source_of(tensor: Any) -> tensors.TorchSource:
    source = tensors.recognise(tensor)
    assert isinstance(source, tensors.TorchSource)
    return source


LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "sliced": lambda t: t[1:, ::2, 1:],
    "row": lambda t: t[1],
    "0-d": lambda t: t[0, 0, 0],
    "one of many": lambda t: t[0, 0, ::4][:1],
    "empty": lambda t: t[:, :0],
    "expanded": lambda t: t[:1].expand(4, *t.shape[1:]),
}


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_reading_any_dtype_and_layout(name: str, layout: str, device: str) -> None:
    tensor = LAYOUTS[layout](random_tensor(name, (3, 4, 5)).to(device))
    source = source_of(tensor)
    expected = image_of(LAYOUTS[layout](random_tensor(name, (3, 4, 5))).clone())
    assert (source.dtype, source.shape, source.origin) == (name, tuple(tensor.shape), "torch")
    assert source.nbytes == len(expected)
    assert read_all(source) == expected
    assert read_all(source, 64) == expected
    view = source.view()
    assert (view is not None) == (tensors.on_host(tensor) and tensor.is_contiguous())
    if view is not None:
        assert view.tobytes() == expected
        assert not view.size or view.__array_interface__["data"][0] == tensor.data_ptr()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "expanded"])
@pytest.mark.parametrize("name", NAMES)
def test_restoring_in_place(name: str, layout: str, device: str) -> None:
    tensor = LAYOUTS[layout](random_tensor(name, (3, 4, 5)).to(device))
    new = np.frombuffer(image_of(random_tensor(name, tuple(tensor.shape), seed=1)), np.uint8)  # read-only
    address = tensor.data_ptr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in range(0, new.size, 7):
            tensors.copy_into(tensor, new[start : start + 7], start)
    assert image_of(tensor) == new.tobytes()
    assert tensor.data_ptr() == address
    tensors.copy_into(tensor, b"", new.size)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (7,), (2, 3)])
def test_from_buffer_shares_memory(name: str, shape: tuple[int, ...]) -> None:
    dtype = dtypes.get(name)
    buffer = bytearray(i % 2 for i in range(dtypes.nbytes(dtype, shape)))
    tensor = tensors.from_buffer(name, shape, buffer)
    assert tensor.dtype == tensors.torch_dtype(name)
    assert tuple(tensor.shape) == shape
    assert image_of(tensor) == bytes(buffer)
    if buffer:
        buffer[0] ^= 1
        assert image_of(tensor) == bytes(buffer)


def test_a_view_keeps_the_tensor_alive() -> None:
    tensor = torch.arange(1 << 16, dtype=torch.int32)
    gone = weakref.ref(tensor)
    view = tensors.TorchSource(tensor).view()
    assert view is not None
    assert view.__array_interface__["data"][0] == tensor.data_ptr()  # no copy
    del tensor
    assert gone() is not None
    assert view.tobytes() == np.arange(1 << 16, dtype=np.int32).tobytes()
    del view
    assert gone() is None


def test_from_buffer_keeps_its_memory_alive() -> None:
    tensor = tensors.from_buffer("F32", (1000,), np.ones(1000, "<f4").view(np.uint8))
    np.zeros(1000, "<f4")
    assert bool((tensor == 1).all())


def test_from_buffer_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="read-only"):
        tensors.from_buffer("F32", (1,), b"1234")
    with pytest.raises(ValueError, match="5 bytes for a tensor of F32"):
        tensors.from_buffer("F32", (1,), bytearray(5))
    with pytest.raises(FormatError, match="unknown dtype"):
        tensors.from_buffer("F33", (1,), bytearray(4))


def test_unaligned_memory_is_copied() -> None:
    memory = np.zeros(17, np.uint8)
    memory[1:] = np.arange(4, dtype="<f4").view(np.uint8)
    tensor = tensors.from_buffer("F32", (4,), memory[1:])
    assert tensor.data_ptr() % 4 == 0
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_lazy_conjugates_and_negations(device: str) -> None:
    tensor = torch.randn(3, 4, dtype=torch.complex64, device=device)
    for lazy in (tensor.conj(), tensor.conj().imag, tensor.mT.conj()):
        assert lazy.is_conj() or lazy.is_neg()
        assert read_all(source_of(lazy)) == image_of(lazy.clone())
        new = torch.randn(*lazy.shape, dtype=lazy.dtype)
        data = np.frombuffer(image_of(new), np.uint8)
        tensors.copy_into(lazy, data[:12], 0)
        tensors.copy_into(lazy, data[12:], 12)
        assert torch.equal(lazy.cpu(), new)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    for name in NAMES:
        for layout in LAYOUTS:
            test_reading_any_dtype_and_layout(name, layout, "cuda")
            if layout != "expanded":
                test_restoring_in_place(name, layout, "cuda")
    test_lazy_conjugates_and_negations("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_reading_waits_for_the_stream_that_was_current() -> None:
    """Another thread, with another current stream, reads data that was queued before the source was made."""
    stream = torch.cuda.Stream()
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tensor += 1
        source = source_of(tensor)
    out = np.zeros(source.nbytes, np.uint8)
    reader = threading.Thread(target=source.read, args=(0, out))
    reader.start()
    reader.join()
    assert bool((out.view("<f4") == 1).all())


# autograd


def test_parameters_are_stored_as_their_data_and_restored_in_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert np.shares_memory(source_of(parameter).view(), parameter.detach().numpy())
    tensors.copy_into(parameter, np.full(3, 2, "<f4"))
    assert parameter.tolist() == [2, 2, 2]
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_autograd_sees_a_restore() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    tensors.copy_into(weight, np.full(3, 2, "<f4"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_inference_tensors(device: str) -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert read_all(source_of(tensor)) == image_of(tensor)
    tensors.copy_into(tensor, np.full(3, 2, "<f4"))
    assert tensor.tolist() == [2, 2, 2]


# identity


def test_ties() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    state = {"model": model.state_dict(), "again": [model["head"].weight]}
    flat = flatten(state, tensors.recognise)
    assert list(flat.tensors) == ["model.embed.weight"]
    back = unflatten(flat.tree, lambda name, origin: object())
    assert back["model"]["embed.weight"] is back["model"]["head.weight"] is back["again"][0]


def test_views_that_differ_are_not_tied() -> None:
    base = torch.arange(16.0).reshape(4, 4)
    complex_base = torch.randn(4, 4, dtype=torch.complex64)
    different = [base, base.T, base[:2], base[1:3], base.view(torch.int32), base.reshape(16), base.clone()]
    different += [complex_base, complex_base.conj()]
    assert len({source_of(tensor).identity for tensor in different}) == len(different)
    assert source_of(base).identity == source_of(base.detach()[:]).identity
    assert source_of(torch.empty(0)).identity != source_of(base).identity


def test_empty_tensors_are_not_tied_by_their_missing_address() -> None:
    one, two = torch.empty(0), torch.empty(0)
    assert source_of(one).identity == source_of(one.detach()).identity
    assert source_of(one).identity != source_of(two).identity


# the whole state of a run


def train(steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
        "loader": {"epoch": 0, "sampler": torch.randperm(5), "shape": torch.Size([2, 3]), "dtype": torch.bfloat16},
        "device": torch.device("cuda", 1),
    }


def assert_same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert image_of(one) == image_of(two)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert one.tobytes() == two.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for element, other in zip(one, two, strict=True):
            assert_same(element, other)
    else:
        assert one == two


def test_a_whole_run() -> None:
    state = train(3)
    assert isinstance(state["scheduler"]["milestones"], Counter)
    flat = flatten(state, tensors.recognise)
    assert "optimizer.state.0.exp_avg" in flat.tensors
    tree = jsontext.loads(jsontext.dumps(flat.tree), what="tree", max_bytes=1 << 20)

    def resolve(name: str, origin: str) -> Any:
        source = flat.tensors[name]
        assert source.origin == origin
        image = np.frombuffer(bytearray(read_all(source)), np.uint8)
        if origin == "torch":
            return tensors.from_buffer(source.dtype, source.shape, image)
        return image.view(dtypes.get(source.dtype).numpy).reshape(source.shape)

    assert_same(unflatten(tree, resolve, tensors.revive), state)


# refusals


class Subclass(torch.Tensor):
    pass


def freed() -> Any:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "sparse": (lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)), "coalesce"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "int_repr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "sub-byte": (lambda: torch.empty(3, dtype=torch.uint4), "uint4"),
    "subclass": (lambda: torch.ones(3).as_subclass(Subclass), "Subclass"),
    "uninitialized": (torch.nn.UninitializedParameter, "UninitializedParameter"),
    "freed": (freed, "freed"),
    "module": (lambda: torch.nn.Linear(2, 2), "state_dict"),
    "storage": (lambda: torch.ones(1).untyped_storage(), "store the tensor that has it"),
    "layout": (lambda: torch.strided, r"store str\(\) of it"),
    "version": (lambda: torch.__version__, "str"),
}


@pytest.mark.filterwarnings("ignore")  # torch warns that sparse CSR, nested and quantized tensors are prototypes
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_tensors(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(UnsupportedStateError, match=message) as caught:
        flatten({"model": [make()]}, tensors.recognise)
    assert str(caught.value).startswith("state['model'][0]: ")


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, 13), (12, 1)])
def test_ranges_outside_the_tensor(offset: int, length: int) -> None:
    tensor = torch.zeros(3)
    with pytest.raises(ValueError, match="of a tensor of 12 bytes"):
        tensors.copy_into(tensor, bytes(length), offset)
    with pytest.raises(ValueError, match="of a tensor of 12 bytes"):
        source_of(tensor).read(offset, np.empty(length, np.uint8))


def test_hostile_small_types() -> None:
    for tree in ({"$dtype": "load"}, {"$dtype": "nn.Module"}, {"$dtype": ""}, {"$device": "abacus:7"}, {"$device": ""}):
        with pytest.raises(FormatError):
            unflatten(tree, lambda name, origin: name, tensors.revive)


def test_torch_save_agrees_on_what_a_conjugate_is() -> None:
    """An independent reader of the same state."""
    tensor = torch.randn(3, dtype=torch.complex64).conj()
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert image_of(torch.load(file)) == read_all(source_of(tensor))
