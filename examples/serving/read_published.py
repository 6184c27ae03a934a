"""Read the newest weights of `ckpt publish --sha256` with json, numpy and safetensors alone. Every tensor is verified.

python read_published.py /shared/gpt
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from safetensors import deserialize


def read(place: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The newest manifest, and the bytes of each tensor. Raises ValueError: something is damaged."""
    pointer = json.loads((place / "latest.json").read_text())
    before, tensors, manifest = None, {}, {}
    for folder in pointer["chain"]:  # a full, and the deltas on it
        text = (place / folder / "manifest.json").read_bytes()
        manifest = json.loads(text)
        if manifest["base_manifest"] != before:
            raise ValueError(f"{folder}: builds on another version than the one before it")
        before = hashlib.sha256(text).hexdigest()
        for file in {tensor["file"] for tensor in manifest["tensors"] if tensor["encoding"] == "raw"}:
            for name, member in deserialize((place / folder / file).read_bytes()):
                tensors[name] = np.frombuffer(member["data"], np.uint8)
    if before != pointer["manifest"]:
        raise ValueError("the manifest is not the one that latest.json names")
    for tensor in manifest["tensors"]:
        if hashlib.sha256(tensors[tensor["name"]]).hexdigest() != tensor["sha256"]:
            raise ValueError(f"{tensor['name']}: damaged")
    return manifest, tensors


if __name__ == "__main__":
    manifest, tensors = read(Path(sys.argv[1]))
    for one in manifest["tensors"]:
        print(one["name"], one["dtype"], one["shape"], len(tensors[one["name"]]), "bytes, intact")
    print("version", manifest["version"], "of step", manifest["step"])
