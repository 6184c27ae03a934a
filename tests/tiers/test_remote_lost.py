"""A remote that somebody deletes or replaces beside a live drain, and one that refuses or does not answer."""

from __future__ import annotations

import errno
import re
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore import CorruptLogError, RemoteLostError, RemoteWarning, StorageError, UsageError
from ckptstore.backends.base import Backend
from ckptstore.backends.exclusion import exclusive_access
from ckptstore.cli.main import cli
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.records import slot_key
from ckptstore.tiers import background_drain
from ckptstore.tiers.drain import Drain
from ckptstore.tiers.remote_check import check_same
from ckptstore.tiers.remote_silence import RemoteSilence
from ckptstore.tiers.store_pair import StorePair
from tests.tiers.conftest import Outage, Place
from tests.tiers.test_tiers import LONG, check, fill, state, steps
from tools.objects.proxy import Rule
from tools.objects.server import Server

PARTS = ("FORMAT", "log/", "seg/", "")


def removed(backend: Backend, part: str) -> None:
    for key in backend.list(""):
        if key.startswith(part):
            backend.delete(key)


def of_remote(seen: list[warnings.WarningMessage]) -> list[str]:
    """Warnings of the remote. Others may be of files and sockets that earlier tests have left to the collector."""
    return [str(one.message) for one in seen if one.category is RemoteWarning]


def told_while(what: Callable[[], object], match: str) -> int:
    """The number of warnings of the remote until a while after the first one, all of which match."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        what()
        until(lambda: of_remote(seen))
        time.sleep(6 * background_drain.WATCH)  # once while it lasts
        told = of_remote(seen)
    assert all(re.search(match, text) for text in told), told
    return len(told)


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def between_passes(place: Place) -> AbstractContextManager[bool]:
    """While it lasts no pass of the drain is under way: one that began before would not see a change."""
    return exclusive_access(ckptstore.open(place.here, remote=False).backend)


def lost_beside_a_writer(place: Place, part: str) -> list[str]:
    """The warnings while the writer is open, of a remote of which a part is deleted. Steps 1 to 5."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        writer = place.open().writer(poll_seconds=None)
        writer.save(state(1), 1)
        writer.save_async(state(2), 2).result(tier="remote", timeout=LONG)
        with between_passes(place):
            removed(place.theirs().backend, part)
        writer.save(state(3), 3)
        writer.save(state(4), 4)
        until(lambda: of_remote(seen))
        told = of_remote(seen)
        lag = writer.lag()
        assert lag is not None
        assert lag.checkpoints in (1, 2)
        assert "--anew" in (lag.error or "")
        with pytest.raises(RemoteLostError, match="--anew"):
            writer.save_async(state(5), 5).result(tier="remote")  # no timeout: it warns, and does not hang
        writer.close()
    return told


@pytest.mark.parametrize("part", PARTS)
def test_a_remote_deleted_beside_a_drain_is_reported_while_training_runs(place: Place, part: str) -> None:
    told = lost_beside_a_writer(place, part)
    assert len(told) == 1
    assert f"ckpt sync {place.here} {place.remote} --anew" in told[0]
    assert "Saves continue" in told[0]
    for how in (lambda: place.open().sync(), lambda: place.open().writer()):
        with pytest.raises(RemoteLostError, match="--anew"):
            how()
    if part:  # "" is an empty place, which is made again by its name
        with pytest.raises(RemoteLostError, match="--anew"):
            place.open().sync(place.remote)

    assert place.open().sync(anew=True).checkpoints == 5
    theirs = place.theirs()
    assert steps(theirs) == ["1@1", "2@1", "3@1", "4@1", "5@1"]
    assert theirs.verify(deep=True).ok
    fill(place.open(), 6, 7)
    assert steps(place.theirs())[-2:] == ["6@2", "7@2"]
    assert place.theirs().verify(deep=True).ok


def test_a_log_of_which_the_newest_slot_is_another_one_is_not_added_to(place: Place) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = place.open().writer(poll_seconds=None)
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        theirs = place.theirs().backend
        with between_passes(place):
            last = max(key for key in theirs.list("log/"))
            theirs.delete(last)
            theirs.create(last, b"another")
        writer.save(state(2), 2)
        until(lambda: "is not the one that was there" in ((writer.lag() or ckptstore.Lag()).error or ""))
        writer.close()
    assert max(theirs.list("log/")) == last


def test_another_runs_store_in_its_place_gets_nothing(place: Place) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = place.open().writer(poll_seconds=None)
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        theirs = place.theirs().backend
        other = ckptstore.open(place.there.parent / "other")
        fill(other, 1, 1)
        with between_passes(place):
            theirs.replace("FORMAT", other.backend.get("FORMAT"))
            before = theirs.list("")
        writer.save(state(2), 2)
        until(lambda: "another run's store" in ((writer.lag() or ckptstore.Lag()).error or ""))
        writer.close()
    assert theirs.list("") == before
    with pytest.raises(UsageError, match=r"FORMAT is of another run.*nothing was deleted"):
        place.open().sync(anew=True)
    assert theirs.list("") == before


def test_a_folded_remote_is_what_it_was(folders: Place) -> None:
    """Slots that a fold replaces are deleted, also while another drain is ahead."""
    with folders.open().writer(poll_seconds=None) as writer:
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        for step in range(2, 150):
            writer.save(state(step), step)
            if step % 50 == 0:
                folders.open().sync()
        writer.save_async(state(200), 200).result(tier="remote", timeout=LONG)
    assert folders.theirs().verify().ok


def test_anew_of_a_whole_remote_deletes_nothing(place: Place) -> None:
    fill(place.open(), 1, 3)
    place.theirs().tag("kept", 2, take_over=True)
    fill(place.open(), 4, 4)
    before = set(place.theirs().backend.list("log/"))
    assert place.open().sync(anew=True).checkpoints == 0
    assert before <= set(place.theirs().backend.list("log/"))


def test_anew_replaces_a_segment_that_was_cut_off(folders: Place) -> None:
    fill(folders.open(), 1, 3)
    oldest = min(Path(folders.remote, "seg").rglob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    with oldest.open("r+b") as file:
        file.truncate(500)
    assert folders.open().sync(anew=True).checkpoints == 3
    check(folders.theirs().load(1, framework="numpy"), 1)
    assert folders.theirs().verify().ok


def test_anew_leaves_what_somebody_else_left_among_the_objects(folders: Place) -> None:
    fill(folders.open(), 1, 3)
    left = [Path(folders.remote, folder, "Copy of x") for folder in ("log", "pins", "seg/0000000001")]
    for file in left:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"somebody's")
    removed(folders.theirs().backend, "fold/")
    Path(folders.remote, "FORMAT").unlink()
    assert folders.open().sync(anew=True).checkpoints == 3
    assert [file.read_bytes() for file in left] == [b"somebody's"] * 3
    report = folders.theirs().verify()
    assert report.ok
    assert len(report.strangers) == 3


def test_anew_gives_up_nothing_that_is_only_there(folders: Place) -> None:
    store = folders.open()
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 4):
            writer.save(state(step), step)
    store.retire(1, take_over=True)
    store.gc()
    theirs = folders.theirs().backend
    removed(theirs, "log/")
    before = theirs.list("")
    with pytest.raises(UsageError, match=r"1 segment \(.*nothing was deleted.*ckpt repair"):
        folders.open().sync(anew=True)
    assert theirs.list("") == before


def test_anew_gives_up_no_newer_term(place: Place) -> None:
    fill(place.open(), 1, 2)
    fill(place.open(place.there), 3, 4)  # another machine: term 2
    theirs = place.theirs().backend
    theirs.delete("FORMAT")
    before = theirs.list("")
    with pytest.raises(UsageError, match="of term 2, which this store does not have: the run was continued elsewhere"):
        place.open().sync(anew=True)
    removed(theirs, "log/")  # then its segments show it
    with pytest.raises(UsageError, match="of term 2"):
        place.open().sync(anew=True)
    assert theirs.list("") == [key for key in before if not key.startswith("log/")]


def test_anew_gives_up_no_term_of_the_same_number(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    fill(ckptstore.open(folders.here, remote=False), 3, 4)
    fill(folders.open(folders.there), 8, 9)
    theirs = folders.theirs().backend
    theirs.delete("FORMAT")
    before = theirs.list("")
    with pytest.raises(UsageError, match="of term 2, which this store does not have"):
        folders.open().sync(anew=True)
    assert theirs.list("") == before


def test_anew_keeps_the_only_whole_copy_of_a_segment(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    theirs = folders.theirs().backend
    removed(theirs, "log/")
    before = theirs.list("")
    broken = sorted((folders.here / "seg").rglob("*.safetensors"))[0]
    data = bytearray(broken.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(data)
    with pytest.raises(UsageError, match="damaged or missing here, and the remote may have it intact"):
        folders.open().sync(anew=True)
    broken.unlink()
    with pytest.raises(UsageError, match="damaged or missing here"):
        folders.open().sync(anew=True)
    assert theirs.list("") == before


def test_anew_leaves_other_peoples_files_alone(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    (Path(folders.remote) / "FORMAT").unlink()
    (Path(folders.remote) / "thesis.txt").write_text("all of it")
    with pytest.raises(UsageError, match=r"'thesis.txt', which is not part of a store: nothing was deleted"):
        folders.open().sync(anew=True)
    assert (Path(folders.remote) / "thesis.txt").read_text() == "all of it"


def test_anew_of_a_damaged_store_deletes_nothing(folders: Place) -> None:
    fill(folders.open(), 1, 3)
    theirs = folders.theirs().backend
    theirs.delete("FORMAT")
    before = theirs.list("")
    (folders.here / slot_key(1)).write_bytes(b"torn")
    with pytest.raises(CorruptLogError, match="it is unknown what must be copied"):
        folders.open().sync(folders.remote, anew=True)
    assert theirs.list("") == before


def test_an_interrupted_anew_is_continued(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(place.open(), 1, 3)
    theirs = place.theirs().backend
    theirs.delete("FORMAT")
    store = place.open()
    kind, left = type(theirs), iter(range(3))
    before = kind.delete

    def delete(self: Backend, key: str) -> None:
        if next(left, None) is None:
            raise StorageError("the machine burns")
        before(self, key)

    with monkeypatch.context() as broken:
        broken.setattr(kind, "delete", delete)
        with pytest.raises(StorageError, match="burns"):
            store.sync(anew=True)
    with pytest.raises(ckptstore.CkptError):
        place.theirs()
    assert place.open().sync(anew=True).checkpoints == 3
    assert place.theirs().verify(deep=True).ok


def test_the_command_makes_it_anew(folders: Place) -> None:
    fill(folders.open(), 1, 3)
    shutil.rmtree(Path(folders.remote) / "log")
    refused = CliRunner().invoke(cli, ["sync", str(folders.here)])
    assert refused.exit_code == RemoteLostError.exit_code == 8
    assert "--anew" in refused.output
    done = CliRunner().invoke(cli, ["sync", str(folders.here), "--anew"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("drained 3 checkpoints")
    assert folders.theirs().verify(deep=True).ok


def test_a_follower_of_a_remote_that_goes_ends(folders: Place) -> None:
    fill(ckptstore.open(folders.here), 1, 2)
    passes = ckptstore.open(folders.here).sync_forever(folders.remote, every=0.01)
    assert next(passes).checkpoints == 2
    shutil.rmtree(folders.remote)
    with pytest.raises(RemoteLostError, match="--anew"):
        next(passes)


def test_a_remote_that_refuses_is_reported_while_training_runs(outage: Outage) -> None:
    with outage.place.open().writer(poll_seconds=None) as writer:
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        outage.proxy.rules([Rule("403")])
        match = r"403.*are only in .*, and the drain tries again"
        assert told_while(lambda: writer.save(state(2), 2), match) == 1
        outage.end()
        writer.save_async(state(3), 3).result(tier="remote", timeout=LONG)
    assert steps(outage.other.theirs()) == ["1@1", "2@1", "3@1"]


def test_one_slow_answer_is_not_reported_and_a_remote_that_stays_down_is(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_drain, "SOON", LONG)
    monkeypatch.setattr(background_drain, "FIRST_PAUSE", 0.5)  # several looks before the next try
    with outage.place.open().writer(poll_seconds=None) as writer:
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        outage.proxy.rules([Rule("503", times=2)])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            writer.save_async(state(2), 2).result(tier="remote", timeout=LONG)
        assert of_remote(seen) == []
        assert outage.proxy.injected().total() == 2
        monkeypatch.setattr(background_drain, "SOON", 0.3)
        outage.begin()
        assert told_while(lambda: writer.save(state(3), 3), "503|no answer for") == 1
        outage.end()
        writer.save_async(state(4), 4).result(tier="remote", timeout=LONG)


def test_a_remote_that_does_not_answer_is_reported_while_training_runs(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_drain, "SOON", LONG)  # until then no answer of a busy machine is late
    with outage.place.open().writer(poll_seconds=None) as writer:
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        outage.proxy.rules([Rule("slow", seconds=LONG)])  # no pass succeeds meanwhile: a later one would warn again
        monkeypatch.setattr(background_drain, "SOON", 0.5)
        match = r"no answer for \d+ s; new checkpoints are only in .*"
        assert told_while(lambda: writer.save(state(2), 2), match) == 1
        outage.end()
        writer.save_async(state(3), 3).result(tier="remote", timeout=LONG)


def test_where_warnings_are_errors_it_is_logged(folders: Place, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer = folders.open().writer(poll_seconds=None)
        writer.save_async(state(1), 1).result(tier="remote", timeout=LONG)
        shutil.rmtree(folders.remote)
        writer.save(state(2), 2)
        until(lambda: "--anew" in caplog.text)
        with pytest.raises(ckptstore.RemoteWarning, match="Everything that is not there yet"):
            writer.close()  # the caller is still there to read it; everything is written by then
    check(ckptstore.open(folders.here, remote=False).load(2, framework="numpy"), 2)


def test_bytes_on_their_way_and_a_drain_at_rest_are_no_silence(s3: Server, tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    fill(store, 1, 1)
    far = ckptstore.open(s3.url(), storage_options={**s3.options, "bandwidth": 1000})
    drain = Drain(StorePair(store.journal, far.journal, bandwidth=500_000))
    now = [100.0]
    quiet = RemoteSilence(drain, lambda: now[0])

    def later(seconds: float) -> float:
        now[0] += seconds
        return quiet.seconds()

    assert later(50.0) == 0.0
    drain.at_work = True
    quiet.seconds()
    assert later(5.0) == pytest.approx(5.0)
    drain.moved += 20_000  # at 1,000 bytes a second, the lower of the limits
    assert later(1.0) == 0.0
    assert later(19.0) == 0.0
    assert later(7.0) == pytest.approx(6.0)
    assert far.backend.costs is not None
    far.backend.costs.count("head")
    assert later(1.0) == 0.0
    drain.at_work = False
    assert later(90.0) == 0.0


def test_the_newest_slot_is_what_the_view_says(folders: Place) -> None:
    fill(folders.open(), 1, 2)
    theirs = folders.theirs()
    view = theirs.view()
    assert view.catalog.last == xxh3_128(theirs.backend.get(slot_key(view.end - 1)))


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_handle_of_a_folder_that_is_gone_is_a_lost_remote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As on NFS, where another machine has deleted it. Other failures say nothing about the store."""
    remote = ckptstore.open(tmp_path / "run")
    with remote.writer(poll_seconds=None) as writer:
        writer.save({"w": 1}, step=1)
    view = remote.view()

    def fails(*_: object) -> bytes:
        raise StorageError(number, "cannot read", "seg")

    monkeypatch.setattr(type(remote.backend), "get", fails)
    with pytest.raises(StorageError) as failed:
        check_same("here", remote.journal, view)
    assert isinstance(failed.value, RemoteLostError) is (number == errno.ESTALE)
