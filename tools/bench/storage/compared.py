"""Names the methods that are compared, without their code: the driver reads this and never imports torch."""

from __future__ import annotations

from dataclasses import dataclass

READY = "ready"
"""The line that a worker writes before it measures; it then waits for a line."""


@dataclass(frozen=True, slots=True)
class SaveMethod:
    """A way of saving (`savers`)."""

    label: str
    reader: str
    """The load method that reads its files, to compare them bit for bit."""
    keeps: str
    """Name of the file or folder that a load starts from."""


@dataclass(frozen=True, slots=True)
class LoadMethod:
    """A way of loading (`loaders`)."""

    label: str
    saver: str
    """The save method that writes its input."""


SAVES: dict[str, SaveMethod] = {
    "raw-buffered": SaveMethod("raw: buffered + fsync", "raw-buffered", "image"),
    "raw-direct": SaveMethod("raw: O_DIRECT, new file", "raw-direct", "image"),
    "raw-overwrite": SaveMethod("raw: O_DIRECT, overwrite", "raw-direct", "image"),
    "ckptstore": SaveMethod("ckptstore save", "ckptstore", "store"),
    "ckptstore-async": SaveMethod("ckptstore save_async", "ckptstore", "store"),
    "safetensors": SaveMethod("safetensors + fsync", "safetensors", "state.safetensors"),
    "torch": SaveMethod("torch.save + fsync", "torch", "state.pt"),
    "dcp": SaveMethod("DCP save + fsync", "dcp", "dcp"),
    "dcp-async": SaveMethod("DCP async_save, warm stager", "dcp", "dcp"),
}

LOADS: dict[str, LoadMethod] = {
    "raw-buffered": LoadMethod("raw: buffered read", "raw-direct"),
    "raw-direct": LoadMethod("raw: O_DIRECT read", "raw-direct"),
    "ckptstore": LoadMethod("ckptstore load (verified)", "ckptstore"),
    "ckptstore-unverified": LoadMethod("ckptstore load, verify=False", "ckptstore"),
    "ckptstore-mmap": LoadMethod("ckptstore load, mmap (verified)", "ckptstore"),
    "ckptstore-mmap-unverified": LoadMethod("ckptstore load, mmap, verify=False", "ckptstore"),
    "safetensors": LoadMethod("safetensors load_file", "safetensors"),
    "safetensors-pread": LoadMethod("safetensors load_file, pread", "safetensors"),
    "safe-open": LoadMethod("safetensors safe_open", "safetensors"),
    "torch": LoadMethod("torch.load", "torch"),
    "torch-mmap": LoadMethod("torch.load, mmap", "torch"),
    "dcp": LoadMethod("DCP load", "dcp"),
}
