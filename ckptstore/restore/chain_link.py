"""One tensor of one encoding: its stored chunks, read, checked, and laid over the bytes below."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import checksums, codecs
from ckptstore.formats.codecs import Codec
from ckptstore.formats.segment import TensorEntry
from ckptstore.formats.step_codec import Group
from ckptstore.host.buffers import Bytes
from ckptstore.segments.segment_reader import SegmentReader, read_chunk

__all__ = ["Link", "apply_link", "check_decoded", "read_payload", "wrong"]


@dataclass(frozen=True)  # no slots: the codec is made once, not for every chunk
class Link:
    """One tensor of one encoding, in the segment that holds it.

    Attributes:
        tensor: as the segment describes it.
        reader: the segment.
        step: the step that the encoding leads to.
        group: the tensors that an optimizer's step moved with it, if that is how it is stored.
    """

    tensor: TensorEntry
    reader: SegmentReader
    step: int
    group: Group | None = None

    @cached_property
    def codec(self) -> Codec:
        """How its chunks are coded. Raises `IncompatibleFormatError` for a codec that this version does not know."""
        try:
            return codecs.codec(self.tensor.codec, {k: v for k, v in self.tensor.params.items() if k != "of"})
        except FormatError as error:
            raise type(error)(f"{self.where}: {error}") from error

    @property
    def base_ratio(self) -> int:
        """Bytes of a base for each byte of the tensor: 0 for a self-contained link, 2 for a copy of a master."""
        return 1 if self.group is not None else self.codec.base_ratio

    @property
    def where(self) -> str:
        """Names segment and tensor in errors."""
        return f"{self.reader.entry.key}: tensor {self.tensor.name!r}"


def apply_link(link: Link, index: int, base: Bytes | None, out: Bytes, scratch: Bytes, *, verify: bool) -> None:
    """Lay chunk `index` of a link over `base` (None if it needs none, `out` itself to work in place), into `out`.

    Raises:
        CorruptSegmentError: the payload is not what was written.
        StorageError: the medium failed.
    """
    payload = read_payload(link, index, scratch, verify=verify)
    try:
        codecs.decode(link.codec, payload, len(out), base, out)
    except (CorruptSegmentError, FormatError, ValueError) as error:
        raise wrong(f"{link.where}: chunk {index} of step {link.step}: {error}") from error


def read_payload(link: Link, index: int, scratch: Bytes, *, verify: bool) -> Bytes:
    """The stored bytes of chunk `index`: a part of `scratch`.

    Raises:
        CorruptSegmentError: its checksum differs, or it is longer than `scratch`.
        StorageError: the medium failed.
    """
    return read_chunk(link.reader, link.tensor, link.tensor.chunks[index], scratch, verify=verify)


def check_decoded(link: Link, index: int, out: Bytes, *, verify: bool) -> None:
    """Compare what chunk `index` became with what was saved. Raises `CorruptSegmentError` naming tensor and step."""
    expected = link.tensor.chunks[index].decoded_hash
    if verify and expected is not None and checksums.chunk_hash(out.data) != expected:
        raise wrong(f"{link.where}: chunk {index}: its chain gives other bytes than were saved in step {link.step}")


def wrong(text: str) -> CorruptSegmentError:
    """The error of bytes that were decoded, and are not what was saved. See `formats.kernel_choice.confirmed`."""
    error = CorruptSegmentError(text)
    error.computed = True
    return error
