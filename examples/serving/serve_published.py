"""Keep a live torch module up to date with a folder of `ckpt publish`, without ckptstore. All or nothing.

Each new version is read, every tensor of it is verified, and only then the module's tensors change, in place. A version
that is damaged, or that disappears while it is read, leaves the module as it was. Both layouts are understood; the
deltas of `--layout slime` need zstandard.

    python serve_published.py /shared/gpt --layers 2        # follows until Ctrl-C
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
import xxhash
from safetensors import deserialize

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, as a view."""
    return tensor.reshape(-1).view(torch.uint8)


class PublishedWeights:
    """The weights of a module, and the version that they have."""

    def __init__(self, place: Path, module: torch.nn.Module) -> None:
        self.place = place
        self.module = module
        self.version = 0
        self._manifest = ""  # SHA-256 of the manifest of that version

    def update(self) -> bool:
        """Load the newest version into the module -> whether there was a new one.

        Raises ValueError: something is damaged, or does not fit. FileNotFoundError: nothing is published, or the
        version was removed meanwhile. The module is as it was in both cases; call again.
        """
        pointer = json.loads((self.place / "latest.json").read_text())
        if pointer["manifest"] == self._manifest:
            return False
        own = self.module.state_dict()
        manifests = [self._read(folder) for folder in reversed(pointer["chain"])]  # the newest one first
        hashes = [digest for _, digest in manifests]
        if hashes[0] != pointer["manifest"]:
            raise ValueError("the manifest is not the one that latest.json names")
        if any(one["base_manifest"] != (hashes[n + 1 : n + 2] or [None])[0] for n, (one, _) in enumerate(manifests)):
            raise ValueError("a version builds on another version than the one before it")
        # The versions that the module does not have; all of the chain if it has none of it.
        fresh = manifests[: hashes.index(self._manifest)] if self._manifest in hashes else manifests
        staged: dict[str, torch.Tensor] = {}
        for manifest, _ in reversed(fresh):
            self._apply(manifest, own, staged)
        newest = manifests[0][0]
        self._check(newest, own, staged)
        with torch.no_grad():  # nothing can fail from here on
            for name, image in staged.items():
                own[name].copy_(image.view(own[name].dtype).reshape(own[name].shape))
            for name, there in newest["tied"]:
                own[name].copy_(own[there])  # does nothing if they are one tensor in the module, too
        self.version, self._manifest = pointer["version"], pointer["manifest"]
        return True

    def _read(self, folder: str) -> tuple[dict, str]:
        text = (self.place / folder / "manifest.json").read_bytes()
        return json.loads(text), hashlib.sha256(text).hexdigest()

    def _apply(self, manifest: dict, own: dict[str, torch.Tensor], staged: dict[str, torch.Tensor]) -> None:
        folder = self.place / f"weight_v{manifest['version']:06d}"
        encodings = {tensor["name"]: tensor["encoding"] for tensor in manifest["tensors"]}
        for file in sorted({tensor["file"] for tensor in manifest["tensors"] if tensor["file"]}):
            for name, member in deserialize((folder / file).read_bytes()):
                image = torch.frombuffer(bytearray(member["data"]), dtype=torch.uint8) if member["data"] else None
                image = torch.empty(0, dtype=torch.uint8) if image is None else image
                if encodings[name] == "xor":
                    import zstandard

                    before = staged[name] if name in staged else as_bytes(own[name].cpu().contiguous())
                    frame = zstandard.ZstdDecompressor().decompress(bytes(member["data"]))
                    image = torch.frombuffer(bytearray(frame), dtype=torch.uint8) ^ before
                staged[name] = image

    def _check(self, manifest: dict, own: dict[str, torch.Tensor], staged: dict[str, torch.Tensor]) -> None:
        """Every tensor of the newest version: those that change, and those that the module is to have already."""
        names = {tensor["name"] for tensor in manifest["tensors"]}
        if unknown := (names | {name for name, _ in manifest["tied"]}) ^ own.keys():
            raise ValueError(f"the module and the weights differ in {sorted(unknown)[:5]}")
        kinds = {}
        for tensor in manifest["tensors"]:
            name = tensor["name"]
            image = staged[name] if name in staged else as_bytes(own[name].cpu().contiguous())
            kinds[name] = (DTYPES.get(tensor["dtype"]), tensor["shape"])
            if (own[name].dtype, list(own[name].shape)) != kinds[name] or len(image) != own[name].nbytes:
                raise ValueError(f"{name}: {tensor['dtype']} {tensor['shape']} does not fit the module")
            if xxhash.xxh3_128_hexdigest(image.numpy()) != tensor["xxh3"]:
                raise ValueError(f"{name}: damaged")
        for name, there in manifest["tied"]:
            if (own[name].dtype, list(own[name].shape)) != kinds[there]:
                raise ValueError(f"{name}: the weight of {there} does not fit it")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("place", type=Path)
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--every", type=float, default=1.0)
    arguments.add_argument("--timeout", type=float, default=float("inf"))
    asked = arguments.parse_args()
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(asked.layers)))
    weights = PublishedWeights(asked.place, module)
    end = time.monotonic() + asked.timeout
    while time.monotonic() < end:
        try:
            if weights.update():
                print("serving version", weights.version, flush=True)
        except (ValueError, OSError) as error:
            print("still serving version", weights.version, "because", error, flush=True)
        time.sleep(asked.every)


if __name__ == "__main__":
    main()
