"""Codecs: compress and decompress a chunk's bytes without loss, as pure functions on buffers.

docs/codecs.md shows how to use them. `kernels` has the hot loops, in numpy; compiled forms produce the same bytes.
Imports only modules of `formats` that do not know about codecs.
"""

from __future__ import annotations

from ckptstore.formats.codecs.block_loops import apply, as_bytes, decode, encode
from ckptstore.formats.codecs.blocks import BLOCK, CHUNK, bound
from ckptstore.formats.codecs.chunk_batches import ChunkJob, encode_all
from ckptstore.formats.codecs.codec import Buffer, Codec, Method, Sample, word_size
from ckptstore.formats.codecs.codec_choice import (
    FAST_POLICY,
    PAPER_POLICY,
    SMALL_POLICY,
    CodecChoice,
    Policy,
    candidates,
    choose,
    evaluate,
    sample_ranges,
)
from ckptstore.formats.codecs.codec_table import (
    CODECS,
    FROM_MASTER,
    KINDS,
    METHODS,
    WITHOUT_BASE,
    codec,
    copies_of,
    kind_of,
    methods_of,
)
from ckptstore.formats.codecs.delta_sums import add
from ckptstore.formats.codecs.derive import Derive
from ckptstore.formats.codecs.entropy import context_entropy, difference_entropy, plane_entropy
from ckptstore.formats.codecs.plane_coder import DEPTH, FAST, THRIFTY
from ckptstore.formats.codecs.prefix import Prefix, distinct_prefixes
from ckptstore.formats.codecs.raw_planes import Planes, Raw
from ckptstore.formats.codecs.tensor_pools import TINY, PoolMember, TensorPool, plan_pools
from ckptstore.formats.codecs.xor_sub import MAX_CLASSES, RUN, Context, Sub, Xor

__all__ = [
    "BLOCK",
    "CHUNK",
    "CODECS",
    "DEPTH",
    "FAST",
    "FAST_POLICY",
    "FROM_MASTER",
    "KINDS",
    "MAX_CLASSES",
    "METHODS",
    "PAPER_POLICY",
    "RUN",
    "SMALL_POLICY",
    "THRIFTY",
    "TINY",
    "WITHOUT_BASE",
    "Buffer",
    "ChunkJob",
    "Codec",
    "CodecChoice",
    "Context",
    "Derive",
    "Method",
    "Planes",
    "Policy",
    "PoolMember",
    "Prefix",
    "Raw",
    "Sample",
    "Sub",
    "TensorPool",
    "Xor",
    "add",
    "apply",
    "as_bytes",
    "bound",
    "candidates",
    "choose",
    "codec",
    "context_entropy",
    "copies_of",
    "decode",
    "difference_entropy",
    "distinct_prefixes",
    "encode",
    "encode_all",
    "evaluate",
    "kind_of",
    "methods_of",
    "plan_pools",
    "plane_entropy",
    "sample_ranges",
    "word_size",
]
