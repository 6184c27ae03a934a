"""What a segment says about itself, as data classes, and the members that both of its forms share.

A segment describes itself completely: with the log gone, its header (and in the packed form its index) still tell which
run, term and steps it belongs to, on which checkpoints it builds, and how every tensor is encoded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ckptstore.errors import FormatError, IncompatibleFormatError
from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.checksums import tensor_hash
from ckptstore.formats.members import Members
from ckptstore.formats.records import CheckpointId
from ckptstore.formats.segment_steps import StepEncoding, read_parents, read_steps, step_columns

__all__ = [
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

VERSION: Final = 1
"""Version of the segment format; another one is refused."""
KNOWN_INCOMPAT: Final[frozenset[str]] = frozenset()
"""Features of `SegmentDoc.incompat` that this version can read."""
RAW: Final = "raw"
"""The codec of bytes stored as they are: stored length, stored hash = logical length, decoded hash."""
USES: Final = "uses"
"""Member of a packed document: what its reader has to know, so that one that does not refuses before the index."""
LENGTH: Final = struct.Struct("<Q")
"""The length field that a safetensors file begins with."""
MAX_DOC_DEPTH: Final = jsontext.MAX_DEPTH + 8
"""Nesting of a document: a tree as deep as `jsontext` takes by itself, and the members around it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored piece of a tensor: chunk k holds the logical bytes [k * `CHUNK`, (k + 1) * `CHUNK`) of it, encoded.

    Attributes:
        offset: absolute offset in the file.
        length: stored bytes; 0 when the codec needs none (derived or predicted exactly).
        logical: decoded bytes.
        stored_hash: `chunk_hash` of the stored bytes.
        decoded_hash: `chunk_hash` of the decoded bytes, or None where the writer did not have them.
    """

    offset: int
    length: int
    logical: int
    stored_hash: str
    decoded_hash: str | None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of one step as a segment stores it.

    Attributes:
        name: flat name; one that begins with ``ckptstore/`` is auxiliary: data that other entries' codecs refer to (a
            gradient, a pool of tiny tensors), not a tensor of the state. Only the packed form has those.
        dtype: logical dtype.
        shape: logical shape.
        chunks: `layout.chunk_count(nbytes)` of them, in order.
        codec: how the chunks are encoded, `RAW` or the name of a codec.
        params: the codec's parameters: a JSON object.
        global_shape: shape of the whole tensor, when this is a shard.
        offset: where the shard begins in the whole tensor.
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
        """Stored bytes, without the tensor's share of header and index."""
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
    """Everything that a segment says about itself.

    Attributes:
        run: uuid of the run (32 hex digits).
        term: the term that wrote it.
        segment: the segment's own uuid (32 hex digits).
        encodings: by step, ascending, what it says of each that it holds; the plain form holds exactly one.
        generation: counts the reuses of the file on media that recycle files; 0 for a fresh one.
        parents: the checkpoint that a term continues from (None: from nothing), for its own term and those of its
            checkpoints, as far as the writer knew.
        trees: the typed JSON tree of each step; empty in further segments of a checkpoint.
        tensors: per step (every one of `steps` is a key), its tensors by name, in file order.
        incompat: features without which the segment cannot be read.
        ro_compat: features without which it must not be rewritten.
        extra: members of the document that this version does not know, kept as they are.
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
        strangers = (set(self.trees) | set(self.tensors)).difference(self.steps)
        if strangers:
            raise FormatError(f"segment {self.segment}: trees or tensors of other steps ({min(strangers)})")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps it holds data of, ascending."""
        return tuple(self.encodings)

    @property
    def kind(self) -> str:
        """The kind of its encodings, ``mixed`` if they differ."""
        kinds = {encoding.kind for encoding in self.encodings.values()}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def lossy(self) -> bool:
        """Whether some of its steps are not what training had."""
        return any(encoding.lossy for encoding in self.encodings.values())


def identity_members(doc: SegmentDoc, form: str) -> dict[str, Any]:
    """The members of the document, without trees and tensors, that both forms begin with.

    Raises:
        FormatError: the document could not be read back.
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
    """Take what `identity_members` wrote out of `members`, the form aside.

    Returns:
        The document without trees, tensors and unknown members.

    Raises:
        IncompatibleFormatError: another version, or an unknown ``incompat`` feature.
        FormatError: a member is missing or not what it must be.
    """
    version = members.number("version")
    if version != VERSION:
        raise IncompatibleFormatError(f"{where}: segment format version {version}; {VERSION} is known")
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
    """`members` followed by those that this version does not know. Raises `FormatError` if it does know one."""
    taken = sorted(doc.extra.keys() & members.keys())
    if taken:
        raise FormatError(f"segment {doc.segment}: {taken[0]!r} is no unknown member")
    return members | dict(doc.extra)


def read_trees(members: Members, steps: Sequence[int]) -> dict[int, Any]:
    """Take the trees, ``{"trees": {"100": tree}}``, by step. Their insides are checked by `state.unflatten`.

    Raises:
        FormatError: a tree of a step that the segment does not hold.
    """
    names = {str(step): step for step in steps}
    trees = members.mapping("trees")
    if not trees.keys() <= names.keys():
        members.refuse("trees", "an object of the segment's steps")
    return {names[name]: tree for name, tree in trees.items()}


def frame(header: bytes, header_size: int) -> bytes:
    """Length field, header text and padding: `header_size` bytes. Raises `FormatError` if the text does not fit."""
    planned = header_size - LENGTH.size
    if len(header) > planned:
        raise FormatError(f"a header of {len(header)} bytes does not fit the {planned} that were planned")
    return LENGTH.pack(planned) + header.ljust(planned)
