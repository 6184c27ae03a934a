"""Data classes for what a segment says about itself, and the document members that both forms share.

A segment describes itself completely. If the log is lost, the header (in the packed form also the index) still says
which run, term and steps the segment belongs to, on which checkpoints it builds, and how every tensor is encoded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ckptstore.errors import FormatError, IncompatibleFormatError
from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.checksums import chunk_hash, tensor_hash
from ckptstore.formats.history.members import Members
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.segment_files.segment_steps import StepEncoding, read_parents, read_steps, step_columns

__all__ = [
    "HASH_OF_NOTHING",
    "KNOWN_INCOMPAT",
    "LENGTH",
    "MAX_DOC_DEPTH",
    "RAW",
    "USES",
    "VERSION",
    "Chunk",
    "SegmentDoc",
    "TensorEntry",
    "frame",
    "identity_members",
    "read_identity",
    "read_trees",
    "with_extra",
]

HASH_OF_NOTHING: Final = chunk_hash(b"")
"""The hash of a chunk without stored bytes."""
VERSION: Final = 1
"""Version of the segment format; any other version is refused."""
KNOWN_INCOMPAT: Final[frozenset[str]] = frozenset()
"""Features of `SegmentDoc.incompat` that this version can read."""
RAW: Final = "raw"
"""The codec of bytes stored unencoded: the stored length is the logical one, the stored hash the decoded one."""
USES: Final = "uses"
"""Member of a packed document: features that a reader must know. It lets a reader refuse before it reads the index."""
LENGTH: Final = struct.Struct("<Q")
"""The length field at the beginning of a safetensors file."""
MAX_DOC_DEPTH: Final = jsontext.MAX_DEPTH + 8
"""Nesting limit of a document: a tree of the depth that `jsontext` allows, plus the members around it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored piece of a tensor. Chunk k holds its logical bytes [k * `CHUNK`, (k + 1) * `CHUNK`), encoded.

    Attributes:
        offset: absolute offset in the file.
        length: stored bytes; 0 if the codec needs none (the chunk is derived or predicted exactly).
        logical: decoded bytes.
        stored_hash: `chunk_hash` of the stored bytes.
        decoded_hash: `chunk_hash` of the decoded bytes; None if the writer did not have them.
    """

    offset: int
    length: int
    logical: int
    stored_hash: str
    decoded_hash: str | None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of one step, as a segment stores it.

    Attributes:
        name: flat name. A name that begins with ``ckptstore/`` is auxiliary: data that codecs of other entries refer to
            (a gradient, a pool of tiny tensors), not a tensor of the state. Only the packed form has such entries.
        dtype: logical dtype.
        shape: logical shape.
        chunks: its chunks in order; there are `layout.chunk_count(nbytes)`.
        codec: how the chunks are encoded, `RAW` or the name of a codec.
        params: parameters of the codec, a JSON object.
        global_shape: shape of the whole tensor if this entry is a shard.
        offset: position of the shard in the whole tensor.
        digest: state digest of the decoded bytes (unsigned 64-bit), or None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    codec: str = RAW
    params: Mapping[str, Any] = field(default_factory=dict)
    global_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    digest: int | None = None

    @property
    def nbytes(self) -> int:
        """Logical bytes."""
        return dtypes.nbytes(dtypes.get(self.dtype), self.shape)

    @property
    def stored(self) -> int:
        """Stored bytes, without the tensor's part of header and index."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def hash(self) -> str:
        """The tensor's hash (32 hex digits), from the hashes of its decoded chunks.

        Raises:
            FormatError: the writer did not record the hash of every decoded chunk.
        """
        hashes = [chunk.decoded_hash for chunk in self.chunks if chunk.decoded_hash is not None]
        if len(hashes) != len(self.chunks):
            raise FormatError(f"tensor {self.name!r}: the segment does not hold the hashes of its decoded chunks")
        return tensor_hash(hashes)


@dataclass(frozen=True, slots=True)
class SegmentDoc:
    """The complete description that a segment gives of itself.

    Attributes:
        run: uuid of the run (32 hex digits).
        term: the term whose writer wrote the segment.
        segment: the segment's own uuid (32 hex digits).
        encodings: step -> its description, for each step in the segment, ascending. The plain form has exactly one.
        generation: how often the file was reused, on media that recycle files; 0 for a new file.
        parents: term -> the checkpoint that the term continues from (None: it starts from scratch). It covers the
            segment's own term and those of its checkpoints, as far as the writer knew them.
        trees: step -> its typed JSON tree; empty in all but one segment of a checkpoint.
        tensors: step -> its tensors by name, in file order. Every one of `steps` is a key.
        incompat: features that a reader must know to read the segment.
        ro_compat: features that a writer must know to rewrite it.
        extra: members of the document that this version does not know, kept unchanged.
    """

    run: str
    term: int
    segment: str
    encodings: Mapping[int, StepEncoding]
    generation: int = 0
    parents: Mapping[int, CheckpointId | None] = field(default_factory=dict)
    trees: Mapping[int, Any] = field(default_factory=dict)
    tensors: Mapping[int, Mapping[str, TensorEntry]] = field(default_factory=dict)
    incompat: tuple[str, ...] = ()
    ro_compat: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        other_steps = (set(self.trees) | set(self.tensors)).difference(self.steps)
        if other_steps:
            raise FormatError(f"segment {self.segment}: trees or tensors of other steps ({min(other_steps)})")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps whose data it holds, ascending."""
        return tuple(self.encodings)

    @property
    def kind(self) -> str:
        """The kind of its encodings; ``mixed`` if they differ."""
        kinds = {encoding.kind for encoding in self.encodings.values()}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def lossy(self) -> bool:
        """Whether the tensors of some step differ from those that training had."""
        return any(encoding.lossy for encoding in self.encodings.values())


def identity_members(doc: SegmentDoc, form: str) -> dict[str, Any]:
    """Return the members at the beginning of both forms: the document without trees and tensors.

    Raises:
        FormatError: the document is invalid: a reader would refuse it.
    """
    identity = {
        "version": VERSION,
        "form": form,
        "incompat": list(doc.incompat),
        "ro_compat": list(doc.ro_compat),
        "run": doc.run,
        "term": doc.term,
        "segment": doc.segment,
        "generation": doc.generation,
        "parents": [[term, None if parent is None else list(parent)] for term, parent in doc.parents.items()],
        **step_columns(doc.encodings),
    }
    read_identity(Members(identity, f"segment {doc.segment}"), f"segment {doc.segment}")
    return identity


def read_identity(members: Members, where: str) -> SegmentDoc:
    """Remove from `members` everything that `identity_members` wrote, except the form, and return it as a document.

    Returns:
        The document without trees, tensors and unknown members.

    Raises:
        IncompatibleFormatError: another version, or an unknown ``incompat`` feature.
        FormatError: a member is missing or invalid.
    """
    version = members.number("version")
    if version != VERSION:
        raise IncompatibleFormatError(f"{where}: segment format version {version}; this version reads {VERSION}")
    incompat = members.names("incompat")
    unknown = sorted(set(incompat) - KNOWN_INCOMPAT)
    if unknown:
        raise IncompatibleFormatError(f"{where}: needs features that this version does not know: {unknown!r:.200}")
    return SegmentDoc(
        run=members.digest("run"),
        term=members.term(),
        segment=members.digest("segment"),
        generation=members.number("generation"),
        parents=read_parents(members),
        encodings=read_steps(members),
        incompat=incompat,
        ro_compat=members.names("ro_compat"),
    )


def with_extra(members: dict[str, Any], doc: SegmentDoc) -> dict[str, Any]:
    """Append the unknown members of `doc` to `members`. Raises `FormatError` if `members` already has one of them."""
    known = sorted(doc.extra.keys() & members.keys())
    if known:
        raise FormatError(f"segment {doc.segment}: {known[0]!r} is a known member and cannot be in `extra`")
    return members | dict(doc.extra)


def read_trees(members: Members, steps: Sequence[int]) -> dict[int, Any]:
    """Remove ``trees`` from `members` and return it by step.

    The JSON form is ``{"trees": {"100": tree}}``. The trees themselves are not checked: `state.unflatten` does that.

    Raises:
        FormatError: a tree of a step that the segment does not hold.
    """
    names = {str(step): step for step in steps}
    trees = members.mapping("trees")
    if not trees.keys() <= names.keys():
        members.refuse("trees", "an object of the segment's steps")
    return {names[name]: tree for name, tree in trees.items()}


def frame(header: bytes, header_size: int) -> bytes:
    """Return length field, header text and padding, `header_size` bytes. Raises `FormatError` if the text is longer."""
    planned = header_size - LENGTH.size
    if len(header) > planned:
        raise FormatError(f"a header of {len(header)} bytes exceeds the {planned} bytes that were planned")
    return LENGTH.pack(planned) + header.ljust(planned)
