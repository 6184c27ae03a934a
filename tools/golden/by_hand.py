"""Builds stores from given slots and segments, right or wrong, including those that no writer makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckptstore.formats import codecs, dtypes
from ckptstore.formats.checksums import chunk_hash, header_hash, state_hash, xxh3_128
from ckptstore.formats.history.record_text import encode_format, seal
from ckptstore.formats.history.records import (
    FORMAT_KEY,
    NO_SLOT,
    CheckpointId,
    FormatFile,
    manifest_key,
    segment_key,
    slot_key,
)
from ckptstore.formats.jsontext import dumps
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry, header_length
from ckptstore.formats.segment_files.segment_steps import SegmentPart, StepEncoding
from ckptstore.formats.states.state import tensor_names
from tools.golden.make_segments import RUN, packed

__all__ = ["Entry", "Hand", "Made", "Step", "changed_document", "entry"]

Array = np.ndarray[Any, Any]
Entry = tuple[TensorEntry, bytes]


def entry(
    name: str,
    data: Array,
    codec: codecs.Codec | None = None,
    base: Array | None = None,
    *,
    dtype: str = "",
    params: Mapping[str, Any] | None = None,
    **wrong: Any,
) -> Entry:
    """A tensor of a packed segment, and its stored bytes.

    Args:
        name: its name.
        data: the decoded bytes, one chunk.
        codec: None: raw.
        base: the tensor that it is encoded against.
        dtype: logical dtype; empty: that of `data`.
        params: further parameters.
        wrong: members of its chunk to replace.
    """
    image = codecs.as_bytes(data)
    stored = image.tobytes()
    if codec is not None:
        stored = codecs.encode(codec, image, None if base is None else codecs.as_bytes(base)).tobytes()
    chunk = Chunk(0, len(stored), len(image), chunk_hash(stored), chunk_hash(image.tobytes()))
    dtype = dtype or dtypes.from_numpy(data.dtype).name
    told = ("raw", {}) if codec is None else (codec.name, {**codec.params, **(params or {})})
    return TensorEntry(name, dtype, data.shape, (replace(chunk, **wrong),), *told), stored


@dataclass(frozen=True)
class Step:
    """One step of a segment. The tree names all tensors that are not auxiliary, unless another is given."""

    entries: Sequence[Entry] = ()
    tree: Any = None
    base: CheckpointId | None = None
    lossy: bool = False
    part: SegmentPart | None = None
    term: int | None = None
    treeless: bool = False

    @property
    def full_tree(self) -> Any:
        if self.tree is not None:
            return self.tree
        names = [tensor.name for tensor, _ in self.entries]
        return {name: {"$t": name} for name in names if not name.startswith("ckptstore/")}

    @property
    def state(self) -> str:
        """The state hash of the decoded hashes; a tensor without a hash is left out."""
        names = set(tensor_names(self.full_tree))
        tensors = [one for one, _ in self.entries if one.name in names and one.chunks[0].decoded_hash is not None]
        return state_hash(dumps(self.full_tree), [(one.name, one.dtype, one.shape, one.hash) for one in tensors])


@dataclass
class Made:
    """A segment in the store, and its entry in a COMMIT."""

    term: int
    entry: dict[str, Any]
    steps: Mapping[int, Step]

    def checkpoint(self, step: int, **other: Any) -> dict[str, Any]:
        told = {"step": step, "state": self.steps[step].state, "time": 1.5, "tensors": 0, "bytes": 0}
        return told | other

    def encoding(self, step: int, *more: Made, **other: Any) -> dict[str, Any]:
        """The encoding by this segment and `more`."""
        told, base = self.steps[step], self.steps[step].base
        ids = [self.entry["id"], *(one.entry["id"] for one in more)]
        return {
            "checkpoint": [told.term or self.term, step],
            "kind": "full" if base is None else "delta",
            "base": None if base is None else list(base),
            "segments": ids,
            "lossy": told.lossy,
            "bytes": 0,
        } | other

    def identity(self, step: int) -> CheckpointId:
        return CheckpointId(self.steps[step].term or self.term, step, self.steps[step].state)


def changed_document(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """A segment whose document has replaced members."""

    def made(data: bytes) -> bytes:
        size = header_length(data, len(data), "golden")
        members = json.loads(data[8:size])
        document = json.loads(members["__metadata__"]["ckptstore"])
        change(document)
        members["__metadata__"]["ckptstore"] = dumps(document).decode()
        return data[:8] + dumps(members).ljust(size - 8) + data[size:]

    return made


@dataclass
class Hand:
    """A store that is written slot by slot."""

    folder: Path
    anchor_every: int = 1024
    seq: int = 0
    previous: str = NO_SLOT
    term: int = 0
    segments: int = 0
    nonces: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.put(FORMAT_KEY, encode_format(FormatFile(RUN, anchor_every=self.anchor_every)))

    def put(self, key: str, data: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def open(self, parent: CheckpointId | None = None, **wrong: Any) -> None:
        """Open the next term. `wrong`: members to replace."""
        self.term += 1
        self.nonces[self.term] = f"{self.term:032x}"
        told = {"parent": None if parent is None else list(parent), "time": 1.5, "writer": {"host": "golden"}}
        self.slot("open", told, **wrong)

    def commit(self, *segments: Made, wrong: Mapping[str, Any] | None = None, **members: Any) -> None:
        """Commit `segments`; `wrong`: common members to replace."""
        told = {"segments": [one.entry for one in segments]} if segments else {}
        self.slot("commit", told | members, **(wrong or {}))

    def promise(self, made: Made, *steps: int, wrong: Mapping[str, Any] | None = None, **members: Any) -> None:
        """Add a segment with its checkpoints and encodings: of all its steps, or of these."""
        wanted = steps or tuple(made.steps)
        self.commit(
            made,
            wrong=wrong,
            **{
                "checkpoints": [made.checkpoint(step) for step in wanted],
                "encodings": [made.encoding(step) for step in wanted],
            }
            | members,
        )

    def common(self, kind: str) -> dict[str, Any]:
        heading = {"ckptstore": kind, "run": RUN, "seq": self.seq, "previous": self.previous}
        return heading | {"term": self.term, "nonce": self.nonces[self.term]}

    def slot(self, kind: str, members: Mapping[str, Any], **wrong: Any) -> None:
        data = seal(self.common(kind) | wrong | dict(members))
        self.put(slot_key(self.seq), data)
        self.previous = xxh3_128(data)
        self.seq += 1

    def in_manifest(self, members: Mapping[str, Any], **wrong: Any) -> None:
        """A COMMIT in a manifest; `wrong`: members of the manifest that differ from the slot's."""
        data = seal(self.common("commit") | wrong | dict(members))
        name = f"{self.seq:032x}"
        self.put(manifest_key(self.term, name), data)
        self.slot("commit", {"manifest": {"id": name, "size": len(data), "hash": xxh3_128(data)}})

    def segment(
        self, steps: Mapping[int, Step], change: Callable[[bytes], bytes] | None = None, **members: Any
    ) -> Made:
        """Write a packed segment of the newest term; `members` of its document are replaced, `change` is made last."""
        self.segments += 1
        told = {
            step: StepEncoding(
                one.term or self.term, "full" if one.base is None else "delta", one.base, 1.5, one.lossy, one.part
            )
            for step, one in steps.items()
        }
        own = {"run": RUN, "term": self.term, "segment": f"{self.segments:032x}"}
        trees = {step: one.full_tree for step, one in steps.items() if not one.treeless}
        doc = SegmentDoc(**own | members, encodings=told, parents={self.term: None}, trees=trees)
        data, _ = packed(doc, {step: one.entries for step, one in steps.items()})
        data = data if change is None else change(data)
        size = header_length(data, len(data), "golden")
        self.put(segment_key(self.term, own["segment"]), data)
        made = {"id": own["segment"], "size": len(data), "header": size, "hash": header_hash(data[:size])}
        return Made(self.term, made, steps)
