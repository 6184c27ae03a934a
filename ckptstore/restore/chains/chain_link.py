"""Reads, checks and applies the stored chunks of one tensor of one encoding (a link of a chain)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import checksums, codecs
from ckptstore.formats.codecs import Codec
from ckptstore.formats.segment_files.segment import RAW, TensorEntry
from ckptstore.formats.segment_files.step_codec import StepGroup
from ckptstore.host.buffers import Bytes
from ckptstore.segments.segment_reader import SegmentReader, read_chunk

__all__ = ["TensorLink", "apply_link", "check_decoded", "read_payload", "wrong"]


@dataclass(frozen=True)  # no slots: the codec is created once, not for every chunk
class TensorLink:
    """One tensor of one encoding, in the segment that holds it.

    Attributes:
        tensor: its entry in the segment.
        reader: the segment.
        step: the step that the encoding restores.
        group: the tensors that an optimizer step updated together with it, if it is stored as such a step.
    """

    tensor: TensorEntry
    reader: SegmentReader
    step: int
    group: StepGroup | None = None

    @cached_property
    def codec(self) -> Codec:
        """The codec of its chunks. Raises `IncompatibleFormatError` for a codec that this version does not know."""
        try:
            return codecs.codec(self.tensor.codec, {k: v for k, v in self.tensor.params.items() if k != "of"})
        except FormatError as error:
            raise type(error)(f"{self.where}: {error}") from error

    @property
    def base_ratio(self) -> int:
        """Bytes of a base for each byte of the tensor: 0 for a self-contained link, 2 for a copy of a master."""
        if self.tensor.codec == RAW:  # of many thousand tensors
            return 0
        return 1 if self.group is not None else self.codec.base_ratio

    @property
    def where(self) -> str:
        """Segment and tensor, for error messages."""
        return f"{self.reader.entry.key}: tensor {self.tensor.name!r}"


def apply_link(link: TensorLink, index: int, base: Bytes | None, out: Bytes, scratch: Bytes, *, verify: bool) -> None:
    """Apply chunk `index` of a link to `base` (None if it needs none, `out` itself to work in place), into `out`.

    Raises:
        CorruptSegmentError: the payload is not what was written.
        StorageError: the medium failed.
    """
    payload = read_payload(link, index, scratch, verify=verify)
    try:
        codecs.decode(link.codec, payload, len(out), base, out)
    except (CorruptSegmentError, FormatError, ValueError) as error:
        raise wrong(f"{link.where}: chunk {index} of step {link.step}: {error}") from error


def read_payload(link: TensorLink, index: int, scratch: Bytes, *, verify: bool) -> Bytes:
    """The stored bytes of chunk `index`: a slice of `scratch`.

    Raises:
        CorruptSegmentError: its checksum differs, or it is longer than `scratch`.
        StorageError: the medium failed.
    """
    return read_chunk(link.reader, link.tensor, link.tensor.chunks[index], scratch, verify=verify)


def check_decoded(link: TensorLink, index: int, out: Bytes, *, verify: bool) -> None:
    """Compare the restored chunk `index` with the hash of what was saved. Raises `CorruptSegmentError` naming tensor
    and step."""
    expected = link.tensor.chunks[index].decoded_hash
    if verify and expected is not None and checksums.chunk_hash(out.data) != expected:
        raise wrong(f"{link.where}: chunk {index}: its chain gives other bytes than were saved in step {link.step}")


def wrong(text: str) -> CorruptSegmentError:
    """The error for decoded bytes that are not what was saved. See `formats.kernel_choice.confirmed`."""
    error = CorruptSegmentError(text)
    error.computed = True
    return error
