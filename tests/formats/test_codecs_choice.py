"""Choosing by samples, and pooling tiny tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import FormatError, UsageError
from ckptstore.formats import codecs, dtypes
from ckptstore.formats.codecs import rounding
from tests.formats.codec_data import ALL_DTYPES, image, pair


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_word_sizes(dtype: str) -> None:
    found = dtypes.get(dtype)
    assert codecs.word_size(dtype) == found.itemsize // (2 if found.trailing else 1)


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(FormatError):
        codecs.word_size("F33")


@given(st.integers(0, 1 << 36))
def test_sample_ranges(nbytes: int) -> None:
    ranges = codecs.sample_ranges(nbytes)
    assert sum(stop - start for start, stop in ranges) <= min(nbytes, 6 << 17)
    assert all(start % 16 == 0 and start < stop <= nbytes for start, stop in ranges)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), "no byte twice"
    if nbytes:
        assert ranges[0][0] == 0
        assert nbytes - ranges[-1][1] < 16


def chosen(dtype: str, kind: str, change: str, policy: codecs.Policy = codecs.FAST_POLICY) -> codecs.CodecChoice:
    base, data = pair(dtype, kind, change, 60_000, 7)
    return codecs.choose(
        dtype, [codecs.Sample(data[:80_000], base[:80_000]), codecs.Sample(data[-80_000:], base[-80_000:])], policy
    )


def test_the_data_decides() -> None:
    assert chosen("F32", "numbers", "near").name == "sub"
    assert chosen("F32", "numbers", "other").name == "raw"
    assert chosen("F32", "noise", "few").name in ("sub", "xor")
    assert chosen("U8", "bits", "other").name == "raw"
    assert chosen("I64", "ramp", "same").ratio == float("inf")
    unrelated = image("F32", "numbers", 60_000, 99)
    data = image("F32", "numbers", 60_000, 7)
    choice = codecs.choose("F32", [codecs.Sample(data, unrelated)])
    assert (choice.name, choice.params) == ("planes", {"word": 4, "map": "rotate"})
    assert 1.1 < choice.ratio < 1.3
    assert choice.throughput > 0


def test_integers_get_zigzag_and_floats_rotate() -> None:
    assert codecs.choose("I32", [codecs.Sample(image("I32", "numbers", 30_000, 1))]).params == {
        "word": 4,
        "map": "fold",
    }
    assert codecs.choose("U32", [codecs.Sample(image("U32", "ramp", 30_000, 1))]).name == "planes"


def test_a_copy_of_the_master_is_derived() -> None:
    master = image("F32", "numbers", 50_000, 3).view("<u4")
    copy = np.empty(50_000, "<u2")
    rounding.to_bfloat16(master, copy)
    older = copy + np.uint16(1)
    choice = codecs.choose("BF16", [codecs.Sample(copy, older, master)])
    assert (choice.name, choice.params, choice.ratio) == ("derive", {"to": "BF16"}, float("inf"))
    assert codecs.choose("BF16", [codecs.Sample(copy, older)]).name in ("sub", "xor")


def test_policies() -> None:
    assert chosen("F32", "numbers", "near", codecs.Policy(codecs=("planes",))).name == "planes"
    assert chosen("F32", "numbers", "near", codecs.Policy(codecs=())).name == "raw"
    assert chosen("F32", "numbers", "near", codecs.Policy(gain=0.9)).name == "raw"
    assert chosen("F32", "numbers", "near", codecs.Policy(bandwidth=1e15)).name == "raw", "a link faster than any codec"
    assert chosen("F32", "numbers", "near", codecs.Policy(bandwidth=1e3)).name == "sub"
    paper = codecs.candidates("F32", [codecs.Sample(b"", b"")], codecs.PAPER_POLICY)
    assert {codec.name for codec in paper} == {"planes", "xor", "prefix"}
    small = codecs.candidates("F32", [codecs.Sample(*pair("F32", "numbers", "near", 999, 0))], codecs.SMALL_POLICY)
    assert any(isinstance(codec, codecs.Sub) and codec.context for codec in small)


def test_nothing_to_sample() -> None:
    assert codecs.choose("F32", []).name == "raw"
    assert codecs.choose("F32", [codecs.Sample(b"", b"")]).name == "raw"
    assert codecs.choose("F32", [codecs.Sample(b"", b"")], codecs.SMALL_POLICY).name == "raw"


def test_evaluation_reports_every_candidate() -> None:
    base, data = pair("F32", "numbers", "near", 30_000, 7)
    tried = [codecs.Raw(), codecs.Planes(4), codecs.Sub(4), codecs.Prefix(4, 9, 256)]
    found = codecs.evaluate([codecs.Sample(data, base)], tried)
    assert {choice.codec for choice in found} == set(tried)
    assert [choice.ratio for choice in found] == sorted((choice.ratio for choice in found), reverse=True)
    exact = {choice.codec: len(data) / choice.ratio for choice in found}
    for codec in tried:
        payload = codecs.encode(codec, data, base if codec.base_ratio else None)
        assert round(exact[codec]) == len(payload)


TENSORS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 100_000)), max_size=60)


@given(TENSORS)
def test_pools(sizes: list[tuple[str, int]]) -> None:
    tensors = [(f"t{i}", kind, nbytes) for i, (kind, nbytes) in enumerate(sizes)]
    pools = codecs.plan_pools(tensors)
    members = [(member.name, pool.kind, member.nbytes) for pool in pools for member in pool.members]
    assert len(set(members)) == len(members)
    assert set(members) <= {tensor for tensor in tensors if 0 < tensor[2] < codecs.TINY}
    for pool in pools:
        assert len(pool.members) > 1
        assert pool.nbytes <= codecs.BLOCK
        ends = [0, *(member.offset + member.nbytes for member in pool.members)]
        assert [member.offset for member in pool.members] == ends[:-1], "end to end"
    for kind in "ab":
        left = [t for t in tensors if t[1] == kind and 0 < t[2] < codecs.TINY and t not in members]
        assert len(left) <= 1 + sum(pool.kind == kind for pool in pools)
    assert codecs.plan_pools(tensors) == pools


def test_a_pool_is_at_most_one_block() -> None:
    pools = codecs.plan_pools((f"t{i}", "F32", 60_000) for i in range(40))
    assert [len(pool.members) for pool in pools] == [17, 17, 6]


def test_gather_and_split() -> None:
    images = {f"norm.{i}": image("F32", "numbers", 64 + i, i) for i in range(20)}
    (pool,) = codecs.plan_pools((name, "F32", len(data)) for name, data in images.items())
    data = pool.gather(images)
    payload = codecs.encode(codecs.Planes(4, "rotate"), data)
    restored = pool.split(codecs.decode(codecs.Planes(4, "rotate"), payload, pool.nbytes))
    assert {name: part.tobytes() for name, part in restored.items()} == {k: v.tobytes() for k, v in images.items()}
    with pytest.raises(ValueError, match=r"norm\.3 has 8 bytes"):
        pool.gather(images | {"norm.3": bytes(8)})


def test_a_policy_names_codecs_for_a_class_of_tensors() -> None:
    policy = codecs.Policy(by_class={"first_moment": ("prefix",)})
    moment = policy.for_tensor("optimizer.state.0.exp_avg", "F32", (8, 8))
    assert moment == codecs.Policy(codecs=("prefix",))
    for other in ("optimizer.state.0.exp_avg_sq", "model.0.weight", "scheduler.last"):
        assert policy.for_tensor(other, "F32", (8, 8)) is policy
    assert policy.for_tensor("optimizer.state.0.exp_avg", "I64", (8,)) is policy, "a number of steps is no moment"
    assert hash(policy) == hash(codecs.Policy())
    for wrong, said in (
        ({"moments": ("prefix",)}, "no class is called 'moments'"),
        ({"weight": ("zip",)}, "no codec is called 'zip'"),
        ({"weight": "raw"}, "a tuple of names"),
        (("weight",), "a mapping"),
    ):
        with pytest.raises(UsageError, match=said):
            codecs.Policy(by_class=wrong)  # type: ignore[arg-type]
