"""Convert torch tensors to host bytes and back.

To save: `recognise` gives `state.flatten` a `TorchSource` for every tensor, on any device, with any strides. To
load: `from_buffer` makes a tensor over memory that was read, and `copy_into` restores a tensor in place.

All copies move bits, under an integer dtype of the same width. So NaN payloads survive, and torch needs no kernel for
the dtype itself (fp8, fp4, complex32).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.errors import FormatError, UnsupportedStateError, UsageError
from ckptstore.formats import dtypes
from ckptstore.formats.sources import Bytes, NumpySource, Origin, blocks, write_into
from ckptstore.formats.states.state import Parts, Tagged
from ckptstore.frameworks import torch_objects

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]  # Python 3.12 names it

__all__ = [
    "TorchSource",
    "copy_into",
    "counted_changes",
    "flat_bytes",
    "from_buffer",
    "image",
    "on_host",
    "on_stream",
    "recognise",
    "revive",
    "torch_dtype",
]

_log: Final = logging.getLogger("ckptstore")
_TORCH_NAMES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",  # torch 2.7
    "F4_E2M1_X2": "float4_e2m1fn_x2",  # torch 2.8
    "C32": "complex32",
    "C64": "complex64",
    "C128": "complex128",
}
_TORCH: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, torch_name) for name, torch_name in _TORCH_NAMES.items() if hasattr(torch, torch_name)
}
_NAMES: Final = {dtype: name for name, dtype in _TORCH.items()}
_REGISTER: Final = "call ckptstore.register(its class) before saving and loading, or "
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a logical dtype name.

    Raises:
        FormatError: the name is unknown.
        UnsupportedStateError: this version of torch does not have the dtype.
    """
    found = _TORCH.get(dtypes.get(name).name)
    if found is None:
        raise UnsupportedStateError(
            f"torch {torch.__version__} has no {_TORCH_NAMES[name]}: load with numpy, or update torch"
        )
    return found


def recognise(value: object) -> TorchSource | Tagged | Parts | None:
    """Convert a torch object for `state.flatten`, which calls this for every object of no built-in type.

    A `torch.nn.Parameter` is stored as its data and restored as a tensor, as in a `state_dict()`.

    Raises:
        UnsupportedStateError: the tensor has no plain bytes in memory: it is meta, quantized, nested, sub-byte, freed,
            or of a subclass (`torch_shards.recognise` supports DTensors, `ckptstore.register` others).
    """
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if value.layout in torch_objects.SPARSE:  # type: ignore[attr-defined]  # mypy does not narrow by `type(...) is`
            return torch_objects.take_sparse(value)  # type: ignore[arg-type]  # as above
        return TorchSource(value)  # type: ignore[arg-type]  # mypy does not narrow by `type(...) is`
    if kind is torch.Size:
        return Tagged("$size", list(value))  # type: ignore[call-overload]  # as above
    if kind is torch.dtype:
        return Tagged("$dtype", str(value).removeprefix("torch."))
    if kind is torch.device:
        return Tagged("$device", str(value))
    if kind is torch.Generator:
        return torch_objects.take_generator(value)  # type: ignore[arg-type]  # as above
    if isinstance(value, torch.Tensor):
        raise UnsupportedStateError(
            f"{kind.__module__}.{kind.__qualname__} cannot be stored: "
            f"{_REGISTER if hasattr(kind, '__tensor_flatten__') else ''}store plain tensors (of a DTensor, its "
            "to_local() or full_tensor(), or open the store with writer(group=...); of an uninitialized parameter, "
            "nothing before its first use)"
        )
    return None


class TorchSource:
    """A torch tensor on any device, with any strides, as a `formats.sources.TensorSource`. It copies nothing itself.

    CUDA: reads run on the stream that was current when the source was created, so they see all work queued before. A
    caller that changes the tensor on another stream, or before `read`, must synchronize first. Of other devices a read
    waits for that stream, if the device has any, and copies then; that is logged once for each kind of device.

    Attributes:
        tensor: the wrapped tensor.
    """

    __slots__ = ("_before", "_copy", "_storage", "_stream", "dtype", "identity", "nbytes", "shape", "tensor")

    origin: Origin = "torch"

    def __init__(self, tensor: torch.Tensor) -> None:
        """Wrap `tensor`. Raises `UnsupportedStateError` if it has no plain bytes in memory."""
        name = _NAMES.get(tensor.dtype)
        if name is None or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            what = "nested" if tensor.is_nested else f"{tensor.dtype} with layout {tensor.layout}"
            parts = "its unbind()" if tensor.is_nested else "its parts, or a dense copy"
            if tensor.is_quantized:
                parts = "its int_repr(), q_scale() and q_zero_point() (per channel the q_per_channel_ ones)"
            raise UnsupportedStateError(f"a {what} tensor cannot be stored: store {parts}")
        if tensor.is_meta:
            raise UnsupportedStateError("a meta tensor has no data to store: materialize it first")
        shape, strides, storage = tuple(tensor.shape), tensor.stride(), tensor.untyped_storage()
        itemsize = tensor.element_size()
        self.tensor = tensor
        self.dtype = name
        self.shape = shape
        self.nbytes = tensor.numel() * itemsize
        if self.nbytes:
            if tensor.is_contiguous():
                span = tensor.numel()
            else:
                span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if (tensor.storage_offset() + span) * itemsize > storage.nbytes():
                raise UnsupportedStateError("the tensor's storage was freed (FSDP does so with unsharded parameters)")
        # Empty tensors have no address: the id of the storage object identifies them. The reference keeps the id valid.
        self._storage = None if self.nbytes else storage
        address = tensor.data_ptr() if self.nbytes else -id(storage)
        lazy = (tensor.is_conj(), tensor.is_neg())
        self.identity: Hashable = ("torch", tensor.device, address, name, shape, strides, lazy)
        self._copy = tensor.detach().resolve_conj().resolve_neg() if any(lazy) else None
        self._stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self._before = None if tensor.is_cpu or tensor.is_cuda else _current_stream(tensor.device)

    @property
    def resolved(self) -> torch.Tensor:
        """The tensor whose bytes are the image: a copy of a lazy conjugate or negation, or else a detached alias."""
        return self.tensor.detach() if self._copy is None else self._copy  # detach takes longer than all of __init__

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream on which reads run: the one that was current at creation. None: not on a CUDA device."""
        return self._stream

    def view(self) -> Bytes | None:
        """The image without a copy. None: the tensor is not contiguous, or not in host memory."""
        host = self.tensor if self._copy is None else self._copy
        if not on_host(host) or not host.is_contiguous():
            return None
        return np.asarray(_Image(host, self.nbytes)) if self.nbytes else np.empty(0, np.uint8)

    def read(self, offset: int, out: Bytes) -> None:
        """Copy a range of the image into `out`, and wait for it. From a device, only that range is copied."""
        data = self.resolved
        if on_host(data):
            NumpySource(image(data).numpy()).read(offset, out)
            return
        if self._stream is None:
            _say_blocking(data.device.type)
        if self._before is not None:
            # Prevents: bytes from before what the caller has queued on a stream of its own.
            self._before.synchronize()
        with on_stream(self._stream):
            self._copied(data, offset, out, wait=True)

    def queue(self, offset: int, out: Bytes) -> None:
        """Queue the copy of `read` on the current stream, from a CUDA device to registered memory.

        The caller ensures the order: the current stream must wait for earlier changes of the tensor, and later changes
        must wait for the current stream.
        """
        self._copied(self.resolved, offset, out, wait=False)

    def _copied(self, data: torch.Tensor, offset: int, out: Bytes, *, wait: bool) -> None:
        if offset < 0 or offset + out.size > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + out.size} of a tensor of {self.nbytes} bytes")
        if not out.size:
            return
        end = offset + out.size
        part = flat_bytes(data)[offset:end] if data.is_contiguous() else _gather(data, offset, out.size)
        torch.from_numpy(out).copy_(part, non_blocking=not wait)


def _current_stream(device: torch.device) -> Any:
    """The current stream of a device of another kind than CUDA; None: it has none, or torch does not tell."""
    try:
        return torch.accelerator.current_stream(device)
    except (AttributeError, RuntimeError, ValueError):  # torch before 2.6; MPS; no such accelerator
        return None


@lru_cache(maxsize=64)
def _say_blocking(kind: str) -> None:
    """Log once that training waits for copies from this kind of device."""
    _log.warning(
        "tensors on %s are copied while training waits: copies are queued only from CUDA and ROCm devices", kind
    )


class _Image:
    """An object from which numpy makes an array that keeps the tensor alive.

    torch would create three intermediate tensors for that, which takes longer than copying a small tensor.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """A ``with`` block whose work is queued on `stream`. None: on the current stream."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _gather(tensor: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    """Copy a range of a strided tensor's image on its device. Only the rows in the range are made contiguous."""
    first, skip = divmod(offset, tensor.element_size())
    last = -(-(offset + length) // tensor.element_size())
    rows = [flat_bytes(tensor[(*index, ...)].contiguous()) for index, _ in blocks(tensor.shape, first, last)]
    return torch.cat(rows)[skip : skip + length]


def from_buffer(dtype: str, shape: Sequence[int], buffer: Buffer | npt.NDArray[Any]) -> torch.Tensor:
    """Make a CPU tensor over `buffer` without a copy. It shares the buffer and keeps it alive.

    Args:
        dtype: logical dtype name.
        shape: logical shape.
        buffer: writable, C-contiguous, with the length of the tensor's image. If its address is not a multiple of the
            element size, the data is copied, because torch's kernels need aligned memory.

    Raises:
        FormatError: the dtype is unknown.
        ValueError: the length is wrong, or the memory is read-only (torch has no read-only tensors).
        UnsupportedStateError: this version of torch does not have the dtype.
    """
    torch_type = torch_dtype(dtype)
    image = buffer.reshape(-1).view(np.uint8) if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    if image.size != dtypes.nbytes(dtypes.get(dtype), shape):
        raise ValueError(f"{image.size} bytes for a tensor of {dtype} {tuple(shape)}")
    if not image.size:
        return torch.empty(tuple(shape), dtype=torch_type)
    if not image.flags.writeable:
        raise ValueError("buffer is read-only: torch tensors need writable memory")
    if image.__array_interface__["data"][0] % dtypes.get(dtype).itemsize:
        image = image.copy()
    known = dtypes.get(dtype)
    if known.numpy.isbuiltin == 1 and known.storage == known.name:  # views of arrays are faster than torch's
        return torch.from_numpy(image.view(known.numpy).reshape(tuple(shape)))
    return torch.from_numpy(image).view(torch_type).reshape(tuple(shape))


def copy_into(tensor: torch.Tensor, data: Buffer | npt.NDArray[Any], offset: int = 0) -> None:
    """Write `data` at byte `offset` of the image of an existing tensor, in place.

    The tensor may be a leaf that requires grad, strided, and on any device. Autograd notices the change. On a device
    the copy is done when this returns. The caller must synchronize with work on other streams.

    Args:
        tensor: a tensor of the stored dtype and shape (compare `TorchSource.dtype` and `.shape` first).
        data: C-contiguous bytes, read-only or not. Partial elements are allowed.
        offset: position in the image, in bytes.

    Raises:
        ValueError: the range exceeds the image.
        UnsupportedStateError: `recognise` refuses the tensor.
    """
    source = TorchSource(tensor)
    if isinstance(data, np.ndarray):
        piece = data.reshape(-1).view(np.uint8)
    else:
        piece = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
    if offset < 0 or offset + piece.size > source.nbytes:
        raise ValueError(f"bytes {offset} to {offset + piece.size} of a tensor of {source.nbytes} bytes")
    if not piece.size:
        return
    target = tensor.detach()
    lazy = target.is_conj() or target.is_neg()
    # torch refuses some in-place forms on inference tensors outside inference mode.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        if on_host(target) and not lazy:
            write_into(image(target).numpy(), piece, offset)
            if not tensor.is_inference():  # torch did not see numpy's write
                torch.autograd.graph.increment_version(tensor)
            return
        whole = source.resolved.contiguous()
        flat_bytes(whole)[offset : offset + piece.size].copy_(_alias(piece))
        if lazy:
            target.copy_(whole)
        elif not target.is_contiguous():
            image(target).copy_(image(whole))


def counted_changes(tensor: torch.Tensor) -> int:
    """torch's count of changes of the tensor's bits. 0 for inference tensors, which have no count.

    torch's notes on autograd describe the counter ("in-place correctness checks"). The name of the attribute is
    private. torch does not count changes through ``.data``, nor those by fused optimizers and scalers. So an equal
    count does not prove that nothing changed.
    """
    return 0 if tensor.is_inference() else tensor._version


def on_host(tensor: torch.Tensor) -> bool:
    """Whether numpy can access the tensor's memory."""
    return tensor.device.type == "cpu"


def image(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor, with any strides, as integers of the same width (complex128: with a last dimension of 2)."""
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_CARRIERS[tensor.element_size()])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes on its device: uint8, 1-D, without a copy.

    ``reshape(-1).view(torch.uint8)`` would not work: a single element may have a stride above 1, which `view` refuses.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _alias(data: Bytes) -> torch.Tensor:
    """A tensor over numpy memory that is only read. The caller keeps `data` alive.

    torch warns about read-only arrays, and warnings may be errors, so those are wrapped with ctypes.
    """
    if data.flags.writeable:
        return torch.from_numpy(data)
    memory = (ctypes.c_uint8 * data.size).from_address(data.__array_interface__["data"][0])
    return torch.frombuffer(memory, dtype=torch.uint8)


def check_device(device: Any) -> None:
    """Raise `UsageError` if tensors cannot be created on `device`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # a torch without CUDA raises AssertionError
        if "out of memory" in str(error):  # the argument is valid
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"device={device!r}: {first:.200}") from error


def _revive_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no dtype {name!r:.80}")
    return found


def _revive_device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise FormatError(f"torch {torch.__version__} has no device {text!r:.80}") from error


revive: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$size": torch.Size,
    "$dtype": _revive_dtype,
    "$device": _revive_device,
}
"""For `formats.states.state.unflatten`: functions that restore torch's own small types."""
