"""Stores of the conformance set on which a reader fails that overlooks one sentence of the specification.

Each store shows an error that was put into a second reader and that no other store shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore.formats import codecs, optim
from ckptstore.formats.checksums import chunk_hash, xxh3_128
from ckptstore.formats.codecs import rounding
from ckptstore.formats.history.record_text import seal
from ckptstore.formats.history.records import CheckpointId, slot_key
from ckptstore.formats.segment_files.segment import Chunk, TensorEntry
from ckptstore.formats.segment_files.segment_steps import SegmentPart
from ckptstore.formats.segment_files.step_codec import STEP, follower_params
from ckptstore.formats.states import rank_trees
from ckptstore.log import fold_writer
from tools.golden.by_hand import Array, Entry, Hand, Made, Step, changed_document, entry

__all__ = ["SLIPS"]

_WORDS = np.arange(40, dtype="<u4")
_OTHER = "f" * 32


def _word(more: int = 0, **wrong: Any) -> Entry:
    return entry("words", _WORDS + np.uint32(more), **wrong)


def _coded(more: int = 0, **wrong: Any) -> Entry:
    return entry("words", _WORDS + np.uint32(more), codecs.Planes(4), **wrong)


def _delta(more: int, base: int) -> Entry:
    return entry("words", _WORDS + np.uint32(more), codecs.Sub(4), _WORDS + np.uint32(base))


def _texts(*steps: int) -> dict[int, Step]:
    """Steps without tensors: their content is their number."""
    return {step: Step(tree={"step": step}) for step in steps}


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _spoil(hand: Hand, made: Made) -> None:
    """A wrong bit in the first chunk of a segment."""
    flip(hand.folder / f"seg/{made.term:010d}/{made.entry['id']}.safetensors", made.entry["header"])


# ---------------------------------------------------------------------------------------- hashes and identities


def _hashes(folder: Path) -> None:
    hand = Hand(folder)
    hand.open()
    first = hand.segment({1: Step([_word()])})
    hand.promise(first)
    base = first.identity(1)
    made = hand.segment({2: Step([_word(2)])})
    hand.promise(made, checkpoints=[made.checkpoint(2, state=_OTHER)])
    hand.promise(hand.segment({3: Step([_coded(3, stored_hash="0" * 16)])}))
    hand.promise(hand.segment({4: Step([_coded(4, decoded_hash="0" * 16)])}))
    dashes = hand.segment({5: Step([_coded(5, decoded_hash=None)])})
    state = Step([_coded(5)]).state
    hand.promise(dashes, checkpoints=[dashes.checkpoint(5, state=state)])
    hand.promise(hand.segment({6: Step([_delta(6, 5)], base=CheckpointId(1, 5, state))}))
    hand.promise(hand.segment({7: Step([_delta(7, 0)], base=base._replace(state=_OTHER))}))


def _identities(folder: Path) -> None:
    """The segment's description of itself contradicts the log."""
    hand = Hand(folder)
    hand.open()
    first = hand.segment({1: Step([_word()])})
    hand.promise(first)
    base = first.identity(1)
    made = hand.segment({2: Step([_delta(2, 0)], base=base._replace(state=_OTHER))})
    hand.promise(made, encodings=[made.encoding(2, base=list(base))])
    made = hand.segment({3: Step([_word(3)], base=base)})
    hand.promise(made, encodings=[made.encoding(3, base=None)])
    made = hand.segment({4: Step([_word(4)], term=2)})
    hand.promise(made, encodings=[made.encoding(4, checkpoint=[1, 4])])
    for step, members in ((5, {"run": _OTHER}), (6, {"term": 2}), (7, {"segment": _OTHER})):
        hand.promise(hand.segment({step: Step([_word(step)])}, **members))
    for step, members in ((8, {"incompat": ["later"]}), (9, {"version": 2})):
        change = changed_document(lambda document, members=members: document.update(members))
        hand.promise(hand.segment({step: Step([_word(step)])}, change))
    for step, other in ((10, {"hash": _OTHER}), (11, {"size": 1 << 20}), (12, {"header": 8192})):
        made = hand.segment({step: Step([_word(step)])})
        made.entry |= other
        hand.promise(made)
    hand.promise(hand.segment(_texts(13)), encodings=[first.encoding(1, checkpoint=[1, 13])])


def _several(folder: Path) -> None:
    """Encodings of two segments that do not fit together."""
    hand = Hand(folder)
    hand.open()

    def promise(step: int, one: Step, other: Step) -> None:
        first = hand.segments + 1
        parts = [SegmentPart(f"{first:032x}", number, 2) for number in (0, 1)]
        made = [hand.segment({step: replace(half, part=part)}) for half, part in zip((one, other), parts, strict=True)]
        whole = Step([*one.entries, *other.entries], one.tree)
        promised = replace(made[0].steps[step], entries=whole.entries, tree=whole.full_tree)
        checkpoint = made[0].checkpoint(step, state=promised.state)
        hand.commit(*made, checkpoints=[checkpoint], encodings=[made[0].encoding(step, made[1])])

    words, more = _word(), entry("more", _WORDS)
    both = {"words": {"$t": "words"}, "more": {"$t": "more"}}
    promise(1, Step([words], both), Step([more], treeless=True))
    promise(2, Step([words], both), Step([more], both))  # two trees
    promise(3, Step([words], both, treeless=True), Step([more], treeless=True))  # none
    promise(4, Step([words], both), Step([words], treeless=True))  # a tensor in both, and one in none
    promise(5, Step([words, more], both), Step([words], treeless=True))  # the same tensor in both
    promise(6, Step([words, more], both), Step([entry("unnamed", _WORDS)], treeless=True))
    unnamed = entry("unnamed", _WORDS)
    promise(7, Step([words, more, unnamed], both), Step([unnamed], treeless=True))  # twice, if unnamed


def _uses(folder: Path) -> None:
    hand = Hand(folder)
    hand.open()

    def promise(step: int, change: Callable[[dict[str, Any]], None]) -> None:
        hand.promise(hand.segment({step: Step([_coded(step), entry("raw", _WORDS)])}, changed_document(change)))

    promise(1, lambda _: None)
    promise(2, lambda document: document.update(uses=["planes", "raw", "sub"]))
    promise(3, lambda document: document.update(uses=["planes"]))
    promise(4, lambda document: document.update(uses=["raw", "planes"]))
    promise(5, lambda document: document.update(uses=["planes", "planes", "raw"]))
    promise(6, lambda document: document.update(uses=[]))
    promise(7, lambda document: document.pop("uses"))


def _rank_members(folder: Path) -> None:
    hand = Hand(folder)
    hand.open()
    right = {"rank": [[1, 3]], "ranks": [[1, [1, 0]]]}
    hand.promise(hand.segment({1: Step([_word()])}, extra=right))
    wrong: tuple[dict[str, Any], ...] = (
        {"rank": 0},
        {"rank": [[3, -1]]},
        {"rank": [[1, 0]]},  # no step of the segment
        {"rank": [[5, 0], [5, 1]]},
        {"ranks": [[6, 1]]},
        {"ranks": [[7, [1, None]]]},
        {"ranks": {"8": [1]}},
        {"rank": [[9, True]]},
    )
    for step, extra in enumerate(wrong, 2):
        hand.promise(hand.segment({step: Step([_word(step)])}, extra=extra))


# ---------------------------------------------------------------------------------------- other ways, lossy


def _ways(folder: Path) -> None:
    """Checkpoints and bases with several encodings; the first of them are damaged or lead nowhere."""
    hand = Hand(folder)
    hand.open()

    def promise(step: int, one: Step, other: Step, spoilt: bool = True) -> Made:
        made = hand.segment({step: one})
        again = hand.segment({step: other})
        hand.promise(made)
        hand.commit(again, encodings=[again.encoding(step)])
        if spoilt:
            _spoil(hand, made)
        return made

    base = promise(1, Step([_word(1)]), Step([_coded(1)])).identity(1)
    hand.promise(hand.segment({2: Step([_delta(2, 1)], base=base)}))
    told = {"words": {"$t": "words"}}
    unnamed = entry("unnamed", _WORDS)
    narrow = promise(3, Step([_word(3)], told), Step([_word(3), unnamed], told), spoilt=False).identity(3)
    aside = entry("unnamed", _WORDS + np.uint32(9), codecs.Xor(4), _WORDS)
    hand.promise(hand.segment({4: Step([_delta(4, 3), aside], {"u": {"$t": "unnamed"}, **told}, narrow)}))
    # The base of the first encoding cannot be restored, and the second needs none.
    lost = hand.segment({5: Step([_word(5)])})
    hand.promise(lost)
    _spoil(hand, lost)
    promise(6, Step([_delta(6, 5)], base=lost.identity(5)), Step([_word(6)]), spoilt=False)
    hand.promise(hand.segment({7: Step([_delta(7, 6)], base=CheckpointId(1, 6, Step([_word(6)]).state))}))
    gone = CheckpointId(1, 99, _OTHER)
    hand.promise(hand.segment({8: Step([_word(8)], base=gone)}))  # needs no missing part of its base


def _lossy(folder: Path) -> None:
    """Which encodings count when a checkpoint has several."""
    hand = Hand(folder)
    hand.open()

    def promise(step: int, *ways: Step) -> Made:
        made = [hand.segment({step: one}) for one in ways]
        hand.promise(made[0])
        for again in made[1:]:
            hand.commit(again, encodings=[again.encoding(step)])
        return made[0]

    there = promise(1, Step([_word(1)])).identity(1)
    held, gone = promise(2, Step([_word(2)])), promise(3, Step([_word(3)]))
    promise(4, Step([_word(4)], lossy=True), Step([_coded(4)]))
    promise(5, Step([_word(5)], lossy=True), Step([_coded(5)], lossy=True))
    promise(6, Step([_delta(6, 1)], base=there), Step([_word(6)], lossy=True))
    promise(7, Step([_delta(7, 2)], base=held.identity(2)), Step([_word(7)], lossy=True))
    promise(8, Step([_delta(8, 3)], base=gone.identity(3)), Step([_word(8)], lossy=True))
    promise(9, Step([_delta(9, 3)], base=gone.identity(3), lossy=True), Step([_word(9)]))
    hand.commit(retires=[[1, 2], [1, 3]], drops=[gone.entry["id"]])


# ---------------------------------------------------------------------------------------- arithmetic


def stepped(name: str, rule: optim.Rule, old: list[Array], gradient: Array | None) -> list[Entry]:
    """The entries of a group of one parameter. Without a gradient: predicted, and exact."""
    new = [part.copy() for part in old]
    optim.advance(rule, new, np.zeros_like(old[0]) if gradient is None else gradient)
    encoding: optim.Encoding = "predicted" if gradient is None else "replayed"
    if gradient is None:
        payload = optim.predicted.encode(rule, old, new).tobytes()
    else:
        payload = optim.replayed.encode(rule, old, new, gradient).tobytes()
    names = [f"{name}.{slot}" for slot in rule.slots]
    params = {"encoding": encoding, "rule": rule.params, "members": [names]}
    found = []
    for row, (one, part) in enumerate(zip(names, new, strict=True)):
        stored, image = b"" if row else payload, part.tobytes()
        chunk = Chunk(0, len(stored), len(image), chunk_hash(stored), chunk_hash(image))
        told = follower_params(names[0]) if row else params
        found.append((TensorEntry(one, "F32", part.shape, (chunk,), STEP, told), stored))
    return found


def _rounding(folder: Path) -> None:
    """Sums next to the middle of two fp32 numbers; zeros of two signs; both as replays and as predictions."""
    small = np.float32(2.0**-20)
    one, rate = np.float32(1) + small, np.float32(1) - small  # their product is 1 - 2^-40
    weight = np.array([2**24 + 2, -(2**24) - 2, 2**24 + 2, -(2**24) - 2, 2**24, 2**25 + 4], "<f4")
    gradient = np.array([one, -one, -one, one, one, 2 * one], "<f4")
    groups: dict[str, tuple[optim.Rule, list[Array], Array | None]] = {}
    for variant in ("fma", "plain"):
        rule = optim.SGD().rule(optim.Step(count=1, lr=1.0), variant)
        groups[f"sum.{variant}"] = (_with(rule, rate=rate), [weight], gradient)
    zeros = np.array([-0.0, 0.0, -0.0, 1.0], "<f4")
    for label, given in (("replayed", np.zeros(4, "<f4")), ("predicted", None)):
        for sign, weight2 in (("up", 0.001), ("down", -0.001)):
            rule = _with(optim.Adam(amsgrad=True).rule(optim.Step(count=3, lr=0.5), "fma"), weight2=np.float32(weight2))
            state = [weight[:4].copy(), zeros.copy(), zeros[[1, 0, 0, 1]].copy(), zeros.copy()]
            groups[f"zeros.{label}.{sign}"] = (rule, state, given)
    hand = Hand(folder)
    hand.open()
    old = [
        entry(f"{name}.{slot}", part)
        for name, (rule, state, _) in groups.items()
        for slot, part in zip(rule.slots, state, strict=True)
    ]
    base = hand.segment({1: Step(old)})
    hand.promise(base)
    new = [one for name, (rule, state, given) in groups.items() for one in stepped(name, rule, state, given)]
    hand.promise(hand.segment({2: Step(new, base=base.identity(1))}))


def _with(rule: optim.Rule, **numbers: Any) -> optim.Rule:
    """Other scalars, which no settings of training give."""
    patterns = {name: int(np.float32(number).view(np.uint32)) for name, number in numbers.items()}
    return optim.rule({**rule.params, **patterns})


def _nans(folder: Path) -> None:
    """Rounded copies of NaNs of every kind."""
    patterns = [0x7F800001, 0x7F812345, 0x7FC00000, 0x7FFFFFFF, 0x7FBFFFFF, 0x7F9ABCDE, 0x7F800000, 0x3F808000]
    master = np.array([pattern | sign for pattern in patterns for sign in (0, 1 << 31)], "<u4").view("<f4")
    hand = Hand(folder)
    hand.open()
    entries = [entry("master", master)]
    for to, rounded in (("BF16", rounding.to_bfloat16), ("F16", rounding.to_float16)):
        copy = np.empty(len(master), "<u2")
        rounded(master.view("<u4"), copy)
        entries.append(entry(to, copy, codecs.Derive(to), master, dtype=to, params={"of": "master"}))
    hand.promise(hand.segment({1: Step(entries)}))


# ---------------------------------------------------------------------------------------- trees


def _trees(folder: Path) -> None:
    """Texts, numbers and names whose canonical form or order is easily mistaken."""
    hand = Hand(folder)
    hand.open()
    floats = [1e16, 1e15, 9999999999999998.0, 1e-4, 1e-5, 1.5e-5, -0.0, 0.0, 5e-324, 1.7976931348623157e308]
    floats += [123456789012345680.0, 1e21, 1e22, 1e100, 0.1, 1 / 3, 2.5e-10, -1e16, 100.0, 2.0**53, 2.0**63]
    hand.promise(hand.segment({1: Step(tree={"floats": floats})}))
    numbers = [0, -1, 2**53, -(2**53), 2**53 - 1, True, False, None]
    hand.promise(hand.segment({2: Step(tree={"numbers": numbers, "more": {"$int": str(2**64)}})}))
    texts = ["\x7f", "\x80", "\u2028", '"\\/', "\b\t\n\f\r\0\x1f", "\x0b", "é", "\U0001f600", "\ufffd", "~ "]
    hand.promise(hand.segment({3: Step(tree={"texts": texts})}))
    hand.promise(hand.segment({4: Step(tree={text: number for number, text in enumerate(texts)})}))
    names = ["\U00010000", "\ufffd", "\ue000", "\uffff.x", "\U0010ffff", "a", "B", "ab", "a.b", "\x7f", "é", "", "\0"]
    entries = [entry(name, _WORDS[: 3 + row]) for row, name in enumerate(names)]
    hand.promise(hand.segment({5: Step(entries)}))
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    hand.promise(hand.segment({6: Step(tree=deep)}))
    hand.promise(hand.segment({7: Step([_word()], {"10": {"$t": "words"}, "9": 1, "a": 2, "1": 3})}))


def _keys(folder: Path) -> None:
    """Keys of the states of two ranks that are the same in Python, and others that are not."""
    pairs: tuple[tuple[Any, Any], ...] = (
        ({"$tuple": [1.0, True]}, {"$tuple": [1, {"$np": ["U8", "01"]}]}),
        ({"$complex": [2.0, 0.0]}, 2),
        ({"$np": ["F32", "00004040"]}, 3),
        ({"$int": str(2**64)}, 2.0**64),
        ("4", 4),
        ({"$bytes": "NA=="}, "4"),
        (0, -0.0),
        (None, False),
        ({"$float": "inf"}, {"$np": ["F32", "0000807f"]}),
        (0.1, {"$np": ["F32", "cdcccc3d"]}),  # not the same number
    )
    hand = Hand(folder)
    hand.open()
    for step, (one, other) in enumerate(pairs, 1):
        tree = rank_trees.merge([{"d": {"$dict": [[one, 1], [7, 0]]}}, {"d": {"$dict": [[8, 0], [other, 2]]}}])
        hand.promise(hand.segment({step: Step(tree=tree)}))
    # $size is a value, $tuple a separate kind; neither holds a tensor, so the first leads.
    size, pair = {"$size": [1, 2]}, {"$tuple": [1, 2]}
    trees = (
        {"k": size, "l": [[1], size]},
        {"k": pair, "l": [[2, {"a": 1}], pair]},
        {"k": {"$tuple": [3, [4]]}, "l": []},
    )
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        step = hand.seq
        hand.promise(hand.segment({step: Step(tree=rank_trees.merge([trees[rank] for rank in order]))}))


# ---------------------------------------------------------------------------------------- the log


def _continues(folder: Path) -> None:
    """Slots that do not continue the log, or belong to another place, where no slot was ever deleted."""
    hand = Hand(folder)
    hand.open()
    steps = _texts(*range(1, 20))
    made = hand.segment(steps)
    hand.promise(made, 1)

    def more(step: int, **wrong: Any) -> None:
        hand.slot("commit", {"checkpoints": [made.checkpoint(step)], "encodings": [made.encoding(step)]}, **wrong)

    more(2, previous=_OTHER)
    more(3)  # right behind damage, and right
    more(4, nonce=_OTHER)
    more(5)
    more(6, seq=hand.seq + 1)
    more(7)
    more(8, run=_OTHER)
    more(9)
    hand.slot("later", {}, run=_OTHER)  # of another run: the run decides, not the kind
    more(10)
    more(11, previous=_OTHER)
    more(12, nonce=_OTHER)  # right behind damage the nonce is compared, too
    more(13, previous=_OTHER)  # still behind damage
    hand.slot("open", {"parent": None, "time": 0, "writer": {}}, nonce=_OTHER)  # a term that is not above
    more(14)
    more(15, term=3, nonce=_OTHER)  # a term without an OPEN, not behind damage
    more(16, previous=_OTHER)
    hand.open()
    hand.promise(hand.segment(_texts(20)))


def _manifests(folder: Path) -> None:
    """Manifests in which a repeated member differs from the slot's."""
    hand = Hand(folder)
    hand.open()
    made = hand.segment(_texts(*range(1, 12)))
    hand.promise(made, 1)
    wrong: tuple[dict[str, Any], ...] = (
        {"previous": _OTHER},
        {"nonce": _OTHER},
        {"term": 2},
        {"run": _OTHER},
        {"seq": 77},
        {"ckptstore": "request"},
    )
    for step, members in enumerate(wrong, 2):
        told = {"checkpoints": [made.checkpoint(step)], "encodings": [made.encoding(step)]}
        hand.in_manifest(told, **members)
        hand.commit()  # so that nothing is behind damage
    hand.in_manifest({"checkpoints": [made.checkpoint(8)], "encodings": [made.encoding(8)]})


def _closed(hand: Hand) -> None:
    """Fold everything that is there."""
    store = ckptstore.open(hand.folder)
    fold_writer.fold(store.journal, store.view())


def _end(**other: Any) -> Callable[[Path], None]:
    """Another text where the fold ends."""

    def made(folder: Path) -> None:
        hand = Hand(folder)
        hand.open()
        hand.promise(hand.segment(_texts(1, 2)))
        hand.commit()
        _closed(hand)
        hand.put(slot_key(2), seal(hand.common("commit") | {"seq": 2, "previous": _OTHER} | other))

    return made


def _end_followed(folder: Path) -> None:
    """The record of another history where the fold ends, and one that continues that history."""
    hand = Hand(folder)
    hand.open()
    made = hand.segment(_texts(1, 2, 3, 4))
    hand.promise(made, 1)
    hand.commit(checkpoints=[made.checkpoint(2)], encodings=[made.encoding(2)])
    _closed(hand)
    data = seal(hand.common("commit") | {"seq": 2, "previous": _OTHER, "checkpoints": [], "later": 1})
    hand.put(slot_key(2), data)
    hand.previous = xxh3_128(data)
    hand.commit(checkpoints=[made.checkpoint(3)], encodings=[made.encoding(3)])


def _other_run(folder: Path) -> None:
    """A segment of another run in a term above the newest: the end of the log is there."""
    hand = Hand(folder)
    hand.open()
    hand.promise(hand.segment(_texts(1)))
    hand.term = 2
    hand.segment({2: Step(tree=2)}, run=_OTHER)


def _anchored(hand: Hand, until: int) -> None:
    """Empty COMMITs up to a slot."""
    while hand.seq < until:
        hand.commit()


def _gap(*missing: int) -> Callable[[Path], None]:
    """Anchors are every 4 slots; some of 11 slots are absent."""

    def made(folder: Path) -> None:
        hand = Hand(folder, anchor_every=4)
        hand.open()
        segment = hand.segment(_texts(*range(1, 11)))
        hand.promise(segment, 1)
        for step in range(2, 11):
            hand.commit(checkpoints=[segment.checkpoint(step)], encodings=[segment.encoding(step)])
        for seq in missing:
            (folder / slot_key(seq)).unlink()

    return made


def _stray(at: int, until: int) -> Callable[[Path], None]:
    """Anchors are every 4 slots; slot `at` does not name the one before."""

    def made(folder: Path) -> None:
        hand = Hand(folder, anchor_every=4)
        hand.open()
        hand.promise(hand.segment(_texts(1)))
        _anchored(hand, at)
        hand.slot("commit", {}, previous=_OTHER)
        _anchored(hand, until)

    return made


def _bit(at: int, until: int) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        hand = Hand(folder, anchor_every=4)
        hand.open()
        hand.promise(hand.segment(_texts(1)))
        _anchored(hand, until)
        flip(folder / slot_key(at), 100)

    return made


def _retire_above(folded: bool) -> Callable[[Path], None]:
    """A step above the answer is retired; between is a damaged slot, behind the fold if there is one."""

    def made(folder: Path) -> None:
        hand = Hand(folder)
        hand.open()
        made = hand.segment(_texts(1, 3, 5))
        hand.promise(made, 5, 1)
        hand.commit(retires=[[1, 5]])
        if folded:
            _closed(hand)
        hand.commit()
        flip(folder / slot_key(hand.seq - 1), 100)
        hand.commit(checkpoints=[made.checkpoint(3)], encodings=[made.encoding(3)])

    return made


def _highest(folder: Path) -> None:
    """The highest step is known only from a member, before the damage and in a fold."""
    hand = Hand(folder)
    hand.open()
    made = hand.segment(_texts(1, 3))
    hand.promise(made, 1, highest=8)
    _closed(hand)
    hand.commit()
    flip(folder / slot_key(hand.seq - 1), 100)
    hand.commit(checkpoints=[made.checkpoint(3)], encodings=[made.encoding(3)])


def _before(folder: Path) -> None:
    """Damage before the COMMIT that promised the answer; the retired step is below it, or of another term."""
    hand = Hand(folder)
    hand.open()
    first = hand.segment(_texts(9))
    hand.promise(first)
    hand.open(first.identity(9))
    made = hand.segment(_texts(10, 11, 12))
    hand.promise(made, 10, 11)
    hand.commit()
    flip(folder / slot_key(hand.seq - 1), 100)
    told = {"checkpoints": [made.checkpoint(12)], "encodings": [made.encoding(12)]}
    hand.commit(retires=[[1, 9], [2, 11], [1, 99]], highest=12, **told)


def _search(folder: Path) -> None:
    """Two empty terms: the parent's term is searched below the parent, and has higher steps."""
    hand = Hand(folder)
    hand.open()
    made = hand.segment(_texts(*range(1, 8)))
    hand.promise(made)
    hand.open(made.identity(5))
    hand.open(made.identity(4))
    hand.commit(retires=[[1, 4], [1, 3]])


def _orphan(folder: Path) -> None:
    """The parent is promised with another state."""
    hand = Hand(folder)
    hand.open()
    made = hand.segment(_texts(1))
    hand.promise(made)
    hand.open(made.identity(1)._replace(state=_OTHER))


def _loose(folder: Path) -> None:
    """A fold with encodings whose segments no intact record adds."""
    hand = Hand(folder)
    hand.open()
    lost = [hand.segment({1: Step([_word(1)]), 2: Step([_coded(2)])}) for _ in range(2)]
    hand.commit(*lost)
    flip(folder / slot_key(hand.seq - 1), 100)
    made = hand.segment({step: Step([_word(step)]) for step in (1, 2, 3, 4)})
    hand.promise(
        made,
        encodings=[made.encoding(1), *(one.encoding(step) for one in reversed(lost) for step in (1, 2))],
    )
    hand.commit(encodings=[made.encoding(step) for step in (2, 3, 4)])
    hand.commit(retires=[[1, 3]])
    hand.open(made.identity(2))
    _closed(hand)


# ---------------------------------------------------------------------------------------- tags and metadata


def _tags(folder: Path) -> None:
    """Tags that move, are removed, name a retired checkpoint, and one in a slot with a bad name."""
    hand = Hand(folder)
    hand.open()
    made = hand.segment(_texts(1, 2, 3, 4))
    hand.promise(made, tags={"one": [1, 1], "moved": [1, 1], "removed": [1, 2], "v1.0+x/y_-": [1, 2], "7": [1, 3]})
    hand.commit(tags={"moved": [1, 4], "removed": None, "never": None})
    hand.commit(tags={"gone": [1, 3]})
    hand.commit(retires=[[1, 3]])
    hand.commit(tags={"x" * 128: [1, 1], "one": [1, 2]})


def _tags_damaged(folder: Path) -> None:
    """Slots with bad tags, which makes them damaged; then a checkpoint with a tag, which is not an error."""
    hand = Hand(folder)
    hand.open()
    made = hand.segment(_texts(1, 2, 3))
    hand.promise(made, 1, tags={"one": [1, 1], "nothing": [1, 9]})
    bad: tuple[dict[str, Any], ...] = (
        {"-x": [1, 1]},
        {"": [1, 1]},
        {"x" * 129: [1, 1]},
        {"a b": [1, 1]},
        {"é": [1, 1]},
        {".x": None},
        {"a\n": [1, 1]},
        {"one": [1, 1, 1]},
        {"one": [0, 1]},
        {"one": "1@1"},
    )
    for tags in bad:
        hand.commit(checkpoints=[made.checkpoint(3)], tags=tags)
        hand.commit()
    hand.commit(checkpoints=[made.checkpoint(2)], encodings=[made.encoding(2)], tags={"two": [1, 2]})


def _metadata(folder: Path) -> None:
    """Users' metadata of checkpoints: in a log, and of another type, which makes the slot damaged."""
    hand = Hand(folder)
    hand.open()
    made = hand.segment(_texts(*range(1, 7)))
    told = {
        "loss": 0.5,
        "metrics": {"a": [1, 2.0, None]},
        "nan": {"$float": "nan"},
        "é": {"$other": 1},
        "z": "",
        "big": 1e16,
    }
    checkpoints = [made.checkpoint(1, metadata=told), made.checkpoint(2), made.checkpoint(3, metadata={})]
    hand.promise(made, 1, 2, 3, checkpoints=checkpoints)
    for step, wrong in ((4, [1]), (5, None)):
        hand.commit(checkpoints=[made.checkpoint(step, metadata=wrong)], encodings=[made.encoding(step)])
        hand.commit()
    hand.commit(checkpoints=[made.checkpoint(6, metadata={"last": True})], encodings=[made.encoding(6)])


def _metadata_folded(folder: Path) -> None:
    hand = Hand(folder)
    hand.open()
    made = hand.segment(_texts(1, 2, 3))
    checkpoints = [made.checkpoint(step, metadata={"step": step}) for step in (1, 2, 3)]
    hand.promise(made, checkpoints=checkpoints, tags={"best": [1, 2]})
    hand.commit(retires=[[1, 1]])
    _closed(hand)
    for seq in (0, 1):
        (folder / slot_key(seq)).write_bytes(b"not needed: the fold has it")


SLIPS: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
    "hashes": (
        "4, 5.4: wrong are the state hash of 2, a stored hash of 3, a decoded hash of 4 and the base's state of 7; "
        "5 has dashes for a hash, 6 builds on that and is right",
        _hashes,
    ),
    "identities": (
        "5.1: run, term, segment, size, hash, and of a step term and base are compared with the log: 1 alone is right",
        _identities,
    ),
    "several": (
        "5.1: two trees (2), none (3), a tensor in no segment (4) or in two (5, 7) are refused; 1 and 6 are right",
        _several,
    ),
    "uses": ("5.3: uses has to be exactly what the index needs, or absent: 1 and 7 are right", _uses),
    "rank-members": ("5.1: rank or ranks of another form refuse the segment: 1 alone is right", _rank_members),
    "ways": (
        "7.4: if one way to a checkpoint or base fails the others are tried; 5 is damaged, the base of 8 is not there",
        _ways,
    ),
    "lossy": (
        "7.4: lossy if all encodings say so, without those whose base is neither promised nor held: 5, 8",
        _lossy,
    ),
    "rounding": ("5.5.2: sums next to the middle of two numbers, fused and not; the greater of two zeros", _rounding),
    "nans": ("5.4: every NaN rounds to 7fc0 or 7e00, whatever its sign and payload", _nans),
    "trees": ("1, 4: canonical text of floats, integers and texts; names sorted by code points", _trees),
    "keys": (
        "3.3: keys of two ranks that are the same key in two forms, and others; $size is a value, $tuple is none",
        _keys,
    ),
    "continues": (
        "7, 10: run, seq, previous, term and nonce of a slot are compared: 2, 4, 6, 8, 11, 12, 15 are damaged",
        _continues,
    ),
    "manifest-repeats": (
        "7.3: run, seq, previous, term and nonce of a manifest are compared: 1 and 8 are right",
        _manifests,
    ),
    "end-other-run": ("8: a text of another run where the fold ends: no damage", _end(run=_OTHER)),
    "end-other-seq": ("8: a text of another slot where the fold ends: no damage", _end(seq=1)),
    "end-followed": ("8, 10: another record where the fold ends, which the next slot names: taken", _end_followed),
    "end-other-segment": ("10, READ 4: a segment of another run in a higher term: the end is not lost", _other_run),
    "gap-deleted": ("10, READ 3: slot 6 is absent, and anchor 8 is there: it was deleted, refused", _gap(6)),
    "gap-anchor": ("10, READ 3: anchor 4 is absent: lost", _gap(4)),
    "gap-lost": ("10, READ 3: slots 9 and 8 are absent, and anchor 12 is, too: lost", _gap(8, 9)),
    "stray": ("10, READ 2: slot 6 does not continue, and anchor 8 is there: a stray, refused", _stray(6, 10)),
    "stray-anchor": ("10, READ 2: anchor 4 does not continue: a stray, refused", _stray(4, 6)),
    "no-stray": ("10, READ 2: slot 6 does not continue, and anchor 8 is absent: damaged", _stray(6, 8)),
    "bit-below-anchor": ("10: slot 6 has a wrong bit, and anchor 8 is there: damaged, no stray", _bit(6, 10)),
    "retired-above": (
        "7.4: a record retires a step above the answer, behind damage: latest is an error",
        _retire_above(False),
    ),
    "spent": ("7.4, 8: the same, of which a fold tells in spent", _retire_above(True)),
    "highest": ("7.4: highest is above the answer, behind damage: latest is an error", _highest),
    "before": ("7.4: damage before the COMMIT of the answer does not matter; no higher step is retired", _before),
    "search": ("7.4: the parents are retired: latest is below them in their term", _search),
    "orphan-state": ("7.4: the parent has another state: an orphan, latest is an error", _orphan),
    "loose": ("8: a fold with encodings whose segments no intact record adds", _loose),
    "tags": ("7.2: tags that move, go, and name a checkpoint that is retired", _tags),
    "tags-damaged": ("7.2, 7.4: tags with bad names or nodes make their slots damaged", _tags_damaged),
    "metadata": ("7.2: metadata of checkpoints; of another type in slots 2 and 4, which are damaged", _metadata),
    "metadata-folded": ("8: metadata and tags of which a fold tells", _metadata_folded),
}
