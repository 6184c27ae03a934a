"""Faults between a run and its bucket: none loses an acknowledged checkpoint or makes a wrong byte, and errors name the
cause."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

import ckptstore
from ckptstore.backends.object_store.objects import ObjectBackend
from tools.objects import faults
from tools.objects.faults import LossError, Trial, random_run, small_uploads
from tools.objects.proxy import FAULTS, FaultProxy, Rule
from tools.objects.races import races
from tools.objects.server import SECRET, Server, options_for, serving

WAITS = ("slow", "stall")
"""Faults that cost a timeout for each operation: here only for operations that differ."""

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("ministack")) as server:
        if not server.port:
            pytest.skip("the proxy stands before a server of its own")
        yield server


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port) as one:
        yield one


def reached(proxy: FaultProxy, fault: str) -> set[str]:
    return {operation for name, operation in proxy.injected() if name == fault}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_in_each_operation_costs_nothing_acknowledged(s3: Server, proxy: FaultProxy, fault: str) -> None:
    operations = [one for one in FAULTS[fault] if fault not in WAITS or one in ("create", "complete", "range")]
    seconds = {"stall": 0.6, "slow": 0.5, "late": 0.05}.get(fault, 0.0)
    with small_uploads():
        trial = Trial(s3, proxy, deltas=3)
        for part in (("create", "put", "delete", "head", "list"), ("begin", "part", "complete"), ("get", "range")):
            proxy.rules(
                [
                    Rule(fault, one, seconds=seconds, times=1, skip=one in ("create", "get"))
                    for one in operations
                    if one in part
                ]
            )
            trial.save()
            trial.save()
            trial.load()
            trial.gc()
        trial.settle()
    assert reached(proxy, fault) == set(operations)
    assert len(trial.acknowledged) >= 4
    assert not any(SECRET in text for text in trial.texts)
    for text in trial.texts:
        assert trial.url in text or "seg/" in text, text


def test_a_writer_continues_after_a_passing_fault(s3: Server, proxy: FaultProxy) -> None:
    """A retry causes no error at all: the faults that leave no doubt, or that reading back resolves."""
    trial = Trial(s3, proxy, deltas=None)
    trial.save()
    for fault in ("lost_ack", "duplicate", "reset", "409", "412", "500", "500_after", "503", "flip_up", "flip_down"):
        proxy.rules([Rule(fault, one, times=1) for one in ("create", "get")])
        trial.save()
        trial.load()
    assert trial.texts == []
    trial.settle()
    assert len(trial.acknowledged) == 12


def test_a_slot_that_lands_late_is_found_by_the_one_who_sent_it(s3: Server, proxy: FaultProxy) -> None:
    trial = Trial(s3, proxy, deltas=None)
    trial.save()
    proxy.rules([Rule("late", "create", path="log/", seconds=2.0)])
    trial.save()
    assert trial.acknowledged == {1, 2}
    sent = [one for one in proxy.log() if one["fault"]]
    assert len(sent) > 1, "it was sent again, since it was absent when it was looked for"
    proxy.settle()  # the others hit the first one
    trial.settle()
    assert [one.step for one in trial.clean.checkpoints()] == [1, 2, 3]


def test_a_random_run_of_faults_is_survived(s3: Server) -> None:
    trials = list(random_run(s3, faults=30, seed=3, rounds=6))
    assert sum(len(trial.acknowledged) for trial in trials) > 1
    assert len({fault for trial in trials for fault, _ in trial.proxy.injected()}) > 4


def test_the_run_notices_what_it_is_for(s3: Server, proxy: FaultProxy) -> None:
    trial = Trial(s3, proxy, deltas=None)
    trial.save()
    backend = ObjectBackend(trial.url, s3.options)
    with pytest.raises(LossError, match="step 2"):
        faults.check(trial.clean.load(1, framework="numpy") | {"step": 1}, 2, "read")
    backend.delete("log/00000000000000000001")
    with pytest.raises(LossError, match=r"gone: steps \[1\]"):
        trial.settle()


def test_a_store_that_ignores_the_condition_is_refused(s3: Server, proxy: FaultProxy) -> None:
    proxy.rules([Rule("unconditional", "create")])
    url = s3.url()
    with pytest.raises(ckptstore.UnsupportedBackendError, match=r"ignores If-None-Match.*MinIO"):
        ckptstore.open(url, create=True, storage_options=options_for(proxy.port))
    assert ObjectBackend(url, s3.options).list("") == []


def test_a_place_that_may_only_be_read_is_read_unpinned(s3: Server, proxy: FaultProxy) -> None:
    trial = Trial(s3, proxy, deltas=None)
    trial.save()
    trial.close()
    proxy.rules([Rule("403", one) for one in ("create", "put", "delete")])
    with pytest.warns(ckptstore.UnpinnedWarning):
        faults.check(trial.store().load(1, framework="numpy"), 1, "read")
    with pytest.raises(ckptstore.ReadOnlyError, match=r"403 AccessDenied.*docs/object-stores.md"):
        trial.store().writer()


def test_a_lost_answer_of_an_upload_is_looked_up(s3: Server, proxy: FaultProxy) -> None:
    with small_uploads():
        trial = Trial(s3, proxy, deltas=None)
        proxy.rules([Rule("lost_ack", "complete", times=1)])
        trial.save()
        assert trial.acknowledged == {1}
        assert trial.texts == []
        # obstore requests the end of the upload again, which is gone by then: NoSuchUpload, although the object exists
        assert [one["status"] for one in proxy.log() if one["operation"] == "complete"][:1] == [200]
        trial.settle()


def test_the_rules_and_the_log_have_a_path(s3: Server, proxy: FaultProxy) -> None:
    def ask(method: str, name: str, body: str = "") -> list[dict[str, object]]:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
        connection.request(method, f"/__faults/{name}", body=body)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert isinstance(answer, list)
        return answer

    ask("PUT", "rules", json.dumps([{"fault": "503", "operation": "create", "times": 1}]))
    ObjectBackend(s3.url(), options_for(proxy.port)).create("log/1", b"x")
    assert [(one["operation"], one["fault"], one["status"]) for one in ask("GET", "log")] == [
        ("create", "503", 503),
        ("get", "", 404),
        ("create", "", 200),
    ]
    assert ask("GET", "rules")[0]["done"] == 1


def test_races_have_one_winner(s3: Server) -> None:
    told = races(s3, opening=2, committing=20, racers=4)
    assert told.opened == 2
    assert told.committed == 20
    assert told.several == 0
