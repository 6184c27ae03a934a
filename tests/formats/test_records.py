"""Log slots, FORMAT, requests and pins: bytes <-> records, every byte checked, nothing unknown lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import FormatError, IncompatibleFormatError
from ckptstore.formats.history import record_text
from ckptstore.formats.history.records import (
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    FormatFile,
    OpenRecord,
    PinRecord,
    Record,
    Request,
    SegmentEntry,
    fold_key,
    fold_of,
    in_format,
    manifest_key,
    pin_of,
    request_of,
    segment_key,
    slot_key,
    slot_of,
    valid_tag,
)
from tests.formats import log_strategies as some
from tests.formats.log_strategies import RUN, digest


def encode(record: Record, seq: int = 7) -> bytes:
    if isinstance(record, OpenRecord):
        return record_text.encode_open(record, seq=seq, run=RUN)
    slot, manifest = record_text.encode_commit(record, seq=seq, run=RUN, manifest=digest(99))
    assert manifest is None
    return slot


def decode(data: bytes, seq: int = 7) -> Record:
    return record_text.decode_record(data, seq=seq, run=RUN, what="slot")


OPEN = OpenRecord(2, CheckpointId(1, 40, digest(3)), digest(1), 1.5, {"host": "a"})
COMMIT = CommitRecord(
    term=2,
    nonce=digest(2),
    segments=(SegmentEntry(digest(4), 2, 100, 64, digest(5)),),
    checkpoints=(CheckpointEntry(2, 41, digest(6), 2.5, 3, 90),),
    encodings=(Encoding((2, 41), "delta", CheckpointId(1, 40, digest(3)), (digest(4),), False, 100),),
    drops=(digest(7),),
    retires=((1, 30),),
    tags={"best": (2, 41), "old": None},
    requests={digest(8): None, digest(9): "no"},
)
REQUEST = Request(digest(1), 2, "compaction by me", COMMIT.segments, COMMIT.encodings, drops=(digest(7),))
FORMAT = FormatFile(RUN, anchor_every=16)
PIN = PinRecord(digest(1), (digest(2), digest(3)), {"pid": 1})

TEXTS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "open": (encode(OPEN), decode),
    "commit": (encode(COMMIT), decode),
    "format": (record_text.encode_format(FORMAT), record_text.decode_format),
    "request": (
        record_text.encode_request(REQUEST, run=RUN),
        lambda data: record_text.decode_request(data, run=RUN, what="r"),
    ),
    "pin": (record_text.encode_pin(PIN), lambda data: record_text.decode_pin(data, what="p")),
}


class TestRoundTrip:
    @given(some.records)
    def test_record(self, record: Record) -> None:
        assert decode(encode(record)) == record

    @given(some.formats)
    def test_format(self, file: FormatFile) -> None:
        assert record_text.decode_format(record_text.encode_format(file)) == file

    @given(some.requests)
    def test_request(self, request: Request) -> None:
        assert record_text.decode_request(record_text.encode_request(request, run=RUN), run=RUN, what="r") == request

    @given(some.pins)
    def test_pin(self, pin: PinRecord) -> None:
        assert record_text.decode_pin(record_text.encode_pin(pin), what="p") == pin

    def test_the_text_is_for_people(self) -> None:
        text, check, end = encode(COMMIT).decode("ascii").split("\n")
        assert end == ""
        assert len(check) == 32
        assert json.loads(text)["checkpoints"][0]["step"] == 41
        assert "swept" not in text  # empty members are left out

    def test_equal_records_have_equal_bytes(self) -> None:
        assert encode(decode(encode(COMMIT))) == encode(COMMIT)


class TestDamage:
    @pytest.mark.parametrize("name", TEXTS)
    def test_every_flipped_bit_of_every_byte_is_found(self, name: str) -> None:
        data, read = TEXTS[name]
        for position in range(len(data)):
            for bit in range(8):
                flipped = bytearray(data)
                flipped[position] ^= 1 << bit
                with pytest.raises(FormatError):
                    read(bytes(flipped))

    @pytest.mark.parametrize("name", TEXTS)
    def test_every_truncation_is_found(self, name: str) -> None:
        data, read = TEXTS[name]
        for length in range(len(data)):
            with pytest.raises(FormatError):
                read(data[:length])
        with pytest.raises(FormatError):
            read(data + b"\n")

    def test_another_slots_text_is_refused(self) -> None:
        with pytest.raises(FormatError, match="slot 7"):
            decode(encode(COMMIT), seq=8)

    def test_another_runs_text_is_refused(self) -> None:
        with pytest.raises(FormatError, match="run"):
            record_text.decode_record(encode(COMMIT), seq=7, run=digest(1), what="slot")

    def test_a_text_beyond_the_limit_is_refused_before_it_is_parsed(self) -> None:
        with pytest.raises(FormatError, match="at most"):
            decode(b" " * (record_text.SLOT_LIMIT + 1))


def tampered(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The same text with a change and a valid checksum, as a hostile or broken writer could leave it."""
    value = json.loads(data[:-34])
    change(value)
    return record_text.seal(value)


class TestHostile:
    @pytest.mark.parametrize(
        ("member", "value"),
        [
            ("term", 0),
            ("term", -1),
            ("term", True),
            ("term", 2.0),
            ("term", 2**53 + 1),
            ("nonce", "A" * 32),
            ("nonce", "a" * 31),
            ("segments", {}),
            ("segments", [1]),
            ("segments", [{"id": "x"}]),
            ("checkpoints", [{"step": 1}]),
            ("checkpoints", [None]),
            ("encodings", [{"checkpoint": [1], "kind": "full"}]),
            ("encodings", ["x"]),
            ("drops", ["zz"]),
            ("drops", "x"),
            ("retires", [[1]]),
            ("retires", [[0, 1]]),
            ("tags", {"a b": None}),
            ("tags", {"a": [1]}),
            ("tags", []),
            ("requests", {"x": None}),
            ("requests", {"0" * 32: 1}),
            ("manifest", [1]),
            ("manifest", {"id": "0" * 32, "size": 2**50, "hash": "0" * 32}),
            ("incompat", [1]),
        ],
    )
    def test_a_member_of_the_wrong_type_or_range_is_refused(self, member: str, value: object) -> None:
        with pytest.raises(FormatError):
            decode(tampered(encode(COMMIT), lambda found: found.update({member: value})))

    @given(st.sampled_from(sorted(TEXTS)), st.data())
    def test_any_change_anywhere_gives_a_record_or_a_format_error(self, name: str, data: st.DataObject) -> None:
        text, read = TEXTS[name]

        def change(value: Any) -> None:
            while True:
                places = list(value) if isinstance(value, dict) else range(len(value))
                place = data.draw(st.sampled_from(list(places)))
                inner = value[place]
                if isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
                    value = inner
                    continue
                value[place] = data.draw(some.json_values)
                return

        changed = tampered(text, change)
        with contextlib.suppress(FormatError):
            read(changed)

    def test_an_infinite_time_is_refused(self) -> None:
        text = encode(OPEN)[:-34].replace(b'"time":1.5', b'"time":1e999')
        data = text + f"\n{record_text.xxh3_128(text)}\n".encode()
        with pytest.raises(FormatError, match="range"):
            decode(data)

    def test_segments_and_checkpoints_are_of_the_records_own_term(self) -> None:
        record = decode(tampered(encode(COMMIT), lambda found: found.update(term=3)))
        assert isinstance(record, CommitRecord)
        assert {entry.term for entry in record.segments} == {entry.term for entry in record.checkpoints} == {3}


class TestVersions:
    def test_unknown_members_are_kept(self) -> None:
        data = tampered(
            encode(COMMIT), lambda found: (found.update(mood="good"), found["segments"][0].update(colour=[1]))
        )
        record = decode(data)
        assert isinstance(record, CommitRecord)
        assert record.extra == {"mood": "good"}
        assert record.segments[0].extra == {"colour": [1]}
        assert decode(encode(record)) == record

    @pytest.mark.parametrize("name", ["open", "commit", "request"])
    def test_an_unknown_incompat_feature_is_refused(self, name: str) -> None:
        text, read = TEXTS[name]
        with pytest.raises(IncompatibleFormatError, match="warp"):
            read(tampered(text, lambda found: found.update(incompat=["warp"])))

    def test_an_unknown_ro_compat_feature_is_carried(self) -> None:
        record = decode(tampered(encode(COMMIT), lambda found: found.update(ro_compat=["warp"])))
        assert record.ro_compat == ("warp",)
        assert decode(encode(record)) == record

    def test_an_unknown_kind_of_record_is_a_newer_format_not_damage(self) -> None:
        with pytest.raises(IncompatibleFormatError, match="merge"):
            decode(tampered(encode(OPEN), lambda found: found.update(ckptstore="merge")))

    def test_a_newer_major_is_refused(self) -> None:
        with pytest.raises(IncompatibleFormatError, match="version 2"):
            record_text.decode_format(tampered(TEXTS["format"][0], lambda found: found.update(major=2)))

    def test_an_unknown_feature_needed_to_read_is_refused(self) -> None:
        with pytest.raises(IncompatibleFormatError, match="warp"):
            record_text.decode_format(record_text.encode_format(replace(FORMAT, features={"read": ("warp",)})))

    def test_an_unknown_feature_needed_to_write_is_carried(self) -> None:
        file = replace(FORMAT, features={"read": (), "write": ("warp",)})
        assert record_text.decode_format(record_text.encode_format(file)) == file


class TestManifest:
    BIG = replace(COMMIT, drops=tuple(digest(number) for number in range(9000)))

    def store(self) -> tuple[bytes, bytes]:
        slot, manifest = record_text.encode_commit(self.BIG, seq=7, run=RUN, manifest=digest(99))
        assert manifest is not None
        assert len(slot) < 1000
        return slot, manifest

    def test_a_commit_too_long_for_a_slot_goes_into_a_manifest(self) -> None:
        slot, manifest = self.store()
        asked: list[tuple[str, int]] = []

        def fetch(key: str, size: int) -> bytes:
            asked.append((key, size))
            return manifest

        record = record_text.decode_record(slot, seq=7, run=RUN, what="slot", fetch=fetch)
        assert record == replace(self.BIG, manifest=digest(99))
        assert asked == [(manifest_key(2, digest(99)), len(manifest))]

    def test_every_damage_of_a_manifest_is_found(self) -> None:
        slot, manifest = self.store()
        for position in (0, 1, 50, len(manifest) // 2, len(manifest) - 40, len(manifest) - 1):
            flipped = bytearray(manifest)
            flipped[position] ^= 1
            with pytest.raises(FormatError):
                record_text.decode_record(slot, seq=7, run=RUN, what="s", fetch=lambda _k, _s, f=flipped: bytes(f))
        with pytest.raises(FormatError):
            record_text.decode_record(slot, seq=7, run=RUN, what="s", fetch=lambda _k, _s: manifest[:-1])

    def test_a_manifest_of_another_record_is_refused(self) -> None:
        slot, manifest = self.store()
        other = tampered(manifest, lambda found: found.update(nonce=digest(5)))
        renamed = tampered(
            slot, lambda found: found["manifest"].update(size=len(other), hash=record_text.xxh3_128(other))
        )
        with pytest.raises(FormatError, match="another record"):
            record_text.decode_record(renamed, seq=7, run=RUN, what="s", fetch=lambda _k, _s: other)

    def test_another_manifest_of_the_same_record_is_refused(self) -> None:
        slot, manifest = self.store()
        other = tampered(manifest, lambda found: found.update(drops=[]))
        with pytest.raises(FormatError, match="checksum"):
            record_text.decode_record(slot, seq=7, run=RUN, what="s", fetch=lambda _k, _s: other)

    def test_a_manifest_nobody_can_fetch_is_refused(self) -> None:
        with pytest.raises(FormatError, match="manifest"):
            decode(self.store()[0])


class TestLimits:
    def test_an_open_does_not_outgrow_a_slot(self) -> None:
        with pytest.raises(FormatError, match="at most"):
            encode(replace(OPEN, writer={"environment": "x" * record_text.SLOT_LIMIT}))

    def test_a_commit_does_not_outgrow_a_manifest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        long = replace(COMMIT, extra={"note": "x" * record_text.SLOT_LIMIT})
        assert record_text.encode_commit(long, seq=7, run=RUN, manifest=digest(3))[1] is not None
        monkeypatch.setattr(record_text, "MANIFEST_LIMIT", record_text.SLOT_LIMIT + 1)
        with pytest.raises(FormatError, match="at most"):
            record_text.encode_commit(long, seq=7, run=RUN, manifest=digest(3))

    def test_values_without_a_json_form_are_refused(self) -> None:
        with pytest.raises(ValueError, match="JSON"):
            encode(replace(OPEN, time=float("nan")))


class TestKeys:
    @given(st.integers(0, 10**20 - 1))
    def test_slots_sort_by_number(self, seq: int) -> None:
        assert slot_of(slot_key(seq)) == seq
        assert seq == 0 or slot_key(seq - 1) < slot_key(seq)

    def test_folds_and_requests(self) -> None:
        assert fold_of(fold_key(12, "ab" * 16)) == (12, "ab" * 8)
        assert request_of(REQUEST.key) == (2, digest(1))
        assert segment_key(3, digest(1)) == f"seg/0000000003/{digest(1)}.safetensors"

    @pytest.mark.parametrize(
        "key",
        [
            *("log/1", "log/" + "x" * 20, "log/" + "0" * 20 + ".tmp", "0" * 20, "a"),
            *("fold/" + "0" * 20, "0" * 20 + "-" + "a" * 16),
            *("req/" + "0" * 10 + "-a", "0" * 10 + "-" + "a" * 32),
            *("fold/" + "0" * 20 + "-" + "a" * 15 + "~", "req/" + "0" * 10 + "-" + "a" * 31 + "~", "FORMAT~"),
            *("pins/" + "a" * 32 + "~", "pins/" + "A" * 32, "pins/a/" + "a" * 32, "pins/" + "a" * 31, "COPYING/x"),
            *("seg/0000000001/notes.safetensors", "seg/1/" + "a" * 32 + ".json", "probe/x", ""),
        ],
    )
    def test_strangers_are_not_ours(self, key: str) -> None:
        assert not in_format(key)
        assert pin_of(key) is None
        assert slot_of(key) is None
        assert fold_of(key) is None
        assert request_of(key) is None

    def test_tag_names(self) -> None:
        assert not valid_tag(5)  # type: ignore[arg-type]
        assert all(map(valid_tag, ["a", "v1.0", "best/loss", "_x", "a" * 128]))
        assert not any(map(valid_tag, ["", "a b", "-a", "a:b", "a\n", "é", "a" * 129, "@"]))
